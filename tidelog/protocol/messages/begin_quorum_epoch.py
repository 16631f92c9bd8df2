"""BeginQuorumEpoch, key 53, versions 0-1: an elected leader of the metadata log announces itself to
voters.

Version 1 is flexible, names voters by directory and adds the leader's addresses (KIP-853).
"""

from __future__ import annotations

from tidelog.protocol.codec.schema import Message, array, int16, int32, string, uint16, uuid


class BeginQuorumEpochRequestPartitionData(Message):
    partition_index: int = int32()
    voter_directory_id: bytes = uuid("1+", ignorable=True)
    leader_id: int = int32()
    leader_epoch: int = int32()


class BeginQuorumEpochRequestTopicData(Message):
    topic_name: str = string()
    partitions: list[BeginQuorumEpochRequestPartitionData] = array(BeginQuorumEpochRequestPartitionData)


class LeaderEndpoint(Message):
    name: str = string()
    host: str = string()
    port: int = uint16()


class BeginQuorumEpochRequest(Message, key=53, versions="0-1", flexible="1+"):
    cluster_id: str | None = string(nullable="0+", default=None)
    voter_id: int = int32("1+", default=-1, ignorable=True)
    topics: list[BeginQuorumEpochRequestTopicData] = array(BeginQuorumEpochRequestTopicData)
    leader_endpoints: list[LeaderEndpoint] = array(LeaderEndpoint, "1+", ignorable=True)


class BeginQuorumEpochResponsePartitionData(Message):
    partition_index: int = int32()
    error_code: int = int16()
    leader_id: int = int32()
    leader_epoch: int = int32()


class BeginQuorumEpochResponseTopicData(Message):
    topic_name: str = string()
    partitions: list[BeginQuorumEpochResponsePartitionData] = array(BeginQuorumEpochResponsePartitionData)


class NodeEndpoint(Message):
    node_id: int = int32()
    host: str = string()
    port: int = uint16()


class BeginQuorumEpochResponse(Message, key=53, versions="0-1", flexible="1+"):
    error_code: int = int16()
    topics: list[BeginQuorumEpochResponseTopicData] = array(BeginQuorumEpochResponseTopicData)
    node_endpoints: list[NodeEndpoint] = array(NodeEndpoint, "1+", tag=0)
