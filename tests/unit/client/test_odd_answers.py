"""Answers that no broker should give, or that a newer one gives: a clear error, in time, and no other exception."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import Any

import pytest

from tests.patience import PATIENCE_S
from tests.unit.client.fake_broker import HANDLERS, FakeCluster, FakeNode
from tests.unit.client.test_consumer import T0, consumer, fill, read, until
from tidelog.client import Admin, TopicPartition
from tidelog.client.admin.configs import ConfigResource
from tidelog.client.network.metadata import EMPTY, merge_metadata
from tidelog.client.network.offsets import list_offsets
from tidelog.protocol.batches.records import encode_batch
from tidelog.protocol.errors import ErrorCode, KafkaError
from tidelog.protocol.messages.describe_configs import DescribeConfigsResponse, DescribeConfigsResult
from tidelog.protocol.messages.describe_groups import DescribeGroupsRequest, DescribeGroupsResponse
from tidelog.protocol.messages.describe_transactions import DescribeTransactionsRequest, DescribeTransactionsResponse
from tidelog.protocol.messages.fetch import AbortedTransaction, FetchRequest, FetchResponse
from tidelog.protocol.messages.list_config_resources import ConfigResource as ListedResource
from tidelog.protocol.messages.list_config_resources import ListConfigResourcesResponse
from tidelog.protocol.messages.metadata import (
    MetadataResponse,
    MetadataResponseBroker,
    MetadataResponsePartition,
    MetadataResponseTopic,
)
from tidelog.protocol.messages.sync_group import SyncGroupRequest, SyncGroupResponse


class AdminWithAnswer(Admin):
    """An admin client whose every request gets this answer."""

    def __init__(self, answer: Any = None) -> None:
        super().__init__()
        self._answer = answer

    async def _retry(self, attempt: Any, *, repeatable: bool = True, deadline: float | None = None) -> Any:
        return self._answer


@pytest.mark.parametrize(
    ("numbers", "kept"),
    [([2, 0, 1], 3), ([0, 2], 1), ([1, 2], 0), ([-1, 0], 0), ([0, 0, 1], 1), ([0, 2**31 - 1], 1)],
)
def test_partitions_after_a_number_that_is_missing_have_no_place(numbers, kept):
    """They are looked up by their place: a send raised IndexError."""
    rows = [MetadataResponsePartition(partition_index=number, leader_id=1) for number in numbers]
    topic = MetadataResponseTopic(name="t", topic_id=b"a" * 16, partitions=rows)
    answer = MetadataResponse(brokers=[MetadataResponseBroker(node_id=1, host="h", port=1)], topics=[topic])
    merged = merge_metadata(EMPTY, answer, ["t"]).topics["t"]
    assert [entry.partition for entry in merged.partitions] == list(range(kept))


@pytest.mark.parametrize("assignment", [b"\x00", b"\xff\xff", b"\x00\x00\x7f\xff\xff\xff"])
async def test_an_assignment_that_cannot_be_read_is_an_error_of_one_poll(assignment):
    async with FakeCluster(t=1) as cluster, consumer(cluster, "t", group_id="g") as consuming:
        cluster.script(SyncGroupRequest, lambda request, node: SyncGroupResponse(assignment=assignment))
        with pytest.raises(KafkaError, match="an assignment that cannot be read") as caught:
            await until(lambda: consuming.assignment(), consuming)
        assert caught.value.code is ErrorCode.INCONSISTENT_GROUP_PROTOCOL
        await until(lambda: consuming.assignment() == {T0}, consuming)


@pytest.mark.parametrize(
    ("call", "request_class", "answer"),
    [
        ("describe_groups", DescribeGroupsRequest, DescribeGroupsResponse()),
        ("describe_transactions", DescribeTransactionsRequest, DescribeTransactionsResponse()),
    ],
)
async def test_a_coordinator_whose_answer_lacks_the_key_is_an_error(monkeypatch, call, request_class, answer):
    monkeypatch.setitem(HANDLERS, request_class.API_KEY, (request_class, type(answer), lambda request, node: answer))
    async with FakeCluster() as cluster, Admin(bootstrap_servers=cluster.bootstrap) as client:
        with pytest.raises(KafkaError, match=r" 'g': the coordinator's answer does not mention it"):
            await getattr(client, call)(["g"])


@pytest.mark.parametrize(("partitions", "place"), [(1, 0), (3, 0), (3, 2)])
async def test_a_batch_that_the_connection_cannot_receive_is_an_error_of_a_poll(partitions: int, place: int) -> None:
    """The consumer asked for it again eight times a second, without a word; later it said so, and read no records of
    the other partitions while the application polled on.
    """
    large = TopicPartition("t", place)
    others = [number for number in range(partitions) if number != place]
    read_of = dict.fromkeys(others, 0)
    errors: list[str] = []
    async with FakeCluster(t=partitions) as cluster:
        cluster.topics["t"][place].append(bytes(encode_batch([(0, None, bytes(30_000), ())])))
        async with (
            consumer(cluster, "t", receive_message_max_bytes=20_000, retry_backoff_max_ms=50) as consuming,
            asyncio.timeout(PATIENCE_S),
        ):
            for count in (7, 14):
                for number in others:
                    fill(cluster, "t", number, 7)
                while len(errors) < count / 7 or set(read_of.values()) - {count}:  # and again, until it is sought past
                    try:
                        for partition, records in (await consuming.poll(5)).items():
                            read_of[partition.partition] += len(records)
                    except KafkaError as error:
                        errors.append(str(error))
            problem = f"MESSAGE_TOO_LARGE: the records of {large} cannot be fetched: "
            assert all(text.startswith(problem) and "receive_message_max_bytes is 20000" in text for text in errors)
            consuming.seek(large, 1)
            fill(cluster, "t", place, 2)
            assert await read(consuming, 2) == [1, 2]


async def test_many_batches_that_the_connection_cannot_receive_leave_the_other_partitions_their_turn() -> None:
    """Each of them ends a connection, and is asked for again: there was always one to fetch before the others."""
    read_of = 0
    async with FakeCluster(t=9) as cluster:
        for number in range(8):
            cluster.topics["t"][number].append(bytes(encode_batch([(0, None, bytes(30_000), ())])))
        async with (
            consumer(cluster, "t", receive_message_max_bytes=20_000, retry_backoff_max_ms=10) as consuming,
            asyncio.timeout(PATIENCE_S),
        ):
            for count in (7, 14):
                fill(cluster, "t", 8, 7)
                while read_of < count:
                    with contextlib.suppress(KafkaError):
                        read_of += sum(map(len, (await consuming.poll(5)).values()))


async def test_a_batch_that_the_connection_cannot_receive_is_asked_for_again_after_the_longest_wait_alone() -> None:
    """Each attempt ends the connection, also for the other partitions."""
    errors: list[str] = []
    read_of = 0
    async with FakeCluster(t=2) as cluster:
        cluster.topics["t"][0].append(bytes(encode_batch([(0, None, bytes(30_000), ())])))
        async with (
            consumer(cluster, "t", receive_message_max_bytes=20_000, retry_backoff_max_ms=600_000) as consuming,
            asyncio.timeout(PATIENCE_S),
        ):
            for count in range(1, 21):
                fill(cluster, "t", 1, 1)
                while read_of < count or not errors:
                    try:
                        read_of += sum(map(len, (await consuming.poll(5)).values()))
                    except KafkaError as error:
                        errors.append(str(error))
            assert len(errors) == 1
            single = [request for request in cluster.sent(FetchRequest) if request.max_bytes == 1]
            assert {request.max_wait_ms for request in single} == {0}  # there may be none, and the others wait for it


async def test_a_partition_that_is_given_up_before_its_answer_is_too_large_ends_no_other_fetch(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with FakeCluster(t=2) as cluster:
        cluster.topics["t"][0].append(bytes(encode_batch([(0, None, bytes(30_000), ())])))
        fill(cluster, "t", 1, 3)
        async with consumer(cluster, receive_message_max_bytes=20_000) as consuming:

            async def answer(node: FakeNode, request: FetchRequest) -> Any:
                answered = await node.on_fetch(request)
                if request.max_bytes == 1:
                    consuming.assign([TopicPartition("t", 1)])
                return answered

            handlers: Any = HANDLERS
            monkeypatch.setitem(handlers, FetchRequest.API_KEY, (FetchRequest, FetchResponse, answer))
            consuming.assign([TopicPartition("t", 0)])
            await until(lambda: consuming.assignment() == {TopicPartition("t", 1)}, consuming)
            assert await read(consuming, 3) == [0, 1, 2]
    assert "Exception in callback" not in caplog.text


async def test_a_consumer_asks_for_no_more_than_the_connection_receives():
    async with FakeCluster(t=3) as cluster, consumer(cluster, "t", receive_message_max_bytes=20_000) as consuming:
        await until(lambda: cluster.sent(FetchRequest), consuming)
        assert {request.max_bytes for request in cluster.sent(FetchRequest)} == {20_000 - 512 - 3 * 128}


async def test_an_answer_whose_aborted_transactions_take_too_much_is_asked_for_with_fewer_records(monkeypatch):
    """They are of no size that a request can bound. Each poll raised that the records cannot be fetched."""

    async def answer(node: FakeNode, request: FetchRequest) -> Any:
        answered: Any = await node.on_fetch(request)
        count = request.max_bytes // 10
        for topic in answered.responses:
            for data in topic.partitions:
                if data.records:
                    data.aborted_transactions = [AbortedTransaction(producer_id=9, first_offset=0)] * count
        return answered

    monkeypatch.setitem(HANDLERS, FetchRequest.API_KEY, (FetchRequest, FetchResponse, answer))
    async with FakeCluster(t=1) as cluster, consumer(cluster, "t", receive_message_max_bytes=20_000) as consuming:
        fill(cluster, "t", 0, 2)
        assert await read(consuming, 2) == [0, 1]
        asked = [request.max_bytes for request in cluster.sent(FetchRequest)]
        assert asked[:2] == [20_000 - 512 - 128, (20_000 - 512 - 128) // 16]
        fill(cluster, "t", 0, 2)  # what there is fits: later requests ask for more again
        assert len(await read(consuming, 2)) == 2
        assert asked[1] in [request.max_bytes // 2 for request in cluster.sent(FetchRequest)[2:]]
    # The partitions of a broker are fetched one by one meanwhile, a batch each. That all of these fit says nothing of
    # an answer for all, which was too large again.
    async with FakeCluster(t=8) as cluster, consumer(cluster, "t", receive_message_max_bytes=20_000) as consuming:
        for number in range(8):
            fill(cluster, "t", number, 2)
        await read(consuming, 16)
        await until(lambda: [request.max_bytes for request in cluster.sent(FetchRequest)[-2:]].count(1) == 0, consuming)
        asked = [request.max_bytes for request in cluster.sent(FetchRequest)]
        assert asked.count(1) == 8
        after_last = len(asked) - asked[::-1].index(1)
        first = 20_000 - 512 - 8 * 128
        assert set(asked[: after_last + 1]) == {first, 1, first // 16}


async def test_metadata_that_the_connection_cannot_receive_are_logged(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.WARNING, "tidelog")
    async with FakeCluster(t=1) as cluster, consumer(cluster, receive_message_max_bytes=1_000) as consuming:
        for number in range(50):
            cluster.create(f"topic-{number}", 1)
        consuming.subscribe(pattern="topic-.*")
        refusal = " answered Metadata with "
        await until(lambda: refusal in caplog.text, consuming)
        for _ in range(5):
            await consuming.poll(20)
        assert caplog.text.count(refusal) == 1


async def test_config_resources_of_a_type_that_the_client_does_not_know_are_listed():
    rows = [ListedResource(resource_name="new", resource_type=64), ListedResource(resource_name="t", resource_type=2)]
    listed = await AdminWithAnswer(ListConfigResourcesResponse(config_resources=rows)).list_config_resources()
    assert listed == [ConfigResource("topic", "t"), ConfigResource("unknown", "new")]


async def test_configs_of_another_resource_than_the_one_asked_for_are_an_error():
    answer = DescribeConfigsResponse(results=[DescribeConfigsResult(resource_name="new", resource_type=64)])
    with pytest.raises(KafkaError, match="the answer does not mention topic 't'"):
        await AdminWithAnswer(answer).describe_configs(topics=["t"])


async def test_offsets_without_a_leader_leave_time_for_the_wait_before_another_attempt():
    """A call lasted up to `retry_backoff_max_ms` beyond its limit."""
    waits_ms: list[float] = []

    class Backoff:
        def wait_ms(self, failures: int) -> float:
            return 100.0

    class LeaderlessCluster:
        metadata = EMPTY
        refreshes_begun = 1
        retry_backoff = Backoff()

        def track(self, topics: Any) -> None:
            pass

        async def wait_for_metadata(self, timeout_ms: float) -> bool:
            waits_ms.append(timeout_ms)
            return True

    cluster: Any = LeaderlessCluster()
    with pytest.raises(KafkaError) as caught:
        await list_offsets(cluster, {TopicPartition("t", 0): -1}, timeout_ms=350)
    assert caught.value.code is ErrorCode.REQUEST_TIMED_OUT
    assert waits_ms
    assert max(waits_ms) <= 250.001  # a sum of floating-point seconds
