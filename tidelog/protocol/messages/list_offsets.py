"""ListOffsets, key 2, versions 1-11: the offset at a timestamp, at the ends, or at the largest
timestamp.

Version 2 brings isolation levels, 4 leader epochs, 6 is flexible, 7 asks for the largest timestamp
(-3), 8 for the local log's start (-4), 9 for the tiered end (-5), 10 carries a timeout, 11 asks for
the earliest offset not yet tiered.
"""

from __future__ import annotations

from tidelog.protocol.codec.schema import Message, array, int8, int16, int32, int64, string


class ListOffsetsPartition(Message):
    partition_index: int = int32()
    current_leader_epoch: int = int32("4+", default=-1, ignorable=True)
    timestamp: int = int64()


class ListOffsetsTopic(Message):
    name: str = string()
    partitions: list[ListOffsetsPartition] = array(ListOffsetsPartition)


class ListOffsetsRequest(Message, key=2, versions="1-11", flexible="6+"):
    replica_id: int = int32()
    isolation_level: int = int8("2+")
    topics: list[ListOffsetsTopic] = array(ListOffsetsTopic)
    timeout_ms: int = int32("10+", ignorable=True)


class ListOffsetsPartitionResponse(Message):
    partition_index: int = int32()
    error_code: int = int16()
    timestamp: int = int64(default=-1)
    offset: int = int64(default=-1)
    leader_epoch: int = int32("4+", default=-1)


class ListOffsetsTopicResponse(Message):
    name: str = string()
    partitions: list[ListOffsetsPartitionResponse] = array(ListOffsetsPartitionResponse)


class ListOffsetsResponse(Message, key=2, versions="1-11", flexible="6+"):
    throttle_time_ms: int = int32("2+", ignorable=True)
    topics: list[ListOffsetsTopicResponse] = array(ListOffsetsTopicResponse)
