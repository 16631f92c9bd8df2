"""Stand-ins for brokers, and paths to them: asyncio's streams on a listening socket that leave nothing behind.

Not `asyncio.start_server`: its `close` forgets the connections that it is about to serve (Python 3.11). Their sockets
stay open until they are collected, which pytest counts as a failure of the test that runs then.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Awaitable, Callable, Coroutine

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
CLOSING_TURNS = 5


class StreamServer:
    """Runs `serve` for each connection. A connection is closed when its `serve` ends, or when this is closed.

    What has gone wrong with a connection (OSError, IncompleteReadError) is the end of it.
    """

    def __init__(self, serve: Serve, *, limit: int = 1 << 16) -> None:
        self.port = 0
        self._serve = serve
        self._limit = limit
        self._listener: socket.socket | None = None
        self._making: set[asyncio.Task[None]] = set()
        self._serving: set[asyncio.Task[None]] = set()
        self._writers: set[asyncio.StreamWriter] = set()

    async def listen(self, port: int = 0) -> None:
        self._listener = socket.create_server(("127.0.0.1", port), backlog=100)
        self._listener.setblocking(False)
        self.port = self._listener.getsockname()[1]
        asyncio.get_running_loop().add_reader(self._listener, self._accept)

    def _accept(self) -> None:
        assert self._listener is not None
        try:
            accepted, _ = self._listener.accept()
        except OSError:
            return  # the client has gone
        _start(self._connected(accepted), self._making)

    async def _connected(self, accepted: socket.socket) -> None:
        reader, writer = await asyncio.open_connection(sock=accepted, limit=self._limit)
        self._writers.add(writer)
        _start(self._run(reader, writer), self._serving)

    async def _run(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await self._serve(reader, writer)
            writer.close()  # what was written still leaves
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            if not writer.is_closing():
                writer.transport.abort()

    async def connect(self, port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A connection to somebody else, for `serve`; it is closed at the latest when this server is."""
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=self._limit)
        self._writers.add(writer)
        return reader, writer

    @property
    def connections(self) -> int:
        """How many are open."""
        return sum(not writer.is_closing() for writer in self._writers)

    def drop_connections(self) -> None:
        for writer in self._writers:
            writer.transport.abort()

    async def close(self) -> None:
        """No more connections, and an end to all that there are."""
        if self._listener is None:
            return
        asyncio.get_running_loop().remove_reader(self._listener)
        self._listener.close()
        self._listener = None
        # Not cancelled: a connection is known to its owner, and can be closed, once it is made.
        await asyncio.gather(*self._making, return_exceptions=True)
        serving = list(self._serving)
        for task in serving:
            task.cancel()
        await asyncio.gather(*serving, return_exceptions=True)
        self.drop_connections()
        for writer in self._writers:
            with contextlib.suppress(OSError):
                await writer.wait_closed()
        self._writers.clear()
        # Also a connection that `serve` was making when it was cancelled.
        for _ in range(CLOSING_TURNS):
            await asyncio.sleep(0)


def _start(work: Coroutine[None, None, None], tasks: set[asyncio.Task[None]]) -> None:
    task = asyncio.get_running_loop().create_task(work)
    tasks.add(task)
    task.add_done_callback(tasks.discard)
