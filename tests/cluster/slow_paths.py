"""Ports in front of brokers on which produces arrive one by one, a while apart, as over a slow line.

What a client pipelines is then judged at different times. Other requests, and answers, pass at once but in order.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import threading
from collections.abc import Coroutine
from types import TracebackType

PRODUCE = 0


class SlowPaths:
    """One port for each broker, served by a thread of its own."""

    def __init__(self, pause_s: float) -> None:
        self._pause_s = pause_s
        self._loop = asyncio.new_event_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._writers: set[asyncio.StreamWriter] = set()
        self._thread = threading.Thread(target=self._loop.run_forever, name="slow paths", daemon=True)

    def __enter__(self) -> SlowPaths:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def port(self, target_port: int) -> int:
        """A new port whose connections lead to this one."""
        listener = socket.create_server(("127.0.0.1", 0), backlog=100)
        listener.setblocking(False)
        self._loop.call_soon_threadsafe(lambda: self._start(self._accept(listener, target_port)))
        return int(listener.getsockname()[1])

    def _start(self, work: Coroutine[None, None, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _accept(self, listener: socket.socket, target_port: int) -> None:
        # Not asyncio.start_server: in Python 3.11 its close() leaves those connections open that it is about to serve.
        with listener:
            while True:
                accepted, _ = await self._loop.sock_accept(listener)
                reader, writer = await asyncio.open_connection(sock=accepted)
                self._writers.add(writer)
                self._start(self._pass_on(reader, writer, target_port))

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, target_port: int) -> None:
        ways: set[asyncio.Task[None]] = set()
        try:
            answers, broker = await asyncio.open_connection("127.0.0.1", target_port)
            self._writers.add(broker)
            ways = {
                asyncio.create_task(self._requests(reader, broker)),
                asyncio.create_task(self._answers(answers, writer)),
            }
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
            self._drop(broker)
        except OSError:
            pass  # the broker is not there: neither is the path to it
        finally:
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)
            self._drop(writer)

    def _drop(self, writer: asyncio.StreamWriter) -> None:
        self._writers.discard(writer)
        writer.transport.abort()

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
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        writers = list(self._writers)
        for writer in writers:
            self._drop(writer)
        for writer in writers:
            with contextlib.suppress(OSError):
                await writer.wait_closed()
        await asyncio.sleep(0)  # a path that has just ended has its transport closed one turn later
