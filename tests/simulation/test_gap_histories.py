"""A log with gaps of offsets under crashes at any operation: what was acknowledged is read, nothing is damaged.

TIDELOG_SEED=7 replays one history; TIDELOG_GAP_SEEDS=10000 runs that many. The second half plants the mistakes that
were made with gaps, one at a time, and requires that the histories catch each.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.doses import seeds
from tests.simulation.catching import assert_caught
from tests.simulation.gap_history import GapHistory
from tidelog.storage.files import checkpoints
from tidelog.storage.files.checkpoints import EXPLAINED_GAPS_FILE, ExplainedGaps
from tidelog.storage.files.disk import Disk
from tidelog.storage.log import directory, epochs_of_batches, explained_gaps, loader, partition_log, swap
from tidelog.storage.log.explained_gaps import name_early_ends
from tidelog.storage.log.partition_log import PartitionLog
from tidelog.storage.segments import lookup
from tidelog.storage.segments.segment import Segment
from tidelog.storage.segments.segments import Segments

pytestmark = pytest.mark.usefixtures("quiet")

CHUNK = 25
PLANTED_SEEDS = 1500


@pytest.mark.parametrize("chosen", seeds("TIDELOG_GAP_SEEDS", chunk=CHUNK, fast=CHUNK, full=3 * CHUNK))
def test_a_log_with_gaps_is_whole_whatever_a_bad_disk_does(chosen: range):
    for seed in chosen:
        GapHistory(seed).run()


def test_a_seed_does_the_same_again():
    first, second = GapHistory(42), GapHistory(42)
    first.run()
    second.run()
    assert first.steps == second.steps
    assert first.disk.operations == second.disk.operations


Plant = Callable[[pytest.MonkeyPatch], None]


def name_gaps_without_a_sync(patch: pytest.MonkeyPatch) -> None:
    """Before a7c15b4a."""
    write = checkpoints.replace_file

    def careless(disk: Disk, directory: str, name: str, data: bytes, *, sync: bool = True) -> None:
        write(disk, directory, name, data, sync=sync and name != EXPLAINED_GAPS_FILE)

    patch.setattr(explained_gaps, "replace_file", careless)


def name_the_last_gap_only(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(explained_gaps, "_early_ends", lambda log: frozenset())


def name_gaps_after_the_next_segment(patch: pytest.MonkeyPatch) -> None:
    def careless(log: PartitionLog, next_offset: int, leader_epoch: int, now_ms: int) -> Segment:
        gap = log.roll(now_ms)
        active = log.roll(now_ms, next_offset)
        gap.next_offset, gap.may_end_early = next_offset, True
        name_early_ends(log, frozenset())
        return active

    patch.setattr(explained_gaps, "roll_behind_gap", careless)


def name_gaps_that_fit_an_index(patch: pytest.MonkeyPatch) -> None:
    """A start does not believe such a name after a loss of power, and cut the log before the gap."""

    def careless(log: PartitionLog, next_offset: int, leader_epoch: int, now_ms: int) -> Segment:
        gap = log.roll(now_ms)
        name_early_ends(log, {(gap.base_offset, next_offset)})
        active = log.roll(now_ms, next_offset)
        gap.next_offset, gap.may_end_early = next_offset, True
        return active

    patch.setattr(explained_gaps, "roll_behind_gap", careless)


def trim_the_segment_of_a_gap_without_a_sync(patch: pytest.MonkeyPatch) -> None:
    def careless(segment: Segment) -> None:
        if segment.file.size_bytes() > segment.size_bytes:
            segment.file.truncate(segment.size_bytes)
            segment.synced_bytes = -1

    patch.setattr(Segment, "trim", careless)


def believe_no_name(patch: pytest.MonkeyPatch) -> None:
    def careless(disk: Disk, directory: str) -> ExplainedGaps:
        return ExplainedGaps(explained_gaps.read_explained_gaps(disk, directory).end_offset)

    patch.setattr(loader, "read_explained_gaps", careless)


def remove_the_segment_of_a_gap_with_what_is_behind_it(patch: pytest.MonkeyPatch) -> None:
    def careless(segments: Segments, offset: int) -> Any:
        index = segments.floor_index(offset)
        segment = segments[index]
        position, end_offset = lookup.end_before(segment, offset)
        if not position and index:
            segment = segments[index - 1]
            position = segment.size_bytes
        return segment, position, end_offset, ()

    patch.setattr(partition_log, "cut_at", careless)


def explain_gaps_behind_a_lost_end(patch: pytest.MonkeyPatch) -> None:
    """Before a start took the log end for their limit."""
    load = loader.load_log

    def careless(disk: Disk, name: str, *arguments: Any, **settings: Any) -> loader.LoadedLog:
        filed = explained_gaps.read_explained_gaps(disk, name).end_offset
        return load(disk, name, *arguments, **settings)._replace(gaps_explained_below=filed)

    patch.setattr(directory, "load_log", careless)


def explain_gaps_behind_a_cut(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(explained_gaps, "forget_gaps_behind", lambda log, end_offset: None)


def take_gaps_for_damage_where_a_topic_is_not_compacted_any_more(patch: pytest.MonkeyPatch) -> None:
    def careless(log: PartitionLog, end_offset: int, *, sync: bool = True) -> None:
        log.gaps_explained_below = max(log.gaps_explained_below, end_offset)

    patch.setattr(PartitionLog, "explain_gaps", careless)


def believe_no_name_in_a_swap(patch: pytest.MonkeyPatch) -> None:
    """Before 84d43dd5."""
    patch.setattr(swap, "read_explained_gaps", lambda disk, directory: ExplainedGaps())


def begin_epochs_behind_gaps(patch: pytest.MonkeyPatch) -> None:
    for module in (epochs_of_batches, loader):
        patch.setattr(module, "end_before_of", lambda segments, index: segments[index].base_offset)


PLANTS = [
    (believe_no_name_in_a_swap, {"weights": {"copy_prefix": 30}, "cleanup_policy": frozenset({"compact"})}),
    (begin_epochs_behind_gaps, {}),
    (name_gaps_without_a_sync, {}),
    (name_the_last_gap_only, {}),
    (name_gaps_after_the_next_segment, {}),
    (name_gaps_that_fit_an_index, {}),
    (trim_the_segment_of_a_gap_without_a_sync, {"preallocate": True}),
    (believe_no_name, {}),
    (remove_the_segment_of_a_gap_with_what_is_behind_it, {}),
    (explain_gaps_behind_a_lost_end, {"cleanup_policy": frozenset({"delete"})}),
    (explain_gaps_behind_a_cut, {"cleanup_policy": frozenset({"delete"})}),
    (take_gaps_for_damage_where_a_topic_is_not_compacted_any_more, {}),
]


@pytest.mark.hunt
@pytest.mark.parametrize(("plant", "settings"), PLANTS, ids=lambda value: getattr(value, "__name__", ""))
def test_a_planted_bug_is_caught(plant: Plant, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch):
    plant(monkeypatch)
    assert_caught(lambda seed: GapHistory(seed, **settings), "", 0, PLANTED_SEEDS)
