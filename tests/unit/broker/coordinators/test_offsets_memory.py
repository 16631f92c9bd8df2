"""Committed offsets have a bound on the memory of a node, and are counted as long as they are there."""

from __future__ import annotations

import gc
import random
import tracemalloc

import pytest

from tests.unit.broker.coordinators.fakes import World
from tidelog.broker.coordinators.group.config import GroupCoordinatorConfig
from tidelog.broker.coordinators.group.coordinator import GroupCoordinator
from tidelog.broker.coordinators.group.memory import GroupMemory, GroupMemoryBudget
from tidelog.broker.coordinators.group.offsets import OffsetStore
from tidelog.broker.coordinators.group.records import OffsetCommit
from tidelog.protocol.errors import ErrorCode, KafkaError
from tidelog.protocol.messages.group_records import OffsetCommitValue

E = ErrorCode
BUDGET_BYTES = 100_000
DAY_MS = 24 * 3600 * 1000


def world_with(budget_bytes: int = BUDGET_BYTES, **options):
    config = GroupCoordinatorConfig(max_offsets_memory_bytes=budget_bytes, offsets_retention_ms=DAY_MS)
    return World(config, **options)


def used_bytes(world: World) -> int:
    return world.service._offsets_memory.used_bytes


def commit_error(world: World, group: str, offsets: dict[tuple[str, int], int], **options) -> ErrorCode:
    commit = world.commit(group, offsets=offsets, **options)
    if isinstance(commit.response, KafkaError):
        return commit.response.code
    return commit.response.topics[0].partitions[0].error_code


def fill(world: World) -> int:
    """Offsets of strangers until one is refused; how many groups were let in."""
    for number in range(1000):
        error = commit_error(world, f"stranger-{number}", {("t", 0): 1}, metadata="m" * 500)
        if error:
            assert error == E.COORDINATOR_NOT_AVAILABLE
            return number
    raise AssertionError("strangers may take all memory")


@pytest.mark.parametrize("partitions", [1, 7])
def test_commits_above_the_budget_of_the_node_are_refused_with_an_error_to_try_again(partitions: int):
    world = world_with(partitions=partitions)
    count = fill(world)
    assert 10 < count < 40
    assert BUDGET_BYTES - 6_000 < used_bytes(world) <= BUDGET_BYTES


def test_offsets_that_are_there_may_be_committed_anew_while_the_node_is_full():
    world = world_with()
    assert commit_error(world, "g", {("t", 0): 1}) == E.NONE
    fill(world)
    held_bytes = used_bytes(world)
    for offset in range(2, 50):
        assert commit_error(world, "g", {("t", 0): offset}) == E.NONE
    assert used_bytes(world) == held_bytes
    assert commit_error(world, "g", {("t", 0): 50, ("t", 1): 1}, metadata="m" * 4000) == E.COORDINATOR_NOT_AVAILABLE
    assert world.committed("g") == 49


def test_members_that_join_take_no_place_of_offsets():
    world = world_with()
    fill(world)
    (member,) = world.stable()
    assert world.heartbeat(member=member).error == E.NONE


def test_what_is_written_counts_before_it_is_committed():
    world = world_with(commits_at_once=False)
    commits = [world.commit(f"g{number}", metadata="m" * 500) for number in range(100)]
    assert 10 < sum(commit.is_parked for commit in commits) < 40
    assert commits[-1].error == E.COORDINATOR_NOT_AVAILABLE
    assert used_bytes(world) <= BUDGET_BYTES
    world.ports.commit(0)
    assert BUDGET_BYTES - 6_000 < used_bytes(world) <= BUDGET_BYTES


def test_expired_and_deleted_offsets_make_room():
    world = world_with()
    count = fill(world)
    world.advance(2 * DAY_MS)
    assert used_bytes(world) == 0
    assert fill(world) == count
    world.service.on_topics_deleted([("t", bytes(16))])
    world.advance(0)
    assert used_bytes(world) == 0


def test_a_load_is_never_refused_and_counts_the_same():
    world = world_with()
    fill(world)
    held_bytes = used_bytes(world)
    world.restart()
    assert used_bytes(world) == held_bytes
    world.service.on_partition_resigned(0)
    assert used_bytes(world) == 0


