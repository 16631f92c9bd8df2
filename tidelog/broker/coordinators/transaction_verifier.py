"""Asks the coordinators of transactions, on this node or another one, whether partitions belong to an open transaction.

For a batch that would open a transaction in its partition, and for the offsets of a group (KIP-890). Questions that
wait for one coordinator are sent together. Invariant: every question is answered; where the coordinator cannot be
reached, with an error after which producers try again. Source: Kafka's `AddPartitionsToTxnManager`.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Final, Protocol

from tidelog.broker.coordinators.broker_queues import BrokerQueues
from tidelog.broker.coordinators.peer_versions import PeerVersions, VersionNotServed
from tidelog.broker.network.request import Deferred
from tidelog.protocol.errors import ErrorCode, KafkaError
from tidelog.protocol.internal_topics import TRANSACTIONS_TOPIC
from tidelog.protocol.messages.add_partitions_to_txn import (
    AddPartitionsToTxnRequest,
    AddPartitionsToTxnResponse,
    AddPartitionsToTxnTopic,
    AddPartitionsToTxnTransaction,
)
from tidelog.replication.ports import Endpoint, Exchange, PeerUnreachable

if TYPE_CHECKING:
    from tidelog.replication.controller.metadata.image import MetadataImage

logger = logging.getLogger("tidelog.transactions")

TopicPartition = tuple[str, int]
Errors = dict[TopicPartition, ErrorCode]

VERSION: Final = 5
OLDEST_VERSION: Final = 4  # the first that asks for several transactions, and may only verify
TRANSACTIONS_PER_REQUEST_MAX: Final = 500
# Far below what a coordinator takes; one question may have more.
PARTITIONS_PER_REQUEST_MAX: Final = 5_000
# Questions of this node that wait for an answer. Producers retry what is refused.
QUESTIONS_MAX: Final = 10_000
# The coordinator still writes the markers of the transaction before: it is asked again after so long, then twice that,
# up to add.partitions.to.txn.retry.backoff.ms. A small transaction is over within a few milliseconds.
FIRST_RETRY_MS: Final = 1
ADDS_VERSION: Final = 2
# a coordinator's error -> what producers are told
_TOLD_INSTEAD: Final = {
    ErrorCode.PRODUCER_FENCED: ErrorCode.INVALID_PRODUCER_EPOCH,  # the error that they expect here
    # Another partition is unknown there, perhaps only for a moment. Producers would not try this one again.
    ErrorCode.OPERATION_NOT_ATTEMPTED: ErrorCode.COORDINATOR_NOT_AVAILABLE,
}


class LocalCoordinator(Protocol):
    """What this module uses of the service of this node's transaction coordinators."""

    def partition_for(self, transactional_id: str) -> int: ...

    def add_partitions(
        self,
        transactional_id: str,
        producer_id: int,
        producer_epoch: int,
        partitions: Collection[TopicPartition],
        *,
        verify_only: bool,
        transaction_version: int,
    ) -> Errors | Deferred: ...


class _Question:
    __slots__ = ("adds", "answer", "deadline_s", "partitions", "producer_epoch", "producer_id", "retry_ms", "txn_id")

    def __init__(
        self, txn_id: str, producer_id: int, producer_epoch: int, partitions: Collection[TopicPartition], adds: bool,
        answer: asyncio.Future[Errors], deadline_s: float,
    ) -> None:  # fmt: skip
        self.txn_id = txn_id
        self.producer_id = producer_id
        self.producer_epoch = producer_epoch
        self.partitions = tuple(partitions)
        self.adds = adds
        self.answer = answer
        self.deadline_s = deadline_s
        self.retry_ms = FIRST_RETRY_MS

    def all(self, error: ErrorCode) -> Errors:
        return dict.fromkeys(self.partitions, error)


