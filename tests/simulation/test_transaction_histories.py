"""Histories of transactions in simulated clusters: nothing that the clients saw breaks a rule of the checker.

The rules are in `tests/transactions/checker.py`. TIDELOG_SEED=7 replays one history; TIDELOG_TRANSACTION_SEEDS=10000
runs that many. Mistakes that are planted in the broker must be found by the same histories.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.doses import seeds
from tests.simulation import planted_transactions as planted
from tests.simulation.planted import Plant
from tests.simulation.transaction_history import TransactionHistory
from tests.transactions.checker import Kind

ROOT = Path(__file__).resolve().parents[2]
SEEDS = 300
KILLS: dict[str, Any] = {"weights": {"kill": 10, "kill_leader": 10, "pause": 4}}


@pytest.mark.parametrize("chosen", seeds("TIDELOG_TRANSACTION_SEEDS", chunk=2, fast=0, full=4))
def test_transactions_survive_what_a_bad_world_does(chosen: range):
    for seed in chosen:
        TransactionHistory(seed).run()


@pytest.mark.slow
def test_a_metadata_log_that_is_fetched_again_is_looked_at_afterwards():
    """A power cut in a write leaves a damaged record, which the node finds when it has fetched what follows."""
    TransactionHistory(20374).run()


@pytest.mark.slow
def test_partitions_whose_leader_went_while_it_was_in_sync_get_one_again():
    """Two partitions had no ISR, no eligible replica and no last known leader, with every broker running."""
    TransactionHistory(60872).run()


@pytest.mark.slow
def test_records_that_an_unclean_leader_takes_over_count_as_whole():
    """It had led an epoch without records, so that its epoch file gave theirs another epoch."""
    TransactionHistory(64907).run()


# What each may be caught by, and the options of its histories. `first_seed`: the search begins shortly before one that
# finds it.
PLANTS: list[tuple[Plant, tuple[str, ...], dict[str, Any]]] = [
    (planted.leave_out_one_marker, ("TransactionsEnd",), {}),
    (planted.abort_in_one_partition, (Kind.LOST_WRITE,), {}),
    (planted.commit_offsets_of_aborted_transactions, (Kind.CHAIN_LOST, Kind.SKIPPED_POLL), {}),
    (planted.ignore_the_last_stable_offset, (Kind.ABORTED_READ, Kind.DIRTY_READ), {}),
    (planted.forget_aborted_ranges, (Kind.ABORTED_READ,), {}),
    (
        planted.fence_nobody,
        (Kind.LOST_WRITE, Kind.ABORTED_READ, Kind.CHAIN_LOST, Kind.CHAIN_TWICE, "TransactionsEnd"),
        {"first_seed": 4},
    ),
    (planted.verify_nothing, ("TransactionsEnd", Kind.LOST_WRITE, Kind.TORN), {}),
    (planted.forget_what_was_prepared, ("TransactionsEnd",), {**KILLS, "first_seed": 12}),
]


@pytest.mark.hunt
@pytest.mark.parametrize(("plant", "names", "options"), PLANTS, ids=lambda value: getattr(value, "__name__", ""))
def test_a_planted_mistake_is_found(
    plant: Plant, names: tuple[str, ...], options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
):
    plant(monkeypatch)
    options = dict(options)
    first = options.pop("first_seed", 0)
    others: set[str] = set()
    for seed in range(first, first + SEEDS):
        try:
            TransactionHistory(seed, **options).run()
        except Exception as error:
            name = str(error).partition(":")[0]
            if name in names:
                return
            others.add(str(error)[:200])
    pytest.fail(f"not found by {names} in {SEEDS} histories, only by {sorted(others)}")


SAME = """
from tests.simulation.transaction_history import TransactionHistory
print(TransactionHistory({seed}).run())
"""


@pytest.mark.slow
def test_a_seed_is_the_same_history_in_another_process():
    """Its transactions have several partitions: the order of their markers is not that of a set."""

    def trace(hash_seed: str) -> str:
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-c", SAME.format(seed=41061)]
        done = subprocess.run(
            command, check=False, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert trace("1") == trace("2")
