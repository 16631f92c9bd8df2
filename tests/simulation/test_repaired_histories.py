"""A replica whose files are damaged is repaired from the others, whatever else happens: kills, cleanings, elections.

TIDELOG_SEED=7 replays one history; TIDELOG_REPAIR_SEEDS=10000 runs that many.
"""

from __future__ import annotations

import logging

import pytest

from tests.doses import seeds
from tests.simulation.repaired_history import RepairedHistory

CHUNK = 5


@pytest.fixture(autouse=True)
def quiet():
    """Warnings reach the history, and nothing else."""
    logger = logging.getLogger("tidelog")
    level, propagates = logger.level, logger.propagate
    logger.setLevel(logging.WARNING)
    logger.propagate = False
    yield
    logger.setLevel(level)
    logger.propagate = propagates


@pytest.mark.parametrize("chosen", seeds("TIDELOG_REPAIR_SEEDS", chunk=CHUNK, fast=CHUNK, full=4 * CHUNK))
def test_a_damaged_replica_is_whole_again(chosen: range):
    for seed in chosen:
        RepairedHistory(seed).run()


def test_a_seed_does_the_same_again():
    first, second = RepairedHistory(42), RepairedHistory(42)
    first.run()
    second.run()
    assert first.steps == second.steps
    assert first.replicas[0].disk.operations == second.replicas[0].disk.operations
