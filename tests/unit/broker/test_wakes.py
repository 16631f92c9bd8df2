"""When followers that wait are told of what was appended, and how much of an answer may be on its way to them."""

from __future__ import annotations

import socket
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.unit.broker.test_connection import Owner, connect
from tests.unit.replication.replicas import TOPIC_ID, Replicas
from tidelog.broker.apis.records import fetch
from tidelog.broker.network.connection import KafkaConnection
from tidelog.broker.network.server import FOLLOWER_SEND_BYTES, Server, ServerLimits
from tidelog.broker.scheduling.deferred_callbacks import DeferredCallbacks
from tidelog.protocol.hot_replication import RequestTemplate


def framed(*frames: bytes) -> bytes:
    return b"".join(len(frame).to_bytes(4, "big") + frame for frame in frames)


def receive(connection: KafkaConnection, data: bytes) -> None:
    view = connection.get_buffer(-1)
    view[: len(data)] = data
    connection.buffer_updated(len(data))


class Watching(Owner):
    """Notes of each frame whether it was said to be the last."""

    def __init__(self) -> None:
        super().__init__()
        self.last: list[bool] = []

    def dispatch(self, frame: memoryview, connection: KafkaConnection) -> Any:
        self.last.append(self.wakes.is_last)
        return super().dispatch(frame, connection)


def test_the_last_request_of_what_was_read_is_known_as_such() -> None:
    owner = Watching()
    connection, _ = connect(owner)
    receive(connection, framed(b"request1", b"request2"))
    assert owner.last == [False, True]
    assert not owner.wakes.is_last
    receive(connection, framed(b"request3", b"request4")[:-1])
    assert owner.last == [False, True, False], "half a request follows"
    receive(connection, framed(b"request4")[-1:])
    assert owner.last == [False, True, False, True]


def test_a_malformed_request_does_not_leave_it_said() -> None:
    owner = Watching()
    connection, _ = connect(owner)
    receive(connection, framed(b"!request"))
    assert owner.last == [True]
    assert not owner.wakes.is_last


class Chained(Owner):
    """Each request wakes the one that waits on the next connection, as a Produce does, and is noted how deep."""

    def __init__(self) -> None:
        super().__init__()
        self.wakes = DeferredCallbacks(cast(Any, SimpleNamespace(call_soon=self.due.append)))
        self.depth = self.depth_max = 0

    def dispatch(self, frame: memoryview, connection: KafkaConnection) -> Any:
        waiting = self.parked.get(b"e" + bytes(frame[1:])) if bytes(frame[:1]) == b"w" else None
        if waiting is None:
            return super().dispatch(frame, connection)
        self.depth += 1
        self.depth_max = max(self.depth_max, self.depth)
        self.wakes.soon(partial(waiting.complete, b"told"))
        if self.wakes.is_last:
            self.wakes.run()
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


@pytest.mark.parametrize("is_last", [True, False])
def test_followers_are_told_before_the_produce_is_parked_if_no_other_request_was_read(is_last: bool) -> None:
    cluster = Replicas(3)
    cluster.loop.run_for(1)
    leader = cluster.nodes[1]
    wakes = leader.partitions.wakes
    wakes.collecting, wakes.is_last = True, is_last
    sent = leader.produce(b"a")
    waiting = [session.parked for session in leader.partitions.follower_fetches.sessions.values()]
    assert [each is None for each in waiting] == [is_last] * 2
    assert bool(wakes.waiting) is not is_last
    assert sent.code is None
    wakes.collecting = wakes.is_last = False
    wakes.run()
    cluster.loop.settle()
    assert sent.code == 0
    assert cluster.marks()[1] == (1, 1)


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
    leader.partitions.wakes.collecting = leader.partitions.wakes.is_last = True
    sent = leader.produce(b"a")
    cluster.loop.settle()
    assert leader.partition.offline
    assert sent.code == 56, "KAFKA_STORAGE_ERROR, and not never"


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
