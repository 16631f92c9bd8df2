"""The asynchronous consumer: `poll` or `async for`, alone or in a group.

This is the face and the poll loop. Positions are in `Subscription` and found by `Positions`, fetching is `Fetcher`'s,
the group is `Rebalancer`'s. Invariants: everything that changes the assignment of a group happens inside `poll`; a
record that an `async for` has not handed out yet counts as not consumed, for commits and positions alike.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections import deque
from collections.abc import Collection, Iterable, Mapping
from types import TracebackType
from typing import Any, Self

from tidelog.client.config import CLOSE_TIMEOUT_MS, ConsumerConfig
from tidelog.client.consuming.fetcher import Fetcher
from tidelog.client.consuming.iteration_buffer import IterationBuffer
from tidelog.client.consuming.positions import Positions
from tidelog.client.consuming.rebalance import Rebalancer
from tidelog.client.consuming.subscription import RebalanceListener, Subscription
from tidelog.client.model import (
    EARLIEST_TIMESTAMP,
    LATEST_TIMESTAMP,
    ConsumerRecord,
    OffsetAndMetadata,
    OffsetAndTimestamp,
    TopicPartition,
    as_names,
    as_partition,
)
from tidelog.client.network.cluster import Cluster
from tidelog.client.network.metadata import TopicMetadata
from tidelog.protocol.errors import ErrorCode

logger = logging.getLogger(__name__)

_MISSING = (ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, ErrorCode.INVALID_TOPIC_EXCEPTION)
Offsets = Mapping[TopicPartition, int | OffsetAndMetadata]


class Consumer:
    """Reads records. Options are Kafka's consumer configuration with underscores (`docs/client.md` lists them).

        async with Consumer("topic", bootstrap_servers="127.0.0.1:9092", group_id="g") as consumer:
            async for record in consumer:
                ...

    With a group, partitions are dealt out among its members; without one, this consumer reads all partitions of its
    topics, or those given to `assign`. Not for use by several tasks at once. Raises ConfigError for a wrong option.
    """

    def __init__(self, *topics: str, **options: Any) -> None:
        self._config = ConsumerConfig.from_options(options)
        self._subscription = Subscription()
        if topics:
            self._subscription.subscribe(as_names(topics), None, None)
        self._cluster: Cluster | None = None
        self._fetcher: Fetcher | None = None
        self._group: Rebalancer | None = None
        self._news = asyncio.Event()
        self._lookup: Positions | None = None
        self._iteration = IterationBuffer()
        self._missing: set[str] = set()
        self._starting = asyncio.Lock()
        self._closed = False
        """Set when `close` begins: no poll any more, while its listener may still commit."""
        self._ended = asyncio.Event()

    # -- life

    async def start(self) -> None:
        """Reach the cluster; `poll` does it too, the first time. Raises KafkaError(NETWORK_EXCEPTION)."""
        if self._ended.is_set() or self._cluster is None:
            self._open()
            async with self._starting:
                if self._cluster is None:
                    await self._reach()

    async def _reach(self) -> None:
        cluster = Cluster(self._config, auto_create_topics=self._config.allow_auto_create_topics)
        self._track(cluster)
        try:
            await cluster.start()
            self._open()
        except BaseException:
            await cluster.close()
            raise
        self._fetcher = Fetcher(cluster, self._config, self._subscription, self._news.set)
        if self._config.group_id is not None:
            self._group = Rebalancer(
                cluster, self._config, self._subscription, self._fetcher, self._news.set, self._positions
            )
        coordinator = None if self._group is None else self._group.coordinator
        self._lookup = Positions(cluster, self._config, self._subscription, coordinator, self._fetcher, self._news.set)
        self._cluster = cluster
        cluster.on_metadata = self._on_metadata
        self._on_metadata()

    async def close(self, timeout_ms: float = CLOSE_TIMEOUT_MS) -> None:
        """Commit if that is automatic, leave the group, disconnect. A poll or an iteration under way ends.

        Brokers that do not answer are waited for `timeout_ms` in all.
        """
        if self._group is not None:
            self._group.refuse_inside_listener("close()")
        if self._closed:
            await self._ended.wait()
            return
        self._closed = True
        self._news.set()
        if self._cluster is None:
            self._ended.set()
            return
        try:
            self._rewind()
            if self._group is not None:
                await self._group.leave("the consumer was closed", timeout_ms)
        finally:
            if self._fetcher is not None:
                self._fetcher.close()
            try:
                if self._lookup is not None:
                    await self._lookup.close()
                if self._group is not None:
                    await self._group.close()
            finally:
                self._ended.set()
                await self._cluster.close()

    async def __aenter__(self) -> Self:
        await self.start()
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
        """Replace the topics, by name or by a regular expression that must match the whole name."""
        self._open()
        names = [topics] if isinstance(topics, str) else as_names(topics)
        if bool(names) == (pattern is not None):
            raise ValueError("subscribe() takes topics or a pattern")
        self._rewind()
        self._subscription.subscribe(names, None if pattern is None else re.compile(pattern), listener)
        if self._cluster is not None:
            self._track(self._cluster)
            self._on_metadata()

    def assign(self, partitions: Iterable[TopicPartition]) -> None:
        """Read exactly these partitions, without dealing by a group (offsets can still be committed to one)."""
        self._open()
        self._rewind()
        self._subscription.assign(as_partition(each) for each in partitions)
        if self._fetcher is not None:
            self._fetcher.keep_only(set(self._subscription.assigned))
        if self._cluster is not None:
            self._track(self._cluster)

    async def unsubscribe(self) -> None:
        """Read nothing, and leave the group."""
        self._rewind()
        if self._group is not None:
            await self._group.unsubscribe()
        else:
            self._subscription.unsubscribe()
            if self._fetcher is not None:
                self._fetcher.keep_only(())

    def subscription(self) -> set[str]:
        return set(self._subscription.topics)

    def assignment(self) -> set[TopicPartition]:
        return set(self._subscription.assigned)

    def _open(self) -> None:
        if self._closed:
            raise RuntimeError("this consumer is closed")

    def _track(self, cluster: Cluster) -> None:
        cluster.all_topics = self._subscription.pattern is not None
        topics = {*self._subscription.topics, *(each.topic for each in self._subscription.assigned)}
        if self._group is not None:
            topics.update(self._group.membership.watched_topics)
        cluster.track_only(sorted(topics))
        if cluster.all_topics:
            cluster.request_refresh()

    def _on_metadata(self) -> None:
        assert self._cluster is not None
        subscription, known = self._subscription, self._cluster.metadata.topics
        pattern = subscription.pattern
        if pattern is not None:
            names = [name for name, topic in known.items() if pattern.fullmatch(name) and self._to_be_read(topic)]
            subscription.set_topics(names)
        self._say_what_is_missing(known)
        if self._lookup is not None:
            self._lookup.validator.check()
        if self._group is not None:
            self._group.membership.metadata_changed()
        elif subscription.subscribed:
            # No group to deal them out: all partitions, and new ones as they come.
            topics = [known[name] for name in sorted(subscription.topics) if name in known]
            everything = [TopicPartition(topic.name, each.partition) for topic in topics for each in topic.partitions]
            if set(everything) != subscription.assigned.keys():
                subscription.set_assigned(everything)
        self._news.set()

    def _say_what_is_missing(self, known: Mapping[str, TopicMetadata]) -> None:
        """A misspelt topic would otherwise look like an empty one. Once each, until it is there."""
        missing = {name for name in self._subscription.topics if name in known and known[name].error in _MISSING}
        for name in sorted(missing - self._missing):
            logger.warning("cannot read topic %r: %s", name, known[name].error.name)
        self._missing = missing

    def _to_be_read(self, topic: TopicMetadata) -> bool:
        return topic.usable and not (topic.internal and self._config.exclude_internal_topics)

    # -- reading

    async def poll(
        self, timeout_ms: float = 0, max_records: int | None = None
    ) -> dict[TopicPartition, list[ConsumerRecord]]:
        """Records by partition, at most `max_records` (by default `max_poll_records`); empty after `timeout_ms`.

        What the last call returned counts as consumed. Raises KafkaError: OFFSET_OUT_OF_RANGE when there is no offset
        and `auto_offset_reset` is none, CORRUPT_MESSAGE, authorization errors, fatal errors of the group; and what a
        rebalance listener raised. Cancelling it loses nothing: the next call goes on where this one was.
        """
        self._open()
        lookup = await self._started()
        assert self._fetcher is not None
        if not self._subscription.subscribed and not self._subscription.by_user:
            raise RuntimeError("this consumer reads nothing: subscribe() or assign() first")
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_ms / 1000
        limit = self._config.max_poll_records if max_records is None else max_records
        self._rewind()
        while True:
            self._news.clear()
            if self._group is not None and not self._closed:
                await self._group.step()
            if self._closed:
                return {}
            lookup.search()
            records = self._fetcher.take(limit)
            self._fetcher.pump()
            left_s = deadline - loop.time()
            if records or left_s <= 0:
                if not records:
                    await asyncio.sleep(0)  # a loop of empty polls must not keep answers from being read
                return records
            await self._wait_for_news(left_s)

    async def _wait_for_news(self, seconds: float) -> None:
        # Woken now and then all the same: automatic commits are due whether or not there is news.
        longest_s = self._config.auto_commit_interval_ms / 1000 if self._group is not None else seconds
        try:
            async with asyncio.timeout(min(seconds, max(longest_s, 0.05))):
                await self._news.wait()
        except TimeoutError:
            pass

    def __aiter__(self) -> Self:
        self._open()
        return self

    async def __anext__(self) -> ConsumerRecord:
        """The next record, however long it takes; the iteration ends when the consumer is closed."""
        if self._iteration.records:
            self.alive()
        elif not await self.refill():
            raise StopAsyncIteration
        return self._iteration.records.popleft()

    def alive(self) -> None:
        """The application is at work: as good as a poll for `max_poll_interval_ms`. Callable from any thread."""
        if self._group is not None:
            self._group.membership.polled()

    async def refill(self) -> deque[ConsumerRecord]:
        """Wait for records to iterate over, to be taken from the left; none once the consumer is closed."""
        while not self._closed and not self._iteration.records:
            try:
                self._iteration.fill((await self.poll(60_000)).values())
            except RuntimeError:
                if not self._closed:  # while the poll was still about to start
                    raise
        return self._iteration.records

    def _rewind(self) -> None:
        """What an `async for` has not handed out is not consumed."""
        if self._iteration.records:
            rewound = self._iteration.not_consumed()
            self._iteration.records.clear()
            for partition, position in rewound.items():
                self._subscription.rewind(partition, position.offset, position.leader_epoch)
            if self._fetcher is not None:
                self._fetcher.discard(rewound)

    # -- positions

    def _positions(self) -> dict[TopicPartition, OffsetAndMetadata]:
        """What is consumed, without what an iteration still holds."""
        positions = self._subscription.positions()
        if self._iteration.records:
            not_consumed = self._iteration.not_consumed()
            positions.update((each, not_consumed[each]) for each in not_consumed.keys() & positions.keys())
        return positions

    def seek(self, partition: TopicPartition, offset: int | OffsetAndMetadata) -> None:
        """Go on reading an assigned partition at `offset`. Raises ValueError."""
        partition = as_partition(partition)
        self._rewind()
        where = OffsetAndMetadata(offset) if isinstance(offset, int) else offset
        self._subscription.seek(partition, where.offset, where.leader_epoch)
        if self._fetcher is not None:
            self._fetcher.discard((partition,))

    async def seek_to_beginning(self, *partitions: TopicPartition) -> None:
        """Go on at the first offset there is; without arguments, in every assigned partition."""
        await self._seek_by_time(partitions, EARLIEST_TIMESTAMP)

    async def seek_to_end(self, *partitions: TopicPartition) -> None:
        """Go on with what comes from now on; without arguments, in every assigned partition."""
        await self._seek_by_time(partitions, LATEST_TIMESTAMP)

    async def _seek_by_time(self, partitions: Collection[TopicPartition], timestamp: int) -> None:
        wanted = [as_partition(each) for each in partitions] or list(self._subscription.assigned)
        for partition in wanted:
            self._subscription.state(partition)
        found = await (await self._started()).list_offsets(dict.fromkeys(wanted, timestamp))
        for partition, offset in found.items():
            if offset is not None and partition in self._subscription.assigned:
                self.seek(partition, offset.offset)

    async def position(self, partition: TopicPartition) -> int:
        """The offset of the next record of an assigned partition. Raises ValueError, KafkaError."""
        partition = as_partition(partition)
        self._subscription.state(partition)
        position = await (await self._started()).find(partition)
        found = self._positions()
        return found[partition].offset if partition in found else position

    def pause(self, *partitions: TopicPartition) -> None:
        """Return no records of these partitions until `resume`; they stay assigned."""
        self._rewind()
        self._subscription.pause([as_partition(each) for each in partitions])

    def resume(self, *partitions: TopicPartition) -> None:
        self._subscription.resume([as_partition(each) for each in partitions])
        self._news.set()

    def paused(self) -> set[TopicPartition]:
        return self._subscription.paused()

    def lag(self, partition: TopicPartition) -> int | None:
        """Records between the position and the end the last fetch told of; None while unknown."""
        return self._subscription.lag(as_partition(partition))

    # -- offsets in the cluster

    async def commit(self, offsets: Offsets | None = None) -> None:
        """Commit these offsets, or all positions, and wait. Raises KafkaError, ILLEGAL_GENERATION or UNKNOWN_MEMBER_ID
        when the partitions are no longer this consumer's.
        """
        group = await self._need_group()
        await group.commit(self._to_commit(offsets), self._config.default_api_timeout_ms)

    async def commit_async(self, offsets: Offsets | None = None) -> asyncio.Task[None]:
        """Start a commit; await the task, or look at it later. Commits arrive in the order they were started."""
        group = await self._need_group()
        return group.commit_in_background(self._to_commit(offsets))

    def _to_commit(self, offsets: Offsets | None) -> dict[TopicPartition, OffsetAndMetadata]:
        if offsets is None:
            return self._positions()
        wanted: dict[TopicPartition, OffsetAndMetadata] = {}
        given: Any
        for partition, given in offsets.items():
            if not isinstance(given, (int, OffsetAndMetadata)):
                raise TypeError(f"{partition}: an offset to commit is a number or an OffsetAndMetadata, not {given!r}")
            wanted[as_partition(partition)] = OffsetAndMetadata(given) if isinstance(given, int) else given
        return wanted

    async def committed(self, *partitions: TopicPartition) -> dict[TopicPartition, OffsetAndMetadata | None]:
        """What the group has committed, None where nothing; without arguments, for every assigned partition."""
        group = await self._need_group()
        wanted = [as_partition(each) for each in partitions] or list(self._subscription.assigned)
        found = await group.coordinator.committed(wanted, self._config.default_api_timeout_ms)
        return {partition: found.get(partition) for partition in wanted}

    async def _started(self) -> Positions:
        await self.start()
        assert self._lookup is not None
        return self._lookup

    async def _need_group(self) -> Rebalancer:
        await self.start()
        if self._group is None:
            raise RuntimeError("committing needs a group_id")
        return self._group

    async def beginning_offsets(self, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
        """The first offset there is, of any partitions."""
        return await self._ends(partitions, EARLIEST_TIMESTAMP)

    async def end_offsets(self, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
        """The offset after the last record a consumer may see: high watermark, or last stable offset."""
        return await self._ends(partitions, LATEST_TIMESTAMP)

    async def _ends(self, partitions: Iterable[TopicPartition], timestamp: int) -> dict[TopicPartition, int]:
        found = await (await self._started()).list_offsets({as_partition(each): timestamp for each in partitions})
        return {partition: offset.offset for partition, offset in found.items() if offset is not None}

    async def offsets_for_times(
        self, timestamps: Mapping[TopicPartition, int]
    ) -> dict[TopicPartition, OffsetAndTimestamp | None]:
        """The first offset whose timestamp in ms is at or after the one given, None where there is none."""
        for partition, timestamp in timestamps.items():
            if timestamp < 0:
                raise ValueError(f"{partition}: {timestamp} is not a time in ms")
        return await (await self._started()).list_offsets(
            {as_partition(partition): timestamp for partition, timestamp in timestamps.items()}
        )

    async def partitions_for_topic(self, topic: str) -> set[int] | None:
        """The partition numbers of a topic, None when there is no such topic; asking does not create it."""
        await self.start()
        assert self._cluster is not None
        response = await self._cluster.ask_metadata([topic])
        numbers = {each.partition_index for found in response.topics for each in found.partitions}
        return numbers or None

    async def topics(self) -> set[str]:
        """The names of all topics this consumer may see."""
        await self.start()
        assert self._cluster is not None
        response = await self._cluster.ask_metadata(None)
        return {topic.name for topic in response.topics if topic.name is not None and not topic.error_code}
