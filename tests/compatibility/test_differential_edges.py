"""Requests at the edge of what a client sends, to Tidelog and to Kafka 4.3 alike: empty lists, duplicates, no time."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from tests.compatibility.side_by_side import Brokers
from tests.patience import PATIENCE_S

NewTopic = Callable[..., str]
TOPIC, UNKNOWN = 2, 99
UNKNOWN_ID = uuid.UUID(int=77)


# ---------------------------------------------------------------------------------------------------------- operators


@pytest.mark.parametrize("version", [1, 4])
@pytest.mark.parametrize("kinds", [[TOPIC, UNKNOWN], [UNKNOWN], [TOPIC, 0], [UNKNOWN, 64]])
def test_configs_of_a_kind_that_is_none(
    brokers: Brokers, topic_in_both: NewTopic, kinds: list[int], version: int
) -> None:
    name = topic_in_both()
    resources = [
        {"resource_type": kind, "resource_name": name, "configuration_keys": ["retention.ms"]} for kind in kinds
    ]
    brokers.ignored = frozenset({"error_message"})  # Kafka's is that of any bad request
    brokers.same("describe_configs", version, resources=resources)


@pytest.mark.parametrize("names", [["once"], ["twice", "twice"], ["twice", "once", "twice"], []])
@pytest.mark.parametrize("timeout", [0, -1])
def test_no_time_for_names_that_stand_twice(brokers: Brokers, names: list[str], timeout: int) -> None:
    new = [{"name": name, "num_partitions": 1, "replication_factor": 1} for name in names]
    brokers.same("create_topics", 7, topics=new, timeout=timeout)
    brokers.same("create_partitions", 3, topics=[{"name": name, "count": 3} for name in names], timeout=timeout)
    brokers.same("delete_topics", 5, topic_names=names, timeout=timeout)
    brokers.same("delete_topics", 6, topics=[{"name": name} for name in names], timeout=timeout)


@pytest.mark.parametrize("version", range(3))
@pytest.mark.parametrize("timeout", [10_000, 0])
@pytest.mark.parametrize("case", ["nothing", "no partitions"])
def test_no_leader_is_elected(brokers: Brokers, topic_in_both: NewTopic, case: str, timeout: int, version: int) -> None:
    partitions: list[Any] = [] if case == "nothing" else [{"topic": topic_in_both(), "partitions": []}]
    values = {"election_type": 0} if version else {}
    brokers.same("elect_leaders", version, topic_partitions=partitions, timeout=timeout, **values)


@pytest.mark.parametrize("replicas", [([1], [1]), ([1], [77]), (None, [1]), (None, None), ([77], [1])])
@pytest.mark.parametrize("apart", [False, True])
def test_a_partition_moves_twice(
    brokers: Brokers, topic_in_both: NewTopic, replicas: tuple[Any, Any], apart: bool
) -> None:
    name = topic_in_both()
    partitions = [{"partition_index": 0, "replicas": each} for each in replicas]
    topics = (
        [{"name": name, "partitions": [each]} for each in partitions]
        if apart
        else [{"name": name, "partitions": partitions}]
    )
    brokers.same("alter_partition_reassignments", 0, topics=topics, timeout=10_000)


# ------------------------------------------------------------------------------------------------------- transactions


def producer(brokers: Brokers, transactional_id: str) -> Any:
    """A producer whose coordinators, of its transactions and of the group of that name, are ready."""
    for kind in (0, 1):
        until_ready(
            partial(brokers.get, "find_coordinator", 4, key_type=kind, coordinator_keys=[transactional_id]),
            lambda answer: answer.coordinators[0].error_code,
        )
    group = {"group_id": transactional_id, "topics": None}
    until_ready(lambda: brokers.get("offset_fetch", 7, require_stable=False, **group), lambda answer: answer.error_code)
    return until_ready(
        lambda: brokers.get("init_producer_id", 4, transactional_id=transactional_id, transaction_timeout=60_000),
        lambda answer: answer.error_code,
    )


def until_ready(ask: Callable[[], Any], code: Callable[[Any], int]) -> Any:
    deadline = time.monotonic() + PATIENCE_S
    while True:
        answers = ask()
        if not any(int(code(answer)) for answer in answers):
            return answers
        assert time.monotonic() < deadline, answers
        time.sleep(0.1)


@pytest.mark.parametrize("version", [0, 3, 4, 5])
@pytest.mark.parametrize("case", ["alone", "beside one", "beside none that exists", "twice"])
def test_no_partitions_join_a_transaction(brokers: Brokers, topic_in_both: NewTopic, case: str, version: int) -> None:
    name = topic_in_both()
    mine = f"{name}-{version}"
    own = producer(brokers, mine)
    empty: dict[str, Any] = {"name": name, "partitions": []}
    topics = {
        "alone": [empty],
        "beside one": [empty, {"name": topic_in_both(), "partitions": [0]}],
        "beside none that exists": [empty, {"name": "nowhere", "partitions": [0]}],
        "twice": [empty, {"name": name, "partitions": [0]}, empty],
    }[case]
    who = {"producer_id": own.of("producer_id"), "producer_epoch": own.of("producer_epoch")}
    if version < 4:
        values: dict[str, Any] = {f"v3_and_below_{key}": value for key, value in who.items()}
        values |= {"v3_and_below_transactional_id": mine, "v3_and_below_topics": topics}
    else:
        values = {"transactions": [{"transactional_id": mine, **who, "verify_only": False, "topics": topics}]}
    brokers.same("add_partitions_to_txn", version, **values)


@pytest.mark.parametrize("version", [0, 3, 5])
@pytest.mark.parametrize("member", [False, True])
@pytest.mark.parametrize("case", ["alone", "beside one", "beside none that exists", "twice", "none"])
def test_no_offsets_join_a_transaction(
    brokers: Brokers, topic_in_both: NewTopic, case: str, member: bool, version: int
) -> None:
    name = topic_in_both()
    mine = f"{name}-{version}"
    own = producer(brokers, mine)
    empty: dict[str, Any] = {"name": name, "partitions": []}
    committed = {"partition_index": 0, "committed_offset": 1, "committed_metadata": ""}
    topics: list[Any] = {
        "alone": [empty],
        "beside one": [empty, {"name": topic_in_both(), "partitions": [committed]}],
        "beside none that exists": [empty, {"name": "nowhere", "partitions": [committed]}],
        "twice": [empty, {"name": name, "partitions": [committed]}, empty],
        "none": [],
    }[case]
    who = {"producer_id": own.of("producer_id"), "producer_epoch": own.of("producer_epoch")}
    if member and version >= 3:
        who |= {"generation_id": 7, "member_id": "a stranger"}
    brokers.same("txn_offset_commit", version, transactional_id=mine, group_id=mine, topics=topics, **who)


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("case", ["no topics", "no partitions", "beside one", "no markers"])
def test_no_markers_are_written(brokers: Brokers, topic_in_both: NewTopic, case: str, version: int) -> None:
    name = topic_in_both()
    own = producer(brokers, f"{name}-{version}")
    empty: dict[str, Any] = {"name": name, "partition_indexes": []}
    marker = {
        "producer_id": own.of("producer_id"),
        "producer_epoch": 0,
        "transaction_result": False,
        "coordinator_epoch": 0,
    }
    if version > 1:
        marker["transaction_version"] = 2
    choices: dict[str, list[Any]] = {
        "no topics": [],
        "no partitions": [empty],
        "beside one": [empty, {"name": topic_in_both(), "partition_indexes": [0]}],
    }
    topics = choices.get(case, [])
    brokers.ignored = frozenset({"producer_id"})
    markers = [] if case == "no markers" else [{**marker, "topics": topics}]
    brokers.same("write_txn_markers", version, markers=markers)


# ------------------------------------------------------------------------------------------------------------- groups


@pytest.mark.parametrize("version", [4, 5])
@pytest.mark.parametrize("group", ["", "g"])
@pytest.mark.parametrize("kind", [None, "consumer"])
@pytest.mark.parametrize("name", [None, "range"])
def test_a_sync_without_a_group_or_protocol(
    brokers: Brokers, group: str, kind: str | None, name: str | None, version: int
) -> None:
    values = {"protocol_type": kind, "protocol_name": name} if version >= 5 else {}
    brokers.same("sync_group", version, group_id=group, generation_id=1, member_id="m", assignments=[], **values)


@pytest.mark.parametrize("version", [0, 5])
@pytest.mark.parametrize("case", ["offsets", "offsets deleted", "deleted", "joined", "joined, deleted", "never"])
def test_a_group_without_members_is_described(
    brokers: Brokers, topic_in_both: NewTopic, case: str, version: int
) -> None:
    topic = topic_in_both()
    group = f"group-{topic}"
    until_ready(
        lambda: brokers.get("offset_fetch", 7, require_stable=False, group_id=group, topics=None),
        lambda answer: answer.error_code,
    )
    if case.startswith("joined"):
        join = {
            "group_id": group,
            "session_timeout": 30_000,
            "rebalance_timeout": 30_000,
            "member_id": "",
            "protocol_type": "consumer",
            "protocols": [{"name": "range", "metadata": b""}],
        }
        joined = brokers.get("join_group", 3, **join)
        brokers.get("leave_group", 1, group_id=group, member_id=joined.of("member_id"))
    if case in ("offsets", "offsets deleted", "deleted"):
        part = {"partition_index": 0, "committed_offset": 1, "committed_metadata": ""}
        topics = [{"name": topic, "partitions": [part]}]
        brokers.same("offset_commit", 7, group_id=group, generation_id_or_member_epoch=-1, member_id="", topics=topics)
    if case == "offsets deleted":
        wanted = [{"name": topic, "partitions": [{"partition_index": 0}]}]
        brokers.same("offset_delete", 0, group_id=group, topics=wanted)
    if case in ("deleted", "joined, deleted"):
        brokers.same("delete_groups", 1, groups_names=[group])
    brokers.same("describe_groups", version, groups=[group])
    brokers.same("delete_groups", 1, groups_names=[group])
    brokers.same("describe_groups", version, groups=[group])


GROUP_REQUESTS: dict[str, dict[str, Any]] = {
    "a join of a member that is unknown": {"member_id": "x"},
    "a join with a session that is too short": {"session_timeout": 1},
}
OFFSETS: dict[str, dict[str, Any]] = {
    "a commit of nothing": {"topics": []},
    "a commit of no partition": {"topics": [{"name": "nowhere", "partitions": []}]},
    "a commit for a topic that is not there": {
        "topics": [{"name": "nowhere", "partitions": [{"partition_index": 0, "committed_offset": 1}]}]
    },
    "a commit of a member that is unknown": {"generation_id_or_member_epoch": 3, "member_id": "x"},
}


@pytest.mark.parametrize("case", [*GROUP_REQUESTS, *OFFSETS])
def test_a_group_that_a_refused_request_has_named(brokers: Brokers, topic_in_both: NewTopic, case: str) -> None:
    topic = topic_in_both()
    group = f"refused-{topic}"
    until_ready(
        lambda: brokers.get("offset_fetch", 7, require_stable=False, group_id=group, topics=None),
        lambda answer: answer.error_code,
    )
    if case in GROUP_REQUESTS:
        join: dict[str, Any] = {
            "session_timeout": 30_000,
            "rebalance_timeout": 30_000,
            "member_id": "",
            "protocol_type": "consumer",
            "protocols": [{"name": "range", "metadata": b""}],
        }
        brokers.same("join_group", 4, group_id=group, **join | GROUP_REQUESTS[case])
    else:
        committed = {"partition_index": 0, "committed_offset": 1, "committed_metadata": ""}
        commit: dict[str, Any] = {
            "generation_id_or_member_epoch": -1,
            "member_id": "",
            "topics": [{"name": topic, "partitions": [committed]}],
        }
        brokers.same("offset_commit", 7, group_id=group, **commit | OFFSETS[case])
    brokers.same("describe_groups", 5, groups=[group])
    brokers.same("describe_groups", 6, groups=[group])
    brokers.same("delete_groups", 1, groups_names=[group])


# -------------------------------------------------------------------------------------------------------------- fetch


@pytest.mark.parametrize("version", [4, 11, 12, 13, 17])
@pytest.mark.parametrize("isolation", [0, 1])
@pytest.mark.parametrize("offset", [0, 5])
@pytest.mark.parametrize("partition", [0, 9])
@pytest.mark.parametrize("exists", [True, False])
def test_aborted_transactions_where_there_are_none(
    brokers: Brokers, topic_in_both: NewTopic, exists: bool, isolation: int, offset: int, partition: int, version: int
) -> None:
    topic: dict[str, Any] = {"topic": topic_in_both() if exists else "nowhere"}
    if version >= 13:
        topic = {"topic_id": brokers.topic_id(topic["topic"]) if exists else UNKNOWN_ID}
    wanted = [{**topic, "partitions": [wanted_partition(partition, offset)]}]
    brokers.same("fetch", version, **fetch_values(version), isolation_level=isolation, topics=wanted)


@pytest.mark.parametrize("version", [13, 15, 17])
def test_a_fetch_that_only_forgets(brokers: Brokers, topic_in_both: NewTopic, version: int) -> None:
    topic_id = brokers.topic_id(topic_in_both())
    wanted = [{"topic_id": topic_id, "partitions": [wanted_partition(0, 0)]}]
    first = brokers.get("fetch", version, **fetch_values(version), isolation_level=0, topics=wanted)
    forgotten = [{"topic_id": topic_id, "partitions": [0]}]
    for values in ({"session_epoch": 1, "session_id": first.of("session_id")}, {"session_epoch": -1, "session_id": 0}):
        brokers.same(
            "fetch", version, isolation_level=0, topics=[],
            **fetch_values(version) | values | {"forgotten_topics_data": forgotten},
        )  # fmt: skip


def wanted_partition(index: int, offset: int) -> dict[str, Any]:
    return {"partition": index, "fetch_offset": offset, "partition_max_bytes": 1 << 20}


def fetch_values(version: int) -> dict[str, Any]:
    values: dict[str, Any] = {"max_wait": 0, "min_bytes": 0, "max_bytes": 1 << 20}
    if version < 15:
        values["replica_id"] = -1
    if version >= 7:
        values |= {"session_id": 0, "session_epoch": 0, "forgotten_topics_data": []}
    return values
