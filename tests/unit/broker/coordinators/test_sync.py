from __future__ import annotations

import pytest

from tests.unit.broker.coordinators.fakes import World
from tidelog.broker.coordinators.group.states import GroupState
from tidelog.protocol.errors import ErrorCode, KafkaError

E = ErrorCode


def joined(world: World, size: int = 2, **options) -> list[str]:
    members = [world.member(**options) for _ in range(size)]
    world.advance(6000)
    assert all(join.error == 0 for _, join in members)
    return [member for member, _ in members]


def test_everybody_gets_the_leaders_assignment():
    world = World()
    leader, follower = joined(world)
    waiting = world.sync(member=follower)
    assert waiting.is_parked
    sync = world.sync(member=leader, assignments={leader: b"one", follower: b"two"})
    assert sync.response.assignment == b"one"
    assert waiting.response.assignment == b"two"
    assert (waiting.response.protocol_type, waiting.response.protocol_name) == ("consumer", "range")
    assert world.sync(member=follower).response.assignment == b"two", "asked again in a stable group"


def test_who_is_not_in_the_assignment_gets_an_empty_one():
    world = World()
    leader, follower = joined(world)
    world.sync(member=leader, assignments={leader: b"all", "stranger": b"some"})
    assert world.sync(member=follower).response.assignment == b""


def test_nobody_is_answered_before_the_assignment_is_committed():
    world = World(commits_at_once=False)
    leader, follower = joined(world)
    replies = [world.sync(member=follower), world.sync(member=leader, assignments={leader: b"1", follower: b"2"})]
    assert all(reply.is_parked for reply in replies)
    assert world.coordinator().groups["g"].state is GroupState.COMPLETING_REBALANCE
    world.ports.commit(0)
    assert [reply.response.assignment for reply in replies] == [b"2", b"1"]
    assert world.coordinator().groups["g"].state is GroupState.STABLE


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"generation": 0}, E.ILLEGAL_GENERATION),
        ({"generation": 2}, E.ILLEGAL_GENERATION),
        ({"protocol_type": "connect"}, E.INCONSISTENT_GROUP_PROTOCOL),
        ({"protocol": "sticky"}, E.INCONSISTENT_GROUP_PROTOCOL),
        ({"protocol": None}, E.INCONSISTENT_GROUP_PROTOCOL),
        ({"protocol_type": None}, E.INCONSISTENT_GROUP_PROTOCOL),
        ({"group": "other"}, E.UNKNOWN_MEMBER_ID),
        ({"member": "ghost"}, E.UNKNOWN_MEMBER_ID),
    ],
)
def test_a_sync_that_does_not_fit_is_refused(options, error):
    world = World()
    leader, _ = joined(world)
    assert world.sync(**{"member": leader, **options}).error == error


def test_before_version_5_the_protocol_need_not_be_named():
    world = World()
    leader, _ = joined(world)
    sync = world.sync(member=leader, version=4, protocol=None, protocol_type=None, assignments={leader: b"x"})
    assert sync.response.assignment == b"x"


def test_a_sync_during_the_join_phase_sends_the_member_back():
    world = World()
    (leader,) = world.stable()
    world.join(version=3)
    assert world.sync(member=leader).error == E.REBALANCE_IN_PROGRESS


def test_a_new_member_ends_a_generation_that_waits_for_its_leader():
    world = World()
    leader, follower = joined(world)
    waiting = world.sync(member=follower)
    world.join(version=3)
    assert waiting.error == E.REBALANCE_IN_PROGRESS
    assert world.heartbeat(member=leader).error == E.REBALANCE_IN_PROGRESS


def test_an_assignment_that_is_committed_too_late_does_not_count():
    world = World(commits_at_once=False)
    leader, _follower = joined(world)
    sync = world.sync(member=leader, assignments={leader: b"old"})
    world.join(version=3)
    assert sync.error == E.REBALANCE_IN_PROGRESS
    world.ports.commit(0)
    group = world.coordinator().groups["g"]
    assert group.state is GroupState.PREPARING_REBALANCE
    assert group.persisted_generation == 1, "but it is what a restart would find"


def test_a_leader_that_syncs_twice_is_answered_with_what_it_said_first():
    world = World(commits_at_once=False)
    leader, _follower = joined(world)
    first = world.sync(member=leader, assignments={leader: b"first"})
    second = world.sync(member=leader, assignments={leader: b"second"})
    assert first.error == E.REBALANCE_IN_PROGRESS
    world.ports.commit(0)
    assert second.response.assignment == b"first"
    world.restart()
    assert world.sync(member=leader).response.assignment == b"first"


def test_who_never_syncs_is_out_after_the_rebalance_timeout():
    world = World()
    leader, follower = joined(world, session_ms=300_000)
    world.sync(member=leader, assignments={leader: b"x"})
    world.advance(60_000)
    assert world.heartbeat(member=leader).error == E.REBALANCE_IN_PROGRESS
    assert world.heartbeat(member=follower).error == E.UNKNOWN_MEMBER_ID


@pytest.mark.parametrize(
    ("failure", "error"),
    [
        (E.NOT_ENOUGH_REPLICAS, E.COORDINATOR_NOT_AVAILABLE),
        (E.NOT_LEADER_OR_FOLLOWER, E.NOT_COORDINATOR),
        (E.KAFKA_STORAGE_ERROR, E.NOT_COORDINATOR),
        (E.RECORD_LIST_TOO_LARGE, E.UNKNOWN_SERVER_ERROR),
    ],
)
def test_an_assignment_that_cannot_be_stored_is_refused_and_everybody_rejoins(failure, error):
    world = World()
    leader, follower = joined(world)
    waiting = world.sync(member=follower)
    world.ports.refuse_appends = KafkaError(failure)
    assert world.sync(member=leader, assignments={leader: b"x"}).error == error
    assert waiting.error == error
    world.ports.refuse_appends = None
    assert world.heartbeat(member=leader).error == E.REBALANCE_IN_PROGRESS
    joins = [world.join(member=leader), world.join(member=follower)]
    assert [join.response.generation_id for join in joins] == [2, 2]


def test_an_assignment_that_takes_too_long_to_commit_is_given_up():
    world = World(commits_at_once=False)
    leader, _follower = joined(world)
    sync = world.sync(member=leader, assignments={leader: b"x"})
    world.advance(4999)
    assert sync.is_parked
    world.advance(1)
    assert sync.error == E.COORDINATOR_NOT_AVAILABLE
    assert world.coordinator().groups["g"].state is GroupState.PREPARING_REBALANCE
    world.ports.commit(0)
    assert world.coordinator().groups["g"].state is GroupState.PREPARING_REBALANCE
