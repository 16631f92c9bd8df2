"""How long a fetch waits for `fetch.min.bytes`: as long as there is not more to be read than its limits let through.

Answers hold whole batches only, so that they are nearly always a little smaller than the limits; a client that asks for
as much as may come at once must not wait for more than that.
"""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import pytest

from tests.patience import PATIENCE_S
from tidelog.protocol.messages.fetch import FetchPartition, FetchRequest, FetchResponse, FetchTopic
from tidelog.protocol.messages.produce import PartitionProduceData, ProduceRequest, ProduceResponse, TopicProduceData

MIB = 1 << 20
# Of a test's patience, so that an answer says that nothing was waited for.
NEVER_MS = 600_000


async def fill(wire: Any, make_batch: Any, count: int, *, partitions: int = 1) -> None:
    """`count` batches of some 20 KB each to every partition of topic t."""
    for _ in range(count):
        data = [PartitionProduceData(index=index, records=make_batch(b"x" * 20_000)) for index in range(partitions)]
        request = ProduceRequest(
            acks=1, timeout_ms=60_000, topic_data=[TopicProduceData(name="t", partition_data=data)]
        )
        answer = await wire.call(request, 9, ProduceResponse)
        assert not any(each.error_code for topic in answer.responses for each in topic.partition_responses), answer


def fetch(
    min_bytes: int, *, partitions: int = 1, wait_ms: int = NEVER_MS, max_bytes: int = 50 * MIB, session_epoch: int = -1
) -> FetchRequest:
    asked = [FetchPartition(partition=index, fetch_offset=0, partition_max_bytes=MIB) for index in range(partitions)]
    return FetchRequest(
        max_wait_ms=wait_ms,
        min_bytes=min_bytes,
        max_bytes=max_bytes,
        session_epoch=session_epoch,
        topics=[FetchTopic(topic="t", partitions=asked)],
    )


async def sizes(wire: Any, request: FetchRequest) -> list[int]:
    answer = await asyncio.wait_for(wire.call(request, 12, FetchResponse), PATIENCE_S)
    return [len(each.records or b"") for topic in answer.responses for each in topic.partitions]


@pytest.mark.parametrize("session_epoch", [-1, 0])
async def test_a_partition_with_more_than_its_limit_is_not_waited_for(
    wire: Any, make_batch: Any, session_epoch: int
) -> None:
    """fetch.min.bytes=1048576 with max.partition.fetch.bytes at its default, which is the same."""
    await wire.create_topic("t")
    await fill(wire, make_batch, 60)
    (size,) = await sizes(wire, fetch(MIB, session_epoch=session_epoch))
    assert 0.9 * MIB < size < MIB


async def test_an_answer_as_large_as_may_be_is_not_waited_for(wire: Any, make_batch: Any) -> None:
    """Of 5 MB asked for there are more than enough, but no answer is larger than 2 MiB."""
    await wire.create_topic("t", partitions=4)
    await fill(wire, make_batch, 60, partitions=4)
    found = await sizes(wire, fetch(5_000_000, partitions=4))
    assert 1.9 * MIB < sum(found) <= 2 * MIB


async def test_the_least_is_no_more_than_the_most(wire: Any, make_batch: Any) -> None:
    await wire.create_topic("t")
    await fill(wire, make_batch, 10)
    (size,) = await sizes(wire, fetch(150_000, max_bytes=100_000))
    assert 80_000 < size <= 100_000


async def test_the_end_of_an_older_segment_is_not_waited_at(wire: Any, make_batch: Any) -> None:
    """An answer stops where a segment ends; the rest is there already."""
    await wire.create_topic("t", segment_bytes=str(MIB))
    await fill(wire, make_batch, 80)
    request = fetch(MIB // 2)
    request.topics[0].partitions[0].fetch_offset = 50
    (size,) = await sizes(wire, request)
    assert 0 < size < MIB // 2


async def test_too_little_is_still_waited_for(wire: Any, make_batch: Any) -> None:
    await wire.create_topic("t")
    await fill(wire, make_batch, 5)
    loop = asyncio.get_running_loop()
    began = loop.time()
    (size,) = await sizes(wire, fetch(MIB, wait_ms=300))
    assert loop.time() - began >= 0.29
    assert 100_000 < size < 110_000


async def test_a_fetch_that_has_waited_leaves_its_answer_to_no_garbage_collector(wire: Any, make_batch: Any) -> None:
    """One connection that asked for 1.8 MB with 500 B, again and again, made a node of 45 MB grow to 830 MB."""
    await wire.create_topic("t", 3)
    await fill(wire, make_batch, 2, partitions=3)
    request = fetch(MIB, partitions=3, wait_ms=1)
    await sizes(wire, request)
    gc.collect()
    gc.disable()
    try:
        for _ in range(20):
            assert min(await sizes(wire, request)) > 20_000
        assert gc.collect() < 20
    finally:
        gc.enable()
