"""The two sparse indexes of a segment, .index (offset -> position) and .timeindex (timestamp -> offset).

Both have rows of two rising columns, the key and the value, packed big-endian. One class implements both. The newest
rows are in memory. They are written to the file in blocks, those of an offset index also periodically
(`log/saved_rows.py`), and at the latest when the segment is sealed or closed. An index that was not closed is rebuilt
from its segment, so nothing is lost, and an open log needs no map or descriptor per index. Look-ups of older rows use a
map of the file. Invariant: rows [0, rows_in_file) are in the file, rows [first_in_memory, count) are in memory, and
every row is in at least one of them.
"""

from __future__ import annotations

import logging
import sys
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from itertools import chain
from struct import Struct
from typing import Final

from tidelog.storage.files.disk import Disk, FileMap, is_exhaustion
from tidelog.storage.segments.damage import CorruptIndex

logger = logging.getLogger("tidelog.storage")

_SPILL_ROWS: Final = 512
_KEEP_ROWS: Final = 64
_OFFSET_ROW: Final = Struct(">ii")
_TIME_ROW: Final = Struct(">qi")
_WORD_BYTES: Final = 4
_COLUMN_MAX: Final = 2**31 - 1

Row = tuple[int, int]


class SparseIndex:
    """`row` is the row layout; `key_base` and `value_base` are added to the stored columns."""

    __slots__ = (
        "_disk", "_first_in_memory", "_has_file", "_key_base", "_keys", "_map", "_rows_in_file", "_struct",
        "_value_base", "_values", "count", "has_unsynced_rows", "is_rebuilt", "last_key", "last_value", "path",
    )  # fmt: skip

    def __init__(self, disk: Disk, path: str, row: Struct, key_base: int, value_base: int, count: int) -> None:
        self._disk = disk
        self.path = path
        self._struct = row
        self._key_base = key_base
        self._value_base = value_base
        self.count = count
        self._rows_in_file = count
        self._first_in_memory = count
        self._keys = array("q")
        self._values = array("q")
        self._map: FileMap | None = None
        self.is_rebuilt = self.has_unsynced_rows = False
        """`has_unsynced_rows`: the file may lack rows on the device, until `Segment.sync_indexes`."""
        self._has_file = count > 0
        self.last_key = -1
        self.last_value = -1
        if count:
            self.last_key, self.last_value = self._row_from_file(count - 1)

    @property
    def row_size_bytes(self) -> int:
        return self._struct.size

    @property
    def size_bytes(self) -> int:
        return self.count * self._struct.size

    def row(self, number: int) -> Row:
        """(key, value) of row `number`."""
        assert 0 <= number < self.count, number
        if number >= self._first_in_memory:
            at = number - self._first_in_memory
            return self._keys[at], self._values[at]
        return self._checked(number, *self._struct.unpack_from(self._mapped(), number * self._struct.size))

    def _row_from_file(self, number: int) -> Row:
        """Read one row without a map, so that an open log needs no map."""
        file = self._disk.open(self.path)
        try:
            row = file.read_at(self._struct.size, number * self._struct.size)
        finally:
            file.close()
        if len(row) < self._struct.size:
            raise CorruptIndex(self.path, f"has no row {number}")
        return self._checked(number, *self._struct.unpack(row))

    def _checked(self, number: int, key: int, value: int) -> Row:
        """The key and value of a row of the file. Raises CorruptIndex for negative columns."""
        if key < 0 or value < 0:
            raise CorruptIndex(self.path, f"has {key}, {value} as row {number}")
        return key + self._key_base, value + self._value_base

    def append(self, key: int, value: int) -> None:
        self._keys.append(key)
        self._values.append(value)
        self.count += 1
        self.last_key = key
        self.last_value = value
        held = len(self._keys)
        if held >= _SPILL_ROWS and not held % _KEEP_ROWS and not self.is_rebuilt:
            self._spill()

    def _spill(self) -> None:
        """Write the rows to the file. If that fails, they stay in memory and are written later.

        The batches that they index are already in the log, so an append does not fail for them. `write_rows` raises the
        error when the segment is sealed.
        """
        try:
            self.write_rows()
        except OSError as error:
            logger.warning("%s: %d rows stay in memory: %s", self.path, self.count - self._rows_in_file, error)

    def floor(self, key: int) -> Row | None:
        """The last row whose key is not above `key`."""
        keys = self._keys
        if keys and key >= keys[0]:
            at = bisect_right(keys, key) - 1
            return keys[at], self._values[at]
        return self._floor_in_file(key, 0)

    def floor_value(self, value: int) -> Row | None:
        """The last row whose value is not above `value`."""
        values = self._values
        if values and value >= values[0]:
            at = bisect_right(values, value) - 1
            return self._keys[at], values[at]
        return self._floor_in_file(value, 1)

    def _floor_in_file(self, target: int, column: int) -> Row | None:
        count = self._count_in_file(target, column)
        return self.row(count - 1) if count else None

    def count_below(self, target: int, column: int) -> int:
        """The number of rows with a key (column 0) or a value (column 1) below `target`."""
        held = self._values if column else self._keys
        if held and target > held[0]:
            return self._first_in_memory + bisect_left(held, target)
        return self._count_in_file(target - 1, column)

    def _count_in_file(self, target: int, column: int) -> int:
        """The number of rows not above `target`, among those that are only in the file."""
        low, high = 0, self._first_in_memory
        if not high:
            return 0
        view = self._mapped()
        unpack, size = self._struct.unpack_from, self._struct.size
        relative = target - (self._value_base if column else self._key_base)
        while low < high:
            middle = (low + high) >> 1
            if unpack(view, middle * size)[column] <= relative:
                low = middle + 1
            else:
                high = middle
        return low

    def _mapped(self) -> memoryview:
        size = self._rows_in_file * self._struct.size
        if self._map is None or self._map.size_bytes < size:
            self.release()
            try:
                file = self._disk.open(self.path)
            except FileNotFoundError:
                raise CorruptIndex(self.path, "is missing") from None
            try:
                self._map = file.map(size)
            except ValueError as error:
                raise CorruptIndex(self.path, f"is shorter than its {self._rows_in_file} rows") from error
            finally:
                file.close()
        elif self._size_of_file() < size:  # access to the map past the end of the file would kill the process
            self.release()
            raise CorruptIndex(self.path, f"is shorter than its {self._rows_in_file} rows")
        assert self._map is not None
        return self._map.view

    def _size_of_file(self) -> int:
        """0 where it was removed in use: the rows are written anew."""
        try:
            return self._disk.size_of(self.path)
        except FileNotFoundError:
            return 0

    def rows(self) -> list[Row]:
        """Every row, for tests, tools and checks."""
        return [self.row(number) for number in range(self.count)]

    def read_later(self) -> Iterator[Row]:
        """Every present row. The thread that takes the first row reads the file: raises CorruptIndex, OSError then."""
        return self._read(self.path, self._first_in_memory, self.rows_in_memory())

    def _read(self, path: str, count: int, in_memory: list[Row]) -> Iterator[Row]:
        if count:
            try:
                data = self._disk.read_file(path)
            except FileNotFoundError:
                raise CorruptIndex(path, "is missing") from None
            if len(data) < count * self._struct.size:
                raise CorruptIndex(path, f"is shorter than its {count} rows")
            for key, value in self._struct.iter_unpack(memoryview(data)[: count * self._struct.size]):
                yield key + self._key_base, value + self._value_base
        yield from in_memory

    def rows_in_memory(self) -> list[Row]:
        """The newest rows, which are in memory."""
        return list(zip(self._keys, self._values))

    def rows_from_value(self, value: int) -> list[Row]:
        """The rows whose value is not below `value`, of a file that is damaged only those in memory. Raises OSError.

        While a large segment is examined, more rows may be appended than stay in memory.
        """
        rows: list[Row] = []
        try:
            start, end = self.count_below(value, 1) * self._struct.size, self._first_in_memory * self._struct.size
            if start < end:
                in_file = self._struct.iter_unpack(bytes(self._mapped()[start:end]))
                rows = [(each[0] + self._key_base, each[1] + self._value_base) for each in in_file]
        except CorruptIndex as error:
            logger.warning("%s: the rows in memory are taken alone", error)
        return [row for row in chain(rows, zip(self._keys, self._values)) if row[1] >= value]

    def copy_of_rows_in_memory(self) -> Iterator[Row]:
        """`rows_in_memory` for another thread, without a tuple for each of hundreds of thousands."""
        return zip(self._keys[:], self._values[:])

    def write_rows(self) -> int:
        """Write all rows to the file, without a sync, and keep only the newest in memory. The number written."""
        written = self.save_rows()
        self._forget_old_rows()
        return written

    def save_rows(self) -> int:
        """Write all rows to the file, without a sync. The number written. Raises OSError."""
        if self.is_rebuilt or not self._has_file:
            return self._write_whole()
        missing = self.count - self._rows_in_file
        if missing:
            data = self._packed(self._rows_in_file - self._first_in_memory)
            file = self._disk.open(self.path, create=True)
            try:
                position = self._rows_in_file * self._struct.size
                while data:
                    written = file.write_at(data, position)
                    data = data[written:]
                    position += written
            finally:
                file.close()
            self._rows_in_file = self.count
            self.has_unsynced_rows = True
        return missing

    def _packed(self, start: int) -> bytes:
        """Packs whole columns: an index may have hundreds of thousands of rows, and the loop may wait for it."""
        words_of_key = self._struct.size // _WORD_BYTES - 1
        keys = array("q" if words_of_key == 2 else "i", _relative(self._keys[start:], self._key_base))
        values = array("i", _relative(self._values[start:], self._value_base))
        if sys.byteorder == "little":
            keys.byteswap()
            values.byteswap()
        words, rows = array("i", keys.tobytes()), array("i", bytes(len(values) * self._struct.size))
        for number in range(words_of_key):
            rows[number :: words_of_key + 1] = words[number::words_of_key]
        rows[words_of_key :: words_of_key + 1] = values
        return rows.tobytes()

    def _forget_old_rows(self) -> None:
        surplus = len(self._keys) - _KEEP_ROWS
        if surplus > 0:
            del self._keys[:surplus], self._values[:surplus]
            self._first_in_memory += surplus

    def begin_rebuild(self) -> None:
        """Empty the index in memory. The file stays until `write_rows`, which does not rewrite equal content.

        So a rebuild never removes rows from the device.
        """
        self.release()
        self._keys, self._values = array("q"), array("q")
        self.count = self._rows_in_file = self._first_in_memory = 0
        self.last_key = self.last_value = -1
        self.is_rebuilt = True

    def fill(self, keys: array[int], values: array[int]) -> None:
        """Take over the columns of an empty index, each of 64 bits and rising."""
        assert not self.count, self.path
        self._keys, self._values, self.count = keys, values, len(keys)
        if keys:
            self.last_key, self.last_value = keys[-1], values[-1]

    def _write_whole(self) -> int:
        data = self._packed(0)
        try:
            is_right = self._disk.size_of(self.path) == len(data) and self._disk.read_file(self.path) == data
        except FileNotFoundError:
            is_right = False
        if not is_right:
            self._disk.write_file(self.path, data, sync=False)
            self.has_unsynced_rows = True
        self.is_rebuilt = False
        self._has_file = True
        self._rows_in_file = self.count
        return 0 if is_right else max(1, self.count)

    def truncate(self, count: int) -> None:
        """Keep the first `count` rows."""
        count = min(count, self.count)  # also then: a lack of memory may have left a part of a row behind the last one
        self.release()  # a map past the end of its file must not be accessed
        if count < self._rows_in_file:
            file = self._disk.open(self.path, create=True)
            try:
                file.truncate(count * self._struct.size)
            finally:
                file.close()
            self._rows_in_file = count
            self.has_unsynced_rows = True
        keep = max(0, count - self._first_in_memory)
        del self._keys[keep:], self._values[keep:]
        self._first_in_memory = min(self._first_in_memory, count)
        self.count = count
        self.last_key, self.last_value = self.row(count - 1) if count else (-1, -1)

    def release(self) -> None:
        """Close the map. A later use opens it again."""
        if self._map is not None:
            self._map.close()
            self._map = None


