"""Odd Produce requests to Tidelog and to Kafka 4.3 alike: what a batch may be, what a request may ask for, sequences.

Reading is in `test_differential_reading.py`, groups in `test_differential_groups.py`, the rest in
`test_differential_admin.py`. Where the two differ by intent, the table says both answers.
"""

from __future__ import annotations

import random
import struct
import uuid
from collections.abc import Callable
from typing import Any

import pytest

from tests.compatibility.odd_batches import NOW_MS, batch, message_set, record, varint
from tests.compatibility.side_by_side import Brokers

NewTopic = Callable[..., str]
IN_OTHER_WORDS = frozenset({"error_message", "batch_index_error_message"})
IN_TWO_DAYS = NOW_MS + 2 * 86_400_000
NO_SUCH_ID = uuid.UUID(int=77)

GARBAGE = b"\xff" * 20
LINKED_LZ4 = b"\x04\x22\x4d\x18\x40\x40\xc0" + struct.pack("<I", len(record(b"v")) | 1 << 31) + record(b"v") + bytes(4)
BATCHES = {
    "good": batch(3),
    "no bytes": b"",
    "three bytes": b"123",
    "header cut": batch()[:40],
    "cut": batch()[:-1],
    "a byte behind": batch() + b"x",
    "a part of one behind": batch() + batch()[:-1],
    "length 10": batch(length=10),
    "length 20": batch(length=20),
    "length -1": batch(length=-1),
    "length huge": batch(length=1 << 30),
    "magic 0": message_set(0),
    "magic 1": message_set(1),
    "magic 3": batch(magic=3),
    "magic -1": batch(magic=-1),
    "crc": batch(crc=1),
    "base offset": batch(base_offset=5),
    "base offset negative": batch(base_offset=-5),
    "leader epoch": batch(leader_epoch=7),
    "control": batch(attributes=32),
    "transactional": batch(attributes=16),
    "transactional producer": batch(attributes=16, producer=(5, 0, 0)),
    "unused attributes": batch(attributes=0x7F80),
    "delete horizon": batch(attributes=64),
    "log append time": batch(attributes=8),
    "log append time, none": batch(attributes=8, timestamp=-1),
    "empty": batch(0),
    "empty, delta 0": batch(0, last_delta=0, count=0),
    "count 0": batch(2, count=0),
    "count negative": batch(2, count=-1),
    "count small": batch(2, count=1),
    "count large": batch(2, count=3),
    "delta small": batch(2, last_delta=0),
    "delta negative": batch(2, last_delta=-1),
    "two batches": batch() + batch(),
    "no timestamp": batch(timestamp=-1),
    "timestamp 0": batch(timestamp=0),
    "in half an hour": batch(timestamp=NOW_MS + 1_800_000),
    "in two days": batch(3, timestamp=IN_TWO_DAYS),
    "gzip": batch(3, compress=True),
    "delta of records": batch(2, payload=record(b"a", delta=5) + record(b"b", delta=6)),
    "null value and key": batch([None, b"v"], key=None),
    "headers": batch(payload=record(b"a", headers=((b"h", b"1"), (b"", None)))),
    "record attributes": batch(payload=record(b"a", attributes=9)),
    "producer without sequence": batch(producer=(5, 0, -1)),
    "producer without epoch": batch(producer=(5, -1, 0)),
    "producer starts at 3": batch(producer=(5, 0, 3)),
    "producer -2": batch(producer=(-2, 0, 0)),
    "too large": batch([b"x" * 2_000_000]),
    "more announced": batch(2, count=3, last_delta=2),
    "fewer announced": batch(2, count=1, last_delta=0),
    "many more announced": batch(100, count=1 << 30, last_delta=(1 << 30) - 1),
    "more announced in gzip": batch(9, count=10, last_delta=9, compress=True),
    "fewer announced in gzip": batch(9, count=8, last_delta=7, compress=True),
    "gzip of garbage": batch(compress=True, payload=GARBAGE),
    "null header key": batch(payload=record(b"a", headers=((None, b"1"),))),
    "a byte behind the records": batch(payload=record(b"a") + b"x"),
    "a byte behind the fields": batch(payload=varint(9) + b"\0\0\0\1\1\0xxx"),
}
# Tidelog names the error, and of larger compressed batches it trusts header and CRC. Kafka's answer, ours.
ANSWERED_DIFFERENTLY = {
    "garbage": (batch(payload=GARBAGE), "unknown_server_error", "invalid_record"),
    "garbage for gzip": (batch(attributes=1, payload=GARBAGE), "unknown_server_error", "invalid_record"),
    "garbage for snappy": (batch(attributes=2, payload=GARBAGE), "unknown_server_error", "invalid_record"),
    "garbage for lz4": (batch(attributes=3, payload=GARBAGE), "unknown_server_error", "invalid_record"),
    "garbage for zstd": (batch(attributes=4, payload=GARBAGE), "unknown_server_error", "invalid_record"),
    "much gzip of garbage": (batch(compress=True, payload=random.Random(1).randbytes(5000)), "invalid_record", "none"),
    "linked blocks of lz4": (batch(attributes=3, payload=LINKED_LZ4), "unknown_server_error", "invalid_record"),
    "unknown codec": (batch(attributes=5), "unknown_server_error", "unsupported_compression_type"),
}
CONFIGS: dict[str, dict[str, str]] = {
    "append time": {"message_timestamp_type": "LogAppendTime"},
    "compacted": {"cleanup_policy": "compact"},
    "uncompressed": {"compression_type": "uncompressed"},
    "not old": {"message_timestamp_before_max_ms": "1000"},
    "small": {"max_message_bytes": "90"},
}
OF_CONFIGS = ["good", "a byte behind", "control", "crc", "in two days", "log append time", "no timestamp", "gzip"]
OF_CONFIGS += ["null value and key", "two batches", "cut"]


