"""Calls of a consumer that are cancelled at any moment: no record is lost, none comes twice, and nothing is left."""

from __future__ import annotations

import asyncio
import random

import pytest

from tests.patience import PATIENCE_S, until
from tests.unit.client.fake_broker import DROP, FakeCluster
from tests.unit.client.test_consumer import T0, T1, consumer, fill
from tests.unit.client.test_starts_and_ends import tasks_of_clients
from tidelog.client import Consumer, ConsumerRecord
from tidelog.protocol.errors import KafkaError
from tidelog.protocol.messages.fetch import FetchRequest

RECORDS = 60


class Reader:
    """Reads by calls chosen by chance, and checks that each record is the next one of its partition."""

    def __init__(self, consuming: Consumer, chance: random.Random) -> None:
        self._consuming, self._chance = consuming, chance
        self.next = {T0: 0, T1: 0}

    def take(self, records: list[ConsumerRecord]) -> None:
        for record in records:
            partition = T0 if record.partition == 0 else T1
            assert record.offset == self.next[partition]
            self.next[partition] += 1

    async def step(self) -> None:
        consuming, chance = self._consuming, self._chance
        kind = chance.choice(["poll", "poll", "records", "batches", "position", "seek", "pause"])
        if kind == "poll":
            for records in (await consuming.poll(chance.choice([0, 20]), chance.choice([None, 1, 7]))).values():
                self.take(records)
        elif kind == "records":
            count = chance.randrange(1, 20)
            async for record in consuming:
                self.take([record])
                count -= 1
                if not count:
                    break
        elif kind == "batches":
            async for batch in consuming.batches(chance.choice([None, 3])):
                for records in batch.values():
                    self.take(records)
                break
        else:
            partition = chance.choice([T0, T1])
            if kind == "position":
                assert await consuming.position(partition) == self.next[partition]
            elif kind == "seek":
                offset = chance.randrange(max(0, self.next[partition] - 5), self.next[partition] + 1)
                consuming.seek(partition, offset)
                self.next[partition] = offset
            else:
                consuming.pause(partition)
                await asyncio.sleep(0)
                consuming.resume(partition)

    async def cancelled_step(self) -> None:
        """A step that ends after some passes of the loop or some time, or is left alone."""
        try:
            async with asyncio.timeout(self._chance.choice([0, 0, 0.0005, 0.002, 0.01])):
                await self.step()
        except (TimeoutError, KafkaError):
            pass


@pytest.mark.parametrize("seed", range(15))
async def test_calls_that_are_cancelled_at_any_moment_lose_no_record_and_return_none_twice(seed):
    chance = random.Random(seed)
    async with FakeCluster(nodes=2, t=2) as cluster:
        for number in (0, 1):
            fill(cluster, "t", number, RECORDS, per_batch=chance.choice([1, 7, RECORDS]))
        consuming = consumer(cluster)
        consuming.assign([T0, T1])
        reader = Reader(consuming, chance)
        async with asyncio.timeout(PATIENCE_S):
            for _ in range(150):
                if chance.random() < 0.05:
                    cluster.script(FetchRequest, lambda request, node: DROP)
                await reader.cancelled_step()
            consuming.resume(T0, T1)
            while set(reader.next.values()) != {RECORDS}:
                for records in (await consuming.poll(100)).values():
                    reader.take(records)
            await consuming.close()
        assert not tasks_of_clients()
        await until(lambda: all(node.connections == 0 for node in cluster.nodes.values()))
