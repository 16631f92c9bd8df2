"""Classic consumer groups for `fake_broker`: join, sync, heartbeat, leave and offsets, as simply as possible."""

from __future__ import annotations

import asyncio
from typing import Any

from tidelog.protocol.errors import ErrorCode
from tidelog.protocol.messages.heartbeat import HeartbeatRequest, HeartbeatResponse
from tidelog.protocol.messages.join_group import JoinGroupRequest, JoinGroupResponse, JoinGroupResponseMember
from tidelog.protocol.messages.leave_group import LeaveGroupRequest, LeaveGroupResponse
from tidelog.protocol.messages.offset_commit import (
    OffsetCommitRequest,
    OffsetCommitResponse,
    OffsetCommitResponsePartition,
    OffsetCommitResponseTopic,
)
from tidelog.protocol.messages.offset_fetch import (
    OffsetFetchRequest,
    OffsetFetchResponse,
    OffsetFetchResponseGroup,
    OffsetFetchResponsePartitions,
    OffsetFetchResponseTopics,
)
from tidelog.protocol.messages.sync_group import SyncGroupRequest, SyncGroupResponse

# Members that join an empty group within this time start in one generation (group.initial.rebalance.delay.ms).
INITIAL_DELAY_S = 0.05


class _Group:
    def __init__(self) -> None:
        self.generation = 0
        self.members: dict[str, JoinGroupRequest] = {}
        self.joining: dict[str, asyncio.Future[JoinGroupResponse]] = {}
        self.syncing: dict[str, asyncio.Future[SyncGroupResponse]] = {}
        self.assignments: dict[str, bytes] | None = None
        self.window: asyncio.TimerHandle | None = None
        self.offsets: dict[tuple[str, int], tuple[int, str | None]] = {}
        self.epochs: dict[tuple[str, int], int] = {}
        """The leader epochs that were committed beside the offsets."""
        self.born = 0

    @property
    def rebalancing(self) -> bool:
        return bool(self.joining) or self.window is not None


