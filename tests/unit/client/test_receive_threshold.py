"""A reader is woken for much of a large answer at once, and for every byte of what comes after it."""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import Iterator
from random import Random
from typing import Any

import pytest

from tests.patience import PATIENCE_S
from tests.stream_server import StreamServer
from tests.unit.client.test_connection import PATIENCE_MS, answer_beat, beat, framed, read_frame, versions
from tidelog.client.network.connection import Connection, connect
from tidelog.client.network.receive_threshold import ReceiveThreshold
from tidelog.protocol.errors import KafkaError
from tidelog.protocol.messages.fetch import FetchableTopicResponse, FetchResponse, PartitionData
from tidelog.protocol.messages.heartbeat import HeartbeatRequest

MIB = 1024 * 1024
PIECE_BYTES = 32 * 1024

only_on_linux = pytest.mark.skipif(sys.platform != "linux", reason="the threshold is set on Linux alone")


class OneSocket:
    """A transport, as far as the threshold knows it."""

    def __init__(self, own: socket.socket) -> None:
        self.own = own

    def get_extra_info(self, name: str) -> Any:
        return self.own if name == "socket" else None


@pytest.fixture
def own_socket() -> Iterator[socket.socket]:
    with socket.socket() as own:
        yield own


def low_water_mark(own: socket.socket) -> int:
    return own.getsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT)


@only_on_linux
def test_the_threshold_is_at_most_what_is_expected_and_a_byte_in_the_end(own_socket: socket.socket) -> None:
    rng = Random(1)
    threshold = ReceiveThreshold(OneSocket(own_socket))  # type: ignore[arg-type]
    for _ in range(50):
        remaining = rng.randrange(1, 9 * MIB)
        threshold.expect(remaining)
        assert low_water_mark(own_socket) == min(remaining, 2 * MIB)
        while remaining:
            remaining -= rng.randrange(1, remaining + 1)
            threshold.expect(remaining)
            assert 1 <= low_water_mark(own_socket) <= max(1, remaining)
    assert low_water_mark(own_socket) == 1


def test_a_closed_socket_is_left_alone(own_socket: socket.socket) -> None:
    threshold = ReceiveThreshold(OneSocket(own_socket))  # type: ignore[arg-type]
    own_socket.close()
    threshold.expect(MIB)
    threshold.expect(0)


def large_answer(request: bytes, size_bytes: int) -> bytes:
    partition = PartitionData(high_watermark=5, records=bytes(size_bytes))
    body = FetchResponse(responses=[FetchableTopicResponse(topic="t", partitions=[partition])]).encode(4)
    return framed(request[4:8], body)


class SlowServer:
    """Answers requests in pairs, the first with many records and in pieces, the second with a few bytes."""

    def __init__(self, sizes: list[int], *, ends_in_the_middle: bool = False) -> None:
        self._sizes = sizes
        self._ends_in_the_middle = ends_in_the_middle

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        request = await read_frame(reader)
        writer.write(framed(request[4:8], versions()))
        for size in self._sizes:
            first, second = await read_frame(reader), await read_frame(reader)
            answer = large_answer(first, size)
            end = len(answer) // 2 if self._ends_in_the_middle else len(answer)
            for start in range(0, end, PIECE_BYTES):
                writer.write(answer[start : min(start + PIECE_BYTES, end)])
                await writer.drain()
                await asyncio.sleep(0.001)
            if self._ends_in_the_middle:
                return
            writer.write(answer_beat(second, 7))
        await reader.read()

    async def __aenter__(self) -> Connection:
        self._server = StreamServer(self._serve)
        await self._server.listen()
        self._connection = await connect(
            "127.0.0.1",
            self._server.port,
            client_id="test",
            max_frame_bytes=16 * MIB,
            software_version="1",
            timeout_ms=PATIENCE_MS,
        )
        return self._connection

    async def __aexit__(self, *_: object) -> None:
        self._connection.close()
        await self._server.close()


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of what the connection reads."""
    sizes: list[int] = []
    buffer_updated = Connection.buffer_updated

    def noted(self: Connection, count: int) -> None:
        sizes.append(count)
        buffer_updated(self, count)

    monkeypatch.setattr(Connection, "buffer_updated", noted)
    return sizes


async def test_large_answers_take_few_reads_and_the_small_ones_behind_them_come_at_once(reads: list[int]) -> None:
    sizes = [MIB, 70_000, 5 * MIB, MIB // 2]
    async with SlowServer(sizes) as connection:
        for size in sizes:
            del reads[:]
            large = connection.send(HeartbeatRequest(group_id="g"), FetchResponse, 4, PATIENCE_MS)
            small = beat(connection)
            async with asyncio.timeout(PATIENCE_S):
                records = (await large).responses[0].partitions[0].records
                assert (await small).error_code == 7
            assert records is not None
            assert len(records) == size
            pieces = -(-size // PIECE_BYTES)
            if sys.platform == "linux" and pieces >= 16:
                assert len(reads) <= pieces // 2


async def test_an_answer_that_ends_in_its_middle_ends_the_connection(reads: list[int]) -> None:
    async with SlowServer([MIB], ends_in_the_middle=True) as connection:
        large = connection.send(HeartbeatRequest(group_id="g"), FetchResponse, 4, PATIENCE_MS)
        beat(connection).add_done_callback(lambda future: future.exception())
        with pytest.raises(KafkaError, match="closed the connection"):
            async with asyncio.timeout(PATIENCE_S):
                await large
