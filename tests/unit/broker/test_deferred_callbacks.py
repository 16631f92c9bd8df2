"""When followers that wait are told of what was appended, and how much of an answer may be on its way to them."""

from __future__ import annotations

import socket
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.unit.broker.test_connection import Owner, connect
from tests.unit.replication.replicas import TOPIC_ID, Replicas
from tidelog.broker.apis.records import fetch, produce
from tidelog.broker.network.connection import KafkaConnection
from tidelog.broker.network.server import FOLLOWER_SEND_BYTES, Server, ServerLimits
from tidelog.broker.scheduling.deferred_callbacks import DeferredCallbacks
from tidelog.protocol.batches.batch_builder import encode_batch
from tidelog.protocol.batches.record import Record
from tidelog.protocol.hot_replication import RequestTemplate
from tidelog.protocol.messages.produce import PartitionProduceData, ProduceRequest, ProduceResponse, TopicProduceData


def framed(*frames: bytes) -> bytes:
    return b"".join(len(frame).to_bytes(4, "big") + frame for frame in frames)


def receive(connection: KafkaConnection, data: bytes) -> None:
    view = connection.get_buffer(-1)
    view[: len(data)] = data
    connection.buffer_updated(len(data))


class Watching(Owner):
    """Each frame leaves something to be called; `calls` says when it was, with the frames that were there by then."""

    def __init__(self) -> None:
        super().__init__()
        self.callbacks = DeferredCallbacks(cast(Any, SimpleNamespace(call_soon=self.due.append)))
        self.calls: list[tuple[bytes, int, bool]] = []

    def dispatch(self, frame: memoryview, connection: KafkaConnection) -> Any:
        name = bytes(frame)
        self.callbacks.defer(lambda: self.calls.append((name, len(self.frames), bool(connection._pending))))
        return super().dispatch(frame, connection)


def test_before_the_last_request_that_was_read_is_parked_those_it_woke_are_called() -> None:
    owner = Watching()
    connection, _ = connect(owner)
    receive(connection, framed(b"parked-1", b"parked-2"))
    assert owner.calls == [(b"parked-1", 2, True), (b"parked-2", 2, True)], "not after the first: more had been read"
    owner.calls.clear()
    receive(connection, framed(b"parked-3", b"parked-4")[:-1])
    assert owner.calls == [(b"parked-3", 3, True)], "half a request follows: called when what is whole was served"
    other, _ = connect(owner)
    owner.calls.clear()
    receive(other, framed(b"parked-5"))
    assert owner.calls == [(b"parked-5", 4, False)], "before it had its place"


def test_a_request_that_is_answered_at_once_is_answered_before_those_it_woke_are_called() -> None:
    owner = Watching()
    connection, transport = connect(owner)
    owner.callbacks.defer(lambda: written.append(bytes(transport.written)))
    written: list[bytes] = []
    receive(connection, framed(b"request1"))
    assert written == [b"request1"]


class Chained(Owner):
    """Each request wakes the one that waits on the next connection, as a Produce does, and is noted how deep."""

    def __init__(self) -> None:
        super().__init__()
        self.callbacks = DeferredCallbacks(cast(Any, SimpleNamespace(call_soon=self.due.append)))
        self.depth = self.depth_max = 0

    def dispatch(self, frame: memoryview, connection: KafkaConnection) -> Any:
        waiting = self.parked.get(b"e" + bytes(frame[1:])) if bytes(frame[:1]) == b"w" else None
        if waiting is None:
            return super().dispatch(frame, connection)
        self.depth += 1
        self.depth_max = max(self.depth_max, self.depth)
        self.callbacks.defer(partial(waiting.complete, b"told"))
        if self.callbacks.collecting:  # as a connection does before it parks the last request that was read
            self.callbacks.run()
        self.depth -= 1
        return b"done"


def test_a_chain_of_requests_that_wake_each_other_is_not_gone_through_inside_the_first() -> None:
    """A hundred connections deep there was no stack left, and some were never answered."""
    owner = Chained()
    first, _ = connect(owner)
    others = [connect(owner) for _ in range(200)]
    for number, (connection, _) in enumerate(others):
        receive(connection, framed(b"e%07d" % number, b"w%07d" % (number + 1)))
    receive(first, framed(b"w%07d" % 0))
    owner.turn()
    assert all(transport.written[:4] == b"told" for _, transport in others)
    assert owner.depth_max <= 2


