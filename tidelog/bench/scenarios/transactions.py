"""A transaction of one record of 1 KB, from its begin to its acknowledged commit, one after another.

By librdkafka, which speaks version 1 of the protocol, and by Tidelog's own client on uvloop,
which speaks version 2 where the cluster has it. Both write to one partition; the CPU is that of all nodes.
"""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import Callable
from typing import Any

from tidelog.bench.raw import BenchError, Timing
from tidelog.bench.scenarios.base import Contestant, CpuMeter, Metric, Scenario, topic
from tidelog.client.sync.loop_thread import new_loop
from tidelog.protocol.errors import KafkaError

_VALUE = b"v" * 1000
_FIRST_TRANSACTIONS = 20
_TIMEOUT_S = 60.0

Run = Callable[[str, str, str, int], Timing]
"""Bootstrap servers, topic, transactional id, number of transactions."""


class Transactions(Scenario):
    metrics = (
        Metric("cpu", "us/transaction", ratio_at_most=1 / 3),
        Metric("p50", "us", ratio_at_most=1 / 2),
        Metric("p99", "us"),
    )

    def __init__(self, name: str, title: str, run: Run, *, brokers: int, transactions: int, warm: int) -> None:
        super().__init__(name, title, brokers)
        self._run, self.transactions, self.warm_transactions = run, transactions, warm

    def warm(self, contestant: Contestant, scale: float) -> None:
        self._measure(contestant, max(int(self.warm_transactions * scale), 20))

    def measure(self, contestant: Contestant, scale: float) -> dict[str, float]:
        count = max(int(self.transactions * scale), 20)
        timing, cpu_us = self._measure(contestant, count)
        return {"cpu": cpu_us / count, "p50": timing.percentile_us(50), "p99": timing.percentile_us(99)}

    def _measure(self, contestant: Contestant, count: int) -> tuple[Timing, float]:
        with topic(contestant, 1) as its:
            bootstrap = contestant.cluster.bootstrap_servers
            name = f"{self.name}-{its.name}"
            # The first ones find the coordinator and open files.
            self._run(bootstrap, its.name, name, _FIRST_TRANSACTIONS)
            with CpuMeter(contestant.servers) as meter:
                timing = self._run(bootstrap, its.name, name, count)
            return timing, meter.used_ns / 1000


def _by_librdkafka(bootstrap: str, name: str, transactional_id: str, count: int) -> Timing:
    from confluent_kafka import Producer

    failures: list[Any] = []
    producer = Producer(
        {
            "bootstrap.servers": bootstrap,
            "transactional.id": transactional_id,
            "linger.ms": 0,
            "log_level": 0,
            "delivery.report.only.error": True,
            "on_delivery": lambda error, _: failures.append(error) if error is not None else None,
        }
    )
    producer.init_transactions(_TIMEOUT_S)
    latencies, clock = array("q"), time.perf_counter_ns
    start_ns = clock()
    for _ in range(count):
        began_ns = clock()
        producer.begin_transaction()
        producer.produce(name, _VALUE, partition=0)
        producer.commit_transaction(_TIMEOUT_S)
        latencies.append(clock() - began_ns)
    if failures:
        raise BenchError(f"{len(failures)} records failed: {failures[:1]}")
    return Timing(latencies, (clock() - start_ns) / 1e9)


def _by_our_client(bootstrap: str, name: str, transactional_id: str, count: int) -> Timing:
    from tidelog.client import Producer

    async def run() -> Timing:
        latencies, clock = array("q"), time.perf_counter_ns
        async with Producer(
            bootstrap_servers=bootstrap, transactional_id=transactional_id, linger_ms=0, max_block_ms=60_000
        ) as producer:
            await producer.init_transactions()
            start_ns = clock()
            for _ in range(count):
                began_ns = clock()
                async with producer.transaction():
                    await producer.send(name, _VALUE, partition=0)
                latencies.append(clock() - began_ns)
            return Timing(latencies, (clock() - start_ns) / 1e9)

    try:
        with asyncio.Runner(loop_factory=new_loop) as runner:
            return runner.run(run())
    except KafkaError as error:
        raise BenchError(str(error)) from error


def scenarios() -> list[Scenario]:
    """One node, then three replicas; the small transaction is to take half of Kafka's p50 and a third of its CPU."""
    clients: tuple[tuple[str, str, Run], ...] = (
        ("librdkafka", "librdkafka", _by_librdkafka),
        ("v2", "own client, version 2", _by_our_client),
    )
    return [
        Transactions(
            f"{'rf3-' if brokers > 1 else ''}transaction-{name}",
            f"{'RF 3: ' if brokers > 1 else ''}transaction of 1 KB, {title}",
            run,
            brokers=brokers,
            transactions=500,
            warm=1_000,
        )
        for brokers in (1, 3)
        for name, title, run in clients
    ]
