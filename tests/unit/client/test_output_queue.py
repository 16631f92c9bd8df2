"""What a connection sends arrives whole and in order, however slowly the other side reads, and is not copied."""

from __future__ import annotations

import asyncio
import socket
import tracemalloc
from typing import Any

import pytest

from tests.patience import until
from tests.unit.client.test_connection import Server, beat, read_frame
from tidelog.client.network import output_queue
from tidelog.client.network.connection import Connection
from tidelog.protocol.messages.produce import (
    PartitionProduceData,
    ProduceRequest,
    ProduceResponse,
    TopicProduceData,
)

RECORDS = [bytes([number]) * 700_001 for number in range(12)]
PATIENCE_MS = 60_000


def produce(connection: Connection, parts: list[bytes]) -> asyncio.Future[ProduceResponse]:
    topic = TopicProduceData(
        name="t", partition_data=[PartitionProduceData(index=index, records=part) for index, part in enumerate(parts)]
    )
    return connection.send(ProduceRequest(acks=1, timeout_ms=1, topic_data=[topic]), ProduceResponse, 9, PATIENCE_MS)


def is_as_sent(frames: list[bytes]) -> bool:
    sent = [ProduceRequest.read(frame, 15, 9)[0].topic_data[0].partition_data for frame in frames[::2]]
    return [[part.records for part in parts] for parts in sent] == [RECORDS[:6], RECORDS[6:]]


@pytest.mark.parametrize("has_writev", [True, False])
async def test_large_and_small_requests_leave_in_order_to_a_slow_reader(
    monkeypatch: pytest.MonkeyPatch, has_writev: bool
) -> None:
    if not has_writev:
        monkeypatch.setattr(output_queue, "_writev", None)
    may_read = asyncio.Event()
    frames: list[bytes] = []

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await may_read.wait()
        for _ in range(4):
            frames.append(await read_frame(reader))
            await asyncio.sleep(0.001)
        await reader.read()

    async with Server(script) as server:
        connection = await server.connect()
        waiting: list[asyncio.Future[Any]] = []
        for parts in (RECORDS[:6], RECORDS[6:]):
            waiting.append(produce(connection, parts))
            waiting.append(beat(connection))
        assert not connection.writable  # 8 MB are more than the socket takes
        may_read.set()
        await until(lambda: len(frames) == 4)
        assert is_as_sent(frames)
        assert [int.from_bytes(frame[:2], "big") for frame in frames] == [0, 12, 0, 12]
        await until(lambda: connection.writable)
        connection.close()
        await asyncio.gather(*waiting, return_exceptions=True)


async def test_a_close_sends_what_is_written_before_it() -> None:
    may_read = asyncio.Event()
    frames: list[bytes] = []

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await may_read.wait()
        frames.extend([await read_frame(reader) for _ in range(3)])

    async with Server(script) as server:
        connection = await server.connect()
        waiting: list[asyncio.Future[Any]] = [
            produce(connection, RECORDS[:6]),
            beat(connection),
            produce(connection, RECORDS[6:]),
        ]
        connection.close()
        may_read.set()
        await until(lambda: len(frames) == 3)
        assert is_as_sent(frames)
        await asyncio.gather(*waiting, return_exceptions=True)


async def test_large_records_are_not_copied() -> None:
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asyncio.Event().wait()  # reads nothing

    async with Server(script) as server:
        connection = await server.connect()
        whole = b"r" * 40_000_000
        tracemalloc.start()
        try:
            waiting = produce(connection, [whole])
            _, peak_bytes = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert peak_bytes < 2_000_000
        assert connection._transport is not None
        connection._transport.abort()
        await asyncio.gather(waiting, return_exceptions=True)


class EncryptedTransport:
    """It has a socket, as TLS transports do, and takes all that is written."""

    def __init__(self, socket: socket.socket) -> None:
        self._extra = {"socket": socket, "ssl_object": object()}
        self.written = b""

    def get_extra_info(self, name: str) -> object:
        return self._extra.get(name)

    def set_write_buffer_limits(self, high: int) -> None:
        assert high == 0

    def is_closing(self) -> bool:
        return False

    def write(self, data: bytes | memoryview) -> None:
        assert data, "nothing would be left to write after any number of such calls"
        self.written += data


def test_nothing_passes_by_a_transport_that_encrypts() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.setblocking(False)
        transport = EncryptedTransport(ours)
        queue = output_queue.OutputQueue(transport)  # type: ignore[arg-type]
        queue.write([RECORDS[0], RECORDS[1]])
        assert transport.written == RECORDS[0] + RECORDS[1]
        with pytest.raises(BlockingIOError):
            theirs.recv(1)


@pytest.mark.parametrize("is_encrypted", [True, False])
def test_an_empty_piece_is_not_waited_for(monkeypatch: pytest.MonkeyPatch, is_encrypted: bool) -> None:
    """Behind its records a Produce has no more bytes before version 9."""
    written = bytearray()

    def writev(descriptor: int, pieces: list[memoryview]) -> int:
        assert any(pieces), "nothing would be left to write after any number of such calls"
        written.extend(b"".join(pieces))
        return sum(map(len, pieces))

    monkeypatch.setattr(output_queue, "_writev", writev)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        transport = EncryptedTransport(ours)
        if not is_encrypted:
            transport._extra["ssl_object"] = None
        queue = output_queue.OutputQueue(transport)  # type: ignore[arg-type]
        queue.write([b"", b"head", b"", RECORDS[0], b""])
    assert transport.written + written == b"head" + RECORDS[0]
    assert queue.size_bytes == 0
