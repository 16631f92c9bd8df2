"""Produce on a raw connection: what one request costs the broker, and how long it takes, with 1 and 16 in flight.

acks=all on one node, no idempotence, no compression; records of 1,000 bytes (or one of 200) in one batch per partition.
"""

from __future__ import annotations

import time

from tidelog.bench.frames import ProducePlan, record_batch
from tidelog.bench.raw import RawConnection
from tidelog.bench.scenarios.base import Contestant, CpuMeter, Metric, Scenario, topic
from tidelog.bench.usage import warm_pages

_FIRST_REQUESTS = 200


class ProduceRaw(Scenario):
    """`partitions` batches of `records` values of `value_bytes` in every request, `window` requests in flight."""

    def __init__(
        self,
        name: str,
        title: str,
        *,
        partitions: int,
        records: int,
        value_bytes: int,
        window: int,
        requests: int,
        warm_requests: int,
        cpu: Metric,
    ) -> None:
        super().__init__(name, title)
        self.partitions, self.window, self.requests, self.warm_requests = partitions, window, requests, warm_requests
        self.values = [b"v" * value_bytes] * records
        self.metrics = (
            cpu,
            Metric("p50", "us", ratio_at_most=1.0),
            Metric("p99", "us"),
            Metric("rate", "1/s"),
        )

    def _plan(self, name: str) -> ProducePlan:
        batch = record_batch(self.values, int(time.time() * 1000))
        return ProducePlan(name, dict.fromkeys(range(self.partitions), batch))

    def warm(self, contestant: Contestant, scale: float) -> None:
        left = int(self.warm_requests * scale)
        while left > 0:
            count = min(left, self.requests)
            with topic(contestant, self.partitions) as name, RawConnection(contestant.server.port) as connection:
                connection.pipeline_produce(self._plan(name), count, self.window)
            left -= count

    def measure(self, contestant: Contestant, scale: float) -> dict[str, float]:
        count = max(int(self.requests * scale), 10 * self.window)
        with topic(contestant, self.partitions) as name, RawConnection(contestant.server.port) as connection:
            plan = self._plan(name)
            warm_pages(count * sum(map(len, plan.batches.values())))
            # The first requests to a new partition open its files.
            connection.pipeline_produce(plan, _FIRST_REQUESTS, self.window)
            with CpuMeter(contestant.server) as meter:
                timing = connection.pipeline_produce(plan, count, self.window)
        return {
            "cpu": meter.used_ns / 1000 / count,
            "p50": timing.percentile_us(50),
            "p99": timing.percentile_us(99),
            "rate": timing.rate,
        }


def scenarios() -> list[Scenario]:
    """200 B, 16 KB and 12 x 16 KB, each with 1 and 16 in flight, with the budget of the design."""
    sizes = [
        # name, title, partitions, records, value bytes, requests, requests to warm, CPU target
        ("200b", "200 B", 1, 1, 200, 15_000, 30_000, Metric("cpu", "us/request", at_most=20, ratio_at_most=1 / 5)),
        ("16kb", "16 KB", 1, 16, 1000, 10_000, 20_000, Metric("cpu", "us/request", at_most=30, ratio_at_most=1.0)),
        (
            "12x16kb",
            "12 x 16 KB",
            12,
            16,
            1000,
            2_000,
            8_000,
            Metric("cpu", "us/request", at_most=200, ratio_at_most=1.0),
        ),
    ]
    return [
        ProduceRaw(
            f"produce-{name}-w{window}",
            f"produce {title}, {window} in flight",
            partitions=partitions,
            records=records,
            value_bytes=value_bytes,
            window=window,
            requests=requests,
            warm_requests=warm_requests,
            cpu=cpu,
        )
        for name, title, partitions, records, value_bytes, requests, warm_requests, cpu in sizes
        for window in (1, 16)
    ]
