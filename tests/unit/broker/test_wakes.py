"""When followers that wait are told of what was appended."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.broker.test_connection import Owner, connect
from tests.unit.replication.replicas import Replicas
from tidelog.broker.connection import KafkaConnection


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
