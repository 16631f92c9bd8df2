"""A classic group's rebalance: prepare, collect joins, hand out the generation, collect syncs; and its deadlines.

Here lives when a group changes its generation; who may join is decided in `joins`, where the assignment becomes state
in `coordinator` (by replay). The invariants: a generation starts only from here, all parked joins are answered when
it does, and a parked sync is answered as soon as its generation is assigned or over. Source: the classic paths of
Kafka's `GroupMetadataManager`.
"""

from __future__ import annotations

from typing import NamedTuple

from tidelog.broker.coordinators.group.config import GroupCoordinatorConfig
from tidelog.broker.coordinators.group.group import Group, Member
from tidelog.broker.coordinators.group.records import group_metadata
from tidelog.broker.coordinators.group.states import GroupEvent, GroupState
from tidelog.broker.coordinators.outcome import Outcome
from tidelog.broker.coordinators.timers import TimerQueue
from tidelog.protocol.errors import ErrorCode
from tidelog.protocol.messages.join_group import JoinGroupResponse, JoinGroupResponseMember
from tidelog.protocol.messages.sync_group import SyncGroupResponse


class TimerKey(NamedTuple):
    """`kind` is session, join, sync or expire; the ids that do not apply are empty."""

    kind: str
    group_id: str = ""
    member_id: str = ""


class Replacement(NamedTuple):
    """A static instance that came back as `member_id`, parked under `token` until that is stored."""

    member_id: str
    token: int
    api_version: int
    old_leader: str | None
    old_member_id: str
    before: Member  # as it was under the old id


class GroupWrite(NamedTuple):
    """The context of a GroupMetadata write. `kind` is empty, assignment, replacement or deletion."""

    kind: str
    group: Group
    generation: int
    replacement: Replacement | None = None


