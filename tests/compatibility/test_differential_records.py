"""DeleteRecords, DescribeTopicPartitions, DescribeProducers, asked of Tidelog and Kafka 4.3 alike."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from typing import Any

import pytest

from tests.compatibility.odd_batches import batch
from tests.compatibility.side_by_side import Brokers
from tests.compatibility.wire import Wire

NewTopic = Callable[..., str]

ZERO = uuid.UUID(int=0)


def wanted(*partitions: tuple[str, int, int]) -> list[dict[str, Any]]:
    return [{"name": name, "partitions": [{"partition_index": index, "offset": at}]} for name, index, at in partitions]


@pytest.mark.parametrize("version", range(3))
def test_records_are_deleted(brokers: Brokers, topic_in_both: NewTopic, version: int) -> None:
    topic = topic_in_both(3)
    for index in range(2):
        brokers.produce(topic, batch([b"a", b"b", b"c", b"d"]), index=index)

    def delete(*partitions: tuple[str, int, int], timeout: int = 5000) -> None:
        brokers.same("delete_records", version, topics=wanted(*partitions), timeout=timeout)

    delete()
    for at in (-2, -(2**63), 5, 2**63 - 1, 2, 1, 0, 2, -1, 4):
        delete((topic, 0, at))
    delete((topic, 0, 0), (topic, 1, 1), (topic, 2, 0), (topic, 3, 0), (topic, -1, 0))
    delete((topic, 1, 3), (topic, 1, 2), (topic, 1, 9))
    delete((topic, 1, 3), (topic, 1, 4))
    for timeout in (0, -1):
        delete((topic, 1, -1), timeout=timeout)
    for name in ("nowhere", "", "a b", "__cluster_metadata", "__transaction_state"):
        delete((name, 0, 0))
    brokers.same("delete_records", version, topics=[{"name": topic, "partitions": []}])
    for index in range(3):
        listed = [{"name": topic, "partitions": [{"partition_index": index, "timestamp": when}]} for when in (-2,)]
        brokers.same("list_offsets", 7, replica_id=-1, topics=listed)


@pytest.mark.parametrize("policy", ["compact", "compact,delete", "delete"])
def test_records_are_deleted_where_the_policy_lets_them(brokers: Brokers, topic_in_both: NewTopic, policy: str) -> None:
    topic = topic_in_both(cleanup_policy=policy)
    for at in (0, -1, 5, -3):
        brokers.same("delete_records", 2, topics=wanted((topic, 0, at)), timeout=1000)


def _offsets_topic(wire: Wire) -> None:
    for _ in range(200):
        found = wire.ask("find_coordinator", 4, key_type=0, coordinator_keys=["g"]).coordinators[0]
        if int(found.error_code) == 0:
            return
        time.sleep(0.05)
    raise AssertionError(found)


def test_records_of_internal_topics_stay(brokers: Brokers) -> None:
    brokers.in_both(_offsets_topic)
    brokers.same("delete_records", 2, topics=wanted(("__consumer_offsets", 0, -1)), timeout=1000)
    brokers.same("delete_records", 2, topics=wanted(("__consumer_offsets", 99, -1)), timeout=1000)


def test_partitions_are_described_in_pages(brokers: Brokers, topic_in_both: NewTopic) -> None:
    first, second = topic_in_both(3), topic_in_both(4)

    def ask(*names: str, limit: int = 2000, cursor: tuple[str, int] | None = None) -> Any:
        at = None if cursor is None else {"topic_name": cursor[0], "partition_index": cursor[1]}
        topics = [{"name": name} for name in names]
        return brokers.same("describe_topic_partitions", 0, topics=topics, response_partition_limit=limit, cursor=at)

    def id_of(wire: Wire, internal: str) -> Any:
        topics = [{"name": internal}]
        return wire.ask("metadata", 12, topics=topics, allow_auto_topic_creation=False).topics[0].topic_id

    # It is there if another test has begun a transaction.
    for topic_id in brokers.in_both(lambda wire: id_of(wire, "__transaction_state")):
        brokers.topic_names[topic_id] = "id of __transaction_state"
    ask(first)
    ask(second, first, first)
    for limit in (1, 2, 3, 4, 6, 7, 8, 0, -1, 2**31 - 1, -(2**31)):
        ask(first, second, limit=limit)
        ask(first, second, limit=limit, cursor=(first, 1))
        ask(first, second, limit=limit, cursor=(second, 3))
        ask(first, "nowhere", "a b", "zzz", second, limit=limit)
    for index in (0, 2, 3, 4, 99, -1, -(2**31)):
        ask(first, second, cursor=(first, index))
    for name in ("", "nowhere", "a b", "x" * 300, ".", "__transaction_state", "größe"):
        if name:  # Kafka fails over it
            ask(name)
        ask(name, cursor=(name, 0))
        ask(first, cursor=(name, 0))


def test_all_partitions_are_described(brokers: Brokers, topic_in_both: NewTopic) -> None:
    """Topics of other tests are there as well, and not the same in both."""
    topic = topic_in_both(3)
    for cursor in (None, {"topic_name": topic, "partition_index": 1}, {"topic_name": topic, "partition_index": 9}):
        answers = brokers.get("describe_topic_partitions", 0, cursor=cursor, response_partition_limit=2000)
        found = []
        for answer in answers:
            (mine,) = (one for one in answer.topics if one.name == topic)
            found.append(brokers.plain(mine))
            assert [one.name for one in answer.topics] == sorted(one.name for one in answer.topics)
        assert found[0] == found[1]
    brokers.same("describe_topic_partitions", 0, cursor={"topic_name": topic, "partition_index": -1})
    brokers.same("describe_topic_partitions", 0, cursor={"topic_name": "zzzz", "partition_index": 0})


def test_producers_are_described(brokers: Brokers, topic_in_both: NewTopic) -> None:
    topic = topic_in_both(2)
    for sequence in (0, 1):
        brokers.produce(topic, batch(producer=(4711, 2, sequence)))
    brokers.produce(topic, batch(producer=(4712, 0, 0)))

    def ask(*topics: tuple[str, list[int]]) -> None:
        named = [{"name": name, "partition_indexes": indexes} for name, indexes in topics]
        brokers.same("describe_producers", 0, topics=named)

    ask()
    ask((topic, [0]))
    ask((topic, [0, 1, 2, -1, 0]))
    ask((topic, []), (topic, [1]))
    for name in ("nowhere", "", "a b", "..", "x" * 300, "__transaction_state"):
        ask((name, [0, 1]))


def test_telemetry_is_not_advertised(brokers: Brokers) -> None:
    for answer in brokers.get("api_versions", 4, client_software_name="a", client_software_version="1"):
        assert not {71, 72} & {int(one.api_key) for one in answer.api_keys}