class CoordinatorVerifier:
    """`coordinator()`: the service of this node's coordinators."""

    def __init__(
        self,
        node_id: int,
        coordinator: Callable[[], LocalCoordinator],
        image: Callable[[], MetadataImage],
        endpoint_of: Callable[[int], Endpoint | None],
        exchange: Exchange,
        loop: asyncio.AbstractEventLoop,
        *,
        request_timeout_ms: int,
        retry_backoff_ms: int,
        retry_backoff_max_ms: int,
    ) -> None:
        self._node_id = node_id
        self._coordinator = coordinator
        self._image = image
        self._endpoint_of = endpoint_of
        self._peers = PeerVersions(exchange, OLDEST_VERSION, VERSION)
        self._loop = loop
        self._request_timeout_ms = request_timeout_ms
        self._retry_backoff_ms = retry_backoff_ms
        self._retry_max_s = min(retry_backoff_max_ms, request_timeout_ms) / 1000
        self._open: dict[_Question, None] = {}
        self._queues: BrokerQueues[_Question] = BrokerQueues(loop, "verify", _take, self._send_request, self._not_asked)
        self.failures = 0
        """Partitions that were not verified."""

    def __len__(self) -> int:
        """Questions without an answer."""
        return len(self._open)

    def verify(
        self,
        transactional_id: str,
        producer_id: int,
        producer_epoch: int,
        partitions: Collection[TopicPartition],
        *,
        adds: bool,
    ) -> Errors | asyncio.Future[Errors]:
        """The errors; at once if they are known at once."""
        if len(self._open) >= QUESTIONS_MAX:
            return dict.fromkeys(partitions, ErrorCode.COORDINATOR_NOT_AVAILABLE)
        coordinator = self._coordinator()
        leader = self._leader_of(coordinator, transactional_id)
        here: Errors | Deferred | None = None
        if leader == self._node_id:
            here = _ask(coordinator, transactional_id, producer_id, producer_epoch, partitions, adds)
            if type(here) is dict and not any(here.values()):
                return here
        answer: asyncio.Future[Errors] = self._loop.create_future()
        deadline_s = self._loop.time() + self._retry_max_s
        question = _Question(transactional_id, producer_id, producer_epoch, partitions, adds, answer, deadline_s)
        self._open[question] = None
        if here is None:
            self._ask_elsewhere(leader, question)
        else:
            self._answered_here(question, here)
        return answer.result() if answer.done() else answer

    async def close(self) -> None:
        await self._queues.close()
        for question in list(self._open):
            self._answer(question, question.all(ErrorCode.COORDINATOR_NOT_AVAILABLE))

    # -- questions ---------------------------------------------------------------------------------------------------

    def _leader_of(self, coordinator: LocalCoordinator, transactional_id: str) -> int:
        """The broker that coordinates the id, -1 if unknown."""
        assignment = self._image().partition(TRANSACTIONS_TOPIC, coordinator.partition_for(transactional_id))
        return -1 if assignment is None else assignment.leader

    def _ask_again(self, question: _Question) -> None:
        if question not in self._open:
            return
        coordinator = self._coordinator()
        leader = self._leader_of(coordinator, question.txn_id)
        if leader == self._node_id:
            producer = question.producer_id, question.producer_epoch
            self._answered_here(
                question, _ask(coordinator, question.txn_id, *producer, question.partitions, question.adds)
            )
        else:
            self._ask_elsewhere(leader, question)

    def _ask_elsewhere(self, leader: int, question: _Question) -> None:
        if leader < 0 or self._endpoint_of(leader) is None:
            self._settle(question, question.all(ErrorCode.COORDINATOR_NOT_AVAILABLE))
        else:
            self._queues.add(leader, question)

    def _answered_here(self, question: _Question, answer: Errors | Deferred) -> None:
        if isinstance(answer, Deferred):
            answer.on_complete(
                lambda errors: self._settle(
                    question, question.all(errors.code) if isinstance(errors, KafkaError) else errors
                )
            )
        else:
            self._settle(question, answer)

    async def _send_request(self, broker_id: int, questions: list[_Question], lane: str) -> None:
        endpoint = self._endpoint_of(broker_id)
        try:
            if endpoint is None:
                raise PeerUnreachable(f"broker {broker_id} is unknown")
            response: AddPartitionsToTxnResponse = await self._peers.exchange(
                endpoint, _request(questions), timeout_ms=self._request_timeout_ms, lane=lane
            )
        except VersionNotServed:
            for question in questions:  # a release that verifies nothing; producers of version 2 do not exist there
                error_code = ErrorCode.NETWORK_EXCEPTION if question.adds else ErrorCode.NONE
                self._settle(question, question.all(error_code))
            return
        except PeerUnreachable as error:
            logger.info("the coordinator of %d transactions was not reached: %s", len(questions), error)
            self._not_asked(questions)
            return
        results = _results(response)
        refusal = ErrorCode.of(response.error_code)
        if refusal is ErrorCode.CLUSTER_AUTHORIZATION_FAILED:  # which is between brokers; producers do not know it
            refusal = ErrorCode.INVALID_TXN_STATE
        for question in questions:
            of_transaction = results.get(question.txn_id, {}) if refusal is ErrorCode.NONE else question.all(refusal)
            missing = ErrorCode.UNKNOWN_SERVER_ERROR
            self._settle(question, {each: of_transaction.get(each, missing) for each in question.partitions})

    def _not_asked(self, questions: list[_Question]) -> None:
        """Producers try again upon this error."""
        for question in questions:
            self._settle(question, question.all(ErrorCode.NETWORK_EXCEPTION))

    def _settle(self, question: _Question, errors: Errors) -> None:
        if (
            question.adds
            and ErrorCode.CONCURRENT_TRANSACTIONS in errors.values()
            and self._loop.time() < question.deadline_s
        ):
            self._loop.call_later(question.retry_ms / 1000, self._ask_again, question)
            question.retry_ms = min(2 * question.retry_ms, self._retry_backoff_ms)
            return
        self._answer(question, errors)

    def _answer(self, question: _Question, errors: Errors) -> None:
        if self._open.pop(question, self) is self:
            return
        if any(errors.values()):
            errors = {partition: _TOLD_INSTEAD.get(error, error) for partition, error in errors.items()}
            self.failures += sum(error is not ErrorCode.NONE for error in errors.values())
        if not question.answer.done():
            question.answer.set_result(errors)


