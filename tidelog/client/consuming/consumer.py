"""The asynchronous consumer: `poll` or `async for`, alone or in a group.

Here: the public methods and the poll loop. `Subscription` holds the positions, `PositionLookup`
looks them up, `Fetcher` fetches, `Rebalancer` works for the group. Invariants: a group's assignment
changes only inside `poll`. A record that an `async for` has not handed out yet counts as not
consumed, for commits and for positions.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections import deque
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Mapping, Sequence, Sized
from math import inf
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

from tidelog.client.arguments import (
    INT64_MAX,
    WrongArgument,
    as_int,
    as_list,
    as_milliseconds,
    as_offset,
    as_offsets,
    as_partition,
    as_partition_mapping,
    as_partitions,
    as_text,
    as_time,
    as_topic_name,
    as_topic_names,
    shown,
)
from tidelog.client.client_logging import client_logger
from tidelog.client.config import CLOSE_TIMEOUT_MS, ConsumerConfig
from tidelog.client.consuming.arrow_tables import arrow_table, check_columns, load_schema
from tidelog.client.consuming.fetcher import Fetcher
from tidelog.client.consuming.iteration_buffer import IterationBuffer
from tidelog.client.consuming.positions import PositionLookup
from tidelog.client.consuming.rebalance import Rebalancer
from tidelog.client.consuming.reconciliation import Reconciler
from tidelog.client.consuming.subscription import RebalanceListener, Subscription
from tidelog.client.groups.leave_limit import LeaveLimit
from tidelog.client.metrics import ConsumerMetrics
from tidelog.client.model import (
    EARLIEST_TIMESTAMP,
    LATEST_TIMESTAMP,
    ConsumerGroupMetadata,
    ConsumerRecord,
    OffsetAndMetadata,
    OffsetAndTimestamp,
    TopicPartition,
)
from tidelog.client.network.cluster import Cluster
from tidelog.client.network.kernel_loading import KernelLoading
from tidelog.client.network.metadata import TopicMetadata
from tidelog.client.network.offsets import list_offsets
from tidelog.client.network.outcomes import retrieve_exception, start_task
from tidelog.client.network.shared_start import SharedStart
from tidelog.protocol.batches import columnar
from tidelog.protocol.batches.columnar import COLUMNS
from tidelog.protocol.errors import ErrorCode, KafkaError
from tidelog.protocol.messages.metadata import MetadataResponse

if TYPE_CHECKING:
    import pyarrow as pa

logger = client_logger(__name__)

_MISSING_TOPIC_ERRORS = (ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, ErrorCode.INVALID_TOPIC_EXCEPTION)
_HOLD_S_MAX = 0.02
"""The longest that polls go on without other tasks. They return the records that have arrived at once, and would hold
up the event loop until all are returned: half a second of CPU.
"""
_ITERATION_POLL_MS = 60_000
_ARROW_POLL_BYTES = 64 * 1024 * 1024
Records = TypeVar("Records", bound=Sized)
Offsets = Mapping[TopicPartition, int | OffsetAndMetadata]
Batch = dict[TopicPartition, list[ConsumerRecord]]


class Consumer:
    """Reads records. Options are Kafka's consumer options with underscores (`docs/client.md` lists
    them).

        async with Consumer("topic", bootstrap_servers="127.0.0.1:9092", group_id="g") as consumer:
            async for record in consumer:
                ...

    A group assigns the partitions of its topics to its members. Without a group this consumer reads
    all partitions of its topics, or the partitions passed to `assign`. It is not safe for use by
    several tasks at once. Raises ConfigError for a wrong option.
    """

    def __init__(self, *topics: str, **options: Any) -> None:
        self._config = ConsumerConfig.from_options(options)
        self._subscription = Subscription()
        if topics:
            if not all(isinstance(topic, str) for topic in topics):
                form = "Consumer('a', 'b', group_id='g') or Consumer('a', **options)"
                raise TypeError(f"expected topic names and named options, as {form}, not {topics!r}")
            self._subscription.subscribe(as_topic_names("topics", topics), None, None)
        self._cluster: Cluster | None = None
        self._fetcher: Fetcher | None = None
        self._group: Rebalancer | None = None
        self._update_event = asyncio.Event()
        self._position_lookup: PositionLookup | None = None
        self._iteration = IterationBuffer()
        self._record_kernel = KernelLoading(self._load_record_kernel, self._update_event.set)
        self._arrow_kernel = KernelLoading(columnar.load_kernel, self._update_event.set)
        self._missing_topics: set[str] = set()
        self._refused_topic: str | None = None
        """A topic of this consumer that the latest metadata refuses, until a poll has said so."""
        self._next_yield_s = 0.0
        """When the next poll lets other tasks run, in loop time, also if records have arrived."""
        self.positions_before_take: dict[TopicPartition, tuple[int, int]] = {}
        """(position, leader epoch) before a poll whose caller may not have its records yet."""
        self._shared_start = SharedStart(self._config, self._connect, "consumer")
        self._closed = False
        """Set when `close` begins. Polls end then, and the rebalance listener may still commit."""
        self._close_finished = asyncio.Event()

    # -- lifecycle

    async def start(self) -> None:
        """Connect to the cluster; the first `poll` does it too.

        Raises KafkaError(NETWORK_EXCEPTION).
        """
        await self._shared_start.wait()

    async def _connect(self) -> None:
        cluster = Cluster(self._config, auto_create_topics=self._config.allow_auto_create_topics)
        self._track_topics(cluster)
        # The metadata of a topic that only a call names, as `end_offsets`, is kept for longer than any call takes.
        cluster.forget_idle_topics_after(2 * self._config.default_api_timeout_ms, self._topics_in_use)
        await cluster.start()
        self._fetcher = Fetcher(cluster, self._config, self._subscription, self._update_event.set)
        if self._config.group_id is not None:
            kind = Reconciler if self._config.group_protocol == "consumer" else Rebalancer
            self._group = kind(
                cluster, self._config, self._subscription, self._fetcher, self._update_event.set, self._positions
            )
        coordinator = None if self._group is None else self._group.coordinator
        self._position_lookup = PositionLookup(
            cluster, self._config, self._subscription, coordinator, self._fetcher, self._update_event.set
        )
        self._cluster = cluster
        self._track_topics(cluster)  # a subscription may have changed during the start
        cluster.on_metadata = self._on_metadata
        self._on_metadata()

    async def close(self, timeout_ms: float = CLOSE_TIMEOUT_MS) -> None:
        """Commit when auto commit is on, leave the group, disconnect. A poll or an iteration in
        progress ends.

        Waits at most `timeout_ms` in total for brokers that do not answer. A call during another one waits for its
        end, at most as long. Does nothing in the child of a fork.

        A call that is cancelled ends soon: it sends what is still to be sent, without a wait for answers, calls the
        listener and gives it a few seconds, and disconnects. Cancelled again, it does so in the background.
        """
        timeout_ms = as_milliseconds("timeout_ms", timeout_ms)
        if self._shared_start.is_of_parent() or self._close_finished.is_set():
            return
        self._shared_start.check_loop()
        if self._group is not None:
            self._group.refuse_inside_listener("close()")
        if self._closed:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_ms / 1000):
                    await self._close_finished.wait()
            return
        self._closed = True
        self._update_event.set()
        if self._cluster is None:
            try:
                await self._shared_start.stop()
            finally:
                self._close_finished.set()
            return
        self._rewind()
        limit = LeaveLimit(timeout_ms)
        end = start_task(self._leave_and_disconnect(limit))
        end.add_done_callback(retrieve_exception)
        try:
            await asyncio.wait([end])
        except asyncio.CancelledError:
            limit.cut()
            await asyncio.wait([end])
            raise
        end.result()

    async def _leave_and_disconnect(self, limit: LeaveLimit) -> None:
        try:
            if self._group is not None:
                await self._group.leave("the consumer was closed", limit)
        finally:
            await self._disconnect()

    async def abandon(self) -> None:
        """End like a process that dies: no commit, no call of a listener, no LeaveGroup."""
        self._closed = True
        if self._cluster is not None:
            await self._disconnect()
            return
        try:
            await self._shared_start.stop()
        finally:
            self._close_finished.set()

    async def _disconnect(self) -> None:
        """End the background work and the connections."""
        assert self._cluster is not None
        if self._fetcher is not None:
            self._fetcher.close()
        try:
            if self._position_lookup is not None:
                await self._position_lookup.close()
            if self._group is not None:
                await self._group.close()
            for kernel in (self._record_kernel, self._arrow_kernel):
                await kernel.close()
        finally:
            try:
                await self._shared_start.stop()  # calls raise from now on
                await self._cluster.close()
            finally:
                self._close_finished.set()

    @property
    def is_closing(self) -> bool:
        """Whether `close` has begun and has not ended."""
        return self._closed and not self._close_finished.is_set()

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

    # -- what to read

    def subscribe(
        self,
        topics: Iterable[str] = (),
        *,
        pattern: str | None = None,
        listener: RebalanceListener | None = None,
    ) -> None:
        """Replace the topics, by name or by a regular expression that must match the whole name. With
        `group_protocol="consumer"` the broker evaluates it (RE2 syntax), and the next `poll` raises what it says of it.

        Raises ValueError and TypeError for wrong arguments, KafkaError(INVALID_TOPIC_EXCEPTION).
        """
        self._check_open()
        check_listener(listener)
        names = as_topic_names("topics", [topics] if isinstance(topics, str) else topics)
        if bool(names) == (pattern is not None):
            raise ValueError("subscribe() takes topics or a pattern")
        expression: re.Pattern[str] | str | None = None
        if pattern is not None:
            expression = _compiled(pattern) if self._config.group_protocol == "classic" else _for_broker(pattern)
        self._rewind()
        self._subscription.subscribe(names, expression, listener)
        if self._cluster is not None:
            self._track_topics(self._cluster)
            self._on_metadata()

    def assign(self, partitions: Iterable[TopicPartition]) -> None:
        """Read exactly these partitions, without assignment by a group.

        Commits to a group still work.
        """
        self._check_open()
        targets = as_partitions("partitions", partitions)
        self._rewind()
        self._subscription.assign(targets)
        if self._fetcher is not None:
            self._fetcher.keep_only(set(self._subscription.assigned))
        if self._cluster is not None:
            self._track_topics(self._cluster)

    async def unsubscribe(self) -> None:
        """Read nothing, and leave the group."""
        self._check_open()
        self._shared_start.check_loop()
        self._rewind()
        if self._group is not None:
            await self._group.unsubscribe()
        else:
            self._subscription.unsubscribe()
            if self._fetcher is not None:
                self._fetcher.keep_only(())

    def subscription(self) -> set[str]:
        """The topics of `subscribe`; of a pattern, those that match now."""
        return set(self._subscription.topics)

    def assignment(self) -> set[TopicPartition]:
        """The partitions that this consumer reads now, paused ones too."""
        return set(self._subscription.assigned)

    def _check_open(self, *, or_closing: bool = False) -> None:
        """Raise RuntimeError. `or_closing`: for what a listener may call while `close` gives up the partitions."""
        if self._closed and not (or_closing and self.is_closing):
            raise RuntimeError("this consumer is closed")

    def _topics_in_use(self) -> set[str]:
        topics = {*self._subscription.topics, *(partition.topic for partition in self._subscription.assigned)}
        if self._group is not None:
            topics.update(self._group.membership.watched_topics)
        return topics

    def _track_topics(self, cluster: Cluster) -> None:
        cluster.all_topics = self._subscription.pattern is not None
        cluster.track_only(sorted(self._topics_in_use()))
        if cluster.all_topics:
            cluster.request_refresh()

    def _on_metadata(self) -> None:
        assert self._cluster is not None
        subscription, metadata = self._subscription, self._cluster.metadata.topics
        pattern = subscription.pattern
        if isinstance(pattern, re.Pattern):
            names = [name for name, topic in metadata.items() if pattern.fullmatch(name) and self._is_readable(topic)]
            subscription.set_topics(names)
        self._warn_of_missing_topics(metadata)
        if self._position_lookup is not None:
            self._position_lookup.validator.check()
        if self._group is not None:
            self._group.membership.handle_metadata()
        elif subscription.subscribed:
            # Without a group: all partitions, and new partitions as they appear.
            topics = [metadata[name] for name in sorted(subscription.topics) if name in metadata]
            partitions = [TopicPartition(topic.name, entry.partition) for topic in topics for entry in topic.partitions]
            if set(partitions) != subscription.assigned.keys():
                subscription.follow_metadata(partitions)
        self._update_event.set()

    def _warn_of_missing_topics(self, metadata: Mapping[str, TopicMetadata]) -> None:
        """Log each missing topic, and each missing partition of `assign`, once until it exists: otherwise a misspelt
        topic looks empty. A poll raises for one that is refused.
        """
        self._refused_topic = None
        subscription = self._subscription
        assigned: dict[str, set[int]] = {}
        for partition in subscription.assigned if subscription.is_user_assigned else ():
            assigned.setdefault(partition.topic, set()).add(partition.partition)
        missing: dict[str, str] = {}
        for name in {*subscription.topics, *assigned} & metadata.keys():
            topic = metadata[name]
            if topic.error is ErrorCode.TOPIC_AUTHORIZATION_FAILED:
                self._refused_topic = name
            elif topic.error in _MISSING_TOPIC_ERRORS:
                missing[f"topic {name!r}"] = topic.error.name
            elif topic.is_usable and name in assigned:
                for index in assigned[name] - {entry.partition for entry in topic.partitions}:
                    missing[f"partition {index} of topic {name!r}"] = "the topic has no such partition"
        for what in sorted(missing.keys() - self._missing_topics):
            logger.warning("cannot read %s: %s", what, missing[what])
        self._missing_topics = set(missing)

    def _is_readable(self, topic: TopicMetadata) -> bool:
        return topic.is_usable and not (topic.is_internal and self._config.exclude_internal_topics)

    # -- reading

    async def poll(self, timeout_ms: float = 0, max_records: int | None = None) -> Batch:
        """Return at most `max_records` (default `max_poll_records`) by partition; empty after
        `timeout_ms`.

        The records of the last call count as consumed. Raises KafkaError: OFFSET_OUT_OF_RANGE when
        there is no offset and `auto_offset_reset` is none, CORRUPT_MESSAGE, authorization errors,
        fatal errors of the group. Raises the exceptions of a rebalance listener. Cancelling a call
        loses nothing: the next call continues at the same point.
        """
        limit = self._config.max_poll_records if max_records is None else _checked_limit(max_records)
        return await self._poll(timeout_ms, lambda fetcher: fetcher.take(limit)) or {}

    async def poll_arrow(
        self, timeout_ms: float = 0, max_records: int = 1_000_000, columns: Sequence[str] = COLUMNS
    ) -> pa.Table:
        """As `poll`, but the records are rows of a `pyarrow.Table`, without a Python object for each;
        empty after `timeout_ms`. Needs the extra `arrow`.

        The columns are those of Spark's Kafka source: key, value, topic, partition, offset, timestamp,
        timestampType, headers. Rows of one partition are in offset order. Record batches are not cut:
        the table ends with the piece of 200,000 rows or 16 MiB that reaches `max_records` or 64 MiB.
        The first call loads the compiled loops beside it: tables are empty until they are there.
        """
        if self._config.key_deserializer is not None or self._config.value_deserializer is not None:
            raise RuntimeError("poll_arrow() returns bytes; this consumer has a deserializer")
        names = [columns] if isinstance(columns, str) else as_list("columns", columns, "names of columns")
        check_columns(tuple(names))
        _checked_limit(max_records)
        self._check_open()
        schema = await load_schema(tuple(names), is_loaded=self._arrow_kernel.is_over)

        def take(fetcher: Fetcher) -> list[pa.RecordBatch]:
            self._arrow_kernel.start()
            if not self._arrow_kernel.is_over:
                return []
            return fetcher.take_columns(schema.names, max_records, _ARROW_POLL_BYTES)

        batches = None if self._closed else await self._poll(timeout_ms, take)
        return arrow_table(batches or [], schema)

    def _load_record_kernel(self) -> None:
        assert self._fetcher is not None
        self._fetcher.decoder.load_kernel()

    async def _poll(self, timeout_ms: float, take: Callable[[Fetcher], Records]) -> Records | None:
        """Run the group's step and fetch until `take` returns something; None once the consumer is closed."""
        self._check_open()
        timeout_ms = as_milliseconds("timeout_ms", timeout_ms)
        if not self._subscription.subscribed and not self._subscription.is_user_assigned:
            raise RuntimeError("this consumer reads nothing: subscribe() or assign() first")
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        deadline = began_s + timeout_ms / 1000
        try:
            if not await self._shared_start.wait(timeout_ms):
                return None  # it goes on, and a later poll waits for its end
        except RuntimeError:
            if self._closed:  # `close` ended the start that this poll has waited for
                return None
            raise
        assert self._fetcher is not None
        assert self._position_lookup is not None
        lookup = self._position_lookup
        if began_s >= self._next_yield_s:
            # With a time limit of zero around it a call is cancelled here. The next one then does not come here.
            self._next_yield_s = inf
            await asyncio.sleep(0)  # before records are taken: a call that is cancelled here loses none
        self._next_yield_s = min(self._next_yield_s, loop.time() + _HOLD_S_MAX)
        self._rewind()
        self.positions_before_take = {}
        while True:
            self._update_event.clear()
            if self._fetcher.decoder.is_kernel_due and not self._closed:
                await self._record_kernel.load_within(deadline - loop.time())
            if self._group is not None and not self._closed and not await self._group.step(deadline):
                return None
            if self._closed:
                return None
            if self._refused_topic is not None:
                refused_topic, self._refused_topic = self._refused_topic, None
                raise KafkaError(ErrorCode.TOPIC_AUTHORIZATION_FAILED, f"topic {refused_topic!r}")
            lookup.start_lookup()
            try:
                records = take(self._fetcher)
            except Exception:
                await asyncio.sleep(0)  # as below: the next poll may raise the same at once
                raise
            if records:  # else none are to be returned
                self.positions_before_take = self._fetcher.starts
            self._fetcher.send_fetches()
            remaining_s = deadline - loop.time()
            if records or remaining_s <= 0:
                if not records:
                    await asyncio.sleep(0)  # lets the loop read responses between empty polls
                return records
            await self._wait_for_update(remaining_s)

    def batches(self, max_records: int | None = None) -> AsyncIterator[Batch]:
        """Iterate over polls: each batch is what `poll` returns, and never empty.

            async for batch in consumer.batches():
                ...
                await consumer.commit()

        A batch counts as consumed once it is handed out, so `commit()` in the loop commits it and all
        before it. Waits without a time limit; the iteration ends when the consumer is closed. Raises
        what `poll` raises.
        """
        self._check_open()
        if max_records is not None:
            _checked_limit(max_records)
        return _BatchIterator(self, max_records)

    async def next_batch(self, max_records: int | None = None) -> Batch:
        """Wait for the next batch; empty once the consumer is closed."""
        while not self._closed:
            if batch := await self.poll(_ITERATION_POLL_MS, max_records):
                return batch
        return {}

    async def _wait_for_update(self, timeout_s: float) -> None:
        # A group's consumer wakes at the commit interval too: automatic commits are due without any
        # update.
        max_wait_s = self._config.auto_commit_interval_ms / 1000 if self._group is not None else timeout_s
        try:
            async with asyncio.timeout(min(timeout_s, max(max_wait_s, 0.05))):
                await self._update_event.wait()
        except TimeoutError:
            pass

    def __aiter__(self) -> Self:
        self._check_open()
        return self

    async def __anext__(self) -> ConsumerRecord:
        """Wait for the next record without a time limit; the iteration ends when the consumer is
        closed.
        """
        if self._iteration.records:
            self.application_alive()
        elif not await self.refill():
            raise StopAsyncIteration
        return self._iteration.records.popleft()

    def application_alive(self) -> None:
        """Note application activity, which counts as a poll for `max_poll_interval_ms`.

        Thread-safe.
        """
        if self._group is not None:
            self._group.membership.record_poll()

    async def refill(self) -> deque[ConsumerRecord]:
        """Wait for records and return the queue to iterate from the left; empty once the consumer
        is closed.
        """
        if not self._iteration.records:
            self._iteration.fill(await self.next_batch())
            self.positions_before_take = {}  # these records count as consumed one by one
        return self._iteration.records

    def _rewind(self, partitions: Collection[TopicPartition] | None = None) -> None:
        """Move the positions of these partitions, of all by default, back to the first record that an `async for` has
        not handed out.
        """
        positions = self._iteration.drop(partitions)
        for partition, position in positions.items():
            self._subscription.rewind(partition, position.offset, position.leader_epoch)
        if positions and self._fetcher is not None:
            self._fetcher.discard(positions)

    def return_records(self) -> None:
        """Let the records of the last poll count as not consumed, because its caller has not got them."""
        positions, self.positions_before_take = self.positions_before_take, {}
        for partition, (offset, leader_epoch) in positions.items():
            self._subscription.rewind(partition, offset, leader_epoch)
        if self._fetcher is not None:
            self._fetcher.discard(positions)

    # -- positions

    def _positions(self) -> dict[TopicPartition, OffsetAndMetadata]:
        """The consumed positions to commit, without records that an iteration still holds.

        Not those of a deleted topic: a topic of the same name may be there already, and a commit names no other.
        """
        positions = self._subscription.positions()
        if self._cluster is not None:
            for partition in self._subscription.of_deleted_topics(self._cluster.topic_id):
                positions.pop(partition, None)
        if self._iteration.records:
            unconsumed = self._iteration.unconsumed_positions()
            positions.update((partition, unconsumed[partition]) for partition in unconsumed.keys() & positions.keys())
        return positions

    def seek(self, partition: TopicPartition, offset: int | OffsetAndMetadata) -> None:
        """Continue reading an assigned partition at `offset`. Raises ValueError, TypeError."""
        self._check_open(or_closing=True)
        partition = as_partition("partition", partition)
        target = as_offset(partition, offset)
        self._rewind((partition,))
        self._subscription.seek(partition, target.offset, target.leader_epoch)
        if self._fetcher is not None:
            self._fetcher.discard((partition,))

    async def seek_to_beginning(self, *partitions: TopicPartition) -> None:
        """Continue at the log start offset; without arguments, in every assigned partition."""
        await self._seek_by_time(partitions, EARLIEST_TIMESTAMP)

    async def seek_to_end(self, *partitions: TopicPartition) -> None:
        """Continue at the end of the log; without arguments, in every assigned partition."""
        await self._seek_by_time(partitions, LATEST_TIMESTAMP)

    async def _seek_by_time(self, partitions: Collection[TopicPartition], timestamp: int) -> None:
        targets = self._or_assigned(partitions)
        for partition in targets:
            self._subscription.state(partition)
        offsets = await self._list_offsets_by_time(dict.fromkeys(targets, timestamp))
        for partition, offset in offsets.items():
            if offset is not None and partition in self._subscription.assigned:
                self.seek(partition, offset.offset)

    async def position(self, partition: TopicPartition) -> int:
        """The offset of the next record of an assigned partition. Raises ValueError, KafkaError."""
        partition = as_partition("partition", partition)
        self._subscription.state(partition)
        remaining_ms = await self._start_for_call()
        assert self._position_lookup is not None
        position = await self._position_lookup.wait_for_position(partition, remaining_ms)
        unconsumed = self._iteration.first_offset(partition)
        return position if unconsumed is None else unconsumed

    def pause(self, *partitions: TopicPartition) -> None:
        """Return no records of these partitions until `resume`; they stay assigned."""
        self._check_open(or_closing=True)
        targets = as_partitions("partitions", partitions)
        self._subscription.pause(targets)
        self._rewind(targets)

    def resume(self, *partitions: TopicPartition) -> None:
        """Return records of paused partitions again."""
        self._check_open(or_closing=True)
        self._subscription.resume(as_partitions("partitions", partitions))
        self._update_event.set()

    def paused(self) -> set[TopicPartition]:
        """The assigned partitions that are paused."""
        return self._subscription.paused()

    def lag(self, partition: TopicPartition) -> int | None:
        """Records between the position and the end in the last fetch; None while unknown."""
        return self._subscription.lag(as_partition("partition", partition))

    def metrics(self) -> ConsumerMetrics:
        """Totals since the start, and the present state."""
        assigned = sorted(self._subscription.assigned)
        return ConsumerMetrics(
            records_consumed_total=0 if self._fetcher is None else self._fetcher.records_taken,
            assigned_partitions=len(assigned),
            lag={partition: self._subscription.lag(partition) for partition in assigned},
        )

    # -- offsets in the cluster

    def group_metadata(self) -> ConsumerGroupMetadata:
        """What `send_offsets_to_transaction` of a producer needs to know of this consumer.

        Raises KafkaError: UNKNOWN_MEMBER_ID or REBALANCE_IN_PROGRESS while it is no member of its group.
        """
        if self._group is None:
            raise RuntimeError("group_metadata needs a started consumer with a group_id")
        return self._group.metadata()

    async def commit(self, offsets: Offsets | None = None) -> None:
        """Commit these offsets, or all positions, and wait.

        Raises KafkaError: ILLEGAL_GENERATION or UNKNOWN_MEMBER_ID when this consumer no longer owns
        the partitions.
        """
        checked = None if offsets is None else as_offsets("offsets", offsets)
        group, remaining_ms = await self._require_group()
        await group.commit(self._positions() if checked is None else checked, remaining_ms)

    async def commit_async(self, offsets: Offsets | None = None) -> asyncio.Task[None]:
        """Start a commit and return its task.

        Commits reach the coordinator in the order of their calls.
        """
        checked = None if offsets is None else as_offsets("offsets", offsets)
        group, _ = await self._require_group()
        return group.commit_in_background(self._positions() if checked is None else checked)

    async def committed(self, *partitions: TopicPartition) -> dict[TopicPartition, OffsetAndMetadata | None]:
        """The group's committed offsets, None for a partition without one; default: all assigned
        partitions.
        """
        targets = self._or_assigned(partitions)
        group, remaining_ms = await self._require_group()
        assert self._cluster is not None
        topic_id_of = self._cluster.topic_id
        offsets = await group.coordinator.committed(targets, remaining_ms, topic_id_of=topic_id_of)
        return {partition: offsets.get(partition) for partition in targets}

    def _or_assigned(self, partitions: Collection[TopicPartition]) -> list[TopicPartition]:
        return as_partitions("partitions", partitions) or list(self._subscription.assigned)

    async def _start_for_call(self) -> float:
        """Start, for a call without a limit of its own. Returns the milliseconds of `default_api_timeout_ms` left."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._config.default_api_timeout_ms / 1000
        await self._shared_start.wait_within(self._config.default_api_timeout_ms, "default_api_timeout_ms")
        return (deadline - loop.time()) * 1000

    async def _require_group(self) -> tuple[Rebalancer, float]:
        """The group, and the milliseconds left for the call."""
        remaining_ms = await self._start_for_call()
        if self._group is None:
            raise RuntimeError("committing needs a group_id")
        return self._group, remaining_ms

    async def beginning_offsets(self, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
        """The log start offsets of any partitions."""
        return await self._list_offsets(partitions, EARLIEST_TIMESTAMP)

    async def end_offsets(self, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
        """The offset after the last visible record: high watermark or last stable offset."""
        return await self._list_offsets(partitions, LATEST_TIMESTAMP)

    async def _list_offsets(self, partitions: Iterable[TopicPartition], timestamp: int) -> dict[TopicPartition, int]:
        offsets = await self._list_offsets_by_time(dict.fromkeys(as_partitions("partitions", partitions), timestamp))
        return {partition: offset.offset for partition, offset in offsets.items() if offset is not None}

    async def offsets_for_times(
        self, timestamps: Mapping[TopicPartition, int]
    ) -> dict[TopicPartition, OffsetAndTimestamp | None]:
        """The first offset with a timestamp (ms) at or after the requested one, None where no
        record has one.
        """
        times_ms = as_partition_mapping("timestamps", timestamps, "times in ms", as_time)
        return await self._list_offsets_by_time(times_ms)

    async def _list_offsets_by_time(
        self, timestamps: Mapping[TopicPartition, int]
    ) -> dict[TopicPartition, OffsetAndTimestamp | None]:
        remaining_ms = await self._start_for_call()
        assert self._cluster is not None
        isolation_level = self._config.isolation_level
        return await list_offsets(self._cluster, timestamps, isolation_level=isolation_level, timeout_ms=remaining_ms)

    async def partitions_for_topic(self, topic: str) -> set[int] | None:
        """The partition numbers of a topic, None for a topic that does not exist.

        Does not create it.
        """
        response = await self._fetch_metadata([as_topic_name("topic", topic)])
        numbers = {partition.partition_index for entry in response.topics for partition in entry.partitions}
        return numbers or None

    async def topics(self) -> set[str]:
        """The names of all topics that this consumer may see."""
        response = await self._fetch_metadata(None)
        return {topic.name for topic in response.topics if topic.name is not None and not topic.error_code}

    async def _fetch_metadata(self, topics: list[str] | None) -> MetadataResponse:
        remaining_ms = await self._start_for_call()
        assert self._cluster is not None
        return await self._cluster.fetch_metadata_within(topics, remaining_ms)


def _checked_limit(max_records: Any) -> int:
    return as_int("max_records", max_records, 1, INT64_MAX)


def _compiled(pattern: Any) -> re.Pattern[str]:
    if isinstance(pattern, re.Pattern) and isinstance(pattern.pattern, str):
        return pattern
    try:
        return re.compile(as_text("pattern", pattern))
    except re.error as error:
        raise WrongArgument(f"subscribe(): {shown(pattern)} is not a regular expression: {error}") from None


def _for_broker(pattern: Any) -> str:
    """A pattern that the broker evaluates: it may have what Python's patterns have not, as `\\pL`."""
    if not isinstance(pattern, re.Pattern):
        return as_text("pattern", pattern)
    text = _compiled(pattern).pattern
    if re.compile(text).flags != pattern.flags:
        raise WrongArgument(
            f"subscribe(): the flags of {pattern!r} do not reach the broker; write them as in '(?i)a.*'"
        )
    return text


def check_listener(listener: Any) -> None:
    """Raise TypeError for an object without the methods of a RebalanceListener."""
    methods = ("on_partitions_revoked", "on_partitions_assigned", "on_partitions_lost")
    if listener is not None and not all(callable(getattr(listener, method, None)) for method in methods):
        raise TypeError(f"listener must be a RebalanceListener, not {shown(listener)}")


class _BatchIterator:
    """The iterator of `Consumer.batches`."""

    def __init__(self, consumer: Consumer, max_records: int | None) -> None:
        self._consumer = consumer
        self._max_records = max_records

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Batch:
        batch = await self._consumer.next_batch(self._max_records)
        if not batch:
            raise StopAsyncIteration
        return batch
