"""DescribeTransactions (key 65, version 0): the state of transactional ids (KIP-664).

Only the coordinator of an id's partition can describe it. An id whose partition is on another
broker or is loading has that error. A prepared transaction shows the partitions without its marker.
"""

from __future__ import annotations

from tidelog.broker.apis.repeats import check_repeats
from tidelog.broker.apis.services import Services
from tidelog.broker.coordinators.transaction.states import STATE_NAMES
from tidelog.broker.network.request import RequestContext
from tidelog.broker.scheduling.large_answers import made
from tidelog.broker.scheduling.pieces import ID_CHARACTERS, Arrays
from tidelog.protocol.errors import KafkaError
from tidelog.protocol.messages.describe_transactions import (
    DescribeTransactionsRequest,
    DescribeTransactionsResponse,
    DescribeTransactionsResponseTopicData,
    DescribeTransactionsResponseTransactionState,
)

REQUEST = DescribeTransactionsRequest


def _size(response: DescribeTransactionsResponse) -> int:
    count = 0
    for state in response.transaction_states:
        count += len(state.transactional_id) // ID_CHARACTERS
        for topic in state.topics:
            count += len(topic.partitions)
    return count


IN_PIECES = Arrays("transactional_ids", "transaction_states", response_elements=_size)


def check(request: DescribeTransactionsRequest) -> None:
    check_repeats(request.transactional_ids)


def handle(
    services: Services, context: RequestContext, request: DescribeTransactionsRequest
) -> DescribeTransactionsResponse:
    check(request)
    return DescribeTransactionsResponse(
        transaction_states=[_described(services, transactional_id) for transactional_id in request.transactional_ids]
    )


def _described(services: Services, transactional_id: str) -> DescribeTransactionsResponseTransactionState:
    try:
        metadata = services.transactions.describe(transactional_id)
    except KafkaError as error:
        return _refused(transactional_id, error)
    topics: dict[str, DescribeTransactionsResponseTopicData] = {}
    for topic, partition in sorted(metadata.partitions):
        topics.setdefault(topic, DescribeTransactionsResponseTopicData(topic=topic)).partitions.append(partition)
    return DescribeTransactionsResponseTransactionState(
        transactional_id=transactional_id,
        transaction_state=STATE_NAMES[metadata.state],
        transaction_timeout_ms=metadata.timeout_ms,
        transaction_start_time_ms=metadata.start_ms,
        producer_id=metadata.producer_id,
        producer_epoch=metadata.producer_epoch,
        topics=list(topics.values()),
    )


def _refused(transactional_id: str, error: KafkaError) -> DescribeTransactionsResponseTransactionState:
    return DescribeTransactionsResponseTransactionState(error_code=error.code, transactional_id=transactional_id)


def refuse(request: DescribeTransactionsRequest, error: KafkaError, version: int) -> DescribeTransactionsResponse:
    return DescribeTransactionsResponse(
        transaction_states=made(request.transactional_ids, lambda transactional_id: _refused(transactional_id, error))
    )
