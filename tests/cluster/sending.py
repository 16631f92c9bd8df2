"""Producers that never stop: numbered records to every partition, and what became of each, for `checking`.

`ConfluentSending` is librdkafka, `OwnSending` our own client; both idempotent with acks=all, at a bounded rate, in a
thread of their own.
"""

from __future__ import annotations

import asyncio
import logging
import random
import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest

from tests.cluster.asking import REFRESHING
from tests.cluster.checking import UNKNOWN_OFFSET, Scanned, Sent
from tests.patience import PATIENCE_S, join

confluent = pytest.importorskip(
    "confluent_kafka", reason="confluent-kafka is not installed (pip install 'tidelog[dev]')"
)

IMPATIENT = {"reconnect.backoff.ms": 10, "reconnect.backoff.max.ms": 50, "retry.backoff.ms": 10}


class Sending:
    """What both have in common. Subclasses send from `_run` until `_stop`, idle while `_pause`."""

    def __init__(
        self, bootstrap: str, topic: str, partitions: int, choice: random.Random, records_per_second: int = 1500
    ) -> None:
        self.topic, self.partitions = topic, partitions
        self.sent = [Sent() for _ in range(partitions)]
        self.failures: list[Any] = []
        self.client_log: deque[str] = deque(maxlen=5000)
        """The last lines of the client's own log, where it is kept."""
        self.lock = threading.Lock()
        self._bootstrap = bootstrap
        self._rate = records_per_second
        self._choice = random.Random(choice.random())
        self._base_ms = int(time.time() * 1000) - 3_600_000
        self._stop, self._pause, self._idle = threading.Event(), threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="sending")
        self._began, self._count = time.monotonic(), 0

    def _run(self) -> None:
        raise NotImplementedError

    def start(self) -> Sending:
        self._thread.start()
        return self

    def _is_ahead(self) -> bool:
        """Whether there is nothing to send now."""
        return self._pause.is_set() or self._count > (time.monotonic() - self._began) * self._rate

    def _next(self) -> tuple[int, int, int, bytes]:
        """Partition, number, timestamp and value of the next record; from now on it counts as sent."""
        partition = self._choice.randrange(self.partitions)
        self._count += 1
        with self.lock:
            number = len(self.sent[partition].timestamps_ms)
            timestamp_ms = self._base_ms + 3 * number + self._choice.randrange(-20, 20)
            self.sent[partition].timestamps_ms.append(timestamp_ms)
        return partition, number, timestamp_ms, encode_value(number, self._choice)

    def _acknowledged(self, partition: int, number: int, offset: int | None) -> None:
        with self.lock:
            self.sent[partition].acknowledged[number] = UNKNOWN_OFFSET if offset is None else offset

    def settle(self, timeout_s: float = 120.0) -> None:
        """Pause, and wait until everything sent is acknowledged."""
        self._idle.clear()
        self._pause.set()
        deadline = time.monotonic() + timeout_s
        while not (self._idle.is_set() and self._unanswered() == 0):
            assert self.failures == []
            assert self._thread.is_alive(), "the producer ended"
            assert time.monotonic() < deadline, f"{self._unanswered()} records are never acknowledged"
            time.sleep(0.01)
        assert self.failures == []

    def _unanswered(self) -> int:
        with self.lock:
            return sum(len(one.timestamps_ms) - len(one.acknowledged) for one in self.sent)

    def go_on(self) -> None:
        self._began, self._count = time.monotonic(), 0
        self._pause.clear()

    def end(self) -> None:
        self._stop.set()
        join(self._thread, 5 * PATIENCE_S)

    def acknowledged(self) -> list[dict[int, int]]:
        with self.lock:
            return [dict(one.acknowledged) for one in self.sent]

    def records(self) -> int:
        return sum(len(one.timestamps_ms) for one in self.sent)


class _Lines(logging.Handler):
    """Keeps the last lines."""

    def __init__(self, lines: deque[str]) -> None:
        super().__init__()
        self._lines = lines

    def emit(self, record: logging.LogRecord) -> None:
        self._lines.append(self.format(record))


