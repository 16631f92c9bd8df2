"""Gaps that are no damage: compaction made them, or every other replica has them, too.

The file `explained-gaps` beside the log says so to later starts (docs/formats/checkpoints.md). It explains gaps between
batches below one offset. The gap at the end of a segment is explained for that segment alone, because there a lost
end, or a lost next segment, looks the same. Invariant: where the file may not be on the device, the cleaner's
checkpoint names the log, and a start takes gaps between batches for those of compaction.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Set
from contextlib import suppress
from functools import partial
from itertools import pairwise
from typing import Protocol, TypeVar

from tidelog.protocol.batches.record_batch import read_header
from tidelog.storage.cleaner.filter import filler
from tidelog.storage.files.checkpoints import (
    CLEANED_ENDS_FILE,
    EXPLAINED_GAPS_FILE,
    CorruptCheckpoint,
    ExplainedGaps,
    decode_end_offset,
    decode_explained_gaps,
    encode_end_offset,
    encode_explained_gaps,
    read_if_exists,
    replace_file,
)
from tidelog.storage.files.disk import Buffer, Disk
from tidelog.storage.log.flush import Durability, FlushTask
from tidelog.storage.log.recovery import seal, write_if_there_is_space
from tidelog.storage.producers.producer_state import EndMarker
from tidelog.storage.segments.append import Batch, as_batch
from tidelog.storage.segments.damage import CorruptIndex, DamagedRange
from tidelog.storage.segments.leader_epochs import LeaderEpochs
from tidelog.storage.segments.log_config import INT64_MAX, MAX_RELATIVE_OFFSET, LogConfig
from tidelog.storage.segments.reader import ReadResult, position_of
from tidelog.storage.segments.segment import LOG_SUFFIX, Segment, file_name
from tidelog.storage.segments.segments import Segments

_Content = TypeVar("_Content")

logger = logging.getLogger("tidelog.storage")


class LogWithGaps(Protocol):
    """The part of `partition_log.PartitionLog` that is used here."""

    cleaned_offset: int
    clock_ms: int
    config: LogConfig
    disk: Disk
    directory: str
    durability: Durability
    leader_epochs: LeaderEpochs
    gaps_explained_below: int
    jitter_ms: int
    unsynced_gaps_below: int
    segments: Segments

    def append_admitted(
        self, data: Buffer, admitted: list[Batch], now_ms: int, markers: dict[int, EndMarker] | None
    ) -> None: ...
    def roll(self, now_ms: int, base_offset: int = -1) -> Segment: ...


def explain_gaps(log: LogWithGaps, end_offset: int, *, sync: bool) -> None:
    """Record that the gaps below `end_offset` are no damage, also for later starts. Raises OSError."""
    if end_offset <= log.gaps_explained_below and not (sync and log.unsynced_gaps_below):
        return
    _write(log, max(end_offset, log.gaps_explained_below), sync=sync)


def forget_gaps_behind(log: LogWithGaps, end_offset: int) -> None:
    """The log ends there: other records may come than those between which they are. A start forgets them, too."""
    log.gaps_explained_below = min(log.gaps_explained_below, end_offset)
    log.unsynced_gaps_below = min(log.unsynced_gaps_below, end_offset)


def accept_gap(log: LogWithGaps, segment: Segment, damage: DamagedRange) -> None:
    """The offsets of `damage`, between two batches or at the segment's end, are missing in all replicas."""
    segment.may_have_gaps = True
    if damage.end_offset == segment.next_offset:
        what = f"{log.directory}/{file_name(damage.first_offset, LOG_SUFFIX)}"
        hold = partial(hold_gap, log, segment, damage.first_offset)
        if not write_if_there_is_space(hold, what, or_descriptors=True):
            segment.may_end_early = True
            keep_early_ends(log)
    elif damage.end_offset > log.gaps_explained_below:
        _write_if_possible(log, damage.end_offset)
    segment.set_damage(tuple(each for each in segment.damage if each != damage))


