"""What a follower's fetch costs the leader, beside what a consumer's costs it.

One partition, records of 1 KB, acks=all, one in flight; the CPU is the leader's alone, per record. Three times: kept
once and read by nobody; kept once with a consumer waiting at its end; kept twice, so that the follower fetches for each
record. What the second and the third add to the first is the price of one consumer and of one follower.
"""

from __future__ import annotations

import time

from tidelog.bench import frames
from tidelog.bench.raw import BenchError, RawConnection
from tidelog.bench.scenarios.base import Contestant, CpuMeter, Metric, Scenario, Topic, topic

_VALUE = b"v" * 1000
_FIRST = 200


class ReplicaFetch(Scenario):
    metrics = (
        Metric("alone", "us/record"),
        Metric("consumer", "us/record"),
        Metric("follower", "us/record"),
        Metric("follower / consumer", "x", at_most=1.0),
    )

    def __init__(self) -> None:
        super().__init__("rf3-follower-fetch", "leader's CPU: a follower's fetch, a consumer's", 3)
        self.records = 2_000

    def warm(self, contestant: Contestant, scale: float) -> None:
        self.measure(contestant, 2 * scale)

    def measure(self, contestant: Contestant, scale: float) -> dict[str, float]:
        count = max(int(self.records * scale), 100)
        alone = self._leader_us(contestant, 1, count, consumed=False)
        consumer = self._leader_us(contestant, 1, count, consumed=True) - alone
        follower = self._leader_us(contestant, 2, count, consumed=False) - alone
        return {
            "alone": alone,
            "consumer": consumer,
            "follower": follower,
            "follower / consumer": follower / max(consumer, 0.001),
        }

    def _leader_us(self, contestant: Contestant, replicas: int, count: int, *, consumed: bool) -> float:
        """CPU microseconds of the leader for each of `count` records."""
        with topic(contestant, 1, replicas) as its:
            leader = next(server for server in contestant.servers if server.port == its.port)
            self._send(its, _FIRST, 0, consumed)
            with CpuMeter([leader]) as meter:
                self._send(its, count, _FIRST, consumed)
        return meter.used_ns / 1000 / count

    def _send(self, its: Topic, count: int, offset: int, consumed: bool) -> None:
        plan = frames.ProducePlan(its.name, {0: frames.record_batch([_VALUE], int(time.time() * 1000))})
        request = frames.produce(plan, 7)
        with RawConnection(its.port) as producer, RawConnection(its.port) as consumer:
            for number in range(offset, offset + count):
                if consumed:
                    consumer.send(frames.fetch(its.name, {0: number}, number))
                producer.send(request)
                if any(errors := plan.errors(producer.receive())):
                    raise BenchError(f"produce at {number}: error codes {errors}")
                if consumed:
                    fetched = frames.read_fetch_answer(consumer.receive())
                    if fetched.error_code or fetched.records_size_bytes != len(plan.batches[0]):
                        raise BenchError(f"fetch at {number}: {fetched}")


def scenarios() -> list[Scenario]:
    return [ReplicaFetch()]
