"""Latencies counted in buckets, for a load that must not pause while they are evaluated.

To sort the two million latencies of a minute takes seconds, in which records are due and not sent: that pause would be
the latency that is seen.
"""

from __future__ import annotations

from array import array

_BITS = 11
_SUB_BUCKETS = 1 << _BITS
# Below 2^41 us, which are 25 days.
_SHIFTS = 42 - _BITS


class Histogram:
    """Counts of latencies, each known to 0.1 %: microseconds below 2,048 have a bucket each, larger ones share one."""

    def __init__(self) -> None:
        self._counts = array("Q", bytes(8 * _SHIFTS * _SUB_BUCKETS))
        self.count = 0
        self.max_us = 0

    def add(self, latency_ns: int) -> None:
        us = latency_ns // 1000
        shift = us.bit_length() - _BITS
        if shift < 0:
            shift = 0
        self._counts[(shift << _BITS) + (us >> shift)] += 1
        self.count += 1
        if us > self.max_us:
            self.max_us = us

    def percentile_ms(self, percent: float) -> float | None:
        """The nearest-rank percentile in milliseconds; None without a latency."""
        if not self.count:
            return None
        left = min(self.count - 1, int(self.count * percent / 100))
        for index, count in enumerate(self._counts):
            left -= count
            if left < 0:
                shift, place = divmod(index, _SUB_BUCKETS)
                return (place << shift) / 1000
        raise AssertionError("the counts do not add up")
