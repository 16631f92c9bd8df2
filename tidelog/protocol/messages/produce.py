"""Produce, key 0, versions 3-13 (0-2 are only advertised): record batches in, offsets out.

Version 3 brings batches of magic 2 and the transactional id, 5 the log start offset, 7 allows zstd,
8 names the faulty batches, 9 is flexible, 10 names the current leader, 13 names topics by id. The
broker itself uses `protocol.hot`; clients use these declarations, and tests compare the
hand-written codec with them.
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
    uuid,
)


class PartitionProduceData(Message):
    index: int = int32()
    records: Bytes | None = record_batches(nullable="3+")


class TopicProduceData(Message):
    name: str = string("3-12", ignorable=True)
    topic_id: bytes = uuid("13+", ignorable=True)
    partition_data: list[PartitionProduceData] = array(PartitionProduceData)


class ProduceRequest(Message, key=0, versions="3-13", flexible="9+"):
    transactional_id: str | None = string(nullable="3+", default=None)
    acks: int = int16()
    timeout_ms: int = int32()
    topic_data: list[TopicProduceData] = array(TopicProduceData)


class BatchIndexAndErrorMessage(Message):
    batch_index: int = int32()
    batch_index_error_message: str | None = string(nullable="8+", default=None)


class LeaderIdAndEpoch(Message):
    leader_id: int = int32(default=-1)
    leader_epoch: int = int32(default=-1)


class PartitionProduceResponse(Message):
    index: int = int32()
    error_code: int = int16()
    base_offset: int = int64()
    log_append_time_ms: int = int64(default=-1)
    log_start_offset: int = int64("5+", default=-1, ignorable=True)
    record_errors: list[BatchIndexAndErrorMessage] = array(BatchIndexAndErrorMessage, "8+", ignorable=True)
    error_message: str | None = string("8+", nullable="8+", default=None, ignorable=True)
    current_leader: LeaderIdAndEpoch = struct(LeaderIdAndEpoch, "10+", tag=0)


class TopicProduceResponse(Message):
    name: str = string("3-12", ignorable=True)
    topic_id: bytes = uuid("13+", ignorable=True)
    partition_responses: list[PartitionProduceResponse] = array(PartitionProduceResponse)


class NodeEndpoint(Message):
    node_id: int = int32()
    host: str = string()
    port: int = int32()
    rack: str | None = string(nullable="10+", default=None)


class ProduceResponse(Message, key=0, versions="3-13", flexible="9+"):
    responses: list[TopicProduceResponse] = array(TopicProduceResponse)
    throttle_time_ms: int = int32()
    node_endpoints: list[NodeEndpoint] = array(NodeEndpoint, "10+", tag=0)
