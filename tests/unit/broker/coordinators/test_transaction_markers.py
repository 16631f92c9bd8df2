"""The sender of markers: to whoever leads, until each partition has its marker."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from random import Random
from typing import Any

import pytest

from tests.patience import until
from tests.unit.broker.coordinators.peers import OWN_ID, Cluster
from tidelog.broker.coordinators import broker_queues, transaction_markers
from tidelog.broker.coordinators.marker_writer import Marker, OnWritten, TopicPartition
from tidelog.broker.coordinators.transaction_markers import TransactionMarkers
from tidelog.broker.coordinators.transaction_ports import MarkerToSend
from tidelog.protocol.errors import ErrorCode
from tidelog.protocol.messages.write_txn_markers import (
    WritableTxnMarkerPartitionResult,
    WritableTxnMarkerResult,
    WritableTxnMarkerTopicResult,
    WriteTxnMarkersRequest,
    WriteTxnMarkersResponse,
)

E = ErrorCode
A, B, C = ("a", 0), ("b", 0), ("c", 0)


class FakeWriter:
    def __init__(self) -> None:
        self.written: list[tuple[Marker, TopicPartition]] = []
        self.errors: dict[TopicPartition, ErrorCode] = {}

    def write(self, marker: Marker, partitions: Iterable[TopicPartition], on_written: OnWritten) -> None:
        for partition in partitions:
            self.written.append((marker, partition))
            on_written(partition, self.errors.get(partition, E.NONE))


class Room:
    """Partition a is led here, b by broker 2, c by broker 3."""

    def __init__(self) -> None:
        self.cluster = Cluster({A: OWN_ID, B: 2, C: 3})
        self.cluster.answer = self._answer
        self.writer = FakeWriter()
        self.errors: dict[TopicPartition, list[ErrorCode]] = {}
        """What other brokers answer for a partition, one after the other; then NONE."""
        writer: Any = self.writer
        self.sender = TransactionMarkers(
            OWN_ID, writer, lambda: self.cluster.image, self.cluster.endpoint_of, self.cluster.exchange,
            asyncio.get_running_loop(), Random(1), request_timeout_ms=30_000,
        )  # fmt: skip
        self.done: list[TopicPartition] = []

    def send(self, *partitions: TopicPartition, producer_id: int = 7, log_partition: int = 0) -> None:
        marker = MarkerToSend(log_partition, 3, producer_id, 5, True, 2, frozenset(partitions))
        self.sender.send(marker, lambda done: self.done.extend(sorted(done)))

    async def all_done(self, *partitions: TopicPartition) -> None:
        await until(lambda: sorted(self.done) == sorted(partitions), 0.001)
        assert len(self.sender) == 0

    def _answer(self, broker_id: int, request: WriteTxnMarkersRequest) -> WriteTxnMarkersResponse:
        results = []
        for marker in request.markers:
            topics = [
                WritableTxnMarkerTopicResult(
                    name=topic.name,
                    partitions=[
                        WritableTxnMarkerPartitionResult(
                            partition_index=index, error_code=self._next((topic.name, index))
                        )
                        for index in topic.partition_indexes
                    ],
                )
                for topic in marker.topics
            ]
            results.append(WritableTxnMarkerResult(producer_id=marker.producer_id, topics=topics))
        return WriteTxnMarkersResponse(markers=results)

    def _next(self, partition: TopicPartition) -> ErrorCode:
        errors = self.errors.get(partition)
        return errors.pop(0) if errors else E.NONE


@pytest.fixture
async def room(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Room]:
    monkeypatch.setattr(transaction_markers, "BACKOFF_MIN_MS", 1)
    monkeypatch.setattr(transaction_markers, "BACKOFF_MAX_MS", 4)
    room = Room()
    yield room
    await room.sender.close()


async def test_each_leader_gets_its_marker_and_this_node_no_request(room: Room):
    room.send(A, B, C)
    assert not room.done, "no callback within the call"
    await room.all_done(A, B, C)
    assert room.writer.written == [(Marker(7, 5, True, 3, 2), A)]
    assert sorted(broker_id for broker_id, _, _ in room.cluster.sent) == [2, 3]
    marker = room.cluster.sent[0][1].markers[0]
    assert (marker.producer_id, marker.producer_epoch, marker.transaction_result) == (7, 5, True)
    assert (marker.coordinator_epoch, marker.transaction_version) == (3, 2)


async def test_markers_go_in_the_order_of_partitions_not_of_a_set(room: Room):
    """A simulated history must be the same with another hash seed."""
    partitions = [(topic, 0) for topic in "rstuvwxyz"]
    for topic, index in partitions:
        room.cluster.lead(topic, index, OWN_ID)
    room.send(*partitions)
    await room.all_done(*partitions)
    assert [partition for _, partition in room.writer.written] == partitions


async def test_markers_for_one_broker_go_together(room: Room):
    for producer_id in range(50):
        room.send(B, producer_id=producer_id)
    await until(lambda: len(room.done) == 50)
    assert [len(request.markers) for _, request, _ in room.cluster.sent] == [50]


async def test_two_markers_of_one_producer_do_not_share_a_request(room: Room):
    """The answer names the producer alone, and could not tell them apart."""
    room.send(B)
    room.send(B)
    await until(lambda: room.done == [B, B])
    assert [len(request.markers) for _, request, _ in room.cluster.sent] == [1, 1]


@pytest.mark.parametrize(
    "error",
    [
        E.UNKNOWN_TOPIC_OR_PARTITION,
        E.NOT_LEADER_OR_FOLLOWER,
        E.NOT_ENOUGH_REPLICAS,
        E.NOT_ENOUGH_REPLICAS_AFTER_APPEND,
        E.REQUEST_TIMED_OUT,
        E.KAFKA_STORAGE_ERROR,
        E.UNKNOWN_SERVER_ERROR,
        12345,
    ],
)
async def test_what_is_refused_for_now_is_sent_again(room: Room, error: Any):
    room.errors[B] = [error] * 3
    room.send(B, C)
    await room.all_done(B, C)
    assert [broker_id for broker_id, _, _ in room.cluster.sent].count(2) == 4
    assert [broker_id for broker_id, _, _ in room.cluster.sent].count(3) == 1


async def test_a_broker_that_cannot_be_reached_is_tried_again(room: Room):
    answer, room.cluster.answer = room.cluster.answer, lambda broker_id, request: None
    room.send(B)
    await until(lambda: len(room.cluster.sent) >= 3)
    assert not room.done
    room.cluster.answer = answer
    await room.all_done(B)


async def test_markers_are_sent_again_after_an_unexpected_error(room: Room):
    """Or their transactions would stay prepared for ever."""
    answer = room.cluster.answer
    malformed: Any = [None]
    room.cluster.answer = lambda broker_id, request: WriteTxnMarkersResponse(markers=malformed)
    room.send(B)
    room.send(B, producer_id=8)
    await until(lambda: len(room.cluster.sent) >= 2)
    room.cluster.answer = answer
    await room.all_done(B, B)


async def test_a_partition_that_the_answer_leaves_out_is_sent_again(room: Room):
    answer = room.cluster.answer
    room.cluster.answer = lambda broker_id, request: WriteTxnMarkersResponse()
    room.send(B)
    await until(lambda: len(room.cluster.sent) >= 2)
    room.cluster.answer = answer
    await room.all_done(B)


async def test_the_marker_follows_the_leader(room: Room):
    room.errors[B] = [E.NOT_LEADER_OR_FOLLOWER] * 1000
    room.send(B)
    await until(lambda: room.cluster.sent)
    room.cluster.lead(*B, OWN_ID)
    await room.all_done(B)
    assert room.writer.written[-1][1] == B


async def test_a_partition_without_a_leader_waits_for_one(room: Room, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(transaction_markers, "BACKOFF_MIN_MS", 1_000_000)
    monkeypatch.setattr(transaction_markers, "BACKOFF_MAX_MS", 1_000_000)
    room.cluster.lead(*B, -1)
    room.cluster.unknown_brokers = {3}
    room.send(B, C)
    await until(lambda: room.sender.waiting_partitions == 2)
    room.cluster.lead(*B, 2)
    room.sender.on_image()
    await until(lambda: room.done == [B])
    room.cluster.unknown_brokers = set()
    room.sender.on_image()
    await room.all_done(B, C)


async def test_a_deleted_topic_needs_no_marker(room: Room):
    room.cluster.delete("b")
    room.send(A, B)
    await room.all_done(A, B)
    assert not room.cluster.sent


async def test_a_topic_that_is_deleted_meanwhile_needs_none_either(room: Room):
    room.errors[B] = [E.UNKNOWN_TOPIC_OR_PARTITION] * 1000
    room.send(B)
    await until(lambda: room.cluster.sent)
    room.cluster.delete("b")
    await room.all_done(B)


@pytest.mark.parametrize("error", [E.INVALID_PRODUCER_EPOCH, E.INVALID_TOPIC_EXCEPTION])
async def test_a_partition_that_refuses_the_marker_for_good_holds_up_no_other(
    room: Room, error: ErrorCode, caplog: pytest.LogCaptureFixture
):
    """Or its transaction would stay prepared, and those partitions that lack the marker unstable, for ever."""
    room.errors[B] = [error]
    room.errors[C] = [E.NOT_ENOUGH_REPLICAS] * 3
    room.send(A, B, C)
    await room.all_done(A, B, C)
    assert [broker_id for broker_id, _, _ in room.cluster.sent].count(3) == 4
    assert f"b-0 refuses the marker of producer 7, epoch 5, with {error.name}" in caplog.text


async def test_a_fenced_coordinator_holds_up_no_other_partition_either(room: Room):
    """A newer one writes this marker, and this one is told to stop. Until then it goes on."""
    room.errors[B] = [E.TRANSACTION_COORDINATOR_FENCED] * 1000
    room.errors[C] = [E.NOT_ENOUGH_REPLICAS] * 3
    room.send(B, C)
    await until(lambda: room.done == [C])
    room.errors[B].clear()
    await room.all_done(B, C)


async def test_this_nodes_own_refusals_count_the_same(room: Room):
    room.writer.errors[A] = E.NOT_LEADER_OR_FOLLOWER
    room.send(A)
    await until(lambda: len(room.writer.written) >= 2)
    room.writer.errors[A] = E.INVALID_PRODUCER_EPOCH
    await room.all_done(A)


async def test_markers_of_a_log_partition_that_others_lead_are_dropped(room: Room):
    held = room.cluster.hold(2)
    room.send(B, log_partition=1)
    room.send(C, log_partition=2, producer_id=8)
    await until(lambda: room.done == [C])
    room.sender.cancel(1)
    held.set()
    await asyncio.sleep(0.02)
    assert (room.done, len(room.sender)) == ([C], 0)


def has_sent(room: Room, producer_id: int) -> bool:
    return any(each.producer_id == producer_id for _, request, _ in room.cluster.sent for each in request.markers)


async def test_a_request_that_waits_does_not_hold_up_the_others(room: Room):
    held = room.cluster.hold(2)
    for producer_id in range(broker_queues.LANES + 3):
        room.send(B, producer_id=producer_id)
        if producer_id < broker_queues.LANES:
            await until(lambda: has_sent(room, producer_id))  # noqa: B023
    assert len(room.cluster.sent) == broker_queues.LANES
    assert len({lane for _, _, lane in room.cluster.sent}) == broker_queues.LANES
    held.set()
    await until(lambda: len(room.done) == broker_queues.LANES + 3)
    assert [len(request.markers) for _, request, _ in room.cluster.sent][-1] == 3


async def test_a_request_is_bounded(room: Room, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(transaction_markers, "MARKERS_PER_REQUEST_MAX", 4)
    partitions = [("b", index) for index in range(10)]
    for topic, index in partitions:
        room.cluster.lead(topic, index, 2)
    room.send(*partitions)
    await room.all_done(*partitions)
    sizes = [
        sum(len(t.partition_indexes) for m in request.markers for t in m.topics) for _, request, _ in room.cluster.sent
    ]
    assert sizes == [4, 4, 2]


async def test_very_many_partitions_of_this_node_are_written_in_pieces(room: Room, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(transaction_markers, "PIECE_ELEMENTS_MAX", 4)
    partitions = [("a", index) for index in range(10)]
    for topic, index in partitions:
        room.cluster.lead(topic, index, OWN_ID)
    room.send(*partitions)
    written: list[int] = []
    while len(room.done) < 10:
        await asyncio.sleep(0)
        written.append(len(room.writer.written))
    assert written == [4, 8, 10]


async def test_very_many_markers_are_tried_again_in_pieces(room: Room, monkeypatch: pytest.MonkeyPatch):
    """When the leader of all their partitions is back, say."""
    for name in ("BACKOFF_MIN_MS", "BACKOFF_MAX_MS"):
        monkeypatch.setattr(transaction_markers, name, 1_000_000)
    monkeypatch.setattr(transaction_markers, "PIECE_ELEMENTS_MAX", 4)
    room.cluster.lead(*A, -1)
    for producer_id in range(10):
        room.send(A, producer_id=producer_id)
    await until(lambda: room.sender.waiting_partitions == 10)
    room.cluster.lead(*A, OWN_ID)
    room.sender.on_image()
    room.sender.on_image()
    written: list[int] = []
    while len(room.done) < 10:
        await asyncio.sleep(0)
        written.append(len(room.writer.written))
    assert written == [4, 8, 10]


async def test_after_the_end_nothing_is_sent_or_told(room: Room):
    room.cluster.hold(2)
    room.send(B)
    await until(lambda: room.cluster.sent)
    await room.sender.close()
    room.send(C)
    await asyncio.sleep(0.01)
    assert (len(room.cluster.sent), room.done) == (1, [])


async def test_a_broker_of_an_older_release_gets_the_version_that_it_serves(room: Room):
    """WriteTxnMarkers 2 is new in Kafka 4.3: an older broker closes the connection, and the transaction would hang."""
    room.cluster.served = {2: {WriteTxnMarkersRequest.API_KEY or 0: 1}}
    room.send(B, C)
    await room.all_done(B, C)
    room.done.clear()
    room.send(B)
    await room.all_done(B)
    assert sorted(room.cluster.versions) == [(2, 1), (2, 1), (3, 2)]
    room.cluster.served = {}  # the broker is upgraded: its connection breaks
    room.cluster.answer, answer = (lambda broker_id, request: None), room.cluster.answer
    room.done.clear()
    room.send(B)
    await until(lambda: len(room.cluster.versions) > 3)
    room.cluster.served = {2: {WriteTxnMarkersRequest.API_KEY or 0: 2}}
    room.cluster.answer = answer
    await room.all_done(B)
    assert room.cluster.versions[-1] == (2, 2)


async def test_partitions_that_take_their_marker_are_done_though_others_of_the_answer_refuse_it(room: Room):
    """Otherwise their transaction would stay prepared for ever."""
    other = ("b", 1)
    room.cluster.lead(*other, 2)
    room.errors[B] = [E.NOT_LEADER_OR_FOLLOWER]
    room.send(B, other)
    await room.all_done(B, other)
    assert room.done == [other, B]
    assert [len(request.markers[0].topics[0].partition_indexes) for _, request, _ in room.cluster.sent] == [2, 1]


async def requests_sent(room: Room, count: int) -> None:
    await until(lambda: len(room.cluster.sent) == count)


async def test_a_marker_that_is_cancelled_while_it_waits_for_the_broker_is_not_sent(room: Room):
    """Another node coordinates the transaction now. A late marker could end the producer's next one."""
    released = room.cluster.hold(2)
    for count in range(1, broker_queues.LANES + 1):
        room.send(B, producer_id=count)
        await requests_sent(room, count)
    room.send(B, producer_id=70, log_partition=1)
    room.send(B, producer_id=80)
    await until(lambda: len(room.sender._queues) == 2)
    room.sender.cancel(1)
    released.set()
    await until(lambda: len(room.done) == broker_queues.LANES + 1)
    sent = [marker.producer_id for _, request, _ in room.cluster.sent for marker in request.markers]
    assert sent == [*range(1, broker_queues.LANES + 1), 80]
