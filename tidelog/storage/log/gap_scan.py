"""Finds up to where a compacted log may lack records that a cleaner has removed, here or before this copy was made.

Behind that offset it has every record. A copy of damaged records that has more of them than were here matters only
below: the tombstone that deleted one may be among what is missing, so that the record would never be removed again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final, Protocol

from tidelog.protocol.errors import KafkaError
from tidelog.storage.log.compaction import chunks

if TYPE_CHECKING:
    from tidelog.storage.files.disk import Disk
    from tidelog.storage.segments.damage import DamagedRange
    from tidelog.storage.segments.segment import Segment
    from tidelog.storage.segments.segments import Segments

_PIECE_BYTES: Final = 256 * 1024


class CleanedLog(Protocol):
    """The log interface for the scan: a `PartitionLog`, or the files of a stopped node."""

    cleaned_offset: int
    log_start_offset: int
    segments: Segments

    @property
    def disk(self) -> Disk: ...


class GapScan:
    """A task for any thread, which reads the log from its end to the last gap. `end_offset`: the result of `run`."""

    def __init__(
        self,
        log: CleanedLog,
        damaged: Segment,
        damage: DamagedRange,
        compacted_below: int,
        is_over: Callable[[], bool] = lambda: False,
    ) -> None:
        """What lies before the end of the damage is not looked at, nor behind `compacted_below`, where the topic has
        ceased to be compacted. `is_over`: the result is not needed any more.
        """
        self.end_offset = max(log.cleaned_offset, log.log_start_offset)
        self._compacted_below = compacted_below
        self._disk = log.disk
        self._is_over = is_over
        behind = max(self.end_offset, damage.end_offset)
        segments = [each for each in log.segments if each.next_offset > behind and each.base_offset < compacted_below]
        self._places = [(segment, segment.size_bytes, segment.next_offset) for segment in reversed(segments)]
        self._damaged, self._damage = damaged, damage

    def run(self) -> None:
        """Raises OSError."""
        for place in self._places:
            end_offset = min(self._end_of_gaps(*place), self._compacted_below)
            if end_offset > self.end_offset:
                self.end_offset = end_offset
                return

    def _end_of_gaps(self, segment: Segment, size_bytes: int, next_offset: int) -> int:
        """-1 without a gap. What cannot be read counts as one."""
        end_offset, position, expected = -1, 0, segment.base_offset
        if segment is self._damaged:
            position, expected = self._damage.end_position, self._damage.end_offset
        try:
            for _, batches, _ in chunks(self._disk, segment, size_bytes, next_offset, _PIECE_BYTES, position, expected):
                if self._is_over():
                    return next_offset
                for _, header in batches:
                    if header.base_offset != expected or header.record_count <= header.last_offset_delta:
                        end_offset = header.next_offset
                    expected = header.next_offset
        except KafkaError:
            return next_offset
        return end_offset if expected == next_offset else next_offset
