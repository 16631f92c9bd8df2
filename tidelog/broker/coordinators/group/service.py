"""The group coordinator as handlers see it: which partition a group lives in, and requests on their way into the
runtime.

Here lives what is checked before a group is looked at (ids, timeouts, what an answer looks like while the partition
loads); no state. The invariant: a group's requests all go to the partition that Java's hash of its id names, so that
Kafka finds the same groups in the same log. Source: Kafka's `GroupCoordinatorService`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from functools import partial
from itertools import chain
from typing import Any

from tidelog.broker.coordinators.group.config import GroupCoordinatorConfig
from tidelog.broker.coordinators.group.coordinator import GroupCoordinator
from tidelog.broker.coordinators.group.memory import GroupMemoryBudget
from tidelog.broker.coordinators.group.offsets import AskedTopics, FetchedTopics
from tidelog.broker.coordinators.outcome import Caller, RandomBits
from tidelog.broker.coordinators.ports import Ports
from tidelog.broker.coordinators.runtime import CoordinatorRuntime
from tidelog.broker.network.request import Deferred, RequestContext
from tidelog.protocol.errors import ErrorCode, KafkaError
from tidelog.protocol.messages.delete_groups import DeletableGroupResult
from tidelog.protocol.messages.describe_groups import DescribedGroup
from tidelog.protocol.messages.heartbeat import HeartbeatRequest, HeartbeatResponse
from tidelog.protocol.messages.join_group import JoinGroupRequest, JoinGroupResponse
from tidelog.protocol.messages.leave_group import LeaveGroupRequest, LeaveGroupResponse, MemberIdentity
from tidelog.protocol.messages.list_groups import ListedGroup
from tidelog.protocol.messages.offset_commit import OffsetCommitRequest
from tidelog.protocol.messages.sync_group import SyncGroupRequest, SyncGroupResponse

TOPIC = "__consumer_offsets"
PROTOCOL_NAMED_FROM = 5  # SyncGroup says protocol type and name
LEAVE_MANY_FROM = 3
NULL_PROTOCOL_FROM = 7  # JoinGroup
LAGS_MAX = 10_000
LOOKED_AT_FOR_EACH = 10


class GroupCoordinatorService:
    """`partition_count`: how many partitions `__consumer_offsets` has, or will have once it is created.

    A method returns the response, or a `Deferred` of a response or KafkaError; it raises KafkaError for what is
    refused as a whole.
    """

    def __init__(
        self,
        config: GroupCoordinatorConfig,
        ports: Ports,
        rng: RandomBits,
        partition_count: Callable[[], int],
    ) -> None:
        self.config = config
        self._partition_count = partition_count
        self._memory = GroupMemoryBudget(config.max_groups_memory_bytes)
        self._offsets_memory = GroupMemoryBudget(config.max_offsets_memory_bytes)
        self._ports = ports
        self._runtime: CoordinatorRuntime[GroupCoordinator] = CoordinatorRuntime(
            "group coordinator",
            ports,
            lambda partition: GroupCoordinator(config, rng, self._memory, self._offsets_memory),
            write_timeout_ms=config.offsets_commit_timeout_ms,
            compression=config.offsets_topic_compression_codec,
        )

    # -- the node's side ---------------------------------------------------------------------------------------------

    def partition_for(self, group_id: str) -> int:
        """The partition of `__consumer_offsets` that holds the group."""
        return abs_of_int32(java_hash(group_id)) % self._partition_count()

    def on_partition_elected(self, index: int, leader_epoch: int) -> None:
        self._runtime.elected(index, leader_epoch)

    def on_partition_resigned(self, index: int) -> None:
        self._runtime.resigned(index)

    def on_topics_deleted(self, topics: Collection[tuple[str, bytes]]) -> None:
        """(name, topic id) of each; the offsets committed for them are forgotten."""
        self._runtime.submit_to_all(lambda coordinator, now: coordinator.forget_topics(topics, now))

    def is_loading(self) -> bool:
        return self._runtime.is_loading()

    def close(self) -> None:
        self._runtime.close()

    # -- membership --------------------------------------------------------------------------------------------------

    def join(self, context: RequestContext, request: JoinGroupRequest) -> JoinGroupResponse | Deferred:
        _check_group_id(request.group_id)
        timeout_ms = request.session_timeout_ms
        if not self.config.group_min_session_timeout_ms <= timeout_ms <= self.config.group_max_session_timeout_ms:
            raise KafkaError(ErrorCode.INVALID_SESSION_TIMEOUT)
        if context.api_version == 0:
            request.rebalance_timeout_ms = timeout_ms
        answer: JoinGroupResponse | Deferred = self._submit(
            request.group_id,
            lambda coordinator, token, now: coordinator.join(request, caller_of(context, token), now),
            _null_protocol if context.api_version >= NULL_PROTOCOL_FROM else None,
        )
        return answer

    def sync(self, context: RequestContext, request: SyncGroupRequest) -> SyncGroupResponse | Deferred:
        _check_group_id(request.group_id)
        if context.api_version >= PROTOCOL_NAMED_FROM and None in (request.protocol_type, request.protocol_name):
            raise KafkaError(ErrorCode.INCONSISTENT_GROUP_PROTOCOL)
        answer: SyncGroupResponse | Deferred = self._submit(
            request.group_id,
            lambda coordinator, token, now: coordinator.sync(request, caller_of(context, token), now),
        )
        return answer

    def heartbeat(self, context: RequestContext, request: HeartbeatRequest) -> HeartbeatResponse | Deferred:
        _check_group_id(request.group_id)
        try:
            answer: HeartbeatResponse | Deferred = self._submit(
                request.group_id,
                lambda coordinator, token, now: coordinator.heartbeat(request, caller_of(context, token), now),
                holds_nothing=True,
            )
            return answer
        except KafkaError as error:
            if error.code is not ErrorCode.COORDINATOR_LOAD_IN_PROGRESS:
                raise
            return HeartbeatResponse()  # whoever it is, it is alive; nobody is expired before the load is done

    def leave(self, context: RequestContext, request: LeaveGroupRequest) -> LeaveGroupResponse | Deferred:
        _check_group_id(request.group_id)
        members = request.members
        finish: Callable[[Any], Any] | None = None
        if context.api_version < LEAVE_MANY_FROM:
            members = [MemberIdentity(member_id=request.member_id)]
            finish = _leave_of_one
        answer: LeaveGroupResponse | Deferred = self._submit(
            request.group_id,
            lambda coordinator, token, now: coordinator.leave(
                request.group_id, members, caller_of(context, token), now
            ),
            finish,
        )
        return answer

    # -- offsets -----------------------------------------------------------------------------------------------------

    def commit_offsets(self, context: RequestContext, request: OffsetCommitRequest) -> Any:
        """`request` has only topics that exist, by name, with their ids where known."""
        return self._submit(
            request.group_id,
            lambda coordinator, token, now: coordinator.commit_offsets(request, caller_of(context, token), now),
        )

    def fetch_offsets(
        self, group_id: str, topics: AskedTopics | None, require_stable: bool
    ) -> FetchedTopics | Deferred:
        """Committed offsets, of all topics for None; `require_stable`: not before what is under way is committed."""
        found: FetchedTopics | Deferred = self._runtime.submit(
            self.partition_for(group_id),
            lambda coordinator, token, now: coordinator.fetch_offsets(
                group_id, topics, require_stable, Caller(token, -1), now
            ),
            after_pending=require_stable,
            holds_nothing=not require_stable,
        )
        return found

    # -- operators ---------------------------------------------------------------------------------------------------

    def describe_groups(self, group_ids: Iterable[str], api_version: int) -> list[DescribedGroup]:
        found = []
        for group_id in group_ids:
            try:
                found.append(
                    self._runtime.read(self.partition_for(group_id), partial(_describe, group_id, api_version))
                )
            except KafkaError as error:
                found.append(DescribedGroup(group_id=group_id, error_code=error.code))
        return found

    def list_groups(self, states: Collection[str], types: Collection[str]) -> list[ListedGroup]:
        """All groups coordinated here. Raises COORDINATOR_LOAD_IN_PROGRESS while some may be missing."""
        if self._runtime.is_loading():
            raise KafkaError(ErrorCode.COORDINATOR_LOAD_IN_PROGRESS)
        return [
            group
            for partition in self._runtime.active_partitions()
            for group in self._runtime.read(partition, lambda coordinator: coordinator.list_groups(states, types))
        ]

    def lags(self, limit: int = LAGS_MAX) -> tuple[list[tuple[str, str, int, int]], bool]:
        """(group, topic, partition, records not read), for the groups coordinated here and the partitions of which this
        node has a replica; and whether these are all: no more than `limit`, among LOOKED_AT_FOR_EACH times as many
        commits. In one turn of the loop.
        """
        shards = self._runtime.active_partitions()
        commits = chain.from_iterable(self._runtime.read(shard, _positions) for shard in shards)
        found: list[tuple[str, str, int, int]] = []
        for looked_at, (group_id, topic, partition, offset) in enumerate(commits):
            if looked_at == limit * LOOKED_AT_FOR_EACH:
                return found, False
            end = self._ports.high_watermark(topic, partition)
            if end is None:
                continue
            if len(found) == limit:
                return found, False
            found.append((group_id, topic, partition, max(end - offset, 0)))
        return found, True

    def delete_group(self, context: RequestContext, group_id: str) -> DeletableGroupResult | Deferred:
        answer: DeletableGroupResult | Deferred = self._runtime.submit(
            self.partition_for(group_id),
            lambda coordinator, token, now: coordinator.delete_group(group_id, caller_of(context, token), now),
            after_pending=True,
        )
        return answer

    def delete_offsets(
        self, context: RequestContext, group_id: str, topics: list[tuple[str, list[int]]]
    ) -> dict[tuple[str, int], ErrorCode] | Deferred:
        _check_group_id(group_id)
        answer: dict[tuple[str, int], ErrorCode] | Deferred = self._runtime.submit(
            self.partition_for(group_id),
            lambda coordinator, token, now: coordinator.delete_offsets(
                group_id, topics, caller_of(context, token), now
            ),
            after_pending=True,
        )
        return answer

    def _submit(
        self, group_id: str, operation: Any, finish: Callable[[Any], Any] | None = None, *, holds_nothing: bool = False
    ) -> Any:
        return self._runtime.submit(self.partition_for(group_id), operation, finish, holds_nothing=holds_nothing)


def _describe(group_id: str, api_version: int, coordinator: GroupCoordinator) -> DescribedGroup:
    return coordinator.describe_group(group_id, api_version)


def _positions(coordinator: GroupCoordinator) -> Iterator[tuple[str, str, int, int]]:
    return coordinator.offsets.positions()


def caller_of(context: RequestContext, token: int) -> Caller:
    # Java shows an address with a slash in front, and so it is in the records and in what tools print.
    return Caller(token, context.api_version, context.client_id or "", f"/{context.client_host}")


def _check_group_id(group_id: str) -> None:
    if not group_id:
        raise KafkaError(ErrorCode.INVALID_GROUP_ID)


def _null_protocol(response: JoinGroupResponse) -> JoinGroupResponse:
    """From version 7 on no protocol is null, as Kafka has it (JoinGroupResponse)."""
    response.protocol_name = response.protocol_name or None
    return response


def _leave_of_one(response: LeaveGroupResponse) -> LeaveGroupResponse:
    """Before version 3 the one member's error is the answer's."""
    return LeaveGroupResponse(error_code=response.members[0].error_code)


def java_hash(text: str) -> int:
    """`String.hashCode` of Java: a signed 32-bit number over UTF-16 units."""
    value = 0
    units = text.encode("utf-16-be", "surrogatepass")
    for position in range(0, len(units), 2):
        value = (31 * value + (units[position] << 8 | units[position + 1])) & 0xFFFFFFFF
    return value - (1 << 32) if value & 0x80000000 else value


def abs_of_int32(value: int) -> int:
    """Kafka's `Utils.abs`: the one number without a positive twin becomes 0."""
    return 0 if value == -(1 << 31) else abs(value)
