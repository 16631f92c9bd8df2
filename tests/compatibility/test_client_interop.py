"""Our client beside confluent-kafka on one broker: each reads what the other wrote, and they share a group.

On Kafka too (`make compat`): the same client must work against the reference.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from itertools import chain
from typing import Any

import pytest

from tests.compatibility.filling import CODECS, patiently
from tests.patience import PATIENCE_S
from tidelog.client import NewTopic as Topic
from tidelog.client import OffsetAndMetadata, TopicPartition, sync
from tidelog.protocol.errors import ErrorCode, KafkaError
from tidelog.testing.processes import ServerProcess

confluent = pytest.importorskip(
    "confluent_kafka", reason="confluent-kafka is not installed (pip install 'tidelog[dev]')"
)

NewTopic = Callable[..., str]
Plain = tuple[bytes | None, bytes | None, tuple[tuple[str, bytes | None], ...], int]

NOW_MS = int(time.time() * 1000)
RECORDS: list[Plain] = [
    (b"key", b"value" * 200, (("one", b"1"), ("one", b"2")), NOW_MS),
    (None, b"no key", (), NOW_MS + 3),
    (b"tombstone", None, (("null", None),), NOW_MS - 5000),
    (b"", b"", (), NOW_MS),
    (b"\x00\xff", os.urandom(20_000), (), NOW_MS + 1),
    *((str(number).encode(), b"x" * number, (), NOW_MS + number) for number in range(200)),
]


def settings(server: ServerProcess, **more: Any) -> dict[str, Any]:
    return {
        "bootstrap.servers": server.bootstrap_servers,
        "log_level": 0,
        **{k.replace("_", "."): v for k, v in more.items()},
    }


def write_with_theirs(server: ServerProcess, topic: str, codec: str) -> None:
    producer = confluent.Producer(settings(server, compression_type=codec, enable_idempotence=True))
    failures: list[Any] = []
    for key, value, headers, timestamp_ms in RECORDS:
        producer.produce(
            topic,
            value,
            key,
            partition=0,
            headers=list(headers) or None,
            timestamp=timestamp_ms,
            on_delivery=lambda error, _: failures.append(error) if error else None,
        )
    assert producer.flush(20) == 0
    assert failures == []


def read_with_theirs(server: ServerProcess, topic: str) -> list[Plain]:
    consumer = confluent.Consumer(settings(server, group_id="theirs", enable_auto_commit=False))
    found: list[Plain] = []
    try:
        consumer.assign([confluent.TopicPartition(topic, 0, 0)])
        deadline = time.monotonic() + 90
        while len(found) < len(RECORDS):
            assert time.monotonic() < deadline, f"{len(found)} records"
            for message in consumer.consume(len(RECORDS), 0.2):
                assert message.error() is None
                headers = tuple(message.headers() or ())
                found.append((message.key(), message.value(), headers, message.timestamp()[1]))
    finally:
        consumer.close()
    return found


def write_with_ours(server: ServerProcess, topic: str, codec: str) -> None:
    with sync.Producer(bootstrap_servers=server.bootstrap_servers, compression_type=codec) as producer:
        sent = [
            producer.send(topic, value, key, headers=headers, partition=0, timestamp_ms=timestamp_ms)
            for key, value, headers, timestamp_ms in RECORDS
        ]
        producer.flush()
        assert [one.result(60).offset for one in sent] == list(range(len(RECORDS)))


def read_with_ours(server: ServerProcess, topic: str) -> list[Plain]:
    found: list[Plain] = []
    with sync.Consumer(bootstrap_servers=server.bootstrap_servers, auto_offset_reset="earliest") as consumer:
        consumer.assign([TopicPartition(topic, 0)])
        deadline = time.monotonic() + 90
        while len(found) < len(RECORDS):
            assert time.monotonic() < deadline, f"{len(found)} records"
            for records in consumer.poll(timeout_ms=200).values():
                found += [(record.key, record.value, record.headers, record.timestamp_ms) for record in records]
    return found


@pytest.mark.parametrize("codec", CODECS)
def test_each_reads_what_either_wrote(server: ServerProcess, new_topic: NewTopic, codec: str) -> None:
    by_ours, by_theirs = new_topic(), new_topic()
    write_with_ours(server, by_ours, codec)
    write_with_theirs(server, by_theirs, codec)
    for topic in (by_ours, by_theirs):
        assert read_with_theirs(server, topic) == RECORDS
        assert read_with_ours(server, topic) == RECORDS


def test_committed_offsets_are_shared(server: ServerProcess, new_topic: NewTopic) -> None:
    topic, group = new_topic(partitions=2), f"shared-{time.time_ns()}"
    with sync.Consumer(bootstrap_servers=server.bootstrap_servers, group_id=group) as ours:
        ours.commit({TopicPartition(topic, 0): OffsetAndMetadata(5, "ours")})
        theirs = confluent.Consumer(settings(server, group_id=group, enable_auto_commit=False))
        try:
            found = patiently(lambda: theirs.committed([confluent.TopicPartition(topic, 0)], timeout=60))
            # Not its metadata: confluent-kafka 2.16 reads that as a C string, beyond its end.
            assert [one.offset for one in found] == [5]
            theirs.commit(offsets=[confluent.TopicPartition(topic, 1, 7)], asynchronous=False)
        finally:
            theirs.close()
        both = ours.committed(TopicPartition(topic, 0), TopicPartition(topic, 1))
        assert [one.offset if one else None for one in both.values()] == [5, 7]
        assert ours.committed(TopicPartition(topic, 0))[TopicPartition(topic, 0)] == OffsetAndMetadata(5, "ours")


def test_a_new_topic_does_not_get_the_position_of_a_deleted_one(server: ServerProcess, new_topic: NewTopic) -> None:
    topic, group = new_topic(), f"anew-{time.time_ns()}"
    address = {"bootstrap_servers": server.bootstrap_servers}
    with (
        sync.Admin(**address) as admin,
        sync.Producer(**address) as producer,
        sync.Consumer(
            topic,
            **address,
            group_id=group,
            auto_offset_reset="earliest",
            fetch_max_wait_ms=50,
        ) as consuming,
    ):

        def write_and_read(value: bytes, count: int) -> None:
            for _ in range(count):
                producer.send_and_wait(topic, value)
            values: list[bytes | None] = []
            deadline = time.monotonic() + PATIENCE_S
            while len(values) < count:
                assert time.monotonic() < deadline, f"only {len(values)} of {count} records came"
                values += [each.value for each in chain(*consuming.poll(100).values())]
            assert values == [value] * count

        write_and_read(b"former", 20)
        consuming.pause(*consuming.assignment())
        consuming.poll(timeout_ms=300)  # the last fetch ends, so that nothing tells of the topic's end
        admin.delete_topics([topic])
        admin.create_topics([Topic(topic, num_partitions=1)])
        with pytest.raises(KafkaError) as refused:
            consuming.commit()
        assert refused.value.code is ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
        assert TopicPartition(topic, 0) not in admin.list_group_offsets(group)
        consuming.resume(*consuming.assignment())
        write_and_read(b"new", 30)
        consuming.commit()
        assert admin.list_group_offsets(group)[TopicPartition(topic, 0)].offset == 30


def test_members_of_both_kinds_share_a_group(server: ServerProcess, new_topic: NewTopic) -> None:
    topic, group = new_topic(partitions=4), f"mixed-{time.time_ns()}"
    theirs = confluent.Consumer(
        settings(
            server,
            group_id=group,
            auto_offset_reset="earliest",
            partition_assignment_strategy="range",
            heartbeat_interval_ms=200,
        )
    )
    theirs.subscribe([topic])
    deadline = time.monotonic() + 90

    def assigned() -> set[int]:
        # One thread for both: librdkafka's assignment() can hang while another thread polls through a rebalance.
        assert time.monotonic() < deadline, "the group does not settle"
        theirs.poll(0.05)
        return {one.partition for one in theirs.assignment()}

    try:
        with sync.Consumer(
            topic,
            bootstrap_servers=server.bootstrap_servers,
            group_id=group,
            partition_assignment_strategy="range",
            heartbeat_interval_ms=200,
        ) as ours:
            mine: set[int] = set()
            while len(mine) != 2 or mine | assigned() != {0, 1, 2, 3}:
                ours.poll(timeout_ms=50)
                mine = {one.partition for one in ours.assignment()}
                assigned()
        while assigned() != {0, 1, 2, 3}:
            pass
    finally:
        theirs.close()