class NamedBatches:
    """The (last offset, position) of the batches that an offset index names. Any thread may ask. Raises OSError for a
    shortage of descriptors or memory.

    They are read at the first question, also from a file that `SparseIndex` refuses: of a damaged file, what is left.
    No client can write a row. So a batch that a row names belongs to the log, and is not the payload of another one.
    """

    def __init__(self, disk: Disk, path: str, base_offset: int, in_memory: Iterable[Row]) -> None:
        self._disk = disk
        self._path = path
        self._base_offset = base_offset
        self._in_memory = in_memory
        self._rows: array[int] | None = None

    def __contains__(self, row: object) -> bool:
        if self._rows is None:
            self._rows = self._read()
        assert isinstance(row, tuple)
        packed = _packed_row(row[0] - self._base_offset, row[1])
        at = bisect_left(self._rows, packed)
        return packed > 0 and at < len(self._rows) and self._rows[at] == packed

    def _read(self) -> array[int]:
        try:
            data = self._disk.read_file(self._path)
        except FileNotFoundError:  # as of a segment that is appended to
            data = b""
        except OSError as error:
            if is_exhaustion(error):  # it passes, but whole batches would count as damaged for good
                raise
            logger.warning("%s names no batch: %s", self._path, error)
            data = b""
        rows = array("Q", data[: len(data) - len(data) % _OFFSET_ROW.size])
        if sys.byteorder == "little":
            rows.byteswap()
        base_offset = self._base_offset
        rows.extend(_packed_row(last_offset - base_offset, position) for last_offset, position in self._in_memory)
        return array("Q", sorted(rows))


