"""A broker that was killed forgets all but the last batch of a producer: its log is asked, or the records fail."""

from __future__ import annotations

import asyncio
import logging
import random
from types import SimpleNamespace
from typing import Any

import pytest

from tests.patience import PATIENCE_S, until
from tests.unit.client.fake_broker import DROP, SILENCE, FakeCluster, FakeNode
from tests.unit.client.test_producer import handled, numbered, producer, values
from tests.unit.client.transacting import limited
from tidelog.client import Producer
from tidelog.client.model import RecordMetadata, TopicPartition
from tidelog.client.network.backoff import ExponentialBackoff
from tidelog.client.producing.log_inquirer import LogInquirer
from tidelog.protocol.errors import ErrorCode, KafkaError
from tidelog.protocol.messages.describe_producers import (
    DescribeProducersRequest,
    DescribeProducersResponse,
    DescribeProducersResponsePartitionResponse,
    DescribeProducersResponseTopicResponse,
)
from tidelog.protocol.messages.init_producer_id import InitProducerIdRequest
from tidelog.protocol.messages.produce import ProduceRequest

SENT = [b"first", *numbered(5)]
Sent = list[asyncio.Future[RecordMetadata]]


async def five_unheard(cluster: FakeCluster, sending: Producer, processed: int = 5) -> Sent:
    """One batch is acknowledged, five are on the wire; the broker takes some of them, dies, and comes back."""
    await sending.send_and_wait("t", SENT[0])
    taken = 0

    def take(request: Any, node: FakeNode) -> object:
        nonlocal taken
        taken += 1
        if taken <= processed:
            handled(request, node)
        if taken < 5:
            return SILENCE
        cluster.topics["t"][0].forget_all_but_the_last()
        return DROP

    cluster.script(ProduceRequest, *[take] * 5)
    sent = []
    for number, value in enumerate(SENT[1:], 1):
        sent.append(await sending.send("t", value))
        await until(lambda: taken >= number)  # a batch of its own  # noqa: B023
    return sent


def describe(code: ErrorCode) -> Any:
    def action(request: DescribeProducersRequest, node: FakeNode) -> DescribeProducersResponse:
        partition = DescribeProducersResponsePartitionResponse(partition_index=0, error_code=code)
        topic = DescribeProducersResponseTopicResponse(name="t", partitions=[partition])
        return DescribeProducersResponse(topics=[topic])

    return action


@pytest.mark.parametrize("processed", range(6))
async def test_what_a_killed_broker_took_unheard_is_written_once(processed):
    async with FakeCluster(t=1) as cluster, producer(cluster) as sending:
        outcomes = await asyncio.gather(*await five_unheard(cluster, sending, processed))
        assert values(cluster) == SENT
        # The broker recognises the last batch that it took, and says its offset; those before it are without.
        unknown = max(0, processed - 1)
        assert [outcome.offset for outcome in outcomes] == [-1] * unknown + list(range(unknown + 1, 6))
        assert len(cluster.sent(DescribeProducersRequest)) == (1 if processed > 1 else 0)
        assert (await sending.send_and_wait("t", b"more")).offset == 6


async def test_a_log_that_cannot_be_asked_now_is_asked_again():
    async with FakeCluster(t=1) as cluster, producer(cluster) as sending:
        cluster.script(
            DescribeProducersRequest,
            lambda request, node: DROP,
            lambda request, node: SILENCE,
            describe(ErrorCode.NOT_LEADER_OR_FOLLOWER),
        )
        sent = await five_unheard(cluster, sending)
        with limited(sending, request_timeout_ms=1_000):
            await asyncio.gather(*sent)
        assert values(cluster) == SENT
        assert len(cluster.sent(DescribeProducersRequest)) == 4


async def test_a_batch_that_was_taken_unheard_and_is_too_large_now_ends_and_is_written_once(caplog):
    """Its parts are no duplicates of it, so that no answer says whether it is committed."""
    caplog.set_level(logging.CRITICAL, "tidelog")
    async with FakeCluster(t=1) as cluster, producer(cluster, linger_ms=50) as sending:

        def take(request: Any, node: FakeNode) -> object:
            handled(request, node)
            cluster.topics["t"][0].max_batch_bytes = 200
            return DROP

        cluster.script(ProduceRequest, take)
        sent = [await sending.send("t", value) for value in numbered(20)]
        async with asyncio.timeout(PATIENCE_S):
            outcomes = await asyncio.gather(*sent, return_exceptions=True)
        for outcome in outcomes:
            assert isinstance(outcome, KafkaError)
            assert outcome.code is ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER
            assert "in the leader's log" in str(outcome)
        assert len(cluster.sent(DescribeProducersRequest)) == 2
        await sending.send_and_wait("t", b"more")
        assert values(cluster) == [*numbered(20), b"more"]


