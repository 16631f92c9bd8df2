"""Begins to listen on bound sockets, and ends it so that the owner knows every connection that was accepted.

asyncio's own loop accepts in one turn, creates the transport in the next, and calls the protocol in the third. If a
server is closed between the first two (Python 3.11 to 3.13), the accepted socket stays open without an owner. `end` is
for the sockets that a fork has, too.
"""

from __future__ import annotations

import asyncio
import contextlib
import select
import socket
from collections.abc import Iterable
from typing import Any

from tidelog.protocol.addresses import address_text

# Connections of one listener, in one turn of the loop.
ACCEPTED_PER_TURN = 16
TIMER_S = 0.001
TURNS = 3
# Linux alone tells that the other end has closed, before all that it sent is read.
_CLOSED = getattr(select, "POLLRDHUP", 0)


class ListenError(OSError):
    """A listener could not be bound, or cannot listen. The text is written for the user."""

    def __str__(self) -> str:
        return self.strerror or super().__str__()


def begin_listening(sock: Any, backlog: int) -> None:
    """Listen on a bound socket, before an event loop gets it. Raises ListenError.

    Several sockets may be bound to one port as long as none of them listens: those of two nodes that start at once, or
    of one node's clients and metrics. uvloop does not report that listening fails: the node would be ready, and no
    client could connect to it.
    """
    if not isinstance(sock, socket.socket):
        return  # one of a simulation
    try:
        sock.listen(backlog)
    except OSError as error:
        host, port = sock.getsockname()[:2]
        where = address_text(host, port)
        raise ListenError(error.errno, f"cannot listen on {where}: {error.strerror}") from None


def accept_several(sock: Any) -> list[Any]:
    """The socket, and copies for the event loop to accept on as well, so that one turn accepts several connections.

    libuv accepts one connection for each socket in a turn. In turns of a few milliseconds a thousand connections would
    wait for seconds, and beyond the backlog the system drops their first packets. `sock` listens already.
    """
    if not isinstance(sock, socket.socket):
        return [sock]  # one of a simulation
    return [sock, *(sock.dup() for _ in range(ACCEPTED_PER_TURN - 1))]


async def stop_accepting(servers: Iterable[asyncio.Server]) -> None:
    """Close the servers. Afterwards `connection_made` has been called for each accepted connection."""
    # A turn of the loop handles timers last. A task that a timer wakes continues in the next turn, after the transports
    # of the connections accepted in this turn are created, and before the listening socket is polled again.
    await asyncio.sleep(TIMER_S)
    for server in servers:
        for sock in server.sockets:
            end(sock)
        server.close()
    for _ in range(TURNS):
        await asyncio.sleep(0)


def end(sock: Any) -> None:
    """End a socket before it is closed: a close alone leaves it open if a fork of this process has it too.

    `sock` is a socket, or what an event loop shows of one. What uvloop shows has no `shutdown`: then nothing is done.
    """
    with contextlib.suppress(OSError, TypeError, AttributeError):
        sock.shutdown(socket.SHUT_RDWR)


def has_ended(sock: Any) -> bool:
    """Whether the other end has closed the connection. `sock` as for `end`."""
    poll = select.poll()
    try:
        poll.register(sock, _CLOSED)
        return bool(poll.poll(0))
    except (OSError, TypeError, ValueError):
        return False  # one of a simulation