def read_back(brokers: Brokers, topic: str) -> None:
    partition = {"partition": 0, "fetch_offset": 0, "partition_max_bytes": 1 << 20}
    topics = [{"topic": topic, "partitions": [partition]}]
    brokers.same("fetch", 12, max_wait=0, min_bytes=0, max_bytes=1 << 20, topics=topics)


@pytest.mark.parametrize("version", [3, 7, 8, 12])
@pytest.mark.parametrize("name", BATCHES)
def test_a_batch(brokers: Brokers, topic_in_both: NewTopic, name: str, version: int) -> None:
    topic = topic_in_both()
    brokers.ignored = IN_OTHER_WORDS
    brokers.produce(topic, BATCHES[name], version=version)
    read_back(brokers, topic)


@pytest.mark.parametrize("name", OF_CONFIGS)
@pytest.mark.parametrize("config", CONFIGS)
def test_a_batch_for_a_topic_with_settings(brokers: Brokers, topic_in_both: NewTopic, config: str, name: str) -> None:
    topic = topic_in_both(**CONFIGS[config])
    brokers.ignored = IN_OTHER_WORDS
    brokers.produce(topic, BATCHES[name])
    read_back(brokers, topic)


@pytest.mark.parametrize("name", ANSWERED_DIFFERENTLY)
def test_a_batch_that_is_answered_differently(brokers: Brokers, topic_in_both: NewTopic, name: str) -> None:
    records, *expected = ANSWERED_DIFFERENTLY[name]
    data = [{"name": topic_in_both(), "partition_data": [{"index": 0, "records": records}]}]
    answers = brokers.get("produce", 9, acks=-1, timeout=1000, topic_data=data)
    assert [answer.responses[0].partition_responses[0].error_code.name for answer in answers] == expected


def of(topic: str, *indexes: int, name: str = "good") -> dict[str, Any]:
    return {"name": topic, "partition_data": [{"index": index, "records": BATCHES[name]} for index in indexes]}


TOPIC = "the topic"
REQUESTS = {
    "nothing": [],
    "no partitions": [of(TOPIC)],
    "unknown topic": [of("nowhere", 0)],
    "unknown partitions": [of(TOPIC, 9, -1)],
    "invalid names": [of("", 0), of("a b", 0), of("x" * 300, 0)],
    "good and bad": [of(TOPIC, 0, 9), of("nowhere", 0)],
    "partition twice": [of(TOPIC, 0, 0)],
    "topic twice": [of(TOPIC, 0), of(TOPIC, 1)],
    "all twice": [of(TOPIC, 0), of(TOPIC, 0)],
    "metadata log": [of("__cluster_metadata", 0)],
    "control and good": [of(TOPIC, 0, name="control"), of(TOPIC, 1)],
    "transactional and good": [of(TOPIC, 0, name="transactional"), of(TOPIC, 1)],
    "crc": [of(TOPIC, 0, name="crc")],
}


def named(data: list[dict[str, Any]], topic: str) -> list[dict[str, Any]]:
    return [{**one, "name": topic if one["name"] == TOPIC else one["name"]} for one in data]


