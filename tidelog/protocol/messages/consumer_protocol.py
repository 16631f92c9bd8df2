"""Messages between the consumers of a group in JoinGroup and SyncGroup, opaque to the broker;
versions 0-3.

On the wire an int16 version precedes the message. Version 1 adds the owned partitions, 2 the
generation of that ownership, 3 the rack. As in Kafka's consumers, a reader treats a version above 3
as 3 and ignores the added bytes. Kafka has two equal `TopicPartition` structs here; this module has
one.
"""

from __future__ import annotations

from struct import Struct

from tidelog.protocol.codec.schema import Bytes, Message, array, byte_string, int32, string
from tidelog.protocol.errors import MalformedMessage

_VERSION = Struct(">h")


class ConsumerProtocolTopicPartition(Message):
    topic: str = string()
    partitions: list[int] = array(int32)


class ConsumerProtocolSubscription(Message, versions="0-3"):
    topics: list[str] = array(string)
    user_data: bytes | None = byte_string(nullable="0+", default=None)
    owned_partitions: list[ConsumerProtocolTopicPartition] = array(ConsumerProtocolTopicPartition, "1+", ignorable=True)
    generation_id: int = int32("2+", default=-1, ignorable=True)
    rack_id: str | None = string("3+", nullable="3+", default=None, ignorable=True)


class ConsumerProtocolAssignment(Message, versions="0-3"):
    assigned_partitions: list[ConsumerProtocolTopicPartition] = array(ConsumerProtocolTopicPartition)
    user_data: bytes | None = byte_string(nullable="0+", default=None)


def encode_subscription(subscription: ConsumerProtocolSubscription, version: int = 3) -> bytes:
    """A member's metadata for JoinGroup."""
    return _VERSION.pack(version) + subscription.encode(version)


def decode_subscription(data: Bytes) -> tuple[ConsumerProtocolSubscription, int]:
    """The subscription and its version. Raises MalformedMessage."""
    version = _written_version(data)
    return ConsumerProtocolSubscription.read(data, _VERSION.size, min(version, 3))[0], version


def encode_assignment(assignment: ConsumerProtocolAssignment, version: int = 3) -> bytes:
    """A member's assignment for SyncGroup."""
    return _VERSION.pack(version) + assignment.encode(version)


def decode_assignment(data: Bytes) -> ConsumerProtocolAssignment:
    """The assignment. Raises MalformedMessage.

    The caller handles the empty bytes of a member without assignment.
    """
    return ConsumerProtocolAssignment.read(data, _VERSION.size, min(_written_version(data), 3))[0]


def _written_version(data: Bytes) -> int:
    if len(data) < _VERSION.size:
        raise MalformedMessage("consumer protocol bytes without a version")
    version: int = _VERSION.unpack_from(data)[0]
    if version < 0:
        raise MalformedMessage(f"consumer protocol version {version}")
    return version
