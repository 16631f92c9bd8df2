"""A network between nodes on loopback that can be cut: one TCP proxy for every (source, destination).

Each node is told addresses of its own for all the others, so that whatever it sends passes a door here and can be held
back. A cut loses nothing and says nothing, as a real one: connections stay, what was sent waits, connecting succeeds or
hangs, and healing delivers what is left of it. A destination that is down refuses, as its kernel would, unless the way
to it is cut. One thread runs all of it; every method may be called from any other.
"""

from __future__ import annotations

import asyncio
import socket
import struct
import threading
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass, field
from typing import Any

from tidelog.testing.ports import free_port

Way = tuple[int, int]
_CHUNK_BYTES = 1 << 16
_NO_TIME = struct.pack("ii", 1, 0)


@dataclass(slots=True)
class _Door:
    """Where `source` connects to reach `destination`."""

    source: int
    destination: int
    port: int
    target_port: int
    listener: socket.socket | None = None
    connections: set[asyncio.Task[None]] = field(default_factory=set)


class Links:
    """`port(source, destination, target)` makes a door; `cut`, `hush` and `heal` decide what passes."""

    def __init__(self) -> None:
        self._doors: dict[Way, list[_Door]] = {}
        self._silent: set[Way] = set()
        self._up: set[int] = set()
        self._changed: asyncio.Event
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="links", daemon=True)
        self._thread.start()

    def port(self, source: int, destination: int, target_port: int) -> int:
        """The port at which `source` reaches what listens on `target_port` of `destination`."""
        door = _Door(source, destination, free_port(), target_port)
        self._doors.setdefault((source, destination), []).append(door)
        return door.port

    # What happens to nodes

    def up(self, node: int) -> None:
        """The node runs: its doors open."""
        self._do(lambda: self._up.add(node))

    def down(self, node: int) -> None:
        """The node's process is gone: its doors refuse, where no cut hides that."""
        self._do(lambda: self._up.discard(node))

    # What happens to the network

    def cut(self, ones: Iterable[int], others: Iterable[int]) -> None:
        """Nothing passes between any of `ones` and any of `others`, either way."""
        pairs = [(one, other) for one in ones for other in others if one != other]
        self._do(lambda: self._silent.update(pairs + [(other, one) for one, other in pairs]))

    def hush(self, senders: Iterable[int], receivers: Iterable[int]) -> None:
        """What `senders` send no longer reaches `receivers`; the other way it still does."""
        pairs = [(sender, receiver) for sender in senders for receiver in receivers if sender != receiver]
        self._do(lambda: self._silent.update(pairs))

    def heal(self, *, reset: bool = False) -> None:
        """Everything passes again. `reset` ends the connections that were held, as a firewall that forgot them does."""

        async def work() -> None:
            if reset:
                for way in self._silent:
                    for door in self._doors.get(way, []) + self._doors.get(way[::-1], []):
                        for connection in door.connections:
                            connection.cancel()
                # What is ended must not slip out when the way opens.
                await asyncio.sleep(0)
            self._silent.clear()
            await self._apply()

        self._call(work())

    @property
    def silent(self) -> frozenset[Way]:
        """(sender, receiver) of every way that is held now."""
        return frozenset(self._silent)

    def close(self) -> None:
        """End every connection and close every door."""
        if self._loop.is_closed():
            return

        async def work() -> None:
            self._up.clear()
            self._silent.clear()
            await self._apply()
            tasks = [task for doors in self._doors.values() for door in doors for task in door.connections]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await asyncio.sleep(0.01)  # aborted transports close their sockets a turn later

        self._call(work())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    # The thread

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._changed = asyncio.Event()
        self._loop.run_forever()

    def _call(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(30)

    def _do(self, change: Callable[[], Any]) -> None:
        async def work() -> None:
            change()
            await self._apply()

        self._call(work())

    async def _apply(self) -> None:
        """Doors as they should be now, and everybody who waits looks again."""
        for doors in self._doors.values():
            for door in doors:
                is_open = door.destination in self._up or self._is_held(door)
                if is_open and door.listener is None:
                    self._open(door)
                elif not is_open and door.listener is not None:
                    self._loop.remove_reader(door.listener)
                    door.listener.close()
                    door.listener = None
        self._changed.set()
        self._changed = asyncio.Event()

    def _is_held(self, door: _Door) -> bool:
        return bool(self._silent & {(door.source, door.destination), (door.destination, door.source)})

    def _open(self, door: _Door) -> None:
        # By hand: an asyncio server that is closed while it accepts leaves the connection behind.
        door.listener = listener = socket.create_server(("127.0.0.1", door.port), backlog=128)
        listener.setblocking(False)
        self._loop.add_reader(listener, self._accept, door, listener)

    def _accept(self, door: _Door, listener: socket.socket) -> None:
        try:
            accepted, _ = listener.accept()
        except OSError:
            return
        task = self._loop.create_task(self._carry(door, accepted))
        door.connections.add(task)
        task.add_done_callback(door.connections.discard)
        # Also when it is cancelled before it has begun.
        task.add_done_callback(lambda _: accepted.close())

    async def _carry(self, door: _Door, accepted: socket.socket) -> None:
        """One connection, until either end is gone or it is reset."""
        ends: list[asyncio.StreamWriter] = []
        is_ended = False
        try:
            accepted.setblocking(False)
            while self._is_held(door):
                await self._changed.wait()
            reader, writer = await asyncio.open_connection(sock=accepted.dup(), limit=_CHUNK_BYTES)
            ends.append(writer)
            answers, target = await asyncio.open_connection("127.0.0.1", door.target_port, limit=_CHUNK_BYTES)
            ends.append(target)
            for each in ends:
                each.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            there = asyncio.create_task(self._pump(door.source, door.destination, reader, target))
            back = asyncio.create_task(self._pump(door.destination, door.source, answers, writer))
            try:
                await asyncio.wait((there, back), return_when=asyncio.FIRST_COMPLETED)
            finally:
                there.cancel()
                back.cancel()
                await asyncio.gather(there, back, return_exceptions=True)
            is_ended = True
        except OSError:
            pass
        finally:
            for end in ends:
                if is_ended:
                    end.close()  # what was written before still goes out
                else:
                    _reset(end)

    async def _pump(
        self, sender: int, receiver: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Bytes one way, and the news of their end, only while the way is open."""
        while True:
            try:
                data = await reader.read(_CHUNK_BYTES)
            except OSError:
                data = b""
            while (sender, receiver) in self._silent:
                await self._changed.wait()
            if not data:
                return
            writer.write(data)
            await writer.drain()


def _reset(end: asyncio.StreamWriter) -> None:
    """End a connection with a RST: lingering for no time, the kernel tells the other end of no orderly end."""
    try:
        end.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_TIME)
    except OSError:
        pass  # it is closed already
    end.transport.abort()
