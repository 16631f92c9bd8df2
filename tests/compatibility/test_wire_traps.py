"""The traps other Kafka-compatible brokers fell into, one raw-wire test each, read by kio.

Every test holds on Apache Kafka too (`make compat` runs them there), so a passing test is a fact about Kafka.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable
from typing import Any

import pytest

from tests.compatibility.wire import Closed, Wire
from tidelog.bench.frames import record_batch
from tidelog.testing.processes import ServerProcess

NewTopic = Callable[..., str]
NONE, OFFSET_OUT_OF_RANGE, CORRUPT_MESSAGE, UNKNOWN_TOPIC_OR_PARTITION = 0, 1, 2, 3
MESSAGE_TOO_LARGE, INVALID_TOPIC_EXCEPTION, INVALID_REQUIRED_ACKS = 10, 17, 21
UNSUPPORTED_VERSION, TOPIC_ALREADY_EXISTS, INVALID_PARTITIONS = 35, 36, 37
OUT_OF_ORDER_SEQUENCE_NUMBER, INVALID_RECORD, UNKNOWN_TOPIC_ID = 45, 87, 100
# What a node of one serves so far, with the versions Kafka 4.3 advertises.
SERVED = {
    0: (0, 13),
    1: (4, 18),
    2: (1, 11),
    3: (0, 13),
    18: (0, 4),
    19: (2, 7),
    20: (1, 6),
    22: (0, 5),
    23: (2, 4),
    8: (2, 10),
    9: (1, 10),
    10: (0, 6),
    11: (0, 9),
    12: (0, 4),
    13: (0, 5),
    14: (0, 5),
    32: (1, 4),
    33: (0, 2),
    35: (1, 5),
    37: (0, 3),
    43: (0, 2),
    44: (0, 1),
    45: (0, 1),
    46: (0, 0),
    55: (0, 2),
    57: (0, 2),
    60: (0, 2),
    64: (0, 0),
    80: (0, 1),
    81: (0, 0),
}
NOW_MS = int(time.time() * 1000)


def batch(count: int = 1, size_bytes: int = 10, timestamp_ms: int = NOW_MS) -> bytes:
    return record_batch([b"v" * size_bytes] * count, timestamp_ms)


def idempotent(data: bytes, producer_id: int, epoch: int, sequence: int) -> bytes:
    """The same batch with a producer id, epoch and base sequence, and its CRC set right."""
    import crc32c

    changed = bytearray(data)
    struct.pack_into(">qhi", changed, 43, producer_id, epoch, sequence)
    struct.pack_into(">I", changed, 17, crc32c.crc32c(bytes(changed[21:])))
    return bytes(changed)


def produce(wire: Wire, topic: str, records: bytes, *, acks: int = -1, version: int = 9, index: int = 0) -> Any:
    """Produce one batch and return the partition's answer."""
    data = [{"name": topic, "partition_data": [{"index": index, "records": records}]}]
    answer = wire.ask("produce", version, acks=acks, timeout=20_000, topic_data=data)
    return answer.responses[0].partition_responses[0]


def fetch_fields(
    topic: str, offset: int, *, max_bytes: int = 1 << 20, partition_max_bytes: int = 1 << 20
) -> dict[str, Any]:
    partition = {"partition": 0, "fetch_offset": offset, "partition_max_bytes": partition_max_bytes}
    return {"min_bytes": 1, "max_bytes": max_bytes, "topics": [{"topic": topic, "partitions": [partition]}]}


def fetch(wire: Wire, topic: str, offset: int, *, max_wait: int = 0, version: int = 12, **limits: int) -> Any:
    """Fetch partition 0 without a session and return the partition's answer."""
    answer = wire.ask("fetch", version, max_wait=max_wait, **fetch_fields(topic, offset, **limits))
    return answer.responses[0].partitions[0]


def base_offsets(records: bytes) -> list[int]:
    found, position = [], 0
    while position + 12 <= len(records):
        offset, length = struct.unpack_from(">qi", records, position)
        if position + 12 + length > len(records):
            break
        found.append(offset)
        position += 12 + length
    return found


