"""How replication reaches other nodes: what the floor above hands in, so that no module here opens a connection.

`Exchange` is for the cold calls (votes, registrations, ISR changes): a message out, a message back. `Link` is for
fetching replicas: bytes out, bytes back in a callback, in order. Both are implemented in `broker/network/channel.py`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from enum import Enum
from typing import Any, NamedTuple, Protocol, TypeAlias


class Endpoint(NamedTuple):
    """Where a node listens."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class PortState(Enum):
    """What a host said to an attempt to connect: `REFUSES` means that no process listens there."""

    ACCEPTS = "accepts"
    REFUSES = "refuses"
    UNKNOWN = "no answer"


class PeerUnreachable(Exception):
    """No answer came: not connected, cut off, or too late. Whether the request had an effect is unknown.

    `refused`: the host answered that nobody listens there, so the process is gone; never said of one that hangs.
    """

    def __init__(self, message: str, *, refused: bool = False) -> None:
        super().__init__(message)
        self.refused = refused


class Exchange(Protocol):
    """Send one request, get its response. Raises PeerUnreachable.

    Requests of one (endpoint, lane) share a connection and are answered in order: one that may wait at the other end
    (a long poll) has a lane of its own.
    """

    def __call__(
        self, endpoint: Endpoint, request: Any, version: int, *, timeout_ms: int, lane: str = ""
    ) -> Awaitable[Any]: ...


# The body of one response, valid only during the call; None: the link broke before it came.
OnResponse: TypeAlias = "Callable[[memoryview | None], None]"


class Link(Protocol):
    """One connection, made on the first request. Once broken it stays so: every open request gets None."""

    def request(self, api_key: int, version: int, body: bytes | bytearray, on_response: OnResponse) -> None:
        """`body`: the request behind its header. Answers come in the order of the requests."""
        ...

    @property
    def refused(self) -> bool:
        """Whether it broke because nobody listens at the other end."""
        ...

    def close(self) -> None:
        """Open requests get None."""
        ...


Connect = Callable[[Endpoint], Link]
