"""One client connection: assembles frames from bytes, and sends answers in the order of their requests.

Owns the receive buffer (it grows to the frame size, is reused, and shrinks when idle), the queue of answers that wait
for earlier ones, and the back pressure in both directions. It knows no API: `Dispatcher.dispatch` answers a frame.
Invariant: responses leave in request order, even if they complete in another order (Kafka's guarantee).
"""

from __future__ import annotations

import asyncio
import logging
import mmap
import sys
from collections import deque
from collections.abc import Callable, Collection, Sequence
from struct import Struct
from typing import TYPE_CHECKING, Any, Protocol, cast

from tidelog.broker.network.accepting import end, has_ended
from tidelog.broker.network.connection_quotas import plain_address
from tidelog.broker.network.order_of_requests import DELAYED
from tidelog.broker.network.receive_buffers import (
    BUFFER_SMALLEST_BYTES,
    BUFFER_USUAL_BYTES,
    READ_LARGE_BYTES,
    READ_S_PER_BYTE,
    new_buffer,
    read_at_once,
)
from tidelog.broker.network.request import CLOSED, NOT_YET, Answer, Deferred
from tidelog.broker.scheduling.callbacks import call_all
from tidelog.broker.scheduling.pieces import UNCOUNTED_BYTES_MAX, WHOLE_BYTES_MAX
from tidelog.protocol.api import ApiKey
from tidelog.protocol.errors import MalformedMessage

if TYPE_CHECKING:
    import socket

    from tidelog.broker.scheduling.deferred_callbacks import DeferredCallbacks
    from tidelog.broker.scheduling.fair_scheduler import FairScheduler
    from tidelog.protocol.hot import Buffer

logger = logging.getLogger("tidelog.connection")

# Small requests of one connection that are handled before the turn of the others. A request with a large answer counts
# for several.
TURN_REQUESTS_MAX = 16
LARGE_ANSWER_COST = 8
# The connection is not read while this many bytes wait for a client that does not read (uvloop counts them), or wait
# behind an answer that is not complete yet.
WRITE_HIGH_WATER_BYTES = 8 * 1024 * 1024
# Requests that may be handled together, because they are in the buffer at the same time: of larger ones each costs more
# than the calls that are saved. Shorter ones than any Produce are not looked at.
PIPELINED_FRAME_BYTES_MAX = 8 * 1024
# After an attempt that met a request of another kind: the next reads of the connection will hardly differ.
UNPIPELINED_READS = 15
PIPELINED_BYTES_MIN = 100
# Bytes of answers that are collected for one write. Small requests may have large answers: beyond it they are written.
CORKED_BYTES_MAX = 256 * 1024
# Pipelined requests without an answer; beyond it the connection is not read until some are answered.
IN_FLIGHT_MAX = 1024

_frame_size = Struct(">i").unpack_from
_FRAME_HEAD = Struct(">ih")  # size and API key
_REQUEST_HEAD_BYTES = 12  # size, API key, version, correlation id


class ConnectionOwner(Protocol):
    """The server that accepted a connection. It sets limits, schedules connections and dispatches frames."""

    frame_bytes_max: int
    callbacks: DeferredCallbacks
    scheduler: FairScheduler
    keys_of_nodes: Collection[int]
    """The APIs by which nodes live. Their requests do not wait behind those of clients."""
    dispatch_pipelined: Callable[[Sequence[memoryview], KafkaConnection], Sequence[Answer] | None] | None
    """Handles several requests together, if it can; returns the answers to those at the start that it has handled."""

    def dispatch(self, frame: memoryview, connection: KafkaConnection) -> Answer: ...
    def connected(self, connection: KafkaConnection) -> bool: ...
    def disconnected(self, connection: KafkaConnection) -> None: ...
    def reserve_buffer(self, extra_bytes: int) -> bool: ...
    def buffers_full(self, host: str) -> None: ...
    def not_read(self, connection: KafkaConnection) -> None: ...
    def widen(self, sock: socket.socket) -> None: ...
    def warn(self, kind: str, text: str) -> None: ...