async def test_the_parts_of_a_batch_that_was_taken_unheard_are_acknowledged_with_the_next_batch():
    async with FakeCluster(t=1) as cluster, producer(cluster, linger_ms=50) as sending:
        await sending.send_and_wait("t", b"first")
        taken = 0

        def take(request: Any, node: FakeNode) -> object:
            nonlocal taken
            taken += 1
            handled(request, node)
            if taken == 1:
                return SILENCE
            cluster.topics["t"][0].max_batch_bytes = 200
            return DROP

        cluster.script(ProduceRequest, take, take)
        sent = [await sending.send("t", value) for value in numbered(20)]
        await until(lambda: taken == 1)
        sent.append(await sending.send("t", b"next"))
        outcomes = await asyncio.gather(*sent)
        assert [outcome.offset for outcome in outcomes] == [-1] * 20 + [21]
        assert values(cluster) == [b"first", *numbered(20), b"next"]


@pytest.mark.parametrize("refused_as", [None, ErrorCode.TOPIC_AUTHORIZATION_FAILED])
async def test_records_in_doubt_fail_when_the_log_cannot_be_asked_at_all(refused_as, caplog):
    caplog.set_level(logging.CRITICAL, "tidelog")
    async with FakeCluster(t=1) as cluster:
        if refused_as is None:
            cluster.versions[61] = (0, -1)  # a broker before Kafka 2.8
        else:
            cluster.script(DescribeProducersRequest, describe(refused_as))
        async with producer(cluster) as sending:
            outcomes = await asyncio.gather(*await five_unheard(cluster, sending), return_exceptions=True)
            for outcome in outcomes:
                assert isinstance(outcome, KafkaError)
                assert outcome.code is ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER
                assert "may be in the log or not" in str(outcome)
                assert ("DescribeProducers" if refused_as is None else refused_as.name) in str(outcome)
            await sending.send_and_wait("t", b"more")
            assert values(cluster) == [*SENT, b"more"]


async def test_an_epoch_that_is_not_ours_says_nothing_of_our_records(caplog):
    caplog.set_level(logging.CRITICAL, "tidelog")
    async with FakeCluster(t=1) as cluster, producer(cluster) as sending:
        waiting = await five_unheard(cluster, sending)
        [(producer_id, (_, following, recent))] = cluster.topics["t"][0].producers.items()
        cluster.topics["t"][0].producers[producer_id] = (7, following, recent)
        outcomes = await asyncio.gather(*waiting, return_exceptions=True)
        assert {type(outcome) for outcome in outcomes} == {KafkaError}
        assert "epoch 7" in str(outcomes[0])
        assert values(cluster) == SENT


async def test_a_log_without_the_producer_has_lost_its_records_and_they_are_sent_under_a_new_epoch():
    """An unclean election: what was acknowledged is gone, and so is what was not."""
    async with FakeCluster(t=1) as cluster, producer(cluster) as sending:
        for value in numbered(3):
            await sending.send_and_wait("t", value)
        partition = cluster.topics["t"][0]
        [producer_id] = partition.producers

        def lose(request: Any, node: FakeNode) -> object:
            del partition.batches[1:]
            epoch, _, recent = partition.producers[producer_id]
            partition.producers[producer_id] = (epoch, 1, recent)
            recent.clear()
            return DROP

        cluster.script(ProduceRequest, lose)
        await sending.send_and_wait("t", b"after")
        assert values(cluster) == [b"0", b"after"]
        assert partition.producers[producer_id][0] == 1
        assert len(cluster.sent(InitProducerIdRequest)) == 1


async def test_a_leader_that_does_not_answer_does_not_keep_the_inquiries_at_others_from_a_retry():
    asked: list[int] = []

    class ClusterOfLeaders:
        metadata = SimpleNamespace(leader=lambda partition: partition.partition)
        retry_backoff = ExponentialBackoff(1, 2, random.Random(0))

        def request_refresh(self) -> None:
            pass

        async def call(self, node_id: int, *_: object) -> None:
            asked.append(node_id)
            if node_id == 1:
                await asyncio.get_running_loop().create_future()
            raise KafkaError(ErrorCode.NETWORK_EXCEPTION)

    cluster: Any = ClusterOfLeaders()
    session: Any = SimpleNamespace(is_open=lambda *_: True)
    inquirer = LogInquirer(cluster, session, lambda _: None, lambda *_: None)
    inquirer.start([(TopicPartition("t", leader), 1) for leader in (1, 2)])
    await until(lambda: asked.count(2) > 2)
    assert asked.count(1) == 1
    inquirer.close()
