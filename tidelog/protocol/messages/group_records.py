"""Records of `__consumer_offsets`: committed offsets and the classic groups' metadata.

A key starts with its type (int16), a value with its version (int16); a null value is a tombstone.
Kafka's key type 0 (LegacyOffsetCommitKey) is read as the equal type 1, and type 1 is written. Keys
of the newer groups (types 3 and up) are not declared. The coordinator chooses the version of a
value.
"""

from __future__ import annotations

from tidelog.protocol.codec.schema import Bytes, Message, array, byte_string, int32, int64, string, uuid
from tidelog.protocol.messages.coordinator_records import PREFIX_BYTES, prefix_of

_LEGACY_OFFSET_COMMIT_KEY = 0


class OffsetCommitKey(Message, key=1, versions="0"):
    group: str = string()
    topic: str = string()
    partition: int = int32()


class OffsetCommitValue(Message, key=1, versions="0-4", flexible="4+"):
    offset: int = int64()
    leader_epoch: int = int32("3+", default=-1, ignorable=True)
    metadata: str = string()
    commit_timestamp: int = int64()
    expire_timestamp: int = int64("1", default=-1, ignorable=True)
    topic_id: bytes = uuid("4+", ignorable=True, tag=0)


class GroupMetadataKey(Message, key=2, versions="0"):
    group: str = string()


class MemberMetadata(Message):
    member_id: str = string()
    group_instance_id: str | None = string("3+", nullable="3+", default=None, ignorable=True)
    client_id: str = string()
    client_host: str = string()
    rebalance_timeout: int = int32("1+", default=-1, ignorable=True)
    session_timeout: int = int32()
    subscription: bytes = byte_string()
    assignment: bytes = byte_string()


class GroupMetadataValue(Message, key=2, versions="0-4", flexible="4+"):
    protocol_type: str = string()
    generation: int = int32()
    protocol: str | None = string(nullable="0+")
    leader: str | None = string(nullable="0+")
    current_state_timestamp: int = int64("2+", default=-1, ignorable=True)
    members: list[MemberMetadata] = array(MemberMetadata)


_KEYS: dict[int, type[OffsetCommitKey] | type[GroupMetadataKey]] = {
    _LEGACY_OFFSET_COMMIT_KEY: OffsetCommitKey,
    1: OffsetCommitKey,
    2: GroupMetadataKey,
}


def decode_key(data: Bytes) -> OffsetCommitKey | GroupMetadataKey | None:
    """None for a key of another type (newer groups). Raises MalformedMessage."""
    kind = _KEYS.get(prefix_of(data))
    return None if kind is None else kind.decode(data[PREFIX_BYTES:], 0)
