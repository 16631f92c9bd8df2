"""A member of a classic consumer group: joins, assigns as the leader, heartbeats, leaves.

Here: JoinGroup, SyncGroup, Heartbeat, LeaveGroup and the meaning of their errors. Not here: the
effect of an assignment on the consumer, and the user's listeners (`rebalance`). Invariants:
heartbeats continue from the first assignment until the member leaves or loses its membership,
whatever the application does. When the application has not polled for `max_poll_interval_ms`, the
member leaves, so that a stuck application does not keep its partitions.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, Protocol

from tidelog.client.assignment.assignors import Assignor, checked_assignment
from tidelog.client.assignment.protocol import (
    PROTOCOL_TYPE,
    UNKNOWN_GENERATION,
    MemberSubscription,
    decode_assignment,
    decode_subscription,
    encode_assignment,
    encode_subscription,
)
from tidelog.client.client_logging import client_logger
from tidelog.client.config import ConsumerConfig
from tidelog.client.groups.coordinator import Coordinator, GroupIdentity
from tidelog.client.groups.leave_limit import LeaveLimit
from tidelog.client.model import TopicPartition
from tidelog.client.network.cluster import COORDINATOR, JOINING, Cluster
from tidelog.client.network.outcomes import retrieve_exception, start_task
from tidelog.protocol.errors import ErrorCode, KafkaError, MalformedMessage
from tidelog.protocol.messages.heartbeat import HeartbeatRequest, HeartbeatResponse
from tidelog.protocol.messages.join_group import JoinGroupRequest, JoinGroupRequestProtocol, JoinGroupResponse
from tidelog.protocol.messages.leave_group import LeaveGroupRequest, LeaveGroupResponse, MemberIdentity
from tidelog.protocol.messages.sync_group import SyncGroupRequest, SyncGroupRequestAssignment, SyncGroupResponse

logger = client_logger(__name__)

_JOIN_TIMEOUT_MARGIN_MS = 5_000
_METADATA_TIMEOUT_MS = 5_000.0
_MEMBER_ID_WAIT_S = 1.0
"""A coordinator before Kafka 2.2 answers the first JoinGroup only at the end of the rebalance."""
_LOST_MEMBERSHIP_ERRORS = frozenset((ErrorCode.UNKNOWN_MEMBER_ID, ErrorCode.ILLEGAL_GENERATION))


class GroupMembership(Protocol):
    """What a consumer needs of its membership, in either protocol."""

    needs_join: bool
    is_lost: bool
    """Other members own its partitions already."""
    fatal_error: KafkaError | None

    @property
    def identity(self) -> GroupIdentity: ...

    @property
    def is_member(self) -> bool: ...

    @property
    def is_fenced(self) -> bool: ...

    @property
    def watched_topics(self) -> Sequence[str]: ...

    def record_poll(self) -> None: ...

    def handle_metadata(self) -> None: ...

    def handle_group_error(self, code: ErrorCode) -> None: ...

    async def leave(self, reason: str, limit: LeaveLimit) -> None: ...

    async def stop(self) -> None: ...


class Membership:
    """The membership of one consumer.

    `needs_join`: it must join (again). `is_lost`: other members own its partitions already.
    """

    def __init__(
        self, cluster: Cluster, config: ConsumerConfig, coordinator: Coordinator, on_update: Callable[[], None]
    ) -> None:
        self._cluster = cluster
        self._config = config
        self._coordinator = coordinator
        self._on_update = on_update
        self._loop = asyncio.get_running_loop()
        self._assignors = config.assignors()
        self.is_cooperative = all(assignor.cooperative for assignor in self._assignors)
        """True only when all strategies are: an eager strategy makes every member revoke all
        partitions first.
        """
        self._member_id = ""
        self._is_id_stored = True
        """The coordinator has answered a SyncGroup with this id, so that the next coordinator knows it."""
        self._generation = UNKNOWN_GENERATION
        self._last_assignment: tuple[TopicPartition, ...] = ()
        self._last_generation = UNKNOWN_GENERATION
        self._watched_counts: dict[str, int] | None = None
        self._heartbeat_task: asyncio.Task[None] | None = None
        self._is_joining = False
        self._last_poll_s = self._loop.time()
        self.needs_join = True
        self.is_lost = False
        self.fatal_error: KafkaError | None = None
        """The next poll raises this.

        Every poll raises it when this member may never join again (`is_fenced`).
        """
        self._leave_task: asyncio.Task[None] | None = None
        self._first_join: asyncio.Task[JoinGroupResponse] | None = None
        """The JoinGroup whose answer brings the member id."""

    @property
    def identity(self) -> GroupIdentity:
        """The identity in commits."""
        return GroupIdentity(self._generation, self._member_id, self._config.group_instance_id)

    @property
    def is_member(self) -> bool:
        """The member has a generation that no later error has revoked."""
        return self._generation != UNKNOWN_GENERATION

    @property
    def is_fenced(self) -> bool:
        """Another process has its group_instance_id.

        Joining again would fence that process, and so on.
        """
        return self.fatal_error is not None and self.fatal_error.code is ErrorCode.FENCED_INSTANCE_ID

    def record_poll(self) -> None:
        """Note a poll: the application is alive."""
        self._last_poll_s = self._loop.time()

    # -- joining

    async def join(self, topics: Sequence[str], owned: Sequence[TopicPartition]) -> tuple[TopicPartition, ...] | None:
        """Join and wait for the assignment, with retries.

        Returns None when the membership was lost meanwhile and partitions were owned: the caller
        gives them up and joins again. Raises KafkaError for errors that are not retriable.
        """
        failures = 0
        self._is_joining = True
        try:
            while True:
                try:
                    assigned = await self._join_once(topics, owned)
                    self.needs_join = False
                    self._start_heartbeats()
                    self._is_joining = False
                    self.handle_metadata()  # covers changes after the partition counts were taken
                    return assigned
                except KafkaError as error:
                    code = error.code
                    logger.debug("joining %r: %s", self._coordinator.group_id, error)
                    if code in _LOST_MEMBERSHIP_ERRORS:
                        self._forget_membership(code)
                        if owned:
                            self.is_lost = True
                            return None
                    elif code not in (ErrorCode.REBALANCE_IN_PROGRESS, ErrorCode.MEMBER_ID_REQUIRED):
                        self._coordinator.handle_error(code)
                        if code is ErrorCode.FENCED_INSTANCE_ID:
                            self._fail(code)
                        elif self._config.group_instance_id is not None and not self._coordinator.is_known:
                            self._drop_id_of_one_coordinator()
                        if not error.retriable:
                            raise
                        failures += 1
                        await asyncio.sleep(self._cluster.retry_backoff.wait_ms(failures) / 1000)
        finally:
            self._is_joining = False
            self._on_update()

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
        timeout_ms = max(config.request_timeout_ms, config.max_poll_interval_ms + _JOIN_TIMEOUT_MARGIN_MS)
        call = self._coordinator.call(request, JoinGroupResponse, timeout_ms, purpose=JOINING)
        answer = await (call if self._member_id else self._call_for_id(call))
        code = ErrorCode.of(answer.error_code)
        if code is ErrorCode.MEMBER_ID_REQUIRED:
            self._member_id = answer.member_id
        if code is not ErrorCode.NONE:
            raise KafkaError(code, f"joining group {self._coordinator.group_id!r} was refused")
        self._is_id_stored &= answer.member_id == self._member_id
        self._member_id, self._generation = answer.member_id, answer.generation_id
        self._watched_counts = None
        assignments: dict[str, bytes] = {}
        if answer.leader == answer.member_id:
            assignments = await self._assign_as_leader(answer)
        assigned = await self._sync_group(answer.protocol_name, assignments)
        self._is_id_stored = True
        self._last_assignment, self._last_generation = assigned, self._generation
        return assigned

    async def _call_for_id(self, call: Coroutine[Any, Any, JoinGroupResponse]) -> JoinGroupResponse:
        """The call goes on if this one is cancelled: `leave` needs the id."""
        task = self._first_join = start_task(call)
        task.add_done_callback(retrieve_exception)
        answer = await asyncio.shield(task)
        self._first_join = None
        return answer

    def _subscription(self, assignor: Assignor, topics: Sequence[str], owned: Sequence[TopicPartition]) -> bytes:
        user_data = assignor.user_data(self._last_assignment, self._last_generation)
        rack = self._config.client_rack or None
        return encode_subscription(
            MemberSubscription(tuple(sorted(topics)), tuple(owned), self._last_generation, rack, user_data)
        )

    async def _assign_as_leader(self, answer: JoinGroupResponse) -> dict[str, bytes]:
        """As the leader, compute every member's assignment from all subscriptions and the topics'
        partitions.
        """
        members: dict[str, MemberSubscription] = {}
        for member in answer.members:
            try:
                members[member.member_id] = decode_subscription(member.metadata, member.group_instance_id)
            except MalformedMessage as error:
                raise KafkaError(ErrorCode.INCONSISTENT_GROUP_PROTOCOL, f"{member.member_id}: {error}") from None
        topics = {topic for subscription in members.values() for topic in subscription.topics}
        self._watched_counts = await self._partition_counts(sorted(topics))
        if answer.skip_assignment:
            return {}
        assignor = next((known for known in self._assignors if known.name == answer.protocol_name), None)
        if assignor is None:
            raise KafkaError(ErrorCode.UNSUPPORTED_ASSIGNOR, f"the group chose {answer.protocol_name!r}")
        counts = {topic: count for topic, count in self._watched_counts.items() if count}
        assignment = checked_assignment(assignor.name, assignor.assign(counts, members), members)
        return {member: encode_assignment(partitions) for member, partitions in assignment.items()}

    async def _partition_counts(self, topics: list[str]) -> dict[str, int]:
        """Partition counts by topic, 0 for a topic that does not exist.

        The wait for missing topics is short.
        """
        deadline = self._loop.time() + _METADATA_TIMEOUT_MS / 1000
        self._cluster.track(topics)
        while not self._cluster.metadata.topics.keys() >= set(topics):
            remaining_ms = (deadline - self._loop.time()) * 1000
            if remaining_ms <= 0 or not await self._cluster.wait_for_metadata(remaining_ms):
                break
        return self._current_counts(topics)

    def _current_counts(self, topics: Sequence[str]) -> dict[str, int]:
        metadata = self._cluster.metadata.topics
        return {topic: len(metadata[topic].partitions) if topic in metadata else 0 for topic in topics}

    async def _sync_group(
        self, protocol_name: str | None, assignments: Mapping[str, bytes]
    ) -> tuple[TopicPartition, ...]:
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
        timeout_ms = max(self._config.request_timeout_ms, self._config.max_poll_interval_ms + _JOIN_TIMEOUT_MARGIN_MS)
        answer = await self._coordinator.call(request, SyncGroupResponse, timeout_ms, purpose=JOINING)
        code = ErrorCode.of(answer.error_code)
        if code is not ErrorCode.NONE:
            raise KafkaError(code, f"the assignment of group {self._coordinator.group_id!r} was refused")
        try:
            return decode_assignment(answer.assignment)
        except MalformedMessage as error:
            text = f"the leader of group {self._coordinator.group_id!r} sent an assignment that cannot be read: {error}"
            raise KafkaError(ErrorCode.INCONSISTENT_GROUP_PROTOCOL, text) from None

    def handle_metadata(self) -> None:
        """As the leader, start a rebalance when a topic appeared, disappeared or got partitions."""
        if (
            self._watched_counts is not None
            and not self._is_joining
            and self._current_counts(list(self._watched_counts)) != self._watched_counts
        ):
            self._watched_counts = None
            self.request_join()

    @property
    def watched_topics(self) -> Sequence[str]:
        """The topics of the whole group while this member is the leader."""
        return list(self._watched_counts or ())

    def request_join(self) -> None:
        """Join again at the next poll."""
        self.needs_join = True
        self._on_update()

    # -- errors and heartbeats

    def handle_group_error(self, code: ErrorCode) -> None:
        """Act on an error of a commit or a heartbeat: a lost membership or a rebalance."""
        self._coordinator.handle_error(code)
        if self._is_joining:
            return  # the join gets the same error itself
        if code is ErrorCode.REBALANCE_IN_PROGRESS:
            self.request_join()
        elif code in _LOST_MEMBERSHIP_ERRORS:
            self._forget_membership(code)
            self.is_lost = True
            self.request_join()
        elif code in (ErrorCode.FENCED_INSTANCE_ID, ErrorCode.GROUP_AUTHORIZATION_FAILED):
            self._fail(code)

    def _fail(self, code: ErrorCode) -> None:
        problem = f"group {self._coordinator.group_id!r}"
        if code is ErrorCode.FENCED_INSTANCE_ID:
            problem += f": another consumer uses group_instance_id {self._config.group_instance_id!r}"
        self.fatal_error = KafkaError(code, problem)
        self._generation = UNKNOWN_GENERATION
        self.is_lost = True
        self.request_join()

    def _forget_membership(self, code: ErrorCode) -> None:
        self._generation = UNKNOWN_GENERATION
        if code is ErrorCode.UNKNOWN_MEMBER_ID:
            self._member_id = ""

    def _drop_id_of_one_coordinator(self) -> None:
        """A coordinator that hung and was replaced makes ids until it learns of it. The next one does not know them,
        and would fence this static member for good.
        """
        if not self._is_id_stored:
            self._forget_membership(ErrorCode.UNKNOWN_MEMBER_ID)

    def _start_heartbeats(self) -> None:
        if self._heartbeat_task is None or self._heartbeat_task.done():
            self._heartbeat_task = start_task(self._heartbeat_loop())

    async def _heartbeat_loop(self) -> None:
        config = self._config
        while True:
            await asyncio.sleep(config.heartbeat_interval_ms / 1000)
            if self._is_joining:
                continue
            if self._loop.time() - self._last_poll_s > config.max_poll_interval_ms / 1000:
                logger.warning(
                    "no poll for max_poll_interval_ms=%d: leaving group %r until the next one",
                    config.max_poll_interval_ms,
                    self._coordinator.group_id,
                )
                # A poll may join again at any moment: by then `is_lost` must be set and heartbeats
                # must have stopped.
                leave_request = self._send_leave(self._member_id, "max.poll.interval.ms passed without a poll")
                self._leave_task = start_task(leave_request)
                self._forget_membership(ErrorCode.UNKNOWN_MEMBER_ID)
                self.is_lost = True
                self.request_join()
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
        if code is not ErrorCode.NONE and generation == self._generation and not self._is_joining:
            self.handle_group_error(code)

    # -- leaving

    async def leave(self, reason: str, limit: LeaveLimit) -> None:
        """Stop heartbeats and send LeaveGroup. A static member sends none, because it may come
        back.

        Waits for the response up to the limit.
        """
        if self._first_join is not None and self._config.group_instance_id is None:
            await limit.for_brokers(self._learn_id(self._first_join))
        await self.stop()
        if self._member_id and self._config.group_instance_id is None:
            await limit.for_connection(self._coordinator.connect())
        leave_request = self._send_leave(self._member_id, reason)
        self._forget_membership(ErrorCode.UNKNOWN_MEMBER_ID)
        self.needs_join, self.is_lost, self.fatal_error = True, False, None
        await limit.for_brokers(leave_request)

    async def _learn_id(self, first_join: asyncio.Task[JoinGroupResponse]) -> None:
        """Without LeaveGroup the coordinator waits in each rebalance for a member to which it has given an id, until
        the session timeout.
        """
        done, _ = await asyncio.wait([first_join], timeout=_MEMBER_ID_WAIT_S)
        if done and not first_join.cancelled() and first_join.exception() is None:
            self._member_id = first_join.result().member_id

    async def stop(self) -> None:
        """Cancel the background tasks without leaving the group."""
        for task in (self._heartbeat_task, self._leave_task, self._first_join):
            if task is not None:
                task.cancel()
                await asyncio.wait([task])
        self._heartbeat_task = self._leave_task = self._first_join = None

    async def _send_leave(self, member_id: str, reason: str) -> None:
        if not member_id or self._config.group_instance_id is not None or not self._coordinator.is_known:
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
