"""The group coordinator of one `__consumer_offsets` partition: where requests, deadlines and replayed records come in.

Here a message meets its group; the rules live in `joins`, `rebalance` and `offsets`, the I/O in `runtime`. The
invariant: what must survive (an assigned generation, an empty group, committed offsets) changes only in `replay`, so
that a coordinator loaded from the log equals the one that wrote it. Source: Kafka's `GroupCoordinatorShard` and
`GroupMetadataManager`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from tidelog.broker.coordinators.group import admin, records
from tidelog.broker.coordinators.group.config import GroupCoordinatorConfig
from tidelog.broker.coordinators.group.group import Group
from tidelog.broker.coordinators.group.joins import Joins, growth_refusal, refused
from tidelog.broker.coordinators.group.memory import GroupMemory, GroupMemoryBudget
from tidelog.broker.coordinators.group.offsets import (
    AskedTopics,
    OffsetStore,
    OffsetWrite,
    commit_records,
    commit_refusal,
)
from tidelog.broker.coordinators.group.rebalance import GroupWrite, Rebalancer, TimerKey, synced
from tidelog.broker.coordinators.group.records import GroupMetadata, OffsetCommit
from tidelog.broker.coordinators.group.states import HEARTBEAT_ANSWER, GroupState
from tidelog.broker.coordinators.outcome import Caller, Now, Outcome, RandomBits
from tidelog.broker.coordinators.timers import TimerQueue
from tidelog.protocol.errors import ErrorCode
from tidelog.protocol.messages.delete_groups import DeletableGroupResult
from tidelog.protocol.messages.describe_groups import DescribedGroup
from tidelog.protocol.messages.group_records import GroupMetadataValue
from tidelog.protocol.messages.heartbeat import HeartbeatRequest, HeartbeatResponse
from tidelog.protocol.messages.join_group import JoinGroupRequest
from tidelog.protocol.messages.leave_group import LeaveGroupResponse, MemberIdentity, MemberResponse
from tidelog.protocol.messages.list_groups import ListedGroup
from tidelog.protocol.messages.offset_commit import OffsetCommitRequest
from tidelog.protocol.messages.sync_group import SyncGroupRequest, SyncGroupResponse

EXPIRE = TimerKey("expire")
# One turn looks at this many groups and writes this many tombstones; the rest follows a millisecond later.
EXPIRY_GROUPS_PER_TURN = 200
EXPIRY_RECORDS_PER_TURN = 2_000
# No batch may be larger than max.message.bytes of the offsets topic.
TOMBSTONE_BYTES_PER_WRITE = 500_000
_TOMBSTONE_BYTES_MAX = 800  # with the longest of topic names, less the group's


class GroupCoordinator:
    """Calls are made from one thread. A token in `Caller` is answered exactly once, now or in a later outcome."""

    encode = staticmethod(records.encode)
    decode = staticmethod(records.decode)

    def __init__(
        self,
        config: GroupCoordinatorConfig,
        rng: RandomBits,
        memory: GroupMemoryBudget | None = None,
        offsets_memory: GroupMemoryBudget | None = None,
    ) -> None:
        """`memory` and `offsets_memory` are shared by all coordinators of a node."""
        self.config = config
        self._memory = memory or GroupMemoryBudget(config.max_groups_memory_bytes)
        self._loaded: dict[str, GroupMetadataValue] | None = {}  # what groups become once the load ends, None after it
        self.groups: dict[str, Group] = {}
        offsets_memory = offsets_memory or GroupMemoryBudget(config.max_offsets_memory_bytes)
        self.offsets = OffsetStore(GroupMemory(offsets_memory))
        self.timers: TimerQueue[TimerKey] = TimerQueue()
        self._rebalancer = Rebalancer(config, self.timers)
        self._joins = Joins(config, self.timers, self._rebalancer, rng)
        self._expiry_left: list[str] = []

    # -- membership --------------------------------------------------------------------------------------------------

    def join(self, request: JoinGroupRequest, caller: Caller, now: Now) -> Outcome:
        outcome = Outcome(now)
        group = self.groups.get(request.group_id)
        if group is None:
            if request.member_id:
                outcome.reply(caller.token, refused(ErrorCode.UNKNOWN_MEMBER_ID, request.member_id))
                return outcome
            group = self._new_group(request.group_id, now.wall_ms)
        self._joins.join(group, request, caller, outcome)
        self._forget_if_traceless(group)
        return outcome

    def sync(self, request: SyncGroupRequest, caller: Caller, now: Now) -> Outcome:
        outcome = Outcome(now)
        group = self.groups.get(request.group_id)
        error = self._sync_refusal(group, request)
        if group is None or error is not ErrorCode.NONE:
            outcome.reply(caller.token, SyncGroupResponse(error_code=error))
            return outcome
        member_id = request.member_id
        if group.state is GroupState.STABLE:
            self._rebalancer.sync_received(group, member_id)
            outcome.reply(caller.token, synced(group, member_id))
            return outcome
        # A leader that asks twice gets what it said first: one generation has one assignment.
        hands_in = member_id == group.leader and group.assignment_in_flight is None
        given = {each.member_id: each.assignment for each in request.assignments} if hands_in else {}
        error = self._assignment_refusal(group, given, outcome) if hands_in else ErrorCode.NONE
        if error is not ErrorCode.NONE:
            outcome.reply(caller.token, SyncGroupResponse(error_code=error))
            return outcome
        older = group.awaiting_sync.pop(member_id, None)
        if older is not None:
            outcome.reply(older, SyncGroupResponse(error_code=ErrorCode.REBALANCE_IN_PROGRESS))
        group.awaiting_sync[member_id] = caller.token
        self._rebalancer.sync_received(group, member_id)
        if hands_in:
            group.begin_assignment(given)
            self._rebalancer.store(group, GroupWrite("assignment", group, group.generation), given, outcome)
        return outcome

    def _sync_refusal(self, group: Group | None, request: SyncGroupRequest) -> ErrorCode:
        if group is None or group.state is GroupState.EMPTY:
            return ErrorCode.UNKNOWN_MEMBER_ID
        error = group.check_member(request.member_id, request.group_instance_id)
        if error is not ErrorCode.NONE:
            return error
        if request.generation_id != group.generation:
            return ErrorCode.ILLEGAL_GENERATION
        if request.protocol_type not in (None, group.protocol_type):
            return ErrorCode.INCONSISTENT_GROUP_PROTOCOL
        if request.protocol_name not in (None, group.protocol_name):
            return ErrorCode.INCONSISTENT_GROUP_PROTOCOL
        if group.state is GroupState.PREPARING_REBALANCE:
            return ErrorCode.REBALANCE_IN_PROGRESS
        return ErrorCode.NONE

    def _assignment_refusal(self, group: Group, assignments: Mapping[str, bytes], outcome: Outcome) -> ErrorCode:
        """The group stays as it is when the leader's assignment is refused: the leader may hand in another."""
        if any(len(assignments.get(member_id, b"")) > self.config.max_assignment_bytes for member_id in group.members):
            return ErrorCode.INVALID_REQUEST
        return growth_refusal(group, group.growth_by_assignment(assignments), self.config, outcome)

    def heartbeat(self, request: HeartbeatRequest, caller: Caller, now: Now) -> Outcome:
        outcome = Outcome(now)
        group = self.groups.get(request.group_id)
        if group is None:
            error = ErrorCode.UNKNOWN_MEMBER_ID
        else:
            error = group.check_member(request.member_id, request.group_instance_id)
            if error is ErrorCode.NONE and request.generation_id != group.generation:
                error = ErrorCode.ILLEGAL_GENERATION
            if error is ErrorCode.NONE:
                error = HEARTBEAT_ANSWER[group.state]
                self._rebalancer.extend_session(group, group.members[request.member_id], now.steady_ms)
        outcome.reply(caller.token, HeartbeatResponse(error_code=error))
        return outcome

    def leave(self, group_id: str, members: Iterable[MemberIdentity], caller: Caller, now: Now) -> Outcome:
        outcome = Outcome(now)
        group = self.groups.get(group_id)
        response = LeaveGroupResponse()
        left: list[str] = []
        for identity in members:
            member_id, instance_id = identity.member_id, identity.group_instance_id
            if group is None:
                error = ErrorCode.UNKNOWN_MEMBER_ID
            elif member_id in group.pending_members and member_id:
                self._rebalancer.remove_member(group, member_id, outcome)
                left.append(member_id)
                error = ErrorCode.NONE
            else:
                if not member_id and instance_id is not None:
                    # An operator removes a static member by its instance id alone.
                    member_id = group.static_members.get(instance_id, "")
                error = group.check_member(member_id, instance_id)
                if error is ErrorCode.NONE:
                    self._rebalancer.remove_member(group, member_id, outcome)
                    left.append(member_id)
            response.members.append(
                MemberResponse(member_id=identity.member_id, group_instance_id=instance_id, error_code=error)
            )
        outcome.reply(caller.token, response)
        if group is not None and left:
            self._rebalancer.members_left(group, f"{', '.join(left)} left", outcome)
        if group is not None:
            self._forget_if_traceless(group)
        return outcome

    # -- offsets -----------------------------------------------------------------------------------------------------

    def commit_offsets(self, request: OffsetCommitRequest, caller: Caller, now: Now) -> Outcome:
        """Topics carry their names (and ids where known). A refusal of the whole commit is a KafkaError to send."""
        outcome = Outcome(now)
        group = self.groups.get(request.group_id)
        error = commit_refusal(group, request, caller.api_version)
        if error is not ErrorCode.NONE:
            outcome.refuse(caller.token, error)
            return outcome
        if group is not None and group.state in (GroupState.STABLE, GroupState.PREPARING_REBALANCE):
            self._rebalancer.extend_session(group, group.members[request.member_id], now.steady_ms)
        stored, response = commit_records(request, now.wall_ms, self.config.offset_metadata_max_bytes)
        growth_bytes = self.offsets.growth_by(stored)
        if growth_bytes > 0 and not self.offsets.memory.has_room_for(growth_bytes):
            text = f"group {request.group_id} may not commit {len(stored)} offsets: those of this node hold too much"
            outcome.warn("offsets hold too much", text)
            outcome.refuse(caller.token, ErrorCode.COORDINATOR_NOT_AVAILABLE)
        elif stored:
            write = OffsetWrite(stored, max(growth_bytes, 0))
            self.offsets.begin(write)
            outcome.reply_when_stored(stored, caller.token, response, write)
        else:
            outcome.reply(caller.token, response)
        return outcome

    def fetch_offsets(
        self, group_id: str, topics: AskedTopics | None, require_stable: bool, caller: Caller, now: Now
    ) -> Outcome:
        """Answered with `FetchedTopics`, see `OffsetStore.fetch`."""
        outcome = Outcome(now)
        outcome.reply(caller.token, self.offsets.fetch(group_id, topics, require_stable))
        return outcome

    def forget_topics(self, topics: Collection[tuple[str, bytes]], now: Now) -> Outcome:
        """Topics, (name, id) each, are deleted: so are the offsets committed for them."""
        outcome = Outcome(now)
        _write_in_parts(list(self.offsets.tombstones_of_topics(topics)), outcome)
        return outcome

    # -- operators ---------------------------------------------------------------------------------------------------

    def describe_group(self, group_id: str, api_version: int) -> DescribedGroup:
        return admin.describe(self.groups.get(group_id), group_id, api_version)

    def list_groups(self, states: Collection[str], types: Collection[str]) -> list[ListedGroup]:
        return admin.listed(self.groups.values(), states, types)

    def delete_group(self, group_id: str, caller: Caller, now: Now) -> Outcome:
        """Answered with a `DeletableGroupResult`."""
        outcome = Outcome(now)
        group = self.groups.get(group_id)
        error, stored = admin.deletion(group, self.offsets)
        answer = DeletableGroupResult(group_id=group_id, error_code=error)
        if group is None or not stored:
            outcome.reply(caller.token, answer)
            return outcome
        for member_id in list(group.pending_members):
            # The ids it has handed out go with it, as Kafka has it; who comes back with one is told and starts anew.
            self._rebalancer.remove_member(group, member_id, outcome)
        group.writes_in_flight += 1
        outcome.note(f"group {group_id}: deleted on request")
        _write_in_parts(stored, outcome, GroupWrite("deletion", group, group.generation))
        outcome.writes[-1].replies.append((caller.token, answer))
        return outcome

    def delete_offsets(
        self, group_id: str, topics: Iterable[tuple[str, list[int]]], caller: Caller, now: Now
    ) -> Outcome:
        """Answered with (topic, partition) -> ErrorCode, or a KafkaError for the whole."""
        outcome = Outcome(now)
        error, errors, stored = admin.offset_deletion(self.groups.get(group_id), self.offsets, topics)
        if error is not ErrorCode.NONE:
            outcome.refuse(caller.token, error)
        elif stored:
            _write_in_parts(list(stored), outcome)
            outcome.writes[-1].replies.append((caller.token, errors))
        else:
            outcome.reply(caller.token, errors)
        return outcome

    # -- replay ------------------------------------------------------------------------------------------------------

    def replay(self, offset: int, record: GroupMetadata | OffsetCommit, producer_id: int = -1) -> None:
        group = self.groups.get(record.group_id)
        if isinstance(record, OffsetCommit):
            self.offsets.replay(offset, record, producer_id)
            if record.value is not None:
                if group is None:
                    # A group that only commits, without members: it exists by its offsets. Without any it stays, as
                    # in Kafka, until the next look for what has expired.
                    group = self._new_group(record.group_id, record.value.commit_timestamp)
                group.is_recorded = True
            return
        if record.value is None:
            if group is not None:
                group.persisted_generation = None
                if self._loaded is not None:
                    self._loaded.pop(record.group_id, None)
                group.is_recorded = record.group_id in self.offsets
                self._forget_if_traceless(group)
            return
        if group is None:
            group = self._new_group(record.group_id, record.value.current_state_timestamp)
        group.is_recorded = True
        group.persisted_generation = record.value.generation
        if self._loaded is not None:
            self._loaded[record.group_id] = record.value
        if (
            group.state is GroupState.COMPLETING_REBALANCE
            and group.assignment_in_flight == group.generation == record.value.generation
        ):
            group.adopt_assignment(record.value)

    def replay_end_transaction(self, producer_id: int, committed: bool) -> None:
        self.offsets.replay_end_transaction(producer_id, committed)

    def on_loaded(self, now: Now) -> Outcome:
        """Members are taken for alive until their sessions say otherwise."""
        outcome = Outcome(now)
        loaded, self._loaded = self._loaded or {}, None
        for group_id, value in loaded.items():
            group = self.groups[group_id]
            group.restore(value)
            for member in group.members.values():
                self._rebalancer.extend_session(group, member, now.steady_ms)
            if len(group.members) > self.config.group_max_size:
                self._rebalancer.prepare(group, "more members than group.max.size allows", outcome)
        self.timers.set(EXPIRE, now.steady_ms + self.config.offsets_retention_check_interval_ms)
        return outcome

    def close(self) -> None:
        for group in self.groups.values():
            group.memory.release()
        self.offsets.memory.release()
        self.groups.clear()
        self._loaded = None

    # -- what became of a write --------------------------------------------------------------------------------------

    def on_committed(self, context: GroupWrite | OffsetWrite, now: Now) -> Outcome:
        outcome = Outcome(now)
        if isinstance(context, OffsetWrite):
            self.offsets.end(context)
            return outcome
        group = context.group
        group.writes_in_flight -= 1
        if context.kind == "assignment" and group.state is GroupState.STABLE and group.generation == context.generation:
            self._rebalancer.hand_out_assignments(group, outcome)
        elif context.kind == "deletion" and group.is_deserted and group.persisted_generation is None:
            # Unless somebody came while it was being deleted: then it lives on, and so do its generations.
            if self.groups.get(group.group_id) is group and group.group_id not in self.offsets:
                self._forget(group)
        elif context.kind == "replacement":
            self._joins.replacement_stored(context, outcome)
        self._forget_if_traceless(group)
        return outcome

    def on_failed(self, context: GroupWrite | OffsetWrite, error: ErrorCode, in_log: bool, now: Now) -> Outcome:
        outcome = Outcome(now)
        if isinstance(context, OffsetWrite):
            self.offsets.end(context)
            return outcome
        group = context.group
        group.writes_in_flight -= 1
        outcome.note(f"group {group.group_id}: could not store its {context.kind}: {error.name}")
        if context.kind == "assignment":
            if group.assignment_in_flight == context.generation == group.generation:
                self._rebalancer.drop_assignment(group, error, outcome)
                self._rebalancer.prepare(group, f"storing the assignment failed with {error.name}", outcome)
        elif context.kind == "replacement":
            self._joins.replacement_failed(context, error, in_log, outcome)
        self._forget_if_traceless(group)
        return outcome

    # -- deadlines ---------------------------------------------------------------------------------------------------

    def next_deadline_ms(self) -> int | None:
        return self.timers.next_deadline_ms()

    def on_deadline(self, now: Now) -> Outcome:
        outcome = Outcome(now)
        while (key := self.timers.pop_due(now.steady_ms)) is not None:
            if key is EXPIRE or key.kind == "expire":
                self._expire(outcome)
                continue
            group = self.groups.get(key.group_id)
            if group is None:
                continue
            if key.kind == "session":
                self._rebalancer.session_expired(group, key.member_id, outcome)
            elif key.kind == "join":
                self._rebalancer.join_phase_expired(group, outcome)
            else:
                self._rebalancer.sync_phase_expired(group, outcome)
            self._forget_if_traceless(group)
        return outcome

    def _expire(self, outcome: Outcome) -> None:
        """Forget offsets past their retention, and empty groups left without any; a few groups at a time."""
        if not self._expiry_left:
            self._expiry_left = list(self.groups)
        written = 0
        for _ in range(EXPIRY_GROUPS_PER_TURN):
            if not self._expiry_left or written >= EXPIRY_RECORDS_PER_TURN:
                break
            group = self.groups.get(self._expiry_left.pop())
            if group is not None:
                written += self._expire_group(group, outcome)
        pause_ms = 1 if self._expiry_left else self.config.offsets_retention_check_interval_ms
        self.timers.set(EXPIRE, outcome.now_ms + pause_ms)

    def _expire_group(self, group: Group, outcome: Outcome) -> int:
        stored: list[GroupMetadata | OffsetCommit]
        tombstones, all_expired = self.offsets.expired(group, outcome.wall_ms, self.config.offsets_retention_ms)
        stored = list(tombstones)
        is_over = all_expired and group.is_deserted
        if is_over:
            stored.append(GroupMetadata(group.group_id, None))
            group.writes_in_flight += 1
        if stored:
            outcome.note(f"group {group.group_id}: {len(tombstones)} offsets expired{', and the group' * is_over}")
            _write_in_parts(stored, outcome, GroupWrite("deletion", group, group.generation) if is_over else None)
        return len(stored)

    def _forget_if_traceless(self, group: Group) -> None:
        if group.is_traceless and self.groups.get(group.group_id) is group:
            self._forget(group)

    def _new_group(self, group_id: str, wall_ms: int) -> Group:
        group = self.groups[group_id] = Group(group_id, wall_ms, GroupMemory(self._memory))
        return group

    def _forget(self, group: Group) -> None:
        del self.groups[group.group_id]
        group.memory.release()


def _write_in_parts(
    stored: list[GroupMetadata | OffsetCommit], outcome: Outcome, context: GroupWrite | None = None
) -> None:
    """Tombstones in batches that fit into the log; `context` is that of the last."""
    group_bytes = 3 * max((len(record.group_id) for record in stored), default=0)
    per_write = max(TOMBSTONE_BYTES_PER_WRITE // (group_bytes + _TOMBSTONE_BYTES_MAX), 1)
    for start in range(0, len(stored), per_write):
        outcome.write(stored[start : start + per_write])
    if outcome.writes:
        outcome.writes[-1].context = context