@pytest.mark.parametrize("version", [3, 8, 12])
@pytest.mark.parametrize("acks", [-1, 1, 2, -2])
@pytest.mark.parametrize("name", REQUESTS)
def test_a_request(brokers: Brokers, topic_in_both: NewTopic, name: str, acks: int, version: int) -> None:
    data = named(REQUESTS[name], topic_in_both(2))
    brokers.ignored = IN_OTHER_WORDS
    brokers.same("produce", version, acks=acks, timeout=1000, topic_data=data)


@pytest.mark.parametrize("name", REQUESTS)
def test_a_request_without_an_answer(brokers: Brokers, topic_in_both: NewTopic, name: str) -> None:
    topic = topic_in_both(2)
    data = named(REQUESTS[name], topic)
    brokers.in_both(lambda wire: wire.send("produce", 9, answered=False, acks=0, timeout=1000, topic_data=data))
    ends = [{"partition_index": index, "timestamp": -1} for index in (0, 1)]
    brokers.same("list_offsets", 1, replica_id=-1, topics=[{"name": topic, "partitions": ends}])


@pytest.mark.parametrize("acks", [-1, 2])
@pytest.mark.parametrize("name", ["nothing", "no partitions", "good and bad", "partition twice", "topic twice"])
def test_a_request_by_topic_id(brokers: Brokers, topic_in_both: NewTopic, name: str, acks: int) -> None:
    topic = topic_in_both(2)
    known = brokers.topic_id(topic)
    data = [
        {"topic_id": known if one["name"] == topic else NO_SUCH_ID, "partition_data": one["partition_data"]}
        for one in named(REQUESTS[name], topic)
    ]
    brokers.ignored = IN_OTHER_WORDS
    brokers.same("produce", 13, acks=acks, timeout=1000, topic_data=data)


def test_the_topic_id_of_nothing(brokers: Brokers) -> None:
    brokers.ignored = IN_OTHER_WORDS
    data = [{"topic_id": None, "partition_data": of("", 0)["partition_data"]}]
    brokers.same("produce", 13, acks=-1, timeout=1000, topic_data=data)


@pytest.mark.parametrize("timeout", [-1000, 0, 2**31 - 1])
def test_a_timeout(brokers: Brokers, topic_in_both: NewTopic, timeout: int) -> None:
    brokers.produce(topic_in_both(), BATCHES["good"], timeout=timeout)


@pytest.mark.parametrize("transactional_id", ["", "t"])
def test_a_transactional_id_without_a_transaction(
    brokers: Brokers, topic_in_both: NewTopic, transactional_id: str
) -> None:
    brokers.produce(topic_in_both(), BATCHES["good"], transactional_id=transactional_id)


SEQUENCES = {
    "in order": [(5, 0, 0), (5, 0, 2), (5, 0, 4)],
    "duplicates": [(5, 0, 0), (5, 0, 0), (5, 0, 2), (5, 0, 4), (5, 0, 0)],
    "the sixth last": [*((5, 0, 2 * number) for number in range(7)), (5, 0, 0), (5, 0, 2), (5, 0, 4), (5, 0, 12)],
    "gap": [(5, 0, 0), (5, 0, 5)],
    "overlap": [(5, 0, 0), (5, 0, 1)],
    "new epoch": [(5, 0, 0), (5, 1, 0), (5, 0, 2)],
    "new epoch not from 0": [(5, 0, 0), (5, 1, 2)],
    "epochs skipped": [(5, 0, 0), (5, 9, 0)],
    "first not from 0": [(5, 0, 7), (5, 0, 9)],
    "wrap": [(5, 0, 2**31 - 2), (5, 0, 0), (5, 0, 2)],
    "wrap inside": [(5, 0, 2**31 - 1), (5, 0, 1)],
    "last epoch": [(5, 32767, 0), (5, 32767, 2)],
    "two producers": [(5, 0, 0), (6, 0, 0), (5, 0, 2)],
    "negative epochs": [(5, -1, 0), (5, -1, 2), (5, -2, 4)],
    "largest id": [(2**63 - 1, 0, 0), (2**63 - 1, 0, 2)],
    "no id": [(-1, 0, 0), (-1, 0, 0), (-1, 3, 0), (-1, 2, 0)],
}


@pytest.mark.parametrize("name", SEQUENCES)
def test_sequences(brokers: Brokers, topic_in_both: NewTopic, name: str) -> None:
    topic = topic_in_both()
    # Kafka answers a duplicate with the time of its records, even where the topic does not stamp batches.
    brokers.ignored = IN_OTHER_WORDS | {"log_append_time"}
    for producer in SEQUENCES[name]:
        brokers.produce(topic, batch(2, producer=producer))
    read_back(brokers, topic)
