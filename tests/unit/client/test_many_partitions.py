"""A consumer of many partitions, which must not look at each of them for a record."""

from __future__ import annotations

from collections.abc import ItemsView, Iterator
from random import Random
from typing import Any

import pytest

from tests.unit.client.fake_broker import FakeCluster
from tests.unit.client.test_consumer import consumer, fill, until
from tidelog import Consumer, NewTopic, TopicPartition
from tidelog.client import sync
from tidelog.client.consuming import fetcher
from tidelog.client.consuming.completed_fetch import CompletedFetch
from tidelog.client.consuming.fetch_session import FetchTarget
from tidelog.client.consuming.subscription import PartitionState, Subscription
from tidelog.client.network.metadata import EMPTY
from tidelog.protocol.messages.fetch import FetchRequest
from tidelog.testing.embedded import EmbeddedBroker

PARTITIONS = [TopicPartition("t", index) for index in range(100)]
POLLS = 50


class _Walks(dict[TopicPartition, PartitionState]):
    """An assignment that counts how often all its partitions are looked at."""

    def __init__(self, assigned: dict[TopicPartition, PartitionState]) -> None:
        super().__init__(assigned)
        self.looks = 0

    @property
    def count(self) -> float:
        return self.looks / len(self)

    def __iter__(self) -> Iterator[TopicPartition]:
        self.looks += len(self)
        return super().__iter__()

    def items(self) -> ItemsView[TopicPartition, PartitionState]:  # type: ignore[override]
        self.looks += len(self)
        return super().items()

    def __getitem__(self, partition: TopicPartition) -> PartitionState:
        self.looks += 1
        return super().__getitem__(partition)


def walks(subscription: Subscription, monkeypatch: pytest.MonkeyPatch) -> _Walks:
    counted = _Walks(subscription._assigned)
    monkeypatch.setattr(subscription, "_assigned", counted)
    return counted


async def walks_of_polls(consuming: Consumer, monkeypatch: pytest.MonkeyPatch) -> float:
    """How often `POLLS` polls for one record look at all partitions."""
    counted = walks(consuming._subscription, monkeypatch)
    for _ in range(POLLS):
        assert await consuming.poll(5000, max_records=1)
    return counted.count


async def test_a_poll_for_one_record_does_not_look_at_all_partitions(monkeypatch: pytest.MonkeyPatch) -> None:
    async with FakeCluster(t=len(PARTITIONS)) as cluster:
        for partition in PARTITIONS:
            fill(cluster, "t", partition.partition, 3)
        async with consumer(cluster) as consuming:
            consuming.assign(PARTITIONS)
            assert await consuming.poll(5000, max_records=1)
            assert await walks_of_polls(consuming, monkeypatch) < POLLS, "a fetch may look at all, and there are a few"


async def test_a_broker_that_leads_no_partition_any_more_does_not_make_a_poll_look_at_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with FakeCluster(nodes=2, t=len(PARTITIONS)) as cluster:
        for partition in PARTITIONS:
            fill(cluster, "t", partition.partition, 3)
        async with consumer(cluster) as consuming:
            consuming.assign(PARTITIONS)
            assert await consuming.poll(5000, max_records=1)
            assert consuming._cluster is not None
            assert consuming._fetcher is not None
            metadata, nodes = consuming._cluster.metadata, consuming._fetcher._nodes
            await until(lambda: set(nodes) == {1, 2} and all(node.responses for node in nodes.values()))
            consuming.assign([partition for partition in PARTITIONS if metadata.leader(partition) == 1])
            await until(lambda: not nodes[2].in_flight)
            assert await consuming.poll(5000, max_records=1)
            assert await walks_of_polls(consuming, monkeypatch) < POLLS, "a fetch may look at all, and there are a few"


async def test_a_partition_without_a_leader_does_not_make_a_poll_look_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    async with FakeCluster(t=len(PARTITIONS)) as cluster:
        for partition in PARTITIONS:
            fill(cluster, "t", partition.partition, 3)
        cluster.topics["t"][-1].leader = -1
        async with consumer(cluster) as consuming:
            consuming.assign(PARTITIONS)
            for partition in PARTITIONS:
                consuming.seek(partition, 0)
            assert await consuming.poll(5000, max_records=1)
            assert await walks_of_polls(consuming, monkeypatch) < POLLS / 2, (
                "a fetch may look at all, and there are a few"
            )
            cluster.move_leader("t", len(PARTITIONS) - 1, 1)
            await until(lambda: consuming.lag(PARTITIONS[-1]) is not None, consuming)


async def test_a_broker_whose_partitions_are_paused_does_not_make_a_poll_look_at_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with FakeCluster(nodes=2, t=len(PARTITIONS)) as cluster:
        for partition in PARTITIONS:
            fill(cluster, "t", partition.partition, 3)
        async with consumer(cluster) as consuming:
            consuming.assign(PARTITIONS)
            assert await consuming.poll(5000, max_records=1)
            assert consuming._fetcher is not None
            nodes, buffer = consuming._fetcher._nodes, consuming._fetcher._buffer
            await until(lambda: set(nodes) == {1, 2} and all(node.responses for node in nodes.values()))
            paused = [each for each in PARTITIONS if cluster.topics["t"][each.partition].leader == 2]
            consuming.pause(*paused)
            await until(lambda: not nodes[2].in_flight)
            taken: list[TopicPartition] = []
            due_fetch = buffer._due_fetch

            def noted(partition: TopicPartition) -> CompletedFetch | None:
                taken.append(partition)
                return due_fetch(partition)

            monkeypatch.setattr(buffer, "_due_fetch", noted)
            counted = walks(consuming._subscription, monkeypatch)
            for _ in range(POLLS):
                assert await consuming.poll(5000, max_records=1)
            assert counted.looks < POLLS * (len(paused) + 10), "those of that broker, and a fetch may look at all"
            assert set(taken).isdisjoint(paused)


