"""A server that is closed while clients come, on asyncio's own loop: no socket stays open that it has accepted.

And one that cannot listen says so, on either loop.
"""

from __future__ import annotations

import asyncio
import gc
import socket
import warnings
from collections.abc import Awaitable, Callable

import pytest
import uvloop

from tests.patience import PATIENCE_S
from tidelog.broker.network.accepting import ACCEPTED_PER_TURN, ListenError
from tidelog.broker.network.http_server import HttpServer, Page
from tidelog.broker.network.server import Server, ServerLimits, bind
from tidelog.broker.scheduling.deferred_callbacks import DeferredCallbacks
from tidelog.broker.scheduling.fair_scheduler import FairScheduler

Close = Callable[[], Awaitable[None]]
TURNS_BEFORE_CLOSE = 12


async def http_server(sock: socket.socket) -> Close:
    async def no_page(path: str) -> Page:
        raise AssertionError("these clients ask for nothing")

    server = HttpServer(no_page, asyncio.get_running_loop())
    await server.listen(sock)
    return server.close


async def kafka_server(sock: socket.socket) -> Close:
    loop = asyncio.get_running_loop()
    limits = ServerLimits(frame_bytes_max=1 << 20, idle_ms_max=-1, receive_bytes_max=1 << 28)
    server = Server(
        limits, lambda frame, connection: b"", loop.time, DeferredCallbacks(loop), FairScheduler(loop.call_soon)
    )
    await server.listen([("PLAINTEXT", sock)])
    return server.close


class Crowd:
    """A client in each turn of the loop, as long as it is let in."""

    def __init__(self, address: tuple[str, int]) -> None:
        self._address = address
        self._clients: list[socket.socket] = []
        self._has_left = False
        self._come()

    def _come(self) -> None:
        if self._has_left:
            return
        client = socket.socket()
        self._clients.append(client)
        if client.connect_ex(self._address) == 0:
            asyncio.get_running_loop().call_soon(self._come)

    def leave(self) -> None:
        self._has_left = True
        for client in self._clients:
            client.close()


async def close_in_a_crowd(listen: Callable[[socket.socket], Awaitable[Close]], turns: int) -> None:
    sock = bind("127.0.0.1", 0)
    close = await listen(sock)
    crowd = Crowd(sock.getsockname())
    for _ in range(turns):
        await asyncio.sleep(0)
    await close()
    crowd.leave()


@pytest.mark.parametrize("listen", [http_server, kafka_server])
def test_no_accepted_connection_outlives_its_server(listen: Callable[[socket.socket], Awaitable[Close]]) -> None:
    gc.collect()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for turns in range(TURNS_BEFORE_CLOSE):
            asyncio.run(close_in_a_crowd(listen, turns))
        gc.collect()
    assert [str(each.message) for each in caught] == []


async def listen_twice(listen: Callable[[socket.socket], Awaitable[Close]]) -> None:
    """Two sockets may be bound to one port while neither listens, as those of two nodes that start at once."""
    first = bind("127.0.0.1", 0)
    port = first.getsockname()[1]
    with bind("127.0.0.1", port) as second:
        close = await listen(first)
        try:
            with pytest.raises(ListenError, match=f"^cannot listen on 127.0.0.1:{port}: Address already in use$"):
                await listen(second)
        finally:
            await close()


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
@pytest.mark.parametrize("listen", [http_server, kafka_server])
def test_a_port_on_which_another_one_listens_is_refused(
    run: Callable[..., None], listen: Callable[[socket.socket], Awaitable[Close]]
) -> None:
    """uvloop says nothing: the node was ready, and nobody could connect to it."""
    run(listen_twice(listen))


async def accept_a_crowd(count: int) -> None:
    loop = asyncio.get_running_loop()
    limits = ServerLimits(frame_bytes_max=1 << 20, idle_ms_max=-1, receive_bytes_max=1 << 28)
    server = Server(
        limits, lambda frame, connection: b"", loop.time, DeferredCallbacks(loop), FairScheduler(loop.call_soon)
    )
    sock = bind("127.0.0.1", 0)
    await server.listen([("PLAINTEXT", sock)])
    clients = [socket.create_connection(sock.getsockname(), timeout=PATIENCE_S) for _ in range(count)]
    turns = 0
    while server.accepted < count and turns < count:
        await asyncio.sleep(0)
        turns += 1
    await server.close()
    for client in clients:
        client.close()
    assert turns <= count // ACCEPTED_PER_TURN + 4


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_a_turn_of_the_loop_accepts_several_connections(run: Callable[..., None]) -> None:
    """libuv accepts one for each listening socket: behind a thousand in turns of 5 ms, a heartbeat waited for 5 s."""
    run(accept_a_crowd(96))
