"""Reading from the replica that the leader names, and going back to the leader (KIP-392)."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.unit.client.fake_broker import DROP, SILENCE, FakeCluster, FakeNode
from tests.unit.client.test_consumer import T0, T1, consumer, fill, read, until
from tidelog.client import Consumer
from tidelog.protocol.errors import ErrorCode
from tidelog.protocol.messages.fetch import FetchableTopicResponse, FetchRequest, FetchResponse, PartitionData

LEADER, NEAR = 1, 2


def cluster_with_a_near_replica() -> FakeCluster:
    cluster = FakeCluster(nodes=2, t=1)
    partition = cluster.topics["t"][0]
    partition.followers[NEAR] = 0
    partition.nearest = NEAR
    return cluster


def written(cluster: FakeCluster, count: int, *, replicated: bool = True) -> None:
    fill(cluster, "t", 0, count)
    if replicated:
        cluster.topics["t"][0].followers[NEAR] = cluster.topics["t"][0].end_offset
        cluster.appended.set()


def fetched_from(cluster: FakeCluster) -> list[int]:
    return [node for node, _, request in cluster.requests if isinstance(request, FetchRequest) and request.topics]


def reader(cluster: FakeCluster, **options: Any) -> Consumer:
    consuming = consumer(cluster, client_rack="near", **options)
    consuming.assign([T0])
    return consuming


async def test_records_come_from_the_replica_that_the_leader_names():
    async with cluster_with_a_near_replica() as cluster, reader(cluster) as consuming:
        written(cluster, 9)
        assert await read(consuming, 9) == list(range(9))
        assert fetched_from(cluster)[0] == LEADER
        assert set(fetched_from(cluster)[1:]) == {NEAR}
        assert {request.rack_id for request in cluster.sent(FetchRequest)} == {"near"}
        before = len(cluster.requests)
        written(cluster, 3)
        assert await read(consuming, 3) == [9, 10, 11]
        assert LEADER not in [node for node, _, each in cluster.requests[before:] if isinstance(each, FetchRequest)]


async def test_a_replica_is_fetched_from_while_the_leader_has_a_fetch_of_another_partition() -> None:
    async def answer_later(request: FetchRequest, node: FakeNode) -> Any:
        await until(lambda: T0 in consuming.paused())
        return await FakeNode.on_fetch(node, request)

    async with FakeCluster(nodes=2, t=2) as cluster, consumer(cluster, client_rack="near") as consuming:
        partition, other = cluster.topics["t"]
        other.leader = partition.leader
        partition.nearest = NEAR
        partition.followers[NEAR] = 0
        written(cluster, 3)
        consuming.assign([T0, T1])
        cluster.script(FetchRequest, answer_later, lambda request, node: SILENCE)
        await until(lambda: cluster.sent(FetchRequest), consuming)
        consuming.pause(T0)
        await until(lambda: len(cluster.sent(FetchRequest)) == 2)
        consuming.resume(T0)
        assert await read(consuming, 3, timeout_s=10) == [0, 1, 2], "the leader's answer would not come before 30 s"


async def test_without_a_rack_the_leader_is_read_from():
    async with cluster_with_a_near_replica() as cluster, consumer(cluster) as consuming:
        consuming.assign([T0])
        written(cluster, 9)
        assert await read(consuming, 9) == list(range(9))
        assert set(fetched_from(cluster)) == {LEADER}


async def test_the_leader_is_asked_again_when_the_metadata_would_be_too_old():
    async with cluster_with_a_near_replica() as cluster, reader(cluster, metadata_max_age_ms=200) as consuming:
        written(cluster, 3)
        assert await read(consuming, 3) == [0, 1, 2]
        asked = fetched_from(cluster).count(LEADER)
        await until(lambda: fetched_from(cluster).count(LEADER) > asked, consuming)
        written(cluster, 3)
        assert await read(consuming, 3) == [3, 4, 5]


def refuse(code: ErrorCode) -> Any:
    def action(request: FetchRequest, node: FakeNode) -> FetchResponse:
        assert node.node_id == NEAR
        [topic] = request.topics
        data = PartitionData(partition_index=0, error_code=code, high_watermark=-1)
        return FetchResponse(
            responses=[FetchableTopicResponse(topic=topic.topic, topic_id=topic.topic_id, partitions=[data])]
        )

    return action


@pytest.mark.parametrize(
    "trouble",
    [
        refuse(ErrorCode.OFFSET_OUT_OF_RANGE),
        refuse(ErrorCode.NOT_LEADER_OR_FOLLOWER),
        refuse(ErrorCode.REPLICA_NOT_AVAILABLE),
        refuse(ErrorCode.KAFKA_STORAGE_ERROR),
        refuse(ErrorCode.OFFSET_NOT_AVAILABLE),
        refuse(ErrorCode.FENCED_LEADER_EPOCH),
        lambda request, node: DROP,
    ],
)
async def test_trouble_with_the_replica_leads_back_to_the_leader_and_resets_nothing(trouble):
    async with cluster_with_a_near_replica() as cluster, reader(cluster, auto_offset_reset="latest") as consuming:
        written(cluster, 9)
        consuming.seek(T0, 0)
        assert await read(consuming, 9) == list(range(9))
        await until(lambda: fetched_from(cluster)[-1] == NEAR)
        cluster.topics["t"][0].nearest = -1
        cluster.script(FetchRequest, trouble)
        sent = len(cluster.requests)
        await until(lambda: len(cluster.requests) > sent and LEADER in fetched_from(cluster)[1:], consuming)
        written(cluster, 3)
        assert await read(consuming, 3) == [9, 10, 11]


async def test_a_replica_that_dies_leads_back_to_the_leader():
    async with cluster_with_a_near_replica() as cluster, reader(cluster) as consuming:
        written(cluster, 3)
        assert await read(consuming, 3) == [0, 1, 2]
        cluster.topics["t"][0].nearest = -1
        await cluster.nodes[NEAR].stop()
        written(cluster, 3, replicated=False)
        assert await read(consuming, 3) == [3, 4, 5]


async def test_a_replica_that_is_no_longer_in_the_metadata_is_left():
    async with cluster_with_a_near_replica() as cluster, reader(cluster, fetch_max_wait_ms=100) as consuming:
        written(cluster, 3)
        assert await read(consuming, 3) == [0, 1, 2]
        partition = cluster.topics["t"][0]
        partition.nearest = -1
        del partition.followers[NEAR]
        written(cluster, 3, replicated=False)
        assert await read(consuming, 3) == [3, 4, 5]


async def test_a_replica_that_the_metadata_do_not_have_yet_is_looked_for():
    """The leader knows that it is back, the client's metadata do not. Its fetches went to the leader without a pause,
    and got no record, until the metadata were refreshed for their age, five minutes.
    """
    async with cluster_with_a_near_replica() as cluster, reader(cluster, fetch_max_wait_ms=100) as consuming:
        partition = cluster.topics["t"][0]
        del partition.followers[NEAR]
        partition.nearest = -1
        written(cluster, 3, replicated=False)
        assert await read(consuming, 3) == [0, 1, 2]
        partition.followers[NEAR] = partition.end_offset
        partition.nearest = NEAR
        sent = len(fetched_from(cluster))
        written(cluster, 3)
        assert await read(consuming, 3) == [3, 4, 5]
        assert fetched_from(cluster)[-1] == NEAR
        assert len(fetched_from(cluster)) < sent + 20


async def test_a_replica_that_lags_behind_the_position_resets_nothing():
    """The leader names only replicas that have the offset; one that was cut since answers OFFSET_OUT_OF_RANGE."""
    async with cluster_with_a_near_replica() as cluster, reader(cluster, auto_offset_reset="latest") as consuming:
        written(cluster, 9)
        consuming.seek(T0, 6)
        assert await read(consuming, 3) == [6, 7, 8]
        cluster.topics["t"][0].followers[NEAR] = 3
        consuming.seek(T0, 6)
        await asyncio.sleep(0.05)
        cluster.topics["t"][0].nearest = -1
        assert await read(consuming, 3) == [6, 7, 8]


async def test_a_new_leader_epoch_leads_to_the_new_leader():
    async with cluster_with_a_near_replica() as cluster, reader(cluster, metadata_max_age_ms=50) as consuming:
        written(cluster, 3)
        assert await read(consuming, 3) == [0, 1, 2]
        partition = cluster.topics["t"][0]
        partition.nearest = -1
        del partition.followers[NEAR]
        cluster.move_leader("t", 0, NEAR)
        partition.followers[LEADER] = partition.end_offset
        fill(cluster, "t", 0, 3)
        assert await read(consuming, 3) == [3, 4, 5]
