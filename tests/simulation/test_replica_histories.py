"""Replicas of one partition through elections, deletions and restarts: what was promised is in each that joins the ISR.

TIDELOG_SEED=7 replays one history; TIDELOG_REPLICA_SEEDS=10000 runs that many.
"""

from __future__ import annotations

import logging

import pytest

from tests.doses import seeds
from tests.simulation.replica_history import ReplicaHistory
from tidelog.replication.partition import Partition

PLANTED_SEEDS = 2000


@pytest.fixture(autouse=True)
def quiet():
    """Errors reach the history, and nothing else."""
    logger = logging.getLogger("tidelog")
    level, propagates = logger.level, logger.propagate
    logger.setLevel(logging.ERROR)
    logger.propagate = False
    yield
    logger.setLevel(level)
    logger.propagate = propagates


@pytest.mark.parametrize("chosen", seeds("TIDELOG_REPLICA_SEEDS", chunk=5, fast=5, full=50))
def test_each_member_of_the_isr_has_what_was_promised(chosen: range):
    for seed in chosen:
        ReplicaHistory(seed).run()


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("chosen", seeds("TIDELOG_REPLICA_SEEDS", chunk=5, fast=0, full=10))
def test_two_and_four_replicas_have_it_too(chosen: range, count: int):
    for seed in chosen:
        ReplicaHistory(seed, count=count).run()


def test_a_seed_does_the_same_again():
    first, second = ReplicaHistory(42), ReplicaHistory(42)
    first.run()
    second.run()
    assert first.steps == second.steps
    assert first.cluster.requests == second.cluster.requests


@pytest.mark.slow
def test_a_log_without_an_epoch_that_goes_on_where_it_is_is_caught(monkeypatch: pytest.MonkeyPatch):
    """The broker's own mistake once."""
    monkeypatch.setattr(Partition, "beginning", lambda partition: None)
    others: set[str] = set()
    for seed in range(PLANTED_SEEDS):
        try:
            ReplicaHistory(seed).run()
        except Exception as error:
            if "PromisedRecordsArePresent" in str(error):
                return
            others.add(str(error))
    pytest.fail(f"not caught by PromisedRecordsArePresent, only by {sorted(others)[:5]}")
