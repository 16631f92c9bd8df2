"""A network in memory: connections between simulated processes, which delay, break, hang and heal.

Each direction of a connection is a pipe that keeps its order; pipes overtake each other. A pair of hosts can be cut, in
one direction or both: what is under way then waits, as TCP retransmits, and breaks after `GIVE_UP_S`. A process that
ended refuses connections and resets those it had; a machine without power just says nothing.
"""

from __future__ import annotations

import asyncio
import errno
import os
from collections import deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.simulation.host import Host
    from tests.simulation.simulated_loop import SimulatedLoop
    from tests.simulation.world import World

RETRANSMIT_S = 0.2
SYN_RETRANSMIT_S = 0.5
GIVE_UP_S = 20.0
FIN, RESET = "fin", "reset"
Item = bytes | str


class Weather:
    """How the network is: one-way delays in seconds, how often one is a spike, how often a chunk comes in two."""

    def __init__(
        self, low_s: float = 50e-6, high_s: float = 500e-6, spikes: float = 0.002, spike_s: float = 0.04
    ) -> None:
        self.low_s, self.high_s = low_s, high_s
        self.spikes, self.spike_s = spikes, spike_s
        self.splits = 0.01


class SimulatedSocket:
    """A bound port, as `NodePorts.bind` gives it."""

    def __init__(self, host: Host, port: int) -> None:
        self.host, self.port = host, port

    def getsockname(self) -> tuple[str, int]:
        return self.host.name, self.port

    def setsockopt(self, level: int, option: int, value: int) -> None:
        """A simulated link holds what it holds."""

    def close(self) -> None:
        self.host.ports.pop(self.port, None)


class SimulatedServer(asyncio.AbstractServer):
    def __init__(self, loop: SimulatedLoop, factory: Callable[[], asyncio.BaseProtocol], sock: SimulatedSocket) -> None:
        self.loop, self.factory, self.socket = loop, factory, sock
        self.is_open = True

    @property
    def sockets(self) -> tuple[SimulatedSocket, ...]:
        return (self.socket,) if self.is_open else ()

    def close(self) -> None:
        self.is_open = False

    def is_serving(self) -> bool:
        return self.is_open

    async def wait_closed(self) -> None:
        return


class Pipe:
    """One direction of a connection, from one host to another."""

    __slots__ = ("_due", "_items", "_last", "_network", "_sender", "_since", "bytes_waiting", "receiver", "source")

    def __init__(self, network: Network, sender: SimulatedTransport, source: Host) -> None:
        self._network = network
        self._sender = sender
        self.source = source
        self.receiver: SimulatedTransport | None = None
        self._items: deque[tuple[float, Item]] = deque()
        self._last = 0.0
        self._due = False
        self._since = 0.0  # when what is at the head was first held up
        self.bytes_waiting = 0

    def not_before(self, when: float) -> None:
        """Nothing arrives earlier: the other side does not know the connection yet."""
        self._last = when

    def send(self, item: Item) -> None:
        world = self._network.world
        when = max(self._last, world.now + self._network.delay())
        if (
            item is not FIN
            and item is not RESET
            and len(item) > 1
            and world.rng.random() < self._network.weather.splits
        ):
            cut = world.rng.randrange(1, len(item))
            self._put(when, item[:cut])
            item = item[cut:]
            when += self._network.delay()
        self._put(when, item)

    def _put(self, when: float, item: Item) -> None:
        self._last = when
        self._items.append((when, item))
        if type(item) is bytes:
            self.bytes_waiting += len(item)
        if not self._due:
            self._due = True
            self._network.world.at(when, self._deliver)

    def drop(self) -> None:
        """What has not arrived never will."""
        self._items.clear()
        self.bytes_waiting = 0

    def _deliver(self) -> None:
        self._due = False
        receiver, world = self.receiver, self._network.world
        if not self._items or receiver is None:
            return
        target = receiver.host
        if (self.source.name, target.name) in self._network.cuts or not target.powered:
            self._since = self._since or world.now
            if world.now - self._since > GIVE_UP_S:
                self.drop()
                self._sender.broken(TimeoutError(errno.ETIMEDOUT, "connection timed out"))
                return
            self._due = True
            world.after(RETRANSMIT_S, self._deliver)
            return
        self._since = 0.0
        chunks: list[bytes] = []
        end: str | None = None
        while self._items and self._items[0][0] <= world.now:
            item = self._items.popleft()[1]
            if isinstance(item, str):
                end = item
            else:
                chunks.append(item)
                self.bytes_waiting -= len(item)
        if self._items and not end:
            self._due = True
            world.at(self._items[0][0], self._deliver)
        data = b"".join(chunks) if len(chunks) != 1 else chunks[0]
        world.record(data)
        if not receiver.loop.alive:
            if end is None:
                receiver.pipe.send(RESET)  # nobody has this connection any more
            return
        receiver.loop.inject(receiver.arrived, data, end)
        self._sender.drained()


