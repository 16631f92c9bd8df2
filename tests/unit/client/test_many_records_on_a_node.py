"""Calls that send many records, against a real node: bytes that the broker checks, read back by a consumer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tidelog import Admin, Consumer, NewTopic, Producer, ProducerRecord
from tidelog.client import sync
from tidelog.client.assignment.partitioner import positive_hash
from tidelog.testing.embedded import EmbeddedBroker

PARTITIONS = 3


@pytest.fixture
def brokers() -> Iterator[str]:
    with EmbeddedBroker() as broker:
        yield broker.bootstrap_servers


async def create_topic(brokers: str) -> None:
    async with Admin(bootstrap_servers=brokers) as admin:
        await admin.create_topics([NewTopic("t", num_partitions=PARTITIONS)])


async def read(brokers: str, count: int, **options: Any) -> list[Any]:
    records: list[Any] = []
    async with Consumer("t", bootstrap_servers=brokers, auto_offset_reset="earliest", **options) as consumer:
        while len(records) < count:
            records += [each for batch in (await consumer.poll(1000, max_records=10_000)).values() for each in batch]
    return records


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"compression_type": "zstd"}, {"transactional_id": "x"}, {"acks": "1"}])
async def test_a_table_is_in_the_log_as_it_was(brokers: str, options: dict[str, Any]) -> None:
    pa = pytest.importorskip("pyarrow")
    await create_topic(brokers)
    count = 5_000
    table = pa.table(
        {
            "key": [None if n % 5 == 0 else b"k%d" % (n % 97) for n in range(count)],
            "value": [b"v%d" % n for n in range(count)],
            "timestamp": [1_700_000_000_000 + n for n in range(count)],
        }
    )
    async with Producer(bootstrap_servers=brokers, **options) as producer:
        if "transactional_id" in options:
            async with producer.transaction():
                outcome = await producer.send_arrow("t", table)
        else:
            outcome = await producer.send_arrow("t", table)
        written = await outcome
    assert sum(each.record_count for each in written) == count
    records = await read(brokers, count, isolation_level="read_committed")
    assert sorted((each.value, each.key, each.timestamp_ms) for each in records) == sorted(
        zip(table["value"].to_pylist(), table["key"].to_pylist(), table["timestamp"].to_pylist())
    )
    assert all(each.partition == positive_hash(each.key) % PARTITIONS for each in records if each.key is not None)
    for partition in range(PARTITIONS):
        numbers = [int(each.value[1:]) for each in records if each.partition == partition]
        assert numbers == sorted(numbers)


@pytest.mark.slow
async def test_the_blocking_producer_sends_many_after_its_records(brokers: str) -> None:
    pa = pytest.importorskip("pyarrow")
    await create_topic(brokers)
    with sync.Producer(bootstrap_servers=brokers) as producer:
        for number in range(100):
            producer.send("t", b"%d" % number, partition=0)
        table = pa.table({"value": [b"%d" % (100 + number) for number in range(100)], "partition": [0] * 100})
        outcome = producer.send_arrow("t", table)
        assert outcome.result() == [("t", 0, 100, 100)]
        assert producer.send_many("t", [ProducerRecord(b"200", partition=0)] * 3).result() == [("t", 0, 200, 3)]
        assert producer.send_batch("t", [b"200"] * 2, partition=0).result() == ("t", 0, 203, 2)
        with pytest.raises(TypeError, match="value must be bytes"):
            producer.send_many("t", [17])
        with pytest.raises(ValueError, match="no column"):
            producer.send_arrow("t", pa.table({"valeu": [b"x"]}))
    expected = [*(b"%d" % number for number in range(200)), *[b"200"] * 5]
    assert [each.value for each in await read(brokers, 205)] == expected