@pytest.mark.parametrize("seed", range(20))
def test_the_count_is_that_of_what_is_there(seed: int):
    """Commits, tombstones and ends of transactions in any order: as if what is left had been put there alone."""
    rng = random.Random(seed)
    budget = GroupMemoryBudget(1 << 30)
    store = OffsetStore(GroupMemory(budget))
    for number in range(300):
        where = f"g{rng.randrange(3)}", f"t{rng.randrange(3)}", rng.randrange(3)
        if rng.random() < 0.1:
            store.replay_end_transaction(rng.randrange(2), rng.random() < 0.5)
        else:
            value = OffsetCommitValue(offset=number, metadata="m" * rng.randrange(50)) if rng.random() < 0.7 else None
            store.replay(number, OffsetCommit(*where, value), rng.choice((-1, 0, 1)))
    for producer_id in range(2):
        store.replay_end_transaction(producer_id, True)
    alone = OffsetStore()
    for group in store.group_ids():
        for topic, partitions in store.of_group(group).items():
            for index, entry in partitions.items():
                value = OffsetCommitValue(offset=entry.offset, metadata=entry.metadata)
                alone.replay(0, OffsetCommit(group, topic, index, value), -1)
    assert budget.used_bytes == alone.memory.held_bytes
    for group in store.group_ids():
        for key in store.keys(group):
            store.replay(1000, OffsetCommit(group, *key, None), -1)
    assert budget.used_bytes == 0


@pytest.mark.parametrize(("producers", "groups", "partitions"), [(300, 1, 1), (1, 300, 1), (1, 1, 1000), (10, 10, 10)])
def test_what_is_charged_for_open_transactions_is_no_less_than_what_is_taken(
    producers: int, groups: int, partitions: int
):
    store = OffsetStore(GroupMemory(GroupMemoryBudget(1 << 30)))
    gc.collect()
    tracemalloc.start()
    try:
        for producer_id in range(producers):
            for group in range(groups):
                for partition in range(partitions):
                    value = OffsetCommitValue(offset=1_000_000 + partition, metadata=f"metadata {partition}")
                    store.replay(
                        1000 + partition, OffsetCommit(f"group-{group}", "topic", partition, value), producer_id
                    )
        gc.collect()
        taken_bytes = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert taken_bytes <= store.memory.held_bytes


@pytest.mark.slow
@pytest.mark.parametrize(("groups", "topics", "partitions"), [(300, 1, 1), (3, 300, 1), (1, 1, 1000), (10, 10, 10)])
def test_what_is_charged_is_no_less_than_what_is_taken(groups: int, topics: int, partitions: int):
    world = world_with(1 << 30)
    gc.collect()
    tracemalloc.start()
    try:
        for group in range(groups):
            offsets = {(f"topic-{topic}", at): 1_000_000 + at for topic in range(topics) for at in range(partitions)}
            assert commit_error(world, f"group-{group}", offsets, metadata="metadata") == E.NONE
        world.ports.logs.clear()  # it stands for a disk
        del offsets
        gc.collect()
        taken_bytes = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert taken_bytes <= used_bytes(world) + 50_000


def test_a_commit_that_no_batch_can_hold_is_refused_before_its_records_are_made(monkeypatch: pytest.MonkeyPatch):
    """A commit of 49,000 offsets held the loop for a second, and of a million for twenty."""
    world = world_with(10_000_000)
    monkeypatch.setattr(world.ports, "batch_bytes_max", lambda partition: 100_000)
    fits = {("t", index): 1 for index in range(2250)}
    assert commit_error(world, "g", fits) == E.NONE
    appended = [sum(map(len, log)) for log in world.ports.logs.values()]
    assert 95_000 < max(appended) < 100_000, "what is refused comes close to what does not fit"
    with monkeypatch.context() as without_records:
        without_records.delattr(GroupCoordinator, "encode")
        assert commit_error(world, "g", {("t", index): 1 for index in range(2500)}) == E.UNKNOWN_SERVER_ERROR
    assert appended == [sum(map(len, log)) for log in world.ports.logs.values()]
    assert world.committed("g", "t", 2249) == 1
    assert world.committed("g", "t", 2400) == -1


def test_a_smaller_compressed_commit_is_left_to_the_append():
    config = GroupCoordinatorConfig(offsets_topic_compression_codec=1)
    world = World(config)
    world.ports.batch_bytes_max = lambda partition: 100_000  # type: ignore[method-assign]
    assert commit_error(world, "g", {("t", index): 1 for index in range(7000)}) == E.NONE
    assert commit_error(world, "g", {("t", index): 1 for index in range(10_000)}) == E.UNKNOWN_SERVER_ERROR
