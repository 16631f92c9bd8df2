"""Ports in front of brokers on which produces arrive one by one, a while apart, as over a slow line.

What a client pipelines is then judged at different times. Other requests, and answers, pass at once but in order.
"""

from __future__ import annotations

import asyncio
import struct
import threading
from types import TracebackType

from tests.patience import PATIENCE_S, join
from tests.stream_server import StreamServer

PRODUCE = 0


class SlowPaths:
    """One port for each broker, served by a thread of its own."""

    def __init__(self, pause_s: float) -> None:
        self._pause_s = pause_s
        self._loop = asyncio.new_event_loop()
        self._servers: list[StreamServer] = []
        self._thread = threading.Thread(target=self._loop.run_forever, name="slow paths", daemon=True)

    def __enter__(self) -> SlowPaths:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result(PATIENCE_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        join(self._thread)
        self._loop.close()

    def port(self, target_port: int) -> int:
        """A new port whose connections lead to this one."""

        async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            answers, broker = await server.connect(target_port)
            ways = {
                asyncio.create_task(self._requests(reader, broker)),
                asyncio.create_task(self._answers(answers, writer)),
            }
            try:
                await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for way in ways:
                    way.cancel()
                await asyncio.gather(*ways, return_exceptions=True)
                broker.transport.abort()
                writer.transport.abort()

        server = StreamServer(pass_on)
        self._servers.append(server)
        asyncio.run_coroutine_threadsafe(server.listen(), self._loop).result(PATIENCE_S)
        return server.port

    async def _requests(self, reader: asyncio.StreamReader, broker: asyncio.StreamWriter) -> None:
        while True:
            head = await reader.readexactly(6)
            size, key = struct.unpack(">ih", head)
            rest = await reader.readexactly(size - 2)
            if key == PRODUCE:
                await asyncio.sleep(self._pause_s)
            broker.write(head + rest)
            await broker.drain()

    async def _answers(self, answers: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await answers.read(1 << 16):
            writer.write(data)
            await writer.drain()

    async def _end(self) -> None:
        for server in self._servers:
            await server.close()
