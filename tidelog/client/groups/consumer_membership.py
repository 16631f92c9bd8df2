"""A member of the consumer group protocol (KIP-848): sends the heartbeats of `consumer_member`.

Here: the heartbeat task, the coordinator, errors that end the membership. Not here: what an assignment
does to the consumer (`reconciliation`). Invariants: heartbeats continue whatever the application does,
until it has not polled for `max_poll_interval_ms`; then the member leaves, so that a stuck application
does not keep its partitions.
"""

from __future__ import annotations

import asyncio
import base64
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress

from tidelog.client.assignment.protocol import UNKNOWN_GENERATION
from tidelog.client.client_logging import client_logger
from tidelog.client.config import ConsumerConfig
from tidelog.client.groups.consumer_member import ConsumerMember, IdPartition, Outcome, TopicSelection
from tidelog.client.groups.coordinator import Coordinator, GroupIdentity
from tidelog.client.groups.leave_limit import LeaveLimit
from tidelog.client.network.cluster import Cluster
from tidelog.client.network.outcomes import start_task
from tidelog.protocol.errors import ErrorCode, KafkaError
from tidelog.protocol.messages.consumer_group_heartbeat import (
    ConsumerGroupHeartbeatRequest,
    ConsumerGroupHeartbeatResponse,
)

logger = client_logger(__name__)

_REGEX_VERSION = 1


