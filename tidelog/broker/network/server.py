"""The node's listening sockets and the connections they accepted: limits, idle sweep, orderly close.

Binding and listening are two steps, so that a busy port is known before any data directory is touched and nobody is
accepted before the logs are loaded. How many may come is `connection_quotas`, what a request means `dispatch`.
Invariant: what the clients of a server may make it hold (connections, bytes received, bytes not read) has a bound.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from tidelog.broker.network.accepting import stop_accepting
from tidelog.broker.network.connection import KafkaConnection
from tidelog.broker.network.connection_quotas import ConnectionLimits, ConnectionQuotas, Refused
from tidelog.broker.network.repeated_warnings import RepeatedWarnings

if TYPE_CHECKING:
    from tidelog.broker.network.request import Answer, Deferred
    from tidelog.broker.scheduling.deferred_callbacks import DeferredCallbacks
    from tidelog.broker.scheduling.fair_scheduler import FairScheduler

logger = logging.getLogger("tidelog.server")

BACKLOG = 1024
SWEEP_INTERVAL_S = 30.0
SWEEPS_PER_IDLE_TIME = 4
SWEEP_S_MIN = 0.05
# A request that is not answered so long after its own time was up never will be: its client shall ask again. Longer
# than any answer may take to a request that says no time.
OVERDUE_S_MAX = 600.0
# Until an aborted transport is closed.
ABORT_TURNS = 5
# A request that arrives more slowly than this is as good as none.
TRICKLE_BYTES_PER_S = 64
UNREAD_CHECK_S = 1.0
# At least this much of an answer to a follower is on its way at once: with less, both sides wake for every piece.
FOLLOWER_SEND_BYTES = 300_000


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """`receive_bytes_max` bounds the receive buffers of all connections together, `unread_bytes_max` their answers.

    `files_max`: no connection gets a file descriptor from here on, for logs need some; 0 is without bound. The buffers
    are the system's for one connection, -1 leaves them to it.
    """

    frame_bytes_max: int
    idle_ms_max: int
    receive_bytes_max: int
    unread_bytes_max: int = 1 << 60
    files_max: int = 0
    send_buffer_bytes: int = -1
    receive_buffer_bytes: int = -1
    connections: ConnectionLimits = field(default_factory=ConnectionLimits)


class ListenError(OSError):
    """A listener could not be bound; the text is fit to be shown as it is."""

    def __str__(self) -> str:
        return self.strerror or super().__str__()


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
        raise ListenError(error.errno, f"cannot listen on {host}:{port}: {error.strerror}") from None
    return sock


class Server:
    """Accepts on bound sockets and hands frames to `dispatch`; implements `ConnectionOwner`."""

    def __init__(
        self,
        limits: ServerLimits,
        dispatch: Callable[[memoryview, KafkaConnection], Answer],
        loop_time: Callable[[], float],
        wakes: DeferredCallbacks,
        turns: FairScheduler,
        protected_listener: str | None = None,
    ) -> None:
        self.dispatch = dispatch
        self.wakes = wakes
        self.turns = turns
        self.frame_bytes_max = limits.frame_bytes_max
        self.connections: dict[KafkaConnection, None] = {}
        self.receive_bytes = 0
        self.accepted = 0
        self.refused = 0
        self.cut = dict.fromkeys(("malformed", "failed", "buffers", "unread", "idle", "overdue"), 0)
        """Connections closed from this side, by reason."""
        self._limits = limits
        self._quotas = ConnectionQuotas(limits.connections, protected_listener)
        self._warnings = RepeatedWarnings(logger, loop_time)
        self._loop_time = loop_time
        self._servers: list[asyncio.Server] = []
        self._sweep: asyncio.TimerHandle | None = None
        self._unread_check: asyncio.TimerHandle | None = None
        self._unread: dict[KafkaConnection, None] = {}
        # Since when a connection is idle, and where its unfinished request stood at the last sweep.
        self._idle_since: dict[KafkaConnection, float] = {}
        self._partial: dict[KafkaConnection, tuple[int, int]] = {}
        # Answers that were overdue at the last sweep.
        self._overdue: dict[KafkaConnection, Deferred] = {}
        # Closing since the last sweep or longer.
        self._leaving: dict[KafkaConnection, None] = {}

    def reconfigure(self, limits: ServerLimits) -> None:
        """Other limits from now on; connections that are open stay."""
        self._limits = limits
        self._quotas.limits = limits.connections
        self.frame_bytes_max = limits.frame_bytes_max

    async def listen(self, sockets: list[tuple[str, socket.socket]]) -> None:
        """Start accepting; `sockets` are (listener name, bound socket)."""
        loop = asyncio.get_running_loop()
        for name, sock in sockets:
            self._limit_buffers(sock)
            accept = partial(KafkaConnection, self, name)
            self._servers.append(await loop.create_server(accept, sock=sock, backlog=BACKLOG))

    def _limit_buffers(self, sock: socket.socket) -> None:
        """The system's buffers of accepted connections; they take these from the socket that listens."""
        for option, size_bytes in (
            (socket.SO_SNDBUF, self._limits.send_buffer_bytes),
            (socket.SO_RCVBUF, self._limits.receive_buffer_bytes),
        ):
            if size_bytes > 0 and isinstance(sock, socket.socket):
                sock.setsockopt(socket.SOL_SOCKET, option, size_bytes)

    async def close(self) -> None:
        """Stop accepting, send what is already answered, close every connection."""
        await stop_accepting(self._servers)
        for timer in (self._sweep, self._unread_check):
            if timer is not None:
                timer.cancel()
        for connection in list(self.connections):
            connection.close()
        # Closing transports finish on the next turns of the loop; those that do not drain are cut.
        for _ in range(20):
            if not self.connections:
                break
            await asyncio.sleep(0.01)
        for connection in list(self.connections):
            connection.abort()
        for _ in range(ABORT_TURNS):
            if self.connections:
                await asyncio.sleep(0)
        for server in self._servers:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(server.wait_closed(), 1)

    # ------------------------------------------------------------------------------------------- ConnectionOwner

    def connected(self, connection: KafkaConnection) -> bool:
        try:
            if 0 < self._limits.files_max <= connection.file_number:
                raise Refused("the limit on open files (ulimit -n), less what logs need,", self._limits.files_max)
            wait_s = self._quotas.admit(connection.listener_name, connection.host, self._loop_time())
        except Refused as refused:
            self.refused += 1
            self._warnings.warn(refused.limit, f"refusing a connection from {connection.host}: {refused}")
            return False
        self.accepted += 1
        self.connections[connection] = None
        if self._quotas.too_many:
            self._close_the_idlest(connection.listener_name)
        if wait_s > 0:
            connection.rest()
            asyncio.get_running_loop().call_later(wait_s, connection.wake)
        if self._sweep is None:
            self._arm_sweep()
        return True

    def disconnected(self, connection: KafkaConnection) -> None:
        if connection in self.connections:
            del self.connections[connection]
            self._quotas.gone(connection.listener_name, connection.host)
        self._idle_since.pop(connection, None)
        self._partial.pop(connection, None)
        self._leaving.pop(connection, None)
        self._overdue.pop(connection, None)
        self._unread.pop(connection, None)

    def reserve_buffer(self, extra_bytes: int) -> bool:
        wanted = self.receive_bytes + extra_bytes
        if extra_bytes > 0 and wanted > self._limits.receive_bytes_max:
            return False
        self.receive_bytes = wanted
        return True

    def widen(self, sock: socket.socket) -> None:
        """The send buffer of a connection to a follower; one that the system sizes stays as it is."""
        if 0 < self._limits.send_buffer_bytes < FOLLOWER_SEND_BYTES:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, FOLLOWER_SEND_BYTES)

    def warn(self, kind: str, text: str) -> None:
        """Something that clients can do again and again, for which they are cut off."""
        self.cut[kind] += 1
        self._warnings.warn(kind, text)

    def not_read(self, connection: KafkaConnection) -> None:
        """The client leaves answers lying; look after a while how many there are in all."""
        self._unread[connection] = None
        if self._unread_check is None:
            self._unread_check = asyncio.get_running_loop().call_later(UNREAD_CHECK_S, self._check_unread)

    # ------------------------------------------------------------------------------------------------------- idle

    def _arm_sweep(self) -> None:
        self._sweep = asyncio.get_running_loop().call_later(self._sweep_s(), self._sweep_idle)

    def _sweep_s(self) -> float:
        idle_ms_max = self._limits.idle_ms_max
        if idle_ms_max < 0:
            return SWEEP_INTERVAL_S
        return min(SWEEP_INTERVAL_S, max(SWEEP_S_MIN, idle_ms_max / 1000 / SWEEPS_PER_IDLE_TIME))

    def _sweep_idle(self) -> None:
        """Give back big buffers of quiet connections; close those idle beyond connections.max.idle.ms.

        Who was closed and has not taken its last answers by the next time is cut off: it could stay for ever.
        """
        self._sweep = None
        now = self._loop_time()
        sweep_s = self._sweep_s()
        for connection in list(self.connections):
            if connection.is_closing:
                if connection in self._leaving:
                    connection.abort()
                self._leaving[connection] = None
                continue
            if self._is_overdue(connection, now):
                connection.close()
                continue
            if connection.active and not self._trickles(connection, sweep_s):
                connection.active = False
                self._idle_since.pop(connection, None)
                continue
            connection.active = False
            since = self._idle_since.setdefault(connection, now - sweep_s)
            if 0 <= self._limits.idle_ms_max < (now - since) * 1000:
                self.cut["idle"] += 1
                connection.close()
            else:
                connection.give_back()
        if self.connections:
            self._arm_sweep()

    def _is_overdue(self, connection: KafkaConnection, now: float) -> bool:
        """The last resort: whether an answer will never come, for which the client may wait for ever.

        It was overdue at the last sweep, too: a process that was stopped for long has many answers to give first.
        """
        awaited, before = connection.awaited, self._overdue.pop(connection, None)
        if awaited is None or awaited.timing is None:
            return False
        counters, began = awaited.timing
        waited_s = counters.stopwatch() - began
        if awaited.overdue_s(waited_s, now) <= OVERDUE_S_MAX:
            return False
        if awaited is not before:
            self._overdue[connection] = awaited
            return False
        self.cut["overdue"] += 1
        logger.error(
            "closing connection from %s: %s was not answered in %d s, which is a failure of this broker",
            connection.host, counters.name, waited_s,
        )  # fmt: skip
        return True

    def _trickles(self, connection: KafkaConnection, seconds: float) -> bool:
        """Whether all that came since the last sweep is a few bytes more of the same request."""
        partial = connection.partial
        before = self._partial.get(connection)
        if partial is None:
            self._partial.pop(connection, None)
            return False
        self._partial[connection] = partial
        return before is not None and before[0] == partial[0] and partial[1] - before[1] < TRICKLE_BYTES_PER_S * seconds

    def _close_the_idlest(self, but_of: str) -> None:
        """One of another listener than this goes: the one that has been idle for longest, or else the oldest."""
        others = [each for each in self.connections if each.listener_name != but_of and not each.is_closing]
        if others:
            never = self._loop_time()
            min(others, key=lambda each: self._idle_since.get(each, never)).close()

    # ------------------------------------------------------------------------------------------------ slow readers

    def _check_unread(self) -> None:
        """Cut off those with most to read if all of it together is more than may be kept for them."""
        self._unread_check = None
        unread = {connection: connection.unread_bytes for connection in self._unread}
        total = sum(unread.values())
        if total > self._limits.unread_bytes_max:
            for connection in sorted(unread, key=unread.__getitem__, reverse=True):
                if total <= self._limits.unread_bytes_max // 2:
                    break
                total -= unread.pop(connection)
                self.warn(
                    "unread", f"closing connection from {connection.host}: it leaves its answers unread, as others do"
                )
                connection.abort()
        self._unread = {connection: None for connection, size in unread.items() if size}
        if self._unread:
            self._unread_check = asyncio.get_running_loop().call_later(UNREAD_CHECK_S, self._check_unread)
