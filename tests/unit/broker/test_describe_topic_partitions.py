"""DescribeTopicPartitions and DescribeProducers: pages, cursors, eligible leaders; producers as the log knows them."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.broker.metadata_services import context, encoded
from tests.unit.broker.test_metadata import create, with_change
from tests.unit.broker.test_node import MakeBatch, produce
from tidelog.broker.apis import authorized_operations
from tidelog.broker.apis.cluster import describe_topic_partitions
from tidelog.broker.apis.records import describe_producers
from tidelog.protocol.errors import ErrorCode, KafkaError
from tidelog.protocol.messages.describe_producers import (
    DescribeProducersRequest,
    DescribeProducersRequestTopicRequest,
    DescribeProducersResponse,
)
from tidelog.protocol.messages.describe_topic_partitions import (
    DescribeTopicPartitionsRequest,
    DescribeTopicPartitionsRequestCursor,
    DescribeTopicPartitionsRequestTopicRequest,
)
from tidelog.protocol.messages.produce import ProduceResponse
from tidelog.protocol.uuids import LOST_DIRECTORY, ZERO_UUID


def ask(services: Any, *names: str, limit: int = 2000, cursor: tuple[str, int] | None = None) -> Any:
    at = (
        None
        if cursor is None
        else DescribeTopicPartitionsRequestCursor(topic_name=cursor[0], partition_index=cursor[1])
    )
    request = DescribeTopicPartitionsRequest(
        topics=[DescribeTopicPartitionsRequestTopicRequest(name=name) for name in names],
        response_partition_limit=limit,
        cursor=at,
    )
    return encoded(describe_topic_partitions.handle(services, context(0), request), 0)


def page(answer: Any) -> tuple[list[tuple[str, list[int]]], tuple[str, int] | None]:
    cursor = answer.next_cursor
    found = [(topic.name, [each.partition_index for each in topic.partitions]) for topic in answer.topics]
    return found, None if cursor is None else (cursor.topic_name, cursor.partition_index)


async def test_all_topics_come_by_name(services: Any) -> None:
    await create(services, "b", "a", partitions=2)
    answer = ask(services)
    assert page(answer) == ([("a", [0, 1]), ("b", [0, 1])], None)
    (topic, _) = answer.topics
    assert (topic.error_code, topic.topic_id) == (0, services.image().topics_by_name["a"].topic_id)
    assert topic.topic_authorized_operations == authorized_operations.TOPIC
    first = topic.partitions[0]
    assert (first.leader_id, first.replica_nodes, first.isr_nodes, first.offline_replicas) == (1, [1], [1], [])
    assert (first.eligible_leader_replicas, first.last_known_elr) == ([], [])


async def test_every_page_goes_on_where_the_last_one_ended(services: Any) -> None:
    await create(services, "a", "b", "c", partitions=3)
    for limit in (1, 2, 3, 4, 9):
        seen: list[tuple[str, int]] = []
        cursor = None
        for _ in range(20):
            topics, cursor = page(ask(services, "c", "b", "a", limit=limit, cursor=cursor))
            seen += [(name, index) for name, indexes in topics for index in indexes]
            if cursor is None:
                break
        assert seen == [(name, index) for name in "abc" for index in range(3)], limit


async def test_a_full_page_points_at_the_next_topic(services: Any) -> None:
    await create(services, "a", "b", partitions=2)
    assert page(ask(services, limit=2)) == ([("a", [0, 1])], ("b", 0))
    assert page(ask(services, limit=3)) == ([("a", [0, 1]), ("b", [0])], ("b", 1))
    assert page(ask(services, limit=-5)) == ([("a", [0])], ("a", 1)), "one at least"
    assert page(ask(services, limit=2, cursor=("a", 7))) == ([("a", []), ("b", [0, 1])], None)
    assert page(ask(services, limit=2, cursor=("aa", 1))) == ([("b", [0, 1])], None), "gone, but all were asked for"


async def test_the_node_has_a_limit_of_its_own(services: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    await create(services, "a", partitions=3)
    monkeypatch.setattr(type(services.config), "integer", lambda config, name: 2)
    assert page(ask(services, limit=2**31 - 1)) == ([("a", [0, 1])], ("a", 2))


async def test_what_is_not_there_or_no_name_is_said_so(services: Any) -> None:
    await create(services, "a")
    answer = ask(services, "nowhere", "a b", "a", "a")
    assert [(topic.name, topic.error_code) for topic in answer.topics] == [
        ("a", 0),
        ("a b", ErrorCode.INVALID_TOPIC_EXCEPTION),
        ("nowhere", ErrorCode.UNKNOWN_TOPIC_OR_PARTITION),
    ]
    assert answer.topics[1].topic_id == ZERO_UUID


@pytest.mark.parametrize("cursor", [("b", 0), ("a", -1)])
async def test_a_cursor_that_makes_no_sense_is_refused(services: Any, cursor: tuple[str, int]) -> None:
    await create(services, "a")
    with pytest.raises(KafkaError) as caught:
        ask(services, "a", cursor=cursor)
    assert caught.value.code is ErrorCode.INVALID_REQUEST
    request = DescribeTopicPartitionsRequest(topics=[DescribeTopicPartitionsRequestTopicRequest(name="a")])
    refused = encoded(describe_topic_partitions.refuse(request, caught.value, 0), 0)
    assert [(topic.name, topic.error_code) for topic in refused.topics] == [("a", ErrorCode.INVALID_REQUEST)]


async def test_leaders_and_replicas_that_cannot_be_reached(services: Any) -> None:
    await create(services, "a", partitions=1)
    home = services.image().brokers[1].log_dirs[0]
    image = with_change(
        services, replicas=[1, 2, 3], directories=[home, b"e" * 16, LOST_DIRECTORY], leader=2,
        eligible_leader_replicas=[3], last_known_elr=[2],
    )  # fmt: skip
    services.image = lambda: image
    partition = ask(services, "a").topics[0].partitions[0]
    assert (partition.error_code, partition.leader_id, partition.offline_replicas) == (0, -1, [2, 3])
    assert (partition.eligible_leader_replicas, partition.last_known_elr) == ([3], [2])


def producers(response: DescribeProducersResponse) -> list[tuple[str, int, int, list[tuple[int, ...]]]]:
    return [
        (
            topic.name,
            each.partition_index,
            each.error_code,
            [
                (
                    one.producer_id, one.producer_epoch, one.last_sequence, one.last_timestamp, one.coordinator_epoch,
                    one.current_txn_start_offset,
                )
                for one in each.active_producers
            ],
        )
        for topic in response.topics
        for each in topic.partitions
    ]  # fmt: skip


def asked(*topics: tuple[str, list[int]]) -> DescribeProducersRequest:
    return DescribeProducersRequest(
        topics=[DescribeProducersRequestTopicRequest(name=name, partition_indexes=indexes) for name, indexes in topics]
    )


async def test_who_has_written_is_told(wire: Any, make_batch: MakeBatch) -> None:
    await wire.create_topic("t", 2)
    for sequence in (0, 2):
        data = make_batch(b"a", b"b", producer_id=7, producer_epoch=3, base_sequence=sequence)
        await wire.call(produce("t", data), 9, ProduceResponse)
    answer = await wire.call(asked(("t", [0, 1, 5])), 0, DescribeProducersResponse)
    assert producers(answer) == [
        ("t", 0, 0, [(7, 3, 3, 1_700_000_000_000, -1, -1)]),
        ("t", 1, 0, []),
        ("t", 5, ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, []),
    ]


async def test_topics_that_cannot_be_asked_for(wire: Any) -> None:
    answer = await wire.call(asked(("none", [0]), ("a b", [0, 1])), 0, DescribeProducersResponse)
    assert producers(answer) == [
        ("none", 0, ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, []),
        ("a b", 0, ErrorCode.INVALID_TOPIC_EXCEPTION, []),
        ("a b", 1, ErrorCode.INVALID_TOPIC_EXCEPTION, []),
    ]
    assert "a b" in answer.topics[1].partitions[0].error_message


def test_a_refusal_names_every_partition_asked_for() -> None:
    refused = describe_producers.refuse(asked(("t", [0, 1])), KafkaError(ErrorCode.UNKNOWN_SERVER_ERROR, "why"), 0)
    assert producers(encoded(refused, 0)) == [("t", 0, -1, []), ("t", 1, -1, [])]