class Rebalancer:
    def __init__(self, config: GroupCoordinatorConfig, timers: TimerQueue[TimerKey]) -> None:
        self._config = config
        self._timers = timers

    # -- phases ------------------------------------------------------------------------------------------------------

    def prepare_or_complete(self, group: Group, reason: str, outcome: Outcome) -> None:
        """Membership changed: start a rebalance, or see whether the one under way is complete now."""
        if group.can_rebalance:
            self.prepare(group, reason, outcome)
        else:
            self.maybe_complete_join(group, outcome)

    def prepare(self, group: Group, reason: str, outcome: Outcome) -> None:
        if group.state is GroupState.COMPLETING_REBALANCE:
            self.drop_assignment(group, ErrorCode.REBALANCE_IN_PROGRESS, outcome)
        group.pending_sync.clear()
        self._timers.cancel(TimerKey("sync", group.group_id))
        is_initial = group.state is GroupState.EMPTY
        group.move(GroupEvent.REBALANCE, outcome.wall_ms)
        outcome.note(f"group {group.group_id}: rebalance of generation {group.generation}: {reason}")
        if is_initial:
            # A new group: wait a little, so that members started together need one rebalance and not one each.
            delay_ms = self._config.group_initial_rebalance_delay_ms
            group.new_member_added = False
            group.initial_delay = (delay_ms, max(group.rebalance_timeout_ms - delay_ms, 0))
            self._timers.set(TimerKey("join", group.group_id), outcome.now_ms + delay_ms)
        elif group.all_members_joined:
            self.complete_join(group, outcome)
        else:
            self._await_joins(group, outcome)

    def maybe_complete_join(self, group: Group, outcome: Outcome) -> None:
        """Complete the join phase if everybody is there and it is not the initial one, which ends by time alone."""
        if (
            group.state is GroupState.PREPARING_REBALANCE
            and not group.in_initial_rebalance
            and group.all_members_joined
        ):
            self.complete_join(group, outcome)

    def complete_join(self, group: Group, outcome: Outcome) -> None:
        """The join phase is over. Dynamic members that did not rejoin are out; static ones may still come back."""
        self._timers.cancel(TimerKey("join", group.group_id))
        group.initial_delay = None
        missing = [
            member.member_id
            for member in group.members.values()
            if member.member_id not in group.awaiting_join and not member.is_static
        ]
        for member_id in missing:
            self._timers.cancel(TimerKey("session", group.group_id, member_id))
            group.remove(member_id)
        if missing:
            outcome.note(f"group {group.group_id}: did not rejoin in time: {', '.join(missing)}")
        if not group.elect_joined_leader() and group.members:
            # Only absent static members are left: wait until one comes back or their sessions end.
            self._await_joins(group, outcome)
            return
        group.start_generation(outcome.wall_ms)
        if group.members:
            self._hand_out_generation(group, outcome)
        else:
            outcome.note(f"group {group.group_id}: generation {group.generation} is empty")
            self.store(group, GroupWrite("empty", group, group.generation), {}, outcome)

    def _hand_out_generation(self, group: Group, outcome: Outcome) -> None:
        outcome.note(
            f"group {group.group_id}: generation {group.generation} has {len(group.members)} members, "
            f"leader {group.leader}, protocol {group.protocol_name}"
        )
        for member in group.members.values():
            token = group.awaiting_join.pop(member.member_id, None)
            if token is not None:
                outcome.reply(token, joined(group, member.member_id))
            member.is_new = False
            self.extend_session(group, member, outcome.now_ms)
            group.pending_sync[member.member_id] = None
        self._timers.set(TimerKey("sync", group.group_id), outcome.now_ms + group.rebalance_timeout_ms)

    def _await_joins(self, group: Group, outcome: Outcome) -> None:
        self._timers.set(TimerKey("join", group.group_id), outcome.now_ms + group.rebalance_timeout_ms)

    # -- assignments -------------------------------------------------------------------------------------------------

    def store(self, group: Group, write: GroupWrite, assignments: dict[str, bytes], outcome: Outcome) -> None:
        group.writes_in_flight += 1
        outcome.write([group_metadata(group, assignments)], write)

    def hand_out_assignments(self, group: Group, outcome: Outcome) -> None:
        """The assignment is committed and adopted: answer every parked sync."""
        for member_id, token in group.awaiting_sync.items():
            outcome.reply(token, synced(group, member_id))
            # An expiry that came up while the sync was parked was let pass; from here on the session counts again.
            self.extend_session(group, group.members[member_id], outcome.now_ms)
        group.awaiting_sync.clear()

    def drop_assignment(self, group: Group, error: ErrorCode, outcome: Outcome) -> None:
        """This generation will not be assigned: refuse every parked sync."""
        group.drop_assignment()
        for member_id, token in group.awaiting_sync.items():
            outcome.reply(token, SyncGroupResponse(error_code=error))
            self.extend_session(group, group.members[member_id], outcome.now_ms)
        group.awaiting_sync.clear()

    def sync_received(self, group: Group, member_id: str) -> None:
        group.pending_sync.pop(member_id, None)
        if not group.pending_sync:
            self._timers.cancel(TimerKey("sync", group.group_id))

    # -- members that go ---------------------------------------------------------------------------------------------

    def remove_member(self, group: Group, member_id: str, outcome: Outcome) -> None:
        """Take a member or a handed-out id out and answer what it had parked; the caller goes on with the rebalance."""
        self._timers.cancel(TimerKey("session", group.group_id, member_id))
        join_token, sync_token = group.remove(member_id)
        if join_token is not None:
            outcome.reply(join_token, JoinGroupResponse(error_code=ErrorCode.UNKNOWN_MEMBER_ID))
        if sync_token is not None:
            outcome.reply(sync_token, SyncGroupResponse(error_code=ErrorCode.UNKNOWN_MEMBER_ID))

    def members_left(self, group: Group, reason: str, outcome: Outcome) -> None:
        if group.can_rebalance and group.state is not GroupState.EMPTY:
            self.prepare(group, reason, outcome)
        else:
            self.maybe_complete_join(group, outcome)

    # -- deadlines ---------------------------------------------------------------------------------------------------

    def extend_session(self, group: Group, member: Member, now_ms: int) -> None:
        key = TimerKey("session", group.group_id, member.member_id)
        self._timers.set(key, now_ms + member.session_timeout_ms)

    def session_expired(self, group: Group, member_id: str, outcome: Outcome) -> None:
        if member_id in group.pending_members:
            self.remove_member(group, member_id, outcome)
            outcome.note(f"group {group.group_id}: {member_id} never joined")
            self._expired_during_join(group, outcome)
            return
        member = group.members.get(member_id)
        if member is None:
            return
        if not member.is_new and (member_id in group.awaiting_join or member_id in group.awaiting_sync):
            return  # it waits for us; its session starts again when it is answered
        self.remove_member(group, member_id, outcome)
        outcome.note(f"group {group.group_id}: the session of {member_id} expired")
        if group.state in (GroupState.STABLE, GroupState.COMPLETING_REBALANCE):
            self.prepare(group, f"the session of {member_id} expired", outcome)
        else:
            self._expired_during_join(group, outcome)

    def _expired_during_join(self, group: Group, outcome: Outcome) -> None:
        # Unlike a member that leaves, one that is lost may end even the initial delay (as Kafka has it).
        if group.state is GroupState.PREPARING_REBALANCE and group.all_members_joined:
            self.complete_join(group, outcome)

    def join_phase_expired(self, group: Group, outcome: Outcome) -> None:
        if group.state is not GroupState.PREPARING_REBALANCE:
            return
        if group.initial_delay is None:
            self.complete_join(group, outcome)
            return
        delay_ms, remaining_ms = group.initial_delay
        if not group.new_member_added or remaining_ms == 0:
            self.complete_join(group, outcome)
            return
        group.new_member_added = False
        next_delay_ms = min(self._config.group_initial_rebalance_delay_ms, remaining_ms)
        group.initial_delay = (next_delay_ms, max(remaining_ms - delay_ms, 0))
        self._timers.set(TimerKey("join", group.group_id), outcome.now_ms + next_delay_ms)

    def sync_phase_expired(self, group: Group, outcome: Outcome) -> None:
        """Who never asked for its assignment within the rebalance timeout is out, as Kafka has it."""
        if not group.pending_sync or group.state not in (GroupState.COMPLETING_REBALANCE, GroupState.STABLE):
            return
        absent = list(group.pending_sync)
        for member_id in absent:
            self.remove_member(group, member_id, outcome)
        self.prepare(group, f"no SyncGroup came in time from {', '.join(absent)}", outcome)


def joined(group: Group, member_id: str) -> JoinGroupResponse:
    """The answer to a completed join; only the leader learns who the members are."""
    members: list[JoinGroupResponseMember] = []
    if member_id == group.leader:
        members = members_for_leader(group)
    return JoinGroupResponse(
        generation_id=group.generation,
        protocol_type=group.protocol_type,
        protocol_name=group.protocol_name,
        leader=group.leader or "",
        member_id=member_id,
        members=members,
    )


def members_for_leader(group: Group) -> list[JoinGroupResponseMember]:
    name = group.protocol_name or ""
    return [
        JoinGroupResponseMember(
            member_id=member.member_id,
            group_instance_id=member.instance_id,
            metadata=member.protocols.get(name, b""),
        )
        for member in group.members.values()
    ]


def synced(group: Group, member_id: str) -> SyncGroupResponse:
    return SyncGroupResponse(
        protocol_type=group.protocol_type,
        protocol_name=group.protocol_name,
        assignment=group.members[member_id].assignment,
    )
