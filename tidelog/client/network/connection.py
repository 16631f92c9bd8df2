"""One connection to one broker: frames, correlation of responses, negotiated versions, timeouts.

Here: bytes, correlation ids, ApiVersions, the request timeout. Not here: the choice of the broker
and retries (`cluster`). Invariants: responses arrive in the order of the requests, and a response
out of order ends the connection. No frame larger than `max_frame_bytes` is read. At most
`MAX_IN_FLIGHT` requests are unanswered. No timeout ends the connection while a large answer goes on
arriving. After `close` every request has a response or an error.
"""

from __future__ import annotations

import asyncio
import ipaddress
import os
import re
import socket
import sys
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from struct import Struct
from time import monotonic
from typing import Any, ClassVar, Protocol, TypeVar, cast

from tidelog.client.network.frame_buffers import FrameBuffers
from tidelog.client.network.output_queue import Buffer, OutputQueue
from tidelog.protocol.addresses import address_text
from tidelog.protocol.codec.schema import Message
from tidelog.protocol.errors import ErrorCode, KafkaError, MalformedMessage
from tidelog.protocol.messages.api_versions import ApiVersionsRequest, ApiVersionsResponse
from tidelog.protocol.messages.headers import RequestHeader, ResponseHeader

Response = TypeVar("Response", bound=Message)
Address = TypeVar("Address")

MAX_IN_FLIGHT = 128
_RECEIVE_BUFFER_BYTES = 64 * 1024
UNREAD_BYTES = 2 * 1024 * 1024
"""What the system takes in while the program decodes: a whole answer of Tidelog's brokers. It takes in as much of any
connection that was busy for a while.
"""
ARRIVING_BYTES = 64 * 1024
"""So many more bytes of an answer within a request timeout show that a slow link still brings it."""
_CORRELATION_MASK = 0x7FFFFFFF
_CORRELATION_ID_START = 8
_INT32 = Struct(">i")
_FRAME_START = Struct(">ii")
_METADATA, _API_VERSIONS, _BROKER_REGISTRATION = 3, 18, 62
_WRITE_BUFFER_BYTES = 1024 * 1024
yield_processor: Callable[[], None] = getattr(os, "sched_yield", lambda: None)  # not on Windows
"""Let another thread or process run here, if one waits for this processor."""
_ADDRESS_WAIT_S = 0.5
_ADDRESSES_MAX = 32


class AnswerTooLarge(KafkaError):
    """NETWORK_EXCEPTION: the answer to this request is larger than `receive_message_max_bytes`."""

    def __init__(self, message: str) -> None:
        super().__init__(ErrorCode.NETWORK_EXCEPTION, message)


class Request(Protocol):
    """What a connection writes: a `Message`, or what writes the bytes of one."""

    API_KEY: ClassVar[int | None]
    FLEXIBLE_FROM: ClassVar[int]

    def write_pieces(self, out: bytearray, version: int) -> list[Buffer]: ...


def request_header_version(request: type[Request], version: int) -> int:
    """2 from the first flexible version on, else 1."""
    return 2 if version >= request.FLEXIBLE_FROM else 1


def response_header_version(response: type[Message], version: int) -> int:
    """1 from the first flexible version on, else 0.

    Always 0 for ApiVersions: its reader may not know the version of the response yet.
    """
    return 1 if version >= response.FLEXIBLE_FROM and response.API_KEY != _API_VERSIONS else 0


class _PendingRequest:
    """One request that waits for its response."""

    __slots__ = ("correlation_id", "deadline", "future", "read", "response", "timeout_s", "version")

    def __init__(
        self,
        correlation_id: int,
        response: type[Message],
        version: int,
        future: asyncio.Future[Message] | ResponseCallback,
        deadline: float,
        timeout_s: float,
        read: FrameReader | None,
    ) -> None:
        self.correlation_id = correlation_id
        self.response = response
        self.version = version
        self.future = future
        self.deadline = deadline
        self.timeout_s = timeout_s
        self.read = read


FrameReader = Callable[[bytes | memoryview], Any]
"""Reads a response of a usual form from its frame; None for one that has to be decoded as a message."""


