"""The transactions aborted in a segment: .txnindex, rows of 34 bytes in the order of their markers.

The file exists only where something was aborted. Rows are few, so they are held in memory once read. Invariant: the
last offsets rise strictly.
"""

from __future__ import annotations

import logging
from struct import Struct
from typing import Final, NamedTuple

from tidelog.storage.files.disk import Disk

logger = logging.getLogger("tidelog.storage")

_ROW: Final = Struct(">hqqqq")
_VERSION: Final = 0


class AbortedTransaction(NamedTuple):
    producer_id: int
    first_offset: int
    last_offset: int
    last_stable_offset: int


class CorruptTransactionIndex(Exception):
    pass


class TransactionIndex:
    __slots__ = ("_disk", "_is_rebuilt", "_rows", "exists", "lacks_rows", "path")

    def __init__(self, disk: Disk, path: str, *, exists: bool) -> None:
        self._disk = disk
        self.path = path
        self.exists = exists
        self._rows: list[AbortedTransaction] | None = None if exists else []
        self._is_rebuilt = False
        self.lacks_rows = False
        """It was made anew while damage hid batches."""

    def check_file(self) -> None:
        """Raises CorruptTransactionIndex where the file is not what it should be."""
        if self.exists and not self._is_rebuilt:
            known, self._rows = self._rows, None
            try:
                found = self.rows
            finally:
                self._rows = known if known is not None else self._rows
            if known is not None and found != known:
                raise CorruptTransactionIndex(f"{self.path} is not what was written")

    @property
    def rows(self) -> list[AbortedTransaction]:
        """Raises CorruptTransactionIndex for a file that cannot be one."""
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
                # The marker is in the log already, so the append does not fail for it.
                logger.warning("%s is written when its segment is sealed: %s", self.path, error)
                self._is_rebuilt = True
        rows.append(row)

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
        """The aborted transactions that touch [fetch_offset, upper_offset), and whether later segments have none."""
        found: list[AbortedTransaction] = []
        for row in self.rows:
            if row.last_offset >= fetch_offset and row.first_offset < upper_offset:
                found.append(row)
            if row.last_stable_offset >= upper_offset:
                return found, True
        return found, False

    def truncate_to(self, offset: int) -> None:
        """Forget the transactions whose marker is at `offset` or later."""
        kept = [row for row in self.rows if row.last_offset < offset]
        if len(kept) == len(self.rows):
            return
        if not self._is_rebuilt:
            file = self._disk.open(self.path)
            try:
                file.truncate(len(kept) * _ROW.size)
            finally:
                file.close()
        self._rows = kept

    def begin_rebuild(self) -> None:
        """Empty it in memory, to be filled by `append`; the file stays as it is until `settle`."""
        self._rows = []
        self._is_rebuilt = True

    def rows_or_none(self) -> list[AbortedTransaction]:
        """The rows; none of an index that cannot be read."""
        try:
            return self.rows
        except CorruptTransactionIndex:
            return []

    def settle(self) -> bool:
        """Bring a rebuilt index to its file, unless that is right already; True when it was not."""
        if not self._is_rebuilt:
            return False
        self._is_rebuilt = False
        data = b"".join(_ROW.pack(_VERSION, *row) for row in self.rows)
        if data == (self._disk.read_file(self.path) if self.exists else b""):
            return False
        if data:
            self._disk.write_file(self.path, data, sync=False)
        else:
            self._disk.remove(self.path)
        self.exists = bool(data)
        return True
