"""AddPartitionsToTxn (key 24, versions 0-5): partitions join a transaction, or are verified to be in it.

Clients of transaction version 0 and 1 send versions 0-3, with one transaction. Brokers send versions
4 and 5, with many, and may only verify (KIP-890). A partition that does not exist, or is one of an
internal topic, makes its whole transaction fail: the others get OPERATION_NOT_ATTEMPTED. Offsets of
groups join by AddOffsetsToTxn, or by version 4 and 5. Deviation: Kafka lets brokers add any
internal topic; here only `__consumer_offsets` gets markers, so no other internal topic can join.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain, repeat
from typing import Any

from tidelog.broker.apis.repeats import check_repeats
from tidelog.broker.apis.services import Services
from tidelog.broker.apis.transactions.answers import error_for_version
from tidelog.broker.coordinators.transaction.transitions import EPOCH_BUMP_VERSION
from tidelog.broker.network.request import Deferred, RequestContext, completed, gather
from tidelog.broker.scheduling.large_answers import in_pieces, made
from tidelog.broker.scheduling.pieces import PIECE_ELEMENTS_MAX
from tidelog.protocol.errors import ErrorCode, KafkaError
from tidelog.protocol.internal_topics import INTERNAL_TOPICS, OFFSETS_TOPIC
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
# The maximum of partitions in one request. A larger one gets an answer with only the first partition of each topic.
PARTITIONS_MAX = 100_000
# What a transaction costs, in partitions, beside its partitions.
TRANSACTION_ELEMENTS = 5

Errors = dict[tuple[str, int], ErrorCode]
_REFUSED_HERE = {
    ErrorCode.TOPIC_AUTHORIZATION_FAILED,
    ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
    ErrorCode.OPERATION_NOT_ATTEMPTED,
}


def handle(services: Services, context: RequestContext, request: AddPartitionsToTxnRequest) -> Any:
    version = context.api_version
    transactions = _transactions(request, version)
    check_repeats([transaction.transactional_id for transaction in transactions])
    if (count := _partition_count(transactions)) > PARTITIONS_MAX:
        raise KafkaError(ErrorCode.INVALID_REQUEST, f"{count} partitions in one request, above {PARTITIONS_MAX}")

    waits = len(transactions) == 1  # others must not wait for one
    calls = [partial(_add, services, transaction, version, waits) for transaction in transactions]
    if count + len(transactions) + sum(len(transaction.topics) for transaction in transactions) > PIECE_ELEMENTS_MAX:
        return _added_in_pieces(services, transactions, calls, version)

    def response(answers: Sequence[Errors | KafkaError]) -> AddPartitionsToTxnResponse:
        return _response(
            [_result(transaction, answer, version) for transaction, answer in zip(transactions, answers, strict=True)],
            version,
        )

    return gather(calls, response)


async def _added_in_pieces(
    services: Services,
    transactions: list[AddPartitionsToTxnTransaction],
    calls: Sequence[Callable[[], Errors | Deferred]],
    version: int,
) -> AddPartitionsToTxnResponse:
    """Other requests are served between the pieces, each of one transaction at least: no other half of it is added."""
    added: list[list[Errors | KafkaError] | Deferred] = []
    begun = elements = 0
    for end, transaction in enumerate(transactions, 1):
        elements += TRANSACTION_ELEMENTS + _partition_count([transaction])
        if elements >= PIECE_ELEMENTS_MAX or end == len(calls):
            await services.scheduler.pause()
            added.append(gather(calls[begun:end], list))
            begun, elements = end, 0
    answers: list[Errors | KafkaError] = []
    for answer in added:
        answers += await completed(answer) if isinstance(answer, Deferred) else answer
    results: list[AddPartitionsToTxnResult] = []

    def answer_one(number: int) -> None:
        results.append(_result(transactions[number], answers[number], version))

    await in_pieces(services.scheduler, range(len(transactions)), answer_one)
    return _response(results, version)


def _response(results: list[AddPartitionsToTxnResult], version: int) -> AddPartitionsToTxnResponse:
    if version >= MANY_TRANSACTIONS_FROM:
        return AddPartitionsToTxnResponse(results_by_transaction=results)
    return AddPartitionsToTxnResponse(results_by_topic_v3_and_below=results[0].topic_results)


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


def _add(
    services: Services, transaction: AddPartitionsToTxnTransaction, version: int, waits: bool
) -> Errors | Deferred:
    topics_by_name = services.image().topics_by_name
    partitions = _partitions(transaction.topics)
    closed_topics = INTERNAL_TOPICS - {OFFSETS_TOPIC} if version >= MANY_TRANSACTIONS_FROM else INTERNAL_TOPICS
    refused: Errors = {}
    for partition in partitions:
        name, index = partition
        if name in closed_topics:
            refused[partition] = ErrorCode.TOPIC_AUTHORIZATION_FAILED
        elif (topic := topics_by_name.get(name)) is None or index not in topic.partitions:
            refused[partition] = ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    if refused:
        errors: Errors = dict.fromkeys(partitions, ErrorCode.OPERATION_NOT_ATTEMPTED)
        errors.update(refused)
        return errors
    return services.transactions.add_partitions(
        transaction.transactional_id,
        transaction.producer_id,
        transaction.producer_epoch,
        partitions,
        verify_only=transaction.verify_only,
        # Brokers add partitions only for clients of version 2.
        transaction_version=EPOCH_BUMP_VERSION if version >= MANY_TRANSACTIONS_FROM else 0,
        waits=waits,
    )


def _partition_count(transactions: Sequence[AddPartitionsToTxnTransaction]) -> int:
    return sum(len(topic.partitions) for transaction in transactions for topic in transaction.topics)


def _partitions(topics: Sequence[AddPartitionsToTxnTopic]) -> dict[tuple[str, int], None]:
    """The partitions in the order of the request, without duplicates."""
    return dict.fromkeys(chain.from_iterable(zip(repeat(topic.name), topic.partitions) for topic in topics))


def _result(
    transaction: AddPartitionsToTxnTransaction, answer: Errors | KafkaError, version: int
) -> AddPartitionsToTxnResult:
    # As in Kafka, the topics of the request are repeated as they are, if the coordinator was asked to add them.
    repeats = not transaction.verify_only and (
        isinstance(answer, KafkaError) or _REFUSED_HERE.isdisjoint(answer.values())
    )
    by_topic: list[tuple[str, list[int]]] = [(topic.name, topic.partitions) for topic in transaction.topics]
    if not repeats:
        indexes: dict[str, dict[int, None]] = {}
        for topic in transaction.topics:
            if topic.partitions:
                indexes.setdefault(topic.name, {}).update(dict.fromkeys(topic.partitions))
        by_topic = [(name, list(of_topic)) for name, of_topic in indexes.items()]

    def partition_result(name: str, index: int) -> AddPartitionsToTxnPartitionResult:
        error = answer.code if isinstance(answer, KafkaError) else answer[name, index]
        code = error_for_version(error, version, PRODUCER_FENCED_FROM)
        return AddPartitionsToTxnPartitionResult(partition_index=index, partition_error_code=code)

    def topic_result(topic: tuple[str, list[int]]) -> AddPartitionsToTxnTopicResult:
        name, partitions = topic
        return AddPartitionsToTxnTopicResult(
            name=name, results_by_partition=made(partitions, partial(partition_result, name))
        )

    results = made(by_topic, topic_result)
    return AddPartitionsToTxnResult(transactional_id=transaction.transactional_id, topic_results=results)


def refuse(request: AddPartitionsToTxnRequest, error: KafkaError, version: int) -> AddPartitionsToTxnResponse:
    if version >= MANY_TRANSACTIONS_FROM:
        return AddPartitionsToTxnResponse(error_code=error.code)
    transactions = _transactions(request, version)
    if _partition_count(transactions) > PARTITIONS_MAX:
        for topic in transactions[0].topics:
            del topic.partitions[1:]
    results = [_result(transaction, error, version) for transaction in transactions]
    return AddPartitionsToTxnResponse(results_by_topic_v3_and_below=results[0].topic_results)
