"""OffsetFetch, key 9, versions 1-10: read the committed offsets of a group.

Version 2 allows all topics (null) and adds a top-level error, 5 adds leader epochs, 6 is flexible,
7 waits for pending transactions, 8 allows many groups, 9 serves the newer groups (KIP-848), 10
names topics by id.
"""

from __future__ import annotations

from tidelog.protocol.codec.schema import Message, array, boolean, int16, int32, int64, string, uuid


class OffsetFetchRequestTopic(Message):
    name: str = string()
    partition_indexes: list[int] = array(int32)


class OffsetFetchRequestTopics(Message):
    name: str = string("8-9", ignorable=True)
    topic_id: bytes = uuid("10+", ignorable=True)
    partition_indexes: list[int] = array(int32)


class OffsetFetchRequestGroup(Message):
    group_id: str = string()
    member_id: str | None = string("9+", nullable="9+", default=None, ignorable=True)
    member_epoch: int = int32("9+", default=-1, ignorable=True)
    topics: list[OffsetFetchRequestTopics] | None = array(OffsetFetchRequestTopics, nullable="8+")


class OffsetFetchRequest(Message, key=9, versions="1-10", flexible="6+"):
    group_id: str = string("1-7")
    topics: list[OffsetFetchRequestTopic] | None = array(OffsetFetchRequestTopic, "1-7", nullable="2-7")
    groups: list[OffsetFetchRequestGroup] = array(OffsetFetchRequestGroup, "8+")
    require_stable: bool = boolean("7+")


class OffsetFetchResponsePartition(Message):
    partition_index: int = int32()
    committed_offset: int = int64()
    committed_leader_epoch: int = int32("5-7", default=-1, ignorable=True)
    metadata: str | None = string(nullable="1-7")
    error_code: int = int16()


class OffsetFetchResponseTopic(Message):
    name: str = string()
    partitions: list[OffsetFetchResponsePartition] = array(OffsetFetchResponsePartition)


class OffsetFetchResponsePartitions(Message):
    partition_index: int = int32()
    committed_offset: int = int64()
    committed_leader_epoch: int = int32(default=-1)
    metadata: str | None = string(nullable="8+")
    error_code: int = int16()


class OffsetFetchResponseTopics(Message):
    name: str = string("8-9", ignorable=True)
    topic_id: bytes = uuid("10+", ignorable=True)
    partitions: list[OffsetFetchResponsePartitions] = array(OffsetFetchResponsePartitions)


class OffsetFetchResponseGroup(Message):
    group_id: str = string()
    topics: list[OffsetFetchResponseTopics] = array(OffsetFetchResponseTopics)
    error_code: int = int16()


class OffsetFetchResponse(Message, key=9, versions="1-10", flexible="6+"):
    throttle_time_ms: int = int32("3+", ignorable=True)
    topics: list[OffsetFetchResponseTopic] = array(OffsetFetchResponseTopic, "1-7")
    error_code: int = int16("2-7", ignorable=True)
    groups: list[OffsetFetchResponseGroup] = array(OffsetFetchResponseGroup, "8+")
