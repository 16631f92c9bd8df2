"""A transactional producer while the coordinator of its id and the leaders of its partitions are killed.

What a commit returned for is read once and in order; what was aborted is never read. A commit whose outcome the client
does not know may be read or not, but whole.
"""

from __future__ import annotations

import asyncio

import pytest

from tests.cluster.asking import await_healthy, create_topic, rotated
from tests.cluster.conftest import NewCluster
from tests.patience import PATIENCE_S
from tidelog.client import Admin, Consumer, Producer, TopicPartition, TransactionAbortable, TransactionTimeout
from tidelog.client.network.cluster import Cluster
from tidelog.testing.cluster import EmbeddedCluster

pytestmark = pytest.mark.slow

PARTITIONS = 3
KILLS = 3
OPTIONS = {
    "transaction.state.log.num.partitions": "3",
    "transaction.state.log.replication.factor": "3",
    "transaction.state.log.min.isr": "2",
}
QUICK = {
    "request_timeout_ms": 3_000,
    "retry_backoff_ms": 20,
    "retry_backoff_max_ms": 200,
    "delivery_timeout_ms": 60_000,
}


class Outcomes:
    """The transactions of one producer, one record of each in every partition."""

    def __init__(self) -> None:
        self.committed: list[int] = []
        self.aborted: set[int] = set()
        self.unknown: set[int] = set()


async def run_transactions(producer: Producer, topic: str, outcomes: Outcomes, is_over: asyncio.Event) -> None:
    number = 0
    while not is_over.is_set() or not number or number - 1 not in outcomes.committed:
        number += 1
        try:
            if number % 4:
                async with producer.transaction():
                    for partition in range(PARTITIONS):
                        await producer.send(topic, b"%d" % number, partition=partition)
                outcomes.committed.append(number)
            else:
                outcomes.aborted.add(number)
                await producer.begin_transaction()
                for partition in range(PARTITIONS):
                    await producer.send(topic, b"%d" % number, partition=partition)
                await producer.flush()
                await producer.abort_transaction()
        except TransactionAbortable:
            outcomes.aborted.add(number)
            if number % 4 == 0:
                await producer.abort_transaction()
        except TransactionTimeout:
            outcomes.unknown.add(number)


async def coordinator_of(bootstrap: str, name: str) -> int:
    producer = Producer(bootstrap_servers=bootstrap)
    cluster = Cluster(producer._config)
    await cluster.start()
    try:
        return await cluster.find_coordinator(name, 1)
    finally:
        await cluster.close()


async def strike(cluster: EmbeddedCluster, name: str, outcomes: Outcomes, topic: str) -> None:
    for kill in range(KILLS):
        count = len(outcomes.committed)
        async with asyncio.timeout(2 * PATIENCE_S):
            while len(outcomes.committed) < count + 5:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        if kill % 2 == 0:
            victim = await coordinator_of(cluster.bootstrap_servers, name)
        else:
            async with Admin(bootstrap_servers=cluster.bootstrap_servers) as admin:
                victim = (await admin.describe_topics([topic]))[topic].partitions[0].leader or 0
        await asyncio.to_thread(cluster.kill, victim)
        count = len(outcomes.committed)
        async with asyncio.timeout(2 * PATIENCE_S):
            while len(outcomes.committed) < count + 3:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        await asyncio.to_thread(cluster.restart, victim)
        await asyncio.to_thread(await_healthy, cluster, [topic])


async def read_committed(bootstrap: str, topic: str) -> list[list[int]]:
    values: list[list[int]] = [[] for _ in range(PARTITIONS)]
    partitions = [TopicPartition(topic, number) for number in range(PARTITIONS)]
    async with (
        Admin(bootstrap_servers=bootstrap) as admin,
        Consumer(bootstrap_servers=bootstrap, isolation_level="read_committed", auto_offset_reset="earliest") as reader,
    ):
        ends = await admin.list_offsets(dict.fromkeys(partitions, "latest"))
        reader.assign(partitions)
        async with asyncio.timeout(2 * PATIENCE_S):
            while any([await reader.position(each) < (ends[each] or (0,))[0] for each in partitions]):
                for partition, records in (await reader.poll(200)).items():
                    values[partition.partition] += [int(record.value or b"-1") for record in records]
    return values


async def test_commits_survive_the_death_of_the_coordinator_and_of_leaders(new_cluster: NewCluster) -> None:
    cluster = await asyncio.to_thread(new_cluster, 3, options=OPTIONS)
    topic, name = "torn", "survivor"
    create_topic(cluster, topic, rotated([*cluster.broker_ids], PARTITIONS, 3), {"min.insync.replicas": "2"})
    outcomes, is_over = Outcomes(), asyncio.Event()
    async with Producer(
        bootstrap_servers=cluster.bootstrap_servers, transactional_id=name, linger_ms=0, **QUICK
    ) as producer:
        running = asyncio.create_task(run_transactions(producer, topic, outcomes, is_over))
        striking = asyncio.create_task(strike(cluster, name, outcomes, topic))
        done, _ = await asyncio.wait([running, striking], return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
        is_over.set()
        async with asyncio.timeout(2 * PATIENCE_S):
            await running
    values = await read_committed(cluster.bootstrap_servers, topic)
    for seen in values:
        assert seen == sorted(set(seen)), "a record is there twice, or out of order"
        assert set(outcomes.committed) <= set(seen)
        assert set(seen) <= {*outcomes.committed, *outcomes.unknown}
    assert values[0] == values[1] == values[2], "a transaction is torn"
    assert outcomes.aborted
