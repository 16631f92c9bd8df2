"""Strangers' metadata and assignments must not fill a node, nor disturb the members that are there."""

from __future__ import annotations

import gc
import logging
import tracemalloc
from collections.abc import Callable
from struct import pack

import pytest

from tests.unit.broker.coordinators.fakes import World
from tidelog.broker.coordinators import runtime as runtime_module
from tidelog.broker.coordinators.group.config import GroupCoordinatorConfig
from tidelog.broker.coordinators.group.memory import ASSIGNMENT_RESERVE_BYTES, METADATA_RESERVE_BYTES
from tidelog.broker.coordinators.group.states import GroupState
from tidelog.protocol.errors import ErrorCode

E = ErrorCode
BUDGET_BYTES = 3_000_000
LARGE = 500_000


def world_with(budget_bytes: int = BUDGET_BYTES, *, commits_at_once: bool = True, partitions: int = 1, **fields):
    config = GroupCoordinatorConfig(max_groups_memory_bytes=budget_bytes, **fields)
    return World(config, commits_at_once=commits_at_once, partitions=partitions)


def used_bytes(world: World) -> int:
    return world.service._memory.used_bytes


def join_large(world: World, group: str, **options):
    return world.join(group, version=3, protocols={"range": bytes(LARGE)}, **options)


def fill(world: World) -> list[str]:
    """Groups of strangers until one is refused; those that were let in."""
    for number in range(100):
        join = join_large(world, f"stranger-{number}", session_ms=300_000)
        if not join.is_parked:
            assert join.error == E.COORDINATOR_NOT_AVAILABLE
            return [f"stranger-{each}" for each in range(number)]
    raise AssertionError("strangers may take all memory")


@pytest.mark.parametrize("partitions", [1, 7])
def test_a_join_above_the_budget_of_the_node_is_refused_with_an_error_to_try_again(partitions: int):
    world = world_with(partitions=partitions)
    groups = fill(world)
    assert len(groups) == 5
    assert BUDGET_BYTES - 600_000 < used_bytes(world) <= BUDGET_BYTES
    held = [group for index in range(partitions) for group in world.coordinator(index).groups]
    assert sorted(held) == groups, "nothing is left of those that were refused"


def test_a_first_join_is_refused_before_an_id_is_handed_out():
    world = world_with()
    fill(world)
    assert world.join("g", protocols={"range": bytes(LARGE)}).error == E.COORDINATOR_NOT_AVAILABLE
    assert "g" not in world.coordinator().groups


