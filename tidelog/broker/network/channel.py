"""Connections to other nodes of the cluster: they send requests and receive the answers in the same order.

`Channel` implements replication's `Link` (bytes and a callback, for fetching replicas), `Channels.exchange` implements
`Exchange` (a request message, a response message). The callers choose the node and retry. Invariant: a broken channel
stays broken, and each of its unanswered requests gets its callback once, with None.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
import struct
import sys
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor
from functools import partial
from struct import Struct
from typing import Any, cast

from tidelog.protocol.api import request_header_version, response_header_version
from tidelog.protocol.errors import MalformedMessage
from tidelog.protocol.messages.api_versions import ApiVersionsRequest
from tidelog.replication.answer_size import ARRIVING_BYTES
from tidelog.replication.ports import Endpoint, OnResponse, PeerUnreachable, PortState

BUFFER_INITIAL_BYTES = 64 * 1024
# A fetch response has at most replica.fetch.response.max.bytes, or one larger batch.
FRAME_BYTES_MAX = 256 * 1024 * 1024
IN_FLIGHT_MAX = 1024
CHANNELS_MAX = 1024
CONNECT_TIMEOUT_S = 10.0
API_VERSIONS_VERSION = 3
ANSWER_TIMEOUT_MS = 10_000
# An answer that goes on arriving is awaited for so many timeouts, and looked at so often within one.
ARRIVING_TIMEOUTS_MAX = 64
LOOKS = 4
# A connection with this many unanswered `sign_of_life` requests is replaced: a full one would look like a refusal.
LIFE_UNANSWERED_MAX = 8

_FRAME = Struct(">i4si")  # size, API key and version, correlation id
_read_int32 = Struct(">i").unpack_from
# Size, correlation id, and the number of tags of a header of version 1.
_answer_head = Struct(">iiB").unpack_from
_ANSWER_BYTES_MIN = 9


async def _connect(
    loop: asyncio.AbstractEventLoop,
    protocol: Callable[[], asyncio.BaseProtocol],
    endpoint: Endpoint,
    resolver: Executor | None,
) -> asyncio.Transport:
    """Connect to the first address of the host that accepts. Raises OSError."""
    try:
        addresses = await _addresses(loop, endpoint, resolver)
    except UnicodeError as error:  # a part of the name is empty, or longer than 63 characters
        raise OSError(str(error)) from None
    for address in addresses[:-1]:
        with contextlib.suppress(OSError):
            transport, _ = await loop.create_connection(protocol, address, endpoint.port)
            return transport
    transport, _ = await loop.create_connection(protocol, addresses[-1], endpoint.port)
    return transport


async def _addresses(loop: asyncio.AbstractEventLoop, endpoint: Endpoint, resolver: Executor | None) -> list[str]:
    """The addresses of a host in the resolver's order.

    uvloop would look a name up on threads of its own, and abort the process when it gets none.
    """
    try:
        ipaddress.ip_address(endpoint.host)
    except ValueError:
        if resolver is None:
            entries = await loop.getaddrinfo(endpoint.host, endpoint.port, type=socket.SOCK_STREAM)
        else:
            look_up = partial(socket.getaddrinfo, endpoint.host, endpoint.port, type=socket.SOCK_STREAM)
            entries = await loop.run_in_executor(resolver, look_up)
        # The last of an IPv6 address's four parts is its scope.
        texts = (f"{place[0]}%{place[3]}" if len(place) == 4 and place[3] else str(place[0]) for *_, place in entries)
        return list(dict.fromkeys(texts))
    return [endpoint.host]


class Channel(asyncio.BufferedProtocol):
    """One connection. The constructor starts to connect; requests wait until then."""

    __slots__ = (
        "_buffer", "_client_id", "_connecting", "_correlation_id", "_end", "_headers", "_loop", "_on_broken", "_open",
        "_queued", "_resolver", "_start", "_transport", "broken", "endpoint", "reason", "refused",
    )  # fmt: skip

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        endpoint: Endpoint,
        client_id: str,
        on_broken: Callable[[Channel], None] | None = None,
        resolver: Executor | None = None,
    ) -> None:
        self.endpoint = endpoint
        self.broken = False
        self.refused = False
        self.reason = ""
        self._loop = loop
        self._client_id = client_id.encode()
        self._headers: dict[tuple[int, int], tuple[bytes, bytes, int]] = {}
        self._on_broken = on_broken
        self._resolver = resolver
        self._buffer = memoryview(bytearray(BUFFER_INITIAL_BYTES))
        self._start = self._end = 0
        self._open: deque[tuple[int, int, OnResponse]] = deque()
        self._queued: list[bytes] | None = []
        self._correlation_id = 0
        self._transport: asyncio.Transport | None = None
        self._connecting = loop.create_task(self._connect(), name=f"connect to {endpoint}")

    async def _connect(self) -> None:
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                await _connect(self._loop, lambda: self, self.endpoint, self._resolver)
        except (OSError, TimeoutError) as error:
            self.refused = isinstance(error, ConnectionRefusedError)
            self._break(str(error) or "connecting took too long")

    # -- Link --------------------------------------------------------------------------------------------------------

    def request(self, api_key: int, version: int, body: bytes | bytearray, on_response: OnResponse) -> None:
        if self.broken or len(self._open) >= IN_FLIGHT_MAX:
            self._loop.call_soon(on_response, None)
            return
        correlation_id = self._correlation_id = (self._correlation_id + 1) & 0x7FFFFFFF
        begin, end, answer_version = self._headers.get((api_key, version)) or self._learn_headers(api_key, version)
        frame = _FRAME.pack(8 + len(end) + len(body), begin, correlation_id) + end + body
        self._open.append((correlation_id, answer_version, on_response))
        if self._transport is not None:
            self._transport.write(frame)
        elif self._queued is not None:
            self._queued.append(frame)

    def _learn_headers(self, api_key: int, version: int) -> tuple[bytes, bytes, int]:
        """A request's header before and after the correlation id, and the version of the response header."""
        begin = struct.pack(">hh", api_key, version)
        client_id = struct.pack(">h", len(self._client_id)) + self._client_id
        end = client_id + b"\0" if request_header_version(api_key, version) == 2 else client_id
        headers = self._headers[api_key, version] = begin, end, response_header_version(api_key, version)
        return headers

    @property
    def unanswered(self) -> int:
        """The number of requests without an answer, including those whose callers no longer wait."""
        return len(self._open)

    @property
    def arrived_bytes(self) -> int:
        return self._end - self._start

    def arrived_bytes_for(self, on_response: OnResponse) -> int:
        """`arrived_bytes`; 0 if the present answer is another request's."""
        return self.arrived_bytes if self._open and self._open[0][2] is on_response else 0

    def close(self) -> None:
        self.give_up("closed")

    def give_up(self, reason: str) -> None:
        """Close the connection from this side, for `reason`."""
        self._break(reason)

    async def closed(self) -> None:
        """After `close`: wait until the connecting task has ended."""
        with contextlib.suppress(asyncio.CancelledError):
            await self._connecting

    # -- asyncio's protocol ------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        if self.broken:
            self._transport.abort()
            return
        queued, self._queued = self._queued, None
        if queued:
            self._transport.writelines(queued)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._break(str(exc) if exc else "the connection was closed")

    def eof_received(self) -> bool:
        return False

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._buffer[self._end :] if self._end else self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        if self._end or nbytes < _ANSWER_BYTES_MIN or not self._take_usual(nbytes):
            self._end += nbytes
            self._take_answers()

    def _take_usual(self, size_bytes: int) -> bool:
        """`_take_answers` for a buffer that holds one whole answer with a usual header. False, without a change, for
        any other buffer.
        """
        buffer, unanswered = self._buffer, self._open
        size, correlation_id, tags = _answer_head(buffer)
        if size + 4 != size_bytes or not unanswered:
            return False
        expected_id, header_version, on_response = unanswered[0]
        if correlation_id != expected_id or tags or not header_version:
            return False
        unanswered.popleft()
        try:
            on_response(buffer[_ANSWER_BYTES_MIN:size_bytes])
        except (MalformedMessage, IndexError) as error:
            self._break(f"an answer that cannot be read: {error}")
        return True

    def _take_answers(self) -> None:
        start, end, buffer = self._start, self._end, self._buffer
        size = 0
        while end - start >= 4:
            size = _read_int32(buffer, start)[0]
            if not 4 <= size <= FRAME_BYTES_MAX:
                self._break(f"an answer of {size} bytes")
                return
            stop = start + 4 + size
            if stop > end:
                break
            try:
                if not self._open:
                    raise MalformedMessage("nothing was asked")
                correlation_id, header_version, on_response = self._open[0]
                if _read_int32(buffer, start + 4)[0] != correlation_id:
                    raise MalformedMessage("it is out of order")
                body = start + 8
                if header_version:
                    if body == stop:
                        raise MalformedMessage("it ends in its header")
                    body = body + 1 if buffer[body] == 0 else start + 4 + _after_tags(buffer[start + 4 : stop])
                self._open.popleft()
                on_response(buffer[body:stop])
            except (MalformedMessage, IndexError) as error:
                self._break(f"an answer that cannot be read: {error}")
                return
            if self.broken:
                return
            start, size = stop, 0
        self._start = start
        if start == end:
            self._start = self._end = 0
        else:
            self._make_room(4 + size)

    def _make_room(self, frame_bytes: int) -> None:
        """Make room for the rest of the current frame. The buffer grows with the received bytes, not the frame size."""
        start, end, capacity = self._start, self._end, len(self._buffer)
        if start + frame_bytes <= capacity and end < capacity:
            return
        kept = self._buffer[start:end]
        target = self._buffer if frame_bytes <= capacity else memoryview(bytearray(min(frame_bytes, 2 * capacity)))
        if target is not self._buffer or start:
            target[: end - start] = bytes(kept) if target is self._buffer else kept
        self._buffer = target
        self._start, self._end = 0, end - start

    def _break(self, reason: str) -> None:
        if self.broken:
            return
        self.broken = True
        self.reason = reason
        self._queued = None
        if self._transport is not None:
            self._transport.abort()
        elif not self._connecting.done() and asyncio.current_task(self._loop) is not self._connecting:
            self._connecting.cancel()
        if self._on_broken is not None:
            self._on_broken(self)
        while self._open:
            self._open.popleft()[2](None)


