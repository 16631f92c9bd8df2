"""The HTTP server against clients that are wrong, slow, many, or gone."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Iterator

import pytest

from tests.patience import PATIENCE_S, until
from tidelog.broker.network import http_server
from tidelog.broker.network.http_server import CONNECTIONS_MAX, HEAD_BYTES_MAX, HttpServer, Page

Address = tuple[str, int]


shown: list[str] = []
held: list[socket.socket] = []
goes_on = asyncio.Event()


@pytest.fixture(autouse=True)
def _forgotten() -> Iterator[None]:
    shown.clear()
    goes_on.clear()
    yield
    for each in held:
        each.close()
    held.clear()


async def show(path: str) -> Page:
    shown.append(path)
    if path == "/waits":
        await goes_on.wait()
    if path == "/broken":
        raise RuntimeError("as asked")
    if path == "/large":
        return Page(200, b"x" * 8_000_000)
    return Page(200, f"this is {path}".encode())


@pytest.fixture
async def server() -> AsyncIterator[HttpServer]:
    running = HttpServer(show, asyncio.get_running_loop())
    yield running
    await running.close()


@pytest.fixture
async def address(server: HttpServer) -> Address:
    sock = socket.socket()
    sock.bind(("127.0.0.1", 0))
    await server.listen(sock)
    found: Address = sock.getsockname()
    return found


async def ask(address: Address, request: bytes) -> bytes:
    """Everything that is answered until the server closes the connection."""
    reader, writer = await asyncio.open_connection(*address)
    writer.write(request)
    try:
        return await asyncio.wait_for(reader.read(), PATIENCE_S)
    finally:
        writer.close()


async def test_a_page_is_shown_and_the_connection_closed_when_asked(address: Address):
    answer = await ask(address, b"GET /page?x=1 HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 OK\r\n")
    assert b"Content-Length: 13\r\n" in head
    assert body == b"this is /page"


async def test_a_connection_is_answered_once_and_what_comes_behind_costs_nothing(server: HttpServer, address: Address):
    """Requests at once, by a client that takes no answer: each answer was built and kept."""
    one = b"GET /large HTTP/1.1\r\nHost: a\r\n\r\n"
    greedy = socket.socket()
    greedy.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    greedy.connect(address)
    greedy.setblocking(False)
    await asyncio.get_running_loop().sock_sendall(greedy, one * 200)
    await until(lambda: shown.count("/large") >= 1)
    (connection,) = server.connections
    for _ in range(20):
        await asyncio.sleep(0.005)
        assert shown.count("/large") == 1
    assert connection._transport is not None
    assert connection._transport.get_write_buffer_size() < 9_000_000
    greedy.close()
    await until(lambda: not server.connections)


async def test_a_client_that_keeps_connections_open_is_told_that_this_one_ends(address: Address):
    answer = await ask(address, b"GET /a HTTP/1.1\r\nHost: a\r\nConnection: keep-alive\r\n\r\n")
    assert b"Connection: close\r\n" in answer
    assert answer.endswith(b"this is /a")


async def test_a_request_may_come_in_pieces(address: Address):
    reader, writer = await asyncio.open_connection(*address)
    for piece in (b"GE", b"T /slow HTTP/1.0\r", b"\n\r", b"\n"):
        writer.write(piece)
        await asyncio.sleep(0.01)
    assert (await reader.read()).endswith(b"this is /slow")
    writer.close()


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (b"POST / HTTP/1.1\r\n\r\n", 405),
        (b"GET / HTTP/1.1\r\nContent-Length: 5\r\n\r\nhello", 400),
        (b"GET / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n", 400),
        (b"GET / HTTP/2.0\r\n\r\n", 505),
        (b"GET /\r\n\r\n", 400),
        (b"GET http://elsewhere/ HTTP/1.1\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nno colon\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\n folded: x\r\n\r\n", 400),
        (b"\x00\x00\x00\x10\x00\x12\r\n\r\n", 400),
        (b"GET /" + b"x" * HEAD_BYTES_MAX + b" HTTP/1.1\r\n\r\n", 431),
        (b"GET / HTTP/1.1\r\nX: " + b"x" * HEAD_BYTES_MAX, 431),
        (b"GET /broken HTTP/1.1\r\nConnection: close\r\n\r\n", 500),
    ],
)
async def test_what_is_no_request_is_refused(address: Address, request_: bytes, status: int):
    answer = await ask(address, request_)
    assert answer.startswith(b"HTTP/1.1 %d " % status), answer[:100]


async def test_connections_are_bounded_and_who_asks_for_nothing_gives_way(server: HttpServer, address: Address):
    idle = [await asyncio.open_connection(*address) for _ in range(CONNECTIONS_MAX)]
    await until(lambda: len(server.connections) == CONNECTIONS_MAX)
    for _ in range(3):
        assert (await ask(address, b"GET /healthz HTTP/1.1\r\nHost: a\r\n\r\n")).endswith(b"this is /healthz")
    assert len(server.connections) <= CONNECTIONS_MAX
    assert await asyncio.wait_for(idle[0][0].read(), PATIENCE_S) == b"" or idle[0][0].at_eof()
    for _, writer in idle:
        writer.close()
    await until(lambda: not server.connections)


async def test_who_has_asked_is_answered_while_others_open_connections(server: HttpServer, address: Address):
    asked = asyncio.create_task(ask(address, b"GET /waits HTTP/1.1\r\nHost: a\r\n\r\n"))
    await until(lambda: "/waits" in shown)
    others = [await asyncio.open_connection(*address) for _ in range(2 * CONNECTIONS_MAX)]
    await until(lambda: len(server.connections) == CONNECTIONS_MAX)
    goes_on.set()
    assert (await asked).endswith(b"this is /waits")
    for _, writer in others:
        writer.close()


@pytest.mark.slow
async def test_who_asks_and_takes_nothing_gives_way_too(server: HttpServer, address: Address):
    for path in (b"/large",) * (CONNECTIONS_MAX + 1):
        greedy = socket.socket()
        greedy.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        greedy.setblocking(False)
        await asyncio.get_running_loop().sock_connect(greedy, address)
        held.append(greedy)
        await asyncio.get_running_loop().sock_sendall(greedy, b"GET " + path + b" HTTP/1.1\r\n\r\n")
    await until(lambda: shown.count("/large") == CONNECTIONS_MAX + 1)
    assert len(server.connections) == CONNECTIONS_MAX
    assert (await ask(address, b"GET /a HTTP/1.0\r\n\r\n")).endswith(b"this is /a")


async def test_who_is_slow_to_ask_is_cut_off(server: HttpServer, address: Address, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(http_server, "REQUEST_S_MAX", 0.1)
    _, writer = await asyncio.open_connection(*address)
    writer.write(b"GET /a HTTP/1.1\r\nHost: ")
    await until(lambda: bool(server.connections))

    def is_gone_while_more_comes() -> bool:
        with contextlib.suppress(RuntimeError):  # the loop that ships raises it where the connection is closed already
            writer.write(b"a")
        return not server.connections

    await until(is_gone_while_more_comes)
    writer.close()


async def test_who_does_not_take_the_answer_is_cut_off(
    server: HttpServer, address: Address, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(http_server, "ANSWER_S_MAX", 0.1)
    slow = socket.socket()
    slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    slow.connect(address)
    slow.sendall(b"GET /large HTTP/1.1\r\nHost: a\r\n\r\n")
    await until(lambda: bool(server.connections))
    await until(lambda: not server.connections)
    slow.close()
