"""Requests and disks that are against the node: nobody waits in vain, nothing grows without bound."""

from __future__ import annotations

import asyncio
import struct
import time
from collections.abc import Callable
from typing import Any

import pytest

from tests.patience import PATIENCE_S, until
from tests.unit.broker.test_node import fetch, fetched, hold_flushes, produce, produced
from tidelog.broker.apis.records import fetch as fetch_module
from tidelog.broker.replicas.fetching import fetch_sessions
from tidelog.broker.scheduling import purgatory
from tidelog.broker.scheduling.purgatory import Deadlines
from tidelog.broker.scheduling.timers import DeadlineTimer
from tidelog.protocol.errors import ErrorCode
from tidelog.protocol.messages.create_topics import (
    CreatableTopic,
    CreatableTopicConfig,
    CreateTopicsRequest,
    CreateTopicsResponse,
)
from tidelog.protocol.messages.delete_topics import DeleteTopicsRequest, DeleteTopicsResponse, DeleteTopicState
from tidelog.protocol.messages.fetch import FetchPartition, FetchRequest, FetchResponse, FetchTopic
from tidelog.protocol.messages.list_offsets import (
    ListOffsetsPartition,
    ListOffsetsRequest,
    ListOffsetsResponse,
    ListOffsetsTopic,
)
from tidelog.protocol.messages.metadata import MetadataRequest, MetadataResponse
from tidelog.protocol.messages.produce import ProduceResponse
from tidelog.storage.log.partition_log import CorruptLog, PartitionLog

MakeBatch = Callable[..., bytes]


def waiting_count(running: Any) -> int:
    """Of requests that are not answered yet."""
    return len(running.node._broker.partitions.deadlines._deadlines)


def failing(error: Exception) -> Callable[..., Any]:
    def fail(*arguments: Any, **options: Any) -> Any:
        raise error

    return fail


