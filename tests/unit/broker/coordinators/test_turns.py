"""What comes due in thousands at a moment, on all partitions: a turn of the loop does a small part of it.

Clients choose these moments. Otherwise a node answers nobody for seconds.
"""

from __future__ import annotations

from tests.unit.broker.coordinators.fakes import World
from tests.unit.broker.coordinators.transaction_world import T0, TransactionWorld
from tidelog.broker.coordinators.group.config import GroupCoordinatorConfig

PARTITIONS = 20
HOUR_MS = 3_600_000
RECORDS_PER_TURN = 600
ABORTS_PER_TURN = 50


def world_with_offsets(retention_ms: int = -1) -> World:
    """10,000 offsets of 200 groups, on all partitions."""
    world = World(partitions=PARTITIONS)
    for number in range(200):
        world.commit(f"g{number}", {("t", index): 1 for index in range(50)}, retention_ms=retention_ms, version=4)
    return world


def offset_count(world: World) -> int:
    shards = [world.coordinator(index) for index in range(PARTITIONS)]
    return sum(len(list(shard.offsets.positions())) for shard in shards)


def test_offsets_that_expire_together():
    world = world_with_offsets(retention_ms=1)
    turns = world.ports.turns_after(HOUR_MS)
    assert offset_count(world) == 0
    assert max(turns) <= RECORDS_PER_TURN, turns


def test_offsets_of_a_deleted_topic():
    world = world_with_offsets()
    before = sum(world.ports.end_offsets.values())
    world.service.on_topics_deleted([("t", bytes(16))])
    at_once = sum(world.ports.end_offsets.values()) - before
    assert max(at_once, *world.ports.turns_after(0)) <= RECORDS_PER_TURN
    assert offset_count(world) == 0


def test_topics_deleted_during_the_deletion_of_others():
    world = world_with_offsets()
    for topic in ("x", "t", "u"):
        world.service.on_topics_deleted([(topic, bytes(16))])
        world.ports.turn()
    world.ports.turns_after(0)
    assert offset_count(world) == 0
    world.ports.turns_after(1000)
    for shard in map(world.coordinator, range(PARTITIONS)):
        assert not any((shard._deleted_topics, shard._groups_to_sweep, shard._groups_to_sweep_later)), "no name is kept"


def test_sessions_that_end_together():
    world = World(GroupCoordinatorConfig(group_initial_rebalance_delay_ms=0), partitions=PARTITIONS)
    for number in range(500):
        world.stable(f"g{number}", session_ms=1_000_000)
    turns = world.ports.turns_after(1_000_001)
    assert sum(turns) == 500, "each group is empty now"
    assert max(turns) <= 50, turns


def test_transactions_that_time_out_together():
    world = TransactionWorld(partitions=PARTITIONS)
    for number in range(1000):
        identity = world.init(f"x{number}").response
        world.add(identity, T0, transactional_id=f"x{number}")
    sent = []
    world.ports.time_ms += HOUR_MS
    while len(world.markers.sent) < 1000:
        before = len(world.markers.sent)
        world.ports.turn()
        sent.append(len(world.markers.sent) - before)
        world.ports.time_ms += 1
    assert max(sent) <= ABORTS_PER_TURN, sent


def test_partitions_whose_logs_are_committed_together():
    world = World(GroupCoordinatorConfig(group_initial_rebalance_delay_ms=0), partitions=PARTITIONS)
    for number in range(200):
        world.stable(f"g{number}")
    world.ports._timers.clear()
    world.ports.high_watermarks.clear()
    for partition in range(PARTITIONS):
        world.service.on_partition_elected(partition, 2)
    while world.ports._timers:
        world.ports.turn()
    assert world.service._runtime.active_partitions() == []
    for partition in range(PARTITIONS):
        world.ports.commit(partition)
    active = [len(world.service._runtime.active_partitions())]
    while world.service.is_loading():
        world.ports.turn()
        active.append(len(world.service._runtime.active_partitions()))
    assert active == list(range(1, PARTITIONS + 1))


def test_partitions_that_are_loaded_together():
    world = world_with_offsets()
    world.ports._timers.clear()
    loaded: list[int] = []
    for partition in range(PARTITIONS):
        world.service.on_partition_elected(partition, 2)
    while world.service.is_loading():
        before = offset_count(world)
        world.ports.turn()
        loaded.append(offset_count(world) - before)
    assert sum(loaded) == 10_000
    assert max(loaded) <= RECORDS_PER_TURN, loaded


def test_empty_partitions_are_loaded_within_two_turns() -> None:
    """The first groups come as soon as their topic is there."""
    world = World(partitions=PARTITIONS)
    for partition in range(PARTITIONS):
        world.service.on_partition_elected(partition, 2)
    for _ in range(2):
        world.ports.turn()
    assert world.ports.turn() == 0
    assert not world.service.is_loading()