class MovedBatches:
    """The batches that an index names, in a file that was written anew.

    Those before `start` are where they were. What was at `source` is at `position` now, with all behind it.
    """

    def __init__(self, named: NamedBatches, start: int, source: int, position: int) -> None:
        self._named = named
        self._start = start
        self._position = position
        self._moved_by = position - source

    def __contains__(self, row: object) -> bool:
        assert isinstance(row, tuple)
        last_offset, position = row
        if position < self._start:
            return row in self._named
        return position >= self._position and (last_offset, position - self._moved_by) in self._named


def _relative(column: array[int], base: int) -> Iterable[int]:
    return [each - base for each in column] if base else column


def _packed_row(relative_offset: int, position: int) -> int:
    """Return the bytes of a row of the offset index as one integer; 0, as in a page of zeros, if it is not valid."""
    is_row = 0 < relative_offset <= _COLUMN_MAX and 0 < position <= _COLUMN_MAX
    return relative_offset << 32 | position if is_row else 0


def offset_index(disk: Disk, path: str, base_offset: int, count: int = 0) -> SparseIndex:
    """The .index file: the last offset of a batch -> the batch's position in the segment."""
    return SparseIndex(disk, path, _OFFSET_ROW, base_offset, 0, count)


def time_index(disk: Disk, path: str, base_offset: int, count: int = 0) -> SparseIndex:
    """The .timeindex file: the largest timestamp so far -> the last offset of the batch that has it."""
    return SparseIndex(disk, path, _TIME_ROW, 0, base_offset, count)


OFFSET_ROW_BYTES: Final = _OFFSET_ROW.size
TIME_ROW_BYTES: Final = _TIME_ROW.size
