"""Odd frames and administration requests to Tidelog and to Kafka 4.3 alike; `test_answers_side_by_side.py` has more."""

from __future__ import annotations

import struct
import uuid
from collections.abc import Callable
from typing import Any

import pytest

from tests.compatibility.side_by_side import Brokers, Each, header
from tests.compatibility.wire import Closed, Wire

NewTopic = Callable[..., str]
NO_SUCH_ID = uuid.UUID(int=77)
# What is served, and which features follow from it, differs by intent.
OF_VERSIONS = frozenset({"finalized_features_epoch", "api_keys", "finalized_features", "supported_features"})


def int32(*values: int) -> bytes:
    return struct.pack(f">{len(values)}i", *values)


def text(value: str) -> bytes:
    return struct.pack(">h", len(value)) + value.encode()


# Name: (API key, version, body, whether the header is the flexible one).
FRAMES: dict[str, tuple[int, int, bytes, bool]] = {
    "ApiVersions 0": (18, 0, b"", False),
    "ApiVersions 3": (18, 3, b"\x02a\x021\x00", True),
    "ApiVersions 4": (18, 4, b"\x02a\x021\x00", True),
    "ApiVersions 0 and more": (18, 0, b"xyz", False),
    "ApiVersions 3 and more": (18, 3, b"\x02a\x021\x00xyz", True),
    "ApiVersions cut": (18, 3, b"\x02a", True),
    "ApiVersions of a name with a space": (18, 3, b"\x04a b\x021\x00", True),
    "ApiVersions without name": (18, 3, b"\x01\x021\x00", True),
    "ApiVersions of null": (18, 3, b"\x00\x021\x00", True),
    "ApiVersions with tags": (18, 3, b"\x02a\x021\x01\x05\x02ab", True),
    "ApiVersions of version -": (18, 3, b"\x02a\x02-\x00", True),
    "ApiVersions 5": (18, 5, b"\x02a\x021\x00", True),
    "ApiVersions 99": (18, 99, b"", True),
    "ApiVersions -1": (18, -1, b"", False),
    "Metadata 0 and more": (3, 0, int32(0) + b"abc", False),
    "Metadata 0, null": (3, 0, int32(-1), False),
    "Metadata 1, nothing": (3, 1, int32(0), False),
    "Metadata 1, cut": (3, 1, int32(5), False),
    "Metadata 1, too many": (3, 1, int32(2**31 - 1), False),
    "Metadata 1, count -2": (3, 1, int32(-2), False),
    "Metadata 1, name cut": (3, 1, int32(1) + b"\x00\x05ab", False),
    "Metadata 1, name null": (3, 1, int32(1) + b"\xff\xff", False),
    "Metadata 1, length -16": (3, 1, int32(1) + b"\xff\xf0", False),
    "Metadata 9, truth of 7": (3, 9, b"\x01\x07\x07\x07\x00", True),
    "Metadata 9 and more": (3, 9, b"\x01\x00\x00\x00\x00zzz", True),
    "Metadata 9 with tags": (3, 9, b"\x01\x00\x00\x00\x01\x07\x01a", True),
    "Metadata 9 with tags cut": (3, 9, b"\x01\x00\x00\x00\x01\x07\x09a", True),
    "Metadata 14": (3, 14, b"", True),
    "Metadata -1": (3, -1, b"", False),
    "Heartbeat 0 cut": (12, 0, text("g") + int32(1) + b"\x00\x05m", False),
    "ListOffsets 0": (2, 0, int32(-1, 0), False),
    "ListOffsets 1": (2, 1, int32(-1, 0), False),
    "Produce 0": (0, 0, struct.pack(">hii", 1, 100, 0), False),
    "Produce 2": (0, 2, struct.pack(">hii", 1, 100, 0), False),
    "Produce 3": (0, 3, struct.pack(">hhii", -1, 1, 100, 0), False),
    "Produce 9": (0, 9, b"\x00\x00\x01\x00\x00\x00\x00\x01\x00", True),
    "Produce 9 cut": (0, 9, b"\x00\xff\xff", True),
    "Produce 14": (0, 14, b"\x00\x00\x01\x00\x00\x00\x00\x01\x00", True),
    "Fetch 3": (1, 3, b"", False),
    "Fetch 12 cut": (1, 12, b"\x00\xff\xff", True),
    "Fetch 19": (1, 19, b"", True),
    "no such API": (999, 0, b"", False),
    "API -1": (-1, 0, b"", False),
    "an API of brokers of old": (7, 0, b"", False),
    "an API of controllers": (52, 0, b"", True),
}
HEADERS: dict[str, dict[str, bytes | None]] = {
    "client id of no length": {"client_id": b""},
    "no client id": {"client_id": None},
    "client id of no encoding": {"client_id": b"\xff\xfe"},
    "long client id": {"client_id": b"x" * 30_000},
    "tags": {"tags": b"\x01\x63\x02ab"},
}


