from __future__ import annotations

from random import Random
from typing import Any

import pytest

from tests.unit.client.fake_broker import FakeCluster
from tests.unit.client.test_producer import producer
from tidelog.client.assignment.partitioner import positive_hash
from tidelog.client.config import ProducerConfig
from tidelog.client.model import TopicPartition
from tidelog.client.network.metadata import PartitionMetadata, TopicMetadata
from tidelog.client.producing.accumulator import Accumulator
from tidelog.client.producing.producer_memory import new_accumulator
from tidelog.client.producing.producer_session import ProducerSession
from tidelog.client.producing.topic_routes import TopicRoutes
from tidelog.protocol.batches.records import BatchBuilder
from tidelog.protocol.errors import ErrorCode
from tidelog.protocol.messages.produce import ProduceRequest


class Sessions(ProducerSession):
    """Notes what it forgets."""

    def __init__(self) -> None:
        super().__init__(idempotent=True)
        self.forgotten: list[TopicPartition] = []

    def forget(self, partitions: Any) -> None:
        self.forgotten += partitions


class World:
    def __init__(self, **options: Any) -> None:
        config = ProducerConfig.from_options(options)
        self.session = Sessions()
        self.accumulator: Accumulator[Any] = new_accumulator(config, None, lambda: BatchBuilder(1000))
        self.stuck: set[TopicPartition] = set()
        self.routes = TopicRoutes(config, self.accumulator, self.session, Random(1), self.stuck.__contains__)


def topic(name: str, count: int, topic_id: bytes = b"a" * 16, leaders: set[int] | None = None) -> TopicMetadata:
    partitions = tuple(
        PartitionMetadata(number, ErrorCode.NONE, 0 if leaders is None or number in leaders else -1, 0, (0,), (0,), ())
        for number in range(count)
    )
    return TopicMetadata(name, topic_id, ErrorCode.NONE, False, partitions)


def test_a_key_decides_and_its_absence_stays_with_partitions_that_have_a_leader() -> None:
    world = World()
    route = world.routes.make(topic("t", 4, leaders={1, 3}))
    assert {world.routes.choose(route, b"key %d" % at, b"v") for at in range(50)} == {0, 1, 2, 3}
    assert all(world.routes.choose(route, b"%d" % at, None) == positive_hash(b"%d" % at) % 4 for at in range(50))
    assert {world.routes.choose(route, None, b"v" * 9000) for _ in range(50)} == {1, 3}


def test_a_custom_partitioner_is_asked_for_every_record_and_held_to_the_partitions() -> None:
    calls: list[Any] = []

    def choose(*arguments: Any) -> int:
        calls.append(arguments)
        return len(calls)

    world = World(partitioner=choose)
    route = world.routes.make(topic("t", 3))
    assert [world.routes.choose(route, b"k", b"v"), world.routes.choose(route, None, b"w")] == [1, 2]
    assert calls == [("t", b"k", b"v", 3), ("t", None, b"w", 3)]
    with pytest.raises(ValueError, match="chose 3 of the 3 partitions of t"):
        world.routes.choose(route, None, b"x")


@pytest.mark.parametrize("chosen", ["0", None, 1.0, 0.5, -1, 10**30, float("nan")])
def test_what_is_no_number_of_a_partition_is_refused_as_a_wrong_number_is(chosen: Any) -> None:
    world = World(partitioner=lambda *_: chosen)
    with pytest.raises(ValueError, match=r"the partitioner chose .* of the 3 partitions of t"):
        world.routes.choose(world.routes.make(topic("t", 3)), b"k", b"v")


def test_keys_that_are_ignored_are_spread() -> None:
    world = World(partitioner_ignore_keys=True)
    route = world.routes.make(topic("t", 8))
    assert len({world.routes.choose(route, b"same", b"v" * 20_000) for _ in range(64)}) == 8


def test_more_partitions_keep_the_queues_and_the_place_of_the_spread() -> None:
    world = World(partitioner="round_robin")
    old = world.routes.make(topic("t", 2))
    assert [world.routes.choose(old, None, b"v") for _ in range(3)] == [0, 1, 0]
    world.routes.update({"t": topic("t", 3)})
    new = world.routes.by_topic["t"]
    assert new.queues[:2] == old.queues
    assert [world.routes.choose(new, None, b"v") for _ in range(3)] == [0, 1, 2]
    assert not world.session.forgotten


@pytest.mark.parametrize("topics", [{}, {"t": topic("t", 2, b"b" * 16)}], ids=["deleted", "recreated"])
def test_a_topic_that_is_deleted_or_recreated_loses_queues_and_sequences(topics: dict[str, TopicMetadata]) -> None:
    world = World()
    old = world.routes.make(topic("t", 2))
    kept = world.routes.make(topic("other", 1))
    world.routes.update({**topics, "other": kept.topic})
    assert list(world.routes.by_topic) == ["other"]
    assert world.session.forgotten == [TopicPartition("t", 0), TopicPartition("t", 1)]
    assert world.accumulator.queue(TopicPartition("t", 0)) is not old.queues[0]


def test_the_spread_avoids_a_partition_whose_leader_is_stuck() -> None:
    world = World(partitioner_availability_timeout_ms=1)
    world.stuck.add(TopicPartition("t", 1))
    route = world.routes.make(topic("t", 3))
    assert {world.routes.choose(route, None, b"v" * 20_000) for _ in range(60)} == {0, 2}


async def test_a_route_is_made_once_for_the_same_metadata() -> None:
    """A producer looks for the topic again every few batches. It made a route each time, a step for each partition."""
    async with FakeCluster(t=3) as cluster, producer(cluster, batch_size=100) as sending:
        await sending.send_and_wait("t", b"v")
        route = sending._appender.known_route("t")
        for _ in range(100):
            await sending.send("t", b"v" * 80)
        await sending.flush()
        assert len(cluster.sent(ProduceRequest)) > 10
        assert sending._appender.known_route("t") is route
