"""A port in front of a broker that notes which client asks for which API in which version.

The broker advertises this port, so clients come back to it. What passes is not changed; of each request only the
header is read: the key, the version and the client id, by which the clients of the matrix are told apart.
"""

from __future__ import annotations

import asyncio
import struct
import threading
from collections import defaultdict
from types import TracebackType

from tests.patience import PATIENCE_S, join
from tests.stream_server import StreamServer

Seen = dict[str, dict[int, set[int]]]
_PIECE = 1 << 18


class Recorder:
    """Listens on a port of its own choice, in a thread. `target_port` may be set before the first connection."""

    def __init__(self) -> None:
        self.target_port = 0
        self.seen: Seen = defaultdict(lambda: defaultdict(set))
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._server = StreamServer(self._pass_on, limit=_PIECE)
        asyncio.run_coroutine_threadsafe(self._server.listen(), self._loop).result(PATIENCE_S)
        self.port = self._server.port

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(self._server.close(), self._loop).result(PATIENCE_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        join(self._thread)
        self._loop.close()

    def __enter__(self) -> Recorder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        inner_reader, inner_writer = await self._server.connect(self.target_port)
        ways = [
            asyncio.ensure_future(self._requests(reader, inner_writer)),
            asyncio.ensure_future(_copy(inner_reader, writer)),
        ]
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)
            inner_writer.close()

    async def _requests(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            head = await reader.readexactly(4)
            (left,) = struct.unpack(">i", head)
            piece = await reader.readexactly(min(left, _PIECE // 2))
            self._note(piece)
            writer.write(head + piece)
            left -= len(piece)
            while left > 0:
                piece = await reader.readexactly(min(left, _PIECE // 2))
                writer.write(piece)
                await writer.drain()
                left -= len(piece)

    def _note(self, request: bytes) -> None:
        key, version, _, size = struct.unpack_from(">hhih", request)
        client = request[10 : 10 + size].decode(errors="replace") if size > 0 else ""
        self.seen[client][key].add(version)


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while piece := await reader.read(_PIECE):
        writer.write(piece)
        await writer.drain()
