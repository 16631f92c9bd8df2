"""Decodes and checks the records of batches, and selects the batches that a reader may see.

`batch_builder.py` builds batches, `control_batches.py` has control records, `columnar.py` makes
Arrow columns; this module also exports the names of the first two. Invariant: all claims of an
untrusted batch (counts, sizes, deltas) are checked against its bytes. `decode_batch` returns every
record or raises KafkaError(CORRUPT_MESSAGE or INVALID_RECORD). It holds at most
`max_decompressed_bytes` of decompressed input.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import repeat
from typing import Final

from tidelog.protocol.batches import compression as codecs
from tidelog.protocol.batches.batch_builder import BatchBuilder, encode_batch, encode_one
from tidelog.protocol.batches.control_batches import (
    ControlRecordType,
    control_record_type,
    decode_end_txn_value,
    encode_control_batch,
    encode_end_txn_value,
    read_usual_marker,
)
from tidelog.protocol.batches.record import ZIGZAG, Headers, Record, RecordLike, encode_varint, read_varint, wrapped
from tidelog.protocol.batches.record_batch import (
    CONTROL_FLAG,
    HEADER_SIZE,
    LOG_APPEND_TIME,
    TRANSACTIONAL_FLAG,
    BatchHeader,
    Buffer,
    CorruptRecord,
    check_magic,
    iter_headers,
    read_header,
)
from tidelog.protocol.errors import ErrorCode, KafkaError

__all__ = [
    "MAX_BASE_OFFSET",
    "MAX_BASE_TIME",
    "MIN_RECORD_BYTES",
    "BatchBuilder",
    "ControlRecordType",
    "Headers",
    "Record",
    "RecordLike",
    "control_record_type",
    "decode_batch",
    "decode_end_txn_value",
    "decode_fields",
    "decode_headers",
    "decode_in_pieces",
    "decode_section",
    "encode_batch",
    "encode_control_batch",
    "encode_end_txn_value",
    "encode_one",
    "encode_varint",
    "iter_data_batches",
    "iter_records",
    "read_usual_marker",
    "record_section",
]

MIN_RECORD_BYTES: Final = 7
"""Length, attributes, two deltas, two sizes and a header count, of one byte each."""
MIN_HEADER_BYTES: Final = 2
"""The size fields of the key and the value of a header."""
HEADERS_MAX: Final = 1_000_000
"""Headers of one record. Decoding enlarges a header by a factor of up to a hundred."""

Fields = tuple[int, int, bytes | None, bytes | None, tuple[tuple[str, bytes | None], ...]]
"""The fields of a `Record`, in its order."""

_MAX_INT64: Final = 2**63 - 1
MAX_BASE_OFFSET: Final = _MAX_INT64 - 2**31
"""Leaves room for an offset delta of 32 bits."""
MAX_BASE_TIME: Final = _MAX_INT64 - 2**13
"""Leaves room for a timestamp delta of 14 bits."""


def decode_batch(
    buffer: Buffer,
    position: int = 0,
    header: BatchHeader | None = None,
    max_decompressed_bytes: int = codecs.DEFAULT_MAX_BYTES,
) -> list[Record]:
    """All records of the batch at `position`, with absolute offsets and timestamps. Ignores the
    CRC.

    Raises KafkaError: CORRUPT_MESSAGE for a batch that is incomplete or does not decompress,
    INVALID_RECORD for records that contradict the header, MESSAGE_TOO_LARGE above
    `max_decompressed_bytes`.
    """
    if header is None:
        header = read_header(buffer, position)
    check_magic(header)
    return decode_section(record_section(buffer, position, header, max_decompressed_bytes), header)


def decode_section(data: bytes, header: BatchHeader) -> list[Record]:
    """The records of a decompressed record section. Raises INVALID_RECORD as `decode_batch`."""
    return list(map(tuple.__new__, repeat(Record), decode_fields(data, header)))


def decode_fields(data: bytes, header: BatchHeader) -> list[Fields]:
    """The fields of each record of a decompressed record section, as plain tuples, for callers with a record type of
    their own. Raises INVALID_RECORD as `decode_batch`.
    """
    _check_claims(data, header)
    records, end = _decode_records(data, header, 0, header.record_count)
    _check_end(data, header, end)
    return records


def decode_in_pieces(data: bytes, header: BatchHeader, records_max: int) -> Iterator[list[Record]]:
    """As `decode_section`, but each list has at most `records_max` records and is decoded when it is asked for.

    A later record may be malformed, so the caller must be able to take back what it has done with the earlier ones.
    """
    _check_claims(data, header)
    position = 0
    for index in range(0, header.record_count, records_max):
        fields, position = _decode_records(data, header, position, min(records_max, header.record_count - index))
        yield list(map(tuple.__new__, repeat(Record), fields))
    _check_end(data, header, position)


def _check_claims(data: bytes, header: BatchHeader) -> None:
    count = header.record_count
    if count < 0 or count * MIN_RECORD_BYTES > len(data):
        raise KafkaError(ErrorCode.INVALID_RECORD, f"{count} records in {len(data)} bytes")
    if abs(header.base_offset) > MAX_BASE_OFFSET:
        raise KafkaError(ErrorCode.INVALID_RECORD, "base offset at the end of 64 bits")


def _check_end(data: bytes, header: BatchHeader, end: int) -> None:
    if end != len(data):
        raise KafkaError(
            ErrorCode.INVALID_RECORD, f"{len(data) - end} bytes left after the last of {header.record_count} records"
        )


def record_section(
    buffer: Buffer, position: int, header: BatchHeader, max_bytes: int = codecs.DEFAULT_MAX_BYTES
) -> bytes:
    """The decompressed record section of a batch. The caller has checked the magic."""
    end = position + header.size_bytes
    if end > len(buffer):
        raise CorruptRecord(f"batch of {header.size_bytes} bytes where {len(buffer) - position} are left")
    section = memoryview(buffer)[position + HEADER_SIZE : end]
    codec = header.compression
    if codec == codecs.NONE:
        return bytes(section)
    if codec not in codecs.NAMES:
        raise KafkaError(ErrorCode.INVALID_RECORD, f"unknown compression codec {codec}")
    return codecs.decompress(codec, section, max_bytes)


def _decode_records(data: bytes, header: BatchHeader, position: int, count: int) -> tuple[list[Fields], int]:
    """The fields of the `count` records from `position` on, and their end position. Raises INVALID_RECORD."""
    try:
        records, end = _read_records(data, header, position, count)
    except IndexError:
        raise KafkaError(ErrorCode.INVALID_RECORD, "records end before their batch says") from None
    if abs(header.base_timestamp) > MAX_BASE_TIME:
        records = [
            (offset, wrapped(timestamp), key, value, headers) for offset, timestamp, key, value, headers in records
        ]
    return records, end


def _read_records(data: bytes, header: BatchHeader, position: int, count: int) -> tuple[list[Fields], int]:
    """As `_decode_records`, with timestamps that may need more than 64 bits. Raises IndexError past the end.

    Varints of one and two bytes are read inline: a call for each field would double the cost.
    """
    base_offset, base_timestamp = header.base_offset, header.base_timestamp
    append_time = header.max_timestamp if header.timestamp_type == LOG_APPEND_TIME else None
    zigzag = ZIGZAG
    records: list[Fields] = []
    add = records.append
    limit = len(data)
    for _ in range(count):
        byte = data[position]
        if byte < 0x80:
            size = zigzag[byte]
            position += 1
        elif (second := data[position + 1]) < 0x80:
            size = zigzag[byte & 0x7F | second << 7]
            position += 2
        else:
            size, position = read_varint(data, position, 32)
        end = position + size
        if size < MIN_RECORD_BYTES - 1 or end > limit:
            raise KafkaError(ErrorCode.INVALID_RECORD, f"record of {size} bytes where {limit - position} are left")
        # One byte of unused attributes, then the two deltas.
        if (time_byte := data[position + 1]) < 0x80 and (byte := data[position + 2]) < 0x80:
            timestamp = base_timestamp + zigzag[time_byte]
            offset = base_offset + zigzag[byte]
            position += 3
        elif time_byte < 0x80 and (second := data[position + 3]) < 0x80:
            timestamp = base_timestamp + zigzag[time_byte]
            offset = base_offset + zigzag[byte & 0x7F | second << 7]
            position += 4
        else:
            timestamp, offset, position = _read_deltas(data, position + 1, base_timestamp, base_offset)
        byte = data[position]
        if byte < 0x80:
            size = zigzag[byte]
            position += 1
        else:
            size, position = read_varint(data, position, 32)
        if size < 0:
            key = None
        else:
            key = data[position : (position := position + size)]
        byte = data[position]
        if byte < 0x80:
            size = zigzag[byte]
            position += 1
        elif (second := data[position + 1]) < 0x80:
            size = zigzag[byte & 0x7F | second << 7]
            position += 2
        else:
            size, position = read_varint(data, position, 32)
        if size < 0:
            value = None
        else:
            value = data[position : (position := position + size)]
        if position < end and data[position] == 0:
            position += 1
            headers: tuple[tuple[str, bytes | None], ...] = ()
        else:
            headers, position = _decode_headers(data, position, end)
        # This check covers every size above: a slice past the end is cut short, but the position is
        # not.
        if position != end:
            raise KafkaError(ErrorCode.INVALID_RECORD, f"record fields end {position - end} bytes off the record's end")
        add((offset, timestamp if append_time is None else append_time, key, value, headers))
    return records, position


def _read_deltas(data: bytes, position: int, base_timestamp: int, base_offset: int) -> tuple[int, int, int]:
    """Timestamp, offset and the next position, for deltas of more than one byte."""
    byte = data[position]
    if byte < 0x80:
        timestamp = base_timestamp + ZIGZAG[byte]
        position += 1
    elif (second := data[position + 1]) < 0x80:
        timestamp = base_timestamp + ZIGZAG[byte & 0x7F | second << 7]
        position += 2
    else:
        delta, position = read_varint(data, position, 64)
        timestamp = wrapped(base_timestamp + delta)
    byte = data[position]
    if byte < 0x80:
        return timestamp, base_offset + ZIGZAG[byte], position + 1
    if (second := data[position + 1]) < 0x80:
        return timestamp, base_offset + ZIGZAG[byte & 0x7F | second << 7], position + 2
    delta, position = read_varint(data, position, 32)
    return timestamp, base_offset + delta, position


def _decode_headers(data: bytes, position: int, end: int) -> tuple[tuple[tuple[str, bytes | None], ...], int]:
    count, position = read_varint(data, position, 32)
    return decode_headers(data, position, end, count)


def decode_headers(
    data: bytes, position: int, end: int, count: int
) -> tuple[tuple[tuple[str, bytes | None], ...], int]:
    """The `count` headers at `position` of a record that ends at `end`, and the position after them."""
    if not 0 <= count * MIN_HEADER_BYTES <= end - position or count > HEADERS_MAX:
        raise KafkaError(ErrorCode.INVALID_RECORD, f"{count} record headers in {end - position} bytes")
    headers: list[tuple[str, bytes | None]] = []
    for _ in range(count):
        size, position = read_varint(data, position, 32)
        if not 0 <= size <= end - position:
            raise KafkaError(ErrorCode.INVALID_RECORD, f"header key of {size} bytes")
        key = str(data[position : position + size], "utf-8", "replace")  # as Java, so that the record stays readable
        size, position = read_varint(data, position + size, 32)
        if size < 0:
            headers.append((key, None))
            continue
        headers.append((key, data[position : position + size]))
        position += size
        if position > end:
            raise KafkaError(ErrorCode.INVALID_RECORD, f"header value of {size} bytes")
    return tuple(headers), position


def iter_data_batches(
    buffer: Buffer,
    aborted: Iterable[tuple[int, int]] = (),
    headers: Iterable[tuple[int, BatchHeader]] | None = None,
) -> Iterator[tuple[int, BatchHeader]]:
    """Position and header of each whole batch that a reader may see, in order.

    Omits control batches and, for read_committed, the batches of aborted transactions. `aborted`
    has the (producer id, first offset) pairs of the fetch response. As in Kafka's CompletedFetch, a
    transaction is dropped from its first offset to its producer's next ABORT marker. `headers` are
    those of `buffer` where the caller has read them already.
    """
    if headers is None:
        headers = iter_headers(buffer)
    pending_aborts = sorted(((first_offset, producer_id) for producer_id, first_offset in aborted), reverse=True)
    aborted_producers: set[int] = set()
    for position, header in headers:
        while pending_aborts and pending_aborts[-1][0] <= header.last_offset:
            aborted_producers.add(pending_aborts.pop()[1])
        attributes = header[5]
        if attributes & CONTROL_FLAG:
            if header.producer_id in aborted_producers:
                marker = decode_batch(buffer, position, header)
                if marker and control_record_type(marker[0].key) is ControlRecordType.ABORT:
                    aborted_producers.discard(header.producer_id)
        elif not (attributes & TRANSACTIONAL_FLAG and header.producer_id in aborted_producers):
            yield position, header


def iter_records(buffer: Buffer, max_decompressed_bytes: int = codecs.DEFAULT_MAX_BYTES) -> Iterator[Record]:
    """The records of all batches in `buffer`, in order.

    Omits control records and an incomplete last batch.
    """
    for position, header in iter_data_batches(buffer):
        yield from decode_batch(buffer, position, header, max_decompressed_bytes)