def list_offset(wire: Wire, topic: str, timestamp: int, version: int = 10) -> Any:
    wanted = [{"name": topic, "partitions": [{"partition_index": 0, "timestamp": timestamp}]}]
    return wire.ask("list_offsets", version, replica_id=-1, topics=wanted).topics[0].partitions[0]


class TestApiVersions:
    def test_an_unknown_version_is_answered_in_the_oldest_form_with_error_35(self, wire: Wire) -> None:
        wire.send_frame(struct.pack(">hhih", 18, 99, 77, -1) + b"\x00\x02a\x02b\x00")
        answer = wire.receive_frame()
        correlation_id, error, count = struct.unpack_from(">ihi", answer)
        assert (correlation_id, error) == (77, UNSUPPORTED_VERSION)
        keys = [struct.unpack_from(">hhh", answer, 10 + 6 * number) for number in range(count)]
        assert len(answer) == 10 + 6 * count
        assert (18, 0, 4) in keys

    @pytest.mark.parametrize("version", [0, 1, 2, 3, 4])
    def test_every_version_is_answered_behind_a_header_without_tags(self, wire: Wire, version: int) -> None:
        names = {"client_software_name": "x", "client_software_version": "1"} if version >= 3 else {}
        answer = wire.ask("api_versions", version, **names)
        assert answer.error_code == NONE
        assert any(one.api_key == 18 for one in answer.api_keys)

    def test_the_versions_advertised_are_kafkas_and_no_more_is_advertised_than_kafka_has(self, wire: Wire) -> None:
        answer = wire.ask("api_versions", 0)
        advertised = {one.api_key: (one.min_version, one.max_version) for one in answer.api_keys}
        assert {key: advertised.get(key) for key in SERVED} == SERVED
        assert advertised.keys() <= set(range(93))

    def test_an_api_nobody_knows_closes_the_connection(self, wire: Wire) -> None:
        wire.send_frame(struct.pack(">hhih", 9999, 0, 1, -1))
        with pytest.raises(Closed):
            wire.receive_frame()

    def test_a_frame_longer_than_allowed_closes_the_connection(self, wire: Wire) -> None:
        wire.socket.sendall(struct.pack(">i", 2_000_000_000))
        with pytest.raises(Closed):
            wire.receive_frame()


