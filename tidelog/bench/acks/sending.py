"""Synchronous producers: each sends one record of 1 KB and waits for its answer before the next. One thread drives all.

With acks=0 there is no answer to wait for: a producer sends as fast as its connection takes it. So that such records
are counted when the leader has them and not when they left, each producer ends with one request of acks=1, which its
broker answers after all before it; the offset in that answer says whether any is missing.
"""

from __future__ import annotations

import select
import socket
import struct
import time
from array import array
from dataclasses import dataclass

from tidelog.bench import frames
from tidelog.bench.figures import percentile
from tidelog.bench.raw import BenchError
from tidelog.bench.scenarios.base import Topic

RECORD_BYTES = 1000
FIRST_RECORDS = 10
_ANSWER = struct.Struct(">hq")
_SENDS_BETWEEN_CLOCKS = 16
_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class Sent:
    """Records taken by the brokers, how long that took, and each one's latency; none of those with acks=0."""

    records: int
    elapsed_s: float
    latencies_ns: array[int]

    @property
    def rate(self) -> float:
        return self.records / self.elapsed_s

    def percentile_us(self, percent: float) -> float | None:
        """Nearest-rank percentile of the latencies in microseconds; None with acks=0."""
        latency_ns = percentile(sorted(self.latencies_ns), percent)
        return None if latency_ns is None else latency_ns / 1000


class _Producer:
    """One connection to the leader of one partition."""

    def __init__(self, its: Topic, index: int, acks: int) -> None:
        batch = frames.record_batch([b"v" * RECORD_BYTES], int(time.time() * 1000))
        self.plan = frames.ProducePlan(its.name, {index: batch}, acks)
        self.index, self.request = index, frames.produce(self.plan, index)
        self.socket = socket.create_connection(("127.0.0.1", its.leader_ports[index]), _TIMEOUT_S)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sent_ns = self.sent = self._filled = 0
        self._answer = bytearray(4096)
        self._view = memoryview(self._answer)
        self._wanted = self.plan.answer_size_bytes + 4

    def begin(self) -> None:
        """The first records, with acks=all: they open files, and every follower is there when they are answered."""
        everyone = frames.produce(frames.ProducePlan(self.plan.topic, self.plan.batches), self.index)
        usual, self.request = self.request, everyone
        for _ in range(FIRST_RECORDS):
            self.send()
            while not self.receive():
                pass
        self.request = usual

    def send(self) -> None:
        self.sent_ns = time.perf_counter_ns()
        self.sent += 1
        self.socket.sendall(self.request)

    def receive(self) -> bool:
        """Take what came; whether the answer is whole, and then a success with the offset expected."""
        got = self.socket.recv_into(self._view[self._filled :])
        if not got:
            raise BenchError("the server closed the connection")
        self._filled += got
        if self._filled < self._wanted and self._filled < 4 + int.from_bytes(self._answer[:4], "big"):
            return False
        self._filled = 0
        error_code, offset = _ANSWER.unpack_from(self._answer, self.plan.first_error_offset)
        if error_code:
            raise BenchError(f"{self.plan.topic}: error code {error_code}")
        if offset != self.sent - 1:
            raise BenchError(f"{self.plan.topic}: record {self.sent - 1} has offset {offset}")
        return True

    def close(self) -> None:
        self.socket.close()


def send(its: Topic, acks: int, seconds: float) -> Sent:
    """A producer for each partition of a new topic, for so many seconds."""
    producers = [_Producer(its, index, acks) for index in its.leader_ports]
    try:
        for producer in producers:
            producer.begin()
        return _unanswered(producers, seconds) if acks == 0 else _answered(producers, seconds)
    finally:
        for producer in producers:
            producer.close()


def _answered(producers: list[_Producer], seconds: float) -> Sent:
    clock, latencies = time.perf_counter_ns, array("q")
    by_descriptor = {producer.socket.fileno(): producer for producer in producers}
    with select.epoll() as poller:
        for descriptor in by_descriptor:
            poller.register(descriptor, select.EPOLLIN)
        began = clock()
        ends, waiting = began + int(seconds * 1e9), len(producers)
        for producer in producers:
            producer.send()
        while waiting:
            ready = poller.poll(_TIMEOUT_S)
            if not ready:
                raise BenchError(f"no answer within {_TIMEOUT_S:g} s")
            for descriptor, _ in ready:
                producer = by_descriptor[descriptor]
                if producer.receive():
                    now = clock()
                    latencies.append(now - producer.sent_ns)
                    if now < ends:
                        producer.send()
                    else:
                        waiting -= 1
    return Sent(len(latencies), (clock() - began) / 1e9, latencies)


def _unanswered(producers: list[_Producer], seconds: float) -> Sent:
    clock = time.perf_counter_ns
    began = clock()
    ends = began + int(seconds * 1e9)
    while clock() < ends:
        for _ in range(_SENDS_BETWEEN_CLOCKS):
            for producer in producers:
                producer.send()
    for producer in producers:
        producer.request = frames.produce(
            frames.ProducePlan(producer.plan.topic, producer.plan.batches, 1), producer.index
        )
        producer.send()
    for producer in producers:
        while not producer.receive():
            pass
    taken = sum(producer.sent - FIRST_RECORDS for producer in producers)
    return Sent(taken, (clock() - began) / 1e9, array("q"))
