"""A consumer's side of a rebalance: commits, listeners and the new assignment, in the right order.

A step starts inside `poll`, so that the assignment never changes while the application processes
the records of the last poll (as Java's `ConsumerCoordinator`). Invariants: before a partition is
revoked, its position is committed and the listener has returned. The position of a lost partition
is never committed. A started step runs to its end, also when the poll is cancelled or a listener
raises, and the next poll waits for it. A poll whose time is over does not wait for a commit of the
step; what follows the commit waits for the next poll.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping
from typing import Any

from tidelog.client.assignment.protocol import UNKNOWN_GENERATION
from tidelog.client.client_logging import client_logger
from tidelog.client.config import ConsumerConfig
from tidelog.client.consuming.fetcher import Fetcher
from tidelog.client.consuming.subscription import Subscription
from tidelog.client.groups.commit_queue import CommitQueue
from tidelog.client.groups.coordinator import Coordinator, GroupIdentity
from tidelog.client.groups.leave_limit import CUT_LISTENER_S, LeaveLimit
from tidelog.client.groups.membership import GroupMembership, Membership
from tidelog.client.model import ConsumerGroupMetadata, OffsetAndMetadata, TopicPartition
from tidelog.client.network.cluster import Cluster
from tidelog.client.network.outcomes import own_error, retrieve_exception, start_task
from tidelog.protocol.errors import ErrorCode, KafkaError

logger = client_logger(__name__)

_COMMIT_ERROR_REASONS = {
    ErrorCode.ILLEGAL_GENERATION: "the group has dealt its partitions anew",
    ErrorCode.UNKNOWN_MEMBER_ID: "this consumer is no longer a member of its group",
    ErrorCode.REBALANCE_IN_PROGRESS: "the group is dealing its partitions anew",
    ErrorCode.STALE_MEMBER_EPOCH: "the group has assigned its partitions anew",
    ErrorCode.FENCED_INSTANCE_ID: "another consumer uses the same group_instance_id",
}
_ADVICE_POLL_MORE_OFTEN = "nothing was committed; poll more often, or raise max_poll_interval_ms"
_ADVICE_POLL_FIRST = "nothing was committed; poll, then commit again"
_ADVICE_OWN_ID = "nothing was committed; each consumer of a group needs a group_instance_id of its own"
_OTHER_COMMIT_ADVICE = {
    ErrorCode.REBALANCE_IN_PROGRESS: _ADVICE_POLL_FIRST,
    ErrorCode.FENCED_INSTANCE_ID: _ADVICE_OWN_ID,
}

_listener_call: contextvars.ContextVar[object] = contextvars.ContextVar("tidelog_listener_call", default=None)
"""The call of a listener in which this code runs, in tasks that the listener starts too."""


class Rebalancer:
    """Runs the rebalance steps and the commits of one consumer."""

    def __init__(
        self,
        cluster: Cluster,
        config: ConsumerConfig,
        subscription: Subscription,
        fetcher: Fetcher,
        on_update: Callable[[], None],
        positions: Callable[[], dict[TopicPartition, OffsetAndMetadata]],
    ) -> None:
        assert config.group_id is not None
        self._cluster = cluster
        self._config = config
        self._subscription = subscription
        self._fetcher = fetcher
        self._positions = positions
        self._on_update = on_update
        self._loop = asyncio.get_running_loop()
        self.coordinator = Coordinator(cluster, config.group_id)
        self.membership = self._new_membership(on_update)
        self._join_task: asyncio.Task[tuple[TopicPartition, ...] | None] | None = None
        self._joined_change_count = -1
        self._refusals = 0
        """So many attempts to join in a row were refused."""
        self._refusal_timer: asyncio.TimerHandle | None = None
        """Set until the consumer may try again."""
        self._step_task: asyncio.Task[None] | None = None
        self._is_step_committing = False
        self._wait_deadline: float | None = None
        """The end, in loop time, of the call that waits for the step."""
        self._is_overdue: asyncio.Future[None] = self._loop.create_future()
        """Done when that time is over and the step is committing."""
        self._may_go_on = asyncio.Event()
        """Whether the step may go on after its commit. Clear when the call has ended before it."""
        self._listener_problem: Exception | None = None
        self._listener_call: object = None
        """The call of a listener that runs now."""
        self._commits = CommitQueue(self.coordinator)
        self._next_auto_commit_s = self._loop.time() + config.auto_commit_interval_ms / 1000

    def _new_membership(self, on_update: Callable[[], None]) -> GroupMembership:
        self._classic_membership = Membership(self._cluster, self._config, self.coordinator, on_update)
        return self._classic_membership

    # -- in every poll

    async def step(self, deadline: float) -> bool:
        """Run the step that is due. Waits for the user's listeners without a limit, and until `deadline` (loop time)
        for the commit before a revocation. False when that is not over: a later call waits for it again.

        Raises KafkaError and the exceptions of a listener.
        """
        self.membership.record_poll()
        if self.membership.is_member:
            self._refusals = 0
        is_due = self._subscription.subscribed and self._refusal_timer is None and self._is_step_due()
        if self._step_task is not None or is_due:
            is_over = await self._run_to_completion(self._step_group, deadline)
            if not is_over:
                return False
        self._auto_commit()
        return True

    def _is_step_due(self) -> bool:
        membership = self.membership
        return (
            membership.needs_join
            or membership.is_lost
            or membership.fatal_error is not None
            or self._listener_problem is not None
            or self._joined_change_count != self._subscription.topic_change_count
            or (self._join_task is not None and self._join_task.done())
        )

    async def _run_to_completion(
        self, step: Callable[[], Coroutine[Any, Any, None]], deadline: float | None = None
    ) -> bool:
        """Run the step as a task, or wait for the running one. False when it is committing at `deadline`.

        Cancelling the caller does not cancel the task.
        """
        self.refuse_inside_listener("poll()")
        task = self._step_task
        if task is None:
            task = self._step_task = start_task(step())
            task.add_done_callback(retrieve_exception)
        self._may_go_on.set()
        self._wait_deadline = deadline
        is_overdue = self._is_overdue = self._loop.create_future()
        timer = None if deadline is None else self._loop.call_at(deadline, self._end_wait_for_commit, is_overdue)
        try:
            await asyncio.wait([task, is_overdue], return_when=asyncio.FIRST_COMPLETED)
        finally:
            if timer is not None:
                timer.cancel()
        if not task.done():
            return False
        if self._step_task is task:
            self._step_task = None
            if not task.cancelled():  # by `close`, when a listener takes too long
                task.result()
        return True

    def _end_wait_for_commit(self, is_overdue: asyncio.Future[None]) -> None:
        """At the deadline of a call, or at the begin of a commit after it."""
        if self._is_step_committing and not is_overdue.done():
            self._may_go_on.clear()
            is_overdue.set_result(None)

    async def _commit_in_step(self) -> None:
        """`_commit_quietly`, and then wait for a call that waits for the step: its next part calls the listener and
        changes the assignment.
        """
        if not self._positions():
            return
        self._is_step_committing = True
        try:
            if self._wait_deadline is not None and self._loop.time() >= self._wait_deadline:
                self._end_wait_for_commit(self._is_overdue)
            await self._commit_quietly()
        finally:
            self._is_step_committing = False
        await self._may_go_on.wait()

    def refuse_inside_listener(self, call: str) -> None:
        """Raise RuntimeError inside a listener: the call would wait for the step, or for `close`, which
        waits for the listener.
        """
        if self._listener_call is not None and _listener_call.get() is self._listener_call:
            raise RuntimeError(f"{call} cannot be called in a rebalance listener")

    async def _step_group(self) -> None:
        membership, subscription = self._classic_membership, self._subscription
        await self._raise_fatal_error()
        if membership.is_lost:
            await self._lose_all()
        if self._join_task is not None and self._join_task.done():
            join, self._join_task = self._join_task, None
            try:
                assigned = join.result()
            except Exception:  # also what an assignor raises
                self._wait_after_refusal()
                raise
            if assigned is not None and membership.is_member:
                await self._apply_assignment(assigned)
        if self._join_task is None and (
            membership.needs_join or self._joined_change_count != subscription.topic_change_count
        ):
            await self._revoke_before_join()
            self._joined_change_count = subscription.topic_change_count
            owned = tuple(subscription.assigned)
            self._join_task = start_task(membership.join(tuple(subscription.topics), owned))
            self._join_task.add_done_callback(retrieve_exception)
        self._raise_listener_problem()

    async def _raise_fatal_error(self) -> None:
        membership = self.membership
        error = membership.fatal_error
        if error is not None:
            if not membership.is_fenced:
                membership.fatal_error = None
                self._wait_after_refusal()
            await self._lose_all()
            raise own_error(error)  # each poll of a fenced member raises it again

    def _wait_after_refusal(self) -> None:
        """Have polls wait for the backoff before the next attempt to join. A program that polls on after the error
        would send hundreds of requests a second.
        """
        self._end_wait_after_refusal()
        self._refusals += 1
        wait_s = self._cluster.retry_backoff.wait_ms(self._refusals) / 1000
        self._refusal_timer = self._loop.call_later(wait_s, self._handle_refusal_timer)

    def _handle_refusal_timer(self) -> None:
        self._refusal_timer = None
        self._on_update()

    def _end_wait_after_refusal(self) -> None:
        if self._refusal_timer is not None:
            self._refusal_timer.cancel()
            self._refusal_timer = None

    async def _revoke_before_join(self) -> None:
        """Revoke partitions before joining: all of an eager member, the unsubscribed ones of a
        cooperative member.
        """
        assigned = list(self._subscription.assigned)
        to_revoke = assigned
        if self._classic_membership.is_cooperative:
            to_revoke = [partition for partition in assigned if partition.topic not in self._subscription.topics]
        if self._config.auto_commit:
            await self._commit_in_step()
        if to_revoke:
            await self._notify("revoked", to_revoke)
            self._set_assigned([partition for partition in assigned if partition not in set(to_revoke)])

    async def _apply_assignment(self, assigned: Collection[TopicPartition]) -> None:
        new_assignment = [partition for partition in assigned if partition.topic in self._subscription.topics]
        previous = set(self._subscription.assigned)
        revoked = [partition for partition in previous if partition not in set(new_assignment)]
        if revoked:
            # Cooperative only: the next round assigns these to others. This member starts that
            # round by joining again.
            self.membership.needs_join = True
            if self._config.auto_commit:
                await self._commit_in_step()
            await self._notify("revoked", revoked)
        self._set_assigned(new_assignment)
        await self._notify("assigned", [partition for partition in new_assignment if partition not in previous])

    async def _lose_all(self) -> None:
        self.membership.is_lost = False
        partitions = list(self._subscription.assigned)
        if partitions:
            logger.warning("group %r: lost %s", self.coordinator.group_id, ", ".join(map(str, partitions)))
            self._set_assigned(())
            await self._notify("lost", partitions)

    def _set_assigned(self, partitions: Collection[TopicPartition]) -> None:
        self._subscription.set_assigned(partitions)
        self._fetcher.keep_only(set(partitions))

    async def _notify(self, event: str, partitions: Collection[TopicPartition]) -> None:
        """Call the listener.

        Its exception is stored until the step is done, and the step continues.
        """
        listener = self._subscription.listener
        logger.info("group %r: %s %s", self.coordinator.group_id, event, ", ".join(map(str, partitions)) or "nothing")
        if listener is None:
            return
        task = asyncio.current_task()
        self._listener_call = object()
        token = _listener_call.set(self._listener_call)
        try:
            method: Callable[[Collection[TopicPartition]], Awaitable[None] | None]
            method = getattr(listener, f"on_partitions_{event}")
            result = method(list(partitions))  # the listener's own, to change as it likes
            if result is not None:
                await result
        except asyncio.CancelledError as error:
            if task is not None and task.cancelling():
                raise
            problem = RuntimeError("something that the rebalance listener waited for was cancelled")
            problem.__cause__ = error
            self._listener_problem = self._listener_problem or problem
        except Exception as error:
            logger.error(
                "group %r: the listener raised %r when partitions were %s", self.coordinator.group_id, error, event
            )
            self._listener_problem = self._listener_problem or error
        finally:
            self._listener_call = None
            _listener_call.reset(token)

    def _raise_listener_problem(self) -> None:
        problem, self._listener_problem = self._listener_problem, None
        if problem is not None:
            raise problem

    # -- committing

    @property
    def _identity(self) -> GroupIdentity:
        return self.membership.identity if self._subscription.subscribed else GroupIdentity()

    def metadata(self) -> ConsumerGroupMetadata:
        """The identity for commits by a transaction. Raises KafkaError while this consumer is no member: without a
        generation the broker would take the commit for that of a consumer outside of any group.
        """
        identity = self._identity
        if not self._subscription.is_user_assigned and identity.generation == UNKNOWN_GENERATION:
            raise KafkaError(self._refusal_code, "the consumer is not a member of its group now")
        assert self._config.group_id is not None
        return ConsumerGroupMetadata(
            self._config.group_id, identity.generation, identity.member_id, identity.instance_id
        )

    @property
    def _refusal_code(self) -> ErrorCode:
        if self.membership.fatal_error is not None:
            return self.membership.fatal_error.code
        return ErrorCode.REBALANCE_IN_PROGRESS if self._join_task is not None else ErrorCode.UNKNOWN_MEMBER_ID

    async def commit(self, offsets: Mapping[TopicPartition, OffsetAndMetadata], timeout_ms: float) -> None:
        """Commit and wait.

        Raises KafkaError, with the reason when this consumer may no longer commit.
        """
        await self._await_commit(*self._start_commit(offsets, timeout_ms))

    def commit_in_background(self, offsets: Mapping[TopicPartition, OffsetAndMetadata]) -> asyncio.Task[None]:
        """Start a commit. Commits are sent in the order of their calls."""
        pending = self._start_commit(offsets, self._config.default_api_timeout_ms)
        return start_task(self._await_commit(*pending))

    def _start_commit(
        self, offsets: Mapping[TopicPartition, OffsetAndMetadata], timeout_ms: float
    ) -> tuple[asyncio.Future[None], GroupIdentity]:
        identity = self._identity
        if not offsets or (self._subscription.subscribed and identity.generation == UNKNOWN_GENERATION):
            # Without a generation the broker would take this for the commit of a consumer outside
            # of any group.
            refusal: asyncio.Future[None] = self._loop.create_future()
            refusal.add_done_callback(retrieve_exception)  # the caller may be cancelled before it sees the refusal
            if offsets:
                refusal.set_exception(KafkaError(self._refusal_code))
            else:
                refusal.set_result(None)
            return refusal, identity
        topics = {partition.topic for partition in offsets}
        topic_ids = self._subscription.topic_ids(topics, self._cluster.topic_id)
        return self._commits.add(offsets, identity, timeout_ms, topic_ids), identity

    async def _await_commit(self, future: asyncio.Future[None], identity: GroupIdentity) -> None:
        # Cancelling the caller does not cancel the commit: its request may be sent already.
        await asyncio.wait([future])
        try:
            future.result()
        except KafkaError as error:
            code = error.code
            is_current = identity == self._identity
            # The error of an earlier membership does not concern the present one.
            if self._subscription.subscribed and is_current and self.membership.is_member:
                self.membership.handle_group_error(code)
            if code is ErrorCode.ILLEGAL_GENERATION and not is_current and self._join_task is not None:
                code = ErrorCode.REBALANCE_IN_PROGRESS
            if code in _COMMIT_ERROR_REASONS:
                advice = _OTHER_COMMIT_ADVICE.get(code, _ADVICE_POLL_MORE_OFTEN)
                raise KafkaError(code, f"{_COMMIT_ERROR_REASONS[code]}: {advice}") from None
            raise

    def _auto_commit(self) -> None:
        if not self._config.auto_commit or self._loop.time() < self._next_auto_commit_s:
            return
        if self._commits.is_busy or self._join_task is not None:
            return  # one automatic commit at a time, and none that a rebalance would refuse
        self._next_auto_commit_s = self._loop.time() + self._config.auto_commit_interval_ms / 1000
        offsets = self._positions()
        if offsets:
            self.commit_in_background(offsets).add_done_callback(_log_failure)

    async def _commit_quietly(self) -> None:
        """Commit before a revocation.

        After a failure other members read some records again, so it is only logged.
        """
        try:
            await self.commit(self._positions(), self._config.request_timeout_ms)
        except KafkaError as error:
            logger.warning("group %r: automatic commit failed: %s", self.coordinator.group_id, error)

    # -- the end

    async def unsubscribe(self) -> None:
        """Leave the group as `leave` does. Cancelling the caller does not cancel it."""
        self.refuse_inside_listener("unsubscribe()")
        if self._step_task is not None:
            self._may_go_on.set()
            await asyncio.wait([self._step_task])
            self._step_task = None
        await self._run_to_completion(lambda: self.leave("the consumer unsubscribed", LeaveLimit()))

    async def leave(self, reason: str, limit: LeaveLimit) -> None:
        """Commit when auto commit is on, call the listener, leave the group, clear the assignment, within the limit."""
        step, call_count = self._step_task, self._subscription.call_count
        if step is not None and step is not asyncio.current_task():
            self._may_go_on.set()
            await limit.for_brokers(asyncio.wait([step]))
            if not step.done() and limit.is_cut and self._listener_call is not None:
                await limit.for_listener(asyncio.wait([step]))
            if not step.done():
                step.cancel()
                await asyncio.wait([step])
        self._end_wait_after_refusal()
        join, self._join_task = self._join_task, None
        if join is not None:
            join.cancel()
            await asyncio.wait([join])
        if self.membership.is_lost:
            await self._call_within(limit, self._lose_all())
        subscribed = self._subscription.subscribed
        if subscribed or self._subscription.is_user_assigned:
            if self._config.auto_commit and self._positions():
                await limit.for_connection(self.coordinator.connect())
                await limit.for_brokers(self._commit_quietly())
            assigned = list(self._subscription.assigned)
            if assigned and subscribed:
                await self._call_within(limit, self._notify("revoked", assigned))
        await limit.for_brokers(self._commits.wait_until_empty())
        if call_count == self._subscription.call_count:
            self._subscription.unsubscribe()
        elif self._subscription.subscribed:  # a caller has subscribed again before this call ended
            self._subscription.set_assigned(())
        self._fetcher.keep_only(())
        await self.membership.leave(reason, limit)
        self._raise_listener_problem()

    async def _call_within(self, limit: LeaveLimit, call: Coroutine[Any, Any, None]) -> None:
        if not await limit.for_listener(call):
            group_id = self.coordinator.group_id
            logger.warning("group %r: the listener was cancelled %g s after `close`", group_id, CUT_LISTENER_S)

    async def close(self) -> None:
        """Cancel the background tasks without waiting for the group."""
        self._commits.close()
        self._end_wait_after_refusal()
        for task in (self._step_task, self._join_task):
            if task is not None:
                task.cancel()
        await self.membership.stop()


def _log_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.warning("automatic commit failed, the next one makes up for it: %s", error)
