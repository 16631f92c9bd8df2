"""Calls of the consumer that are wrong, or come after its end: a clear error, and the consumer goes on."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

import pytest

from tests.patience import PATIENCE_S, until
from tests.unit.client.fake_broker import FakeCluster, FakeNode
from tests.unit.client.test_consumer import T0, fill, read
from tidelog.client import Consumer, OffsetAndMetadata, TopicPartition, sync
from tidelog.protocol.errors import ErrorCode, KafkaError
from tidelog.protocol.messages.metadata import MetadataRequest, MetadataResponse


def consumer(cluster: FakeCluster, *topics: str, **options: Any) -> Consumer:
    timing = {"reconnect_backoff_ms": 5, "retry_backoff_ms": 5, "fetch_max_wait_ms": 20}
    return Consumer(
        *topics, **{"bootstrap_servers": cluster.bootstrap, "auto_offset_reset": "earliest", **timing, **options}
    )


async def made(call: Callable[[Consumer], Any], consuming: Consumer) -> Any:
    """The result of a call, of either kind."""
    result = call(consuming)
    return await result if inspect.isawaitable(result) else result


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda it: it.seek(T0, "5"), TypeError, "an offset is a number or an OffsetAndMetadata, not '5'"),
        (lambda it: it.seek(T0, None), TypeError, "not None"),
        (lambda it: it.seek(T0, -1), ValueError, "is not an offset"),
        (lambda it: it.seek(T0, 2**63), ValueError, "is not an offset"),
        (lambda it: it.seek(T0, OffsetAndMetadata("5")), TypeError, "an offset is a number"),  # type: ignore[arg-type]
        (lambda it: it.seek(T0, OffsetAndMetadata(5, "", 2**31)), ValueError, "is not a leader epoch"),
        (lambda it: it.seek(T0, OffsetAndMetadata(5, "", None)), TypeError, "an offset is a number"),  # type: ignore[arg-type]
        (
            lambda it: it.offsets_for_times({T0: None}),
            TypeError,
            "t-0: a time is a whole number of milliseconds, not None",
        ),
        (lambda it: it.offsets_for_times({T0: 1.5}), TypeError, "a time is a whole number of milliseconds, not 1.5"),
        (lambda it: it.offsets_for_times({T0: -1}), ValueError, "t-0: -1 is not a time in ms"),
        (lambda it: it.offsets_for_times({T0: 2**63}), ValueError, "is not a time in ms"),
        (lambda it: it.assign([("t", -1)]), ValueError, "numbered from 0 on"),
        (lambda it: it.assign([("\ud800", 0)]), KafkaError, "the topic name"),
        (lambda it: it.subscribe(["\ud800"]), KafkaError, "the topic name"),
        (lambda it: it.subscribe(pattern="["), ValueError, "is not a regular expression"),
        (lambda it: it.subscribe(["t"], listener=print), TypeError, "listener must be a RebalanceListener, not <built"),
        (lambda it: it.batches(max_records=0), ValueError, "max_records must be between 1 and"),
        (lambda it: it.poll(0, 0), ValueError, "max_records"),
        (lambda it: it.poll(0, "5"), TypeError, "max_records must be a whole number, not '5'"),
        (lambda it: it.poll(None), TypeError, "timeout_ms must be a number of milliseconds, not None"),
        (lambda it: it.poll(float("nan")), TypeError, "timeout_ms must be a number of milliseconds, not nan"),
        (lambda it: it.poll_arrow(0, 0), ValueError, "max_records"),
        (lambda it: it.poll_arrow(0, 1, ("value", "value")), ValueError, "a column is named twice: value, value"),
        (lambda it: it.close(float("nan")), TypeError, "timeout_ms must be a number of milliseconds, not nan"),
    ],
)
async def test_a_wrong_argument_is_named_and_changes_nothing(call, error, text):
    async with FakeCluster(t=1) as cluster:
        fill(cluster, "t", 0, 3)
        async with consumer(cluster, "t") as consuming:
            with pytest.raises(error, match=text):
                await made(call, consuming)
            [records] = (await consuming.poll(10_000)).values()
            assert [record.offset for record in records] == [0, 1, 2]


async def test_a_call_after_close_says_so():
    async with FakeCluster(t=1) as cluster:
        consuming = consumer(cluster, "t")
        await consuming.poll()
        await consuming.close()
        for call in (
            lambda it: it.seek(T0, 0),
            lambda it: it.pause(T0),
            lambda it: it.resume(T0),
            lambda it: it.unsubscribe(),
        ):
            with pytest.raises(RuntimeError, match="this consumer is closed"):
                await made(call, consuming)


@pytest.mark.parametrize("protocol", ["classic", "consumer"])
@pytest.mark.parametrize("end", ["unsubscribe", "close"])
async def test_a_consumer_that_has_left_its_group_has_no_metadata_for_a_transaction(protocol, end):
    """As a member of no group its offsets would be committed unchecked, over those of the next owner."""
    async with FakeCluster(t=1) as cluster:
        consuming = consumer(cluster, "t", group_id="g", group_protocol=protocol)
        fill(cluster, "t", 0, 1)
        assert await consuming.poll(10_000)
        consuming.group_metadata()
        await getattr(consuming, end)()
        with pytest.raises(KafkaError, match="not a member") as caught:
            consuming.group_metadata()
        assert caught.value.code is ErrorCode.UNKNOWN_MEMBER_ID
        await consuming.close()


async def test_a_consumer_of_assigned_partitions_has_metadata_without_a_member():
    async with FakeCluster(t=1) as cluster:
        consuming = consumer(cluster, group_id="g")
        await consuming.start()
        consuming.assign([T0])
        assert consuming.group_metadata().generation_id == -1
        await consuming.close()


def test_the_blocking_consumer_refuses_what_is_no_listener():
    consuming = sync.Consumer()
    with pytest.raises(TypeError, match="listener must be a RebalanceListener"):
        consuming.subscribe(["t"], listener=print)  # type: ignore[arg-type]
    consuming.close()


def refuse_mine(request: MetadataRequest, node: FakeNode) -> MetadataResponse:
    response = node.on_metadata(request)
    assert isinstance(response, MetadataResponse)
    for topic in response.topics:
        if topic.name == "mine":
            topic.error_code, topic.partitions = ErrorCode.TOPIC_AUTHORIZATION_FAILED, []
    return response


@pytest.mark.parametrize("options", [{}, {"group_id": "g"}])
async def test_a_refused_topic_of_a_subscription_is_raised_and_the_others_are_read(options: dict[str, str]):
    """As in Java. Polls were empty, without a word of it."""
    async with FakeCluster(mine=1, t=1) as cluster:
        fill(cluster, "t", 0, 3)
        cluster.script(MetadataRequest, *[refuse_mine] * 99)
        async with consumer(cluster, "mine", "t", **options) as consuming:
            with pytest.raises(KafkaError, match="topic 'mine'") as caught:
                await consuming.poll(PATIENCE_S * 1000)
            assert caught.value.code is ErrorCode.TOPIC_AUTHORIZATION_FAILED
            assert await read(consuming, 3) == [0, 1, 2]
            cluster.scripts.clear()
            fill(cluster, "mine", 0, 3)
            assert consuming._cluster is not None
            consuming._cluster.request_refresh()
            assert await read(consuming, 3) == [0, 1, 2]


async def test_offsets_of_a_topic_that_was_refused_are_asked_for_anew() -> None:
    """After an ACL has come. The refusal in the metadata was raised until these were as old as metadata_max_age_ms."""
    mine = TopicPartition("mine", 0)
    async with FakeCluster(mine=1) as cluster, consumer(cluster) as consuming:
        fill(cluster, "mine", 0, 3)
        cluster.script(MetadataRequest, *[refuse_mine] * 9999)
        for _ in range(2):
            with pytest.raises(KafkaError, match="topic 'mine'") as caught:
                await consuming.end_offsets([mine])
            assert caught.value.code is ErrorCode.TOPIC_AUTHORIZATION_FAILED
        cluster.scripts.clear()
        assert await consuming.end_offsets([mine]) == {mine: 3}


async def test_a_refused_topic_of_assigned_partitions_with_a_position_is_raised():
    """Without a position its lookup raises; with one, polls were empty for good."""
    mine = TopicPartition("mine", 0)
    async with FakeCluster(mine=1) as cluster, consumer(cluster) as consuming:
        fill(cluster, "mine", 0, 3)
        cluster.script(MetadataRequest, *[refuse_mine] * 9999)
        consuming.assign([mine])
        consuming.seek(mine, 1)
        with pytest.raises(KafkaError, match="topic 'mine'") as caught:
            await consuming.poll(PATIENCE_S * 1000 / 4)
        assert caught.value.code is ErrorCode.TOPIC_AUTHORIZATION_FAILED


@pytest.mark.parametrize("group_id", [None, "g"])
async def test_a_topic_that_no_call_names_any_more_is_forgotten(group_id: str | None) -> None:
    """With one deleted the consumer asked for the metadata of all that it ever named, each second of its life."""
    async with (
        FakeCluster(t=1, u=1) as cluster,
        consumer(cluster, "t", group_id=group_id) as consuming,
    ):
        fill(cluster, "t", 0, 1)
        await read(consuming, 1)
        await consuming.end_offsets([TopicPartition("u", 0)])
        inner = consuming._cluster
        assert inner is not None
        await until(lambda: "u" in inner.metadata.topics and not inner._refresh_requested.is_set())
        inner._topics = dict.fromkeys(inner._topics, -math.inf)
        await inner.wait_for_metadata(PATIENCE_S * 1000)
        await until(lambda: inner.metadata.topics.keys() == {"t"})
        assert inner._topics.keys() == {"t"}
        assert await consuming.end_offsets([TopicPartition("u", 0)]) == {TopicPartition("u", 0): 0}
