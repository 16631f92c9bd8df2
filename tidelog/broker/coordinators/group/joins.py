"""The decision about one JoinGroup request: new and existing members, pending member ids, static
members.

The rebalance that a join may start lives in `rebalance`. Invariants: an existing member that joins
during a rebalance never gets UNKNOWN_MEMBER_ID; of two requests that join as the same member, the
first is answered and the second is parked. Source: Kafka's `GroupMetadataManager.classicGroupJoin`,
KIP-345, KIP-394, KIP-814.
"""

from __future__ import annotations

from typing import NamedTuple

from tidelog.broker.coordinators.group.config import GroupCoordinatorConfig
from tidelog.broker.coordinators.group.group import Group, Member
from tidelog.broker.coordinators.group.rebalance import (
    GroupWrite,
    Rebalancer,
    Replacement,
    TimerKey,
    join_response,
    members_for_leader,
)
from tidelog.broker.coordinators.group.states import GroupState
from tidelog.broker.coordinators.outcome import Caller, Outcome, RandomBits
from tidelog.broker.coordinators.timers import TimerQueue
from tidelog.protocol.errors import ErrorCode
from tidelog.protocol.messages.join_group import JoinGroupRequest, JoinGroupResponse
from tidelog.protocol.messages.sync_group import SyncGroupResponse

MEMBER_ID_REQUIRED_VERSION_MIN = 4
SKIP_ASSIGNMENT_VERSION_MIN = 9
MEMBER_ID_BYTES_MAX = 32_767
"""The longest string of an answer or a record; the id has the client's, or the instance's, in it."""
REASON_CHARACTERS_MAX = 255
"""What Java's clients send of their reason to join (JoinGroupRequest.maybeTruncateReason)."""


class _Join(NamedTuple):
    """One request, its group, and the outcome that takes its answer. `protocols`: the metadata by protocol."""

    group: Group
    request: JoinGroupRequest
    protocols: dict[str, bytes]
    caller: Caller
    outcome: Outcome


