"""FetchSnapshot, key 59, versions 0-1, flexible from the first: a piece of a metadata snapshot, by
position.

Version 1 adds the fetching replica's directory and the leader's addresses (KIP-853).
"""

from __future__ import annotations

from tidelog.protocol.codec.schema import (
    Bytes,
    Message,
    array,
    int16,
    int32,
    int64,
    record_batches,
    string,
    struct,
    uint16,
    uuid,
)


class FetchSnapshotRequestSnapshotId(Message):
    end_offset: int = int64()
    epoch: int = int32()


class FetchSnapshotRequestPartitionSnapshot(Message):
    partition: int = int32()
    current_leader_epoch: int = int32()
    snapshot_id: FetchSnapshotRequestSnapshotId = struct(FetchSnapshotRequestSnapshotId)
    position: int = int64()
    replica_directory_id: bytes = uuid("1+", ignorable=True, tag=0)


class FetchSnapshotRequestTopicSnapshot(Message):
    name: str = string()
    partitions: list[FetchSnapshotRequestPartitionSnapshot] = array(FetchSnapshotRequestPartitionSnapshot)


class FetchSnapshotRequest(Message, key=59, versions="0-1", flexible="0+"):
    cluster_id: str | None = string(nullable="0+", default=None, tag=0)
    replica_id: int = int32(default=-1)
    max_bytes: int = int32(default=2147483647)
    topics: list[FetchSnapshotRequestTopicSnapshot] = array(FetchSnapshotRequestTopicSnapshot)


class FetchSnapshotResponseSnapshotId(Message):
    end_offset: int = int64()
    epoch: int = int32()


class LeaderIdAndEpoch(Message):
    leader_id: int = int32()
    leader_epoch: int = int32()


class FetchSnapshotResponsePartitionSnapshot(Message):
    index: int = int32()
    error_code: int = int16()
    snapshot_id: FetchSnapshotResponseSnapshotId = struct(FetchSnapshotResponseSnapshotId)
    current_leader: LeaderIdAndEpoch = struct(LeaderIdAndEpoch, tag=0)
    size: int = int64()
    position: int = int64()
    unaligned_records: Bytes | None = record_batches()


class FetchSnapshotResponseTopicSnapshot(Message):
    name: str = string()
    partitions: list[FetchSnapshotResponsePartitionSnapshot] = array(FetchSnapshotResponsePartitionSnapshot)


class NodeEndpoint(Message):
    node_id: int = int32()
    host: str = string()
    port: int = uint16()


class FetchSnapshotResponse(Message, key=59, versions="0-1", flexible="0+"):
    throttle_time_ms: int = int32()
    error_code: int = int16()
    topics: list[FetchSnapshotResponseTopicSnapshot] = array(FetchSnapshotResponseTopicSnapshot)
    node_endpoints: list[NodeEndpoint] = array(NodeEndpoint, "1+", tag=0)
