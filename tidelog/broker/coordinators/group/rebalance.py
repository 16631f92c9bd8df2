"""A classic group's rebalance: prepare, collect joins, start the generation, collect syncs; and its
deadlines.

`joins` decides which members may join. `coordinator` makes the assignment state, by replay.
Invariants: only this module starts a generation; its start answers all parked joins; a parked sync
is answered when its generation is assigned or over. Source: the classic paths of Kafka's
`GroupMetadataManager`.
"""

from __future__ import annotations

from typing import NamedTuple

from tidelog.broker.coordinators.group.config import GroupCoordinatorConfig
from tidelog.broker.coordinators.group.group import Group, Member
from tidelog.broker.coordinators.group.records import group_metadata
from tidelog.broker.coordinators.group.states import GroupEvent, GroupState
from tidelog.broker.coordinators.outcome import Outcome
from tidelog.broker.coordinators.timers import TimerQueue
from tidelog.protocol.errors import ErrorCode, counted
from tidelog.protocol.messages.join_group import JoinGroupResponse, JoinGroupResponseMember
from tidelog.protocol.messages.sync_group import SyncGroupResponse

# Where no member has rejoined, a rebalance timeout of 0 would end the join phase again and again, in every turn of the
# loop. A generation of a large group takes much time, and absent static members take part in each.
REBALANCE_WAIT_MIN_MS = 1_000


class TimerKey(NamedTuple):
    """`kind` is session, join, sync or expire; unused ids are empty."""

    kind: str
    group_id: str = ""
    member_id: str = ""


