"""The Python consumer in groups of the consumer protocol (KIP-848), on Kafka 4.3 itself; Tidelog has none yet."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import Any

import pytest

from tests.compatibility.wire import Wire
from tests.patience import PATIENCE_S
from tidelog import Admin, Consumer, KafkaError, Producer, TopicPartition
from tidelog.protocol.errors import ErrorCode
from tidelog.testing.processes import ServerProcess, TidelogProcess

RECORDS = 400
_numbers = itertools.count(1)


@pytest.fixture
def kafka(server: ServerProcess) -> ServerProcess:
    if isinstance(server, TidelogProcess):
        pytest.skip("Tidelog does not serve the consumer protocol yet")
    return server


@pytest.fixture
async def topic(kafka: ServerProcess, new_topic: Callable[..., str]) -> str:
    name = new_topic(4)
    async with Producer(bootstrap_servers=kafka.bootstrap_servers) as producer:
        for number in range(RECORDS):
            await producer.send(name, b"%d" % number, partition=number % 4)
    return name


def consumer(server: ServerProcess, *topics: str, group: str, **options: Any) -> Consumer:
    options = {"group_protocol": "consumer", "auto_offset_reset": "earliest", **options}
    return Consumer(*topics, bootstrap_servers=server.bootstrap_servers, group_id=group, **options)


async def poll_until(condition: Callable[[], Any], *members: Consumer) -> list[bytes]:
    """The values that were read until the condition was true."""
    values: list[bytes] = []
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            for member in members:
                for records in (await member.poll(20)).values():
                    values += [record.value or b"" for record in records]
    return values


async def test_members_come_and_go_and_each_record_is_read_once(kafka: ServerProcess, topic: str) -> None:
    group, values = f"consumer-{next(_numbers)}", []
    async with consumer(kafka, topic, group=group, group_remote_assignor="uniform") as first:
        values += await poll_until(lambda: len(first.assignment()) == 4, first)
        async with consumer(kafka, topic, group=group) as second:
            values += await poll_until(lambda: len(first.assignment()) == len(second.assignment()) == 2, first, second)
            with Wire(kafka.port) as wire:
                (described,) = wire.ask("consumer_group_describe", 1, group_ids=[group]).groups
            assert (described.group_state, len(described.members)) == ("Stable", 2)
            await first.commit()
            await second.commit()
        values += await poll_until(lambda: len(first.assignment()) == 4, first)
        async with asyncio.timeout(PATIENCE_S):
            while len(values) < RECORDS:
                values += [record.value or b"" for records in (await first.poll(100)).values() for record in records]
        await first.commit()
        committed = await first.committed(*(TopicPartition(topic, number) for number in range(4)))
        assert [offset.offset for offset in committed.values() if offset is not None] == [100] * 4
    assert sorted(values, key=int) == [b"%d" % number for number in range(RECORDS)]


async def test_kafka_evaluates_a_pattern(kafka: ServerProcess, topic: str) -> None:
    async with consumer(kafka, group=f"consumer-{next(_numbers)}") as reading:
        reading.subscribe(pattern=f"{topic[:-1]}[{topic[-1]}]")
        await poll_until(lambda: len(reading.assignment()) == 4, reading)
        assert reading.subscription() == {topic}
        reading.subscribe(pattern="(?=lookahead)")
        with pytest.raises(KafkaError) as caught:
            await poll_until(lambda: False, reading)
        assert caught.value.code is ErrorCode.INVALID_REGULAR_EXPRESSION


async def test_a_static_member_returns_to_its_partitions(kafka: ServerProcess, topic: str) -> None:
    group = f"consumer-{next(_numbers)}"
    async with consumer(kafka, topic, group=group) as other:
        async with consumer(kafka, topic, group=group, group_instance_id="i") as reading:
            await poll_until(lambda: len(other.assignment()) == len(reading.assignment()) == 2, other, reading)
            before = reading.assignment()
            async with consumer(kafka, topic, group=group, group_instance_id="i") as twin:
                with pytest.raises(KafkaError) as caught:
                    await poll_until(lambda: False, twin)
                assert caught.value.code is ErrorCode.UNRELEASED_INSTANCE_ID
        async with consumer(kafka, topic, group=group, group_instance_id="i") as returned:
            await poll_until(lambda: len(returned.assignment()) == 2, returned, other)
            assert returned.assignment() == before
            assert len(other.assignment()) == 2


async def test_members_of_both_protocols_share_a_group(kafka: ServerProcess, topic: str) -> None:
    """The group of classic members changes over to the new protocol while it works."""
    group = f"consumer-{next(_numbers)}"
    old = Consumer(
        topic, bootstrap_servers=kafka.bootstrap_servers, group_id=group, auto_offset_reset="earliest",
        heartbeat_interval_ms=500, partition_assignment_strategy="cooperative-sticky",
    )  # fmt: skip
    async with old:
        values = await poll_until(lambda: len(old.assignment()) == 4, old)
        async with consumer(kafka, topic, group=group) as new:
            values += await poll_until(lambda: len(old.assignment()) == len(new.assignment()) == 2, old, new)
            async with asyncio.timeout(PATIENCE_S):
                while len(set(values)) < RECORDS:
                    for member in (old, new):
                        polled = await member.poll(50)
                        values += [record.value or b"" for records in polled.values() for record in records]
    assert set(values) == {b"%d" % number for number in range(RECORDS)}


async def test_a_group_is_described_with_its_members(kafka: ServerProcess, topic: str) -> None:
    group = f"consumer-{next(_numbers)}"
    async with Admin(bootstrap_servers=kafka.bootstrap_servers) as admin:
        async with consumer(kafka, topic, group=group) as reading:
            await poll_until(lambda: len(reading.assignment()) == 4, reading)
            described = (await admin.describe_groups([group]))[group]
            assert (described.protocol_type, described.protocol) == ("consumer", "uniform")
            (member,) = described.members
            assert member.topics == (topic,)
            assert set(member.assignment) == reading.assignment()
        assert (await admin.describe_groups([group]))[group].members == ()


async def test_tidelog_says_that_it_does_not_serve_it(server: ServerProcess, new_topic: Callable[..., str]) -> None:
    if not isinstance(server, TidelogProcess):
        pytest.skip("Kafka serves it")
    async with consumer(server, new_topic(), group="none") as reading:
        with pytest.raises(KafkaError, match="use 'classic'"):
            await poll_until(lambda: False, reading)