def _ask(
    coordinator: LocalCoordinator,
    transactional_id: str,
    producer_id: int,
    producer_epoch: int,
    partitions: Collection[TopicPartition],
    adds: bool,
) -> Errors | Deferred:
    """The answer of a coordinator on this node."""
    try:
        return coordinator.add_partitions(
            transactional_id,
            producer_id,
            producer_epoch,
            partitions,
            verify_only=not adds,
            transaction_version=ADDS_VERSION if adds else 0,
        )
    except KafkaError as error:
        return dict.fromkeys(partitions, error.code)


def _take(queue: deque[_Question]) -> list[_Question]:
    """What one request carries. Its answer names transactional ids alone: two questions about one id go together only
    when they are of the same producer, and their partitions are asked for as one."""
    taken: list[_Question] = []
    later: list[_Question] = []
    questions: dict[str, tuple[int, int, bool]] = {}
    count = 0
    while queue and len(questions) < TRANSACTIONS_PER_REQUEST_MAX and count < PARTITIONS_PER_REQUEST_MAX:
        question = queue.popleft()
        count += len(question.partitions)
        about = (question.producer_id, question.producer_epoch, question.adds)
        (taken if questions.setdefault(question.txn_id, about) == about else later).append(question)
    queue.extendleft(reversed(later))
    return taken


def _request(questions: list[_Question]) -> AddPartitionsToTxnRequest:
    by_id: dict[str, dict[TopicPartition, None]] = {}
    for question in questions:
        by_id.setdefault(question.txn_id, {}).update(dict.fromkeys(question.partitions))
    transactions: dict[str, AddPartitionsToTxnTransaction] = {}
    for question in questions:
        if question.txn_id in transactions:
            continue
        topics: dict[str, AddPartitionsToTxnTopic] = {}
        for name, index in by_id[question.txn_id]:
            topic = topics.get(name)
            if topic is None:
                topic = topics[name] = AddPartitionsToTxnTopic(name=name)
            topic.partitions.append(index)
        transactions[question.txn_id] = AddPartitionsToTxnTransaction(
            transactional_id=question.txn_id,
            producer_id=question.producer_id,
            producer_epoch=question.producer_epoch,
            verify_only=not question.adds,
            topics=list(topics.values()),
        )
    return AddPartitionsToTxnRequest(transactions=list(transactions.values()))


def _results(response: AddPartitionsToTxnResponse) -> dict[str, Errors]:
    return {
        transaction.transactional_id: {
            (topic.name, each.partition_index): ErrorCode.of(each.partition_error_code)
            for topic in transaction.topic_results
            for each in topic.results_by_partition
        }
        for transaction in response.results_by_transaction
    }
