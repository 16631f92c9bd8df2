"""librdkafka in and out: the broker's cost per gigabyte, and the rate of a stock client, over 12 partitions.

Keyless records, acks=all, no compression, all else as in `stock_client`. The client is the limit on two cores; the
broker's CPU is the figure to compare.
"""

from __future__ import annotations

import time
from typing import Any

from tidelog.bench.raw import BenchError
from tidelog.bench.scenarios.base import GIGABYTE, MEGABYTE, Contestant, CpuMeter, Metric, Scenario, topic
from tidelog.bench.stock_client import deliver_all, new_consumer, new_producer
from tidelog.testing.usage import warm_pages

_PARTITIONS = 12
_FIRST_RECORDS = 6_000
_DELIVERY_TIMEOUT_S = 60.0


class Librdkafka(Scenario):
    """`records` values of `value_bytes` produced, then consumed from the beginning by one consumer without a group."""

    def __init__(
        self, name: str, title: str, *, value_bytes: int, records: int, metrics: tuple[Metric, ...], brokers: int = 1
    ) -> None:
        super().__init__(name, title, brokers)
        self.value, self.records, self.metrics = b"v" * value_bytes, records, metrics

    def warm(self, contestant: Contestant, scale: float) -> None:
        self.measure(contestant, 0.3)

    def measure(self, contestant: Contestant, scale: float) -> dict[str, float]:
        count = max(int(self.records * scale), 1000)
        first = _FIRST_RECORDS if contestant.replicas > 1 else 0
        size_bytes = count * len(self.value)
        with topic(contestant, _PARTITIONS) as its:
            name = its.name
            # A follower that asked before the new leader was one may wait a second before it asks again.
            self._produce(contestant, name, first)
            warm_pages(int(size_bytes * 1.1) * contestant.replicas)
            began = time.perf_counter()
            with CpuMeter(contestant.servers) as meter_in:
                self._produce(contestant, name, count)
            in_s = time.perf_counter() - began
            began = time.perf_counter()
            with CpuMeter(contestant.servers) as meter_out:
                self._consume(contestant, name, first + count)
            out_s = time.perf_counter() - began
        out_bytes = size_bytes + first * len(self.value)
        every = {
            "cpu in": meter_in.used_ns / 1e9 / size_bytes * GIGABYTE,
            "in": size_bytes / MEGABYTE / in_s,
            "records in": count / in_s,
            "cpu out": meter_out.used_ns / 1e9 / out_bytes * GIGABYTE,
            "out": out_bytes / MEGABYTE / out_s,
            "records out": (first + count) / out_s,
        }
        return {metric.name: every[metric.name] for metric in self.metrics}

    def _produce(self, contestant: Contestant, name: str, count: int) -> None:
        failures: list[Any] = []
        producer = new_producer(contestant.cluster.bootstrap_servers, failures)
        produce, value = producer.produce, self.value
        for _ in range(count):
            try:
                produce(name, value)
            except BufferError:
                producer.poll(0.01)
                while len(producer) > 500_000:
                    producer.poll(0.01)
                produce(name, value)
        deliver_all([producer], failures, _DELIVERY_TIMEOUT_S)

    def _consume(self, contestant: Contestant, name: str, count: int) -> None:
        consumer = new_consumer(contestant.cluster.bootstrap_servers, name, _PARTITIONS)
        try:
            remaining, deadline = count, time.monotonic() + 120
            while remaining > 0:
                messages = consumer.consume(min(10_000, remaining), 1.0)
                failed = [message.error() for message in messages if message.error() is not None]
                if failed or (not messages and time.monotonic() > deadline):
                    raise BenchError(f"{remaining} records still wanted: {failed[:1] or 'nothing comes'}")
                remaining -= len(messages)
        finally:
            consumer.close()


def scenarios() -> list[Scenario]:
    """1 KB for bytes, 100 B for records; with three replicas 1 KB."""
    cpu_in = Metric("cpu in", "s/GB", at_most=0.8, ratio_at_most=1 / 1.2)
    cpu_out = Metric("cpu out", "s/GB", at_most=0.45, ratio_at_most=1.0)
    return [
        Librdkafka(
            "librdkafka-1kb",
            "librdkafka 1 KB, 12 partitions",
            value_bytes=1000,
            records=600_000,
            metrics=(cpu_in, Metric("in", "MB/s"), cpu_out, Metric("out", "MB/s")),
        ),
        Librdkafka(
            "librdkafka-100b",
            "librdkafka 100 B, 12 partitions",
            value_bytes=100,
            records=2_000_000,
            metrics=(
                Metric("cpu in", "s/GB", ratio_at_most=1.0),
                Metric("records in", "1/s"),
                Metric("cpu out", "s/GB", ratio_at_most=1.0),
                Metric("records out", "1/s"),
            ),
        ),
        Librdkafka(
            "rf3-librdkafka-1kb",
            "RF 3: librdkafka 1 KB, 12 partitions",
            value_bytes=1000,
            records=300_000,
            brokers=3,
            metrics=(
                Metric("cpu in", "s/GB", ratio_at_most=1 / 3),
                Metric("in", "MB/s"),
                Metric("cpu out", "s/GB", ratio_at_most=1.0),
                Metric("out", "MB/s"),
            ),
        ),
    ]