class JoinHandler:
    def __init__(
        self,
        config: GroupCoordinatorConfig,
        timers: TimerQueue[TimerKey],
        rebalancer: Rebalancer,
        rng: RandomBits,
    ) -> None:
        self._config = config
        self._timers = timers
        self._rebalancer = rebalancer
        self._rng = rng

    def join(self, group: Group, request: JoinGroupRequest, caller: Caller, outcome: Outcome) -> None:
        protocols = {protocol.name: protocol.metadata for protocol in request.protocols}
        join = _Join(group, request, protocols, caller, outcome)
        refusal = self._refusal(join)
        if refusal is not ErrorCode.NONE:
            if refusal is ErrorCode.GROUP_MAX_SIZE_REACHED and request.member_id:
                self._remove_refused(join)
            outcome.reply(caller.token, join_error(refusal, request.member_id))
        elif not request.member_id:
            self._join_new(join)
        elif request.member_id in group.pending_members and request.group_instance_id is None:
            self._add(join, request.member_id)
        else:
            error = group.check_member(request.member_id, request.group_instance_id)
            if error is ErrorCode.NONE:
                self._rejoin(join)
            else:
                outcome.reply(caller.token, join_error(error, request.member_id))

    def _refusal(self, join: _Join) -> ErrorCode:
        group, request, protocols, caller, outcome = join
        if not self._has_room(group, request.member_id):
            return ErrorCode.GROUP_MAX_SIZE_REACHED
        if not group.supports(request.protocol_type, protocols):
            return ErrorCode.INCONSISTENT_GROUP_PROTOCOL
        metadata_bytes = sum(len(name) + len(metadata) for name, metadata in protocols.items())
        if metadata_bytes > self._config.max_group_metadata_bytes:
            return ErrorCode.INVALID_REQUEST
        if request.member_id not in group.members and len(self._timers) >= self._config.max_timers:
            return ErrorCode.COORDINATOR_NOT_AVAILABLE
        candidate = new_member(request, request.member_id, protocols, caller)
        growth_bytes = group.growth_by_join(request.group_instance_id, candidate)
        return growth_refusal(group, growth_bytes, self._config, outcome)

    def _remove_refused(self, join: _Join) -> None:
        """The sender has no place in the next generation either, so the join phase must not wait for it.

        Another member must get its partitions, and perhaps its role as leader.
        """
        group, request, _, _, outcome = join
        was_member = request.member_id in group.members
        self._rebalancer.remove_member(group, request.member_id, outcome)
        if was_member:
            self._rebalancer.on_members_removed(group, f"there is no room for {request.member_id}", outcome)
        else:
            self._rebalancer.maybe_complete_join(group, outcome)

    def _has_room(self, group: Group, member_id: str) -> bool:
        if group.state is GroupState.EMPTY:
            return True
        if group.state is GroupState.PREPARING_REBALANCE:
            # The limit counts rejoined members: after the limit is lowered, the last to rejoin are
            # refused.
            return member_id in group.awaiting_join or len(group.awaiting_join) < self._config.group_max_size
        return member_id in group.members or len(group.members) < self._config.group_max_size

    # -- new members -------------------------------------------------------------------------------------------------

    def _join_new(self, join: _Join) -> None:
        group, request, _, caller, outcome = join
        instance_id = request.group_instance_id
        member_id = f"{caller.client_id if instance_id is None else instance_id}-{random_uuid(self._rng)}"
        if len(member_id.encode("utf-8", "surrogatepass")) > MEMBER_ID_BYTES_MAX:
            outcome.reply(caller.token, join_error(ErrorCode.INVALID_REQUEST, ""))
        elif instance_id is not None and instance_id in group.static_members:
            self._replace(join, member_id)
        elif instance_id is None and caller.api_version >= MEMBER_ID_REQUIRED_VERSION_MIN:
            # The client joins again with this id, so that a retry of its first join adds no second
            # member (KIP-394).
            group.add_pending_member(member_id)
            key = TimerKey("session", group.group_id, member_id)
            self._timers.set(key, outcome.now_ms + request.session_timeout_ms)
            outcome.reply(caller.token, join_error(ErrorCode.MEMBER_ID_REQUIRED, member_id))
        else:
            self._add(join, member_id)

    def _add(self, join: _Join, member_id: str) -> None:
        group, request, protocols, caller, outcome = join
        member = new_member(request, member_id, protocols, caller)
        member.is_new = True
        if group.in_initial_rebalance:
            group.new_member_added = True
        group.add(member, request.protocol_type)
        group.awaiting_join[member_id] = caller.token
        # A client may give up on a long join and join again under another id. The coordinator
        # cannot notice that, so the first member expires after this time.
        key = TimerKey("session", group.group_id, member_id)
        self._timers.set(key, outcome.now_ms + self._config.new_member_join_timeout_ms)
        reason = _reason(request)
        self._rebalancer.prepare_or_complete(group, f"{member_id} joins (its reason: {reason})", outcome)

    # -- existing members --------------------------------------------------------------------------------------------

    def _rejoin(self, join: _Join) -> None:
        group, request, protocols, caller, outcome = join
        member = group.members[request.member_id]
        has_changed = member.protocols != protocols or list(member.protocols) != list(protocols)
        if group.state is GroupState.PREPARING_REBALANCE:
            must_rebalance = True
        elif group.state is GroupState.COMPLETING_REBALANCE:
            # An unchanged member has only missed the response to its last join.
            must_rebalance = has_changed or (group.leader == member.member_id and group.is_large)
        else:
            # The leader rejoins to get all members a new assignment, for instance when a topic has
            # more partitions.
            must_rebalance = has_changed or group.leader == member.member_id
        if not must_rebalance:
            response = join_response(group, member.member_id)
            if group.state is GroupState.STABLE:
                response.members = []
            outcome.reply(caller.token, response)
            return
        group.update(member, protocols, request.rebalance_timeout_ms, request.session_timeout_ms)
        self._park(group, member, caller, outcome)
        reason = _reason(request)
        text = f"{member.member_id} joins again (its reason: {reason})"
        self._rebalancer.prepare_or_complete(group, text, outcome)

    def _park(self, group: Group, member: Member, caller: Caller, outcome: Outcome) -> None:
        earlier_token = group.awaiting_join.pop(member.member_id, None)
        if earlier_token is not None:
            # The member has joined again over another connection; the first request gets a
            # retriable error.
            outcome.reply(earlier_token, join_error(ErrorCode.REBALANCE_IN_PROGRESS, member.member_id))
        group.awaiting_join[member.member_id] = caller.token

    # -- static members (KIP-345) ------------------------------------------------------------------------------------

    def _replace(self, join: _Join, member_id: str) -> None:
        """A static member joins without its member id: its new member id replaces the old one."""
        group, request, protocols, caller, outcome = join
        instance_id = request.group_instance_id
        assert instance_id is not None
        old_member_id = group.static_members[instance_id]
        old_leader = group.leader
        self._fence(group, old_member_id, outcome)
        member = group.replace_static(instance_id, member_id)
        old_member = copy_of(member)
        self._timers.cancel(TimerKey("session", group.group_id, old_member_id))
        self._rebalancer.extend_session(group, member, outcome.now_ms)
        group.update(member, protocols, request.rebalance_timeout_ms, request.session_timeout_ms)
        # The request is parked in every state: a rebalance that begins before the record is stored
        # includes it.
        group.awaiting_join[member_id] = caller.token
        reason = f"static member {instance_id} is back as {member_id}"
        if group.state is GroupState.STABLE and group.select_protocol() == group.protocol_name:
            # Only the member id changes, so a record with the new id suffices, without a rebalance.
            outcome.note(f"group {group.group_id}: {reason}, no rebalance needed")
            replacement = Replacement(
                member_id, caller.token, caller.api_version, old_leader, old_member_id, old_member
            )
            write = GroupWrite("replacement", group, group.generation, replacement)
            assignments = {other.member_id: other.assignment for other in group.members.values()}
            self._rebalancer.store(group, write, assignments, outcome)
            return
        self._rebalancer.prepare_or_complete(group, reason, outcome)

    def _fence(self, group: Group, member_id: str, outcome: Outcome) -> None:
        """Answer the parked requests of a static member's old member id with FENCED_INSTANCE_ID."""
        token = group.awaiting_join.pop(member_id, None)
        if token is not None:
            outcome.reply(token, join_error(ErrorCode.FENCED_INSTANCE_ID, member_id))
        token = group.awaiting_sync.pop(member_id, None)
        if token is not None:
            outcome.reply(token, SyncGroupResponse(error_code=ErrorCode.FENCED_INSTANCE_ID))

    def on_replacement_stored(self, write: GroupWrite, outcome: Outcome) -> None:
        if self._still_waits(write) and write.replacement is not None:
            group, (member_id, token, api_version, old_leader, _, _) = write.group, write.replacement
            del group.awaiting_join[member_id]
            outcome.reply(token, replacement_response(group, member_id, old_leader, api_version))
            self._rebalancer.extend_session(group, group.members[member_id], outcome.now_ms)

    def on_replacement_failed(self, write: GroupWrite, error: ErrorCode, in_log: bool, outcome: Outcome) -> None:
        """Restore the old member id, unless the record with the new member id may still be
        committed.
        """
        if not self._still_waits(write) or write.replacement is None:
            return
        group, (member_id, token, _, _, old_member_id, old_member) = write.group, write.replacement
        del group.awaiting_join[member_id]
        outcome.reply(token, join_error(error, ""))
        member = group.members[member_id]
        if not in_log:
            assert member.instance_id is not None
            self._timers.cancel(TimerKey("session", group.group_id, member_id))
            group.replace_static(member.instance_id, old_member_id)
            group.update(member, old_member.protocols, old_member.rebalance_timeout_ms, old_member.session_timeout_ms)
        self._rebalancer.extend_session(group, member, outcome.now_ms)

    def _still_waits(self, write: GroupWrite) -> bool:
        """Whether this write answers the request. A rebalance, fence or removal since then answers
        it instead.
        """
        group, replacement = write.group, write.replacement
        return (
            replacement is not None
            and group.state is GroupState.STABLE
            and group.generation == write.generation
            and group.awaiting_join.get(replacement.member_id) == replacement.token
        )


