"""The walks of docs/ARCHITECTURE.md are true: what they name really runs when a Produce, or a Fetch, passes through.

Every function a walk names has to be called, and of every class at least one method, while the requests below are
served by a real node. Functions are told by file and qualified name.
"""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from tests.patience import until
from tidelog.protocol.messages.fetch import FetchPartition, FetchRequest, FetchResponse, FetchTopic
from tidelog.protocol.messages.produce import PartitionProduceData, ProduceRequest, ProduceResponse, TopicProduceData

ROOT = Path(__file__).resolve().parents[3]
# Only when the pages of a segment have left memory, which a test cannot bring about.
NOT_EVERY_TIME = {("storage/segments/reader.py", "ColdRead")}

Called = set[tuple[str, str]]


def walk(title: str) -> Called:
    """(file, name) of everything with a name in one section of the page."""
    page = (ROOT / "docs" / "ARCHITECTURE.md").read_text()
    section = page.partition(f"## {title}\n")[2].partition("\n## ")[0]
    return set(re.findall(r"`((?:\w+/)+\w+\.py):([\w.]+)`", section)) - NOT_EVERY_TIME


@contextmanager
def watching() -> Iterator[Called]:
    """Collects (file, qualified name) of every function of ours that is called on this thread."""
    package = str(ROOT / "tidelog") + "/"
    called: Called = set()

    def note(frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(package):
            called.add((code.co_filename.removeprefix(package), code.co_qualname))

    sys.setprofile(note)
    try:
        yield called
    finally:
        sys.setprofile(None)


def missing(named: Called, called: Called) -> Called:
    """What a walk names and nobody called; calling any method of a class counts for the class."""
    classes = {(file, name.partition(".")[0]) for file, name in called}
    return {each for each in named if each not in called and not (each[1][0].isupper() and each in classes)}


def produce(topic: str, *batches: bytes) -> ProduceRequest:
    partitions = [PartitionProduceData(index=index, records=data) for index, data in enumerate(batches)]
    return ProduceRequest(
        acks=-1, timeout_ms=60_000, topic_data=[TopicProduceData(name=topic, partition_data=partitions)]
    )


def fetch(topic: str, offset: int, last_fetched_epoch: int = 0, **options: Any) -> FetchRequest:
    partition = FetchPartition(
        partition=0, fetch_offset=offset, last_fetched_epoch=last_fetched_epoch, partition_max_bytes=1 << 20
    )
    return FetchRequest(min_bytes=1, topics=[FetchTopic(topic=topic, partitions=[partition])], **options)


async def test_the_walk_of_a_produce(wire: Any, make_batch: Any) -> None:
    await wire.create_topic("walked", partitions=2, flush_messages="1")
    await wire.create_topic("stamped", message_timestamp_type="LogAppendTime")  # the broker changes its batches
    first = make_batch(b"1", producer_id=7, producer_epoch=0, base_sequence=0)
    with watching() as called:
        one = await wire.call(produce("walked", first), 9, ProduceResponse)
        two = await wire.call(produce("walked", make_batch(b"2"), make_batch(b"3")), 9, ProduceResponse)
        await wire.call(produce("stamped", make_batch(b"4")), 9, ProduceResponse)
        for _ in range(2):  # both are there when the broker reads
            wire.send(produce("walked", make_batch(b"5")), 9)
        for _ in range(2):
            await wire.receive(ProduceResponse, 9)
        for _ in range(2):  # the second is known from the first
            await wire.call(produce("walked", make_batch(b"6")), 9, ProduceResponse)
    assert [each.base_offset for topic in one.responses for each in topic.partition_responses] == [0]
    assert [each.base_offset for topic in two.responses for each in topic.partition_responses] == [1, 0]
    assert len(walk("The walk of a Produce")) > 12
    assert missing(walk("The walk of a Produce"), called) == set()


async def test_the_walk_of_a_fetch(wire: Any, running: Any, make_batch: Any) -> None:
    await wire.create_topic("walked", index_interval_bytes="64")
    for _ in range(200):
        await wire.call(produce("walked", make_batch(b"x" * 100)), 9, ProduceResponse)
    producer = await running.connect()
    with watching() as called:
        early = await wire.call(fetch("walked", 3, isolation_level=1), 12, FetchResponse)
        newest = await wire.call(fetch("walked", 199, last_fetched_epoch=-1), 12, FetchResponse)
        waiting = asyncio.ensure_future(wire.call(fetch("walked", 200, max_wait_ms=600_000), 12, FetchResponse))
        await until(lambda: running.node._broker.partitions.deadlines._deadlines)
        assert not waiting.done()
        await producer.call(produce("walked", make_batch(b"news")), 9, ProduceResponse)
        late = await waiting
    for answer in (early, newest, late):
        assert answer.responses[0].partitions[0].records
    assert len(walk("The walk of a Fetch")) > 8
    assert missing(walk("The walk of a Fetch"), called) == set()


def test_a_step_that_is_not_taken_is_missed() -> None:
    called = {("storage/log/partition_log.py", "PartitionLog.read"), ("storage/log/flush.py", "FlushTask.run")}
    named = {("storage/log/partition_log.py", "PartitionLog.append"), ("storage/log/flush.py", "FlushTask")}
    assert missing(named, called) == {("storage/log/partition_log.py", "PartitionLog.append")}