def roll_behind_gap(log: LogWithGaps, next_offset: int, leader_epoch: int, now_ms: int) -> Segment:
    """A new active segment for batches behind a gap that do not fit the index of the one before. Raises OSError.

    An empty segment holds the gap, so that the end of the one before is known: a start misses batches that are cut off.
    The file comes before the new segment: if it named a segment beside an earlier gap, which a truncation has removed,
    a start after a kill would miss that one (`may_end_early`). A gap that fits the index ends in a batch without
    records, of the `leader_epoch` of the next batch: after a loss of power a start would believe no name of it, and
    would cut the log before it.
    """
    gap = log.roll(now_ms)
    if not is_beyond_index(gap.base_offset, next_offset):
        left = filler(next_offset - 1, leader_epoch)
        if leader_epoch > log.leader_epochs.latest:
            log.leader_epochs.assign(leader_epoch, gap.base_offset)
        log.append_admitted(left.data, [as_batch(0, read_header(left.data))], now_ms, None)
        return log.roll(now_ms)
    name_early_ends(log, {(gap.base_offset, next_offset)})
    active = log.roll(now_ms, next_offset)
    gap.next_offset, gap.may_end_early = next_offset, True
    return active


class ReadLog(Protocol):
    """The part of `partition_log.PartitionLog` that `read_for_copy` uses."""

    leader_epochs: LeaderEpochs
    log_end_offset: int

    def read(self, offset: int, max_bytes: int, upper_offset: int, *, min_one_batch: bool = True) -> ReadResult: ...


def read_for_copy(log: ReadLog, offset: int, max_bytes: int, *, min_one_batch: bool = True) -> ReadResult:
    """`log.read` up to the log end, for a copy of the log that ends at `offset`. Raises the same errors.

    Where the log ends behind a gap, as after a truncation or in a log that Kafka has cleaned, the copy gets a batch
    without records at the end of the gap. Otherwise it would end before the gap until the log's next record.
    """
    result = log.read(offset, max_bytes, log.log_end_offset, min_one_batch=min_one_batch)
    if result.regions or result.next_offset <= offset:
        return result
    last_offset = result.next_offset - 1
    left = memoryview(filler(last_offset, log.leader_epochs.epoch_for_offset(last_offset)).data)
    return ReadResult([left], len(left), result.next_offset)


def hold_gap(log: LogWithGaps, segment: Segment, offset: int) -> None:
    """Give the gap between `offset`, where the batches of `segment` end, and the next segment one of its own, as in
    `roll_behind_gap`: so the end of `segment` is known. Waits for the device. Raises OSError.

    After a crash in between the gap is damage again.
    """
    end_offset = segment.next_offset
    leader_epoch, last_epoch = (log.leader_epochs.epoch_for_offset(each) for each in (offset, end_offset - 1))
    is_of_one_epoch = 0 <= leader_epoch == last_epoch <= log.segments.epoch_behind(segment)  # otherwise it is damage
    is_named = is_beyond_index(offset, end_offset) or not is_of_one_epoch
    held = b"" if is_named else bytes(filler(end_offset - 1, leader_epoch, offset).data)
    if offset == segment.base_offset:  # its file is empty, or was lost
        segment.may_end_early = is_named
        if held:
            log.disk.write_file(f"{segment.path}.gap.tmp", held, sync=True)
            segment.replace_file(f"{segment.path}.gap.tmp")
        else:
            keep_early_ends(log)
        _index(segment, held)
        return
    gap = Segment(
        log.disk, log.directory, offset, log.config, log.clock_ms, size_bytes=len(held), jitter_ms=log.jitter_ms
    )
    gap.next_offset = end_offset
    gap.may_have_gaps, gap.may_end_early = True, is_named
    if is_named:
        name_early_ends(log, {(offset, end_offset)})
    try:
        replace_file(log.disk, log.directory, file_name(offset, LOG_SUFFIX), held)
    except OSError:  # it may be there, without a sync of the directory
        log.disk.remove(gap.path)
        raise
    segment.next_offset, segment.may_end_early = offset, False
    log.segments.insert(gap)
    _index(gap, held)


def _index(gap: Segment, held: bytes) -> None:
    gap.begin_rebuild()
    if held:
        gap.note_scanned(0, len(held), gap.next_offset - 1, -1)
    seal(gap, is_synced=True)


def keep_empty(segment: Segment) -> None:
    """A start takes an empty segment without index files for one whose file is lost. Raises OSError."""
    segment.begin_rebuild()
    seal(segment, is_synced=True)


def keep_early_ends(log: LogWithGaps) -> None:
    """Record which segments may end before the next one begins, also for later starts. Raises OSError."""
    _write_if_possible(log, log.gaps_explained_below)


