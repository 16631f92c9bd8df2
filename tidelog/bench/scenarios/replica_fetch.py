"""The leader's cost of a follower's fetch, compared with a consumer's fetch.

One partition, records of 1 KB, acks=all, one in flight; the CPU is the leader's alone, per record. Three ways, in turn:
kept once and not read; kept once with a consumer waiting at its end; kept twice, so that the follower fetches
for each record. What the second and the third take more than the first is the price of a consumer and of a follower.
"""

from __future__ import annotations

import time
from contextlib import ExitStack

from tidelog.bench import frames
from tidelog.bench.raw import BenchError, RawConnection
from tidelog.bench.scenarios.base import Contestant, CpuMeter, Metric, Scenario, Topic, topic

_VALUE = b"v" * 1000
_FIRST = 200
_TURNS = 5


class ReplicaFetch(Scenario):
    metrics = (
        Metric("alone", "us/record"),
        Metric("with a consumer", "us/record"),
        Metric("with a follower", "us/record"),
        Metric("follower / consumer", "x", at_most=1.0),
    )

    def __init__(self) -> None:
        super().__init__("rf3-follower-fetch", "leader's CPU, acks=all, 1 KB: what its readers add", 3)
        self.records = 2_500

    def warm(self, contestant: Contestant, scale: float) -> None:
        self.measure(contestant, 2 * scale)

    def measure(self, contestant: Contestant, scale: float) -> dict[str, float]:
        count = max(int(self.records * scale) // _TURNS, 20)
        used_ns = [0, 0, 0]
        with ExitStack() as topics:
            # Replicas, and whether a consumer waits.
            ways = [(topics.enter_context(topic(contestant, 1, kept)), read) for kept, read in _WAYS]
            for its, read in ways:
                _send(its, _FIRST, 0, read)
            for turn in range(_TURNS):
                for place, (its, read) in enumerate(ways):
                    leader = next(server for server in contestant.servers if server.port == its.port)
                    with CpuMeter([leader]) as meter:
                        _send(its, count, _FIRST + turn * count, read)
                    used_ns[place] += meter.used_ns
        alone, consumer, follower = (used / 1000 / count / _TURNS for used in used_ns)
        return {
            "alone": alone,
            "with a consumer": consumer,
            "with a follower": follower,
            "follower / consumer": follower / consumer,
        }


_WAYS = ((1, False), (1, True), (2, False))


def _send(its: Topic, count: int, offset: int, consumed: bool) -> None:
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
