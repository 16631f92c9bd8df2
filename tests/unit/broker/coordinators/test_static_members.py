from __future__ import annotations

import pytest

from tests.unit.broker.coordinators.fakes import World
from tidelog.broker.coordinators.group.states import GroupState
from tidelog.protocol.errors import ErrorCode, KafkaError

E = ErrorCode


def static_pair(world: World, **options) -> tuple[str, str]:
    joins = [world.join(instance=name, client="c", **options) for name in ("i1", "i2")]
    world.advance(6000)
    first, second = (join.response.member_id for join in joins)
    assert first.startswith("i1-")
    world.sync(member=first, instance="i1", assignments={first: b"one", second: b"two"})
    world.sync(member=second, instance="i2")
    world.ports.commit(0)
    return first, second


def test_a_static_member_comes_back_without_a_rebalance():
    world = World()
    first, second = static_pair(world)
    back = world.join(instance="i2")
    assert back.response.generation_id == 1
    assert back.response.member_id not in (first, second)
    assert back.response.leader == first
    assert world.heartbeat(member=first, instance="i1").error == E.NONE
    sync = world.sync(member=back.response.member_id, instance="i2")
    assert sync.response.assignment == b"two"


def test_the_old_process_is_fenced():
    world = World()
    _, second = static_pair(world)
    world.join(instance="i2")
    assert world.heartbeat(member=second, instance="i2").error == E.FENCED_INSTANCE_ID
    assert world.sync(member=second, instance="i2").error == E.FENCED_INSTANCE_ID
    assert world.commit(member=second, instance="i2", generation=1).error == E.FENCED_INSTANCE_ID
    assert world.join(member=second, instance="i2").error == E.FENCED_INSTANCE_ID
    assert world.leave("g", second).response.members[0].error_code == E.UNKNOWN_MEMBER_ID


def test_a_static_member_that_has_dropped_its_id_is_not_fenced():
    """librdkafka drops it when its session times out, and sends heartbeats until the program polls. The error of a
    fenced member ended it for good, where the coordinator stood still, or another node led with all members.
    """
    world = World()
    _, second = static_pair(world)
    assert world.heartbeat(instance="i2").error == E.UNKNOWN_MEMBER_ID
    assert world.sync(instance="i2").error == E.UNKNOWN_MEMBER_ID
    assert world.commit(instance="i2", generation=1).error == E.UNKNOWN_MEMBER_ID
    assert world.heartbeat(member=second, instance="i2").error == E.NONE
    back = world.join(instance="i2").response
    assert (back.generation_id, back.member_id.startswith("i2-")) == (1, True)


@pytest.mark.parametrize(("version", "skips"), [(9, True), (8, False)])
def test_a_leader_that_comes_back_is_told_not_to_assign(version: int, skips: bool):
    world = World()
    first, _second = static_pair(world)
    back = world.join(instance="i1", version=version).response
    assert back.skip_assignment is skips
    assert back.leader == (back.member_id if skips else first), "older ones must not think they lead"
    assert len(back.members) == (2 if skips else 0)
    assert world.sync(member=back.member_id, instance="i1").response.assignment == b"one"


def test_the_new_member_id_survives_a_restart():
    world = World()
    static_pair(world)
    back = world.join(instance="i2").response.member_id
    world.restart()
    assert world.heartbeat(member=back, instance="i2").error == E.NONE
    assert world.sync(member=back, instance="i2").response.assignment == b"two"


def test_the_answer_waits_for_the_record_and_the_new_id_stays_while_it_may_be_committed():
    world = World(commits_at_once=False)
    _, second = static_pair(world)
    back = world.join(instance="i2")
    assert back.is_parked
    world.advance(5000)
    assert back.error == E.COORDINATOR_NOT_AVAILABLE
    again = world.join(instance="i2")
    world.ports.commit(0)
    assert world.heartbeat(member=second, instance="i2").error == E.FENCED_INSTANCE_ID
    assert world.heartbeat(member=again.response.member_id, instance="i2").error == E.NONE
    world.restart()
    assert world.heartbeat(member=again.response.member_id, instance="i2").error == E.NONE