class TestProduce:
    def test_acks_0_is_never_answered_and_still_written(self, wire: Wire, new_topic: NewTopic) -> None:
        topic = new_topic()
        data = [{"name": topic, "partition_data": [{"index": 0, "records": batch()}]}]
        wire.send("produce", 9, answered=False, acks=0, timeout=1000, topic_data=data)
        assert wire.ask("api_versions", 0).error_code == NONE
        assert list_offset(wire, topic, -1).offset == 1

    @pytest.mark.parametrize("version", [3, 4, 5, 6, 7, 8, 9, 10, 11, 12])
    def test_every_version_by_name(self, wire: Wire, new_topic: NewTopic, version: int) -> None:
        topic = new_topic()
        for expected in (0, 2):
            answer = produce(wire, topic, batch(2), version=version)
            assert (answer.error_code, answer.base_offset) == (NONE, expected)

    def test_a_batch_above_max_message_bytes_is_refused(self, wire: Wire, new_topic: NewTopic) -> None:
        topic = new_topic(max_message_bytes="1000")
        assert produce(wire, topic, batch(1, 2000)).error_code == MESSAGE_TOO_LARGE
        assert produce(wire, topic, batch(1, 500)).error_code == NONE
        assert list_offset(wire, topic, -1).offset == 1

    def test_a_record_without_key_is_refused_on_a_compacted_topic(self, wire: Wire, new_topic: NewTopic) -> None:
        answer = produce(wire, new_topic(cleanup_policy="compact"), batch(2))
        assert answer.error_code == INVALID_RECORD
        assert [error.batch_index for error in answer.record_errors] == [0, 1]

    def test_a_wrong_checksum_is_refused(self, wire: Wire, new_topic: NewTopic) -> None:
        topic = new_topic()
        records = bytearray(batch(1, 100))
        records[-5] ^= 1
        assert produce(wire, topic, bytes(records)).error_code == CORRUPT_MESSAGE
        assert list_offset(wire, topic, -1).offset == 0

    def test_acks_other_than_0_1_all_are_refused(self, wire: Wire, new_topic: NewTopic) -> None:
        assert produce(wire, new_topic(), batch(), acks=2).error_code == INVALID_REQUIRED_ACKS

    def test_an_unknown_topic_is_refused_and_not_created(self, wire: Wire) -> None:
        assert produce(wire, "never-created", batch()).error_code == UNKNOWN_TOPIC_OR_PARTITION
        answer = wire.ask("metadata", 12, topics=[{"name": "never-created"}], allow_auto_topic_creation=False)
        assert answer.topics[0].error_code == UNKNOWN_TOPIC_OR_PARTITION

    def test_log_append_time_is_answered_and_kept(self, wire: Wire, new_topic: NewTopic) -> None:
        topic = new_topic(message_timestamp_type="LogAppendTime")
        answer = produce(wire, topic, batch(1, timestamp_ms=1000))
        appended_ms = int(answer.log_append_time.timestamp() * 1000)
        assert abs(appended_ms - time.time() * 1000) < 60_000
        assert list_offset(wire, topic, -3).timestamp == appended_ms

    def test_a_retried_batch_is_answered_with_its_first_offset(self, wire: Wire, new_topic: NewTopic) -> None:
        topic = new_topic()
        producer = init_producer_id(wire)
        for sequence in range(3):
            answer = produce(wire, topic, idempotent(batch(), producer.producer_id, producer.producer_epoch, sequence))
            assert (answer.error_code, answer.base_offset) == (NONE, sequence)
        again = produce(wire, topic, idempotent(batch(), producer.producer_id, producer.producer_epoch, 1))
        assert (again.error_code, again.base_offset) == (NONE, 1)
        gap = produce(wire, topic, idempotent(batch(), producer.producer_id, producer.producer_epoch, 9))
        assert gap.error_code == OUT_OF_ORDER_SEQUENCE_NUMBER
        assert list_offset(wire, topic, -1).offset == 3


class TestOrder:
    def test_answers_keep_the_order_of_their_requests(self, wire: Wire, new_topic: NewTopic) -> None:
        """A long poll with nothing to give must hold back the answers behind it, or be answered before them."""
        topic, quiet = new_topic(), new_topic()
        wire.send("fetch", 12, max_wait=300, **fetch_fields(quiet, 0))
        data = [{"name": topic, "partition_data": [{"index": 0, "records": batch()}]}]
        for _ in range(20):
            wire.send("produce", 9, acks=-1, timeout=1000, topic_data=data)
            wire.send("api_versions", 0)
        # receive() compares every correlation id with the order sent.
        answers = [wire.receive() for _ in range(41)]
        produced = [one.responses[0].partition_responses[0].base_offset for one in answers[1::2]]
        assert produced == list(range(20))


