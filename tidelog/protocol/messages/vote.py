"""Vote, key 52, versions 0-2, flexible from the first: a voter asks the others for their vote.

Version 1 names voters by directory too (KIP-853), 2 may ask only whether a vote would be granted
(pre-vote, KIP-996). Candidates put their last epoch and log end into the request; a refusal carries
the epoch and leader the voter knows.
"""

from __future__ import annotations

from tidelog.protocol.codec.schema import Message, array, boolean, int16, int32, int64, string, uint16, uuid


class VoteRequestPartitionData(Message):
    partition_index: int = int32()
    replica_epoch: int = int32()
    replica_id: int = int32()
    replica_directory_id: bytes = uuid("1+", ignorable=True)
    voter_directory_id: bytes = uuid("1+", ignorable=True)
    last_offset_epoch: int = int32()
    last_offset: int = int64()
    pre_vote: bool = boolean("2+")


class VoteRequestTopicData(Message):
    topic_name: str = string()
    partitions: list[VoteRequestPartitionData] = array(VoteRequestPartitionData)


class VoteRequest(Message, key=52, versions="0-2", flexible="0+"):
    cluster_id: str | None = string(nullable="0+", default=None)
    voter_id: int = int32("1+", default=-1, ignorable=True)
    topics: list[VoteRequestTopicData] = array(VoteRequestTopicData)


class VoteResponsePartitionData(Message):
    partition_index: int = int32()
    error_code: int = int16()
    leader_id: int = int32()
    leader_epoch: int = int32()
    vote_granted: bool = boolean()


class VoteResponseTopicData(Message):
    topic_name: str = string()
    partitions: list[VoteResponsePartitionData] = array(VoteResponsePartitionData)


class NodeEndpoint(Message):
    node_id: int = int32()
    host: str = string()
    port: int = uint16()


class VoteResponse(Message, key=52, versions="0-2", flexible="0+"):
    error_code: int = int16()
    topics: list[VoteResponseTopicData] = array(VoteResponseTopicData)
    node_endpoints: list[NodeEndpoint] = array(NodeEndpoint, "1+", tag=0)