@pytest.mark.parametrize("error", [CorruptLog("the log is lost"), OSError(5, "Input/output error")])
async def test_a_log_that_cannot_be_read_is_that_partitions_error_and_takes_it_offline(
    wire: Any, make_batch: MakeBatch, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    await wire.create_topic("t")
    await wire.call(produce("t", make_batch(b"a")), 9, ProduceResponse)
    with monkeypatch.context() as broken:
        broken.setattr(PartitionLog, "read", failing(error))
        answer = await wire.call(fetch("t"), 11, FetchResponse)
    assert answer.responses[0].partitions[0].error_code == ErrorCode.KAFKA_STORAGE_ERROR
    answer = await wire.call(produce("t", make_batch(b"a")), 9, ProduceResponse)
    assert produced(answer) == [(ErrorCode.KAFKA_STORAGE_ERROR, -1)]


@pytest.mark.parametrize("error", [CorruptLog("the log is lost"), OSError(5, "Input/output error")])
async def test_a_timestamp_that_cannot_be_looked_up_is_that_partitions_error(
    wire: Any, make_batch: MakeBatch, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    await wire.create_topic("t")
    monkeypatch.setattr(PartitionLog, "offset_for_timestamp", failing(error))
    partition = ListOffsetsPartition(partition_index=0, timestamp=5)
    request = ListOffsetsRequest(topics=[ListOffsetsTopic(name="t", partitions=[partition])])
    answer = await wire.call(request, 7, ListOffsetsResponse)
    assert answer.topics[0].partitions[0].error_code == ErrorCode.KAFKA_STORAGE_ERROR


async def test_a_bug_in_reading_is_answered_and_keeps_nobody_else_waiting(
    running: Any, wire: Any, make_batch: MakeBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    await wire.create_topic("t")
    waiting = [await running.connect() for _ in range(2)]
    for each in waiting:
        each.send(fetch("t", wait_ms=600_000), 11)
    await until(lambda: waiting_count(running) == 2)
    real = PartitionLog.read
    failed: list[bool] = []

    def read(*arguments: Any, **options: Any) -> Any:
        if not failed:
            failed.append(True)
            raise ZeroDivisionError("a bug")
        return real(*arguments, **options)

    monkeypatch.setattr(PartitionLog, "read", read)
    await wire.call(produce("t", make_batch(b"a")), 9, ProduceResponse)
    answers = [await asyncio.wait_for(each.receive(FetchResponse, 11), PATIENCE_S) for each in waiting]
    assert answers[0].responses[0].partitions[0].error_code == ErrorCode.UNKNOWN_SERVER_ERROR
    assert fetched(answers[1]) == [b"a"]


async def test_a_deadline_that_fails_does_not_keep_the_others_waiting() -> None:
    timer = DeadlineTimer(asyncio.get_running_loop())
    reached: list[str] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: reached.append("told"))
    timer.add(0, failing(ZeroDivisionError("a bug")))
    timer.add(0, lambda: reached.append("same bucket"))
    timer.add(30, lambda: reached.append("later"))
    await until(lambda: "later" in reached)
    assert reached[-2:] == ["same bucket", "later"]


def test_deadlines_that_were_dropped_leave_nothing_behind() -> None:
    deadlines: Deadlines[int] = Deadlines()
    deadlines.add(10, -1)
    for number in range(10_000):
        deadlines.discard(deadlines.add(1_000_000 + number * 100, number), number)
    assert len(deadlines._buckets) + len(deadlines._order) < 1000
    bucket = deadlines.add(1_000_000, 5)
    deadlines.discard(bucket, 5)
    assert deadlines.add(1_000_000, 6) == bucket
    assert deadlines.next_due_ms() == 20
    assert list(deadlines.expire(1_000_020)) == [-1, 6]
    assert deadlines.next_due_ms() is None


async def test_a_fetch_of_at_least_nothing_does_not_wait(wire: Any) -> None:
    await wire.create_topic("t")
    request = fetch("t", wait_ms=600_000)
    request.min_bytes = 0
    assert fetched(await asyncio.wait_for(wire.call(request, 11, FetchResponse), PATIENCE_S)) == []


@pytest.mark.parametrize("most", [0, -1, -(2**31)])
@pytest.mark.parametrize("is_later", [False, True])
async def test_a_fetch_of_no_more_than_a_negative_size_gets_one_batch(
    running: Any, wire: Any, make_batch: MakeBatch, most: int, is_later: bool
) -> None:
    """It got all that had been written lately: up to a whole segment, whatever the bounds of an answer."""
    await wire.create_topic("t")
    for _ in range(5):
        await wire.call(produce("t", make_batch(b"a")), 9, ProduceResponse)
    answer = await wire.call(fetch("t", most=most), 11, FetchResponse)
    assert fetched(answer) == [b"a"]
    log = running.node._broker.partitions.leader("t", 0).log
    result = log.read(0, most, log.log_end_offset, min_one_batch=not is_later)
    assert result.next_offset == (0 if is_later else 1)


async def test_an_answer_that_its_version_cannot_hold_is_an_error_and_the_connection_goes_on(wire: Any) -> None:
    config = CreatableTopicConfig(name="x" * 32_767, value="y")
    topic = CreatableTopic(name="t", num_partitions=1, replication_factor=1, configs=[config])
    request = CreateTopicsRequest(topics=[topic], timeout_ms=60_000)
    answer = await asyncio.wait_for(wire.call(request, 4, CreateTopicsResponse), PATIENCE_S)
    assert answer.topics[0].error_code != 0
    await asyncio.wait_for(wire.call(MetadataRequest(topics=[]), 9, MetadataResponse), PATIENCE_S)


@pytest.mark.slow
async def test_naming_one_thing_twice_among_many_costs_no_time(wire: Any) -> None:
    names = [f"topic-{number}" for number in range(20_000)] + ["topic-0"]
    partitions = [ListOffsetsPartition(partition_index=i, timestamp=-1) for i in [*range(20_000), 0]]
    began = time.process_time()
    request = ListOffsetsRequest(topics=[ListOffsetsTopic(name="t", partitions=partitions)])
    found = (await wire.call(request, 7, ListOffsetsResponse)).topics[0].partitions
    assert [each.partition_index for each in found if each.error_code == ErrorCode.INVALID_REQUEST] == [0]
    states = [DeleteTopicState(name=name) for name in names]
    found = (await wire.call(DeleteTopicsRequest(topics=states, timeout_ms=60_000), 6, DeleteTopicsResponse)).responses
    assert [each.name for each in found if each.error_code == ErrorCode.INVALID_REQUEST] == ["topic-0"]
    few = [*names[:9_999], "topic-0"]  # more are refused at once
    topics = [CreatableTopic(name=name, num_partitions=0, replication_factor=1) for name in few]
    created = (await wire.call(CreateTopicsRequest(topics=topics, timeout_ms=60_000), 5, CreateTopicsResponse)).topics
    assert [each.name for each in created if each.error_code == ErrorCode.INVALID_REQUEST] == ["topic-0"]
    assert time.process_time() - began < 4


async def test_a_small_request_for_an_enormous_object_is_refused(wire: Any) -> None:
    # A frame of 20 MB that holds nothing but empty topic names.
    count = 10_000_000
    body = struct.pack(">hhihB", 3, 9, 1, -1, 0) + b"\x81\xad\xe2\x04" + b"\x01\x00" * count + bytes(4)
    began = time.process_time()
    wire.writer.write(struct.pack(">i", len(body)) + body)
    assert await asyncio.wait_for(wire.reader.read(), PATIENCE_S) == b""
    assert time.process_time() - began < 2


async def test_two_fetches_of_one_session_are_both_woken(running: Any, wire: Any, make_batch: MakeBatch) -> None:
    await wire.create_topic("t")
    other = await running.connect()
    partition = FetchPartition(partition=0, fetch_offset=0, partition_max_bytes=1 << 20)
    topics = [FetchTopic(topic="t", partitions=[partition])]
    answer = await other.call(
        FetchRequest(session_epoch=0, min_bytes=1, max_wait_ms=0, topics=topics), 11, FetchResponse
    )
    for epoch, wait_ms in ((1, 600_000), (2, 600_000)):
        other.send(
            FetchRequest(
                session_id=answer.session_id, session_epoch=epoch, min_bytes=1, max_wait_ms=wait_ms, topics=[]
            ),
            11,
        )
    await asyncio.sleep(0.05)
    await wire.call(produce("t", make_batch(b"a")), 9, ProduceResponse)
    assert fetched(await asyncio.wait_for(other.receive(FetchResponse, 11), PATIENCE_S)) == [b"a"]


@pytest.mark.parametrize("acks", [1, -1])
async def test_with_flush_interval_1_no_produce_is_acknowledged_before_it_is_synced(
    start_node: Any, make_batch: MakeBatch, monkeypatch: pytest.MonkeyPatch, acks: int
) -> None:
    node = await start_node(**{"log.flush.interval.messages": "1"})
    wire = await node.connect()
    await wire.create_topic("t", 2)
    gate = hold_flushes(monkeypatch)
    wire.send(produce("t", make_batch(b"a"), acks=acks), 9)
    wire.send(produce("t", make_batch(b"a"), make_batch(b"b"), acks=acks), 9)
    await asyncio.sleep(0.1)
    assert not wire.reader._buffer
    gate.set()
    assert produced(await asyncio.wait_for(wire.receive(ProduceResponse, 9), PATIENCE_S)) == [(0, 0)]
    assert produced(await asyncio.wait_for(wire.receive(ProduceResponse, 9), PATIENCE_S)) == [(0, 1), (0, 0)]


@pytest.mark.parametrize("acks", [1, -1])
async def test_produces_that_have_timed_out_do_not_wait_for_their_offset(
    start_node: Any, make_batch: MakeBatch, monkeypatch: pytest.MonkeyPatch, acks: int
) -> None:
    """Where the high watermark stands still, repeats of one batch took 13 MiB for 20,000 while the log did not grow."""
    node = await start_node(**{"log.flush.interval.messages": "1"})
    wire = await node.connect()
    await wire.create_topic("t", 2)
    monkeypatch.setattr(purgatory, "DISCARDED_MAX", 5)
    gate = hold_flushes(monkeypatch)
    repeated = make_batch(b"a", producer_id=7, producer_epoch=0, base_sequence=0)
    for number in range(60):
        batches = (repeated, make_batch(b"b")) if number % 3 == 0 else (repeated,)
        wire.send(produce("t", *batches, acks=acks, timeout_ms=0), 9)
    for _ in range(60):
        answer = await asyncio.wait_for(wire.receive(ProduceResponse, 9), PATIENCE_S)
        assert {code for code, _ in produced(answer)} == {ErrorCode.REQUEST_TIMED_OUT}
    partitions = node.node._broker.partitions
    for index in (0, 1):
        watch = partitions.leader("t", index).watch
        assert len(watch.produces.waiting) + len(watch.syncs.waiting) <= 6
    gate.set()


async def test_what_a_vanished_client_waits_for_is_forgotten(running: Any, wire: Any) -> None:
    await wire.create_topic("t")
    other = await running.connect()
    for _ in range(10):
        other.send(fetch("t", wait_ms=600_000), 11)
    await until(lambda: waiting_count(running) == 10)
    other.writer.close()
    await until(lambda: waiting_count(running) == 0)
    partitions = running.node._broker.partitions
    assert all(not watch.fetches for watch in partitions._watches.values())


@pytest.mark.parametrize("acks", [1, -1])
@pytest.mark.parametrize("batches", [1, 2])
async def test_the_produces_of_a_vanished_client_do_not_wait_for_their_timeout(
    start_node: Any, make_batch: MakeBatch, monkeypatch: pytest.MonkeyPatch, batches: int, acks: int
) -> None:
    """It may be weeks, and where a device hangs, each repeat of a batch on a new connection stayed until then."""
    node = await start_node(**{"log.flush.interval.messages": "1"})
    wire = await node.connect()
    await wire.create_topic("t", 2)
    monkeypatch.setattr(purgatory, "DISCARDED_MAX", 5)
    gate = hold_flushes(monkeypatch)
    repeated = [make_batch(b"a", producer_id=7, producer_epoch=0, base_sequence=0)] * batches
    for _ in range(3):
        other = await node.connect()
        for _ in range(10):
            other.send(produce("t", *repeated, acks=acks, timeout_ms=2**31 - 1), 9)
        await until(lambda: waiting_count(node) == 10)
        other.writer.close()
        await until(lambda: waiting_count(node) == 0)
    partitions = node.node._broker.partitions
    for index in (0, 1):
        watch = partitions.leader("t", index).watch
        assert len(watch.produces.waiting) + len(watch.syncs.waiting) <= 6
    gate.set()


async def test_a_session_that_another_connection_closes_between_two_pieces_of_its_fetch_leaves_nothing(
    running: Any, wire: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a client that asks again on a new connection. Each partition kept an entry until it changed."""
    monkeypatch.setattr(fetch_module, "PIECE_ELEMENTS_MAX", 10)
    await wire.create_topic("t", 40)
    partitions = running.node._broker.partitions
    await until(lambda: sum(each.leads for each in partitions.hosted()) == 40)
    asked = [FetchPartition(partition=index, fetch_offset=0, partition_max_bytes=1 << 20) for index in range(40)]
    topics = [FetchTopic(topic="t", partitions=asked)]

    def request(session_id: int, epoch: int) -> FetchRequest:
        return FetchRequest(max_wait_ms=0, min_bytes=1, session_id=session_id, session_epoch=epoch, topics=topics)

    session_id = (await wire.call(request(0, 0), 11, FetchResponse)).session_id
    assert sum(len(each.watch.fetches) for each in partitions.hosted()) == 40
    next_piece = fetch_module._Fetch._next_piece

    def close_after(one: Any, attempt: Any) -> Any:
        frames = next_piece(one, attempt)
        partitions.fetch_sessions.resolve(FetchRequest(session_id=session_id, session_epoch=-1), False, 0)
        return frames

    monkeypatch.setattr(fetch_module._Fetch, "_next_piece", close_after)
    await asyncio.wait_for(wire.call(request(session_id, 1), 11, FetchResponse), PATIENCE_S)
    assert not partitions.fetch_sessions
    assert not any(each.watch.fetches for each in partitions.hosted())


async def test_where_too_much_waits_already_the_fetch_that_has_waited_longest_is_answered(
    running: Any, wire: Any, make_batch: MakeBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one that comes would be sent again at once, as those of all other clients: 70 connections with a thousand
    fetches each made every consumer of a node ask two thousand times a second.
    """
    await wire.create_topic("t")
    monkeypatch.setattr(fetch_sessions, "PARKED_MAX", 12)
    sessions = running.node._broker.partitions.fetch_sessions
    others = [await running.connect() for _ in range(3)]
    others[0].send(fetch("t", wait_ms=600_000), 11)
    await until(lambda: sessions._parked == 5)
    others[1].send(fetch("t", wait_ms=600_000), 11)
    await until(lambda: sessions._parked == 10)
    others[2].send(fetch("t", wait_ms=600_000), 11)
    answer = await asyncio.wait_for(others[0].receive(FetchResponse, 11), PATIENCE_S)
    assert fetched(answer) == []
    assert sessions._parked == 10
    others[1].writer.close()
    await until(lambda: sessions._parked == 5)
    await wire.call(produce("t", make_batch(b"a")), 9, ProduceResponse)
    assert fetched(await asyncio.wait_for(others[2].receive(FetchResponse, 11), PATIENCE_S)) == [b"a"]
    await until(lambda: sessions._parked == 0)


async def test_where_too_much_waits_already_a_large_fetch_is_answered_at_once(
    running: Any, wire: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    await wire.create_topic("t")
    monkeypatch.setattr(fetch_sessions, "PARKED_MAX", 4)
    monkeypatch.setattr(fetch_sessions, "GIVEN_WAY_MAX", 4)
    answer = await asyncio.wait_for(wire.call(fetch("t", wait_ms=600_000), 11, FetchResponse), PATIENCE_S)
    assert fetched(answer) == []
    assert running.node._broker.partitions.fetch_sessions._parked == 0


async def test_a_fetch_of_thousands_of_partitions_is_not_tried_again_with_every_record(
    running: Any, wire: Any, make_batch: MakeBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetch_module, "PARTITIONS_AT_ONCE", 4)
    monkeypatch.setattr(fetch_module, "PARTITIONS_PER_MS", 0.02)
    await wire.create_topic("t", 5)
    other = await running.connect()
    partitions = [FetchPartition(partition=index, fetch_offset=0, partition_max_bytes=1 << 20) for index in range(5)]
    topics = [FetchTopic(topic="t", partitions=partitions)]
    tries = 0
    attempt = fetch_module._Fetch._attempt

    def counted(self: Any) -> Any:
        nonlocal tries
        tries += 1
        return attempt(self)

    monkeypatch.setattr(fetch_module._Fetch, "_attempt", counted)
    began = time.monotonic()
    request = FetchRequest(max_wait_ms=300_000, min_bytes=1500, max_bytes=1 << 20, session_epoch=-1, topics=topics)
    other.send(request, 11)
    await until(lambda: waiting_count(running) == 1)
    for _ in range(15):
        await wire.call(produce("t", make_batch(b"a")), 9, ProduceResponse)
    assert tries < 4 + (time.monotonic() - began) / 0.25
    await wire.call(produce("t", make_batch(bytes(1500))), 9, ProduceResponse)
    answer = await asyncio.wait_for(other.receive(FetchResponse, 11), PATIENCE_S)
    assert sum(len(fetched_bytes.records or b"") for fetched_bytes in answer.responses[0].partitions) > 1500
