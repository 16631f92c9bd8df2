"""The compiled key table: the same results as `keys.PlainKeyTable` in a twentieth of the time and memory.

Used for large logs if numba is installed. A key is stored as its 128-bit SipHash-2-4 with a secret of this process, so
that clients cannot construct keys with equal hashes. A slot holds hash and offset in 24 bytes, as in Kafka. The loops
run without the interpreter lock. numba checks no bounds, so every index is compared with the end of its record, and
every record with the end of its section, before use. A property test compares the two tables.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Final

import numpy as np

from tidelog.protocol.batches.compiled import compiled
from tidelog.protocol.batches.record import wrapped
from tidelog.protocol.batches.record_batch import BatchHeader
from tidelog.protocol.errors import ErrorCode, KafkaError
from tidelog.storage.cleaner.keys import KeptRecords

BYTES_PER_SLOT: Final = 24

Array = np.ndarray[Any, Any]

_FIRST_SLOTS: Final = 1 << 14
_WHOLE, _MALFORMED = 0, 2
_compiled = partial(compiled, nogil=True)


@_compiled
def _varint(data: Array, position: int, end: int) -> tuple[int, int]:
    """A zigzag varint and the position after it; position -1 if it passes `end` or ten bytes."""
    number = np.uint64(0)
    shift = 0
    while True:
        if position >= end or shift > 63:
            return 0, -1
        byte = np.uint64(data[position])
        position += 1
        number |= (byte & np.uint64(0x7F)) << np.uint64(shift)
        if byte < np.uint64(0x80):
            break
        shift += 7
    half: Any = np.int64(number >> np.uint64(1))
    return (~half if number & np.uint64(1) else half), position


@_compiled
def _record(data: Array, position: int, limit: int) -> tuple[int, int, int, int, int]:
    """(end of the record, timestamp delta, offset delta, key start, key size); end -1 for an invalid record."""
    size, position = _varint(data, position, limit)
    if position < 0 or size < 0 or size > limit - position:
        return -1, 0, 0, 0, 0
    end = position + size
    timestamp, position = _varint(data, position + 1, end)
    if position < 0:
        return -1, 0, 0, 0, 0
    offset, position = _varint(data, position, end)
    if position < 0:
        return -1, 0, 0, 0, 0
    key_size, position = _varint(data, position, end)
    # The size of the value, one byte at least, lies within the record too.
    if position < 0 or key_size >= end - position or position >= end:
        return -1, 0, 0, 0, 0
    return end, timestamp, offset, position, key_size


@_compiled
def _rotate(value: Any, by: int) -> Any:
    return (value << np.uint64(by)) | (value >> np.uint64(64 - by))


@_compiled
def _round(a: Any, b: Any, c: Any, d: Any) -> tuple[Any, Any, Any, Any]:
    a += b
    b = _rotate(b, 13) ^ a
    a = _rotate(a, 32)
    c += d
    d = _rotate(d, 16) ^ c
    a += d
    d = _rotate(d, 21) ^ a
    c += b
    b = _rotate(b, 17) ^ c
    c = _rotate(c, 32)
    return a, b, c, d


@_compiled
def siphash(data: Array, start: int, size: int, k0: Any, k1: Any) -> tuple[Any, Any]:
    """SipHash-2-4 of 128 bits, as two words."""
    a = k0 ^ np.uint64(0x736F6D6570736575)
    b = k1 ^ np.uint64(0x646F72616E646F6D) ^ np.uint64(0xEE)
    c = k0 ^ np.uint64(0x6C7967656E657261)
    d = k1 ^ np.uint64(0x7465646279746573)
    whole = start + size - size % 8
    for position in range(start, whole, 8):
        word = np.uint64(0)
        for n in range(8):
            word |= np.uint64(data[position + n]) << np.uint64(8 * n)
        d ^= word
        a, b, c, d = _round(a, b, c, d)
        a, b, c, d = _round(a, b, c, d)
        a ^= word
    word = np.uint64(size & 0xFF) << np.uint64(56)
    for n in range(size % 8):
        word |= np.uint64(data[whole + n]) << np.uint64(8 * n)
    d ^= word
    a, b, c, d = _round(a, b, c, d)
    a, b, c, d = _round(a, b, c, d)
    a ^= word
    c ^= np.uint64(0xEE)
    for _ in range(4):
        a, b, c, d = _round(a, b, c, d)
    low = a ^ b ^ c ^ d
    b ^= np.uint64(0xDD)
    for _ in range(4):
        a, b, c, d = _round(a, b, c, d)
    return low, a ^ b ^ c ^ d


@_compiled
def _slot(table: Array, low: Any, high: Any) -> Any:
    """The slot of the key: the first one from its hash position on that holds the key or is empty."""
    slots = np.uint64(table.shape[0])
    at: Any = np.int64(low % slots)
    while table[at, 2] != np.uint64(0):
        if table[at, 0] == low and table[at, 1] == high:
            break
        at += 1
        if at == table.shape[0]:
            at = 0
    return at


@_compiled
def _note(
    data: Array, count: int, base_offset: int, from_offset: int, table: Array, entries: int, entries_max: int,
    k0: Any, k1: Any,
) -> tuple[int, int, int]:  # fmt: skip
    """(outcome, entries, the last offset noted or -1). A slot holds the offset plus one, 0 is an empty one."""
    position, limit, latest = 0, data.shape[0], -1
    for _ in range(count):
        end, _, delta, key_start, key_size = _record(data, position, limit)
        if end < 0:
            return 2, entries, latest
        offset = base_offset + delta
        if key_size >= 0 and offset >= from_offset:
            low, high = siphash(data, key_start, key_size, k0, k1)
            at = _slot(table, low, high)
            if table[at, 2] == np.uint64(0):
                if entries >= entries_max:
                    return 1, entries, latest
                entries += 1
                table[at, 0] = low
                table[at, 1] = high
            elif entries >= entries_max:
                return 1, entries, latest
            table[at, 2] = np.uint64(offset + 1)
            latest = offset
        position = end
    return 0, entries, latest


@_compiled
def _keep(
    data: Array, count: int, base_offset: int, latest: int, drop_tombstones: bool, table: Array, k0: Any, k1: Any,
    runs: Array,
) -> tuple[int, int, int, int, int, int]:  # fmt: skip
    """(outcome, runs, records, largest timestamp delta of those, whether one is a tombstone, records without key)."""
    position, limit = 0, data.shape[0]
    run_count = records = keyless = has_tombstone = 0
    run_end = -1
    largest = 0
    for _ in range(count):
        start = position
        end, timestamp, delta, key_start, key_size = _record(data, position, limit)
        if end < 0:
            return 2, 0, 0, 0, 0, 0
        position = end
        offset = base_offset + delta
        is_tombstone = data[key_start + max(0, key_size)] & 1
        if offset <= latest:
            if key_size < 0:
                keyless += 1
                continue
            low, high = siphash(data, key_start, key_size, k0, k1)
            at = _slot(table, low, high)
            if np.uint64(offset + 1) < table[at, 2] or (drop_tombstones and is_tombstone):
                continue
        if records == 0 or timestamp > largest:
            largest = timestamp
        records += 1
        has_tombstone |= is_tombstone
        if start == run_end:
            runs[run_count - 1, 1] = end
        else:
            runs[run_count, 0] = start
            runs[run_count, 1] = end
            run_count += 1
        run_end = end
    if position != limit:
        return 2, 0, 0, 0, 0, 0
    return 0, run_count, records, largest, has_tombstone, keyless


@_compiled
def _move(table: Array, larger: Array) -> None:
    for number in range(table.shape[0]):
        if table[number, 2] != np.uint64(0):
            at = _slot(larger, table[number, 0], table[number, 1])
            for column in range(3):
                larger[at, column] = table[number, column]


class CompiledKeyTable:
    """A `KeyTable` that grows up to `memory_bytes`, including the old table during a growth. `secret`: 16 random
    bytes."""

    def __init__(self, memory_bytes: int, load_factor: float, secret: bytes) -> None:
        self._slots_max = max(16, memory_bytes // BYTES_PER_SLOT * 2 // 3)
        self._load_factor = load_factor
        self._make(min(_FIRST_SLOTS, self._slots_max))
        self._entries = 0
        self._k0 = np.uint64(int.from_bytes(secret[:8], "little"))
        self._k1 = np.uint64(int.from_bytes(secret[8:16], "little"))
        self._runs: Array = np.empty((1024, 2), np.int64)
        self.latest_offset = -1

    def _make(self, slots: int) -> None:
        self._table: Array = np.zeros((slots, 3), np.uint64)
        # One slot stays empty, to end every search.
        self._entries_max = max(1, min(int(slots * self._load_factor), slots - 1))

    def _make_room(self, entries: int) -> None:
        """Grow the table for `entries` more keys, up to its maximum."""
        while self._entries + entries > self._entries_max and len(self._table) < self._slots_max:
            table = self._table
            self._make(min(2 * len(table), self._slots_max))
            _move(table, self._table)

    @property
    def utilization(self) -> float:
        return self._entries / max(1, self._slots_max * self._load_factor)

    def note(self, section: bytes, header: BatchHeader, from_offset: int) -> bool:
        self._make_room(header.record_count)
        data = np.frombuffer(section, np.uint8)
        outcome, self._entries, latest = _note(
            data, header.record_count, header.base_offset, from_offset, self._table, self._entries, self._entries_max,
            self._k0, self._k1,
        )  # fmt: skip
        if outcome == _MALFORMED:
            raise KafkaError(ErrorCode.INVALID_RECORD, f"no {header.record_count} records at {header.base_offset}")
        if latest >= 0:
            self.latest_offset = latest
        return outcome == _WHOLE

    def keep(self, section: bytes, header: BatchHeader, drop_tombstones: bool) -> KeptRecords:
        count = header.record_count
        if count > len(self._runs):
            self._runs = np.empty((2 * count, 2), np.int64)
        data = np.frombuffer(section, np.uint8)
        outcome, run_count, records, largest, has_tombstone, keyless = _keep(
            data, count, header.base_offset, self.latest_offset, drop_tombstones, self._table, self._k0, self._k1,
            self._runs,
        )  # fmt: skip
        if outcome == _MALFORMED:
            raise KafkaError(ErrorCode.INVALID_RECORD, f"no {count} records at {header.base_offset}")
        runs = [(start, end) for start, end in self._runs[:run_count].tolist()]
        return KeptRecords(runs, records, wrapped(header.base_timestamp + largest), bool(has_tombstone), keyless)
