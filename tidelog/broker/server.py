"""The node's listening sockets and the connections they accepted: limits, idle sweep, orderly close.

Binding and listening are two steps, so that a busy port is known before any data directory is touched and nobody is
accepted before the logs are loaded. What a request means is `dispatch`'s business.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from tidelog.broker.connection import KafkaConnection

if TYPE_CHECKING:
    from tidelog.broker.request import Answer
    from tidelog.broker.wakes import Wakes

log = logging.getLogger("tidelog.server")

BACKLOG = 1024
SWEEP_INTERVAL_S = 30.0
ACCEPT_TURNS = 5


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """`receive_bytes_max` bounds the receive buffers of all connections together."""

    frame_bytes_max: int
    connections_max: int
    idle_ms_max: int
    receive_bytes_max: int


class ListenError(OSError):
    """A listener could not be bound; the text is fit to be shown as it is."""


def bind(host: str, port: int) -> socket.socket:
    """A bound, not yet listening socket. Raises ListenError."""
    try:
        candidates = socket.getaddrinfo(host or "0.0.0.0", port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except socket.gaierror as error:
        raise ListenError(f"cannot listen on {host}:{port}: {error.strerror}") from None
    family, kind, protocol, _, address = candidates[0]
    sock = socket.socket(family, kind, protocol)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind(address)
    except OSError as error:
        sock.close()
        raise ListenError(f"cannot listen on {host}:{port}: {error.strerror}") from None
    return sock


class Server:
    """Accepts on bound sockets and hands frames to `dispatch`; implements `ConnectionOwner`."""

    def __init__(
        self,
        limits: ServerLimits,
        dispatch: Callable[[memoryview, KafkaConnection], Answer],
        loop_time: Callable[[], float],
        wakes: Wakes,
    ) -> None:
        self.dispatch = dispatch
        self.wakes = wakes
        self.frame_bytes_max = limits.frame_bytes_max
        self.connections: dict[KafkaConnection, None] = {}
        self._limits = limits
        self._loop_time = loop_time
        self.receive_bytes = 0
        self._servers: list[asyncio.Server] = []
        self._sweep: asyncio.TimerHandle | None = None
        self._idle_since: dict[KafkaConnection, float] = {}
        self.accepted = 0
        self.refused = 0

    async def listen(self, sockets: list[tuple[str, socket.socket]]) -> None:
        """Start accepting; `sockets` are (listener name, bound socket)."""
        loop = asyncio.get_running_loop()
        for name, sock in sockets:
            accept = partial(KafkaConnection, self, name)
            self._servers.append(await loop.create_server(accept, sock=sock, backlog=BACKLOG))

    async def close(self) -> None:
        """Stop accepting, send what is already answered, close every connection."""
        # asyncio gives an accepted connection its transport some turns later, and loses it when closed in between.
        for _ in range(ACCEPT_TURNS):
            await asyncio.sleep(0)
        for server in self._servers:
            server.close()
        if self._sweep is not None:
            self._sweep.cancel()
        for connection in list(self.connections):
            connection.close()
        # Closing transports finish on the next turns of the loop; those that do not drain are cut.
        for _ in range(20):
            if not self.connections:
                break
            await asyncio.sleep(0.01)
        for connection in list(self.connections):
            connection.abort()
        for server in self._servers:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(server.wait_closed(), 1)

    # ------------------------------------------------------------------------------------------- ConnectionOwner

    def connected(self, connection: KafkaConnection) -> bool:
        if len(self.connections) >= self._limits.connections_max:
            self.refused += 1
            if self.refused & (self.refused - 1) == 0:  # say it at 1, 2, 4, 8, ...
                log.warning(
                    "refused %d connections so far: max.connections=%d are open",
                    self.refused, self._limits.connections_max,
                )  # fmt: skip
            return False
        self.connections[connection] = None
        self.accepted += 1
        if self._sweep is None:
            self._arm_sweep()
        return True

    def disconnected(self, connection: KafkaConnection) -> None:
        self.connections.pop(connection, None)
        self._idle_since.pop(connection, None)

    def reserve_buffer(self, extra_bytes: int) -> bool:
        wanted = self.receive_bytes + extra_bytes
        if extra_bytes > 0 and wanted > self._limits.receive_bytes_max:
            return False
        self.receive_bytes = wanted
        return True

    # ------------------------------------------------------------------------------------------------------- idle

    def _arm_sweep(self) -> None:
        self._sweep = asyncio.get_running_loop().call_later(SWEEP_INTERVAL_S, self._sweep_idle)

    def _sweep_idle(self) -> None:
        """Give back big buffers of quiet connections; close those idle beyond connections.max.idle.ms."""
        self._sweep = None
        now = self._loop_time()
        for connection in list(self.connections):
            if connection.active:
                connection.active = False
                self._idle_since.pop(connection, None)
                continue
            since = self._idle_since.setdefault(connection, now - SWEEP_INTERVAL_S)
            if 0 <= self._limits.idle_ms_max < (now - since) * 1000:
                connection.close()
            else:
                connection.give_back()
        if self.connections:
            self._arm_sweep()
