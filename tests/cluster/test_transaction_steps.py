"""The coordinator of a transaction dies after each of its steps, real processes throughout.

Whatever the last step was, the transaction ends as its client wants: all of it is read and the group's offset moves,
or none of it; and no partition's last stable offset stays behind. One of its partitions lies on broker 4 alone, which
is dead where a marker must wait; brokers 1 to 3 hold the log of the transactions.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable

import pytest

from tests.cluster.asking import SAFE_DOWNGRADE, await_healthy, create_topic, set_feature
from tests.cluster.conftest import NewCluster
from tests.cluster.test_transactions_failover import coordinator_of
from tests.patience import PATIENCE_S
from tidelog.broker.coordinators.group.service import java_hash
from tidelog.client import Admin, Consumer, Producer, TopicPartition
from tidelog.protocol.errors import KafkaError
from tidelog.testing.cluster import EmbeddedCluster

pytestmark = pytest.mark.hunt

LONELY = 4
HERE, THERE = TopicPartition("here", 0), TopicPartition("there", 0)
OPTIONS = {
    "transaction.state.log.num.partitions": "8",
    "transaction.state.log.replication.factor": "3",
    "transaction.state.log.min.isr": "2",
}
QUICK = {"request_timeout_ms": 3_000, "retry_backoff_ms": 20, "retry_backoff_max_ms": 200, "linger_ms": 0}
TOPICS = (HERE.topic, THERE.topic, "__transaction_state", "__consumer_offsets")
STEPS = ("init", "send", "offsets", "prepared", "ended")


async def eventually(condition: Callable[[], Awaitable[bool]], what: str) -> None:
    async with asyncio.timeout(2 * PATIENCE_S):
        while True:
            try:
                if await condition():
                    return
            except KafkaError:
                pass  # a leader is being elected
            await asyncio.sleep(0.05)


async def away_from_the_lonely(cluster: EmbeddedCluster, admin: Admin, prefix: str) -> str:
    """A transactional id whose transactions are not logged on broker 4."""
    for number in itertools.count():
        name = f"{prefix}-{number}"
        await coordinator_of(cluster.bootstrap_servers, name)  # creates the log of transactions
        topic = (await admin.describe_topics(["__transaction_state"]))["__transaction_state"]
        index = abs(java_hash(name)) % len(topic.partitions)
        if any(one.partition == index and LONELY not in one.replicas for one in topic.partitions):
            return name
    raise AssertionError


class Case:
    """One transaction whose coordinator dies after a step."""

    def __init__(self, cluster: EmbeddedCluster, admin: Admin, name: str, step: str, commits: bool) -> None:
        self.cluster, self.admin, self.name, self.step, self.commits = cluster, admin, name, step, commits
        self.group = f"group-{name}"

    async def run(self) -> int:
        """The broker that was killed."""
        async with Producer(
            bootstrap_servers=self.cluster.bootstrap_servers, transactional_id=self.name, **QUICK
        ) as producer:
            victim = 0
            for step in STEPS:
                await self.take(step, producer)
                if step == self.step:
                    victim = await coordinator_of(self.cluster.bootstrap_servers, self.name)
                    assert victim != LONELY
                    await asyncio.to_thread(self.cluster.kill, victim)
                    if step == "prepared":
                        await asyncio.to_thread(self.cluster.restart, LONELY)
        return victim

    async def take(self, step: str, producer: Producer) -> None:
        if step == "init":
            await producer.init_transactions()
            await producer.begin_transaction()
        elif step == "send":
            for partition in (HERE, THERE):
                await producer.send_and_wait(partition.topic, self.name.encode(), partition=0)
        elif step == "offsets":
            await producer.send_offsets_to_transaction({HERE: 7}, self.group)
        elif step == "prepared":
            if step == self.step:
                await asyncio.to_thread(self.cluster.kill, LONELY)
            await (producer.commit_transaction() if self.commits else producer.abort_transaction())
            if step == self.step:
                await eventually(lambda: self.is_stable(HERE), "the marker is written where it can be")
        else:
            await eventually(self.is_over, "the transaction ends")

    async def is_stable(self, *partitions: TopicPartition) -> bool:
        """Whether readers of committed records get to the end of these."""
        latest: dict[TopicPartition, int | str] = dict.fromkeys(partitions, "latest")
        return await self.admin.list_offsets(latest, isolation_level="read_committed") == (
            await self.admin.list_offsets(latest)
        )

    async def is_over(self) -> bool:
        """The coordinator has forgotten the transaction's partitions, and each of them has its marker."""
        described = (await self.admin.describe_transactions([self.name]))[self.name]
        return described.state == ("CompleteCommit" if self.commits else "CompleteAbort") and (
            await self.is_stable(HERE, THERE)
        )

    async def check(self) -> None:
        await eventually(self.is_over, "no transaction holds readers back")
        for partition in (HERE, THERE):
            values = await read(self.cluster, partition)
            assert values.count(self.name.encode()) == self.commits, (self.name, partition, values)

        async def is_known() -> bool:
            offsets = await self.admin.list_group_offsets(self.group, require_stable=True)
            return {where: each.offset for where, each in offsets.items()} == ({HERE: 7} if self.commits else {})

        await eventually(is_known, f"the offset of {self.group}")


async def read(cluster: EmbeddedCluster, partition: TopicPartition) -> list[bytes | None]:
    async with Consumer(
        bootstrap_servers=cluster.bootstrap_servers, isolation_level="read_committed", auto_offset_reset="earliest"
    ) as consumer:
        consumer.assign([partition])
        values: list[bytes | None] = []
        end = (await consumer.end_offsets([partition]))[partition]
        async with asyncio.timeout(2 * PATIENCE_S):
            while await consumer.position(partition) < end:
                values += [record.value for record in (await consumer.poll(200)).get(partition, ())]
    return values


@pytest.fixture
async def cluster(new_cluster: NewCluster) -> EmbeddedCluster:
    running = await asyncio.to_thread(new_cluster, 4, options=OPTIONS)
    create_topic(running, HERE.topic, [[1, 2, 3]])
    create_topic(running, THERE.topic, [[LONELY]])
    return running


@pytest.mark.parametrize("version", [2, 1])
async def test_a_coordinator_that_dies_after_any_step_loses_nothing(cluster: EmbeddedCluster, version: int) -> None:
    if version == 1:
        await asyncio.to_thread(set_feature, cluster, "transaction.version", 1, SAFE_DOWNGRADE)
    async with Admin(bootstrap_servers=cluster.bootstrap_servers) as admin:
        for step, commits in itertools.product(STEPS, (True, False)):
            name = await away_from_the_lonely(cluster, admin, f"{step}-{commits}")
            case = Case(cluster, admin, name, step, commits)
            victim = await case.run()
            await case.check()
            await asyncio.to_thread(cluster.restart, victim)
            await asyncio.to_thread(await_healthy, cluster, TOPICS)
            await case.check()
