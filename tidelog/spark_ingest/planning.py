"""Which task reads what: ranges of offsets, divided until there are enough of them and none is too large.

Pure. Invariant: the ranges that come out cover exactly the offsets that went in, without overlap and none empty. The
rules are those of Spark's KafkaOffsetRangeCalculator.
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
        """How many offsets, an upper bound of how many records."""
        return max(0, self.end - self.start)


def plan_ranges(
    ranges: Sequence[OffsetRange], min_partitions: int | None = None, max_records_per_partition: int | None = None
) -> list[OffsetRange]:
    """Drop the empty ranges, and divide the others so that none is above `max_records_per_partition` offsets.

    When that gives fewer than `min_partitions`, each range gets parts in proportion to its size, at least one; through
    rounding the result may miss the number by some, as in Spark.
    """
    planned = [each for each in ranges if each.size > 0]
    parts = [-(-each.size // (max_records_per_partition or each.size)) for each in planned]
    if min_partitions is not None and min_partitions > sum(parts):
        total = sum(each.size for each in planned)
        # The small ones stay whole, and the parts they do not need go to the large ones.
        large = [each.size for each in planned if _share(each.size, total, min_partitions) > 1]
        left = max(min_partitions - (len(planned) - len(large)), 1)
        parts = [
            max(least, _share(each.size, sum(large), left) if _share(each.size, total, min_partitions) > 1 else 1)
            for each, least in zip(planned, parts)
        ]
    return [part for each, count in zip(planned, parts) for part in divide(each, count)]


def divide(whole: OffsetRange, parts: int) -> list[OffsetRange]:
    """`whole` in at most `parts` pieces whose sizes differ by one at most, none of them empty."""
    parts = min(parts, whole.size)
    cuts = [whole.start + whole.size * index // parts for index in range(parts + 1)] if parts else []
    return [whole._replace(start=start, end=end) for start, end in pairwise(cuts)]


def _share(size: int, total: int, parts: int) -> int:
    # Half rounds up, as in Java, where Python's round() would take the even neighbour.
    return max((2 * size * parts + total) // (2 * total), 1)
