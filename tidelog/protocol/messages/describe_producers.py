"""DescribeProducers, key 61, version 0 (KIP-664): a partition's active producers and open
transactions.
"""

from __future__ import annotations

from tidelog.protocol.codec.schema import Message, array, int16, int32, int64, string


class DescribeProducersRequestTopicRequest(Message):
    name: str = string()
    partition_indexes: list[int] = array(int32)


class DescribeProducersRequest(Message, key=61, versions="0", flexible="0+"):
    topics: list[DescribeProducersRequestTopicRequest] = array(DescribeProducersRequestTopicRequest)


class DescribeProducersResponseProducerState(Message):
    producer_id: int = int64()
    producer_epoch: int = int32()
    last_sequence: int = int32(default=-1)
    last_timestamp: int = int64(default=-1)
    coordinator_epoch: int = int32()
    current_txn_start_offset: int = int64(default=-1)


class DescribeProducersResponsePartitionResponse(Message):
    partition_index: int = int32()
    error_code: int = int16()
    error_message: str | None = string(nullable="0+", default=None)
    active_producers: list[DescribeProducersResponseProducerState] = array(DescribeProducersResponseProducerState)


class DescribeProducersResponseTopicResponse(Message):
    name: str = string()
    partitions: list[DescribeProducersResponsePartitionResponse] = array(DescribeProducersResponsePartitionResponse)


class DescribeProducersResponse(Message, key=61, versions="0", flexible="0+"):
    throttle_time_ms: int = int32()
    topics: list[DescribeProducersResponseTopicResponse] = array(DescribeProducersResponseTopicResponse)