def ask_frame(brokers: Brokers, name: str, **of_header: Any) -> None:
    key, version, body, flexible = FRAMES[name]
    answered_version = 0 if key == 18 and not 0 <= version <= 4 else version
    brokers.ignored = OF_VERSIONS
    brokers.same_frame(header(key, version, flexible, **of_header) + body, key, answered_version)


@pytest.mark.parametrize("name", FRAMES)
def test_a_frame(brokers: Brokers, name: str) -> None:
    ask_frame(brokers, name)


@pytest.mark.parametrize("frame", ["ApiVersions 0", "ApiVersions 3", "Metadata 1, nothing", "Produce 9"])
@pytest.mark.parametrize("name", HEADERS)
def test_a_header(brokers: Brokers, name: str, frame: str) -> None:
    if name != "tags" or FRAMES[frame][3]:
        ask_frame(brokers, frame, **HEADERS[name])


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"\0" * 7,
        struct.pack(">hhi", 18, 0, 1),
        struct.pack(">hhih", 18, 0, 1, 5) + b"ab",
        struct.pack(">hhih", 18, 0, 1, -7),
        struct.pack(">hhih", 18, 3, 1, -1),
    ],
    ids=["nothing", "too short", "no client id", "client id cut", "length -7", "no tags"],
)
def test_a_frame_that_is_none(brokers: Brokers, frame: bytes) -> None:
    def closes(wire: Wire) -> bool:
        wire.send_frame(frame)
        try:
            wire.receive_frame()
        except Closed:
            return True
        return False

    kafka, tidelog = brokers.in_both(closes)
    assert tidelog == kafka


@pytest.mark.parametrize("version", range(5))
def test_what_is_advertised_is_in_the_range_of_kafka(brokers: Brokers, version: int) -> None:
    software = {"client_software_name": "a", "client_software_version": "1"} if version >= 3 else {}
    answers = brokers.get("api_versions", version, **software)
    kafka, tidelog = (
        {one.api_key: (one.min_version, one.max_version) for one in keys} for keys in answers.of("api_keys")
    )
    assert {key: kafka[key] for key in tidelog} == tidelog


@pytest.mark.parametrize("version", range(14))
def test_metadata(brokers: Brokers, topic_in_both: NewTopic, version: int) -> None:
    topic = topic_in_both(2)
    silent = {"allow_auto_topic_creation": False} if version >= 4 else {}

    def ask(*topics: str | dict[str, Any], **values: Any) -> None:
        wanted = [{"name": one} if isinstance(one, str) else one for one in topics]
        brokers.same("metadata", version, topics=wanted, **silent, **values)

    ask(topic, topic)
    if version >= 1:
        ask()
    if version >= 4:
        ask(topic, "a b", "", "x" * 300, "..", "__transaction_state", "__cluster_metadata", "nowhere")
    if version >= 8:
        ask(topic, "nowhere", include_topic_authorized_operations=True)
    if 8 <= version <= 10:
        ask(topic, include_cluster_authorized_operations=True)
    if version >= 10:
        known = brokers.topic_id(topic)
        for name, topic_id in ((topic, known), (topic, NO_SUCH_ID), (None, NO_SUCH_ID)):
            ask({"name": name, "topic_id": topic_id})
        if version < 12:  # from then on Kafka fails over it
            ask({"name": None, "topic_id": None})
    if version >= 12:
        by_id = {"name": None, "topic_id": known}
        ask(by_id)
        ask(by_id, {"name": topic, "topic_id": None})
        ask(by_id, by_id, {"name": None, "topic_id": NO_SUCH_ID})