class ResponseCallback:
    """In place of a request's future: calls `handle(response, None)` as soon as the response is read.

    A future would take one more pass of the event loop. `handle(None, error)` is called by the loop,
    since an error may end the connection first.
    """

    __slots__ = ("_handle", "_is_done", "_loop")

    def __init__(self, loop: asyncio.AbstractEventLoop, handle: Callable[[Any, Exception | None], None]) -> None:
        self._handle = handle
        self._loop = loop
        self._is_done = False

    def done(self) -> bool:
        return self._is_done

    def set_result(self, response: Any, /) -> None:
        self._is_done = True
        try:
            self._handle(response, None)
        except (SystemExit, KeyboardInterrupt):
            raise
        except BaseException as error:  # asyncio would end the connection, by a CancelledError too
            self._loop.call_exception_handler({"message": "a response was not handled", "exception": error})

    def set_exception(self, error: Any, /) -> None:
        self._is_done = True
        self._loop.call_soon(self._handle, None, error)


class Connection(asyncio.BufferedProtocol):
    """A connection, made by `connect`: connected, with negotiated versions."""

    def __init__(self, address: str, client_id: str, max_frame_bytes: int) -> None:
        self.address = address
        self.node_id = -1
        self.closed = False
        self.last_used = 0.0
        self.on_close: Callable[[Connection], None] | None = None
        self._loop = asyncio.get_running_loop()
        self._client_id = client_id
        self._max_frame_bytes = max_frame_bytes
        self.finalized_features: dict[str, int] = {}
        """The levels that the cluster has finalized, as this broker knew them when it was connected."""
        self.finalized_features_epoch = -1
        self._versions: dict[int, tuple[int, int]] = {}
        self._common_versions: dict[tuple[int, int], int] = {}
        self._frame_starts: dict[tuple[int | None, int], bytes] = {}
        """By API key and version a request's first bytes: room for the size, then its header."""
        self._transport: asyncio.Transport | None = None
        self._output: OutputQueue | None = None
        self._closed_future: asyncio.Future[None] = self._loop.create_future()
        self._pending: deque[_PendingRequest] = deque()
        self._correlation_id = 0
        self._timer: asyncio.TimerHandle | None = None
        self._timer_due_s = 0.0  # uvloop's handle of a time that is past has no `when`
        self._receive_buffer = memoryview(bytearray(_RECEIVE_BUFFER_BYTES))
        self._start = 0
        self._end = 0
        self._frame_buffers = FrameBuffers()
        self._large: memoryview | None = None
        self._large_filled = 0
        self._large_filled_at_check = 0
        self._large_grew_s = 0.0

    # -- callbacks of asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._output = OutputQueue(self._transport)
        self.last_used = self._loop.time()

    def connection_lost(self, error: Exception | None) -> None:
        if not self._closed_future.done():
            self._closed_future.set_result(None)
        self._fail(
            ErrorCode.NETWORK_EXCEPTION, f"{self.address} closed the connection" + (f": {error}" if error else "")
        )

    def pause_writing(self) -> None:
        if self._output is not None:
            self._output.pause()

    def resume_writing(self) -> None:
        if self._output is not None:
            self._output.resume()

    def get_buffer(self, sizehint: int) -> memoryview:
        if self._large is not None:
            return self._large[self._large_filled :]
        if self._start == self._end:
            self._start = self._end = 0
        elif self._end == _RECEIVE_BUFFER_BYTES:
            unread = self._end - self._start
            self._receive_buffer[:unread] = bytes(self._receive_buffer[self._start : self._end])
            self._start, self._end = 0, unread
        return self._receive_buffer[self._end :]

    def buffer_updated(self, count: int) -> None:
        if self._large is not None:
            self._large_filled += count
            self._large_grew_s = self._loop.time()
            if self._large_filled == len(self._large):
                frame, self._large = self._large, None
                self._extend_deadlines()
                self._handle_frame(frame)
            return
        self._end += count
        self._split_frames()

    def eof_received(self) -> bool:
        return False

    # -- frames

    def _split_frames(self) -> None:
        buffer = self._receive_buffer
        while (unread := self._end - self._start) >= 4 and not self.closed:
            (size,) = _INT32.unpack_from(buffer, self._start)
            if not 0 <= size <= self._max_frame_bytes:
                self._refuse_frame(size)
                return
            frame_start = self._start + 4
            if unread - 4 >= size:
                self._start = frame_end = frame_start + size
                self._handle_frame(bytes(buffer[frame_start:frame_end]))
            elif size + 4 > _RECEIVE_BUFFER_BYTES:
                # Read into a separate buffer: record batches may remain views of it.
                self._large = self._frame_buffers.take(size)
                self._large_filled = self._end - frame_start
                self._large_filled_at_check = 0
                self._large_grew_s = self._loop.time()
                self._large[: self._large_filled] = buffer[frame_start : self._end]
                self._start = self._end = 0
                return
            else:
                return

    def _refuse_frame(self, size: int) -> None:
        """Fail a frame beyond the bound. The request that it answers gets `AnswerTooLarge`."""
        limit = self._max_frame_bytes
        if size >= 0 and self._pending and self._end - self._start >= _FRAME_START.size:
            pending = self._pending[0]
            _, correlation_id = _FRAME_START.unpack_from(self._receive_buffer, self._start)
            if correlation_id == pending.correlation_id:
                name = pending.response.__name__.removesuffix("Response")
                problem = f"{self.address} answered {name} with {size} bytes, receive_message_max_bytes is {limit}"
                if not pending.future.done():
                    pending.future.set_exception(AnswerTooLarge(problem))
                self._fail(ErrorCode.NETWORK_EXCEPTION, problem)
                return
        self._fail(
            ErrorCode.NETWORK_EXCEPTION,
            f"{self.address} announced {size} bytes, allowed are {limit}: not a Kafka broker?",
        )

    def _handle_frame(self, frame: bytes | memoryview) -> None:
        correlation_id = _INT32.unpack_from(frame)[0] if len(frame) >= 4 else -1
        if not self._pending or self._pending[0].correlation_id != correlation_id:
            self._fail(ErrorCode.NETWORK_EXCEPTION, f"{self.address} answered {correlation_id} out of turn")
            return
        pending = self._pending.popleft()
        if not self._pending:  # the connection may be idle from now on
            self.last_used = self._loop.time()
        if pending.future.done():
            return
        try:
            response = None if pending.read is None else pending.read(frame)
            if response is None:
                response = self._decode(pending, frame)
            # A Ctrl-C cancels the task of asyncio.run from inside its signal: also while an answer is decoded.
            if not pending.future.done():
                pending.future.set_result(response)
        except (MalformedMessage, KafkaError) as error:
            if not pending.future.done():
                pending.future.set_exception(KafkaError(ErrorCode.UNKNOWN_SERVER_ERROR, f"{self.address}: {error}"))
            self._fail(ErrorCode.NETWORK_EXCEPTION, f"{self.address} sent an answer that cannot be read")

    @staticmethod
    def _decode(pending: _PendingRequest, frame: bytes | memoryview) -> Message:
        version = pending.version
        position = 4
        if response_header_version(pending.response, version):
            if len(frame) > 4 and frame[4] == 0:
                position = 5
            else:
                _, position = ResponseHeader.read(frame, 0, 1)
        if (
            pending.response is ApiVersionsResponse
            and int.from_bytes(frame[4:6], "big", signed=True) == ErrorCode.UNSUPPORTED_VERSION
        ):
            version = 0
        message, _ = pending.response.read(frame, position, version)
        return message

    def set_reads_later(self, reads_later: bool) -> None:
        """Whether this thread reads nothing for the moment, because it decodes. It must not wait for the socket before
        it says that it reads again.

        Linux acknowledges bytes that a program does not read after a delay, unless it waits for more (SO_RCVLOWAT).
        A broker's send buffer, 100 KiB by default, stays full so long, and its answer stands still.
        """
        transport = self._transport
        if sys.platform == "linux" and transport is not None and not transport.is_closing():
            sock = transport.get_extra_info("socket")
            if sock is not None:  # not on a simulated network
                with suppress(OSError):  # a system that stands in for Linux may not have the option
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, UNREAD_BYTES if reads_later else 1)

    # -- requests

    @property
    def writable(self) -> bool:
        """Whether few bytes wait for the socket."""
        return self._output is not None and self._output.size_bytes <= _WRITE_BUFFER_BYTES

    @property
    def in_flight(self) -> int:
        return len(self._pending)

    def unused_s(self, now_s: float) -> float:
        """The time since the last request or answer; 0 while an answer is due."""
        return 0.0 if self._pending else now_s - self.last_used

    def is_idle(self, before_s: float) -> bool:
        """Whether no answer is due, and the last request or answer came by then."""
        return not self._pending and self.last_used <= before_s

    def version_of(self, request: type[Message], max_version: int = 32767) -> int:
        """The highest common version, at most `max_version`.

        Raises KafkaError(UNSUPPORTED_VERSION).
        """
        key = request.API_KEY
        assert key is not None
        version = self._common_versions.get((key, max_version))
        if version is None:
            lowest, highest = self._versions.get(key, (0, -1))
            version = min(highest, request.VERSIONS.stop - 1, max_version)
            if version < max(lowest, request.VERSIONS.start):
                name = request.__name__.removesuffix("Request")
                broker_versions = f"versions {lowest} to {highest}" if highest >= 0 else "no version"
                client_versions = f"{request.VERSIONS.start} to {min(request.VERSIONS.stop - 1, max_version)}"
                text = f"{self.address} has {broker_versions} of {name}, this client {client_versions}"
                if _BROKER_REGISTRATION in self._versions and _METADATA not in self._versions:
                    text = f"{self.address} is the address of a controller: clients connect to brokers"
                raise KafkaError(ErrorCode.UNSUPPORTED_VERSION, text)
            self._common_versions[key, max_version] = version
        return version

    def supports(self, request: type[Message], version: int) -> bool:
        """Whether the broker supports this version or a later one."""
        return request.API_KEY in self._versions and self._versions[request.API_KEY][1] >= version

    def send(
        self,
        request: Message,
        response: type[Response],
        version: int,
        timeout_ms: float,
    ) -> asyncio.Future[Response]:
        """Write the request now.

        The future gets the response, or KafkaError NETWORK_EXCEPTION or REQUEST_TIMED_OUT.
        """
        future: asyncio.Future[Response] = self._loop.create_future()
        self._send(request, response, version, timeout_ms, future)
        return future

    def send_with_callback(
        self,
        request: Request,
        response: type[Response],
        version: int,
        timeout_ms: float,
        handle: Callable[[Any, Exception | None], None],
        read: FrameReader | None = None,
    ) -> None:
        """Write the request now. `handle` gets the response while it is read, or the error that `send` gives.

        Where `read` understands the response, `handle` gets what it returns.
        """
        self._send(request, response, version, timeout_ms, ResponseCallback(self._loop, handle), read)

    def _send(
        self,
        request: Request,
        response: type[Response],
        version: int,
        timeout_ms: float,
        future: Any,
        read: FrameReader | None = None,
    ) -> None:
        if len(self._pending) >= MAX_IN_FLIGHT:
            raise KafkaError(ErrorCode.NETWORK_EXCEPTION, f"{self.address} owes {MAX_IN_FLIGHT} answers already")
        self._write(request, version)
        self._await(response, version, timeout_ms, future, read)

    def _await(
        self,
        response: type[Response],
        version: int,
        timeout_ms: float,
        future: Any,
        read: FrameReader | None,
    ) -> None:
        timeout_s = timeout_ms / 1000
        deadline = self.last_used + timeout_s
        self._pending.append(
            _PendingRequest(self._correlation_id, response, version, future, deadline, timeout_s, read)
        )
        if self._timer is None or deadline < self._timer_due_s:
            self._start_timer(deadline)

    @property
    def can_exchange(self) -> bool:
        """Whether `exchange` is possible: nothing is under way, and the socket can be read directly."""
        output = self._output
        return (
            not self._pending
            and output is not None
            and output.descriptor >= 0
            and self._large is None
            and not self.closed
        )

    def exchange(self, request: Request, version: int, read: FrameReader, until_s: float) -> Any | None:
        """Write the request and read its answer in one go, until `until_s` of `time.monotonic`.

        Requires `can_exchange`. Returns what `read` makes of the answer; None when the answer is not there or `read`
        does not understand it. Then `await_answer` has to follow at once.
        """
        self._write(request, version)
        assert self._output is not None
        descriptor = self._output.descriptor
        while not self._output.is_closing:
            try:
                count = os.readv(descriptor, [self.get_buffer(-1)])
                break
            except BlockingIOError:
                if monotonic() >= until_s:
                    return None
                # The broker may be waiting for this very processor.
                yield_processor()
            except OSError:  # the loop meets it again
                return None
        else:
            return None
        start = self._start
        self._end = end = self._end + count
        if count < _FRAME_START.size:  # also the end of the stream, which the loop meets again
            return None
        size, correlation_id = _FRAME_START.unpack_from(self._receive_buffer, start)
        if size != end - start - 4 or correlation_id != self._correlation_id:
            return None
        answer = read(bytes(self._receive_buffer[start + 4 : end]))
        if answer is not None:
            self._start = end
        return answer

    def await_answer(
        self,
        response: type[Response],
        version: int,
        timeout_ms: float,
        handle: Callable[[Any, Exception | None], None],
        read: FrameReader | None = None,
    ) -> None:
        """Wait for the answer of an `exchange`, as `send_with_callback`."""
        self._await(response, version, timeout_ms, ResponseCallback(self._loop, handle), read)
        self._split_frames()

    def send_without_response(self, request: Request, version: int) -> None:
        """Write a request that has no response (Produce with acks=0)."""
        self._write(request, version)

    async def call(
        self, request: Message, response: type[Response], timeout_ms: float, max_version: int = 32767
    ) -> Response:
        """Send in the highest common version and wait for the response."""
        return await self.send(request, response, self.version_of(type(request), max_version), timeout_ms)

    def _write(self, request: Request, version: int) -> None:
        if self.closed or self._output is None:
            raise KafkaError(ErrorCode.NETWORK_EXCEPTION, f"{self.address} is not connected")
        self._correlation_id = (self._correlation_id + 1) & _CORRELATION_MASK
        key = request.API_KEY, version
        frame = bytearray(self._frame_starts.get(key) or self._frame_start(type(request), version))
        _INT32.pack_into(frame, _CORRELATION_ID_START, self._correlation_id)
        pieces = request.write_pieces(frame, version)
        _INT32.pack_into(frame, 0, sum(map(len, pieces)) - 4)
        self.last_used = self._loop.time()
        self._output.write(pieces)

    def _frame_start(self, request_type: type[Request], version: int) -> bytes:
        api_key = request_type.API_KEY
        assert api_key is not None
        header = RequestHeader(request_api_key=api_key, request_api_version=version, client_id=self._client_id)
        frame = bytearray(4)
        header.write(frame, request_header_version(request_type, version))
        start = self._frame_starts[api_key, version] = bytes(frame)
        return start

    # -- timeouts and close

    def _start_timer(self, deadline: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer_due_s = deadline
        self._timer = self._loop.call_at(deadline, self._check_deadlines)

    def _check_deadlines(self) -> None:
        self._timer = None
        if self._is_answer_arriving():
            self._extend_deadlines()
        now_s = self._loop.time()
        expired = [pending for pending in self._pending if pending.deadline <= now_s]
        for pending in expired:
            if not pending.future.done():
                name = pending.response.__name__.removesuffix("Response")
                pending.future.set_exception(
                    KafkaError(ErrorCode.REQUEST_TIMED_OUT, f"{self.address} did not answer {name} in time")
                )
        if expired:
            # Later responses wait behind this one, which may never arrive.
            self._fail(ErrorCode.NETWORK_EXCEPTION, f"{self.address} was given up: it did not answer in time")
        elif self._pending:
            self._start_timer(min(pending.deadline for pending in self._pending))

    def _is_answer_arriving(self) -> bool:
        """Whether a large answer has grown enough since the last look."""
        if self._large is None or self._large_filled - self._large_filled_at_check < ARRIVING_BYTES:
            return False
        self._large_filled_at_check = self._large_filled
        return True

    def _extend_deadlines(self) -> None:
        """Count each timeout from the last bytes of a large answer that goes on arriving, or has ended.

        A request for the same bytes over the same slow link would not be answered in time either: the client would
        connect and fetch without end. Later answers wait behind this one, and begin when it has ended.
        """
        for pending in self._pending:
            pending.deadline = max(pending.deadline, self._large_grew_s + pending.timeout_s)

    def close(self) -> None:
        """Close after written bytes have left.

        Unanswered requests fail with NETWORK_EXCEPTION now.
        """
        self._fail(ErrorCode.NETWORK_EXCEPTION, "the client closed the connection", abort=False)

    async def wait_closed(self, timeout_s: float) -> None:
        """After `close`, wait until written bytes have left.

        After the timeout the connection is aborted.
        """
        if self._transport is None:
            return
        try:
            await asyncio.wait([self._closed_future], timeout=timeout_s)
        finally:
            if not self._closed_future.done():
                self._transport.abort()
                await asyncio.sleep(0)

    def _fail(self, code: ErrorCode, message: str, *, abort: bool = True) -> None:
        if self.closed:
            return
        self.closed = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._transport is not None and self._output is not None:
            if abort:
                self._output.drop()
                self._transport.abort()
            else:
                self._output.pass_to_transport()
                self._transport.close()
        for pending in self._pending:
            if not pending.future.done():
                pending.future.set_exception(KafkaError(code, message))
        self._pending.clear()
        self._large = None
        if self.on_close is not None:
            self.on_close(self)

    # -- version negotiation

    async def negotiate(self, software_version: str, timeout_ms: float) -> None:
        """Fetch the broker's versions.

        An older broker refuses the newest request version; a retry uses its own.
        """
        version = ApiVersionsRequest.VERSIONS.stop - 1
        while True:
            request = ApiVersionsRequest(client_software_name="tidelog", client_software_version=software_version)
            api_versions = await self.send(request, ApiVersionsResponse, version, timeout_ms)
            code = ErrorCode.of(api_versions.error_code)
            if code is ErrorCode.UNSUPPORTED_VERSION and version > 0:
                broker_max_versions = [api.max_version for api in api_versions.api_keys if api.api_key == _API_VERSIONS]
                version = (
                    min(version - 1, broker_max_versions[0])
                    if broker_max_versions and broker_max_versions[0] >= 0
                    else 0
                )
                continue
            if code is not ErrorCode.NONE:
                raise KafkaError(code, f"{self.address} refused to name its versions")
            self._versions = {api.api_key: (api.min_version, api.max_version) for api in api_versions.api_keys}
            self.finalized_features = {
                feature.name: feature.max_version_level for feature in api_versions.finalized_features
            }
            self.finalized_features_epoch = api_versions.finalized_features_epoch
            return


async def connect(
    host: str, port: int, *, client_id: str, max_frame_bytes: int, software_version: str, timeout_ms: float
) -> Connection:
    """Open a connection that is ready for requests, to the first address of the host that answers.

    Raises KafkaError(NETWORK_EXCEPTION) within the timeout.
    """
    address = address_text(host, port)

    async def connect_to(ip: str) -> Connection:
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(lambda: Connection(address, client_id, max_frame_bytes), ip, port)
        try:
            await connection.negotiate(software_version, timeout_ms)
        except BaseException:
            connection.close()
            raise
        return connection

    try:
        async with asyncio.timeout(timeout_ms / 1000):
            return await first_success(connect_to, await _addresses(host, port), _ADDRESS_WAIT_S)
    except TimeoutError:
        error = KafkaError(ErrorCode.NETWORK_EXCEPTION, f"{address} did not answer within {timeout_ms:.0f} ms")
    except (OSError, ValueError, OverflowError, RuntimeError) as cause:
        # ValueError and OverflowError: a host or a port that cannot exist. RuntimeError: a name cannot be looked up in
        # a thread any more when the interpreter ends.
        error = KafkaError(ErrorCode.NETWORK_EXCEPTION, f"cannot connect to {address}: {_reason(cause)}")
    raise error


async def _addresses(host: str, port: int) -> list[str]:
    """The addresses of a host in the resolver's order."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        infos = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
        # The last of an IPv6 address's four parts is its scope.
        texts = (f"{place[0]}%{place[3]}" if len(place) == 4 and place[3] else str(place[0]) for *_, place in infos)
        return list(dict.fromkeys(texts))[:_ADDRESSES_MAX]
    return [host]


async def first_success(
    attempt: Callable[[Address], Awaitable[Connection]], addresses: Sequence[Address], attempt_wait_s: float
) -> Connection:
    """The first connection, with a new attempt whenever one fails or takes `attempt_wait_s` (as RFC 8305): an address
    that does not answer must not hide the others. Raises the first error when all have failed.
    """
    if len(addresses) == 1:
        return await attempt(addresses[0])
    waiting = deque(addresses)
    running: set[asyncio.Task[Connection]] = set()
    winner: Connection | None = None
    errors: list[BaseException] = []
    try:
        while winner is None:
            if waiting:
                running.add(asyncio.ensure_future(attempt(waiting.popleft())))
            elif not running:
                raise errors[0]
            wait_s = attempt_wait_s if waiting else None
            done, running = await asyncio.wait(running, timeout=wait_s, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                error = task.exception()
                if error is not None:
                    errors.append(error)
                elif winner is None:
                    winner = task.result()
                else:
                    task.result().close()
        return winner
    finally:
        for task in running:
            task.cancel()
            task.add_done_callback(_close_late)
        if running:
            await asyncio.wait(running)


def _close_late(task: asyncio.Task[Connection]) -> None:
    """An attempt may succeed in the moment in which it is cancelled."""
    if not task.cancelled() and task.exception() is None:
        task.result().close()


def _reason(cause: Exception) -> str:
    """The system's words for an error. asyncio's text has the address as a tuple instead, of each address of a name."""
    text = getattr(cause, "strerror", None) or str(cause)
    if not isinstance(cause, OSError) or isinstance(cause, socket.gaierror):
        return text
    numbers = [cause.errno] if cause.errno else [int(number) for number in re.findall(r"\[Errno (\d+)\]", text)]
    return ", ".join(dict.fromkeys(map(os.strerror, numbers))) or text
