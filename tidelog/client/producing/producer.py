"""The asynchronous producer: `send` returns a future, and batches are sent in the background.

Here: the public methods, the life of the parts, the calls that send many records. The appender
gives records a place in memory, the accumulator batches, the sender sends, the session assigns
sequences. Invariant: no record is taken before the start has ended, or after `close`.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence, Sized
from functools import partial
from threading import get_ident
from time import monotonic
from types import TracebackType
from typing import TYPE_CHECKING, Any, Never, Self

from tidelog.client.arguments import as_milliseconds, as_offsets, check_named_options, group_metadata_or_error
from tidelog.client.client_logging import client_logger
from tidelog.client.config import ProducerConfig
from tidelog.client.metrics import ProducerMetrics
from tidelog.client.model import (
    ConsumerGroupMetadata,
    OffsetAndMetadata,
    PartitionDescription,
    RecordMetadata,
    TopicPartition,
    WrittenRange,
)
from tidelog.client.network.cluster import Cluster
from tidelog.client.network.kernel_loading import KernelLoading
from tidelog.client.network.outcomes import start_task, text_of
from tidelog.client.network.shared_start import SharedStart
from tidelog.client.producing.accumulator import Headers, ProducerBatch
from tidelog.client.producing.arrow_batches import ArrowBatches
from tidelog.client.producing.busy_poll import BusyPoll
from tidelog.client.producing.delivery_future import DeliveryFuture, delivery_future_class
from tidelog.client.producing.detached_transactions import DetachedTransaction
from tidelog.client.producing.direct_send import NOT_APPENDED, Appended, DirectSend, allows_direct_sends
from tidelog.client.producing.interceptors import DeliveryCallback, Interceptors, calls_on_delivery
from tidelog.client.producing.producer_memory import new_accumulator
from tidelog.client.producing.producer_session import ProducerSession
from tidelog.client.producing.record_appender import RecordAppender
from tidelog.client.producing.record_arguments import (
    RecordPieces,
    RefusedRecord,
    as_partition_number,
    as_producer_record,
    as_records,
    build_batch,
)
from tidelog.client.producing.record_waiter import RecordWaiter
from tidelog.client.producing.send_group import BatchOutcome, GroupFuture, SendGroup
from tidelog.client.producing.sender import CLOSED_BEFORE_DELIVERY, Sender
from tidelog.client.producing.sender_totals import SenderTotals
from tidelog.client.producing.topic_routes import Route
from tidelog.client.producing.transaction_errors import TransactionError, TransactionTimeout
from tidelog.client.producing.transaction_manager import TransactionManager
from tidelog.client.producing.transaction_sender import TransactionSender
from tidelog.client.producing.transactions import Transactions, TransactionScope
from tidelog.protocol.batches.compression import CODECS
from tidelog.protocol.batches.records import BatchBuilder
from tidelog.protocol.errors import ErrorCode, KafkaError

if TYPE_CHECKING:
    import pyarrow as pa

logger = client_logger(__name__)

_TURN_BYTES = 256 * 1024
"""`send_arrow` lets the sender send what it has encoded after so many bytes: each large batch by itself."""


class Producer:
    """Sends records. Options are Kafka's producer options with underscores (see `docs/client.md`).

        async with Producer(bootstrap_servers="127.0.0.1:9092") as producer:
            future = await producer.send("topic", b"value", key=b"key")
            metadata = await future

    Records to a partition are in the log in the order in which their calls begin, also where calls of several tasks
    overlap, as in one `asyncio.gather`. There are two exceptions. While a call waits for the metadata of its topic, a
    later call of another task may pass it. The same may happen while a task that has filled some batches lets the event
    loop run.

    Raises ConfigError for a wrong option. With idempotence, on by default, a record is in the log
    once and in order after any number of attempts (KIP-98), for the lifetime of this object.
    """

    def __init__(self, *positional: Never, **options: Any) -> None:
        check_named_options("Producer", positional)
        self._config = ProducerConfig.from_options(options)
        config = self._config
        self._shared_start = SharedStart(config, self._start, "producer")
        self._manager = None if config.transactional_id is None else TransactionManager(config.transactional_id)
        self._transactions: Transactions | None = None
        codec = CODECS[config.compression_type]
        self._new_builder = partial(
            BatchBuilder,
            config.batch_size,
            codec,
            config.compression_level,
            transactional=config.transactional_id is not None,
        )
        self._accumulator = new_accumulator(config, self._manager, self._new_builder)
        self._arrow_batches = ArrowBatches(config)
        self._arrow_kernel = KernelLoading(self._arrow_batches.load_kernel, lambda: None)
        self._session = ProducerSession(
            idempotent=config.idempotent,
            max_in_flight=config.max_in_flight_requests_per_connection,
            transactional=config.transactional_id is not None,
        )
        self._interceptors = Interceptors(config.interceptors) if config.interceptors else None
        self._busy_poll = BusyPoll(config.busy_poll_us)
        self._direct_send: DirectSend | None = None
        self._rng = random.Random()
        self._appender = RecordAppender(
            config,
            self._accumulator,
            self._session,
            self._manager,
            self._interceptors,
            self._rng,
            self._start_within,
            self._shared_start.check_loop,
        )
        appender = self._appender
        self._append: Any = appender.append if appender.prepares else appender.append_prepared
        self._cluster: Cluster | None = None
        self._cluster_id: str | None = None
        self._sender: Sender | None = None
        self._new_future: type[DeliveryFuture] = DeliveryFuture  # of the loop, once the start has ended
        self._thread_id = 0
        """The thread of the loop, once the start has ended."""
        self._closed = False
        self._close_finished = asyncio.Event()

    @property
    def config(self) -> ProducerConfig:
        """The options, with their defaults."""
        return self._config

    # -- lifecycle

    async def start(self) -> None:
        """Connect to the cluster; the first `send` does it too.

        Raises KafkaError(NETWORK_EXCEPTION).
        """
        if self._closed:
            raise RuntimeError("this producer is closed")
        await self._shared_start.wait()

    async def _start_for_send(self) -> None:
        await self._start_within(self._config.max_block_ms)

    async def _start_within(self, timeout_ms: float) -> None:
        await self._shared_start.wait_within(timeout_ms, "max_block_ms")

    async def _start(self) -> None:
        cluster = Cluster(self._config, auto_create_topics=True, rng=self._rng)
        cluster.forget_idle_topics_after(self._config.metadata_max_idle_ms)
        cluster.names_new_topics_alone = True
        await cluster.start()
        self._cluster = cluster
        self._sender = Sender(cluster, self._config, self._accumulator, self._session, self._manager)
        self._sender.interceptors = self._interceptors
        if self._manager is not None:
            requests = TransactionSender(cluster, self._config, self._manager, self._session, self._sender)
            self._transactions = Transactions(self._config, self._manager, requests)
        self._appender.attach(cluster, self._sender)
        if allows_direct_sends(self._config):
            self._direct_send = DirectSend(
                self._config, self._appender, self._accumulator, self._session, self._new_builder, cluster, self._sender
            )
        self._new_future = delivery_future_class(asyncio.get_running_loop())
        self._thread_id = get_ident()
        self._cluster_id = cluster.metadata.cluster_id
        cluster.on_metadata = self._on_metadata
        cluster.on_loop_end = self._handle_loop_end

    def _handle_loop_end(self) -> None:
        self._appender.handle_loop_end()
        self.warn_of_undelivered()

    def warn_of_undelivered(self, queued_count: int = 0) -> None:
        """The program ends without `close`: say so if records are left, as librdkafka does."""
        if queued_count or self._accumulator.incomplete_count:
            logger.warning("a producer was not closed, and its last records may be lost: call close() or flush()")

    async def close(self, timeout_ms: float | None = None) -> None:
        """Deliver the sent records within `timeout_ms` (None: within their delivery timeouts) and
        disconnect. An open transaction is aborted, within `max_block_ms`. A call during another one waits for its end.
        Does nothing in the child of a fork.
        """
        limit_s = None if timeout_ms is None else as_milliseconds("timeout_ms", timeout_ms) / 1000
        if self._shared_start.is_of_parent() or self._close_finished.is_set():
            return
        self._shared_start.check_loop()
        if self._closed:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(limit_s):
                    await self._close_finished.wait()
            return
        self._appender.append_before()
        try:
            self._closed = True  # here: a call behind an interrupted one waits for the end below
            self._appender.close()
            await self._shared_start.stop()  # no record is taken before the start has ended
            async with asyncio.timeout(limit_s):
                has_ended = self._transactions is None or await self._transactions.close(timeout_ms)
                if has_ended and self._sender is not None:
                    await self._sender.flush()
        except TimeoutError:
            pass
        finally:
            try:
                if self._sender is not None:
                    self._sender.close()
            finally:
                # A task, which goes on where this call is cancelled again.
                await asyncio.wait([start_task(self._disconnect())])

    async def _disconnect(self) -> None:
        try:
            await self._arrow_kernel.close()
            if self._cluster is not None:
                await self._cluster.close()
        finally:
            self._close_finished.set()

    async def __aenter__(self) -> Self:
        try:
            await self.start()
        except BaseException:
            await self.close()  # `__aexit__` does not run after this, so the start must end here
            raise
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
        headers: Headers | None = (),
        partition: int | None = None,
        timestamp_ms: int | None = None,
        on_delivery: DeliveryCallback | None = None,
    ) -> asyncio.Future[RecordMetadata]:
        """Append one record. The returned future gets its RecordMetadata or a KafkaError.

        `value` and `key` are bytes or None, or any input of the serializer. Headers are (name,
        bytes or None). Raises KafkaError: REQUEST_TIMED_OUT without memory or metadata in time,
        MESSAGE_TOO_LARGE, UNKNOWN_TOPIC_OR_PARTITION; TypeError for other types.
        When it raises, or is cancelled, the record is not sent. `on_delivery` is called once the
        returned future is done, with (metadata, None) or (None, error).
        """
        if get_ident() != self._thread_id:  # a thread has its own loop; to look at that costs 8 times as much
            self._shared_start.check_loop()
        transaction: int | None = None
        try:
            callback = None if on_delivery is None else calls_on_delivery(on_delivery)
            place = self._append(topic, value, key, headers, partition, timestamp_ms, None)
            if place.__class__ is not ProducerBatch:
                transaction = self.open_transaction
                place = await place
            future = self._new_future()
            # As `future.bind`.
            future._delivery = place.delivery
            future.index = len(place.tickets) - 1
            future._observation = None
            if callback is not None:
                future.add_done_callback(callback)
            return future  # type: ignore[no-any-return]
        except BaseException as error:
            self._handle_unsent(error, transaction)
            raise

    def _handle_unsent(self, error: BaseException, transaction: int | None) -> None:
        if isinstance(error, KafkaError):
            self.note_lost_record(error, transaction)
        self.report_unsent(error)

    def report_unsent(self, error: BaseException, count: int = 1) -> None:
        """Tell the interceptors of records that have no place in a batch, because of an error or a cancelled call."""
        if self._interceptors is not None:
            if not isinstance(error, Exception):
                error = KafkaError(ErrorCode.REQUEST_TIMED_OUT, "the call was cancelled before its record was sent")
            for _ in range(count):
                self._interceptors.on_acknowledgement(None, error)

    async def send_and_wait(
        self,
        topic: str,
        value: Any = None,
        key: Any = None,
        *,
        headers: Headers | None = (),
        partition: int | None = None,
        timestamp_ms: int | None = None,
    ) -> RecordMetadata:
        """Send one record and wait for its acknowledgement. Raises KafkaError without one.

        Without a `linger_ms` its batch is sent at once, or in the next turn of the event loop.
        """
        if get_ident() != self._thread_id:
            self._shared_start.check_loop()
        started_s = monotonic()
        transaction: int | None = None
        place: Any = None
        waiter: RecordWaiter | None = None
        try:
            direct = self._direct_send
            if direct is not None and self._busy_poll.last_was_prompt and not headers and timestamp_ms is None:
                if direct.is_turn_due(started_s, topic):
                    append = partial(self._append_awaited, topic, value, key, partition)
                    place, waiter = await direct.give_turn(append)
                if waiter is None:
                    place = direct.send(topic, value, key, partition)
                    if place.__class__ is RecordMetadata:
                        return place
            if place is None:
                place = self._append(topic, value, key, headers, partition, timestamp_ms, None)
            if place.__class__ is not ProducerBatch:
                transaction = self.open_transaction
                place = await place
        except BaseException as error:
            self._handle_unsent(error, transaction)
            raise
        loop = self._new_future.loop
        if waiter is None:
            waiter = RecordWaiter(place.delivery, len(place.tickets) - 1, loop)
        if self._config.linger_ms is None and not place.in_flight:
            place.delivery.is_awaited = True
            assert self._sender is not None
            self._sender.wake()
        future = waiter.future
        self._busy_poll.begin(future, loop, started_s)
        await future
        self._busy_poll.end(future)
        return waiter.result()

    def _append_awaited(self, topic: str, value: Any, key: Any, partition: int | None) -> Appended:
        """Append a record that a call waits for, and return its batch and waiter, if it can be done at once."""
        place = self._append(topic, value, key, (), partition, None, None)
        if not isinstance(place, ProducerBatch):
            place.close()
            return NOT_APPENDED
        return place, RecordWaiter(place.delivery, len(place.tickets) - 1, self._new_future.loop)

    def _send_appended(self) -> None:
        """Send all records appended so far without linger: the blocking client waits for one of them."""
        if self._sender is not None:
            self._sender.send_all()

    async def send_many(
        self, topic: str, records: Iterable[Any], *, ticket: GroupFuture | None = None
    ) -> asyncio.Future[list[WrittenRange]]:
        """Append records as `send` does, without a future and a coroutine for each.

        A record is a value, a tuple (key, value) or a `ProducerRecord`. The returned future gets the
        `WrittenRange`s, or a BatchSendError that has those of the records that were delivered. An
        error at the first record is raised, as by `send`; an error at a later one fails it and all
        after it, and is in the BatchSendError. An iterator is read while its records are sent, so it
        may be longer than the memory.
        """
        self._shared_start.check_loop()
        records = as_records(records)
        if not isinstance(records, (list, tuple)):
            if not isinstance(records, Sized):
                pieces = RecordPieces(records, partial(self._appender.copy_of_any, topic))

                async def read() -> list[Any]:
                    return pieces.next_piece()

                return await self.send_pieces(topic, read, ticket=ticket)
            records = list(records)
        group = SendGroup(topic, ticket or asyncio.get_running_loop().create_future(), len(records))
        await self._fill(group, self._append_many(group, topic, records, self._append))
        return group.future  # type: ignore[no-any-return]

    async def send_pieces(
        self, topic: str, read: Callable[[], Awaitable[Sequence[Any]]], *, ticket: GroupFuture | None = None
    ) -> asyncio.Future[list[WrittenRange]]:
        """As `send_many`, with the records of `RecordPieces` that `read` returns from call to call, until it returns
        none.
        """
        self._shared_start.check_loop()
        group = SendGroup(topic, ticket or asyncio.get_running_loop().create_future(), 0, is_read=False)
        await self._fill(group, self._append_pieces(group, topic, read))
        return group.future  # type: ignore[no-any-return]

    async def _append_pieces(self, group: SendGroup, topic: str, read: Callable[[], Awaitable[Sequence[Any]]]) -> None:
        transaction = 0 if self._manager is None else self._manager.check_open()
        while piece := await read():
            group.record_count += len(piece)
            await self._append_many(group, topic, piece, self._appender.append_prepared, transaction)
            del piece  # or it waits in memory for the next one
        group.end()

    async def _append_many(
        self, group: SendGroup, topic: str, records: Sequence[Any], append: Any, transaction: int = 0
    ) -> None:
        """`transaction`: the one that was open before the records were read."""
        group_ticket: Any = group
        try:
            if self._manager is not None and transaction:
                self._manager.check_still_open(transaction)
            for record in records:
                if record.__class__ is bytes:  # without an object around it
                    place = append(topic, record, None, (), None, None, group_ticket)
                else:
                    if record.__class__ is RefusedRecord:
                        raise record.error
                    value, key, headers, partition, timestamp_ms = as_producer_record(record)
                    place = append(topic, value, key, headers, partition, timestamp_ms, group_ticket)
                if place.__class__ is not ProducerBatch:
                    await place
                group.appended_count += 1
        except BaseException as error:
            self.report_unsent(error, group.unappended_count)
            raise

    async def send_batch(
        self, topic: str, records: Iterable[Any], *, partition: int, ticket: GroupFuture | None = None
    ) -> asyncio.Future[WrittenRange]:
        """Append records to one partition as one record batch, which is in the log whole or not at all.

        Records as for `send_many`, without a partition of their own. `batch_size` does not limit
        them, `max_request_size` does, and the batch is never split. The returned future gets the
        WrittenRange or a KafkaError. Raises as `send`, ValueError without records.
        """
        return await self.send_built_batch(topic, lambda: self.build_batch(records), partition=partition, ticket=ticket)

    def build_batch(self, records: Iterable[Any]) -> BatchBuilder:
        """The batch of `send_batch`. Its records are serialized in this thread, any one."""
        return build_batch(self._config, records, int(time.time() * 1000), is_transactional=self._manager is not None)

    async def send_built_batch(
        self, topic: str, build: Callable[[], BatchBuilder], *, partition: int, ticket: GroupFuture | None = None
    ) -> asyncio.Future[WrittenRange]:
        """As `send_batch`, with what `build` returns or raises."""
        self._shared_start.check_loop()
        group_ticket: Any = ticket or asyncio.get_running_loop().create_future()
        partition = as_partition_number(partition)
        transaction = self.open_transaction
        try:
            builder = build()
            route = await self._appender.find_route(topic, partition)
            group = BatchOutcome(route.topic.name, group_ticket, builder.record_count)
            await self._appender.append_batch(TopicPartition(topic, partition), builder, group)
        except KafkaError as error:
            self.note_lost_record(error, transaction)
            raise
        return group_ticket  # type: ignore[no-any-return]

    async def send_arrow(
        self, topic: str, table: pa.Table | pa.RecordBatch, *, ticket: GroupFuture | None = None
    ) -> asyncio.Future[list[WrittenRange]]:
        """Append the rows of a `pyarrow.Table` or `RecordBatch`, without a Python object for each.

        Columns: key, value, headers, timestamp, partition, with the types of `poll_arrow`; topic,
        offset and timestampType are ignored, and any may be missing but key and value. Rows of one
        partition keep their order. Batches have up to 500 KiB, with zstd 128 KiB; a `batch_size` other than
        the default counts instead, and at least 128 KiB. Needs `arrow`.

        The returned future gets the `WrittenRange`s, or a BatchSendError that has those of the rows
        that were delivered. Before the first row is appended, this raises TypeError or ValueError
        for wrong columns, and KafkaError as `send`.
        """
        self._shared_start.check_loop()
        config = self._config
        if config.key_serializer is not None or config.value_serializer is not None:
            raise RuntimeError("send_arrow() takes bytes; this producer has a serializer")
        transaction = self.open_transaction
        try:
            await self._load_arrow_kernel()
            summary = self._arrow_batches.check(table)
            route = await self._appender.find_route(
                topic, summary.partition_max if summary.partition_max >= 0 else None
            )
        except KafkaError as error:
            self.note_lost_record(error, transaction)
            raise
        group = SendGroup(topic, ticket or asyncio.get_running_loop().create_future(), summary.row_count)
        await self._fill(group, self._append_rows(group, route, table))
        return group.future  # type: ignore[no-any-return]

    async def _load_arrow_kernel(self) -> None:
        """Load the compiled loops beside the event loop. Raises KafkaError(REQUEST_TIMED_OUT) after `max_block_ms`,
        RuntimeError after `close`.
        """
        limit_ms = self._config.max_block_ms
        if not self._closed:
            await self._arrow_kernel.load_within(limit_ms / 1000)
        if self._closed:
            raise RuntimeError("this producer is closed")
        if not self._arrow_kernel.is_over:
            text = f"the compiled loops of send_arrow were not loaded within max_block_ms={limit_ms}"
            raise KafkaError(ErrorCode.REQUEST_TIMED_OUT, text)

    async def _fill(self, group: SendGroup, appending: Coroutine[Any, Any, None]) -> None:
        """Append the records of a group. An error after the first one is the group's outcome, not this call's."""
        transaction = self.open_transaction
        try:
            await appending
        except BaseException as error:
            if isinstance(error, Exception):
                self.note_lost_record(error, transaction)
            if not group.appended_count:
                raise
            if isinstance(error, KafkaError):
                group.fail_rest(error)
            elif self._closed:
                group.fail_rest(KafkaError(ErrorCode.NETWORK_EXCEPTION, CLOSED_BEFORE_DELIVERY))
            else:
                group.fail_rest(KafkaError(ErrorCode.INVALID_RECORD, f"a record was not sent: {error!r}"))
            if not isinstance(error, Exception):
                raise

    async def _append_rows(self, group: SendGroup, route: Route, table: pa.Table | pa.RecordBatch) -> None:
        topic = route.topic.name
        transaction = 0 if self._manager is None else self._manager.check_open()
        for rows in self._arrow_batches.pieces(table, route.count):
            route = self._appender.known_route(topic) or await self._appender.find_route(topic, None)
            batches = self._arrow_batches.encode(
                rows,
                topic,
                route.count,
                route.topic.available_partitions,
                route.unkeyed_partitioner,
                int(time.time() * 1000),
            )
            since_turn_bytes = 0
            for batch in batches:
                if self._manager is not None:
                    self._manager.check_still_open(transaction)
                builder = self._new_builder()
                builder.adopt(batch.buffer, batch.record_count, batch.base_timestamp, batch.max_timestamp)
                await self._appender.append_batch(TopicPartition(topic, batch.partition), builder, group)
                since_turn_bytes += len(batch.buffer)
                if since_turn_bytes >= _TURN_BYTES:
                    since_turn_bytes = 0
                    await asyncio.sleep(0)  # the sender reads the batch while it is in the processor's cache
            await asyncio.sleep(0)  # a large table must not hold the event loop

    async def flush(self) -> None:
        """Send all records at once and wait until each is delivered or has failed."""
        self._shared_start.check_loop()
        self._appender.append_before()
        if self._sender is not None:
            await self._sender.flush()

    def metrics(self) -> ProducerMetrics:
        """Totals since the start, and the present state."""
        totals = SenderTotals() if self._sender is None else self._sender.totals
        accumulator = self._accumulator
        return totals.snapshot(
            self._config.buffer_memory,
            accumulator.used_bytes,
            accumulator.incomplete_count,
            self._appender.waiting_count,
        )

    # -- transactions

    async def init_transactions(self) -> None:
        """Get the producer id, and end what an earlier producer of this `transactional_id` left open.

        The first transaction does it too. Call it before the first poll of a consumer whose positions the transactions
        commit: where a crash has left one open, polls are empty until it ends. Raises TransactionTimeout after
        `max_block_ms`, TransactionFatal.
        """
        deadline = self._max_block_deadline()
        await (await self._started_transactions()).initialize(deadline)

    def transaction(self) -> TransactionScope:
        """One transaction: `async with producer.transaction():`.

        It commits at the end of the block and aborts on any exception. The end raises
        TransactionAbortable when the transaction was aborted (run the block again), ProducerFenced
        and other TransactionFatal (close this producer), TransactionTimeout when the outcome is not
        known.
        """
        return TransactionScope(self._begin)

    async def begin_transaction(self) -> None:
        """Begin a transaction. Raises RuntimeError in an open one, TransactionTimeout, TransactionFatal.

        A call that is cancelled or raises begins none: a commit or an abort then raises RuntimeError, also if it is the
        previous transaction whose outcome is not known.
        """
        await self._begin()

    async def _begin(self) -> tuple[Transactions, int]:
        """The transactions, and the number of the one that has begun."""
        deadline = self._max_block_deadline()  # for the start, too
        transactions = await self._started_transactions()
        return transactions, await transactions.begin(deadline)

    def _max_block_deadline(self) -> float:
        return asyncio.get_running_loop().time() + self._config.max_block_ms / 1000

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
        assert self._sender is not None
        limit_ms = self._config.max_block_ms
        try:
            async with asyncio.timeout(limit_ms / 1000):
                await self._sender.flush()
        except TimeoutError:
            text = f"detach_transaction did not end within max_block_ms={limit_ms}: records are not delivered yet"
            raise TransactionTimeout(ErrorCode.REQUEST_TIMED_OUT, text) from None
        return await transactions.detach()

    async def send_offsets_to_transaction(
        self, offsets: Mapping[TopicPartition, int | OffsetAndMetadata], group: Any
    ) -> None:
        """Commit a group's offsets with the open transaction, if it is committed.

        `group` is the consumer that read the records, its `group_metadata()`, or a group id. Raises
        TransactionAbortable, also when the consumer is no longer a member of the group;
        TransactionFatal.
        """
        await self.send_offsets_of(offsets, group_metadata_or_error(group))

    async def send_offsets_of(
        self, offsets: Mapping[TopicPartition, int | OffsetAndMetadata], metadata: ConsumerGroupMetadata | KafkaError
    ) -> None:
        """As `send_offsets_to_transaction`, with what `group_metadata_or_error` has returned."""
        to_commit = as_offsets("offsets", offsets)
        await (await self._started_transactions()).send_offsets(to_commit, metadata)

    @property
    def open_transaction(self) -> int:
        """The number of the open transaction, 0 without one."""
        return 0 if self._manager is None else self._manager.open_number

    def note_lost_record(self, error: BaseException, transaction: int | None = None) -> None:
        """A record could not be sent: its transaction, if any, can only be aborted (as in Java).

        `transaction`: the one that was open when the record began to wait for its place, None for a record that has
        not waited. Another one may be open now.
        """
        manager = self._manager
        number = self.open_transaction if transaction is None else transaction
        if manager is None or not number or manager.number != number or isinstance(error, TransactionError):
            return
        code = error.code if isinstance(error, KafkaError) else ErrorCode.INVALID_RECORD
        manager.handle_problem(code, f"a record was not sent: {text_of(error)}")
        if self._sender is not None:
            self._sender.wake()

    async def _started_transactions(self) -> Transactions:
        if self._manager is None:
            raise RuntimeError("this producer has no transactions; set transactional_id")
        if self._sender is None:
            try:
                await self._start_for_send()
            except KafkaError as error:
                raise TransactionTimeout(error.code, error.message) from None
        await self.start()  # raises when the producer is closed
        assert self._transactions is not None
        return self._transactions

    async def partitions_for(self, topic: str) -> list[PartitionDescription]:
        """The partitions of a topic. The broker creates the topic where allowed.

        Raises KafkaError.
        """
        self._shared_start.check_loop()
        route = await self._appender.find_topic(topic, None)
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

    def _on_metadata(self) -> None:
        assert self._sender is not None
        assert self._cluster is not None
        cluster_id = self._cluster.metadata.cluster_id
        if cluster_id is not None:
            if self._cluster_id not in (None, cluster_id):
                logger.warning("the cluster %s is in the place of %s now", cluster_id, self._cluster_id)
                self._session.drop_identity()
                if self._transactions is not None:
                    self._transactions.handle_other_cluster()
            self._cluster_id = cluster_id
        self._appender.handle_metadata()
        self._sender.wake()
