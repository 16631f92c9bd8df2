"""Groups of a cluster: each has its coordinator, all are seen from anywhere, and outlive the broker that led them."""

from __future__ import annotations

import asyncio
import time

import pytest

from tests.cluster.conftest import NewCluster
from tidelog.client import Admin, NewTopic, Producer, TopicPartition
from tidelog.client.groups.model import PartitionLag

pytestmark = pytest.mark.slow

GROUPS = [f"group-{number}" for number in range(12)]
FIRST = TopicPartition("flights", 0)


async def test_groups_are_administered_wherever_they_are(new_cluster: NewCluster) -> None:
    cluster = new_cluster(options={"offsets.topic.replication.factor": "3", "num.partitions": "3"})
    async with Admin(bootstrap_servers=cluster.bootstrap_servers) as admin:
        await admin.create_topics([NewTopic("flights", 3, 3)])
        now_ms = time.time_ns() // 1_000_000
        async with Producer(bootstrap_servers=cluster.bootstrap_servers) as producer:
            for age_ms in (9000, 5000, 1000):
                await producer.send_and_wait("flights", b"x", partition=0, timestamp_ms=now_ms - age_ms)
        for number, group in enumerate(GROUPS):
            await admin.alter_group_offsets(group, {FIRST: number % 4})
        assert [each.group_id for each in await admin.list_groups()] == sorted(GROUPS)
        described = await admin.describe_groups(GROUPS)
        coordinators = {each.coordinator.node_id for each in described.values() if each.coordinator is not None}
        assert coordinators == {1, 2, 3}
        lags = [(await admin.group_lag(group, times=True))[FIRST] for group in GROUPS[:4]]
        times_ms = [now_ms - 9000, now_ms - 5000, now_ms - 1000, None]
        assert lags == [PartitionLag(number, 3, time_ms) for number, time_ms in enumerate(times_ms)]

        lost = described[GROUPS[0]].coordinator
        assert lost is not None
        cluster.kill(lost.node_id)
        deadline = time.monotonic() + 120
        while lost.node_id in {each.node_id for each in (await admin.describe_cluster()).nodes}:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.2)
        again = await admin.describe_groups(GROUPS)
        assert {each.state for each in again.values()} == {"Empty"}
        assert lost not in {each.coordinator for each in again.values()}
        assert [each.group_id for each in await admin.list_groups()] == sorted(GROUPS)
        assert await admin.delete_groups(GROUPS[:6]) == dict.fromkeys(GROUPS[:6])
        assert [each.group_id for each in await admin.list_groups()] == sorted(GROUPS[6:])
