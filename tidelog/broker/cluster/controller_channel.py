"""The active controller, wherever it is: in this process or at the other end of a connection.

Finds it, sends, and tries again while it moves; what is said to it is the callers' business. Requests of clients that
only the controller can answer travel in an Envelope (KIP-590). Invariant: a caller gets an answer of a controller that
was active when it answered, or REQUEST_TIMED_OUT.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from struct import Struct
from typing import TYPE_CHECKING, Any

from tidelog.broker.network.channel import response_type
from tidelog.protocol.api import request_header_version, response_header_version
from tidelog.protocol.errors import ErrorCode, KafkaError
from tidelog.protocol.messages.create_topics import (
    CreatableReplicaAssignment,
    CreatableTopic,
    CreatableTopicConfig,
    CreateTopicsRequest,
)
from tidelog.protocol.messages.envelope import EnvelopeRequest
from tidelog.replication.backoff import Backoff
from tidelog.replication.ports import Endpoint, Exchange, PeerUnreachable

if TYPE_CHECKING:
    import random

    from tidelog.replication.controller.decisions.state import NewTopic

CREATE_TOPICS_VERSION = 7
ENVELOPE_VERSION = 0
BACKOFF_MIN_MS = 20
BACKOFF_MAX_MS = 500
TIMEOUT_MS = 30_000
FORWARDED_AT_ONCE_MAX = 32
FORWARDING_GRACE_MS = 500
_HEADER = Struct(">hhih")  # API key, version, correlation id, length of a client id: none

# Kafka's DefaultPrincipalData, version 0: User:ANONYMOUS, not by token. There is nobody else without security.
_ANONYMOUS = b"\x00\x00\x05User\x0aANONYMOUS\x00\x00"

Local = Callable[[Any, int], Awaitable[Any]]


class _Lanes:
    """A connection for each request of clients that is under way, up to a bound; the rest wait for their turn.

    On a shared one an answer waits for those before it, and a request whose time is up takes the connection with it:
    the others would be sent again, and what they asked for might be done twice.
    """

    def __init__(self, count: int) -> None:
        self._free = [f"forward-{number}" for number in reversed(range(count))]
        self._turn = asyncio.Semaphore(count)

    @contextlib.asynccontextmanager
    async def one(self, timeout_ms: float) -> AsyncIterator[str]:
        """Its name. Raises KafkaError(REQUEST_TIMED_OUT)."""
        try:
            async with asyncio.timeout(timeout_ms / 1000):
                await self._turn.acquire()
        except TimeoutError:
            raise KafkaError(ErrorCode.REQUEST_TIMED_OUT, "too many requests to the controller are under way") from None
        lane = self._free.pop()  # the one used last, whose connection is there
        try:
            yield lane
        finally:
            self._free.append(lane)
            self._turn.release()


def forwarding_ms(request: Any) -> int:
    """How long a client's request may take: as long as the client waits, and a moment for the controller's own word."""
    timeout_ms = getattr(request, "timeout_ms", 0)
    return min(timeout_ms + FORWARDING_GRACE_MS, TIMEOUT_MS) if timeout_ms > 0 else TIMEOUT_MS


class ControllerChannel:
    """`local(request, version)` answers as the active controller; `is_local` says whether this node is it.

    `leader()` is where the active controller listens, None while nobody knows.
    """

    def __init__(
        self,
        *,
        is_local: Callable[[], bool],
        local: Local,
        leader: Callable[[], Endpoint | None],
        exchange: Exchange,
        loop: asyncio.AbstractEventLoop,
        rng: random.Random,
    ) -> None:
        self.is_local = is_local
        self._local = local
        self._leader = leader
        self._exchange = exchange
        self._loop = loop
        self._rng = rng
        self._lanes = _Lanes(FORWARDED_AT_ONCE_MAX)
        self._moved = asyncio.Event()

    def leader_changed(self) -> None:
        """Another controller leads, or none: who waits for the one before, which may hang, asks the next."""
        self._moved.set()
        self._moved = asyncio.Event()

    async def attempt(self, request: Any, version: int, *, timeout_ms: int, lane: str = "controller") -> Any:
        """Once. Raises PeerUnreachable, also while no controller is known."""
        if self.is_local():
            return await self._local(request, version)
        endpoint = self._leader()
        if endpoint is None:
            raise PeerUnreachable("no active controller is known")
        return await self._exchange(endpoint, request, version, timeout_ms=timeout_ms, lane=lane)

    async def _attempt_while_it_leads(self, request: Any, version: int, *, timeout_ms: int, lane: str) -> Any:
        """As `attempt`, and PeerUnreachable as soon as another controller is known to lead."""
        endpoint = self._leader()
        if self.is_local() or endpoint is None:
            return await self.attempt(request, version, timeout_ms=timeout_ms, lane=lane)
        attempt = self._loop.create_task(self.attempt(request, version, timeout_ms=timeout_ms, lane=lane))
        watch = self._loop.create_task(self._until_another_leads(endpoint))
        try:
            await asyncio.wait((attempt, watch), return_when=asyncio.FIRST_COMPLETED)
            if attempt.done():
                return attempt.result()
            raise PeerUnreachable(f"{endpoint} is no longer the active controller")
        finally:
            for task in (attempt, watch):
                task.cancel()
            await asyncio.gather(attempt, watch, return_exceptions=True)

    async def _until_another_leads(self, endpoint: Endpoint) -> None:
        while self._leader() in (None, endpoint) and not self.is_local():
            await self._moved.wait()

    async def call(self, request: Any, version: int, *, timeout_ms: int = TIMEOUT_MS, lane: str = "controller") -> Any:
        """Until a controller has answered that is the active one. Raises KafkaError(REQUEST_TIMED_OUT).

        A request may take effect twice when the controller dies before its answer: only for what may.
        """
        deadline = self._loop.time() + timeout_ms / 1000
        backoff = Backoff(BACKOFF_MIN_MS, BACKOFF_MAX_MS)
        while (left_s := deadline - self._loop.time()) > 0:
            try:
                left_ms = max(1, int(left_s * 1000))
                response = await self._attempt_while_it_leads(request, version, timeout_ms=left_ms, lane=lane)
                if getattr(response, "error_code", 0) != ErrorCode.NOT_CONTROLLER:
                    return response
            except PeerUnreachable:
                pass
            await asyncio.sleep(min(left_s, backoff.next_ms(self._rng) / 1000))
        raise KafkaError(ErrorCode.REQUEST_TIMED_OUT, "the active controller could not be reached in time")

    async def _call_apart(self, request: Any, version: int, timeout_ms: int) -> Any:
        """As `call`, on a connection that carries nothing else meanwhile; on none where this node is the controller."""
        if self.is_local():
            with contextlib.suppress(PeerUnreachable):
                response = await self.attempt(request, version, timeout_ms=timeout_ms)
                if getattr(response, "error_code", 0) != ErrorCode.NOT_CONTROLLER:
                    return response
        deadline = self._loop.time() + timeout_ms / 1000
        async with self._lanes.one(timeout_ms) as lane:
            left_ms = max(1, int((deadline - self._loop.time()) * 1000))
            return await self.call(request, version, timeout_ms=left_ms, lane=lane)

    async def forward(self, request: bytes, client_host: str, timeout_ms: int = TIMEOUT_MS) -> bytes:
        """A client's request, header included, to the controller; its response, header included."""
        try:
            address = ipaddress.ip_address(client_host).packed
        except ValueError:
            address = bytes(4)
        envelope = EnvelopeRequest(request_data=request, request_principal=_ANONYMOUS, client_host_address=address)
        response = await self._call_apart(envelope, ENVELOPE_VERSION, timeout_ms)
        if response.error_code:
            raise KafkaError(ErrorCode(response.error_code))
        data = response.response_data
        if data is None:
            raise KafkaError(ErrorCode.UNKNOWN_SERVER_ERROR, "an empty envelope came back")
        return bytes(data)

    async def forward_message(self, request: Any, version: int, client_host: str) -> Any:
        """The same for what this broker has made of a client's request; the response message. Raises KafkaError."""
        key = request.API_KEY
        tags = b"\0" if request_header_version(key, version) == 2 else b""
        response = await self.forward(_HEADER.pack(key, version, 0, -1) + tags + request.encode(version), client_host)
        header_bytes = 5 if response_header_version(key, version) == 1 else 4
        return response_type(type(request)).decode(response[header_bytes:], version)

    async def create_topics(self, topics: Sequence[NewTopic]) -> dict[str, KafkaError | None]:
        """Each topic's outcome, None where it was created. Raises KafkaError(REQUEST_TIMED_OUT)."""
        request = CreateTopicsRequest(topics=[_creatable(topic) for topic in topics], timeout_ms=TIMEOUT_MS)
        deadline = self._loop.time() + TIMEOUT_MS / 1000
        while True:
            response = await self._call_apart(request, CREATE_TOPICS_VERSION, TIMEOUT_MS)
            outcomes = {one.name: _outcome(one.error_code, one.error_message) for one in response.topics}
            moved = any(error is not None and error.code == ErrorCode.NOT_CONTROLLER for error in outcomes.values())
            if not moved or self._loop.time() > deadline:
                return outcomes
            await asyncio.sleep(BACKOFF_MIN_MS / 1000)


def _creatable(topic: NewTopic) -> CreatableTopic:
    return CreatableTopic(
        name=topic.name,
        num_partitions=topic.partition_count,
        replication_factor=topic.replication_factor,
        assignments=[
            CreatableReplicaAssignment(partition_index=index, broker_ids=list(brokers))
            for index, brokers in topic.assignments
        ],
        configs=[CreatableTopicConfig(name=name, value=value) for name, value in topic.configs],
    )


def _outcome(code: int, message: str | None) -> KafkaError | None:
    return KafkaError(ErrorCode(code), message) if code else None
