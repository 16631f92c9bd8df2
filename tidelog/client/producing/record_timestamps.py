"""The timestamps of a batch's records as runs of equal ones: records that are sent within a millisecond share one.

Pure. The future of a record keeps them as long as it is kept, so they must be small. Invariant: runs are in the order
of the records, and the first one begins with record 0.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right


class RecordTimestamps:
    """Timestamps of milliseconds since 1970. `Accumulator.append` does inline what `append` does, to save the call."""

    __slots__ = ("first_records", "last_ms", "run_timestamps_ms")

    def __init__(self) -> None:
        self.last_ms: int | None = None
        """The timestamp of the last run."""
        self.first_records = array("L")
        """By run the index of its first record."""
        self.run_timestamps_ms = array("q")

    def append(self, record: int, timestamp_ms: int) -> None:
        """Add the timestamp of the next record, which has this index."""
        if timestamp_ms != self.last_ms:
            self.last_ms = timestamp_ms
            self.first_records.append(record)
            self.run_timestamps_ms.append(timestamp_ms)

    def of(self, record: int) -> int:
        """The timestamp of one record."""
        return self.run_timestamps_ms[bisect_right(self.first_records, record) - 1]
