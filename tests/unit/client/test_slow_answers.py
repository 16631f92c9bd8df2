"""Request timeouts on a slow link: an answer that goes on arriving is awaited, one that stops is given up."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tidelog.client.network.connection import ARRIVING_BYTES, Connection
from tidelog.protocol.errors import ErrorCode, KafkaError
from tidelog.protocol.messages.fetch import FetchableTopicResponse, FetchRequest, FetchResponse, PartitionData
from tidelog.protocol.messages.heartbeat import HeartbeatRequest, HeartbeatResponse

TIMEOUT_S = 30.0
SIZE_BYTES = 20 * ARRIVING_BYTES
BODY = FetchResponse(
    responses=[FetchableTopicResponse(topic="t", partitions=[PartitionData(records=bytes(SIZE_BYTES))])]
).encode(4)
BEAT = HeartbeatResponse(error_code=0).encode(3)


class Clock:
    """The connection's event loop, with a time of its own."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.timers: list[tuple[float, Callable[[], None], list[bool]]] = []
        self.create_future = asyncio.get_running_loop().create_future

    def time(self) -> float:
        return self.now_s

    def call_at(self, due_s: float, callback: Callable[[], None]) -> Any:
        cancelled = [False]
        self.timers.append((due_s, callback, cancelled))
        return SimpleNamespace(cancel=lambda: cancelled.__setitem__(0, True))

    def advance(self, seconds: float) -> None:
        self.now_s += seconds
        due = [timer for timer in self.timers if timer[0] <= self.now_s]
        self.timers = [timer for timer in self.timers if timer[0] > self.now_s]
        for _, callback, cancelled in due:
            if not cancelled[0]:
                callback()


def connect() -> tuple[Connection, Clock]:
    connection, clock = Connection("b:1", "c", 10 * SIZE_BYTES), Clock()
    connection._loop = cast(asyncio.AbstractEventLoop, clock)
    transport = SimpleNamespace(
        get_extra_info=lambda name: None, write=lambda data: None, abort=lambda: None, is_closing=lambda: False,
        set_write_buffer_limits=lambda **limits: None, get_write_buffer_size=lambda: 0, close=lambda: None,
    )  # fmt: skip
    connection.connection_made(cast(asyncio.Transport, transport))
    return connection, clock


def fetch(connection: Connection) -> asyncio.Future[FetchResponse]:
    return connection.send(FetchRequest(), FetchResponse, 4, TIMEOUT_S * 1000)


def assert_timed_out(answer: asyncio.Future[FetchResponse]) -> None:
    with pytest.raises(KafkaError) as caught:
        answer.result()
    assert caught.value.code is ErrorCode.REQUEST_TIMED_OUT


def framed(correlation_id: int, body: bytes) -> bytes:
    return (len(body) + 4).to_bytes(4, "big") + correlation_id.to_bytes(4, "big") + body


def receive(connection: Connection, data: bytes) -> None:
    while data and not connection.closed:
        room = connection.get_buffer(-1)
        piece, data = data[: len(room)], data[len(room) :]
        room[: len(piece)] = piece
        connection.buffer_updated(len(piece))


async def test_an_answer_that_arrives_slowly_is_awaited_and_those_behind_it_too() -> None:
    connection, clock = connect()
    answer = fetch(connection)
    beat = connection.send(HeartbeatRequest(group_id="g"), HeartbeatResponse, 3, TIMEOUT_S * 1000)
    frame = framed(1, BODY)
    piece_bytes = 2 * ARRIVING_BYTES
    for start in range(0, len(frame), piece_bytes):
        clock.advance(TIMEOUT_S * 0.9)
        receive(connection, frame[start : start + piece_bytes])
    assert len(answer.result().responses[0].partitions[0].records or b"") == SIZE_BYTES
    clock.advance(TIMEOUT_S * 0.9)
    receive(connection, framed(2, BEAT))
    assert beat.result().error_code == 0
    assert not connection.closed


async def test_an_answer_behind_another_large_one_has_a_timeout_of_its_own() -> None:
    connection, clock = connect()
    first, second = fetch(connection), fetch(connection)
    clock.advance(TIMEOUT_S * 0.95)
    frame = framed(2, BODY)
    receive(connection, framed(1, BODY) + frame[: ARRIVING_BYTES // 2])
    clock.advance(TIMEOUT_S * 0.1)
    assert first.done()
    receive(connection, frame[ARRIVING_BYTES // 2 :])
    assert len(second.result().responses[0].partitions[0].records or b"") == SIZE_BYTES
    assert not connection.closed


async def test_an_answer_that_never_begins_is_given_up_a_timeout_after_the_one_before_it() -> None:
    connection, clock = connect()
    _, second = fetch(connection), fetch(connection)
    clock.advance(TIMEOUT_S * 0.9)
    receive(connection, framed(1, BODY))
    clock.advance(TIMEOUT_S * 0.9)
    assert not second.done()
    clock.advance(TIMEOUT_S * 0.2)
    assert_timed_out(second)


async def test_an_answer_that_stops_is_given_up_a_timeout_after_its_last_bytes() -> None:
    connection, clock = connect()
    answer = fetch(connection)
    clock.advance(TIMEOUT_S * 0.9)
    receive(connection, framed(1, BODY)[: SIZE_BYTES // 2])
    clock.advance(TIMEOUT_S * 0.9)
    assert not answer.done()
    clock.advance(TIMEOUT_S * 0.2)
    assert_timed_out(answer)
    assert connection.closed


async def test_an_answer_that_trickles_is_given_up() -> None:
    connection, clock = connect()
    answer = fetch(connection)
    frame = framed(1, BODY)
    receive(connection, frame[: 2 * ARRIVING_BYTES])
    for second in range(3 * int(TIMEOUT_S)):
        clock.advance(1)
        if connection.closed:
            break
        receive(connection, frame[2 * ARRIVING_BYTES + second :][:1])
    assert_timed_out(answer)
    assert connection.closed
