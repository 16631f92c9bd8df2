"""Looks up start positions: the committed offset, or the offset that `auto_offset_reset` selects.

Invariant: at most one lookup of a partition runs. Its results apply only to partitions that still need them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from itertools import starmap

from tidelog.client.config import ConsumerConfig
from tidelog.client.consuming.fetcher import Fetcher
from tidelog.client.consuming.subscription import Subscription
from tidelog.client.consuming.validation import PositionValidator
from tidelog.client.groups.coordinator import Coordinator
from tidelog.client.model import LATEST_TIMESTAMP, OffsetAndMetadata, OffsetAndTimestamp, TopicPartition
from tidelog.client.network.cluster import Cluster
from tidelog.client.network.offsets import list_offsets_once, raise_lasting
from tidelog.client.network.outcomes import start_task
from tidelog.protocol.errors import ErrorCode, KafkaError, join_some


class PositionLookup:
    """The position lookups of one consumer. `on_update` is called at the end of a lookup."""

    def __init__(
        self,
        cluster: Cluster,
        config: ConsumerConfig,
        subscription: Subscription,
        coordinator: Coordinator | None,
        fetcher: Fetcher,
        on_update: Callable[[], None],
    ) -> None:
        self._cluster = cluster
        self._config = config
        self._subscription = subscription
        self._coordinator = coordinator
        self._on_update = on_update
        self.validator = PositionValidator(cluster, config, subscription, fetcher, on_update)
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._looked_up: set[TopicPartition] = set()
        """The partitions of lookups that run."""
        self._closed = False

    def start_lookup(self) -> None:
        """Look up missing positions and validate doubtful ones, in the background.

        Raises the KafkaError of a lookup that has ended, once.
        """
        self.validator.check()
        for task in [each for each in self._tasks if each.done()]:
            self._tasks.discard(task)
            if not task.cancelled():
                task.result()
        if self._closed:
            return
        due = {*self._subscription.partitions_without_position(), *self._pending_resets()} - self._looked_up
        # The coordinator refuses the ids of deleted topics. In one request they would hold up the others.
        due = {partition for partition in due if not self._cluster.metadata.is_deleted(partition.topic)}
        if due:
            self._looked_up |= due
            self._tasks.add(start_task(self._run_lookup(due)))

    def _pending_resets(self) -> dict[TopicPartition, int]:
        return self._subscription.pending_resets(self._loop.time() * 1000)

    async def wait_for_position(self, partition: TopicPartition, timeout_ms: float) -> int:
        """The position of an assigned partition, within `timeout_ms`.

        Raises ValueError, KafkaError, and RuntimeError after `close`.
        """
        pause_s = self._config.retry_backoff_ms / 1000
        try:
            async with asyncio.timeout(timeout_ms / 1000):
                while (state := self._subscription.state(partition)).position < 0:
                    self.start_lookup()
                    if self._closed:
                        raise RuntimeError("this consumer is closed")
                    if self._tasks:
                        # The lookup of this partition has an outcome before the end of those of other leaders.
                        await asyncio.wait(self._tasks, timeout=pause_s, return_when=asyncio.FIRST_COMPLETED)
                    else:
                        await asyncio.sleep(pause_s)
        except TimeoutError:
            problem = f"the position of {partition} was not found in default_api_timeout_ms"
            raise KafkaError(ErrorCode.REQUEST_TIMED_OUT, problem) from None
        return state.position

    async def close(self) -> None:
        self._closed = True
        await self.validator.close()
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    async def _run_lookup(self, partitions: set[TopicPartition]) -> None:
        """Look up these positions, each leader's by itself: one that does not answer must not hold back the others,
        nor later lookups.
        """
        by_leader: dict[int, dict[TopicPartition, int]] = {}
        try:
            without_position = self._subscription.partitions_without_position()
            await self._use_committed_offsets([each for each in without_position if each in partitions])
            for partition, timestamp in self._pending_resets().items():
                if partition in partitions:
                    by_leader.setdefault(self._cluster.metadata.leader(partition), {})[partition] = timestamp
        except KafkaError as error:
            await self._back_off()
            if not error.retriable:
                raise
        finally:
            self._looked_up -= partitions.difference(*by_leader.values())
            self._on_update()
        for outcome in await asyncio.gather(*starmap(self._reset_led, by_leader.items()), return_exceptions=True):
            if isinstance(outcome, BaseException):
                raise outcome

    async def _reset_led(self, leader: int, resets: Mapping[TopicPartition, int]) -> None:
        """Ask the leader of these partitions (-1: none is known) once. Raises KafkaError for errors that are not
        retriable.
        """
        try:
            if await self._reset_by_leader(resets):
                await self._pause(leader)
        except KafkaError as error:
            await self._pause(leader)
            if not error.retriable:
                raise
        finally:
            self._looked_up.difference_update(resets)
            self._on_update()

    async def _pause(self, leader: int) -> None:
        """The next poll tries again. This wait prevents a busy loop."""
        if leader < 0:  # as long as the topic or partition does not exist, or is refused
            await self._cluster.wait_for_leaders(self._config.retry_backoff_ms)
        else:
            self._cluster.request_refresh()
            await self._back_off()

    async def _back_off(self) -> None:
        await asyncio.sleep(self._config.retry_backoff_ms / 1000)

    async def _reset_by_leader(self, resets: Mapping[TopicPartition, int]) -> bool:
        """Reset partitions of one leader. Returns whether some have a retriable error. Raises KafkaError, when those
        without an error are reset.

        Where no record is as late as a time, its partition begins at the end. That is asked for first: what comes
        after it is later.
        """
        epochs = {partition: self._cluster.metadata.leader_epoch(partition) for partition in resets}
        latest = {partition: LATEST_TIMESTAMP for partition, timestamp in resets.items() if timestamp >= 0}
        ends: dict[TopicPartition, OffsetAndTimestamp | None] = {}
        isolation_level = self._config.isolation_level
        errors: dict[TopicPartition, KafkaError] = {}
        if latest:
            errors = await list_offsets_once(
                self._cluster, latest, isolation_level=isolation_level, on_offsets=ends.update
            )

        def apply_offsets(offsets: Mapping[TopicPartition, OffsetAndTimestamp | None]) -> None:
            for partition, offset in offsets.items():
                offset = offset or ends.get(partition)
                if offset is not None and partition in resets:
                    self._subscription.finish_reset(
                        partition, resets[partition], offset.offset, offset.leader_epoch, epochs[partition]
                    )
            self._on_update()

        asked = {partition: timestamp for partition, timestamp in resets.items() if partition not in errors}
        refused = await list_offsets_once(
            self._cluster, asked, isolation_level=isolation_level, on_offsets=apply_offsets
        )
        errors.update(refused)
        raise_lasting(errors.values())
        return bool(errors)

    async def _use_committed_offsets(self, partitions: list[TopicPartition]) -> None:
        committed: Mapping[TopicPartition, OffsetAndMetadata] = {}
        topic_ids = {partition.topic: self._cluster.topic_id(partition.topic) for partition in partitions}
        states = {partition: self._subscription.assigned.get(partition) for partition in partitions}
        if partitions and self._coordinator is not None:
            committed = await self._coordinator.committed(
                partitions, self._config.default_api_timeout_ms, topic_id_of=self._cluster.topic_id
            )
        without: list[TopicPartition] = []
        for partition in partitions:
            state = self._subscription.assigned.get(partition)
            if state is None or state.position >= 0 or state.reset_to is not None:
                continue
            if state is not states[partition]:
                continue  # another member has had the partition meanwhile, and may have committed
            if self._cluster.topic_id(partition.topic) != topic_ids[partition.topic]:
                continue  # the offset is of a topic that was deleted meanwhile; the next lookup is of the new one
            if partition in committed:
                self._subscription.seek(partition, committed[partition].offset, committed[partition].leader_epoch)
                continue
            timestamp = self._config.reset_timestamp_ms(time.time_ns() // 1_000_000)
            if timestamp is None:
                without.append(partition)
            else:
                self._subscription.request_reset(partition, timestamp)
        if without:  # now that the others have their positions
            verb = "has" if len(without) == 1 else "have"
            problem = f"{join_some(without)} {verb} no committed offset, auto_offset_reset=none"
            raise KafkaError(ErrorCode.OFFSET_OUT_OF_RANGE, problem)
