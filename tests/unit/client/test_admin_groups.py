"""What the admin client tells of groups and does to them, on a real node in this process."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from tests.patience import PATIENCE_S
from tests.unit.client.fake_broker import DROP, HANDLERS, FakeCluster, FakeNode
from tidelog import EmbeddedBroker
from tidelog.client import (
    Admin,
    Consumer,
    NewTopic,
    OffsetAndMetadata,
    PartitionErrors,
    Producer,
    TopicPartition,
    sync,
)
from tidelog.client.groups.model import GROUP_STATES, GroupListing, GroupMember, PartitionLag
from tidelog.client.network.cluster import Cluster
from tidelog.client.network.record_times import first_record_times
from tidelog.protocol.batches.records import encode_batch
from tidelog.protocol.errors import ErrorCode, KafkaError
from tidelog.protocol.messages import consumer_group_describe, describe_groups
from tidelog.protocol.messages.consumer_group_describe import (
    ConsumerGroupDescribeRequest,
    ConsumerGroupDescribeResponse,
)
from tidelog.protocol.messages.delete_groups import DeletableGroupResult, DeleteGroupsRequest, DeleteGroupsResponse
from tidelog.protocol.messages.describe_groups import DescribeGroupsRequest, DescribeGroupsResponse
from tidelog.protocol.messages.list_offsets import ListOffsetsRequest, ListOffsetsResponse
from tidelog.protocol.messages.metadata import MetadataResponseBroker

E = ErrorCode
_numbers = itertools.count(1)


@pytest.fixture(scope="module")
def broker() -> Iterator[EmbeddedBroker]:
    with EmbeddedBroker(config={"offsets.topic.num.partitions": "3"}) as running:
        yield running


@pytest.fixture
async def admin(broker: EmbeddedBroker) -> AsyncIterator[Admin]:
    async with Admin(bootstrap_servers=broker.bootstrap_servers) as client:
        yield client


@pytest.fixture
async def topic(admin: Admin) -> str:
    name = f"topic-{next(_numbers)}"
    await admin.create_topics([NewTopic(name, 2)])
    return name


@pytest.fixture
def group() -> str:
    return f"group-{next(_numbers)}"


async def fill(broker: EmbeddedBroker, topic: str, times_ms: list[int], partition: int = 0, **options: object) -> None:
    async with Producer(bootstrap_servers=broker.bootstrap_servers, **options) as producer:
        for number, time_ms in enumerate(times_ms):
            await producer.send(topic, b"%d" % number, partition=partition, timestamp_ms=time_ms)
            if not options:
                await producer.flush()


async def join(broker: EmbeddedBroker, topic: str, group: str, **options: object) -> Consumer:
    consumer = Consumer(topic, bootstrap_servers=broker.bootstrap_servers, group_id=group, **options)
    await consumer.start()
    async with asyncio.timeout(PATIENCE_S):
        while not consumer.assignment():
            await consumer.poll(50)
    return consumer


async def test_a_group_is_listed_and_described_while_it_reads_and_when_it_is_left(
    broker: EmbeddedBroker, admin: Admin, topic: str, group: str
) -> None:
    consumer = await join(broker, topic, group, client_id="reader", group_instance_id="one")
    assert GroupListing(group, "consumer", "Stable", "classic") in await admin.list_groups()
    assert [each.group_id for each in await admin.list_groups(states=["stable"], types=["classic"])] == [group]
    described = (await admin.describe_groups([group]))[group]
    assert (described.state, described.protocol_type, described.protocol) == ("Stable", "consumer", "range")
    assert described.coordinator is not None
    (member,) = described.members
    assert (member.instance_id, member.client_id, member.client_host) == ("one", "reader", "/127.0.0.1")
    assert member.topics == (topic,)
    assert member.assignment == (TopicPartition(topic, 0), TopicPartition(topic, 1))
    refused = await admin.delete_groups([group, "nobody"])
    assert {name: error and error.code for name, error in refused.items()} == {
        group: E.NON_EMPTY_GROUP,
        "nobody": E.GROUP_ID_NOT_FOUND,
    }
    with pytest.raises(KafkaError, match="UNKNOWN_MEMBER_ID"):
        await admin.alter_group_offsets(group, {TopicPartition(topic, 0): 1})
    kept = await admin.delete_group_offsets(group, [TopicPartition(topic, 0)])
    assert kept[TopicPartition(topic, 0)].code is E.GROUP_SUBSCRIBED_TO_TOPIC  # type: ignore[union-attr]
    await consumer.close()


async def test_offsets_are_set_told_and_forgotten(admin: Admin, topic: str, group: str) -> None:
    first, second = TopicPartition(topic, 0), TopicPartition(topic, 1)
    await admin.alter_group_offsets(group, {first: 3, second: OffsetAndMetadata(4, "note")})
    assert await admin.list_group_offsets(group) == {first: OffsetAndMetadata(3), second: OffsetAndMetadata(4, "note")}
    assert await admin.list_group_offsets(group, [first]) == {first: OffsetAndMetadata(3)}
    assert (await admin.describe_groups([group]))[group].state == "Empty"
    missing = TopicPartition(topic, 7)
    outcome = await admin.delete_group_offsets(group, [first, missing])
    assert outcome[first] is None
    assert outcome[missing].code is E.UNKNOWN_TOPIC_OR_PARTITION  # type: ignore[union-attr]
    assert list(await admin.list_group_offsets(group)) == [second]
    assert await admin.delete_groups([group]) == {group: None}
    with pytest.raises(KafkaError, match=group) as caught:
        await admin.describe_groups([group])
    assert caught.value.code is E.GROUP_ID_NOT_FOUND
    with pytest.raises(KafkaError) as caught:
        await admin.delete_group_offsets(group, [first])
    assert caught.value.code is E.GROUP_ID_NOT_FOUND
    with pytest.raises(TypeError):
        await admin.describe_groups("ab")


async def test_lag_is_told_in_records_and_in_time(broker: EmbeddedBroker, admin: Admin, topic: str, group: str) -> None:
    now_ms = time.time_ns() // 1_000_000
    first, second = TopicPartition(topic, 0), TopicPartition(topic, 1)
    await fill(broker, topic, [now_ms - 9000, now_ms - 5000, now_ms - 1000])
    await fill(broker, topic, [now_ms], partition=1)
    await admin.alter_group_offsets(group, {first: 1})
    assert await admin.group_lag(group) == {first: PartitionLag(1, 3)}
    lags = await admin.group_lag(group, [first, second, TopicPartition("nowhere", 0)], times=True)
    assert lags == {first: PartitionLag(1, 3, now_ms - 5000), second: PartitionLag(None, 1)}
    assert [each.lag for each in lags.values()] == [2, None]
    await admin.alter_group_offsets(group, {first: 9, second: 1})
    lags = await admin.group_lag(group, times=True)
    assert [(each.lag, each.unread_since_ms) for each in lags.values()] == [(0, None), (0, None)]
    await admin.alter_group_offsets(group, {first: 0})
    await admin.delete_records({first: 2})
    assert (await admin.group_lag(group, times=True))[first] == PartitionLag(0, 3, now_ms - 1000)


async def test_times_of_records_inside_batches_and_of_large_ones(
    broker: EmbeddedBroker, admin: Admin, topic: str
) -> None:
    first, second = TopicPartition(topic, 0), TopicPartition(topic, 1)
    times = list(range(1_700_000_000_000, 1_700_000_000_100))
    await fill(broker, topic, times, linger_ms=1000, compression_type="zstd")
    async with Producer(bootstrap_servers=broker.bootstrap_servers, batch_size=400_000) as producer:
        for time_ms in times[:4]:
            await producer.send_and_wait(topic, b"x" * 300_000, partition=1, timestamp_ms=time_ms)
    cluster = await admin._connected_cluster()
    found = await first_record_times(cluster, {second: 2, first: 57}, 5000)
    assert found == {first: times[57], second: times[2]}
    assert await first_record_times(cluster, {first: 100, second: 9}, 5000) == {first: None, second: None}
    with pytest.raises(KafkaError) as caught:
        await first_record_times(cluster, {TopicPartition(topic, 7): 0}, 300)
    assert caught.value.code is E.REQUEST_TIMED_OUT


def _unscripted(node: FakeNode, request: object) -> object:
    raise AssertionError(request)


def describe_classic(_: FakeNode, request: DescribeGroupsRequest) -> DescribeGroupsResponse:
    return DescribeGroupsResponse(
        groups=[
            describe_groups.DescribedGroup(group_id=group, group_state="Stable", protocol_type="consumer")
            if group == "classic"
            else describe_groups.DescribedGroup(group_id=group, error_code=E.GROUP_ID_NOT_FOUND, group_state="Dead")
            for group in request.groups
        ]
    )


def describe_newer(_: FakeNode, request: ConsumerGroupDescribeRequest) -> ConsumerGroupDescribeResponse:
    assignment = consumer_group_describe.Assignment(
        topic_partitions=[consumer_group_describe.TopicPartitions(topic_name="t", partitions=[1, 0])]
    )
    member = consumer_group_describe.Member(
        member_id="m", client_id="c", client_host="/h", subscribed_topic_names=["u", "t"], assignment=assignment
    )
    return ConsumerGroupDescribeResponse(
        groups=[
            consumer_group_describe.DescribedGroup(
                group_id=group, group_state="Reconciling", assignor_name="uniform", members=[member]
            )
            if group == "newer"
            else consumer_group_describe.DescribedGroup(group_id=group, error_code=E.GROUP_ID_NOT_FOUND)
            for group in request.group_ids
        ]
    )


async def test_a_group_of_the_newer_protocol_is_described_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kafka's answer to DescribeGroups is GROUP_ID_NOT_FOUND, with the message that the group is not a classic one."""
    monkeypatch.setitem(HANDLERS, 15, (DescribeGroupsRequest, DescribeGroupsResponse, describe_classic))
    monkeypatch.setitem(HANDLERS, 69, (ConsumerGroupDescribeRequest, ConsumerGroupDescribeResponse, describe_newer))
    async with FakeCluster() as cluster, Admin(bootstrap_servers=cluster.bootstrap) as client:
        described = await client.describe_groups(["newer", "classic"])
        assert list(described) == ["newer", "classic"]
        assert described["classic"].state == "Stable"
        newer = described["newer"]
        assert (newer.state, newer.protocol_type, newer.protocol) == ("Reconciling", "consumer", "uniform")
        assignment = (TopicPartition("t", 0), TopicPartition("t", 1))
        assert newer.members == (GroupMember("m", None, "c", "/h", ("t", "u"), assignment),)
        assert newer.coordinator is not None
        with pytest.raises(KafkaError) as raised:
            await client.describe_groups(["newer", "none"])
        assert raised.value.code is E.GROUP_ID_NOT_FOUND


