"""The records of `__transaction_state`: encoded to key and value bytes, and decoded.

This module chooses the version of a value (as Kafka 4.3 does) and turns its fields into the
coordinator's state. `protocol/messages/transaction_records` declares the fields. Invariant: decoding
an encoded record gives an equal record, except for the last producer epoch, which is not stored, and
for what version 0 cannot hold. Source: Kafka's `TransactionLog`.
"""

from __future__ import annotations

from typing import NamedTuple

from tidelog.broker.coordinators.transaction.states import TransactionState
from tidelog.broker.coordinators.transaction.transitions import TransactionMetadata
from tidelog.protocol.errors import MalformedMessage
from tidelog.protocol.messages.coordinator_records import decode_value, encode_key, encode_value
from tidelog.protocol.messages.transaction_records import (
    PartitionsSchema,
    TransactionLogKey,
    TransactionLogValue,
    decode_key,
)

# The first transaction version that is stored in version 1 of the value.
FLEXIBLE_VALUE_VERSION = 1


class TransactionRecord(NamedTuple):
    """The state of a transactional id; the value None deletes the id."""

    transactional_id: str
    metadata: TransactionMetadata | None


def encode(record: TransactionRecord, transaction_version: int) -> tuple[bytes, bytes | None]:
    """`transaction_version`: the finalized level of the feature."""
    key = encode_key(TransactionLogKey(transactional_id=record.transactional_id))
    metadata = record.metadata
    if metadata is None:
        return key, None
    value = TransactionLogValue(
        producer_id=metadata.producer_id,
        producer_epoch=metadata.producer_epoch,
        transaction_timeout_ms=metadata.timeout_ms,
        transaction_status=metadata.state,
        # Kafka writes null in state EMPTY, and no other state without a list.
        transaction_partitions=None if metadata.state is TransactionState.EMPTY else _by_topic(metadata),
        transaction_last_update_timestamp_ms=metadata.update_ms,
        transaction_start_timestamp_ms=metadata.start_ms,
    )
    if transaction_version < FLEXIBLE_VALUE_VERSION:
        return key, encode_value(value, 0)
    value.previous_producer_id = metadata.previous_producer_id
    value.next_producer_id = metadata.next_producer_id
    value.client_transaction_version = metadata.client_version
    return key, encode_value(value, 1)


def decode(key: bytes, value: bytes | None) -> TransactionRecord | None:
    """None for an unknown kind of record. Raises MalformedMessage."""
    decoded_key = decode_key(key)
    if decoded_key is None:
        return None
    if value is None:
        return TransactionRecord(decoded_key.transactional_id, None)
    fields = decode_value(TransactionLogValue, value)
    try:
        state = TransactionState(fields.transaction_status)
    except ValueError:
        raise MalformedMessage(f"unknown transaction status {fields.transaction_status}") from None
    return TransactionRecord(
        decoded_key.transactional_id,
        TransactionMetadata(
            producer_id=fields.producer_id,
            previous_producer_id=fields.previous_producer_id,
            next_producer_id=fields.next_producer_id,
            producer_epoch=fields.producer_epoch,
            timeout_ms=fields.transaction_timeout_ms,
            state=state,
            partitions=frozenset(
                (topic.topic, partition)
                for topic in fields.transaction_partitions or ()
                for partition in topic.partition_ids
            ),
            start_ms=fields.transaction_start_timestamp_ms,
            update_ms=fields.transaction_last_update_timestamp_ms,
            client_version=fields.client_transaction_version,
        ),
    )


def _by_topic(metadata: TransactionMetadata) -> list[PartitionsSchema]:
    topics: dict[str, list[int]] = {}
    for topic, partition in sorted(metadata.partitions):
        topics.setdefault(topic, []).append(partition)
    return [PartitionsSchema(topic=topic, partition_ids=partitions) for topic, partitions in topics.items()]