class FakeGroups:
    """All groups of a cluster. A rebalance ends when all members have joined, or their rebalance timeout has passed.

    A member that is slow to join again stays a member, as on a broker: otherwise it would lose its partitions before it
    could commit, and a busy machine would show in what the test sees.
    """

    def __init__(self) -> None:
        self.groups: dict[str, _Group] = {}

    def group(self, name: str) -> _Group:
        return self.groups.setdefault(name, _Group())

    def handle(self, request: Any) -> Any:
        return _HANDLERS[type(request)](self, request)

    async def join(self, request: JoinGroupRequest) -> JoinGroupResponse:
        group = self.group(request.group_id)
        member = request.member_id
        if not member and request.group_instance_id is None:
            group.born += 1
            return JoinGroupResponse(error_code=ErrorCode.MEMBER_ID_REQUIRED, member_id=f"member-{group.born}")
        member = member or f"static-{request.group_instance_id}"
        group.members[member] = request
        future: asyncio.Future[JoinGroupResponse] = asyncio.get_running_loop().create_future()
        group.joining[member] = future
        for waiting in group.syncing.values():
            waiting.set_result(SyncGroupResponse(error_code=ErrorCode.REBALANCE_IN_PROGRESS))
        group.syncing.clear()
        self._begin_rebalance(group)
        self._complete_if_all_joined(group)
        return await future

    def _begin_rebalance(self, group: _Group) -> None:
        if group.window is None:
            timeout_s = max(each.rebalance_timeout_ms for each in group.members.values()) / 1000
            delay_s = timeout_s if group.generation else INITIAL_DELAY_S
            group.window = asyncio.get_running_loop().call_later(delay_s, self._complete, group)

    def _complete_if_all_joined(self, group: _Group) -> None:
        if group.joining and group.joining.keys() >= group.members.keys() and group.generation:
            self._complete(group)

    def _complete(self, group: _Group) -> None:
        if group.window is not None:
            group.window.cancel()
            group.window = None
        group.members = {name: each for name, each in group.members.items() if name in group.joining}
        if not group.members:
            return
        group.generation += 1
        group.assignments = None
        leader = min(group.members)
        common = set.intersection(*({p.name for p in each.protocols} for each in group.members.values()))
        protocol = next(each.name for each in group.members[leader].protocols if each.name in common)
        for name, future in group.joining.items():
            answer = JoinGroupResponse(
                generation_id=group.generation,
                protocol_type="consumer",
                protocol_name=protocol,
                leader=leader,
                member_id=name,
                members=[
                    JoinGroupResponseMember(
                        member_id=other,
                        group_instance_id=each.group_instance_id,
                        metadata=next(bytes(p.metadata) for p in each.protocols if p.name == protocol),
                    )
                    for other, each in group.members.items()
                ]
                if name == leader
                else [],
            )
            if not future.done():
                future.set_result(answer)
        group.joining.clear()

    async def sync(self, request: SyncGroupRequest) -> SyncGroupResponse:
        group = self.group(request.group_id)
        code = self._check(group, request.member_id, request.generation_id)
        if code:
            return SyncGroupResponse(error_code=code)
        if group.rebalancing:
            return SyncGroupResponse(error_code=ErrorCode.REBALANCE_IN_PROGRESS)
        if request.assignments:
            group.assignments = {each.member_id: bytes(each.assignment) for each in request.assignments}
            for name, future in group.syncing.items():
                future.set_result(SyncGroupResponse(assignment=group.assignments.get(name, b"")))
            group.syncing.clear()
        if group.assignments is not None:
            return SyncGroupResponse(assignment=group.assignments.get(request.member_id, b""))
        waiting: asyncio.Future[SyncGroupResponse] = asyncio.get_running_loop().create_future()
        group.syncing[request.member_id] = waiting
        return await waiting

    @staticmethod
    def _check(group: _Group, member: str, generation: int) -> ErrorCode:
        if member not in group.members:
            return ErrorCode.UNKNOWN_MEMBER_ID
        if generation != group.generation:
            return ErrorCode.ILLEGAL_GENERATION
        return ErrorCode.NONE

    def heartbeat(self, request: HeartbeatRequest) -> HeartbeatResponse:
        group = self.group(request.group_id)
        code = self._check(group, request.member_id, request.generation_id)
        if not code and group.rebalancing:
            code = ErrorCode.REBALANCE_IN_PROGRESS
        return HeartbeatResponse(error_code=code)

    def leave(self, request: LeaveGroupRequest) -> LeaveGroupResponse:
        group = self.group(request.group_id)
        for member in [each.member_id for each in request.members] or [request.member_id]:
            group.members.pop(member, None)
        if group.members:
            self._begin_rebalance(group)
            self._complete_if_all_joined(group)
        return LeaveGroupResponse()

    def expel(self, name: str, member: str) -> None:
        """As when its session timed out."""
        group = self.group(name)
        group.members.pop(member, None)
        self._complete_if_all_joined(group)

    def commit(self, request: OffsetCommitRequest, judged: ErrorCode | None = None) -> OffsetCommitResponse:
        """`judged`: what a group of the consumer protocol says of the member."""
        group = self.group(request.group_id)
        code = judged or ErrorCode.NONE
        if judged is None and request.generation_id_or_member_epoch >= 0:
            code = self._check(group, request.member_id, request.generation_id_or_member_epoch)
        topics = []
        for topic in request.topics:
            refusal = code or (ErrorCode.NONE if topic.name else ErrorCode.UNKNOWN_TOPIC_ID)
            for each in topic.partitions:
                if not refusal:
                    group.offsets[topic.name, each.partition_index] = (each.committed_offset, each.committed_metadata)
                    group.epochs[topic.name, each.partition_index] = each.committed_leader_epoch
            rows = [
                OffsetCommitResponsePartition(partition_index=each.partition_index, error_code=refusal)
                for each in topic.partitions
            ]
            topics.append(OffsetCommitResponseTopic(name=topic.name, topic_id=topic.topic_id, partitions=rows))
        return OffsetCommitResponse(topics=topics)

    def fetch_offsets(self, request: OffsetFetchRequest) -> OffsetFetchResponse:
        asked = request.groups[0]
        offsets, epochs = self.group(asked.group_id).offsets, self.group(asked.group_id).epochs
        wanted = (
            list(offsets)
            if asked.topics is None
            else [(topic.name, number) for topic in asked.topics for number in topic.partition_indexes]
        )
        ids = {topic.name: topic.topic_id for topic in asked.topics or ()}
        topics: dict[str, OffsetFetchResponseTopics] = {}
        for name, number in wanted:
            offset, text = offsets.get((name, number), (-1, ""))
            row = OffsetFetchResponsePartitions(
                partition_index=number,
                committed_offset=offset,
                committed_leader_epoch=epochs.get((name, number), -1),
                metadata=text,
                error_code=ErrorCode.NONE if name else ErrorCode.UNKNOWN_TOPIC_ID,
            )
            topic = OffsetFetchResponseTopics(name=name, topic_id=ids.get(name, bytes(16)))
            topics.setdefault(name, topic).partitions.append(row)
        group = OffsetFetchResponseGroup(group_id=asked.group_id, topics=list(topics.values()))
        return OffsetFetchResponse(groups=[group])


_HANDLERS: dict[type[Any], Any] = {
    JoinGroupRequest: FakeGroups.join,
    SyncGroupRequest: FakeGroups.sync,
    HeartbeatRequest: FakeGroups.heartbeat,
    LeaveGroupRequest: FakeGroups.leave,
    OffsetCommitRequest: FakeGroups.commit,
    OffsetFetchRequest: FakeGroups.fetch_offsets,
}
