"""Record batches being built: records in, one finished batch out, header and CRC included.

Reading them is `records.py`'s, sending and retrying the client's. Invariant: what `append` took is in the batch that
`build` returns, and that batch is no larger than the limit unless its first record alone is.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from tidelog.protocol.batches import compression as codecs
from tidelog.protocol.batches.record import VARINTS, Headers, Record, RecordLike, encode_varint
from tidelog.protocol.batches.record_batch import (
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
    write_crc,
)


def _encode_headers(headers: Headers) -> bytes:
    count = len(headers)
    varints = VARINTS
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
        varints = VARINTS
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
