"""Leaders and replicas that move: preferred election by hand and by itself, a replica list that grows and shrinks."""

from __future__ import annotations

import time
from typing import Any

import pytest

from tests.cluster.asking import (
    admin_client,
    await_equal_replicas,
    await_healthy,
    await_in_sync,
    await_partition,
    confluent,
    create_topic,
    read,
    rotated,
    send,
)
from tests.cluster.conftest import NewCluster
from tests.compatibility.wire import Wire
from tidelog.bench.metadata import ask
from tidelog.testing.cluster import EmbeddedCluster

pytestmark = pytest.mark.slow

TOPIC, PARTITIONS = "elected", 6


def table(cluster: EmbeddedCluster, node: int = 2) -> dict[int, int]:
    """Partition -> leader, as a broker sees it."""
    return {index: state.leader for index, state in ask(cluster.nodes[node].port, [TOPIC]).topics[TOPIC].items()}


def displaced(new_cluster: NewCluster, **options: str) -> tuple[EmbeddedCluster, dict[int, int]]:
    """A cluster whose broker 1 was away and leads nothing any more; and the table from before."""
    cluster = new_cluster(3, controllers=1, options=options)
    create_topic(cluster, TOPIC, rotated([1, 2, 3], PARTITIONS, 3))
    before = table(cluster)
    assert before == {partition: 1 + partition % 3 for partition in range(PARTITIONS)}
    cluster.kill(1)
    for partition in range(PARTITIONS):
        await_partition(
            cluster.nodes[2].port, TOPIC, lambda state: state.leader in (2, 3), "another leader", partition=partition
        )
    cluster.restart(1)
    return cluster, before


def await_table(cluster: EmbeddedCluster, wanted: dict[int, int], timeout_s: float = 60) -> None:
    deadline = time.monotonic() + timeout_s
    while table(cluster) != wanted:
        assert time.monotonic() < deadline, table(cluster)
        time.sleep(0.05)


@pytest.mark.parametrize("how", ["all", "list"])
def test_preferred_leaders_by_hand(new_cluster: NewCluster, how: str):
    cluster, before = displaced(new_cluster, **{"auto.leader.rebalance.enable": "false"})
    await_healthy(cluster, [TOPIC])
    assert 1 not in table(cluster).values()
    partitions = [confluent.TopicPartition(TOPIC, index) for index in (0, 3)] if how == "list" else None
    election: Any = confluent.ElectionType.PREFERRED
    client = admin_client(cluster)
    client.elect_leaders(election, partitions).result(60)
    await_table(cluster, before)


def test_preferred_leaders_by_itself(new_cluster: NewCluster):
    swift = {"auto.leader.rebalance.enable": "true", "leader.imbalance.check.interval.seconds": "1"}
    cluster, before = displaced(new_cluster, **swift)
    await_table(cluster, before, timeout_s=60)


def reassign(cluster: EmbeddedCluster, replicas: list[int] | None) -> None:
    with Wire(cluster.nodes[2].port) as wire:
        partitions = [{"partition_index": 0, "replicas": replicas}]
        answer = wire.ask("alter_partition_reassignments", 0, topics=[{"name": TOPIC, "partitions": partitions}])
        assert answer.error_code == 0, answer
        assert answer.responses[0].partitions[0].error_code == 0, answer


def test_a_replica_list_that_grows_and_then_moves(new_cluster: NewCluster):
    cluster = new_cluster(3, controllers=1)
    create_topic(cluster, TOPIC, [[1]])
    values = [b"%d" % number * 100 for number in range(500)]
    send(cluster, TOPIC, values)
    reassign(cluster, [1, 2, 3])
    await_in_sync(cluster.nodes[2].port, TOPIC, [1, 2, 3])
    grown = ask(cluster.nodes[2].port, [TOPIC]).topics[TOPIC][0]
    assert grown.replicas == (1, 2, 3)
    assert grown.leader == 1
    await_equal_replicas(cluster, TOPIC, 0, [1, 2, 3])
    reassign(cluster, [3])
    moved = await_partition(
        cluster.nodes[2].port, TOPIC, lambda state: state.replicas == (3,) and state.leader == 3, "only 3 is left"
    )
    assert moved.in_sync == (3,)
    assert read(cluster, TOPIC, 500) == values
    send(cluster, TOPIC, [b"after"])
