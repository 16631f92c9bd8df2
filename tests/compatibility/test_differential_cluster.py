"""Odd requests of those who administer a cluster, to Tidelog and to Kafka 4.3 alike: each a cluster of one node."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any

import pytest

from tests.compatibility.side_by_side import Brokers

NewTopic = Callable[..., str]
TOPIC, BROKER, LOGGER, METRICS, GROUP = 2, 4, 8, 16, 32
SET, DELETE, APPEND, SUBTRACT = range(4)
SHOWN = ["retention.ms", "cleanup.policy", "compression.type", "preallocate", "max.message.bytes", "segment.bytes"]
NODE, NOBODY = 1, 77


# --------------------------------------------------------------------------------------------------- create partitions


def grow(name: str, count: int, *replicas: list[int], given: bool = False) -> dict[str, Any]:
    placed = [{"broker_ids": each} for each in replicas] if replicas or given else None
    return {"name": name, "count": count, "assignments": placed}


GROWTH: dict[str, Callable[[str], list[dict[str, Any]]]] = {
    "to three": lambda name: [grow(name, 3)],
    "to as many": lambda name: [grow(name, 2)],
    "to fewer": lambda name: [grow(name, 1)],
    "to none": lambda name: [grow(name, 0)],
    "to -1": lambda name: [grow(name, -1)],
    "of nothing": lambda name: [grow("nowhere", 3)],
    "of an empty name": lambda name: [grow("", 3)],
    "of a name that is none": lambda name: [grow("a b", 3)],
    "of nobody": lambda name: [],
    "twice": lambda name: [grow(name, 3), grow(name, 4)],
    "where": lambda name: [grow(name, 3, [NODE])],
    "where, too few": lambda name: [grow(name, 4, [NODE])],
    "where, too many": lambda name: [grow(name, 3, [NODE], [NODE])],
    "where, none": lambda name: [grow(name, 3, given=True)],
    "where, no replicas": lambda name: [grow(name, 3, [])],
    "where nobody is": lambda name: [grow(name, 3, [NOBODY])],
    "where, two replicas": lambda name: [grow(name, 3, [NODE, NOBODY])],
    "where, the same twice": lambda name: [grow(name, 3, [NODE, NODE])],
}


@pytest.mark.parametrize("version", range(4))
@pytest.mark.parametrize("validate_only", [True, False])
@pytest.mark.parametrize("case", GROWTH)
def test_topics_grow(brokers: Brokers, topic_in_both: NewTopic, case: str, validate_only: bool, version: int) -> None:
    topics = GROWTH[case](topic_in_both(2))
    brokers.same("create_partitions", version, topics=topics, timeout=10_000, validate_only=validate_only)


# ------------------------------------------------------------------------------------------------------------- configs


def change(kind: int, name: str, *configs: tuple[str, int, str | None]) -> dict[str, Any]:
    entries = [{"name": key, "config_operation": operation, "value": value} for key, operation, value in configs]
    return {"resource_type": kind, "resource_name": name, "configs": entries}


CHANGES: dict[str, tuple[str, int, str | None]] = {
    "set": ("retention.ms", SET, "1000"),
    "set to nonsense": ("retention.ms", SET, "soon"),
    "set below": ("retention.ms", SET, "-2"),
    "set to nothing": ("retention.ms", SET, ""),
    "set to null": ("retention.ms", SET, None),
    "delete": ("retention.ms", DELETE, None),
    "delete with a value": ("retention.ms", DELETE, "x"),
    "append to a number": ("retention.ms", APPEND, "5"),
    "subtract from a number": ("retention.ms", SUBTRACT, "5"),
    "append": ("cleanup.policy", APPEND, "compact"),
    "append what is there": ("cleanup.policy", APPEND, "delete"),
    "append two": ("cleanup.policy", APPEND, "compact,delete"),
    "append nonsense": ("cleanup.policy", APPEND, "burn"),
    "subtract": ("cleanup.policy", SUBTRACT, "delete"),
    "subtract what is not there": ("cleanup.policy", SUBTRACT, "compact"),
    "append null": ("cleanup.policy", APPEND, None),
    "unknown": ("no.such.config", SET, "1"),
    "unknown deleted": ("no.such.config", DELETE, None),
    "no name": ("", SET, "1"),
    "enumeration": ("compression.type", SET, "brotli"),
    "enumeration that is right": ("compression.type", SET, "zstd"),
    "boolean": ("preallocate", SET, "perhaps"),
    "boolean that is right": ("preallocate", SET, "TRUE"),
    "spaces": ("retention.ms", SET, " 1000 "),
    "too large": ("segment.bytes", SET, "99999999999"),
    "throttled replicas": ("leader.replication.throttled.replicas", SET, "0:1,1:1"),
    "all throttled": ("leader.replication.throttled.replicas", SET, "*"),
    "throttled nonsense": ("leader.replication.throttled.replicas", SET, "0"),
    "min insync": ("min.insync.replicas", SET, "2"),
    "min insync of none": ("min.insync.replicas", SET, "0"),
}


@pytest.mark.parametrize("version", range(2))
@pytest.mark.parametrize("validate_only", [True, False])
@pytest.mark.parametrize("case", CHANGES)
def test_a_config_of_a_topic(
    brokers: Brokers, topic_in_both: NewTopic, case: str, validate_only: bool, version: int
) -> None:
    name = topic_in_both(max_message_bytes="70000")
    resources = [change(TOPIC, name, CHANGES[case])]
    brokers.same("incremental_alter_configs", version, resources=resources, validate_only=validate_only)
    described = {"resource_type": TOPIC, "resource_name": name, "configuration_keys": SHOWN}
    brokers.same("describe_configs", 4, resources=[described])


BROKER_CHANGES: dict[str, tuple[str, int, str | None]] = {
    "what can change": ("log.retention.ms", SET, "123456789"),
    "back": ("log.retention.ms", DELETE, None),
    "nonsense": ("log.retention.ms", SET, "soon"),
    "what cannot change": ("node.id", SET, "5"),
    "what cannot change either": ("log.dirs", SET, "/tmp"),
    "unknown": ("no.such.config", SET, "1"),
    "unknown back": ("no.such.config", DELETE, None),
    "rate": ("leader.replication.throttled.rate", SET, "1000"),
    "rate back": ("leader.replication.throttled.rate", DELETE, None),
    "topic's own": ("retention.ms", SET, "1000"),
    "null": ("log.retention.ms", SET, None),
}


@pytest.mark.parametrize("validate_only", [True, False])
@pytest.mark.parametrize("name", ["", str(NODE)])
@pytest.mark.parametrize("case", BROKER_CHANGES)
def test_a_config_of_brokers(brokers: Brokers, case: str, name: str, validate_only: bool) -> None:
    resources = [change(BROKER, name, BROKER_CHANGES[case])]
    brokers.same("incremental_alter_configs", 1, resources=resources, validate_only=validate_only)
    back = [change(BROKER, name, (BROKER_CHANGES[case][0], DELETE, None))]
    brokers.get("incremental_alter_configs", 1, resources=back, validate_only=False)


RESOURCES: dict[str, Callable[[str], list[dict[str, Any]]]] = {
    "none": lambda name: [],
    "no changes": lambda name: [change(TOPIC, name)],
    "a topic twice": lambda name: [change(TOPIC, name, CHANGES["set"])] * 2,
    "a config twice": lambda name: [change(TOPIC, name, CHANGES["set"], CHANGES["delete"])],
    "no topic": lambda name: [change(TOPIC, "nowhere", CHANGES["set"])],
    "no topic's name": lambda name: [change(TOPIC, "a b", CHANGES["set"])],
    "an empty topic": lambda name: [change(TOPIC, "", CHANGES["set"])],
    "some wrong": lambda name: [change(TOPIC, "nowhere", CHANGES["set"]), change(TOPIC, name, CHANGES["set"])],
    "some changes wrong": lambda name: [change(TOPIC, name, CHANGES["set"], CHANGES["unknown"])],
    "another broker": lambda name: [change(BROKER, str(NOBODY), BROKER_CHANGES["rate"])],
    "no broker": lambda name: [change(BROKER, "x", BROKER_CHANGES["rate"])],
    "type 0": lambda name: [change(0, name, CHANGES["set"])],
    "type 3": lambda name: [change(3, name, CHANGES["set"])],
    "type 99": lambda name: [change(99, name, CHANGES["set"])],
    "type -1": lambda name: [change(-1, name, CHANGES["set"])],
}


@pytest.mark.parametrize("version", range(2))
@pytest.mark.parametrize("case", RESOURCES)
def test_resources_to_change(brokers: Brokers, topic_in_both: NewTopic, case: str, version: int) -> None:
    resources = RESOURCES[case](topic_in_both())
    brokers.same("incremental_alter_configs", version, resources=resources, validate_only=False)


@pytest.mark.parametrize("version", range(3))
@pytest.mark.parametrize("validate_only", [True, False])
@pytest.mark.parametrize(
    "configs",
    [
        {},
        {"retention.ms": "1000"},
        {"retention.ms": "soon"},
        {"retention.ms": None},
        {"no.such.config": "1"},
        {"retention.ms": "1000", "cleanup.policy": "compact"},
    ],
    ids=["none", "one", "nonsense", "null", "unknown", "two"],
)
def test_all_configs_of_a_topic_are_replaced(
    brokers: Brokers, topic_in_both: NewTopic, configs: dict[str, str | None], validate_only: bool, version: int
) -> None:
    name = topic_in_both(max_message_bytes="70000")
    entries = [{"name": key, "value": value} for key, value in configs.items()]
    resources = [{"resource_type": TOPIC, "resource_name": name, "configs": entries}]
    brokers.same("alter_configs", version, resources=resources, validate_only=validate_only)
    described = {"resource_type": TOPIC, "resource_name": name, "configuration_keys": SHOWN}
    brokers.same("describe_configs", 4, resources=[described])


@pytest.mark.parametrize("kind", [0, 3, LOGGER, 99])
def test_all_configs_of_something_else_are_not_replaced(brokers: Brokers, kind: int) -> None:
    resources = [{"resource_type": kind, "resource_name": "1", "configs": [{"name": "a", "value": "b"}]}]
    brokers.same("alter_configs", 2, resources=resources, validate_only=False)


# ----------------------------------------------------------------------------------------------- elections and moves


@pytest.mark.parametrize("version", range(3))
@pytest.mark.parametrize("kind", [0, 1, 2, -1])
@pytest.mark.parametrize("case", ["all", "none", "one", "no topic", "no partition", "twice", "partition -1"])
def test_leaders_are_elected(brokers: Brokers, topic_in_both: NewTopic, case: str, kind: int, version: int) -> None:
    name = topic_in_both(2)
    partitions: dict[str, Any] = {
        "all": None,
        "none": [],
        "one": [{"topic": name, "partitions": [0]}],
        "no topic": [{"topic": "nowhere", "partitions": [0]}],
        "no partition": [{"topic": name, "partitions": [7, 0]}],
        "twice": [{"topic": name, "partitions": [0, 0]}],
        "partition -1": [{"topic": name, "partitions": [-1]}],
    }
    values = {"election_type": kind} if version else {}
    if kind and not version:
        return
    if case == "all":
        brokers.ignored = frozenset({"replica_election_results"})  # other topics there are not the same
    brokers.same("elect_leaders", version, topic_partitions=partitions[case], timeout=10_000, **values)


MOVES: dict[str, Callable[[str], list[dict[str, Any]]]] = {
    "to where it is": lambda name: [move(name, 0, [NODE])],
    "to nobody": lambda name: [move(name, 0, [NOBODY])],
    "to one and nobody": lambda name: [move(name, 0, [NODE, NOBODY])],
    "to the same twice": lambda name: [move(name, 0, [NODE, NODE])],
    "to no replicas": lambda name: [move(name, 0, [])],
    "to -1": lambda name: [move(name, 0, [-1])],
    "cancelled": lambda name: [move(name, 0, None)],
    "of nothing": lambda name: [move("nowhere", 0, [NODE])],
    "of nothing, cancelled": lambda name: [move("nowhere", 0, None)],
    "of no partition": lambda name: [move(name, 9, [NODE])],
    "of partition -1": lambda name: [move(name, -1, [NODE])],
    "of a topic twice": lambda name: [move(name, 0, [NODE]), move(name, 1, [NODE])],
    "of a partition twice": lambda name: [move(name, 0, [NODE]), move(name, 0, [NODE])],
    "of none": lambda name: [],
    "some wrong": lambda name: [move("nowhere", 0, [NODE]), move(name, 0, [NODE])],
}


def move(name: str, index: int, replicas: list[int] | None) -> dict[str, Any]:
    return {"name": name, "partitions": [{"partition_index": index, "replicas": replicas}]}


@pytest.mark.parametrize("version", range(2))
@pytest.mark.parametrize("growing", [True, False])
@pytest.mark.parametrize("case", MOVES)
def test_partitions_move(brokers: Brokers, topic_in_both: NewTopic, case: str, growing: bool, version: int) -> None:
    values = {"allow_replication_factor_change": growing} if version else {}
    topics = MOVES[case](topic_in_both(2))
    if not topics:
        # Kafka answers nothing with an empty message and the default, anything else with null and what was asked.
        brokers.ignored = frozenset({"error_message", "allow_replication_factor_change"})
    brokers.same("alter_partition_reassignments", version, topics=topics, timeout=10_000, **values)


@pytest.mark.parametrize("case", ["all", "none", "one", "no topic", "no partition"])
def test_moves_are_listed(brokers: Brokers, topic_in_both: NewTopic, case: str) -> None:
    name = topic_in_both()
    topics: dict[str, Any] = {
        "all": None,
        "none": [],
        "one": [{"name": name, "partition_indexes": [0]}],
        "no topic": [{"name": "nowhere", "partition_indexes": [0]}],
        "no partition": [{"name": name, "partition_indexes": [9]}],
    }
    brokers.same("list_partition_reassignments", 0, topics=topics[case], timeout=10_000)


NO_TIME: dict[str, Callable[[str], tuple[str, int, dict[str, Any]]]] = {
    "create": lambda name: (
        "create_topics",
        7,
        {"topics": [new(each) for each in ("no-time", "no-time", "a b", name)]},
    ),
    "delete": lambda name: (
        "delete_topics",
        6,
        {"topics": [{"name": each, "topic_id": None} for each in (name, "no")]},
    ),
    "delete by name": lambda name: ("delete_topics", 3, {"topic_names": [name, "nowhere", name]}),
    "grow": lambda name: ("create_partitions", 3, {"topics": [grow(name, 3), grow("a", 2), grow("a", 2)]}),
    "elect": lambda name: ("elect_leaders", 2, {"election_type": 7, "topic_partitions": None}),
    "elect one": lambda name: ("elect_leaders", 0, {"topic_partitions": [{"topic": name, "partitions": [0]}]}),
    "move": lambda name: ("alter_partition_reassignments", 0, {"topics": [move(name, 0, [NODE])]}),
    "list moves": lambda name: ("list_partition_reassignments", 0, {"topics": None}),
    "update": lambda name: ("update_features", 2, {"feature_updates": [update("metadata.version", 30)]}),
}


def new(name: str) -> dict[str, Any]:
    return {"name": name, "num_partitions": 1, "replication_factor": 1}


@pytest.mark.parametrize("timeout", [0, -1])
@pytest.mark.parametrize("case", NO_TIME)
def test_no_time_is_given(brokers: Brokers, topic_in_both: NewTopic, case: str, timeout: int) -> None:
    api, version, values = NO_TIME[case](topic_in_both())
    brokers.same(api, version, timeout=timeout, **values)


# ------------------------------------------------------------------------------------------------- cluster and quorum


def update(feature: str, level: int, kind: int = 1) -> dict[str, Any]:
    return {"feature": feature, "max_version_level": level, "upgrade_type": kind}


UPDATES: dict[str, list[dict[str, Any]]] = {
    "none": [],
    "unknown": [update("no.such.feature", 1)],
    "no name": [update("", 1)],
    "metadata.version too high": [update("metadata.version", 999)],
    "metadata.version as it is": [update("metadata.version", 30)],
    "metadata.version called down": [update("metadata.version", 29)],
    "metadata.version -1": [update("metadata.version", -1)],
    "metadata.version 0": [update("metadata.version", 0, 2)],
    "metadata.version down": [update("metadata.version", 29, 2)],
    "metadata.version far down": [update("metadata.version", 7, 3)],
    "metadata.version twice": [update("metadata.version", 29), update("metadata.version", 30)],
    "eligible leaders as they are": [update("eligible.leader.replicas.version", 1)],
    "eligible leaders down": [update("eligible.leader.replicas.version", 0, 2)],
    "eligible leaders up": [update("eligible.leader.replicas.version", 2)],
    "metadata.version below eligible leaders": [
        update("metadata.version", 20, 2),
        update("eligible.leader.replicas.version", 1),
    ],
    "kraft.version as it is": [update("kraft.version", 0)],
    "kraft.version called down": [update("kraft.version", 1, 2)],
    "kraft.version too high": [update("kraft.version", 2)],
    "kraft.version -1": [update("kraft.version", -1)],
    "type 0": [update("metadata.version", 30, 0)],
    "type 9": [update("metadata.version", 30, 9)],
}


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("case", UPDATES)
def test_features_are_updated(brokers: Brokers, case: str, version: int) -> None:
    updates = UPDATES[case]
    brokers.same("update_features", version, feature_updates=updates, timeout=10_000, validate_only=True)


@pytest.mark.parametrize("version", range(3))
@pytest.mark.parametrize(
    "asked",
    [[("__cluster_metadata", [0])], [("__cluster_metadata", [1])], [("other", [0])], [], [("__cluster_metadata", [])]],
    ids=["it", "another partition", "another topic", "nothing", "no partition"],
)
def test_the_quorum_is_described(brokers: Brokers, asked: list[tuple[str, list[int]]], version: int) -> None:
    brokers.ignored = frozenset(
        {"leader_epoch", "high_watermark", "log_end_offset", "replica_directory_id", "error_message", "listeners"}
        | {"last_fetch_timestamp", "last_caught_up_timestamp"}
    )
    topics = [
        {"topic_name": name, "partitions": [{"partition_index": index} for index in indexes]} for name, indexes in asked
    ]
    brokers.same("describe_quorum", version, topics=topics)


def test_a_broker_that_is_not_registered_is_not_forgotten(brokers: Brokers) -> None:
    brokers.same("unregister_broker", 0, broker_id=NOBODY)


@pytest.mark.parametrize("api", ["add_raft_voter", "remove_raft_voter"])
def test_static_voters_do_not_change(brokers: Brokers, api: str) -> None:
    brokers.ignored = frozenset({"error_message"})
    values: dict[str, Any] = {"cluster_id": None, "voter_id": 5, "voter_directory_id": uuid.UUID(int=5)}
    if api == "add_raft_voter":
        values |= {"timeout": 1000, "listeners": [{"name": "CONTROLLER", "host": "127.0.0.1", "port": 1}]}
    brokers.same(api, 0, **values)


@pytest.mark.parametrize("version", range(1, 6))
@pytest.mark.parametrize("case", ["one", "no topic", "no partition", "none"])
def test_log_directories_are_described(brokers: Brokers, topic_in_both: NewTopic, case: str, version: int) -> None:
    name = topic_in_both(2)
    topics: dict[str, Any] = {
        "one": [{"topic": name, "partitions": [0, 1]}],
        "no topic": [{"topic": "nowhere", "partitions": [0]}],
        "no partition": [{"topic": name, "partitions": [7]}],
        "none": [],
    }
    brokers.ignored = frozenset({"log_dir", "total_bytes", "usable_bytes"})
    brokers.same("describe_log_dirs", version, topics=topics[case])
