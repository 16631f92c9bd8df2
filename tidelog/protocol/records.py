"""Records inside a batch: built for sending, decoded for reading, control records included.

The bytes of a batch header are `record_batch.py`'s, Arrow columns are `columnar.py`'s. Whatever a batch from outside
claims (counts, sizes, deltas) is checked against the bytes that are there: `decode_batch` returns every record or
raises KafkaError(CORRUPT_MESSAGE or INVALID_RECORD), and holds at most `max_decompressed_bytes` of decompressed input.
The varint fast paths are written out in the loops, as a call per field would double their cost.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from enum import IntEnum
from struct import Struct, error
from typing import Final, NamedTuple

from tidelog.protocol import compression as codecs
from tidelog.protocol.errors import ErrorCode, KafkaError
from tidelog.protocol.record_batch import (
    CONTROL_FLAG,
    CREATE_TIME,
    HEADER,
    HEADER_SIZE,
    LOG_APPEND_TIME,
    LOG_APPEND_TIME_FLAG,
    LOG_OVERHEAD,
    MAGIC,
    NO_LEADER_EPOCH,
    NO_PRODUCER_EPOCH,
    NO_PRODUCER_ID,
    NO_SEQUENCE,
    NO_TIMESTAMP,
    TRANSACTIONAL_FLAG,
    BatchHeader,
    Buffer,
    CorruptRecord,
    check_magic,
    iter_headers,
    read_header,
    write_crc,
)

Headers = Sequence[tuple[str, bytes | None]]

MIN_RECORD_BYTES: Final = 7
"""Length, attributes, two deltas, two sizes and a header count of one byte each."""

_MAX_INT64: Final = 2**63 - 1


class Record(NamedTuple):
    """One record. `timestamp` in ms since 1970; a header is (key, value), its value may be null."""

    offset: int
    timestamp: int
    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes | None], ...] = ()


RecordLike = Record | tuple[int, bytes | None, bytes | None, Headers]
"""What goes into a batch: a Record, whose offset is not looked at, or (timestamp, key, value, headers)."""


def encode_varint(value: int) -> bytes:
    """Zigzag varint of a signed number of at most 64 bits (Kafka's ByteUtils.writeVarlong)."""
    number = (value << 1) ^ (value >> 63)
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


_TABLE_SIZE: Final = 2048
# The varints of 0 to 2047, and that of -1, the length of a null, where index -1 finds it.
_VARINTS: Final = [encode_varint(value) for value in range(_TABLE_SIZE)] + [encode_varint(-1)]
_ZIGZAG: Final = tuple((number >> 1) ^ -(number & 1) for number in range(0x4000))


def _read_varint(data: bytes, position: int, max_bits: int) -> tuple[int, int]:
    """The slow path: a varint of up to `max_bits` (32 or 64). Raises IndexError past the end."""
    number = shift = 0
    while True:
        byte = data[position]
        position += 1
        number |= (byte & 0x7F) << shift
        if byte < 0x80:
            break
        shift += 7
        if shift >= max_bits:
            raise KafkaError(ErrorCode.INVALID_RECORD, f"varint of more than {max_bits} bits")
    number &= (1 << max_bits) - 1
    return (number >> 1) ^ -(number & 1), position


def _encode_headers(headers: Headers) -> bytes:
    count = len(headers)
    varints = _VARINTS
    out = varints[count] if count < 2048 else encode_varint(count)
    for key, value in headers:
        name = key.encode()
        key_size = len(name)
        value_size = -1 if value is None else len(value)
        out = b"".join(
            (
                out,
                varints[key_size] if key_size < 2048 else encode_varint(key_size),
                name,
                varints[value_size] if value_size < 2048 else encode_varint(value_size),
                value or b"",
            )
        )
    return out


class BatchBuilder:
    """One growing batch: `append` until it says no, then `build`.

    The size limit counts the batch uncompressed, header included; the first record is always taken, however large, so
    that a single big record can travel (Java's hasRoomFor). One thread at a time.
    """

    __slots__ = (
        "_base_timestamp",
        "_buffer",
        "_compressed",
        "_flags",
        "_level",
        "_max_size_bytes",
        "_max_timestamp",
        "base_offset",
        "compression",
        "leader_epoch",
        "record_count",
    )

    def __init__(
        self,
        max_size_bytes: int,
        compression: int = codecs.NONE,
        level: int | None = None,
        *,
        timestamp_type: int = CREATE_TIME,
        transactional: bool = False,
        control: bool = False,
        base_offset: int = 0,
        leader_epoch: int = NO_LEADER_EPOCH,
    ) -> None:
        assert compression in codecs.NAMES, compression
        self.compression = compression
        self.base_offset = base_offset
        self.leader_epoch = leader_epoch
        self.record_count = 0
        self._level = level
        self._max_size_bytes = max_size_bytes
        self._flags = (
            compression
            | (LOG_APPEND_TIME_FLAG if timestamp_type == LOG_APPEND_TIME else 0)
            | (TRANSACTIONAL_FLAG if transactional else 0)
            | (CONTROL_FLAG if control else 0)
        )
        self._buffer = bytearray(HEADER_SIZE)
        self._base_timestamp = NO_TIMESTAMP
        self._max_timestamp = NO_TIMESTAMP
        self._compressed: tuple[int, bytes] = (0, b"")

    @property
    def size_bytes(self) -> int:
        """Of the batch as it stands, uncompressed, header included."""
        return len(self._buffer)

    @property
    def max_timestamp(self) -> int:
        return self._max_timestamp

    def append(self, timestamp: int, key: bytes | None, value: bytes | None, headers: Headers = ()) -> bool:
        """Add a record; False, and nothing changed, when the batch has no room for it."""
        count = self.record_count
        if count:
            delta = timestamp - self._base_timestamp
        else:
            self._base_timestamp = timestamp
            delta = 0
        key_size = -1 if key is None else len(key)
        value_size = -1 if value is None else len(value)
        varints = _VARINTS
        body = b"".join(
            (
                b"\x00",
                varints[delta] if 0 <= delta < 2048 else encode_varint(delta),
                varints[count] if count < 2048 else encode_varint(count),
                varints[key_size] if key_size < 2048 else encode_varint(key_size),
                key or b"",
                varints[value_size] if value_size < 2048 else encode_varint(value_size),
                value or b"",
                _encode_headers(headers) if headers else b"\x00",
            )
        )
        size = len(body)
        prefix = varints[size] if size < 2048 else encode_varint(size)
        buffer = self._buffer
        if count and len(buffer) + len(prefix) + size > self._max_size_bytes:
            return False
        buffer += prefix
        buffer += body
        self.record_count = count + 1
        if timestamp > self._max_timestamp:
            self._max_timestamp = timestamp
        return True

    def build(
        self,
        producer_id: int = NO_PRODUCER_ID,
        producer_epoch: int = NO_PRODUCER_EPOCH,
        base_sequence: int = NO_SEQUENCE,
    ) -> bytearray:
        """The finished batch, header and CRC included.

        May be called again, say with another sequence; uncompressed batches then reuse the same bytearray, so the one
        returned before changes too. Records cannot be added while a view of it is held.
        """
        count = self.record_count
        if self.compression == codecs.NONE:
            batch = self._buffer
        else:
            if self._compressed[0] != count:
                payload = memoryview(self._buffer)[HEADER_SIZE:]
                self._compressed = (count, codecs.compress(self.compression, payload, self._level))
                payload.release()
            batch = bytearray(HEADER_SIZE)
            batch += self._compressed[1]
        size_bytes = len(batch)
        HEADER.pack_into(
            batch,
            0,
            self.base_offset,
            size_bytes - LOG_OVERHEAD,
            self.leader_epoch,
            MAGIC,
            0,
            self._flags,
            max(count - 1, 0),
            self._base_timestamp,
            self._max_timestamp,
            producer_id,
            producer_epoch,
            base_sequence,
            count,
        )
        write_crc(batch, 0, size_bytes)
        return batch


_UNLIMITED: Final = 2**31 - 1


def encode_batch(
    records: Iterable[RecordLike],
    *,
    base_offset: int = 0,
    leader_epoch: int = NO_LEADER_EPOCH,
    compression: int = codecs.NONE,
    level: int | None = None,
    timestamp_type: int = CREATE_TIME,
    producer_id: int = NO_PRODUCER_ID,
    producer_epoch: int = NO_PRODUCER_EPOCH,
    base_sequence: int = NO_SEQUENCE,
    transactional: bool = False,
    control: bool = False,
) -> bytearray:
    """One batch of `records`, at offsets from `base_offset` on without gaps, header and CRC included.

    With timestamp type LogAppendTime the batch's time is the greatest timestamp given. At least one record.
    """
    builder = BatchBuilder(
        _UNLIMITED,
        compression,
        level,
        timestamp_type=timestamp_type,
        transactional=transactional,
        control=control,
        base_offset=base_offset,
        leader_epoch=leader_epoch,
    )
    for record in records:
        fits = builder.append(*record[-4:]) if isinstance(record, Record) else builder.append(*record)
        assert fits, "a batch of more than 2 GiB"
    assert builder.record_count, "a batch without records"
    return builder.build(producer_id, producer_epoch, base_sequence)


def decode_batch(
    buffer: Buffer,
    position: int = 0,
    header: BatchHeader | None = None,
    max_decompressed_bytes: int = codecs.DEFAULT_MAX_BYTES,
) -> list[Record]:
    """All records of the batch at `position`, with absolute offsets and timestamps. The CRC is not looked at.

    Raises KafkaError: CORRUPT_MESSAGE for a batch that is not whole or does not decompress, INVALID_RECORD for records
    that are not what the header says, MESSAGE_TOO_LARGE past `max_decompressed_bytes`.
    """
    if header is None:
        header = read_header(buffer, position)
    check_magic(header)
    return decode_section(record_section(buffer, position, header, max_decompressed_bytes), header)


def decode_section(data: bytes, header: BatchHeader) -> list[Record]:
    """The records of a batch from its decompressed record section. Raises INVALID_RECORD as `decode_batch` does."""
    count = header.record_count
    if count < 0 or count * MIN_RECORD_BYTES > len(data):
        raise KafkaError(ErrorCode.INVALID_RECORD, f"{count} records in {len(data)} bytes")
    # Far enough from the ends that no delta of 32 bits, in a timestamp of 14, leaves the 64 bits.
    if abs(header.base_offset) > _MAX_INT64 - 2**31 or abs(header.base_timestamp) > _MAX_INT64 - 2**13:
        raise KafkaError(ErrorCode.INVALID_RECORD, "base offset or timestamp at the end of 64 bits")
    try:
        records, end = _decode_records(data, header)
    except IndexError:
        raise KafkaError(ErrorCode.INVALID_RECORD, "records end before their batch says") from None
    if end != len(data):
        raise KafkaError(ErrorCode.INVALID_RECORD, f"{len(data) - end} bytes left after the last of {count} records")
    return records


def record_section(buffer: Buffer, position: int, header: BatchHeader, max_bytes: int) -> bytes:
    """The bytes of a batch's records, decompressed. The magic has been checked."""
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


def _decode_records(data: bytes, header: BatchHeader) -> tuple[list[Record], int]:
    """The records in `data` and where they end. Running past the end raises IndexError."""
    base_offset = header.base_offset
    base_timestamp = header.base_timestamp
    append_time = header.max_timestamp if header.timestamp_type == LOG_APPEND_TIME else None
    zigzag = _ZIGZAG
    new = tuple.__new__
    records: list[Record] = []
    add = records.append
    limit = len(data)
    position = 0
    for _ in range(header.record_count):
        byte = data[position]
        if byte < 0x80:
            size = zigzag[byte]
            position += 1
        elif (second := data[position + 1]) < 0x80:
            size = zigzag[byte & 0x7F | second << 7]
            position += 2
        else:
            size, position = _read_varint(data, position, 32)
        end = position + size
        if size < MIN_RECORD_BYTES - 1 or end > limit:
            raise KafkaError(ErrorCode.INVALID_RECORD, f"record of {size} bytes where {limit - position} are left")
        position += 1  # the attributes are unused

        byte = data[position]
        if byte < 0x80:
            timestamp = base_timestamp + zigzag[byte]
            position += 1
        elif (second := data[position + 1]) < 0x80:
            timestamp = base_timestamp + zigzag[byte & 0x7F | second << 7]
            position += 2
        else:
            delta, position = _read_varint(data, position, 64)
            timestamp = base_timestamp + delta
            if not -_MAX_INT64 <= timestamp <= _MAX_INT64:
                raise KafkaError(ErrorCode.INVALID_RECORD, f"timestamp {timestamp} needs more than 64 bits")

        byte = data[position]
        if byte < 0x80:
            offset = base_offset + zigzag[byte]
            position += 1
        elif (second := data[position + 1]) < 0x80:
            offset = base_offset + zigzag[byte & 0x7F | second << 7]
            position += 2
        else:
            delta, position = _read_varint(data, position, 32)
            offset = base_offset + delta

        byte = data[position]
        if byte < 0x80:
            size = zigzag[byte]
            position += 1
        else:
            size, position = _read_varint(data, position, 32)
        if size < 0:
            key = None
        else:
            key = data[position : position + size]
            position += size

        byte = data[position]
        if byte < 0x80:
            size = zigzag[byte]
            position += 1
        elif (second := data[position + 1]) < 0x80:
            size = zigzag[byte & 0x7F | second << 7]
            position += 2
        else:
            size, position = _read_varint(data, position, 32)
        if size < 0:
            value = None
        else:
            value = data[position : position + size]
            position += size

        if position < end and data[position] == 0:
            position += 1
            headers: tuple[tuple[str, bytes | None], ...] = ()
        else:
            headers, position = _decode_headers(data, position, end)
        # Every size above is checked here at once: a slice past the end is short, but the position is not.
        if position != end:
            raise KafkaError(ErrorCode.INVALID_RECORD, f"record fields end {position - end} bytes off the record's end")
        add(new(Record, (offset, timestamp if append_time is None else append_time, key, value, headers)))
    return records, position


def _decode_headers(data: bytes, position: int, end: int) -> tuple[tuple[tuple[str, bytes | None], ...], int]:
    count, position = _read_varint(data, position, 32)
    if not 0 <= count <= end - position:
        raise KafkaError(ErrorCode.INVALID_RECORD, f"{count} record headers in {end - position} bytes")
    headers: list[tuple[str, bytes | None]] = []
    for _ in range(count):
        size, position = _read_varint(data, position, 32)
        if not 0 <= size <= end - position:
            raise KafkaError(ErrorCode.INVALID_RECORD, f"header key of {size} bytes")
        key = str(data[position : position + size], "utf-8", "replace")  # as Java: a reader must get past it
        size, position = _read_varint(data, position + size, 32)
        if size < 0:
            headers.append((key, None))
            continue
        headers.append((key, data[position : position + size]))
        position += size
        if position > end:
            raise KafkaError(ErrorCode.INVALID_RECORD, f"header value of {size} bytes")
    return tuple(headers), position


def iter_data_batches(buffer: Buffer, aborted: Iterable[tuple[int, int]] = ()) -> Iterator[tuple[int, BatchHeader]]:
    """Position and header of each whole batch that a reader is to see, in order.

    Left out are control batches and, for read_committed, the batches of aborted transactions: `aborted` is what the
    fetch response listed, (producer id, first offset) pairs. As in Kafka's CompletedFetch, a transaction is
    dropped from its first offset to its producer's next ABORT marker.
    """
    waiting = sorted(((first_offset, producer_id) for producer_id, first_offset in aborted), reverse=True)
    dropped: set[int] = set()
    for position, header in iter_headers(buffer):
        while waiting and waiting[-1][0] <= header.last_offset:
            dropped.add(waiting.pop()[1])
        if header.is_control:
            if header.producer_id in dropped:
                marker = decode_batch(buffer, position, header)
                if marker and control_record_type(marker[0].key) is ControlRecordType.ABORT:
                    dropped.discard(header.producer_id)
        elif not (header.is_transactional and header.producer_id in dropped):
            yield position, header


def iter_records(buffer: Buffer, max_decompressed_bytes: int = codecs.DEFAULT_MAX_BYTES) -> Iterator[Record]:
    """The records of all batches in `buffer`, in order, without control records; a torn last batch is left out."""
    for position, header in iter_data_batches(buffer):
        yield from decode_batch(buffer, position, header, max_decompressed_bytes)


class ControlRecordType(IntEnum):
    """What a control record says (org.apache.kafka.common.record.ControlRecordType)."""

    ABORT = 0
    COMMIT = 1
    LEADER_CHANGE = 2
    SNAPSHOT_HEADER = 3
    SNAPSHOT_FOOTER = 4
    KRAFT_VERSION = 5
    KRAFT_VOTERS = 6
    UNKNOWN = -1


_CONTROL_KEY: Final = Struct(">hh")
_END_TXN_VALUE: Final = Struct(">hi")


def control_record_type(key: bytes | None) -> ControlRecordType:
    """The type a control record's key states; types from the future are UNKNOWN, to be skipped.

    Raises INVALID_RECORD for a key that is too short or of a negative version.
    """
    try:
        version, kind = _CONTROL_KEY.unpack_from(key or b"")
    except error:
        raise KafkaError(ErrorCode.INVALID_RECORD, "control record key of fewer than 4 bytes") from None
    if version < 0:
        raise KafkaError(ErrorCode.INVALID_RECORD, f"control record key of version {version}")
    return ControlRecordType(kind) if 0 <= kind <= 6 else ControlRecordType.UNKNOWN


def encode_control_batch(
    kind: ControlRecordType,
    value: bytes,
    *,
    timestamp: int,
    base_offset: int = 0,
    leader_epoch: int = NO_LEADER_EPOCH,
    producer_id: int = NO_PRODUCER_ID,
    producer_epoch: int = NO_PRODUCER_EPOCH,
) -> bytearray:
    """A control batch of one record whose value is the message of that type, encoded by the caller.

    Transactional for the two markers that end a transaction, not for the quorum's own records, as Kafka writes them.
    """
    assert kind is not ControlRecordType.UNKNOWN
    return encode_batch(
        [(timestamp, _CONTROL_KEY.pack(0, kind), value, ())],
        base_offset=base_offset,
        leader_epoch=leader_epoch,
        producer_id=producer_id,
        producer_epoch=producer_epoch,
        transactional=kind in (ControlRecordType.ABORT, ControlRecordType.COMMIT),
        control=True,
    )


def encode_end_txn_value(coordinator_epoch: int) -> bytes:
    """The value of an ABORT or COMMIT record: version 0 and the transaction coordinator's epoch."""
    return _END_TXN_VALUE.pack(0, coordinator_epoch)


def decode_end_txn_value(value: bytes | None) -> int:
    """The coordinator epoch in the value of an ABORT or COMMIT record. Raises INVALID_RECORD when malformed."""
    try:
        version, coordinator_epoch = _END_TXN_VALUE.unpack_from(value or b"")
    except error:
        raise KafkaError(ErrorCode.INVALID_RECORD, "end transaction marker of fewer than 6 bytes") from None
    if version < 0:
        raise KafkaError(ErrorCode.INVALID_RECORD, f"end transaction marker of version {version}")
    epoch: int = coordinator_epoch
    return epoch
