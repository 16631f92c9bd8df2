from __future__ import annotations

import pytest

from tests.unit.broker.coordinators.fakes import Reply, World
from tidelog.broker.coordinators.group.config import GroupCoordinatorConfig
from tidelog.broker.coordinators.group.states import GroupState
from tidelog.protocol.errors import ErrorCode

E = ErrorCode


@pytest.fixture
def world() -> World:
    return World()


def test_a_new_dynamic_member_is_sent_back_with_an_id_from_version_4(world: World):
    first = world.join(client="flights")
    assert first.error == E.MEMBER_ID_REQUIRED
    assert first.response.member_id.startswith("flights-")
    assert world.join(member=first.response.member_id).is_parked


def test_an_older_client_joins_in_one_go(world: World):
    join = world.join(version=3)
    assert join.is_parked
    world.advance(3000)
    assert join.error == E.NONE
    assert join.response.leader == join.response.member_id


def test_the_log_has_no_more_of_a_reason_than_clients_of_java_send(world: World, caplog: pytest.LogCaptureFixture):
    with caplog.at_level("INFO"):
        assert world.join(version=8, instance="i", reason="r" * 1000).is_parked
        world.advance(3000)
        world.join(version=8, instance="j", reason="s" * 1000)
    assert f"(its reason: {'r' * 255})" in caplog.text
    assert f"(its reason: {'s' * 255})" in caplog.text


def test_the_first_rebalance_waits_for_members_started_together(world: World):
    first_id, first = world.member()
    world.advance(2000)
    second_id, second = world.member()
    world.advance(2000)
    assert first.is_parked, "the second member made the delay start over"
    world.advance(2000)
    assert first.response.generation_id == second.response.generation_id == 1
    assert {member.member_id for member in first.response.members} == {first_id, second_id}
    assert second.response.members == []
    assert second.response.leader == first_id


def test_the_initial_delay_ends_at_the_rebalance_timeout(world: World):
    joins = []
    for _ in range(4):
        joins.append(world.member(rebalance_ms=7000)[1])
        world.advance(2000)
    assert all(join.error == E.NONE for join in joins), "8 s have passed, 7 s is all the members give"


def test_a_member_of_an_unknown_group_is_unknown(world: World):
    assert world.join(member="ghost").error == E.UNKNOWN_MEMBER_ID
    assert "g" not in world.coordinator().groups


def test_the_protocol_with_the_most_votes_among_the_common_ones_is_taken(world: World):
    only_one = {"roundrobin": b"1"}
    votes = [{"range": b"1", "roundrobin": b"2"}, {"sticky": b"3", "roundrobin": b"4", "range": b"5"}, only_one]
    joins = [world.member(protocols=protocols)[1] for protocols in votes]
    world.advance(6000)
    assert joins[0].response.protocol_name == "roundrobin"
    assert [member.metadata for member in joins[0].response.members] == [b"2", b"4", b"1"]


@pytest.mark.parametrize(
    ("protocol_type", "protocols"), [("connect", {"range": b""}), ("consumer", {"sticky": b""}), ("consumer", {})]
)
def test_a_member_without_a_common_protocol_is_refused(world: World, protocol_type: str, protocols: dict[str, bytes]):
    world.stable()
    assert world.join(protocol_type=protocol_type, protocols=protocols).error == E.INCONSISTENT_GROUP_PROTOCOL


def test_a_first_member_needs_a_protocol_and_a_type(world: World):
    assert world.join(protocols={}).error == E.INCONSISTENT_GROUP_PROTOCOL
    assert world.join(protocol_type="").error == E.INCONSISTENT_GROUP_PROTOCOL
    assert "g" not in world.coordinator().groups


@pytest.mark.parametrize(("session_ms", "fits"), [(5999, False), (6000, True), (1_800_000, True), (1_800_001, False)])
def test_the_session_timeout_has_bounds(world: World, session_ms: int, fits: bool):
    error = world.join(session_ms=session_ms).error
    assert error == (E.MEMBER_ID_REQUIRED if fits else E.INVALID_SESSION_TIMEOUT)


def test_a_group_needs_an_id(world: World):
    assert world.join(group="").error == E.INVALID_GROUP_ID
    assert world.sync(group="").error == E.INVALID_GROUP_ID
    assert world.heartbeat(group="").error == E.INVALID_GROUP_ID
    assert world.leave("", "m").error == E.INVALID_GROUP_ID


def test_version_0_takes_the_session_timeout_for_the_rebalance_timeout(world: World):
    world.join(version=0, session_ms=9000, rebalance_ms=-1)
    (member,) = world.coordinator().groups["g"].members.values()
    assert member.rebalance_timeout_ms == 9000


def test_a_full_group_takes_nobody_else():
    world = World(GroupCoordinatorConfig(group_max_size=2))
    world.stable(size=2)
    assert world.join().error == E.GROUP_MAX_SIZE_REACHED


def test_a_group_above_a_lowered_limit_loses_who_rejoins_last():
    world = World()
    members = world.stable(size=3)
    world.config = GroupCoordinatorConfig(group_max_size=2)
    world.restart()
    assert world.coordinator().groups["g"].state is GroupState.PREPARING_REBALANCE
    joins = [world.join(member=member) for member in members]
    assert joins[2].error == E.GROUP_MAX_SIZE_REACHED
    assert {join.error for join in joins[:2]} == {E.NONE}


