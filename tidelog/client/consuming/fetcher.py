"""Fetches for a consumer: one request in flight per broker, one response ahead of the reader.

Here: fetch requests and sessions, leaders, errors of partitions. Records wait in `FetchBuffer`;
`Subscription` holds the positions. Invariants: per broker at most two responses are unread or in
flight, so memory is bounded by twice `fetch_max_bytes` per broker; two responses of each partition
that was paused before they were read come on top. Records are handed out only when they continue at
the position, so records fetched before a seek or a rebalance are dropped. Every request names all
partitions of the broker: a request for the quiet partitions alone would wait at the broker and hold
up the busy ones.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

from tidelog.client.client_logging import client_logger
from tidelog.client.config import ConsumerConfig
from tidelog.client.consuming.completed_fetch import CompletedFetch
from tidelog.client.consuming.fetch_buffer import FetchBuffer
from tidelog.client.consuming.fetch_session import CLOSE_SESSION, FetchPlan, FetchSession, FetchTarget
from tidelog.client.consuming.record_decoder import RecordDecoder
from tidelog.client.consuming.subscription import PartitionState, Subscription
from tidelog.client.model import ConsumerRecord, TopicPartition
from tidelog.client.network.cluster import Cluster
from tidelog.client.network.connection import AnswerTooLarge, Connection
from tidelog.client.network.metadata import EMPTY, NO_TOPIC_ID, ClusterMetadata
from tidelog.client.network.offsets import ISOLATION
from tidelog.client.network.outcomes import retrieve_exception
from tidelog.protocol.batches.compression import DEFAULT_MAX_BYTES
from tidelog.protocol.errors import ErrorCode, KafkaError
from tidelog.protocol.messages.fetch import (
    FIRST_VERSION_WITH_DIVERGENCE,
    LAST_VERSION_WITH_NAMES,
    FetchPartition,
    FetchRequest,
    FetchResponse,
    FetchTopic,
    ForgottenTopic,
    PartitionData,
)

if TYPE_CHECKING:
    import pyarrow as pa

logger = client_logger(__name__)

_RESPONSES_PER_NODE = 2
_ANSWER_BYTES, _ANSWER_PARTITION_BYTES = 512, 128
"""About how many bytes an answer has besides its records: once, and for each partition. Not counted are 16 bytes for
each aborted transaction that it lists.
"""
_TOO_LARGE_DIVISOR = 16
_MAX_BYTES_MAX = 2**31 - 1
_LARGE_ANSWER_BYTES = 256 * 1024
"""More than a broker's send buffer holds by default."""


class _NodeFetches:
    """The fetch session with one broker, and its responses that are not read to the end."""

    __slots__ = (
        "answers_are_large", "apart", "asked_bytes", "in_flight", "is_for_all", "max_bytes", "metadata", "node_id",
        "responses", "retry_at_ms", "session", "targets", "was_apart",
    )  # fmt: skip

    def __init__(self, node_id: int) -> None:
        self.node_id = node_id
        self.session = FetchSession()
        self.in_flight = False
        self.answers_are_large = False
        """The last one was."""
        self.responses: deque[deque[CompletedFetch]] = deque()
        self.retry_at_ms = 0.0
        self.asked_bytes = 0
        """The most records that the last request has asked for."""
        self.max_bytes = _MAX_BYTES_MAX
        """The most records to ask for. Less after an answer that was too large to receive, until larger ones fit."""
        self.apart: dict[TopicPartition, None] = {}
        """The partitions to fetch by themselves, a batch at a time, until that fits: one of them may have a batch that
        is too large to receive, which would end the fetches of all. Those that have failed last come last.
        """
        self.was_apart = False
        """The last fetch was one of these. The next one is for the others: many that fail would hold them up."""
        self.is_for_all = False
        """The last fetch was for all partitions that were due."""
        self.targets: dict[TopicPartition, FetchTarget] = {}
        """Those of the last fetch, which were made with `metadata`."""
        self.metadata = EMPTY


