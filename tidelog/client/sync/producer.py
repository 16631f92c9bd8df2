"""The blocking twin of the producer: records are queued by any thread and taken over in bulk on the loop's thread.

Invariants: there is one way in, the queue, so that records of one thread keep their order however they were sent; every
future that was handed out ends; the loop's own thread, where delivery callbacks run, never waits.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from concurrent.futures import Future
from typing import Any

from tidelog.client.model import PartitionDescription, RecordMetadata
from tidelog.client.producing import producer
from tidelog.client.producing.accumulator import Headers
from tidelog.client.sync.loop_thread import Twin
from tidelog.protocol.errors import ErrorCode, KafkaError

logger = logging.getLogger(__name__)

_MAX_QUEUED = 4096
_MAX_QUEUED_BY_CALLBACKS = 16 * _MAX_QUEUED
_MAX_MISSING_TOPICS = 1000
_CLOSED = "the producer was closed before this was delivered"


class _Barrier:
    """In the queue: done when all that was queued before it was handed over."""

    __slots__ = ("reached",)

    def __init__(self) -> None:
        self.reached = asyncio.Event()


class Producer(Twin):
    """`tidelog.Producer`, blocking. `send` may be called from several threads, and from delivery callbacks."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self._producer = producer.Producer(**options)
        self._queue: deque[tuple[Any, ...] | _Barrier] = deque()
        self._room = threading.Event()
        self._draining = False
        self._drain_task: asyncio.Task[None] | None = None
        self._complained = ""
        self._missing_since: dict[str, float] = {}
        """Topics whose metadata did not come, and since when it is waited for."""
        self._ended = False

    def start(self) -> None:
        """Reach the cluster. Raises KafkaError(NETWORK_EXCEPTION)."""
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
        """Hand over one record; the future ends with its metadata or with what went wrong.

        Blocks while the queue to the loop is full, which it is when the producer's memory is. A delivery callback (of
        `add_done_callback`) does not block: there the queue may grow longer, and then KafkaError(REQUEST_TIMED_OUT).
        """
        thread = self._thread
        if self._closed or thread is None:
            self.start()
            thread = self._thread
            if thread is None:
                raise RuntimeError("this client is closed")
        if len(self._queue) >= _MAX_QUEUED:
            self._wait_for_room()
        future: Future[RecordMetadata] = Future()
        future.set_running_or_notify_cancel()  # what was handed over cannot be taken back
        self._queue.append((future, time.monotonic(), topic, value, key, headers, partition, timestamp_ms))
        if self._ended:
            self._fail_queued()  # another thread closed the producer meanwhile, and has looked at the queue already
        elif not self._draining:
            self._draining = True
            try:
                thread.loop.call_soon_threadsafe(self._start_draining)
            except RuntimeError:  # the loop is closed
                self._fail_queued()
        return future

    def _wait_for_room(self) -> None:
        if self._on_loop():
            if len(self._queue) >= _MAX_QUEUED_BY_CALLBACKS:
                raise KafkaError(
                    ErrorCode.REQUEST_TIMED_OUT,
                    f"{_MAX_QUEUED_BY_CALLBACKS} records are queued, and a delivery callback cannot wait for room",
                )
            return
        while len(self._queue) >= _MAX_QUEUED:
            if self._closed:
                raise RuntimeError("this client is closed")
            self._room.clear()
            if len(self._queue) >= _MAX_QUEUED:
                self._room.wait(0.05)

    def _start_draining(self) -> None:
        # Two threads may both have found that nobody drains; two drains could change the order.
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
                    await self._hand_over(*item)
                if not queue or len(queue) == _MAX_QUEUED // 2:
                    self._room.set()
            # First say that nobody drains, then look again: a sender that saw the flag before has queued by then.
            self._draining = False
            if not queue:
                return
            self._draining = True

    async def _hand_over(
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
        began_s = time.monotonic()
        waited_s = 0.0
        try:
            if self._missing_since:
                # All records of a missing topic wait at the same time, not one after another: others are behind them.
                waited_s = max(0.0, began_s - max(queued_s, self._missing_since.get(topic, began_s)))
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
            self._complain(str(error))
            if isinstance(error, KafkaError) and error.retriable:
                self._missing_since.setdefault(topic, began_s)
                if len(self._missing_since) > _MAX_MISSING_TOPICS:
                    del self._missing_since[next(iter(self._missing_since))]
        except asyncio.CancelledError:
            if not future.done():
                future.set_exception(KafkaError(ErrorCode.NETWORK_EXCEPTION, _CLOSED))
            raise

    def _complain(self, reason: str) -> None:
        """Once for many records in a row: their futures may be looked at by nobody."""
        if reason != self._complained:
            self._complained = reason
            logger.error("a record was not sent: %s", reason)

    def send_and_wait(self, topic: str, value: Any = None, key: Any = None, **how: Any) -> RecordMetadata:
        """Send one record and wait until it is acknowledged. Raises KafkaError when it is not."""
        self._refuse_on_loop()
        return self.send(topic, value, key, **how).result()

    def flush(self) -> None:
        """Send everything and wait until all of it is delivered or has failed."""
        self._run(self._flush)

    async def _flush(self) -> None:
        """All that was queued so far; what other threads queue meanwhile does not prolong it."""
        barrier = _Barrier()
        self._queue.append(barrier)
        self._start_draining()
        await barrier.reached.wait()
        await self._producer.flush()

    def partitions_for(self, topic: str) -> list[PartitionDescription]:
        return self._run(lambda: self._producer.partitions_for(topic))

    def close(self, timeout_ms: float | None = None) -> None:
        """Deliver what was sent, within `timeout_ms`, and end the thread. What is not delivered by then fails."""

        async def end() -> None:
            try:
                async with asyncio.timeout(None if timeout_ms is None else timeout_ms / 1000):
                    await self._flush()
                    await self._producer.close()
            except TimeoutError:
                await self._producer.close(0)

        self._refuse_on_loop()
        try:
            self._end(end)
        finally:
            self._ended = True
            self._fail_queued()

    def _fail_queued(self) -> None:
        """Any number of threads may do this at once."""
        while self._queue:
            try:
                item = self._queue.popleft()
            except IndexError:
                return
            if not isinstance(item, _Barrier):
                item[0].set_exception(KafkaError(ErrorCode.NETWORK_EXCEPTION, _CLOSED))
