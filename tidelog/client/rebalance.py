"""What a group's rebalance does to one consumer: commits, listeners, the change of assignment, in the right order.

Runs inside `poll`, so that partitions never change hands while the application works on what the last poll gave it
(as Java's `ConsumerCoordinator`). Invariant: positions are committed and the listener has returned before a partition
is given up, unless it was lost; what was lost is never committed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Mapping

from tidelog.client.cluster import Cluster
from tidelog.client.config import ConsumerConfig
from tidelog.client.coordinator import Coordinator, GroupIdentity
from tidelog.client.fetcher import Fetcher
from tidelog.client.membership import Membership
from tidelog.client.model import OffsetAndMetadata, TopicPartition
from tidelog.client.subscription import Subscription
from tidelog.protocol.errors import ErrorCode, KafkaError

log = logging.getLogger(__name__)

_GONE = {
    ErrorCode.ILLEGAL_GENERATION: "the group has dealt its partitions anew",
    ErrorCode.UNKNOWN_MEMBER_ID: "this consumer is no longer a member of its group",
    ErrorCode.REBALANCE_IN_PROGRESS: "the group is dealing its partitions anew",
    ErrorCode.FENCED_INSTANCE_ID: "another consumer uses the same group_instance_id",
}


class Rebalancer:
    """The group side of one consumer."""

    def __init__(
        self,
        cluster: Cluster,
        config: ConsumerConfig,
        subscription: Subscription,
        fetcher: Fetcher,
        on_news: Callable[[], None],
        positions: Callable[[], dict[TopicPartition, OffsetAndMetadata]],
    ) -> None:
        assert config.group_id is not None
        self._cluster = cluster
        self._config = config
        self._subscription = subscription
        self._fetcher = fetcher
        self._positions = positions
        self._loop = asyncio.get_running_loop()
        self.coordinator = Coordinator(cluster, config.group_id)
        self.membership = Membership(cluster, config, self.coordinator, on_news)
        self._join: asyncio.Task[tuple[TopicPartition, ...] | None] | None = None
        self._joined_changes = -1
        self._commits: set[asyncio.Task[None]] = set()
        self._next_auto_commit = self._loop.time() + config.auto_commit_interval_ms / 1000

    # -- in every poll

    async def step(self) -> None:
        """Do what is due; waits only for the user's listeners and for the commit before partitions are given up."""
        self.membership.polled()
        if self._subscription.subscribed:
            await self._step_group()
        self._auto_commit()

    async def _step_group(self) -> None:
        membership, subscription = self.membership, self._subscription
        if membership.fatal is not None:
            problem, membership.fatal = membership.fatal, None
            await self._lose_all()
            raise problem
        if membership.lost:
            await self._lose_all()
        if self._join is not None and self._join.done():
            join, self._join = self._join, None
            assigned = join.result()
            if assigned is not None:
                await self._take_on(assigned)
        if self._join is None and (membership.needs_join or self._joined_changes != subscription.changes):
            await self._prepare()
            self._joined_changes = subscription.changes
            owned = tuple(subscription.assigned)
            self._join = self._loop.create_task(membership.join(tuple(subscription.topics), owned))

    async def _prepare(self) -> None:
        """Before joining: an eager member gives up all, a cooperative one what it no longer subscribes to."""
        assigned = list(self._subscription.assigned)
        leaving = assigned
        if self.membership.cooperative:
            leaving = [each for each in assigned if each.topic not in self._subscription.topics]
        if self._config.auto_commit:
            await self._commit_quietly()
        if leaving:
            await self._notify("revoked", leaving)
            self._set_assigned([each for each in assigned if each not in set(leaving)])

    async def _take_on(self, assigned: Collection[TopicPartition]) -> None:
        wanted = [each for each in assigned if each.topic in self._subscription.topics]
        before = set(self._subscription.assigned)
        revoked = [each for each in before if each not in set(wanted)]
        if revoked:
            # Cooperative only: they go to others in the next round, which this member starts by joining again.
            if self._config.auto_commit:
                await self._commit_quietly()
            await self._notify("revoked", revoked)
            self.membership.needs_join = True
        self._set_assigned(wanted)
        await self._notify("assigned", [each for each in wanted if each not in before])

    async def _lose_all(self) -> None:
        self.membership.lost = False
        lost = list(self._subscription.assigned)
        if lost:
            log.warning("group %r: lost %s", self.coordinator.group_id, ", ".join(map(str, lost)))
            self._set_assigned(())
            await self._notify("lost", lost)

    def _set_assigned(self, partitions: Collection[TopicPartition]) -> None:
        self._subscription.set_assigned(partitions)
        self._fetcher.keep_only(set(partitions))

    async def _notify(self, what: str, partitions: Collection[TopicPartition]) -> None:
        listener = self._subscription.listener
        log.info("group %r: %s %s", self.coordinator.group_id, what, ", ".join(map(str, partitions)) or "nothing")
        if listener is None:
            return
        method: Callable[[Collection[TopicPartition]], Awaitable[None] | None]
        method = getattr(listener, f"on_partitions_{what}")
        outcome = method(partitions)
        if outcome is not None:
            await outcome

    # -- committing

    @property
    def _identity(self) -> GroupIdentity:
        return self.membership.identity if self._subscription.subscribed else GroupIdentity()

    async def commit(self, offsets: Mapping[TopicPartition, OffsetAndMetadata], timeout_ms: float) -> None:
        """Raises KafkaError; one that says why, when this consumer is no longer the one to commit."""
        who = self._identity
        try:
            await self.coordinator.commit(offsets, who, timeout_ms)
        except KafkaError as error:
            # Of an earlier membership it says nothing about the present one.
            if self._subscription.subscribed and who == self._identity:
                self.membership.refused(error.code)
            if error.code in _GONE:
                advice = "nothing was committed; poll more often, or raise max_poll_interval_ms"
                raise KafkaError(error.code, f"{_GONE[error.code]}: {advice}") from None
            raise

    def commit_in_background(self, offsets: Mapping[TopicPartition, OffsetAndMetadata]) -> asyncio.Task[None]:
        """Commits go out in the order in which they are asked for."""
        task = self._loop.create_task(self.commit(offsets, self._config.default_api_timeout_ms))
        self._commits.add(task)
        task.add_done_callback(self._commits.discard)
        return task

    def _auto_commit(self) -> None:
        if not self._config.auto_commit or self._loop.time() < self._next_auto_commit:
            return
        if self._commits or self._join is not None:
            return  # one at a time, and none that a rebalance would refuse
        self._next_auto_commit = self._loop.time() + self._config.auto_commit_interval_ms / 1000
        offsets = self._positions()
        if offsets:
            self.commit_in_background(offsets).add_done_callback(_log_failure)

    async def _commit_quietly(self) -> None:
        """Before giving up partitions. A failure means that others read some records again: no reason to stop."""
        if self._commits:
            await asyncio.wait(self._commits)
        try:
            await self.commit(self._positions(), self._config.request_timeout_ms)
        except KafkaError as error:
            log.warning("group %r: automatic commit failed: %s", self.coordinator.group_id, error)

    # -- the end

    async def leave(self, reason: str) -> None:
        """Commit if that is automatic, tell the listener, leave the group."""
        if self._join is not None:
            self._join.cancel()
            await asyncio.wait([self._join])
            self._join = None
        if self.membership.lost:
            await self._lose_all()
        if self._subscription.subscribed or self._subscription.by_user:
            if self._config.auto_commit:
                await self._commit_quietly()
            assigned = list(self._subscription.assigned)
            if assigned and self._subscription.subscribed:
                await self._notify("revoked", assigned)
        if self._commits:
            await asyncio.wait(self._commits)
        await self.membership.leave(reason)
        self.membership.needs_join = True


def _log_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.warning("automatic commit failed, the next one makes up for it: %s", error)
