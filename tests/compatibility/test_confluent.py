"""confluent-kafka, unchanged, as Python users know it: every codec, groups that rebalance, offsets, admin calls."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.compatibility.filling import CODECS, patiently
from tests.patience import PATIENCE_S, line_of
from tidelog.testing.processes import ServerProcess

confluent = pytest.importorskip(
    "confluent_kafka", reason="confluent-kafka is not installed (pip install 'tidelog[dev]')"
)
admin = pytest.importorskip("confluent_kafka.admin")

NewTopic = Callable[..., str]
Received = tuple[bytes | None, bytes | None, list[tuple[str, bytes | None]] | None, tuple[int, int]]


def settings(server: ServerProcess, **more: Any) -> dict[str, Any]:
    return {
        "bootstrap.servers": server.bootstrap_servers,
        "log_level": 0,
        **{k.replace("_", "."): v for k, v in more.items()},
    }


def produce_all(server: ServerProcess, topic: str, records: list[dict[str, Any]], **more: Any) -> None:
    """Produce records (arguments of `Producer.produce`) and wait for every acknowledgement."""
    failures: list[Any] = []
    producer = confluent.Producer(settings(server, **more))
    for record in records:
        producer.produce(topic, on_delivery=lambda error, _: failures.append(error) if error else None, **record)
    assert producer.flush(90) == 0
    assert failures == []


def poll_some(consumer: Any, count: int, timeout_s: float = 90.0) -> list[Any]:
    """At least `count` messages, none of them an error."""
    found: list[Any] = []
    deadline = time.monotonic() + timeout_s
    while len(found) < count:
        assert time.monotonic() < deadline, f"{len(found)} of {count} messages"
        found += consumer.consume(count - len(found), 0.2)
    assert [message.error() for message in found if message.error()] == []
    return found


def read_all(server: ServerProcess, topic: str, count: int, partitions: int = 1, **more: Any) -> list[Any]:
    """The first `count` messages of a topic, and that no more follow at once."""
    consumer = confluent.Consumer(settings(server, group_id="reader", enable_auto_commit=False, **more))
    try:
        consumer.assign([confluent.TopicPartition(topic, index, 0) for index in range(partitions)])
        found = poll_some(consumer, count)
        assert consumer.consume(1, 0.2) == []
        return found
    finally:
        consumer.close()


def seen(message: Any) -> Received:
    return message.key(), message.value(), message.headers(), message.timestamp()


@pytest.mark.parametrize("codec", CODECS)
def test_keys_headers_nulls_and_timestamps_come_back(server: ServerProcess, new_topic: NewTopic, codec: str) -> None:
    topic = new_topic()
    now_ms = int(time.time() * 1000)
    records: list[dict[str, Any]] = [
        {"key": b"key", "value": b"value" * 100, "headers": [("one", b"1"), ("one", b"2")], "timestamp": now_ms},
        {"key": None, "value": b"no key", "headers": None, "timestamp": now_ms + 5},
        {"key": b"tombstone", "value": None, "headers": None, "timestamp": now_ms - 5000},
        {"key": b"", "value": b"", "headers": [("", b""), ("null", None)], "timestamp": now_ms},
        {"key": b"\x00\xff", "value": os.urandom(30_000), "headers": None, "timestamp": now_ms},
    ]
    produce_all(server, topic, [{**record, "partition": 0} for record in records], compression_type=codec)
    found = [seen(message) for message in read_all(server, topic, len(records))]
    create_time = confluent.TIMESTAMP_CREATE_TIME
    assert found == [
        (record["key"], record["value"], record["headers"], (create_time, record["timestamp"])) for record in records
    ]


@pytest.mark.parametrize("codec", CODECS)
def test_many_records_over_partitions_arrive_once_and_in_order(
    server: ServerProcess, new_topic: NewTopic, codec: str
) -> None:
    topic, count = new_topic(partitions=4), 4000
    records = [{"key": str(number % 17), "value": str(number).encode() * 20} for number in range(count)]
    produce_all(server, topic, records, compression_type=codec, enable_idempotence=True, linger_ms=2)
    by_partition: dict[int, list[int]] = {}
    for message in read_all(server, topic, count, partitions=4):
        number = int(message.value()[: len(message.value()) // 20])
        by_partition.setdefault(message.partition(), []).append(number)
    for key in {number % 17 for number in range(count)}:
        homes = {index for index, numbers in by_partition.items() if any(n % 17 == key for n in numbers)}
        assert len(homes) == 1, "one key, one partition"
    assert all(numbers == sorted(numbers) for numbers in by_partition.values())
    assert sorted(number for numbers in by_partition.values() for number in numbers) == list(range(count))


@pytest.mark.parametrize("acks", ["0", "1", "all"])
def test_every_level_of_acknowledgement(server: ServerProcess, new_topic: NewTopic, acks: str) -> None:
    topic = new_topic()
    produce_all(server, topic, [{"value": str(number)} for number in range(200)], acks=acks)
    assert [message.value() for message in read_all(server, topic, 200)] == [str(n).encode() for n in range(200)]


class Member:
    """A consumer of a group that remembers its assignment."""

    def __init__(self, server: ServerProcess, group: str, topic: str, strategy: str) -> None:
        self.consumer = confluent.Consumer(
            settings(
                server,
                group_id=group,
                auto_offset_reset="earliest",
                enable_auto_commit=False,
                session_timeout_ms=6000,
                heartbeat_interval_ms=200,
                partition_assignment_strategy=strategy,
            )
        )
        self.consumer.subscribe([topic])
        self.got: list[tuple[int, int]] = []

    def poll(self) -> None:
        for message in self.consumer.consume(100, 0.05):
            assert message.error() is None, message.error()
            self.got.append((message.partition(), message.offset()))

    @property
    def partitions(self) -> set[int]:
        return {one.partition for one in self.consumer.assignment()}


@pytest.fixture
def members(server: ServerProcess) -> Iterator[list[Member]]:
    alive: list[Member] = []
    yield alive
    for member in alive:
        member.consumer.close()


def settle(members: list[Member], partitions: int, timeout_s: float = 90.0) -> None:
    """Until every partition has one owner and every member some."""
    deadline = time.monotonic() + timeout_s
    while True:
        for member in members:
            member.poll()
        owned = [index for member in members for index in member.partitions]
        if sorted(owned) == list(range(partitions)) and all(member.partitions for member in members):
            return
        assert time.monotonic() < deadline, [member.partitions for member in members]


@pytest.mark.parametrize("strategy", ["range", "roundrobin", "cooperative-sticky"])
def test_a_group_rebalances_when_members_come_and_go(
    server: ServerProcess, new_topic: NewTopic, members: list[Member], strategy: str
) -> None:
    topic, group = new_topic(partitions=6), f"group-{strategy}-{time.time_ns()}"
    produce_all(server, topic, [{"value": b"v", "partition": number % 6} for number in range(300)])
    members.append(Member(server, group, topic, strategy))
    settle(members, 6)
    members.append(Member(server, group, topic, strategy))
    settle(members, 6)
    members.append(Member(server, group, topic, strategy))
    settle(members, 6)
    assert all(len(member.partitions) == 2 for member in members)
    gone = members.pop(0)
    gone.consumer.close()
    settle(members, 6)
    deadline = time.monotonic() + 90
    wanted = {(index, offset) for index in range(6) for offset in range(50)}
    while not wanted <= {one for member in [gone, *members] for one in member.got}:
        assert time.monotonic() < deadline, "records that no member was given"
        for member in members:
            member.poll()


def test_a_member_that_dies_loses_its_partitions(
    server: ServerProcess, new_topic: NewTopic, members: list[Member]
) -> None:
    topic, group = new_topic(partitions=4), f"group-dies-{time.time_ns()}"
    child = subprocess.Popen(
        [sys.executable, "-c", _MEMBER, server.bootstrap_servers, group, topic], stdout=subprocess.PIPE
    )
    try:
        assert child.stdout is not None
        assert line_of(child) == b"assigned\n"
        members.append(Member(server, group, topic, "range"))
        deadline = time.monotonic() + 90
        while len(members[0].partitions) != 2:
            assert time.monotonic() < deadline
            members[0].poll()
    finally:
        child.kill()
        child.communicate(timeout=PATIENCE_S)
    settle(members, 4)


# A member to be killed: it says no goodbye, only its heartbeats stop.
_MEMBER = """
import sys
from confluent_kafka import Consumer
consumer = Consumer({
    "bootstrap.servers": sys.argv[1], "group.id": sys.argv[2], "log_level": 0,
    "session.timeout.ms": 2000, "heartbeat.interval.ms": 200, "partition.assignment.strategy": "range",
})
consumer.subscribe([sys.argv[3]], on_assign=lambda *_: print("assigned", flush=True))
while True:
    consumer.poll(0.1)
