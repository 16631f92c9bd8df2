"""One client connection: bytes to whole frames, answers back in the order of their requests.

Owns the receive buffer (grown to the frame, reused, given back when idle), the queue of answers that are not yet
due, and the back pressure in both directions. It knows no API: `Dispatcher.dispatch` turns a frame into an answer.
Invariant: responses leave in request order, whatever order they were completed in (Kafka promises it per connection).
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from struct import Struct
from typing import TYPE_CHECKING, Any, Protocol, cast

from tidelog.broker.network.receive_buffers import (
    BUFFER_SMALLEST_BYTES,
    BUFFER_USUAL_BYTES,
    READ_LARGE_BYTES,
    READ_S_PER_BYTE,
    new_buffer,
    read_at_once,
)
from tidelog.broker.network.request import Answer, Deferred
from tidelog.broker.scheduling.callbacks import call_all
from tidelog.protocol.api import ApiKey
from tidelog.protocol.errors import MalformedMessage

if TYPE_CHECKING:
    import mmap
    import socket

    from tidelog.broker.scheduling.deferred_callbacks import DeferredCallbacks
    from tidelog.broker.scheduling.fair_scheduler import FairScheduler
    from tidelog.protocol.hot import Buffer

logger = logging.getLogger("tidelog.connection")

# Requests that one connection may have served before others are looked at, in small ones; one with a large answer
# counts for several.
TURN_REQUESTS_MAX = 16
LARGE_ANSWER_COST = 8
# A reader that stops reading is not read from either, once this much waits for it (uvloop counts the bytes); nor one
# for which this much waits behind an answer that is not due yet.
WRITE_HIGH_WATER_BYTES = 8 * 1024 * 1024
# Answers held back to leave with one write. Small requests may have large answers: beyond it they are written.
CORKED_BYTES_MAX = 256 * 1024
# Pipelined requests whose answers are still open; beyond it the connection is not read until some are answered.
IN_FLIGHT_MAX = 1024

_FRAME_SIZE = Struct(">i")
_FRAME_HEAD = Struct(">ih")  # size and API key


class ConnectionOwner(Protocol):
    """The server that accepted a connection: limits, order, and where frames go. Tests put their own in its place."""

    frame_bytes_max: int
    wakes: DeferredCallbacks
    turns: FairScheduler

    def dispatch(self, frame: memoryview, connection: KafkaConnection) -> Answer: ...
    def connected(self, connection: KafkaConnection) -> bool: ...
    def disconnected(self, connection: KafkaConnection) -> None: ...
    def reserve_buffer(self, extra_bytes: int) -> bool: ...
    def not_read(self, connection: KafkaConnection) -> None: ...
    def widen(self, sock: socket.socket) -> None: ...
    def warn(self, kind: str, text: str) -> None: ...


class AnswerSlot:
    """The place of one answer among those of its connection: filled in any order, emptied in that of the requests."""

    __slots__ = ("connection", "deferred", "done", "frames", "size_bytes")

    def __init__(self, connection: KafkaConnection, deferred: Deferred | None = None) -> None:
        self.connection = connection
        self.deferred = deferred
        self.done = False
        self.frames: Any = None
        self.size_bytes = 0

    def fill(self, frames: Any) -> int:
        self.done, self.frames = True, frames
        self.size_bytes = sum(map(len, frames)) if type(frames) is list else len(frames)
        return self.size_bytes

    def completed(self, frames: Any) -> None:
        """The parked request has its answer, or None: there will be none."""
        connection = self.connection
        if frames is None:
            connection.close()
            return
        if connection.answer_head(self, frames):
            return
        connection.hold(self.fill(frames))

    def completed_exclusively(self, frames: Any) -> None:
        if frames is None:
            self.connection.close()
            return
        self.connection.end_exclusive()
        self.connection.hold(self.fill(frames))


def find_awaited(slots: deque[AnswerSlot]) -> Deferred | None:
    """The request whose answer is next and not there yet; all answers behind it wait, too."""
    return slots[0].deferred if slots and not slots[0].done else None


class KafkaConnection(asyncio.BufferedProtocol):
    __slots__ = (
        "_buffer", "_capacity_bytes", "_closed", "_corked", "_corked_bytes", "_end", "_exclusive", "_held_bytes",
        "_on_close", "_out", "_owner", "_paused_reading", "_pending", "_resting", "_start", "_transport", "_view",
        "_writable", "active", "host", "listener_name",
    )  # fmt: skip
    awaited = property(lambda self: find_awaited(self._pending))

    def __init__(self, owner: ConnectionOwner, listener_name: str) -> None:
        self._owner = owner
        self.listener_name = listener_name
        self.host = ""
        self.active = True  # since the server's last sweep of idle connections
        self._transport: asyncio.Transport | None = None
        self._buffer: bytearray | mmap.mmap = bytearray()
        self._view = memoryview(self._buffer)
        self._capacity_bytes = 0  # what is reserved; the view of a map is longer
        self._start = self._end = 0
        self._pending: deque[AnswerSlot] = deque()
        self._out: list[Buffer] = []
        self._corked = False
        self._corked_bytes = 0
        self._held_bytes = 0  # of answers that wait for an earlier one
        self._closed = False
        self._exclusive = False
        self._resting = False
        self._writable = True
        self._paused_reading = False
        self._on_close: list[Callable[[], None]] = []

    # ------------------------------------------------------------------------------------------- asyncio's protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        peer = transport.get_extra_info("peername")
        self.host = str(peer[0]) if peer else ""
        if not self._owner.connected(self):
            self._transport.abort()
            return
        self._transport.set_write_buffer_limits(high=WRITE_HIGH_WATER_BYTES)
        self._resize(BUFFER_SMALLEST_BYTES)

    def connection_lost(self, exc: Exception | None) -> None:
        self._owner.reserve_buffer(-self._capacity_bytes)
        self._capacity_bytes = 0
        self._transport = None
        waiting = [slot.deferred for slot in self._pending if not slot.done and slot.deferred is not None]
        self._pending.clear()
        self._owner.disconnected(self)
        call_all(each.on_abandon for each in waiting if each.on_abandon is not None)
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
            capacity = min(capacity, end + read_at_once(capacity, self._owner.turns.late))
        return self._view[end:capacity]

    def buffer_updated(self, nbytes: int) -> None:
        self._end += nbytes
        self.active = True
        if self._resting and self._transport is not None:
            # uvloop begins to read after `connection_made`, also where that has paused reading.
            self._transport.pause_reading()
            return
        turns = self._owner.turns
        if nbytes >= READ_LARGE_BYTES:
            turns.took(nbytes * READ_S_PER_BYTE)
        if turns.late:
            self._wait_in_line(is_first=True)
            return
        if self._end == self._capacity_bytes < BUFFER_USUAL_BYTES:
            self._resize(BUFFER_USUAL_BYTES)
            if self._closed:
                return
        wakes = self._owner.wakes
        wakes.collecting = True
        try:
            self._process()
        finally:
            wakes.collecting = False
            if wakes.waiting:
                wakes.run()

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

    def _process(self, turns: int = TURN_REQUESTS_MAX) -> None:
        """Take whole frames out of the buffer, up to `turns`, then write all answers that are due with one call."""
        view, start, end = self._view, self._start, self._end
        dispatch, pending, wakes = self._owner.dispatch, self._pending, self._owner.wakes
        size = 0
        has_more = False
        self._corked = True
        try:
            while end - start >= 4:
                size = _FRAME_SIZE.unpack_from(view, start)[0]
                if not 8 <= size <= self._owner.frame_bytes_max:
                    raise MalformedMessage(f"frame of {size} bytes (socket.request.max.bytes)")
                stop = start + 4 + size
                if stop > end or (pending and not self._ready()) or not self._writable:
                    break
                if turns <= 0:
                    has_more = True
                    break
                turns -= 1
                frame = view[start + 4 : stop]
                start = stop
                size = 0
                answer = dispatch(frame, self)
                if type(answer) is bytes and not pending:
                    self._out.append(answer)
                else:
                    if stop == end and wakes.waiting and wakes.collecting and isinstance(answer, Deferred):
                        # It may wait for followers, whom it has just given something to fetch: they are told first,
                        # unless more requests were read, which would give them more.
                        wakes.run()
                    self._answer(answer)
                    if self._closed:
                        break
                    if self._owner.turns.late:
                        turns = 0
                    elif type(answer) is list and len(answer) > 1:
                        turns -= LARGE_ANSWER_COST
        except MalformedMessage as error:
            self._owner.warn("malformed", f"closing connection from {self.host}: {error}")
            self.close()
            return
        except Exception as error:
            logger.error("a request from %s failed", self.host, exc_info=error)
            self._owner.warn("failed", f"closing connection from {self.host}: the broker failed at its request")
            self.close()
            return
        finally:
            self._corked = False
            self._start = start
        if start == end:
            self._start = self._end = 0
        else:
            self._make_room(size)
        out = self._out
        if len(out) == 1 and (transport := self._transport) is not None and not self._closed:
            self._out = []
            self._corked_bytes = 0
            transport.write(out[0])
        elif out:
            self._flush()
        if has_more:
            self._wait_in_line(is_first=False)
        elif pending or self._paused_reading or self._resting or self._closed or not self._writable:
            self._update_reading()

    def _ready(self) -> bool:
        return (
            not self._exclusive
            and not self._resting
            and self._writable
            and len(self._pending) < IN_FLIGHT_MAX
            and self._held_bytes < WRITE_HIGH_WATER_BYTES
            and not self._closed
        )

    def _make_room(self, frame_bytes: int) -> None:
        """After processing: the rest of the frame that has begun must fit behind what is already here."""
        start, end = self._start, self._end
        capacity = self._capacity_bytes
        wanted = 4 + frame_bytes
        if start + wanted <= capacity and end < capacity:
            return
        kept = end - start
        if wanted > capacity and kept == capacity - start:
            # Reserve by what has really arrived, not by what the frame claims: a claim costs the sender bytes first.
            if start == 0 and len(self._view) > capacity:
                self._reserve(min(capacity * 2, len(self._view)))
            else:
                self._resize(capacity * 2, wanted)
        elif start:
            self._view[:kept] = self._view[start:end]
            self._start, self._end = 0, kept

    def _reserve(self, capacity_bytes: int) -> bool:
        if not self._owner.reserve_buffer(capacity_bytes - self._capacity_bytes):
            self._owner.warn("buffers", f"closing connection from {self.host}: the node's receive buffers are full")
            self.close()
            # At once, not when the transport is closed: others ask for room in this same turn of the loop.
            self._owner.reserve_buffer(-self._capacity_bytes)
            self._capacity_bytes = 0
            return False
        self._capacity_bytes = capacity_bytes
        return True

    def _resize(self, capacity_bytes: int, wanted_bytes: int = 0) -> None:
        """Another buffer of this capacity; one that could grow to `wanted_bytes` without being copied, if large."""
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
        """The connection was idle for a while: return a large buffer, unless it bounds what a request still holds."""
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
                self._park(answer)
                return
            answer = answer.response
        if self._pending:
            slot = AnswerSlot(self)
            self._held_bytes += slot.fill(answer)
            self._pending.append(slot)
            if self._held_bytes > CORKED_BYTES_MAX:
                self._owner.not_read(self)
        elif type(answer) is list:
            self._out += answer
            self._corked_bytes += len(answer[0])
            if len(answer) > 1 or self._corked_bytes > CORKED_BYTES_MAX:
                # Large: let the transport count it now, so that a client that does not read is noticed at once.
                self._flush()
        else:
            buffer = cast("Buffer", answer)
            self._out.append(buffer)
            self._corked_bytes += len(buffer)
            if self._corked_bytes > CORKED_BYTES_MAX:
                self._flush()

    def _park(self, answer: Deferred) -> None:
        slot = AnswerSlot(self, answer)
        self._pending.append(slot)
        if answer.exclusive:
            self._exclusive = True
            answer.on_complete(slot.completed_exclusively)
        else:
            answer.on_complete(slot.completed)

    def answer_head(self, slot: AnswerSlot, frames: Any) -> bool:
        """Write what was completed if it is next in order and nothing else is under way: the common case, in short."""
        pending = self._pending
        if self._corked or self._paused_reading or not pending or pending[0] is not slot or type(frames) is list:
            return False
        transport = self._transport
        if transport is None or self._closed:
            return False
        pending.popleft()
        transport.write(frames)
        if pending and pending[0].done:
            self._drain()
        return True

    def end_exclusive(self) -> None:
        self._exclusive = False

    def hold(self, size_bytes: int) -> None:
        """So much more waits to be written in its turn."""
        self._held_bytes += size_bytes
        self._drain()
        if self._held_bytes > CORKED_BYTES_MAX:
            self._owner.not_read(self)

    def _drain(self) -> None:
        """An answer was completed: send what is now at the head of the order."""
        pending = self._pending
        while pending and pending[0].done:
            slot = pending.popleft()
            frames = slot.frames
            self._held_bytes -= slot.size_bytes
            if type(frames) is list:
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
        else:
            transport.writelines(out)
            if transport.get_write_buffer_size():
                self._owner.not_read(self)

    # ------------------------------------------------------------------------------------------ what the server asks

    @property
    def file_number(self) -> int:
        """Of the socket; the lowest that was free, so that it tells how many are in use. -1 where there is none."""
        found = self._transport.get_extra_info("socket") if self._transport is not None else None
        return -1 if found is None else int(found.fileno())

    def send_much(self) -> None:
        found = self._transport.get_extra_info("socket") if self._transport is not None else None
        if found is not None:
            self._owner.widen(found)

    @property
    def is_closing(self) -> bool:
        """It is closed as soon as the other side has taken what was answered."""
        return self._closed

    @property
    def partial(self) -> tuple[int, int] | None:
        """Where the request that has begun to arrive begins in the buffer, and how far it has come."""
        return (self._start, self._end) if self._end > self._start else None

    @property
    def unread_bytes(self) -> int:
        """Of answers, written and not taken by the other side, or waiting for an earlier one."""
        transport = self._transport
        return self._held_bytes + (transport.get_write_buffer_size() if transport is not None else 0)

    def rest(self) -> None:
        """Read nothing until `wake`."""
        self._resting = True
        self._update_reading()

    def wake(self, turns: int = TURN_REQUESTS_MAX) -> None:
        self._resting = False
        if self._paused_reading and self._ready() and self._transport is not None:
            self._process(turns)

    def _wake_for_one(self) -> None:
        self.wake(1)

    # ------------------------------------------------------------------------------------------------ back pressure

    def _wait_in_line(self, *, is_first: bool) -> None:
        self.rest()
        view, start = self._view, self._start
        for_records = self._end - start >= _FRAME_HEAD.size and _FRAME_HEAD.unpack_from(view, start)[1] <= ApiKey.FETCH
        wake = self._wake_for_one if is_first else self.wake
        self._owner.turns.wait(wake, is_first=is_first, for_records=for_records)

    def _resume(self) -> None:
        if self._paused_reading and self._ready() and self._transport is not None:
            if self._owner.turns.late:
                self._wait_in_line(is_first=True)
            else:
                self._process()

    def _update_reading(self) -> None:
        transport = self._transport
        if transport is None:
            return
        pause = not self._ready()
        if pause != self._paused_reading:
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
