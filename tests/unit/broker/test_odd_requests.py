"""Requests that no sane client sends, answered as Kafka answers them; `tests/compatibility` holds both side by side."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import pytest

from tests.unit.broker.test_node import fetch, fetched, produce, produced
from tidelog.protocol.errors import ErrorCode
from tidelog.protocol.messages.fetch import FetchPartition, FetchResponse
from tidelog.protocol.messages.find_coordinator import FindCoordinatorRequest, FindCoordinatorResponse
from tidelog.protocol.messages.join_group import JoinGroupRequest, JoinGroupRequestProtocol, JoinGroupResponse
from tidelog.protocol.messages.list_offsets import (
    ListOffsetsPartition,
    ListOffsetsRequest,
    ListOffsetsResponse,
    ListOffsetsTopic,
)
from tidelog.protocol.messages.metadata import MetadataRequest, MetadataRequestTopic, MetadataResponse
from tidelog.protocol.messages.offset_commit import (
    OffsetCommitRequest,
    OffsetCommitRequestPartition,
    OffsetCommitRequestTopic,
    OffsetCommitResponse,
)
from tidelog.protocol.messages.produce import ProduceResponse, TopicProduceData

MakeBatch = Callable[..., bytes]


async def test_a_partition_named_twice_is_written_once(wire: Any, make_batch: MakeBatch) -> None:
    await wire.create_topic("t", 2)
    request = produce("t", make_batch(b"a"))
    request.topic_data += produce("t", make_batch(b"b"), make_batch(b"c")).topic_data
    request.topic_data.append(TopicProduceData(name="t"))
    answer = await wire.call(request, 8, ProduceResponse)
    assert [topic.name for topic in answer.responses] == ["t"]
    assert produced(answer) == [(0, 0), (0, 0)]
    assert fetched(await wire.call(fetch("t"), 11, FetchResponse)) == [b"b"]


@pytest.mark.parametrize("version", [8, 9])
async def test_no_transaction_begins_that_nobody_could_end(wire: Any, make_batch: MakeBatch, version: int) -> None:
    await wire.create_topic("t", 2)
    inside = bytes(make_batch(b"a", transactional=True, producer_id=5, producer_epoch=0, base_sequence=0))
    answer = await wire.call(produce("t", inside), version, ProduceResponse)
    assert produced(answer) == [(ErrorCode.TRANSACTIONAL_ID_AUTHORIZATION_FAILED, -1)]
    answer = await wire.call(produce("t", make_batch(b"b"), inside), version, ProduceResponse)
    assert produced(answer) == [(ErrorCode.TRANSACTIONAL_ID_AUTHORIZATION_FAILED, -1)] * 2
    assert fetched(await wire.call(fetch("t"), 11, FetchResponse)) == []
    wire.send(produce("t", inside, acks=0), version)
    assert await wire.reader.read() == b""


async def test_what_does_not_exist_is_said_before_wrong_acks(wire: Any, make_batch: MakeBatch) -> None:
    await wire.create_topic("t")
    answer = await wire.call(produce("t", make_batch(b"a"), make_batch(b"b"), acks=2), 9, ProduceResponse)
    assert produced(answer) == [
        (ErrorCode.INVALID_REQUIRED_ACKS, -1), (ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, -1),
    ]  # fmt: skip


async def test_nobody_follows_a_node_that_is_alone(wire: Any) -> None:
    await wire.create_topic("t")
    request = fetch("t")
    request.replica_id = 5
    request.topics[0].partitions.append(FetchPartition(partition=7))
    answer = await wire.call(request, 11, FetchResponse)
    assert [partition.error_code for partition in answer.responses[0].partitions] == [
        ErrorCode.NOT_LEADER_OR_FOLLOWER, ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
    ]  # fmt: skip


def offsets_of(*partitions: ListOffsetsPartition) -> ListOffsetsRequest:
    return ListOffsetsRequest(replica_id=-1, topics=[ListOffsetsTopic(name="t", partitions=list(partitions))])


@pytest.mark.parametrize(
    ("epoch", "error"),
    [
        (-1, ErrorCode.NONE),
        (0, ErrorCode.NONE),
        (1, ErrorCode.UNKNOWN_LEADER_EPOCH),
        (-5, ErrorCode.FENCED_LEADER_EPOCH),
    ],
)
async def test_only_the_epoch_minus_one_means_that_none_is_known(wire: Any, epoch: int, error: ErrorCode) -> None:
    await wire.create_topic("t")
    asked = ListOffsetsPartition(partition_index=0, timestamp=-1, current_leader_epoch=epoch)
    answer = await wire.call(offsets_of(asked), 7, ListOffsetsResponse)
    assert answer.topics[0].partitions[0].error_code == error


async def test_a_topic_without_partitions_is_passed_over_and_a_partition_named_twice_refused_once(wire: Any) -> None:
    await wire.create_topic("t")
    assert (await wire.call(offsets_of(), 7, ListOffsetsResponse)).topics == []
    latest = ListOffsetsPartition(partition_index=0, timestamp=-1)
    [topic] = (await wire.call(offsets_of(latest, latest), 7, ListOffsetsResponse)).topics
    assert [partition.error_code for partition in topic.partitions] == [ErrorCode.INVALID_REQUEST]


@pytest.mark.parametrize(("version", "name"), [(6, ""), (7, None)])
@pytest.mark.parametrize("group", ["", "g"])
async def test_a_refused_join_has_no_protocol(wire: Any, version: int, name: str | None, group: str) -> None:
    request = JoinGroupRequest(
        group_id=group,
        session_timeout_ms=10_000,
        rebalance_timeout_ms=10_000,
        member_id="nobody",
        protocol_type="consumer",
        protocols=[JoinGroupRequestProtocol(name="range", metadata=b"")],
    )
    answer = await wire.call(request, version, JoinGroupResponse)
    assert (answer.error_code != 0, answer.protocol_name) == (True, name)


async def test_the_metadata_log_is_not_created_as_a_topic(running: Any, wire: Any) -> None:
    request = MetadataRequest(topics=[MetadataRequestTopic(name="__cluster_metadata")], allow_auto_topic_creation=True)
    answer = await wire.call(request, 9, MetadataResponse)
    assert answer.topics[0].error_code == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    await running.node._services.topic_creation.close()
    assert (await wire.call(MetadataRequest(topics=None), 9, MetadataResponse)).topics == []


async def test_a_client_id_in_another_encoding_is_served(wire: Any) -> None:
    frame = struct.pack(">hhih", 18, 0, 77, 2) + b"\xff\xfe"
    wire.writer.write(struct.pack(">i", len(frame)) + frame)
    assert struct.unpack(">iih", await wire.reader.readexactly(10))[1:] == (77, 0)


async def test_what_does_not_exist_is_said_although_the_group_refuses_the_commit(wire: Any) -> None:
    await wire.create_topic("t")
    await wire.call(FindCoordinatorRequest(key="g"), 3, FindCoordinatorResponse)
    topics = [
        OffsetCommitRequestTopic(
            name=name, partitions=[OffsetCommitRequestPartition(partition_index=index) for index in indexes]
        )
        for name, indexes in (("t", (0, 7)), ("nowhere", (0,)), ("empty", ()))
    ]
    request = OffsetCommitRequest(group_id="g", generation_id_or_member_epoch=5, member_id="m", topics=topics)
    answer = await wire.call(request, 8, OffsetCommitResponse)
    unknown = ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    assert {(t.name, p.partition_index): p.error_code for t in answer.topics for p in t.partitions} == {
        ("t", 0): ErrorCode.ILLEGAL_GENERATION, ("t", 7): unknown, ("nowhere", 0): unknown,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("key", "version", "reason"),
    [
        (0, 1, "version 1 of Produce is not served"),
        (1, 3, "version 3 of Fetch is not served"),
        (3, 99, "version 99 of Metadata is not served"),
        (29, 2, "DescribeAcls is not served"),
        (1234, 0, "API 1234 is not served"),
    ],
)
async def test_the_log_names_what_is_not_served(
    wire: Any, caplog: pytest.LogCaptureFixture, key: int, version: int, reason: str
) -> None:
    header = struct.pack(">hhih", key, version, 1, -1)
    wire.writer.write(struct.pack(">i", len(header)) + header)
    assert await wire.reader.read() == b""
    assert f"closing connection from 127.0.0.1: {reason}" in caplog.text