async def test_a_group_is_missing_where_brokers_do_not_know_the_newer_protocol(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(HANDLERS, 15, (DescribeGroupsRequest, DescribeGroupsResponse, describe_classic))
    async with FakeCluster() as cluster, Admin(bootstrap_servers=cluster.bootstrap) as client:
        with pytest.raises(KafkaError) as raised:
            await client.describe_groups(["newer"])
        assert raised.value.code is E.GROUP_ID_NOT_FOUND


async def test_a_coordinator_that_moved_is_asked_for_what_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(HANDLERS, 42, (DeleteGroupsRequest, DeleteGroupsResponse, _unscripted))
    asked: list[list[str]] = []

    def answer(first: ErrorCode, second: ErrorCode):
        def action(request: DeleteGroupsRequest, node: object) -> object:
            asked.append(request.groups_names)
            codes = dict(zip(("a", "b"), (first, second)))
            return DeleteGroupsResponse(
                results=[DeletableGroupResult(group_id=each, error_code=codes[each]) for each in request.groups_names]
            )

        return action

    async with FakeCluster() as cluster:
        fast = {"retry_backoff_ms": 5, "retry_backoff_max_ms": 10}
        async with Admin(bootstrap_servers=cluster.bootstrap, **fast) as client:
            cluster.script(
                DeleteGroupsRequest,
                lambda request, node: DROP,
                answer(E.NONE, E.NOT_COORDINATOR),
                answer(E.NONE, E.NONE),
            )
            assert await client.delete_groups(["a", "b", "a"]) == {"a": None, "b": None}
    assert asked == [["a", "b"], ["b"]]


@pytest.mark.parametrize(
    ("filters", "text"),
    [
        ({"states": ["Stabel"]}, "states: 'Stabel' is unknown; did you mean Stable?"),
        ({"states": ["empty", "Foo"]}, f"states: 'Foo' is unknown; known are {', '.join(GROUP_STATES)}"),
        ({"types": ["clasic"]}, "types: 'clasic' is unknown; did you mean classic?"),
        ({"types": [""]}, "types: '' is unknown; known are consumer, classic, share, streams"),
    ],
)
async def test_groups_in_a_state_or_of_a_type_that_is_none_are_refused(admin: Admin, filters: Any, text: str) -> None:
    """The answer was an empty list."""
    with pytest.raises(ValueError) as refused:
        await admin.list_groups(**filters)
    assert str(refused.value) == text


def test_the_blocking_twin(broker: EmbeddedBroker, group: str) -> None:
    topic = f"topic-{next(_numbers)}"
    partition = TopicPartition(topic, 0)
    with sync.Admin(bootstrap_servers=broker.bootstrap_servers) as admin:
        admin.create_topics([NewTopic(topic, 1)])
        admin.alter_group_offsets(group, {partition: 0})
        assert admin.list_group_offsets(group) == admin.list_consumer_group_offsets(group)
        assert group in [each.group_id for each in admin.list_groups(states=["Empty"])]
        assert admin.group_lag(group)[partition].lag == 0
        assert admin.describe_groups([group])[group].members == ()
        assert admin.delete_group_offsets(group, [partition]) == {partition: None}
        assert admin.delete_groups([group]) == {group: None}


async def test_groups_have_longer_names_than_topics(admin: Admin) -> None:
    """An id of 300 characters was refused as the name of a topic."""
    long = "g" * 300
    with pytest.raises(KafkaError, match=f"GROUP_ID_NOT_FOUND.*{long}"):
        await admin.describe_groups([long])
    (refused,) = (await admin.delete_groups([long])).values()
    assert isinstance(refused, KafkaError)
    assert refused.code is E.GROUP_ID_NOT_FOUND
    with pytest.raises(TypeError, match="group_ids must be a list of strings, not 'gg'"):
        await admin.describe_groups("gg")
    with pytest.raises(TypeError, match="group_ids must be a list of strings, not 5"):
        await admin.delete_groups(5)  # type: ignore[arg-type]


async def test_a_broker_that_was_fenced_a_moment_ago_is_not_asked(broker, topic, group, monkeypatch):
    """Metadata names it for some seconds more, DescribeCluster does not."""
    fetch = Cluster.fetch_metadata

    async def with_a_dead_broker(self, topics, **options):
        response = await fetch(self, topics, **options)
        response.brokers.append(MetadataResponseBroker(node_id=99, host="127.0.0.1", port=1))
        return response

    monkeypatch.setattr(Cluster, "fetch_metadata", with_a_dead_broker)
    consumer = await join(broker, topic, group)
    async with Admin(bootstrap_servers=broker.bootstrap_servers, default_api_timeout_ms=5000) as admin:
        assert group in [listing.group_id for listing in await admin.list_groups()]
        assert await admin.list_transactions() == []
    await consumer.close()


async def test_the_lag_where_a_leader_refuses_has_the_partitions_without_a_leader_yet() -> None:
    partitions = [TopicPartition("t", number) for number in range(3)]
    async with FakeCluster(t=3) as cluster:
        cluster.topics["t"][1].leader = -1
        cluster.topics["t"][2].append(bytes(encode_batch([(0, None, b"x", ())])))

        def refuse(request: ListOffsetsRequest, node: FakeNode) -> object:
            response = node.on_list_offsets(request)
            assert isinstance(response, ListOffsetsResponse)
            for answer in response.topics[0].partitions:
                if answer.partition_index == 0:
                    answer.error_code = E.KAFKA_STORAGE_ERROR
            return response

        cluster.script(ListOffsetsRequest, *[refuse] * 1000)
        async with Admin(bootstrap_servers=cluster.bootstrap, default_api_timeout_ms=500) as client:
            with pytest.raises(PartitionErrors) as raised:
                await client.group_lag("g", partitions)
        assert set(raised.value.errors) == {partitions[0]}
        ends = {each: end and end.offset for each, end in raised.value.answers.items()}
        assert ends == {partitions[1]: None, partitions[2]: 1}
