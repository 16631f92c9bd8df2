"""End to end: one 1 KB record at a time from a producer's socket to a consumer's, with the consumer already waiting.

Two raw connections: a Fetch is parked at the end of the partition, then the record is produced (acks=all); the latency
runs from the send to the arrival of the record. The next begins when both answers are in.
"""

from __future__ import annotations

import time
from array import array

from tidelog.bench import frames
from tidelog.bench.raw import BenchError, RawConnection, Timing
from tidelog.bench.scenarios.base import Contestant, CpuMeter, Metric, Scenario, topic

_VALUE = b"v" * 1000


class EndToEnd(Scenario):
    metrics = (
        Metric("cpu", "us/message", ratio_at_most=1.0),
        Metric("p50", "us", ratio_at_most=1.0),
        Metric("p99", "us"),
    )

    def __init__(self) -> None:
        super().__init__("end-to-end", "end to end 1 KB, one in flight")

    def warm(self, contestant: Contestant, scale: float) -> None:
        with topic(contestant, 1) as name:
            self._run(contestant, name, 8_000)

    def measure(self, contestant: Contestant, scale: float) -> dict[str, float]:
        count = max(int(5_000 * scale), 100)
        with topic(contestant, 1) as name:
            offset = self._run(contestant, name, 100)[1]
            with CpuMeter(contestant.server) as meter:
                timing, _ = self._run(contestant, name, count, offset)
        return {
            "cpu": meter.used_ns / 1000 / count,
            "p50": timing.percentile_us(50),
            "p99": timing.percentile_us(99),
        }

    def _run(self, contestant: Contestant, name: str, count: int, offset: int = 0) -> tuple[Timing, int]:
        """`count` messages from `offset` on; returns their timing and the offset behind them."""
        plan = frames.ProducePlan(name, {0: frames.record_batch([_VALUE], int(time.time() * 1000))})
        request = frames.produce(plan, 7)
        port, latencies, clock = contestant.server.port, array("q"), time.perf_counter_ns
        with RawConnection(port) as producer, RawConnection(port) as consumer:
            began = clock()
            for number in range(count):
                consumer.send(frames.fetch(name, {0: offset}, number))
                sent_at = clock()
                producer.send(request)
                fetched = frames.read_fetch_answer(consumer.receive())
                latencies.append(clock() - sent_at)
                if fetched.error_code or fetched.records_size_bytes != len(plan.batches[0]):
                    raise BenchError(f"fetch at {offset}: {fetched}")
                if any(errors := plan.errors(producer.receive())):
                    raise BenchError(f"produce at {offset}: error codes {errors}")
                offset += 1
            return Timing(latencies, (clock() - began) / 1e9), offset


def scenarios() -> list[Scenario]:
    return [EndToEnd()]
