"""Odd reading from Tidelog and from Kafka 4.3 alike: Fetch and its sessions, ListOffsets, OffsetForLeaderEpoch."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from typing import Any

import pytest

from tests.compatibility.odd_batches import NOW_MS, batch, record
from tests.compatibility.side_by_side import Brokers, Each
from tests.compatibility.wire import Wire

NewTopic = Callable[..., str]
FETCH_VERSIONS = range(4, 19)
BY_ID_FROM = 13
NO_SUCH_ID = uuid.UUID(int=77)
MIB = 1 << 20


@pytest.fixture(scope="module")
def filled(running_brokers: Brokers) -> str:
    """51 records in partition 0, 3 in partition 1, none in partition 2."""
    running_brokers.reconnect()
    topic = running_brokers.topic("filled", 3, index_interval_bytes="100")
    for number in range(10):
        running_brokers.produce(topic, batch([b"x" * 100] * 5, timestamp=NOW_MS - 10_000 + number * 1000))
    running_brokers.produce(topic, batch([b"x" * 10], timestamp=NOW_MS - 20_000))
    running_brokers.produce(topic, batch(3), index=1)
    return topic


def asked(brokers: Brokers, topic: str | None, version: int, *partitions: dict[str, Any]) -> dict[str, Any]:
    """One topic of a Fetch; None is one that does not exist."""
    whole = [{"partition": 0, "fetch_offset": 0, "partition_max_bytes": MIB, **partition} for partition in partitions]
    if version < BY_ID_FROM:
        return {"topic": topic or "nowhere", "partitions": whole}
    return {"topic_id": brokers.topic_id(topic) if topic else NO_SUCH_ID, "partitions": whole}


def fetch(brokers: Brokers, topic: str | None, version: int, *partitions: dict[str, Any], **values: Any) -> Each:
    topics = [asked(brokers, topic, version, *partitions)]
    return brokers.same("fetch", version, topics=topics, **{"min_bytes": 0, "max_wait": 0, "max_bytes": MIB, **values})


# Name: (since version, the partition asked for). Negative sizes, and isolation levels that do not exist, Kafka answers
# with UNKNOWN_SERVER_ERROR; they are not here.
PARTITIONS: dict[str, tuple[int, dict[str, Any]]] = {
    "start": (4, {}),
    "inside a batch": (4, {"fetch_offset": 3}),
    "last": (4, {"fetch_offset": 50}),
    "end": (4, {"fetch_offset": 51}),
    "beyond": (4, {"fetch_offset": 52}),
    "far beyond": (4, {"fetch_offset": 1 << 60}),
    "negative": (4, {"fetch_offset": -1}),
    "one byte": (4, {"partition_max_bytes": 1}),
    "no byte": (4, {"partition_max_bytes": 0}),
    "two batches and a half": (4, {"partition_max_bytes": 1500}),
    "unknown": (4, {"partition": 9}),
    "negative partition": (4, {"partition": -1}),
    "log start": (5, {"log_start_offset": 7}),
    "epoch": (9, {"current_leader_epoch": 0}),
    "epoch to come": (9, {"current_leader_epoch": 9}),
    "epoch -5": (9, {"current_leader_epoch": -5}),
    "last epoch": (12, {"last_fetched_epoch": 0}),
    "last epoch and beyond": (12, {"last_fetched_epoch": 0, "fetch_offset": 60}),
    "last epoch to come": (12, {"last_fetched_epoch": 5, "fetch_offset": 10}),
    "last epoch -2": (12, {"last_fetched_epoch": -2}),
}
REQUESTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "committed": {"isolation_level": 1},
    "no byte": {"max_bytes": 0},
    "one byte": {"max_bytes": 1},
    "more than there is": {"min_bytes": 1 << 30, "max_wait": 100},
    "less than nothing": {"min_bytes": -1},
    "negative wait": {"max_wait": -1, "min_bytes": 1},
}


@pytest.mark.parametrize("version", FETCH_VERSIONS)
@pytest.mark.parametrize("name", PARTITIONS)
def test_a_partition_is_fetched(brokers: Brokers, filled: str, name: str, version: int) -> None:
    since, partition = PARTITIONS[name]
    if version >= since:
        fetch(brokers, filled, version, partition)


@pytest.mark.parametrize("version", FETCH_VERSIONS)
@pytest.mark.parametrize("name", REQUESTS)
def test_partitions_are_fetched(brokers: Brokers, filled: str, name: str, version: int) -> None:
    fetch(brokers, filled, version, {}, *({"partition": index} for index in (1, 2, 7)), **REQUESTS[name])


@pytest.mark.parametrize("version", FETCH_VERSIONS)
def test_what_is_asked_for_is_odd(brokers: Brokers, filled: str, version: int) -> None:
    fetch(brokers, None, version, {}, {"partition": 1})
    fetch(brokers, filled, version, {"fetch_offset": 50}, {"fetch_offset": 49})
    fetch(brokers, filled, version)
    limits = {"min_bytes": 0, "max_wait": 0, "max_bytes": 10}
    brokers.same("fetch", version, topics=[], **limits)
    one = {"partitions": [{"partition": 0, "fetch_offset": 0, "partition_max_bytes": 100}]}
    if version >= BY_ID_FROM:
        brokers.same("fetch", version, topics=[{"topic_id": None, **one}], **limits)
    else:
        for name in ("", "a b", "x" * 300, "__cluster_metadata"):
            brokers.same("fetch", version, topics=[{"topic": name, **one}], **limits)
    if version == 12:
        fetch(brokers, filled, version, {}, cluster_id="another")


@pytest.mark.parametrize("version", FETCH_VERSIONS)
@pytest.mark.parametrize("replica_id", [-3, -2, 0, 5])
def test_replicas_that_are_none(brokers: Brokers, filled: str, replica_id: int, version: int) -> None:
    who: dict[str, Any] = {"replica_id": replica_id}
    if version >= 15:
        who = {"replica_state": {"replica_id": replica_id, "replica_epoch": -1}}
    # KIP-951: told where a leader can have moved. Of transactions no follower is told; none or nothing is all the same.
    brokers.ignored = frozenset({"current_leader", "node_endpoints", "aborted_transactions"})
    fetch(brokers, filled, version, {}, {"partition": 7}, **who)


@pytest.mark.parametrize("version", [4, 9, 10])
def test_a_topic_of_zstd_is_read_in_every_version(brokers: Brokers, topic_in_both: NewTopic, version: int) -> None:
    topic = topic_in_both(compression_type="zstd")
    brokers.produce(topic, batch(3))
    brokers.ignored = frozenset({"records"})  # compressed by each in its own way
    answers = fetch(brokers, topic, version, {})
    assert all(answer.responses[0].partitions[0].records for answer in answers)


# (session, epoch) of each request; OPENED is the session that the answers so far have opened.
OPENED = -99
SESSIONS = {
    "initial epoch of a session": [(5, 0)],
    "final epoch of a session": [(5, -1)],
    "epoch without session": [(0, 1), (0, -2)],
    "unknown session": [(99, 3)],
    "in order": [(0, 0), (OPENED, 1), (OPENED, 2)],
    "wrong epoch": [(0, 0), (OPENED, 2), (OPENED, 1), (OPENED, 1)],
    "opened anew": [(0, 0), (OPENED, 0), (OPENED, 1)],
    "closed": [(0, 0), (OPENED, -1), (OPENED, 1)],
}


@pytest.mark.parametrize("version", [7, 12, 13, 18])
@pytest.mark.parametrize("name", SESSIONS)
def test_a_session(brokers: Brokers, filled: str, name: str, version: int) -> None:
    opened = Each((0, 0))
    for session, epoch in SESSIONS[name]:
        ids = opened if session == OPENED else session
        answers = fetch(
            brokers, filled, version, {"fetch_offset": 49}, {"partition": 2}, session_id=ids, session_epoch=epoch
        )
        opened = answers.of("session_id") if all(answers.of("session_id")) else opened


@pytest.mark.parametrize("version", [7, 12, 13, 18])
def test_the_life_of_a_session(brokers: Brokers, topic_in_both: NewTopic, version: int) -> None:
    topic = topic_in_both(3)
    parts = [{"partition": index} for index in (0, 1, 2, 8)]
    session = fetch(brokers, topic, version, *parts, session_id=0, session_epoch=0).of("session_id")

    def go(epoch: int, *topics: dict[str, Any], forget: tuple[dict[str, Any], ...] = ()) -> None:
        brokers.same(
            "fetch", version, session_id=session, session_epoch=epoch, min_bytes=0, max_wait=0, max_bytes=MIB,
            topics=list(topics), forgotten_topics_data=list(forget),
        )  # fmt: skip

    def forgotten(name: str | None, *indexes: int) -> dict[str, Any]:
        return {**asked(brokers, name, version), "partitions": list(indexes)}

    go(1)
    brokers.produce(topic, batch(2), index=1)
    go(2)
    go(3)
    go(4, asked(brokers, topic, version, {"partition": 1, "fetch_offset": 2}))
    go(5)
    go(6, asked(brokers, topic, version, {"partition": 1}), forget=(forgotten(topic, 1, 2),))
    go(7, forget=(forgotten(topic, 1, 7), forgotten(None, 1)))
    brokers.produce(topic, batch(2))
    go(8)
    go(9, asked(brokers, None, version, {"partition": 1}))
    go(10)
    go(11, forget=(forgotten(None, 1), forgotten(topic, 0, 1, 2, 8)))
    go(12)


@pytest.mark.parametrize("version", [12, 13, 18])
def test_a_session_whose_topic_is_deleted_and_created_anew(
    brokers: Brokers, topic_in_both: NewTopic, version: int
) -> None:
    topic = topic_in_both()
    session = fetch(brokers, topic, version, {}, session_id=0, session_epoch=0).of("session_id")
    values: dict[str, Any] = {"session_id": session, "min_bytes": 0, "max_wait": 0, "max_bytes": MIB, "topics": []}
    brokers.in_both(lambda wire: wire.ask("delete_topics", 5, topic_names=[topic], timeout=10_000))
    brokers.in_both(lambda wire: _until_gone(wire, topic))
    # None for no partition, or an empty list: of aborted transactions both say that there is nothing to be told.
    brokers.ignored = frozenset({"aborted_transactions"})
    for epoch in (1, 2):
        brokers.same("fetch", version, **values, session_epoch=epoch)
    brokers.topic(topic)
    for epoch in (3, 4):
        brokers.same("fetch", version, **values, session_epoch=epoch)


def _until_gone(wire: Wire, topic: str) -> None:
    for _ in range(500):
        found = wire.ask("metadata", 12, topics=[{"name": topic}], allow_auto_topic_creation=False).topics[0]
        if int(found.error_code) == 3:
            return
        time.sleep(0.01)
    raise AssertionError(found)


TIMES = [-1, -2, -3, -4, -5, -6, -7, 0, NOW_MS - 20_000, NOW_MS - 7000, NOW_MS - 6999, NOW_MS - 1000]
TIMES += [NOW_MS + 10**9, -(2**63), 2**63 - 1]


@pytest.mark.parametrize("version", range(1, 12))
def test_offsets_are_listed(brokers: Brokers, filled: str, version: int) -> None:
    for timestamp in TIMES:
        for index in (0, 2, 9, -1):
            partition = {"partition_index": index, "timestamp": timestamp}
            topics = [{"name": filled, "partitions": [partition]}]
            for replica_id in (-1, -2, -3, 0):
                brokers.same("list_offsets", version, replica_id=replica_id, topics=topics)
            if version >= 2:
                brokers.same("list_offsets", version, replica_id=-1, isolation_level=1, topics=topics)


@pytest.mark.parametrize("version", range(1, 12))
def test_odd_offsets_are_listed(brokers: Brokers, filled: str, version: int) -> None:
    latest = {"partition_index": 0, "timestamp": -1}
    requests: list[list[tuple[str, list[dict[str, Any]]]]] = [
        [],
        [(filled, [])],
        *([(name, [latest])] for name in ("nowhere", "", "a b")),
        [(filled, [latest, latest])],
        [(filled, [latest]), (filled, [latest])],
        [("nowhere", [latest, latest])],
    ]
    if version >= 4:
        for epoch in (-1, 0, 1, -5):
            requests += [[(filled, [{**latest, "timestamp": at, "current_leader_epoch": epoch}])] for at in (-1, -7)]
    for topics in requests:
        named = [{"name": name, "partitions": partitions} for name, partitions in topics]
        brokers.same("list_offsets", version, replica_id=-1, topics=named)


def found_by_time(brokers: Brokers, topic: str, *times: int) -> None:
    for timestamp in times:
        wanted = [{"name": topic, "partitions": [{"partition_index": 0, "timestamp": timestamp}]}]
        brokers.same("list_offsets", 7, replica_id=-1, topics=wanted)


@pytest.mark.parametrize("compress", [False, True])
def test_records_are_found_by_their_time(brokers: Brokers, topic_in_both: NewTopic, compress: bool) -> None:
    topic = topic_in_both()
    for deltas in ((10, 20, 0), (20, 20)):
        records = b"".join(record(b"v", delta=delta, time_delta=time) for delta, time in enumerate(deltas))
        count = len(deltas)
        brokers.produce(topic, batch(count, max_timestamp=NOW_MS + 20, compress=compress, payload=records))
    brokers.produce(topic, batch(timestamp=-1))
    found_by_time(brokers, topic, -1, -2, -3, *(NOW_MS + delta for delta in (0, 1, 10, 11, 20, 21)))


def test_records_without_a_time(brokers: Brokers, topic_in_both: NewTopic) -> None:
    topic = topic_in_both()
    brokers.produce(topic, batch(timestamp=-1))
    found_by_time(brokers, topic, -1, -2, -3, 0, 5)


def test_records_of_log_append_time(brokers: Brokers, topic_in_both: NewTopic) -> None:
    topic = topic_in_both(message_timestamp_type="LogAppendTime")
    brokers.produce(topic, batch(3))
    found_by_time(brokers, topic, -1, -2, -3, 0, NOW_MS - 10**9, NOW_MS + 10**9)


@pytest.mark.parametrize("version", [2, 3, 4])
def test_epochs_end(brokers: Brokers, filled: str, version: int) -> None:
    who = {"replica_id": -1} if version >= 3 else {}
    for current in (-1, 0, 1, -5):
        for epoch in (-1, 0, 1, -2, -5):
            partitions = [
                {"partition": index, "current_leader_epoch": current, "leader_epoch": epoch} for index in (0, 2, 9)
            ]
            topics = [{"topic": filled, "partitions": partitions}]
            brokers.same("offset_for_leader_epoch", version, topics=topics, **who)
    one = [{"partition": 0, "current_leader_epoch": -1, "leader_epoch": 0}]
    requests: list[list[tuple[str, list[Any]]]] = [[], [(filled, [])], [(filled, one * 2)], [(filled, one)] * 2]
    requests += [[(name, one)] for name in ("nowhere", "", "a b")]
    for wanted in requests:
        topics = [{"topic": name, "partitions": partitions} for name, partitions in wanted]
        brokers.same("offset_for_leader_epoch", version, topics=topics, **who)
