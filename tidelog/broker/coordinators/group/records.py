"""The records of `__consumer_offsets`: built from state, encoded to key and value bytes, and
decoded.

This module chooses the version of each record (as Kafka 4.3 does) and reads the kind from the key.
`protocol/messages/group_records` declares the fields. Invariant: decoding an encoded record gives
an equal record. A record of an unknown kind (of the newer group protocols) decodes to None, so
that the load goes on. Layout: `docs/formats/consumer_offsets.md`. Source: Kafka's
`GroupCoordinatorRecordHelpers` and `GroupCoordinatorRecordSerde`.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from struct import Struct, error
from typing import TYPE_CHECKING, NamedTuple

from tidelog.protocol.errors import MalformedMessage
from tidelog.protocol.messages.group_records import (
    GroupMetadataKey,
    GroupMetadataValue,
    MemberMetadata,
    OffsetCommitKey,
    OffsetCommitValue,
)

if TYPE_CHECKING:
    from tidelog.broker.coordinators.group.group import Group

OFFSET_COMMIT = 1
LEGACY_OFFSET_COMMIT = 0  # written by versions before 0.9; it has the same fields
GROUP_METADATA = 2

GROUP_METADATA_VERSION = 3
OFFSET_COMMIT_VERSION = 4
OFFSET_COMMIT_VERSION_WITH_EXPIRY = 1

_VERSION = Struct(">h")
_PARTITION = Struct(">i")
_OFFSET_AND_LEADER_EPOCH = Struct(">hqi")  # behind the version
_TIMESTAMP = Struct(">q")
_NO_TOPIC_ID = bytes(16)
_NO_TAGS, _TOPIC_ID_TAG = b"\x00", b"\x01\x00\x10"  # one tagged field, the tag 0, 16 bytes
_SHORT_METADATA_BYTES_MAX = 126  # with one byte of length

OFFSET_RECORD_BYTES_MIN = 41
"""The size of a commit's record in a batch, in bytes, without the names of its group and topic and its metadata."""


class GroupMetadata(NamedTuple):
    """A classic group in one generation; the value None deletes the group."""

    group_id: str
    value: GroupMetadataValue | None


class OffsetCommit(NamedTuple):
    """A group's committed offset of one partition; the value None deletes the offset."""

    group_id: str
    topic: str
    partition: int
    value: OffsetCommitValue | None


def group_metadata(group: Group, assignments: Mapping[str, bytes]) -> GroupMetadata:
    """The record of the group's present state, with the assignments from `assignments`."""
    name = group.protocol_name or ""
    return GroupMetadata(
        group.group_id,
        GroupMetadataValue(
            protocol_type=group.protocol_type or "",
            generation=group.generation,
            protocol=group.protocol_name,
            leader=group.leader,
            current_state_timestamp=group.state_since_ms,
            members=[
                MemberMetadata(
                    member_id=member.member_id,
                    group_instance_id=member.instance_id,
                    client_id=member.client_id,
                    client_host=member.client_host,
                    rebalance_timeout=member.rebalance_timeout_ms,
                    session_timeout=member.session_timeout_ms,
                    subscription=member.protocols.get(name, b""),
                    assignment=assignments.get(member.member_id, b""),
                )
                for member in group.members.values()
            ],
        ),
    )


def encode(record: GroupMetadata | OffsetCommit) -> tuple[bytes, bytes | None]:
    if isinstance(record, OffsetCommit):
        key_bytes = _key_of_topic(record.group_id, record.topic) + _PARTITION.pack(record.partition)
        return key_bytes, None if record.value is None else _encode_offset(record.value)
    key_bytes = _VERSION.pack(GROUP_METADATA) + GroupMetadataKey(group=record.group_id).encode(0)
    if record.value is None:
        return key_bytes, None
    return key_bytes, _VERSION.pack(GROUP_METADATA_VERSION) + record.value.encode(GROUP_METADATA_VERSION)


@lru_cache(maxsize=16)
def _key_of_topic(group_id: str, topic: str) -> bytes:
    """The key of a commit, without the partition at its end."""
    key = OffsetCommitKey(group=group_id, topic=topic, partition=0)
    return _VERSION.pack(OFFSET_COMMIT) + key.encode(0)[: -_PARTITION.size]


def _encode_offset(value: OffsetCommitValue) -> bytes:
    """As `value.encode`, in a fraction of its time: a request may commit ten thousand offsets."""
    metadata = value.metadata.encode()
    # Only version 1 has an expiry time; clients before 2.1 set one.
    expires = value.expire_timestamp != -1
    if expires or len(metadata) > _SHORT_METADATA_BYTES_MAX:
        version = OFFSET_COMMIT_VERSION_WITH_EXPIRY if expires else OFFSET_COMMIT_VERSION
        return _VERSION.pack(version) + value.encode(version)
    has_topic_id = value.topic_id != _NO_TOPIC_ID
    return b"".join(
        (
            _OFFSET_AND_LEADER_EPOCH.pack(OFFSET_COMMIT_VERSION, value.offset, value.leader_epoch),
            (len(metadata) + 1).to_bytes(1),
            metadata,
            _TIMESTAMP.pack(value.commit_timestamp),
            _TOPIC_ID_TAG + value.topic_id if has_topic_id else _NO_TAGS,
        )
    )


def decode(key: bytes, value: bytes | None) -> GroupMetadata | OffsetCommit | None:
    """None for an unknown kind of record. Raises MalformedMessage, KafkaError(UNSUPPORTED_VERSION)."""
    try:
        (kind,) = _VERSION.unpack_from(key)
        version = -1 if value is None else _VERSION.unpack_from(value)[0]
    except error:
        raise MalformedMessage("a coordinator record starts with two bytes of version") from None
    if kind in (OFFSET_COMMIT, LEGACY_OFFSET_COMMIT):
        offset_key = OffsetCommitKey.decode(key[2:], 0)
        offset = None if value is None else OffsetCommitValue.decode(value[2:], version)
        return OffsetCommit(offset_key.group, offset_key.topic, offset_key.partition, offset)
    if kind == GROUP_METADATA:
        group_id = GroupMetadataKey.decode(key[2:], 0).group
        return GroupMetadata(group_id, None if value is None else GroupMetadataValue.decode(value[2:], version))
    return None
