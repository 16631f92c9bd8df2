"""The node's listening sockets and their connections: limits, idle sweep, orderly close.

Binding and listening are two steps: a busy port is detected before a data directory is touched, and no connection is
accepted before the logs are loaded. `connection_quotas` limits the connections, `dispatch` handles requests. Invariant:
the connections, received bytes and unread bytes that clients make a server hold are bounded.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import itemgetter
from typing import TYPE_CHECKING

from tidelog.broker.network.accepting import ListenError, accept_several, begin_listening, stop_accepting
from tidelog.broker.network.connection import WRITE_HIGH_WATER_BYTES, KafkaConnection
from tidelog.broker.network.connection_quotas import ConnectionLimits, ConnectionQuotas, Refused
from tidelog.broker.network.receive_buffers import BUFFER_USUAL_BYTES
from tidelog.broker.network.repeated_warnings import RepeatedWarnings
from tidelog.protocol.addresses import address_text

if TYPE_CHECKING:
    from tidelog.broker.network.request import Answer, Deferred
    from tidelog.broker.scheduling.deferred_callbacks import DeferredCallbacks
    from tidelog.broker.scheduling.fair_scheduler import FairScheduler

logger = logging.getLogger("tidelog.server")

BACKLOG = 4096
SWEEP_INTERVAL_S = 30.0
SWEEPS_PER_IDLE_TIME = 4
SWEEP_S_MIN = 0.05
# A request without an answer this long after its own timeout is lost: its connection is closed, so that the client
# tries again. Longer than the slowest answer to a request without a timeout.
OVERDUE_S_MAX = 600.0
# Turns of the loop until an aborted transport is closed.
ABORT_TURNS = 5
# A connection whose request arrives more slowly than this counts as idle.
TRICKLE_BYTES_PER_S = 64
UNREAD_CHECK_S = 1.0
# The smallest send buffer of a connection to a follower. With less, both sides wake up for every piece of an answer.
FOLLOWER_SEND_BYTES = 300_000
# When large requests take all of the bound of receive buffers, small buffers may have so much of it in addition.
SMALL_BUFFERS_SHARE = 1 / 8
# After a connection was closed because the receive buffers are full: the time in which the requests that have partly
# arrived are compared, and the share of the bound that is free when the slowest of them are closed.
ARRIVALS_CHECK_S = 5.0
FREED_SHARE = 1 / 2


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """`receive_bytes_max` bounds the receive buffers of all connections together, `unread_bytes_max` their answers.

    `files_max`: connections get only file descriptors below this number, because logs need some too; 0 means no bound.
    `send_buffer_bytes` and `receive_buffer_bytes` set the system's buffers of a connection; -1 keeps its defaults.
    """

    frame_bytes_max: int
    idle_ms_max: int
    receive_bytes_max: int
    unread_bytes_max: int = 1 << 60
    files_max: int = 0
    send_buffer_bytes: int = -1
    receive_buffer_bytes: int = -1
    connections: ConnectionLimits = field(default_factory=ConnectionLimits)


def bind(host: str, port: int) -> socket.socket:
    """A socket that is bound and does not listen yet. Raises ListenError."""
    try:
        candidates = socket.getaddrinfo(host or "0.0.0.0", port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except socket.gaierror as error:
        raise ListenError(f"cannot listen on {address_text(host, port)}: {error.strerror}") from None
    family, kind, protocol, _, address = candidates[0]
    sock = socket.socket(family, kind, protocol)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind(address)
    except OSError as error:
        sock.close()
        raise ListenError(error.errno, f"cannot listen on {address_text(host, port)}: {error.strerror}") from None
    return sock


class Server:
    """Accepts on bound sockets and hands frames to `dispatch`; implements `ConnectionOwner`."""

    def __init__(
        self,
        limits: ServerLimits,
        dispatch: Callable[[memoryview, KafkaConnection], Answer],
        loop_time: Callable[[], float],
        callbacks: DeferredCallbacks,
        scheduler: FairScheduler,
        protected_listener: str | None = None,
        dispatch_pipelined: Callable[[Sequence[memoryview], KafkaConnection], Sequence[Answer] | None] | None = None,
    ) -> None:
        self.dispatch = dispatch
        self.dispatch_pipelined = dispatch_pipelined
        self.keys_of_nodes: Collection[int] = ()
        self.callbacks = callbacks
        self.scheduler = scheduler
        self.frame_bytes_max = limits.frame_bytes_max
        self.connections: dict[KafkaConnection, None] = {}
        self.receive_bytes = 0
        self.accepted = 0
        self.refused = 0
        self.cut = dict.fromkeys(("malformed", "failed", "buffers", "unread", "idle", "overdue"), 0)
        """Connections closed from this side, by reason."""
        self.on_file_shortage: Callable[[], None] = lambda: None
        """Called with each connection that is refused for want of file descriptors, unless connections have most."""
        self._limits = limits
        self._quotas = ConnectionQuotas(limits.connections, protected_listener)
        self._warnings = RepeatedWarnings(logger, loop_time)
        self._loop_time = loop_time
        self._servers: list[asyncio.Server] = []
        self._sweep: asyncio.TimerHandle | None = None
        self._unread_check: asyncio.TimerHandle | None = None
        self._unread: dict[KafkaConnection, None] = {}
        self._arrivals_check: asyncio.TimerHandle | None = None
        # When a connection became idle, and the state of its unfinished request at the last sweep.
        self._idle_since: dict[KafkaConnection, float] = {}
        self._partial: dict[KafkaConnection, tuple[int, int]] = {}
        # The answers that were overdue at the last sweep.
        self._overdue: dict[KafkaConnection, Deferred] = {}
        # The connections that were closing at the last sweep.
        self._leaving: dict[KafkaConnection, None] = {}

    def reconfigure(self, limits: ServerLimits) -> None:
        """Set new limits. Open connections stay."""
        self._limits = limits
        self._quotas.limits = limits.connections
        self.frame_bytes_max = limits.frame_bytes_max

    async def listen(self, sockets: list[tuple[str, socket.socket]]) -> None:
        """Start accepting; `sockets` are (listener name, bound socket). Raises ListenError."""
        loop = asyncio.get_running_loop()
        for name, sock in sockets:
            self._limit_buffers(sock)
            begin_listening(sock, BACKLOG)
            accept = partial(KafkaConnection, self, name)
            for each in accept_several(sock):
                self._servers.append(await loop.create_server(accept, sock=each, backlog=BACKLOG))

    def _limit_buffers(self, sock: socket.socket) -> None:
        """Set the system's buffers of accepted connections, which inherit them from the listening socket."""
        for option, size_bytes in (
            (socket.SO_SNDBUF, self._limits.send_buffer_bytes),
            (socket.SO_RCVBUF, self._limits.receive_buffer_bytes),
        ):
            if size_bytes > 0 and isinstance(sock, socket.socket):
                sock.setsockopt(socket.SOL_SOCKET, option, size_bytes)

    async def close(self) -> None:
        """Stop accepting, send the finished answers, close every connection."""
        await stop_accepting(self._servers)
        for timer in (self._sweep, self._unread_check, self._arrivals_check):
            if timer is not None:
                timer.cancel()
        for connection in list(self.connections):
            connection.close()
        # Closing transports finish in the next turns of the loop. Those that do not drain are aborted.
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
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(1):
                    await server.wait_closed()

    # ------------------------------------------------------------------------------------------- ConnectionOwner

    def connected(self, connection: KafkaConnection) -> bool:
        try:
            if 0 < self._limits.files_max <= connection.file_number:
                if 2 * len(self.connections) < self._limits.files_max:  # not where clients open too many
                    self.on_file_shortage()
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
        if self._checks_all:
            self._arm_unread_check()
        return True

    def disconnected(self, connection: KafkaConnection) -> None:
        if connection in self.connections:
            del self.connections[connection]
            self._quotas.release(connection.listener_name, connection.host)
        self._idle_since.pop(connection, None)
        self._partial.pop(connection, None)
        self._leaving.pop(connection, None)
        self._overdue.pop(connection, None)
        self._unread.pop(connection, None)

    def reserve_buffer(self, extra_bytes: int) -> bool:
        total_bytes = self.receive_bytes + extra_bytes
        bound_bytes = self._limits.receive_bytes_max
        if extra_bytes < BUFFER_USUAL_BYTES:  # of a new connection, or one with small requests
            bound_bytes += int(bound_bytes * SMALL_BUFFERS_SHARE)
        if extra_bytes > 0 and total_bytes > bound_bytes:
            return False
        self.receive_bytes = total_bytes
        return True

    def widen(self, sock: socket.socket) -> None:
        """Enlarge the send buffer of a connection to a follower, unless the system chooses its size."""
        if 0 < self._limits.send_buffer_bytes < FOLLOWER_SEND_BYTES:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, FOLLOWER_SEND_BYTES)

    def warn(self, kind: str, text: str) -> None:
        """Count and log that a client is cut off. Warnings are rate-limited, because clients can repeat the cause."""
        self.cut[kind] += 1
        self._warnings.warn(kind, text)

    def not_read(self, connection: KafkaConnection) -> None:
        """The client does not read its answers: check all unread answers after a pause."""
        self._unread[connection] = None
        self._arm_unread_check()

    def _arm_unread_check(self) -> None:
        if self._unread_check is None:
            self._unread_check = asyncio.get_running_loop().call_later(UNREAD_CHECK_S, self._check_unread)

    @property
    def _checks_all(self) -> bool:
        """Whether connections may exceed the bound together of which none says `not_read`: each has less than the
        transport reports.
        """
        return len(self.connections) * WRITE_HIGH_WATER_BYTES > self._limits.unread_bytes_max

    # ------------------------------------------------------------------------------------------------------- idle

    def _arm_sweep(self) -> None:
        self._sweep = asyncio.get_running_loop().call_later(self._sweep_s(), self._sweep_idle)

    def _sweep_s(self) -> float:
        idle_ms_max = self._limits.idle_ms_max
        if idle_ms_max < 0:
            return SWEEP_INTERVAL_S
        return min(SWEEP_INTERVAL_S, max(SWEEP_S_MIN, idle_ms_max / 1000 / SWEEPS_PER_IDLE_TIME))

    def _sweep_idle(self) -> None:
        """Free the large buffers of idle connections; close those idle beyond connections.max.idle.ms, or not read
        while their client has disconnected.

        A connection that is still closing at the next sweep is aborted: its client might never read the last answers.
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
            if connection.is_left:
                connection.abort()
                continue
            since = self._idle_since.setdefault(connection, now - sweep_s)
            if 0 <= self._limits.idle_ms_max < (now - since) * 1000:
                self.cut["idle"] += 1
                connection.close()
            else:
                connection.give_back()
        if self.connections:
            self._arm_sweep()

    def _is_overdue(self, connection: KafkaConnection, now: float) -> bool:
        """Whether the connection's next answer was overdue at this sweep and the last one.

        Such an answer never comes, and the client might wait for ever. One sweep is not enough: a process that was
        suspended for long first has many answers to send.
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
        """Whether only a few bytes of the same request have arrived since the last sweep."""
        partial = connection.partial
        before = self._partial.get(connection)
        if partial is None:
            self._partial.pop(connection, None)
            return False
        self._partial[connection] = partial
        return before is not None and before[0] == partial[0] and partial[1] - before[1] < TRICKLE_BYTES_PER_S * seconds

    def _close_the_idlest(self, but_of: str) -> None:
        """Close a connection of another listener: the one that has been idle for longest, or else the oldest."""
        others = [each for each in self.connections if each.listener_name != but_of and not each.is_closing]
        if others:
            never = self._loop_time()
            min(others, key=lambda each: self._idle_since.get(each, never)).close()

    # ------------------------------------------------------------------------------------------------ slow senders

    def buffers_full(self, host: str) -> None:
        """A connection is closed because the buffers are full. Look for those that fill them, and hardly send.

        Otherwise requests that never end would keep out all others that are large.
        """
        self.warn("buffers", f"closing connection from {host}: the node's receive buffers are full")
        if self._arrivals_check is None:
            before = {each: arrival for each in self.connections if (arrival := each.arrival) is not None}
            loop = asyncio.get_running_loop()
            self._arrivals_check = loop.call_later(ARRIVALS_CHECK_S, self._close_the_slowest, before)

    def _close_the_slowest(self, before: dict[KafkaConnection, tuple[bytes, int]]) -> None:
        """Close connections on which the same large request arrives as at the last look, those first that have
        received the fewest bytes since, until a share of the bound is free.
        """
        self._arrivals_check = None
        slow = []
        for connection in self.connections:
            head, received_bytes = connection.arrival or (b"", 0)
            if connection in before and head == before[connection][0] and received_bytes >= before[connection][1]:
                slow.append((received_bytes - before[connection][1], connection))
        bound_bytes = self._limits.receive_bytes_max * (1 - FREED_SHARE)
        for _, connection in sorted(slow, key=itemgetter(0)):
            if self.receive_bytes <= bound_bytes:
                break
            text = "its request arrives more slowly than others, and the node's receive buffers are full"
            self.warn("buffers", f"closing connection from {connection.host}: {text}")
            connection.abort()
            connection.return_buffer()

    # ------------------------------------------------------------------------------------------------ slow readers

    def _check_unread(self) -> None:
        """If the unread answers exceed their bound, abort the connections with the largest ones."""
        self._unread_check = None
        checked = self.connections if self._checks_all else self._unread
        unread = {connection: size for connection in checked if (size := connection.unread_bytes)}
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
        self._unread = dict.fromkeys(unread)
        if self._unread or self._checks_all:
            self._arm_unread_check()
