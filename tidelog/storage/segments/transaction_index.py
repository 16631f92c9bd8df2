"""The transactions aborted in a segment: .txnindex, rows of 34 bytes in the order of their markers.

The file exists only if a transaction was aborted. Its bytes stay in memory after the first read, and rows are taken out
of them when they are needed, because a tenant may abort millions.
Invariant: the last offsets rise strictly.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from struct import Struct
from typing import Final, NamedTuple

from tidelog.protocol.batches.crc import crc32c
from tidelog.storage.files.disk import Disk

logger = logging.getLogger("tidelog.storage")

_ROW: Final = Struct(">hqqqq")
_VERSION: Final = 0
_LAST_OFFSET: Final = Struct(">q")
_LAST_OFFSET_AT: Final = 18
_BOUNDS: Final = Struct(">10xq8xq")  # first offset, last stable offset
_PIECE_BYTES: Final = 512 * _ROW.size


class AbortedTransaction(NamedTuple):
    producer_id: int
    first_offset: int
    last_offset: int
    last_stable_offset: int


class CorruptTransactionIndex(Exception):
    pass


class TransactionIndex:
    __slots__ = ("_checksum", "_data", "_disk", "_is_rebuilt", "exists", "lacks_rows", "path")

    def __init__(self, disk: Disk, path: str, *, exists: bool) -> None:
        self._disk = disk
        self.path = path
        self.exists = exists
        self._data: bytearray | None = None if exists else bytearray()
        """The rows as in the file; None before the first use."""
        self._is_rebuilt = False
        self._checksum: tuple[int, int] | None = None
        self.lacks_rows = False
        """The index was rebuilt while damage hid batches."""

    def check_file(self) -> None:
        """Raises CorruptTransactionIndex if the file is invalid or differs from the rows that were written."""
        if self.exists and not self._is_rebuilt:
            entries = self._read()
            if self._data is not None and entries != self._data:
                raise CorruptTransactionIndex(f"{self.path} is not what was written")

    @property
    def checksum(self) -> tuple[int, int]:
        """(size, CRC-32C) of the rows; size -1 if damage hid batches, so that a later start builds the index anew.

        Raises CorruptTransactionIndex for an invalid file.
        """
        if self.lacks_rows:
            return -1, 0
        if self._checksum is None:
            self._checksum = _checksum_of(self._loaded())
        return self._checksum

    @property
    def rows(self) -> list[AbortedTransaction]:
        """The rows of the index. Raises CorruptTransactionIndex for an invalid file."""
        return [AbortedTransaction(*fields) for _, *fields in _ROW.iter_unpack(bytes(self._loaded()))]

    def _loaded(self) -> bytearray:
        if self._data is None:
            self._data = self._read()
        return self._data

    def _read(self) -> bytearray:
        """The content of the file. Raises CorruptTransactionIndex unless it is valid."""
        try:
            data = bytearray(self._disk.read_file(self.path))
        except FileNotFoundError:
            raise CorruptTransactionIndex(f"{self.path} is missing") from None
        if len(data) % _ROW.size:
            raise CorruptTransactionIndex(f"{self.path}: {len(data)} bytes are no multiple of {_ROW.size}")
        before = -1
        for number, (version, _, first_offset, last_offset, _) in enumerate(_ROW.iter_unpack(data)):
            if version != _VERSION or last_offset < first_offset or last_offset <= before:
                raise CorruptTransactionIndex(
                    f"{self.path}: row {number} is version {version}, from {first_offset} to {last_offset}"
                )
            before = last_offset
        return data

    @property
    def is_empty(self) -> bool:
        """Whether it is known to have no rows. Asks nothing of the device: False for a file that was not read yet."""
        return not self._data and self._data is not None

    def append(self, row: AbortedTransaction) -> None:
        data = self._loaded()
        assert not data or row.last_offset > _last_offset(data, len(data) // _ROW.size - 1), row
        packed = _ROW.pack(_VERSION, *row)
        if not self._is_rebuilt:
            try:
                self._write(packed, len(data))
            except OSError as error:
                # The marker is in the log already, so the append must not fail.
                logger.warning("cannot write %s until its segment is closed: %s", self.path, error)
                self._is_rebuilt = True
        data += packed
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
        return collect_rows(self._loaded(), fetch_offset, upper_offset)

    def content(self) -> bytes:
        """A copy of the present rows, for `collect_rows`."""
        return bytes(self._loaded())

    def truncate_to(self, offset: int) -> None:
        """Forget the transactions whose marker is at `offset` or later."""
        data = self._loaded()
        kept_bytes = _first_from(data, offset) * _ROW.size
        if kept_bytes == len(data):
            return
        try:
            if not self._is_rebuilt:
                file = self._disk.open(self.path)
                try:
                    file.truncate(kept_bytes)
                finally:
                    file.close()
        except FileNotFoundError:
            self._is_rebuilt = True  # removed behind our back: `settle` writes the rows again
        self._data = data[:kept_bytes]
        self._checksum = None

    def write_again(self) -> bool:
        """Write the rows in memory in place of a damaged file. False if they are not known. Raises OSError."""
        if self._data is None:
            return False
        self._is_rebuilt = True
        self.settle()
        return True

    def begin_rebuild(self) -> None:
        """Empty the index in memory. `append` fills it; the file stays until `settle`."""
        self._data = bytearray()
        self._checksum = None
        self._is_rebuilt = True

    @property
    def is_readable(self) -> bool:
        """Whether its rows are in memory, or its file is valid."""
        try:
            self._loaded()
        except CorruptTransactionIndex:
            return False
        return True

    def rows_or_none(self) -> list[AbortedTransaction]:
        """The rows; none if the index is unreadable."""
        return self.rows if self.is_readable else []

    def settle(self) -> bool:
        """Write a rebuilt index to its file, unless the content is equal. Whether the file changed.

        A file without a row goes: a loss of power could give it back the rows that a truncation took.
        """
        if not self._is_rebuilt:
            return False
        data = bytes(self._loaded())
        try:
            present = self._disk.read_file(self.path) if self.exists else b""
        except FileNotFoundError:
            present = b""
        has_changed = data != present or (self.exists and not data)
        if has_changed and data:
            self._disk.write_file(self.path, data, sync=False)
        elif has_changed:
            self._disk.remove(self.path)
        self.exists = bool(data)
        self._is_rebuilt = False  # at the end: after a shortage it is written later
        return has_changed


def collect_rows(
    data: bytes | bytearray, fetch_offset: int, upper_offset: int
) -> tuple[list[AbortedTransaction], bool]:
    """`TransactionIndex.collect` of these rows. 100,000 rows take 0.2 s."""
    aborted: list[AbortedTransaction] = []
    # There may be very many, and every fetch of read_committed asks.
    begin = _first_from(data, fetch_offset) * _ROW.size
    for at in range(begin, len(data), _PIECE_BYTES):
        # A copy, not a view, with which the data could not grow.
        piece = bytes(data[at : at + _PIECE_BYTES])
        for number, (first_offset, stable_offset) in enumerate(_BOUNDS.iter_unpack(piece)):
            if first_offset < upper_offset:
                _, *fields = _ROW.unpack_from(piece, number * _ROW.size)
                aborted.append(AbortedTransaction(*fields))
            if stable_offset >= upper_offset:
                return aborted, True
    return aborted, False


def _checksum_of(data: bytearray) -> tuple[int, int]:
    return len(data), crc32c(data)


def _last_offset(data: bytes | bytearray, number: int) -> int:
    offset: int = _LAST_OFFSET.unpack_from(data, number * _ROW.size + _LAST_OFFSET_AT)[0]
    return offset


def _first_from(data: bytes | bytearray, offset: int) -> int:
    """The number of the first row whose last offset is `offset` or later."""
    return bisect_left(range(len(data) // _ROW.size), offset, key=lambda number: _last_offset(data, number))
