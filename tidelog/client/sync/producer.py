"""The blocking producer: any thread queues records, and the loop's thread sends them in bulk.

The first record wakes the loop. Then the loop looks at the queue again after half of `linger_ms`, a
millisecond at least, until it is empty, and no record in between wakes it: a wake-up costs several
times what a record costs. A thread that waits for a record wakes the loop at once.

Invariants: every record goes through the one queue, so that the records of a thread to a topic keep
their order. A record that waits for its topic's metadata holds those of the same topic, not the
others. Every returned future gets a result. The loop's own thread, where delivery callbacks run,
never waits. Only the loop's thread takes from the queue while the producer is open, one record at a
time.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sized
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from itertools import repeat
from typing import TYPE_CHECKING, Any, NamedTuple, Never

from tidelog.client.arguments import as_milliseconds, check_named_options, group_metadata_or_error
from tidelog.client.client_logging import client_logger
from tidelog.client.metrics import ProducerMetrics
from tidelog.client.model import (
    OffsetAndMetadata,
    PartitionDescription,
    ProducerRecord,
    RecordMetadata,
    TopicPartition,
    WrittenRange,
)
from tidelog.client.network.outcomes import kept_error, text_of, without_handled
from tidelog.client.producing import producer
from tidelog.client.producing.accumulator import Headers, ProducerBatch
from tidelog.client.producing.detached_transactions import DetachedTransaction
from tidelog.client.producing.interceptors import DeliveryCallback, calls_on_delivery
from tidelog.client.producing.record_appender import Place
from tidelog.client.producing.record_arguments import RecordPieces, as_records, fixed_headers
from tidelog.client.producing.sender import CLOSED_BEFORE_DELIVERY
from tidelog.client.producing.transaction_errors import TransactionAborted
from tidelog.client.producing.transactions import TransactionScope
from tidelog.client.sync.caller_thread import CallerThread
from tidelog.client.sync.loop_call import SharedCall
from tidelog.client.sync.loop_thread import BlockingClient, LoopThread
from tidelog.client.sync.record_future import RecordFuture, record_future_class
from tidelog.client.sync.waiting_threads import WaitingThreads
from tidelog.protocol.batches.records import BatchBuilder
from tidelog.protocol.errors import ErrorCode, KafkaError

if TYPE_CHECKING:
    import pyarrow as pa

logger = client_logger(__name__)

_QUEUE_MAX = 4096
"""Entries. A record has one for each `_ENTRY_BYTES`, so that those in a queue are not much more than 32 MiB."""
_ENTRY_BYTES = 8 * 1024
_QUEUE_MAX_IN_CALLBACKS = 16 * _QUEUE_MAX
_MISSING_TOPICS_MAX = 1000
_NO_HEADERS: Headers = ()
"""The only empty tuple."""
_DRAIN_INTERVAL_MIN_S = 0.001
_DRAIN_INTERVAL_MAX_S = 0.005
_RECORDS_PER_DRAIN = 1024
"""After these the loop sends batches and reads responses before it takes more records."""


class _Barrier:
    """A queue entry that is reached when all earlier entries were passed to the asynchronous
    producer; with `topic`, those of this topic.
    """

    __slots__ = ("_part_count", "_whole", "reached", "topic")

    def __init__(self, topic: object = None, whole: _Barrier | None = None) -> None:
        self.reached = asyncio.Event()
        self.topic = topic
        self._whole, self._part_count = whole, 0

    def part(self, topic: str) -> _Barrier:
        """An entry behind the records of a topic that wait for metadata. With its last part the barrier is reached."""
        self._part_count += 1
        return _Barrier(topic, self)

    def reach(self) -> None:
        self.reached.set()
        if self._whole is not None:
            self._whole._part_count -= 1
            if not self._whole._part_count:
                self._whole.reach()


class _Refused(NamedTuple):
    """A queue entry: a record that has failed in `send` already."""

    future: RecordFuture
    topic: str
    error: Exception


class _Wait:
    """A record that waits for memory or metadata."""

    __slots__ = ("behind", "future", "is_dropped", "task")

    def __init__(self) -> None:
        self.future: RecordFuture | None = None
        self.task: asyncio.Task[object] | None = None
        self.is_dropped = False
        """Its transaction is aborted."""
        self.behind: deque[Any] = deque()
        """The later queue entries of a topic whose metadata is missing."""


class Producer(BlockingClient):
    """The blocking version of `tidelog.Producer`.

    Several threads and delivery callbacks may call `send`.
    """

    def __init__(self, *positional: Never, **options: Any) -> None:
        check_named_options("Producer", positional)
        super().__init__()
        self._producer = producer.Producer(**options)
        self._queue: deque[Any] = deque()
        """Records (future, time of the call, arguments of `append_prepared`), refused ones, barriers, and None behind a
        large record.
        """
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
        self._prepares = self._producer._appender.prepares
        self._append: Any = self._producer._appender.append_prepared
        self._is_awaited = False
        """A thread waits for a record: when the queue is empty, all records are sent without linger."""
        self._drain_timer: asyncio.TimerHandle | None = None
        self._wait: _Wait | None = None
        """The record that waits for memory. All behind it wait too."""
        self._topic_waits: dict[str, _Wait] = {}
        """The records that wait for the metadata of their topics."""
        self._behind_count = 0
        """The queue entries behind these."""
        self._last_error_text = ""
        self._missing_since: dict[str, float] = {}
        """Topics without metadata, with the start time of the wait for it."""
        self._is_closed = False

    def _handle_fork(self) -> None:
        super()._handle_fork()
        if self._is_forked:  # the parent delivers what is queued
            self._queue.clear()
            self._wait = None
            self._topic_waits.clear()
            self._behind_count = 0

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
        is called with (metadata, None) or (None, error) in the loop's thread. Serializers run in this thread.

        Blocks while the queue to the loop is full, which happens when the producer's memory is
        full, or many records wait for the metadata of this topic. In a delivery callback it does not block: the queue
        may grow longer there, and beyond that limit it raises KafkaError(REQUEST_TIMED_OUT). The first call starts the
        client, for at most `max_block_ms`, and raises KafkaError(NETWORK_EXCEPTION or REQUEST_TIMED_OUT).
        """
        thread = self._thread
        if self._closed or thread is None:
            self._run(self._producer._start_for_send)
            thread = self._thread
            if thread is None:
                raise RuntimeError("this client is closed")
        if len(self._queue) >= _QUEUE_MAX or self._behind_count >= _QUEUE_MAX:
            self._wait_for_space(topic)
        future: RecordFuture = self._new_future()
        if on_delivery is not None:
            future.call_when_done(calls_on_delivery(on_delivery))
        queued_s = time.monotonic() if self._missing_since else 0.0  # read only while a topic is missing
        has_bytes_only = value.__class__ is bytes and (key is None or key.__class__ is bytes) and not self._prepares
        fixed = headers if headers is _NO_HEADERS else fixed_headers(headers)
        if has_bytes_only and fixed is not None:
            entry: Any = (future, queued_s, topic, value, key, fixed, partition, timestamp_ms)
        else:
            entry = self._copy_of(future, queued_s, topic, value, key, headers, partition, timestamp_ms)
        self._queue.append(entry)
        is_plain = has_bytes_only and fixed is _NO_HEADERS
        if not is_plain or len(value) + (0 if key is None else len(key)) >= _ENTRY_BYTES:
            self._queue.extend(repeat(None, _entry_count(entry) - 1))
        if self._is_closed:
            self._fail_queued()  # another thread has closed the producer and emptied the queue already
        elif not self._is_draining:
            self._wake_loop(thread)
        return future

    def _copy_of(
        self, future: RecordFuture, queued_s: float, topic: str, value: Any, key: Any, headers: Any, *rest: Any
    ) -> tuple[Any, ...]:
        """The queue entry of a record whose sender may change it after the call: a dict, for example, or a list of
        headers.
        """
        try:
            record = ProducerRecord(value, key, headers or (), *rest)
            return future, queued_s, topic, *self._producer._appender.copy(topic, record)
        except Exception as error:  # of a serializer: it is the record's outcome
            problem = error
        except BaseException as interrupt:
            cause = interrupt
            self._call_on_loop(lambda: self._producer.report_unsent(cause))
            raise
        return _Refused(future, topic, without_handled(problem))

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

    def _wait_for_space(self, topic: object) -> None:
        if self._is_on_loop():
            if len(self._queue) + self._behind_count >= _QUEUE_MAX_IN_CALLBACKS:
                raise KafkaError(
                    ErrorCode.REQUEST_TIMED_OUT,
                    f"{_QUEUE_MAX_IN_CALLBACKS} records are queued, and a delivery callback cannot wait for room",
                )
            return
        while not self._has_space(topic):
            if self._closed:
                raise RuntimeError("this client is closed")
            self._space_waiters.wait(lambda: self._has_space(topic), 0.05)

    def _has_space(self, topic: object) -> bool:
        if self._behind_count >= _QUEUE_MAX and isinstance(topic, str) and topic in self._topic_waits:
            return False
        return len(self._queue) < _QUEUE_MAX

    def _drain(self) -> None:
        """On the loop: pass queued records to the asynchronous producer."""
        self._wake_up.has_begun()
        if self._wait is not None:
            return  # it drains at its end
        if self._drain_timer is not None:
            self._drain_timer.cancel()
            self._drain_timer = None
        queue, topic_waits = self._queue, self._topic_waits
        append = self._append
        count = 0
        while queue and count < _RECORDS_PER_DRAIN:
            item = queue.popleft()
            if item.__class__ is not tuple:
                self._pass(item)
                continue
            count += 1
            future, queued_s, topic, value, key, headers, partition, timestamp_ms = item
            if topic_waits and isinstance(topic, str) and topic in topic_waits:
                topic_waits[topic].behind.append(item)
                self._behind_count += _entry_count(item)
                continue
            try:
                waited_ms = self._waited_ms(topic, queued_s) if self._missing_since else 0.0
                place = append(topic, value, key, headers, partition, timestamp_ms, None, waited_ms)
            except BaseException as error:  # of a serializer, a partitioner: it is the record's outcome
                self._handle_send_error(future, topic, error, time.monotonic())
                continue
            if place.__class__ is not ProducerBatch:
                if self._begin_wait(place, future, topic, partition):
                    break
                continue
            # As `future.bind`.
            future._index = len(place.tickets) - 1
            future._delivery = place.delivery
            if future._is_observed:
                place.delivery.observe(future)
            if self._missing_since:
                self._missing_since.pop(topic, None)
        if len(queue) <= _QUEUE_MAX // 2:
            self._space_waiters.wake()
        if self._wait is None:
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

        All records of such a topic share one wait: if each began its own, a full queue would take days.
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

    def _pass(self, item: _Barrier | _Refused | None) -> None:
        """What is no record has come to the head of the queue."""
        if isinstance(item, _Refused):
            self._handle_send_error(*item, time.monotonic())
        if not isinstance(item, _Barrier):
            return
        waits = [(topic, wait) for topic, wait in self._topic_waits.items() if item.topic in (None, topic)]
        for topic, wait in waits:
            wait.behind.append(item.part(topic))
            self._behind_count += 1
        if not waits:
            item.reach()

    def _begin_wait(
        self, waiting: Coroutine[Any, Any, Place], future: RecordFuture, topic: str, partition: int | None
    ) -> bool:
        """A record waits. Returns whether those of all topics do."""
        wait = _Wait()
        lacks_metadata = self._producer._appender.lacks_metadata(topic, partition)
        if lacks_metadata and len(self._topic_waits) < _MISSING_TOPICS_MAX:
            self._topic_waits[topic] = wait
        else:
            self._wait = wait
        self._wait_for(waiting, future, topic, wait)
        return self._wait is wait

    def _wait_for(self, waiting: Coroutine[Any, Any, Place], future: RecordFuture, topic: str, wait: _Wait) -> None:
        """Go on with the records behind when a record has its place, or has failed."""
        start_s = time.monotonic()
        transaction = self._producer.open_transaction

        async def bind() -> None:
            place = await waiting
            wait.future = None
            future.bind(place.delivery, len(place.tickets) - 1)  # until the loop runs again it is the last

        def handle_end(task: asyncio.Task[object]) -> None:
            wait.task, is_dropped, wait.is_dropped = None, wait.is_dropped, False
            waiting.close()  # it has not begun if the task was cancelled at once
            # A partitioner may raise a CancelledError of its own.
            error = asyncio.CancelledError() if task.cancelled() else task.exception()
            if is_dropped:
                self._end_wait(wait, topic)
                return
            if task.cancelled() and self._closed:
                cause = KafkaError(ErrorCode.NETWORK_EXCEPTION, CLOSED_BEFORE_DELIVERY)
                if not future.done():  # `close` in another thread may have settled it
                    future.set_exception(cause)
                self._producer.report_unsent(cause)
                self._leave_wait(wait, topic)
                return
            if error is None:
                self._missing_since.pop(topic, None)
                self._is_awaited |= self._skips_linger and future._is_observed
            else:
                # A commit waits for the records queued before it, so it began before this one was queued.
                is_behind_commit = self._producer.open_transaction != transaction
                self._handle_send_error(future, topic, error, start_s, 0 if is_behind_commit else transaction)
            self._end_wait(wait, topic)

        wait.future = future
        wait.task = asyncio.get_running_loop().create_task(bind())
        wait.task.add_done_callback(handle_end)

    def _end_wait(self, wait: _Wait, topic: str) -> None:
        """A record has its place or has failed: go on with those behind it."""
        if self._wait is wait:
            self._wait = None
        else:
            self._append_behind(wait, topic)
        self._is_draining = True
        self._drain()

    def _leave_wait(self, wait: _Wait, topic: str) -> None:
        """The producer is closed: `_fail_queued` does not come to what is behind the record."""
        if self._wait is wait:
            self._wait = None
        else:
            del self._topic_waits[topic]
            self._fail_entries([wait.behind])

    def _append_behind(self, wait: _Wait, topic: str) -> None:
        """Append the records behind one that waited for metadata, up to the next one that waits."""
        for _ in range(_RECORDS_PER_DRAIN):
            if not wait.behind:
                del self._topic_waits[topic]
                return
            item = wait.behind.popleft()
            self._behind_count -= _entry_count(item)
            if item.__class__ is _Barrier:
                item.reach()
                continue
            future, queued_s, _, *record = item
            try:
                waited_ms = self._waited_ms(topic, queued_s) if self._missing_since else 0.0
                place = self._append(topic, *record, None, waited_ms)
            except BaseException as error:
                self._handle_send_error(future, topic, error, time.monotonic())
                continue
            if not isinstance(place, ProducerBatch):
                self._wait_for(place, future, topic, wait)
                return
            future.bind(place.delivery, len(place.tickets) - 1)
            self._missing_since.pop(topic, None)
            self._is_awaited |= self._skips_linger and future._is_observed
        asyncio.get_running_loop().call_soon(self._end_wait, wait, topic)

    def _handle_send_error(
        self, future: RecordFuture, topic: str, error: BaseException, start_s: float, transaction: int | None = None
    ) -> None:
        """`transaction`: that of a record that has waited, 0 if it is not a part of any."""
        if isinstance(error, RuntimeError) and self._producer._closed:  # it was sent before `close`, and is left
            error = KafkaError(ErrorCode.NETWORK_EXCEPTION, CLOSED_BEFORE_DELIVERY)
        future.set_exception(kept_error(error))
        self._log_once(text_of(error))
        self._producer.note_lost_record(error, transaction)
        self._producer.report_unsent(error)
        # The metadata may refuse the topic, too: each record would ask for it again, 100 ms apart.
        if isinstance(error, KafkaError) and (error.retriable or self._producer._appender.lacks_metadata(topic, None)):
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
        """As in the asynchronous producer; blocks until every record has a place in the producer's memory.

        An iterator is read in this thread.
        """
        records = as_records(records)
        if isinstance(records, Sized):
            known = list(records)
            return self._send_group(topic, lambda future: self._producer.send_many(topic, known, ticket=future))
        pieces = RecordPieces(records, partial(self._producer._appender.copy_of_any, topic))
        caller = CallerThread()
        return self._send_group(
            topic,
            lambda future: self._producer.send_pieces(topic, lambda: caller.run(pieces.next_piece), ticket=future),
            caller,
        )

    def send_batch(self, topic: str, records: Iterable[Any], *, partition: int) -> Future[WrittenRange]:
        """As in the asynchronous producer; blocks until the batch has a place in the producer's memory."""
        built: Future[BatchBuilder] = Future()
        try:
            built.set_result(self._producer.build_batch(records))  # in this thread: the iterable is the caller's
        except Exception as error:
            built.set_exception(error)
        return self._send_group(
            topic,
            lambda future: self._producer.send_built_batch(topic, built.result, partition=partition, ticket=future),
        )

    def send_arrow(self, topic: str, table: pa.Table | pa.RecordBatch) -> Future[list[WrittenRange]]:
        """As in the asynchronous producer; blocks until every row has a place in the producer's memory."""
        return self._send_group(topic, lambda future: self._producer.send_arrow(topic, table, ticket=future))

    def _send_group(
        self,
        topic: str,
        send: Callable[[Future[Any]], Coroutine[Any, Any, Any]],
        caller: CallerThread | None = None,
    ) -> Future[Any]:
        """Send after the records of the topic queued so far. An error before the first record is raised."""
        future: Future[Any] = self._new_future()

        async def send_in_order() -> None:
            await self._drain_queue(topic)
            await send(future)

        self._run(send_in_order, caller)
        return future

    def metrics(self) -> ProducerMetrics:
        """As in the asynchronous producer; records that wait for its loop are not counted."""
        return self._producer.metrics()

    def flush(self) -> None:
        """Send all records and wait until each is delivered or has failed."""
        self._run(self._flush)

    async def _flush(self) -> None:
        """Flush the records queued so far. Records of other threads queued meanwhile do not prolong it."""
        await self._drain_queue()
        await self._producer.flush()

    async def _drain_queue(self, topic: str | None = None) -> None:
        """Wait until the asynchronous producer has the records queued so far; with `topic`, those of this topic."""
        barrier = _Barrier(topic)
        self._queue.append(barrier)
        self._is_draining = True
        self._drain()
        await barrier.reached.wait()

    # -- transactions, as of the asynchronous producer

    def init_transactions(self) -> None:
        self._run(self._producer.init_transactions)

    def begin_transaction(self) -> None:
        async def begin() -> None:
            await self._drain_before_begin()
            await self._producer.begin_transaction()

        self._run(begin)

    async def _drain_before_begin(self) -> None:
        """What was sent before a transaction, by delivery callbacks too, is no part of it. Where the begin raises at
        once, this does not wait.
        """
        transactions = await self._producer._started_transactions()
        if not transactions.refuses_begin:
            await self._drain_queue()

    def commit_transaction(self) -> None:
        has_committed = False

        async def commit() -> None:
            nonlocal has_committed
            await self._drain_before_commit()
            await self._producer.commit_transaction()
            has_committed = True

        try:
            self._run(commit)
        except BaseException:
            self._call_on_loop(lambda: self._keep_commit(has_committed))
            raise

    async def _drain_before_commit(self) -> None:
        with (await self._producer._started_transactions()).commit_ahead():
            await self._drain_queue()

    def _keep_commit(self, has_committed: bool) -> None:
        """On the loop: an interrupt came between the end of a commit and its caller, whose next one returns at once."""
        transactions = self._producer._transactions
        if has_committed and transactions is not None:
            transactions.keep_commit()

    def abort_transaction(self) -> None:
        async def abort() -> None:
            transactions = await self._producer._started_transactions()
            self._drop_queued()
            await transactions.abort()

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
                await self._drain_before_commit()
                await scope.__aexit__(None, None, None)
                has_committed = True
            else:
                self._drop_queued()
                await scope.__aexit__(type(error), error, None)

        async def begin() -> None:
            await self._drain_before_begin()
            await scope.__aenter__()

        try:
            self._run(begin)
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
        waits = list(self._topic_waits.values())
        if self._wait is not None:
            waits.append(self._wait)
        queue_length = len(self._queue)  # not what a delivery callback sends meanwhile: it may do so each time
        for wait in waits:
            future = wait.future
            if wait.task is not None and future is not None and wait.task.cancel():
                wait.is_dropped, wait.future = True, None  # an abort at the same time leaves it alone
                self._fail_aborted(future)
        for entries, count in (*((wait.behind, len(wait.behind)) for wait in waits), (self._queue, queue_length)):
            for _ in range(count):
                item = entries.popleft()
                if isinstance(item, _Barrier):
                    kept.append(item)
                elif item is not None:
                    self._fail_aborted(item[0])
        self._behind_count = 0
        for barrier in kept:
            barrier.reach()
        if self._queue:  # the caller begins the abort first, so these are no part of the next transaction
            self._is_draining = True
            asyncio.get_running_loop().call_soon(self._drain)
        self._space_waiters.wake()

    def _fail_aborted(self, future: RecordFuture) -> None:
        error = TransactionAborted(ErrorCode.TRANSACTION_ABORTABLE, "its transaction was aborted before it was sent")
        if not future.done():  # `close` in another thread may have settled it
            future.set_exception(error)
        self._producer.report_unsent(error)

    def partitions_for(self, topic: str) -> list[PartitionDescription]:
        return self._run(lambda: self._producer.partitions_for(topic))

    def close(self, timeout_ms: float | None = None) -> None:
        """Deliver the sent records within `timeout_ms` and end the thread. The remaining records fail."""
        limit_s = None if timeout_ms is None else as_milliseconds("timeout_ms", timeout_ms) / 1000

        async def close() -> None:
            try:
                async with asyncio.timeout(limit_s):
                    if (transactions := self._producer._transactions) is None:
                        await self._flush()
                    else:  # `close` waits for the end of a transaction, and no record counts without its commit
                        if transactions.begin_close():
                            self._drop_queued()
                        await self._drain_queue()
                        await transactions.wait_for_commits_ahead()
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
            waiting_count = (self._wait is not None) + len(self._topic_waits) + self._behind_count
            self._producer.warn_of_undelivered(len(self._queue) + waiting_count)

    def _final_call(self) -> Callable[[], Coroutine[Any, Any, None]]:
        return self._producer.close  # nothing is underway: a record's future refers to this client

    async def _last_call(self) -> None:
        await self._producer.close(0)  # returns at once where `close` has ended

    def _fail_queued(self) -> None:
        """Fail all queued records. Several threads may do this at the same time."""
        waits = [wait for wait in (self._wait, *self._topic_waits.values()) if wait is not None]
        for wait in waits:
            future = wait.future
            if self._is_closed and future is not None and not future.done():
                future.set_exception(KafkaError(ErrorCode.NETWORK_EXCEPTION, CLOSED_BEFORE_DELIVERY))
        self._observe_all()  # the loop may have ended before it came to them
        self._fail_entries([*(wait.behind for wait in waits), self._queue])

    def _fail_entries(self, queues: Iterable[deque[Any]]) -> None:
        """Fail the records of these queues. Several threads may do this at the same time."""
        cause = KafkaError(ErrorCode.NETWORK_EXCEPTION, CLOSED_BEFORE_DELIVERY)
        count = 0
        for entries in queues:
            while entries:
                try:
                    item = entries.popleft()
                except IndexError:
                    break
                if isinstance(item, tuple):
                    item[0].set_exception(KafkaError(cause.code, cause.message))
                    count += 1
        self._producer.report_unsent(cause, count)  # in the end: an interceptor may raise an interrupt


def _entry_count(item: Any) -> int:
    """How many entries the queue has for this one. Those behind a large record are None."""
    if item.__class__ is not tuple:
        return 1
    _, _, _, value, key, headers, _, _ = item
    size_bytes = (0 if value is None else len(value)) + (0 if key is None else len(key))
    for header in headers:
        for part in header:
            # The client refuses headers of other types. They may change, and the count must not: they count nothing.
            if isinstance(part, (bytes, str)):
                size_bytes += len(part)
    return 1 + size_bytes // _ENTRY_BYTES
