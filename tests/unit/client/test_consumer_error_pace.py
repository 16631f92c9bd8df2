"""A program that logs an error and polls on: the consumer asks the broker again after a wait, not in each poll."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from tests.patience import PATIENCE_S
from tests.unit.client.fake_broker import FakeCluster, FakeNode
from tests.unit.client.test_consumer import T0, consumer, fill, read
from tests.unit.client.test_consumer_leader_epochs import NO_DIVERGENCE_IN_FETCH, elect_uncleanly
from tidelog.client import Consumer, ConsumerRecord, TopicPartition
from tidelog.protocol.batches.records import encode_batch
from tidelog.protocol.errors import ErrorCode, KafkaError
from tidelog.protocol.messages.fetch import FetchableTopicResponse, FetchRequest, FetchResponse, PartitionData
from tidelog.protocol.messages.list_offsets import ListOffsetsRequest, ListOffsetsResponse
from tidelog.protocol.messages.metadata import MetadataRequest, MetadataResponse
from tidelog.protocol.messages.offset_for_leader_epoch import OffsetForLeaderEpochRequest

BACKOFF_MS = 200


def collect(values: list[bytes | None], batch: Mapping[TopicPartition, Sequence[ConsumerRecord]]) -> None:
    values.extend(record.value for records in batch.values() for record in records)


async def poll_through_errors(
    consuming: Consumer, count: int, values: list[bytes | None] | None = None
) -> tuple[float, set[ErrorCode]]:
    """Poll until so many polls have raised. Returns the seconds that they took. `values` gets those of the records."""
    loop = asyncio.get_running_loop()
    began_s, codes = loop.time(), list[ErrorCode]()
    async with asyncio.timeout(PATIENCE_S):
        while len(codes) < count:
            try:
                collect([] if values is None else values, await consuming.poll(1000))
            except KafkaError as error:
                codes.append(error.code)
    return loop.time() - began_s, set(codes)


@pytest.mark.parametrize("problem", ["no such offset", "a damaged batch", "refused"])
async def test_a_partition_that_cannot_be_fetched_is_fetched_again_after_the_backoff(problem: str) -> None:
    async with FakeCluster(t=1) as cluster:
        batch = bytearray(encode_batch([(1000, None, b"v", ())]))
        batch[-1] ^= 1
        cluster.topics["t"][0].append(bytes(batch))
        refusal = PartitionData(partition_index=0, error_code=ErrorCode.TOPIC_AUTHORIZATION_FAILED)
        topic = FetchableTopicResponse(topic="t", topic_id=cluster.ids["t"], partitions=[refusal])
        if problem == "refused":
            cluster.script(FetchRequest, *[lambda request, node: FetchResponse(responses=[topic])] * 100)
        async with consumer(cluster, auto_offset_reset="none", retry_backoff_ms=BACKOFF_MS) as consuming:
            consuming.assign([T0])
            consuming.seek(T0, 7 if problem == "no such offset" else 0)
            took_s, codes = await poll_through_errors(consuming, 4)
            assert took_s >= 3 * BACKOFF_MS / 1000
            assert len(codes) == 1


async def test_a_broker_without_a_usable_version_of_fetch_raises_once_for_all_partitions() -> None:
    refusal = FetchResponse(error_code=ErrorCode.UNSUPPORTED_VERSION)
    async with FakeCluster(nodes=2, t=8, other=1) as cluster:
        cluster.topics["other"][0].leader = 2
        for led in cluster.topics["t"]:
            led.leader = 1

        def answer(request: FetchRequest, node: FakeNode) -> Any:
            return refusal if node.node_id == 1 else node.on_fetch(request)

        cluster.script(FetchRequest, *[answer] * 10_000)
        fill(cluster, "other", 0, 3)
        async with consumer(cluster, retry_backoff_ms=BACKOFF_MS) as consuming:
            consuming.assign([*(TopicPartition("t", number) for number in range(8)), TopicPartition("other", 0)])
            for partition in consuming.assignment():
                consuming.seek(partition, 0)
            values = list[bytes | None]()
            took_s, codes = await poll_through_errors(consuming, 4, values)
            assert took_s >= 3 * BACKOFF_MS / 1000
            assert codes == {ErrorCode.UNSUPPORTED_VERSION}
            assert values == [b"0", b"1", b"2"], "from the other broker"
            cluster.scripts[FetchRequest].clear()
            fill(cluster, "t", 7, 2)
            async with asyncio.timeout(PATIENCE_S):
                while len(values) < 5:
                    with contextlib.suppress(KafkaError):
                        collect(values, await consuming.poll(1000))


async def test_a_reset_is_repeated_after_the_backoff_when_no_fetch_accepts_its_outcome() -> None:
    def refuse(request: FetchRequest, node: FakeNode) -> FetchResponse:
        data = PartitionData(partition_index=0, error_code=ErrorCode.OFFSET_OUT_OF_RANGE)
        topic = FetchableTopicResponse(topic="t", topic_id=cluster.ids["t"], partitions=[data])
        return FetchResponse(responses=[topic])

    async with FakeCluster(t=1) as cluster:
        fill(cluster, "t", 0, 3)
        cluster.script(FetchRequest, *[refuse] * 10_000)
        async with consumer(cluster, auto_offset_reset="earliest", retry_backoff_ms=BACKOFF_MS) as consuming:
            consuming.assign([T0])
            assert not await consuming.poll(5 * BACKOFF_MS)
            assert 3 <= len(cluster.sent(FetchRequest)) <= 6
            assert len(cluster.sent(ListOffsetsRequest)) <= 6
            cluster.scripts[FetchRequest].clear()
            assert await read(consuming, 3) == [0, 1, 2]


@pytest.mark.parametrize("policy", ["earliest", "by_duration:PT1M"])
@pytest.mark.parametrize("code", [ErrorCode.UNKNOWN_SERVER_ERROR, ErrorCode.KAFKA_STORAGE_ERROR])
async def test_a_partition_whose_offsets_stay_refused_does_not_hold_up_others_of_its_leader(
    code: ErrorCode, policy: str
) -> None:
    def refuse(request: ListOffsetsRequest, node: FakeNode) -> ListOffsetsResponse:
        answer = node.on_list_offsets(request)
        assert isinstance(answer, ListOffsetsResponse)
        for partition in answer.topics[0].partitions:
            if partition.partition_index == 0:
                partition.error_code, partition.offset = code, -1
        return answer

    async with FakeCluster(t=2) as cluster:
        cluster.script(ListOffsetsRequest, *[refuse] * 10_000)
        async with consumer(cluster, auto_offset_reset=policy, retry_backoff_ms=BACKOFF_MS) as consuming:
            consuming.assign([T0, TopicPartition("t", 1)])
            async with asyncio.timeout(PATIENCE_S):
                while consuming.lag(TopicPartition("t", 1)) is None:
                    with contextlib.suppress(KafkaError):
                        await consuming.poll(100)
            if code is ErrorCode.UNKNOWN_SERVER_ERROR:
                took_s, codes = await poll_through_errors(consuming, 4)
                assert took_s >= 3 * BACKOFF_MS / 1000
                assert codes == {code}
            cluster.scripts[ListOffsetsRequest].clear()
            with contextlib.suppress(KafkaError):  # of a lookup before this
                await consuming.poll(2 * BACKOFF_MS)
            assert await consuming.position(T0) == 0


@pytest.mark.parametrize("versions", [{}, NO_DIVERGENCE_IN_FETCH])
async def test_a_leader_without_the_records_before_the_position_is_asked_again_after_the_backoff(
    versions: dict[int, tuple[int, int]],
) -> None:
    async with FakeCluster(nodes=2, t=1) as cluster:
        cluster.versions = dict(versions)
        fill(cluster, "t", 0, 9)
        async with consumer(cluster, auto_offset_reset="none", retry_backoff_ms=BACKOFF_MS) as consuming:
            consuming.assign([T0])
            consuming.seek(T0, 0)
            await read(consuming, 9)
            elect_uncleanly(cluster, 2, 3, 12)
            took_s, codes = await poll_through_errors(consuming, 4)
            assert took_s >= 3 * BACKOFF_MS / 1000
            assert codes == {ErrorCode.OFFSET_OUT_OF_RANGE}
            assert len(cluster.sent(OffsetForLeaderEpochRequest)) <= 6
            consuming.seek(T0, 3)
            assert await read(consuming, 12) == list(range(3, 15))


@pytest.mark.slow
@pytest.mark.parametrize("missing", [TopicPartition("t", 7), TopicPartition("gone", 0), TopicPartition("refused", 0)])
async def test_an_assigned_partition_that_stays_missing_is_asked_for_later_and_later(missing: TopicPartition) -> None:
    """Its position has to be looked up: that cost ten refreshes of the metadata each second."""

    def refuse(request: MetadataRequest, node: FakeNode) -> MetadataResponse:
        answer = node.on_metadata(request)
        assert isinstance(answer, MetadataResponse)
        for topic in answer.topics:
            if topic.name == "refused":
                topic.error_code, topic.partitions = ErrorCode.TOPIC_AUTHORIZATION_FAILED, []
        return answer

    async with FakeCluster(t=1, refused=1) as cluster:
        cluster.script(MetadataRequest, *[refuse] * 10_000)
        fill(cluster, "t", 0, 3)
        options = {"retry_backoff_max_ms": 1000, "allow_auto_create_topics": False}
        async with consumer(cluster, **options) as consuming:
            consuming.assign([T0, missing])
            values = list[bytes | None]()

            async def poll_for(seconds: float) -> int:
                """The requests for metadata meanwhile."""
                began_with = len(cluster.sent(MetadataRequest))
                until_s = asyncio.get_running_loop().time() + seconds
                while asyncio.get_running_loop().time() < until_s:
                    with contextlib.suppress(KafkaError):
                        for records in (await consuming.poll(100)).values():
                            values.extend(record.value for record in records)
                return len(cluster.sent(MetadataRequest)) - began_with

            async with asyncio.timeout(PATIENCE_S):
                while len(cluster.sent(MetadataRequest)) <= 16:  # the first ten are prompt
                    await poll_for(0.05)
            assert await poll_for(1.5) <= 6, "5 ms, doubled up to 1 s"
            assert values == [b"0", b"1", b"2"]