def _reason(request: JoinGroupRequest) -> str:
    """For the log. A request may name one of 32 KB."""
    return (request.reason or "not given")[:REASON_CHARACTERS_MAX]


def growth_refusal(group: Group, growth_bytes: int, config: GroupCoordinatorConfig, outcome: Outcome) -> ErrorCode:
    """NONE, or the error of a request for which there is no memory.

    GROUP_MAX_SIZE_REACHED, which is final for clients, when the group exceeds its own bound;
    COORDINATOR_NOT_AVAILABLE, on which clients retry, when the groups of the node exceed theirs.
    """
    if growth_bytes <= 0:
        return ErrorCode.NONE
    if group.memory.held_bytes + growth_bytes > config.max_group_memory_bytes:
        outcome.warn("a group is too large", f"group {group.group_id} may not hold {growth_bytes} bytes more")
        return ErrorCode.GROUP_MAX_SIZE_REACHED
    if not group.memory.has_room_for(growth_bytes):
        text = f"group {group.group_id} may not hold {growth_bytes} bytes more: the groups of this node hold too much"
        outcome.warn("groups hold too much", text)
        return ErrorCode.COORDINATOR_NOT_AVAILABLE
    return ErrorCode.NONE


def new_member(request: JoinGroupRequest, member_id: str, protocols: dict[str, bytes], caller: Caller) -> Member:
    return Member(
        member_id,
        instance_id=request.group_instance_id,
        client_id=caller.client_id,
        client_host=caller.client_host,
        rebalance_timeout_ms=request.rebalance_timeout_ms,
        session_timeout_ms=request.session_timeout_ms,
        protocols=protocols,
    )


