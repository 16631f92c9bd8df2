"""The header of a record batch (magic 2): read it, check the CRC, set fields in place.

Here: the 61 header bytes only. `records.py` decodes the records; `docs/formats/record_batch.md` has
the byte layout. Nothing here copies a batch. The CRC covers the bytes from the attributes to the
end of the batch, so the broker sets base offset and leader epoch without a new CRC.
"""

from __future__ import annotations

from collections.abc import Iterator
from struct import Struct, error
from typing import Final, NamedTuple

from tidelog.protocol.batches.crc import crc32c
from tidelog.protocol.errors import ErrorCode, KafkaError

Buffer = bytes | bytearray | memoryview

HEADER_SIZE: Final = 61
LOG_OVERHEAD: Final = 12
"""The bytes of base offset and batch length, which are not part of the batch length."""
MAGIC: Final = 2
MIN_BATCH_LENGTH: Final = HEADER_SIZE - LOG_OVERHEAD

LENGTH_OFFSET: Final = 8
LEADER_EPOCH_OFFSET: Final = 12
MAGIC_OFFSET: Final = 16
CRC_OFFSET: Final = 17
ATTRIBUTES_OFFSET: Final = 21
ATTRIBUTES_LOW_OFFSET: Final = 22
"""The byte of the attributes that holds all defined flags."""
MAX_TIMESTAMP_OFFSET: Final = 35

COMPRESSION_MASK: Final = 0x07
LOG_APPEND_TIME_FLAG: Final = 0x08
TRANSACTIONAL_FLAG: Final = 0x10
CONTROL_FLAG: Final = 0x20
DELETE_HORIZON_FLAG: Final = 0x40

NO_TIMESTAMP: Final = -1
NO_PRODUCER_ID: Final = -1
NO_PRODUCER_EPOCH: Final = -1
NO_SEQUENCE: Final = -1
NO_LEADER_EPOCH: Final = -1

CREATE_TIME: Final = 0
LOG_APPEND_TIME: Final = 1

HEADER: Final = Struct(">qiibIhiqqqhii")
_CRC: Final = Struct(">I")
_INT16: Final = Struct(">h")
_INT32: Final = Struct(">i")
_INT64: Final = Struct(">q")

_MAX_SEQUENCE: Final = 2**31 - 1


class CorruptRecord(KafkaError):
    """An incomplete or malformed record batch (Kafka's CorruptRecordException; CORRUPT_MESSAGE)."""

    def __init__(self, message: str) -> None:
        super().__init__(ErrorCode.CORRUPT_MESSAGE, message)


class BatchHeader(NamedTuple):
    """The header fields in wire order. Sizes in bytes, timestamps in ms since 1970."""

    base_offset: int
    batch_length: int
    partition_leader_epoch: int
    magic: int
    crc: int
    attributes: int
    last_offset_delta: int
    base_timestamp: int
    max_timestamp: int
    producer_id: int
    producer_epoch: int
    base_sequence: int
    record_count: int

    @property
    def size_bytes(self) -> int:
        """The size of the whole batch, header included."""
        return self[1] + LOG_OVERHEAD

    @property
    def last_offset(self) -> int:
        return self[0] + self[6]

    @property
    def next_offset(self) -> int:
        return self[0] + self[6] + 1

    @property
    def last_sequence(self) -> int:
        """The sequence of the last record.

        It wraps to 0 after 2**31 - 1 (Kafka's incrementSequence).
        """
        return NO_SEQUENCE if self[11] == NO_SEQUENCE else increment_sequence(self[11], self[6])

    @property
    def compression(self) -> int:
        """0 none, 1 gzip, 2 snappy, 3 lz4, 4 zstd; 5 to 7 are unassigned and not checked here."""
        return self[5] & COMPRESSION_MASK

    @property
    def timestamp_type(self) -> int:
        """0 CreateTime, 1 LogAppendTime: `max_timestamp` is the time of every record then."""
        return self[5] >> 3 & 1

    @property
    def is_transactional(self) -> bool:
        return self[5] & TRANSACTIONAL_FLAG != 0

    @property
    def is_control(self) -> bool:
        return self[5] & CONTROL_FLAG != 0

    @property
    def has_delete_horizon(self) -> bool:
        """Whether the base timestamp is the time from which tombstones and markers may be removed
        (KIP-534).
        """
        return self[5] & DELETE_HORIZON_FLAG != 0


def increment_sequence(sequence: int, by: int) -> int:
    """The sequence `by` records later. As in Kafka, 0 follows 2**31 - 1."""
    return sequence + by if sequence <= _MAX_SEQUENCE - by else by - (_MAX_SEQUENCE - sequence) - 1


# Module-level names: this runs for every incoming batch, and attribute lookups would cost a third
# of it.
_unpack_header = HEADER.unpack_from
_as_tuple = tuple.__new__


