"""AddPartitionsToTxn (key 24, versions 0-5): partitions join a transaction, or are verified to be in it.

Clients of transaction version 0 and 1 send versions 0-3, with one transaction. Brokers send versions
4 and 5, with many, and may only verify (KIP-890). A partition that does not exist makes its whole
transaction fail: the others get OPERATION_NOT_ATTEMPTED.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from tidelog.broker.apis.repeats import check_repeats
from tidelog.broker.apis.services import Services
from tidelog.broker.apis.transactions.answers import error_for_version
from tidelog.broker.coordinators.transaction.transitions import EPOCH_BUMP_VERSION
from tidelog.broker.network.request import Deferred, RequestContext, gather
from tidelog.protocol.errors import ErrorCode, KafkaError
from tidelog.protocol.messages.add_partitions_to_txn import (
    AddPartitionsToTxnPartitionResult,
    AddPartitionsToTxnRequest,
    AddPartitionsToTxnResponse,
    AddPartitionsToTxnResult,
    AddPartitionsToTxnTopic,
    AddPartitionsToTxnTopicResult,
    AddPartitionsToTxnTransaction,
)

REQUEST = AddPartitionsToTxnRequest

MANY_TRANSACTIONS_FROM = 4
PRODUCER_FENCED_FROM = 2

Errors = dict[tuple[str, int], ErrorCode]


def handle(
    services: Services, context: RequestContext, request: AddPartitionsToTxnRequest
) -> AddPartitionsToTxnResponse | Deferred:
    version = context.api_version
    transactions = _transactions(request, version)
    check_repeats([transaction.transactional_id for transaction in transactions])

    def response(answers: Sequence[Errors | KafkaError]) -> AddPartitionsToTxnResponse:
        results = [
            _result(transaction, answer, version) for transaction, answer in zip(transactions, answers, strict=True)
        ]
        if version >= MANY_TRANSACTIONS_FROM:
            return AddPartitionsToTxnResponse(results_by_transaction=results)
        return AddPartitionsToTxnResponse(results_by_topic_v3_and_below=results[0].topic_results)

    return gather([partial(_add, services, transaction, version) for transaction in transactions], response)


def _transactions(request: AddPartitionsToTxnRequest, version: int) -> list[AddPartitionsToTxnTransaction]:
    if version >= MANY_TRANSACTIONS_FROM:
        return request.transactions
    return [
        AddPartitionsToTxnTransaction(
            transactional_id=request.v3_and_below_transactional_id,
            producer_id=request.v3_and_below_producer_id,
            producer_epoch=request.v3_and_below_producer_epoch,
            topics=request.v3_and_below_topics,
        )
    ]


def _add(services: Services, transaction: AddPartitionsToTxnTransaction, version: int) -> Errors | Deferred:
    topics_by_name = services.image().topics_by_name
    partitions = list(_partitions(transaction.topics))
    missing = [
        (name, index)
        for name, index in partitions
        if (topic := topics_by_name.get(name)) is None or index not in topic.partitions
    ]
    if missing:
        errors = dict.fromkeys(partitions, ErrorCode.OPERATION_NOT_ATTEMPTED)
        return errors | dict.fromkeys(missing, ErrorCode.UNKNOWN_TOPIC_OR_PARTITION)
    return services.transactions.add_partitions(
        transaction.transactional_id,
        transaction.producer_id,
        transaction.producer_epoch,
        partitions,
        verify_only=transaction.verify_only,
        # Brokers add partitions only for clients of version 2.
        transaction_version=EPOCH_BUMP_VERSION if version >= MANY_TRANSACTIONS_FROM else 0,
    )


def _partitions(topics: Sequence[AddPartitionsToTxnTopic]) -> dict[tuple[str, int], None]:
    """In the order of the request, each once."""
    return dict.fromkeys((topic.name, index) for topic in topics for index in topic.partitions)


def _result(
    transaction: AddPartitionsToTxnTransaction, answer: Errors | KafkaError, version: int
) -> AddPartitionsToTxnResult:
    topics: dict[str, AddPartitionsToTxnTopicResult] = {}
    for name, index in _partitions(transaction.topics):
        error = answer.code if isinstance(answer, KafkaError) else answer[name, index]
        topic = topics.setdefault(name, AddPartitionsToTxnTopicResult(name=name))
        topic.results_by_partition.append(
            AddPartitionsToTxnPartitionResult(
                partition_index=index, partition_error_code=error_for_version(error, version, PRODUCER_FENCED_FROM)
            )
        )
    return AddPartitionsToTxnResult(transactional_id=transaction.transactional_id, topic_results=list(topics.values()))


def refuse(request: AddPartitionsToTxnRequest, error: KafkaError, version: int) -> AddPartitionsToTxnResponse:
    if version >= MANY_TRANSACTIONS_FROM:
        return AddPartitionsToTxnResponse(error_code=error.code)
    results = [_result(transaction, error, version) for transaction in _transactions(request, version)]
    return AddPartitionsToTxnResponse(results_by_topic_v3_and_below=results[0].topic_results)
