"""What comes due in thousands at a moment, on all partitions: a turn of the loop does a small part of it.

Clients choose these moments. Otherwise a node answers nobody for seconds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.unit.broker.coordinators.fakes import FakePorts, Reply, World, context
from tests.unit.broker.coordinators.test_runtime import Tape
from tests.unit.broker.coordinators.transaction_world import T0, TransactionWorld
from tidelog.broker.coordinators import runtime
from tidelog.broker.coordinators.group import coordinator
from tidelog.broker.coordinators.group.config import GroupCoordinatorConfig
from tidelog.broker.coordinators.group.rebalance import TimerKey
from tidelog.broker.coordinators.outcome import Now, Outcome, TransactionEnd, WriteTransaction
from tidelog.broker.coordinators.runtime import CoordinatorRuntime
from tidelog.broker.coordinators.transaction import coordinator as transaction_coordinator
from tidelog.broker.coordinators.transaction.coordinator import TransactionCoordinator
from tidelog.protocol.errors import ErrorCode, KafkaError
from tidelog.protocol.messages.txn_offset_commit import (
    TxnOffsetCommitRequest,
    TxnOffsetCommitRequestPartition,
    TxnOffsetCommitRequestTopic,
)

PARTITIONS = 20
HOUR_MS = 3_600_000
RECORDS_PER_TURN = 600
ABORTS_PER_TURN = 50


@pytest.fixture(autouse=True)
def _a_jump_of_the_time_is_no_standstill(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "LATE_MS", 10 * HOUR_MS)


def world_with_offsets(retention_ms: int = -1) -> World:
    """10,000 offsets of 200 groups, on all partitions."""
    world = World(partitions=PARTITIONS)
    for number in range(200):
        world.commit(f"g{number}", {("t", index): 1 for index in range(50)}, retention_ms=retention_ms, version=4)
    return world


def offset_count(world: World, partitions: int = PARTITIONS) -> int:
    shards = [world.coordinator(index) for index in range(partitions)]
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


def test_a_turn_looks_at_few_open_transactions(monkeypatch: pytest.MonkeyPatch):
    """Each turn that aborted 50 looked at all those that are within their timeout again."""
    world = TransactionWorld()
    for number in range(400):
        timeout_ms = 900_000 if number < 200 else 60_000
        identity = world.init(f"x{number}", timeout_ms=timeout_ms).response
        world.add(identity, T0, transactional_id=f"x{number}")
    looks = 0
    abort_if_timed_out = TransactionCoordinator._abort_if_timed_out

    def counted(shard: TransactionCoordinator, transactional_id: str, outcome: Outcome) -> bool:
        nonlocal looks
        looks += 1
        return abort_if_timed_out(shard, transactional_id, outcome)

    monkeypatch.setattr(transaction_coordinator, "OPEN_CHECKED_PER_TURN", 30)
    monkeypatch.setattr(TransactionCoordinator, "_abort_if_timed_out", counted)
    world.ports.time_ms += 60_001
    turns: list[int] = []
    while len(world.markers.sent) < 200 or sum(turns) < 400:
        before = looks
        world.ports.turn()
        turns.append(looks - before)
        world.ports.time_ms += 1
        assert len(turns) < 100
    assert max(turns) <= 30, turns
    assert sum(turns) == 400, turns


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


@pytest.mark.slow
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


def commit_in_transactions(world: World, producers: int, offsets: int) -> None:
    """Each producer has the same offsets in an open transaction, one request for 500 of them."""
    for producer_id in range(producers):
        for start in range(0, offsets, 500):
            partitions = [
                TxnOffsetCommitRequestPartition(partition_index=index, committed_offset=7, committed_metadata="")
                for index in range(start, min(start + 500, offsets))
            ]
            topic = TxnOffsetCommitRequestTopic(name="t", partitions=partitions)
            request = TxnOffsetCommitRequest(group_id="g", producer_id=producer_id, producer_epoch=0, topics=[topic])
            world.service.commit_offsets_of_transaction(context(28, 2), request, {"t": bytes(16)}, None)


def end_transaction(world: World, producer_id: int, *, is_commit: bool = True) -> Any:
    transaction = WriteTransaction(producer_id, 0)
    return world.ask(lambda: world.service.end_transaction(0, transaction, TransactionEnd(is_commit, 0)))


def offsets_moved(world: World) -> list[int]:
    """In each turn of the loop: how many offsets are committed, or pending no longer."""
    offsets = world.coordinator().offsets
    moved = []
    while world.ports._timers and world.ports._timers[0][0] <= world.ports.time_ms:
        before = offset_count(world, 1), len(offsets._pending._producers.get("g", ()))
        world.ports.turn()
        after = offset_count(world, 1), len(offsets._pending._producers.get("g", ()))
        moved.append(max(abs(after[0] - before[0]), abs(after[1] - before[1])))
        world.ports.time_ms += 1
    return moved


@pytest.mark.parametrize("is_commit", [True, False])
def test_the_end_of_a_transaction_with_many_offsets(is_commit: bool) -> None:
    world = World()
    world.commit(offsets={("t", 0): 3, ("t", 4_000): 3})
    commit_in_transactions(world, 1, 5_000)
    ended = end_transaction(world, 0, is_commit=is_commit)
    later = [world.commit(offsets={("t", index): 9}) for index in (1, 4_001)]
    assert ended.is_parked
    assert all(reply.is_parked for reply in later), "a record behind the marker is replayed after it"
    assert offset_count(world, 1) <= 2 * RECORDS_PER_TURN, "at once, and in a first step"
    moved = offsets_moved(world)
    assert max(moved) <= RECORDS_PER_TURN, moved
    assert ended.response is True
    assert [world.committed(partition=index) for index in (1, 4_001)] == [9, 9]
    assert world.committed(partition=4_000) == (7 if is_commit else 3)
    assert offset_count(world, 1) == (5_000 if is_commit else 4)
    assert not world.coordinator().offsets._pending


def test_transactions_that_end_together() -> None:
    world = World(commits_at_once=False)
    commit_in_transactions(world, 20, 400)
    world.ports.commit(0)
    offsets_moved(world)
    ended = [end_transaction(world, producer_id) for producer_id in range(20)]
    world.ports.commit(0)
    assert sum(reply.response is True for reply in ended) <= 2
    turns = 0
    while any(reply.is_parked for reply in ended):
        before = sum(reply.is_parked for reply in ended)
        world.ports.turn()
        assert before - sum(reply.is_parked for reply in ended) <= 2
        turns += 1
    assert turns >= 10


def test_a_transaction_whose_end_is_loaded() -> None:
    world = World()
    commit_in_transactions(world, 1, 5_000)
    end_transaction(world, 0)
    offsets_moved(world)
    world.ports._timers.clear()
    world.service.on_partition_elected(0, 2)
    assert max(offsets_moved(world)) <= RECORDS_PER_TURN
    assert offset_count(world, 1) == 5_000


def test_commits_that_are_replicated_together() -> None:
    """A follower hangs, and comes back."""
    world = World(commits_at_once=False)
    replies = [world.commit(offsets={("t", index): 1}) for index in range(3_000)]
    world.ports.commit(0)
    assert offset_count(world, 1) <= 2 * RECORDS_PER_TURN, "at once, and in a first step"
    moved = offsets_moved(world)
    assert max(moved) <= RECORDS_PER_TURN, moved
    assert not any(reply.is_parked for reply in replies)
    assert offset_count(world, 1) == 3_000


def test_the_partition_moves_away_while_committed_writes_are_replayed() -> None:
    world = World(commits_at_once=False)
    replies = [world.commit(offsets={("t", index): 1}) for index in range(3_000)]
    world.ports.commit(0)
    world.service.on_partition_resigned(0)
    assert not any(reply.is_parked for reply in replies)
    world.ports.turns_after(0)
    world.service.on_partition_elected(0, 2)
    world.ports.turns_after(0)
    assert offset_count(world, 1) == 3_000


def test_members_that_are_loaded_together() -> None:
    world = World(GroupCoordinatorConfig(group_initial_rebalance_delay_ms=0))
    for number in range(30):
        world.stable(f"g{number}", size=40)
    world.ports._timers.clear()
    world.service.on_partition_elected(0, 2)
    groups = world.coordinator().groups
    restored = []
    while world.service.is_loading():
        before = sum(len(group.members) for group in groups.values())
        world.ports.turn()
        restored.append(sum(len(group.members) for group in groups.values()) - before)
    assert sum(restored) == 1_200
    assert max(restored) <= 200, restored
    for group in groups.values():
        assert all(
            TimerKey("session", group.group_id, member) in world.coordinator().timers for member in group.members
        )


def test_sessions_begin_at_the_end_of_the_load() -> None:
    """A heartbeat during the load is answered, but prolongs nothing."""
    world = World(GroupCoordinatorConfig(group_initial_rebalance_delay_ms=0))
    for number in range(30):
        world.stable(f"g{number}", size=40, session_ms=6_000)
    world.ports._timers.clear()
    world.service.on_partition_elected(0, 2)
    while world.service.is_loading():
        world.ports.turn()
        world.ports.time_ms += 2_000  # the loads of other partitions
    groups = world.coordinator().groups
    members = {group_id: list(group.members) for group_id, group in groups.items()}
    for _ in range(50):
        world.ports.turn()
    assert {group_id: list(group.members) for group_id, group in groups.items()} == members
    assert sum(map(len, members.values())) == 1_200
    world.advance(6_001)
    assert not any(group.members for group in groups.values())


def test_steps_without_work_that_take_long() -> None:
    ports = FakePorts()
    begun = []

    class Slow(Tape):
        def on_deadline(self, now: Now) -> Outcome:
            begun.append(ports.time_ms)
            ports.time_ms += 1
            self.deadline_ms = None
            return Outcome(now)

    runtime: CoordinatorRuntime[Slow] = CoordinatorRuntime("test", ports, lambda partition: Slow(), write_timeout_ms=1)
    for partition in range(10):
        runtime.on_elected(partition, 1)
    ports.turns_after(0)
    for partition in range(10):
        runtime._shards[partition].coordinator.deadline_ms = ports.time_ms
        runtime._arm_timer(runtime._shards[partition])
    counts = []
    while ports._timers:
        before = len(begun)
        ports.turn()
        counts.append(len(begun) - before)
    assert sum(counts) == 10
    assert max(counts) == 1, counts


OFFSETS = 3_000


def group_with_offsets(*, retention_ms: int = -1, commits_at_once: bool = True) -> World:
    """All of one group."""
    world = World(commits_at_once=commits_at_once)
    world.commit(offsets={("t", index): 1 for index in range(OFFSETS)}, retention_ms=retention_ms, version=4)
    world.ports.commit(0)
    world.ports.turns_after(0)
    return world


def delete_group(world: World) -> Reply:
    return world.ask(lambda: world.service.delete_group(context(42, 2), "g"))


def delete_offsets(world: World, indexes: list[int]) -> Reply:
    return world.ask(lambda: world.service.delete_offsets(context(47, 0), "g", [("t", indexes)]))


def test_offsets_of_one_group_that_expire_together() -> None:
    world = group_with_offsets(retention_ms=1)
    world.ports.time_ms += HOUR_MS
    moved = offsets_moved(world)
    assert max(moved) <= RECORDS_PER_TURN, moved
    assert offset_count(world, 1) == 0
    assert "g" not in world.coordinator().groups


def test_an_offset_that_is_renewed_while_others_of_its_group_expire() -> None:
    world = group_with_offsets(retention_ms=1)
    world.ports.time_ms += HOUR_MS
    world.ports.turn()
    world.commit(offsets={("t", 0): 5, ("t", OFFSETS - 1): 5})
    offsets_moved(world)
    assert offset_count(world, 1) == 2
    assert "g" in world.coordinator().groups


@pytest.mark.parametrize("commits_at_once", [True, False])
def test_a_group_keeps_its_record_when_it_commits_while_its_offsets_expire(commits_at_once: bool) -> None:
    """After the next load tools showed it without its protocol type, and it counted its generations anew."""
    world = World()
    world.leave("g", *world.stable())
    world.commit(offsets={("t", index): 1 for index in range(OFFSETS)}, retention_ms=1, version=4)
    world.ports.time_ms += HOUR_MS
    world.ports.commits_at_once = commits_at_once
    world.ports.turn()
    world.commit(offsets={("t", 0) if commits_at_once else ("u", 0): 5})
    offsets_moved(world)
    world.restart()
    assert [each.protocol_type for each in world.list_groups([], [])] == ["consumer"]
    assert offset_count(world, 1) == 1


def test_a_group_keeps_its_record_when_it_commits_before_its_offsets_expire() -> None:
    world = World()
    world.leave("g", *world.stable())
    world.commit(retention_ms=1, version=4)
    world.ports.commits_at_once = False
    world.commit(offsets={("u", 0): 5})
    world.advance(HOUR_MS)
    world.restart()
    assert [each.protocol_type for each in world.list_groups([], [])] == ["consumer"]
    assert world.committed(topic="u") == 5


def test_offsets_of_one_group_whose_topic_is_deleted() -> None:
    world = group_with_offsets()
    world.service.on_topics_deleted([("t", bytes(16))])
    assert offset_count(world, 1) >= OFFSETS - RECORDS_PER_TURN
    world.commit(offsets={("t", OFFSETS - 1): 5}, topic_id=bytes([1]) * 16)
    assert max(offsets_moved(world)) <= RECORDS_PER_TURN
    assert offset_count(world, 1) == 1
    assert world.committed(partition=OFFSETS - 1) == 5, "of the new topic of this name"


def test_a_group_with_many_offsets_is_deleted() -> None:
    world = group_with_offsets()
    deleted, again = delete_group(world), delete_group(world)
    assert deleted.is_parked
    assert offset_count(world, 1) >= OFFSETS - RECORDS_PER_TURN
    assert max(offsets_moved(world)) <= RECORDS_PER_TURN
    assert (deleted.error, again.error) == (0, 0)
    assert "g" not in world.coordinator().groups
    assert offset_count(world, 1) == 0
    assert delete_group(world).error == ErrorCode.GROUP_ID_NOT_FOUND


def test_many_offsets_are_deleted() -> None:
    world = group_with_offsets()
    deleted = delete_offsets(world, [*range(OFFSETS - 1), 0, 0])
    assert deleted.is_parked
    before = sum(world.ports.end_offsets.values())
    assert max(offsets_moved(world)) <= RECORDS_PER_TURN
    assert sum(world.ports.end_offsets.values()) - before <= OFFSETS, "none has two tombstones"
    assert len(deleted.response) == OFFSETS - 1
    assert world.committed(partition=OFFSETS - 1) == 1


def test_a_transaction_ends_while_its_group_is_deleted() -> None:
    world = World()
    commit_in_transactions(world, 1, OFFSETS)
    deleted = delete_group(world)
    ended = end_transaction(world, 0)
    offsets_moved(world)
    assert ended.response is True
    assert deleted.error == 0
    assert offset_count(world, 1) == 0


def test_a_member_joins_while_its_group_is_deleted() -> None:
    """It tries again, as with a coordinator that moves, and begins without offsets; a part of them would be left."""
    world = group_with_offsets()
    deleted = delete_group(world)
    assert world.join("g").error == ErrorCode.COORDINATOR_NOT_AVAILABLE
    assert world.commit(offsets={("t", 0): 5, ("t", OFFSETS - 1): 5}).error == ErrorCode.COORDINATOR_NOT_AVAILABLE
    world.ports.turns_after(0)
    assert (deleted.error, offset_count(world, 1)) == (0, 0)
    world.member()
    assert [group.group_id for group in world.list_groups([], [])] == ["g"]


def test_a_member_joins_before_the_deletion_of_its_group_begins() -> None:
    world = group_with_offsets()
    world.commit("other")
    delete_group(world)
    deleted = world.ask(lambda: world.service.delete_group(context(42, 2), "other"))
    member, _ = world.member("other")
    world.ports.turns_after(0)
    assert deleted.error == ErrorCode.NON_EMPTY_GROUP
    assert world.committed("other") == 1
    assert member in world.coordinator().groups["other"].members


@pytest.mark.parametrize("delete", [delete_group, lambda world: delete_offsets(world, list(range(OFFSETS)))])
def test_a_part_of_a_deletion_is_refused(delete: Callable[[World], Reply]) -> None:
    """For want of replicas, for three turns: what is left may be deleted again."""
    world = group_with_offsets()
    deleted = delete(world)
    world.ports.refuse_appends = KafkaError(ErrorCode.NOT_ENOUGH_REPLICAS)
    for _ in range(3):
        world.ports.turn()
    world.ports.refuse_appends = None
    world.ports.turns_after(0)
    assert isinstance(deleted.response, KafkaError)
    assert deleted.error == ErrorCode.COORDINATOR_NOT_AVAILABLE
    delete(world)
    world.ports.turns_after(0)
    assert offset_count(world, 1) == 0


def test_the_last_part_of_a_deletion_finds_nothing() -> None:
    """The answer waits for the parts before it."""
    world = group_with_offsets(commits_at_once=False)
    deleted = delete_offsets(world, list(range(coordinator.DELETED_PER_STEP)))
    world.ports.turns_after(0)
    assert deleted.is_parked, "a leader without this deletion may be elected"
    world.ports.commit(0)
    world.ports.turns_after(0)
    assert set(deleted.response.values()) == {ErrorCode.NONE}


def test_a_group_subscribes_while_its_offsets_are_deleted() -> None:
    world = group_with_offsets()
    deleted = delete_offsets(world, list(range(OFFSETS)))
    world.member(protocols={"range": b"\0\1\0\0\0\1\0\1t\0\0\0\0"})
    world.ports.time_ms += 3_001
    world.ports.turns_after(0)
    kept = [key for key, error in deleted.response.items() if error is ErrorCode.GROUP_SUBSCRIBED_TO_TOPIC]
    assert 0 < len(kept) == offset_count(world, 1) < OFFSETS


def test_a_deletion_that_finds_nothing_while_another_group_becomes_empty() -> None:
    """Their writes are of one turn."""
    world = World(GroupCoordinatorConfig(group_initial_rebalance_delay_ms=0))
    world.commit()
    world.stable("other", session_ms=10_000)
    world.ports.time_ms += 10_001
    deleted = delete_offsets(world, list(range(1, 300)))
    world.ports.turns_after(0)
    assert not deleted.is_parked
    world.ask(lambda: world.service.delete_group(context(42, 2), "other"))
    assert [group.group_id for group in world.list_groups([], [])] == ["g"]


def test_a_commit_is_replayed_behind_the_place_that_a_sweep_has_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coordinator, "EXPIRY_RECORDS_PER_TURN", 1)
    monkeypatch.setattr(coordinator, "SWEPT_PER_TURN", 1)
    world = World(commits_at_once=False)
    world.commit(offsets={("t", index): 1 for index in range(2)}, topic_id=bytes([2]) * 16)
    world.ports.commit(0)
    world.commit(offsets={("t", 2): 1}, topic_id=bytes([1]) * 16)
    world.service.on_topics_deleted([("t", bytes([1]) * 16)])
    world.ports.turn()
    world.ports.commit(0)
    for _ in range(4):
        world.advance(250)
        world.ports.commit(0)
    assert offset_count(world, 1) == 2


def test_the_partition_moves_away_while_a_group_is_deleted() -> None:
    world = group_with_offsets()
    deleted = delete_group(world)
    world.service.on_partition_resigned(0)
    assert deleted.error == ErrorCode.NOT_COORDINATOR
    world.ports.turns_after(0)
    world.service.on_partition_elected(0, 2)
    world.ports.turns_after(0)
    assert 0 < offset_count(world, 1) < OFFSETS
    again = delete_group(world)
    offsets_moved(world)
    assert (again.error, offset_count(world, 1)) == (0, 0)


def test_a_group_is_deleted_while_a_follower_hangs() -> None:
    world = group_with_offsets(commits_at_once=False)
    deleted = delete_group(world)
    offsets_moved(world)
    assert deleted.is_parked
    world.ports.commit(0)
    offsets_moved(world)
    assert (deleted.error, offset_count(world, 1)) == (0, 0)


def test_a_group_is_deleted_again_and_again_while_a_follower_hangs() -> None:
    """The repetitions wait for the first part, and the follower hangs behind it. They wrote all tombstones again."""
    world = group_with_offsets(commits_at_once=False)
    before = world.ports.end_offsets[0]
    first, *others = [delete_group(world) for _ in range(10)]
    world.ports.commit(0)
    offsets_moved(world)
    assert world.ports.end_offsets[0] - before == OFFSETS + 1
    assert {each.error for each in others} == {ErrorCode.COORDINATOR_NOT_AVAILABLE}
    world.ports.commit(0)
    offsets_moved(world)
    assert (first.error, offset_count(world, 1)) == (0, 0)
    assert delete_group(world).error == ErrorCode.GROUP_ID_NOT_FOUND


def test_a_topic_is_deleted_while_a_follower_hangs() -> None:
    """Longer than a write may take. All tombstones were written again each time."""
    world = group_with_offsets(commits_at_once=False)
    before = world.ports.end_offsets[0]
    world.service.on_topics_deleted([("t", bytes(16))])
    world.advance(4 * world.config.offsets_commit_timeout_ms)
    assert world.ports.end_offsets[0] - before == OFFSETS
    world.ports.commit(0)
    world.advance(1000)
    assert offset_count(world, 1) == 0
    assert world.ports.end_offsets[0] - before == OFFSETS


def test_a_group_whose_deletion_is_replicated_late_is_gone_then() -> None:
    world = World(commits_at_once=False)
    world.join(version=3)
    world.advance(world.config.group_initial_rebalance_delay_ms)
    world.leave("g", *world.coordinator().groups["g"].members)
    world.ports.commit(0)
    deleted = delete_group(world)
    world.advance(world.config.offsets_commit_timeout_ms)
    assert deleted.error == ErrorCode.COORDINATOR_NOT_AVAILABLE
    world.ports.commit(0)
    assert not world.coordinator().groups, "it was listed until the next expiry"
