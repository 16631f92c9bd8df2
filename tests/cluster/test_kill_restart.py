"""SIGKILL at any moment, again and again, with an idempotent producer that never stops.

`log.flush.interval.messages=1`. After every kill the node must start, keep every acknowledged record once and in order,
and find by offset and by time what a full scan finds. TIDELOG_KILLS says how often (`make kill-test`: 100),
TIDELOG_SEED replays the moments.
"""

from __future__ import annotations

import os
import random
import struct
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.checking import Scanned, Sent, check_offset_lookup, check_partition, check_time_lookup
from tests.compatibility.wire import Wire
from tidelog.bench.processes import TidelogProcess

confluent = pytest.importorskip(
    "confluent_kafka", reason="confluent-kafka is not installed (pip install 'tidelog[dev]')"
)
admin = pytest.importorskip("confluent_kafka.admin")

pytestmark = pytest.mark.slow

KILLS = int(os.environ.get("TIDELOG_KILLS", "10"))
SEED = int(os.environ.get("TIDELOG_SEED") or time.time())
TOPIC, PARTITIONS = "killed", 3
FULL_CHECK_EVERY = 20
RECORDS_PER_SECOND = 1500
OPTIONS = {"log.flush.interval.messages": "1", "offsets.topic.num.partitions": "1"}
# Many index entries and a few segments, so that the indexes have something to get wrong.
TOPIC_CONFIG = {"segment.bytes": str(1 << 20), "index.interval.bytes": "512"}


class Sending:
    """A thread that sends numbered records to every partition until told to stop, at a bounded rate."""

    def __init__(self, bootstrap: str, choice: random.Random) -> None:
        self.sent = [Sent() for _ in range(PARTITIONS)]
        self.failures: list[Any] = []
        self.lock = threading.Lock()
        self._choice = random.Random(choice.random())
        self._stop, self._pause, self._idle = threading.Event(), threading.Event(), threading.Event()
        self._producer = confluent.Producer(
            {
                "bootstrap.servers": bootstrap,
                "enable.idempotence": True,
                "compression.type": "lz4",
                "linger.ms": 3,
                "message.timeout.ms": 300_000,
                "reconnect.backoff.ms": 10,
                "reconnect.backoff.max.ms": 50,
                "retry.backoff.ms": 10,
                "log_level": 0,
                "error_cb": self._on_error,
            }
        )
        self._thread = threading.Thread(target=self._run, name="sending")
        self._thread.start()

    def _on_error(self, error: Any) -> None:
        if error.fatal():
            self.failures.append(error)

    def _run(self) -> None:
        base_ms = int(time.time() * 1000) - 3_600_000
        began, sent = time.monotonic(), 0
        while not self._stop.is_set():
            if self._pause.is_set() or sent > (time.monotonic() - began) * RECORDS_PER_SECOND:
                if self._pause.is_set():
                    self._idle.set()
                self._producer.poll(0.002)
                continue
            partition = self._choice.randrange(PARTITIONS)
            with self.lock:
                number = len(self.sent[partition].timestamps_ms)
                timestamp_ms = base_ms + 3 * number + self._choice.randrange(-20, 20)
                self.sent[partition].timestamps_ms.append(timestamp_ms)
            value = struct.pack(">q", number) + self._choice.randbytes(self._choice.randrange(400))
            self._producer.produce(
                TOPIC, value, partition=partition, timestamp=timestamp_ms, on_delivery=self._reporter(partition, number)
            )
            sent += 1
            self._producer.poll(0)

    def _reporter(self, partition: int, number: int) -> Callable[[Any, Any], None]:
        def report(error: Any, message: Any) -> None:
            if error is not None:
                self.failures.append(error)
                return
            with self.lock:
                self.sent[partition].acknowledged[number] = message.offset()

        return report

    def settle(self) -> None:
        """Pause, and wait until everything sent is acknowledged."""
        self._idle.clear()
        self._pause.set()
        assert self._idle.wait(10)
        left = self._producer.flush(60)
        assert self.failures == []
        assert left == 0, f"{left} records are never acknowledged"

    def go_on(self) -> None:
        self._pause.clear()

    def end(self) -> None:
        self._stop.set()
        self._thread.join()

    def acknowledged(self) -> list[dict[int, int]]:
        with self.lock:
            return [dict(one.acknowledged) for one in self.sent]


def scan(bootstrap: str, partition: int, end_offset: int) -> list[Scanned]:
    """A whole partition up to `end_offset`, by a consumer that starts at 0."""
    consumer = confluent.Consumer({"bootstrap.servers": bootstrap, "group.id": "scan", "log_level": 0})
    found: list[Scanned] = []
    deadline = time.monotonic() + 60
    try:
        consumer.assign([confluent.TopicPartition(TOPIC, partition, 0)])
        while len(found) < end_offset:
            assert time.monotonic() < deadline, f"{len(found)} of {end_offset} records of partition {partition}"
            for message in consumer.consume(min(1000, end_offset - len(found)), 1.0):
                assert message.error() is None, message.error()
                number = struct.unpack_from(">q", message.value())[0]
                found.append(Scanned(message.offset(), message.timestamp()[1], number))
    finally:
        consumer.close()
    return found


