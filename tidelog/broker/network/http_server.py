"""An HTTP/1.1 server for metrics collectors and load balancers: GET and HEAD of a few pages, no bodies, bounded.

This module handles bytes, limits and timeouts; `http_pages.py` builds the pages. Invariants: a connection gets one
answer and is closed; bytes after its request are dropped; a new connection always gets a place. If there is none, an
older connection is closed for it, at first one that has sent no request. Kafka clients wait for at most one page.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable
from typing import NamedTuple, cast

from tidelog.broker.network.accepting import begin_listening, stop_accepting

logger = logging.getLogger("tidelog.http")

CONNECTIONS_MAX = 32
HEAD_BYTES_MAX = 8 * 1024
# The time for a request to arrive completely, and for the client to receive its answer.
REQUEST_S_MAX = 10.0
ANSWER_S_MAX = 30.0
BACKLOG = 32
# Turns of the loop until an aborted transport is closed.
ABORT_TURNS = 5

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
"""Returns the page of a path. An exception becomes a status 500."""


class _Request(NamedTuple):
    method: str
    path: str


class _Refused(Exception):
    """The request is refused with `status`, and the connection is closed."""

    def __init__(self, status: int) -> None:
        self.status = status


class HttpServer:
    def __init__(self, pages: Pages, loop: asyncio.AbstractEventLoop) -> None:
        self.pages = pages
        self.loop = loop
        self.connections: dict[HttpConnection, None] = {}
        self._server: asyncio.Server | None = None

    async def listen(self, sock: socket.socket) -> None:
        """Accept on a bound socket. Raises ListenError."""
        begin_listening(sock, BACKLOG)
        self._server = await self.loop.create_server(lambda: HttpConnection(self), sock=sock, backlog=BACKLOG)

    def make_place(self) -> None:
        """If there are too many connections, abort the oldest one without a request, or else the oldest one."""
        if len(self.connections) < CONNECTIONS_MAX:
            return
        given_up = next((each for each in self.connections if not each.has_asked), next(iter(self.connections)))
        logger.info("closing the oldest of %d connections for a new one", len(self.connections))
        del self.connections[given_up]
        given_up.end()

    async def close(self) -> None:
        if self._server is not None:
            await stop_accepting([self._server])
        for connection in list(self.connections):
            connection.end()
        for _ in range(ABORT_TURNS):
            if self.connections:
                await asyncio.sleep(0)


class HttpConnection(asyncio.Protocol):
    def __init__(self, server: HttpServer) -> None:
        self.has_asked = False
        self._server = server
        self._transport: asyncio.Transport | None = None
        self._received = bytearray()
        self._answering: asyncio.Task[None] | None = None
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._server.make_place()
        self._server.connections[self] = None
        self._give(REQUEST_S_MAX)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._server.connections.pop(self, None)
        if self._deadline is not None:
            self._deadline.cancel()
        if self._answering is not None:
            self._answering.cancel()

    def data_received(self, data: bytes) -> None:
        if self.has_asked:
            return
        self._received += data
        end = self._received.find(b"\r\n\r\n", 0, HEAD_BYTES_MAX + 4)
        if end < 0 and len(self._received) <= HEAD_BYTES_MAX:
            return
        self.has_asked = True
        self._give(ANSWER_S_MAX)
        try:
            if end < 0:
                raise _Refused(431)
            request = _parse(bytes(self._received[:end]))
        except _Refused as refused:
            self._write(Page(refused.status, f"{_REASONS[refused.status]}\n".encode()), head_only=False)
            return
        finally:
            self._received.clear()
        self._answering = self._server.loop.create_task(self._answer(request), name="http answer")

    def end(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def _give(self, seconds: float) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline = self._server.loop.call_later(seconds, self.end)

    async def _answer(self, request: _Request) -> None:
        try:
            page = await self._server.pages(request.path)
        except Exception:
            logger.exception("cannot render %s", request.path)
            page = Page(500, b"the node's log says why\n")
        self._answering = None
        self._write(page, head_only=request.method == "HEAD")

    def _write(self, page: Page, *, head_only: bool) -> None:
        transport = self._transport
        if transport is None:
            return
        head = (
            f"HTTP/1.1 {page.status} {_REASONS[page.status]}\r\n"
            f"Content-Type: {page.content_type}\r\n"
            f"Content-Length: {len(page.body)}\r\n"
            "Cache-Control: no-store\r\n"
            + ("Allow: GET, HEAD\r\n" if page.status == 405 else "")
            + "Connection: close\r\n\r\n"
        ).encode()
        transport.write(head if head_only else head + page.body)
        self._give(ANSWER_S_MAX)
        transport.close()


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
        raise _Refused(400)  # the request has a body
    return _Request(method, target.partition("?")[0])
