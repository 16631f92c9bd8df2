"""The same question to Tidelog and to Kafka 4.3: topics, configs and cluster metadata, refusals word for word.

What may differ is taken out by name: addresses, ids, times, and configs that describe the node itself.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.compatibility.conftest import start
from tests.compatibility.wire import Wire

pytestmark = pytest.mark.usefixtures("need_java")

# Says who or where the node is, or is said by the peer's own configuration.
OF_THE_NODE = {
    "advertised.listeners",
    "broker.id",
    "controller.listener.names",
    "controller.quorum.voters",
    "listener.security.protocol.map",
    "listeners",
    "log.dir",
    "log.dirs",
    "node.id",
    "process.roles",
}
REPLICAS_OF_INTERNAL_TOPICS = (
    "transaction.state.log.replication.factor",
    "transaction.state.log.min.isr",
    "share.coordinator.state.topic.replication.factor",
    "share.coordinator.state.topic.min.isr",
)
DIFFERENT = {"port", "cluster_id", "topic_id", "throttle_time", "node_id", "broker_id", "controller_id", "leader_id"}
DIFFERENT |= {"replica_nodes", "isr_nodes", "producer_id"}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Wire, Wire]]:
    """(connection to Kafka, connection to Tidelog)"""
    options = dict.fromkeys(REPLICAS_OF_INTERNAL_TOPICS, "1")
    with (
        start("kafka", tmp_path_factory.mktemp("kafka"), **options) as kafka,
        start("tidelog", tmp_path_factory.mktemp("tidelog"), **options) as tidelog,
        Wire(kafka.port) as to_kafka,
        Wire(tidelog.port) as to_tidelog,
    ):
        yield to_kafka, to_tidelog


def plain(value: Any) -> Any:
    """An answer as dicts, without what may differ; lists of named things in order of name."""
    if dataclasses.is_dataclass(value):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return {name: plain(found) for name, found in fields.items() if name not in DIFFERENT}
    if isinstance(value, (tuple, list)):
        return sorted((plain(item) for item in value), key=_name)
    return value


def _name(item: Any) -> str:
    return str(item.get("name", item) if isinstance(item, dict) else item)


def alike(pair: tuple[Wire, Wire], api: str, version: int, **values: Any) -> Any:
    kafka, tidelog = (plain(wire.ask(api, version, **values)) for wire in pair)
    assert tidelog == kafka
    return tidelog


def same_configs(kafka: list[Any], tidelog: list[Any]) -> None:
    expected, found = ({one["name"]: one for one in configs} for configs in (kafka, tidelog))
    for name in (expected.keys() | found.keys()) - OF_THE_NODE:
        assert found.get(name) == expected.get(name), name


def topic(name: str, partitions: int = 1, factor: int = 1, **configs: str | None) -> dict[str, Any]:
    return {
        "name": name,
        "num_partitions": partitions,
        "replication_factor": factor,
        "configs": [{"name": key.replace("_", "."), "value": value} for key, value in configs.items()],
    }


def have_topic(wire: Wire, wanted: dict[str, Any]) -> None:
    """Create it if need be, and wait until the broker knows it: Kafka's lags behind its controller's answer."""
    wire.ask("create_topics", 7, topics=[wanted], timeout=10_000)
    for _ in range(100):
        (found,) = wire.ask("metadata", 9, topics=[{"name": wanted["name"]}], allow_auto_topic_creation=False).topics
        if found.error_code == 0 and all(each.error_code == 0 for each in found.partitions):
            return
        time.sleep(0.1)
    raise AssertionError(f"{wanted['name']} was created but is not known after 10 s")


def by_hand(name: str, *assignments: tuple[int, list[int]], partitions: int = -1, factor: int = -1) -> dict[str, Any]:
    pairs = [{"partition_index": index, "broker_ids": brokers} for index, brokers in assignments]
    return topic(name, partitions, factor) | {"assignments": pairs}


REFUSED = [
    topic("bad name"),
    topic("."),
    topic("x" * 250),
    topic("zero", 0),
    topic("minus", -2),
    topic("none", 1, 0),
    topic("two", 1, 2),
    topic("huge", 20_000),
    topic("__cluster_metadata"),
    topic("unknown", foo="1"),
    topic("null", retention_ms=None),
    topic("text", retention_ms="x"),
    topic("low", retention_ms="-5"),
    topic("small", segment_bytes="10"),
    topic("policy", cleanup_policy="compact,bogus"),
    topic("codec", compression_type="zip"),
    topic("yes", preallocate="yes"),
    topic("ratio", min_cleanable_dirty_ratio="2"),
    topic("gzip", compression_gzip_level="12"),
    topic("throttled", leader_replication_throttled_replicas="abc"),
    topic("isr", min_insync_replicas="0"),
    topic("lag", min_compaction_lag_ms="10", max_compaction_lag_ms="5"),
    topic("tiered", remote_storage_enable="true"),
    by_hand("hole", (1, [1])),
    by_hand("empty", (0, [])),
    by_hand("twice", (0, [1]), (0, [1])),
    by_hand("same", (0, [1, 1])),
    by_hand("nobody", (0, [77])),
    by_hand("counted", (0, [1]), partitions=1),
    by_hand("replicated", (0, [1]), factor=1),
]


@pytest.mark.parametrize("refused", REFUSED, ids=lambda one: one["name"][:20])
def test_a_topic_is_refused_with_the_same_words(pair: tuple[Wire, Wire], refused: dict[str, Any]) -> None:
    answer = alike(pair, "create_topics", 7, topics=[refused], timeout=10_000)
    assert answer["topics"][0]["error_code"] != 0


@pytest.mark.parametrize("version", range(2, 8))
def test_topics_are_created_validated_and_deleted(pair: tuple[Wire, Wire], version: int) -> None:
    good = [
        topic(f"plain-{version}", 3),
        topic(f"kept-{version}", cleanup_policy="compact, delete", retention_ms=" 77 "),
        topic(f"default-{version}", -1, -1) if version >= 4 else topic(f"default-{version}"),
        by_hand(f"placed-{version}", (0, [1]), (1, [1])),
        topic(f"double-{version}"),
        topic(f"double-{version}"),
    ]
    for validate_only in (True, False):
        answers = [
            plain(wire.ask("create_topics", version, topics=good, timeout=10_000, validate_only=validate_only))
            for wire in pair
        ]
        for kafka, tidelog in zip(answers[0]["topics"], answers[1]["topics"]):
            same_configs(kafka.pop("configs", None) or [], tidelog.pop("configs", None) or [])
            assert tidelog == kafka
    alike(pair, "create_topics", version, topics=[topic(f"plain-{version}")], timeout=10_000)
    names = [f"plain-{version}", f"kept-{version}", "not there", "again", "again"]
    if version < 6:
        alike(pair, "delete_topics", version, topic_names=names, timeout=10_000)
    else:
        alike(pair, "delete_topics", 6, topics=[{"name": name, "topic_id": None} for name in names], timeout=10_000)


@pytest.mark.parametrize("version", range(1, 5))
@pytest.mark.parametrize(
    ("kind", "name", "keys"),
    [
        (2, "described", None),
        (2, "described", ["retention.ms", "nope"]),
        (2, "not there", None),
        (2, "not-there", None),
        (4, "1", None),
        (4, "9", None),
        (4, "x", None),
        (8, "", None),
        (8, "9", None),
        (16, "", None),
        (16, "mine", None),
        (32, "", None),
        (32, "mine", None),
    ],
)
def test_configs_are_described_alike(
    pair: tuple[Wire, Wire], version: int, kind: int, name: str, keys: list[str] | None
) -> None:
    for wire in pair:
        have_topic(wire, topic("described", retention_ms="5"))
    resource = {"resource_type": kind, "resource_name": name, "configuration_keys": keys}
    answers = [
        plain(wire.ask("describe_configs", version, resources=[resource], include_synonyms=True)) for wire in pair
    ]
    configs = [answer["results"][0].pop("configs") for answer in answers]
    assert answers[1] == answers[0]
    same_configs(*configs)


@pytest.mark.parametrize("version", range(14))
def test_metadata_is_alike(pair: tuple[Wire, Wire], version: int) -> None:
    for wire in pair:
        have_topic(wire, topic("looked-up", 2))
    values: dict[str, Any] = {"allow_auto_topic_creation": False} if version >= 4 else {}
    names = ["looked-up", "bad name", *(["not-there"] if version >= 4 else [])]
    alike(pair, "metadata", version, topics=[{"name": name} for name in names], **values)
    if version >= 8:
        asked = {"include_topic_authorized_operations": True}
        alike(pair, "metadata", version, topics=[{"name": "looked-up"}], **asked)


def test_a_topic_asked_for_is_created(pair: tuple[Wire, Wire]) -> None:
    alike(pair, "metadata", 9, topics=[{"name": "on-demand"}], allow_auto_topic_creation=True)
    time.sleep(1)
    answer = alike(pair, "metadata", 9, topics=[{"name": "on-demand"}], allow_auto_topic_creation=True)
    assert len(answer["topics"][0]["partitions"]) == 4


@pytest.mark.parametrize("version", range(3))
def test_the_cluster_is_described_alike(pair: tuple[Wire, Wire], version: int) -> None:
    alike(pair, "describe_cluster", version, include_cluster_authorized_operations=True)
    if version >= 1:
        for endpoint in (0, 2, 3):
            alike(pair, "describe_cluster", version, endpoint_type=endpoint)


@pytest.mark.parametrize("version", range(7))
def test_a_groups_coordinator_is_found_alike(pair: tuple[Wire, Wire], version: int) -> None:
    values: dict[str, Any] = {"coordinator_keys": ["a", "b"]} if version >= 4 else {"key": "a"}
    for wire in pair:
        for _ in range(100):
            answer = plain(wire.ask("find_coordinator", version, **values))
            if all(one["error_code"] == 0 for one in answer.get("coordinators", [answer])):
                break
            time.sleep(0.1)
    alike(pair, "find_coordinator", version, **values)


@pytest.mark.parametrize("version", range(6))
def test_producer_ids_are_handed_out_alike(pair: tuple[Wire, Wire], version: int) -> None:
    for _ in range(100):  # Kafka fetches its first block in the background
        if pair[0].ask("init_producer_id", 0, transactional_id=None, transaction_timeout=1000).error_code == 0:
            break
        time.sleep(0.1)
    for transactional_id in (None, ""):
        alike(
            pair, "init_producer_id", version, transactional_id=transactional_id, transaction_timeout=1000,
            **({"producer_epoch": -1, "producer_id": -1} if version >= 3 else {}),
        )  # fmt: skip
