"""Checks and scans uncompressed records in place, without Record objects: for appends and lookups.

`check_records` walks over the lengths: the record count is right, each record is inside the batch,
and no bytes follow the last. It checks the fields of the first records only (docs/decisions/0014
has the costs and the consequences). `scan_records` checks every field and yields each record's
deltas, one record at a time. Malformed records raise KafkaError(INVALID_RECORD), as in Kafka's
DefaultRecordBatch and DefaultRecord.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from struct import Struct
from typing import Final

from tidelog.protocol.batches.record import ZIGZAG, read_varint
from tidelog.protocol.batches.records import HEADERS_MAX, MIN_HEADER_BYTES, MIN_RECORD_BYTES
from tidelog.protocol.errors import ErrorCode, KafkaError

Buffer = bytes | bytearray | memoryview

CHECKED_RECORDS: Final = 4
"""The number of records at the start of a batch whose fields are checked."""

_MAX_RATIO: Final = {0: 1, 1: 1032, 2: 32, 3: 255, 4: 32768}
"""The maximum decompressed bytes per compressed byte, by codec."""
_RUN_RECORDS: Final = 128
"""Consecutive records usually have one length: this many are compared at once."""
_RECORDS_BETWEEN_RUNS: Final = 128
"""The number of records walked one by one before the next attempt of a run."""
_MIN_RUN_RECORDS: Final = 16
_USUAL_HEAD: Final = Struct(">6B")  # of a record: size (one or two bytes), attributes, deltas of time and offset, key
first_eight: Final = Struct(">Q").unpack_from
_NO_KEY: Final = 1  # the length -1 as a varint
_KNOWN_HEADS_MAX: Final = 4096


def check_plausible(count: int, section_bytes: int, codec: int) -> None:
    """Refuse a record count that this many bytes cannot hold, even after decompression."""
    if count * MIN_RECORD_BYTES > section_bytes * _MAX_RATIO.get(codec, 1):
        raise _invalid(f"{count} records in {section_bytes} bytes")


def check_records(data: Buffer, position: int, end: int, count: int, *, counted: bool = False) -> None:
    """Check the `count` uncompressed records between `position` and `end`. `counted`: the offset deltas of those whose
    fields are checked must be 0, 1, 2.

    Raises INVALID_RECORD.
    """
    if count * MIN_RECORD_BYTES > end - position:
        raise _invalid(f"{count} records in {end - position} bytes")
    try:
        if count == 1 and not counted and _is_usual_record(data, position, end):
            return
        for index in range(min(count, CHECKED_RECORDS)):
            position, _, offset_delta, _ = _read_record(data, position, end)
            if counted and offset_delta != index:
                raise _invalid(f"record {index} of a compressed batch has the offset delta {offset_delta}")
        if count > CHECKED_RECORDS:
            position = _walk(data, position, end, count - CHECKED_RECORDS)
    except IndexError:
        position = -1
    if position != end:
        raise _invalid(f"the {count} records announced are not what the batch holds")


@lru_cache(maxsize=_KNOWN_HEADS_MAX)
def keyless_record_size(first_eight: int) -> int:
    """The bytes of a record without a key that begins with these eight bytes and ends with a zero, for no headers.

    A record of this size needs no `check_records`. -1 for a record in another form, or whose value is shorter than 64
    bytes or 8 KiB and longer. Cached, because all records of a producer that have the same size begin with the same
    eight bytes.
    """
    size, size_high, _, time_delta, offset_delta, key, value, value_high = first_eight.to_bytes(8, "big")
    is_long = size >= 0x80 > size_high and value >= 0x80 > value_high  # both sizes have two bytes
    if not is_long or size & 1 or value & 1 or time_delta >= 0x80 or offset_delta >= 0x80 or key != _NO_KEY:
        return -1
    record_end = 2 + ((size & 0x7F | size_high << 7) >> 1)
    value_end = 8 + ((value & 0x7F | value_high << 7) >> 1)
    return record_end if value_end + 1 == record_end else -1


def _is_usual_record(data: Buffer, position: int, end: int) -> bool:
    """Whether a record in the usual form fills these bytes: small deltas and key, at most 8 KiB, no headers.

    The checks are those of `_read_record`, with fewer reads of single bytes, because this runs for every batch of one
    record. False says nothing about the record.
    """
    if end - position < _USUAL_HEAD.size:
        return False
    size, second, third, fourth, fifth, sixth = _USUAL_HEAD.unpack_from(data, position)
    if size < 0x80:
        stop = position + 1 + (size >> 1)
        time_delta, offset_delta, key = third, fourth, fifth
        position += 5
    else:
        stop = position + 2 + ((size & 0x7F | second << 7) >> 1)
        time_delta, offset_delta, key = fourth, fifth, sixth
        position += 6
    if stop != end or size & 1 or second >= 0x80 or time_delta >= 0x80 or offset_delta >= 0x80 or key >= 0x80:
        return False
    if not key & 1:
        position += key >> 1
    if position + 2 > end:
        return False
    size = data[position]
    if size >= 0x80:
        position += 1
        size = size & 0x7F | data[position] << 7  # three bytes: larger than the record, whose size has two
    position += 1
    if not size & 1:
        position += size >> 1
    return position + 1 == end and data[position] == 0


def scan_records(data: Buffer, count: int) -> Iterator[tuple[int, int, bool]]:
    """Yield (offset delta, timestamp delta, has a key) of each record.

    `data` must be exactly `count` records.
    """
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
    """The end of the records at the start of `data` (there may be none), and whether `data` ends
    too early.

    The bytes after that end are not a record. No count announces these records, so their attributes
    must be 0 and their offset deltas must rise. `data` may be the first part of a section that ends
    at `end`.
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
    """The end of the record, its deltas, whether it has a key. Its fields must end with it.

    Raises IndexError when the bytes end.
    """
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
    # One byte of unused attributes, then the two deltas.
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
    """The slow path: twice the size, as the varint encodes it, or an odd number for a negative
    size.
    """
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
    """The end of `count` records by their lengths alone.

    Never goes back; may pass `end` or raise IndexError.
    """
    is_walking = False
    while count > 0 and position < end:
        if not is_walking and count >= _MIN_RUN_RECORDS:
            run_length, step = _equal_size_run(data, position, end, count)
            position += step * run_length
            count -= run_length
            is_walking = run_length < _MIN_RUN_RECORDS
            continue
        is_walking = False
        record_count = min(count, _RECORDS_BETWEEN_RUNS)
        count -= record_count
        for _ in range(record_count):
            size = data[position]
            if size & 1:
                raise _invalid("a record of negative size")
            if size < 0x80:
                position += 1 + (size >> 1)
            elif (second := data[position + 1]) < 0x80:
                position += (size >> 1) + (second << 6) - 62  # 2 bytes of size, plus half of their 14-bit number
            else:
                size, position = _read_size(data, position)
                position += size >> 1
    return position if not count else -1


def _equal_size_run(data: Buffer, position: int, end: int, count: int) -> tuple[int, int]:
    """The number of records from `position` on with one length, and that length, size field
    included.
    """
    width = 1
    while data[position + width - 1] >= 0x80:
        width += 1
    size, start = _read_size(data, position)
    if size & 1:
        raise _invalid("a record of negative size")
    step = width + (size >> 1)
    run_length = min(count, _RUN_RECORDS)
    stop = min(end, position + step * run_length)
    for column in range(position, start):
        values = bytes(data[column:stop:step])
        run_length = min(run_length, len(values) - len(values.lstrip(values[:1])))
    return run_length, step


def _invalid(reason: str) -> KafkaError:
    return KafkaError(ErrorCode.INVALID_RECORD, reason)
