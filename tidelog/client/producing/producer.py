"""The asynchronous producer: `send` gives a future, batches go out in the background.

This is the face: arguments, serializers, partition choice, back pressure. Batching is the accumulator's, sending the
sender's, sequences the session's. Invariant: `send` suspends for long only when memory is full or a topic is not yet
known; otherwise it at most lets the event loop run once per few batches, so that a tight loop of sends also sends.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

from tidelog.client.assignment.partitioner import (
    CustomPartitioner,
    RoundRobinSpread,
    Spread,
    StickySpread,
    positive_hash,
)
from tidelog.client.config import ProducerConfig
from tidelog.client.model import PartitionDescription, RecordMetadata, TopicPartition
from tidelog.client.network.cluster import Cluster
from tidelog.client.network.metadata import TopicMetadata
from tidelog.client.producing.accumulator import Accumulator, Headers, PartitionQueue
from tidelog.client.producing.producer_session import ProducerSession
from tidelog.client.producing.sender import Sender, Ticket
from tidelog.protocol.batches.compression import CODECS
from tidelog.protocol.batches.records import BatchBuilder
from tidelog.protocol.errors import ErrorCode, KafkaError

_BATCHES_PER_YIELD = 8
_MAX_TIMESTAMP_MS = 2**62


class _Route:
    """Where the records of one topic can go; replaced when its metadata changes."""

    __slots__ = ("count", "queues", "spread", "topic")

    def __init__(self, topic: TopicMetadata, queues: list[PartitionQueue[Ticket]], spread: Spread) -> None:
        self.topic = topic
        self.count = len(queues)
        self.queues = queues
        self.spread = spread


class Producer:
    """Sends records. Options are Kafka's producer configuration with underscores (`docs/client.md` lists them).

        async with Producer(bootstrap_servers="127.0.0.1:9092") as producer:
            future = await producer.send("topic", b"value", key=b"key")
            metadata = await future

    Raises ConfigError for a wrong option. With idempotence, on by default, a record is in the log once and in order
    however often it was sent (KIP-98), for the life of this object.
    """

    def __init__(self, **options: Any) -> None:
        self._config = ProducerConfig.from_options(options)
        config = self._config
        codec = CODECS[config.compression_type]
        self._accumulator: Accumulator[Ticket] = Accumulator(
            lambda: BatchBuilder(config.batch_size, codec, config.compression_level),
            memory_bytes=config.buffer_memory,
            max_record_bytes=config.max_request_size,
            linger_ms=config.linger_ms,
            delivery_timeout_ms=config.delivery_timeout_ms,
        )
        self._session = ProducerSession(
            idempotent=config.idempotent, max_in_flight=config.max_in_flight_requests_per_connection
        )
        self._custom: CustomPartitioner | None = None if isinstance(config.partitioner, str) else config.partitioner
        self._keyed = self._custom is None and config.partitioner == "default" and not config.partitioner_ignore_keys
        self._rng = random.Random()
        self._routes: dict[str, _Route] = {}
        self._opened_seen = 0
        self._opened_yielded = 0
        self._cluster: Cluster | None = None
        self._sender: Sender | None = None
        self._starting: asyncio.Task[None] | None = None
        self._room_lock = asyncio.Lock()
        self._waiting_for_room = 0
        self._closed = False

    # -- life

    async def start(self) -> None:
        """Reach the cluster. `send` does it too, the first time. Raises KafkaError(NETWORK_EXCEPTION)."""
        if self._closed:
            raise RuntimeError("this producer is closed")
        if self._sender is not None:
            return
        if self._starting is None:
            self._starting = asyncio.get_running_loop().create_task(self._start())
            self._starting.add_done_callback(_retrieve)
        starting = self._starting
        try:
            await asyncio.shield(starting)
        except asyncio.CancelledError:
            if starting.cancelled():  # by `close`
                raise RuntimeError("this producer is closed") from None
            raise
        finally:
            if starting.done():
                self._starting = None

    async def _start(self) -> None:
        cluster = Cluster(self._config, auto_create_topics=True, rng=self._rng)
        cluster.forget_idle_topics_after(self._config.metadata_max_idle_ms)
        try:
            await cluster.start()
        except BaseException:
            await cluster.close()
            raise
        self._cluster = cluster
        self._sender = Sender(cluster, self._config, self._accumulator, self._session)
        cluster.on_metadata = self._on_metadata

    async def close(self, timeout_ms: float | None = None) -> None:
        """Deliver what was sent, within `timeout_ms` (None: as long as delivery timeouts allow), and disconnect."""
        if self._closed:
            return
        self._closed = True
        starting = self._starting
        try:
            async with asyncio.timeout(None if timeout_ms is None else timeout_ms / 1000):
                if starting is not None:
                    await asyncio.wait([starting])
                if self._sender is not None:
                    await self._sender.flush()
        except TimeoutError:
            pass
        finally:
            if starting is not None:
                starting.cancel()
                await asyncio.wait([starting])
            if self._sender is not None:
                self._sender.close()
            if self._cluster is not None:
                await self._cluster.close()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    # -- sending

    async def send(
        self,
        topic: str,
        value: Any = None,
        key: Any = None,
        *,
        headers: Headers = (),
        partition: int | None = None,
        timestamp_ms: int | None = None,
        ticket: Any = None,
        waited_ms: float = 0.0,
    ) -> asyncio.Future[RecordMetadata]:
        """Hand over one record; the future ends with its RecordMetadata or a KafkaError.

        `value` and `key` are bytes or None, or whatever the serializer takes; headers are (name, bytes or None);
        `ticket` is a future to use instead of a new one; `waited_ms` is the part of `max_block_ms` that went by waiting
        for this topic's metadata before the call. Raises KafkaError: REQUEST_TIMED_OUT when there is no room or no
        metadata within `max_block_ms`, MESSAGE_TOO_LARGE, UNKNOWN_TOPIC_OR_PARTITION; TypeError unless bytes.
        """
        config = self._config
        if config.value_serializer is not None:
            value = config.value_serializer(value)
        if config.key_serializer is not None:
            key = config.key_serializer(key)
        if value.__class__ is not bytes and value is not None:
            value = _as_bytes("value", value)
        if key.__class__ is not bytes and key is not None:
            key = _as_bytes("key", key)
        if headers:
            _check_headers(headers)
        if timestamp_ms is None:
            timestamp_ms = int(time.time() * 1000)
        elif timestamp_ms.__class__ is not int or not 0 <= timestamp_ms < _MAX_TIMESTAMP_MS:
            raise ValueError(f"timestamp_ms must be a whole number of milliseconds since 1970, not {timestamp_ms!r}")
        route = self._routes.get(topic)
        if route is None or self._closed or (partition is not None and not 0 <= partition < route.count):
            route = await self._find_route(topic, partition, waited_ms)
        if partition is None:
            if key is not None and self._keyed:
                partition = positive_hash(key) % route.count
            elif self._custom is not None:
                partition = self._ask_custom(self._custom, route, key, value)
            else:
                partition = route.spread.choose(route.topic.available_partitions)
                route.spread.sent((0 if value is None else len(value)) + (0 if key is None else len(key)) + 16)
        accumulator = self._accumulator
        loop = asyncio.get_running_loop()
        if ticket is None:
            ticket = loop.create_future()
        queue = route.queues[partition]
        if self._waiting_for_room or not accumulator.append(
            queue, timestamp_ms, key, value, headers, ticket, loop.time() * 1000
        ):
            await self._append_when_room(queue, timestamp_ms, key, value, headers, ticket)
        if accumulator.opened_batches != self._opened_seen:
            self._opened_seen = accumulator.opened_batches
            assert self._sender is not None
            self._sender.wake()
            if self._opened_seen - self._opened_yielded >= _BATCHES_PER_YIELD:
                self._opened_yielded = self._opened_seen
                await asyncio.sleep(0)
        return ticket  # type: ignore[no-any-return]

    async def send_and_wait(
        self,
        topic: str,
        value: Any = None,
        key: Any = None,
        *,
        headers: Headers = (),
        partition: int | None = None,
        timestamp_ms: int | None = None,
    ) -> RecordMetadata:
        """Send one record and wait until it is acknowledged. Raises KafkaError when it is not."""
        return await (
            await self.send(topic, value, key, headers=headers, partition=partition, timestamp_ms=timestamp_ms)
        )

    async def flush(self) -> None:
        """Send everything at once and wait until all of it is delivered or has failed."""
        if self._sender is not None:
            await self._sender.flush()

    async def partitions_for(self, topic: str) -> list[PartitionDescription]:
        """The partitions of a topic, created by the broker if it may. Raises KafkaError."""
        route = await self._find_route(topic, None)
        return [
            PartitionDescription(
                each.partition,
                each.leader if each.leader >= 0 else None,
                each.leader_epoch,
                each.replicas,
                each.isr,
                each.offline_replicas,
            )
            for each in route.topic.partitions
        ]

    # -- inside

    async def _append_when_room(
        self,
        queue: PartitionQueue[Ticket],
        timestamp_ms: int,
        key: bytes | None,
        value: bytes | None,
        headers: Headers,
        ticket: Ticket,
    ) -> None:
        """One after another, in the order in which they came: many small records must not keep out a large one."""
        self._waiting_for_room += 1  # not `locked()`: between two owners the lock is free, and others still wait
        try:
            async with asyncio.timeout(self._config.max_block_ms / 1000), self._room_lock:
                while not self._append_again(queue.partition, timestamp_ms, key, value, headers, ticket):
                    assert self._sender is not None
                    await self._sender.wait_for_room()
        except TimeoutError:
            raise KafkaError(
                ErrorCode.REQUEST_TIMED_OUT,
                f"no room in buffer_memory ({self._config.buffer_memory} bytes) for {self._config.max_block_ms} ms",
            ) from None
        finally:
            self._waiting_for_room -= 1

    def _append_again(
        self,
        partition: TopicPartition,
        timestamp_ms: int,
        key: bytes | None,
        value: bytes | None,
        headers: Headers,
        ticket: Ticket,
    ) -> bool:
        if self._closed:
            raise RuntimeError("this producer is closed")
        # The topic may have been dropped and made anew meanwhile, and its queue with it.
        queue = self._accumulator.queue(partition)
        now_ms = asyncio.get_running_loop().time() * 1000
        return self._accumulator.append(queue, timestamp_ms, key, value, headers, ticket, now_ms)

    def _ask_custom(self, custom: CustomPartitioner, route: _Route, key: bytes | None, value: bytes | None) -> int:
        partition = custom(route.topic.name, key, value, route.count)
        if not 0 <= partition < route.count:
            raise ValueError(
                f"the partitioner chose {partition!r} of the {route.count} partitions of {route.topic.name}"
            )
        return partition

    async def _find_route(self, topic: Any, partition: int | None, waited_ms: float = 0.0) -> _Route:
        if not isinstance(topic, str):
            raise TypeError(f"topic must be a str, not {type(topic).__name__}")
        if self._closed:
            raise RuntimeError("this producer is closed")
        if self._sender is None:
            await self.start()
        assert self._cluster is not None
        assert self._sender is not None
        loop = asyncio.get_running_loop()
        deadline = loop.time() + (self._config.max_block_ms - waited_ms) / 1000
        while True:
            found = await self._cluster.topic(topic, (deadline - loop.time()) * 1000)
            if partition is None or 0 <= partition < len(found.partitions):
                break
            if partition < 0 or not await self._cluster.wait_for_metadata((deadline - loop.time()) * 1000):
                count = len(found.partitions)
                raise KafkaError(
                    ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
                    f"{topic} has {count} partitions, not one numbered {partition}",
                )
        if self._closed:
            raise RuntimeError("this producer is closed")
        return self._make_route(found)

    def _make_route(self, topic: TopicMetadata) -> _Route:
        queues = [
            self._accumulator.queue(TopicPartition(topic.name, number)) for number in range(len(topic.partitions))
        ]
        known = self._routes.get(topic.name)
        spread = self._new_spread() if known is None else known.spread
        route = self._routes[topic.name] = _Route(topic, queues, spread)
        return route

    def _new_spread(self) -> Spread:
        if self._config.partitioner == "round_robin":
            return RoundRobinSpread()
        return StickySpread(self._rng, self._config.batch_size)

    def _on_metadata(self) -> None:
        """Routes follow the metadata; a topic gone from it, or another of the same name, starts from nothing."""
        assert self._cluster is not None
        assert self._sender is not None
        topics = self._cluster.metadata.topics
        for name, route in list(self._routes.items()):
            found = topics.get(name)
            if found is route.topic:
                continue
            if found is None or not found.partitions or found.topic_id != route.topic.topic_id:
                del self._routes[name]
                self._session.forget(queue.partition for queue in route.queues)
                for queue in route.queues:
                    self._accumulator.forget(queue.partition)
            else:
                self._make_route(found)
        self._cluster.track(self._in_use())
        self._sender.wake()

    def _in_use(self) -> Sequence[str]:
        return list(dict.fromkeys(queue.partition.topic for queue in self._accumulator.active()))


def _retrieve(task: asyncio.Task[None]) -> None:
    """Whoever waits for a start hears how it went; nobody may be left who does."""
    if not task.cancelled():
        task.exception()


def _as_bytes(what: str, given: Any) -> bytes:
    if isinstance(given, (bytes, bytearray, memoryview)):
        return bytes(given)
    raise TypeError(f"{what} must be bytes or None, not {type(given).__name__}; set {what}_serializer to convert")


def _check_headers(headers: Headers) -> None:
    each: Any
    for each in headers:
        pair = isinstance(each, (tuple, list)) and len(each) == 2
        if not pair or not isinstance(each[0], str) or not (each[1] is None or isinstance(each[1], bytes)):
            raise TypeError(f"headers must be pairs of str and bytes or None, not {each!r}")
