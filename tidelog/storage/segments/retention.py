"""Decides when a segment is rolled by age, and which segments may be deleted.

Pure: sizes, times and offsets in, decisions out. The rules are those of Kafka's LogSegment.shouldRoll and of
UnifiedLog.deleteOldSegments: only a prefix of the log is ever deleted, and nothing at or above the high watermark.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from tidelog.storage.segments.log_config import INT64_MAX, LogConfig


class SegmentFacts(NamedTuple):
    """`end_offset`: the next segment's base offset, or the log end for the last one. `largest_timestamp`: the segment's
    maximum record timestamp, or the modification time of its file if there is none."""

    base_offset: int
    end_offset: int
    size_bytes: int
    largest_timestamp: int


def segment_jitter_ms(config: LogConfig, topic: str, partition: int) -> int:
    """The time by which this log rolls before `segment.ms`: fixed per partition, spread over all partitions."""
    if config.segment_jitter_ms <= 0:
        return 0
    spread = 0
    for byte in topic.encode():
        spread = (spread * 31 + byte) & 0x7FFFFFFF
    return (spread * 31 + partition * 2654435761) % min(config.segment_jitter_ms, config.segment_ms)


def roll_limits(first_batch_timestamp: int, created_ms: int, segment_ms: int, jitter_ms: int) -> tuple[int, int]:
    """(record timestamp, wall time) above which a non-empty segment is rolled.

    If the first batch has a timestamp, record time counts, otherwise the segment's age (LogSegment.shouldRoll).
    """
    age_ms = segment_ms - jitter_ms
    if first_batch_timestamp >= 0:
        return min(first_batch_timestamp + age_ms, INT64_MAX), INT64_MAX
    return INT64_MAX, min(created_ms + age_ms, INT64_MAX)


def deletable_prefix(
    segments: Sequence[SegmentFacts], config: LogConfig, log_start_offset: int, high_watermark: int, now_ms: int
) -> int:
    """The number of segments at the front that may be deleted, without an empty last one.

    If it is all of them, the caller rolls a new segment first.
    """
    count = _below_log_start(segments, log_start_offset, high_watermark)
    if config.is_deleted_by_age_or_size:
        rest = segments[count:]
        if config.retention_bytes >= 0:
            more = _above_size(rest, config.retention_bytes, high_watermark)
            count += more
            rest = rest[more:]
        if config.retention_ms >= 0:
            count += _above_age(rest, config.retention_ms, high_watermark, now_ms)
    return count


def _below_log_start(segments: Sequence[SegmentFacts], log_start_offset: int, high_watermark: int) -> int:
    count = 0
    for segment in segments[:-1]:
        if segment.end_offset > log_start_offset or segment.end_offset > high_watermark:
            break
        count += 1
    return count


def _above_size(segments: Sequence[SegmentFacts], retention_bytes: int, high_watermark: int) -> int:
    excess = sum(segment.size_bytes for segment in segments) - retention_bytes
    count = 0
    for segment in segments:
        excess -= segment.size_bytes
        if excess < 0 or not _may_go(segment, segments, high_watermark):
            break
        count += 1
    return count


def _above_age(segments: Sequence[SegmentFacts], retention_ms: int, high_watermark: int, now_ms: int) -> int:
    count = 0
    for segment in segments:
        if now_ms - segment.largest_timestamp <= retention_ms or not _may_go(segment, segments, high_watermark):
            break
        count += 1
    return count


def _may_go(segment: SegmentFacts, segments: Sequence[SegmentFacts], high_watermark: int) -> bool:
    is_empty_last = segment is segments[-1] and segment.size_bytes == 0
    return segment.end_offset <= high_watermark and not is_empty_last
