"""The bytes that members of a classic consumer group exchange through the coordinator, in Java's formats.

Subscription and assignment are `ConsumerProtocolSubscription` and `ConsumerProtocolAssignment`; the sticky assignor's
user data is a schema of its own. The broker looks into none of them. Pure. Invariant: what a Java, librdkafka or Python
member wrote is read whatever its version: a later one as the newest known, with the fields it added left unread.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from tidelog.client.model import TopicPartition
from tidelog.protocol.codec.schema import Message, array, int32
from tidelog.protocol.errors import MalformedMessage
from tidelog.protocol.messages import consumer_protocol
from tidelog.protocol.messages.consumer_protocol import (
    ConsumerProtocolAssignment,
    ConsumerProtocolSubscription,
    ConsumerProtocolTopicPartition,
)

PROTOCOL_TYPE = "consumer"
UNKNOWN_GENERATION = -1

Assignment = dict[str, list[TopicPartition]]
"""Member id -> the partitions it is given."""


class MemberSubscription(NamedTuple):
    """What one member tells the leader of its group; `owned` and `generation` are of its last assignment."""

    topics: tuple[str, ...]
    owned: tuple[TopicPartition, ...] = ()
    generation: int = UNKNOWN_GENERATION
    rack: str | None = None
    user_data: bytes | None = None
    instance_id: str | None = None
    """The static member's `group.instance.id`; it travels beside the subscription, in JoinGroup."""


def ordered_members(members: Mapping[str, MemberSubscription]) -> list[str]:
    """Static members by instance id first, then dynamic ones by member id: restarts do not shuffle (KIP-345)."""
    return sorted(
        members,
        key=lambda member: (members[member].instance_id is None, members[member].instance_id or member, member),
    )


class _StickyUserData(Message, versions="0-1"):
    previous_assignment: list[ConsumerProtocolTopicPartition] = array(ConsumerProtocolTopicPartition)
    generation: int = int32("1+", default=UNKNOWN_GENERATION, ignorable=True)


def by_topic(partitions: Iterable[TopicPartition]) -> dict[str, list[int]]:
    """Partition numbers per topic, topics and numbers in the order given."""
    grouped: dict[str, list[int]] = {}
    for topic, partition in partitions:
        grouped.setdefault(topic, []).append(partition)
    return grouped


def _grouped(partitions: Iterable[TopicPartition]) -> list[ConsumerProtocolTopicPartition]:
    return [
        ConsumerProtocolTopicPartition(topic=topic, partitions=numbers)
        for topic, numbers in by_topic(partitions).items()
    ]


def _flat(topics: Iterable[ConsumerProtocolTopicPartition]) -> tuple[TopicPartition, ...]:
    return tuple(TopicPartition(each.topic, number) for each in topics for number in each.partitions)


def encode_subscription(subscription: MemberSubscription) -> bytes:
    """The metadata of one JoinGroup protocol."""
    return consumer_protocol.encode_subscription(
        ConsumerProtocolSubscription(
            topics=list(subscription.topics),
            user_data=subscription.user_data,
            owned_partitions=_grouped(subscription.owned),
            generation_id=subscription.generation,
            rack_id=subscription.rack,
        )
    )


def decode_subscription(data: bytes, instance_id: str | None = None) -> MemberSubscription:
    """The subscription of a member; raises MalformedMessage."""
    message, _ = consumer_protocol.decode_subscription(data)
    return MemberSubscription(
        tuple(message.topics),
        _flat(message.owned_partitions),
        message.generation_id,
        message.rack_id,
        message.user_data,
        instance_id,
    )


def encode_assignment(partitions: Iterable[TopicPartition]) -> bytes:
    """The assignment the leader sends one member through SyncGroup."""
    return consumer_protocol.encode_assignment(ConsumerProtocolAssignment(assigned_partitions=_grouped(partitions)))


def decode_assignment(data: bytes) -> tuple[TopicPartition, ...]:
    """The partitions of an assignment; empty bytes are an empty assignment. Raises MalformedMessage."""
    return _flat(consumer_protocol.decode_assignment(data).assigned_partitions) if data else ()


def encode_sticky_user_data(owned: Iterable[TopicPartition], generation: int) -> bytes:
    """What Java's `StickyAssignor` keeps of the member's last assignment (its user data, version 1)."""
    return _StickyUserData(previous_assignment=_grouped(owned), generation=generation).encode(1)


def decode_sticky_user_data(data: bytes | None) -> tuple[tuple[TopicPartition, ...], int]:
    """(owned, generation); version 0 had no generation, and what cannot be read counts as nothing owned, as in Java."""
    for version in (1, 0):
        try:
            message, _ = _StickyUserData.read(data or b"", 0, version)
        except MalformedMessage:
            continue
        return _flat(message.previous_assignment), message.generation
    return (), UNKNOWN_GENERATION
