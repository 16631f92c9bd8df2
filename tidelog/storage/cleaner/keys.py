"""The table of the newest offset of each key, and the choice of the records to keep.

Pure, and the reference for the compiled table. The caller bounds the memory for keys (log.cleaner.dedupe.buffer.size);
when it is full, the following records are left for the next cleaning. Invariant: a record at or below `latest_offset`
is dropped only if the table has a newer one of its key, if it is an expired tombstone, or if it has no key.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import Final, NamedTuple, Protocol

from tidelog.protocol.batches.record import ZIGZAG, encode_varint, read_varint, wrapped
from tidelog.protocol.batches.record_batch import BatchHeader
from tidelog.protocol.batches.records import MIN_RECORD_BYTES
from tidelog.protocol.errors import ErrorCode, KafkaError

BYTES_PER_KEY: Final = 200
"""The maximum memory of a key: the slot, the key or its digest, the offset."""

_WHOLE_KEY_MAX: Final = 32
_DIGEST_BYTES: Final = 33  # longer than any key that is stored whole, so a digest never equals a key

Run = tuple[int, int]


class KeptRecords(NamedTuple):
    """The kept records of a batch: `runs` are the kept spans of its record section, with `records` in them.

    `max_timestamp`: the largest of these records, None if not computed. `has_tombstone`: one of them has no value.
    `keyless`: the number of records dropped for want of a key.
    """

    runs: list[Run]
    records: int
    max_timestamp: int | None
    has_tombstone: bool
    keyless: int


class KeyTable(Protocol):
    """The table of keys, from the cleaner's view."""

    latest_offset: int

    @property
    def utilization(self) -> float:
        """The used part of the table, 0 to 1."""
        ...

    def note(self, section: bytes, header: BatchHeader, from_offset: int) -> bool:
        """Add the keys of a batch from `from_offset` on. False if there was no room for all of them."""
        ...

    def keep(self, section: bytes, header: BatchHeader, drop_tombstones: bool) -> KeptRecords: ...


