"""The verifier: what coordinators are asked about partitions of transactions, and what is made of their answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection
from typing import Any

import pytest

from tests.patience import until
from tests.unit.broker.coordinators.peers import OWN_ID, Cluster
from tidelog.broker.coordinators import transaction_verifier
from tidelog.broker.coordinators.transaction_verifier import CoordinatorVerifier
from tidelog.broker.network.request import Deferred
from tidelog.protocol.errors import ErrorCode, KafkaError
from tidelog.protocol.internal_topics import TRANSACTIONS_TOPIC
from tidelog.protocol.messages.add_partitions_to_txn import (
    AddPartitionsToTxnPartitionResult,
    AddPartitionsToTxnRequest,
    AddPartitionsToTxnResponse,
    AddPartitionsToTxnResult,
    AddPartitionsToTxnTopicResult,
)

E = ErrorCode
A, B = ("a", 0), ("b", 3)


class LocalCoordinator:
    """The id "here" is coordinated here, "there" by broker 2, "nowhere" by none."""

    def __init__(self) -> None:
        self.answers: list[Any] = []
        self.asked: list[tuple[str, bool, int]] = []

    def partition_for(self, transactional_id: str) -> int:
        return {"here": 0, "nowhere": 2, "unknown": 3}.get(transactional_id, 1)

    def add_partitions(
        self, transactional_id: str, producer_id: int, producer_epoch: int, partitions: Collection[tuple[str, int]], *,
        verify_only: bool, transaction_version: int,
    ) -> Any:  # fmt: skip
        self.asked.append((transactional_id, verify_only, transaction_version))
        answer = self.answers.pop(0) if self.answers else E.NONE
        if isinstance(answer, KafkaError):
            raise answer
        return answer if isinstance(answer, Deferred) else dict.fromkeys(partitions, answer)


class Room:
    def __init__(self) -> None:
        self.cluster = Cluster(
            {
                (TRANSACTIONS_TOPIC, 0): OWN_ID,
                (TRANSACTIONS_TOPIC, 1): 2,
                (TRANSACTIONS_TOPIC, 2): -1,
                (TRANSACTIONS_TOPIC, 3): 9,
            }
        )
        self.cluster.unknown_brokers = {9}
        self.cluster.answer = self._answer
        self.here = LocalCoordinator()
        self.errors: dict[tuple[str, int], list[int]] = {}
        self.refusal = E.NONE
        self.verifier = CoordinatorVerifier(
            OWN_ID, lambda: self.here, lambda: self.cluster.image, self.cluster.endpoint_of, self.cluster.exchange,
            asyncio.get_running_loop(), request_timeout_ms=30_000, retry_backoff_ms=4, retry_backoff_max_ms=100,
        )  # fmt: skip

    def verify(
        self, txn_id: str, *partitions: tuple[str, int], epoch: int = 0, adds: bool = False
    ) -> asyncio.Future[dict[tuple[str, int], ErrorCode]]:
        answer = self.verifier.verify(txn_id, 7, epoch, partitions or (A,), adds=adds)
        if isinstance(answer, asyncio.Future):
            return answer
        known: asyncio.Future[dict[tuple[str, int], ErrorCode]] = asyncio.get_running_loop().create_future()
        known.set_result(answer)
        return known

    def _answer(self, broker_id: int, request: AddPartitionsToTxnRequest) -> AddPartitionsToTxnResponse:
        if self.refusal:
            return AddPartitionsToTxnResponse(error_code=self.refusal)
        results = []
        for transaction in request.transactions:
            topics = [
                AddPartitionsToTxnTopicResult(
                    name=topic.name,
                    results_by_partition=[
                        AddPartitionsToTxnPartitionResult(
                            partition_index=index, partition_error_code=self._next((topic.name, index))
                        )
                        for index in topic.partitions
                    ],
                )
                for topic in transaction.topics
            ]
            results.append(
                AddPartitionsToTxnResult(transactional_id=transaction.transactional_id, topic_results=topics)
            )
        return AddPartitionsToTxnResponse(results_by_transaction=results)

    def _next(self, partition: tuple[str, int]) -> int:
        errors = self.errors.get(partition)
        return errors.pop(0) if errors else 0


@pytest.fixture
async def room() -> AsyncIterator[Room]:
    room = Room()
    yield room
    await room.verifier.close()
    assert len(room.verifier) == 0


async def test_this_nodes_coordinator_answers_at_once(room: Room):
    answer = room.verify("here", A, B)
    assert answer.done()
    assert await answer == {A: E.NONE, B: E.NONE}
    await room.verify("here", adds=True)
    assert room.here.asked == [("here", True, 0), ("here", False, 2)]
    assert not room.cluster.sent


async def test_it_may_answer_later(room: Room):
    deferred = Deferred()
    room.here.answers = [deferred]
    answer = room.verify("here", adds=True)
    assert not answer.done()
    deferred.complete({A: E.INVALID_TXN_STATE})
    assert await answer == {A: E.INVALID_TXN_STATE}


async def test_its_refusals_are_answers(room: Room):
    room.here.answers = [KafkaError(E.NOT_COORDINATOR)]
    assert await room.verify("here") == {A: E.NOT_COORDINATOR}
    deferred = Deferred()
    room.here.answers = [deferred]
    answer = room.verify("here")
    deferred.complete(KafkaError(E.COORDINATOR_NOT_AVAILABLE))
    assert await answer == {A: E.COORDINATOR_NOT_AVAILABLE}


async def test_another_broker_is_asked_in_one_request_for_all_that_wait(room: Room):
    answers = [room.verify(f"there-{number}", A, B, adds=number == 2) for number in range(3)]
    for answer in answers:
        assert await answer == {A: E.NONE, B: E.NONE}
    ((broker_id, request, _),) = room.cluster.sent
    assert broker_id == 2
    assert [(each.transactional_id, each.verify_only) for each in request.transactions] == [
        ("there-0", True), ("there-1", True), ("there-2", False),
    ]  # fmt: skip


async def test_questions_about_one_transaction_become_one(room: Room):
    """Kafka refuses the first of two requests of one producer, which then sends it again."""
    room.errors[B] = [E.INVALID_TXN_STATE]
    first, second = room.verify("there", A), room.verify("there", B)
    assert (await first, await second) == ({A: E.NONE}, {B: E.INVALID_TXN_STATE})
    assert len(room.cluster.sent[0][1].transactions) == 1


async def test_those_of_another_epoch_go_on_their_own(room: Room):
    await asyncio.gather(room.verify("there", A, epoch=1), room.verify("there", A, epoch=2))
    assert [len(request.transactions) for _, request, _ in room.cluster.sent] == [1, 1]
    assert [request.transactions[0].producer_epoch for _, request, _ in room.cluster.sent] == [1, 2]


@pytest.mark.parametrize("txn_id", ["nowhere", "unknown"])
async def test_without_a_coordinator_that_is_the_answer(room: Room, txn_id: str):
    assert await room.verify(txn_id) == {A: E.COORDINATOR_NOT_AVAILABLE}


async def test_without_an_answer_that_is_the_answer(room: Room):
    room.cluster.answer = lambda broker_id, request: None
    assert await room.verify("there", A, B) == {A: E.NETWORK_EXCEPTION, B: E.NETWORK_EXCEPTION}


async def test_an_unexpected_error_is_answered_too(room: Room):
    malformed: Any = [None]
    room.cluster.answer = lambda broker_id, request: AddPartitionsToTxnResponse(results_by_transaction=malformed)
    answer = await asyncio.wait_for(room.verify("there", A, B), 5)
    assert answer == {A: E.NETWORK_EXCEPTION, B: E.NETWORK_EXCEPTION}
    assert len(room.verifier) == 0


@pytest.mark.parametrize(
    ("refusal", "told"),
    [(E.CLUSTER_AUTHORIZATION_FAILED, E.INVALID_TXN_STATE), (E.UNKNOWN_SERVER_ERROR, E.UNKNOWN_SERVER_ERROR)],
)
async def test_a_refusal_of_the_whole_request_is_everybodys(room: Room, refusal: ErrorCode, told: ErrorCode):
    room.refusal = refusal
    assert await room.verify("there", A, B) == {A: told, B: told}


async def test_a_fenced_producer_is_told_what_it_expects(room: Room):
    room.errors[A] = [E.PRODUCER_FENCED]
    assert await room.verify("there") == {A: E.INVALID_PRODUCER_EPOCH}


async def test_a_partition_that_its_coordinator_does_not_know_yet_does_not_fail_the_others(room: Room):
    """The coordinator's metadata may be a moment old. After OPERATION_NOT_ATTEMPTED producers would not try again."""
    room.errors = {A: [E.OPERATION_NOT_ATTEMPTED], B: [E.UNKNOWN_TOPIC_OR_PARTITION]}
    first, second = await asyncio.gather(room.verify("there", A, adds=True), room.verify("there", B, adds=True))
    assert first | second == {A: E.COORDINATOR_NOT_AVAILABLE, B: E.UNKNOWN_TOPIC_OR_PARTITION}


