"""OffsetDelete, key 47, version 0: delete committed offsets of a group; never flexible."""

from __future__ import annotations

from tidelog.protocol.codec.schema import Message, array, int16, int32, string


class OffsetDeleteRequestPartition(Message):
    partition_index: int = int32()


class OffsetDeleteRequestTopic(Message):
    name: str = string()
    partitions: list[OffsetDeleteRequestPartition] = array(OffsetDeleteRequestPartition)


class OffsetDeleteRequest(Message, key=47, versions="0"):
    group_id: str = string()
    topics: list[OffsetDeleteRequestTopic] = array(OffsetDeleteRequestTopic)


class OffsetDeleteResponsePartition(Message):
    partition_index: int = int32()
    error_code: int = int16()


class OffsetDeleteResponseTopic(Message):
    name: str = string()
    partitions: list[OffsetDeleteResponsePartition] = array(OffsetDeleteResponsePartition)


class OffsetDeleteResponse(Message, key=47, versions="0"):
    error_code: int = int16()
    throttle_time_ms: int = int32(ignorable=True)
    topics: list[OffsetDeleteResponseTopic] = array(OffsetDeleteResponseTopic)
