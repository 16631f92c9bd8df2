"""Commits keep their order, whatever happens to them on the way."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from tests.patience import PATIENCE_S
from tests.unit.client.fake_broker import DROP, SILENCE, FakeCluster, FakeNode
from tests.unit.client.test_consumer import FAST, T0, T1, consumer, fill, read, until
from tidelog.client import Consumer, OffsetAndMetadata, TopicPartition
from tidelog.protocol.errors import ErrorCode, KafkaError
from tidelog.protocol.messages.find_coordinator import FindCoordinatorRequest
from tidelog.protocol.messages.offset_commit import (
    OffsetCommitRequest,
    OffsetCommitResponse,
    OffsetCommitResponsePartition,
    OffsetCommitResponseTopic,
)

PATIENT = {"request_timeout_ms": 300, "retry_backoff_ms": 400, "retry_backoff_max_ms": 400}


def alone(cluster: FakeCluster, **options: Any) -> Consumer:
    """A consumer that commits for a group without being its member."""
    consuming = consumer(cluster, group_id="g", **options)
    consuming.assign([T0, T1])
    return consuming


def sent(cluster: FakeCluster, partition: TopicPartition) -> list[int]:
    return [
        each.committed_offset
        for request in cluster.sent(OffsetCommitRequest)
        for topic in request.topics
        for each in topic.partitions
        if (topic.name, each.partition_index) == partition
    ]


def committed(cluster: FakeCluster) -> dict[tuple[str, int], int]:
    return {partition: offset for partition, (offset, _) in cluster.groups.group("g").offsets.items()}


def refuse(code: ErrorCode) -> Any:
    def action(request: OffsetCommitRequest, node: FakeNode) -> OffsetCommitResponse:
        topics = []
        for topic in request.topics:
            rows = [
                OffsetCommitResponsePartition(partition_index=each.partition_index, error_code=code)
                for each in topic.partitions
            ]
            topics.append(OffsetCommitResponseTopic(name=topic.name, topic_id=topic.topic_id, partitions=rows))
        return OffsetCommitResponse(topics=topics)

    return action


async def test_commits_that_were_started_in_the_background_arrive_in_order():
    async with FakeCluster(t=2) as cluster, alone(cluster) as consuming:
        tasks = [await consuming.commit_async({T0: offset}) for offset in (10, 20, 30)]
        await asyncio.wait_for(asyncio.gather(*tasks), PATIENCE_S)
        assert sent(cluster, T0) == sorted(sent(cluster, T0))
        assert committed(cluster) == {T0: 30}


@pytest.mark.parametrize(
    "trouble", [refuse(ErrorCode.COORDINATOR_LOAD_IN_PROGRESS), refuse(ErrorCode.NOT_COORDINATOR), DROP, SILENCE]
)
async def test_a_retry_yields_to_a_newer_commit_of_the_same_partition_only(trouble):
    # Time enough to start the newer commit before the older one is tried again.
    answer = trouble if callable(trouble) else lambda request, node: trouble
    async with FakeCluster(t=2) as cluster, alone(cluster, **PATIENT) as consuming:
        cluster.script(OffsetCommitRequest, answer)
        old = await consuming.commit_async({T0: 10, T1: 7})
        await until(lambda: cluster.sent(OffsetCommitRequest))
        new = await consuming.commit_async({T0: 20})
        await asyncio.wait_for(asyncio.gather(old, new), PATIENCE_S)
        assert sent(cluster, T0) == [10, 20]
        assert sent(cluster, T1) == [7, 7]
        assert committed(cluster) == {T0: 20, T1: 7}


async def test_going_back_on_purpose_is_obeyed():
    async with FakeCluster(t=2) as cluster, alone(cluster) as consuming:
        cluster.script(OffsetCommitRequest, refuse(ErrorCode.COORDINATOR_LOAD_IN_PROGRESS))
        tasks = [await consuming.commit_async({T0: 20}), await consuming.commit_async({T0: 10})]
        await asyncio.wait_for(asyncio.gather(*tasks), PATIENCE_S)
        assert committed(cluster) == {T0: 10}


async def test_a_commit_that_yielded_fails_when_the_newer_one_does():
    async with FakeCluster(t=2) as cluster, alone(cluster) as consuming:
        cluster.script(
            OffsetCommitRequest,
            refuse(ErrorCode.COORDINATOR_LOAD_IN_PROGRESS),
            refuse(ErrorCode.TOPIC_AUTHORIZATION_FAILED),
        )
        tasks = [await consuming.commit_async({T0: offset}) for offset in (10, 20)]
        outcomes = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), PATIENCE_S)
        assert [getattr(each, "code", None) for each in outcomes] == [ErrorCode.TOPIC_AUTHORIZATION_FAILED] * 2
        assert outcomes[0] is not outcomes[1], "of the blocking consumer each `result()` lengthens its traceback"
        assert committed(cluster) == {}


async def test_a_commit_whose_caller_is_cancelled_does_not_come_after_a_later_one():
    gate = asyncio.Event()

    async def hold(request: OffsetCommitRequest, node: FakeNode) -> Any:
        await gate.wait()
        return node.on_group(request)

    async with FakeCluster(t=2) as cluster, alone(cluster) as consuming:
        cluster.script(OffsetCommitRequest, hold)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(consuming.commit({T0: 10}), 0.05)
        later = await consuming.commit_async({T0: 20})
        gate.set()
        await asyncio.wait_for(later, PATIENCE_S)
        assert committed(cluster) == {T0: 20}


async def test_the_commit_at_the_end_comes_last():
    async with FakeCluster(t=2) as cluster:
        fill(cluster, "t", 0, 9)
        cluster.script(OffsetCommitRequest, refuse(ErrorCode.COORDINATOR_LOAD_IN_PROGRESS))
        async with consumer(cluster, "t", group_id="g", auto_commit_interval_ms=600_000) as consuming:
            await read(consuming, 4)
            await consuming.commit_async()
            await read(consuming, 4)
        assert committed(cluster)[T0] == 8


async def test_a_commit_that_the_answer_leaves_out_is_tried_again():
    async with FakeCluster(t=2) as cluster, alone(cluster) as consuming:
        cluster.script(OffsetCommitRequest, lambda request, node: OffsetCommitResponse())
        await asyncio.wait_for(consuming.commit({T0: 5}), PATIENCE_S)
        assert committed(cluster) == {T0: 5}


@pytest.mark.parametrize("seed", range(8))
async def test_whatever_is_refused_and_cancelled_the_last_call_stands(seed):
    rng = random.Random(seed)
    trouble = (
        refuse(ErrorCode.COORDINATOR_LOAD_IN_PROGRESS),
        refuse(ErrorCode.NOT_COORDINATOR),
        lambda request, node: DROP,
        lambda request, node: node.on_group(request),
    )
    async with FakeCluster(nodes=2, t=2) as cluster, alone(cluster) as consuming:
        last: dict[TopicPartition, int] = {}
        tasks: list[asyncio.Task[None]] = []
        for _ in range(60):
            offsets = {each: rng.randrange(1000) for each in (T0, T1) if rng.random() < 0.7}
            if rng.random() < 0.4:
                cluster.script(OffsetCommitRequest, rng.choice(trouble))
            if rng.random() < 0.1:
                cluster.coordinator = rng.choice((1, 2))
            task = await consuming.commit_async({each: OffsetAndMetadata(n) for each, n in offsets.items()})
            last.update(offsets)
            tasks.append(task)
            if rng.random() < 0.2:
                task.cancel()
            if rng.random() < 0.3:
                await asyncio.sleep(rng.random() * 0.01)
        outcomes = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), PATIENCE_S)
        assert not [each for each in outcomes if isinstance(each, KafkaError)]
        await consuming.commit({})
        await until(lambda: committed(cluster) == last)
    assert FindCoordinatorRequest in {type(request) for _, _, request in cluster.requests}
    assert FAST["retry_backoff_ms"] == 5


async def test_a_commit_whose_time_is_over_behind_another_one_names_its_time():
    async with FakeCluster(t=2) as cluster, alone(cluster, default_api_timeout_ms=300) as consuming:
        cluster.script(OffsetCommitRequest, *[lambda request, node: SILENCE] * 2)
        tasks = [await consuming.commit_async({partition: 5}) for partition in (T0, T1)]
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED, timeout=PATIENCE_S)
        # Its time began with its call. If it began with the end of the first one, 300 ms would be left.
        done, _ = await asyncio.wait(tasks[1:], timeout=0.2)
        assert done
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    assert [str(each).rpartition(" within ")[2] for each in outcomes] == ["300 ms", "300 ms"]
