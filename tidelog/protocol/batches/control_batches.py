"""Control records: what brokers say to each other and to clients inside a partition's log.

Key and batch here; the messages in the values are `messages/control_records.py`'s, but for the two markers that end a
transaction, whose value is small and read by every consumer.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from struct import Struct, error
from typing import Final

from tidelog.protocol.batches.batch_builder import encode_batch
from tidelog.protocol.batches.record_batch import NO_LEADER_EPOCH, NO_PRODUCER_EPOCH, NO_PRODUCER_ID
from tidelog.protocol.errors import ErrorCode, KafkaError


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


def encode_control_records(
    records: Sequence[tuple[ControlRecordType, bytes]],
    *,
    timestamp: int,
    base_offset: int = 0,
    leader_epoch: int = NO_LEADER_EPOCH,
) -> bytearray:
    """One control batch of several of the quorum's own records: each its type and its encoded value."""
    return encode_batch(
        [(timestamp, _CONTROL_KEY.pack(0, kind), value, ()) for kind, value in records],
        base_offset=base_offset,
        leader_epoch=leader_epoch,
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