class TestFetch:
    def test_an_offset_inside_a_batch_gives_the_whole_batch(self, wire: Wire, new_topic: NewTopic) -> None:
        topic = new_topic()
        for _ in range(3):
            produce(wire, topic, batch(10))
        answer = fetch(wire, topic, 15)
        assert answer.error_code == NONE
        assert base_offsets(answer.records) == [10, 20]
        assert answer.high_watermark == 30

    def test_the_first_batch_comes_whole_even_above_the_limits(self, wire: Wire, new_topic: NewTopic) -> None:
        topic, data = new_topic(), batch(1, 50_000)
        produce(wire, topic, data)
        produce(wire, topic, data)
        answer = fetch(wire, topic, 0, max_bytes=1, partition_max_bytes=1)
        assert base_offsets(answer.records) == [0]
        assert len(answer.records) == len(data)

    @pytest.mark.parametrize("version", range(4, 13))
    def test_every_version_by_name(self, wire: Wire, new_topic: NewTopic, version: int) -> None:
        topic = new_topic()
        produce(wire, topic, batch(3))
        answer = fetch(wire, topic, 0, version=version)
        assert (answer.error_code, base_offsets(answer.records)) == (NONE, [0])

    @pytest.mark.parametrize("version", range(13, 18))
    def test_every_version_by_topic_id(self, wire: Wire, new_topic: NewTopic, version: int) -> None:
        topic = new_topic()
        produce(wire, topic, batch(3))
        topic_id = wire.ask("metadata", 12, topics=[{"name": topic}]).topics[0].topic_id
        fields = fetch_fields(topic, 0)
        fields["topics"] = [{"topic_id": topic_id, "partitions": fields["topics"][0]["partitions"]}]
        answer = wire.ask("fetch", version, max_wait=0, **fields)
        assert base_offsets(answer.responses[0].partitions[0].records) == [0]

    def test_an_unknown_topic_id(self, wire: Wire) -> None:
        import uuid

        fields = fetch_fields("", 0)
        fields["topics"] = [{"topic_id": uuid.UUID(int=12345), "partitions": fields["topics"][0]["partitions"]}]
        answer = wire.ask("fetch", 13, max_wait=0, **fields)
        assert answer.responses[0].partitions[0].error_code == UNKNOWN_TOPIC_ID

    @pytest.mark.parametrize("offset", [-1, 4, 1000])
    def test_an_offset_outside_the_log(self, wire: Wire, new_topic: NewTopic, offset: int) -> None:
        topic = new_topic()
        produce(wire, topic, batch(3))
        assert fetch(wire, topic, offset).error_code == OFFSET_OUT_OF_RANGE

    def test_the_end_of_the_log_waits_for_data(self, server: ServerProcess, wire: Wire, new_topic: NewTopic) -> None:
        topic = new_topic()
        wire.send("fetch", 12, max_wait=50_000, **fetch_fields(topic, 0))
        time.sleep(0.2)
        with Wire(server.port) as other:
            produce(other, topic, batch())
        began = time.monotonic()
        answer = wire.receive()
        assert base_offsets(answer.responses[0].partitions[0].records) == [0]
        assert time.monotonic() - began < 30

    def test_a_session_answers_only_what_changed(self, wire: Wire, new_topic: NewTopic) -> None:
        busy, quiet = new_topic(), new_topic()
        produce(wire, busy, batch())
        produce(wire, quiet, batch())
        topics = [fetch_fields(name, 1)["topics"][0] for name in (busy, quiet)]
        first = wire.ask("fetch", 12, max_wait=0, min_bytes=0, session_epoch=0, topics=topics)
        assert first.session_id != 0
        assert {one.topic for one in first.responses} == {busy, quiet}
        session = {"max_wait": 0, "min_bytes": 0, "session_id": first.session_id}
        assert wire.ask("fetch", 12, session_epoch=1, **session).responses == ()
        produce(wire, busy, batch())
        changed = wire.ask("fetch", 12, session_epoch=2, **session)
        assert [one.topic for one in changed.responses] == [busy]
        wrong_epoch = wire.ask("fetch", 12, session_epoch=7, **session)
        assert wrong_epoch.error_code == 71  # INVALID_FETCH_SESSION_EPOCH
        unknown = wire.ask("fetch", 12, max_wait=0, min_bytes=0, session_id=123456, session_epoch=1)
        assert unknown.error_code == 70  # FETCH_SESSION_ID_NOT_FOUND


class TestListOffsets:
    def test_by_time_and_by_every_special_timestamp(self, wire: Wire, new_topic: NewTopic) -> None:
        topic = new_topic()
        for at_ms in (NOW_MS - 3000, NOW_MS - 1000, NOW_MS - 2000):
            produce(wire, topic, batch(2, timestamp_ms=at_ms))
        assert list_offset(wire, topic, -1).offset == 6
        assert list_offset(wire, topic, -2).offset == 0
        highest = list_offset(wire, topic, -3)
        assert (highest.offset, highest.timestamp) == (2, NOW_MS - 1000)
        assert list_offset(wire, topic, -4).offset == 0
        assert list_offset(wire, topic, -5).offset == -1
        for wanted_ms, expected in ((0, 0), (NOW_MS - 3000, 0), (NOW_MS - 2999, 2), (NOW_MS - 1000, 2), (NOW_MS, -1)):
            assert list_offset(wire, topic, wanted_ms).offset == expected, wanted_ms

    @pytest.mark.parametrize("version", range(1, 11))
    def test_every_version(self, wire: Wire, new_topic: NewTopic, version: int) -> None:
        topic = new_topic()
        produce(wire, topic, batch(2))
        assert list_offset(wire, topic, -1, version).offset == 2
        assert list_offset(wire, topic, -2, version).offset == 0