def test_a_refused_record_gives_the_old_process_its_place_back():
    world = World()
    _, second = static_pair(world)
    world.ports.refuse_appends = KafkaError(E.NOT_ENOUGH_REPLICAS)
    assert world.join(instance="i2", protocols={"range": b"new"}).error == E.COORDINATOR_NOT_AVAILABLE
    group = world.coordinator().groups["g"]
    assert group.members[second].protocols == {"range": b"meta"}
    assert group.static_members["i2"] == second


def test_a_changed_protocol_needs_a_rebalance():
    world = World()
    for name in ("i1", "i2"):
        world.join(instance=name, protocols={"range": b"", "sticky": b""})
    world.advance(6000)
    group = world.coordinator().groups["g"]
    first, _second = group.members
    world.sync(member=first, instance="i1", assignments={first: b"1"})
    back = world.join(instance="i2", protocols={"sticky": b""})
    assert back.is_parked
    assert world.heartbeat(member=first, instance="i1").error == E.REBALANCE_IN_PROGRESS


def test_coming_back_while_the_leader_assigns_starts_over():
    world = World()
    joins = [world.join(instance=name) for name in ("i1", "i2")]
    world.advance(6000)
    first, second = (join.response.member_id for join in joins)
    waiting = world.sync(member=second, instance="i2")
    world.join(instance="i2")
    assert waiting.error == E.FENCED_INSTANCE_ID
    assert world.sync(member=first, instance="i1", assignments={first: b"x"}).error == E.REBALANCE_IN_PROGRESS


def test_coming_back_during_the_join_phase_fences_the_parked_join():
    world = World()
    older = world.join(instance="i1")
    newer = world.join(instance="i1")
    assert older.error == E.FENCED_INSTANCE_ID
    world.advance(6000)
    assert newer.error == E.NONE
    assert len(newer.response.members) == 1


def test_the_join_of_one_that_comes_back_before_its_first_generation_outlasts_its_session():
    world = World()
    world.stable(session_ms=100_000)
    world.join(instance="i1", session_ms=10_000)
    back = world.join(instance="i1", session_ms=10_000)
    world.advance(30_000)
    assert back.is_parked
    world.advance(30_000)
    assert (back.error, back.response.generation_id) == (E.NONE, 2)


def test_a_static_member_is_removed_by_its_instance_id():
    world = World()
    first, second = static_pair(world)
    leave = world.leave("g", instances=("i2", "nobody"))
    assert [each.error_code for each in leave.response.members] == [E.NONE, E.UNKNOWN_MEMBER_ID]
    assert [each.member_id for each in leave.response.members] == ["", ""]
    assert world.heartbeat(member=first, instance="i1").error == E.REBALANCE_IN_PROGRESS
    assert world.heartbeat(member=second, instance="i2").error == E.UNKNOWN_MEMBER_ID


def test_a_rebalance_that_begins_before_the_record_is_stored_takes_the_member_along():
    world = World(commits_at_once=False)
    first, _ = static_pair(world)
    back = world.join(instance="i2")
    world.leave("g", first)
    assert back.response.generation_id == 2, "it had joined, nobody else was left"
    world.ports.commit(0)
    assert back.response.leader == back.response.member_id


@pytest.mark.parametrize("rebalance_ms", [-1, 0, 1])
def test_absent_members_without_a_rebalance_timeout_do_not_occupy_the_node(rebalance_ms: int):
    world = World()
    dynamic, _ = world.member()
    statics = [world.join(instance=name, rebalance_ms=rebalance_ms) for name in ("i1", "i2")]
    world.advance(6000)
    for name, static in zip(("i1", "i2"), statics):
        world.sync(member=static.response.member_id, instance=name)
    world.sync(member=dynamic)
    assert world.coordinator().groups["g"].state is GroupState.STABLE
    world.leave("g", dynamic)
    assert sum(1 for _ in range(50) if world.ports.turn_has_work(1)) < 5
    back = world.join(instance="i1", rebalance_ms=rebalance_ms)
    assert back.is_parked
    world.advance(1000)
    assert back.response.leader == back.response.member_id