class PlainKeyTable:
    """`memory_bytes`: log.cleaner.dedupe.buffer.size of one cleaner. `load_factor`: the usable part of it."""

    def __init__(self, memory_bytes: int, load_factor: float) -> None:
        self._keys: dict[bytes, int] = {}
        self._keys_max = max(1, int(memory_bytes // BYTES_PER_KEY * load_factor))
        self.latest_offset = -1

    @property
    def utilization(self) -> float:
        return len(self._keys) / self._keys_max

    def note(self, section: bytes, header: BatchHeader, from_offset: int) -> bool:
        keys, keys_max, zigzag = self._keys, self._keys_max, ZIGZAG
        count, limit, position = header.record_count, len(section), 0
        is_sparse = count != header.last_offset_delta + 1
        may_fill = len(keys) + count > keys_max
        offset = header.base_offset - 1
        noted = self.latest_offset
        try:
            for _ in range(count):
                # `_record` inlined, because a call per record would cost a third of the time.
                byte = section[position]
                if byte < 0x80:
                    end = position + 1 + zigzag[byte]
                    position += 2
                elif (second := section[position + 1]) < 0x80:
                    end = position + 2 + zigzag[byte & 0x7F | second << 7]
                    position += 3
                else:
                    end, position = _record(section, position, limit)
                while section[position] > 0x7F:  # the timestamp
                    position += 1
                position += 1
                if is_sparse:
                    delta, position = read_varint(section, position, 32)
                    offset = header.base_offset + delta
                else:
                    offset += 1
                    while section[position] > 0x7F:
                        position += 1
                    position += 1
                byte = section[position]
                if byte < 0x80:
                    size = zigzag[byte]
                    position += 1
                else:
                    size, position = read_varint(section, position, 32)
                key_end = position + size
                if key_end >= end or end > limit:
                    raise _malformed(position)
                if size >= 0 and offset >= from_offset:
                    key = section[position:key_end]
                    if size > _WHOLE_KEY_MAX:
                        key = _digest(key)
                    if may_fill and len(keys) >= keys_max:
                        return False
                    keys[key] = noted = offset
                position = end
        except IndexError:
            raise _malformed(position) from None
        finally:
            self.latest_offset = noted
        return True

    def keep(self, section: bytes, header: BatchHeader, drop_tombstones: bool) -> KeptRecords:
        find, latest, zigzag = self._keys.get, self.latest_offset, ZIGZAG
        limit, position = len(section), 0
        is_sparse = header.record_count != header.last_offset_delta + 1
        offset = header.base_offset - 1
        runs: list[Run] = []
        run_start, run_end = 0, -1
        records = keyless = 0
        has_tombstone = False
        try:
            for _ in range(header.record_count):
                start = position
                byte = section[position]
                if byte < 0x80:
                    end = position + 1 + zigzag[byte]
                    position += 2
                elif (second := section[position + 1]) < 0x80:
                    end = position + 2 + zigzag[byte & 0x7F | second << 7]
                    position += 3
                else:
                    end, position = _record(section, position, limit)
                while section[position] > 0x7F:  # the timestamp
                    position += 1
                position += 1
                if is_sparse:
                    delta, position = read_varint(section, position, 32)
                    offset = header.base_offset + delta
                else:
                    offset += 1
                    while section[position] > 0x7F:
                        position += 1
                    position += 1
                byte = section[position]
                if byte < 0x80:
                    size = zigzag[byte]
                    position += 1
                else:
                    size, position = read_varint(section, position, 32)
                key_end = position + size if size > 0 else position
                if key_end >= end or end > limit:
                    raise _malformed(position)
                # The first byte of an odd zigzag varint is odd, and no length but that of a null is negative.
                has_value = not section[key_end] & 1
                if offset <= latest:
                    if size < 0:
                        keyless += 1
                        position = end
                        continue
                    key = section[position:key_end]
                    if size > _WHOLE_KEY_MAX:
                        key = _digest(key)
                    if offset < find(key, -1) or (drop_tombstones and not has_value):
                        position = end
                        continue
                records += 1
                if not has_value:
                    has_tombstone = True
                if start != run_end:
                    if run_end >= 0:
                        runs.append((run_start, run_end))
                    run_start = start
                run_end = position = end
        except IndexError:
            raise _malformed(position) from None
        if position != limit:
            raise _malformed(position)
        if run_end >= 0:
            runs.append((run_start, run_end))
        return KeptRecords(runs, records, None, has_tombstone, keyless)


def largest_timestamp(section: bytes, runs: list[Run], base_timestamp: int) -> int:
    """The largest timestamp of the records in the runs, which have at least one."""
    largest = None
    for position, run_end in runs:
        while position < run_end:
            end, position = _record(section, position, run_end)
            delta, _ = read_varint(section, position, 64)
            if largest is None or delta > largest:
                largest = delta
            position = end
    assert largest is not None
    return wrapped(base_timestamp + largest)


def _record(section: bytes, position: int, limit: int) -> tuple[int, int]:
    """(end of the record at `position`, start of its timestamp)."""
    byte = section[position]
    if byte < 0x80:
        size = ZIGZAG[byte]
        position += 1
    elif (second := section[position + 1]) < 0x80:
        size = ZIGZAG[byte & 0x7F | second << 7]
        position += 2
    else:
        size, position = read_varint(section, position, 32)
    end = position + size
    if size < MIN_RECORD_BYTES - 1 or end > limit:
        raise _malformed(position)
    return end, position + 1


def rebased(section: bytes, runs: list[Run], base_timestamp: int, new_base_timestamp: int) -> bytes:
    """The records of the runs, encoded again with timestamp deltas from another base."""
    shift = base_timestamp - new_base_timestamp
    parts: list[bytes] = []
    for position, run_end in runs:
        while position < run_end:
            end, body = _record(section, position, run_end)
            delta, rest = read_varint(section, body, 64)
            timestamp = encode_varint(wrapped(delta + shift))
            size = encode_varint(1 + len(timestamp) + end - rest)
            parts += (size, section[body - 1 : body], timestamp, section[rest:end])
            position = end
    return b"".join(parts)


def _digest(key: bytes) -> bytes:
    return blake2b(key, digest_size=_DIGEST_BYTES).digest()


def _malformed(position: int) -> KafkaError:
    return KafkaError(ErrorCode.INVALID_RECORD, f"no record at {position} of its batch")