def size_of(frames: Any) -> int:
    return sum(map(len, frames)) if type(frames) is list else len(frames)


def is_mapped(buffer: Buffer) -> bool:
    return type(buffer) is memoryview and type(buffer.obj) is mmap.mmap


def keeps_buffers(transport: asyncio.BaseTransport) -> bool:
    """Whether `writelines` keeps the buffers that it cannot send yet. asyncio joins them before Python 3.12."""
    return sys.version_info >= (3, 12) or type(transport).__module__.partition(".")[0] != "asyncio"


def find_awaited(pending: deque[Deferred]) -> Deferred | None:
    """The request whose answer is next in order and not complete; all later answers wait for it."""
    return pending[0] if pending and pending[0].response is None else None


class KafkaConnection(asyncio.BufferedProtocol):
    __slots__ = (
        "_buffer", "_capacity_bytes", "_closed", "_corked", "_corked_bytes", "_end", "_exclusive", "_held_bytes",
        "_keeps_maps", "_on_close", "_out", "_owner", "_paused_reading", "_pending", "_private_bytes", "_resting",
        "_start", "_transport", "_unpipelined_reads", "_view", "_writable", "active", "costly_waits", "host",
        "known_key", "listener_name", "produce_topic_at",
    )  # fmt: skip
    awaited = property(lambda self: find_awaited(self._pending))

    def __init__(self, owner: ConnectionOwner, listener_name: str) -> None:
        self._owner = owner
        self.listener_name = listener_name
        self.host = ""
        self.known_key = -1
        self.costly_waits = 0
        self.produce_topic_at = 0  # for `Dispatcher.dispatch` alone
        self.active = True  # since the server's last sweep of idle connections
        self._transport: asyncio.Transport | None = None
        self._buffer: bytearray | mmap.mmap = bytearray()
        self._view = memoryview(self._buffer)
        self._capacity_bytes = 0  # the reserved bytes; the view of a map is longer
        self._start = self._end = 0
        self._pending: deque[Deferred] = deque()  # in request order; between callbacks the first one is not complete
        self._out: list[Buffer] = []
        self._corked = False
        self._corked_bytes = 0
        self._held_bytes = 0  # of answers that wait for an earlier one
        self._keeps_maps = False  # the transport keeps parts of mapped files as they are, instead of copies
        # At most so many of the unsent bytes are memory, the rest parts of mapped files; -1: all may be memory.
        self._private_bytes = -1
        self._closed = False
        self._exclusive = False
        self._resting = False
        self._writable = True
        self._paused_reading = False
        self._on_close: list[Callable[[], None]] = []
        self._unpipelined_reads = 0  # so many more are not looked through for requests to handle together

    # ------------------------------------------------------------------------------------------- asyncio's protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._keeps_maps = keeps_buffers(transport)
        peer = transport.get_extra_info("peername")
        self.host = plain_address(str(peer[0])) if peer else ""
        if not self._owner.connected(self):
            self._transport.abort()
            return
        self._transport.set_write_buffer_limits(high=WRITE_HIGH_WATER_BYTES)
        self._resize(BUFFER_SMALLEST_BYTES)

    def connection_lost(self, exc: Exception | None) -> None:
        self._owner.reserve_buffer(-self._capacity_bytes)
        self._capacity_bytes = 0
        # Requests whose answers still come refer to this connection: it must hold nothing meanwhile.
        self._buffer = bytearray()
        self._view = memoryview(self._buffer)
        self._start = self._end = self._held_bytes = 0
        self._out.clear()
        if self._transport is not None:
            end(self._transport.get_extra_info("socket"))
        self._transport = None
        waiting = [each for each in self._pending if each.response is None]
        self._pending.clear()
        self._owner.disconnected(self)
        call_all(each.abandon for each in waiting)
        notices, self._on_close = self._on_close, []
        call_all(notices)

    def on_close(self, callback: Callable[[], None]) -> None:
        if self._transport is None:
            callback()
        else:
            self._on_close.append(callback)

    def get_buffer(self, sizehint: int) -> memoryview:
        end, capacity = self._end, self._capacity_bytes
        if capacity > READ_LARGE_BYTES:
            capacity = min(capacity, end + read_at_once(capacity, self._owner.scheduler.is_turn_long))
        return self._view[end:capacity]

    def buffer_updated(self, nbytes: int) -> None:
        end = self._end = self._end + nbytes
        self.active = True
        if self._resting and self._transport is not None:
            # uvloop starts to read after `connection_made`, even if that has paused reading.
            self._transport.pause_reading()
            return
        owner = self._owner
        scheduler = owner.scheduler
        if nbytes >= READ_LARGE_BYTES:
            scheduler.add_work(nbytes * READ_S_PER_BYTE)
        if scheduler.is_turn_long:
            self._wait_in_line(is_first=True)
            return
        if end == self._capacity_bytes < BUFFER_USUAL_BYTES:
            self._resize(BUFFER_USUAL_BYTES)
            if self._closed:
                return
        callbacks = owner.callbacks
        callbacks.collecting = True
        try:
            if end != nbytes or self._pending or self._paused_reading or not self._process_single(nbytes):
                self._process()
        finally:
            callbacks.collecting = False
            if callbacks.waiting:
                callbacks.run()

    def pause_writing(self) -> None:
        self._writable = False
        self._owner.not_read(self)
        self._update_reading()

    def resume_writing(self) -> None:
        self._writable = True
        self._resume()

    def eof_received(self) -> bool:
        return False

    # ------------------------------------------------------------------------------------------------------- frames

    def _process_single(self, size_bytes: int) -> bool:
        """`_process` for a buffer that holds one small frame, as that of a client that waits for each answer.

        False, without a change, for any other buffer.
        """
        view, owner = self._view, self._owner
        size = _frame_size(view)[0]
        if size + 4 != size_bytes or not 8 <= size <= PIPELINED_FRAME_BYTES_MAX or size > owner.frame_bytes_max:
            return False
        try:
            answer = owner.dispatch(view[4:size_bytes], self)
        except Exception as error:
            self._close_for(error)
            return True
        finally:
            self._end = 0
        transport = self._transport
        if type(answer) is bytes and self._private_bytes < 0 and transport is not None and not self._closed:
            transport.write(answer)
            return True
        if answer is NOT_YET:
            self._end = size_bytes
            self._wait_for_room()
            return True
        if isinstance(answer, Deferred):
            callbacks = owner.callbacks
            if callbacks.waiting:
                callbacks.run()  # as in `_process`
            if answer.response is None and not answer.exclusive:
                self._pending.append(answer)
                answer.on_complete(self._completed)
                return True
        self._answer(answer)
        if self._out:
            self._flush()
        if self._exclusive or self._resting or self._closed or not self._writable:  # one answer waits at most
            self._update_reading()
        return True

    def _process(self, request_budget: int = TURN_REQUESTS_MAX) -> None:
        """Dispatch at most `request_budget` frames of the buffer, then write all complete answers with one call."""
        view, start, end = self._view, self._start, self._end
        dispatch, pending, callbacks = self._owner.dispatch, self._pending, self._owner.callbacks
        pipelined = self._owner.dispatch_pipelined
        size, has_more = 0, False
        self._corked = True
        try:
            while end - start >= 4:
                if (pending and not self._ready(start)) or not self._writable:
                    break  # no turn for the next frame yet, even if its size cannot be
                size = _frame_size(view, start)[0]
                if not 8 <= size <= self._owner.frame_bytes_max:
                    raise MalformedMessage(f"frame of {size} bytes (socket.request.max.bytes)")
                stop = start + 4 + size
                if stop > end:
                    break
                if request_budget <= 0:
                    has_more = True
                    break
                if end - stop >= PIPELINED_BYTES_MIN and request_budget > 1 and pipelined is not None:
                    pipelined = None  # one attempt for a read
                    start, handled = self._process_pipelined(start, end, request_budget)
                    if handled:
                        request_budget -= handled
                        size = 0
                        continue
                request_budget -= 1
                frame = view[start + 4 : stop]
                start, size = stop, 0
                answer = dispatch(frame, self)
                if answer is NOT_YET:
                    start = stop - 4 - len(frame)
                    self._wait_for_room()
                    break
                if type(answer) is bytes and not pending:
                    self._out.append(answer)
                else:
                    if stop == end and callbacks.waiting and callbacks.collecting and isinstance(answer, Deferred):
                        # The request may wait for followers that can fetch its records now: wake them before parking
                        # it, unless the buffer holds more requests, which would add more records.
                        callbacks.run()
                    self._answer(answer)
                    if self._closed:
                        break
                    if self._owner.scheduler.is_turn_long:
                        request_budget = 0
                    elif type(answer) is list and len(answer) > 1:
                        request_budget -= LARGE_ANSWER_COST
        except Exception as error:
            self._close_for(error)
            return
        finally:
            self._corked = False
            self._start = start
        if start == end:
            self._start = self._end = 0
        else:
            self._make_room(size)
        out, transport = self._out, self._transport
        if len(out) == 1 and self._private_bytes < 0 and transport is not None and not self._closed:
            self._out = []
            self._corked_bytes = 0
            transport.write(out[0])
        elif out:
            self._flush()
        if has_more:
            self._wait_in_line(is_first=False)
        elif pending or self._paused_reading or self._resting or self._closed or not self._writable:
            self._update_reading()

    def _close_for(self, error: Exception) -> None:
        """Close the connection, because its last request cannot be answered, behind the answers before it (as in Kafka,
        which reads the next request after them): records that are in the log are not sent again.
        """
        if isinstance(error, MalformedMessage):
            self._warn_malformed(error)
        else:
            logger.error("a request from %s failed", self.host, exc_info=error)
            self._owner.warn("failed", f"closing connection from {self.host}: the broker failed at its request")
        self._answer(CLOSED)
        if not self._closed:
            if self._out:
                self._flush()
            self._update_reading()

    def _warn_malformed(self, error: MalformedMessage) -> None:
        self._owner.warn("malformed", f"closing connection from {self.host}: {error}")

    def _process_pipelined(self, start: int, end: int, request_budget: int) -> tuple[int, int]:
        """Dispatch frames of the buffer together. Returns where the rest begins, and the number of handled frames."""
        if self._unpipelined_reads:
            self._unpipelined_reads -= 1
            return start, 0
        view, pending, owner = self._view, self._pending, self._owner
        frames: list[memoryview] = []
        ends: list[int] = []
        count_max = min(request_budget, IN_FLIGHT_MAX - len(pending))
        position = start
        size_max = min(PIPELINED_FRAME_BYTES_MAX, owner.frame_bytes_max)
        for _ in range(count_max):
            if end - position < 4:
                break
            size = _frame_size(view, position)[0]
            stop = position + 4 + size
            if not 8 <= size <= size_max or stop > end:
                break
            frames.append(view[position + 4 : stop])
            ends.append(stop)
            position = stop
        if len(frames) < 2 or owner.dispatch_pipelined is None:
            return start, 0
        answers = owner.dispatch_pipelined(frames, self)
        if answers is None:
            self._unpipelined_reads = UNPIPELINED_READS
        if not answers:
            return start, 0
        callbacks = owner.callbacks
        for place, answer in enumerate(answers):
            if type(answer) is bytes and not pending:
                self._out.append(answer)
                continue
            if ends[place] == end and callbacks.waiting and callbacks.collecting and isinstance(answer, Deferred):
                callbacks.run()  # as in `_process`
            self._answer(answer)
        return ends[len(answers) - 1], len(answers)

    def _ready(self, start: int = -1) -> bool:
        """Whether the next request may be served, which begins at `start` (-1: where the buffer does)."""
        return (
            not self._exclusive
            and not self._resting
            and self._writable
            and len(self._pending) < IN_FLIGHT_MAX
            and self._held_bytes < WRITE_HIGH_WATER_BYTES
            and not self._closed
            and not (self._pending and self._is_delayed(self._start if start < 0 else start))
        )

    def _is_delayed(self, start: int) -> bool:
        """Whether the request at `start` reads what one before it changes that still waits."""
        if self._end - start < _FRAME_HEAD.size:
            return False
        key = _FRAME_HEAD.unpack_from(self._view, start)[1]
        return key in DELAYED and any(key in each.delays and each.response is None for each in self._pending)

    def _make_room(self, frame_bytes: int) -> None:
        """After processing, make room for the rest of the frame that has partly arrived."""
        start, end = self._start, self._end
        capacity = self._capacity_bytes
        frame_size_bytes = 4 + frame_bytes
        if start + frame_size_bytes <= capacity and end < capacity:
            return
        kept = end - start
        if frame_size_bytes > capacity and kept == capacity - start:
            # Reserve by the received bytes, not by the frame's size field, which costs a client nothing.
            if start == 0 and len(self._view) > capacity:
                self._reserve(min(capacity * 2, len(self._view)))
            else:
                self._resize(capacity * 2, frame_size_bytes)
        elif start:
            self._view[:kept] = self._view[start:end]
            self._start, self._end = 0, kept

    def _reserve(self, capacity_bytes: int) -> bool:
        if not self._owner.reserve_buffer(capacity_bytes - self._capacity_bytes):
            self._owner.buffers_full(self.host)
            self.close()
            self.return_buffer()
            return False
        self._capacity_bytes = capacity_bytes
        return True

    def return_buffer(self) -> None:
        """Return the memory of a connection that closes now, before its transport is closed: others may need it in
        this turn of the loop.
        """
        self._owner.reserve_buffer(-self._capacity_bytes)
        self._capacity_bytes = 0

    def _resize(self, capacity_bytes: int, wanted_bytes: int = 0) -> None:
        """Replace the buffer by one of this capacity. A large one can grow to `wanted_bytes` without a copy."""
        kept = self._end - self._start
        if not self._reserve(capacity_bytes):
            return
        try:
            buffer = new_buffer(capacity_bytes, wanted_bytes)
        except (MemoryError, OSError) as error:
            self._owner.warn("buffers", f"closing connection from {self.host}: no memory for its request: {error!r}")
            self.close()
            return
        view = memoryview(buffer)
        view[:kept] = self._view[self._start : self._end]
        self._buffer, self._view = buffer, view
        self._start, self._end = 0, kept

    def give_back(self) -> None:
        """Replace the large buffer of an idle connection by the smallest one, unless a request still uses it."""
        if self._start < self._end or self._exclusive or self._closed:
            return
        if self._capacity_bytes > BUFFER_SMALLEST_BYTES:
            self._resize(BUFFER_SMALLEST_BYTES)

    # ------------------------------------------------------------------------------------------------------ answers

    def _answer(self, answer: Answer) -> None:
        if answer is None:
            return
        if isinstance(answer, Deferred):
            if answer.response is None:
                self._pending.append(answer)
                if answer.exclusive:
                    self._exclusive = True
                    answer.on_complete(self._completed_exclusively)
                    answer.on_release = self._release
                else:
                    answer.on_complete(self._completed)
                return
            answer = answer.response
        if self._pending:
            behind = Deferred()
            behind.response = answer
            self._held_bytes += size_of(answer)
            self._pending.append(behind)
            if answer is CLOSED:
                self._exclusive = True  # no later request is served
            if self._held_bytes > CORKED_BYTES_MAX:
                self._owner.not_read(self)
        elif answer is CLOSED:
            self.close()
        elif type(answer) is list:
            self._out += answer
            self._corked_bytes += len(answer[0])
            if len(answer) > 1 or self._corked_bytes > CORKED_BYTES_MAX:
                # Write a large answer now, so that the transport counts it and detects a client that does not read.
                self._flush()
        else:
            buffer = cast("Buffer", answer)
            self._out.append(buffer)
            self._corked_bytes += len(buffer)
            if self._corked_bytes > CORKED_BYTES_MAX:
                self._flush()

    def _completed(self, frames: Any) -> None:
        """A parked request has its answer. None: it has failed, and the connection is closed.

        It is written at once if it is next in order and no processing is under way.
        """
        if frames is None:
            self.close()
            return
        pending, transport = self._pending, self._transport
        if (
            self._corked or self._paused_reading or transport is None or self._closed or type(frames) is list
            or not pending or pending[0].response is None
        ):  # fmt: skip
            self._hold(frames)
            return
        pending.popleft()
        transport.write(frames)
        if self._private_bytes >= 0:
            self._private_bytes += len(frames)
        if pending and pending[0].response is not None:
            self._drain()

    def _completed_exclusively(self, frames: Any) -> None:
        if frames is None or self._transport is None:
            self.close()
            return
        if isinstance(frames, MalformedMessage):
            self._warn_malformed(frames)
            frames = self._pending[-1].response = CLOSED
        self._exclusive = frames is CLOSED  # then no later request is served
        self._hold(frames)

    def _release(self) -> None:
        """The last request that was read only waits for others now: the next ones are read again."""
        self._exclusive = False
        self._pending[-1].on_complete(self._completed)
        if not self._corked:
            self._resume()

    def _hold(self, frames: Any) -> None:
        """An answer waits for its place in the order, unless it is next."""
        if self._transport is None:
            return  # the client is gone: the answer waits for nothing
        self._held_bytes += size_of(frames)
        self._drain()
        if self._held_bytes > CORKED_BYTES_MAX:
            self._owner.not_read(self)

    def _drain(self) -> None:
        """An answer was completed: send the complete answers at the head of the queue."""
        pending = self._pending
        while pending and pending[0].response is not None:
            frames = pending.popleft().response
            self._held_bytes -= size_of(frames)
            if frames is CLOSED:
                self.close()
            elif type(frames) is list:
                self._out += frames
            else:
                self._out.append(frames)
        if not self._corked:
            if self._out:
                self._flush()
            self._resume()

    def _flush(self) -> None:
        out, self._out = self._out, []
        self._corked_bytes = 0
        transport = self._transport
        if transport is None or self._closed:
            return
        if len(out) == 1:
            transport.write(out[0])
            if self._private_bytes >= 0:
                self._private_bytes += len(out[0])
        else:
            transport.writelines(out)
            unsent_bytes = transport.get_write_buffer_size()
            if unsent_bytes:
                self._count_private(out, unsent_bytes)
                self._owner.not_read(self)
            else:
                self._private_bytes = -1

    def _count_private(self, written: list[Buffer], unsent_bytes: int) -> None:
        """`written` has been written, and not all of it has been sent: count what is not part of a mapped file.

        Everything unsent that was written before the first mapped part counts.
        """
        mapped_bytes = sum(map(len, filter(is_mapped, written))) if self._keeps_maps else 0
        if not mapped_bytes and self._private_bytes < 0:
            return
        size_bytes = sum(map(len, written))
        earlier_bytes = self._private_bytes if self._private_bytes >= 0 else max(unsent_bytes - size_bytes, 0)
        private_bytes = earlier_bytes + size_bytes - mapped_bytes
        self._private_bytes = min(private_bytes, unsent_bytes)

    # ------------------------------------------------------------------------------------------- called by the server

    @property
    def file_number(self) -> int:
        """The socket's file descriptor or -1. It shows how many are in use, because the system takes the lowest."""
        sock = self._transport.get_extra_info("socket") if self._transport is not None else None
        return -1 if sock is None else int(sock.fileno())

    def send_much(self) -> None:
        sock = self._transport.get_extra_info("socket") if self._transport is not None else None
        if sock is not None:
            self._owner.widen(sock)

    @property
    def is_closing(self) -> bool:
        """Whether the connection closes as soon as the client has received its answers."""
        return self._closed

    @property
    def is_gone(self) -> bool:
        """Whether the client has disconnected. It asks the system: what is not read does not end either."""
        return self._transport is None or has_ended(self._transport.get_extra_info("socket"))

    @property
    def is_left(self) -> bool:
        """Whether the client has disconnected while a request waits for which the connection is not read."""
        return self._paused_reading and not self._resting and self.awaited is not None and self.is_gone

    @property
    def partial(self) -> tuple[int, int] | None:
        """The start and the end in the buffer of the request that has partly arrived; None without one."""
        return (self._start, self._end) if self._end > self._start else None

    @property
    def arrival(self) -> tuple[bytes, int] | None:
        """The head of the large request that has partly arrived, and its bytes so far. None without one, and while the
        connection is not read.
        """
        received_bytes = self._end - self._start
        if received_bytes < BUFFER_USUAL_BYTES or self._paused_reading or self._resting or self._closed:
            return None
        return bytes(self._view[self._start : self._start + _REQUEST_HEAD_BYTES]), received_bytes

    @property
    def unread_bytes(self) -> int:
        """The memory of the answers that the client has not received yet, or that wait for an earlier one.

        Parts of mapped files are not memory of this process: hundreds of clients that read a large answer slowly, but
        read, need no more than one.
        """
        transport = self._transport
        unsent_bytes = transport.get_write_buffer_size() if transport is not None else 0
        if not unsent_bytes:
            self._private_bytes = -1
        elif self._private_bytes >= 0:
            unsent_bytes = min(unsent_bytes, self._private_bytes)
        return self._held_bytes + unsent_bytes

    def rest(self) -> None:
        """Stop reading until `wake`."""
        self._resting = True
        self._update_reading()

    def wake(self, request_budget: int = TURN_REQUESTS_MAX) -> None:
        self._resting = False
        if self._paused_reading and self._ready() and self._transport is not None:
            self._process(request_budget)

    def _wake_for_one(self) -> None:
        self.wake(1)

    def _wait_for_room(self) -> None:
        self.rest()
        self._owner.scheduler.wait_for_room(self._serve_large, self.host)

    def _serve_large(self) -> None:
        """There is room for the large request at the begin of the buffer."""
        if self.is_gone:
            self.abort()
        else:
            self.wake(1)

    # ------------------------------------------------------------------------------------------------ back pressure

    def _wait_in_line(self, *, is_first: bool) -> None:
        self.rest()
        view, start = self._view, self._start
        of_node = for_records = is_large = is_known = False
        if self._end - start >= _FRAME_HEAD.size:
            size, key = _FRAME_HEAD.unpack_from(view, start)[:2]
            for_records = key <= ApiKey.FETCH
            # The quorum's fetches stay in the queue of Fetch: a stranger's thousands of heartbeats do not hold them up.
            of_node = key in self._owner.keys_of_nodes and not for_records
            is_known = key == self.known_key
            # Not before others' heartbeats: a hundred of these take seconds.
            is_large = size > (UNCOUNTED_BYTES_MAX if of_node else WHOLE_BYTES_MAX) and not for_records
        wake = self._wake_for_one if is_first else self.wake
        first = is_first and not is_large
        is_costly = self.costly_waits > 0
        if is_costly:
            self.costly_waits -= 1
        self._owner.scheduler.wait(
            wake, is_first=first, for_records=for_records, of_node=of_node, is_known=is_known, host=self.host,
            is_costly=is_costly,
        )  # fmt: skip

    def _resume(self) -> None:
        if self._paused_reading and self._ready() and self._transport is not None:
            # Only a request says which queue is the connection's: without one it does not wait.
            if self._owner.scheduler.is_turn_long and self._end > self._start:
                self._wait_in_line(is_first=True)
            else:
                self._process()

    def _update_reading(self) -> None:
        pause = not self._ready()
        transport = self._transport
        if pause != self._paused_reading and transport is not None:
            self._paused_reading = pause
            if pause:
                transport.pause_reading()
            else:
                transport.resume_reading()

    def close(self) -> None:
        if self._transport is not None:
            if self._out:
                self._flush()
            self._closed = True
            self._transport.close()

    def abort(self) -> None:
        self._closed = True
        if self._transport is not None:
            self._transport.abort()
