"""Validates a consumer's positions with OffsetForLeaderEpoch after a leader change (KIP-320).

After an unclean election the new leader's log may end, or continue differently, below a position; a
consumer that continued there would miss records. Here: which positions are validated, and when.
`Subscription.handle_divergence` applies a divergence to the position. Invariant: a position that
must be validated is not fetched from until the leader of the newest known epoch has answered.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable, Mapping

from tidelog.client.client_logging import client_logger
from tidelog.client.config import ConsumerConfig
from tidelog.client.consuming.fetcher import Fetcher
from tidelog.client.consuming.subscription import PartitionState, Subscription
from tidelog.client.model import TopicPartition
from tidelog.client.network.cluster import Cluster
from tidelog.client.network.epoch_ends import FIRST_VERSION_FOR_CONSUMERS
from tidelog.client.network.metadata import EMPTY, ClusterMetadata
from tidelog.client.network.outcomes import start_task
from tidelog.protocol.errors import ErrorCode, KafkaError
from tidelog.protocol.messages.offset_for_leader_epoch import (
    OffsetForLeaderEpochRequest,
    OffsetForLeaderEpochResponse,
    OffsetForLeaderPartition,
    OffsetForLeaderTopic,
)

logger = client_logger(__name__)


class PositionValidator:
    """The validator of one consumer. `on_update` is called after a validation."""

    def __init__(
        self,
        cluster: Cluster,
        config: ConsumerConfig,
        subscription: Subscription,
        fetcher: Fetcher,
        on_update: Callable[[], None],
    ) -> None:
        self._cluster = cluster
        self._config = config
        self._subscription = subscription
        self._fetcher = fetcher
        self._on_update = on_update
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._validating: set[TopicPartition] = set()
        """The partitions of these tasks."""
        self._newer_epoch_since_s: dict[TopicPartition, float] = {}
        self._seen_state: tuple[ClusterMetadata, Mapping[TopicPartition, PartitionState]] = (EMPTY, {})
        """The metadata and the assignment of the last check.

        Both are replaced as a whole when they change.
        """
        self._closed = False

    def check(self) -> None:
        """Store the leaders' epochs, and validate the affected positions in the background."""
        if self._closed:
            return
        state = (self._cluster.metadata, self._subscription.assigned)
        if state[0] is not self._seen_state[0] or state[1] is not self._seen_state[1]:  # every poll calls this method
            self._seen_state = state
            self._fetcher.discard(self._subscription.update_leader_epochs(state[0].leader_epoch))
            replaced, restored = self._subscription.update_topic_ids(state[0].topic_id)
            self._fetcher.discard(restored)
            for partition in replaced:
                # The new topic of this name holds other records, and all of them are unread.
                self._fetcher.discard((partition,))
                self._fetcher.handle_divergence(partition, 0, 0, "when its topic was deleted and created anew")
        self._start(self._partitions_to_validate(), 0)

    async def close(self) -> None:
        self._closed = True
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    def _partitions_to_validate(self) -> list[TopicPartition]:
        # A partition with an error to raise waits for the application's next poll.
        return [
            partition
            for partition in self._subscription.awaiting_validation()
            if not self._fetcher.has_error(partition)
        ]

    def _start(self, partitions: Iterable[TopicPartition], failures: int) -> None:
        """Start a task for each leader: one that does not answer must not hold back the partitions of others."""
        by_leader: dict[int, set[TopicPartition]] = {}
        for partition in partitions:
            if partition not in self._validating:
                by_leader.setdefault(self._cluster.metadata.leader(partition), set()).add(partition)
        for leader, led in by_leader.items():
            self._validating |= led
            task = start_task(self._validate(leader, led, failures))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _validate(self, leader: int, led: Collection[TopicPartition], failures: int) -> None:
        """Ask the leader (-1: none is known) once; then go on with what is not settled, after the backoff."""
        try:
            partitions = [partition for partition in self._partitions_to_validate() if partition in led]
            ready = [each for each in partitions if leader >= 0 and not self._metadata_is_behind(each)]
            settled_count = await self._validate_with(leader, ready) if ready else 0
            self._fetcher.send_fetches()
            if settled_count < len(partitions):
                self._cluster.request_refresh()
                await asyncio.sleep(self._cluster.retry_backoff.wait_ms(failures + 1) / 1000)
            elif any(map(self._fetcher.has_error, partitions)):
                # A program that polls on after the error: the leader is not asked again at once.
                await asyncio.sleep(self._config.retry_backoff_ms / 1000)
        finally:
            self._validating.difference_update(led)
            self._on_update()
        if not self._closed:
            self._start([partition for partition in self._partitions_to_validate() if partition in led], failures + 1)

    def _metadata_is_behind(self, partition: TopicPartition) -> bool:
        """Whether the position has a newer epoch than the leader in the metadata, which may not
        have that epoch.

        The wait is bounded: the epochs of a recreated topic begin at 0.
        """
        if self._subscription.assigned[partition].leader_epoch <= self._cluster.metadata.leader_epoch(partition):
            self._newer_epoch_since_s.pop(partition, None)
            return False
        since_s = self._newer_epoch_since_s.setdefault(partition, self._loop.time())
        return self._loop.time() - since_s < self._config.default_api_timeout_ms / 1000

    async def _validate_with(self, leader: int, partitions: list[TopicPartition]) -> int:
        """Validate positions with one leader. Returns the number of settled positions."""
        positions: dict[TopicPartition, tuple[int, int, int]] = {}
        topics: dict[str, OffsetForLeaderTopic] = {}
        for partition in partitions:
            state = self._subscription.assigned.get(partition)
            if state is None:
                continue
            positions[partition] = (state.position, state.leader_epoch, state.current_epoch)
            topic = topics.setdefault(partition.topic, OffsetForLeaderTopic(topic=partition.topic))
            topic.partitions.append(
                OffsetForLeaderPartition(
                    partition=partition.partition,
                    current_leader_epoch=state.current_epoch,
                    leader_epoch=state.leader_epoch,
                )
            )
        request = OffsetForLeaderEpochRequest(topics=list(topics.values()))
        try:
            connection = await self._cluster.connection(leader)
            if not connection.supports(OffsetForLeaderEpochRequest, FIRST_VERSION_FOR_CONSUMERS):
                return sum(self._settle(partition, *positions[partition], None) for partition in positions)
            response = await self._cluster.call(leader, request, OffsetForLeaderEpochResponse)
        except KafkaError as error:
            logger.debug("positions could not be checked: %s", error)
            return 0
        settled_count = 0
        for topic_result in response.topics:
            for result in topic_result.partitions:
                partition = TopicPartition(topic_result.topic, result.partition)
                code = ErrorCode.of(result.error_code)
                if partition not in positions:
                    continue
                if code is ErrorCode.NONE:
                    settled_count += self._settle(
                        partition, *positions[partition], (result.leader_epoch, result.end_offset)
                    )
                elif code.retriable or code is ErrorCode.UNKNOWN_SERVER_ERROR:
                    logger.debug("the position of %s could not be checked: %s", partition, code.name)
                else:
                    self._fetcher.fail(partition, KafkaError(code, f"the position of {partition}"))
                    settled_count += 1
        return settled_count

    def _settle(
        self,
        partition: TopicPartition,
        position: int,
        leader_epoch: int,
        current_epoch: int,
        end: tuple[int, int] | None,
    ) -> bool:
        """Apply a result; False when the position or the leader has changed since the request."""
        state = self._subscription.assigned.get(partition)
        if state is None or not state.awaiting_validation:
            return True
        if (state.position, state.leader_epoch, state.current_epoch) != (position, leader_epoch, current_epoch):
            return False
        if end is None:
            state.awaiting_validation = False
        else:
            self._fetcher.handle_divergence(partition, *end)
        return True
