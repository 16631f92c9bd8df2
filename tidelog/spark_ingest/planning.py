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
    """Drop the empty ranges, halve those above `max_records_per_partition`, then divide the large for `min_partitions`.

    With `min_partitions` a range gets parts in proportion to its size, at least one; a result somewhat above or below
    the number is possible through rounding, as in Spark.
    """
    planned = [each for each in ranges if each.size > 0]
    if max_records_per_partition is not None:
        planned = [part for each in planned for part in divide(each, -(-each.size // max_records_per_partition))]
    if min_partitions is None or min_partitions <= len(planned):
        return planned
    total = sum(each.size for each in planned)
    # The small ones stay whole, and the parts they do not need go to the large ones.
    whole = {each for each in planned if _share(each.size, total, min_partitions) == 1}
    divisible = total - sum(each.size for each in whole)
    parts = max(min_partitions - len(whole), 1)
    return [
        part
        for each in planned
        for part in (divide(each, _share(each.size, divisible, parts)) if each not in whole else [each])
    ]


def divide(whole: OffsetRange, parts: int) -> list[OffsetRange]:
    """`whole` in at most `parts` pieces whose sizes differ by one at most, none of them empty."""
    parts = min(parts, whole.size)
    cuts = [whole.start + whole.size * index // parts for index in range(parts + 1)] if parts else []
    return [whole._replace(start=start, end=end) for start, end in pairwise(cuts)]


def _share(size: int, total: int, parts: int) -> int:
    return max(round(size * parts / total), 1)
