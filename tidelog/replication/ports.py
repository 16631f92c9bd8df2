"""The interfaces through which replication reaches other nodes, so that no module here opens a connection.

`Exchange` is for rare calls (votes, registrations, ISR changes): it sends a message and returns the response. `Link` is
for replica fetches: it sends bytes and passes the response bytes to a callback, in order. `broker/network/channel.py`
implements both.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from enum import Enum
from typing import Any, NamedTuple, Protocol, TypeAlias

from tidelog.protocol.addresses import address_text


class Endpoint(NamedTuple):
    """Where a node listens."""

    host: str
    port: int

    def __str__(self) -> str:
        return address_text(self.host, self.port)


class PortState(Enum):
    """The result of an attempt to connect. `REFUSES` means that no process listens on the port."""

    ACCEPTS = "accepts"
    REFUSES = "refuses"
    UNKNOWN = "no answer"


class PeerUnreachable(Exception):
    """No response: no connection, a lost connection, or a timeout. The effect of the request is unknown.

    `refused`: the host refused the connection, so the process is gone. A process that hangs does not cause it.
    """

    def __init__(self, message: str, *, refused: bool = False) -> None:
        super().__init__(message)
        self.refused = refused


class Exchange(Protocol):
    """Send one request, get its response. Raises PeerUnreachable.

    A response that goes on arriving may take longer than the timeout. `on_arriving` is called as it goes on.

    Requests of one (endpoint, lane) share a connection and are answered in order. A request that may wait at the other
    end (a long poll) has a lane of its own.
    """

    def __call__(
        self,
        endpoint: Endpoint,
        request: Any,
        version: int,
        *,
        timeout_ms: int,
        lane: str = "",
        on_arriving: Callable[[], None] | None = None,
    ) -> Awaitable[Any]: ...


# Receives the body of one response, valid only during the call, or None if the link broke before.
OnResponse: TypeAlias = "Callable[[memoryview | None], None]"


class Link(Protocol):
    """One connection, opened by the first request. A broken link stays broken, and its open requests get None."""

    def request(self, api_key: int, version: int, body: bytes | bytearray, on_response: OnResponse) -> None:
        """`body`: the request after its header. Responses come in the order of the requests."""
        ...

    @property
    def refused(self) -> bool:
        """Whether the link broke because no process listens at the other end."""
        ...

    @property
    def reason(self) -> str:
        """Why the link broke."""
        ...

    @property
    def arrived_bytes(self) -> int:
        """The bytes of the present answer that have arrived. It is not whole yet."""
        ...

    def close(self) -> None:
        """Open requests get None."""
        ...


Connect = Callable[[Endpoint], Link]
