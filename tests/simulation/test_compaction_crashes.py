"""A compacted log under crashes at any step of its cleaning: the newest of every key is there, and nothing else is.

TIDELOG_SEED=7 replays one history; TIDELOG_COMPACTION_SEEDS=10000 runs that many. The second half plants the
mistakes a cleaner can make, one at a time, and requires that the simulation catches each by its name.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.doses import seeds
from tests.simulation.catching import assert_caught
from tests.simulation.compaction_history import CompactionHistory
from tests.simulation.simulated_disk import SimulatedDisk, SimulatedFile
from tidelog.protocol.batches.control_batches import ControlRecordType
from tidelog.protocol.batches.record_batch import NO_TIMESTAMP, BatchHeader
from tidelog.storage.cleaner.filter import BatchFilter, CleanedBatch
from tidelog.storage.cleaner.keys import KeptRecords, PlainKeyTable
from tidelog.storage.cleaner.transactions import CleanedTransactions
from tidelog.storage.log import compaction, tidying
from tidelog.storage.log import swap as cleaner_swap
from tidelog.storage.log.compaction import Compaction
from tidelog.storage.log.partition_log import PartitionLog
from tidelog.storage.log.swap import Swap
from tidelog.storage.segments.segment import CLEANED_SUFFIX, SWAP_SUFFIX

pytestmark = pytest.mark.usefixtures("quiet")

CHUNK = 50
PLANTED_SEEDS = 2000


@pytest.mark.parametrize("chosen", seeds("TIDELOG_COMPACTION_SEEDS", chunk=CHUNK, fast=CHUNK, full=3 * CHUNK))
def test_a_compacted_log_is_a_dict_whatever_a_bad_disk_does(chosen: range):
    cleanings = swaps_cut_short = 0
    for seed in chosen:
        history = CompactionHistory(seed)
        history.run()
        cleanings += history.cleanings
        swaps_cut_short += history.swaps_cut_short
    if len(chosen) == CHUNK:
        assert cleanings > CHUNK
        assert swaps_cut_short > 0


@pytest.mark.slow
@pytest.mark.parametrize("chosen", seeds("TIDELOG_COMPACTION_SEEDS", chunk=CHUNK, fast=CHUNK, full=2 * CHUNK))
def test_files_of_earlier_cleanings_take_nothing_from_it(chosen: range):
    for seed in chosen:
        CompactionHistory(seed, {"leave_stray": 15, "clean": 10, "truncate": 0}, segment_bytes=500).run()


def test_a_seed_does_the_same_again():
    first, second = CompactionHistory(42), CompactionHistory(42)
    first.run()
    second.run()
    assert first.steps == second.steps
    assert first.disk.operations == second.disk.operations


Plant = Callable[[pytest.MonkeyPatch], None]


def swap_without_syncing_the_directory(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Swap, "sync", lambda swap: None)


def swap_in_what_is_not_on_the_device(patch: pytest.MonkeyPatch) -> None:
    sync = SimulatedFile.sync

    def careless(file: SimulatedFile) -> None:
        if not file._path.endswith(CLEANED_SUFFIX):
            sync(file)

    patch.setattr(SimulatedFile, "sync", careless)


def forget_to_finish_a_swap(patch: pytest.MonkeyPatch) -> None:
    def careless(disk: SimulatedDisk, directory: str, names: set[str]) -> None:
        left = [name for name in sorted(names) if name.endswith((CLEANED_SUFFIX, SWAP_SUFFIX))]
        cleaner_swap._remove(disk, directory, names, left)

    patch.setattr(tidying, "finish_swaps", careless)


def leave_the_old_segments(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Swap, "_mark_deleted", lambda swap, old: None)


def drop_for_the_sake_of_what_is_not_on_the_device(patch: pytest.MonkeyPatch) -> None:
    begin = Compaction.__init__

    def careless(self: Compaction, *arguments: object, **settings: object) -> None:
        begin(self, *arguments, **settings)  # type: ignore[arg-type]
        self._to_sync = []

    patch.setattr(Compaction, "__init__", careless)


def note_the_keys_of_aborted_records(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(CleanedTransactions, "on_data", lambda self, header: False)


def drop_markers_before_their_data(patch: pytest.MonkeyPatch) -> None:
    def careless(self: BatchFilter, buffer: object, position: int, header: BatchHeader) -> object:
        kind = ControlRecordType.COMMIT
        self._transactions.on_control(header, kind)
        return self._without_records(header)

    patch.setattr(BatchFilter, "_clean_control", careless)


def clean_past_open_transactions(patch: pytest.MonkeyPatch) -> None:
    stable = PartitionLog.last_stable_offset
    find = compaction.find_cleanable

    def careless(log: PartitionLog, now_ms: int) -> object:
        patch.setattr(PartitionLog, "last_stable_offset", property(lambda log: log.log_end_offset))
        try:
            return find(log, now_ms)
        finally:
            patch.setattr(PartitionLog, "last_stable_offset", stable)

    patch.setattr("tests.simulation.compaction_history.find_cleanable", careless)


def drop_tombstones_at_once(patch: pytest.MonkeyPatch) -> None:
    keep = PlainKeyTable.keep

    def careless(table: PlainKeyTable, section: bytes, header: BatchHeader, drop_tombstones: bool) -> KeptRecords:
        return keep(table, section, header, True)

    patch.setattr(PlainKeyTable, "keep", careless)


def forget_producers(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(BatchFilter, "_is_last_of_producer", lambda self, header: False)


def end_segments_early(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(compaction, "filler", lambda offset, leader_epoch: CleanedBatch(b"", offset, NO_TIMESTAMP))


def say_more_was_cleaned_than_was(patch: pytest.MonkeyPatch) -> None:
    finish = Compaction._finish

    def careless(self: Compaction) -> None:
        finish(self)
        self.log.cleaned_offset = self.chosen.end_offset

    patch.setattr(Compaction, "_finish", careless)


def clean_on_after_the_log_was_cut(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Compaction, "give_up", lambda self: None)


def move_the_records_of_a_rewritten_batch(patch: pytest.MonkeyPatch) -> None:
    rewrite = BatchFilter._rewritten

    def careless(
        self: BatchFilter, section: bytes, header: BatchHeader, kept: KeptRecords, with_horizon: bool
    ) -> object:
        if with_horizon:
            return rewrite(self, section, header, kept, False)
        return rewrite(self, section, replace_base(header), kept, False)

    def replace_base(header: BatchHeader) -> BatchHeader:
        return header._replace(base_timestamp=header.base_timestamp + 1)

    patch.setattr(BatchFilter, "_rewritten", careless)


PLANTS = [
    pytest.param(swap_without_syncing_the_directory, "", marks=pytest.mark.slow),
    (swap_in_what_is_not_on_the_device, ""),
    pytest.param(forget_to_finish_a_swap, "", marks=pytest.mark.slow),
    (leave_the_old_segments, ""),
    pytest.param(drop_for_the_sake_of_what_is_not_on_the_device, "EveryKeyKeepsItsNewest", marks=pytest.mark.slow),
    (note_the_keys_of_aborted_records, "EveryKeyKeepsItsNewest"),
    (drop_markers_before_their_data, ""),
    (clean_past_open_transactions, "EveryKeyKeepsItsNewest"),
    (drop_tombstones_at_once, "EveryKeyKeepsItsNewest"),
    (forget_producers, "ProducersAreRemembered"),
    (end_segments_early, "SegmentsAreWhole"),
    (say_more_was_cleaned_than_was, "TheCleanPartIsClean"),
    (clean_on_after_the_log_was_cut, ""),
    (move_the_records_of_a_rewritten_batch, "NothingIsInvented"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("plant", "invariant"), PLANTS, ids=lambda value: getattr(value, "__name__", ""))
def test_a_planted_bug_is_caught(plant: Plant, invariant: str, monkeypatch: pytest.MonkeyPatch):
    plant(monkeypatch)
    first_seed = 112 if plant is swap_without_syncing_the_directory else 0
    assert_caught(CompactionHistory, invariant, first_seed, PLANTED_SEEDS)
