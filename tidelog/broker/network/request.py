"""One request from a handler's view: its context, and answers that come later.

Knows no connection, socket or API: `connection` handles order and framing, `dispatch` decodes and encodes.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeAlias, TypeVar

from tidelog.protocol.errors import KafkaError
from tidelog.protocol.hot import Buffer

if TYPE_CHECKING:
    from tidelog.broker.network.counters import ApiCounters

logger = logging.getLogger("tidelog.dispatch")

Response = TypeVar("Response")


class Peer(Protocol):
    """The client's connection, as far as a handler may use it."""

    host: str
    listener_name: str
    known_key: int
    """The API whose requests on this connection do not wait behind those of others; -1 for none."""
    costly_waits: int
    """So often its next requests wait with those of other connections of which one took long."""
    produce_topic_at: int
    """What its last Produce says of the next one (`protocol/hot.py:note_head`)."""

    @property
    def is_gone(self) -> bool:
        """Whether the client has disconnected. A connection that is not read does not notice it."""
        ...

    def close(self) -> None: ...

    def send_much(self) -> None:
        """Most answers are large: enlarge the send buffer."""
        ...

    def on_close(self, callback: Callable[[], None]) -> None:
        """Call back when the connection is closed."""
        ...


class RequestContext:
    """The decoded request header and the client's address.

    `connection` is None for internal requests: this node's own calls, and requests forwarded in an envelope.
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
    """An answer that comes later. It is completed exactly once, on the loop thread.

    It uses a plain callback, not an asyncio future: completing it runs the connection's writer at once, so a parked
    request costs no extra turn of the loop.
    """

    delays: Collection[int] = ()
    """The API keys of the later requests of its connection that are served after it (`order_of_requests`)."""

    __slots__ = ("_on_complete", "exclusive", "is_abandoned", "on_abandon", "on_release", "response", "timing")

    def __init__(self, exclusive: bool = False) -> None:
        self.exclusive = exclusive  # the connection's next request waits until this one is answered, or released
        self.is_abandoned = False
        self.on_release: Callable[[], None] | None = None  # called when the next request need not wait any more
        self.response: Any = None
        self.on_abandon: Callable[[], None] | None = None  # called when the client has disconnected
        self.timing: tuple[ApiCounters, float] | None = None  # the counters of its API, and the start time
        self._on_complete: Callable[[Any], None] | None = None

    def complete(self, response: Any) -> None:
        """Complete the answer. `response` None: this broker failed, so the connection is closed without an answer."""
        assert self.response is None, "a request is answered once"
        self.response = response
        self.on_abandon = None  # a cycle with what waits, and the response, which the collector alone would free
        timing, callback = self.timing, self._on_complete
        if callback is not None:
            self._on_complete = None  # once, also if a failure follows
            callback(response)
        if timing is not None:  # counted after the answer is sent, because the client waits for it
            timing[0].answered(timing[1])

    def complete_as(self, answer: Answer) -> None:
        """Complete it with another answer to the same request, now or when that one is complete. While it waits for
        one that is not exclusive, the connection is read again, and so notices that the client disconnects.
        """
        if not isinstance(answer, Deferred):
            self.complete([] if answer is None else answer)
            return
        answer.on_complete(self.complete)
        if self.response is not None:
            return
        if self.is_abandoned:
            answer.abandon()
            return
        self.on_abandon = answer.abandon
        if answer.exclusive:
            answer.on_release = self._release
        else:
            self._release()

    def _release(self) -> None:
        if self.on_release is not None:
            self.on_release()

    def abandon(self) -> None:
        """The client has disconnected."""
        self.is_abandoned = True
        callback, self.on_abandon = self.on_abandon, None
        if callback is not None:
            callback()

    def overdue_s(self, waited_s: float, loop_time_s: float) -> float:
        """The time since the end of the wait that the request allows. By default a request allows none."""
        return waited_s

    def failed(self, error: BaseException) -> None:
        """A bug here: end the request, so that the client does not wait for ever."""
        logger.error("a waiting request failed", exc_info=error)
        if self.response is None:
            self.complete(None)

    def on_complete(self, callback: Callable[[Any], None]) -> None:
        """Set the callback, which runs at once if the answer is complete already. Dispatch calls this once."""
        if self.response is not None:
            callback(self.response)
        else:
            self._on_complete = callback


NOT_YET: Final = Deferred()
"""The answer to a request for which there is no room yet: it stays as it is in its connection's buffer."""


CLOSED: Final[list[Buffer]] = []
"""The answer to a request that has failed and has none: the connection is closed behind the answers before it."""


async def completed(answer: Deferred) -> Any:
    """Await the response of a Deferred. Raises the response if it is a KafkaError."""
    waiter: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    def on_complete(response: Any) -> None:
        if not waiter.done():
            waiter.set_result(response)

    answer.on_complete(on_complete)
    response = await waiter
    if isinstance(response, KafkaError):
        raise response
    return response


# Frames to write in order, a Deferred that will hold them, or None for a request without a response (acks=0).
Answer: TypeAlias = "Buffer | list[Buffer] | Deferred | None"


def gather(calls: Sequence[Callable[[], Any]], response: Callable[[list[Any]], Response]) -> Response | Deferred:
    """`response` of the results of all `calls`, in their order. It is a Deferred if a call returns an open Deferred.

    A KafkaError that a call raises, or that completes its Deferred, is the result of this call.
    """
    results: list[Any] = [None] * len(calls)
    missing = len(calls)
    deferred: Deferred | None = None

    def arrived(index: int, answer: Any) -> None:
        nonlocal missing
        results[index] = answer
        missing -= 1
        if missing == 0 and deferred is not None:
            try:
                gathered = response(results)
            except Exception as error:
                deferred.failed(error)
            else:
                deferred.complete(gathered)

    for index, call in enumerate(calls):
        try:
            answer = call()
        except KafkaError as error:
            answer = error.with_traceback(None)
        if isinstance(answer, Deferred):
            answer.on_complete(partial(arrived, index))
        else:
            arrived(index, answer)
    if missing == 0:
        return response(results)
    deferred = Deferred()
    return deferred