async def test_what_an_answer_leaves_out_is_not_verified(room: Room):
    room.cluster.answer = lambda broker_id, request: AddPartitionsToTxnResponse()
    assert await room.verify("there") == {A: E.UNKNOWN_SERVER_ERROR}
    room.cluster.answer = room._answer
    room.errors[A] = [12345]
    assert await room.verify("there") == {A: E.UNKNOWN_SERVER_ERROR}


@pytest.mark.parametrize("txn_id", ["here", "there"])
async def test_a_transaction_that_ends_is_waited_for_when_partitions_are_added(room: Room, txn_id: str):
    room.here.answers = [E.CONCURRENT_TRANSACTIONS] * 3
    room.errors[A] = [E.CONCURRENT_TRANSACTIONS] * 3
    assert await room.verify(txn_id, adds=True) == {A: E.NONE}
    assert len(room.here.asked) + len(room.cluster.sent) == 4


async def test_it_is_not_waited_for_when_partitions_are_verified_only(room: Room):
    room.here.answers = [E.CONCURRENT_TRANSACTIONS]
    assert await room.verify("here") == {A: E.CONCURRENT_TRANSACTIONS}


async def test_nor_for_longer_than_the_setting_says(room: Room):
    room.here.answers = [E.CONCURRENT_TRANSACTIONS] * 10_000
    room.verifier._retry_max_s = 0.02
    assert await room.verify("here", adds=True) == {A: E.CONCURRENT_TRANSACTIONS}


