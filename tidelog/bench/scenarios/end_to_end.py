"""End to end: one 1 KB record at a time from a producer's socket to a consumer's, with the consumer already waiting.

Two raw connections: a Fetch is parked at the end of the partition, then the record is produced (acks=all); the latency
runs from the send to the arrival of the record. The next begins when both answers are in.
"""

from __future__ import annotations

import time
from array import array

from tidelog.bench import frames
from tidelog.bench.raw import BenchError, RawConnection, Timing
from tidelog.bench.scenarios.base import Contestant, CpuMeter, Metric, Scenario, Topic, topic

_VALUE = b"v" * 1000


class EndToEnd(Scenario):
    metrics = (
        Metric("cpu", "us/message", ratio_at_most=1.0),
        Metric("p50", "us", ratio_at_most=1.0),
        Metric("p99", "us"),
    )

    def __init__(self, name: str, title: str, *, brokers: int, messages: int, warm_messages: int) -> None:
        super().__init__(name, title, brokers)
        self.messages, self.warm_messages = messages, warm_messages

    def warm(self, contestant: Contestant, scale: float) -> None:
        with topic(contestant, 1) as its:
            self._run(its, max(int(self.warm_messages * scale), 100))

    def measure(self, contestant: Contestant, scale: float) -> dict[str, float]:
        count = max(int(self.messages * scale), 100)
        with topic(contestant, 1) as its:
            offset = self._run(its, 100)[1]
            with CpuMeter(contestant.servers) as meter:
                timing, _ = self._run(its, count, offset)
        return {
            "cpu": meter.used_ns / 1000 / count,
            "p50": timing.percentile_us(50),
            "p99": timing.percentile_us(99),
        }

    def _run(self, its: Topic, count: int, offset: int = 0) -> tuple[Timing, int]:
        """`count` messages from `offset` on; returns their timing and the offset behind them."""
        plan = frames.ProducePlan(its.name, {0: frames.record_batch([_VALUE], int(time.time() * 1000))})
        request = frames.produce(plan, 7)
        name, latencies, clock = its.name, array("q"), time.perf_counter_ns
        with RawConnection(its.port) as producer, RawConnection(its.port) as consumer:
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
    return [
        EndToEnd("end-to-end", "end to end 1 KB, one in flight", brokers=1, messages=5_000, warm_messages=8_000),
        EndToEnd(
            "rf3-end-to-end", "RF 3: end to end 1 KB, one in flight", brokers=3, messages=2_000, warm_messages=6_000
        ),
    ]
