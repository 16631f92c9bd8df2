"""Narrows the ranges of a batch read by the filters that Spark pushes down.

Pure. Filters on `topic`, `partition` and `offset` cut ranges; one on `timestamp` gives a time before
which nothing is wanted. Spark evaluates every filter again on the rows, so a filter that is not
understood here costs time only. Invariant: no record that passes the filters is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Final, NamedTuple

from tidelog.spark_ingest.planning import OffsetRange

_OPERATORS: Final[Mapping[str, str]] = {
    "EqualTo": "=",
    "EqualNullSafe": "=",
    "LessThan": "<",
    "LessThanOrEqual": "<=",
    "GreaterThan": ">",
    "GreaterThanOrEqual": ">=",
    "In": "in",
}
"""The filters of `pyspark.sql.datasource` by the name of their class."""

_COMPARE: Final[Mapping[str, Callable[[Any, Any], bool]]] = {
    "=": lambda left, right: bool(left == right),
    "<": lambda left, right: bool(left < right),
    "<=": lambda left, right: bool(left <= right),
    ">": lambda left, right: bool(left > right),
    ">=": lambda left, right: bool(left >= right),
    "in": lambda left, right: left in right,
}
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MAX_OFFSET: Final = 2**63 - 1


class Condition(NamedTuple):
    """`column operator value`; all conditions of a read hold together."""

    column: str
    operator: str
    value: Any


def read_conditions(filters: Iterable[Any]) -> list[Condition]:
    """The conditions on columns of this source among Spark's filters."""
    conditions = []
    for each in filters:
        operator = _OPERATORS.get(type(each).__name__)
        if operator is None or len(each.attribute) != 1:
            continue
        condition = Condition(each.attribute[0], operator, each.value)
        if _is_understood(condition):
            conditions.append(condition)
    return conditions


def _is_understood(condition: Condition) -> bool:
    values = condition.value if condition.operator == "in" else [condition.value]
    if condition.column == "topic":
        return condition.operator in ("=", "in") and all(isinstance(value, str) for value in values)
    if condition.column in ("partition", "offset"):
        return all(isinstance(value, int) and not isinstance(value, bool) for value in values)
    # Spark hands times over with their zone.
    return condition.column == "timestamp" and all(isinstance(value, datetime) and value.tzinfo for value in values)


def narrow_ranges(ranges: Sequence[OffsetRange], conditions: Sequence[Condition]) -> list[OffsetRange]:
    """The parts of the ranges whose records may pass the conditions on topic, partition and offset."""
    narrowed = []
    for each in ranges:
        start, end = each.start, each.end
        for column, operator, value in conditions:
            if column == "offset":
                low, high = _offset_bounds(operator, value)
                start, end = max(start, low), min(end, high)
            elif column in ("topic", "partition") and not _COMPARE[operator](getattr(each, column), value):
                end = start
        if start < end:
            narrowed.append(each._replace(start=start, end=end))
    return narrowed


def _offset_bounds(operator: str, value: Any) -> tuple[int, int]:
    """The offsets [low, high) that a condition leaves."""
    if operator == "in":
        return min(value, default=0), max(value, default=-1) + 1
    low = {"=": value, ">=": value, ">": value + 1}.get(operator, 0)
    high = {"=": value + 1, "<": value, "<=": value + 1}.get(operator, _MAX_OFFSET)
    return low, high


def earliest_time_ms(conditions: Sequence[Condition]) -> int | None:
    """The time in ms before which no record passes the conditions on `timestamp`; None without one.

    There is no latest time: a record with an early timestamp may follow a later one. A time before
    1970 is none: brokers look up times from 0 on, and records without a timestamp have -1.
    """
    times = []
    for column, operator, value in conditions:
        if column == "timestamp" and operator in ("=", ">", ">=", "in"):
            times += [min(map(_to_ms, value))] if operator == "in" and value else []
            times += [_to_ms(value)] if operator != "in" else []
    earliest_ms = max(times, default=-1)
    return earliest_ms if earliest_ms >= 0 else None


def _to_ms(time: datetime) -> int:
    """Milliseconds since 1970, rounded down."""
    return (time - _EPOCH) // timedelta(milliseconds=1)
