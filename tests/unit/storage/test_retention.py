"""When a segment is full, and which segments may go."""

from __future__ import annotations

from typing import Any

from tidelog.storage.segments.log_config import INT64_MAX, LogConfig
from tidelog.storage.segments.retention import SegmentFacts, deletable_prefix, roll_limits, segment_jitter_ms

SEGMENTS = [
    SegmentFacts(0, 10, 100, 1000),
    SegmentFacts(10, 20, 100, 2000),
    SegmentFacts(20, 30, 100, 1500),
    SegmentFacts(30, 40, 50, 3000),
]
KEEP = {"retention_ms": -1, "retention_bytes": -1}


def deletable(
    *, log_start: int = 0, high_watermark: int = 40, now_ms: int = 10_000, segments=SEGMENTS, **settings
) -> int:
    return deletable_prefix(segments, LogConfig(**{**KEEP, **settings}), log_start, high_watermark, now_ms)


def test_without_limits_nothing_goes():
    assert deletable() == 0


def test_age_takes_a_prefix_and_may_take_all():
    assert deletable(retention_ms=9000) == 0
    assert deletable(retention_ms=8999) == 1
    assert deletable(retention_ms=7999) == 3
    assert deletable(retention_ms=100) == 4


def test_an_old_segment_behind_a_young_one_stays():
    assert deletable(retention_ms=8100) == 1


def test_size_takes_what_is_wholly_too_much():
    assert deletable(retention_bytes=350) == 0
    assert deletable(retention_bytes=251) == 0
    assert deletable(retention_bytes=250) == 1
    assert deletable(retention_bytes=0) == 4


def test_nothing_at_or_above_the_high_watermark_goes():
    assert deletable(retention_ms=0, high_watermark=25) == 2
    assert deletable(retention_bytes=0, high_watermark=9) == 0
    assert deletable(log_start=30, high_watermark=10) == 1


def test_segments_below_the_log_start_go_whatever_the_policy():
    compact: dict[str, Any] = {"cleanup_policy": frozenset({"compact"})}
    assert deletable(log_start=20, **compact) == 2
    assert deletable(log_start=19, **compact) == 1
    assert deletable(log_start=40, **compact) == 3
    assert deletable(retention_ms=0, retention_bytes=0, **compact) == 0


def test_the_rules_add_up():
    assert deletable(log_start=10, retention_bytes=150) == 2
    assert deletable(log_start=10, retention_bytes=150, retention_ms=9000) == 2
    assert deletable(log_start=10, retention_bytes=150, retention_ms=8000) == 3


def test_an_empty_last_segment_never_goes():
    empty = [SegmentFacts(0, 10, 100, 0), SegmentFacts(10, 10, 0, 0)]
    assert deletable(segments=empty, retention_ms=0) == 1
    assert deletable(segments=empty[1:], retention_ms=0) == 0


def test_a_segment_is_full_by_the_time_of_its_records_where_they_have_one():
    assert roll_limits(5000, 100, 1000, 0) == (6000, INT64_MAX)
    assert roll_limits(5000, 100, 1000, 300) == (5700, INT64_MAX)
    assert roll_limits(-1, 100, 1000, 300) == (INT64_MAX, 800)
    assert roll_limits(5, 0, INT64_MAX, 0) == (INT64_MAX, INT64_MAX)


def test_jitter_is_fixed_per_partition_and_spread_over_them():
    config = LogConfig(segment_ms=10_000, segment_jitter_ms=1000)
    jitters = [segment_jitter_ms(config, "topic", partition) for partition in range(50)]
    assert jitters == [segment_jitter_ms(config, "topic", partition) for partition in range(50)]
    assert len(set(jitters)) > 40
    assert all(0 <= jitter < 1000 for jitter in jitters)
    assert segment_jitter_ms(LogConfig(), "topic", 3) == 0