@pytest.mark.parametrize("version", [4, 9, 12])
def test_what_is_created_on_demand(brokers: Brokers, version: int) -> None:
    topics = [{"name": name} for name in (f"on-demand-{version}", "a b", "__cluster_metadata")]
    brokers.same("metadata", version, topics=topics, allow_auto_topic_creation=True)


def new(name: str, partitions: int = 1, factor: int = 1, **config: str) -> dict[str, Any]:
    configs = [{"name": key.replace("_", "."), "value": value} for key, value in config.items()]
    return {"name": name, "num_partitions": partitions, "replication_factor": factor, "configs": configs}


def placed(name: str, *replicas: tuple[int, list[int]], partitions: int = -1) -> dict[str, Any]:
    assignments = [{"partition_index": index, "broker_ids": brokers} for index, brokers in replicas]
    return {**new(name, partitions, -1), "assignments": assignments}


# NEW becomes a name not used yet, OLD that of a topic that is there.
CREATED: dict[str, list[dict[str, Any]]] = {
    "nothing": [],
    "good": [new("NEW")],
    "twice": [new("NEW"), new("NEW")],
    "without name": [new("")],
    "collide with each other": [new("NEW.x"), new("NEW_x")],
    "there already": [new("OLD")],
    "there already, wrong config": [new("OLD", foo="1")],
    "wrong in two ways": [new("NEW", 0, 5)],
    "wrong in three ways": [new("NEW", 0, 1, foo="1")],
    "defaults": [new("NEW", -1, -1)],
    "factor -2": [new("NEW", 1, -2)],
    "factor 32767": [new("NEW", 1, 32_767)],
    "too many partitions": [new("NEW", 2**31 - 1)],
    "config twice": [{**new("NEW"), "configs": 2 * new("", retention_ms="1")["configs"]}],
    "config without name": [{**new("NEW"), "configs": [{"name": "", "value": "1"}]}],
    "of different fates": [new("NEW"), new("a b"), new("OLD"), new("NEW-zero", 0)],
    "two partitions by hand": [placed("NEW", (1, [1]), (0, [1]))],
    "partition -1 by hand": [placed("NEW", (-1, [1]))],
    "uneven by hand": [placed("NEW", (0, [1]), (1, [1, 1]))],
    "broker -1 by hand": [placed("NEW", (0, [-1]))],
    "unknown brokers by hand": [placed("NEW", (0, [1, 2]))],
    "by hand and counted": [placed("NEW", (0, [1]), partitions=2)],
}
SETTINGS = {
    "retention.ms": [" 5 ", "", "+5"],
    "cleanup.policy": ["", "delete,compact", "compact,compact"],
    "unclean.leader.election.enable": ["TRUE"],
    "segment.bytes": ["2147483648", "0x1000000"],
    "min.cleanable.dirty.ratio": ["1e-1", "NaN"],
    "message.format.version": ["3.0"],
    "message.downconversion.enable": ["true"],
    "message.timestamp.type": ["foo"],
    "message.timestamp.before.max.ms": ["-1"],
    "compression.zstd.level": ["99"],
    "compression.lz4.level": ["0"],
    "remote.log.copy.disable": ["true"],
    "follower.replication.throttled.replicas": ["*"],
    "flush.messages": ["0"],
    "segment.index.bytes": ["3"],
    "segment.jitter.ms": ["-1"],
    "index.interval.bytes": ["-1"],
    "max.message.bytes": ["-1"],
    "min.insync.replicas": ["5"],
    "delete.retention.ms": ["-1"],
    "file.delete.delay.ms": ["-1"],
    "internal.segment.bytes": ["5"],
    "log.retention.ms": ["5"],
}
CREATED |= {
    f"{key}={value}": [{**new("NEW"), "configs": [{"name": key, "value": value}]}]
    for key, values in SETTINGS.items()
    for value in values
}


