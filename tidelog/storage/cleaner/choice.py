"""Chooses the part of a compacted log to clean, its urgency, and the segments to merge.

Pure: facts about segments, offsets and settings in, decisions out. The rules are those of Kafka's LogCleanerManager
(dirty part, min and max compaction lag) and of the grouping in its Cleaner. Invariant: only whole segments below the
last stable offset are cleaned, and never the active one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from tidelog.storage.segments.log_config import INT64_MAX, MAX_POSITION, MAX_RELATIVE_OFFSET, LogConfig


class CleanerSegment(NamedTuple):
    """The facts of a segment. The timestamps are only used with a compaction lag: the largest of its records, and that
    of its first batch (0 or less if it has none). `index_bytes`: the size of its offset index, only used for groups."""

    base_offset: int
    size_bytes: int
    largest_timestamp: int = -1
    first_timestamp: int = -1
    index_bytes: int = 0


class CleanableRange(NamedTuple):
    """Records from `first_dirty_offset` on have not been cleaned yet; segments from `end_offset` on are left alone.

    `delay_ms`: the time by which the cleaning is late, by max.compaction.lag.ms.
    """

    first_dirty_offset: int
    end_offset: int
    clean_bytes: int
    cleanable_bytes: int
    delay_ms: int

    @property
    def dirty_ratio(self) -> float:
        total = self.clean_bytes + self.cleanable_bytes
        return self.cleanable_bytes / total if total else 0.0

    def is_due(self, min_dirty_ratio: float) -> bool:
        if not self.cleanable_bytes:
            return False
        return self.delay_ms > 0 or self.dirty_ratio > min_dirty_ratio


def first_dirty(cleaned_offset: int, log_start_offset: int, log_end_offset: int) -> int:
    """The start of the dirty part: the end of the last cleaning, or the log start if that is outside the log."""
    return cleaned_offset if log_start_offset <= cleaned_offset <= log_end_offset else log_start_offset


def cleanable_range(
    segments: Sequence[CleanerSegment],
    first_dirty_offset: int,
    last_stable_offset: int,
    config: LogConfig,
    now_ms: int,
) -> CleanableRange:
    """`segments`: all segments of the log, the active one last."""
    bases = [segment.base_offset for segment in segments]
    dirty_from = max(0, sum(1 for base in bases if base <= first_dirty_offset) - 1)
    closed_dirty = segments[dirty_from:-1] if bases[-1] > first_dirty_offset else []
    bound = min(last_stable_offset, bases[-1])
    if config.min_compaction_lag_ms > 0:
        newest_allowed = now_ms - config.min_compaction_lag_ms
        bound = min([bound, *(s.base_offset for s in closed_dirty if s.largest_timestamp > newest_allowed)])
    bound = max(first_dirty_offset, bound)
    # Only whole segments are cleaned, so not the one that holds the bound.
    end_offset = max((base for base in bases if base <= bound), default=bases[0])
    # As in Kafka, the segment in which the dirty part begins counts as clean and as dirty.
    clean = sum(segment.size_bytes for segment in segments if segment.base_offset < first_dirty_offset)
    dirty = sum(segment.size_bytes for segment in segments[dirty_from:-1] if segment.base_offset < end_offset)
    delay_ms = _delay(closed_dirty, config, now_ms)
    return CleanableRange(first_dirty_offset, end_offset, clean, dirty, delay_ms)


def _delay(closed_dirty: Sequence[CleanerSegment], config: LogConfig, now_ms: int) -> int:
    if config.max_compaction_lag_ms == INT64_MAX:
        return 0
    first_timestamps = [segment.first_timestamp for segment in closed_dirty if segment.first_timestamp > 0]
    return max(0, now_ms - config.max_compaction_lag_ms - min(first_timestamps, default=INT64_MAX))


def groups(
    segments: Sequence[CleanerSegment], end_offset: int, segment_bytes: int, index_bytes_max: int = INT64_MAX
) -> list[tuple[int, int]]:
    """The groups of segments that become one segment each: (first, one past the last) indexes, in order.

    `segments` are all cleaned segments, and `end_offset` is the end of the last one. Before the cleaning a group is at
    most as large as a segment, so are its indexes together, and its relative offsets fit into 32 bits.
    """
    limit = min(segment_bytes, MAX_POSITION)
    ends = [segment.base_offset for segment in segments[1:]] + [end_offset]
    ranges: list[tuple[int, int]] = []
    start = 0
    while start < len(segments):
        size, index_bytes = segments[start].size_bytes, segments[start].index_bytes
        stop = start + 1
        while (
            stop < len(segments)
            and size + segments[stop].size_bytes <= limit
            and index_bytes + segments[stop].index_bytes <= index_bytes_max
            and ends[stop] - 1 - segments[start].base_offset <= MAX_RELATIVE_OFFSET
        ):
            size += segments[stop].size_bytes
            index_bytes += segments[stop].index_bytes
            stop += 1
        ranges.append((start, stop))
        start = stop
    return ranges