class Replacement(NamedTuple):
    """A static member that joined under the new id `member_id`; its request `token` waits for the
    record.
    """

    member_id: str
    token: int
    api_version: int
    old_leader: str | None
    old_member_id: str
    old_member: Member  # a copy from before the replacement


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
        """The membership has changed: start a rebalance, or complete the one under way if possible."""
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
            # A new group waits, so that members that start together share one rebalance.
            delay_ms = self._config.group_initial_rebalance_delay_ms
            group.new_member_added = False
            group.initial_delay = (delay_ms, max(group.rebalance_timeout_ms - delay_ms, 0))
            self._timers.set(TimerKey("join", group.group_id), outcome.now_ms + delay_ms)
        elif group.all_members_joined:
            self.complete_join(group, outcome)
        else:
            self._await_joins(group, outcome)

    def maybe_complete_join(self, group: Group, outcome: Outcome) -> None:
        """Complete the join phase if all members have joined. The initial join phase ends only by
        time.
        """
        if (
            group.state is GroupState.PREPARING_REBALANCE
            and not group.in_initial_rebalance
            and group.all_members_joined
        ):
            self.complete_join(group, outcome)

    def complete_join(self, group: Group, outcome: Outcome) -> None:
        """End the join phase. Dynamic members that have not rejoined are removed, static members
        stay.
        """
        self._timers.cancel(TimerKey("join", group.group_id))
        group.initial_delay = None
        missing_ids = [
            member.member_id
            for member in group.members.values()
            if member.member_id not in group.awaiting_join and not member.is_static
        ]
        for member_id in missing_ids:
            self._timers.cancel(TimerKey("session", group.group_id, member_id))
            group.remove(member_id)
        if missing_ids:
            outcome.note(f"group {group.group_id}: did not rejoin in time: {', '.join(missing_ids)}")
        if not group.elect_joined_leader() and group.members:
            # The only members are absent static ones: wait until one rejoins or their sessions
            # expire.
            self._await_joins(group, outcome, REBALANCE_WAIT_MIN_MS)
            return
        group.start_generation(outcome.wall_ms)
        if group.members:
            self._hand_out_generation(group, outcome)
        else:
            outcome.note(f"group {group.group_id}: generation {group.generation} is empty")
            self.store(group, GroupWrite("empty", group, group.generation), {}, outcome)

    def _hand_out_generation(self, group: Group, outcome: Outcome) -> None:
        outcome.note(
            f"group {group.group_id}: generation {group.generation} has {counted(len(group.members), 'member')}, "
            f"leader {group.leader}, protocol {group.protocol_name}"
        )
        for member in group.members.values():
            token = group.awaiting_join.pop(member.member_id, None)
            if token is not None:
                outcome.reply(token, join_response(group, member.member_id))
            member.is_new = False
            self.extend_session(group, member, outcome.now_ms)
            group.pending_sync[member.member_id] = None
        self._timers.set(TimerKey("sync", group.group_id), outcome.now_ms + group.rebalance_timeout_ms)

    def _await_joins(self, group: Group, outcome: Outcome, wait_min_ms: int = 0) -> None:
        if group.is_large:
            wait_min_ms = REBALANCE_WAIT_MIN_MS
        wait_ms = max(group.rebalance_timeout_ms, wait_min_ms)
        self._timers.set(TimerKey("join", group.group_id), outcome.now_ms + wait_ms)

    # -- assignments -------------------------------------------------------------------------------------------------

    def store(self, group: Group, write: GroupWrite, assignments: dict[str, bytes], outcome: Outcome) -> None:
        group.writes_in_flight += 1
        outcome.write([group_metadata(group, assignments)], write)

    def hand_out_assignments(self, group: Group, outcome: Outcome) -> None:
        """The assignment is committed and adopted: answer all parked syncs."""
        for member_id, token in group.awaiting_sync.items():
            outcome.reply(token, sync_response(group, member_id))
            # A session does not expire while its sync is parked; it starts again here.
            self.extend_session(group, group.members[member_id], outcome.now_ms)
        group.awaiting_sync.clear()

    def drop_assignment(self, group: Group, error: ErrorCode, outcome: Outcome) -> None:
        """The generation gets no assignment: refuse all parked syncs."""
        group.drop_assignment()
        for member_id, token in group.awaiting_sync.items():
            outcome.reply(token, SyncGroupResponse(error_code=error))
            self.extend_session(group, group.members[member_id], outcome.now_ms)
        group.awaiting_sync.clear()

    def on_sync_received(self, group: Group, member_id: str) -> None:
        group.pending_sync.pop(member_id, None)
        if not group.pending_sync:
            self._timers.cancel(TimerKey("sync", group.group_id))

    # -- removal of members ------------------------------------------------------------------------------------------

    def remove_member(self, group: Group, member_id: str, outcome: Outcome) -> None:
        """Remove a member or a pending member id, and answer its parked requests; the caller starts
        the rebalance.
        """
        self._timers.cancel(TimerKey("session", group.group_id, member_id))
        join_token, sync_token = group.remove(member_id)
        if join_token is not None:
            outcome.reply(join_token, JoinGroupResponse(error_code=ErrorCode.UNKNOWN_MEMBER_ID))
        if sync_token is not None:
            outcome.reply(sync_token, SyncGroupResponse(error_code=ErrorCode.UNKNOWN_MEMBER_ID))

    def on_members_removed(self, group: Group, reason: str, outcome: Outcome) -> None:
        if group.can_rebalance and group.state is not GroupState.EMPTY:
            self.prepare(group, reason, outcome)
        else:
            self.maybe_complete_join(group, outcome)

    # -- deadlines ---------------------------------------------------------------------------------------------------

    def extend_session(self, group: Group, member: Member, now_ms: int) -> None:
        key = TimerKey("session", group.group_id, member.member_id)
        self._timers.set(key, now_ms + member.session_timeout_ms)

    def on_session_expired(self, group: Group, member_id: str, outcome: Outcome) -> None:
        if member_id in group.pending_members:
            self.remove_member(group, member_id, outcome)
            outcome.note(f"group {group.group_id}: {member_id} never joined")
            self._expired_during_join(group, outcome)
            return
        member = group.members.get(member_id)
        if member is None:
            return
        if not member.is_new and (member_id in group.awaiting_join or member_id in group.awaiting_sync):
            return  # it waits for the coordinator; its session starts again with the answer
        self.remove_member(group, member_id, outcome)
        outcome.note(f"group {group.group_id}: the session of {member_id} expired")
        if group.state in (GroupState.STABLE, GroupState.COMPLETING_REBALANCE):
            self.prepare(group, f"the session of {member_id} expired", outcome)
        else:
            self._expired_during_join(group, outcome)

    def _expired_during_join(self, group: Group, outcome: Outcome) -> None:
        # An expired session may end even the initial delay, other than a LeaveGroup (as in Kafka).
        if group.state is GroupState.PREPARING_REBALANCE and group.all_members_joined:
            self.complete_join(group, outcome)

    def on_join_phase_expired(self, group: Group, outcome: Outcome) -> None:
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

    def on_sync_phase_expired(self, group: Group, outcome: Outcome) -> None:
        """Remove the members that sent no SyncGroup within the rebalance timeout, as Kafka does."""
        if not group.pending_sync or group.state not in (GroupState.COMPLETING_REBALANCE, GroupState.STABLE):
            return
        absent_ids = list(group.pending_sync)
        for member_id in absent_ids:
            self.remove_member(group, member_id, outcome)
        self.prepare(group, f"no SyncGroup came in time from {', '.join(absent_ids)}", outcome)


def join_response(group: Group, member_id: str) -> JoinGroupResponse:
    """The response to a completed join; only the leader's response lists the members."""
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


def sync_response(group: Group, member_id: str) -> SyncGroupResponse:
    return SyncGroupResponse(
        protocol_type=group.protocol_type,
        protocol_name=group.protocol_name,
        assignment=group.members[member_id].assignment,
    )
