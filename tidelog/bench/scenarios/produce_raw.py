"""Produce on a raw connection: the broker's cost per request, and the latency, with 1 and 16 in flight.

acks=all, no idempotence, no compression; records of 1,000 bytes (or one of 200) in one batch per partition. On three
brokers each partition has three replicas, the request goes to the leader, and the CPU is that of all three.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from tidelog.bench.floor import Floor
from tidelog.bench.frames import ProducePlan, record_batch
from tidelog.bench.raw import RawConnection
from tidelog.bench.scenarios.base import Contestant, CpuMeter, Metric, Scenario, Topic, topic
from tidelog.testing.usage import warm_pages

_FIRST_REQUESTS = 200
# The CPU of a 200 B request, as a multiple of the floor's, by the number of requests in flight.
_FLOORS_AT_MOST = {1: 1.45, 16: 2.3}


@dataclass(frozen=True, slots=True)
class Load:
    """A batch of `records` values of `value_bytes` for each of `partitions`; how many requests measure and warm."""

    name: str
    title: str
    partitions: int
    records: int
    value_bytes: int
    requests: int
    warm_requests: int


class ProduceRaw(Scenario):
    """One load with `window` requests in flight. A request carries the partitions that its broker leads."""

    def __init__(
        self,
        load: Load,
        window: int,
        cpu: Metric,
        *,
        brokers: int = 1,
        p50_ratio: float = 1.0,
        floors: Metric | None = None,
    ) -> None:
        prefix, where = ("rf3-", "RF 3: ") if brokers > 1 else ("", "")
        super().__init__(
            f"{prefix}produce-{load.name}-w{window}", f"{where}produce {load.title}, {window} in flight", brokers
        )
        self.load, self.window = load, window
        self.metrics = (cpu, Metric("p50", "us", ratio_at_most=p50_ratio), Metric("p99", "us"), Metric("rate", "1/s"))
        if floors is not None:
            self.metrics += (Metric("floor", "us/request"), floors)

    def _plan(self, its: Topic) -> ProducePlan:
        batch = record_batch([b"v" * self.load.value_bytes] * self.load.records, int(time.time() * 1000))
        return ProducePlan(its.name, dict.fromkeys(its.led_beside_the_first(), batch))

    def warm(self, contestant: Contestant, scale: float) -> None:
        left = int(self.load.warm_requests * scale)
        while left > 0:
            count = min(left, self.load.requests)
            with topic(contestant, self.load.partitions) as its, RawConnection(its.port) as connection:
                connection.pipeline_produce(self._plan(its), count, self.window)
            left -= count

    def measure(self, contestant: Contestant, scale: float) -> dict[str, float]:
        count = max(int(self.load.requests * scale), 10 * self.window)
        with topic(contestant, self.load.partitions) as its, RawConnection(its.port) as connection:
            plan = self._plan(its)
            warm_pages(count * sum(map(len, plan.batches.values())) * contestant.replicas)
            # The first requests to a new partition open its files.
            connection.pipeline_produce(plan, _FIRST_REQUESTS, self.window)
            with CpuMeter(contestant.servers) as meter:
                timing = connection.pipeline_produce(plan, count, self.window)
            floor_us = self._floor_us(contestant, plan, count) if len(self.metrics) > 4 else 0.0
        cpu_us = meter.used_ns / 1000 / count
        figures = {
            "cpu": cpu_us,
            "p50": timing.percentile_us(50),
            "p99": timing.percentile_us(99),
            "rate": timing.rate,
        }
        return {**figures, "floor": floor_us, "cpu / floor": cpu_us / floor_us} if floor_us else figures

    def _floor_us(self, contestant: Contestant, plan: ProducePlan, count: int) -> float:
        """CPU per request of as many servers that only read, write and answer the same, right after the brokers."""
        warm_pages(count * sum(map(len, plan.batches.values())) * contestant.replicas)
        with Floor(contestant.scratch, plan, contestant.replicas) as floor, RawConnection(floor.port) as connection:
            connection.pipeline_produce(plan, 10 * _FIRST_REQUESTS, self.window)
            before_ns = floor.cpu_ns
            connection.pipeline_produce(plan, count, self.window)
            return (floor.cpu_ns - before_ns) / 1000 / count


def scenarios() -> list[Scenario]:
    """200 B, 16 KB and 12 x 16 KB, each with 1 and 16 in flight, with the budget of the design.

    Then with three replicas: the 200 B request is to be five times cheaper than Kafka's and twice as fast.
    """
    alone: Sequence[tuple[Load, Metric]] = (
        (Load("200b", "200 B", 1, 1, 200, 15_000, 30_000), _cpu(20, 1 / 5)),
        (Load("16kb", "16 KB", 1, 16, 1000, 10_000, 20_000), _cpu(30, 1.0)),
        (Load("12x16kb", "12 x 16 KB", 12, 16, 1000, 2_000, 8_000), _cpu(200, 1.0)),
    )
    replicated: Sequence[tuple[Load, Metric, float]] = (
        (Load("200b", "200 B", 1, 1, 200, 4_000, 28_000), _cpu(None, 1 / 5), 1 / 2),
        (Load("16kb", "16 KB", 1, 16, 1000, 3_000, 12_000), _cpu(None, 1.0), 1.0),
        (Load("12x16kb", "12 x 16 KB, a third on each broker", 12, 16, 1000, 1_000, 5_000), _cpu(None, 1.0), 1.0),
    )
    return [
        *(
            ProduceRaw(load, window, cpu, floors=_floors(_FLOORS_AT_MOST[window]) if load.value_bytes == 200 else None)
            for load, cpu in alone
            for window in (1, 16)
        ),
        *(
            ProduceRaw(
                load,
                window,
                cpu,
                brokers=3,
                p50_ratio=p50_ratio,
                floors=_floors() if load.value_bytes == 200 and window == 1 else None,
            )
            for load, cpu, p50_ratio in replicated
            for window in (1, 16)
        ),
    ]


def _cpu(at_most: float | None, ratio_at_most: float) -> Metric:
    return Metric("cpu", "us/request", at_most=at_most, ratio_at_most=ratio_at_most)


def _floors(at_most: float | None = None) -> Metric:
    return Metric("cpu / floor", "x", at_most=at_most)