class Fetcher:
    """The fetcher of one consumer.

    `send_fetches` sends due fetches; `on_update` follows data or an error.
    """

    def __init__(
        self, cluster: Cluster, config: ConsumerConfig, subscription: Subscription, on_update: Callable[[], None]
    ) -> None:
        self._cluster = cluster
        self._config = config
        self._subscription = subscription
        self._on_update = on_update
        self._loop = asyncio.get_running_loop()
        self._nodes: dict[int, _NodeFetches] = {}
        self._sources: dict[int, dict[TopicPartition, None]] = {}
        """By broker, the partitions that may be fetched from it: those that it leads in these metadata and this
        assignment, which are replaced as a whole, and those for which a leader has named it. -1: no leader is known.
        Without those that were paused when they were last looked at.
        """
        self._seen_state: tuple[ClusterMetadata, Mapping[TopicPartition, PartitionState]] = (EMPTY, {})
        self._buffer = FetchBuffer(subscription, self._back_off)
        self.decoder = RecordDecoder(max(DEFAULT_MAX_BYTES, config.receive_message_max_bytes))
        self.records_taken = 0
        """Records that were returned, in total."""
        self._timer: asyncio.TimerHandle | None = None
        self._timer_due_s = 0.0  # uvloop's handle of a time that is past has no `when`
        self._backoff_until_ms = 0.0
        self._closed = False

    # -- requests

    def send_fetches(self) -> None:
        """Send a fetch to every broker that has a fetchable partition and no fetch in flight."""
        if self._closed:
            return
        now_ms = self._loop.time() * 1000
        if now_ms < self._backoff_until_ms:
            # A timer may fire early by the resolution of the loop's clock.
            self._schedule_send(self._backoff_until_ms - now_ms)
        by_source: dict[int, list[TopicPartition]] = {}
        for partition in self._subscription.fetchable_partitions(self._partitions_of_idle_sources(), now_ms):
            # Responses that wait for a paused partition count against the partition, not against
            # the broker.
            if partition not in self._buffer.errors and self._buffer.fetch_count(partition) < _RESPONSES_PER_NODE:
                by_source.setdefault(self._node_to_fetch_from(partition, now_ms), []).append(partition)
        if by_source.pop(-1, None):
            self._cluster.request_leaders()
            self._schedule_send(self._config.retry_backoff_ms)
        for node_id, partitions in by_source.items():
            node = self._nodes.get(node_id)
            if node is None:
                node = self._nodes[node_id] = _NodeFetches(node_id)
            if self._is_busy(node):
                continue
            if node.retry_at_ms > now_ms:
                self._schedule_send(node.retry_at_ms - now_ms)
                continue
            connection = self._cluster.ready(node_id)
            if connection is None:
                node.in_flight = True
                self._cluster.start_connecting(node_id).add_done_callback(partial(self._handle_connection, node))
            else:
                self._fetch(node, connection, self._to_fetch(node, partitions))

    def _partitions_of_idle_sources(self) -> Collection[TopicPartition]:
        """The partitions that may be fetched from a broker that is not busy. Every poll sends fetches: it must not look
        at each of thousands of partitions for a record or two.
        """
        metadata, assigned = self._cluster.metadata, self._subscription.assigned
        changed: Iterable[TopicPartition] = self._subscription.pause_changes
        if metadata is not self._seen_state[0] or assigned is not self._seen_state[1]:
            self._seen_state = metadata, assigned
            self._sources = {}
            changed = assigned
        for partition in changed:
            state = assigned[partition]
            if state.paused:
                for partitions in self._sources.values():
                    partitions.pop(partition, None)
            else:
                self._sources.setdefault(metadata.leader(partition), {})[partition] = None
                if state.read_replica >= 0:
                    self._sources.setdefault(state.read_replica, {})[partition] = None
        self._subscription.pause_changes.clear()
        idle: dict[TopicPartition, None] = {}
        for node_id, partitions in self._sources.items():
            node = self._nodes.get(node_id)
            if node is None or not self._is_busy(node):
                idle.update(partitions)
        return idle

    def _is_busy(self, node: _NodeFetches) -> bool:
        """Whether as much is on its way from this broker, or unread, as may be."""
        if not node.in_flight:
            self._drop_finished_responses(node)
        return node.in_flight or len(node.responses) >= _RESPONSES_PER_NODE

    def _to_fetch(self, node: _NodeFetches, partitions: list[TopicPartition]) -> list[TopicPartition]:
        """Those of the partitions that are due which the next request is for."""
        due = set(partitions) if node.apart else set()
        apart = [partition for partition in node.apart if partition in due]
        node.is_for_all = not apart
        others = [partition for partition in partitions if partition not in node.apart] if apart else partitions
        node.was_apart = bool(apart) and not (node.was_apart and others)
        return apart[:1] if node.was_apart else others

    def _node_to_fetch_from(self, partition: TopicPartition, now_ms: float) -> int:
        """The preferred read replica while usable (KIP-392), else the leader; -1 without one.

        -1 also if the metadata do not have the replica: the leader, which knows newer ones, would name it again at
        once. The caller has the metadata refreshed, and tries again later.
        """
        state, metadata = self._subscription.assigned[partition], self._cluster.metadata
        replica = state.read_replica
        if replica >= 0:
            is_online = metadata.is_online(partition, replica)
            if is_online and now_ms < state.read_replica_until_ms:
                return replica
            state.read_replica = -1
            if not is_online:
                return -1
        return metadata.leader(partition)

    def _clear_read_replica(self, node_id: int) -> None:
        """After a failed fetch, let partitions that read from this replica return to leaders."""
        for state in self._subscription.assigned.values():
            if state.read_replica == node_id:
                state.read_replica = -1

    def _handle_connection(self, node: _NodeFetches, task: asyncio.Task[Connection]) -> None:
        node.in_flight = False
        if task.cancelled() or task.exception() is not None:
            self._clear_read_replica(node.node_id)
            self._schedule_send(self._config.reconnect_backoff_ms)
        else:
            self.send_fetches()

    def _schedule_send(self, wait_ms: float) -> None:
        due_s = self._loop.time() + wait_ms / 1000
        if self._timer is not None:
            if self._timer_due_s <= due_s and not self._timer.cancelled():
                return
            self._timer.cancel()
        self._timer_due_s = due_s
        self._timer = self._loop.call_at(due_s, self._on_timer)

    def _on_timer(self) -> None:
        # The loop's clock may still show a time before `when`, so only this tells that the timer has fired.
        self._timer = None
        self.send_fetches()
        self._on_update()  # a reset may be due, which a poll begins

    def _fetch(self, node: _NodeFetches, connection: Connection, partitions: list[TopicPartition]) -> None:
        metadata, config = self._cluster.metadata, self._config
        # Most of thousands of partitions have no new records, and keep their targets: new ones take 2 us each.
        known = node.targets if node.metadata is metadata else {}
        targets: dict[TopicPartition, FetchTarget] = {}
        for partition in partitions:
            offset, epoch = self._buffer.fetch_position(partition)
            target = known.get(partition)
            if target is None or target.offset != offset or target.last_fetched_epoch != epoch:
                target = FetchTarget(
                    metadata.topic_id(partition.topic),
                    offset,
                    metadata.leader_epoch(partition),
                    # A follower may not have an epoch in which nothing was written.
                    epoch if node.node_id == metadata.leader(partition) else -1,
                    config.max_partition_fetch_bytes,
                )
            targets[partition] = target
        node.targets, node.metadata = targets, metadata
        try:
            version = connection.version_of(FetchRequest)
            if version > LAST_VERSION_WITH_NAMES and any(target.topic_id == NO_TOPIC_ID for target in targets.values()):
                version = connection.version_of(FetchRequest, LAST_VERSION_WITH_NAMES)
            plan = node.session.plan(targets)
            node.asked_bytes = 1 if node.was_apart else self._max_bytes(node, len(targets))
            max_wait_ms = config.fetch_max_wait_ms if node.is_for_all else 0
            request = self._request(plan, version, node.asked_bytes, max_wait_ms)
            timeout_ms = config.request_timeout_ms + config.fetch_max_wait_ms
            response_future = connection.send(request, FetchResponse, version, timeout_ms)
        except KafkaError as error:
            self._handle_failure(node, targets, error)
            return
        node.in_flight = True
        response_future.add_done_callback(partial(self._handle_response, node, targets, version))

    def _max_bytes(self, node: _NodeFetches, partitions: int) -> int:
        """The most records to ask for, so that the connection can receive the answer."""
        room = self._config.receive_message_max_bytes - _ANSWER_BYTES - partitions * _ANSWER_PARTITION_BYTES
        return max(1, min(self._config.fetch_max_bytes, room, node.max_bytes))

    def _request(self, plan: FetchPlan, version: int, max_bytes: int, max_wait_ms: int) -> FetchRequest:
        topics: dict[str, FetchTopic] = {}
        for partition, target in plan.to_send.items():
            topic = topics.setdefault(partition.topic, FetchTopic(topic=partition.topic, topic_id=target.topic_id))
            topic.partitions.append(
                FetchPartition(
                    partition=partition.partition,
                    current_leader_epoch=target.leader_epoch,
                    fetch_offset=target.offset,
                    last_fetched_epoch=target.last_fetched_epoch if version >= FIRST_VERSION_WITH_DIVERGENCE else -1,
                    partition_max_bytes=target.max_bytes,
                )
            )
        forgotten: dict[tuple[str, bytes], ForgottenTopic] = {}
        for partition, topic_id in plan.to_forget:
            key = (partition.topic, topic_id)
            topic_to_forget = forgotten.setdefault(key, ForgottenTopic(topic=partition.topic, topic_id=topic_id))
            topic_to_forget.partitions.append(partition.partition)
        config = self._config
        return FetchRequest(
            max_wait_ms=max_wait_ms,
            min_bytes=config.fetch_min_bytes,
            max_bytes=max_bytes,
            isolation_level=ISOLATION[config.isolation_level],
            session_id=plan.session_id,
            session_epoch=plan.epoch,
            topics=list(topics.values()),
            forgotten_topics_data=list(forgotten.values()),
            rack_id=config.client_rack,
        )

    # -- responses

    def _handle_response(
        self,
        node: _NodeFetches,
        targets: dict[TopicPartition, FetchTarget],
        version: int,
        response_future: asyncio.Future[FetchResponse],
    ) -> None:
        node.in_flight = False
        error = None if response_future.cancelled() else response_future.exception()
        if self._closed or response_future.cancelled():
            return
        if error is not None:
            if isinstance(error, AnswerTooLarge):
                self._handle_too_large(node, targets, error)
            self._handle_failure(node, targets, error)
            return
        if node.is_for_all:
            node.max_bytes = min(2 * node.max_bytes, _MAX_BYTES_MAX)
        response = response_future.result()
        code = ErrorCode.of(response.error_code)
        if version >= 7:
            node.session.handle_response(code, response.session_id)
        if code is not ErrorCode.NONE:
            self._handle_failure(node, targets, KafkaError(code, "the fetch was refused"))
            return
        if response.throttle_time_ms > 0:
            node.retry_at_ms = self._loop.time() * 1000 + response.throttle_time_ms
        for partition in targets if node.apart else ():
            node.apart.pop(partition, None)
        names = {target.topic_id: partition.topic for partition, target in targets.items()}
        completed: deque[CompletedFetch] = deque()
        for topic in response.responses:
            name = names.get(topic.topic_id, "") if version > LAST_VERSION_WITH_NAMES else topic.topic
            for data in topic.partitions:
                partition = TopicPartition(name, data.partition_index)
                if partition in targets and self._subscription.is_of_topic(partition, targets[partition].topic_id):
                    completed_fetch = self._accept_partition(node, partition, targets[partition].offset, data)
                    if completed_fetch is not None:
                        completed.append(completed_fetch)
        node.answers_are_large = sum(fetch.size_bytes for fetch in completed) >= _LARGE_ANSWER_BYTES
        if completed:
            node.responses.append(completed)
        if completed or self._buffer.errors:
            self._on_update()
        self.send_fetches()

    def _handle_failure(self, node: _NodeFetches, targets: Iterable[TopicPartition], error: BaseException) -> None:
        if not isinstance(error, KafkaError):
            raise error
        logger.debug("a fetch failed: %s", error)
        if error.code is ErrorCode.UNSUPPORTED_VERSION:
            # Once for all partitions of the broker: a program that polls on would get the error of each at once.
            for partition in [each for each in targets if each in self._subscription.assigned][:1]:
                self.fail(partition, error)
        is_session_error = error.code in (ErrorCode.FETCH_SESSION_ID_NOT_FOUND, ErrorCode.INVALID_FETCH_SESSION_EPOCH)
        if not is_session_error:
            self._clear_read_replica(node.node_id)
            node.session.handle_failure()
            self._cluster.request_refresh()
            node.retry_at_ms = self._loop.time() * 1000 + self._config.retry_backoff_ms
        self.send_fetches()

    def _handle_too_large(self, node: _NodeFetches, targets: Collection[TopicPartition], error: AnswerTooLarge) -> None:
        """Ask for fewer records: the aborted transactions among them may have made the answer too large. Have the next
        poll raise the error if it was a single batch, whose partition is known once it is fetched by itself.
        """
        (partition, *others) = targets
        if others:
            node.apart.update(dict.fromkeys(targets))
        if node.asked_bytes > 1:
            node.max_bytes = max(1, node.asked_bytes // _TOO_LARGE_DIVISOR)
        elif not others and partition in self._subscription.assigned:
            node.apart.pop(partition, None)
            node.apart[partition] = None
            self._back_off(partition, self._config.retry_backoff_max_ms)  # meanwhile the connection is for the others
            problem = f"the records of {partition} cannot be fetched: {error.message}"
            self.fail(partition, KafkaError(ErrorCode.MESSAGE_TOO_LARGE, problem))

    def _accept_partition(
        self, node: _NodeFetches, partition: TopicPartition, offset: int, data: PartitionData
    ) -> CompletedFetch | None:
        state = self._subscription.assigned.get(partition)
        if (
            state is None
            or state.position < 0
            or state.awaiting_validation
            or offset != self._buffer.fetch_position(partition)[0]
        ):
            return None  # requested before a seek, a pause, a rebalance or a leader change
        code = ErrorCode.of(data.error_code)
        if code is not ErrorCode.NONE:
            self._handle_partition_error(node, partition, offset, code)
            return None
        if data.diverging_epoch.epoch >= 0:
            if self._buffer.has_fetches(partition):
                # Only the records fetched ahead may diverge: fetch again from the position.
                self._buffer.discard((partition,))
            else:
                self.handle_divergence(partition, data.diverging_epoch.epoch, data.diverging_epoch.end_offset)
            return None
        if data.preferred_read_replica >= 0 and data.preferred_read_replica != node.node_id:
            state.read_replica = data.preferred_read_replica
            self._sources.setdefault(state.read_replica, {})[partition] = None
            state.read_replica_until_ms = self._loop.time() * 1000 + self._config.metadata_max_age_ms
        state.is_reset_untried = False
        state.high_watermark = data.high_watermark
        state.last_stable_offset = data.last_stable_offset
        state.log_start_offset = data.log_start_offset
        if not data.records:
            return None
        aborted = [(entry.producer_id, entry.first_offset) for entry in data.aborted_transactions or ()]
        config = self._config
        try:
            completed_fetch = CompletedFetch(
                partition,
                offset,
                data.records,
                aborted if config.isolation_level == "read_committed" else (),
                high_watermark=data.high_watermark,
                check_crcs=config.check_crcs,
                key_deserializer=config.key_deserializer,
                value_deserializer=config.value_deserializer,
                decoder=self.decoder,
            )
        except KafkaError as error:
            self._refuse(partition, error)
            return None
        if completed_fetch.exhausted:
            problem = f"{partition}: the batch at {offset} is larger than max_partition_fetch_bytes"
            self._refuse(partition, KafkaError(ErrorCode.MESSAGE_TOO_LARGE, problem))
            return None
        self._buffer.add(completed_fetch)
        return completed_fetch

    def handle_divergence(
        self, partition: TopicPartition, epoch: int, end_offset: int, cause: str = "by an unclean election"
    ) -> None:
        """Act on a leader whose log differs before the position (see
        `Subscription.handle_divergence`).
        """
        old_position = self._subscription.assigned[partition].position
        error = self._subscription.handle_divergence(
            partition, epoch, end_offset, self._config.reset_timestamp_ms(time.time_ns() // 1_000_000)
        )
        new_position = self._subscription.assigned[partition].position
        if error is not None:
            self.fail(partition, error)
        elif new_position != old_position:
            self.discard((partition,))
            policy = self._config.auto_offset_reset
            target = f"back to {new_position}" if new_position >= 0 else f"reset to {policy}"
            logger.warning("%s was truncated below %d %s: %s", partition, old_position, cause, target)
            self._on_update()

    def fail(self, partition: TopicPartition, error: KafkaError) -> None:
        """Store an error for the next poll to raise.

        The partition is not fetched from until then.
        """
        self._buffer.errors[partition] = error
        self._on_update()

    def has_error(self, partition: TopicPartition) -> bool:
        return partition in self._buffer.errors

    def _handle_partition_error(
        self, node: _NodeFetches, partition: TopicPartition, offset: int, code: ErrorCode
    ) -> None:
        self._subscription.assigned[partition].read_replica = -1
        if code is ErrorCode.OFFSET_OUT_OF_RANGE:
            if node.node_id != self._cluster.metadata.leader(partition):
                # The follower may lag or may be a former leader: only the leader's answer moves a
                # position.
                self._cluster.request_refresh()
                self._back_off(partition)  # the leader may name the same replica again
                return
            if self._buffer.has_fetches(partition):
                self._back_off(partition)  # buffered records come first; a later fetch reports the error again
                return
            timestamp = self._config.reset_timestamp_ms(time.time_ns() // 1_000_000)
            if timestamp is None:
                problem = f"{partition} has no offset {offset}, auto_offset_reset=none"
                self._refuse(partition, KafkaError(code, problem))
            else:
                logger.info("%s has no offset %d: reset to %s", partition, offset, self._config.auto_offset_reset)
                is_again = self._subscription.assigned[partition].is_reset_untried
                self._subscription.request_reset(partition, timestamp)
                if is_again:  # the answers to ListOffsets and to fetches contradict each other
                    self._back_off(partition)
                self._on_update()
            return
        if code is ErrorCode.CORRUPT_MESSAGE:
            # The broker has no whole copy of the records. It answers KAFKA_STORAGE_ERROR while it looks for one.
            self._refuse(partition, KafkaError(code, f"the records of {partition} at {offset} are damaged"))
            return
        if not code.retriable and code is not ErrorCode.UNKNOWN_SERVER_ERROR:
            self._refuse(partition, KafkaError(code, f"fetch of {partition}"))
            return
        if code.invalidates_metadata:
            self._cluster.request_refresh()
        self._back_off(partition)

    def _refuse(self, partition: TopicPartition, error: KafkaError) -> None:
        """Have the next poll raise the error. A program that polls on after it does not fetch again before a wait:
        these were hundreds of requests a second.
        """
        self._buffer.errors[partition] = error
        self._back_off(partition)

    def _back_off(self, partition: TopicPartition, wait_ms: float | None = None) -> None:
        wait_ms = self._config.retry_backoff_ms if wait_ms is None else wait_ms
        retry_at_ms = self._subscription.assigned[partition].retry_at_ms = self._loop.time() * 1000 + wait_ms
        self._backoff_until_ms = max(self._backoff_until_ms, retry_at_ms)
        self._schedule_send(wait_ms)

    # -- records

    def take(self, limit: int) -> dict[TopicPartition, list[ConsumerRecord]]:
        """Return up to `limit` records by partition and move the positions.

        Raises as `FetchBuffer.take`.
        """
        with _collector_at_rest(), self._reading_later():
            taken = self._buffer.take(limit)
        self.records_taken += sum(map(len, taken.values()))
        return taken

    def take_columns(self, columns: Sequence[str], rows: int, size_bytes: int) -> list[pa.RecordBatch]:
        """Return records as Arrow columns; as `FetchBuffer.take_columns`."""
        with self._reading_later():
            taken = self._buffer.take_columns(columns, rows, size_bytes)
        self.records_taken += sum(piece.num_rows for piece in taken)
        return taken

    @property
    def starts(self) -> dict[TopicPartition, tuple[int, int]]:
        """(position, leader epoch) before the last records were taken, of the partitions that were looked at."""
        return self._buffer.starts

    @contextmanager
    def _reading_later(self) -> Iterator[None]:
        """Let large answers go on arriving while their predecessors are decoded."""
        connections = [
            connection
            for node in self._nodes.values()
            if node.in_flight and node.answers_are_large
            if (connection := self._cluster.ready(node.node_id)) is not None
        ]
        try:
            for connection in connections:
                connection.set_reads_later(True)
            yield
        finally:
            for connection in connections:
                connection.set_reads_later(False)

    def _drop_finished_responses(self, node: _NodeFetches) -> None:
        while node.responses:
            fetches = node.responses[0]
            while fetches and fetches[0].exhausted:
                fetches.popleft()
            if any(self._buffer.is_readable(completed_fetch) for completed_fetch in fetches):
                return
            node.responses.popleft()

    def discard(self, partitions: Collection[TopicPartition]) -> None:
        """Drop the records and errors of these partitions, as after a seek."""
        self._buffer.discard(partitions)

    def keep_only(self, partitions: Collection[TopicPartition]) -> None:
        """Drop the records and errors of all other partitions, as after a rebalance."""
        self._buffer.keep_only(partitions)

    # -- close

    def close(self) -> None:
        """Close the sessions at the brokers without waiting for their responses."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        for node_id, node in self._nodes.items():
            connection = self._cluster.ready(node_id)
            if node.session.session_id and connection is not None:
                try:
                    request = FetchRequest(session_id=node.session.session_id, session_epoch=CLOSE_SESSION)
                    version = connection.version_of(FetchRequest)
                    connection.send(request, FetchResponse, version, 1000).add_done_callback(retrieve_exception)
                except KafkaError:
                    pass
        self._nodes.clear()
        self._buffer.keep_only(())


@contextmanager
def _collector_at_rest() -> Iterator[None]:
    """Hold up the garbage collector, if it is on: it would run several times while thousands of records are made, and
    find nothing, because all are needed. That took up to half of the time of a large poll.
    """
    is_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if is_enabled:
            gc.enable()
