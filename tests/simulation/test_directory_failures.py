"""Histories of clusters whose nodes have two log directories each, of which one or the other breaks and is mended.

Nothing acknowledged is lost, partitions of a broken directory are led by others where there are others, and all of it
is in sync again when all is mended. TIDELOG_SEED=7 replays one; TIDELOG_DIRECTORY_SEEDS says how many.
"""

from __future__ import annotations

import os
from random import Random
from typing import Any

import pytest

from tests.simulation.cluster import Layout
from tests.simulation.cluster_faults import DIRECTORY_WEIGHTS
from tests.simulation.cluster_history import ClusterHistory

CHUNK = 2
FAST = 2
SEEDS = int(os.environ.get("TIDELOG_DIRECTORY_SEEDS", "40"))


def history(seed: int, **options: Any) -> ClusterHistory:
    rng = Random(seed * 65537 + 5)
    syncs = rng.random() < 0.7
    config = {
        "log.segment.bytes": str(rng.choice((1 << 30, 1 << 20))),
        "default.replication.factor": "3",
        "min.insync.replicas": "2",
        "offsets.topic.replication.factor": "3",
        **({"log.flush.interval.messages": "1"} if syncs else {}),
    }
    layout = Layout((1, 2, 3), (1, 2, 3, 4), config, log_dirs=("/data", "/more"))
    return ClusterHistory(seed, layout=layout, syncs=syncs, weights=DIRECTORY_WEIGHTS, **options)


def chosen() -> list[object]:
    if "TIDELOG_SEED" in os.environ:
        seed = int(os.environ["TIDELOG_SEED"])
        return [range(seed, seed + 1)]
    chunks = [range(first, min(first + CHUNK, SEEDS)) for first in range(0, SEEDS, CHUNK)]
    return [pytest.param(chunk, marks=() if chunk.start < FAST else pytest.mark.slow) for chunk in chunks]


@pytest.mark.parametrize("seeds", chosen(), ids=lambda seeds: f"{seeds.start}-{seeds.stop - 1}")
def test_nothing_acknowledged_is_lost_with_a_directory(seeds: range) -> None:
    for seed in seeds:
        history(seed).run()
