"""Uncompressed records looked at where they lie, without making records of them: for the append path and for lookups.

`check_records` is a walk over the lengths: as many records as announced, each inside the batch, nothing behind the
last; the fields inside are looked at in the first ones only (docs/decisions/0014 has the costs and what follows).
`scan_records` looks at every field and gives each record's deltas, holding one record at a time. What is wrong raises
KafkaError(INVALID_RECORD), as in Kafka's DefaultRecordBatch and DefaultRecord.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from tidelog.protocol.batches.record import ZIGZAG, read_varint
from tidelog.protocol.batches.records import HEADERS_MAX, MIN_HEADER_BYTES, MIN_RECORD_BYTES
from tidelog.protocol.errors import ErrorCode, KafkaError

Buffer = bytes | bytearray | memoryview

CHECKED_RECORDS: Final = 4
"""So many records at the beginning of a batch have their fields checked."""

_MAX_RATIO: Final = {0: 1, 1: 1032, 2: 32, 3: 255, 4: 32768}
"""Bytes that one byte of each codec can stand for at most."""
# Records of one length follow each other more often than not; then this many are compared at once. Otherwise so many
# are walked before it is tried again.
_RUN: Final = 128
_BETWEEN_RUNS: Final = 128
_RUN_WORTH: Final = 16


def check_plausible(count: int, section_bytes: int, codec: int) -> None:
    """Refuse a count of records that this many bytes, whatever they decompress to, cannot hold."""
    if count * MIN_RECORD_BYTES > section_bytes * _MAX_RATIO.get(codec, 1):
        raise _invalid(f"{count} records in {section_bytes} bytes")


def check_records(data: Buffer, position: int, end: int, count: int) -> None:
    """Walk the `count` records between `position` and `end`, uncompressed."""
    if count * MIN_RECORD_BYTES > end - position:
        raise _invalid(f"{count} records in {end - position} bytes")
    try:
        if count == 1:
            position = _read_record(data, position, end)[0]
        else:
            for _ in range(min(count, CHECKED_RECORDS)):
                position = _read_record(data, position, end)[0]
            if count > CHECKED_RECORDS:
                position = _walk(data, position, end, count - CHECKED_RECORDS)
    except IndexError:
        position = -1
    if position != end:
        raise _invalid(f"the {count} records announced are not what the batch holds")


def scan_records(data: Buffer, count: int) -> Iterator[tuple[int, int, bool]]:
    """Offset delta, timestamp delta and whether there is a key, of each of the `count` records that `data` must be."""
    position, end = 0, len(data)
    if count < 0 or count * MIN_RECORD_BYTES > end:
        raise _invalid(f"{count} records in {end} bytes")
    try:
        for _ in range(count):
            position, time_delta, offset_delta, has_key = _read_record(data, position, end)
            yield offset_delta, time_delta, has_key
    except IndexError:
        raise _invalid("records end before their batch says") from None
    if position != end:
        raise _invalid(f"{end - position} bytes left after the last of {count} records")


def records_end(data: Buffer, end: int) -> tuple[int, bool]:
    """Where the records end that `data` begins with, of which there may be none, and whether `data` ends before.

    What is behind the last one is no record. Attributes must be 0 and offset deltas rise, as the fields of a record
    that nothing announces may be anything. `data` may be a part of what has its end at `end`.
    """
    position, last_delta = 0, -1
    try:
        while position < end:
            stop, _, offset_delta, _ = _read_record(data, position, end)
            attributes_at = position + 1
            while data[attributes_at - 1] >= 0x80:
                attributes_at += 1
            if data[attributes_at] or offset_delta <= last_delta:
                break
            position, last_delta = stop, offset_delta
    except KafkaError:
        pass
    except IndexError:
        return position, True
    return position, False


def _read_record(data: Buffer, position: int, end: int) -> tuple[int, int, int, bool]:
    """Where the record ends, its deltas, whether it has a key. Fields must end with it. IndexError where bytes do."""
    size = data[position]
    if size < 0x80:
        position += 1
    elif (second := data[position + 1]) < 0x80:
        size = size & 0x7F | second << 7
        position += 2
    else:
        size, position = _read_size(data, position)
    stop = position + (size >> 1)
    if size & 1 or stop > end:
        raise _invalid(f"a record of {size >> 1} bytes where {end - position} are left")
    # One byte of attributes, of which none is in use, then the deltas.
    byte = data[position + 1]
    if byte < 0x80:
        time_delta = ZIGZAG[byte]
        position += 2
    else:
        time_delta, position = read_varint(data, position + 1, 64)
    byte = data[position]
    if byte < 0x80:
        offset_delta = ZIGZAG[byte]
        position += 1
    else:
        offset_delta, position = read_varint(data, position, 32)
    key = data[position]
    if key < 0x80:
        position += 1
    else:
        key, position = _read_size(data, position)
    if not key & 1:
        position += key >> 1
    size = data[position]
    if size < 0x80:
        position += 1
    elif (second := data[position + 1]) < 0x80:
        size = size & 0x7F | second << 7
        position += 2
    else:
        size, position = _read_size(data, position)
    if not size & 1:
        position += size >> 1
    if position >= stop:
        raise _invalid("the fields of a record end behind it")
    position = position + 1 if data[position] == 0 else _skip_headers(data, position, stop)
    if position != stop:
        raise _invalid(f"the fields of a record end {stop - position} bytes before it does")
    return position, time_delta, offset_delta, not key & 1


def _read_size(data: Buffer, position: int) -> tuple[int, int]:
    """A size twice over, as a varint has it, and odd where it is negative: the slow path."""
    size, position = read_varint(data, position, 32)
    return size * 2 if size >= 0 else 1, position


def _skip_headers(data: Buffer, position: int, stop: int) -> int:
    count, position = read_varint(data, position, 32)
    if not 0 <= count * MIN_HEADER_BYTES <= stop - position or count > HEADERS_MAX:
        raise _invalid(f"{count} record headers in {stop - position} bytes")
    for _ in range(count):
        size, position = read_varint(data, position, 32)
        if not 0 <= size <= stop - position:
            raise _invalid(f"a header key of {size} bytes")
        size, position = read_varint(data, position + size, 32)
        if size > stop - position:
            raise _invalid(f"a header value of {size} bytes")
        if size > 0:
            position += size
    return position


def _walk(data: Buffer, position: int, end: int, count: int) -> int:
    """Where `count` records end, by their lengths alone. Never goes back; may run past `end`, or into IndexError."""
    walks = False
    while count > 0 and position < end:
        if not walks and count >= _RUN_WORTH:
            found, step = _run(data, position, end, count)
            position += step * found
            count -= found
            walks = found < _RUN_WORTH
            continue
        walks = False
        many = min(count, _BETWEEN_RUNS)
        count -= many
        for _ in range(many):
            size = data[position]
            if size & 1:
                raise _invalid("a record of negative size")
            if size < 0x80:
                position += 1 + (size >> 1)
            elif (second := data[position + 1]) < 0x80:
                position += (size >> 1) + (second << 6) - 62  # 2 bytes, and what is in their 14 bits, halved
            else:
                size, position = _read_size(data, position)
                position += size >> 1
    return position if not count else -1


def _run(data: Buffer, position: int, end: int, count: int) -> tuple[int, int]:
    """How many records from `position` on have the same length, and what it is, with the bytes that say so."""
    width = 1
    while data[position + width - 1] >= 0x80:
        width += 1
    size, start = _read_size(data, position)
    if size & 1:
        raise _invalid("a record of negative size")
    step = width + (size >> 1)
    found = min(count, _RUN)
    stop = min(end, position + step * found)
    for column in range(position, start):
        values = bytes(data[column:stop:step])
        found = min(found, len(values) - len(values.lstrip(values[:1])))
    return found, step


def _invalid(reason: str) -> KafkaError:
    return KafkaError(ErrorCode.INVALID_RECORD, reason)
