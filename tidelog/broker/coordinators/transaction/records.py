"""The records of `__transaction_state`: encoded to key and value bytes, and decoded.

This module chooses the version of a value (as Kafka 4.3 does) and turns its fields into the
coordinator's state. `protocol/messages/transaction_records` declares the fields. Invariant: decoding
an encoded record gives an equal record, except for the last producer epoch, which is not stored, and
for what version 0 cannot hold. Source: Kafka's `TransactionLog`.
"""

from __future__ import annotations

from functools import lru_cache
from struct import Struct
from typing import NamedTuple

from tidelog.broker.coordinators.transaction.states import TransactionState
from tidelog.broker.coordinators.transaction.transitions import NO_PRODUCER_ID, TopicPartition, TransactionMetadata
from tidelog.protocol.codec.primitives import write_uvarint
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
# Larger transactions take the general way.
PACKED_PARTITIONS_MAX = 100
# Keys of longer ids are not worth their memory.
CACHED_CHARACTERS_MAX = 100
CACHED_KEYS_MAX = 4096
CACHED_PARTITIONS_MAX = 256  # sets of partitions

# A value of version 1: its version, the fields before the partitions, and those after them.
_HEAD = Struct(">hqhib")
_TIMES = Struct(">qqB")  # and the number of tags
_TIMES_AND_USUAL_TAGS = Struct(">qqBbbqbbh")  # the previous id and the version of the client
_PARTITION = Struct(">i")
_NULL = b"\x00"  # a compact array that is null
_NO_TAGS = b"\x00"
_TAGGED_ID = Struct(">bbq")
_TAGGED_VERSION = Struct(">bbh")


class TransactionRecord(NamedTuple):
    """The state of a transactional id; the value None deletes the id."""

    transactional_id: str
    metadata: TransactionMetadata | None


def encode(record: TransactionRecord, transaction_version: int) -> tuple[bytes, bytes | None]:
    """`transaction_version`: the finalized level of the feature."""
    transactional_id, metadata = record
    is_short = len(transactional_id) <= CACHED_CHARACTERS_MAX
    key = _cached_key(transactional_id) if is_short else _key(transactional_id)
    if metadata is None:
        return key, None
    if transaction_version >= FLEXIBLE_VALUE_VERSION and len(metadata.partitions) <= PACKED_PARTITIONS_MAX:
        return key, _packed_value(metadata)
    return key, value_by_declaration(metadata, transaction_version)


def _key(transactional_id: str) -> bytes:
    return encode_key(TransactionLogKey(transactional_id=transactional_id))


_cached_key = lru_cache(maxsize=CACHED_KEYS_MAX)(_key)


def value_by_declaration(metadata: TransactionMetadata, transaction_version: int) -> bytes:
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
        return encode_value(value, 0)
    value.previous_producer_id = metadata.previous_producer_id
    value.next_producer_id = metadata.next_producer_id
    value.client_transaction_version = metadata.client_version
    return encode_value(value, 1)


def _packed_value(metadata: TransactionMetadata) -> bytes:
    """The bytes of `value_by_declaration` in version 1, in a third of its time: each transaction has three of them."""
    producer_id, timeout_ms, update_ms, state, epoch, _, previous_id, next_id, partitions, start_ms, version = metadata
    head = _HEAD.pack(1, producer_id, epoch, timeout_ms, state)
    packed = _NULL if state is TransactionState.EMPTY else _packed_partitions(partitions)
    if version and previous_id != NO_PRODUCER_ID and next_id == NO_PRODUCER_ID:
        return head + packed + _TIMES_AND_USUAL_TAGS.pack(update_ms, start_ms, 2, 0, 8, previous_id, 2, 2, version)
    tags: list[bytes] = []
    if previous_id != NO_PRODUCER_ID:
        tags.append(_TAGGED_ID.pack(0, 8, previous_id))
    if next_id != NO_PRODUCER_ID:
        tags.append(_TAGGED_ID.pack(1, 8, next_id))
    if version:
        tags.append(_TAGGED_VERSION.pack(2, 2, version))
    return b"".join((head, packed, _TIMES.pack(update_ms, start_ms, len(tags)), *tags))


@lru_cache(maxsize=CACHED_PARTITIONS_MAX)
def _packed_partitions(partitions: frozenset[TopicPartition]) -> bytes:
    """Two of a transaction's three records have the same."""
    out = bytearray()
    by_topic: dict[str, list[int]] = {}
    for topic, partition in sorted(partitions) if len(partitions) > 1 else partitions:
        by_topic.setdefault(topic, []).append(partition)
    write_uvarint(out, len(by_topic) + 1)
    for topic, indexes in by_topic.items():
        name = topic.encode()
        write_uvarint(out, len(name) + 1)
        out += name
        write_uvarint(out, len(indexes) + 1)
        for index in indexes:
            out += _PARTITION.pack(index)
        out += _NO_TAGS
    return bytes(out)


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