def list_offset(wire: Wire, partition: int, timestamp_ms: int) -> tuple[int, int] | None:
    wanted = [{"name": TOPIC, "partitions": [{"partition_index": partition, "timestamp": timestamp_ms}]}]
    answer = wire.ask("list_offsets", 7, replica_id=-1, topics=wanted).topics[0].partitions[0]
    assert answer.error_code == 0, answer
    return (answer.timestamp, answer.offset) if answer.offset >= 0 else None


def batch_at(wire: Wire, partition: int, offset: int) -> tuple[int, int]:
    wanted = {"partition": partition, "fetch_offset": offset, "partition_max_bytes": 4096}
    topics = [{"topic": TOPIC, "partitions": [wanted]}]
    answer = wire.ask("fetch", 12, max_wait=0, min_bytes=0, max_bytes=4096, topics=topics).responses[0].partitions[0]
    assert answer.error_code == 0, answer
    first, last_delta = struct.unpack_from(">q15xi", answer.records)
    return first, first + last_delta


def check_everything(node: TidelogProcess, sent: list[Sent], choice: random.Random, lookups: int = 200) -> None:
    """The whole log of a node that nobody writes to, against what was sent."""
    with Wire(node.port) as wire:
        for partition, expected in enumerate(sent):
            end = list_offset(wire, partition, -1)
            assert end is not None
            found = scan(node.bootstrap, partition, end[1])
            check_partition(expected, found)
            times = [record.timestamp_ms for record in found]
            targets = [choice.randrange(min(times) - 5, max(times) + 6) for _ in range(lookups)]
            check_time_lookup(found, targets, partial(list_offset, wire, partition))
            offsets = [choice.randrange(len(found)) for _ in range(lookups)]
            check_offset_lookup(offsets, partial(batch_at, wire, partition))


def check_what_was_acknowledged(
    node: TidelogProcess, sending: Sending, choice: random.Random, lookups: int = 20
) -> None:
    """Right after a start, while the producer goes on: the log reaches what was acknowledged, and finds it."""
    before = sending.acknowledged()
    with Wire(node.port) as wire:
        for partition, acknowledged in enumerate(before):
            if not acknowledged:
                continue
            end = list_offset(wire, partition, -1)
            assert end is not None
            assert end[1] > max(acknowledged.values()), f"partition {partition} ends at {end[1]}: acknowledged is lost"
            offsets = choice.choices(list(acknowledged.values()), k=lookups)
            check_offset_lookup(offsets, partial(batch_at, wire, partition))


@pytest.fixture
def node(tmp_path: Path) -> Iterator[TidelogProcess]:
    with TidelogProcess(tmp_path, options=OPTIONS) as running:
        client = admin.AdminClient({"bootstrap.servers": running.bootstrap, "log_level": 0})
        client.create_topics([admin.NewTopic(TOPIC, PARTITIONS, 1, config=TOPIC_CONFIG)])[TOPIC].result(10)
        yield running


@pytest.fixture
def choice() -> random.Random:
    print(f"seed {SEED}")
    return random.Random(SEED)


@pytest.fixture
def sending(node: TidelogProcess, choice: random.Random) -> Iterator[Sending]:
    running = Sending(node.bootstrap, choice)
    yield running
    running.end()


def test_nothing_acknowledged_is_lost_however_often_the_node_is_killed(
    node: TidelogProcess, sending: Sending, choice: random.Random
) -> None:
    slowest_s, early = 0.0, 0
    for kill in range(1, KILLS + 1):
        time.sleep(choice.uniform(0.0, 0.5))
        node.kill()
        while choice.random() < 0.25:
            # Also while it starts and recovers.
            node.launch()
            time.sleep(choice.uniform(0.05, 0.4))
            node.kill()
            early += 1
        slowest_s = max(slowest_s, node.start(30))
        check_what_was_acknowledged(node, sending, choice)
        assert sending.failures == []
        if kill % FULL_CHECK_EVERY == 0 or kill == KILLS:
            sending.settle()
            check_everything(node, sending.sent, choice)
            sending.go_on()
    records = sum(len(one.timestamps_ms) for one in sending.sent)
    assert records > 20 * KILLS, "the producer hardly ran"
    print(f"{KILLS} kills, {early} more during start; {records} records; slowest start {slowest_s:.2f} s")


def test_a_record_cut_off_behind_the_nodes_back_is_noticed(
    node: TidelogProcess, sending: Sending, choice: random.Random
) -> None:
    """Plants a loss: the last batch of a partition is cut from its file, and the check must say so."""
    time.sleep(0.5)
    sending.settle()
    check_everything(node, sending.sent, choice, lookups=20)
    node.kill()
    log = max((node.data_directory / f"{TOPIC}-0").glob("*.log"))
    os.truncate(log, log.stat().st_size - 1)
    node.start()
    with pytest.raises(AssertionError, match="is lost"):
        check_everything(node, sending.sent, choice, lookups=20)
