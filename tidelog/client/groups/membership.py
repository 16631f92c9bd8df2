"""A member of a classic consumer group: joins, deals out partitions when it leads, heartbeats, leaves.

Here: JoinGroup, SyncGroup, Heartbeat, LeaveGroup and what their errors mean. Not here: what an assignment does to the
consumer, and the user's listeners (`rebalance`). Invariants: heartbeats are sent from the first assignment until the
member leaves or is told that it is none, whatever the application does; but when the application has not polled for
`max_poll_interval_ms` the member leaves by itself, so that a stuck one does not keep its partitions.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence

from tidelog.client.assignment.assignors import Assignor, assignor_named
from tidelog.client.assignment.protocol import (
    PROTOCOL_TYPE,
    UNKNOWN_GENERATION,
    MemberSubscription,
    decode_assignment,
    decode_subscription,
    encode_assignment,
    encode_subscription,
)
from tidelog.client.config import ConsumerConfig
from tidelog.client.groups.coordinator import Coordinator, GroupIdentity
from tidelog.client.model import TopicPartition
from tidelog.client.network.cluster import COORDINATOR, JOINING, Cluster
from tidelog.protocol.errors import ErrorCode, KafkaError, MalformedMessage
from tidelog.protocol.messages.heartbeat import HeartbeatRequest, HeartbeatResponse
from tidelog.protocol.messages.join_group import JoinGroupRequest, JoinGroupRequestProtocol, JoinGroupResponse
from tidelog.protocol.messages.leave_group import LeaveGroupRequest, LeaveGroupResponse, MemberIdentity
from tidelog.protocol.messages.sync_group import SyncGroupRequest, SyncGroupRequestAssignment, SyncGroupResponse

logger = logging.getLogger(__name__)

_JOIN_GRACE_MS = 5_000
_METADATA_WAIT_MS = 5_000.0
_NOT_A_MEMBER = frozenset((ErrorCode.UNKNOWN_MEMBER_ID, ErrorCode.ILLEGAL_GENERATION))


async def wait_until(until: float | None, work: Awaitable[object]) -> None:
    """Wait for the work, which is cancelled at that time of the loop; None: however long it takes."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout_at(until):
            await work


