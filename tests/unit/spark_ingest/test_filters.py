"""Filters narrow the ranges of a batch read, and never leave out a record that passes them."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidelog.spark_ingest.filters import Condition, earliest_time_ms, narrow_ranges, read_conditions
from tidelog.spark_ingest.offsets import resolve_ranges
from tidelog.spark_ingest.planning import OffsetRange

datasource = pytest.importorskip("pyspark.sql.datasource")

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
RANGES = [OffsetRange("a", 0, 0, 10), OffsetRange("a", 1, 5, 20), OffsetRange("b", 0, 0, 7)]


def narrowed(*filters: Any) -> list[tuple]:
    return [tuple(each) for each in narrow_ranges(RANGES, read_conditions(filters))]


def test_topics_and_partitions_that_fail_a_filter_are_not_read():
    assert narrowed(datasource.EqualTo(("topic",), "b")) == [("b", 0, 0, 7)]
    assert narrowed(datasource.In(("topic",), ("a", "c")), datasource.EqualTo(("partition",), 1)) == [("a", 1, 5, 20)]
    assert narrowed(datasource.GreaterThan(("partition",), 0)) == [("a", 1, 5, 20)]
    assert narrowed(datasource.In(("partition",), ())) == []


def test_offsets_cut_ranges():
    between = (datasource.GreaterThanOrEqual(("offset",), 6), datasource.LessThan(("offset",), 9))
    assert narrowed(*between) == [("a", 0, 6, 9), ("a", 1, 6, 9), ("b", 0, 6, 7)]
    assert narrowed(datasource.EqualNullSafe(("offset",), 8)) == [("a", 0, 8, 9), ("a", 1, 8, 9)]
    assert narrowed(datasource.In(("offset",), [2, 4])) == [("a", 0, 2, 5), ("b", 0, 2, 5)]


def test_filters_that_are_not_understood_change_nothing():
    others = (
        datasource.Not(datasource.EqualTo(("topic",), "a")),
        datasource.IsNotNull(("offset",)),
        datasource.EqualTo(("value",), b"x"),
        datasource.EqualTo(("offset",), None),
        datasource.GreaterThan(("offset",), 2.5),
        datasource.GreaterThan(("topic",), "b"),
        datasource.StringStartsWith(("topic",), "b"),
        datasource.EqualTo(("headers", "key"), "b"),
        datasource.GreaterThan(("timestamp",), datetime(2024, 1, 1)),
    )
    assert read_conditions(others) == []
    assert narrowed(*others) == [tuple(each) for each in RANGES]


def test_times_have_a_beginning_and_no_end():
    def time(milliseconds: float) -> datetime:
        return EPOCH + timedelta(milliseconds=milliseconds)

    later = datasource.GreaterThan(("timestamp",), time(5.7)), datasource.GreaterThanOrEqual(("timestamp",), time(3))
    assert earliest_time_ms(read_conditions(later)) == 5
    assert earliest_time_ms(read_conditions([datasource.In(("timestamp",), (time(9), time(7)))])) == 7
    assert earliest_time_ms(read_conditions([datasource.LessThan(("timestamp",), time(9))])) is None
    assert earliest_time_ms([]) is None
    # Brokers look up no such time, and a record without a timestamp has -1.
    before_1970 = [datasource.GreaterThanOrEqual(("timestamp",), time(-9))]
    assert earliest_time_ms(read_conditions(before_1970)) is None
    assert earliest_time_ms(read_conditions([*before_1970, *later])) == 5


OPERATORS = ("=", "<", "<=", ">", ">=", "in")


@given(st.lists(st.tuples(st.sampled_from(["partition", "offset"]), st.sampled_from(OPERATORS), st.integers(-1, 22))))
def test_no_record_that_passes_is_left_out(rows):
    conditions = [Condition(column, op, [value, value + 2] if op == "in" else value) for column, op, value in rows]
    compare = {
        "=": int.__eq__,
        "<": int.__lt__,
        "<=": int.__le__,
        ">": int.__gt__,
        ">=": int.__ge__,
        "in": lambda left, right: left in right,
    }
    for each in RANGES:
        kept = {offset for part in narrow_ranges([each], conditions) for offset in range(part.start, part.end)}
        for offset in range(each.start, each.end):
            row = {"partition": each.partition, "offset": offset}
            if all(compare[op](row[column], value) for column, op, value in conditions):
                assert offset in kept


def test_a_time_narrows_ranges_to_the_first_record_that_is_so_late(node, new_topic):
    topic = new_topic(10, 4)
    conditions = [Condition("timestamp", ">=", EPOCH + timedelta(milliseconds=1_700_000_000_006))]
    ranges = resolve_ranges(node.options(subscribe=topic), conditions).ranges
    assert [tuple(each) for each in ranges] == [(topic, 0, 6, 10)]
    conditions.append(Condition("partition", "=", 1))
    assert resolve_ranges(node.options(subscribe=topic), conditions).ranges == []
