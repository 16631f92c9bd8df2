"""The blocking consumer and a blocking raw reader, each on an event loop in a thread.

There is no second implementation: every call runs the asynchronous call and waits for it. Two hot
paths differ, so that a record does not cost a thread switch: the blocking producer queues records
and the loop takes them in bulk (`sync.producer`); iteration takes records from the result of one
poll. Only one thread at a time may use a consumer.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, TypeVar

from tidelog.client.arguments import as_milliseconds
from tidelog.client.config import CLOSE_TIMEOUT_MS, ClientConfig
from tidelog.client.consuming import consumer
from tidelog.client.consuming.consumer import Batch, Offsets, check_listener
from tidelog.client.consuming.subscription import RebalanceListener
from tidelog.client.metrics import ConsumerMetrics
from tidelog.client.model import (
    ConsumerGroupMetadata,
    ConsumerRecord,
    OffsetAndMetadata,
    OffsetAndTimestamp,
    TopicPartition,
)
from tidelog.client.network.cluster import Cluster
from tidelog.client.network.raw_fetch import DEFAULT_CHUNK_BYTES, RawBatches, fetch_raw
from tidelog.client.sync.admin import Admin
from tidelog.client.sync.caller_thread import CallerThread
from tidelog.client.sync.loop_thread import BlockingClient
from tidelog.client.sync.producer import Producer
from tidelog.client.sync.record_future import record_future_class
from tidelog.protocol.batches.columnar import COLUMNS

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["Admin", "Consumer", "Producer", "RawReader"]

Result = TypeVar("Result")


class _CallerThreadListener(RebalanceListener):
    """Runs each call of a listener in the thread that waits in `poll` or `close`."""

    def __init__(self, listener: RebalanceListener, caller: CallerThread) -> None:
        self._listener = listener
        self._caller = caller

    async def on_partitions_revoked(self, revoked: Collection[TopicPartition]) -> None:
        await self._run_in_caller_thread(self._listener.on_partitions_revoked, revoked)

    async def on_partitions_assigned(self, assigned: Collection[TopicPartition]) -> None:
        await self._run_in_caller_thread(self._listener.on_partitions_assigned, assigned)

    async def on_partitions_lost(self, lost: Collection[TopicPartition]) -> None:
        await self._run_in_caller_thread(self._listener.on_partitions_lost, lost)

    async def _run_in_caller_thread(self, method: Callable[..., Any], partitions: Collection[TopicPartition]) -> None:
        awaitable = await self._caller.run(method, partitions)
        if awaitable is not None:
            await awaitable


class Consumer(BlockingClient):
    """The blocking version of `tidelog.Consumer`.

    A listener runs in the thread that called `poll`, `close` or `unsubscribe`, and may seek and
    commit. A listener with `async def` methods runs on the loop's thread, where it must not call
    this object.
    """

    def __init__(self, *topics: str, **options: Any) -> None:
        super().__init__()
        self._consumer = consumer.Consumer(*topics, **options)
        self._records: deque[ConsumerRecord] = deque()
        self._caller = CallerThread()
        self._new_future = record_future_class(
            self._check_may_wait, check_can_end=self._check_not_forked, check_may_wait=self._check_may_wait
        )
        self._is_close_begun = False

    def _run_with_listener(self, name: str, call: Callable[[], Coroutine[Any, Any, Result]]) -> Result:
        if self._caller.is_in_callback:
            raise RuntimeError(f"{name}() cannot be called in a rebalance listener")
        return self._run(call, self._caller)

    def _take(self, name: str, call: Callable[[], Coroutine[Any, Any, Result]]) -> Result:
        """Run a poll. When the caller is interrupted, by Ctrl-C for example, the records that the loop takes
        at that moment count as not consumed.
        """
        try:
            records = self._run_with_listener(name, call)
            # The caller has these: the next poll may be interrupted before it begins. Python interrupts at no place
            # between here and the end of the call.
            self._consumer.positions_before_take = {}
            return records
        except BaseException:
            if not self._caller.is_in_callback:
                self._call_on_loop(self._consumer.return_records)
            raise

    def start(self) -> None:
        """Connect to the cluster. Raises KafkaError(NETWORK_EXCEPTION)."""
        self._run(self._consumer.start)

    def close(self, timeout_ms: float = CLOSE_TIMEOUT_MS) -> None:
        """Commit when auto commit is on, leave the group, disconnect. Ends an iteration in another
        thread.

        Waits at most `timeout_ms` in total for brokers that do not answer. A call during another one waits for its
        end, at most as long.
        """
        limit_s = as_milliseconds("timeout_ms", timeout_ms) / 1000
        if self._caller.is_in_callback:
            raise RuntimeError("close() cannot be called in a rebalance listener")
        if self._open_thread is not None:
            self._check_thread_can_run()
        with self._thread_lock:
            is_first, self._is_close_begun = not self._is_close_begun, True
        try:
            if self._open_thread is not None:
                self._run_with_listener("close", lambda: self._consumer.close(timeout_ms))
        except RuntimeError:
            if not self._closed:
                raise
            # Another thread has closed the consumer meanwhile.
        finally:
            if is_first or not self._consumer.is_closing:
                self._close_with(self._consumer.close, limit_s, self._caller)

    def _final_call(self) -> Callable[[], Coroutine[Any, Any, None]]:
        return self._consumer.abandon  # no thread waits that could run a listener

    def subscribe(
        self, topics: Iterable[str] = (), *, pattern: str | None = None, listener: RebalanceListener | None = None
    ) -> None:
        check_listener(listener)
        caller_listener = None if listener is None else _CallerThreadListener(listener, self._caller)

        async def call() -> None:
            self._consumer.subscribe(topics, pattern=pattern, listener=caller_listener)

        self._run(call)

    def assign(self, partitions: Iterable[TopicPartition]) -> None:
        async def call() -> None:
            self._consumer.assign(partitions)

        self._run(call)

    def unsubscribe(self) -> None:
        self._run_with_listener("unsubscribe", self._consumer.unsubscribe)

    def subscription(self) -> set[str]:
        return self._consumer.subscription()

    def assignment(self) -> set[TopicPartition]:
        return self._consumer.assignment()

    def poll(self, timeout_ms: float = 0, max_records: int | None = None) -> Batch:
        return self._take("poll", lambda: self._consumer.poll(timeout_ms, max_records))

    def poll_arrow(
        self, timeout_ms: float = 0, max_records: int = 1_000_000, columns: Sequence[str] = COLUMNS
    ) -> pa.Table:
        """As `poll`, but the records are rows of a `pyarrow.Table`; see `tidelog.Consumer.poll_arrow`."""
        return self._take("poll", lambda: self._consumer.poll_arrow(timeout_ms, max_records, columns))

    def batches(self, max_records: int | None = None) -> Iterator[Batch]:
        """Iterate over polls: each batch is what `poll` returns, and never empty.

        A batch counts as consumed once it is handed out. Waits without a time limit; `close` in another
        thread ends the iteration.
        """
        if self._closed:
            raise RuntimeError("this client is closed")
        return self._iterate_batches(max_records)

    def _iterate_batches(self, max_records: int | None) -> Iterator[Batch]:
        while True:
            try:
                batch = self._take("next", lambda: self._consumer.next_batch(max_records))
            except RuntimeError:
                if not self._closed:
                    raise
                return
            if not batch:
                return
            yield batch

    def __iter__(self) -> Iterator[ConsumerRecord]:
        if self._closed:
            raise RuntimeError("this client is closed")
        return self

    def __next__(self) -> ConsumerRecord:
        """Wait for the next record without a time limit.

        `close` in another thread ends the iteration.
        """
        if not self._records:
            self._refill()
        self._consumer.application_alive()
        try:
            # Without a call: behind `popleft()` an interrupt, by Ctrl-C for example, would lose the record.
            record = self._records[0]
            del self._records[0]
        except IndexError:
            raise StopIteration from None
        return record

    def _refill(self) -> None:
        try:
            self._records = self._run_with_listener("next", self._consumer.refill)
        except RuntimeError:
            if not self._closed:
                raise

    def seek(self, partition: TopicPartition, offset: int | OffsetAndMetadata) -> None:
        async def call() -> None:
            self._consumer.seek(partition, offset)

        self._run(call)

    def seek_to_beginning(self, *partitions: TopicPartition) -> None:
        self._run(lambda: self._consumer.seek_to_beginning(*partitions))

    def seek_to_end(self, *partitions: TopicPartition) -> None:
        self._run(lambda: self._consumer.seek_to_end(*partitions))

    def position(self, partition: TopicPartition) -> int:
        return self._run(lambda: self._consumer.position(partition))

    def pause(self, *partitions: TopicPartition) -> None:
        async def call() -> None:
            self._consumer.pause(*partitions)

        self._run(call)

    def resume(self, *partitions: TopicPartition) -> None:
        async def call() -> None:
            self._consumer.resume(*partitions)

        self._run(call)

    def paused(self) -> set[TopicPartition]:
        return self._consumer.paused()

    def commit(self, offsets: Offsets | None = None) -> None:
        self._run(lambda: self._consumer.commit(offsets))

    def commit_async(self, offsets: Offsets | None = None) -> Future[None]:
        """Start a commit of these offsets, or of the positions at this moment.

        Commits reach the coordinator in the order of their calls.
        """
        outcome: Future[None] = self._new_future()

        def finish(task: asyncio.Task[None]) -> None:
            if task.cancelled():
                outcome.set_exception(RuntimeError("this client was closed while it was at work"))
            elif error := task.exception():
                outcome.set_exception(error)
            else:
                outcome.set_result(None)

        async def start() -> None:
            (await self._consumer.commit_async(offsets)).add_done_callback(finish)

        self._run(start)
        return outcome

    def lag(self, partition: TopicPartition) -> int | None:
        return self._consumer.lag(partition)

    def metrics(self) -> ConsumerMetrics:
        async def call() -> ConsumerMetrics:
            return self._consumer.metrics()

        return self._run(call)

    def group_metadata(self) -> ConsumerGroupMetadata:
        return self._consumer.group_metadata()

    def committed(self, *partitions: TopicPartition) -> dict[TopicPartition, OffsetAndMetadata | None]:
        return self._run(lambda: self._consumer.committed(*partitions))

    def beginning_offsets(self, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
        return self._run(lambda: self._consumer.beginning_offsets(partitions))

    def end_offsets(self, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
        return self._run(lambda: self._consumer.end_offsets(partitions))

    def offsets_for_times(
        self, timestamps: Mapping[TopicPartition, int]
    ) -> dict[TopicPartition, OffsetAndTimestamp | None]:
        return self._run(lambda: self._consumer.offsets_for_times(timestamps))

    def partitions_for_topic(self, topic: str) -> set[int] | None:
        return self._run(lambda: self._consumer.partitions_for_topic(topic))

    def topics(self) -> set[str]:
        return self._run(self._consumer.topics)


class RawReader(BlockingClient):
    """Reads whole record batches as bytes, for callers that decode them; see `raw_fetch`."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self._config = ClientConfig.from_options(options)
        self._clusters: list[Cluster] = []
        """The connected cluster, once there is one."""

    def start(self) -> None:
        """Connect to the cluster. Raises KafkaError(NETWORK_EXCEPTION)."""
        self._run(self._connected_cluster)

    async def _connected_cluster(self) -> Cluster:
        if not self._clusters:
            cluster = Cluster(self._config)
            await cluster.start()
            self._clusters.append(cluster)
        return self._clusters[0]

    def fetch(
        self,
        partition: TopicPartition,
        start_offset: int,
        end_offset: int,
        *,
        chunk_bytes: int = DEFAULT_CHUNK_BYTES,
        isolation_level: str = "read_uncommitted",
        stall_timeout_ms: float = 60_000,
    ) -> Iterator[RawBatches]:
        """Yield the batches that hold [start_offset, end_offset).

        The next chunk is fetched while this one is read.
        """

        async def start_fetch() -> AsyncIterator[RawBatches]:
            return fetch_raw(
                await self._connected_cluster(),
                TopicPartition(*partition),
                start_offset,
                end_offset,
                chunk_bytes=chunk_bytes,
                isolation_level=isolation_level,
                stall_timeout_ms=stall_timeout_ms,
            )

        chunks = self._run(start_fetch)

        async def advance() -> RawBatches | None:
            return await anext(chunks, None)

        async def close() -> None:
            await chunks.aclose()  # type: ignore[attr-defined]

        try:
            while (chunk := self._run(advance)) is not None:
                yield chunk
        finally:
            if not self._closed:
                self._run(close)

    def close(self) -> None:
        self._close_with(self._final_call())

    def _final_call(self) -> Callable[[], Coroutine[Any, Any, None]]:
        clusters = self._clusters

        async def close() -> None:
            for cluster in clusters:
                await cluster.close()

        return close
