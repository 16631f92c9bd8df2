"""Builds record batches: records in, one complete batch out, header and CRC included.

`records.py` reads batches; the client sends them. Invariant: every record that `append` accepted is
in the batch that `build` returns. That batch is within the size limit, unless its first record
alone is larger.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, cast

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

_ATTRIBUTES_AND_DELTA: Final = [b"\x00" + varint for varint in VARINTS]
_NULL_AND_SIZE: Final = [VARINTS[-1] + varint for varint in VARINTS]
"""The size of a key that is null, and the size of the value."""


def _encode_body(delta: int, count: int, key: bytes | None, value: bytes | None, headers: Headers) -> bytes:
    """A record without its size in front."""
    key_size = -1 if key is None else len(key)
    value_size = -1 if value is None else len(value)
    varints = VARINTS
    return b"".join(
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
    """One open batch: call `append` until it returns False, then `build`.

    The size limit counts the uncompressed batch, header included. The first record is always
    accepted, so that a single large record can be sent (Java's hasRoomFor). Not thread-safe.
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
        self._flags = compression
        if timestamp_type == LOG_APPEND_TIME:
            self._flags |= LOG_APPEND_TIME_FLAG
        if transactional:
            self._flags |= TRANSACTIONAL_FLAG
        if control:
            self._flags |= CONTROL_FLAG
        self._buffer = bytearray(HEADER_SIZE)
        self._base_timestamp = self._max_timestamp = NO_TIMESTAMP
        self._compressed: tuple[int, bytes] = (0, b"")

    @property
    def size_bytes(self) -> int:
        """The present size of the batch, uncompressed, header included."""
        return len(self._buffer)

    @property
    def max_timestamp(self) -> int:
        return self._max_timestamp

    def append(self, timestamp: int, key: bytes | None, value: bytes | None, headers: Headers = ()) -> bool:
        """Add a record. Returns False, and changes nothing, when the record does not fit."""
        count = self.record_count
        if not count:
            self._base_timestamp = timestamp
        delta = timestamp - self._base_timestamp
        varints = VARINTS
        # One comparison for all numbers that must be in the tables: nearly always they are.
        if headers or value is None or not 0 <= delta | count | (size := len(value)) < 2048:
            body = _encode_body(delta, count, key, value, headers)
        elif key is None:
            body = b"".join((_ATTRIBUTES_AND_DELTA[delta], varints[count], _NULL_AND_SIZE[size], value, b"\x00"))
        else:
            key_size = len(key)
            body = b"".join(
                (
                    _ATTRIBUTES_AND_DELTA[delta],
                    varints[count],
                    varints[key_size] if key_size < 2048 else encode_varint(key_size),
                    key,
                    varints[size],
                    value,
                    b"\x00",
                )
            )
        size = len(body)
        prefix = varints[size] if size < 2048 else encode_varint(size)
        buffer = self._buffer
        if len(buffer) + len(prefix) + size > self._max_size_bytes and count:
            return False
        buffer += prefix
        buffer += body
        self.record_count = count + 1
        if timestamp > self._max_timestamp:
            self._max_timestamp = timestamp
        return True

    def adopt(self, buffer: memoryview, record_count: int, base_timestamp: int, max_timestamp: int) -> None:
        """Take encoded records instead of single ones: HEADER_SIZE free bytes, then the records.

        Requires an empty builder, offset deltas from 0 on and at least one record. No record can be
        added then.
        """
        assert not self.record_count
        assert record_count > 0
        self._buffer = cast(bytearray, buffer)  # all that `build` does with it
        self.record_count = record_count
        self._base_timestamp = base_timestamp
        self._max_timestamp = max_timestamp

    def build(
        self,
        producer_id: int = NO_PRODUCER_ID,
        producer_epoch: int = NO_PRODUCER_EPOCH,
        base_sequence: int = NO_SEQUENCE,
    ) -> bytearray:
        """The complete batch, header and CRC included.

        It may be called again, for example with another sequence. An uncompressed batch then reuses
        the same bytearray, so the earlier result changes too. No record can be added while a view
        of it exists.
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


def encode_one(
    timestamp: int,
    key: bytes,
    value: bytes | None,
    *,
    producer_id: int = NO_PRODUCER_ID,
    producer_epoch: int = NO_PRODUCER_EPOCH,
    flags: int = 0,
) -> bytearray:
    """`encode_batch` of one record with a key, uncompressed, in a third of the time: coordinators write many."""
    key_size, value_size = len(key), -1 if value is None else len(value)
    varints = VARINTS
    body = b"".join(
        (
            b"\x00\x00\x00",  # attributes, timestamp delta, offset delta
            varints[key_size] if key_size < 2048 else encode_varint(key_size),
            key,
            varints[value_size] if value_size < 2048 else encode_varint(value_size),
            value or b"",
            b"\x00",
        )
    )
    size = len(body)
    prefix = varints[size] if size < 2048 else encode_varint(size)
    size_bytes = HEADER_SIZE + len(prefix) + size
    batch = bytearray(
        HEADER.pack(
            0, size_bytes - LOG_OVERHEAD, NO_LEADER_EPOCH, MAGIC, 0, flags, 0, timestamp,
            max(timestamp, NO_TIMESTAMP), producer_id, producer_epoch, NO_SEQUENCE, 1,
        )
    )  # fmt: skip
    batch += prefix
    batch += body
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
    """One batch of `records`, at consecutive offsets from `base_offset` on, header and CRC
    included.

    Requires at least one record. With timestamp type LogAppendTime the batch's time is the largest
    timestamp.
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