class SimulatedTransport(asyncio.Transport):
    """One end of a connection."""

    def __init__(self, loop: SimulatedLoop, network: Network, peer: tuple[str, int]) -> None:
        super().__init__()
        self.loop, self.host = loop, loop.host
        self.pipe = Pipe(network, self, loop.host)
        self._network = network
        self._peer = peer
        self._protocol: Any = None
        self._buffered = False
        self._high, self._low = 64 * 1024, 16 * 1024
        self._is_paused_writing = False
        self._reading = True
        self._inbox: deque[bytes] = deque()
        self._end: str | None = None
        self._closing = False
        self._lost = False

    # asyncio's side

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._peer if name == "peername" else default

    def is_closing(self) -> bool:
        return self._closing

    def set_protocol(self, protocol: Any) -> None:
        self._protocol = protocol
        self._buffered = isinstance(protocol, asyncio.BufferedProtocol)

    def get_protocol(self) -> Any:
        return self._protocol

    def is_reading(self) -> bool:
        return self._reading and not self._closing

    def pause_reading(self) -> None:
        self._reading = False

    def resume_reading(self) -> None:
        if not self._reading and not self._closing:
            self._reading = True
            self.loop.call_soon(self._take)

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self._high = 64 * 1024 if high is None else high
        self._low = self._high // 4 if low is None else low

    def get_write_buffer_size(self) -> int:
        return self.pipe.bytes_waiting

    def can_write_eof(self) -> bool:
        return False

    def write(self, data: Any) -> None:
        if self._closing or not self.loop.alive or not len(data):
            return
        self.pipe.send(bytes(data))
        if self.pipe.bytes_waiting > self._high and not self._is_paused_writing:
            self._is_paused_writing = True
            self._protocol.pause_writing()

    def writelines(self, list_of_data: Iterable[Any]) -> None:
        self.write(b"".join(list_of_data))

    def close(self) -> None:
        self._finish(FIN)

    def abort(self) -> None:
        if not self._closing:
            self.pipe.drop()
        self._finish(RESET)

    def _finish(self, how: str) -> None:
        if self._closing or not self.loop.alive:
            return
        self._closing = True
        self.pipe.send(how)
        self.loop.call_soon(self._lose, None)

    # The network's side

    def begin(self, factory: Callable[[], Any]) -> None:
        """On the loop: the connection is there."""
        self.set_protocol(factory())
        self._protocol.connection_made(self)

    def abandon(self) -> None:
        """Nobody waits for this connection any more."""
        self._closing = self._lost = True
        self.pipe.send(RESET)

    def arrived(self, data: bytes, end: str | None) -> None:
        """On the loop."""
        if self._closing:
            return
        if data:
            self._inbox.append(data)
        self._end = end or self._end
        if self._end is RESET:
            self._inbox.clear()
        self._take()

    def _take(self) -> None:
        while self._inbox and self._reading and not self._closing:
            data = self._inbox.popleft()
            if self._buffered:
                self._fill(data)
            else:
                self._protocol.data_received(data)
        if self._end is None or self._inbox or self._closing:
            return
        self._closing = True
        if self._end is RESET:
            self._lose(ConnectionResetError(errno.ECONNRESET, os.strerror(errno.ECONNRESET)))
        else:
            self._protocol.eof_received()
            self.pipe.send(FIN)
            self._lose(None)

    def _fill(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            buffer = self._protocol.get_buffer(len(view))
            count = min(len(buffer), len(view))
            assert count, "a protocol without room in its buffer"
            buffer[:count] = view[:count]
            view = view[count:]
            self._protocol.buffer_updated(count)
            if self._closing:
                return
            if view and not self._reading:
                self._inbox.appendleft(bytes(view))
                return

    def drained(self) -> None:
        if self._is_paused_writing and self.pipe.bytes_waiting <= self._low and self.loop.alive:
            self._is_paused_writing = False
            self.loop.inject(self._resume_writing)

    def _resume_writing(self) -> None:
        if not self._closing:
            self._protocol.resume_writing()

    def broken(self, error: OSError) -> None:
        """The other side was not heard of for too long, or somebody in between dropped the connection."""
        if self.loop.alive and not self._lost:
            self.loop.inject(self._break, error)

    def _break(self, error: OSError) -> None:
        if not self._closing:
            self._closing = True
            self._lose(error)

    def _lose(self, error: Exception | None) -> None:
        if not self._lost:
            self._lost = True
            self._network.transports.pop(self, None)
            if self._protocol is not None:
                self._protocol.connection_lost(error)

    def end_process(self, *, silently: bool) -> None:
        """The process of this end is gone: its system closes what it had, unless that is gone as well."""
        self._network.transports.pop(self, None)
        if silently:
            self.pipe.drop()
        elif not self._closing:
            self.pipe.send(RESET if self._network.world.rng.random() < 0.5 else FIN)
        self._closing = self._lost = True


class Network:
    def __init__(self, world: World, weather: Weather | None = None) -> None:
        self.world = world
        self.weather = weather or Weather()
        self.hosts: dict[str, Host] = {}
        self.cuts: set[tuple[str, str]] = set()
        """Pairs (from, to) between which nothing passes."""
        self.transports: dict[SimulatedTransport, None] = {}

    def delay(self) -> float:
        weather, draw = self.weather, self.world.rng.random()
        if draw < weather.spikes:
            return weather.spike_s * self.world.rng.random()
        return weather.low_s + (weather.high_s - weather.low_s) * draw * draw

    # Faults

    def cut(self, one: str, other: str, *, one_way: bool = False) -> None:
        self.cuts.add((one, other))
        if not one_way:
            self.cuts.add((other, one))

    def isolate(self, name: str, among: Iterable[str]) -> None:
        for other in among:
            if other != name:
                self.cut(name, other)

    def heal(self) -> None:
        self.cuts.clear()

    def reset(self, transport: SimulatedTransport) -> None:
        """Somebody in between drops this connection: both ends see it broken."""
        error = ConnectionResetError(errno.ECONNRESET, os.strerror(errno.ECONNRESET))
        for end in (transport, transport.pipe.receiver):
            if end is not None:
                end.pipe.drop()
                end.broken(error)

    # Connections

    def listen(self, loop: SimulatedLoop, factory: Any, sock: SimulatedSocket) -> SimulatedServer:
        server = SimulatedServer(loop, factory, sock)  # type: ignore[abstract]
        sock.host.ports[sock.port] = server
        return server

    async def connect(self, loop: SimulatedLoop, factory: Any, host: str, port: int) -> Any:
        waiter = loop.create_future()
        self.world.after(self.delay(), self._syn, loop, factory, host, port, waiter, self.world.now)
        return await waiter

    def _syn(
        self, loop: SimulatedLoop, factory: Any, name: str, port: int, waiter: asyncio.Future[Any], since: float
    ) -> None:
        if not loop.alive or waiter.done():
            return
        target = self.hosts.get(name)
        pair = (loop.host.name, name)
        if target is None or not target.powered or pair in self.cuts or pair[::-1] in self.cuts:
            if self.world.now - since > GIVE_UP_S:
                loop.inject(_refuse, waiter, TimeoutError(errno.ETIMEDOUT, "connection timed out"))
            else:
                self.world.after(SYN_RETRANSMIT_S, self._syn, loop, factory, name, port, waiter, since)
            return
        server = target.ports.get(port)
        if server is None or not server.is_open or not server.loop.alive:
            refused = ConnectionRefusedError(errno.ECONNREFUSED, f"connection to {name}:{port} refused")
            self.world.after(self.delay(), loop.inject, _refuse, waiter, refused)
            return
        near = SimulatedTransport(loop, self, (name, port))
        far = SimulatedTransport(server.loop, self, (loop.host.name, 50_000 + len(self.transports)))
        near.pipe.receiver, far.pipe.receiver = far, near
        self.transports[near] = self.transports[far] = None
        established = self.world.now + self.delay()
        far.pipe.not_before(established)
        server.loop.inject(far.begin, server.factory)
        self.world.at(established, loop.inject, self._established, near, factory, waiter)

    def _established(self, near: SimulatedTransport, factory: Any, waiter: asyncio.Future[Any]) -> None:
        if waiter.done():
            self.transports.pop(near, None)
            near.abandon()
        elif near.is_closing():
            waiter.set_exception(ConnectionResetError(errno.ECONNRESET, os.strerror(errno.ECONNRESET)))
        else:
            near.begin(factory)
            waiter.set_result((near, near.get_protocol()))


def _refuse(waiter: asyncio.Future[Any], error: OSError) -> None:
    if not waiter.done():
        waiter.set_exception(error)
