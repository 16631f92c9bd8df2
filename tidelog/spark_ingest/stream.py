"""The driver's side of a stream: looks offsets up, keeps what it knows of the topics, commits progress.

One `StreamDriver` lives as long as its query, in a process of its own that Spark calls serially. It
asks the cluster and lets `stream_planning.py` decide. Spark itself is not needed here. Invariant: the
ranges of a micro-batch depend on its two offsets and the options alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from tidelog.client.model import TopicPartition
from tidelog.client.network.backoff import ExponentialBackoff
from tidelog.client.network.cluster import Cluster
from tidelog.client.network.epoch_ends import Epochs
from tidelog.client.network.metadata import NO_TOPIC_ID
from tidelog.client.sync.loop_thread import LoopThread
from tidelog.protocol.errors import ErrorCode, KafkaError, join_some
from tidelog.spark_ingest.offsets import (
    DataLoss,
    FirstOffsets,
    MissingPartition,
    PresentEnds,
    commit_offsets,
    ends_after,
    find_ends,
    find_first_offsets,
    find_log_starts,
    find_replaced,
    list_edge_offsets,
    selected,
    target_ends,
)
from tidelog.spark_ingest.options import EARLIEST, SourceOptions
from tidelog.spark_ingest.planning import OffsetRange, plan_ranges
from tidelog.spark_ingest.stream_planning import (
    StreamState,
    available_offsets,
    backlog,
    first_end,
    from_offset,
    limit_offsets,
    missing_partitions,
    must_wait,
    ranges_between,
    recreated_partitions,
    replayed_start,
    to_offset,
)
from tidelog.spark_ingest.topic_watch import check_gone

logger = logging.getLogger(__name__)
Result = TypeVar("Result")

_COMMIT_PAUSE_MS_MAX = 60_000
"""The longest time after a failed commit of progress until the next one."""

_AFTER_REPLACED = (
    ". The next start goes on at the checkpoint, after the new records in their place: read those in a batch"
)
"""It has no leader epochs, and finds nothing wrong, also with failOnDataLoss=false."""

StreamOffset = dict[str, Any]
"""`{"topic": {"0": 12}}`: the next offset of each partition."""


class StreamDriver:
    """Plans the micro-batches of one query. `close` ends its connections."""

    def __init__(self, options: SourceOptions, now_ms: Callable[[], float] = lambda: time.monotonic() * 1000) -> None:
        self._options = options
        self._now_ms = now_ms
        self._thread: LoopThread | None = None
        self._cluster: Cluster | None = None
        self._first: FirstOffsets | None = None
        self._first_offset: StreamOffset | None = None
        self._has_looked = False
        """Whether this process has planned a micro-batch, and not only run one again."""
        self._has_run_again = False
        """Whether this process has run the first micro-batch of the query again, so that none it plans is the first."""
        self._topic_ids: dict[str, bytes] = {}
        self._leader_epochs: dict[TopicPartition, int] = {}
        """The newest leader of each partition that has given an end, and whose log has what the stream has read."""
        self._target: PresentEnds | None = None
        """The ends at the start of a query with the trigger AvailableNow."""
        self._latest: Mapping[TopicPartition, int] = {}
        self._last_batch_ms: float | None = None
        self._committed: StreamOffset | None = None
        self._commits_fail_since_ms: float | None = None
        self._next_commit_ms = float("-inf")

    # -- offsets

    def initial_offset(self) -> StreamOffset:
        """Where a new query begins; the same in every call."""
        if self._first_offset is None:
            for name in self._options.without_effect:
                logger.warning("option %r has no effect on this source", name)
            self._first = self._find_first()
            self._topic_ids.update(self._first.topic_ids)
            self._first_offset = to_offset(self._first.offsets)
        return self._first_offset

    def _find_first(self) -> FirstOffsets:
        """Where a new query begins. What refuses a new query does not refuse to run a first micro-batch again: topics
        and partitions may have come and gone since.
        """
        try:
            return self._run(self._find_first_offsets)
        except MissingPartition as error:
            if self._options.fail_on_data_loss:
                raise
            missing = error
        return self._run(lambda cluster: self._find_first_offsets(cluster, omit_missing=True))._replace(missing=missing)

    async def _find_first_offsets(self, cluster: Cluster, omit_missing: bool = False) -> FirstOffsets:
        first = await find_first_offsets(cluster, self._options, omit_missing)
        if self._target is None:
            return first
        # The target is older. `latest` begins at it; a start of its own lies after it where the log has grown since.
        starts = {each: offset for each, offset in first.offsets.items() if each not in first.at_end}
        ends = (await ends_after(cluster, self._options, self._target, starts)).offsets
        offsets = {each: min(offset, ends[each]) for each, offset in first.offsets.items() if each in ends}
        return first._replace(offsets=offsets)

    def prepare_for_available_now(self) -> None:
        """Fix the end of the query at the present end of the logs."""
        self._target = self._run(lambda cluster: find_ends(cluster, self._options))

    def latest_offset(
        self, start: StreamOffset, *, max_offsets: int | None = None, min_offsets: int | None = None
    ) -> StreamOffset:
        """The end of the micro-batch that begins at `start`; `start` itself when there is none.

        Raises DataLoss when records are gone, unless failOnDataLoss is false. `start` also says that
        everything before it is processed.
        """
        first = self._first if self._is_first(start) and not self._has_run_again else None
        if first is not None and (refusal := first.missing or first.refusal) is not None:
            raise refusal
        self._has_looked = True
        self._commit(start)
        options, start_offsets = self._options, from_offset(start)
        present, state = self._run(lambda cluster: self._look(cluster, start_offsets))
        self._latest = present.offsets
        ends, losses = available_offsets(start_offsets, state)
        self._report(losses, _AFTER_REPLACED if state.replaced else "")
        if min_offsets and self._target is None and not losses:
            new_offsets = sum(backlog(start_offsets, ends, state.new_starts).values())
            since_ms = float("inf") if self._last_batch_ms is None else self._now_ms() - self._last_batch_ms
            if must_wait(new_offsets, min_offsets, since_ms, options.max_trigger_delay_ms):
                return start
        if first is not None:
            ends = first_end(start_offsets, ends, first.at_end)
        if max_offsets:
            ends = limit_offsets(start_offsets, ends, state.new_starts, max_offsets)
        self._topic_ids.update(present.topic_ids)
        self._leader_epochs = {
            each: epoch if each in state.recreated else max(epoch, self._leader_epochs.get(each, epoch))
            for each, epoch in present.leader_epochs.items()
        }
        end = to_offset(ends)
        if end == start:
            return start
        self._last_batch_ms = self._now_ms()
        return end

    async def _look(self, cluster: Cluster, start: Mapping[TopicPartition, int]) -> tuple[PresentEnds, StreamState]:
        options = self._options
        present = await self._find_ends(cluster, start)
        missing = missing_partitions(start, present.offsets, self._topic_ids, present.topic_ids)
        await self._check_missing(cluster, missing)
        if self._target is not None:
            # A topic that is not there may be back: the broker that was asked may lag behind.
            absent = {each: end for each, end in self._target.offsets.items() if each.topic not in present.topic_ids}
            self._target = PresentEnds(absent | dict(present.offsets), {**self._target.topic_ids, **present.topic_ids})
        recreated = recreated_partitions(start, present.offsets, self._topic_ids, present.topic_ids)
        new = [partition for partition in present.offsets if partition not in start]
        log_starts = await list_edge_offsets(cluster, options, [*new, *recreated], EARLIEST) if new or recreated else {}
        return present, StreamState(
            present.offsets,
            {partition: log_starts[partition] for partition in new},
            {partition: log_starts[partition] for partition in recreated},
            await self._find_replaced(cluster, start, present, recreated),
            set(missing).difference(selected(options, missing)),
        )

    async def _find_replaced(
        self,
        cluster: Cluster,
        start: Mapping[TopicPartition, int],
        present: PresentEnds,
        recreated: Collection[TopicPartition],
    ) -> Mapping[TopicPartition, int]:
        """Asks only where the leader has changed: an idle stream comes here every few milliseconds."""
        newer = {
            partition: Epochs(known, epoch)
            for partition, epoch in present.leader_epochs.items()
            if partition in start
            and partition not in recreated
            and (known := self._leader_epochs.get(partition, epoch)) < epoch
        }
        return await find_replaced(cluster, start, newer) if newer else {}

    async def _check_missing(self, cluster: Cluster, missing: Iterable[TopicPartition]) -> None:
        """Raise a KafkaError that passes where the broker that was asked may lag behind: another may have them.

        A stream that drops a partition would read it again from its log start when the partition is back.
        """
        still_read = selected(self._options, missing)
        if not still_read:
            return
        try:
            await check_gone(cluster, still_read, self._topic_ids)
        except KafkaError:
            cluster.close_connections()
            if self._target is not None:
                with contextlib.suppress(MissingPartition):  # the next attempt asks again
                    self._target = await find_ends(cluster, self._options)
            raise

    async def _find_ends(self, cluster: Cluster, start: Mapping[TopicPartition, int]) -> PresentEnds:
        """The ends at this time, asked again where one is before `start`: a new leader may not know
        yet what is committed.
        """
        options = self._options
        for attempt in range(options.fetch_offset_retries + 1):
            if attempt:
                await asyncio.sleep(options.fetch_offset_retry_interval_ms / 1000)
            present = await find_ends(cluster, options)
            if self._target is not None:
                present = target_ends(self._target, present)
            if self._target is not None or options.consumer.isolation_level == "read_committed":
                present = await ends_after(cluster, options, present, start)
            is_behind = any(
                end < start.get(partition, end) and self.topic_id(partition.topic) in (NO_TOPIC_ID, topic_id)
                for partition, end in present.offsets.items()
                if (topic_id := present.topic_ids.get(partition.topic))
            )
            if self._target is not None or not is_behind:
                break
        return present

    def reported_offset(self) -> StreamOffset | None:
        """The ends of the logs as of the last `latest_offset`."""
        return to_offset(self._latest) if self._latest else None

    def _is_first(self, start: StreamOffset) -> bool:
        """Whether the micro-batch from `start` on is the first of the query.

        It can be only before `latest_offset` is called.
        """
        return not self._has_looked and start == self._first_offset

    # -- micro-batches

    def ranges(self, start: StreamOffset, end: StreamOffset) -> list[OffsetRange]:
        """The ranges of one micro-batch, one for each task."""
        options = self._options
        begins: Mapping[TopicPartition, int] = from_offset(start)
        ends = from_offset(end)
        if self._first is not None and self._is_first(start):
            self._has_run_again = True
            if (refusal := self._first.refusal) is not None:
                if not self._first.without_start.isdisjoint(ends):
                    raise refusal
                logger.warning("the first micro-batch runs again; a new query would be refused: %s", refusal)
            begins = replayed_start(begins, ends, self._first.at_end, options.may_begin_later)
            self._warn_of_removed_records(begins, ends)
        ranges, new_partitions, losses = ranges_between(begins, ends)
        self._report(losses)
        if new_partitions:
            ranges = self._begin_at_log_start(ranges, new_partitions)
        return plan_ranges(ranges, options.min_partitions, options.max_records_per_partition)

    def _warn_of_removed_records(
        self, begins: Mapping[TopicPartition, int], ends: Mapping[TopicPartition, int]
    ) -> None:
        """Whether retention has removed records of the first micro-batch since is not known: its start is not kept."""
        moved = self._first.trimmed if self._first is not None else ()
        names = [f"{each} at {begins[each]}" for each in sorted(moved) if begins.get(each, 0) < ends.get(each, 0)]
        if names:
            logger.warning(
                "the first micro-batch runs again from where the logs begin now: %s. Records that retention has "
                "removed since its first run are lost",
                join_some(names),
            )

    def _begin_at_log_start(
        self, ranges: Sequence[OffsetRange], new_partitions: Sequence[TopicPartition]
    ) -> tuple[OffsetRange, ...]:
        async def find(cluster: Cluster) -> Mapping[TopicPartition, int]:
            log_starts = await find_log_starts(cluster, self._options, new_partitions)
            await self._check_missing(cluster, [each for each in new_partitions if each not in log_starts])
            return log_starts

        log_starts = self._run(find)
        self._report(
            [f"{each} is gone" for each in new_partitions if each not in log_starts]
            + [f"the new {each} begins at {start} instead of 0" for each, start in sorted(log_starts.items()) if start]
        )
        begun = []
        for each in ranges:
            partition = TopicPartition(each.topic, each.partition)
            log_start = log_starts.get(partition, each.end) if partition in new_partitions else 0
            begun.append(each._replace(start=min(each.end, max(each.start, log_start))))
        return tuple(begun)

    def topic_id(self, topic: str) -> bytes:
        """The id of the topic as of the last `latest_offset`; zeros where it is not known."""
        return self._topic_ids.get(topic, NO_TOPIC_ID)

    def commit(self, end: StreamOffset) -> None:
        """Spark has processed everything before `end`."""
        self._commit(end)

    def _commit(self, offset: StreamOffset) -> None:
        """Commit the progress for the group of `commitOffsetsToGroup`.

        A group that refuses the first commit is an error: it may have members. Later errors are
        warnings, since the stream itself does not need the commits. An idle stream comes here every few
        milliseconds: it tries again when the commits have failed for twice as long.
        """
        offsets, begin_ms = from_offset(offset), self._now_ms()
        is_due = offset != self._committed and begin_ms >= self._next_commit_ms
        if not self._options.commit_group or not offsets or not is_due:
            return
        try:
            self._run(lambda cluster: commit_offsets(cluster, self._options, offsets), with_retries=False)
        except KafkaError as error:
            group = self._options.commit_group
            if self._committed is None and not error.retriable:
                hint = f": {error.message}" if error.message else ""
                if error.code is ErrorCode.UNKNOWN_MEMBER_ID:
                    hint = "; it has members"
                raise KafkaError(error.code, f"commitOffsetsToGroup: group {group!r} takes no commits{hint}") from None
            logger.warning("the progress of the stream could not be committed for group %r: %s", group, error)
            if self._commits_fail_since_ms is None:
                self._commits_fail_since_ms = begin_ms
            now_ms = self._now_ms()
            self._next_commit_ms = now_ms + min(now_ms - self._commits_fail_since_ms, _COMMIT_PAUSE_MS_MAX)
            return
        self._committed, self._commits_fail_since_ms = dict(offset), None

    def _report(self, losses: Sequence[str], advice: str = "") -> None:
        if losses and self._options.fail_on_data_loss:
            more = f"; and {len(losses) - 3} more" if len(losses) > 3 else ""
            raise DataLoss("; ".join(losses[:3]) + more + advice)
        for loss in losses:
            logger.warning("%s; the stream goes on with what is left", loss)

    # -- the cluster

    def _run(self, call: Callable[[Cluster], Coroutine[Any, Any, Result]], *, with_retries: bool = True) -> Result:
        """Run the call in the thread that keeps the connections, and wait for its result."""
        if self._thread is None:
            self._thread = LoopThread()

        async def run() -> Result:
            if self._cluster is None:
                cluster = Cluster(self._options.consumer)
                cluster.keeps_broker = True  # brokers that take turns could contradict each other
                await cluster.start()
                self._cluster = cluster
            try:
                return await call(self._cluster)
            except MissingPartition as missing:
                await self._check_missing(self._cluster, [missing.partition])
                raise

        return self._thread.run(self._retry(run) if with_retries else run())

    async def _retry(self, attempt: Callable[[], Coroutine[Any, Any, Result]]) -> Result:
        """Try again after errors that pass, as while a broker is down: a stream must outlive them."""
        loop = asyncio.get_running_loop()
        config = self._options.consumer
        deadline = loop.time() + config.default_api_timeout_ms / 1000
        backoff = ExponentialBackoff(config.retry_backoff_ms, config.retry_backoff_max_ms, random.Random())
        failures = 0
        while True:
            try:
                return await attempt()
            except KafkaError as error:
                failures += 1
                wait_s = backoff.wait_ms(failures) / 1000
                # Another look finds what is there without a topic that is gone. All brokers have confirmed a
                # MissingPartition.
                is_passing = error.retriable and not isinstance(error, MissingPartition)
                if not is_passing or loop.time() + wait_s > deadline:
                    raise
                logger.warning("the cluster is asked again: %s", error)
                await asyncio.sleep(wait_s)

    def close(self) -> None:
        """Close the connections and end the thread."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        cluster, self._cluster = self._cluster, None
        try:
            if cluster is not None:
                thread.run(cluster.close())
        finally:
            thread.stop()
