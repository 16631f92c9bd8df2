"""Stock and own clients while a broker dies halfway: nothing sent is lost, everything is read, the group goes on."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from typing import Any

import pytest

from tests.cluster.asking import REFRESHING, await_healthy, confluent, create_topic, rotated
from tests.cluster.conftest import NewCluster
from tests.patience import PATIENCE_S, join
from tidelog import Consumer, Producer
from tidelog.bench.metadata import ask
from tidelog.testing.cluster import EmbeddedCluster

pytestmark = pytest.mark.slow

TOPIC, PARTITIONS, RECORDS = "through", 6, 6_000


class Reader(threading.Thread):
    """A librdkafka member of a group that reads until told to stop and commits as it goes."""

    def __init__(self, bootstrap: str, group: str) -> None:
        super().__init__(name="reader")
        self.seen: Counter[bytes] = Counter()
        self.errors: list[Any] = []
        self._stopping = threading.Event()
        self._consumer = confluent.Consumer(
            {
                "bootstrap.servers": bootstrap,
                "group.id": group,
                "auto.offset.reset": "earliest",
                "session.timeout.ms": 10_000,
                "heartbeat.interval.ms": 500,
                "enable.auto.commit": False,
                "log_level": 0,
                **REFRESHING,
            }
        )
        self._consumer.subscribe([TOPIC])

    def run(self) -> None:
        while not self._stopping.is_set():
            batch = self._consumer.consume(200, 0.1)
            for message in batch:
                if message.error() is None:
                    self.seen[message.value()] += 1
                elif not message.error().retriable():
                    self.errors.append(message.error())
            if batch:
                try:
                    self._consumer.commit(asynchronous=False)
                except confluent.KafkaException as error:
                    self.errors.append(error)
        self._consumer.close()

    def stop(self) -> None:
        self._stopping.set()
        join(self, 2 * PATIENCE_S)


def coordinator(cluster: EmbeddedCluster, group: str) -> int:
    """Which broker coordinates a group."""
    from tests.compatibility.wire import Wire

    deadline = time.monotonic() + 90
    while True:
        with Wire(cluster.nodes[cluster.broker_ids[-1]].port) as wire:
            answer = wire.ask("find_coordinator", 4, key_type=0, coordinator_keys=[group]).coordinators[0]
        if answer.error_code == 0:
            return int(answer.node_id)
        assert time.monotonic() < deadline, answer
        time.sleep(0.1)


@pytest.mark.parametrize("victim", ["coordinator", "other"])
def test_librdkafka_goes_on_when_a_broker_dies(new_cluster: NewCluster, victim: str) -> None:
    cluster = new_cluster(3)
    create_topic(cluster, TOPIC, rotated([1, 2, 3], PARTITIONS, 3), {"min.insync.replicas": "2"})
    failures: list[Any] = []
    producer = confluent.Producer(
        {"bootstrap.servers": cluster.bootstrap_servers, "enable.idempotence": True, "log_level": 0}
    )
    readers = [Reader(cluster.bootstrap_servers, "group") for _ in range(2)]
    for reader in readers:
        reader.start()
    try:
        coordinating = coordinator(cluster, "group")
        doomed = coordinating if victim == "coordinator" else 1 + coordinating % 3
        for number in range(RECORDS):
            producer.produce(
                TOPIC,
                b"%d" % number,
                b"%d" % (number % 50),
                on_delivery=lambda error, _: failures.append(error) if error else None,
            )
            producer.poll(0.0005)
            if number == RECORDS // 2:
                cluster.kill(doomed)
        assert producer.flush(60) == 0
        assert failures == []
        wanted = {b"%d" % number for number in range(RECORDS)}
        await_seen(readers, wanted)
    finally:
        for reader in readers:
            reader.stop()
    doubled = sum(count - 1 for reader in readers for count in reader.seen.values())
    assert doubled <= RECORDS // 2, "what was committed is not read again"
    assert [error for reader in readers for error in reader.errors if is_serious(error)] == []
    cluster.restart(doomed)
    await_healthy(cluster, [TOPIC])


def is_serious(error: Any) -> bool:
    """Not what a client is told while leaders and coordinators move, which it deals with by itself."""
    inner = error.args[0] if isinstance(error, confluent.KafkaException) else error
    return not inner.retriable() and inner.code() not in (
        confluent.KafkaError._TRANSPORT,
        confluent.KafkaError._ALL_BROKERS_DOWN,
        confluent.KafkaError._WAIT_COORD,
        confluent.KafkaError._TIMED_OUT,
        confluent.KafkaError._NO_OFFSET,
        confluent.KafkaError.ILLEGAL_GENERATION,
        confluent.KafkaError.UNKNOWN_MEMBER_ID,
        confluent.KafkaError.REBALANCE_IN_PROGRESS,
    )


def await_seen(readers: list[Reader], wanted: set[bytes], timeout_s: float = 120) -> None:
    deadline = time.monotonic() + timeout_s
    while True:
        missing = wanted - set().union(*(reader.seen for reader in readers))
        if not missing:
            return
        errors = [error for reader in readers for error in reader.errors]
        assert time.monotonic() < deadline, f"{len(missing)} records are never read; {errors[:3]}"
        time.sleep(0.05)


@pytest.mark.parametrize("victim", ["coordinator", "other"])
async def test_our_clients_go_on_when_a_broker_dies(new_cluster: NewCluster, victim: str) -> None:
    cluster = await asyncio.to_thread(new_cluster, 3)
    await asyncio.to_thread(
        create_topic, cluster, TOPIC, rotated([1, 2, 3], PARTITIONS, 3), {"min.insync.replicas": "2"}
    )
    seen: Counter[bytes] = Counter()
    stop = asyncio.Event()
    options: dict[str, Any] = {
        "bootstrap_servers": cluster.bootstrap_servers,
        "group_id": "own-group",
        "auto_offset_reset": "earliest",
        "enable_auto_commit": False,
        "session_timeout_ms": 10_000,
        "heartbeat_interval_ms": 500,
    }

    async def read(consumer: Consumer) -> None:
        while not stop.is_set():
            for records in (await consumer.poll(100)).values():
                seen.update(record.value or b"" for record in records)
            if consumer.assignment():
                await consumer.commit()

    async with asyncio.timeout(120), Consumer(TOPIC, **options) as one, Consumer(TOPIC, **options) as two:
        readers = [asyncio.create_task(read(each)) for each in (one, two)]
        coordinating = await asyncio.to_thread(coordinator, cluster, "own-group")
        doomed = coordinating if victim == "coordinator" else 1 + coordinating % 3
        async with Producer(bootstrap_servers=cluster.bootstrap_servers, linger_ms=1) as producer:
            futures = []
            for number in range(RECORDS):
                futures.append(await producer.send(TOPIC, b"%d" % number, b"%d" % (number % 50)))
                if number % 20 == 0:
                    await asyncio.sleep(0.005)
                if number == RECORDS // 2:
                    await asyncio.to_thread(cluster.kill, doomed)
            await asyncio.gather(*futures)
        while len(seen) < RECORDS:
            for task in readers:
                if task.done():
                    task.result()
            await asyncio.sleep(0.05)
        stop.set()
        await asyncio.gather(*readers)
    assert seen.keys() == {b"%d" % number for number in range(RECORDS)}
    state = await asyncio.to_thread(ask, cluster.nodes[1 + doomed % 3].port, [TOPIC])
    assert all(each.leader not in (doomed, -1) for each in state.topics[TOPIC].values())
