"""Divides offset ranges among tasks: enough ranges, and none too large; small ones may share a task.

Pure. Invariant: the resulting ranges cover exactly the input offsets, without overlap, and none is
empty. The number of ranges is that of Spark's KafkaOffsetRangeCalculator, which lets no ranges share a
task, with one exception. Where both limits are given, Spark divides each piece of the first limit by itself
again. So it gives 100 tasks where 149 are asked for and 1,000 offsets have pieces of 10. Here each
partition is divided once, and gives 149.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple


class OffsetRange(NamedTuple):
    """Offsets [start, end) of one partition."""

    topic: str
    partition: int
    start: int
    end: int

    @property
    def size(self) -> int:
        """The number of offsets, an upper bound of the number of records."""
        return max(0, self.end - self.start)


def plan_ranges(
    ranges: Sequence[OffsetRange], min_partitions: int | None = None, max_records_per_partition: int | None = None
) -> list[OffsetRange]:
    """Drop empty ranges and divide the others to at most `max_records_per_partition` offsets each.

    When that gives fewer than `min_partitions` ranges, each range gets parts in proportion to its
    size, at least one. As in Spark, rounding may make the result differ from `min_partitions`.
    """
    non_empty = [part for part in ranges if part.size > 0]
    sizes = [part.size for part in non_empty]
    parts = [-(-size // (max_records_per_partition or size)) for size in sizes]
    if min_partitions is not None and min_partitions > sum(parts):
        total = sum(sizes)
        # Small ranges stay whole, and large ranges get the parts that the small ones do not need.
        large = [size for size in sizes if _share(size, total, min_partitions) > 1]
        remaining_parts, large_total = max(min_partitions - (len(non_empty) - len(large)), 1), sum(large)
        parts = [
            max(minimum, _share(size, large_total, remaining_parts) if _share(size, total, min_partitions) > 1 else 1)
            for size, minimum in zip(sizes, parts)
        ]
    return [part for undivided, count in zip(non_empty, parts) for part in divide(undivided, count)]


def share_tasks(
    ranges: Sequence[OffsetRange], min_records: int | None, max_records: int | None = None
) -> list[tuple[OffsetRange, ...]]:
    """The ranges of each task, in the same order: one after the other until a task has `min_records` offsets.

    No task gets more than `max_records` by it. Without `min_records` each range is a task.
    """
    tasks: list[list[OffsetRange]] = []
    size = 0
    for each in ranges:
        has_room = max_records is None or size + each.size <= max_records
        if tasks and min_records is not None and size < min_records and has_room:
            tasks[-1].append(each)
            size += each.size
        else:
            tasks.append([each])
            size = each.size
    return [tuple(task) for task in tasks]


def divide(offset_range: OffsetRange, parts: int) -> list[OffsetRange]:
    """Divide a range into at most `parts` non-empty pieces whose sizes differ by at most one."""
    parts = min(parts, offset_range.size)
    cuts = [offset_range.start + offset_range.size * index // parts for index in range(parts + 1)] if parts else []
    return [offset_range._replace(start=start, end=end) for start, end in pairwise(cuts)]


def _share(size: int, total: int, parts: int) -> int:
    # Half rounds up, as in Java. Python's round() would round half to even.
    return max((2 * size * parts + total) // (2 * total), 1)