def keep_early_end(log: LogWithGaps, repaired: Segment) -> None:
    """`keep_early_ends` where a start needs it. A segment beside a far gap may now be part of the one before it."""
    needs_name = not log.config.is_compacted or is_beyond_index(repaired.base_offset, repaired.next_offset)
    if repaired.may_end_early and needs_name:
        keep_early_ends(log)


def name_early_ends(log: LogWithGaps, early_ends: Set[tuple[int, int]]) -> None:
    """Before a segment is there that may end before the next one begins. Waits for the device. Raises OSError."""
    _write(log, log.gaps_explained_below, sync=True, early_ends=early_ends)


def write_again(log: LogWithGaps, *, sync: bool) -> None:
    """Write the file from memory if it is unreadable, missing or older. Raises OSError if the device has failed.

    Where no other replica has the log, nothing else explains the gaps to the next start. What a compacted log has at
    the ends of its segments is the cleaner's matter.
    """
    if log.gaps_explained_below or (_early_ends(log) and not log.config.is_compacted):
        filed = _read(log.disk, f"{log.directory}/{EXPLAINED_GAPS_FILE}", decode_explained_gaps)
        if filed is None or filed.end_offset < log.gaps_explained_below:
            logger.warning("%s: writing %s again", log.directory, EXPLAINED_GAPS_FILE)
            _write_if_possible(log, log.gaps_explained_below, sync=sync)


def _write_if_possible(log: LogWithGaps, end_offset: int, *, sync: bool = True) -> None:
    """Without space, or descriptors, the next start takes the gap for damage, and asks the other replicas again.

    Raises OSError if the device has failed.
    """
    what = f"{log.directory}/{EXPLAINED_GAPS_FILE}"
    write_if_there_is_space(lambda: _write(log, end_offset, sync=sync), what, or_descriptors=True)


def keep_early_ends_of_unknown(log: LogWithGaps) -> None:
    """`keep_early_ends` where any segment may end early, as the cleaner's checkpoint is lost. Waits for the device."""
    for segment in list(log.segments)[:-1]:
        with suppress(CorruptIndex):
            if segment.may_end_early:
                last = position_of(segment, segment.next_offset - 1, wait=True)
                segment.may_end_early = last >= segment.size_bytes
        segment.forget_indexes()
    if any(segment.may_end_early for segment in log.segments):
        keep_early_ends(log)


def _write(log: LogWithGaps, end_offset: int, *, sync: bool, early_ends: Set[tuple[int, int]] = frozenset()) -> None:
    """`early_ends`: some that are not among the segments yet. What a start believes after a loss of power is synced."""
    early_ends = _early_ends(log) | early_ends
    sync = sync or any(is_beyond_index(*each) for each in early_ends)
    log.unsynced_gaps_below = max(log.unsynced_gaps_below, end_offset)  # also where there is no space for the file
    content = encode_explained_gaps(ExplainedGaps(end_offset, early_ends))
    replace_file(log.disk, log.directory, EXPLAINED_GAPS_FILE, content, sync=sync)
    log.gaps_explained_below = end_offset
    if sync:
        _note_synced(log)
    else:
        log.durability.note_path(f"{log.directory}/{EXPLAINED_GAPS_FILE}")
        log.durability.note_directory(log.directory)
    for segment in log.segments:
        segment.may_have_gaps = segment.may_have_gaps or segment.base_offset < end_offset


def _early_ends(log: LogWithGaps) -> frozenset[tuple[int, int]]:
    segments = list(log.segments)
    return frozenset((each.base_offset, after.base_offset) for each, after in pairwise(segments) if each.may_end_early)


def note_flush(log: LogWithGaps, task: FlushTask) -> None:
    """The flush has succeeded. While the cleaner's checkpoint names the log, a lost segment is taken for cleaned."""
    path = f"{log.directory}/{EXPLAINED_GAPS_FILE}"
    if log.unsynced_gaps_below and path in task.paths and not log.durability.is_noted(path):
        _note_synced(log)


def _note_synced(log: LogWithGaps) -> None:
    if log.unsynced_gaps_below <= log.gaps_explained_below:
        log.unsynced_gaps_below = 0


def read_explained_gaps(disk: Disk, directory: str) -> ExplainedGaps:
    """None are explained without the file, or where it is unreadable. Raises OSError."""
    return _read(disk, f"{directory}/{EXPLAINED_GAPS_FILE}", decode_explained_gaps) or ExplainedGaps()