async def test_questions_are_bounded(room: Room, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(transaction_verifier, "QUESTIONS_MAX", 2)
    held = room.cluster.hold(2)
    waiting = [room.verify(f"there-{number}") for number in range(2)]
    assert await room.verify("there-2") == {A: E.COORDINATOR_NOT_AVAILABLE}
    held.set()
    assert await asyncio.gather(*waiting) == [{A: E.NONE}] * 2
    assert await room.verify("there-3") == {A: E.NONE}


async def test_a_request_is_bounded(room: Room, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(transaction_verifier, "TRANSACTIONS_PER_REQUEST_MAX", 2)
    await asyncio.gather(*(room.verify(f"there-{number}") for number in range(5)))
    assert [len(request.transactions) for _, request, _ in room.cluster.sent] == [2, 2, 1]


async def test_at_the_end_whoever_waits_is_answered(room: Room):
    room.cluster.hold(2)
    answer = room.verify("there")
    await until(lambda: room.cluster.sent)
    await room.verifier.close()
    assert await answer == {A: E.COORDINATOR_NOT_AVAILABLE}


async def test_failures_are_counted(room: Room):
    room.here.answers = [E.INVALID_TXN_STATE]
    await room.verify("here", A, B)
    await room.verify("here")
    assert room.verifier.failures == 2


async def test_a_coordinator_of_an_older_release_gets_the_version_that_it_serves(room: Room):
    room.cluster.served = {2: {AddPartitionsToTxnRequest.API_KEY or 0: 4}}
    assert await room.verify("there") == {A: E.NETWORK_EXCEPTION}, "the producer tries again"
    assert await room.verify("there") == {A: E.NONE}
    assert room.cluster.versions == [(2, 4)]


async def test_a_coordinator_that_cannot_verify_is_believed(room: Room):
    """As in Kafka: releases before 3.6 verify nothing."""
    room.cluster.served = {2: {AddPartitionsToTxnRequest.API_KEY or 0: 3}}
    assert await room.verify("there") == {A: E.NETWORK_EXCEPTION}
    assert await room.verify("there") == {A: E.NONE}
    assert await room.verify("there", adds=True) == {A: E.NETWORK_EXCEPTION}
    assert not room.cluster.versions
