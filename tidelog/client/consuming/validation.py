"""Whether a consumer's positions still lie in the leaders' logs: OffsetForLeaderEpoch after a leader change (KIP-320).

After an unclean election the new leader's log may end, or continue differently, below a position; a consumer that
simply went on would pass over records. Here: which positions are checked, and when. What a divergence means for the
position is `Subscription.diverged`. Invariant: a position that is to be checked is not fetched from until the leader of
the newest known epoch has answered.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping

from tidelog.client.config import ConsumerConfig
from tidelog.client.consuming.fetcher import Fetcher
from tidelog.client.consuming.subscription import PartitionState, Subscription
from tidelog.client.model import TopicPartition
from tidelog.client.network.cluster import Cluster
from tidelog.client.network.metadata import EMPTY, ClusterMetadata
from tidelog.protocol.errors import ErrorCode, KafkaError
from tidelog.protocol.messages.offset_for_leader_epoch import (
    OffsetForLeaderEpochRequest,
    OffsetForLeaderEpochResponse,
    OffsetForLeaderPartition,
    OffsetForLeaderTopic,
)

logger = logging.getLogger(__name__)

_OLDEST_FOR_CONSUMERS = 3
"""Before this version only brokers may ask."""


class PositionValidator:
    """One consumer's. `on_news` is called when positions were checked."""

    def __init__(
        self,
        cluster: Cluster,
        config: ConsumerConfig,
        subscription: Subscription,
        fetcher: Fetcher,
        on_news: Callable[[], None],
    ) -> None:
        self._cluster = cluster
        self._config = config
        self._subscription = subscription
        self._fetcher = fetcher
        self._on_news = on_news
        self._loop = asyncio.get_running_loop()
        self._task: asyncio.Task[None] | None = None
        self._ahead_since: dict[TopicPartition, float] = {}
        self._noted: tuple[ClusterMetadata, Mapping[TopicPartition, PartitionState]] = (EMPTY, {})
        """The metadata and the assignment of which the leader epochs were noted last; both are replaced as a whole."""
        self._closed = False

    def check(self) -> None:
        """Note the leaders' epochs, and ask about the positions that they put in doubt, in the background."""
        if self._closed:
            return
        noted = (self._cluster.metadata, self._subscription.assigned)
        if noted[0] is not self._noted[0] or noted[1] is not self._noted[1]:  # every poll comes here
            self._noted = noted
            self._fetcher.discard(self._subscription.note_leader_epochs(noted[0].leader_epoch))
            for partition in self._subscription.note_topic_ids(noted[0].topic_id):
                # Another topic of the same name has nothing of what was read, and all of it is still to be read.
                logger.warning("the topic of %s was deleted and created anew", partition)
                self._fetcher.discard((partition,))
                self._fetcher.diverged(partition, 0, 0)
        if self._task is None and self._to_ask():
            self._task = self._loop.create_task(self._ask_until_answered())

    async def close(self) -> None:
        self._closed = True
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    def _to_ask(self) -> list[TopicPartition]:
        # One whose truncation has still to be raised waits for the application.
        return [each for each in self._subscription.unvalidated() if not self._fetcher.has_problem(each)]

    async def _ask_until_answered(self) -> None:
        failures = 0
        try:
            while partitions := self._to_ask():
                by_leader: dict[int, list[TopicPartition]] = {}
                for partition in partitions:
                    if not self._metadata_is_behind(partition):
                        by_leader.setdefault(self._cluster.metadata.leader(partition), []).append(partition)
                by_leader.pop(-1, None)
                calls = [self._ask(leader, some) for leader, some in by_leader.items()]
                answered = sum(await asyncio.gather(*calls))
                self._fetcher.pump()
                if answered < len(partitions):
                    failures += 1
                    self._cluster.request_refresh()
                    await asyncio.sleep(self._cluster.retry_backoff.wait_ms(failures) / 1000)
        finally:
            self._task = None
            self._on_news()

    def _metadata_is_behind(self, partition: TopicPartition) -> bool:
        """The position is of a newer epoch than the leader that is known: that one may know nothing of it.

        Not for ever: the epochs of a topic that was created anew begin at 0.
        """
        if self._subscription.assigned[partition].leader_epoch <= self._cluster.metadata.leader_epoch(partition):
            self._ahead_since.pop(partition, None)
            return False
        since = self._ahead_since.setdefault(partition, self._loop.time())
        return self._loop.time() - since < self._config.default_api_timeout_ms / 1000

    async def _ask(self, leader: int, partitions: list[TopicPartition]) -> int:
        """Ask one leader; how many of the positions are settled."""
        asked: dict[TopicPartition, tuple[int, int, int]] = {}
        topics: dict[str, OffsetForLeaderTopic] = {}
        for partition in partitions:
            state = self._subscription.assigned.get(partition)
            if state is None:
                continue
            asked[partition] = (state.position, state.leader_epoch, state.current_epoch)
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
            if not connection.supports(OffsetForLeaderEpochRequest, _OLDEST_FOR_CONSUMERS):
                return sum(self._settle(partition, *asked[partition], None) for partition in asked)
            response = await self._cluster.call(leader, request, OffsetForLeaderEpochResponse)
        except KafkaError as error:
            logger.debug("positions could not be checked: %s", error)
            return 0
        settled = 0
        for answer in response.topics:
            for each in answer.partitions:
                partition = TopicPartition(answer.topic, each.partition)
                code = ErrorCode.of(each.error_code)
                if partition not in asked:
                    continue
                if code is ErrorCode.NONE:
                    settled += self._settle(partition, *asked[partition], (each.leader_epoch, each.end_offset))
                elif code.retriable or code is ErrorCode.UNKNOWN_SERVER_ERROR:
                    logger.debug("the position of %s could not be checked: %s", partition, code.name)
                else:
                    self._fetcher.fail(partition, KafkaError(code, f"the position of {partition}"))
                    settled += 1
        return settled

    def _settle(
        self, partition: TopicPartition, position: int, leader_epoch: int, current: int, end: tuple[int, int] | None
    ) -> bool:
        """Take an answer over; False when the position or the leader has changed since it was asked for."""
        state = self._subscription.assigned.get(partition)
        if state is None or not state.unvalidated:
            return True
        if (state.position, state.leader_epoch, state.current_epoch) != (position, leader_epoch, current):
            return False
        if end is None:
            state.unvalidated = False
        else:
            self._fetcher.diverged(partition, *end)
        return True
