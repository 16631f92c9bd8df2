"""Records of `__transaction_state`: the state of each transactional id.

A key starts with its type (int16, 0), a value with its version (int16); a null value is a
tombstone. Kafka writes version 0 of the value with transaction version 0, and version 1, which is
flexible, from transaction version 1 on.
"""

from __future__ import annotations

from tidelog.protocol.codec.schema import Bytes, Message, array, int8, int16, int32, int64, string
from tidelog.protocol.messages.coordinator_records import PREFIX_BYTES, prefix_of


class TransactionLogKey(Message, key=0, versions="0"):
    transactional_id: str = string()


class PartitionsSchema(Message):
    topic: str = string()
    partition_ids: list[int] = array(int32)


class TransactionLogValue(Message, key=0, versions="0-1", flexible="1+"):
    producer_id: int = int64()
    previous_producer_id: int = int64("1+", default=-1, tag=0)
    next_producer_id: int = int64("1+", default=-1, tag=1)
    producer_epoch: int = int16()
    next_producer_epoch: int = int16("1+", default=-1, tag=3)
    transaction_timeout_ms: int = int32()
    transaction_status: int = int8()
    transaction_partitions: list[PartitionsSchema] | None = array(PartitionsSchema, nullable="0+")
    transaction_last_update_timestamp_ms: int = int64()
    transaction_start_timestamp_ms: int = int64()
    client_transaction_version: int = int16("1+", default=0, tag=2)


def decode_key(data: Bytes) -> TransactionLogKey | None:
    """None for a key of another type. Raises MalformedMessage."""
    return TransactionLogKey.decode(data[PREFIX_BYTES:], 0) if prefix_of(data) == TransactionLogKey.API_KEY else None
