"""What a group's rebalance does to one consumer: commits, listeners, the change of assignment, in the right order.

Begins inside `poll`, so that partitions never change hands while the application works on what the last poll gave it
(as Java's `ConsumerCoordinator`). Invariants: positions are committed and the listener has returned before a partition
is given up, unless it was lost; what was lost is never committed; a step that began runs to its end, also when the
poll that began it is cancelled or a listener raises, and the next poll waits for it.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping
from typing import Any

from tidelog.client.assignment.protocol import UNKNOWN_GENERATION
from tidelog.client.config import ConsumerConfig
from tidelog.client.consuming.fetcher import Fetcher
from tidelog.client.consuming.subscription import Subscription
from tidelog.client.groups.commit_queue import CommitQueue
from tidelog.client.groups.coordinator import Coordinator, GroupIdentity
from tidelog.client.groups.membership import Membership, wait_until
from tidelog.client.model import OffsetAndMetadata, TopicPartition
from tidelog.client.network.cluster import Cluster
from tidelog.protocol.errors import ErrorCode, KafkaError

logger = logging.getLogger(__name__)

_GONE = {
    ErrorCode.ILLEGAL_GENERATION: "the group has dealt its partitions anew",
    ErrorCode.UNKNOWN_MEMBER_ID: "this consumer is no longer a member of its group",
    ErrorCode.REBALANCE_IN_PROGRESS: "the group is dealing its partitions anew",
    ErrorCode.FENCED_INSTANCE_ID: "another consumer uses the same group_instance_id",
}
_POLL_MORE_OFTEN = "nothing was committed; poll more often, or raise max_poll_interval_ms"
_POLL_FIRST = "nothing was committed; poll, then commit again"

_within: contextvars.ContextVar[object] = contextvars.ContextVar("tidelog_rebalance_step", default=None)
"""The step inside which a listener runs."""


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
        self._step: asyncio.Task[None] | None = None
        self._listener_problem: Exception | None = None
        self._commits = CommitQueue(self.coordinator)
        self._next_auto_commit = self._loop.time() + config.auto_commit_interval_ms / 1000

    # -- in every poll

    async def step(self) -> None:
        """Do what is due; waits only for the user's listeners and for the commit before partitions are given up.

        Raises KafkaError, and what a listener raised.
        """
        self.membership.polled()
        if self._step is not None or (self._subscription.subscribed and self._due()):
            await self._to_its_end(self._step_group)
        self._auto_commit()

    def _due(self) -> bool:
        membership = self.membership
        return (
            membership.needs_join
            or membership.lost
            or membership.fatal is not None
            or self._listener_problem is not None
            or self._joined_changes != self._subscription.changes
            or (self._join is not None and self._join.done())
        )

    async def _to_its_end(self, step: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run the step as a task of its own, or wait for the one under way: it goes on when the caller is cancelled."""
        self.refuse_inside_listener("poll()")
        task = self._step
        if task is None:
            task = self._step = self._loop.create_task(step())
            task.add_done_callback(_retrieve)
        await asyncio.wait([task])
        if self._step is task:
            self._step = None
            task.result()

    def refuse_inside_listener(self, call: str) -> None:
        """A call that waits for the step which waits for the listener would wait for ever."""
        if self._step is not None and _within.get() is self._step:
            raise RuntimeError(f"{call} cannot be called in a rebalance listener")

    async def _step_group(self) -> None:
        membership, subscription = self.membership, self._subscription
        if membership.fatal is not None:
            problem = membership.fatal
            if not membership.fenced:
                membership.fatal = None
            await self._lose_all()
            raise problem
        if membership.lost:
            await self._lose_all()
        if self._join is not None and self._join.done():
            join, self._join = self._join, None
            assigned = join.result()
            if assigned is not None and membership.is_member:
                await self._take_on(assigned)
        if self._join is None and (membership.needs_join or self._joined_changes != subscription.changes):
            await self._prepare()
            self._joined_changes = subscription.changes
            owned = tuple(subscription.assigned)
            self._join = self._loop.create_task(membership.join(tuple(subscription.topics), owned))
            self._join.add_done_callback(_retrieve)
        self._raise_listener_problem()

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
            self.membership.needs_join = True
            if self._config.auto_commit:
                await self._commit_quietly()
            await self._notify("revoked", revoked)
        self._set_assigned(wanted)
        await self._notify("assigned", [each for each in wanted if each not in before])

    async def _lose_all(self) -> None:
        self.membership.lost = False
        lost = list(self._subscription.assigned)
        if lost:
            logger.warning("group %r: lost %s", self.coordinator.group_id, ", ".join(map(str, lost)))
            self._set_assigned(())
            await self._notify("lost", lost)

    def _set_assigned(self, partitions: Collection[TopicPartition]) -> None:
        self._subscription.set_assigned(partitions)
        self._fetcher.keep_only(set(partitions))

    async def _notify(self, what: str, partitions: Collection[TopicPartition]) -> None:
        """Call the listener. What it raises is kept until the step is done: the group goes on without it."""
        listener = self._subscription.listener
        logger.info("group %r: %s %s", self.coordinator.group_id, what, ", ".join(map(str, partitions)) or "nothing")
        if listener is None:
            return
        task = asyncio.current_task()
        _within.set(task)
        try:
            method: Callable[[Collection[TopicPartition]], Awaitable[None] | None]
            method = getattr(listener, f"on_partitions_{what}")
            outcome = method(partitions)
            if outcome is not None:
                await outcome
        except asyncio.CancelledError as error:
            if task is not None and task.cancelling():
                raise
            problem = RuntimeError("something that the rebalance listener waited for was cancelled")
            problem.__cause__ = error
            self._listener_problem = self._listener_problem or problem
        except Exception as error:
            logger.error(
                "group %r: the listener raised %r when partitions were %s", self.coordinator.group_id, error, what
            )
            self._listener_problem = self._listener_problem or error

    def _raise_listener_problem(self) -> None:
        problem, self._listener_problem = self._listener_problem, None
        if problem is not None:
            raise problem

    # -- committing

    @property
    def _identity(self) -> GroupIdentity:
        return self.membership.identity if self._subscription.subscribed else GroupIdentity()

    async def commit(self, offsets: Mapping[TopicPartition, OffsetAndMetadata], timeout_ms: float) -> None:
        """Raises KafkaError; one that says why, when this consumer is no longer the one to commit."""
        await self._finish(*self._begin(offsets, timeout_ms))

    def commit_in_background(self, offsets: Mapping[TopicPartition, OffsetAndMetadata]) -> asyncio.Task[None]:
        """Commits go out in the order in which they are asked for."""
        begun = self._begin(offsets, self._config.default_api_timeout_ms)
        return self._loop.create_task(self._finish(*begun))

    def _begin(
        self, offsets: Mapping[TopicPartition, OffsetAndMetadata], timeout_ms: float
    ) -> tuple[asyncio.Future[None], GroupIdentity]:
        identity = self._identity
        if not offsets or (self._subscription.subscribed and identity.generation == UNKNOWN_GENERATION):
            # Without a generation the broker would take it for one of a consumer that belongs to no group.
            refusal: asyncio.Future[None] = self._loop.create_future()
            if offsets:
                code = ErrorCode.REBALANCE_IN_PROGRESS if self._join is not None else ErrorCode.UNKNOWN_MEMBER_ID
                refusal.set_exception(KafkaError(code))
            else:
                refusal.set_result(None)
            return refusal, identity
        return self._commits.add(offsets, identity, timeout_ms), identity

    async def _finish(self, outcome: asyncio.Future[None], identity: GroupIdentity) -> None:
        # Cancelling the caller does not take back what may be on the wire.
        await asyncio.wait([outcome])
        try:
            outcome.result()
        except KafkaError as error:
            code = error.code
            same = identity == self._identity
            # Of an earlier membership it says nothing about the present one.
            if self._subscription.subscribed and same and self.membership.is_member:
                self.membership.refused(code)
            if code is ErrorCode.ILLEGAL_GENERATION and not same and self._join is not None:
                code = ErrorCode.REBALANCE_IN_PROGRESS
            if code in _GONE:
                advice = _POLL_FIRST if code is ErrorCode.REBALANCE_IN_PROGRESS else _POLL_MORE_OFTEN
                raise KafkaError(code, f"{_GONE[code]}: {advice}") from None
            raise

    def _auto_commit(self) -> None:
        if not self._config.auto_commit or self._loop.time() < self._next_auto_commit:
            return
        if self._commits.busy or self._join is not None:
            return  # one at a time, and none that a rebalance would refuse
        self._next_auto_commit = self._loop.time() + self._config.auto_commit_interval_ms / 1000
        offsets = self._positions()
        if offsets:
            self.commit_in_background(offsets).add_done_callback(_log_failure)

    async def _commit_quietly(self) -> None:
        """Before giving up partitions. A failure means that others read some records again: no reason to stop."""
        try:
            await self.commit(self._positions(), self._config.request_timeout_ms)
        except KafkaError as error:
            logger.warning("group %r: automatic commit failed: %s", self.coordinator.group_id, error)

    # -- the end

    async def unsubscribe(self) -> None:
        """Leave the group as `leave` does, to its end also when the caller is cancelled."""
        self.refuse_inside_listener("unsubscribe()")
        if self._step is not None:
            await asyncio.wait([self._step])
            self._step = None
        await self._to_its_end(lambda: self.leave("the consumer unsubscribed"))

    async def leave(self, reason: str, timeout_ms: float | None = None) -> None:
        """Commit if that is automatic, tell the listener, leave the group, forget the assignment.

        Brokers are waited for until `timeout_ms` is over, the listener to its end.
        """
        until = None if timeout_ms is None else self._loop.time() + timeout_ms / 1000
        step, calls = self._step, self._subscription.calls
        if step is not None and step is not asyncio.current_task():
            await wait_until(until, asyncio.wait([step]))
            if not step.done():
                step.cancel()
                await asyncio.wait([step])
        join, self._join = self._join, None
        if join is not None:
            join.cancel()
            await asyncio.wait([join])
        if self.membership.lost:
            await self._lose_all()
        subscribed = self._subscription.subscribed
        if subscribed or self._subscription.by_user:
            if self._config.auto_commit:
                await wait_until(until, self._commit_quietly())
            assigned = list(self._subscription.assigned)
            if assigned and subscribed:
                await self._notify("revoked", assigned)
        await wait_until(until, self._commits.wait_until_empty())
        if calls == self._subscription.calls:
            self._subscription.unsubscribe()
        elif self._subscription.subscribed:  # again, by a caller who did not wait for the end of this
            self._subscription.set_assigned(())
        self._fetcher.keep_only(())
        await self.membership.leave(reason, until)
        self._raise_listener_problem()

    async def close(self) -> None:
        """End what runs in the background, without waiting for the group."""
        self._commits.close()
        for task in (self._step, self._join):
            if task is not None:
                task.cancel()
        await self.membership.stop()


def _retrieve(task: asyncio.Task[Any]) -> None:
    """The next poll raises it; without one, a failed join is no error of the program."""
    if not task.cancelled():
        task.exception()


def _log_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.warning("automatic commit failed, the next one makes up for it: %s", error)