def join_error(error: ErrorCode, member_id: str) -> JoinGroupResponse:
    return JoinGroupResponse(error_code=error, member_id=member_id)


def replacement_response(group: Group, member_id: str, old_leader: str | None, api_version: int) -> JoinGroupResponse:
    """The response to a static member that joins without a rebalance.

    From version 9 the response to a leader has the members, for watching their topics, and
    `skip_assignment` (KIP-814). Older versions show the old leader's id, so that the member does
    not act as the leader.
    """
    is_leader = member_id == group.leader
    can_skip = api_version >= SKIP_ASSIGNMENT_VERSION_MIN
    return JoinGroupResponse(
        generation_id=group.generation,
        protocol_type=group.protocol_type,
        protocol_name=group.protocol_name,
        leader=(group.leader if can_skip else old_leader) or "",
        skip_assignment=can_skip and is_leader,
        member_id=member_id,
        members=members_for_leader(group) if can_skip and is_leader else [],
    )


def copy_of(member: Member) -> Member:
    return Member(
        member.member_id,
        instance_id=member.instance_id,
        client_id=member.client_id,
        client_host=member.client_host,
        rebalance_timeout_ms=member.rebalance_timeout_ms,
        session_timeout_ms=member.session_timeout_ms,
        protocols=member.protocols,
        assignment=member.assignment,
    )


def random_uuid(rng: RandomBits) -> str:
    """A version 4 UUID as text."""
    bits = rng.getrandbits(128)
    digits = f"{bits & ~(0xF << 76) & ~(0x3 << 62) | 4 << 76 | 2 << 62:032x}"
    return f"{digits[:8]}-{digits[8:12]}-{digits[12:16]}-{digits[16:20]}-{digits[20:]}"