class TestTopics:
    @pytest.mark.parametrize("name", ["", ".", "..", "a b", "a/b", "é", "x" * 250])
    def test_an_invalid_name_is_refused_and_not_created(self, wire: Wire, name: str) -> None:
        created = wire.ask(
            "create_topics", 7, topics=[{"name": name, "num_partitions": 1, "replication_factor": 1}], timeout=60_000
        )
        assert created.topics[0].error_code == INVALID_TOPIC_EXCEPTION
        for _ in range(2):
            answer = wire.ask("metadata", 9, topics=[{"name": name}], allow_auto_topic_creation=True)
            assert answer.topics[0].error_code == INVALID_TOPIC_EXCEPTION

    def test_metadata_creates_a_topic_when_allowed(self, wire: Wire, server: ServerProcess) -> None:
        name = f"auto-{time.time_ns()}"
        answer = wire.ask("metadata", 9, topics=[{"name": name}], allow_auto_topic_creation=False)
        assert answer.topics[0].error_code == UNKNOWN_TOPIC_OR_PARTITION
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            answer = wire.ask("metadata", 9, topics=[{"name": name}], allow_auto_topic_creation=True)
            if answer.topics[0].error_code == NONE:
                break
        assert len(answer.topics[0].partitions) == 4
        assert all(partition.leader_id >= 0 for partition in answer.topics[0].partitions)

    def test_a_topic_that_exists_is_not_created_again(self, wire: Wire, new_topic: NewTopic) -> None:
        name = new_topic()
        again = wire.ask(
            "create_topics", 7, topics=[{"name": name, "num_partitions": 1, "replication_factor": 1}], timeout=60_000
        )
        assert again.topics[0].error_code == TOPIC_ALREADY_EXISTS

    def test_validate_only_creates_nothing(self, wire: Wire) -> None:
        topics = [{"name": "validated", "num_partitions": 1, "replication_factor": 1}]
        answer = wire.ask("create_topics", 7, topics=topics, timeout=60_000, validate_only=True)
        assert answer.topics[0].error_code == NONE
        listed = wire.ask("metadata", 9, topics=[{"name": "validated"}], allow_auto_topic_creation=False)
        assert listed.topics[0].error_code == UNKNOWN_TOPIC_OR_PARTITION

    def test_no_partitions_is_refused(self, wire: Wire) -> None:
        topics = [{"name": "none", "num_partitions": 0, "replication_factor": 1}]
        assert wire.ask("create_topics", 7, topics=topics, timeout=60_000).topics[0].error_code == INVALID_PARTITIONS

    def test_a_deleted_topic_is_gone(self, wire: Wire, new_topic: NewTopic) -> None:
        name = new_topic()
        deleted = wire.ask("delete_topics", 4, topic_names=[name], timeout=60_000)
        assert deleted.responses[0].error_code == NONE
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            answer = wire.ask("metadata", 9, topics=[{"name": name}], allow_auto_topic_creation=False)
            if answer.topics[0].error_code == UNKNOWN_TOPIC_OR_PARTITION:
                break
        assert answer.topics[0].error_code == UNKNOWN_TOPIC_OR_PARTITION
        deleted = wire.ask("delete_topics", 4, topic_names=[name], timeout=60_000)
        assert deleted.responses[0].error_code == UNKNOWN_TOPIC_OR_PARTITION

    def test_the_controller_and_the_node_are_told_by_every_version_of_metadata(self, wire: Wire) -> None:
        for version in range(13):
            answer = wire.ask("metadata", version, topics=[])
            assert [broker.host for broker in answer.brokers] == ["127.0.0.1"], version
            if version >= 2:
                assert answer.cluster_id