def test_a_follower_that_rejoins_unchanged_does_not_disturb_a_stable_group(world: World):
    leader, follower = world.stable(size=2)
    again = world.join(member=follower)
    assert again.error == E.NONE
    assert again.response.generation_id == 1
    assert again.response.members == []
    assert world.heartbeat(member=leader).error == E.NONE


def test_a_follower_with_new_metadata_makes_everybody_rejoin(world: World):
    leader, follower = world.stable(size=2)
    again = world.join(member=follower, protocols={"range": b"more topics"})
    assert again.is_parked
    assert world.heartbeat(member=leader).error == E.REBALANCE_IN_PROGRESS
    assert world.join(member=leader).error == E.NONE
    assert again.response.generation_id == 2


def test_the_leader_may_ask_for_a_rebalance(world: World):
    leader, follower = world.stable(size=2)
    again = world.join(member=leader)
    assert again.is_parked
    world.join(member=follower)
    assert again.response.generation_id == 2


def test_who_does_not_rejoin_within_the_rebalance_timeout_is_out(world: World):
    leader, follower = world.stable(size=2, session_ms=300_000)
    again = world.join(member=leader)
    world.advance(59_999)
    assert again.is_parked
    world.advance(1)
    assert [member.member_id for member in again.response.members] == [leader]
    assert world.heartbeat(member=follower, generation=2).error == E.UNKNOWN_MEMBER_ID


def test_a_leader_that_stays_away_is_replaced_by_who_came(world: World):
    leader, follower = world.stable(size=2, session_ms=300_000)
    again = world.join(member=follower, protocols={"range": b"changed"})
    world.advance(60_000)
    assert again.response.leader == follower
    assert again.response.generation_id == 2
    assert leader not in world.coordinator().groups["g"].members


def test_joining_twice_at_once_answers_the_older_request_and_keeps_the_member(world: World):
    leader, follower = world.stable(size=2)
    older = world.join(member=leader)
    newer = world.join(member=leader)
    assert older.error == E.REBALANCE_IN_PROGRESS
    world.join(member=follower)
    assert newer.error == E.NONE


def test_a_member_that_missed_the_answer_to_its_join_gets_it_again(world: World):
    leader_id, join = world.member()
    world.advance(3000)
    assert join.response.generation_id == 1
    again = world.join(member=leader_id)
    assert again.response.generation_id == 1
    assert [member.member_id for member in again.response.members] == [leader_id]


def test_a_member_id_handed_out_expires_with_the_session_timeout(world: World):
    member = world.join(session_ms=6000).response.member_id
    world.advance(6000)
    assert "g" not in world.coordinator().groups
    assert world.join(member=member).error == E.UNKNOWN_MEMBER_ID


def test_a_rebalance_waits_for_member_ids_handed_out(world: World):
    (leader,) = world.stable()
    coming = world.join().response.member_id
    again = world.join(member=leader)
    assert again.is_parked
    joined = world.join(member=coming)
    assert again.error == joined.error == E.NONE


def test_a_handed_out_id_that_is_never_used_does_not_hold_a_rebalance_for_ever(world: World):
    (leader,) = world.stable()
    world.join(session_ms=6000)
    again = world.join(member=leader)
    world.advance(6000)
    assert again.error == E.NONE


def test_a_ghost_that_waits_for_its_first_join_is_dropped_after_five_minutes():
    world = World()
    leader, _ = world.stable(size=2, session_ms=1_800_000, rebalance_ms=1_700_000)
    ghost = world.join(version=3)
    assert ghost.is_parked
    for _ in range(10):
        world.advance(30_000)
        if ghost.is_parked:
            world.heartbeat(member=leader)
    assert ghost.error == E.UNKNOWN_MEMBER_ID


def test_absent_static_members_hold_the_group_together_until_their_sessions_end(world: World):
    first = world.join(instance="i1", session_ms=20_000)
    second = world.join(instance="i2", session_ms=200_000)
    world.advance(6000)
    leader, follower = first.response.member_id, second.response.member_id
    for member, instance in ((leader, "i1"), (follower, "i2")):
        assert world.sync(member=member, instance=instance, assignments={leader: b"1"}).error == E.NONE
    again = world.join(member=leader, instance="i1", session_ms=20_000)
    world.advance(60_000)
    assert again.response.generation_id == 2
    assert {member.member_id for member in again.response.members} == {leader, follower}


def test_a_flood_of_member_ids_is_bounded():
    world = World(GroupCoordinatorConfig(max_timers=50))
    errors = [world.join(group=f"g{number}").error for number in range(60)]
    assert errors.count(E.MEMBER_ID_REQUIRED) == 49, "one deadline is the expiry check's"
    assert errors[-1] == E.COORDINATOR_NOT_AVAILABLE
    assert len(world.coordinator().groups) == 49


def test_metadata_that_no_record_can_hold_is_refused():
    world = World(GroupCoordinatorConfig(max_group_metadata_bytes=1000))
    assert world.join(protocols={"range": bytes(1001)}).error == E.INVALID_REQUEST


@pytest.mark.parametrize("is_static", [False, True])
def test_a_member_whose_id_no_answer_can_hold_is_refused(world: World, is_static: bool):
    def join(length: int) -> Reply:
        name = "c" * length
        return world.join(version=3, instance=name) if is_static else world.join(version=3, client=name)

    assert join(32_731).error == E.INVALID_REQUEST
    assert "g" not in world.coordinator().groups
    joined = join(32_730)
    world.advance(3000)
    assert joined.error == E.NONE
    assert joined.response.encode(5)
