from __future__ import annotations

from tests.unit.broker.coordinators.fakes import World
from tidelog.broker.coordinators.group.config import GroupCoordinatorConfig
from tidelog.broker.coordinators.group.states import GroupState
from tidelog.protocol.errors import ErrorCode

E = ErrorCode


def test_heartbeats_keep_a_member_alive_and_silence_ends_it():
    world = World()
    alive, silent = world.stable(size=2, session_ms=10_000)
    world.advance(9_000)
    assert world.heartbeat(member=alive).error == E.NONE
    world.advance(1_000)
    assert world.heartbeat(member=alive).error == E.REBALANCE_IN_PROGRESS
    assert world.heartbeat(member=silent).error == E.UNKNOWN_MEMBER_ID
    assert world.join(member=alive).response.generation_id == 2


def test_a_node_that_stood_still_reads_what_its_members_sent_before_their_sessions_end():
    """Heartbeats waited in its sockets, and all members were expelled. Where another node led meanwhile, a static
    member joined the old coordinator anew, and the new one fenced it for good.
    """
    world = World()
    alive, silent = world.stable(size=2, session_ms=10_000)
    world.ports.time_ms += 15_000
    world.advance(0)
    assert world.heartbeat(member=alive).error == E.NONE
    world.advance(1_000)
    assert world.heartbeat(member=alive).error == E.REBALANCE_IN_PROGRESS
    assert world.heartbeat(member=silent).error == E.UNKNOWN_MEMBER_ID


def test_sessions_end_also_on_a_node_that_stands_still_again_and_again():
    world = World()
    (silent,) = world.stable(session_ms=10_000)
    world.ports.time_ms += 15_000
    world.advance(0)
    world.ports.time_ms += 15_000
    world.advance(0)
    assert world.heartbeat(member=silent).error == E.UNKNOWN_MEMBER_ID


def test_a_node_that_stood_still_ends_the_sessions_of_many_members_at_once():
    """Each fifty of them waited for a second more, and so did all other deadlines of their partition."""
    world = World(GroupCoordinatorConfig(group_initial_rebalance_delay_ms=0))
    for number in range(200):
        world.stable(f"g{number}", session_ms=10_000)
    world.ports.time_ms += 15_000
    world.advance(1_010)
    assert not any(group.members for group in world.coordinator().groups.values())


def test_a_heartbeat_says_what_is_wrong():
    world = World()
    (member,) = world.stable()
    assert world.heartbeat(member="ghost").error == E.UNKNOWN_MEMBER_ID
    assert world.heartbeat(group="other", member=member).error == E.UNKNOWN_MEMBER_ID
    assert world.heartbeat(member=member, generation=7).error == E.ILLEGAL_GENERATION
    assert world.heartbeat(member=member).error == E.NONE


def test_a_heartbeat_while_the_leader_assigns_counts():
    world = World()
    members = [world.member(session_ms=6000) for _ in range(2)]
    world.advance(6000)
    (leader, _), (follower, _) = members
    for _ in range(3):
        world.advance(4000)
        assert world.heartbeat(member=leader).error == E.NONE
        assert world.heartbeat(member=follower).error == E.NONE


def test_a_parked_member_is_not_expired_while_it_waits_for_us():
    world = World()
    first, second = world.stable(size=2, session_ms=6000, rebalance_ms=60_000)
    world.heartbeat(member=second)
    again = world.join(member=first, session_ms=6000)
    for _ in range(6):
        world.advance(5000)
        assert world.heartbeat(member=second).error == E.REBALANCE_IN_PROGRESS
    assert again.is_parked
    world.join(member=second, session_ms=6000)
    assert again.error == E.NONE
    world.advance(5999)
    assert world.heartbeat(member=first, generation=2).error == E.NONE


def test_when_the_last_member_leaves_the_group_is_empty_and_remembered():
    world = World()
    (member,) = world.stable()
    leave = world.leave("g", member)
    assert [each.error_code for each in leave.response.members] == [E.NONE]
    group = world.coordinator().groups["g"]
    assert (group.state, group.generation, group.protocol_type) == (GroupState.EMPTY, 2, "consumer")
    world.restart()
    group = world.coordinator().groups["g"]
    assert (group.state, group.generation, group.protocol_type) == (GroupState.EMPTY, 2, "consumer")
    _next_member, join = world.member()
    world.advance(3000)
    assert join.response.generation_id == 3


def test_many_members_leave_at_once():
    world = World()
    a, b, c = world.stable(size=3)
    leave = world.leave("g", a, "ghost", b)
    assert [each.error_code for each in leave.response.members] == [E.NONE, E.UNKNOWN_MEMBER_ID, E.NONE]
    assert world.heartbeat(member=c).error == E.REBALANCE_IN_PROGRESS
    assert world.join(member=c).response.leader == c


def test_before_version_3_the_answer_is_the_one_members():
    world = World()
    (member,) = world.stable()
    assert world.leave("g", "ghost", version=2).error == E.UNKNOWN_MEMBER_ID
    assert world.leave("nowhere", member, version=0).error == E.UNKNOWN_MEMBER_ID
    left = world.leave("g", member, version=2)
    assert (left.error, left.response.members) == (E.NONE, [])


def test_a_handed_out_id_can_be_given_back():
    world = World()
    member = world.join().response.member_id
    assert world.leave("g", member).response.members[0].error_code == E.NONE
    assert "g" not in world.coordinator().groups


def test_leaving_while_a_join_is_parked_answers_it():
    world = World()
    member, join = world.member()
    world.leave("g", member)
    assert join.error == E.UNKNOWN_MEMBER_ID
    world.advance(3000)
    assert world.coordinator().groups["g"].state is GroupState.EMPTY


def test_a_leave_completes_the_join_phase_that_waited_for_it():
    world = World()
    a, b = world.stable(size=2)
    again = world.join(member=a)
    assert again.is_parked
    world.leave("g", b)
    assert again.response.generation_id == 2
