"""Fetches for a consumer: one request in flight per broker, one answer ahead of what is being read.

Here: fetch requests and sessions, leaders, errors of partitions. Records wait in `FetchBuffer`, positions are
`Subscription`'s. Invariants: per broker there are at most two answers, unread or on their way, so memory is bounded by
twice `fetch_max_bytes` per broker, and besides that two answers of each partition that was paused before they were
read; records are handed out only for the position at which they continue, so what was fetched before a seek or a
rebalance is dropped. All of a broker's partitions are in every request: a quiet one never holds up a busy one, as it
would if only the quiet ones were asked for and the broker waited for them.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Collection
from functools import partial

from tidelog.client.config import ConsumerConfig
from tidelog.client.consuming.completed_fetch import CompletedFetch
from tidelog.client.consuming.fetch_buffer import FetchBuffer
from tidelog.client.consuming.fetch_session import CLOSE_SESSION, FetchPlan, FetchSession, FetchTarget
from tidelog.client.consuming.subscription import Subscription
from tidelog.client.model import EARLIEST_TIMESTAMP, LATEST_TIMESTAMP, ConsumerRecord, TopicPartition
from tidelog.client.network.cluster import Cluster
from tidelog.client.network.connection import Connection
from tidelog.client.network.metadata import NO_TOPIC_ID
from tidelog.client.network.offsets import ISOLATION
from tidelog.protocol.errors import ErrorCode, KafkaError
from tidelog.protocol.messages.fetch import (
    FetchPartition,
    FetchRequest,
    FetchResponse,
    FetchTopic,
    ForgottenTopic,
    PartitionData,
)

logger = logging.getLogger(__name__)

_NEWEST_BY_NAME = 12
_DIVERGENCE_FROM = 12
_ANSWERS_PER_NODE = 2
RESET_TIMESTAMPS = {"earliest": EARLIEST_TIMESTAMP, "latest": LATEST_TIMESTAMP}


class _NodeFetches:
    """One broker: the session with it, and the answers not yet read to the end."""

    __slots__ = ("answers", "in_flight", "node_id", "retry_at_ms", "session")

    def __init__(self, node_id: int) -> None:
        self.node_id = node_id
        self.session = FetchSession()
        self.in_flight = False
        self.answers: deque[list[CompletedFetch]] = deque()
        self.retry_at_ms = 0.0


class Fetcher:
    """One per consumer. `pump` sends what can be sent; `on_news` is called when data or an error came."""

    def __init__(
        self, cluster: Cluster, config: ConsumerConfig, subscription: Subscription, on_news: Callable[[], None]
    ) -> None:
        self._cluster = cluster
        self._config = config
        self._subscription = subscription
        self._on_news = on_news
        self._loop = asyncio.get_running_loop()
        self._nodes: dict[int, _NodeFetches] = {}
        self._buffer = FetchBuffer(subscription)
        self._timer: asyncio.TimerHandle | None = None
        self._rest_until_ms = 0.0
        self._closed = False

    # -- asking

    def pump(self) -> None:
        """Send a fetch to every broker that a fetchable partition is read from and that owes nothing."""
        if self._closed:
            return
        now_ms = self._loop.time() * 1000
        if now_ms < self._rest_until_ms:
            self._pump_later(self._rest_until_ms - now_ms)  # a timer may be early by the grain of the loop's clock
        by_source: dict[int, list[TopicPartition]] = {}
        for partition in self._subscription.fetchable(now_ms):
            # What waited while its partition was paused does not count against its broker, but against the partition.
            if partition not in self._buffer.problems and self._buffer.count(partition) < _ANSWERS_PER_NODE:
                by_source.setdefault(self._source(partition, now_ms), []).append(partition)
        if by_source.pop(-1, None):
            self._cluster.request_refresh()
            self._pump_later(self._config.retry_backoff_ms)
        for node_id, partitions in by_source.items():
            node = self._nodes.get(node_id)
            if node is None:
                node = self._nodes[node_id] = _NodeFetches(node_id)
            self._drop_read(node)
            if node.in_flight or len(node.answers) >= _ANSWERS_PER_NODE:
                continue
            if node.retry_at_ms > now_ms:
                self._pump_later(node.retry_at_ms - now_ms)
                continue
            connection = self._cluster.ready(node_id)
            if connection is None:
                node.in_flight = True
                self._cluster.attempt(node_id).add_done_callback(partial(self._connected, node))
            else:
                self._fetch(node, connection, partitions)

    def _source(self, partition: TopicPartition, now_ms: float) -> int:
        """The leader, or the replica that it named while that can be used (KIP-392); -1 where there is neither."""
        state, metadata = self._subscription.assigned[partition], self._cluster.metadata
        replica = state.read_replica
        if replica >= 0:
            if now_ms < state.read_replica_until_ms and metadata.is_online(partition, replica):
                return replica
            state.read_replica = -1
        return metadata.leader(partition)

    def _leave_replica(self, node_id: int) -> None:
        """A broker that cannot be fetched from: those who read from it as a replica turn to the leaders."""
        for state in self._subscription.assigned.values():
            if state.read_replica == node_id:
                state.read_replica = -1

    def _connected(self, node: _NodeFetches, attempt: asyncio.Task[Connection]) -> None:
        node.in_flight = False
        if attempt.cancelled() or attempt.exception() is not None:
            self._leave_replica(node.node_id)
            self._pump_later(self._config.reconnect_backoff_ms)
        else:
            self.pump()

    def _pump_later(self, wait_ms: float) -> None:
        at = self._loop.time() + wait_ms / 1000
        if self._timer is not None and not self._timer.cancelled() and self._loop.time() < self._timer.when() <= at:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_at(at, self.pump)

    def _fetch(self, node: _NodeFetches, connection: Connection, partitions: list[TopicPartition]) -> None:
        metadata, config = self._cluster.metadata, self._config
        targets = {}
        for partition in partitions:
            offset, epoch = self._buffer.end(partition)
            targets[partition] = FetchTarget(
                metadata.topic_id(partition.topic),
                offset,
                metadata.leader_epoch(partition),
                # A follower may not have heard of an epoch in which nothing was written.
                epoch if node.node_id == metadata.leader(partition) else -1,
                config.max_partition_fetch_bytes,
            )
        try:
            version = connection.version_of(FetchRequest)
            if version > _NEWEST_BY_NAME and any(target.topic_id == NO_TOPIC_ID for target in targets.values()):
                version = connection.version_of(FetchRequest, _NEWEST_BY_NAME)
            plan = node.session.plan(targets)
            request = self._request(plan, version)
            timeout_ms = config.request_timeout_ms + config.fetch_max_wait_ms
            answer = connection.send(request, FetchResponse, version, timeout_ms)
        except KafkaError as error:
            self._failed(node, error)
            return
        node.in_flight = True
        answer.add_done_callback(partial(self._answered, node, targets, version))

    def _request(self, plan: FetchPlan, version: int) -> FetchRequest:
        topics: dict[str, FetchTopic] = {}
        for partition, target in plan.to_send.items():
            topic = topics.setdefault(partition.topic, FetchTopic(topic=partition.topic, topic_id=target.topic_id))
            topic.partitions.append(
                FetchPartition(
                    partition=partition.partition,
                    current_leader_epoch=target.leader_epoch,
                    fetch_offset=target.offset,
                    last_fetched_epoch=target.last_fetched_epoch if version >= _DIVERGENCE_FROM else -1,
                    partition_max_bytes=target.max_bytes,
                )
            )
        forgotten: dict[tuple[str, bytes], ForgottenTopic] = {}
        for partition, topic_id in plan.to_forget:
            key = (partition.topic, topic_id)
            gone = forgotten.setdefault(key, ForgottenTopic(topic=partition.topic, topic_id=topic_id))
            gone.partitions.append(partition.partition)
        config = self._config
        return FetchRequest(
            max_wait_ms=config.fetch_max_wait_ms,
            min_bytes=config.fetch_min_bytes,
            max_bytes=config.fetch_max_bytes,
            isolation_level=ISOLATION[config.isolation_level],
            session_id=plan.session_id,
            session_epoch=plan.epoch,
            topics=list(topics.values()),
            forgotten_topics_data=list(forgotten.values()),
            rack_id=config.client_rack,
        )

    # -- hearing

    def _answered(
        self,
        node: _NodeFetches,
        targets: dict[TopicPartition, FetchTarget],
        version: int,
        answer: asyncio.Future[FetchResponse],
    ) -> None:
        node.in_flight = False
        problem = None if answer.cancelled() else answer.exception()
        if self._closed or answer.cancelled():
            return
        if problem is not None:
            self._failed(node, problem)
            return
        response = answer.result()
        code = ErrorCode.of(response.error_code)
        if version >= 7:
            node.session.answered(code, response.session_id)
        if code is not ErrorCode.NONE:
            self._failed(node, KafkaError(code, "the fetch was refused"))
            return
        if response.throttle_time_ms > 0:
            node.retry_at_ms = self._loop.time() * 1000 + response.throttle_time_ms
        names = {target.topic_id: partition.topic for partition, target in targets.items()}
        completed = []
        for topic in response.responses:
            name = names.get(topic.topic_id, "") if version > _NEWEST_BY_NAME else topic.topic
            for data in topic.partitions:
                partition = TopicPartition(name, data.partition_index)
                if partition in targets:
                    fetched = self._take_in(node, partition, targets[partition].offset, data)
                    if fetched is not None:
                        completed.append(fetched)
        if completed:
            node.answers.append(completed)
        if completed or self._buffer.problems:
            self._on_news()
        self.pump()

    def _failed(self, node: _NodeFetches, problem: BaseException) -> None:
        if not isinstance(problem, KafkaError):
            raise problem
        logger.debug("a fetch failed: %s", problem)
        if problem.code is ErrorCode.UNSUPPORTED_VERSION:
            for partition in self._subscription.assigned:
                self._buffer.problems[partition] = problem
            self._on_news()
            return
        in_session = problem.code in (ErrorCode.FETCH_SESSION_ID_NOT_FOUND, ErrorCode.INVALID_FETCH_SESSION_EPOCH)
        if not in_session:
            self._leave_replica(node.node_id)
            node.session.failed()
            self._cluster.request_refresh()
            node.retry_at_ms = self._loop.time() * 1000 + self._config.retry_backoff_ms
        self.pump()

    def _take_in(
        self, node: _NodeFetches, partition: TopicPartition, offset: int, data: PartitionData
    ) -> CompletedFetch | None:
        state = self._subscription.assigned.get(partition)
        if state is None or state.position < 0 or state.unvalidated or offset != self._buffer.end(partition)[0]:
            return None  # asked for before a seek, a pause, a rebalance or a change of leader
        code = ErrorCode.of(data.error_code)
        if code is not ErrorCode.NONE:
            self._partition_failed(node, partition, offset, code)
            return None
        if data.diverging_epoch.epoch >= 0:
            if self._buffer.holds(partition):
                self._buffer.discard((partition,))  # fetched ahead: perhaps only that is gone, so ask from the position
            else:
                self.diverged(partition, data.diverging_epoch.epoch, data.diverging_epoch.end_offset)
            return None
        if data.preferred_read_replica >= 0 and data.preferred_read_replica != node.node_id:
            state.read_replica = data.preferred_read_replica
            state.read_replica_until_ms = self._loop.time() * 1000 + self._config.metadata_max_age_ms
        state.high_watermark = data.high_watermark
        state.last_stable_offset = data.last_stable_offset
        state.log_start_offset = data.log_start_offset
        if not data.records:
            return None
        aborted = [(each.producer_id, each.first_offset) for each in data.aborted_transactions or ()]
        config = self._config
        try:
            fetched = CompletedFetch(
                partition,
                offset,
                data.records,
                aborted if config.isolation_level == "read_committed" else (),
                high_watermark=data.high_watermark,
                check_crcs=config.check_crcs,
                key_convert=config.key_deserializer,
                value_convert=config.value_deserializer,
            )
        except KafkaError as error:
            self._buffer.problems[partition] = error
            return None
        if fetched.exhausted:
            self._buffer.problems[partition] = KafkaError(
                ErrorCode.MESSAGE_TOO_LARGE,
                f"{partition}: the batch at {offset} is larger than max_partition_fetch_bytes",
            )
            return None
        self._buffer.add(fetched)
        return fetched

    def diverged(self, partition: TopicPartition, epoch: int, end_offset: int) -> None:
        """The leader has no such record before the position as the one that was read (see `Subscription.diverged`)."""
        before = self._subscription.assigned[partition].position
        problem = self._subscription.diverged(
            partition, epoch, end_offset, RESET_TIMESTAMPS.get(self._config.auto_offset_reset)
        )
        after = self._subscription.assigned[partition].position
        if problem is not None:
            self.fail(partition, problem)
        elif after != before:
            self.discard((partition,))
            where = f"back to {after}" if after >= 0 else f"reset to {self._config.auto_offset_reset}"
            logger.warning("%s was truncated below %d by an unclean election: %s", partition, before, where)
            self._on_news()

    def fail(self, partition: TopicPartition, problem: KafkaError) -> None:
        """Have the next poll raise it; the partition is not fetched from until then."""
        self._buffer.problems[partition] = problem
        self._on_news()

    def has_problem(self, partition: TopicPartition) -> bool:
        return partition in self._buffer.problems

    def _partition_failed(self, node: _NodeFetches, partition: TopicPartition, offset: int, code: ErrorCode) -> None:
        self._subscription.assigned[partition].read_replica = -1
        if code is ErrorCode.OFFSET_OUT_OF_RANGE:
            if node.node_id != self._cluster.metadata.leader(partition):
                # A follower that lags, or who led before: only the leader's word moves a position.
                self._cluster.request_refresh()
                self._rest(partition)  # the leader may name the same replica again
                return
            if self._buffer.holds(partition):
                self._rest(partition)  # read first what is there; a later fetch says it again
                return
            timestamp = RESET_TIMESTAMPS.get(self._config.auto_offset_reset)
            if timestamp is None:
                self._buffer.problems[partition] = KafkaError(
                    code, f"{partition} has no offset {offset}, auto_offset_reset=none"
                )
            else:
                logger.info("%s has no offset %d: reset to %s", partition, offset, self._config.auto_offset_reset)
                self._subscription.ask_reset(partition, timestamp)
                self._on_news()
            return
        if not code.retriable and code is not ErrorCode.UNKNOWN_SERVER_ERROR:
            self._buffer.problems[partition] = KafkaError(code, f"fetch of {partition}")
            return
        if code.invalidates_metadata:
            self._cluster.request_refresh()
        self._rest(partition)

    def _rest(self, partition: TopicPartition) -> None:
        wait_ms = self._config.retry_backoff_ms
        self._rest_until_ms = self._loop.time() * 1000 + wait_ms
        self._subscription.assigned[partition].retry_at_ms = self._rest_until_ms
        self._pump_later(wait_ms)

    # -- handing out

    def take(self, limit: int) -> dict[TopicPartition, list[ConsumerRecord]]:
        """Up to `limit` records by partition, and positions move behind them. Raises as `FetchBuffer.take`."""
        return self._buffer.take(limit)

    def _drop_read(self, node: _NodeFetches) -> None:
        while node.answers and not any(self._buffer.holds_unread(fetched) for fetched in node.answers[0]):
            node.answers.popleft()

    def discard(self, partitions: Collection[TopicPartition]) -> None:
        """Forget what was fetched of these partitions, as after a seek."""
        self._buffer.discard(partitions)

    def keep_only(self, partitions: Collection[TopicPartition]) -> None:
        """Forget everything else, as after a rebalance."""
        self._buffer.keep_only(partitions)

    # -- the end

    def close(self) -> None:
        """Tell the brokers that the sessions are over, without waiting for their answers."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        for node_id, node in self._nodes.items():
            connection = self._cluster.ready(node_id)
            if node.session.session_id and connection is not None:
                try:
                    request = FetchRequest(session_id=node.session.session_id, session_epoch=CLOSE_SESSION)
                    version = connection.version_of(FetchRequest)
                    connection.send(request, FetchResponse, version, 1000).add_done_callback(_ignore)
                except KafkaError:
                    pass
        self._nodes.clear()
        self._buffer.keep_only(())


def _ignore(answer: asyncio.Future[FetchResponse]) -> None:
    if not answer.cancelled():
        answer.exception()
