"""The blocking producer: any thread queues records, and the loop's thread sends them in bulk.

Invariants: every record goes through the one queue, so that the records of a thread keep their
order. Every returned future gets a result. The loop's own thread, where delivery callbacks run,
never waits.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

from tidelog.client.model import OffsetAndMetadata, PartitionDescription, RecordMetadata, TopicPartition
from tidelog.client.producing import producer
from tidelog.client.producing.accumulator import Headers
from tidelog.client.producing.transaction_errors import TransactionAborted
from tidelog.client.sync.loop_thread import BlockingClient
from tidelog.protocol.errors import ErrorCode, KafkaError

logger = logging.getLogger(__name__)

_QUEUE_MAX = 4096
_QUEUE_MAX_IN_CALLBACKS = 16 * _QUEUE_MAX
_MISSING_TOPICS_MAX = 1000
_CLOSED = "the producer was closed before this was delivered"


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

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self._producer = producer.Producer(**options)
        self._queue: deque[tuple[Any, ...] | _Barrier] = deque()
        self._space_event = threading.Event()
        self._is_draining = False
        self._drain_task: asyncio.Task[None] | None = None
        self._last_error_text = ""
        self._missing_since: dict[str, float] = {}
        """Topics without metadata, with the start time of the wait for it."""
        self._is_closed = False

    def start(self) -> None:
        """Connect to the cluster. Raises KafkaError(NETWORK_EXCEPTION)."""
        self._run(self._producer.start)

    def send(
        self,
        topic: str,
        value: Any = None,
        key: Any = None,
        *,
        headers: Headers = (),
        partition: int | None = None,
        timestamp_ms: int | None = None,
    ) -> Future[RecordMetadata]:
        """Queue one record. The returned future gets its metadata or an exception.

        Blocks while the queue to the loop is full, which happens when the producer's memory is
        full. In a delivery callback (of `add_done_callback`) it does not block: the queue may grow
        longer there, and beyond that limit it raises KafkaError(REQUEST_TIMED_OUT).
        """
        thread = self._thread
        if self._closed or thread is None:
            self.start()
            thread = self._thread
            if thread is None:
                raise RuntimeError("this client is closed")
        if len(self._queue) >= _QUEUE_MAX:
            self._wait_for_space()
        future: Future[RecordMetadata] = Future()
        future.set_running_or_notify_cancel()  # a queued record cannot be cancelled
        self._queue.append((future, time.monotonic(), topic, value, key, headers, partition, timestamp_ms))
        if self._is_closed:
            self._fail_queued()  # another thread has closed the producer and emptied the queue already
        elif not self._is_draining:
            self._is_draining = True
            try:
                thread.loop.call_soon_threadsafe(self._start_draining)
            except RuntimeError:  # the loop is closed
                self._fail_queued()
        return future

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
            self._space_event.clear()
            if len(self._queue) >= _QUEUE_MAX:
                self._space_event.wait(0.05)

    def _start_draining(self) -> None:
        # Two threads may both see no drain in progress. Two drains at once could change the order.
        if self._drain_task is None or self._drain_task.done():
            self._drain_task = asyncio.get_running_loop().create_task(self._drain())

    async def _drain(self) -> None:
        queue = self._queue
        while True:
            while queue:
                item = queue.popleft()
                if isinstance(item, _Barrier):
                    item.reached.set()
                else:
                    await self._send_queued(*item)
                if not queue or len(queue) == _QUEUE_MAX // 2:
                    self._space_event.set()
            # Clear the flag first, then check the queue again: a sender that saw the flag set has
            # queued by then.
            self._is_draining = False
            if not queue:
                return
            self._is_draining = True

    async def _send_queued(
        self,
        future: Future[RecordMetadata],
        queued_s: float,
        topic: str,
        value: Any,
        key: Any,
        headers: Headers,
        partition: int | None,
        timestamp_ms: int | None,
    ) -> None:
        start_s = time.monotonic()
        waited_s = 0.0
        try:
            if self._missing_since:
                # All records of a missing topic share one wait, because records of other topics are
                # behind them.
                waited_s = max(0.0, start_s - max(queued_s, self._missing_since.get(topic, start_s)))
            await self._producer.send(
                topic,
                value,
                key,
                headers=headers,
                partition=partition,
                timestamp_ms=timestamp_ms,
                ticket=future,
                waited_ms=waited_s * 1000,
            )
            if self._missing_since:
                self._missing_since.pop(topic, None)
        except Exception as error:
            future.set_exception(error)
            self._log_once(str(error))
            if not isinstance(error, RuntimeError):
                self._producer.note_lost_record(error)
            if isinstance(error, KafkaError) and error.retriable:
                self._missing_since.setdefault(topic, start_s)
                if len(self._missing_since) > _MISSING_TOPICS_MAX:
                    del self._missing_since[next(iter(self._missing_since))]
        except asyncio.CancelledError:
            if not future.done():
                future.set_exception(KafkaError(ErrorCode.NETWORK_EXCEPTION, _CLOSED))
            raise

    def _log_once(self, reason: str) -> None:
        """Log a reason once for consecutive records: their futures may never be read."""
        if reason != self._last_error_text:
            self._last_error_text = reason
            logger.error("a record was not sent: %s", reason)

    def send_and_wait(self, topic: str, value: Any = None, key: Any = None, **options: Any) -> RecordMetadata:
        """Send one record and wait for its acknowledgement. Raises KafkaError without one."""
        self._check_not_on_loop()
        return self.send(topic, value, key, **options).result()

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
        self._start_draining()
        await barrier.reached.wait()

    # -- transactions, as of the asynchronous producer

    def init_transactions(self) -> None:
        self._run(self._producer.init_transactions)

    def begin_transaction(self) -> None:
        self._run(self._producer.begin_transaction)

    def commit_transaction(self) -> None:
        async def commit() -> None:
            await self._drain_queue()
            await self._producer.commit_transaction()

        self._run(commit)

    def abort_transaction(self) -> None:
        async def abort() -> None:
            self._drop_queued()
            await self._producer.abort_transaction()

        self._run(abort)

    def send_offsets_to_transaction(
        self, offsets: Mapping[TopicPartition, int | OffsetAndMetadata], group: Any
    ) -> None:
        metadata = producer.as_group_metadata(group)  # in this thread: it may be a blocking consumer
        self._run(lambda: self._producer.send_offsets_to_transaction(offsets, metadata))

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """One transaction: `with producer.transaction():` commits at the end and aborts on any exception."""
        scope = self._producer.transaction()

        async def end(error: BaseException | None) -> None:
            if error is None:
                await self._drain_queue()
                await scope.__aexit__(None, None, None)
            else:
                self._drop_queued()
                await scope.__aexit__(type(error), error, None)

        self._run(scope.__aenter__)
        try:
            yield
        except BaseException as error:
            cause = error
            self._run(lambda: end(cause))
            raise
        self._run(lambda: end(None))

    def _drop_queued(self) -> None:
        """On the loop: fail the records of a transaction that is aborted before they reach the producer."""
        kept: list[_Barrier] = []
        while self._queue:
            item = self._queue.popleft()
            if isinstance(item, _Barrier):
                kept.append(item)
            else:
                text = "its transaction was aborted before it was sent"
                item[0].set_exception(TransactionAborted(ErrorCode.TRANSACTION_ABORTABLE, text))
        for barrier in kept:
            barrier.reached.set()
        self._space_event.set()

    def partitions_for(self, topic: str) -> list[PartitionDescription]:
        return self._run(lambda: self._producer.partitions_for(topic))

    def close(self, timeout_ms: float | None = None) -> None:
        """Deliver the sent records within `timeout_ms` and end the thread.

        The remaining records fail.
        """

        async def close() -> None:
            try:
                async with asyncio.timeout(None if timeout_ms is None else timeout_ms / 1000):
                    await self._flush()
                    await self._producer.close()
            except TimeoutError:
                await self._producer.close(0)

        self._check_not_on_loop()
        try:
            self._close_with(close)
        finally:
            self._is_closed = True
            self._fail_queued()

    def _fail_queued(self) -> None:
        """Fail all queued records. Several threads may do this at the same time."""
        while self._queue:
            try:
                item = self._queue.popleft()
            except IndexError:
                return
            if not isinstance(item, _Barrier):
                item[0].set_exception(KafkaError(ErrorCode.NETWORK_EXCEPTION, _CLOSED))
