"""The group coordinator of one `__consumer_offsets` partition. It handles requests, deadlines and
replayed records.

This module finds the group of a request. The rules live in `joins`, `rebalance` and `offsets`, the
I/O in `runtime`. Invariant: durable state (an assigned generation, an empty group, committed
offsets) changes only in `replay`, so that a coordinator loaded from the log equals the one that
wrote it. Source: Kafka's `GroupCoordinatorShard` and `GroupMetadataManager`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from sys import maxsize
from typing import Any, TypeVar

from tidelog.broker.coordinators.group import admin, records
from tidelog.broker.coordinators.group.config import GroupCoordinatorConfig
from tidelog.broker.coordinators.group.group import Group, Member
from tidelog.broker.coordinators.group.joins import JoinHandler, growth_refusal, join_error
from tidelog.broker.coordinators.group.large_commits import PreparedCommit
from tidelog.broker.coordinators.group.memory import GroupMemory, GroupMemoryBudget
from tidelog.broker.coordinators.group.offsets import (
    DeletedTopic,
    OffsetStore,
    OffsetWrite,
    RequestedTopics,
    commit_records,
    commit_refusal,
    txn_commit_records,
    txn_commit_refusal,
)
from tidelog.broker.coordinators.group.rebalance import GroupWrite, Rebalancer, TimerKey, sync_response
from tidelog.broker.coordinators.group.records import GroupMetadata, OffsetCommit
from tidelog.broker.coordinators.group.states import HEARTBEAT_ANSWER, GroupState
from tidelog.broker.coordinators.outcome import Caller, Now, Outcome, RandomBits, WriteTransaction
from tidelog.broker.coordinators.timers import TimerQueue
from tidelog.protocol.errors import ErrorCode, counted
from tidelog.protocol.messages.delete_groups import DeletableGroupResult
from tidelog.protocol.messages.describe_groups import DescribedGroup
from tidelog.protocol.messages.group_records import GroupMetadataValue
from tidelog.protocol.messages.heartbeat import HeartbeatRequest, HeartbeatResponse
from tidelog.protocol.messages.join_group import JoinGroupRequest
from tidelog.protocol.messages.leave_group import LeaveGroupResponse, MemberIdentity, MemberResponse
from tidelog.protocol.messages.offset_commit import OffsetCommitRequest, OffsetCommitResponse
from tidelog.protocol.messages.sync_group import SyncGroupRequest, SyncGroupResponse
from tidelog.protocol.messages.txn_offset_commit import TxnOffsetCommitRequest, TxnOffsetCommitResponse

Tombstone = TypeVar("Tombstone", GroupMetadata, OffsetCommit, GroupMetadata | OffsetCommit)

EXPIRE = TimerKey("expire")
FORGET = TimerKey("forget")
DELETE = TimerKey("delete")
NO_TOPIC = ""
# The bounds of one turn of the expiry; the rest follows a millisecond later.
EXPIRY_GROUPS_PER_TURN = 200
EXPIRY_RECORDS_PER_TURN = 500
# Groups, and offsets of deleted topics in them; most groups have none.
SWEPT_PER_TURN = 1_000
# Until a group with such offsets is looked at again: its tombstones or newer commits were under way, or refused.
SWEEP_RETRY_MS = 200
# Offsets that one request deletes; a DeleteGroups begins with 25 groups in a turn.
DELETED_PER_STEP = 100
# Deadlines of members and groups; each may have a record.
DEADLINES_PER_TURN = 50
# Members and groups that a load restores at once.
MEMBERS_PER_STEP = 200
# Keeps a batch below max.message.bytes of the offsets topic.
TOMBSTONE_BYTES_PER_WRITE = 500_000
_TOMBSTONE_BYTES_MAX = 800  # one with the longest topic name, without the group id


Keys = Iterator[tuple[str, int]]  # (topic, partition) of offsets


@dataclass(slots=True)
class GroupToSweep:
    """A group that may have offsets of these deleted topics."""

    group_id: str
    topics: dict[str, list[DeletedTopic]]
    has_tombstones: bool = False  # this look, or the last one, has written some
    keys: Keys | None = None  # of this look: those that it has not reached; None before it begins
    is_left: bool = False  # offsets of deleted topics are left after this look


@dataclass(slots=True)
class GroupToExpire:
    """A group whose offsets are checked for expiry, in steps. `keys`: those that are not checked yet."""

    group: Group
    keys: Keys
    all_expired: bool = True


@dataclass(slots=True)
class Deletion:
    """A request to delete offsets of a group, or the whole group with all."""

    group: Group
    keys: Keys
    is_whole: bool
    token: int
    response: Any
    error: ErrorCode = ErrorCode.NONE  # a write of it was refused: not all is deleted
    has_written: bool = False


class GroupCoordinator:
    """All calls come from one thread. Each `Caller.token` gets exactly one reply, in this or a
    later outcome.
    """

    encode = staticmethod(records.encode)
    decode = staticmethod(records.decode)

    def __init__(
        self,
        config: GroupCoordinatorConfig,
        rng: RandomBits,
        memory: GroupMemoryBudget | None = None,
        offsets_memory: GroupMemoryBudget | None = None,
    ) -> None:
        """All coordinators of a node share `memory` and `offsets_memory`."""
        self.config = config
        self._memory = memory or GroupMemoryBudget(config.max_groups_memory_bytes)
        self._loading_groups: dict[str, GroupMetadataValue] | None = {}  # the last record of each; None after the load
        self._restored = self._restore_groups()
        self._loaded_ms = 0
        self.groups: dict[str, Group] = {}
        offsets_memory = offsets_memory or GroupMemoryBudget(config.max_offsets_memory_bytes)
        self.offsets = OffsetStore(GroupMemory(offsets_memory))
        self.timers: TimerQueue[TimerKey] = TimerQueue()
        self._rebalancer = Rebalancer(config, self.timers)
        self._joins = JoinHandler(config, self.timers, self._rebalancer, rng)
        self._groups_to_check: list[str] = []
        self._group_to_expire: GroupToExpire | None = None
        self._deletions: deque[Deletion] = deque()
        self._deleted_topics: dict[str, list[DeletedTopic]] = {}
        # Those to look at now, and later.
        self._groups_to_sweep: list[GroupToSweep] = []
        self._groups_to_sweep_later: list[GroupToSweep] = []

    # -- membership --------------------------------------------------------------------------------------------------

    def join(self, request: JoinGroupRequest, caller: Caller, now: Now) -> Outcome:
        outcome = Outcome(now)
        group = self.groups.get(request.group_id)
        if group is None:
            if request.member_id:
                outcome.reply(caller.token, join_error(ErrorCode.UNKNOWN_MEMBER_ID, request.member_id))
                return outcome
            group = self._new_group(request.group_id, now.wall_ms)
        if group.is_being_deleted:
            outcome.reply(caller.token, join_error(ErrorCode.COORDINATOR_NOT_AVAILABLE, request.member_id))
            return outcome
        self._joins.join(group, request, caller, outcome)
        self._forget_if_unused(group)
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
            self._rebalancer.on_sync_received(group, member_id)
            outcome.reply(caller.token, sync_response(group, member_id))
            return outcome
        # A generation has one assignment: a second SyncGroup of the leader gets the assignment of
        # its first.
        is_assigning = member_id == group.leader and group.assignment_in_flight is None
        assignments = {entry.member_id: entry.assignment for entry in request.assignments} if is_assigning else {}
        error = self._assignment_refusal(group, assignments, outcome) if is_assigning else ErrorCode.NONE
        if error is not ErrorCode.NONE:
            outcome.reply(caller.token, SyncGroupResponse(error_code=error))
            return outcome
        earlier_token = group.awaiting_sync.pop(member_id, None)
        if earlier_token is not None:
            outcome.reply(earlier_token, SyncGroupResponse(error_code=ErrorCode.REBALANCE_IN_PROGRESS))
        group.awaiting_sync[member_id] = caller.token
        self._rebalancer.on_sync_received(group, member_id)
        if is_assigning:
            group.begin_assignment(assignments)
            self._rebalancer.store(group, GroupWrite("assignment", group, group.generation), assignments, outcome)
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
        """NONE, or the error of an assignment that is too large.

        The error leaves the group unchanged, so that the leader may send another assignment.
        """
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
        removed_ids: list[str] = []
        for identity in members:
            member_id, instance_id = identity.member_id, identity.group_instance_id
            if group is None:
                error = ErrorCode.UNKNOWN_MEMBER_ID
            elif member_id in group.pending_members and member_id:
                self._rebalancer.remove_member(group, member_id, outcome)
                removed_ids.append(member_id)
                error = ErrorCode.NONE
            else:
                if not member_id and instance_id is not None:
                    # Operators remove a static member by its instance id, without a member id.
                    member_id = group.static_members.get(instance_id, "")
                error = group.check_member(member_id, instance_id)
                if error is ErrorCode.NONE:
                    self._rebalancer.remove_member(group, member_id, outcome)
                    removed_ids.append(member_id)
            response.members.append(
                MemberResponse(member_id=identity.member_id, group_instance_id=instance_id, error_code=error)
            )
        outcome.reply(caller.token, response)
        if group is not None and removed_ids:
            self._rebalancer.on_members_removed(group, f"{', '.join(removed_ids)} left", outcome)
        if group is not None:
            self._forget_if_unused(group)
        return outcome

    # -- offsets -----------------------------------------------------------------------------------------------------

    def commit_refusal(self, request: OffsetCommitRequest | TxnOffsetCommitRequest, api_version: int) -> ErrorCode:
        """NONE, or the error of a commit that would be refused now."""
        group = self.groups.get(request.group_id)
        if isinstance(request, TxnOffsetCommitRequest):
            return txn_commit_refusal(group, request)
        return commit_refusal(group, request, api_version)

    def commit_offsets(
        self, request: OffsetCommitRequest, caller: Caller, now: Now, prepared: PreparedCommit | None = None
    ) -> Outcome:
        """`request` has topic names, and topic ids where known. The reply is a KafkaError for a
        refused commit. `prepared`: its records, where they were made before.
        """
        outcome = Outcome(now)
        group = self.groups.get(request.group_id)
        error = commit_refusal(group, request, caller.api_version)
        if error is not ErrorCode.NONE:
            outcome.refuse(caller.token, error)
            return outcome
        if group is not None and group.state in (GroupState.STABLE, GroupState.PREPARING_REBALANCE):
            self._rebalancer.extend_session(group, group.members[request.member_id], now.steady_ms)
        if prepared is None:
            commits, response = commit_records(request, now.wall_ms, self.config.offset_metadata_max_bytes)
            self._store_offsets(request.group_id, commits, caller, response, outcome)
        else:
            self._store_prepared(request.group_id, prepared, caller, outcome)
        return outcome

    def commit_offsets_of_transaction(
        self,
        request: TxnOffsetCommitRequest,
        topic_ids: Mapping[str, bytes],
        transaction: WriteTransaction,
        caller: Caller,
        now: Now,
        prepared: PreparedCommit | None = None,
    ) -> Outcome:
        """As `commit_offsets`; the offsets wait for the end of the transaction."""
        outcome = Outcome(now)
        error = txn_commit_refusal(self.groups.get(request.group_id), request)
        if error is not ErrorCode.NONE:
            outcome.refuse(caller.token, error)
            return outcome
        if prepared is None:
            max_metadata_bytes = self.config.offset_metadata_max_bytes
            commits, response = txn_commit_records(request, topic_ids, now.wall_ms, max_metadata_bytes)
            self._store_offsets(request.group_id, commits, caller, response, outcome, transaction)
        else:
            self._store_prepared(request.group_id, prepared, caller, outcome, transaction)
        return outcome

    def _store_prepared(
        self,
        group_id: str,
        prepared: PreparedCommit,
        caller: Caller,
        outcome: Outcome,
        transaction: WriteTransaction | None = None,
    ) -> None:
        self._store_offsets(group_id, prepared.records, caller, prepared.response, outcome, transaction)
        if outcome.writes:
            outcome.writes[-1].batch = prepared.batch

    def _store_offsets(
        self,
        group_id: str,
        commits: list[OffsetCommit],
        caller: Caller,
        response: OffsetCommitResponse | TxnOffsetCommitResponse,
        outcome: Outcome,
        transaction: WriteTransaction | None = None,
    ) -> None:
        growth_bytes = self.offsets.growth_by(commits, -1 if transaction is None else transaction.producer_id)
        if growth_bytes > 0 and not self.offsets.memory.has_room_for(growth_bytes):
            text = (
                f"group {group_id} may not commit {counted(len(commits), 'offset')}: those of this node hold too much"
            )
            outcome.warn("offsets hold too much", text)
            outcome.refuse(caller.token, ErrorCode.COORDINATOR_NOT_AVAILABLE)
        elif commits:
            write = OffsetWrite(commits, max(growth_bytes, 0))
            self.offsets.begin(write)
            if self._group_to_expire is not None and self._group_to_expire.group.group_id == group_id:
                self._group_to_expire.all_expired = False  # the step that looked at this offset may be over
            outcome.reply_when_stored(commits, caller.token, response, write)
            outcome.writes[-1].transaction = transaction
        else:
            outcome.reply(caller.token, response)

    def fetch_offsets(
        self,
        group_id: str,
        topics: RequestedTopics | None,
        require_stable: bool,
        caller: Caller,
        now: Now,
        *,
        must_prove_leadership: bool = False,
    ) -> Outcome:
        """Replies with `FetchedTopics`, see `OffsetStore.fetch`.

        With `must_prove_leadership` the reply waits until a record is committed, which only the leader of the
        partition can do. The record deletes an offset that no group can have, so that it changes nothing.
        """
        outcome = Outcome(now)
        fetched = self.offsets.fetch(group_id, topics, require_stable)
        if must_prove_leadership:
            outcome.reply_when_stored([OffsetCommit(group_id, NO_TOPIC, 0, None)], caller.token, fetched)
        else:
            outcome.reply(caller.token, fetched)
        return outcome

    def forget_topics(self, topics: Iterable[tuple[str, bytes]], end_offset: int, now: Now) -> Outcome:
        """Begin to delete the offsets of deleted topics, each given as (name, topic id), that were written below
        `end_offset`.
        """
        outcome = Outcome(now)
        for topic, topic_id in topics:
            self._deleted_topics.setdefault(topic, []).append(DeletedTopic(topic_id, end_offset))
        if FORGET not in self.timers:
            self._forget_some(outcome)
        return outcome

    def _forget_some(self, outcome: Outcome) -> None:
        """Delete offsets of deleted topics; a bounded number of groups per turn, each until it has none."""
        if not self._groups_to_sweep:
            self._groups_to_sweep, self._groups_to_sweep_later = self._groups_to_sweep_later, []
            topics, self._deleted_topics = self._deleted_topics, {}
            if topics:
                self._groups_to_sweep += [GroupToSweep(group_id, topics) for group_id in self.offsets.group_ids()]
        tombstones: list[OffsetCommit] = []
        room = SWEPT_PER_TURN
        while room > 0 and self._groups_to_sweep and len(tombstones) < EXPIRY_RECORDS_PER_TURN:
            group = self._groups_to_sweep[-1]
            count_max = EXPIRY_RECORDS_PER_TURN - len(tombstones)
            count = self._sweep(group, count_max, tombstones)
            room -= 1 + count
            if count < count_max:
                self._groups_to_sweep.pop()
                if group.is_left:
                    self._groups_to_sweep_later.append(group)
        for part in _in_parts(tombstones):
            write = OffsetWrite(part)
            self.offsets.begin(write)
            outcome.write(part, write)
        if self._groups_to_sweep or self._deleted_topics:
            self.timers.set(FORGET, outcome.now_ms)
        elif self._groups_to_sweep_later:
            self.timers.set(FORGET, outcome.now_ms + SWEEP_RETRY_MS)

    def _sweep(self, group: GroupToSweep, count_max: int, tombstones: list[OffsetCommit]) -> int:
        """Look at the next `count_max` offsets of the group. Returns how many there were: fewer only at its last."""
        if group.keys is None:
            # What is being written now may be replayed behind the place that this look has reached.
            group.is_left = self.offsets.is_being_written(group.group_id, group.topics)
            if group.has_tombstones and group.is_left:
                return 0  # there may be very many, for as long as a follower hangs
            group.keys, group.has_tombstones = self.offsets.keys(group.group_id, group.topics), False
        keys = list(islice(group.keys, count_max))
        due_tombstones, is_left = self.offsets.tombstones_of_topics(group.group_id, group.topics, keys)
        tombstones += due_tombstones
        group.is_left |= is_left
        group.has_tombstones |= bool(due_tombstones)
        if len(keys) < count_max:
            group.keys = None
        return len(keys)

    # -- operators ---------------------------------------------------------------------------------------------------

    def describe_group(self, group_id: str, api_version: int) -> DescribedGroup:
        return admin.describe(self.groups.get(group_id), group_id, api_version)

    def delete_group(self, group_id: str, caller: Caller, now: Now) -> Outcome:
        """Replies with a `DeletableGroupResult`."""
        outcome = Outcome(now)
        group = self.groups.get(group_id)
        error = admin.deletion_error(group)
        result = DeletableGroupResult(group_id=group_id, error_code=error)
        if group is None or error is not ErrorCode.NONE:
            outcome.reply(caller.token, result)
            return outcome
        for member_id in list(group.pending_members):
            # Pending member ids end with their group, as in Kafka. A client that joins with one
            # gets UNKNOWN_MEMBER_ID and joins without an id.
            self._rebalancer.remove_member(group, member_id, outcome)
        outcome.note(f"group {group_id}: deleted on request")
        self._delete(Deletion(group, self.offsets.keys(group_id), True, caller.token, result), outcome)
        return outcome

    def delete_offsets(
        self, group_id: str, topics: Iterable[tuple[str, list[int]]], caller: Caller, now: Now
    ) -> Outcome:
        """Replies with (topic, partition) -> ErrorCode, or with a KafkaError for the whole request."""
        outcome = Outcome(now)
        group = self.groups.get(group_id)
        error, errors = admin.offset_deletion_errors(group, topics)
        if group is None or error is not ErrorCode.NONE:
            outcome.refuse(caller.token, error)
        else:
            self._delete(Deletion(group, iter(list(errors)), False, caller.token, errors), outcome)
        return outcome

    def _delete(self, deletion: Deletion, outcome: Outcome) -> None:
        self._deletions.append(deletion)
        if len(self._deletions) == 1:
            self._delete_some(outcome)

    def _delete_some(self, outcome: Outcome) -> None:
        """Delete a bounded number of offsets of the first request, in one write. A group that is deleted as a whole
        takes no joins and no commits until the last step, so that it has all its offsets or none.
        """
        deletion = self._deletions[0]
        group, token = deletion.group, deletion.token
        is_gone = self.groups.get(group.group_id) is not group
        if deletion.is_whole and not is_gone and deletion.error is ErrorCode.NONE:
            deletion.error = admin.deletion_error(group)
            if not group.is_being_deleted and group.writes_in_flight:
                # The write may be the end of another deletion. Each request would write all its tombstones again.
                deletion.error = ErrorCode.COORDINATOR_NOT_AVAILABLE
        count_max = min(DELETED_PER_STEP, _tombstones_per_write(group.group_id) - 1)
        part = list(islice(deletion.keys, count_max))
        is_refused = deletion.error is not ErrorCode.NONE
        is_last = is_gone or is_refused or len(part) < count_max
        group.is_being_deleted = deletion.is_whole and not is_last
        if is_last:
            self._deletions.popleft()
        if self._deletions:
            self.timers.set(DELETE, outcome.now_ms)
        if is_gone:
            outcome.reply(token, deletion.response)
        elif is_refused:
            outcome.refuse(token, deletion.error)
        else:
            self._delete_part(deletion, part, is_last, outcome)

    def _delete_part(self, deletion: Deletion, part: list[tuple[str, int]], is_last: bool, outcome: Outcome) -> None:
        group = deletion.group
        context: Deletion | GroupWrite | None = None if is_last else deletion
        if not deletion.is_whole:
            # The group may have members by now.
            deletion.error, errors = admin.offset_deletion_errors(group, ((topic, [index]) for topic, index in part))
            deletion.response.update(errors)
            part = [key for key in errors if errors[key] is ErrorCode.NONE]
        group_tombstones = [self.offsets.tombstone(group.group_id, *key) for key in part]
        tombstones: list[GroupMetadata | OffsetCommit] = [each for each in group_tombstones if each is not None]
        if is_last and deletion.is_whole:
            group.writes_in_flight += 1
            tombstones.append(GroupMetadata(group.group_id, None))
            context = GroupWrite("deletion", group, group.generation)
        elif is_last and deletion.has_written and not tombstones:
            # A tombstone that changes nothing, for an offset that no group can have: with it the answer waits until
            # the parts before it are committed.
            tombstones.append(OffsetCommit(group.group_id, NO_TOPIC, 0, None))
        if tombstones:
            outcome.write(tombstones, context)
            deletion.has_written = True
        if is_last and deletion.error is not ErrorCode.NONE:
            outcome.refuse(deletion.token, deletion.error)
        elif is_last and tombstones:
            outcome.writes[-1].replies.append((deletion.token, deletion.response))
        elif is_last:
            outcome.reply(deletion.token, deletion.response)

    # -- replay ------------------------------------------------------------------------------------------------------

    def replay(self, offset: int, record: GroupMetadata | OffsetCommit, producer_id: int = -1) -> None:
        group = self.groups.get(record.group_id)
        if isinstance(record, OffsetCommit):
            self.offsets.replay(offset, record, producer_id)
            if record.value is not None:
                if group is None:
                    # A group without members that only commits exists by its offsets. When the last
                    # of them is deleted it stays until the next expiry, as in Kafka.
                    group = self._new_group(record.group_id, record.value.commit_timestamp)
                group.is_recorded = True
            return
        if record.value is None:
            if group is not None:
                group.persisted_generation = None
                if self._loading_groups is not None:
                    self._loading_groups.pop(record.group_id, None)
                group.is_recorded = record.group_id in self.offsets
                self._forget_if_unused(group)
            return
        if group is None:
            group = self._new_group(record.group_id, record.value.current_state_timestamp)
        group.is_recorded = True
        group.persisted_generation = record.value.generation
        if self._loading_groups is not None:
            self._loading_groups[record.group_id] = record.value
        if (
            group.state is GroupState.COMPLETING_REBALANCE
            and group.assignment_in_flight == group.generation == record.value.generation
        ):
            group.adopt_assignment(record.value)

    def replay_end_transaction(self, producer_id: int, committed: bool, count_max: int = maxsize) -> int:
        return self.offsets.replay_end_transaction(producer_id, committed, count_max)

    def restore_some(self, now: Now) -> bool:
        """Restore the groups, and start a session timeout for each member."""
        count = 0
        for group, member in islice(self._restored, MEMBERS_PER_STEP):
            count += 1
            if member is not None:
                self._rebalancer.extend_session(group, member, now.steady_ms)
        return count == MEMBERS_PER_STEP

    def _restore_groups(self) -> Iterator[tuple[Group, Member | None]]:
        """Each member as it is restored, and None when its group is ready."""
        loaded_groups, self._loading_groups = self._loading_groups or {}, None
        for group_id, value in loaded_groups.items():
            group = self.groups[group_id]
            for member in group.restore(value):
                yield group, member
            yield group, None

    def on_loaded(self, now: Now) -> Outcome:
        outcome = Outcome(now)
        self._loaded_ms = now.steady_ms
        while self.restore_some(now):
            pass
        for group in self.groups.values():
            if len(group.members) > self.config.group_max_size:
                self._rebalancer.prepare(group, "more members than group.max.size allows", outcome)
        self.timers.set(EXPIRE, now.steady_ms + self.config.offsets_retention_check_interval_ms)
        return outcome

    def close(self) -> None:
        for group in self.groups.values():
            group.memory.release()
        self.offsets.memory.release()
        self.groups.clear()
        self._loading_groups = None
        self._deletions.clear()

    # -- results of writes -------------------------------------------------------------------------------------------

    def on_committed(self, context: GroupWrite | OffsetWrite | Deletion, now: Now) -> Outcome:
        outcome = Outcome(now)
        self._end(context)
        if not isinstance(context, GroupWrite):
            return outcome
        group = context.group
        if context.kind == "assignment" and group.state is GroupState.STABLE and group.generation == context.generation:
            self._rebalancer.hand_out_assignments(group, outcome)
        elif context.kind == "deletion" and group.is_vacant and group.persisted_generation is None:
            # A group that a member joined during the deletion stays, with its generations.
            if self.groups.get(group.group_id) is group and group.group_id not in self.offsets:
                self._forget(group)
        elif context.kind == "replacement":
            self._joins.on_replacement_stored(context, outcome)
        self._forget_if_unused(group)
        return outcome

    def on_failed(
        self, context: GroupWrite | OffsetWrite | Deletion, error: ErrorCode, in_log: bool, now: Now
    ) -> Outcome:
        outcome = Outcome(now)
        if not in_log:
            self._end(context)
            if isinstance(context, Deletion):
                context.error = error
        if not isinstance(context, GroupWrite):
            return outcome
        group = context.group
        outcome.note(f"group {group.group_id}: could not store its {context.kind}: {error.name}")
        if context.kind == "assignment":
            if group.assignment_in_flight == context.generation == group.generation:
                self._rebalancer.drop_assignment(group, error, outcome)
                self._rebalancer.prepare(group, f"storing the assignment failed with {error.name}", outcome)
        elif context.kind == "replacement":
            self._joins.on_replacement_failed(context, error, in_log, outcome)
        self._forget_if_unused(group)
        return outcome

    def _end(self, context: GroupWrite | OffsetWrite | Deletion) -> None:
        """The write is no longer under way."""
        if isinstance(context, OffsetWrite):
            self.offsets.end(context)
        elif isinstance(context, GroupWrite):
            context.group.writes_in_flight -= 1

    # -- deadlines ---------------------------------------------------------------------------------------------------

    def next_deadline_ms(self) -> int | None:
        return self.timers.next_deadline_ms()

    def on_deadline(self, now: Now) -> Outcome:
        outcome = Outcome(now)
        for _ in range(DEADLINES_PER_TURN):
            key = self.timers.pop_due(now.steady_ms)
            if key is None:
                break
            if key == EXPIRE:
                self._expire(outcome)
                continue
            if key in (FORGET, DELETE):
                self._forget_some(outcome) if key == FORGET else self._delete_some(outcome)
                break
            group = self.groups.get(key.group_id)
            if group is None:
                continue
            member = group.members.get(key.member_id)
            if member is not None and now.steady_ms < self._loaded_ms + member.session_timeout_ms:
                # It was restored in an early step of the load, where its heartbeats prolonged nothing.
                self.timers.set(key, self._loaded_ms + member.session_timeout_ms)
            elif key.kind == "session":
                self._rebalancer.on_session_expired(group, key.member_id, outcome)
            elif key.kind == "join":
                self._rebalancer.on_join_phase_expired(group, outcome)
            else:
                self._rebalancer.on_sync_phase_expired(group, outcome)
            self._forget_if_unused(group)
        return outcome

    def _expire(self, outcome: Outcome) -> None:
        """Delete expired offsets, and empty groups without offsets; a bounded number of groups and offsets
        per turn.
        """
        if not self._groups_to_check and self._group_to_expire is None:
            self._groups_to_check = list(self.groups)
        room = EXPIRY_RECORDS_PER_TURN
        for _ in range(EXPIRY_GROUPS_PER_TURN):
            if room <= 0:
                break
            if self._group_to_expire is None:
                if not self._groups_to_check:
                    break
                group = self.groups.get(self._groups_to_check.pop())
                if group is None:
                    continue
                self._group_to_expire = GroupToExpire(group, self.offsets.keys(group.group_id))
            room -= self._expire_group(self._group_to_expire, room, outcome)
        is_left = bool(self._groups_to_check) or self._group_to_expire is not None
        pause_ms = 1 if is_left else self.config.offsets_retention_check_interval_ms
        self.timers.set(EXPIRE, outcome.now_ms + pause_ms)

    def _expire_group(self, expiring: GroupToExpire, count_max: int, outcome: Outcome) -> int:
        """Look at the next `count_max` offsets of the group. Returns how many there were: fewer only at its last."""
        group = expiring.group
        keys = list(islice(expiring.keys, count_max))
        is_last = len(keys) < count_max
        if is_last or self.groups.get(group.group_id) is not group:
            self._group_to_expire = None
        if self.groups.get(group.group_id) is not group:
            return len(keys)
        tombstones: list[GroupMetadata | OffsetCommit]
        retention_ms = self.config.offsets_retention_ms
        offset_tombstones, all_expired = self.offsets.expiration_records(group, keys, outcome.wall_ms, retention_ms)
        tombstones = list(offset_tombstones)
        expiring.all_expired &= all_expired
        is_over = is_last and expiring.all_expired and group.is_vacant
        if is_over:
            tombstones.append(GroupMetadata(group.group_id, None))
            group.writes_in_flight += 1
        if tombstones:
            expired_group = ", and the group" * is_over
            outcome.note(f"group {group.group_id}: {counted(len(offset_tombstones), 'offset')} expired{expired_group}")
            _write_in_parts(tombstones, outcome, GroupWrite("deletion", group, group.generation) if is_over else None)
        return len(keys)

    def _forget_if_unused(self, group: Group) -> None:
        if group.is_unused and self.groups.get(group.group_id) is group:
            self._forget(group)

    def _new_group(self, group_id: str, wall_ms: int) -> Group:
        group = self.groups[group_id] = Group(group_id, wall_ms, GroupMemory(self._memory))
        return group

    def _forget(self, group: Group) -> None:
        del self.groups[group.group_id]
        group.memory.release()


def _write_in_parts(
    tombstones: list[GroupMetadata | OffsetCommit], outcome: Outcome, context: GroupWrite | None = None
) -> None:
    """Write tombstones; the last batch has the context."""
    for part in _in_parts(tombstones):
        outcome.write(part)
    if outcome.writes:
        outcome.writes[-1].context = context


def _tombstones_per_write(group_id: str) -> int:
    """How many make a batch of a size that the log accepts."""
    return max(TOMBSTONE_BYTES_PER_WRITE // (3 * len(group_id) + _TOMBSTONE_BYTES_MAX), 2)


def _in_parts(tombstones: Sequence[Tombstone]) -> Iterator[list[Tombstone]]:
    per_write = _tombstones_per_write(max((record.group_id for record in tombstones), key=len, default=""))
    for start in range(0, len(tombstones), per_write):
        yield list(tombstones[start : start + per_write])