def test_members_that_are_there_are_served_while_the_node_is_full():
    world = world_with()
    leader, follower = members = world.stable(size=2)
    fill(world)
    world.ports.advance(0)
    while world.join("small", version=3).is_parked:
        pass  # not even a small member has a place
    assert world.heartbeat(member=leader).error == E.NONE
    assert world.commit(member=leader, generation=1).response.topics[0].partitions[0].error_code == E.NONE
    metadata, assignment = bytes(METADATA_RESERVE_BYTES // 2), bytes(ASSIGNMENT_RESERVE_BYTES)
    joins = [world.join(member=member, protocols={"range": metadata}) for member in members]
    assert [join.error for join in joins] == [E.NONE, E.NONE]
    follows = world.sync(member=follower, generation=2)
    leads = world.sync(member=leader, generation=2, assignments=dict.fromkeys(members, assignment))
    assert leads.response.assignment == follows.response.assignment == assignment
    assert world.leave("g", leader).error == E.NONE


def test_a_member_may_not_grow_above_the_budget_but_is_still_a_member():
    world = world_with()
    (member,) = world.stable()
    fill(world)
    grown = world.join(member=member, protocols={"range": bytes(LARGE)})
    assert grown.error == E.COORDINATOR_NOT_AVAILABLE
    assert world.heartbeat(member=member).error == E.NONE


def test_a_static_member_that_is_back_is_let_in_while_the_node_is_full():
    world = world_with()
    join_large(world, "g", instance="i")
    world.advance(3000)
    fill(world)
    assert join_large(world, "g", instance="i").error != E.COORDINATOR_NOT_AVAILABLE


def test_large_assignments_count_while_they_are_stored_and_after():
    world = world_with(commits_at_once=False)
    joins = {f"g{number}": world.join(f"g{number}", version=3) for number in range(10)}
    world.advance(3000)
    leaders = {group: join.response.member_id for group, join in joins.items()}
    syncs = [world.sync(group, leader, assignments={leader: bytes(LARGE)}) for group, leader in leaders.items()]
    errors = [sync.error for sync in syncs if not sync.is_parked]
    assert errors == [E.COORDINATOR_NOT_AVAILABLE] * 5
    in_flight_bytes = used_bytes(world)
    assert BUDGET_BYTES - 600_000 < in_flight_bytes <= BUDGET_BYTES
    world.ports.commit(0)
    assert [sync.error for sync in syncs].count(E.NONE) == 5
    assert used_bytes(world) == in_flight_bytes
    assert world.join("another", version=3, protocols={"range": bytes(LARGE)}).error == E.COORDINATOR_NOT_AVAILABLE


def test_a_leader_whose_assignment_is_too_large_may_hand_in_another():
    world = world_with(max_assignment_bytes=1000)
    first, second = world.member(), world.member()
    world.advance(6000)
    (leader, _), (follower, _) = first, second
    parked = world.sync(member=follower)
    refused = world.sync(member=leader, assignments={leader: b"l", follower: bytes(1001)})
    assert refused.error == E.INVALID_REQUEST
    assert parked.is_parked
    assert world.coordinator().groups["g"].state is GroupState.COMPLETING_REBALANCE
    assert world.sync(member=leader, assignments={leader: b"l", follower: bytes(1000)}).response.assignment == b"l"
    assert parked.response.assignment == bytes(1000)


def test_what_is_assigned_to_strangers_is_not_held():
    world = world_with(max_assignment_bytes=1000)
    member, _ = world.member()
    world.advance(3000)
    assert world.sync(member=member, assignments={member: b"m", "ghost": bytes(LARGE)}).error == E.NONE
    assert used_bytes(world) < 10_000


def test_one_group_alone_may_not_take_the_whole_budget():
    world = world_with(10 * BUDGET_BYTES, max_group_memory_bytes=BUDGET_BYTES)
    joins = [join_large(world, "g") for _ in range(7)]
    assert [join.is_parked for join in joins] == [True] * 5 + [False] * 2
    assert joins[-1].error == E.GROUP_MAX_SIZE_REACHED
    assert join_large(world, "another").is_parked


def test_a_member_whose_rejoin_finds_no_room_leaves_its_partitions_to_the_others():
    world = world_with(max_group_memory_bytes=100_000)
    members = world.stable(size=2)
    group = world.coordinator().groups["g"]
    (follower,) = (member for member in members if member != group.leader)
    assert world.join(member=follower, protocols={"range": bytes(LARGE)}).error == E.GROUP_MAX_SIZE_REACHED
    assert world.heartbeat(member=group.leader).error == E.REBALANCE_IN_PROGRESS
    assert world.join(member=group.leader).response.generation_id == 2
    assert list(group.members) == [group.leader]


def test_a_leader_whose_rejoin_finds_no_room_leaves_no_member_waiting_for_its_assignment():
    world = world_with(max_group_memory_bytes=100_000)
    members = [world.member()[0] for _ in range(2)]
    world.advance(6000)
    group = world.coordinator().groups["g"]
    old_leader = group.leader
    (follower,) = (member for member in members if member != old_leader)
    sync = world.sync(member=follower)
    assert world.join(member=old_leader, protocols={"range": bytes(LARGE)}).error == E.GROUP_MAX_SIZE_REACHED
    assert sync.error == E.REBALANCE_IN_PROGRESS
    assert world.join(member=follower).response.leader == follower


def test_an_unknown_sender_that_finds_no_room_disturbs_no_member():
    world = world_with(max_group_memory_bytes=100_000)
    (member,) = world.stable()
    assert world.join(member="stranger", protocols={"range": bytes(LARGE)}).error == E.GROUP_MAX_SIZE_REACHED
    assert world.heartbeat(member=member).error == E.NONE


def test_the_leader_of_a_large_group_gets_its_members_only_once_in_a_generation():
    world = World()
    large = [world.member(protocols={"range": bytes(LARGE)}) for _ in range(3)]
    world.advance(6000)
    leader = world.coordinator().groups["g"].leader
    assert leader is not None
    follower = next(member for member, _ in large if member != leader)
    follows = world.join(member=follower, protocols={"range": bytes(LARGE)})
    assert (follows.response.generation_id, follows.response.members) == (1, [])
    again = [world.join(member=leader, protocols={"range": bytes(LARGE)}) for _ in range(2)]
    assert again[0].error == E.REBALANCE_IN_PROGRESS
    assert again[1].is_parked
    for member, _ in large:
        if member != leader:
            world.join(member=member, protocols={"range": bytes(LARGE)})
    assert again[1].response.generation_id == 2
    assert {each.member_id for each in again[1].response.members} == {member for member, _ in large}


def test_a_large_group_begins_one_generation_in_a_second_while_members_are_away():
    world = World()
    leader = world.join(instance="leader", protocols={"range": b"1"})
    for number in range(3):
        world.join(instance=f"large-{number}", protocols={"range": bytes(LARGE)}, rebalance_ms=1)
    world.advance(6000)
    member = leader.response.member_id
    for generation in range(2, 5):
        changed = {"range": str(generation).encode()}
        again = world.join(member=member, instance="leader", protocols=changed, rebalance_ms=1)
        world.advance(999)
        assert again.is_parked
        world.advance(1)
        assert again.response.generation_id == generation
        assert len(again.response.members) == 4
    assert world.leave("g", member).response.members[0].error_code == E.NONE
    world.advance(20_000)
    assert used_bytes(world) == 0


def test_names_of_protocols_count_as_metadata():
    world = world_with(max_group_metadata_bytes=1000)
    assert world.join(version=3, protocols={"p" * 1001: b""}).error == E.INVALID_REQUEST


def test_members_that_leave_or_expire_give_their_memory_back():
    world = world_with(partitions=3)
    groups = fill(world)
    world.advance(3000)
    for group in groups[:2]:
        coordinator = world.coordinator(world.service.partition_for(group))
        (member,) = coordinator.groups[group].members
        assert world.leave(group, member).error == E.NONE
    assert [join_large(world, f"later-{number}").is_parked for number in range(3)] == [True, True, False]
    world.advance(310_000)
    assert used_bytes(world) == 0, "groups without members hold nothing"
    assert len(fill(world)) == 5


def test_ids_handed_out_count_until_they_expire():
    world = world_with()
    while world.join(client="c" * 30_000, session_ms=10_000).error == E.MEMBER_ID_REQUIRED:
        pass
    assert BUDGET_BYTES - 50_000 < used_bytes(world) <= BUDGET_BYTES
    world.advance(10_000)
    assert used_bytes(world) == 0


def test_a_coordinator_that_moves_away_gives_its_memory_back():
    world = world_with()
    fill(world)
    coordinator = world.coordinator()
    world.service.on_partition_resigned(0)
    assert used_bytes(world) == 0
    assert not coordinator.groups
    world.service.on_partition_elected(0, world.epoch + 1)
    world.advance(0)
    assert len(fill(world)) == 5


def test_a_group_that_moved_away_is_not_charged_for_what_comes_late():
    world = world_with(commits_at_once=False)
    member, _ = world.member()
    world.advance(3000)
    world.sync(member=member, assignments={member: bytes(LARGE)})
    group = world.coordinator().groups["g"]
    stored = world.service._runtime._shards[0].pending_writes[0].write.records[0].value
    world.service.on_partition_resigned(0)
    group.adopt_assignment(stored)
    assert used_bytes(world) == 0


def test_a_load_is_never_refused():
    world = world_with(10 * BUDGET_BYTES)
    stable = {}
    for number in range(8):
        group = f"g{number}"
        (stable[group],) = world.stable(group, session_ms=300_000, protocols={"range": bytes(LARGE)})
    world.config = GroupCoordinatorConfig(max_groups_memory_bytes=BUDGET_BYTES)
    world.restart()
    assert used_bytes(world) > BUDGET_BYTES
    for group, member in stable.items():
        assert world.heartbeat(group, member).error == E.NONE
        assert world.join(group, member, protocols={"range": bytes(LARGE)}, session_ms=300_000).error == E.NONE
        assert world.sync(group, member, 2, assignments={member: b"again"}).response.assignment == b"again"
    assert join_large(world, "new").error == E.COORDINATOR_NOT_AVAILABLE
    for group, member in stable.items():
        world.leave(group, member)
    assert join_large(world, "new").is_parked


def test_a_subscription_to_more_topics_than_there_is_room_for_counts_as_one_to_every_topic():
    names = b"".join(pack(">h", 4) + b"%04d" % number for number in range(10_000))
    subscription = pack(">hi", 0, 10_000) + names + pack(">i", -1)
    for budget_bytes, has_room in ((200_000, False), (2_000_000, True)):
        world = world_with(budget_bytes)
        world.stable(protocols={"range": subscription})
        group = world.coordinator().groups["g"]
        assert used_bytes(world) <= budget_bytes
        assert group.is_subscribed_to("0007")
        assert group.is_subscribed_to("another") is not has_room


def many_small_members(world: World) -> None:
    for number in range(300):
        world.join(f"g{number % 10}", version=3, client=f"client-{number}")


def many_small_groups(world: World) -> None:
    for number in range(300):
        world.join(f"group-{number}", version=3)


def long_names(world: World) -> None:
    for number in range(20):
        world.join(f"{number}" + "g" * 10_000, version=3, client="\N{PILE OF POO}" + "c" * 10_000)


def many_protocols(world: World) -> None:
    for number in range(10):
        protocols = {f"protocol-{number}-{each}": b"%d" % each for each in range(1000)}
        world.join(f"g{number}", version=3, protocols=protocols)


def many_topics(world: World) -> None:
    for number in range(3):
        names = b"".join(pack(">h", 5) + b"%d%04d" % (number, each) for each in range(5000))
        world.stable(f"g{number}", protocols={"range": pack(">hi", 0, 5000) + names + pack(">i", -1)})


def ids_never_used(world: World) -> None:
    for number in range(300):
        world.join(f"g{number % 10}", client=f"client-{number}")


def large_assignments(world: World) -> None:
    for number in range(5):
        (member,) = world.stable(f"g{number}")
        world.join(f"g{number}", member)
        world.sync(f"g{number}", member, 2, assignments={member: bytes(200_000 + number)})


def large_metadata_that_shrinks(world: World) -> None:
    """What the log holds of it is not held here too."""
    for number in range(5):
        (member,) = world.stable(f"g{number}", protocols={"range": bytes(200_000 + number)})
        assert world.join(f"g{number}", member, protocols={"range": b""}).error == E.NONE


@pytest.mark.parametrize(
    "attack",
    [
        many_small_members,
        many_small_groups,
        pytest.param(long_names, marks=pytest.mark.slow),
        many_protocols,
        pytest.param(many_topics, marks=pytest.mark.slow),
        ids_never_used,
        large_assignments,
        large_metadata_that_shrinks,
    ],
)
def test_what_is_charged_is_no_less_than_what_python_takes(attack: Callable[[World], None]):
    world = world_with(100 * BUDGET_BYTES)
    attack(World())  # what is made once, by whatever is done first, is no group's
    gc.collect()
    tracemalloc.start()
    try:
        attack(world)
        world.ports.logs.clear()  # it stands for a disk
        gc.collect()
        taken_bytes = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    # Requests that wait have a bound of their own.
    assert taken_bytes <= used_bytes(world) + 1000 * world.service._runtime._parked_count + 50_000


def test_the_log_says_now_and_then_that_groups_hold_too_much(caplog: pytest.LogCaptureFixture):
    world = world_with()
    groups = fill(world)
    with caplog.at_level(logging.WARNING, "tidelog.coordinator"):
        caplog.clear()
        for number in range(50):
            join_large(world, f"more-{number}")
        world.advance(10_000)
        join_large(world, "later")
    assert len(groups) == 5
    (message,) = [record.getMessage() for record in caplog.records]
    assert "later" in message
    assert "50 times more" in message


def test_writes_under_way_are_bounded_over_all_coordinators_of_a_node(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(runtime_module, "PENDING_BYTES_OF_NODE_MAX", 1000)
    world = world_with(commits_at_once=False, partitions=10)
    commits = [world.commit(f"g{number}", metadata="m" * 300) for number in range(5)]
    assert len({world.service.partition_for(f"g{number}") for number in range(5)}) == 5, "no two in one log"
    assert [commit.is_parked for commit in commits] == [True] * 3 + [False] * 2
    assert commits[-1].error == E.COORDINATOR_NOT_AVAILABLE
    world.ports.commit(world.service.partition_for("g0"))
    world.service.on_partition_resigned(world.service.partition_for("g1"))
    later = [world.commit(f"g{number}", metadata="m" * 300) for number in (3, 4)]
    assert [commit.is_parked for commit in later] == [True, True]
