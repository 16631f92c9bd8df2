"""Fills a broker with one of everything that is kept on disk, and says what must be found there afterwards."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass, field
from typing import Any

import pytest

pytest.importorskip("confluent_kafka", reason="confluent-kafka is not installed (pip install 'tidelog[dev]')")

from confluent_kafka import Consumer, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic  # type: ignore[attr-defined]

CODECS = ["none", "gzip", "snappy", "lz4", "zstd"]
GROUP = "filled-group"
Kept = tuple[bytes | None, bytes | None, Any, int]


@dataclass
class Filling:
    """Records per (topic, partition) in the order of their offsets, and the group's committed offsets."""

    records: dict[tuple[str, int], list[Kept]] = field(default_factory=dict)
    committed: dict[tuple[str, int], tuple[int, str]] = field(default_factory=dict)


def fill(bootstrap: str, *, records_per_topic: int = 800) -> Filling:
    """A topic per codec with two partitions and several segments, a compacted one, and offsets of a group."""
    filling = Filling()
    admin = AdminClient({"bootstrap.servers": bootstrap, "log_level": 0})
    names = [f"filled-{codec}" for codec in CODECS] + ["filled-compact"]
    topics = [NewTopic(name, 2, 1, config={"segment.bytes": str(1 << 20)}) for name in names[:-1]]
    topics.append(NewTopic(names[-1], 2, 1, config={"cleanup.policy": "compact"}))
    for future in admin.create_topics(topics).values():
        future.result(60)
    choice = random.Random(3)
    for name, codec in zip(names, [*CODECS, "none"], strict=True):
        _produce(bootstrap, name, codec, records_per_topic, choice, filling)
    _commit(bootstrap, filling)
    return filling


def _produce(bootstrap: str, name: str, codec: str, count: int, choice: random.Random, filling: Filling) -> None:
    kept: dict[int, list[Kept]] = {0: [], 1: []}
    failures: list[Any] = []
    producer = Producer(
        {
            "bootstrap.servers": bootstrap,
            "compression.type": codec,
            "enable.idempotence": True,
            "linger.ms": 5,
            "log_level": 0,
        }
    )
    now_ms = int(time.time() * 1000) - 100_000
    for number in range(count):
        key = f"{name}-{number % 50}".encode()
        value = choice.randbytes(3500) + b"abc" * 500 if number % 7 else None
        headers: Any = [("number", str(number).encode())] if number % 3 else None
        # Times that go back now and then, so that the time index has something to get wrong.
        timestamp_ms = now_ms + number * 10 - (500 if number % 11 == 0 else 0)
        partition = number % 2
        producer.produce(
            name,
            key=key,
            value=value,
            headers=headers,
            timestamp=timestamp_ms,
            partition=partition,
            on_delivery=lambda error, _: failures.append(error) if error else None,
        )
        kept[partition].append((key, value, headers, timestamp_ms))
        if number % 20 == 19:
            producer.flush(20)
    assert producer.flush(20) == 0
    assert failures == []
    for partition, records in kept.items():
        filling.records[name, partition] = records


def _commit(bootstrap: str, filling: Filling) -> None:
    consumer = Consumer(
        {"bootstrap.servers": bootstrap, "group.id": GROUP, "enable.auto.commit": False, "log_level": 0}
    )
    for number, (topic, partition) in enumerate(filling.records):
        filling.committed[topic, partition] = (10 + number, f"note-{number}")
    offsets = [
        TopicPartition(topic, partition, offset, metadata=note)
        for (topic, partition), (offset, note) in filling.committed.items()
    ]
    patiently(lambda: consumer.commit(offsets=offsets, asynchronous=False))
    # A member that joins and leaves puts group metadata into the log beside the offsets.
    consumer.subscribe(["filled-none"])
    deadline = time.monotonic() + 90
    while not consumer.assignment() and time.monotonic() < deadline:
        consumer.poll(0.1)
    consumer.close()


def patiently(call: Any, timeout_s: float = 90.0) -> Any:
    """Call until it does not fail with a retriable error: a coordinator that has just moved in must load first."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            return call()
        except KafkaException as failed:
            if time.monotonic() > deadline or failed.args[0].code() not in (14, 15, 16, -172, -195, -185):
                raise
            time.sleep(0.1)


def read_back(bootstrap: str, filling: Filling) -> dict[tuple[str, int], list[Kept]]:
    """What a consumer finds in every partition of the filling, in order; offsets must run from 0 without a gap."""
    found: dict[tuple[str, int], list[Kept]] = {where: [] for where in filling.records}
    consumer = Consumer(
        {"bootstrap.servers": bootstrap, "group.id": "reader", "enable.auto.commit": False, "log_level": 0}
    )
    try:
        consumer.assign([TopicPartition(topic, partition, 0) for topic, partition in found])
        left = sum(map(len, filling.records.values()))
        deadline = time.monotonic() + 30
        while left > 0:
            assert time.monotonic() < deadline, f"{left} records are missing"
            for message in consumer.consume(min(left, 1000), 0.5):
                assert message.error() is None, message.error()
                where = str(message.topic()), int(message.partition() or 0)
                assert message.offset() == len(found[where])
                found[where].append((message.key(), message.value(), message.headers(), message.timestamp()[1]))
                left -= 1
    finally:
        consumer.close()
    return found


def read_committed_offsets(bootstrap: str, filling: Filling) -> dict[tuple[str, int], tuple[int, str]]:
    """The group's offsets and their metadata as the coordinator answers them."""
    consumer = Consumer(
        {"bootstrap.servers": bootstrap, "group.id": GROUP, "enable.auto.commit": False, "log_level": 0}
    )
    try:
        wanted = [TopicPartition(topic, partition) for topic, partition in filling.committed]
        answered = patiently(lambda: consumer.committed(wanted, timeout=10))
        return {(one.topic, one.partition): (one.offset, one.metadata) for one in answered}
    finally:
        consumer.close()
