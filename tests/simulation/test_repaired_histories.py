"""A replica whose files are damaged is repaired from the others, whatever else happens: kills, cleanings, elections.

TIDELOG_SEED=7 replays one history; TIDELOG_REPAIR_SEEDS=10000 runs that many. The second half plants mistakes, one at a
time, and requires that the histories catch each by its name.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest

from tests.doses import seeds
from tests.simulation.catching import assert_caught
from tests.simulation.repaired_history import RepairedHistory
from tidelog.storage.log import recovery
from tidelog.storage.log.flush import Durability
from tidelog.storage.log.partition_log import PartitionLog
from tidelog.storage.log.prefix_copy import PrefixCopy
from tidelog.storage.log.swap import Swap

CHUNK = 5
PLANTED_SEEDS = 400


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


Plant = Callable[[pytest.MonkeyPatch], None]


def believe_the_indexes_that_damage_made_incomplete(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(recovery, "rebuild_hidden_rows", lambda *arguments, has_damage: False)


def go_on_with_the_producers_from_before_a_repair(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PartitionLog, "_know_producers", lambda log, *, anew=False: True)


def forget_to_file_corrected_epochs(patch: pytest.MonkeyPatch) -> None:
    """The next flush does, if the process lives so long."""
    patch.setattr(Durability, "file_epochs", lambda durability, epochs: None)


def note_no_aborted_transactions_of_a_whole_copy(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PrefixCopy, "_note_aborted", lambda copy, new: iter(()))


def put_a_whole_copy_in_place_without_a_sync(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Swap, "sync", lambda swap: None)


PLANTS: list[tuple[Plant, str]] = [
    (believe_the_indexes_that_damage_made_incomplete, "CommittedRecordsAreRead"),
    (go_on_with_the_producers_from_before_a_repair, "ProducersAreRemembered"),
    (forget_to_file_corrected_epochs, "NothingIsDamaged"),
    (note_no_aborted_transactions_of_a_whole_copy, "CommittedRecordsAreRead"),
    (put_a_whole_copy_in_place_without_a_sync, "NothingIsDamaged"),
]
FIRST_SEEDS: dict[Plant, int] = {
    forget_to_file_corrected_epochs: 372,
    note_no_aborted_transactions_of_a_whole_copy: 33,
    put_a_whole_copy_in_place_without_a_sync: 202,
}


@pytest.mark.slow
@pytest.mark.parametrize(("plant", "invariant"), PLANTS, ids=lambda value: getattr(value, "__name__", ""))
def test_a_planted_mistake_is_caught(plant: Plant, invariant: str, monkeypatch: pytest.MonkeyPatch):
    plant(monkeypatch)
    assert_caught(RepairedHistory, invariant, FIRST_SEEDS.get(plant, 0), PLANTED_SEEDS)
