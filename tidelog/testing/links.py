"""A network between nodes on loopback that tests can cut: one TCP proxy for each (source,
destination).

Each node gets addresses of its own for all other nodes, so that all its traffic passes a proxy,
which can hold it. A cut loses and reports nothing, like a real one: connections stay, sent bytes
wait, a connect succeeds or hangs, and healing delivers the bytes of connections that still exist. A
destination that is down refuses connections, as its kernel would, unless the direction to it is
cut. One thread runs everything; all methods may be called from any thread.
"""

from __future__ import annotations

import asyncio
import socket
import struct
import threading
import weakref
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass, field
from typing import Any

from tidelog.testing.ports import free_port, release_ports

Direction = tuple[int, int]
_CHUNK_BYTES = 1 << 16
_NO_TIME = struct.pack("ii", 1, 0)


@dataclass(slots=True)
class _Proxy:
    """The proxy to which `source` connects to reach `destination`."""

    source: int
    destination: int
    port: int
    target_port: int
    listener: socket.socket | None = None
    connections: set[asyncio.Task[None]] = field(default_factory=set)


class Links:
    """`port(source, destination, target)` makes a proxy; `cut`, `hush` and `heal` control directions."""

    def __init__(self) -> None:
        self._proxies: dict[Direction, list[_Proxy]] = {}
        self._silent: set[Direction] = set()
        self._up: set[int] = set()
        self._state_changed: asyncio.Event
        self._loop: asyncio.AbstractEventLoop
        self._thread: threading.Thread | None = None
        """The thread that carries bytes: from the first state in which bytes can come until `close`."""
        self._lock = threading.RLock()
        """Held while a state changes, and while the thread starts or ends."""
        self._ports: list[int] = []
        weakref.finalize(self, release_ports, self._ports)

    def port(self, source: int, destination: int, target_port: int) -> int:
        """The port on which `source` reaches `target_port` of `destination`."""
        proxy = _Proxy(source, destination, free_port(), target_port)
        self._ports.append(proxy.port)
        self._proxies.setdefault((source, destination), []).append(proxy)
        return proxy.port

    # States of nodes

    def up(self, node: int) -> None:
        """The node runs: open its proxies."""
        self._do(lambda: self._up.add(node))

    def down(self, node: int) -> None:
        """The node's process has ended: its proxies refuse connections, except for cut directions."""
        self._do(lambda: self._up.discard(node))

    # States of the network

    def cut(self, first_group: Iterable[int], second_group: Iterable[int]) -> None:
        """Hold both directions between the nodes of two groups."""
        pairs = [(first, second) for first in first_group for second in second_group if first != second]
        self._do(lambda: self._silent.update(pairs + [(second, first) for first, second in pairs]))

    def hush(self, senders: Iterable[int], receivers: Iterable[int]) -> None:
        """Hold the bytes from `senders` to `receivers`; the opposite direction stays open."""
        pairs = [(sender, receiver) for sender in senders for receiver in receivers if sender != receiver]
        self._do(lambda: self._silent.update(pairs))

    def heal(self, *, reset: bool = False) -> None:
        """Everything passes again. `reset` ends the connections that were held, as a
        firewall that forgot them does.
        """
        if self._thread is None:
            return  # nothing is held

        async def work() -> None:
            if reset:
                for direction in self._silent:
                    for proxy in self._proxies.get(direction, []) + self._proxies.get(direction[::-1], []):
                        for connection in proxy.connections:
                            connection.cancel()
                # The cancelled connections must end before their direction opens.
                await asyncio.sleep(0)
            self._silent.clear()
            await self._apply()

        self._call(work())

    @property
    def silent(self) -> frozenset[Direction]:
        """(sender, receiver) of every direction that is held now."""
        return frozenset(self._silent)

    def close(self) -> None:
        """End all connections and close all proxies; a later change of a state opens them again."""
        with self._lock:
            if self._thread is not None:
                self._end(self._thread)

    def _end(self, thread: threading.Thread) -> None:
        async def work() -> None:
            self._up.clear()
            self._silent.clear()
            await self._apply()
            tasks = [task for proxies in self._proxies.values() for proxy in proxies for task in proxy.connections]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await asyncio.sleep(0.01)  # aborted transports close their sockets a turn later

        self._call(work())
        self._loop.call_soon_threadsafe(self._loop.stop)
        thread.join()
        self._thread = None
        self._loop.close()

    # The thread

    def _call(self, work: Coroutine[Any, Any, None]) -> None:
        with self._lock:
            self._start()
            asyncio.run_coroutine_threadsafe(work, self._loop).result(30)

    def _start(self) -> None:
        if self._thread is None:
            self._loop = asyncio.new_event_loop()
            self._state_changed = asyncio.Event()
            self._thread = threading.Thread(target=self._loop.run_forever, name="tidelog-links", daemon=True)
            self._thread.start()

    def _do(self, change: Callable[[], Any]) -> None:
        async def work() -> None:
            change()
            await self._apply()

        with self._lock:
            if self._thread is None:
                change()
                if not self._up and not self._silent:
                    return  # no proxy is open
            self._call(work())

    async def _apply(self) -> None:
        """Open and close the proxies for the present state, and wake all waiting tasks."""
        for proxies in self._proxies.values():
            for proxy in proxies:
                is_open = proxy.destination in self._up or self._is_held(proxy)
                if is_open and proxy.listener is None:
                    self._open(proxy)
                elif not is_open and proxy.listener is not None:
                    self._loop.remove_reader(proxy.listener)
                    proxy.listener.close()
                    proxy.listener = None
        self._state_changed.set()
        self._state_changed = asyncio.Event()

    def _is_held(self, proxy: _Proxy) -> bool:
        return bool(self._silent & {(proxy.source, proxy.destination), (proxy.destination, proxy.source)})

    def _open(self, proxy: _Proxy) -> None:
        # An asyncio server that is closed during an accept would leak the connection.
        proxy.listener = listener = socket.create_server(("127.0.0.1", proxy.port), backlog=128)
        listener.setblocking(False)
        self._loop.add_reader(listener, self._accept, proxy, listener)

    def _accept(self, proxy: _Proxy, listener: socket.socket) -> None:
        try:
            accepted, _ = listener.accept()
        except OSError:
            return
        task = self._loop.create_task(self._carry(proxy, accepted))
        proxy.connections.add(task)
        task.add_done_callback(proxy.connections.discard)
        # This closes the socket also if the task is cancelled before its start.
        task.add_done_callback(lambda _: accepted.close())

    async def _carry(self, proxy: _Proxy, accepted: socket.socket) -> None:
        """Carry one connection until either end closes it, or until a reset."""
        ends: list[asyncio.StreamWriter] = []
        is_ended = False
        try:
            accepted.setblocking(False)
            while self._is_held(proxy):
                await self._state_changed.wait()
            reader, writer = await asyncio.open_connection(sock=accepted.dup(), limit=_CHUNK_BYTES)
            ends.append(writer)
            target_reader, target_writer = await asyncio.open_connection(
                "127.0.0.1", proxy.target_port, limit=_CHUNK_BYTES
            )
            ends.append(target_writer)
            for end in ends:
                end.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            forward = asyncio.create_task(self._pump(proxy.source, proxy.destination, reader, target_writer))
            backward = asyncio.create_task(self._pump(proxy.destination, proxy.source, target_reader, writer))
            try:
                await asyncio.wait((forward, backward), return_when=asyncio.FIRST_COMPLETED)
            finally:
                forward.cancel()
                backward.cancel()
                await asyncio.gather(forward, backward, return_exceptions=True)
            is_ended = True
        except OSError:
            pass
        finally:
            for end in ends:
                if is_ended:
                    end.close()  # the buffered bytes are still sent
                else:
                    _reset(end)

    async def _pump(
        self, sender: int, receiver: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Carry bytes in one direction, and their end, while the direction is open."""
        while True:
            try:
                data = await reader.read(_CHUNK_BYTES)
            except OSError:
                data = b""
            while (sender, receiver) in self._silent:
                await self._state_changed.wait()
            if not data:
                return
            writer.write(data)
            await writer.drain()


def _reset(end: asyncio.StreamWriter) -> None:
    """End a connection with a RST: lingering for no time, the kernel tells the other end of no
    orderly end.
    """
    try:
        end.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_TIME)
    except OSError:
        pass  # it is closed already
    end.transport.abort()