async def test_a_poll_does_not_look_at_paused_partitions(monkeypatch: pytest.MonkeyPatch) -> None:
    async with FakeCluster(t=len(PARTITIONS)) as cluster, consumer(cluster) as consuming:
        consuming.assign(PARTITIONS)
        for partition in PARTITIONS:
            consuming.seek(partition, 0)
        await consuming.poll()
        consuming.pause(*PARTITIONS)
        fetcher = consuming._fetcher
        assert fetcher is not None
        await until(lambda: not any(fetcher._is_busy(node) for node in fetcher._nodes.values()))
        await consuming.poll()
        counted = walks(consuming._subscription, monkeypatch)
        for _ in range(POLLS):
            assert not await consuming.poll()
        assert counted.count < POLLS / 2, "the first poll looks at all, as the assignment is another one"
        consuming.resume(PARTITIONS[7])
        fill(cluster, "t", 7, 1)
        assert (await consuming.poll(5000)).keys() == {PARTITIONS[7]}


@pytest.mark.parametrize("seed", range(5))
async def test_the_partitions_to_fetch_are_those_that_are_not_paused(seed: int) -> None:
    rng = Random(seed)
    async with FakeCluster(nodes=2, t=len(PARTITIONS)) as cluster, consumer(cluster) as consuming:
        consuming.assign(PARTITIONS)
        await consuming.poll()
        fetcher, subscription = consuming._fetcher, consuming._subscription
        assert fetcher is not None
        for _ in range(300):
            some = rng.sample(PARTITIONS, rng.randrange(20))
            assigned = [each for each in some if each in subscription.assigned]
            step = rng.random()
            if step < 0.1:
                consuming.assign(rng.sample(PARTITIONS, 80))
            elif step < 0.2:
                for partition in assigned:
                    subscription.assigned[partition].read_replica = rng.choice([-1, 1, 2])
                fetcher._seen_state = EMPTY, {}  # as where a leader names a replica, or the metadata are new
            else:
                (consuming.pause if step < 0.6 else consuming.resume)(*assigned)
            if rng.random() < 0.7:
                fetcher._partitions_of_idle_sources()
                sources = fetcher._sources
                assert {each for partitions in sources.values() for each in partitions} == (
                    subscription.assigned.keys() - consuming.paused()
                )
                for partition, state in subscription.assigned.items():
                    assert state.paused or state.read_replica < 0 or partition in sources[state.read_replica]


async def test_a_position_does_not_look_at_all_partitions(monkeypatch: pytest.MonkeyPatch) -> None:
    async with FakeCluster(t=len(PARTITIONS)) as cluster:
        fill(cluster, "t", 0, 3)
        async with consumer(cluster) as consuming:
            consuming.assign(PARTITIONS)
            assert (await anext(consuming)).offset == 0
            for partition in PARTITIONS:
                await consuming.position(partition)
            counted = walks(consuming._subscription, monkeypatch)
            assert [await consuming.position(each) for each in PARTITIONS] == [1] + [0] * (len(PARTITIONS) - 1)
            assert counted.count < 20


def test_a_blocking_poll_for_one_record_does_not_look_at_all_partitions(monkeypatch: pytest.MonkeyPatch) -> None:
    with EmbeddedBroker() as broker:
        options = {"bootstrap_servers": broker.bootstrap_servers}
        with sync.Admin(**options) as admin:
            admin.create_topics([NewTopic("t", num_partitions=len(PARTITIONS))])
        with sync.Producer(**options) as producer:
            for partition in PARTITIONS:
                producer.send("t", b"v", partition=partition.partition)
        with sync.Consumer(auto_offset_reset="earliest", **options) as consuming:
            consuming.assign(PARTITIONS)
            assert consuming.poll(10_000, max_records=1)
            counted = walks(consuming._consumer._subscription, monkeypatch)
            taken = [consuming.poll(10_000, max_records=1) for _ in range(POLLS)]
            assert len({partition for batch in taken for partition in batch}) == POLLS
            assert counted.count < POLLS


async def test_a_fetch_makes_only_targets_that_have_changed_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []

    def target(*fields: Any) -> FetchTarget:
        made.append(fields[1])
        return FetchTarget(*fields)

    monkeypatch.setattr(fetcher, "FetchTarget", target)
    async with FakeCluster(t=len(PARTITIONS)) as cluster, consumer(cluster) as consuming:
        consuming.assign(PARTITIONS)
        await consuming.poll(100)
        made.clear()
        for round_number in range(20):
            fill(cluster, "t", 0, 1)
            (records,) = (await consuming.poll(5000)).values()
            assert [record.offset for record in records] == [round_number]
        assert set(made) <= set(range(21)), "offsets of other partitions"
        assert len(made) < 3 * 20


async def test_a_fetch_states_the_epoch_of_a_seek_to_the_same_offset() -> None:
    async with FakeCluster(t=1) as cluster:
        fill(cluster, "t", 0, 3)
        async with consumer(cluster, fetch_max_wait_ms=10) as consuming:
            consuming.assign(PARTITIONS[:1])
            assert await consuming.poll(5000)
            await consuming.poll(200)  # some fetches at the end
            consuming.seek(PARTITIONS[0], 3)
            await consuming.poll(200)
            asked = [
                each for fetch in cluster.sent(FetchRequest) for topic in fetch.topics for each in topic.partitions
            ]
            assert (asked[-1].fetch_offset, asked[-1].last_fetched_epoch) == (3, -1)