def ends_kept_below(disk: Disk, directory: str, cleaned_offset: int) -> int:
    """The offset below which each segment of a cleaned log ends where the next one begins (`cleaned-ends`), or 0.

    `cleaned_offset`: that of the cleaner's checkpoint, INT64_MAX where the checkpoint is lost. One above that of the
    file shows that Kafka's cleaner has cleaned since, which may leave segments that end earlier. A lower one is from
    before a kill, or from a truncation. One of 0 or less says nothing: the topic has ceased to be compacted since, and
    `explained-gaps` names the segments that end earlier. A damaged file hides no damage beside it: it counts as one
    that names the checkpoint's offset. Raises OSError.
    """
    path = f"{directory}/{CLEANED_ENDS_FILE}"
    end_offset = _read(disk, path, decode_end_offset)
    if end_offset is None:
        end_offset = cleaned_offset if disk.exists(path) else 0
    return end_offset if 0 < cleaned_offset <= end_offset or cleaned_offset == INT64_MAX else 0


def keep_ends_below(log: LogWithGaps, end_offset: int) -> None:
    """Record that each segment ends where the next one begins, as a cleaning up to this offset does. Raises OSError."""
    log.durability.files.replace(CLEANED_ENDS_FILE, lambda: encode_end_offset(end_offset), sync=True)


def lower_cleaned_offset(log: LogWithGaps, end_offset: int) -> None:
    """The log is to end at `end_offset`. `cleaned-ends` from before a cleaning by Kafka goes. Raises OSError."""
    if end_offset < log.cleaned_offset:
        if not ends_kept_below(log.disk, log.directory, log.cleaned_offset):
            log.durability.files.remove(CLEANED_ENDS_FILE)
        log.cleaned_offset = end_offset


def is_beyond_index(base_offset: int, next_offset: int) -> bool:
    """Whether the last offset before the next segment is too far above the base offset for a batch of this segment."""
    return next_offset - 1 - base_offset > MAX_RELATIVE_OFFSET and next_offset < INT64_MAX


def _has_far_gap(base_offset: int, next_offset: int, early_ends: Set[tuple[int, int]]) -> bool:
    """Whether a gap that is too large for an index has another segment beside it, which is missing.

    No cleaner merges the segments beside such a gap with ones across it, or before it. A repair does, and names it.
    """
    return any(base_offset <= base and end <= next_offset and is_beyond_index(base, end) for base, end in early_ends)


def may_end_early(
    segment: Segment,
    next_offset: int,
    *,
    cleaned_offset: int,
    kept_below: int,
    early_ends: Set[tuple[int, int]],
    synced_below: int = INT64_MAX,
) -> bool:
    """Whether the last batches of a segment may be missing before the next one, which begins at `next_offset`.

    `kept_below`: as `ends_kept_below` says. `early_ends`: those of `explained-gaps`. `synced_below`: a loss of power
    may have taken what was appended above it, but not what was cleaned, nor what is before a gap that is too large for
    an index. No batch of a compacted log can be at the end of a segment before such a gap. Without a name, one with
    batches may lack the next segment instead: the two may have more offsets than an index. Kafka's cleaner writes its
    checkpoint last, or not at all if it is stopped. Raises OSError.
    """
    base_offset, is_named = segment.base_offset, (segment.base_offset, next_offset) in early_ends
    if (
        not is_named
        and is_beyond_index(base_offset, next_offset)
        and _has_far_gap(base_offset, next_offset, early_ends)
    ):
        return False
    if cleaned_offset >= 0 and segment.is_backdated:
        return True
    is_cleaned = next_offset <= (kept_below or cleaned_offset)
    if not is_cleaned and next_offset > synced_below:
        return is_named and is_beyond_index(base_offset, next_offset)
    if cleaned_offset >= 0 and is_beyond_index(base_offset, next_offset):
        return is_named or not (kept_below and segment.size_bytes)
    if is_cleaned:
        return not kept_below
    return is_named or (not kept_below and base_offset < cleaned_offset)


def _read(disk: Disk, path: str, decode: Callable[[bytes], _Content]) -> _Content | None:
    data = read_if_exists(disk, path)
    if not data:
        return None
    try:
        return decode(data)
    except CorruptCheckpoint as error:
        logger.warning("cannot read %s: %s", path, error)
        return None