class Door(Owner):
    """Hands produces to a leader, as its server would."""

    def __init__(self, leader: Any) -> None:
        super().__init__()
        self.leader = leader
        self.callbacks = leader.partitions.callbacks

    def dispatch(self, frame: memoryview, connection: KafkaConnection) -> Any:
        return produce.serve(self.leader.services, frame, 0, 10, 1, connection)


def produce_body(value: bytes) -> bytes:
    data = PartitionProduceData(index=0, records=bytes(encode_batch([Record(0, 0, None, value)])))
    return ProduceRequest(
        acks=-1, timeout_ms=1000, topic_data=[TopicProduceData(name="t", partition_data=[data])]
    ).encode(10)


def error_code(written: bytes) -> int:
    """Of the only partition, in an answer that begins with its size, header and tags."""
    response, _ = ProduceResponse.read(written, 9, 10)
    code: int = response.responses[0].partition_responses[0].error_code
    return code


@pytest.mark.parametrize("is_last", [True, False])
def test_followers_are_told_before_the_produce_is_parked_if_no_other_request_was_read(is_last: bool) -> None:
    cluster = Replicas(3)
    cluster.loop.run_for(1)
    leader = cluster.nodes[1]
    connection, transport = connect(Door(leader))
    open_when_told: list[int] = []
    leader.partitions.callbacks.defer(lambda: open_when_told.append(len(connection._pending)))
    body = produce_body(b"a")
    receive(connection, framed(body) if is_last else framed(body, body))
    assert open_when_told == [0 if is_last else 1]
    assert [session.parked for session in leader.partitions.follower_fetches.sessions.values()] == [None] * 2
    assert not transport.written
    cluster.loop.settle()
    assert error_code(bytes(transport.written)) == 0
    assert cluster.marks()[1] == ((1, 1) if is_last else (2, 2))


def test_a_log_that_cannot_be_read_for_the_followers_refuses_the_produce_that_told_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster = Replicas(3)
    cluster.loop.run_for(1)
    leader = cluster.nodes[1]
    tail = leader.partition.watch.tail

    def fails(*_: Any) -> None:
        raise OSError(5, "no")

    monkeypatch.setattr(type(tail), "frame", fails)
    connection, transport = connect(Door(leader))
    receive(connection, framed(produce_body(b"a")))
    assert leader.partition.offline
    assert error_code(bytes(transport.written)) == 56, "KAFKA_STORAGE_ERROR, and not never"


@pytest.mark.parametrize(("configured_bytes", "is_widened"), [(102_400, True), (1_000_000, False), (-1, False)])
def test_more_may_be_on_its_way_to_a_follower(configured_bytes: int, is_widened: bool) -> None:
    limits = ServerLimits(1000, 1000, 1 << 20, send_buffer_bytes=configured_bytes)
    server = Server(limits, cast(Any, None), lambda: 0.0, DeferredCallbacks(cast(Any, None)), cast(Any, None))
    with socket.socket() as sock:
        before = sock.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
        server.widen(sock)
        after = sock.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
    assert (after != before) is is_widened
    assert after >= FOLLOWER_SEND_BYTES or not is_widened


@pytest.mark.parametrize(("replica_id", "is_widened"), [(2, True), (9, False)])
def test_more_is_on_its_way_only_to_who_is_a_replica(replica_id: int, is_widened: bool) -> None:
    cluster = Replicas(2)
    cluster.loop.run_for(1)
    leader = cluster.nodes[1]
    template = RequestTemplate(replica_id, cluster.image.brokers[2].epoch, 0, 1, 1 << 20, 1 << 20)
    body = template.many(0, 0, [(TOPIC_ID, 0, leader.partition.leader_epoch, 0, -1, 0)])
    told: list[bool] = []
    peer: Any = SimpleNamespace(listener_name="PLAINTEXT", send_much=lambda: told.append(True))
    fetch.serve(leader.services, memoryview(body), 18, 1, peer)
    assert told == [True] * is_widened
