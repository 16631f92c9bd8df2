"""The tests' own stand-ins for brokers are closed whole, whoever comes meanwhile."""

from __future__ import annotations

import asyncio
import gc
import warnings

from tests.stream_server import StreamServer
from tests.unit.broker.test_accepting import TURNS_BEFORE_CLOSE, Crowd


async def close_in_a_crowd(turns: int) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await server.connect(target.port)
        await reader.read()

    async def silence(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()

    server, target = StreamServer(serve), StreamServer(silence)
    await target.listen()
    await server.listen()
    crowd = Crowd(("127.0.0.1", server.port))
    for _ in range(turns):
        await asyncio.sleep(0)
    await server.close()
    crowd.leave()
    await target.close()


def test_no_connection_outlives_a_stream_server() -> None:
    gc.collect()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for turns in range(2 * TURNS_BEFORE_CLOSE):
            asyncio.run(close_in_a_crowd(turns))
        gc.collect()
    assert [str(each.message) for each in caught] == []


async def test_what_was_written_leaves_before_the_connection_is_closed() -> None:
    sent = bytes(8 << 20)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(sent)

    server = StreamServer(serve)
    await server.listen()
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    assert await reader.read() == sent
    writer.close()
    await server.close()
