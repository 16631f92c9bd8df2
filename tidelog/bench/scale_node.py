"""Many partitions and connections on one node: the cost to hold them, to write to them, and to recover.

The records are produced by librdkafka, round robin over all partitions, and counted after the node was killed. Memory
per partition and per connection is what the node grew by. As in `scale`, few are measured before many, on a node of
their own each, and the CPU is the node's.
"""

from __future__ import annotations

import resource
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack

from tidelog.bench.metadata import Reader, ask, frame
from tidelog.bench.raw import BenchError, RawConnection
from tidelog.bench.scale import (
    FULL_WAITS,
    PARTITIONS_PER_TOPIC,
    TIMEOUT_S,
    VALUE,
    ScaleResult,
    Steps,
    Waits,
    fresh_nodes,
)
from tidelog.testing.usage import cpu_ns

RECORDS_EACH = 3
_LIST_OFFSETS = (2, 1)
_LATEST = -1
_SPARE_FILES = 1000


def run(
    name: str,
    partitions: int,
    connections: int,
    progress: Callable[[str], None] = lambda _: None,
    waits: Waits = FULL_WAITS,
    result: ScaleResult | None = None,
) -> ScaleResult:
    """All steps on a fresh node of the named broker; a step that fails ends the run and is its failure.

    The figures go into `result` as they come, so that the caller has them after an interrupt.
    """
    result = ScaleResult() if result is None else result
    with fresh_nodes(name, 1, result) as running:
        result.figures["start of an empty node, s"] = running.ready_s
        steps = _NodeSteps(running, partitions, result, lambda step: progress(f"{name}, {partitions:,}: {step}"), waits)
        steps.run(connections)
    return result


class _NodeSteps(Steps):
    """The life of one node with many partitions."""

    def run(self, connections: int) -> None:
        figures = self._result.figures
        (node,) = self._nodes
        self._idle("empty")
        with self._timed("create and list"):
            self._create()
            self._await_led(node.port, 1)
        with self._timed("list once more"):
            ask(node.port, None, TIMEOUT_S)
        with self._timed(f"{RECORDS_EACH} records to each"):
            self._produce(node.bootstrap_servers)
        self._idle("full")
        grown_mib = figures["full: memory of a node, MiB"] - figures["empty: memory of a node, MiB"]
        figures["memory per partition, KiB"] = grown_mib * 1024 / self._partitions
        if connections:
            self._connect(connections)
        node.kill()
        self._start("after SIGKILL")
        if (count := self._count_records()) != RECORDS_EACH * self._partitions:
            raise BenchError(f"{count:,} records are left of {RECORDS_EACH * self._partitions:,}")
        self._idle("after SIGKILL", self._waits.first_upkeep_s)
        self._progress("stop")
        began = time.monotonic()
        node.stop(TIMEOUT_S)
        figures["stop, s"] = time.monotonic() - began
        self._start("after a stop")

    def _start(self, when: str) -> None:
        """Start the node; it answers at the first figure, and leads everything at the second."""
        self._progress(f"start {when}")
        figures = self._result.figures
        (node,) = self._nodes
        began = time.monotonic()
        node.start(TIMEOUT_S)
        figures[f"start {when}, answering, s"] = time.monotonic() - began
        self._await_led(node.port, 1)
        figures[f"start {when}, all led, s"] = time.monotonic() - began
        figures[f"start {when}, CPU s"] = cpu_ns(node.pid) / 1e9

    def _produce(self, bootstrap: str) -> None:
        """Record by record through all partitions, three times, with librdkafka's own defaults and acks=all."""
        from confluent_kafka import Producer

        failures = []

        def delivered(error: object, _: object) -> None:
            if error is not None:
                failures.append(error)

        settings = {
            "bootstrap.servers": bootstrap,
            "acks": "all",
            "log_level": 0,
            "queue.buffering.max.messages": max(100_000, 2 * RECORDS_EACH * self._partitions),
            "delivery.report.only.error": True,
        }
        producer = Producer(settings)
        for _ in range(RECORDS_EACH):
            left = self._partitions
            for topic in self._topics:
                for index in range(min(left, PARTITIONS_PER_TOPIC)):
                    producer.produce(topic, VALUE, partition=index, on_delivery=delivered)
                left -= PARTITIONS_PER_TOPIC
                producer.poll(0)
        left_over = producer.flush(TIMEOUT_S)
        if left_over or failures:
            raise BenchError(f"{left_over} records not sent, {len(failures)} failed: {failures[:1]}")

    def _connect(self, count: int) -> None:
        """So many connections, each of which has asked for the brokers once."""
        figures = self._result.figures
        (node,) = self._nodes
        self._progress(f"{count:,} connections")
        _allow_files(count + _SPARE_FILES)
        before = node.usage()
        began = time.monotonic()
        with ExitStack() as opened:
            request = frame(3, 4, struct.pack(">i?", 0, False))
            for _ in range(count):
                connection = RawConnection(node.port, TIMEOUT_S, buffer_bytes=1024)
                opened.callback(connection.close)
                connection.send(request)
                connection.receive()
            figures[f"{count:,} connections, s"] = time.monotonic() - began
            after = node.usage()
            figures[f"{count:,} connections, CPU s"] = after.cpu_s - before.cpu_s
            figures["memory per connection, KiB"] = (after.rss_bytes - before.rss_bytes) / 1024 / count
            self._idle(f"{count:,} connections")

    def _count_records(self) -> int:
        """The sum of what the log ends say, over all partitions."""
        (node,) = self._nodes
        total, left = 0, self._partitions
        with RawConnection(node.port, TIMEOUT_S) as connection:
            for topic in self._topics:
                count = min(left, PARTITIONS_PER_TOPIC)
                entries = b"".join(struct.pack(">iq", index, _LATEST) for index in range(count))
                name = struct.pack(">h", len(topic)) + topic.encode()
                body = struct.pack(">ii", -1, 1) + name + struct.pack(">i", count) + entries
                connection.send(frame(*_LIST_OFFSETS, body))
                total += sum(_ends(connection.receive()))
                left -= count
        return total


def _ends(answer: memoryview) -> Iterator[int]:
    """The offsets in a ListOffsets answer of version 1 for one topic."""
    reader = Reader(answer, 4 + 4 + 4)
    reader.string()
    for _ in range(reader.int32()):
        index, error_code = reader.int32(), reader.int16()
        if error_code:
            raise BenchError(f"the end of partition {index} is not told: error code {error_code}")
        reader.skip(8)
        yield (reader.int32() << 32) | (reader.int32() & 0xFFFFFFFF)


def _allow_files(count: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < count:
        if hard < count:
            raise BenchError(f"{count:,} files are needed, the limit is {hard:,}")
        resource.setrlimit(resource.RLIMIT_NOFILE, (count, hard))
