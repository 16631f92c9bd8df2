"""Random transactions of real clients against real brokers, each history judged; `run.py` is the same by hand.

In the small dose a few histories on one node. `make transactions` runs many, on one node and on three, with and without
faults, and Java's clients among them where Java is there.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.doses import dose
from tidelog.bench import peers

pytest.importorskip("confluent_kafka", reason="confluent-kafka is not installed (pip install 'tidelog[dev]')")
from tests.transactions.run import Totals, run_histories
from tests.transactions.servers import running_cluster

HISTORIES = dose("TIDELOG_TRANSACTION_HISTORIES")
SEED = int(os.environ.get("TIDELOG_SEED") or time.time())
PYTHON = ["confluent", "tidelog"]


def everyone() -> list[str]:
    return PYTHON if peers.bring_kafka() is not None else [*PYTHON, "java"]


def hunt(directory: Path, brokers: int, histories: int, faults: Sequence[str], clients: Sequence[str]) -> None:
    print(f"seed {SEED}")
    totals = Totals()
    with running_cluster("tidelog", directory, brokers, None, faults) as cluster:
        seeds = range(SEED, SEED + histories)
        run_histories(cluster, totals, seeds=seeds, faults=faults, clients=clients, keep=directory / "broken")
    print(totals)
    assert not totals.broken, totals
    assert totals.counts["operations committed"] > histories, "the clients hardly ran"


@pytest.mark.slow
def test_a_few_histories_break_no_rule(tmp_path: Path):
    hunt(tmp_path, 1, 3, (), PYTHON)


@pytest.mark.hunt
@pytest.mark.parametrize("faults", ["", "kill,pause,restart"])
def test_one_node(tmp_path: Path, faults: str):
    hunt(tmp_path, 1, HISTORIES, tuple(filter(None, faults.split(","))), everyone())


@pytest.mark.hunt
@pytest.mark.parametrize("faults", ["", "kill,pause,cut,restart", "operate", "operate,kill,pause"])
def test_three_nodes(tmp_path: Path, faults: str):
    hunt(tmp_path, 3, HISTORIES, tuple(filter(None, faults.split(","))), everyone())
