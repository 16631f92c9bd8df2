"""The blocking producer: any thread queues records, and the loop's thread sends them in bulk.

The first record wakes the loop. Then the loop looks at the queue again after half of `linger_ms`, a
millisecond at least, until it is empty, and no record in between wakes it: a wake-up costs several
times what a record costs. A thread that waits for a record wakes the loop at once.

Invariants: every record goes through the one queue, so that the records of a thread keep their
order. Every returned future gets a result. The loop's own thread, where delivery callbacks run,
never waits. Only the loop's thread takes from the queue while the producer is open, one record at a
time.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sized
from concurrent.futures import Future
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Never

from tidelog.client.arguments import as_milliseconds, check_named_options, group_metadata_or_error
from tidelog.client.metrics import ProducerMetrics
from tidelog.client.model import OffsetAndMetadata, PartitionDescription, RecordMetadata, TopicPartition, WrittenRange
from tidelog.client.producing import producer
from tidelog.client.producing.accumulator import Headers, ProducerBatch
from tidelog.client.producing.detached_transactions import DetachedTransaction
from tidelog.client.producing.interceptors import DeliveryCallback, calls_on_delivery
from tidelog.client.producing.record_appender import Place
from tidelog.client.producing.record_arguments import RecordPieces, as_records, read_batch
from tidelog.client.producing.sender import CLOSED_BEFORE_DELIVERY
from tidelog.client.producing.transaction_errors import TransactionAborted
from tidelog.client.producing.transactions import TransactionScope
from tidelog.client.sync.caller_thread import CallerThread
from tidelog.client.sync.loop_call import SharedCall
from tidelog.client.sync.loop_thread import BlockingClient, LoopThread
from tidelog.client.sync.record_future import RecordFuture, record_future_class
from tidelog.client.sync.waiting_threads import WaitingThreads
from tidelog.protocol.errors import ErrorCode, KafkaError

if TYPE_CHECKING:
    import pyarrow as pa

logger = logging.getLogger(__name__)

_QUEUE_MAX = 4096
_QUEUE_MAX_IN_CALLBACKS = 16 * _QUEUE_MAX
_MISSING_TOPICS_MAX = 1000
_DRAIN_INTERVAL_MIN_S = 0.001
_DRAIN_INTERVAL_MAX_S = 0.005
_RECORDS_PER_DRAIN = 1024
"""After these the loop sends batches and reads responses before it takes more records."""


class _Barrier:
    """A queue entry that is reached when all earlier entries were passed to the asynchronous
    producer.
    """

    __slots__ = ("reached",)

    def __init__(self) -> None:
        self.reached = asyncio.Event()


class Producer(BlockingClient):
    """The blocking version of `tidelog.Producer`.

    Several threads and delivery callbacks may call `send`.
    """

    def __init__(self, *positional: Never, **options: Any) -> None:
        check_named_options("Producer", positional)
        super().__init__()
        self._producer = producer.Producer(**options)
        self._queue: deque[Any] = deque()
        """Records (future, time of the call, arguments of `append`), and barriers."""
        self._new_future = record_future_class(
            self._wake_before_waiting, self._observe_on_loop, self._check_not_forked, self._check_may_wait
        )
        self._to_observe: deque[RecordFuture] = deque()
        """Futures of records in batches, whose outcome another thread has asked for."""
        self._observing = SharedCall(self._observe_all)
        linger_s = self._producer.config.full_linger_ms / 1000
        self._drain_interval_s = min(max(linger_s / 2, _DRAIN_INTERVAL_MIN_S), _DRAIN_INTERVAL_MAX_S)
        self._space_waiters = WaitingThreads()
        self._is_draining = False
        """The loop will look at the queue without another wake-up."""
        self._wake_up = SharedCall(self._drain)
        self._skips_linger = self._producer.config.linger_ms is None
        self._is_awaited = False
        """A thread waits for a record: when the queue is empty, all records are sent without linger."""
        self._drain_timer: asyncio.TimerHandle | None = None
        self._waiting_task: asyncio.Task[object] | None = None
        """The record that waits for memory or metadata. Those behind it wait too."""
        self._waiting_future: RecordFuture | None = None
        self._dropped_task: asyncio.Task[object] | None = None
        """The waiting task whose record's transaction is aborted."""
        self._last_error_text = ""
        self._missing_since: dict[str, float] = {}
        """Topics without metadata, with the start time of the wait for it."""
        self._is_closed = False

    def _handle_fork(self) -> None:
        super()._handle_fork()
        if self._is_forked:  # the parent delivers what is queued
            self._queue.clear()
            self._waiting_future = None

    def start(self) -> None:
        """Connect to the cluster. Raises KafkaError(NETWORK_EXCEPTION)."""
        self._run(self._producer.start)

    def send(
        self,
        topic: str,
        value: Any = None,
        key: Any = None,
        *,
        headers: Headers | None = (),
        partition: int | None = None,
        timestamp_ms: int | None = None,
        on_delivery: DeliveryCallback | None = None,
    ) -> Future[RecordMetadata]:
        """Queue one record. The returned future gets its metadata or an exception, and `on_delivery`
        is called with (metadata, None) or (None, error) in the loop's thread.

        Blocks while the queue to the loop is full, which happens when the producer's memory is
        full. In a delivery callback it does not block: the queue may grow
        longer there, and beyond that limit it raises KafkaError(REQUEST_TIMED_OUT). The first call starts the
        client, for at most `max_block_ms`, and raises KafkaError(NETWORK_EXCEPTION or REQUEST_TIMED_OUT).
        """
        thread = self._thread
        if self._closed or thread is None:
            self._run(self._producer._start_for_send)
            thread = self._thread
            if thread is None:
                raise RuntimeError("this client is closed")
        if len(self._queue) >= _QUEUE_MAX:
            self._wait_for_space()
        future: RecordFuture = self._new_future()
        if on_delivery is not None:
            future.call_when_done(calls_on_delivery(on_delivery))
        queued_s = time.monotonic() if self._missing_since else 0.0  # read only while a topic is missing
        self._queue.append((future, queued_s, topic, value, key, headers, partition, timestamp_ms))
        if self._is_closed:
            self._fail_queued()  # another thread has closed the producer and emptied the queue already
        elif not self._is_draining:
            self._wake_loop(thread)
        return future

    def _wake_loop(self, thread: LoopThread) -> None:
        try:
            self._is_draining = True
            self._wake_up.ask(thread.loop)
        except RuntimeError:  # the loop is closed
            self._fail_queued()
        except BaseException:  # an interrupt, perhaps before the call, to which other threads have left their records
            self._is_draining = False
            self._call_on_loop(self._drain)
            raise

    def _wake_before_waiting(self) -> None:
        """A thread is about to wait for a record, so neither the queue nor a batch must wait for its interval."""
        self._check_not_on_loop()
        self._check_thread_can_run()
        thread = self._open_thread
        self._is_awaited = self._skips_linger
        if (self._queue or self._is_awaited) and not self._wake_up.is_on_its_way() and thread is not None:
            self._wake_loop(thread)

    def _wait_for_space(self) -> None:
        if self._is_on_loop():
            if len(self._queue) >= _QUEUE_MAX_IN_CALLBACKS:
                raise KafkaError(
                    ErrorCode.REQUEST_TIMED_OUT,
                    f"{_QUEUE_MAX_IN_CALLBACKS} records are queued, and a delivery callback cannot wait for room",
                )
            return
        while len(self._queue) >= _QUEUE_MAX:
            if self._closed:
                raise RuntimeError("this client is closed")
            self._space_waiters.wait(lambda: len(self._queue) < _QUEUE_MAX, 0.05)

    def _drain(self) -> None:
        """On the loop: pass queued records to the asynchronous producer."""
        self._wake_up.has_begun()
        if self._waiting_task is not None:
            return  # it drains at its end
        if self._drain_timer is not None:
            self._drain_timer.cancel()
            self._drain_timer = None
        queue = self._queue
        append = self._producer._append  # `send` without its coroutine
        count = 0
        while queue and count < _RECORDS_PER_DRAIN:
            item = queue.popleft()
            if item.__class__ is _Barrier:
                item.reached.set()
                continue
            count += 1
            future, queued_s, topic, value, key, headers, partition, timestamp_ms = item
            try:
                waited_ms = self._waited_ms(topic, queued_s) if self._missing_since else 0.0
                place = append(topic, value, key, headers, partition, timestamp_ms, None, waited_ms)
            except BaseException as error:  # of a serializer, a partitioner: it is the record's outcome
                self._handle_send_error(future, topic, error, time.monotonic())
                continue
            if place.__class__ is not ProducerBatch:
                self._wait_for(place, future, topic)
                break
            # As `future.bind`.
            future._index = len(place.tickets) - 1
            future._delivery = place.delivery
            if future._is_observed:
                place.delivery.observe(future)
            if self._missing_since:
                self._missing_since.pop(topic, None)
        if len(queue) <= _QUEUE_MAX // 2:
            self._space_waiters.wake()
        if self._waiting_task is None:
            if self._is_awaited and not queue:
                self._is_awaited = False
                self._producer._send_appended()
            self._drain_again(count)

    def _drain_again(self, count: int) -> None:
        """Schedule the next drain after one of `count` records, or leave it to the next record."""
        loop = asyncio.get_running_loop()
        if self._queue:
            loop.call_soon(self._drain)
        elif count:
            self._drain_timer = loop.call_later(self._drain_interval_s, self._drain)
        else:
            # Clear the flag first, then check the queue again: a sender that saw the flag set has
            # queued by then.
            self._is_draining = False
            if self._queue:
                self._is_draining = True
                loop.call_soon(self._drain)

    def _waited_ms(self, topic: str, queued_s: float) -> float:
        """The part of `max_block_ms` that a record of a missing topic has waited.

        All records of such a topic share one wait, because records of other topics are behind them.
        """
        start_s = time.monotonic()
        return 1000 * max(0.0, start_s - max(queued_s, self._missing_since.get(topic, start_s)))

    def _observe_on_loop(self, future: RecordFuture) -> None:
        """In any thread: have the loop tell a future of its delivery."""
        self._to_observe.append(future)
        thread = self._thread
        if thread is None or self._observing.is_on_its_way():
            return
        try:
            self._observing.ask(thread.loop)
        except RuntimeError:  # the loop is closed, and every delivery is settled
            self._observe_all()
        except BaseException:  # an interrupt, perhaps before the call, to which other threads have left their futures
            self._call_on_loop(self._observe_all)
            raise

    def _observe_all(self) -> None:
        self._observing.has_begun()
        while self._to_observe:
            try:
                future = self._to_observe.popleft()
            except IndexError:  # another thread has taken the last one
                return
            future.observe()

    def _wait_for(self, waiting: Coroutine[Any, Any, Place], future: RecordFuture, topic: str) -> None:
        """Drain on when a record has its place, or has failed."""
        start_s = time.monotonic()
        transaction = self._producer.open_transaction

        async def bind() -> None:
            place = await waiting
            self._waiting_future = None
            future.bind(place.delivery, len(place.tickets) - 1)  # until the loop runs again it is the last

        def handle_end(task: asyncio.Task[object]) -> None:
            self._waiting_task = None
            is_dropped, self._dropped_task = self._dropped_task is task, None
            if task.cancelled() and is_dropped:
                waiting.close()
                if not future.done():  # `close` in another thread may have settled it
                    self._fail_aborted(future)
                self._drain()
                return
            if task.cancelled() and self._closed:
                waiting.close()
                cause = KafkaError(ErrorCode.NETWORK_EXCEPTION, CLOSED_BEFORE_DELIVERY)
                if not future.done():  # `close` in another thread may have settled it
                    future.set_exception(cause)
                self._producer.report_unsent(cause)
                return
            # A partitioner may raise a CancelledError of its own.
            error = asyncio.CancelledError() if task.cancelled() else task.exception()
            if error is None:
                self._missing_since.pop(topic, None)
            else:
                # A commit waits for the records queued before it, so it began before this one was queued.
                is_behind_commit = self._producer.open_transaction != transaction
                self._handle_send_error(future, topic, error, start_s, 0 if is_behind_commit else transaction)
            self._drain()

        self._waiting_future = future
        self._waiting_task = asyncio.get_running_loop().create_task(bind())
        self._waiting_task.add_done_callback(handle_end)

    def _handle_send_error(
        self, future: RecordFuture, topic: str, error: BaseException, start_s: float, transaction: int | None = None
    ) -> None:
        """`transaction`: that of a record that has waited, 0 if it is not a part of any."""
        if isinstance(error, RuntimeError) and self._producer._closed:  # it was sent before `close`, and is left
            error = KafkaError(ErrorCode.NETWORK_EXCEPTION, CLOSED_BEFORE_DELIVERY)
        future.set_exception(error)
        self._log_once(str(error) or repr(error))
        self._producer.note_lost_record(error, transaction)
        self._producer.report_unsent(error)
        if isinstance(error, KafkaError) and error.retriable:
            self._missing_since.setdefault(topic, start_s)
            if len(self._missing_since) > _MISSING_TOPICS_MAX:
                del self._missing_since[next(iter(self._missing_since))]

    def _log_once(self, reason: str) -> None:
        """Log a reason once for consecutive records: their futures may never be read."""
        if reason != self._last_error_text:
            self._last_error_text = reason
            logger.error("a record was not sent: %s", reason)

    def send_and_wait(self, topic: str, value: Any = None, key: Any = None, **options: Any) -> RecordMetadata:
        """Send one record and wait for its acknowledgement. Raises KafkaError without one."""
        self._check_not_on_loop()
        return self.send(topic, value, key, **options).result()

    def send_many(self, topic: str, records: Iterable[Any]) -> Future[list[WrittenRange]]:
        """As of the asynchronous producer; blocks until every record has a place in the producer's memory.

        An iterator is read in this thread.
        """
        records = as_records(records)
        if isinstance(records, Sized):
            known = list(records)
            return self._send_group(lambda future: self._producer.send_many(topic, known, ticket=future))
        pieces = RecordPieces(records)
        caller = CallerThread()
        return self._send_group(
            lambda future: self._producer.send_pieces(topic, lambda: caller.run(pieces.next_piece), ticket=future),
            caller,
        )

    def send_batch(self, topic: str, records: Iterable[Any], *, partition: int) -> Future[WrittenRange]:
        """As of the asynchronous producer; blocks until the batch has a place in the producer's memory."""
        read = read_batch(self._producer.config, records)  # in this thread: the iterable is the caller's
        return self._send_group(
            lambda future: self._producer.send_batch(topic, read, partition=partition, ticket=future)
        )

    def send_arrow(self, topic: str, table: pa.Table | pa.RecordBatch) -> Future[list[WrittenRange]]:
        """As of the asynchronous producer; blocks until every row has a place in the producer's memory."""
        return self._send_group(lambda future: self._producer.send_arrow(topic, table, ticket=future))

    def _send_group(
        self,
        send: Callable[[Future[Any]], Coroutine[Any, Any, Any]],
        caller: CallerThread | None = None,
    ) -> Future[Any]:
        """Send after the records queued so far. An error before the first record is raised."""
        future: Future[Any] = self._new_future()

        async def send_in_order() -> None:
            await self._drain_queue()
            await send(future)

        self._run(send_in_order, caller)
        return future

    def metrics(self) -> ProducerMetrics:
        """As of the asynchronous producer; records that wait for its loop are not counted."""
        return self._producer.metrics()

    def flush(self) -> None:
        """Send all records and wait until each is delivered or has failed."""
        self._run(self._flush)

    async def _flush(self) -> None:
        """Flush the records queued so far.

        Records of other threads queued meanwhile do not prolong it.
        """
        await self._drain_queue()
        await self._producer.flush()

    async def _drain_queue(self) -> None:
        """Wait until the asynchronous producer has the records queued so far."""
        barrier = _Barrier()
        self._queue.append(barrier)
        self._is_draining = True
        self._drain()
        await barrier.reached.wait()

    # -- transactions, as of the asynchronous producer

    def init_transactions(self) -> None:
        self._run(self._producer.init_transactions)

    def begin_transaction(self) -> None:
        self._run(self._producer.begin_transaction)

    def commit_transaction(self) -> None:
        has_committed = False

        async def commit() -> None:
            nonlocal has_committed
            await self._drain_queue()
            await self._producer.commit_transaction()
            has_committed = True

        try:
            self._run(commit)
        except BaseException:
            self._call_on_loop(lambda: self._keep_commit(has_committed))
            raise

    def _keep_commit(self, has_committed: bool) -> None:
        """On the loop: an interrupt came between the end of a commit and its caller, whose next one returns at once."""
        transactions = self._producer._transactions
        if has_committed and transactions is not None:
            transactions.keep_commit()

    def abort_transaction(self) -> None:
        async def abort() -> None:
            self._drop_queued()
            await self._producer.abort_transaction()

        self._run(abort)

    def detach_transaction(self) -> DetachedTransaction | None:
        async def detach() -> DetachedTransaction | None:
            await self._drain_queue()
            return await self._producer.detach_transaction()

        return self._run(detach)

    def send_offsets_to_transaction(
        self, offsets: Mapping[TopicPartition, int | OffsetAndMetadata], group: Any
    ) -> None:
        metadata = group_metadata_or_error(group)  # in this thread: it may be a blocking consumer
        self._run(lambda: self._producer.send_offsets_of(offsets, metadata))

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """One transaction: `with producer.transaction():` commits at the end and aborts on any exception."""
        scope = self._producer.transaction()
        has_committed = False

        async def end(error: BaseException | None) -> None:
            nonlocal has_committed
            if error is None:
                await self._drain_queue()
                await scope.__aexit__(None, None, None)
                has_committed = True
            else:
                self._drop_queued()
                await scope.__aexit__(type(error), error, None)

        try:
            self._run(scope.__aenter__)
            try:
                yield
            except BaseException as error:
                cause = error
                self._run(lambda: end(cause))
                raise
            self._run(lambda: end(None))
        except BaseException:
            # An interrupt may have come before the loop began with the end, or behind the end.
            self._call_on_loop(lambda: self._abandon(scope))
            self._call_on_loop(lambda: self._keep_commit(has_committed))
            raise

    def _abandon(self, scope: TransactionScope) -> None:
        """On the loop: abort the transaction of a block in the background, unless it ends already."""
        if scope.is_open:
            self._drop_queued()
            scope.abandon()

    def _drop_queued(self) -> None:
        """On the loop: fail the records of a transaction that is aborted before they reach the producer."""
        kept: list[_Barrier] = []
        while self._queue:
            item = self._queue.popleft()
            if isinstance(item, _Barrier):
                kept.append(item)
            else:
                self._fail_aborted(item[0])
        if self._waiting_task is not None:
            # It waits for memory or metadata, and all later records behind it.
            self._dropped_task = self._waiting_task
            self._waiting_task.cancel()
        for barrier in kept:
            barrier.reached.set()
        self._space_waiters.wake()

    def _fail_aborted(self, future: RecordFuture) -> None:
        error = TransactionAborted(ErrorCode.TRANSACTION_ABORTABLE, "its transaction was aborted before it was sent")
        future.set_exception(error)
        self._producer.report_unsent(error)

    def partitions_for(self, topic: str) -> list[PartitionDescription]:
        return self._run(lambda: self._producer.partitions_for(topic))

    def close(self, timeout_ms: float | None = None) -> None:
        """Deliver the sent records within `timeout_ms` and end the thread.

        The remaining records fail.
        """

        limit_s = None if timeout_ms is None else as_milliseconds("timeout_ms", timeout_ms) / 1000

        async def close() -> None:
            try:
                async with asyncio.timeout(limit_s):
                    await self._flush()
                    await self._producer.close()
            except TimeoutError:
                await self._producer.close(0)
            except asyncio.CancelledError:  # an interrupt of the caller: the records that are left fail
                await self._producer.close(0)
                raise

        self._check_not_on_loop()
        try:
            self._close_with(close, limit_s)
        finally:
            # Not while another call still delivers what is queued.
            if self._is_close_finished:
                self._is_closed = True
                self._fail_queued()

    def _handle_exit(self) -> None:
        if self._open_thread is not None:
            self._producer.warn_of_undelivered(len(self._queue) + (self._waiting_task is not None))

    def _final_call(self) -> Callable[[], Coroutine[Any, Any, None]]:
        return self._producer.close  # nothing is underway: a record's future refers to this client

    async def _last_call(self) -> None:
        await self._producer.close(0)  # returns at once where `close` has ended

    def _fail_queued(self) -> None:
        """Fail all queued records. Several threads may do this at the same time."""
        waiting_future = self._waiting_future
        if self._is_closed and waiting_future is not None and not waiting_future.done():
            waiting_future.set_exception(KafkaError(ErrorCode.NETWORK_EXCEPTION, CLOSED_BEFORE_DELIVERY))
        while self._queue:
            try:
                item = self._queue.popleft()
            except IndexError:
                break
            if not isinstance(item, _Barrier):
                item[0].set_exception(KafkaError(ErrorCode.NETWORK_EXCEPTION, CLOSED_BEFORE_DELIVERY))
        self._observe_all()  # the loop may have ended before it came to them
