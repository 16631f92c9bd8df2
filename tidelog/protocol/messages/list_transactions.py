"""ListTransactions, key 66, versions 0-2 (KIP-664): the transactional ids of a coordinator.

Version 1 filters by duration (KIP-994), 2 by a pattern of the transactional id (KIP-1152).
"""

from __future__ import annotations

from tidelog.protocol.codec.schema import Message, array, int16, int32, int64, string


class ListTransactionsRequest(Message, key=66, versions="0-2", flexible="0+"):
    state_filters: list[str] = array(string)
    producer_id_filters: list[int] = array(int64)
    duration_filter: int = int64("1+", default=-1)
    transactional_id_pattern: str | None = string("2+", nullable="2+", default=None)


class ListTransactionsResponseTransactionState(Message):
    transactional_id: str = string()
    producer_id: int = int64()
    transaction_state: str = string()


class ListTransactionsResponse(Message, key=66, versions="0-2", flexible="0+"):
    throttle_time_ms: int = int32()
    error_code: int = int16()
    unknown_state_filters: list[str] = array(string)
    transaction_states: list[ListTransactionsResponseTransactionState] = array(ListTransactionsResponseTransactionState)
