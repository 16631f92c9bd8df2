"""One request as a handler sees it: who asks, and how the answer may come later.

Knows no connection, socket or API: order and framing belong to `connection`, decoding and encoding to `dispatch`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeVar

from tidelog.protocol.errors import KafkaError
from tidelog.protocol.hot import Buffer

if TYPE_CHECKING:
    from tidelog.broker.network.counters import ApiCounters

logger = logging.getLogger("tidelog.dispatch")

Response = TypeVar("Response")


class Peer(Protocol):
    """The other end, as far as a handler may know it."""

    host: str
    listener_name: str

    def close(self) -> None: ...

    def send_much(self) -> None:
        """Most of what is answered is large: let more of it be on its way at once."""
        ...

    def on_close(self, callback: Callable[[], None]) -> None:
        """Call back once the other end is gone."""
        ...


class RequestContext:
    """Who asks, and in which version: the decoded request header plus the peer's address.

    `connection` is None for what comes from inside: this node's own calls, and requests forwarded in an envelope.
    """

    __slots__ = ("api_key", "api_version", "client_host", "client_id", "connection", "correlation_id", "listener_name")

    def __init__(
        self,
        api_key: int,
        api_version: int,
        correlation_id: int,
        client_id: str | None,
        client_host: str,
        listener_name: str,
        connection: Peer | None = None,
    ) -> None:
        self.api_key = api_key
        self.api_version = api_version
        self.correlation_id = correlation_id
        self.client_id = client_id
        self.client_host = client_host
        self.listener_name = listener_name
        self.connection = connection


class Deferred:
    """One answer that comes later: completed exactly once, on the loop thread.

    A plain callback rather than an asyncio future: completing it runs the connection's writer at once, so that a
    parked request costs no extra turn of the loop.
    """

    __slots__ = ("_on_complete", "exclusive", "on_abandon", "response", "timing")

    def __init__(self, exclusive: bool = False) -> None:
        self.exclusive = exclusive  # the connection's next request waits until this one is answered
        self.response: Any = None
        self.on_abandon: Callable[[], None] | None = None  # the client is gone: nobody will read the answer
        self.timing: tuple[ApiCounters, float] | None = None  # of whom it is counted, and when the request came
        self._on_complete: Callable[[Any], None] | None = None

    def complete(self, response: Any) -> None:
        """`response` None: there will be no answer, because this broker failed; the connection is closed."""
        assert self.response is None, "a request is answered once"
        self.response = response
        timing, callback = self.timing, self._on_complete
        if callback is not None:
            self._on_complete = None  # it holds the connection's place for this answer, which holds this
            callback(response)
        if timing is not None:  # counted when it has left: somebody waits for it
            timing[0].answered(timing[1])

    def overdue_s(self, waited_s: float, loop_time_s: float) -> float:
        """How long ago the time was up for which the client agreed to wait, as far as the request says so."""
        return waited_s

    def failed(self, error: BaseException) -> None:
        """A bug of ours: who waits is not left waiting for ever."""
        logger.error("a request that waited failed", exc_info=error)
        if self.response is None:
            self.complete(None)

    def on_complete(self, callback: Callable[[Any], None]) -> None:
        """Called by dispatch, once; runs the callback at once if the answer is there already."""
        if self.response is not None:
            callback(self.response)
        else:
            self._on_complete = callback


async def completed(answer: Deferred) -> Any:
    """The response of a Deferred. Raises KafkaError where it is one."""
    waiter: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    def on_complete(response: Any) -> None:
        if not waiter.done():
            waiter.set_result(response)

    answer.on_complete(on_complete)
    response = await waiter
    if isinstance(response, KafkaError):
        raise response
    return response


# Frames ready to be written in order, a Deferred that will hold them, or None where no response is due (acks=0).
Answer: TypeAlias = "Buffer | list[Buffer] | Deferred | None"


def gather(calls: Sequence[Callable[[], Any]], response: Callable[[list[Any]], Response]) -> Response | Deferred:
    """`response` of what all `calls` say, in their order: at once, or as a Deferred when one of them is.

    A KafkaError that a call raises, or that a Deferred is completed with, stands in its place.
    """
    found: list[Any] = [None] * len(calls)
    missing = len(calls)
    deferred: Deferred | None = None

    def arrived(index: int, answer: Any) -> None:
        nonlocal missing
        found[index] = answer
        missing -= 1
        if missing == 0 and deferred is not None:
            try:
                gathered = response(found)
            except Exception as error:
                deferred.failed(error)
            else:
                deferred.complete(gathered)

    for index, call in enumerate(calls):
        try:
            answer = call()
        except KafkaError as error:
            answer = error
        if isinstance(answer, Deferred):
            answer.on_complete(partial(arrived, index))
        else:
            arrived(index, answer)
    if missing == 0:
        return response(found)
    deferred = Deferred()
    return deferred