class ConsumerMembership:
    """The membership of one consumer. The members are those of `membership.Membership`."""

    def __init__(
        self, cluster: Cluster, config: ConsumerConfig, coordinator: Coordinator, on_update: Callable[[], None]
    ) -> None:
        self._cluster = cluster
        self._config = config
        self._coordinator = coordinator
        self._on_update = on_update
        self._loop = asyncio.get_running_loop()
        self._member = ConsumerMember(
            coordinator.group_id,
            base64.urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("="),
            rebalance_timeout_ms=config.max_poll_interval_ms,
            backoff_ms=cluster.retry_backoff.wait_ms,
            instance_id=config.group_instance_id,
            rack_id=config.client_rack or None,
            server_assignor=config.group_remote_assignor,
        )
        self._task: asyncio.Task[None] | None = None
        self._wake_event = asyncio.Event()
        self._last_poll_s = self._loop.time()
        self.needs_join = True
        self.is_lost = False
        self.fatal_error: KafkaError | None = None
        self.metadata_changed = False
        """The metadata has changed since the consumer last looked up topic ids."""

    @property
    def _now_ms(self) -> float:
        return self._loop.time() * 1000

    @property
    def identity(self) -> GroupIdentity:
        """The identity in commits: the member epoch takes the place of the generation. It is unknown from a loss of the
        partitions until the consumer acts on it: the heartbeats join again meanwhile, and a commit would be accepted.
        """
        epoch = self._member.epoch if self.may_own_partitions() else UNKNOWN_GENERATION
        return GroupIdentity(epoch, self._member.member_id, self._config.group_instance_id)

    @property
    def is_member(self) -> bool:
        return self._member.is_member

    def may_own_partitions(self) -> bool:
        """No heartbeat since the last step has said otherwise."""
        return self._member.is_member and not self.is_lost

    @property
    def is_fenced(self) -> bool:
        return self.fatal_error is not None and self.fatal_error.code is ErrorCode.FENCED_INSTANCE_ID

    @property
    def watched_topics(self) -> Sequence[str]:
        return ()

    @property
    def target(self) -> frozenset[IdPartition] | None:
        """The assignment to reconcile with."""
        return self._member.target

    def record_poll(self) -> None:
        self._last_poll_s = self._loop.time()

    def handle_metadata(self) -> None:
        self.metadata_changed = True

    # -- the consumer's side

    def subscribe(self, topics: TopicSelection) -> None:
        """Join with these topics, or change them."""
        self.needs_join = False
        self._member.subscribe(topics, self._now_ms)
        if self._task is None or self._task.done():
            self._task = start_task(self._heartbeat_loop())
        self._wake_event.set()

    def acknowledge(self, owned: Sequence[IdPartition], target: frozenset[IdPartition]) -> None:
        """Tell the coordinator which partitions are owned after the work on `target`."""
        self._member.acknowledge(owned, target, self._now_ms)
        self._wake_event.set()

    def handle_group_error(self, code: ErrorCode) -> None:
        """A commit was refused: the next heartbeat says what became of this member."""
        self._coordinator.handle_error(code)
        if code is ErrorCode.FENCED_INSTANCE_ID:
            self._fail(KafkaError(code, f"group {self._coordinator.group_id!r}"))
        else:
            self._member.heartbeat_now(self._now_ms)
            self._wake_event.set()

    # -- heartbeats

    async def _heartbeat_loop(self) -> None:
        while self.fatal_error is None:
            self._wake_event.clear()
            wait_ms = self._member.ms_until_heartbeat(self._now_ms)
            if wait_ms is None:
                return
            idle_ms = self._last_poll_s * 1000 + self._config.max_poll_interval_ms - self._now_ms
            if idle_ms <= 0:
                await self._leave_idle()
                continue  # a poll may have subscribed again meanwhile
            if wait_ms > 0:
                with suppress(TimeoutError):
                    async with asyncio.timeout(min(wait_ms, idle_ms) / 1000):
                        await self._wake_event.wait()
                continue
            await self._heartbeat()

    async def _heartbeat(self) -> None:
        member = self._member
        request = member.next_heartbeat()
        try:
            if request.subscribed_topic_regex is not None:
                await self._fit_regex(request)
            response = await self._coordinator.call(request, ConsumerGroupHeartbeatResponse)
        except KafkaError as error:
            logger.debug("a heartbeat of group %r failed: %s", member.group_id, error)
            if error.retriable:
                member.handle_failure(self._now_ms)
            else:
                self._fail(_explained(error))
            return
        code = ErrorCode.of(response.error_code)
        self._coordinator.handle_error(code)
        outcome = member.handle_response(response, self._now_ms)
        if outcome is Outcome.FATAL:
            self._fail(KafkaError(code, f"group {member.group_id!r}: {response.error_message or 'refused'}"))
        elif outcome is Outcome.FENCED:
            logger.warning("group %r: %s", member.group_id, response.error_message or code.name)
            self.is_lost = True
        self._on_update()

    async def _fit_regex(self, request: ConsumerGroupHeartbeatRequest) -> None:
        """A broker of version 0 keeps no expression that an empty one would end. Raises KafkaError for any other."""
        connection = await self._cluster.connection(await self._coordinator.find())
        if connection.version_of(ConsumerGroupHeartbeatRequest) >= _REGEX_VERSION:
            return
        if request.subscribed_topic_regex:
            problem = "this broker does not evaluate patterns of the consumer protocol; subscribe to names"
            raise KafkaError(ErrorCode.UNSUPPORTED_VERSION, problem)
        request.subscribed_topic_regex = None

    async def _leave_idle(self) -> None:
        group_id, interval_ms = self._member.group_id, self._config.max_poll_interval_ms
        logger.warning(
            "no poll for max_poll_interval_ms=%d: leaving group %r until the next one", interval_ms, group_id
        )
        request = self._member.leave()
        self.is_lost = self.needs_join = True
        self._on_update()
        await self._send_leave(request)

    def _fail(self, error: KafkaError) -> None:
        self.fatal_error = error
        self.needs_join = True
        self.is_lost = True
        self._member.leave()
        self._on_update()

    # -- leaving

    async def leave(self, reason: str, limit: LeaveLimit) -> None:
        """Stop heartbeats and leave. A static member says that it may come back."""
        await self.stop()
        request = self._member.leave()
        self.needs_join, self.is_lost, self.fatal_error = True, False, None
        logger.debug("leaving group %r: %s", self._coordinator.group_id, reason)
        if request is not None:
            await limit.for_connection(self._coordinator.connect())
            await limit.for_brokers(self._send_leave(request))

    async def stop(self) -> None:
        """Cancel the heartbeat task without leaving the group."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.wait([task])

    async def _send_leave(self, request: ConsumerGroupHeartbeatRequest | None) -> None:
        if request is None or not self._coordinator.is_known:
            return
        try:
            await self._coordinator.call(request, ConsumerGroupHeartbeatResponse)
        except KafkaError as error:
            logger.debug("leaving group %r: %s", self._coordinator.group_id, error)


def _explained(error: KafkaError) -> KafkaError:
    if error.code is not ErrorCode.UNSUPPORTED_VERSION or "ConsumerGroupHeartbeat" not in str(error):
        return error
    problem = "this broker does not serve group_protocol='consumer' (KIP-848, Kafka 4.0); use 'classic'"
    return KafkaError(error.code, problem)
