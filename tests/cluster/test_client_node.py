"""Our client against real nodes, and in one group with librdkafka; `make compat` runs it against Kafka as well."""

from __future__ import annotations

import asyncio
import itertools
import os
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from tidelog.bench import peers
from tidelog.client import (
    Admin,
    Consumer,
    NewTopic,
    OffsetAndMetadata,
    OffsetAndTimestamp,
    Producer,
    ProducerInterceptor,
    ProducerRecord,
    TopicPartition,
    sync,
)
from tidelog.client.config import ClientConfig
from tidelog.client.network.cluster import Cluster
from tidelog.client.network.raw_fetch import fetch_raw
from tidelog.protocol.batches.records import iter_records
from tidelog.protocol.errors import ErrorCode, KafkaError
from tidelog.testing.processes import ServerProcess, TidelogProcess

pytestmark = pytest.mark.slow

OPTIONS = {
    "group.initial.rebalance.delay.ms": "0",
    "offsets.topic.num.partitions": "3",
    "log.flush.interval.messages": "1",
}
START_TIMEOUT_S = 300.0
"""Kafka needs a minute and more to come back on a machine that does much else."""
_topics = itertools.count()


@pytest.fixture(scope="module", params=["tidelog", "kafka"])
def node(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    directory = tmp_path_factory.mktemp(request.param)
    if request.param == "tidelog":
        with TidelogProcess(directory, options=OPTIONS) as tidelog:
            yield tidelog
        return
    if not os.environ.get("TIDELOG_COMPAT_KAFKA"):
        pytest.skip("set TIDELOG_COMPAT_KAFKA=1 to run against Kafka too")
    if (reason := peers.why_unavailable()) is not None:
        pytest.skip(reason)
    with peers.KafkaProcess(directory, options=OPTIONS, heap="512m") as kafka:
        yield kafka


async def make_topic(node: ServerProcess, partitions: int = 1, **configs: str) -> str:
    name = f"topic-{next(_topics)}"
    async with Admin(bootstrap_servers=node.bootstrap_servers) as admin:
        configs = {key.replace("_", "."): value for key, value in configs.items()}
        await admin.create_topics([NewTopic(name, partitions, 1, configs)])
    return name


async def read_all(node: ServerProcess, topic: str, count: int, **options: Any) -> list[Any]:
    found: list[Any] = []
    options = {"auto_offset_reset": "earliest", **options}
    async with Consumer(topic, bootstrap_servers=node.bootstrap_servers, **options) as consumer, asyncio.timeout(120):
        while len(found) < count:
            for records in (await consumer.poll(1000)).values():
                found.extend(records)
    return found


@pytest.mark.parametrize("codec", ["none", "gzip", "snappy", "lz4", "zstd"])
async def test_records_come_back_as_they_went(node, codec):
    topic = await make_topic(node, 3)
    async with Producer(bootstrap_servers=node.bootstrap_servers, compression_type=codec) as producer:
        for number in range(3_000):
            key = None if number % 7 == 0 else b"k%d" % (number % 50)
            value = None if number % 11 == 0 else b"%d" % number * 20
            await producer.send(
                topic, value, key, headers=[("n", b"%d" % number), ("nil", None)], timestamp_ms=10_000 + number
            )
    records = await read_all(node, topic, 3_000)
    numbers = [record.timestamp_ms - 10_000 for record in records]
    assert sorted(numbers) == list(range(3_000))
    for record, number in zip(records, numbers):
        assert record.key == (None if number % 7 == 0 else b"k%d" % (number % 50))
        assert record.value == (None if number % 11 == 0 else b"%d" % number * 20)
        assert record.headers == (("n", b"%d" % number), ("nil", None))
    by_key: dict[bytes, list[int]] = {}
    for record, number in zip(records, numbers):
        if record.key is not None:
            by_key.setdefault(record.key, []).append(number)
    assert all(of_key == sorted(of_key) for of_key in by_key.values()), "the order of a key"


@pytest.mark.parametrize("acks", ["0", "1", "all"])
async def test_every_level_of_acknowledgement(node, acks):
    topic = await make_topic(node)
    async with Producer(bootstrap_servers=node.bootstrap_servers, acks=acks, linger_ms=0) as producer:
        sent = [await producer.send_and_wait(topic, b"%d" % number) for number in range(20)]
    assert [each.offset for each in sent] == ([-1] * 20 if acks == "0" else list(range(20)))
    assert [record.value for record in await read_all(node, topic, 20)] == [b"%d" % number for number in range(20)]


async def test_nothing_is_lost_or_doubled_over_hard_kills(node):
    topic = await make_topic(node, 2)
    acknowledged: list[bytes] = []
    begun: asyncio.Future[Any]
    options = {"batch_size": 2_000, "linger_ms": 1, "request_timeout_ms": 3_000, "delivery_timeout_ms": 600_000}

    async with Producer(bootstrap_servers=node.bootstrap_servers, **options) as producer:

        async def send(first: int) -> None:
            pending = []
            for number in range(first, first + 20_000):
                value = b"%d" % number
                pending.append((value, await producer.send(topic, value, partition=number % 2)))
                if number == first:
                    pending[0][1].add_done_callback(begun.set_result)
            for value, future in pending:
                await future
                acknowledged.append(value)

        for first in (0, 20_000):
            begun = asyncio.get_running_loop().create_future()
            sending = asyncio.create_task(send(first))
            await begun
            node.kill()
            assert not sending.done(), "the kill comes while records are on their way"
            await asyncio.to_thread(node.start, START_TIMEOUT_S)
            await sending
    values = [record.value for record in await read_all(node, topic, 40_000)]
    assert len(acknowledged) == 40_000
    assert Counter(values) == Counter(acknowledged)
    for parity in range(2):
        numbers = [int(value) for value in values if int(value) % 2 == parity]
        assert numbers == sorted(numbers)


@pytest.mark.parametrize("strategy", ["range", "roundrobin", "sticky", "cooperative-sticky"])
async def test_a_group_shares_the_work_and_commits_it(node, strategy):
    topic = await make_topic(node, 4)
    group = f"group-{topic}"
    async with Producer(bootstrap_servers=node.bootstrap_servers) as producer:
        for number in range(4_000):
            await producer.send(topic, b"%d" % number, partition=number % 4)
    seen: Counter[bytes] = Counter()
    options = {
        "bootstrap_servers": node.bootstrap_servers,
        "group_id": group,
        "auto_offset_reset": "earliest",
        "partition_assignment_strategy": strategy,
        "heartbeat_interval_ms": 100,
        "max_poll_records": 50,
    }

    async def work(consumer: Consumer) -> None:
        for records in (await consumer.poll(100)).values():
            seen.update(record.value or b"" for record in records)

    async with asyncio.timeout(120), Consumer(topic, **options) as first:
        while not seen:
            await work(first)
        assert len(first.assignment()) == 4
        async with Consumer(topic, **options) as second:
            while len(second.assignment()) != 2 or len(first.assignment()) != 2:
                await asyncio.gather(work(first), work(second))
            await asyncio.gather(work(first), work(second))
        while len(first.assignment()) != 4 or len(seen) < 4_000:
            await work(first)
    assert set(seen.values()) == {1}, "clean hand-overs read nothing twice"
    async with Admin(bootstrap_servers=node.bootstrap_servers) as admin:
        committed = await admin.list_consumer_group_offsets(group)
    assert committed == {TopicPartition(topic, number): OffsetAndMetadata(1_000, "", 0) for number in range(4)}


async def test_a_group_goes_on_after_a_hard_kill_of_its_node(node):
    topic = await make_topic(node, 2)
    options = {
        "bootstrap_servers": node.bootstrap_servers,
        "group_id": f"survivor-{topic}",
        "auto_offset_reset": "earliest",
        "enable_auto_commit": False,
        "heartbeat_interval_ms": 100,
    }
    async with Producer(bootstrap_servers=node.bootstrap_servers) as producer, Consumer(topic, **options) as consumer:
        seen: Counter[bytes] = Counter()

        async def exchange(first: int) -> None:
            for number in range(first, first + 500):
                await producer.send(topic, b"%d" % number, partition=number % 2)
            await producer.flush()
            async with asyncio.timeout(120):
                while len(seen) < first + 500:
                    for records in (await consumer.poll(200)).values():
                        seen.update(record.value or b"" for record in records)
            await consumer.commit()

        await exchange(0)
        await asyncio.to_thread(node.kill)
        await asyncio.to_thread(node.start, START_TIMEOUT_S)
        await exchange(500)
    assert set(seen.values()) == {1}, "what was committed is not read again"


async def test_seeks_times_and_limits(node):
    topic = await make_topic(node, 1, max_message_bytes="2000")
    partition = TopicPartition(topic, 0)
    async with Producer(bootstrap_servers=node.bootstrap_servers, linger_ms=0) as producer:
        for number in range(100):
            await producer.send_and_wait(topic, b"%d" % number, timestamp_ms=50_000 + 10 * number)
        with pytest.raises(KafkaError) as caught:
            await producer.send_and_wait(topic, b"x" * 3_000)
        assert caught.value.code is ErrorCode.MESSAGE_TOO_LARGE
        assert (await producer.send_and_wait(topic, b"100", timestamp_ms=60_000)).offset == 100
    async with Consumer(bootstrap_servers=node.bootstrap_servers, group_id=f"g-{topic}") as consumer:
        consumer.assign([partition])
        found = await consumer.offsets_for_times({partition: 50_123})
        assert found == {partition: OffsetAndTimestamp(13, 50_130, 0)}
        assert await consumer.end_offsets([partition]) == {partition: 101}
        consumer.seek(partition, 13)
        async with asyncio.timeout(120):
            while not (records := (await consumer.poll(2_000)).get(partition)):
                pass  # a poll may end before the node answers
        record = records[0]
        assert record.value == b"13"
        await consumer.commit({partition: OffsetAndMetadata(14, "said")})
        assert await consumer.committed(partition) == {partition: OffsetAndMetadata(14, "said", -1)}


async def test_raw_batches_are_what_was_sent(node):
    topic = await make_topic(node)
    async with Producer(bootstrap_servers=node.bootstrap_servers, compression_type="lz4") as producer:
        for number in range(20_000):
            await producer.send(topic, b"%d" % number)
    cluster = Cluster(ClientConfig.from_options({"bootstrap_servers": node.bootstrap_servers}))
    await cluster.start()
    try:
        values = []
        async for chunk in fetch_raw(cluster, TopicPartition(topic, 0), 1_000, 19_000, chunk_bytes=20_000):
            values += [record.value for record in iter_records(chunk.data) if 1_000 <= record.offset < 19_000]
    finally:
        await cluster.close()
    assert values == [b"%d" % number for number in range(1_000, 19_000)]


def test_the_blocking_clients(node):
    options = {"bootstrap_servers": node.bootstrap_servers}
    with sync.Admin(**options) as admin:
        topic = f"blocking-{next(_topics)}"
        admin.create_topics([NewTopic(topic, 2, 1)])
        assert topic in admin.list_topics()
        assert admin.describe_configs(topics=[topic])[topic]["cleanup.policy"].value == "delete"
        assert len(admin.describe_cluster().nodes) == 1
        with sync.Producer(**options) as producer:
            futures = [producer.send(topic, b"%d" % number) for number in range(10_000)]
            producer.flush()
            assert all(future.result(0).offset >= 0 for future in futures)
        with sync.Consumer(topic, group_id=topic, auto_offset_reset="earliest", **options) as consumer:
            values = {int(record.value or b"") for record in itertools.islice(consumer, 10_000)}
        assert values == set(range(10_000))
        committed = admin.list_consumer_group_offsets(topic)
        assert sum(offset.offset for offset in committed.values()) == 10_000
        admin.delete_topics([topic])


@pytest.mark.parametrize("strategy", ["range", "roundrobin", "cooperative-sticky"])
async def test_one_group_with_librdkafka(node, strategy):
    confluent = pytest.importorskip("confluent_kafka", reason="confluent-kafka is not installed")
    topic = await make_topic(node, 4)
    theirs = confluent.Consumer(
        {
            "bootstrap.servers": node.bootstrap_servers,
            "group.id": f"mixed-{topic}",
            "auto.offset.reset": "earliest",
            "partition.assignment.strategy": strategy,
            "heartbeat.interval.ms": 100,
        }
    )
    theirs.subscribe([topic])
    seen: Counter[bytes] = Counter()

    def work_theirs() -> None:
        message = theirs.poll(0.05)
        if message is not None and message.error() is None:
            seen[message.value()] += 1

    ours = Consumer(
        topic,
        bootstrap_servers=node.bootstrap_servers,
        group_id=f"mixed-{topic}",
        auto_offset_reset="earliest",
        partition_assignment_strategy=strategy,
        heartbeat_interval_ms=100,
    )
    try:
        async with asyncio.timeout(120), ours:
            while len(ours.assignment()) != 2 or len(theirs.assignment()) != 2:
                await asyncio.gather(asyncio.to_thread(work_theirs), ours.poll(50))
            assert {part.partition for part in theirs.assignment()} | {
                part.partition for part in ours.assignment()
            } == {0, 1, 2, 3}
            async with Producer(bootstrap_servers=node.bootstrap_servers) as producer:
                for number in range(400):
                    await producer.send(topic, b"%d" % number, partition=number % 4)
            while len(seen) < 400:
                _, records = await asyncio.gather(asyncio.to_thread(work_theirs), ours.poll(20))
                for batch in records.values():
                    seen.update(record.value or b"" for record in batch)
        async with asyncio.timeout(120):
            while len(theirs.assignment()) != 4:
                await asyncio.to_thread(work_theirs)
    finally:
        await asyncio.to_thread(theirs.close)
    assert set(seen.values()) == {1}


async def test_committed_and_aborted_transactions(node):
    topic = await make_topic(node)
    copy = await make_topic(node)
    options = {"bootstrap_servers": node.bootstrap_servers}
    async with Producer(**options, transactional_id=f"id-{topic}") as producer:
        await producer.init_transactions()
        for is_committed in (True, False, True):
            await producer.begin_transaction()
            for number in range(10):
                await producer.send(topic, b"%d %d" % (is_committed, number))
            await producer.flush()  # an abort drops what is not sent
            await (producer.commit_transaction() if is_committed else producer.abort_transaction())
        committed = await read_all(node, topic, 20, isolation_level="read_committed")
        assert [record.value for record in committed] == [b"1 %d" % number for number in range(10)] * 2
        assert len(await read_all(node, topic, 30)) == 30
        async with Consumer(topic, **options, group_id=f"g-{topic}", auto_offset_reset="earliest",
                            isolation_level="read_committed", enable_auto_commit=False) as consumer:  # fmt: skip
            seen: list[Any] = []
            async with asyncio.timeout(120):
                while len(seen) < 20:
                    for records in (await consumer.poll(1000)).values():
                        seen += records
            async with producer.transaction():
                await producer.send_many(copy, [record.value for record in seen])
                offset = {TopicPartition(topic, 0): seen[-1].offset + 1}
                await producer.send_offsets_to_transaction(offset, consumer.group_metadata())
            [found] = (await consumer.committed(TopicPartition(topic, 0))).values()
            assert found is not None
            assert found.offset == seen[-1].offset + 1
    assert [record.value for record in await read_all(node, copy, 20, isolation_level="read_committed")] == [
        record.value for record in seen
    ]


async def test_tables_and_many_records_at_once(node):
    pa = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    pytest.importorskip("numba", reason="numba is not installed")
    topic = await make_topic(node)
    values = [b"%d" % number for number in range(3_000)]
    async with Producer(bootstrap_servers=node.bootstrap_servers) as producer:
        [written] = await (await producer.send_many(topic, values))
        assert (written.base_offset, written.record_count) == (0, 3_000)
        table = pa.table({"key": pa.array(values, pa.binary()), "value": pa.array(values, pa.binary())})
        await (await producer.send_arrow(topic, table))
    options = {"bootstrap_servers": node.bootstrap_servers, "auto_offset_reset": "earliest"}
    rows: list[Any] = []
    async with Consumer(topic, **options) as consumer, asyncio.timeout(120):
        while len(rows) < 6_000:
            rows += (await consumer.poll_arrow(1000)).to_pylist()
    assert [row["value"] for row in rows] == values * 2
    assert [row["key"] for row in rows] == [None] * 3_000 + values
    assert [row["offset"] for row in rows] == list(range(6_000))


async def test_interceptors_and_delivery_callbacks(node):
    topic = await make_topic(node)
    acknowledged: list[int] = []
    delivered: list[int] = []

    class Marking(ProducerInterceptor):
        def on_send(self, topic: str, record: ProducerRecord) -> ProducerRecord:
            return record._replace(headers=[*record.headers, ("seen", b"yes")])

        def on_acknowledgement(self, metadata: Any, error: Any) -> None:
            acknowledged.append(metadata.offset)

    def on_delivery(metadata: Any, error: Any) -> None:
        delivered.append(metadata.offset)

    async with Producer(bootstrap_servers=node.bootstrap_servers, interceptors=[Marking()]) as producer:
        for _ in range(50):
            await producer.send(topic, b"x", on_delivery=on_delivery)
    assert acknowledged == delivered == list(range(50))
    assert {record.headers for record in await read_all(node, topic, 50)} == {(("seen", b"yes"),)}


async def test_administration(node):
    topic = await make_topic(node, 2)
    first, second = TopicPartition(topic, 0), TopicPartition(topic, 1)
    group = f"group-{topic}"
    async with Producer(bootstrap_servers=node.bootstrap_servers) as producer:
        await producer.send_batch(topic, [b"x"] * 10, partition=0)
        await producer.flush()
    async with Admin(bootstrap_servers=node.bootstrap_servers) as admin:
        await admin.create_partitions({topic: 3})
        assert len((await admin.describe_topics([topic]))[topic].partitions) == 3
        assert await admin.delete_records({first: 4}) == {first: 4}
        offsets = await admin.list_offsets({first: "earliest", second: "latest"})
        assert {partition: found and found.offset for partition, found in offsets.items()} == {first: 4, second: 0}
        await admin.incremental_alter_configs(topics={topic: {"retention.ms": 1_000_000}})
        assert (await admin.describe_configs(topics=[topic]))[topic]["retention.ms"].value == "1000000"
        await admin.alter_group_offsets(group, {first: 6, second: 0})
        lag = await admin.group_lag(group)
        assert {partition: (entry.committed, entry.log_end_offset) for partition, entry in lag.items()} == {
            first: (6, 10),
            second: (0, 0),
        }
        assert group in {listing.group_id for listing in await admin.list_groups()}
        [description] = (await admin.describe_groups([group])).values()
        assert (description.state, description.members) == ("Empty", ())
        assert await admin.delete_group_offsets(group, [second]) == {second: None}
        assert set(await admin.list_group_offsets(group)) == {first}
        assert await admin.delete_groups([group]) == {group: None}
        [state] = (await admin.describe_producers([first]))[first]
        assert state.last_sequence == 9
        await admin.delete_topics([topic])
        with pytest.raises(KafkaError) as caught:
            await admin.describe_topics([topic])
        assert caught.value.code is ErrorCode.UNKNOWN_TOPIC_OR_PARTITION


async def test_the_consumer_protocol_where_it_is_served(node):
    topic = await make_topic(node, 4)
    options = {"bootstrap_servers": node.bootstrap_servers, "group_id": f"new-{topic}", "group_protocol": "consumer"}
    async with Consumer(topic, **options, auto_offset_reset="earliest") as first, asyncio.timeout(120):
        if node.name == "tidelog":
            with pytest.raises(KafkaError, match="does not serve group_protocol='consumer'"):
                await first.poll(100_000)
            return
        while len(first.assignment()) < 4:
            await first.poll(100)
        async with Consumer(topic, **options) as second:
            while not len(first.assignment()) == len(second.assignment()) == 2:
                await asyncio.gather(first.poll(100), second.poll(100))
            assert first.assignment() | second.assignment() == {TopicPartition(topic, number) for number in range(4)}
        while len(first.assignment()) < 4:
            await first.poll(100)