def read_header(buffer: Buffer, position: int = 0) -> BatchHeader:
    """Read the header at `position`. Checks only that it is complete and that the length is
    possible.

    Raises CorruptRecord for fewer than 61 bytes or a batch length that cannot hold a header,
    INVALID_RECORD for the short messages of magic 0 and 1, which Kafka 4 no longer accepts. Other
    values of the magic are returned unchecked; `check_magic` refuses them.
    """
    try:
        header: BatchHeader = _as_tuple(BatchHeader, _unpack_header(buffer, position))
    except error:
        refuse_old_format(buffer, position)
        raise CorruptRecord(f"{len(buffer) - position} bytes cannot hold a batch header of {HEADER_SIZE}") from None
    if header[1] < MIN_BATCH_LENGTH:
        refuse_old_format(buffer, position)
        raise CorruptRecord(f"batch length {header[1]} is below the least possible, {MIN_BATCH_LENGTH}")
    return header


def check_magic(header: BatchHeader) -> None:
    """Raise INVALID_RECORD for the formats of magic 0 and 1, CorruptRecord for an unknown magic."""
    if header.magic != MAGIC:
        if header.magic in (0, 1):
            raise KafkaError(ErrorCode.INVALID_RECORD, _old_format(header.magic))
        raise CorruptRecord(f"unknown magic {header.magic}")


def refuse_old_format(buffer: Buffer, position: int = 0) -> None:
    """Raise INVALID_RECORD for what begins as a message of magic 0 or 1, which may be shorter than a header."""
    if position >= 0 and position + MAGIC_OFFSET < len(buffer) and buffer[position + MAGIC_OFFSET] in (0, 1):
        raise KafkaError(ErrorCode.INVALID_RECORD, _old_format(buffer[position + MAGIC_OFFSET]))


def _old_format(magic: int) -> str:
    return f"only record batches of magic {MAGIC} are taken, this is a message set of magic {magic}"


def check_crc(buffer: Buffer, position: int, header: BatchHeader) -> bool:
    """Whether the batch is complete and its CRC-32C equals the stored one."""
    end = position + header[1] + LOG_OVERHEAD
    view = buffer if buffer.__class__ is memoryview else memoryview(buffer)
    return end <= len(view) and crc32c(view[position + ATTRIBUTES_OFFSET : end]) == header[4]


_pack_offset = _INT64.pack_into
_pack_epoch = _INT32.pack_into


def stamp(buffer: bytearray | memoryview, position: int, base_offset: int, leader_epoch: int) -> None:
    """Write base offset and partition leader epoch in place. The CRC covers neither."""
    _pack_offset(buffer, position, base_offset)
    _pack_epoch(buffer, position + LEADER_EPOCH_OFFSET, leader_epoch)


stamp_head = Struct(">qii").pack_into
"""The same for a known length: (buffer, position, base offset, batch length, leader epoch)."""


def stamp_log_append_time(
    buffer: bytearray | memoryview, position: int, header: BatchHeader, now_ms: int
) -> BatchHeader:
    """Mark the batch as LogAppendTime at `now_ms` in place, update its CRC, return the new header.

    As Kafka's DefaultRecordBatch.setMaxTimestamp: the attribute bit and the maximum timestamp
    change; the base timestamp and the records stay.
    """
    attributes = header.attributes | LOG_APPEND_TIME_FLAG
    _INT16.pack_into(buffer, position + ATTRIBUTES_OFFSET, attributes)
    _INT64.pack_into(buffer, position + MAX_TIMESTAMP_OFFSET, now_ms)
    crc = write_crc(buffer, position, header.size_bytes)
    return header._replace(attributes=attributes, max_timestamp=now_ms, crc=crc)


def stamp_create_time(buffer: bytearray | memoryview, position: int, header: BatchHeader) -> BatchHeader:
    """Mark the batch as CreateTime in place, update its CRC, and return the new header."""
    attributes = header.attributes & ~LOG_APPEND_TIME_FLAG
    _INT16.pack_into(buffer, position + ATTRIBUTES_OFFSET, attributes)
    crc = write_crc(buffer, position, header.size_bytes)
    return header._replace(attributes=attributes, crc=crc)


def write_crc(buffer: bytearray | memoryview, position: int, size_bytes: int) -> int:
    """Compute the CRC of the batch of `size_bytes` at `position`, store it in the header and return
    it.
    """
    crc = crc32c(memoryview(buffer)[position + ATTRIBUTES_OFFSET : position + size_bytes])
    _CRC.pack_into(buffer, position + CRC_OFFSET, crc)
    return crc


def iter_headers(buffer: Buffer, position: int = 0, end: int | None = None) -> Iterator[tuple[int, BatchHeader]]:
    """Yield position and header of each batch in `buffer[position:end]`.

    Stops silently before an incomplete last batch: a fetch may end with one. Raises CorruptRecord
    for a complete header with an impossible length, INVALID_RECORD for an old message set.
    """
    limit = len(buffer) if end is None else min(end, len(buffer))
    while limit - position >= HEADER_SIZE:
        header = read_header(buffer, position)
        next_position = position + header[1] + LOG_OVERHEAD
        if next_position > limit:
            return
        yield position, header
        position = next_position