class TestOffsets:
    @pytest.mark.parametrize("version", range(2, 9))
    def test_metadata_of_a_commit_comes_back(self, wire: Wire, new_topic: NewTopic, version: int) -> None:
        topic, group = new_topic(), f"group-{version}"
        find_coordinator(wire, group)
        offsets = [{"partition_index": 0, "committed_offset": 7, "committed_metadata": "mine"}]
        generation = {"generation_id_or_member_epoch": -1}
        committed = wire.ask(
            "offset_commit", version, group_id=group, topics=[{"name": topic, "partitions": offsets}], **generation
        )
        assert committed.topics[0].partitions[0].error_code == NONE
        fetched = wire.ask("offset_fetch", 7, group_id=group, topics=[{"name": topic, "partition_indexes": [0, 1]}])
        found = {one.partition_index: one for one in fetched.topics[0].partitions}
        assert (found[0].committed_offset, found[0].metadata) == (7, "mine")
        assert (found[1].committed_offset, found[1].metadata) == (-1, "")
        everything = wire.ask("offset_fetch", 7, group_id=group, topics=None)
        assert [one.name for one in everything.topics] == [topic]

    def test_metadata_longer_than_allowed_is_refused(self, wire: Wire, new_topic: NewTopic) -> None:
        topic = new_topic()
        find_coordinator(wire, "group-long")
        offsets = [{"partition_index": 0, "committed_offset": 7, "committed_metadata": "m" * 5000}]
        topics = [{"name": topic, "partitions": offsets}]
        answer = wire.ask("offset_commit", 8, group_id="group-long", topics=topics)
        assert answer.topics[0].partitions[0].error_code == 12  # OFFSET_METADATA_TOO_LARGE


def init_producer_id(wire: Wire) -> Any:
    """A producer id; the first block of them may still be on its way (COORDINATOR_LOAD_IN_PROGRESS)."""
    for _ in range(1000):
        producer = wire.ask("init_producer_id", 4, transactional_id=None)
        if producer.error_code == NONE:
            return producer
        assert producer.error_code == 14
        time.sleep(0.05)
    raise AssertionError(producer)


def find_coordinator(wire: Wire, group: str) -> None:
    """Until the group's coordinator is there: the first call creates the topic of offsets."""
    deadline = time.monotonic() + 60
    while True:
        answer = wire.ask("find_coordinator", 4, key_type=0, coordinator_keys=[group])
        fetched = wire.ask("offset_fetch", 7, group_id=group, topics=None)
        if answer.coordinators[0].error_code == NONE and fetched.error_code == NONE:
            return
        assert time.monotonic() < deadline, (answer, fetched)
        time.sleep(0.05)


class TestDescribe:
    def test_every_topic_setting_has_a_value_a_source_and_synonyms(self, wire: Wire, new_topic: NewTopic) -> None:
        topic = new_topic(retention_ms="12345")
        answer = wire.ask(
            "describe_configs",
            4,
            resources=[{"resource_type": 2, "resource_name": topic, "configuration_keys": None}],
            include_synonyms=True,
        )
        assert answer.results[0].error_code == NONE
        found = {one.name: one for one in answer.results[0].configs}
        assert {"segment.bytes", "cleanup.policy", "max.message.bytes", "min.insync.replicas"} <= found.keys()
        assert found["retention.ms"].value == "12345"
        assert found["retention.ms"].config_source == 1  # DYNAMIC_TOPIC_CONFIG
        assert found["retention.ms"].synonyms[0].name == "retention.ms"
        assert found["segment.bytes"].value == str(1 << 30)
        assert found["segment.bytes"].config_source == 5  # DEFAULT_CONFIG
        assert [one.name for one in found["segment.bytes"].synonyms] == ["log.segment.bytes"]

    def test_the_cluster_is_described(self, wire: Wire, server: ServerProcess) -> None:
        answer = wire.ask("describe_cluster", 0)
        assert answer.error_code == NONE
        assert [(broker.host, broker.port) for broker in answer.brokers] == [("127.0.0.1", server.port)]
        assert answer.cluster_id
