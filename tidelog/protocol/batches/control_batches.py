"""Control records: messages of brokers to each other and to clients inside a partition's log.

Here: the key, the batch, and the values of the two markers that end a transaction, which every
consumer reads. `messages/control_records.py` has the other values.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from struct import Struct, error
from typing import Final

from tidelog.protocol.batches.batch_builder import encode_batch, encode_one
from tidelog.protocol.batches.record_batch import (
    CONTROL_FLAG,
    HEADER_SIZE,
    NO_LEADER_EPOCH,
    NO_PRODUCER_EPOCH,
    NO_PRODUCER_ID,
    TRANSACTIONAL_FLAG,
    Buffer,
)
from tidelog.protocol.errors import ErrorCode, KafkaError


class ControlRecordType(IntEnum):
    """The type of a control record (org.apache.kafka.common.record.ControlRecordType)."""

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
# The only record of a marker, as brokers write it: its size, attributes and deltas, then key, value and no headers.
_MARKER_RECORD: Final = Struct(">BBBBBhhBhiB")
_MARKER_CONSTANTS: Final = (32, 0, 0, 0, 8, 0, 12, 0, 0)
MARKER_BYTES: Final = HEADER_SIZE + _MARKER_RECORD.size
_MARKER_KEYS: Final = [_CONTROL_KEY.pack(0, record_type) for record_type in (0, 1)]  # ABORT, COMMIT


def control_record_type(key: bytes | None) -> ControlRecordType:
    """The type in a control record's key. Later types are UNKNOWN, for readers to skip.

    Raises INVALID_RECORD for a key that is too short or has a negative version.
    """
    try:
        version, record_type = _CONTROL_KEY.unpack_from(key or b"")
    except error:
        raise KafkaError(ErrorCode.INVALID_RECORD, "control record key of fewer than 4 bytes") from None
    if version < 0:
        raise KafkaError(ErrorCode.INVALID_RECORD, f"control record key of version {version}")
    return ControlRecordType(record_type) if 0 <= record_type <= 6 else ControlRecordType.UNKNOWN


def encode_control_batch(
    record_type: ControlRecordType,
    value: bytes,
    *,
    timestamp: int,
    base_offset: int = 0,
    leader_epoch: int = NO_LEADER_EPOCH,
    producer_id: int = NO_PRODUCER_ID,
    producer_epoch: int = NO_PRODUCER_EPOCH,
) -> bytearray:
    """A control batch of one record. `value` is the encoded message of that type.

    As in Kafka, the two markers that end a transaction are transactional; the quorum's records are
    not.
    """
    assert record_type is not ControlRecordType.UNKNOWN
    if record_type <= ControlRecordType.COMMIT and not base_offset and leader_epoch == NO_LEADER_EPOCH:
        return encode_one(
            timestamp, _MARKER_KEYS[record_type], value, producer_id=producer_id, producer_epoch=producer_epoch,
            flags=TRANSACTIONAL_FLAG | CONTROL_FLAG,
        )  # fmt: skip
    return encode_batch(
        [(timestamp, _CONTROL_KEY.pack(0, record_type), value, ())],
        base_offset=base_offset,
        leader_epoch=leader_epoch,
        producer_id=producer_id,
        producer_epoch=producer_epoch,
        transactional=record_type in (ControlRecordType.ABORT, ControlRecordType.COMMIT),
        control=True,
    )


def encode_control_records(
    records: Sequence[tuple[ControlRecordType, bytes]],
    *,
    timestamp: int,
    base_offset: int = 0,
    leader_epoch: int = NO_LEADER_EPOCH,
) -> bytearray:
    """One control batch of several records of the quorum, each with its type and encoded value."""
    return encode_batch(
        [(timestamp, _CONTROL_KEY.pack(0, record_type), value, ()) for record_type, value in records],
        base_offset=base_offset,
        leader_epoch=leader_epoch,
        control=True,
    )


def read_usual_marker(batch: Buffer) -> tuple[int, int] | None:
    """(type, coordinator epoch) of a batch with one marker in the form in which brokers write it; None for another."""
    if len(batch) != MARKER_BYTES:
        return None
    size, attributes, time_delta, delta, key_size, version, kind, value_size, value_version, epoch, headers = (
        _MARKER_RECORD.unpack_from(batch, HEADER_SIZE)
    )
    fields = (size, attributes, time_delta, delta, key_size, version, value_size, value_version, headers)
    return (kind, epoch) if fields == _MARKER_CONSTANTS and kind in (0, 1) else None


def encode_end_txn_value(coordinator_epoch: int) -> bytes:
    """The value of an ABORT or COMMIT record: version 0 and the transaction coordinator's epoch."""
    return _END_TXN_VALUE.pack(0, coordinator_epoch)


def decode_end_txn_value(value: bytes | None) -> int:
    """The coordinator epoch in the value of an ABORT or COMMIT record.

    Raises INVALID_RECORD when malformed.
    """
    try:
        version, coordinator_epoch = _END_TXN_VALUE.unpack_from(value or b"")
    except error:
        raise KafkaError(ErrorCode.INVALID_RECORD, "end transaction marker of fewer than 6 bytes") from None
    if version < 0:
        raise KafkaError(ErrorCode.INVALID_RECORD, f"end transaction marker of version {version}")
    epoch: int = coordinator_epoch
    return epoch
