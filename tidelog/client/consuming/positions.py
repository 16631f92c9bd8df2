"""Where a consumer starts to read: the committed offset, else what `auto_offset_reset` says.

Invariant: at most one look-up runs; its findings are used only for partitions that still want them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from tidelog.client.config import ConsumerConfig
from tidelog.client.consuming.fetcher import RESET_TIMESTAMPS, Fetcher
from tidelog.client.consuming.subscription import Subscription
from tidelog.client.consuming.validation import PositionValidator
from tidelog.client.groups.coordinator import Coordinator
from tidelog.client.model import OffsetAndMetadata, OffsetAndTimestamp, TopicPartition
from tidelog.client.network.cluster import Cluster
from tidelog.client.network.offsets import ask_leaders, list_offsets
from tidelog.protocol.errors import ErrorCode, KafkaError


class Positions:
    """One consumer's look-ups. `on_news` is called when one ended."""

    def __init__(
        self,
        cluster: Cluster,
        config: ConsumerConfig,
        subscription: Subscription,
        coordinator: Coordinator | None,
        fetcher: Fetcher,
        on_news: Callable[[], None],
    ) -> None:
        self._cluster = cluster
        self._config = config
        self._subscription = subscription
        self._coordinator = coordinator
        self._on_news = on_news
        self.validator = PositionValidator(cluster, config, subscription, fetcher, on_news)
        self._loop = asyncio.get_running_loop()
        self._search: asyncio.Task[None] | None = None
        self._closed = False

    def search(self) -> None:
        """Look for what is missing, and check what is in doubt, in the background.

        Raises the KafkaError of the last search, once.
        """
        self.validator.check()
        if self._search is not None:
            if not self._search.done():
                return
            search, self._search = self._search, None
            if not search.cancelled():
                search.result()
        if self._closed:
            return
        now_ms = self._loop.time() * 1000
        if self._subscription.without_position() or self._subscription.to_reset(now_ms):
            self._search = self._loop.create_task(self._look_up())

    async def find(self, partition: TopicPartition) -> int:
        """The position of an assigned partition. Raises ValueError, KafkaError; RuntimeError when closed meanwhile."""
        try:
            async with asyncio.timeout(self._config.default_api_timeout_ms / 1000):
                while (state := self._subscription.state(partition)).position < 0:
                    self.search()
                    if self._closed:
                        raise RuntimeError("this consumer is closed")
                    if self._search is not None:
                        await asyncio.wait([self._search])
                    else:
                        await asyncio.sleep(self._config.retry_backoff_ms / 1000)
        except TimeoutError:
            problem = f"the position of {partition} was not found in default_api_timeout_ms"
            raise KafkaError(ErrorCode.REQUEST_TIMED_OUT, problem) from None
        return state.position

    async def list_offsets(
        self, timestamps: Mapping[TopicPartition, int]
    ) -> dict[TopicPartition, OffsetAndTimestamp | None]:
        """ListOffsets under the consumer's isolation level."""
        return await list_offsets(
            self._cluster,
            timestamps,
            isolation_level=self._config.isolation_level,
            timeout_ms=self._config.default_api_timeout_ms,
        )

    async def close(self) -> None:
        self._closed = True
        await self.validator.close()
        if self._search is not None:
            self._search.cancel()
            await asyncio.wait([self._search])

    async def _look_up(self) -> None:
        problem: KafkaError | None = None
        try:
            await self._from_group(self._subscription.without_position())
            resets = self._subscription.to_reset(self._loop.time() * 1000)
            if resets:
                problem = await self._reset(resets)
        except KafkaError as error:
            problem = error
            if not error.retriable:
                raise
        finally:
            if problem is not None:
                # Asked again by the next poll, but not in a tight loop.
                if problem.code is ErrorCode.LEADER_NOT_AVAILABLE:
                    await self._cluster.wait_for_metadata(self._config.retry_backoff_ms)
                else:
                    self._cluster.request_refresh()
                    await asyncio.sleep(self._config.retry_backoff_ms / 1000)
            self._on_news()

    async def _reset(self, resets: Mapping[TopicPartition, int]) -> KafkaError | None:
        """Ask each leader once: a partition whose leader is gone or silent must not keep the others from being read."""
        epochs = {partition: self._cluster.metadata.leader_epoch(partition) for partition in resets}

        def take_over(found: Mapping[TopicPartition, OffsetAndTimestamp | None]) -> None:
            for partition, offset in found.items():
                if offset is not None and partition in resets:
                    self._subscription.finish_reset(
                        partition, resets[partition], offset.offset, offset.leader_epoch, epochs[partition]
                    )
            self._on_news()

        return await ask_leaders(
            self._cluster, resets, isolation_level=self._config.isolation_level, on_found=take_over
        )

    async def _from_group(self, missing: list[TopicPartition]) -> None:
        committed: Mapping[TopicPartition, OffsetAndMetadata] = {}
        if missing and self._coordinator is not None:
            committed = await self._coordinator.committed(missing, self._config.default_api_timeout_ms)
        for partition in missing:
            state = self._subscription.assigned.get(partition)
            if state is None or state.position >= 0 or state.reset_to is not None:
                continue
            if partition in committed:
                self._subscription.seek(partition, committed[partition].offset, committed[partition].leader_epoch)
                continue
            timestamp = RESET_TIMESTAMPS.get(self._config.auto_offset_reset)
            if timestamp is None:
                problem = f"{partition} has no committed offset, auto_offset_reset=none"
                raise KafkaError(ErrorCode.OFFSET_OUT_OF_RANGE, problem)
            self._subscription.ask_reset(partition, timestamp)
