"""EndQuorumEpoch, key 54, versions 0-1: a leader of the metadata log resigns and names preferred
successors.

Version 1 is flexible and names the preferred candidates by directory too (KIP-853).
"""

from __future__ import annotations

from tidelog.protocol.codec.schema import Message, array, int16, int32, string, uint16, uuid


class ReplicaInfo(Message):
    candidate_id: int = int32()
    candidate_directory_id: bytes = uuid()


class EndQuorumEpochRequestPartitionData(Message):
    partition_index: int = int32()
    leader_id: int = int32()
    leader_epoch: int = int32()
    preferred_successors: list[int] = array(int32, "0", ignorable=True)
    preferred_candidates: list[ReplicaInfo] = array(ReplicaInfo, "1+", ignorable=True)


class EndQuorumEpochRequestTopicData(Message):
    topic_name: str = string()
    partitions: list[EndQuorumEpochRequestPartitionData] = array(EndQuorumEpochRequestPartitionData)


class LeaderEndpoint(Message):
    name: str = string()
    host: str = string()
    port: int = uint16()


class EndQuorumEpochRequest(Message, key=54, versions="0-1", flexible="1+"):
    cluster_id: str | None = string(nullable="0+", default=None)
    topics: list[EndQuorumEpochRequestTopicData] = array(EndQuorumEpochRequestTopicData)
    leader_endpoints: list[LeaderEndpoint] = array(LeaderEndpoint, "1+", ignorable=True)


class EndQuorumEpochResponsePartitionData(Message):
    partition_index: int = int32()
    error_code: int = int16()
    leader_id: int = int32()
    leader_epoch: int = int32()


class EndQuorumEpochResponseTopicData(Message):
    topic_name: str = string()
    partitions: list[EndQuorumEpochResponsePartitionData] = array(EndQuorumEpochResponsePartitionData)


class NodeEndpoint(Message):
    node_id: int = int32()
    host: str = string()
    port: int = uint16()


class EndQuorumEpochResponse(Message, key=54, versions="0-1", flexible="1+"):
    error_code: int = int16()
    topics: list[EndQuorumEpochResponseTopicData] = array(EndQuorumEpochResponseTopicData)
    node_endpoints: list[NodeEndpoint] = array(NodeEndpoint, "1+", tag=0)
