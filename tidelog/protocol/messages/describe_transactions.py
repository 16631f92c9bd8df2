"""DescribeTransactions, key 65, version 0 (KIP-664): the state of transactional ids."""

from __future__ import annotations

from tidelog.protocol.codec.schema import Message, array, int16, int32, int64, string


class DescribeTransactionsRequest(Message, key=65, versions="0", flexible="0+"):
    transactional_ids: list[str] = array(string)


class DescribeTransactionsResponseTopicData(Message):
    topic: str = string()
    partitions: list[int] = array(int32)


class DescribeTransactionsResponseTransactionState(Message):
    error_code: int = int16()
    transactional_id: str = string()
    transaction_state: str = string()
    transaction_timeout_ms: int = int32()
    transaction_start_time_ms: int = int64()
    producer_id: int = int64()
    producer_epoch: int = int16()
    topics: list[DescribeTransactionsResponseTopicData] = array(DescribeTransactionsResponseTopicData)


class DescribeTransactionsResponse(Message, key=65, versions="0", flexible="0+"):
    throttle_time_ms: int = int32()
    transaction_states: list[DescribeTransactionsResponseTransactionState] = array(
        DescribeTransactionsResponseTransactionState
    )