class ConfluentSending(Sending):
    """librdkafka; `settings` over the patient defaults here."""

    def __init__(self, *arguments: Any, settings: dict[str, Any] | None = None, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self._producer = confluent.Producer(
            {
                "bootstrap.servers": self._bootstrap,
                "enable.idempotence": True,
                "compression.type": "lz4",
                "linger.ms": 3,
                "message.timeout.ms": 300_000,
                **IMPATIENT,
                # What the client says of its sequences and its epoch, for a failure's report.
                "debug": "eos",
                "log_level": 7,
                "error_cb": self._on_error,
                **(settings or {}),
            },
            logger=self._logger(),
        )

    def _logger(self) -> logging.Logger:
        logger = logging.Logger(f"librdkafka {self.topic}", logging.DEBUG)
        handler = _Lines(self.client_log)
        handler.setFormatter(logging.Formatter("%(asctime)s %(name)s %(message)s"))
        logger.addHandler(handler)
        return logger

    def _on_error(self, error: Any) -> None:
        if error.fatal():
            self.failures.append(error)

    def _run(self) -> None:
        while not self._stop.is_set():
            if self._is_ahead():
                if self._pause.is_set():
                    self._idle.set()
                self._producer.poll(0.002)
                continue
            partition, number, timestamp_ms, value = self._next()
            report = self._reporter(partition, number)
            try:
                self._producer.produce(
                    self.topic, value, partition=partition, timestamp=timestamp_ms, on_delivery=report
                )
            except (BufferError, confluent.KafkaException) as error:
                self.failures.append(error)
                return
            self._producer.poll(0)

    def _reporter(self, partition: int, number: int) -> Callable[[Any, Any], None]:
        def report(error: Any, message: Any) -> None:
            if error is not None:
                self.failures.append(error)
            else:
                self._acknowledged(partition, number, message.offset())

        return report


class OwnSending(Sending):
    """Tidelog's own producer, on a loop of its own."""

    def _run(self) -> None:
        try:
            asyncio.run(self._send())
        except Exception as error:
            self.failures.append(error)

    async def _send(self) -> None:
        from tidelog import Producer

        options = {
            "bootstrap_servers": self._bootstrap,
            "compression_type": "lz4",
            "linger_ms": 3,
            "delivery_timeout_ms": 300_000,
            "request_timeout_ms": 10_000,
        }
        async with Producer(**options) as producer:
            while not self._stop.is_set():
                if self._is_ahead():
                    if self._pause.is_set():
                        self._idle.set()
                    await asyncio.sleep(0.002)
                    continue
                partition, number, timestamp_ms, value = self._next()
                future = await producer.send(self.topic, value, partition=partition, timestamp_ms=timestamp_ms)
                future.add_done_callback(self._reporter(partition, number))

    def _reporter(self, partition: int, number: int) -> Callable[[asyncio.Future[Any]], None]:
        def report(future: asyncio.Future[Any]) -> None:
            if future.cancelled():
                return
            if (error := future.exception()) is not None:
                self.failures.append(error)
            else:
                self._acknowledged(partition, number, future.result().offset)

        return report


class Committing:
    """A consumer that reads in a group and commits what it has read, waiting for each commit."""

    def __init__(self, bootstrap: str, group: str, topics: list[str]) -> None:
        self.commits = 0
        self.refused = 0
        self._since: float | None = None
        self._stop = threading.Event()
        self._settings = {
            "bootstrap.servers": bootstrap,
            "group.id": group,
            "enable.auto.commit": False,
            "auto.offset.reset": "earliest",
            "log_level": 0,
            **IMPATIENT,
            **REFRESHING,
        }
        self._topics = topics
        self._thread = threading.Thread(target=self._run, name="committing", daemon=True)

    def start(self) -> Committing:
        self._thread.start()
        return self

    def _run(self) -> None:
        consumer = confluent.Consumer(self._settings)
        consumer.subscribe(self._topics)
        while not self._stop.is_set():
            if not [each for each in consumer.consume(200, 0.2) if each.error() is None]:
                continue
            self._since = time.monotonic()
            try:
                consumer.commit(asynchronous=False)
                self.commits += 1
            except confluent.KafkaException:
                self.refused += 1
            self._since = None
        consumer.close()

    def end(self, timeout_s: float = 240.0) -> None:
        """Let it finish; a commit that is not answered in all this time is a failure."""
        self._stop.set()
        self._thread.join(timeout_s)
        waited_s = time.monotonic() - (self._since or time.monotonic())
        assert not self._thread.is_alive(), f"a commit was not answered in {waited_s:.0f} s, or the end not reached"


def encode_value(number: int, choice: random.Random) -> bytes:
    return struct.pack(">q", number) + choice.randbytes(choice.randrange(400))


def scan(bootstrap: str, topic: str, partition: int, end_offset: int, timeout_s: float = 120.0) -> list[Scanned]:
    """A whole partition up to `end_offset`, by a consumer that starts at 0."""
    consumer = confluent.Consumer({"bootstrap.servers": bootstrap, "group.id": "scan", "log_level": 0})
    found: list[Scanned] = []
    deadline = time.monotonic() + timeout_s
    try:
        consumer.assign([confluent.TopicPartition(topic, partition, 0)])
        while len(found) < end_offset:
            assert time.monotonic() < deadline, f"{len(found)} of {end_offset} records of partition {partition}"
            for message in consumer.consume(min(1000, end_offset - len(found)), 1.0):
                assert message.error() is None, message.error()
                number = struct.unpack_from(">q", message.value())[0]
                found.append(Scanned(message.offset(), message.timestamp()[1], number))
    finally:
        consumer.close()
    return found
