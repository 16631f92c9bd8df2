"""ElectLeaders, key 43, versions 0-2: elect the preferred replica, or from version 1 on any
(unclean), as leader.

Version 2 is flexible. A null list of partitions means all.
"""

from __future__ import annotations

from tidelog.protocol.codec.schema import Message, array, int8, int16, int32, string


class TopicPartitions(Message):
    topic: str = string()
    partitions: list[int] = array(int32)


class ElectLeadersRequest(Message, key=43, versions="0-2", flexible="2+"):
    election_type: int = int8("1+")
    topic_partitions: list[TopicPartitions] | None = array(TopicPartitions, nullable="0+")
    timeout_ms: int = int32(default=60000)


class PartitionResult(Message):
    partition_id: int = int32()
    error_code: int = int16()
    error_message: str | None = string(nullable="0+")


class ReplicaElectionResult(Message):
    topic: str = string()
    partition_result: list[PartitionResult] = array(PartitionResult)


class ElectLeadersResponse(Message, key=43, versions="0-2", flexible="2+"):
    throttle_time_ms: int = int32()
    error_code: int = int16("1+")
    replica_election_results: list[ReplicaElectionResult] = array(ReplicaElectionResult)
