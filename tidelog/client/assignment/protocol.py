"""The bytes that group members exchange through the coordinator, in Java's formats.

Subscription and assignment are `ConsumerProtocolSubscription` and `ConsumerProtocolAssignment`; the
sticky assignor's user data has its own schema. The broker does not read them. Pure. Invariant: the
data of a Java, librdkafka or Python member is readable in every version. A later version is read as
the newest known one, and its added fields are ignored.
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
"""Member id -> its assigned partitions."""


class MemberSubscription(NamedTuple):
    """The subscription of one member. `owned` and `generation` are from its last assignment."""

    topics: tuple[str, ...]
    owned: tuple[TopicPartition, ...] = ()
    generation: int = UNKNOWN_GENERATION
    rack: str | None = None
    user_data: bytes | None = None
    instance_id: str | None = None
    """The static member's `group.instance.id`, which JoinGroup carries beside the subscription."""


def ordered_members(members: Mapping[str, MemberSubscription]) -> list[str]:
    """Static members by instance id, then dynamic members by member id, so that restarts keep the
    order (KIP-345).
    """
    return sorted(
        members,
        key=lambda member: (members[member].instance_id is None, members[member].instance_id or member, member),
    )


class _StickyUserData(Message, versions="0-1"):
    previous_assignment: list[ConsumerProtocolTopicPartition] = array(ConsumerProtocolTopicPartition)
    generation: int = int32("1+", default=UNKNOWN_GENERATION, ignorable=True)


def by_topic(partitions: Iterable[TopicPartition]) -> dict[str, list[int]]:
    """Partition numbers by topic. Topics and numbers keep their order."""
    numbers_by_topic: dict[str, list[int]] = {}
    for topic, partition in partitions:
        numbers_by_topic.setdefault(topic, []).append(partition)
    return numbers_by_topic


def _to_topics(partitions: Iterable[TopicPartition]) -> list[ConsumerProtocolTopicPartition]:
    return [
        ConsumerProtocolTopicPartition(topic=topic, partitions=numbers)
        for topic, numbers in by_topic(partitions).items()
    ]


def _to_partitions(topics: Iterable[ConsumerProtocolTopicPartition]) -> tuple[TopicPartition, ...]:
    return tuple(TopicPartition(entry.topic, number) for entry in topics for number in entry.partitions)


def encode_subscription(subscription: MemberSubscription) -> bytes:
    """The metadata of one JoinGroup protocol."""
    return consumer_protocol.encode_subscription(
        ConsumerProtocolSubscription(
            topics=list(subscription.topics),
            user_data=subscription.user_data,
            owned_partitions=_to_topics(subscription.owned),
            generation_id=subscription.generation,
            rack_id=subscription.rack,
        )
    )


def decode_subscription(data: bytes, instance_id: str | None = None) -> MemberSubscription:
    """The subscription of a member; raises MalformedMessage."""
    message, _ = consumer_protocol.decode_subscription(data)
    return MemberSubscription(
        tuple(message.topics),
        _to_partitions(message.owned_partitions),
        message.generation_id,
        message.rack_id,
        message.user_data,
        instance_id,
    )


def encode_assignment(partitions: Iterable[TopicPartition]) -> bytes:
    """The assignment the leader sends one member through SyncGroup."""
    return consumer_protocol.encode_assignment(ConsumerProtocolAssignment(assigned_partitions=_to_topics(partitions)))


def decode_assignment(data: bytes) -> tuple[TopicPartition, ...]:
    """The partitions of an assignment; empty bytes are an empty assignment.

    Raises MalformedMessage.
    """
    return _to_partitions(consumer_protocol.decode_assignment(data).assigned_partitions) if data else ()


def encode_sticky_user_data(owned: Iterable[TopicPartition], generation: int) -> bytes:
    """The user data (version 1) of Java's `StickyAssignor`: the member's last assignment."""
    return _StickyUserData(previous_assignment=_to_topics(owned), generation=generation).encode(1)


def decode_sticky_user_data(data: bytes | None) -> tuple[tuple[TopicPartition, ...], int]:
    """(owned, generation). Version 0 has no generation.

    Unreadable data counts as no ownership, as in Java.
    """
    for version in (1, 0):
        try:
            message, _ = _StickyUserData.read(data or b"", 0, version)
        except MalformedMessage:
            continue
        return _to_partitions(message.previous_assignment), message.generation
    return (), UNKNOWN_GENERATION
