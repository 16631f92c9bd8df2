"""Groups of the consumer protocol (KIP-848) for `fake_broker`, as Kafka 4.3 answers where the transcripts of
`tests/golden/consumer_member` have recorded it."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from tidelog.protocol.errors import ErrorCode
from tidelog.protocol.messages.consumer_group_heartbeat import (
    Assignment,
    ConsumerGroupHeartbeatRequest,
    ConsumerGroupHeartbeatResponse,
    TopicPartitions,
)

Partition = tuple[bytes, int]
HEARTBEAT_INTERVAL_MS = 10


@dataclass
class _Member:
    instance_id: str | None = None
    epoch: int = 0
    names: list[str] = field(default_factory=list)
    regex: str = ""
    unresolved_regex: str | None = None
    """Topics are matched after the answer, as Kafka does it on another thread."""
    assigned: set[Partition] = field(default_factory=set)
    revoking: set[Partition] = field(default_factory=set)
    has_left_to_return: bool = False


@dataclass
class _Group:
    epoch: int = 1
    members: dict[str, _Member] = field(default_factory=dict)
    targets: dict[str, set[Partition]] = field(default_factory=dict)


class FakeConsumerGroups:
    """`topics`: name -> (id, partition count). One partition has one owner at a time, whatever members say."""

    def __init__(self, topics: Callable[[], Mapping[str, tuple[bytes, int]]]) -> None:
        self.groups: dict[str, _Group] = {}
        self.interval_ms = HEARTBEAT_INTERVAL_MS
        self._topics = topics

    def group(self, name: str) -> _Group:
        return self.groups.setdefault(name, _Group())

    def expel(self, name: str, member_id: str) -> None:
        """As when its session timed out."""
        self._remove(self.group(name), member_id)

    def heartbeat(self, request: ConsumerGroupHeartbeatRequest) -> ConsumerGroupHeartbeatResponse:
        group = self.group(request.group_id)
        answer = self._answer(group, request)
        member = group.members.get(request.member_id)
        if member is not None and member.unresolved_regex is not None:
            member.regex, member.unresolved_regex = member.unresolved_regex, None
            if member.regex:
                self._assign(group)
        return answer

    def _answer(self, group: _Group, request: ConsumerGroupHeartbeatRequest) -> ConsumerGroupHeartbeatResponse:
        if request.member_epoch < 0:
            return self._leave(group, request)
        member = group.members.get(request.member_id)
        joins = request.member_epoch == 0
        if joins:
            if (refusal := self._refusal(group, request)) is not None:
                return refusal
            if member is None:
                member = self._join(group, request)
            else:
                member.revoking = set()
        elif member is None or member.epoch != request.member_epoch:
            code = ErrorCode.UNKNOWN_MEMBER_ID if member is None else ErrorCode.FENCED_MEMBER_EPOCH
            if self._holder(group, request.instance_id) not in ("", request.member_id):
                code = ErrorCode.FENCED_INSTANCE_ID
            return ConsumerGroupHeartbeatResponse(error_code=code, error_message=code.name)
        if self._subscribe(member, request):
            self._assign(group)
        before = set(member.assigned)
        self._reconcile(group, request.member_id, member, request)
        answer = ConsumerGroupHeartbeatResponse(
            member_id=request.member_id, member_epoch=member.epoch, heartbeat_interval_ms=self.interval_ms
        )
        is_full = request.rebalance_timeout_ms >= 0
        if is_full or member.assigned != before:
            answer.assignment = Assignment(topic_partitions=_by_topic(member.assigned))
        return answer

    def _refusal(self, group: _Group, request: ConsumerGroupHeartbeatRequest) -> ConsumerGroupHeartbeatResponse | None:
        code = ErrorCode.NONE
        if request.server_assignor not in (None, "uniform", "range"):
            code = ErrorCode.UNSUPPORTED_ASSIGNOR
        holder = self._holder(group, request.instance_id)
        if holder not in ("", request.member_id) and not group.members[holder].has_left_to_return:
            code = ErrorCode.UNRELEASED_INSTANCE_ID
        return ConsumerGroupHeartbeatResponse(error_code=code, error_message=code.name) if code else None

    def _holder(self, group: _Group, instance_id: str | None) -> str:
        """The member with this instance id, or nothing."""
        holders = [name for name, member in group.members.items() if member.instance_id == instance_id]
        return holders[0] if instance_id is not None and holders else ""

    def _join(self, group: _Group, request: ConsumerGroupHeartbeatRequest) -> _Member:
        member = _Member(request.instance_id)
        holder = self._holder(group, request.instance_id)
        if holder:
            member = group.members.pop(holder)
            member.has_left_to_return = False
            group.targets[request.member_id] = group.targets.pop(holder, set())
        group.members[request.member_id] = member
        return member

    def _subscribe(self, member: _Member, request: ConsumerGroupHeartbeatRequest) -> bool:
        before = (member.names, member.regex)
        if request.subscribed_topic_names is not None:
            member.names = list(request.subscribed_topic_names)
        if request.subscribed_topic_regex is not None:
            member.regex, member.unresolved_regex = "", request.subscribed_topic_regex
        return (member.names, member.regex) != before

    def _assign(self, group: _Group) -> None:
        """Deal evenly in a new epoch; members keep what they have where they may."""
        group.epoch += 1
        topics = self._topics()
        wanted = {
            name: {
                topic
                for topic in topics
                if topic in member.names or (member.regex and re.fullmatch(member.regex, topic))
            }
            for name, member in group.members.items()
        }
        targets: dict[str, set[Partition]] = {name: set() for name in group.members}
        partitions = [(topic, (entry[0], number)) for topic, entry in topics.items() for number in range(entry[1])]
        partitions = [each for each in partitions if any(each[0] in topics for topics in wanted.values())]
        share = -(-len(partitions) // max(len(targets), 1))
        free = []
        for topic, partition in partitions:
            owner = next((name for name in targets if partition in group.members[name].assigned), None)
            if owner is not None and topic in wanted[owner] and len(targets[owner]) < share:
                targets[owner].add(partition)
            else:
                free.append((topic, partition))
        for topic, partition in free:
            takers = [name for name in targets if topic in wanted[name]]
            if takers:
                targets[min(takers, key=lambda name: len(targets[name]))].add(partition)
        group.targets = targets

    def _reconcile(self, group: _Group, name: str, member: _Member, request: ConsumerGroupHeartbeatRequest) -> None:
        if member.revoking:
            owned = _partitions(request.topic_partitions or [])
            if request.topic_partitions is None or owned & member.revoking:
                return
            member.revoking = set()
        target = group.targets.get(name, set())
        if member.epoch < group.epoch and (revoked := member.assigned - target):
            member.assigned &= target
            if request.topic_partitions is None or _partitions(request.topic_partitions) & revoked:
                member.revoking = revoked
                return
        taken = {each for other, its in group.members.items() if other != name for each in its.assigned | its.revoking}
        member.assigned = target - taken
        member.epoch = group.epoch

    def _leave(self, group: _Group, request: ConsumerGroupHeartbeatRequest) -> ConsumerGroupHeartbeatResponse:
        member = group.members.get(request.member_id)
        if member is None:
            code = ErrorCode.UNKNOWN_MEMBER_ID
            return ConsumerGroupHeartbeatResponse(error_code=code, error_message=code.name)
        if request.member_epoch == -2:
            member.has_left_to_return = True
        else:
            self._remove(group, request.member_id)
        return ConsumerGroupHeartbeatResponse(member_id=request.member_id, member_epoch=request.member_epoch)

    def _remove(self, group: _Group, member_id: str) -> None:
        if group.members.pop(member_id, None) is not None:
            self._assign(group)

    def offset_error(self, group_id: str, member_id: str | None, epoch: int) -> ErrorCode:
        """What a commit or a fetch of offsets of this member is refused with."""
        member = self.group(group_id).members.get(member_id or "")
        if member is None:
            return ErrorCode.UNKNOWN_MEMBER_ID
        return ErrorCode.NONE if member.epoch == epoch else ErrorCode.STALE_MEMBER_EPOCH


def _by_topic(partitions: set[Partition]) -> list[TopicPartitions]:
    topics: dict[bytes, TopicPartitions] = {}
    for topic_id, number in sorted(partitions):
        topics.setdefault(topic_id, TopicPartitions(topic_id=topic_id)).partitions.append(number)
    return list(topics.values())


def _partitions(topics: list[TopicPartitions]) -> set[Partition]:
    return {(topic.topic_id, number) for topic in topics for number in topic.partitions}