"""


def test_committed_offsets_and_their_metadata(server: ServerProcess, new_topic: NewTopic) -> None:
    topic, group = new_topic(partitions=2), f"commits-{time.time_ns()}"
    produce_all(server, topic, [{"value": b"v", "partition": number % 2} for number in range(20)])
    consumer = confluent.Consumer(settings(server, group_id=group, enable_auto_commit=False))
    try:
        asked = [confluent.TopicPartition(topic, 0, 7, metadata="note"), confluent.TopicPartition(topic, 1, 3)]
        committed = consumer.commit(offsets=asked, asynchronous=False)
        assert [one.error for one in committed] == [None, None]
        found = consumer.committed([confluent.TopicPartition(topic, index) for index in (0, 1)], timeout=60)
        assert [(one.offset, one.metadata) for one in found] == [(7, "note"), (3, None)]
        consumer.subscribe([topic])
        messages = poll_some(consumer, 3 + 7)
        assert {(m.partition(), m.offset()) for m in messages} == {(0, n) for n in range(7, 10)} | {
            (1, n) for n in range(3, 10)
        }
    finally:
        consumer.close()


def test_committed_offsets_and_records_survive_a_restart(server: ServerProcess, new_topic: NewTopic) -> None:
    topic, group = new_topic(partitions=3), f"restart-{time.time_ns()}"
    produce_all(server, topic, [{"value": str(n), "partition": n % 3} for n in range(90)])
    consumer = confluent.Consumer(settings(server, group_id=group, enable_auto_commit=False))
    asked = [confluent.TopicPartition(topic, index, 10 + index) for index in range(3)]
    consumer.commit(offsets=asked, asynchronous=False)
    consumer.close()
    server.restart()
    consumer = confluent.Consumer(settings(server, group_id=group, enable_auto_commit=False))
    try:
        wanted = [confluent.TopicPartition(topic, index) for index in range(3)]
        found = patiently(lambda: consumer.committed(wanted, timeout=60))
        assert [one.offset for one in found] == [10, 11, 12]
        consumer.subscribe([topic])
        assert len(poll_some(consumer, 20 + 19 + 18)) == 57
    finally:
        consumer.close()
    produce_all(server, topic, [{"value": "after", "partition": 0}])
    assert len(read_all(server, topic, 91, partitions=3)) == 91


def test_seek_by_time_and_watermarks(server: ServerProcess, new_topic: NewTopic) -> None:
    topic = new_topic()
    now_ms = int(time.time() * 1000)
    for number in range(10):
        produce_all(server, topic, [{"value": str(number), "timestamp": now_ms + 1000 * number, "partition": 0}])
    consumer = confluent.Consumer(settings(server, group_id="seeker", enable_auto_commit=False))
    try:
        assert consumer.get_watermark_offsets(confluent.TopicPartition(topic, 0), timeout=60) == (0, 10)
        for wanted_ms, expected in ((now_ms, 0), (now_ms + 3500, 4), (now_ms + 9000, 9), (now_ms + 9001, -1)):
            found = consumer.offsets_for_times([confluent.TopicPartition(topic, 0, wanted_ms)], timeout=60)
            assert found[0].offset == expected or (expected == -1 and found[0].offset == confluent.OFFSET_END)
        consumer.assign([confluent.TopicPartition(topic, 0, 6)])
        assert [m.value() for m in poll_some(consumer, 4)] == [b"6", b"7", b"8", b"9"]
        consumer.seek(confluent.TopicPartition(topic, 0, 2))
        assert poll_some(consumer, 1)[0].value() == b"2"
    finally:
        consumer.close()


class TestAdmin:
    @pytest.fixture
    def client(self, server: ServerProcess) -> Any:
        return admin.AdminClient(settings(server))

    def test_topics_are_created_listed_and_deleted(self, client: Any) -> None:
        name = f"by-admin-{time.time_ns()}"
        client.create_topics([admin.NewTopic(name, 3, 1, config={"retention.ms": "1000"})])[name].result(60)
        deadline = time.monotonic() + 60
        while name not in (topics := client.list_topics(timeout=60).topics):
            assert time.monotonic() < deadline
        assert sorted(topics[name].partitions) == [0, 1, 2]
        with pytest.raises(confluent.KafkaException) as refused:
            client.create_topics([admin.NewTopic(name, 3, 1)])[name].result(60)
        assert refused.value.args[0].code() == confluent.KafkaError.TOPIC_ALREADY_EXISTS
        client.delete_topics([name])[name].result(60)
        while name in client.list_topics(timeout=60).topics:
            assert time.monotonic() < deadline

    def test_the_cluster_is_described(self, client: Any, server: ServerProcess) -> None:
        described = client.describe_cluster(request_timeout=60).result(60)
        assert [(node.host, node.port) for node in described.nodes] == [("127.0.0.1", server.port)]
        assert described.cluster_id

    def test_topics_are_described(self, client: Any, new_topic: NewTopic) -> None:
        name = new_topic(partitions=2)
        described = client.describe_topics(confluent.TopicCollection([name]), request_timeout=60)[name].result(60)
        assert [len(partition.isr) for partition in described.partitions] == [1, 1]

    def test_configs_of_topics_and_brokers_are_described(self, client: Any, new_topic: NewTopic) -> None:
        name = new_topic(segment_bytes="2000000")
        node = next(iter(client.list_topics(timeout=60).brokers))
        resources = [
            admin.ConfigResource(admin.ResourceType.TOPIC, name),
            admin.ConfigResource(admin.ResourceType.BROKER, str(node)),
        ]
        topic, broker = [future.result(60) for future in client.describe_configs(resources).values()]
        assert topic["segment.bytes"].value == "2000000"
        assert topic["cleanup.policy"].value == "delete"
        assert topic["cleanup.policy"].is_default
        assert broker["num.partitions"].value == "4"

    def test_offsets_are_listed(self, client: Any, server: ServerProcess, new_topic: NewTopic) -> None:
        name = new_topic()
        produce_all(server, name, [{"value": b"v", "partition": 0}] * 5)
        partition = confluent.TopicPartition(name, 0)
        for spec, expected in ((admin.OffsetSpec.latest(), 5), (admin.OffsetSpec.earliest(), 0)):
            assert client.list_offsets({partition: spec})[partition].result(60).offset == expected
