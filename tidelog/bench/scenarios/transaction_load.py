"""Transactions under load: records a second at commit intervals, and a thousand transactional ids at once.

The first row has one librdkafka producer that commits never, each second and each 100 ms. Its figures say how many
times slower it becomes, and how long a committed record takes: a broker that is fast without transactions may lose
more by them and be the faster one still. The second row has a thousand producers of version 2 of the protocol on a few
connections; each runs one transaction of 1 KB after another.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

from tidelog.bench.raw import BenchError
from tidelog.bench.scenarios.base import Contestant, CpuMeter, Metric, Scenario, topic
from tidelog.client.network.connection import Connection, connect
from tidelog.protocol.batches.records import encode_batch
from tidelog.protocol.errors import ErrorCode, KafkaError
from tidelog.protocol.messages.end_txn import EndTxnRequest, EndTxnResponse
from tidelog.protocol.messages.find_coordinator import FindCoordinatorRequest, FindCoordinatorResponse
from tidelog.protocol.messages.init_producer_id import InitProducerIdRequest, InitProducerIdResponse
from tidelog.protocol.messages.produce import (
    PartitionProduceData,
    ProduceRequest,
    ProduceResponse,
    TopicProduceData,
)

_PARTITIONS = 4
_SMALL_VALUE = b"v" * 100
_VALUE = b"v" * 1000
_POLL_EACH = 200
_TIMEOUT_S = 60.0
_TIMEOUT_MS = 60_000.0
_TRANSACTION_KEY_TYPE = 1
_PAUSE_S = 0.02
# Produce 12 carries topic names; it adds partitions to the transaction.
_PRODUCE_VERSION = 12
_RETRIABLE = (ErrorCode.CONCURRENT_TRANSACTIONS, ErrorCode.NOT_ENOUGH_REPLICAS)


class CommitIntervals(Scenario):
    """`seconds`: how long each of the three measurements sends."""

    metrics = (
        Metric("none", "records/s"),
        Metric("none / 1 s", "x", ratio_at_most=1.0),
        Metric("none / 100 ms", "x", ratio_at_most=1.0),
        Metric("elapsed at 1 s", "us/record", ratio_at_most=1.0),
        Metric("elapsed at 100 ms", "us/record", ratio_at_most=1.0),
        Metric("cpu at 100 ms", "us/record", ratio_at_most=1.0),
    )

    def __init__(self, name: str, title: str, *, brokers: int, seconds: float) -> None:
        super().__init__(name, title, brokers)
        self._seconds = seconds

    def warm(self, contestant: Contestant, scale: float) -> None:
        self.measure(contestant, scale / 2)

    def measure(self, contestant: Contestant, scale: float) -> dict[str, float]:
        seconds = max(self._seconds * scale, 0.5)
        none, _ = self._rate(contestant, None, seconds)
        each_second, _ = self._rate(contestant, 1.0, seconds)
        each_100_ms, cpu_us = self._rate(contestant, 0.1, seconds)
        return {
            "none": none,
            "none / 1 s": none / each_second,
            "none / 100 ms": none / each_100_ms,
            "elapsed at 1 s": 1e6 / each_second,
            "elapsed at 100 ms": 1e6 / each_100_ms,
            "cpu at 100 ms": cpu_us,
        }

    def _rate(self, contestant: Contestant, interval_s: float | None, seconds: float) -> tuple[float, float]:
        """Records a second that are acknowledged, or committed; and the CPU of a record."""
        with topic(contestant, _PARTITIONS) as its:
            bootstrap = contestant.cluster.bootstrap_servers
            name = None if interval_s is None else f"{self.name}-{its.name}"
            producer, failures = _producer(bootstrap, name)
            with CpuMeter(contestant.servers) as meter:
                began = time.perf_counter()
                count = _send(producer, its.name, seconds, interval_s)
                elapsed_s = time.perf_counter() - began
            if failures:
                raise BenchError(f"{len(failures)} records failed: {failures[:1]}")
            return count / elapsed_s, meter.used_ns / 1000 / count


def _producer(bootstrap: str, transactional_id: str | None) -> tuple[Any, list[Any]]:
    from confluent_kafka import Producer

    failures: list[Any] = []
    settings: dict[str, Any] = {
        "bootstrap.servers": bootstrap,
        "enable.idempotence": True,
        "linger.ms": 5,
        "log_level": 0,
        "delivery.report.only.error": True,
        "on_delivery": lambda error, _: failures.append(error) if error is not None else None,
    }
    if transactional_id is not None:
        settings["transactional.id"] = transactional_id
    producer = Producer(settings)
    if transactional_id is not None:
        producer.init_transactions(_TIMEOUT_S)
    return producer, failures


def _send(producer: Any, name: str, seconds: float, interval_s: float | None) -> int:
    """Send for so long and wait for the end of all. The number of records."""
    count, clock = 0, time.perf_counter
    deadline = clock() + seconds
    commit_at = deadline if interval_s is None else clock() + interval_s
    if interval_s is not None:
        producer.begin_transaction()
    while (now := clock()) < deadline:
        if interval_s is not None and now >= commit_at:
            producer.commit_transaction(_TIMEOUT_S)
            producer.begin_transaction()
            commit_at = clock() + interval_s
        for number in range(_POLL_EACH):
            try:
                producer.produce(name, _SMALL_VALUE, partition=number % _PARTITIONS)
            except BufferError:
                producer.poll(0.01)
                break
            count += 1
        producer.poll(0)
    if interval_s is not None:
        producer.commit_transaction(_TIMEOUT_S)
    elif producer.flush(_TIMEOUT_S):
        raise BenchError("records are left after the flush")
    return count


class ManyIds(Scenario):
    metrics = (
        Metric("cpu", "us/transaction", ratio_at_most=1.0),
        Metric("elapsed", "us/transaction", ratio_at_most=1.0),
    )

    def __init__(self, name: str, title: str, *, ids: int, connections: int, transactions: int) -> None:
        """`transactions`: of each id."""
        super().__init__(name, title, brokers=1)
        self._ids, self._connections, self._transactions = ids, connections, transactions

    def warm(self, contestant: Contestant, scale: float) -> None:
        self.measure(contestant, scale)

    def measure(self, contestant: Contestant, scale: float) -> dict[str, float]:
        count = max(round(self._transactions * scale), 1)
        with topic(contestant, _PARTITIONS) as its:
            try:
                return asyncio.run(self._run(contestant, its.name, count))
            except KafkaError as error:
                raise BenchError(str(error)) from error

    async def _run(self, contestant: Contestant, name: str, count: int) -> dict[str, float]:
        port = contestant.server.port
        connections = [
            await connect(
                "127.0.0.1",
                port,
                client_id="bench",
                max_frame_bytes=1 << 20,
                software_version="0",
                timeout_ms=_TIMEOUT_MS,
            )
            for _ in range(self._connections)
        ]
        try:
            producers = [
                _RawProducer(connections[number % len(connections)], f"{name}-{number}", name, number % _PARTITIONS)
                for number in range(self._ids)
            ]
            await _all(producer.initialize() for producer in producers)
            await _all(producer.run(1) for producer in producers)  # the first opens files
            with CpuMeter(contestant.servers) as meter:
                began = time.perf_counter()
                await _all(producer.run(count) for producer in producers)
                elapsed_s = time.perf_counter() - began
        finally:
            for connection in connections:
                connection.close()
        ended = self._ids * count
        return {"cpu": meter.used_ns / 1000 / ended, "elapsed": elapsed_s * 1e6 / ended}


async def _all(runs: Any) -> None:
    async with asyncio.TaskGroup() as group:
        for run in runs:
            group.create_task(run)


class _RawProducer:
    """One transactional id of version 2: a record, then the end, which says the next epoch."""

    def __init__(self, connection: Connection, transactional_id: str, topic_name: str, partition: int) -> None:
        self._connection, self._id = connection, transactional_id
        self._topic, self._partition = topic_name, partition
        self._producer_id = self._epoch = -1

    async def initialize(self) -> None:
        find = FindCoordinatorRequest(key_type=_TRANSACTION_KEY_TYPE, coordinator_keys=[self._id])
        init = InitProducerIdRequest(
            transactional_id=self._id, transaction_timeout_ms=60_000, producer_id=-1, producer_epoch=-1
        )
        deadline = time.monotonic() + _TIMEOUT_S
        while time.monotonic() < deadline:
            coordinator = await self._connection.call(find, FindCoordinatorResponse, _TIMEOUT_MS)
            if not coordinator.coordinators[0].error_code:
                answer = await self._connection.call(init, InitProducerIdResponse, _TIMEOUT_MS, 5)
                if not answer.error_code:
                    self._producer_id, self._epoch = answer.producer_id, answer.producer_epoch
                    return
            await asyncio.sleep(_PAUSE_S)
        raise BenchError(f"{self._id} gets no producer id")

    async def run(self, count: int) -> None:
        for _ in range(count):
            await self._produce()
            await self._commit()

    async def _produce(self) -> None:
        batch = encode_batch(
            [(int(time.time() * 1000), None, _VALUE, ())], producer_id=self._producer_id,
            producer_epoch=self._epoch, base_sequence=0, transactional=True,
        )  # fmt: skip
        data = TopicProduceData(
            name=self._topic, partition_data=[PartitionProduceData(index=self._partition, records=bytes(batch))]
        )
        request = ProduceRequest(transactional_id=self._id, acks=-1, timeout_ms=30_000, topic_data=[data])

        async def attempt() -> Sequence[int]:
            answer = await self._connection.call(request, ProduceResponse, _TIMEOUT_MS, _PRODUCE_VERSION)
            return [answer.responses[0].partition_responses[0].error_code]

        await _until_taken(attempt)

    async def _commit(self) -> None:
        request = EndTxnRequest(
            transactional_id=self._id, producer_id=self._producer_id, producer_epoch=self._epoch, committed=True
        )

        async def attempt() -> Sequence[int]:
            answer = await self._connection.call(request, EndTxnResponse, _TIMEOUT_MS)
            if not answer.error_code:
                self._producer_id, self._epoch = answer.producer_id, answer.producer_epoch
            return [answer.error_code]

        await _until_taken(attempt)


async def _until_taken(attempt: Any) -> None:
    while True:
        (code,) = await attempt()
        if not code:
            return
        if ErrorCode.of(code) not in _RETRIABLE:
            raise BenchError(f"a transaction ended with {ErrorCode.of(code).name}")
        await asyncio.sleep(_PAUSE_S)


def scenarios() -> list[Scenario]:
    """Not dearer than Kafka on any row."""
    return [
        *(
            CommitIntervals(
                f"{'rf3-' if brokers > 1 else ''}transaction-intervals",
                f"{'RF 3: ' if brokers > 1 else ''}100 B by librdkafka, committed each 100 ms and each second",
                brokers=brokers,
                seconds=4.0,
            )
            for brokers in (1, 3)
        ),
        ManyIds(
            "transaction-1000-ids", "1,000 transactional ids at once, 1 KB each", ids=1000, connections=20,
            transactions=10,
        ),
    ]  # fmt: skip
