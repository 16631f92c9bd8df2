"""`metrics()` of producers and consumers counts what happened, once."""

from __future__ import annotations

import asyncio

import pytest

from tests.patience import until
from tests.unit.client.fake_broker import SILENCE, FakeCluster, refuse_produce
from tests.unit.client.test_producer import numbered, producer
from tidelog import Consumer, Producer, TopicPartition
from tidelog.client import sync
from tidelog.protocol.errors import ErrorCode, KafkaError
from tidelog.protocol.messages.produce import ProduceRequest
from tidelog.testing.embedded import EmbeddedBroker


async def test_records_retries_splits_and_failures_are_counted_once() -> None:
    async with FakeCluster(t=1) as cluster, producer(cluster, buffer_memory=100_000) as sending:
        assert sending.metrics().record_delivered_total == 0
        cluster.script(ProduceRequest, refuse_produce(ErrorCode.NOT_ENOUGH_REPLICAS))
        await (await sending.send_many("t", numbered(10)))
        cluster.topics["t"][0].max_batch_bytes = 200
        await (await sending.send_many("t", [b"x" * 50] * 4))
        with pytest.raises(KafkaError):
            await sending.send_and_wait("t", b"x" * 300)
        metrics = sending.metrics()
        assert (metrics.record_delivered_total, metrics.record_error_total) == (14, 1)
        assert metrics.record_retry_total >= 14
        assert metrics.batch_split_total >= 1
        assert metrics.request_total == sum(type(request) is ProduceRequest for *_, request in cluster.requests)
        assert metrics.byte_total > 14 * 50
        assert 0 < metrics.request_latency_avg_ms <= metrics.request_latency_max_ms
        assert (metrics.requests_in_flight, metrics.incomplete_batches, metrics.waiting_calls) == (0, 0, 0)
        assert metrics.buffer_total_bytes == metrics.buffer_available_bytes == 100_000


async def test_what_is_underway_is_seen_and_a_lost_request_ends() -> None:
    async with FakeCluster(t=1) as cluster:
        cluster.script(ProduceRequest, lambda request, node: SILENCE)
        sending = producer(cluster, buffer_memory=1_000, batch_size=100)
        first = await sending.send("t", b"x" * 500)
        await until(lambda: sending.metrics().requests_in_flight)
        call = asyncio.ensure_future(sending.send("t", b"x" * 800))
        await until(lambda: sending.metrics().waiting_calls)
        metrics = sending.metrics()
        assert (metrics.incomplete_batches, metrics.buffer_available_bytes) == (1, 1_000 - 500 - 128)
        call.cancel()
        await asyncio.wait([call])
        await sending.close(0)
        assert first.exception() is not None
        assert (sending.metrics().waiting_calls, sending.metrics().record_error_total) == (0, 1)


async def test_both_clients_against_a_real_node() -> None:
    with EmbeddedBroker() as broker:
        brokers = broker.bootstrap_servers
        async with Producer(bootstrap_servers=brokers) as sending:
            await (await sending.send_many("t", numbered(100)))
            assert sending.metrics().record_delivered_total == 100
        async with Consumer("t", bootstrap_servers=brokers, auto_offset_reset="earliest") as reading:
            assert reading.metrics().records_lag_max is None
            taken = 0
            while taken < 60:
                taken += sum(map(len, (await reading.poll(1000, max_records=60 - taken)).values()))
            metrics = reading.metrics()
            assert (metrics.records_consumed_total, metrics.assigned_partitions) == (60, 1)
            assert metrics.lag == {TopicPartition("t", 0): 40}
            assert metrics.records_lag_max == 40
        await asyncio.to_thread(use_blocking_clients, brokers)


def use_blocking_clients(brokers: str) -> None:
    with sync.Producer(bootstrap_servers=brokers) as sending:
        sending.send_and_wait("t", b"x")
        assert sending.metrics().record_delivered_total == 1
    with sync.Consumer("t", bootstrap_servers=brokers, auto_offset_reset="earliest") as reading:
        taken = 0
        while taken < 101:
            taken += sum(map(len, reading.poll(1000).values()))
        assert reading.metrics().records_consumed_total == 101
