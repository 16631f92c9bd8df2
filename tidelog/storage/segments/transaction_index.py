"""The transactions aborted in a segment: .txnindex, rows of 34 bytes in the order of their markers.

The file exists only if a transaction was aborted. There are few rows, so they stay in memory after the first read.
Invariant: the last offsets rise strictly.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from operator import attrgetter
from struct import Struct
from typing import Final, NamedTuple

from tidelog.protocol.batches.crc import crc32c
from tidelog.storage.files.disk import Disk

logger = logging.getLogger("tidelog.storage")

_ROW: Final = Struct(">hqqqq")
_VERSION: Final = 0
_LAST_OFFSET: Final = attrgetter("last_offset")


class AbortedTransaction(NamedTuple):
    producer_id: int
    first_offset: int
    last_offset: int
    last_stable_offset: int


class CorruptTransactionIndex(Exception):
    pass


class TransactionIndex:
    __slots__ = ("_checksum", "_disk", "_is_rebuilt", "_rows", "exists", "lacks_rows", "path")

    def __init__(self, disk: Disk, path: str, *, exists: bool) -> None:
        self._disk = disk
        self.path = path
        self.exists = exists
        self._rows: list[AbortedTransaction] | None = None if exists else []
        self._is_rebuilt = False
        self._checksum: tuple[int, int] | None = None
        self.lacks_rows = False
        """The index was rebuilt while damage hid batches."""

    def check_file(self) -> None:
        """Raises CorruptTransactionIndex if the file is invalid or differs from the rows in memory."""
        if self.exists and not self._is_rebuilt:
            known, self._rows = self._rows, None
            try:
                found = self.rows
            finally:
                self._rows = known if known is not None else self._rows
            if known is not None and found != known:
                raise CorruptTransactionIndex(f"{self.path} is not what was written")

    @property
    def checksum(self) -> tuple[int, int]:
        """(size, CRC-32C) of the rows; size -1 if damage hid batches, so that a later start builds the index anew.

        Raises CorruptTransactionIndex for an invalid file.
        """
        if self.lacks_rows:
            return -1, 0
        if self._checksum is None:
            data = b"".join(_ROW.pack(_VERSION, *row) for row in self.rows)
            self._checksum = len(data), crc32c(data)
        return self._checksum

    @property
    def rows(self) -> list[AbortedTransaction]:
        """The rows of the index. Raises CorruptTransactionIndex for an invalid file."""
        if self._rows is None:
            try:
                data = self._disk.read_file(self.path)
            except FileNotFoundError:
                raise CorruptTransactionIndex(f"{self.path} is missing") from None
            if len(data) % _ROW.size:
                raise CorruptTransactionIndex(f"{self.path}: {len(data)} bytes are no multiple of {_ROW.size}")
            rows: list[AbortedTransaction] = []
            for version, *fields in _ROW.iter_unpack(data):
                row = AbortedTransaction(*fields)
                if (
                    version != _VERSION
                    or row.last_offset < row.first_offset
                    or (rows and row.last_offset <= rows[-1].last_offset)
                ):
                    raise CorruptTransactionIndex(f"{self.path}: row {len(rows)} is version {version}, {row}")
                rows.append(row)
            self._rows = rows
        return self._rows

    def append(self, row: AbortedTransaction) -> None:
        rows = self.rows
        assert not rows or row.last_offset > rows[-1].last_offset, (rows[-1], row)
        if not self._is_rebuilt:
            try:
                self._write(_ROW.pack(_VERSION, *row), len(rows) * _ROW.size)
            except OSError as error:
                # The marker is in the log already, so the append must not fail.
                logger.warning("cannot write %s until its segment is closed: %s", self.path, error)
                self._is_rebuilt = True
        rows.append(row)
        self._checksum = None

    def _write(self, data: bytes, position: int) -> None:
        file = self._disk.open(self.path, create=True)
        try:
            while data:
                written = file.write_at(data, position)
                data, position = data[written:], position + written
        finally:
            file.close()
        self.exists = True

    def collect(self, fetch_offset: int, upper_offset: int) -> tuple[list[AbortedTransaction], bool]:
        """The aborted transactions with records in [fetch_offset, upper_offset). Whether later segments have none."""
        found: list[AbortedTransaction] = []
        rows = self.rows
        # There may be very many, and every fetch of read_committed asks.
        for index in range(bisect_left(rows, fetch_offset, key=_LAST_OFFSET), len(rows)):
            row = rows[index]
            if row.first_offset < upper_offset:
                found.append(row)
            if row.last_stable_offset >= upper_offset:
                return found, True
        return found, False

    def truncate_to(self, offset: int) -> None:
        """Forget the transactions whose marker is at `offset` or later."""
        kept = [row for row in self.rows if row.last_offset < offset]
        if len(kept) == len(self.rows):
            return
        try:
            if not self._is_rebuilt:
                file = self._disk.open(self.path)
                try:
                    file.truncate(len(kept) * _ROW.size)
                finally:
                    file.close()
        except FileNotFoundError:
            self._is_rebuilt = True  # removed behind our back: `settle` writes the rows again
        self._rows = kept
        self._checksum = None

    def begin_rebuild(self) -> None:
        """Empty the index in memory. `append` fills it; the file stays until `settle`."""
        self._rows = []
        self._checksum = None
        self._is_rebuilt = True

    def rows_or_none(self) -> list[AbortedTransaction]:
        """The rows; none if the index is unreadable."""
        try:
            return self.rows
        except CorruptTransactionIndex:
            return []

    def settle(self) -> bool:
        """Write a rebuilt index to its file, unless the content is equal. Whether the file changed."""
        if not self._is_rebuilt:
            return False
        self._is_rebuilt = False
        data = b"".join(_ROW.pack(_VERSION, *row) for row in self.rows)
        try:
            present = self._disk.read_file(self.path) if self.exists else b""
        except FileNotFoundError:
            present = b""
        if data == present:
            self.exists = bool(data)
            return False
        if data:
            self._disk.write_file(self.path, data, sync=False)
        else:
            self._disk.remove(self.path)
        self.exists = bool(data)
        return True