@pytest.mark.parametrize("validate_only", [True, False])
@pytest.mark.parametrize("version", [2, 4, 5, 7])
def test_topics_are_created(brokers: Brokers, topic_in_both: NewTopic, version: int, validate_only: bool) -> None:
    old = topic_in_both()
    brokers.ignored = frozenset({"configs"})  # compared in test_answers_side_by_side.py
    for number, topics in enumerate(CREATED.values()):
        fresh = f"new-{version}-{validate_only}-{number}"
        wanted = [{**one, "name": one["name"].replace("NEW", fresh).replace("OLD", old)} for one in topics]
        answers = brokers.get("create_topics", version, topics=wanted, timeout=10_000, validate_only=validate_only)
        for one in (topic for answer in answers for topic in answer.topics):
            if version >= 7 and one.topic_id:
                brokers.topic_names[one.topic_id] = f"id of {one.name}"
        brokers.compare(answers)


@pytest.mark.parametrize("version", range(1, 7))
def test_topics_are_deleted(brokers: Brokers, topic_in_both: NewTopic, version: int) -> None:
    by_name, by_id = topic_in_both(), topic_in_both()

    def delete(*topics: str | tuple[str | None, Any]) -> None:
        pairs = [(one, None) if isinstance(one, str) else one for one in topics]
        if version < 6:
            wanted: dict[str, Any] = {"topic_names": [name for name, _ in pairs]}
        else:
            wanted = {"topics": [{"name": name, "topic_id": topic_id} for name, topic_id in pairs]}
        brokers.same("delete_topics", version, timeout=10_000, **wanted)

    delete()
    for name in ("nowhere", "", "a b", "x" * 300, "__cluster_metadata"):
        delete(name)
    delete(by_name, by_name)
    delete(by_name, "nowhere")
    delete(by_name)
    if version == 6:
        known: Each = brokers.topic_id(by_id)
        for topics in ([(None, NO_SUCH_ID)] * 2, [(None, None)], [(by_id, known)], [(None, known)] * 2):
            delete(*topics)
        delete((None, known), by_id)
        delete((None, known))
        delete((None, known))


TOPIC, BROKER, LOGGER, METRICS, GROUP = 2, 4, 8, 16, 32


@pytest.mark.parametrize("version", range(1, 5))
def test_configs_are_described(brokers: Brokers, topic_in_both: NewTopic, version: int) -> None:
    topic = topic_in_both()

    def ask(*resources: tuple[int, str, list[str] | None], **values: Any) -> None:
        wanted = [
            {"resource_type": kind, "resource_name": name, "configuration_keys": keys} for kind, name, keys in resources
        ]
        brokers.same("describe_configs", version, resources=wanted, **values)

    ask()
    retention = (TOPIC, topic, ["retention.ms"])
    ask(retention, include_synonyms=True)
    ask(retention, (TOPIC, topic, ["segment.ms"]))
    ask(retention, (BROKER, "9", None), (TOPIC, "nowhere", None))
    ask((BROKER, "1", ["log.retention.ms", "log.retention.hours", "num.io.threads"]), include_synonyms=True)
    for keys in (["retention.ms", "retention.ms"], ["nope"], ["retention.ms", "nope"]):
        ask((TOPIC, topic, keys))
    for kind, name in ((TOPIC, ""), (TOPIC, "a b"), (BROKER, "2"), (BROKER, "x"), (BROKER, "-1"), (METRICS, "")):
        ask((kind, name, None))
    for kind, name, key in (
        (METRICS, "s", "interval.ms"),
        (GROUP, "g", "consumer.session.timeout.ms"),
        (LOGGER, "1", "x"),
    ):
        ask((kind, name, [key]))
    brokers.ignored = frozenset({"error_message"})
    for kind in (-1, 0, 1, 3, 5, 7, 77):
        ask((kind, topic, None))


@pytest.mark.parametrize("version", range(3))
def test_the_cluster_is_described(brokers: Brokers, version: int) -> None:
    for endpoint in (-1, 0, 1, 2, 3, 99) if version else (1,):
        values: dict[str, Any] = {"endpoint_type": endpoint} if version else {}
        for fenced in (True, False):
            values |= {"include_fenced_brokers": fenced} if version >= 2 else {}
            brokers.same("describe_cluster", version, include_cluster_authorized_operations=fenced, **values)
