"""Rebuilds the leader epochs of a log from its batches, at a start where their file does not reach the first record.

No CRC covers the leader epoch of a batch. One that is too high would make all batches behind it damaged. So a segment
is examined where its epochs fall, or are above that of the next segment.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from tidelog.storage.log.recovery import examine_now, take_over_findings
from tidelog.storage.segments.damage import CorruptIndex
from tidelog.storage.segments.leader_epochs import LeaderEpochs
from tidelog.storage.segments.reader import headers
from tidelog.storage.segments.segment import Segment

logger = logging.getLogger("tidelog.storage")


def rebuild_epochs(epochs: LeaderEpochs, segments: Sequence[Segment], log_start_offset: int) -> None:
    epochs.clear()
    for index, segment in enumerate(segments):
        end_before, before = end_before_of(segments, index), list(epochs)
        epoch_max = next((each.epoch_at(0) for each in segments[index + 1 :] if each.size_bytes), -1)
        try:
            _note_epochs(epochs, segment, end_before)
            if before != list(epochs) and 0 <= epoch_max < epochs.latest:
                raise CorruptIndex(segment.path, f"leader epoch {epochs.latest} before {epoch_max}")
        except CorruptIndex as error:
            logger.warning("examining %s: %s", segment.path, error)
            examine_now(segment, epoch_max)
            take_over_findings(segment)
            _assign_all(epochs, before)
            _note_epochs(epochs, segment, end_before, is_examined=True)
    entries = list(epochs)
    is_hidden = any(each.holds(log_start_offset) for segment in segments for each in segment.damage)
    if entries and entries[0][1] > log_start_offset and not is_hidden:
        # The first records were compacted. The first epoch must begin at the log start, or every start would
        # rebuild the epochs.
        _assign_all(epochs, [(entries[0][0], log_start_offset), *entries[1:]])


def end_before_of(segments: Sequence[Segment], index: int) -> int:
    """Where the batches before a segment end: before the empty segments that hold a gap. An epoch begins there."""
    while index and not segments[index - 1].size_bytes and segments[index - 1].may_end_early:
        index -= 1
    return segments[index].base_offset


def _assign_all(epochs: LeaderEpochs, entries: Sequence[tuple[int, int]]) -> None:
    epochs.clear()
    for epoch, start_offset in entries:
        epochs.assign(epoch, start_offset)


def _note_epochs(epochs: LeaderEpochs, segment: Segment, end_before: int, *, is_examined: bool = False) -> None:
    """Raises CorruptIndex for a base offset that does not follow: epochs that begin before it would be lost. Before the
    segment `is_examined` also for an epoch that falls.
    """
    expected, is_judged = segment.base_offset, not (segment.may_have_gaps or segment.damage)
    for position, header in headers(segment):
        if is_judged and header.base_offset != expected:
            raise CorruptIndex(segment.path, f"base offset {header.base_offset} at {position}, not {expected}")
        epoch = header.partition_leader_epoch
        if epoch < epochs.latest and position and not is_examined:
            raise CorruptIndex(segment.path, f"leader epoch {epoch} at {position} after {epochs.latest}")
        if epoch > epochs.latest:
            start_offset = header.base_offset if segment.damage else end_before if not position else expected
            epochs.assign(epoch, start_offset)
        expected = header.next_offset  # where an epoch begins whose first batches were removed
