"""Compares the rows of a segment's two indexes with its batches, during a sequential read of the batches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from tidelog.storage.segments.damage import CorruptIndex, DamagedRange
from tidelog.storage.segments.examination import WholeBatch

if TYPE_CHECKING:
    from tidelog.storage.segments.segment import Segment

Row = tuple[int, int]


class IndexCheck:
    """The caller passes each batch and each damaged range to `note`, in order. Rows of damaged records are skipped."""

    def __init__(self, segment: Segment) -> None:
        self.wrong: dict[str, str] = {}
        """Path of an index -> why it is wrong."""
        self._newest_time = self._last_time = -1
        self._rows: tuple[Iterator[Row], Iterator[Row]] = (iter(()), iter(()))
        self._paths = ("", "")
        self._has_begun = False
        self._offset_row: Row | None = None
        self._time_row: Row | None = None
        try:
            # The newest rows of the active segment are in memory, and are right.
            self._paths = segment.offset_index.path, segment.time_index.path
            self._rows = segment.offset_index.read_later(), segment.time_index.read_later()
            self._last_time = segment.time_index.last_key
        except CorruptIndex as error:
            self.wrong[error.path] = error.reason

    def _begin(self) -> None:
        """Read the first rows, on the thread that reads the batches, because the files are large."""
        if not self._has_begun:
            self._has_begun = True
            self._offset_row, self._time_row = self._next(0), self._next(1)

    def _next(self, which: int) -> Row | None:
        try:
            return next(self._rows[which], None)
        except CorruptIndex as error:
            self.wrong.setdefault(error.path, error.reason)
            return None

    def note(self, each: WholeBatch | DamagedRange) -> None:
        self._begin()
        if isinstance(each, DamagedRange):
            self._pass_over(each)
            return
        header = each.header
        row = self._offset_row
        if row is not None and row[1] <= each.position:
            if row != (header.last_offset, each.position):
                self._is_wrong(0, f"has offset {row[0]} at {row[1]}, offset {header.last_offset} is at {each.position}")
            self._offset_row = self._next(0)
        row = self._time_row
        if row is not None and row[1] <= header.last_offset:
            is_right = row[1] >= header.base_offset and row[0] == header.max_timestamp >= self._newest_time
            if not is_right:
                self._is_wrong(1, f"has timestamp {row[0]} for offset {row[1]}, the batch has {header.max_timestamp}")
            self._time_row = self._next(1)
        if header.record_count:  # a batch that compaction emptied keeps its timestamp, which no index names
            self._newest_time = max(self._newest_time, header.max_timestamp)

    def _pass_over(self, damage: DamagedRange) -> None:
        while self._offset_row is not None and self._offset_row[1] < damage.end_position:
            self._offset_row = self._next(0)
        end = damage.end_offset
        while self._time_row is not None and (end < 0 or self._time_row[1] < end):
            self._time_row = self._next(1)

    def lacks_last_time(self) -> bool:
        """For a sealed and undamaged segment: whether the time index lacks the newest timestamp."""
        return self._last_time < self._newest_time

    def left_over(self) -> dict[str, str]:
        """Index path -> error, for rows without a batch, which point past the end."""
        self._begin()
        rows = zip(self._paths, (self._offset_row, self._time_row))
        return {path: f"ends in {row}, behind the batches" for path, row in rows if row is not None}

    @property
    def time_path(self) -> str:
        return self._paths[1]

    def _is_wrong(self, which: int, reason: str) -> None:
        self.wrong.setdefault(self._paths[which], reason)
