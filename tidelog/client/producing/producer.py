"""The asynchronous producer: `send` returns a future, and batches are sent in the background.

Here: arguments, serializers, partition choice, back pressure. The accumulator batches, the sender
sends, the session assigns sequences. Invariant: `send` suspends for long only when memory is full
or a topic's metadata is missing. Otherwise it yields to the event loop at most once per few
batches, so that a tight loop of sends also sends.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from tidelog.client.assignment.partitioner import (
    CustomPartitioner,
    RoundRobinPartitioner,
    StickyPartitioner,
    UnkeyedPartitioner,
    positive_hash,
)
from tidelog.client.config import ProducerConfig
from tidelog.client.model import (
    ConsumerGroupMetadata,
    OffsetAndMetadata,
    PartitionDescription,
    RecordMetadata,
    TopicPartition,
)
from tidelog.client.network.cluster import Cluster
from tidelog.client.network.metadata import TopicMetadata
from tidelog.client.producing.accumulator import Accumulator, Headers, PartitionQueue
from tidelog.client.producing.detached_transactions import DetachedTransaction
from tidelog.client.producing.producer_session import ProducerSession
from tidelog.client.producing.sender import Sender, Ticket
from tidelog.client.producing.transaction_errors import TransactionError
from tidelog.client.producing.transaction_manager import TransactionManager
from tidelog.client.producing.transaction_sender import TransactionSender
from tidelog.client.producing.transactions import Transactions, TransactionScope
from tidelog.protocol.batches.compression import CODECS
from tidelog.protocol.batches.records import BatchBuilder
from tidelog.protocol.errors import ErrorCode, KafkaError

_BATCHES_PER_YIELD = 8
_MAX_TIMESTAMP_MS = 2**62


class _Route:
    """The partition queues of one topic. Replaced when its metadata changes."""

    __slots__ = ("count", "queues", "topic", "unkeyed_partitioner")

    def __init__(
        self, topic: TopicMetadata, queues: list[PartitionQueue[Ticket]], unkeyed_partitioner: UnkeyedPartitioner
    ) -> None:
        self.topic = topic
        self.count = len(queues)
        self.queues = queues
        self.unkeyed_partitioner = unkeyed_partitioner


class _TransactionalAccumulator(Accumulator[Ticket]):
    """Takes records only in an open transaction.

    A subclass, so that a producer without transactions pays nothing for the check.
    """

    def __init__(self, manager: TransactionManager, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._manager = manager

    def append(
        self,
        queue: PartitionQueue[Ticket],
        timestamp_ms: int,
        key: bytes | None,
        value: bytes | None,
        headers: Headers,
        ticket: Ticket,
        now_ms: float,
    ) -> bool:
        """Add a record. Raises without an open transaction."""
        self._manager.add_partition(queue.partition)
        return super().append(queue, timestamp_ms, key, value, headers, ticket, now_ms)


def _accumulator(config: ProducerConfig, manager: TransactionManager | None) -> Accumulator[Ticket]:
    codec = CODECS[config.compression_type]
    is_transactional = manager is not None

    def new_builder() -> BatchBuilder:
        return BatchBuilder(config.batch_size, codec, config.compression_level, transactional=is_transactional)

    options: dict[str, Any] = {
        "memory_bytes": config.buffer_memory,
        "max_record_bytes": config.max_request_size,
        "linger_ms": config.linger_ms,
        "delivery_timeout_ms": config.delivery_timeout_ms,
    }
    return (
        Accumulator(new_builder, **options)
        if manager is None
        else _TransactionalAccumulator(manager, new_builder, **options)
    )


class Producer:
    """Sends records. Options are Kafka's producer options with underscores (see `docs/client.md`).

        async with Producer(bootstrap_servers="127.0.0.1:9092") as producer:
            future = await producer.send("topic", b"value", key=b"key")
            metadata = await future

    Raises ConfigError for a wrong option. With idempotence, on by default, a record is in the log
    once and in order after any number of attempts (KIP-98), for the lifetime of this object.
    """

    def __init__(self, **options: Any) -> None:
        self._config = ProducerConfig.from_options(options)
        config = self._config
        self._manager = None if config.transactional_id is None else TransactionManager(config.transactional_id)
        self._transactions: Transactions | None = None
        self._accumulator = _accumulator(config, self._manager)
        self._session = ProducerSession(
            idempotent=config.idempotent,
            max_in_flight=config.max_in_flight_requests_per_connection,
            transactional=config.transactional_id is not None,
        )
        self._custom_partitioner: CustomPartitioner | None = (
            None if isinstance(config.partitioner, str) else config.partitioner
        )
        self._hashes_keys = (
            self._custom_partitioner is None and config.partitioner == "default" and not config.partitioner_ignore_keys
        )
        self._rng = random.Random()
        self._routes: dict[str, _Route] = {}
        self._last_opened_count = 0
        self._opened_count_at_yield = 0
        self._cluster: Cluster | None = None
        self._sender: Sender | None = None
        self._start_task: asyncio.Task[None] | None = None
        self._memory_lock = asyncio.Lock()
        self._memory_waiter_count = 0
        self._closed = False

    # -- lifecycle

    async def start(self) -> None:
        """Connect to the cluster; the first `send` does it too.

        Raises KafkaError(NETWORK_EXCEPTION).
        """
        if self._closed:
            raise RuntimeError("this producer is closed")
        if self._sender is not None:
            return
        if self._start_task is None:
            self._start_task = asyncio.get_running_loop().create_task(self._start())
            self._start_task.add_done_callback(_retrieve_exception)
        start_task = self._start_task
        try:
            await asyncio.shield(start_task)
        except asyncio.CancelledError:
            if start_task.cancelled():  # `close` cancelled it
                raise RuntimeError("this producer is closed") from None
            raise
        finally:
            if start_task.done():
                self._start_task = None

    async def _start(self) -> None:
        cluster = Cluster(self._config, auto_create_topics=True, rng=self._rng)
        cluster.forget_idle_topics_after(self._config.metadata_max_idle_ms)
        try:
            await cluster.start()
        except BaseException:
            await cluster.close()
            raise
        self._cluster = cluster
        self._sender = Sender(cluster, self._config, self._accumulator, self._session, self._manager)
        if self._manager is not None:
            requests = TransactionSender(cluster, self._config, self._manager, self._session, self._sender)
            self._transactions = Transactions(self._config, self._manager, requests)
        cluster.on_metadata = self._on_metadata

    async def close(self, timeout_ms: float | None = None) -> None:
        """Deliver the sent records within `timeout_ms` (None: within their delivery timeouts) and
        disconnect. An open transaction is aborted.
        """
        if self._closed:
            return
        self._closed = True
        start_task = self._start_task
        try:
            async with asyncio.timeout(None if timeout_ms is None else timeout_ms / 1000):
                if start_task is not None:
                    await asyncio.wait([start_task])
                if self._transactions is not None:
                    await self._transactions.close(timeout_ms)
                if self._sender is not None:
                    await self._sender.flush()
        except TimeoutError:
            pass
        finally:
            if start_task is not None:
                start_task.cancel()
                await asyncio.wait([start_task])
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
        """Append one record. The returned future gets its RecordMetadata or a KafkaError.

        `value` and `key` are bytes or None, or any input of the serializer. Headers are (name,
        bytes or None). `ticket` is a future to use instead of a new one. `waited_ms` of
        `max_block_ms` were spent before. Raises KafkaError: REQUEST_TIMED_OUT without memory or
        metadata in time, MESSAGE_TOO_LARGE, UNKNOWN_TOPIC_OR_PARTITION; TypeError for other types.
        """
        try:
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
                raise _wrong_timestamp(timestamp_ms)
            route = self._routes.get(topic)
            if route is None or self._closed or (partition is not None and not 0 <= partition < route.count):
                route = await self._find_route(topic, partition, waited_ms)
            if partition is None:
                if key is not None and self._hashes_keys:
                    partition = positive_hash(key) % route.count
                elif self._custom_partitioner is not None:
                    partition = self._choose_custom_partition(self._custom_partitioner, route, key, value)
                else:
                    partition = route.unkeyed_partitioner.choose(route.topic.available_partitions)
                    route.unkeyed_partitioner.record_sent(
                        (0 if value is None else len(value)) + (0 if key is None else len(key)) + 16
                    )
            accumulator = self._accumulator
            loop = asyncio.get_running_loop()
            if ticket is None:
                ticket = loop.create_future()
            queue = route.queues[partition]
            if self._memory_waiter_count or not accumulator.append(
                queue, timestamp_ms, key, value, headers, ticket, loop.time() * 1000
            ):
                await self._append_when_memory_is_free(queue, timestamp_ms, key, value, headers, ticket)
            if accumulator.opened_batch_count != self._last_opened_count:
                self._last_opened_count = accumulator.opened_batch_count
                assert self._sender is not None
                self._sender.wake()
                if self._last_opened_count - self._opened_count_at_yield >= _BATCHES_PER_YIELD:
                    self._opened_count_at_yield = self._last_opened_count
                    await asyncio.sleep(0)
            return ticket  # type: ignore[no-any-return]
        except KafkaError as error:
            self.note_lost_record(error)
            raise

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
        """Send one record and wait for its acknowledgement. Raises KafkaError without one."""
        return await (
            await self.send(topic, value, key, headers=headers, partition=partition, timestamp_ms=timestamp_ms)
        )

    async def flush(self) -> None:
        """Send all records at once and wait until each is delivered or has failed."""
        if self._sender is not None:
            await self._sender.flush()

    # -- transactions

    async def init_transactions(self) -> None:
        """Get the producer id, and end what an earlier producer of this `transactional_id` left open.

        The first transaction does it too. Raises TransactionTimeout after `max_block_ms`,
        TransactionFatal.
        """
        await (await self._started_transactions()).initialize()

    def transaction(self) -> TransactionScope:
        """One transaction: `async with producer.transaction():`.

        It commits at the end of the block and aborts on any exception. The end raises
        TransactionAbortable when the transaction was aborted (run the block again), ProducerFenced
        and other TransactionFatal (close this producer), TransactionTimeout when the outcome is not
        known.
        """
        return TransactionScope(self._started_transactions)

    async def begin_transaction(self) -> None:
        """Begin a transaction. Raises RuntimeError in an open one, TransactionTimeout, TransactionFatal."""
        await (await self._started_transactions()).begin()

    async def commit_transaction(self) -> None:
        """Deliver all records of the transaction and commit it.

        Raises TransactionAbortable (abort, then try again), TransactionFatal, and TransactionTimeout
        after `max_block_ms`: then the commit goes on, and another call waits for its outcome.
        """
        await (await self._started_transactions()).commit()

    async def abort_transaction(self) -> None:
        """Drop the records that were not sent and abort. Raises TransactionFatal, TransactionTimeout."""
        await (await self._started_transactions()).abort()

    async def detach_transaction(self) -> DetachedTransaction | None:
        """Deliver the open transaction, and leave its end to `end_transaction`, in any process.

        None when nothing is in it. Close this producer afterwards. Raises TransactionAbortable,
        TransactionFatal, TransactionTimeout.
        """
        transactions = await self._started_transactions()
        if self._sender is not None:
            await self._sender.flush()
        return await transactions.detach()

    async def send_offsets_to_transaction(
        self, offsets: Mapping[TopicPartition, int | OffsetAndMetadata], group: Any
    ) -> None:
        """Commit a group's offsets with the open transaction, if it is committed.

        `group` is the consumer that read the records, its `group_metadata()`, or a group id. Raises
        TransactionAbortable, also when the consumer is no longer a member of the group;
        TransactionFatal.
        """
        await (await self._started_transactions()).send_offsets(offsets, as_group_metadata(group))

    def note_lost_record(self, error: Exception) -> None:
        """A record could not be sent: its transaction, if any, can only be aborted (as in Java)."""
        if self._manager is not None and not isinstance(error, TransactionError):
            code = error.code if isinstance(error, KafkaError) else ErrorCode.INVALID_RECORD
            self._manager.handle_problem(code, f"a record was not sent: {error}")
            if self._sender is not None:
                self._sender.wake()

    async def _started_transactions(self) -> Transactions:
        if self._manager is None:
            raise RuntimeError("this producer has no transactions; set transactional_id")
        await self.start()
        assert self._transactions is not None
        return self._transactions

    async def partitions_for(self, topic: str) -> list[PartitionDescription]:
        """The partitions of a topic. The broker creates the topic where allowed.

        Raises KafkaError.
        """
        route = await self._find_route(topic, None)
        return [
            PartitionDescription(
                partition.partition,
                partition.leader if partition.leader >= 0 else None,
                partition.leader_epoch,
                partition.replicas,
                partition.isr,
                partition.offline_replicas,
            )
            for partition in route.topic.partitions
        ]

    # -- internals

    async def _append_when_memory_is_free(
        self,
        queue: PartitionQueue[Ticket],
        timestamp_ms: int,
        key: bytes | None,
        value: bytes | None,
        headers: Headers,
        ticket: Ticket,
    ) -> None:
        """Append in the order of the calls, so that small records cannot starve a large one."""
        number = 0 if self._manager is None else self._manager.check_open()
        # A counter and not `locked()`: between two owners the lock is free although others wait.
        self._memory_waiter_count += 1
        try:
            async with asyncio.timeout(self._config.max_block_ms / 1000), self._memory_lock:
                while not self._append_again(queue.partition, timestamp_ms, key, value, headers, ticket, number):
                    assert self._sender is not None
                    await self._sender.wait_for_memory()
        except TimeoutError:
            raise KafkaError(
                ErrorCode.REQUEST_TIMED_OUT,
                f"no room in buffer_memory ({self._config.buffer_memory} bytes) for {self._config.max_block_ms} ms",
            ) from None
        finally:
            self._memory_waiter_count -= 1

    def _append_again(
        self,
        partition: TopicPartition,
        timestamp_ms: int,
        key: bytes | None,
        value: bytes | None,
        headers: Headers,
        ticket: Ticket,
        transaction: int,
    ) -> bool:
        if self._closed:
            raise RuntimeError("this producer is closed")
        if self._manager is not None:
            self._manager.check_still_open(transaction)
        # The topic, and its queue with it, may have been recreated meanwhile.
        queue = self._accumulator.queue(partition)
        now_ms = asyncio.get_running_loop().time() * 1000
        return self._accumulator.append(queue, timestamp_ms, key, value, headers, ticket, now_ms)

    def _choose_custom_partition(
        self, partitioner: CustomPartitioner, route: _Route, key: bytes | None, value: bytes | None
    ) -> int:
        partition = partitioner(route.topic.name, key, value, route.count)
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
        transaction = 0 if self._manager is None else self._manager.open_number
        loop = asyncio.get_running_loop()
        deadline = loop.time() + (self._config.max_block_ms - waited_ms) / 1000
        while True:
            metadata = await self._cluster.topic(topic, (deadline - loop.time()) * 1000)
            if partition is None or 0 <= partition < len(metadata.partitions):
                break
            if partition < 0 or not await self._cluster.wait_for_metadata((deadline - loop.time()) * 1000):
                count = len(metadata.partitions)
                raise KafkaError(
                    ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
                    f"{topic} has {count} partitions, not one numbered {partition}",
                )
        if self._closed:
            raise RuntimeError("this producer is closed")
        if self._manager is not None and transaction:
            self._manager.check_still_open(transaction)
        return self._make_route(metadata)

    def _make_route(self, topic: TopicMetadata) -> _Route:
        queues = [
            self._accumulator.queue(TopicPartition(topic.name, number)) for number in range(len(topic.partitions))
        ]
        old_route = self._routes.get(topic.name)
        unkeyed_partitioner = self._new_unkeyed_partitioner() if old_route is None else old_route.unkeyed_partitioner
        route = self._routes[topic.name] = _Route(topic, queues, unkeyed_partitioner)
        return route

    def _new_unkeyed_partitioner(self) -> UnkeyedPartitioner:
        if self._config.partitioner == "round_robin":
            return RoundRobinPartitioner()
        return StickyPartitioner(self._rng, self._config.batch_size)

    def _on_metadata(self) -> None:
        """Update the routes.

        A deleted topic, or a recreated one of the same name, loses its state.
        """
        assert self._cluster is not None
        assert self._sender is not None
        topics = self._cluster.metadata.topics
        for name, route in list(self._routes.items()):
            topic = topics.get(name)
            if topic is route.topic:
                continue
            if topic is None or not topic.partitions or topic.topic_id != route.topic.topic_id:
                del self._routes[name]
                self._session.forget(queue.partition for queue in route.queues)
                for queue in route.queues:
                    self._accumulator.forget(queue.partition)
            else:
                self._make_route(topic)
        self._cluster.track(self._topics_in_use())
        self._sender.wake()

    def _topics_in_use(self) -> Sequence[str]:
        return list(dict.fromkeys(queue.partition.topic for queue in self._accumulator.active_queues()))


def _retrieve_exception(task: asyncio.Task[None]) -> None:
    """Mark the exception as retrieved: callers that wait for the start get it, and there may be
    none.
    """
    if not task.cancelled():
        task.exception()


def as_group_metadata(group: Any) -> ConsumerGroupMetadata:
    """The metadata of a consumer, of its `group_metadata()` or of a group id. Raises TypeError."""
    if isinstance(group, str):
        return ConsumerGroupMetadata(group)
    value = group.group_metadata() if hasattr(group, "group_metadata") else group
    if not isinstance(value, ConsumerGroupMetadata):
        raise TypeError(f"group must be a consumer, its group_metadata() or a group id, not {group!r}")
    return value


def _as_bytes(name: str, value: Any) -> bytes:
    if isinstance(value, (bytes, bytearray, memoryview)):
        return bytes(value)
    raise TypeError(f"{name} must be bytes or None, not {type(value).__name__}; set {name}_serializer to convert")


def _wrong_timestamp(value: Any) -> ValueError:
    return ValueError(f"timestamp_ms must be a whole number of milliseconds since 1970, not {value!r}")


def _check_headers(headers: Headers) -> None:
    header: Any
    for header in headers:
        is_pair = isinstance(header, (tuple, list)) and len(header) == 2
        if not is_pair or not isinstance(header[0], str) or not (header[1] is None or isinstance(header[1], bytes)):
            raise TypeError(f"headers must be pairs of str and bytes or None, not {header!r}")
