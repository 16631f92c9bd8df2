"""Gives records a place in the producer's memory: arguments, serializers, partition, back pressure.

The routes choose the partition, the accumulator batches. Invariants: an append suspends for long
only when memory is full or a topic's metadata is missing. Otherwise it yields to the event loop at
most once per few batches, so that a tight loop of sends also sends. Records that wait for memory,
and those of calls that overlap, are appended in the order of the calls.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from random import Random
from typing import Any
from weakref import ref

from tidelog.client.arguments import as_topic_name
from tidelog.client.config import ProducerConfig
from tidelog.client.model import ProducerRecord, TopicPartition
from tidelog.client.network.cluster import Cluster
from tidelog.client.producing.accumulator import Accumulator, Headers, PartitionQueue, ProducerBatch
from tidelog.client.producing.interceptors import Interceptors
from tidelog.client.producing.producer_session import ProducerSession
from tidelog.client.producing.record_arguments import (
    MAX_TIMESTAMP_MS,
    as_bytes,
    as_partition_number,
    as_producer_record,
    as_timestamp,
    checked_headers,
    serialized,
)
from tidelog.client.producing.send_group import SendGroup
from tidelog.client.producing.sender import Sender, Ticket
from tidelog.client.producing.topic_routes import RECORD_OVERHEAD_BYTES, Route, TopicRoutes
from tidelog.client.producing.transaction_manager import TransactionManager
from tidelog.protocol.batches.records import BatchBuilder
from tidelog.protocol.errors import ErrorCode, KafkaError, counted

Place = ProducerBatch[Ticket]
"""The batch of a record that was appended. Until the event loop runs again the record is its last."""
_BATCHES_PER_YIELD = 8
_RECORDS_PER_YIELD = 5000
"""Small records fill few batches: eight of them took a fifth of a second."""


def _no_task() -> asyncio.Task[Any] | None:
    return None


class RecordAppender:
    """Appends the records of one producer.

    `start` connects the producer within so many milliseconds and calls `attach`. It is called before the first record.
    `check_loop` raises in another event loop; with a record that opens a batch, because the check costs a system call.
    """

    def __init__(
        self,
        config: ProducerConfig,
        accumulator: Accumulator[Ticket],
        session: ProducerSession,
        manager: TransactionManager | None,
        interceptors: Interceptors | None,
        rng: Random,
        start: Callable[[float], Awaitable[None]],
        check_loop: Callable[[], None],
    ) -> None:
        self._config = config
        self._accumulator = accumulator
        self._manager = manager
        self._interceptors = interceptors
        self._start = start
        self.check_loop = check_loop
        self._routes = TopicRoutes(config, accumulator, session, rng, self._is_stuck)
        self._route_of = self._routes.by_topic
        self.prepares = (
            interceptors is not None or config.value_serializer is not None or config.key_serializer is not None
        )
        self._last_opened_count = 0
        self._opened_count_at_yield = 0
        self._records_since_yield = 0
        """Those of the batches that records have filled since then."""
        self._cluster: Cluster | None = None
        self._sender: Sender | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._memory_lock = asyncio.Lock()
        self._is_held = False
        """The next append yields to the event loop, lets the record of a call before it go first, or raises because of
        `close` or of another loop.
        """
        self._held_task: Callable[[], asyncio.Task[Any] | None] = _no_task
        """The task that has opened the last batches, if it is still there."""
        self._append_yielding: Callable[[], None] | None = None
        """Appends the record of the call that lets the event loop run."""
        self._closed = False
        self._has_loop_ended = False
        self.waiting_count = 0
        """The appends that wait for memory."""

    def attach(self, cluster: Cluster, sender: Sender) -> None:
        """Use these from now on. They are connected."""
        self._cluster = cluster
        self._sender = sender
        self._loop = asyncio.get_running_loop()

    def close(self) -> None:
        """Take no more records. Appends that wait raise RuntimeError."""
        self._closed = self._is_held = True

    def handle_loop_end(self) -> None:
        """The loop ends without `close`: no record may join those that are left in open batches."""
        self._has_loop_ended = self._is_held = True

    def handle_metadata(self) -> None:
        """Update the routes, and keep the metadata of the topics that have records."""
        assert self._cluster is not None
        self._routes.update(self._cluster.metadata.topics)
        active_queues = self._accumulator.active_queues()
        self._cluster.track(list(dict.fromkeys(queue.partition.topic for queue in active_queues)))

    def _is_stuck(self, partition: TopicPartition) -> bool:
        return self._sender is not None and self._sender.is_stuck(partition)

    # -- one record

    def append(
        self,
        topic: str,
        value: Any,
        key: Any,
        headers: Headers | None,
        partition: int | None,
        timestamp_ms: int | None,
        ticket: Ticket,
        waited_ms: float = 0.0,
    ) -> Place | Coroutine[Any, Any, Place]:
        """Append one record. Returns its batch, in which it is the last; or a coroutine that does it later.

        Raises as `Producer.send`.
        """
        if self.prepares:
            record = self._prepared(topic, ProducerRecord(value, key, headers or (), partition, timestamp_ms))
            value, key, headers, partition, timestamp_ms = record
        return self.append_prepared(topic, value, key, headers, partition, timestamp_ms, ticket, waited_ms)

    def append_prepared(
        self,
        topic: str,
        value: Any,
        key: Any,
        headers: Headers | None,
        partition: int | None,
        timestamp_ms: int | None,
        ticket: Ticket,
        waited_ms: float = 0.0,
    ) -> Place | Coroutine[Any, Any, Place]:
        """`append` of a record that interceptors and serializers have seen, or where there are none."""
        if value.__class__ is not bytes and value is not None:
            value = as_bytes("value", value)
        if key is not None and key.__class__ is not bytes:
            key = as_bytes("key", key)
        headers = checked_headers(headers) if headers else ()
        if timestamp_ms is None:
            timestamp_ms = time.time_ns() // 1_000_000
        elif timestamp_ms.__class__ is not int or not 0 <= timestamp_ms < MAX_TIMESTAMP_MS:
            timestamp_ms = as_timestamp(timestamp_ms)
        try:
            route = self._route_of.get(topic)
        except TypeError:  # no object to look up by: `find_topic` names it
            route = None
        if (
            route is None
            or self._is_held
            or (partition is not None and not (partition.__class__ is int and 0 <= partition < route.count))
        ):
            if self._closed:
                raise RuntimeError("this producer is closed")
            return self._append_when_topic_is_known(
                topic, partition, waited_ms, (timestamp_ms, key, value, headers, ticket)
            )
        if partition is None:
            if key is None and (spread := route.spread) is not None:
                size_bytes = RECORD_OVERHEAD_BYTES if value is None else len(value) + RECORD_OVERHEAD_BYTES
                partition = spread(size_bytes, route.available_partitions)
            else:
                partition = self._routes.choose(route, key, value)
        queue = route.queues[partition]
        if queue.open_batch is not None and not self.waiting_count:
            batch = self._accumulator.append(queue, timestamp_ms, key, value, headers, ticket)
            if batch is not None:
                return batch
        return self._append_slowly(queue, timestamp_ms, key, value, headers, ticket)

    def open_route(self, topic: str) -> Route | None:
        """The route of a topic, when a record may be appended in this turn of the loop."""
        return None if self._is_held or self.waiting_count else self._route_of.get(topic)

    # -- a call that lets the event loop run before its record is taken

    def yield_to_later(self, append: Callable[[], None]) -> None:
        """Have the next call, also a `flush` or `close`, call `append` first: it takes the record of this one."""
        self._append_yielding, self._is_held = append, True

    def end_yield(self, append: Callable[[], None]) -> None:
        """The call goes on. No other one takes its record from now on."""
        if self._append_yielding is append:
            self._append_yielding, self._is_held = None, self._has_loop_ended or self._closed

    def append_before(self) -> None:
        """Take the record of the call that lets the event loop run. It raises its error itself when it goes on."""
        append = self._append_yielding
        if append is not None:
            self.end_yield(append)
            with suppress(Exception):
                append()

    def copy(self, topic: str, record: ProducerRecord) -> ProducerRecord:
        """What `append_prepared` takes for a record as it is now, in any thread. Later changes of its value, key or
        headers do not reach the copy. Raises as `append`.
        """
        value, key, headers, partition, timestamp_ms = self._prepared(topic, record) if self.prepares else record
        return ProducerRecord(
            None if value is None else as_bytes("value", value),
            None if key is None else as_bytes("key", key),
            tuple((name, text) for name, text in checked_headers(headers)) if headers else (),
            partition,
            timestamp_ms,
        )

    def copy_of_any(self, topic: str, record: Any) -> Any:
        """The same for a record in each form that `send_many` takes. What cannot change stays what it is."""
        if not self.prepares:
            if record.__class__ is bytes:
                return record
            if record.__class__ is tuple and len(record) == 2 and record[0].__class__ is record[1].__class__ is bytes:
                return record
        return self.copy(topic, as_producer_record(record))

    def _prepared(self, topic: str, record: ProducerRecord) -> ProducerRecord:
        """A record after interceptors and serializers."""
        if self._interceptors is not None:
            record = self._interceptors.on_send(topic, record)
        value, key = serialized(self._config, record.value, record.key)
        return record._replace(value=value, key=key)

    async def _append_when_topic_is_known(
        self,
        topic: str,
        partition: int | None,
        waited_ms: float,
        record: tuple[int, bytes | None, bytes | None, Headers, Ticket],
    ) -> Place:
        if partition is not None:
            partition = as_partition_number(partition)
        route = await self.find_route(topic, partition, waited_ms)
        _, key, value, _, _ = record
        if partition is None:
            partition = self._routes.choose(route, key, value)
        place = self._append_slowly(route.queues[partition], *record)
        return place if isinstance(place, ProducerBatch) else await place

    def _append_slowly(
        self,
        queue: PartitionQueue[Ticket],
        timestamp_ms: int,
        key: bytes | None,
        value: bytes | None,
        headers: Headers,
        ticket: Ticket,
    ) -> Place | Coroutine[Any, Any, Place]:
        """Append a checked record, to a new batch if needed, or return a coroutine that waits for free memory."""
        self.check_loop()
        accumulator = self._accumulator
        if not self.waiting_count:
            assert self._loop is not None, "there is no queue before the start"
            now_ms = self._loop.time() * 1000
            filled = queue.open_batch
            batch = accumulator.append(queue, timestamp_ms, key, value, headers, ticket, now_ms)
            if batch is not None:
                if accumulator.opened_batch_count != self._last_opened_count:
                    if filled is not None:
                        self._records_since_yield += filled.record_count
                    self._handle_opened_batches()
                return batch

        def append(queue: PartitionQueue[Ticket], now_ms: float) -> Place | None:
            return accumulator.append(queue, timestamp_ms, key, value, headers, ticket, now_ms)

        return self._append_when_memory_is_free(queue.partition, append)

    def _handle_opened_batches(self) -> None:
        self._last_opened_count = self._accumulator.opened_batch_count
        assert self._sender is not None
        self._sender.wake()
        batch_count = self._last_opened_count - self._opened_count_at_yield
        if batch_count >= _BATCHES_PER_YIELD or self._records_since_yield >= _RECORDS_PER_YIELD:
            self._opened_count_at_yield = self._last_opened_count
            self._records_since_yield = 0
            # The next send yields, before it takes its record: a cancellation after that would hide that the
            # record is taken, and the caller would send it again. That of another task need not: the loop has run.
            self._is_held = True
            task = asyncio.current_task()
            self._held_task = _no_task if task is None else ref(task)

    # -- a whole batch

    async def append_batch(self, partition: TopicPartition, builder: BatchBuilder, group: SendGroup) -> None:
        """Append a batch of a known topic. Raises as `Producer.send`."""
        if self._closed:  # between two batches of a table
            raise RuntimeError("this producer is closed")
        self.append_before()
        accumulator = self._accumulator

        def append(queue: PartitionQueue[Ticket], now_ms: float) -> Place | None:
            return accumulator.append_batch(queue, builder, group, now_ms)

        now_ms = asyncio.get_running_loop().time() * 1000
        if self.waiting_count or not append(accumulator.queue(partition), now_ms):
            await self._append_when_memory_is_free(partition, append)
        self._handle_opened_batches()

    # -- waiting

    async def _append_when_memory_is_free(
        self, partition: TopicPartition, append: Callable[[PartitionQueue[Ticket], float], Place | None]
    ) -> Place:
        """Append in the order of the calls, so that small records cannot starve a large one."""
        transaction = 0 if self._manager is None else self._manager.check_open()
        # A counter and not `locked()`: between two owners the lock is free although others wait.
        self.waiting_count += 1
        try:
            async with asyncio.timeout(self._config.max_block_ms / 1000), self._memory_lock:
                while not (place := self._append_again(partition, append, transaction)):
                    assert self._sender is not None
                    await self._sender.wait_for_memory()
            self._handle_opened_batches()
            return place
        except TimeoutError:
            raise KafkaError(
                ErrorCode.REQUEST_TIMED_OUT,
                f"no room in buffer_memory ({self._config.buffer_memory} bytes) for {self._config.max_block_ms} ms",
            ) from None
        finally:
            self.waiting_count -= 1

    def _append_again(
        self,
        partition: TopicPartition,
        append: Callable[[PartitionQueue[Ticket], float], Place | None],
        transaction: int,
    ) -> Place | None:
        if self._closed:
            raise RuntimeError("this producer is closed")
        if self._manager is not None:
            self._manager.check_still_open(transaction)
        # The topic, and its queue with it, may have been recreated meanwhile.
        return append(self._accumulator.queue(partition), asyncio.get_running_loop().time() * 1000)

    def known_route(self, topic: str) -> Route | None:
        """The route of a topic whose metadata is there."""
        return self._route_of.get(topic)

    def lacks_metadata(self, topic: object, partition: object) -> bool:
        """Whether a record waits for metadata, not for memory or for its turn."""
        if not isinstance(topic, str):
            return False
        route = self._route_of.get(topic)
        try:
            return route is None or (partition is not None and as_partition_number(partition) >= route.count)
        except Exception:  # the append will raise it, whatever this number is
            return False

    async def find_route(self, topic: str, partition: int | None, waited_ms: float = 0.0) -> Route:
        """`find_topic` for records. Raises as `Producer.send`, also when their transaction ends meanwhile."""
        if self._manager is None:
            return await self.find_topic(topic, partition, waited_ms)
        transaction = self._manager.check_open()
        route = await self.find_topic(topic, partition, waited_ms)
        self._manager.check_still_open(transaction)
        return route

    async def find_topic(self, topic: str, partition: int | None, waited_ms: float = 0.0) -> Route:
        """The route of a topic, once its metadata is there and has the partition."""
        topic = as_topic_name("topic", topic)
        if partition is not None:
            partition = as_partition_number(partition)
        if self._closed:
            raise RuntimeError("this producer is closed")
        self.check_loop()
        loop = asyncio.get_running_loop()
        deadline = loop.time() + (self._config.max_block_ms - waited_ms) / 1000
        if self._sender is None:
            await self._start(self._config.max_block_ms - waited_ms)
        assert self._cluster is not None
        assert self._sender is not None
        if self._is_held:
            # After the record of an earlier call this one follows at once, or a later one passed it. The loop has run.
            yields = self._append_yielding is None and self._held_task() is asyncio.current_task()
            self.append_before()
            self._is_held = self._has_loop_ended or self._closed
            if yields:
                await asyncio.sleep(0)
        while True:
            metadata = await self._cluster.topic(topic, (deadline - loop.time()) * 1000, waited_ms)
            if partition is None or 0 <= partition < len(metadata.partitions):
                break
            if partition < 0 or not await self._cluster.wait_for_metadata((deadline - loop.time()) * 1000):
                count = len(metadata.partitions)
                raise KafkaError(
                    ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
                    f"{topic} has {counted(count, 'partition')}, not one numbered {partition}",
                )
        if self._closed:
            raise RuntimeError("this producer is closed")
        route = self._route_of.get(topic)
        # Every eighth batch comes here, and a new route costs a step for each partition.
        return route if route is not None and route.topic is metadata else self._routes.make(metadata)
