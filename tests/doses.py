"""How much each hunt does: in the small dose (CI, and who runs a file by itself), in the large one (`make hunt`).

A hunt tries the same thing again and again: histories, kills, faults. `TIDELOG_DOSE=large` chooses the dose for all,
a variable of its own the number for one: TIDELOG_KILLS=100. TIDELOG_SEED=7 replays one history, or one run.
"""

from __future__ import annotations

import os
from typing import NamedTuple

import pytest


class Dose(NamedTuple):
    small: int
    large: int


DOSES = {
    # tests/simulation: histories of clusters, of broken directories, of changing voters, of bad disks, of one log, of a
    # cleaned log, of the replicas of one partition, of one log with gaps of offsets, of the repairs of three replicas
    "TIDELOG_CLUSTER_SEEDS": Dose(45, 1_000),
    "TIDELOG_DIRECTORY_SEEDS": Dose(20, 400),
    "TIDELOG_VOTER_SEEDS": Dose(20, 300),
    "TIDELOG_DAMAGE_SEEDS": Dose(20, 500),
    "TIDELOG_STORAGE_SEEDS": Dose(600, 10_000),
    "TIDELOG_COMPACTION_SEEDS": Dose(300, 5_000),
    "TIDELOG_REPLICA_SEEDS": Dose(200, 10_000),
    "TIDELOG_GAP_SEEDS": Dose(300, 10_000),
    "TIDELOG_REPAIR_SEEDS": Dose(200, 10_000),
    # histories of clusters whose clients use transactions; the same with real processes and clients
    "TIDELOG_TRANSACTION_SEEDS": Dose(12, 10_000),
    "TIDELOG_TRANSACTION_HISTORIES": Dose(3, 1_000),
    # tests/unit/replication/quorum: histories of the quorum's core alone
    "TIDELOG_RAFT_SEEDS": Dose(60, 1_000),
    # tests/cluster, with real processes: hard kills of one node, faults in a cluster of seven, failovers
    "TIDELOG_KILLS": Dose(5, 100),
    "TIDELOG_FAULTS": Dose(6, 200),
    "TIDELOG_FAILOVERS": Dose(2, 50),
    # tests/spark: minutes of a Spark job from topic to topic that is killed again and again
    "TIDELOG_SPARK_CHAOS_MINUTES": Dose(1, 30),
    # tests/unit/testing: starts and stops of embedded brokers and clusters in a row, and spread over xdist's workers
    "TIDELOG_EMBEDDED_STARTS": Dose(6, 200),
    # tests/unit/storage: random work on real threads in one log directory
    "TIDELOG_THREAD_SEEDS": Dose(4, 200),
    # damaged files
    "TIDELOG_DAMAGE": Dose(4, 100),
    # tests/properties, in the profile "deep": examples of each property
    "TIDELOG_EXAMPLES": Dose(50, 5_000),
}


def is_large() -> bool:
    return os.environ.get("TIDELOG_DOSE", "small") == "large"


def dose(variable: str) -> int:
    """How often, or how many."""
    return int(os.environ.get(variable) or DOSES[variable][is_large()])


def seeds(variable: str, *, chunk: int, fast: int, full: int) -> list[object]:
    """Parameters for a test of histories, a range of seeds each.

    The first `fast` seeds are for `make check`, those up to `full` for `make test`, and up to the dose they are a hunt.
    """
    if "TIDELOG_SEED" in os.environ:
        seed = int(os.environ["TIDELOG_SEED"])
        return [pytest.param(range(seed, seed + 1), id=str(seed))]
    assert fast % chunk == full % chunk == 0, "a chunk belongs to one target"
    chosen: list[object] = []
    for first in range(0, max(dose(variable), full), chunk):
        marks = () if first < fast else (pytest.mark.slow,) if first < full else (pytest.mark.hunt,)
        chosen.append(pytest.param(range(first, first + chunk), marks=marks, id=f"{first}-{first + chunk - 1}"))
    return chosen
