"""Our consumer on clusters whose leaders change uncleanly, and next to a replica of its own rack."""

from __future__ import annotations

import asyncio

import pytest

from tests.cluster.asking import await_in_sync, await_leader, create_topic, send
from tests.cluster.conftest import NewCluster
from tests.patience import PATIENCE_S
from tidelog.client import Consumer, LogTruncation, TopicPartition
from tidelog.testing.cluster import EmbeddedCluster

pytestmark = pytest.mark.slow

TOPIC = "torn"
T0 = TopicPartition(TOPIC, 0)


def numbers(first: int, following: int) -> list[bytes]:
    return [b"%d" % number for number in range(first, following)]


async def read(consuming: Consumer, count: int) -> list[tuple[int, bytes | None]]:
    found: list[tuple[int, bytes | None]] = []
    async with asyncio.timeout(2 * PATIENCE_S):
        while len(found) < count:
            for records in (await consuming.poll(1000, max_records=count - len(found))).values():
                found += [(record.offset, record.value) for record in records]
    return found


def lose_the_last_five(cluster: EmbeddedCluster) -> None:
    """2 has five records when it leads, 1 had ten; then ten others are written."""
    cluster.kill(1)
    await_leader(cluster.nodes[3].port, TOPIC, -1)
    cluster.restart(2)
    await_leader(cluster.nodes[3].port, TOPIC, 2)
    assert send(cluster, TOPIC, numbers(100, 110)) == list(range(5, 15))


def begin(cluster: EmbeddedCluster) -> None:
    create_topic(cluster, TOPIC, [[1, 2]], {"unclean.leader.election.enable": "true"})
    send(cluster, TOPIC, numbers(0, 5))
    cluster.kill(2)
    await_in_sync(cluster.nodes[3].port, TOPIC, [1])
    send(cluster, TOPIC, numbers(5, 10))


@pytest.mark.parametrize("reset", ["earliest", "latest", "none"])
async def test_no_record_is_passed_over_after_an_unclean_election(new_cluster: NewCluster, reset: str):
    cluster = await asyncio.to_thread(new_cluster, 3, controllers=1)
    await asyncio.to_thread(begin, cluster)
    async with Consumer(bootstrap_servers=cluster.bootstrap_servers, auto_offset_reset=reset) as consuming:
        consuming.assign([T0])
        consuming.seek(T0, 0)
        assert await read(consuming, 10) == list(enumerate(numbers(0, 10)))
        await asyncio.to_thread(lose_the_last_five, cluster)
        if reset == "none":
            with pytest.raises(LogTruncation) as caught:
                await read(consuming, 1)
            assert caught.value.divergent_offset is not None
            assert caught.value.divergent_offset.offset == 5
            consuming.seek(T0, caught.value.divergent_offset)
        assert await read(consuming, 10) == list(enumerate(numbers(100, 110), start=5))


async def test_an_offset_that_was_committed_before_an_unclean_election_is_checked(new_cluster: NewCluster):
    cluster = await asyncio.to_thread(new_cluster, 3, controllers=1)
    await asyncio.to_thread(begin, cluster)
    options = {"bootstrap_servers": cluster.bootstrap_servers, "group_id": "g", "auto_offset_reset": "earliest"}
    async with Consumer(**options) as consuming:
        consuming.assign([T0])
        assert await read(consuming, 10) == list(enumerate(numbers(0, 10)))
    await asyncio.to_thread(lose_the_last_five, cluster)
    async with Consumer(**options) as consuming:
        consuming.assign([T0])
        assert await read(consuming, 10) == list(enumerate(numbers(100, 110), start=5))


async def test_a_clean_election_moves_no_position(new_cluster: NewCluster):
    cluster = await asyncio.to_thread(new_cluster, 3, controllers=1)
    await asyncio.to_thread(create_topic, cluster, TOPIC, [[1, 2]])
    await asyncio.to_thread(send, cluster, TOPIC, numbers(0, 5))
    async with Consumer(bootstrap_servers=cluster.bootstrap_servers, auto_offset_reset="none") as consuming:
        consuming.assign([T0])
        consuming.seek(T0, 0)
        assert await read(consuming, 5) == list(enumerate(numbers(0, 5)))
        for dies, leads in ((1, 2), (2, 1)):
            position = await consuming.position(T0)
            await asyncio.to_thread(cluster.kill, dies)
            await asyncio.to_thread(await_leader, cluster.nodes[3].port, TOPIC, leads)
            await asyncio.to_thread(send, cluster, TOPIC, numbers(position, position + 5))
            assert await read(consuming, 5) == list(enumerate(numbers(position, position + 5), start=position))
            await asyncio.to_thread(cluster.restart, dies)
            await asyncio.to_thread(await_in_sync, cluster.nodes[3].port, TOPIC, [1, 2])


async def test_a_consumer_reads_from_the_replica_of_its_rack_and_from_the_leader_when_that_dies(
    new_cluster: NewCluster,
):
    def make() -> EmbeddedCluster:
        cluster = new_cluster(
            3,
            controllers=1,
            options={"replica.selector.class": "org.apache.kafka.common.replica.RackAwareReplicaSelector"},
            node_options={node: {"broker.rack": f"rack-{node}"} for node in (1, 2, 3)},
        )
        create_topic(cluster, TOPIC, [[1, 2]])
        send(cluster, TOPIC, numbers(0, 5))
        await_in_sync(cluster.nodes[3].port, TOPIC, [1, 2])
        return cluster

    cluster = await asyncio.to_thread(make)
    async with Consumer(
        bootstrap_servers=cluster.bootstrap_servers, auto_offset_reset="earliest", client_rack="rack-2"
    ) as consuming:
        consuming.assign([T0])
        assert await read(consuming, 5) == list(enumerate(numbers(0, 5)))
        state = consuming._subscription.assigned[T0]
        assert state.read_replica == 2
        await asyncio.to_thread(send, cluster, TOPIC, numbers(5, 10))
        assert await read(consuming, 5) == list(enumerate(numbers(5, 10), start=5))
        assert state.read_replica == 2
        await asyncio.to_thread(cluster.kill, 2)
        await asyncio.to_thread(send, cluster, TOPIC, numbers(10, 15))
        assert await read(consuming, 5) == list(enumerate(numbers(10, 15), start=10))
        assert state.read_replica == -1