class Membership:
    """One consumer's. `needs_join` says that it must join (again); `lost` that its partitions are others' already."""

    def __init__(
        self, cluster: Cluster, config: ConsumerConfig, coordinator: Coordinator, on_news: Callable[[], None]
    ) -> None:
        self._cluster = cluster
        self._config = config
        self._coordinator = coordinator
        self._on_news = on_news
        self._loop = asyncio.get_running_loop()
        self._assignors = [assignor for name in config.strategies if (assignor := assignor_named(name)) is not None]
        self.cooperative = all(assignor.cooperative for assignor in self._assignors)
        """Only when all strategies are: one that is not has every member give up everything first."""
        self._member_id = ""
        self._generation = UNKNOWN_GENERATION
        self._last_assignment: tuple[TopicPartition, ...] = ()
        self._last_generation = UNKNOWN_GENERATION
        self._watched: dict[str, int] | None = None
        self._heartbeats: asyncio.Task[None] | None = None
        self._joining = False
        self._last_poll = self._loop.time()
        self.needs_join = True
        self.lost = False
        self.fatal: KafkaError | None = None
        """Raised by the next poll; by every poll when this member may never come back (`fenced`)."""
        self._leave_task: asyncio.Task[None] | None = None

    @property
    def identity(self) -> GroupIdentity:
        """As commits carry it."""
        return GroupIdentity(self._generation, self._member_id, self._config.group_instance_id)

    @property
    def is_member(self) -> bool:
        """The group gave it a generation, and no answer since took it back."""
        return self._generation != UNKNOWN_GENERATION

    @property
    def joining(self) -> bool:
        return self._joining

    @property
    def fenced(self) -> bool:
        """Another process has its group_instance_id. Joining again would fence that one, and so on in turns."""
        return self.fatal is not None and self.fatal.code is ErrorCode.FENCED_INSTANCE_ID

    def polled(self) -> None:
        """The application is alive."""
        self._last_poll = self._loop.time()

    # -- joining

    async def join(self, topics: Sequence[str], owned: Sequence[TopicPartition]) -> tuple[TopicPartition, ...] | None:
        """Join and wait for the assignment, as often as it takes.

        None when membership was lost underway while partitions were owned: give those up, then join again. Raises the
        KafkaError of a refusal that trying again cannot cure.
        """
        failures = 0
        self._joining = True
        try:
            while True:
                try:
                    assigned = await self._join_once(topics, owned)
                    self.needs_join = False
                    self._start_heartbeats()
                    self._joining = False
                    self.metadata_changed()  # what changed after the partitions were counted
                    return assigned
                except KafkaError as error:
                    code = error.code
                    logger.debug("joining %r: %s", self._coordinator.group_id, error)
                    if code in _NOT_A_MEMBER:
                        self._forget_membership(code)
                        if owned:
                            self.lost = True
                            return None
                    elif code not in (ErrorCode.REBALANCE_IN_PROGRESS, ErrorCode.MEMBER_ID_REQUIRED):
                        self._coordinator.heard(code)
                        if code is ErrorCode.FENCED_INSTANCE_ID:
                            self._fail(code)
                        if not error.retriable:
                            raise
                        failures += 1
                        await asyncio.sleep(self._cluster.retry_backoff.wait_ms(failures) / 1000)
        finally:
            self._joining = False
            self._on_news()

    async def _join_once(self, topics: Sequence[str], owned: Sequence[TopicPartition]) -> tuple[TopicPartition, ...]:
        config = self._config
        request = JoinGroupRequest(
            group_id=self._coordinator.group_id,
            session_timeout_ms=config.session_timeout_ms,
            rebalance_timeout_ms=config.max_poll_interval_ms,
            member_id=self._member_id,
            group_instance_id=config.group_instance_id,
            protocol_type=PROTOCOL_TYPE,
            protocols=[
                JoinGroupRequestProtocol(name=assignor.name, metadata=self._subscription(assignor, topics, owned))
                for assignor in self._assignors
            ],
        )
        patience_ms = max(config.request_timeout_ms, config.max_poll_interval_ms + _JOIN_GRACE_MS)
        answer = await self._coordinator.call(request, JoinGroupResponse, patience_ms, purpose=JOINING)
        code = ErrorCode.of(answer.error_code)
        if code is ErrorCode.MEMBER_ID_REQUIRED:
            self._member_id = answer.member_id
        if code is not ErrorCode.NONE:
            raise KafkaError(code, f"joining group {self._coordinator.group_id!r} was refused")
        self._member_id, self._generation = answer.member_id, answer.generation_id
        self._watched = None
        assignments: dict[str, bytes] = {}
        if answer.leader == answer.member_id:
            assignments = await self._deal(answer)
        assigned = await self._sync(answer.protocol_name, assignments)
        self._last_assignment, self._last_generation = assigned, self._generation
        return assigned

    def _subscription(self, assignor: Assignor, topics: Sequence[str], owned: Sequence[TopicPartition]) -> bytes:
        user_data = assignor.user_data(self._last_assignment, self._last_generation)
        rack = self._config.client_rack or None
        return encode_subscription(
            MemberSubscription(tuple(sorted(topics)), tuple(owned), self._last_generation, rack, user_data)
        )

    async def _deal(self, answer: JoinGroupResponse) -> dict[str, bytes]:
        """The leader's part: every member's assignment, from everybody's subscriptions and the topics' partitions."""
        members: dict[str, MemberSubscription] = {}
        for member in answer.members:
            try:
                members[member.member_id] = decode_subscription(member.metadata, member.group_instance_id)
            except MalformedMessage as error:
                raise KafkaError(ErrorCode.INCONSISTENT_GROUP_PROTOCOL, f"{member.member_id}: {error}") from None
        topics = {topic for subscription in members.values() for topic in subscription.topics}
        self._watched = await self._partition_counts(sorted(topics))
        if answer.skip_assignment:
            return {}
        assignor = assignor_named(answer.protocol_name or "")
        if assignor is None:
            raise KafkaError(ErrorCode.UNSUPPORTED_ASSIGNOR, f"the group chose {answer.protocol_name!r}")
        counts = {topic: count for topic, count in self._watched.items() if count}
        assignment = assignor.assign(counts, members)
        return {member: encode_assignment(partitions) for member, partitions in assignment.items()}

    async def _partition_counts(self, topics: list[str]) -> dict[str, int]:
        """0 for a topic that does not exist: it is looked for, but the group does not wait for it long."""
        deadline = self._loop.time() + _METADATA_WAIT_MS / 1000
        self._cluster.track(topics)
        while not self._cluster.metadata.topics.keys() >= set(topics):
            left_ms = (deadline - self._loop.time()) * 1000
            if left_ms <= 0 or not await self._cluster.wait_for_metadata(left_ms):
                break
        return self._counts_now(topics)

    def _counts_now(self, topics: Sequence[str]) -> dict[str, int]:
        known = self._cluster.metadata.topics
        return {topic: len(known[topic].partitions) if topic in known else 0 for topic in topics}

    async def _sync(self, protocol_name: str | None, assignments: Mapping[str, bytes]) -> tuple[TopicPartition, ...]:
        request = SyncGroupRequest(
            group_id=self._coordinator.group_id,
            generation_id=self._generation,
            member_id=self._member_id,
            group_instance_id=self._config.group_instance_id,
            protocol_type=PROTOCOL_TYPE,
            protocol_name=protocol_name,
            assignments=[
                SyncGroupRequestAssignment(member_id=member, assignment=assignment)
                for member, assignment in assignments.items()
            ],
        )
        patience_ms = max(self._config.request_timeout_ms, self._config.max_poll_interval_ms + _JOIN_GRACE_MS)
        answer = await self._coordinator.call(request, SyncGroupResponse, patience_ms, purpose=JOINING)
        code = ErrorCode.of(answer.error_code)
        if code is not ErrorCode.NONE:
            raise KafkaError(code, f"the assignment of group {self._coordinator.group_id!r} was refused")
        return decode_assignment(answer.assignment)

    def metadata_changed(self) -> None:
        """The leader has the group dealt anew when a topic came, went or got partitions."""
        if self._watched is not None and not self._joining and self._counts_now(list(self._watched)) != self._watched:
            self._watched = None
            self.ask_join()

    @property
    def watched_topics(self) -> Sequence[str]:
        """Topics of the whole group while this member leads it."""
        return list(self._watched or ())

    def ask_join(self) -> None:
        """Join anew at the next poll."""
        self.needs_join = True
        self._on_news()

    # -- staying

    def refused(self, code: ErrorCode) -> None:
        """An answer to a commit or a heartbeat said that this is no member (any more), or that the group deals anew."""
        self._coordinator.heard(code)
        if self._joining:
            return  # which is about to hear it first hand
        if code is ErrorCode.REBALANCE_IN_PROGRESS:
            self.ask_join()
        elif code in _NOT_A_MEMBER:
            self._forget_membership(code)
            self.lost = True
            self.ask_join()
        elif code in (ErrorCode.FENCED_INSTANCE_ID, ErrorCode.GROUP_AUTHORIZATION_FAILED):
            self._fail(code)

    def _fail(self, code: ErrorCode) -> None:
        self.fatal = KafkaError(code, f"group {self._coordinator.group_id!r}")
        self._generation = UNKNOWN_GENERATION
        self.lost = True
        self.ask_join()

    def _forget_membership(self, code: ErrorCode) -> None:
        self._generation = UNKNOWN_GENERATION
        if code is ErrorCode.UNKNOWN_MEMBER_ID:
            self._member_id = ""

    def _start_heartbeats(self) -> None:
        if self._heartbeats is None or self._heartbeats.done():
            self._heartbeats = self._loop.create_task(self._keep_alive())

    async def _keep_alive(self) -> None:
        config = self._config
        while True:
            await asyncio.sleep(config.heartbeat_interval_ms / 1000)
            if self._joining:
                continue
            if self._loop.time() - self._last_poll > config.max_poll_interval_ms / 1000:
                logger.warning(
                    "no poll for max_poll_interval_ms=%d: leaving group %r until the next one",
                    config.max_poll_interval_ms,
                    self._coordinator.group_id,
                )
                # A poll may join anew at any moment: it must find the partitions lost, and no heartbeats running.
                leaving = self._send_leave(self._member_id, "max.poll.interval.ms passed without a poll")
                self._leave_task = self._loop.create_task(leaving)
                self._forget_membership(ErrorCode.UNKNOWN_MEMBER_ID)
                self.lost = True
                self.ask_join()
                return
            if self._generation == UNKNOWN_GENERATION:
                return
            await self._heartbeat()

    async def _heartbeat(self) -> None:
        generation = self._generation
        request = HeartbeatRequest(
            group_id=self._coordinator.group_id,
            generation_id=generation,
            member_id=self._member_id,
            group_instance_id=self._config.group_instance_id,
        )
        timeout_ms = min(self._config.request_timeout_ms, self._config.session_timeout_ms)
        try:
            answer = await self._coordinator.call(request, HeartbeatResponse, timeout_ms)
            code = ErrorCode.of(answer.error_code)
        except KafkaError as error:
            logger.debug("a heartbeat failed: %s", error)
            return
        if code is not ErrorCode.NONE and generation == self._generation and not self._joining:
            self.refused(code)

    # -- leaving

    async def leave(self, reason: str, until: float | None = None) -> None:
        """Stop heartbeats, and tell the group unless this is a static member, who may come back.

        Its answer is waited for `until` that time of the loop.
        """
        await self.stop()
        leaving = self._send_leave(self._member_id, reason)
        self._forget_membership(ErrorCode.UNKNOWN_MEMBER_ID)
        self.needs_join, self.lost, self.fatal = True, False, None
        await wait_until(until, leaving)

    async def stop(self) -> None:
        """End what runs in the background; the group is not told."""
        for task in (self._heartbeats, self._leave_task):
            if task is not None:
                task.cancel()
                await asyncio.wait([task])
        self._heartbeats = self._leave_task = None

    async def _send_leave(self, member_id: str, reason: str) -> None:
        if not member_id or self._config.group_instance_id is not None or not self._coordinator.known:
            return
        try:
            connection = await self._cluster.connection(await self._coordinator.find(), COORDINATOR)
            request = LeaveGroupRequest(group_id=self._coordinator.group_id, member_id=member_id)
            if connection.version_of(LeaveGroupRequest) >= 3:
                member = MemberIdentity(member_id=member_id, reason=reason)
                request = LeaveGroupRequest(group_id=self._coordinator.group_id, members=[member])
            await self._coordinator.call(request, LeaveGroupResponse)
        except KafkaError as error:
            logger.debug("leaving group %r: %s", self._coordinator.group_id, error)