def _after_tags(frame: memoryview) -> int:
    """The position after a response header of version 1. Nodes of a cluster may put tags there, but do not."""
    position = 5
    for _ in range(frame[4]):
        position += 2 + frame[position + 1]
    return position


class Channels:
    """This node's connections to other nodes: one per (endpoint, lane), opened on first use.

    `resolver` looks up the names of hosts, the event loop without it.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, client_id: str, resolver: Executor | None = None) -> None:
        self._loop = loop
        self._resolver = resolver
        self._client_id = client_id
        self._channels: dict[tuple[Endpoint, str], Channel] = {}
        self._links: dict[Channel, None] = {}

    def connect(self, endpoint: Endpoint) -> Channel:
        """A channel for the caller alone. The caller closes it."""
        channel = Channel(
            self._loop, endpoint, self._client_id, lambda broken: self._links.pop(broken, None), self._resolver
        )
        self._links[channel] = None
        return channel

    async def exchange(
        self,
        endpoint: Endpoint,
        request: Any,
        version: int,
        *,
        timeout_ms: int,
        lane: str = "",
        on_arriving: Callable[[], None] | None = None,
    ) -> Any:
        """Send a request and await its response. Raises PeerUnreachable.

        After a timeout the lane's connection is closed, because the late answer would break the order. It
        begins anew with each `ARRIVING_BYTES` of the answer: one batch may be more than a slow link brings in time.
        """
        channel = self._channel(endpoint, lane)
        future: asyncio.Future[bytes] = self._loop.create_future()

        def answered(body: memoryview | None) -> None:
            if future.done():
                return
            if body is None:
                future.set_exception(PeerUnreachable(f"{endpoint}: {channel.reason}", refused=channel.refused))
            else:
                future.set_result(bytes(body))

        channel.request(type(request).API_KEY, version, request.encode(version), answered)
        arrived_bytes = partial(channel.arrived_bytes_for, answered)
        try:
            await self._wait(future, timeout_ms / 1000, arrived_bytes, on_arriving)
            if not future.done():
                channel.give_up("no answer in time")
                raise PeerUnreachable(f"{endpoint}: no answer within {timeout_ms} ms")
        finally:
            future.cancel()
        try:
            return response_type(type(request)).decode(future.result(), version)
        except MalformedMessage as error:
            channel.give_up(str(error))
            raise PeerUnreachable(f"{endpoint}: {error}") from None

    async def _wait(
        self,
        future: asyncio.Future[bytes],
        timeout_s: float,
        arrived_bytes: Callable[[], int],
        on_arriving: Callable[[], None] | None,
    ) -> None:
        """Wait for the answer until no `ARRIVING_BYTES` of it have come for a timeout."""
        now_s = self._loop.time()
        due_s, end_s, seen_bytes = now_s + timeout_s, now_s + timeout_s * ARRIVING_TIMEOUTS_MAX, 0
        while not future.done() and now_s < due_s:
            await asyncio.wait([future], timeout=min(timeout_s / LOOKS, due_s - now_s))
            now_s = self._loop.time()
            if arrived_bytes() - seen_bytes >= ARRIVING_BYTES:
                seen_bytes, due_s = arrived_bytes(), min(now_s + timeout_s, end_s)
                if on_arriving is not None:
                    on_arriving()

    def _channel(self, endpoint: Endpoint, lane: str) -> Channel:
        channel = self._channels.pop((endpoint, lane), None)
        if channel is None:
            if len(self._channels) >= CHANNELS_MAX:
                # After several changes of the lead most are to earlier controllers.
                unused = next((each for each in self._channels.values() if not each.unanswered), None)
                if unused is None:
                    raise PeerUnreachable(f"{endpoint}: too many connections to other nodes")
                unused.give_up("others are needed")

            def forget(broken: Channel) -> None:
                self._channels.pop((endpoint, lane), None)

            channel = Channel(self._loop, endpoint, self._client_id, forget, self._resolver)
        self._channels[endpoint, lane] = channel  # the one used last is the last
        return channel

    async def probe(self, endpoint: Endpoint, timeout_ms: int = 1000) -> PortState:
        """Connect and close again. The port of a dead process refuses; that of a hanging process still accepts."""
        try:
            async with asyncio.timeout(timeout_ms / 1000):
                transport = await _connect(self._loop, asyncio.Protocol, endpoint, self._resolver)
        except ConnectionRefusedError:
            return PortState.REFUSES
        except (OSError, TimeoutError):
            return PortState.UNKNOWN
        transport.abort()
        return PortState.ACCEPTS

    async def sign_of_life(self, endpoint: Endpoint, timeout_ms: int) -> PortState:
        """Whether the process there answers a request. A dying process still accepts connections for a while.

        REFUSES: it refused, or closed the connection twice. It may close the first one because that was idle.
        """
        request = ApiVersionsRequest(client_software_name="tidelog", client_software_version="0")
        channel = self._channels.get((endpoint, "life"))
        if channel is not None and channel.unanswered >= LIFE_UNANSWERED_MAX:
            channel.give_up("no answer in time")
        for _ in range(2):
            try:
                async with asyncio.timeout(timeout_ms / 1000):
                    await self.exchange(
                        endpoint, request, API_VERSIONS_VERSION, timeout_ms=ANSWER_TIMEOUT_MS, lane="life"
                    )
            except TimeoutError:
                return PortState.UNKNOWN
            except PeerUnreachable as error:
                if error.refused:
                    break
            else:
                return PortState.ACCEPTS
        return PortState.REFUSES

    async def close(self) -> None:
        for channel in [*self._channels.values(), *self._links]:
            channel.close()
            await channel.closed()


def response_type(request: type[Any]) -> Any:
    """The response class of a request class, from the same module: FetchRequest -> FetchResponse."""
    return getattr(sys.modules[request.__module__], request.__name__.removesuffix("Request") + "Response")
