"""The clients of a history: our own producer, consumer and admin, which write down what they were promised.

Every value is used once: producer, dash, number. Promises are checked against what is committed at the moment they are
made, and again at the end. Invariant: a client that fails in a way no fault explains breaks the history.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from random import Random
from typing import Any

from tests.simulation.cluster import Cluster
from tests.simulation.cluster_invariants import Knowledge
from tests.simulation.world import Broken
from tidelog.client.admin.client import Admin
from tidelog.client.consuming.consumer import Consumer
from tidelog.client.model import NewTopic, TopicPartition
from tidelog.client.producing.producer import Producer
from tidelog.protocol.errors import ErrorCode, KafkaError

OPTIONS: dict[str, Any] = {
    "client_id": "sim",
    "request_timeout_ms": 1_500,
    "retry_backoff_ms": 50,
    "retry_backoff_max_ms": 300,
    "reconnect_backoff_ms": 30,
    "reconnect_backoff_max_ms": 300,
    "socket_connection_setup_timeout_ms": 1_000,
}
DELIVERY_MS = 60_000
Topics = dict[str, int]
"""Name -> number of partitions."""


class Client:
    """On a machine of its own."""

    def __init__(self, cluster: Cluster, knowledge: Knowledge) -> None:
        self.cluster = cluster
        self.world = cluster.world
        self.knowledge = knowledge
        self.host = cluster.client()
        self.rng = Random(self.world.rng.getrandbits(64))
        self.stopping = False
        self.done = False
        self.options = {**OPTIONS, "bootstrap_servers": cluster.layout.bootstrap}

    def start(self) -> None:
        self.host.start(self._live)

    async def _live(self) -> None:
        try:
            await self.live()
        except Broken as error:
            self.world.fail(str(error))
        self.done = True

    async def live(self) -> None:
        raise NotImplementedError

    async def patiently(self, what: Any) -> None:
        """Until it could start: a whole cluster may be down."""
        while True:
            try:
                await what.start()
                return
            except KafkaError:
                await asyncio.sleep(0.2)


class RecordingProducer(Client):
    """Sends to every partition of `topics` in turn, every `gap_s` or so, until told to stop."""

    def __init__(
        self,
        cluster: Cluster,
        knowledge: Knowledge,
        name: str,
        topics: Topics,
        *,
        acks: str = "all",
        gap_s: float = 0.05,
    ) -> None:
        super().__init__(cluster, knowledge)
        self.name, self.acks, self.gap_s = name, acks, gap_s
        self.targets = [(topic, index) for topic, count in topics.items() for index in range(count)]
        self.acknowledged = 0
        self.failed = 0

    async def live(self) -> None:
        producer = Producer(**self.options, acks=self.acks, linger_ms=0, delivery_timeout_ms=DELIVERY_MS)
        await self.patiently(producer)
        number = 0
        waiting: dict[asyncio.Future[Any], None] = {}
        while not self.stopping:
            topic, index = self.rng.choice(self.targets)
            for _ in range(self.rng.choice((1, 1, 1, 4))):
                number += 1
                value = b"%s-%d" % (self.name.encode(), number)
                if self.acks == "all":
                    self.knowledge.sent.setdefault((topic, index), {})[value] = None
                try:
                    future = await producer.send(topic, value, partition=index)
                except KafkaError:
                    self.failed += 1
                    continue
                waiting[future] = None
                future.add_done_callback(partial(self._answered, waiting, topic, index, value))
            await asyncio.sleep(self.gap_s * self.rng.random() * 2)
        await producer.flush()
        await producer.close()
        assert not waiting, f"{len(waiting)} records without an answer"

    def _answered(
        self,
        waiting: dict[asyncio.Future[Any], None],
        topic: str,
        index: int,
        value: bytes,
        future: asyncio.Future[Any],
    ) -> None:
        waiting.pop(future, None)
        if future.cancelled() or future.exception() is not None:
            self.failed += 1
            return
        self.acknowledged += 1
        offset = future.result().offset
        if self.acks != "all" or offset is None or offset < 0:
            return
        self.knowledge.acknowledged.setdefault((topic, index), []).append((offset, value))
        end = self.knowledge.committed_end(topic, index)
        if offset >= end:
            self.world.fail(
                f"AcknowledgedIsCommitted: {topic}-{index}: {value!r} at {offset} is acknowledged, committed is {end}"
            )


class RecordingConsumer(Client):
    """Reads everything from the beginning; as a member of `group` if one is given."""

    fatal: tuple[ErrorCode, ...] = (ErrorCode.CORRUPT_MESSAGE, ErrorCode.OFFSET_OUT_OF_RANGE)
    """Errors that no fault explains."""

    def __init__(self, cluster: Cluster, knowledge: Knowledge, topics: Topics, group: str | None = None) -> None:
        super().__init__(cluster, knowledge)
        if cluster.layout.has_racks:
            self.options["client_rack"] = f"rack-{Random(self.world.seed).choice(cluster.layout.brokers)}"
        self.topics, self.group = topics, group
        self.read = 0
        self.positions: dict[tuple[str, int], int] = {}

    async def live(self) -> None:
        group: dict[str, Any] = {"group_id": self.group, "session_timeout_ms": 3_000, "heartbeat_interval_ms": 500}
        consumer = Consumer(
            **self.options,
            **(group if self.group else {}),
            auto_offset_reset="earliest",
            auto_commit_interval_ms=500,
            fetch_max_wait_ms=300,
            allow_auto_create_topics=False,
        )
        await self.patiently(consumer)
        if self.group:
            consumer.subscribe(sorted(self.topics))
        else:
            consumer.assign(
                [TopicPartition(topic, index) for topic, count in self.topics.items() for index in range(count)]
            )
        while not self.stopping:
            try:
                polled = await consumer.poll(timeout_ms=400)
            except KafkaError as error:
                if error.code in self.fatal:
                    raise Broken(f"ConsumersReadWhatStays: {error}") from error
                continue
            for partition, records in polled.items():
                self._take(partition, records)
        await consumer.close()

    def _take(self, partition: TopicPartition, records: Sequence[Any]) -> None:
        where = partition.topic, partition.partition
        noted = self.knowledge.consumed.setdefault(where, {})
        end = self.knowledge.committed_end(*where)
        for record in records:
            self.read += 1
            value = record.value or b""
            before = noted.setdefault(record.offset, value)
            if before != value:
                raise Broken(f"ConsumersReadWhatStays: {where} {record.offset} was {before!r}, now {value!r}")
            if record.offset >= end:
                raise Broken(f"ConsumersReadOnlyCommitted: {where} {record.offset} was read, committed is {end}")
            if not self.group and record.offset != self.positions.get(where, 0):
                expected = self.positions.get(where, 0)
                raise Broken(f"ConsumersReadEverything: {where} {record.offset} was read instead of {expected}")
            self.positions[where] = record.offset + 1


class Administrator(Client):
    """Does one thing after another, each until it is done."""

    def __init__(self, cluster: Cluster, knowledge: Knowledge) -> None:
        super().__init__(cluster, knowledge)
        self.orders: asyncio.Queue[Any] = asyncio.Queue()
        self.finished = 0
        self.asked = 0

    async def live(self) -> None:
        admin = Admin(**self.options, default_api_timeout_ms=5_000)
        while not self.stopping:
            order = await self.orders.get()
            try:
                await order(admin)
            except KafkaError:
                pass  # refused, or no time: what it wanted is not promised
            self.finished += 1
        await admin.close()

    def ask(self, order: Any) -> None:
        """`order(admin)` is awaited; a KafkaError is an answer too."""
        loop = self.host.loop
        assert loop is not None
        self.asked += 1
        loop.inject(self.orders.put_nowait, order)

    @property
    def idle(self) -> bool:
        return self.finished >= self.asked

    def create(self, topics: Topics, **options: Any) -> None:
        """Until they are there."""

        async def order(admin: Admin) -> None:
            for name, count in topics.items():
                while True:
                    try:
                        await admin.create_topics([NewTopic(name, count, **options)])
                        break
                    except KafkaError as error:
                        if error.code == ErrorCode.TOPIC_ALREADY_EXISTS:
                            break
                        await asyncio.sleep(0.1)

        self.ask(order)
