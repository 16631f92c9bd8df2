"""HTTP/1.1 as a collector and a load balancer speak it: GET and HEAD of a few pages, no bodies, everything bounded.

Here are bytes, limits and timeouts; what a page says is `http_pages.py`'s. Invariants: a connection has at most one
answer under way, and whoever is slow to ask or to read is cut off; nothing here can make a node's own clients wait for
longer than one page takes.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable
from typing import NamedTuple, cast

log = logging.getLogger("tidelog.http")

CONNECTIONS_MAX = 32
HEAD_BYTES_MAX = 8 * 1024
# For a request to arrive whole, and for its answer to be taken.
REQUEST_S_MAX = 10.0
ANSWER_S_MAX = 30.0
# Between two scrapes of one connection; collectors ask every 15 to 60 s.
IDLE_S_MAX = 120.0
BACKLOG = 32

TEXT = "text/plain; charset=utf-8"
_REASONS = {
    200: "OK",
    400: "Bad Request",
    404: "Not Found",
    405: "Method Not Allowed",
    431: "Request Header Fields Too Large",
    500: "Internal Server Error",
    503: "Service Unavailable",
    505: "HTTP Version Not Supported",
}


class Page(NamedTuple):
    status: int
    body: bytes
    content_type: str = TEXT


Pages = Callable[[str], Awaitable[Page]]
"""A path to its page; may raise, which is answered with 500."""


class _Request(NamedTuple):
    method: str
    path: str
    keeps_open: bool


class _Refused(Exception):
    """What came is no request that is answered here: the status says why, and the connection ends."""

    def __init__(self, status: int) -> None:
        self.status = status


class HttpServer:
    def __init__(self, pages: Pages, loop: asyncio.AbstractEventLoop) -> None:
        self.pages = pages
        self.loop = loop
        self.connections: dict[HttpConnection, None] = {}
        self._server: asyncio.Server | None = None

    async def listen(self, sock: socket.socket) -> None:
        """Accept on a bound socket."""
        self._server = await self.loop.create_server(lambda: HttpConnection(self), sock=sock, backlog=BACKLOG)

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for connection in list(self.connections):
            connection.end()
        await asyncio.sleep(0)


class HttpConnection(asyncio.Protocol):
    def __init__(self, server: HttpServer) -> None:
        self._server = server
        self._transport: asyncio.Transport | None = None
        self._received = bytearray()
        self._answering: asyncio.Task[None] | None = None
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        if len(self._server.connections) >= CONNECTIONS_MAX:
            log.warning("refused a connection: %d are open already", CONNECTIONS_MAX)
            self._transport.abort()
            return
        self._server.connections[self] = None
        # What waits in the transport counts as not taken: `resume_writing` comes when all of it is.
        self._transport.set_write_buffer_limits(high=0)
        self._give(REQUEST_S_MAX)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._server.connections.pop(self, None)
        if self._deadline is not None:
            self._deadline.cancel()
        if self._answering is not None:
            self._answering.cancel()

    def data_received(self, data: bytes) -> None:
        if not self._received and self._answering is None:
            self._give(REQUEST_S_MAX)
        self._received += data
        if self._answering is None:
            self._next()
        elif len(self._received) > HEAD_BYTES_MAX:
            self.end()

    def resume_writing(self) -> None:
        if self._answering is None:
            self._give(IDLE_S_MAX)

    def end(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def _give(self, seconds: float) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline = self._server.loop.call_later(seconds, self.end)

    def _next(self) -> None:
        """Begin the answer to the request that has arrived whole, if one has."""
        end = self._received.find(b"\r\n\r\n")
        try:
            if end < 0:
                if len(self._received) > HEAD_BYTES_MAX:
                    raise _Refused(431)
                return
            if end > HEAD_BYTES_MAX:
                raise _Refused(431)
            request = _parse(bytes(self._received[:end]))
        except _Refused as refused:
            self._write(Page(refused.status, f"{_REASONS[refused.status]}\n".encode()), head_only=False, keep=False)
            return
        del self._received[: end + 4]
        self._give(ANSWER_S_MAX)
        self._answering = self._server.loop.create_task(self._answer(request), name="http answer")

    async def _answer(self, request: _Request) -> None:
        try:
            page = await self._server.pages(request.path)
        except Exception:
            log.exception("%s cannot be shown", request.path)
            page = Page(500, b"the node's log says why\n")
        self._answering = None
        self._write(page, head_only=request.method == "HEAD", keep=request.keeps_open)
        if request.keeps_open and self._received:
            self._next()

    def _write(self, page: Page, *, head_only: bool, keep: bool) -> None:
        transport = self._transport
        if transport is None:
            return
        head = (
            f"HTTP/1.1 {page.status} {_REASONS[page.status]}\r\n"
            f"Content-Type: {page.content_type}\r\n"
            f"Content-Length: {len(page.body)}\r\n"
            "Cache-Control: no-store\r\n"
            + ("Allow: GET, HEAD\r\n" if page.status == 405 else "")
            + f"Connection: {'keep-alive' if keep else 'close'}\r\n\r\n"
        ).encode()
        transport.write(head if head_only else head + page.body)
        if not keep:
            self._give(ANSWER_S_MAX)
            transport.close()
        elif transport.get_write_buffer_size() == 0:
            self._give(IDLE_S_MAX)


def _parse(head: bytes) -> _Request:
    lines = head.decode("latin-1").split("\r\n")
    words = lines[0].split(" ")
    if len(words) != 3 or not words[1].startswith("/"):
        raise _Refused(400)
    method, target, version = words
    if version not in ("HTTP/1.1", "HTTP/1.0"):
        raise _Refused(505 if version.startswith("HTTP/") else 400)
    if method not in ("GET", "HEAD"):
        raise _Refused(405)
    headers: dict[str, str] = {}
    for line in lines[1:]:
        name, colon, value = line.partition(":")
        if not colon or not name or name != name.strip():
            raise _Refused(400)
        headers[name.lower()] = value.strip().lower()
    if headers.get("content-length", "0") != "0" or "transfer-encoding" in headers:
        raise _Refused(400)  # a body, which nothing here wants
    connection = headers.get("connection", "")
    keeps_open = version == "HTTP/1.1" and "close" not in connection
    return _Request(method, target.partition("?")[0], keeps_open)
