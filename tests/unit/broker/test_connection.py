"""One connection: frames however the bytes arrive, answers in request order, bounds in both directions."""

from __future__ import annotations

import asyncio
import mmap
import random
import socket
import struct
import sys
from collections import deque
from collections.abc import Callable, Collection
from itertools import count
from typing import Any, cast

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tidelog.broker.network.connection import (
    CORKED_BYTES_MAX,
    IN_FLIGHT_MAX,
    TURN_REQUESTS_MAX,
    WRITE_HIGH_WATER_BYTES,
    KafkaConnection,
    is_mapped,
    keeps_buffers,
)
from tidelog.broker.network.receive_buffers import BUFFER_SMALLEST_BYTES, BUFFER_USUAL_BYTES
from tidelog.broker.network.request import CLOSED, Deferred
from tidelog.broker.scheduling.deferred_callbacks import DeferredCallbacks
from tidelog.broker.scheduling.fair_scheduler import FairScheduler
from tidelog.protocol.errors import MalformedMessage


class Transport:
    """What asyncio gives a protocol, recording what is asked of it."""

    def __init__(self) -> None:
        self.written = bytearray()
        self.writes = 0
        self.reading = True
        self.closed = False
        self.high_bytes = 0
        self.on_full: Callable[[], None] | None = None

    def get_extra_info(self, name: str) -> Any:
        return ("127.0.0.1", 1234) if name == "peername" else None

    def set_write_buffer_limits(self, high: int) -> None:
        pass

    def write(self, data: Any) -> None:
        self.writes += 1
        self.written += data
        if self.on_full is not None and len(self.written) > self.high_bytes:
            self.on_full()

    def writelines(self, chunks: Any) -> None:
        self.write(b"".join(chunks))

    def pause_reading(self) -> None:
        assert self.reading
        self.reading = False

    def resume_reading(self) -> None:
        assert not self.reading
        self.reading = True

    def get_write_buffer_size(self) -> int:
        return 0

    def close(self) -> None:
        self.closed = True

    abort = close


class Owner:
    """Answers each frame with what its first byte asks for."""

    frame_bytes_max = 200_000
    dispatch_pipelined: Any = None
    keys_of_nodes: Collection[int] = ()

    def __init__(self, receive_bytes_max: int = 1 << 30) -> None:
        self.frames: list[bytes] = []
        self.due: list[Callable[[], None]] = []
        self.parked: dict[bytes, Deferred] = {}
        self.reserved_bytes = 0
        self.callbacks = DeferredCallbacks(cast(Any, None))
        self.scheduler = FairScheduler(self.due.append)
        self.receive_bytes_max = receive_bytes_max

    def dispatch(self, frame: memoryview, connection: KafkaConnection) -> Any:
        data = bytes(frame)
        self.frames.append(data)
        if data[:1] in b"pe" and data:
            self.parked[data] = Deferred(exclusive=data[:1] == b"e")
            return self.parked[data]
        if data[:1] == b"n":
            return None
        if data[:1] == b"c":
            connection.close()
            return None
        if data[:1] == b"0":
            return CLOSED
        if data[:1] == b"m":
            return bytearray(200_000)
        if data[:1] == b"!":
            raise MalformedMessage("as asked")
        return [data[:4], data[4:]] if data[:1] == b"l" else data

    def connected(self, connection: KafkaConnection) -> bool:
        return True

    def disconnected(self, connection: KafkaConnection) -> None:
        pass

    def not_read(self, connection: KafkaConnection) -> None:
        pass

    def widen(self, sock: socket.socket) -> None:
        raise AssertionError("nobody follows")

    def turn(self) -> None:
        """The loop's next turns, as long as somebody wants one."""
        while self.due:
            self.due.pop(0)()

    def warn(self, kind: str, text: str) -> None:
        pass

    def buffers_full(self, host: str) -> None:
        pass

    def reserve_buffer(self, extra_bytes: int) -> bool:
        if extra_bytes > 0 and self.reserved_bytes + extra_bytes > self.receive_bytes_max:
            return False
        self.reserved_bytes += extra_bytes
        return True


def connect(owner: Owner) -> tuple[KafkaConnection, Transport]:
    connection, transport = KafkaConnection(owner, "PLAINTEXT"), Transport()
    connection.connection_made(transport)  # type: ignore[arg-type]
    return connection, transport


def framed(*payloads: bytes) -> bytes:
    return b"".join(struct.pack(">i", len(payload)) + payload for payload in payloads)


def feed(connection: KafkaConnection, transport: Transport, data: bytes, sizes: list[int] | None = None) -> None:
    """As the event loop does: no more than the buffer takes, and nothing while reading is paused."""
    position = 0
    pieces = iter(sizes or [])
    while position < len(data) and transport.reading and not transport.closed:
        buffer = connection.get_buffer(-1)
        assert len(buffer) > 0, "an empty buffer would end the connection"
        size = min(len(buffer), next(pieces, len(buffer)), len(data) - position)
        buffer[:size] = data[position : position + size]
        position += size
        connection.buffer_updated(size)
        cast(Owner, connection._owner).turn()


payloads = st.builds(
    lambda kind, size: kind + bytes([size % 251]) * max(size, 7),
    st.sampled_from([b"a", b"l"]),
    st.sampled_from([7, 100, 5000, 16_380, 40_000, 150_000]),
)


@given(st.lists(payloads, max_size=8), st.lists(st.integers(1, 60_000), max_size=60))
def test_frames_are_found_however_the_bytes_arrive(frames: list[bytes], sizes: list[int]) -> None:
    owner = Owner()
    connection, transport = connect(owner)
    feed(connection, transport, framed(*frames), sizes)
    assert owner.frames == frames
    assert transport.written == b"".join(frames)


@given(st.permutations(range(6)))
def test_answers_leave_in_the_order_of_their_requests(order: list[int]) -> None:
    owner = Owner()
    connection, transport = connect(owner)
    requests = [b"p%07d" % number for number in range(6)] + [b"a-direct"]
    feed(connection, transport, framed(*requests))
    assert transport.written == b""
    for number in order:
        owner.parked[requests[number]].complete(b"<%d>" % number)
    assert transport.written == b"<0><1><2><3><4><5>a-direct"


def test_a_client_of_ipv4_has_the_same_address_on_a_listener_for_both() -> None:
    transport = Transport()
    transport.get_extra_info = lambda name: ("::ffff:10.0.0.1", 1, 0, 0)  # type: ignore[method-assign]
    connection = KafkaConnection(Owner(), "PLAINTEXT")
    connection.connection_made(transport)  # type: ignore[arg-type]
    assert connection.host == "10.0.0.1"


def test_all_answers_of_one_read_leave_with_one_write() -> None:
    owner = Owner()
    connection, transport = connect(owner)
    feed(connection, transport, framed(*[b"a%07d" % number for number in range(TURN_REQUESTS_MAX)]))
    assert transport.writes == 1


def test_others_have_their_turn_while_one_has_sent_many_requests() -> None:
    owner = Owner()
    connection, transport = connect(owner)
    connection._resize(BUFFER_USUAL_BYTES)
    data = framed(*[b"a%07d" % number for number in range(TURN_REQUESTS_MAX * 2 + 1)])
    connection.get_buffer(-1)[: len(data)] = data
    connection.buffer_updated(len(data))
    for turn in (1, 2):
        assert len(owner.frames) == turn * TURN_REQUESTS_MAX
        assert not transport.reading
        owner.due.pop()()
    assert len(owner.frames) == TURN_REQUESTS_MAX * 2 + 1
    assert transport.reading
    assert transport.writes == 3


def test_a_small_request_does_not_wait_behind_large_ones() -> None:
    """A hundred requests of hundreds of KB take seconds to decode: heartbeats must not wait so long."""
    owner = Owner()
    seconds = count()
    owner.scheduler = FairScheduler(owner.due.append, lambda: float(next(seconds)))  # one of each line in a turn
    for payload in (b"a" * 20_000, b"a" * 20_000, b"a" * 20_000, b"small000"):
        connection, _ = connect(owner)
        connection._resize(1 << 15)
        data = framed(payload)
        connection.get_buffer(-1)[: len(data)] = data
        owner.scheduler.is_turn_long = True
        connection.buffer_updated(len(data))
    assert owner.frames == []
    owner.due.pop(0)()
    assert sorted(map(len, owner.frames)) == [8, 20_000]
    owner.turn()
    assert len(owner.frames) == 4


def test_large_answers_make_a_turn_shorter() -> None:
    owner = Owner()
    connection, transport = connect(owner)
    connection._resize(BUFFER_USUAL_BYTES)
    data = framed(*[b"l%07d" % number for number in range(9)])
    connection.get_buffer(-1)[: len(data)] = data
    connection.buffer_updated(len(data))
    assert len(owner.frames) == 2
    owner.turn()
    assert transport.written == data.replace(struct.pack(">i", 8), b"")


def test_a_buffer_grows_with_what_is_said_and_with_what_has_arrived_of_a_large_request() -> None:
    owner = Owner()
    owner.frame_bytes_max = 100_000_000
    connection, transport = connect(owner)
    feed(connection, transport, framed(*[b"a%07d" % number for number in range(400)]))
    assert owner.reserved_bytes == BUFFER_USUAL_BYTES
    request = b"a" + bytes(40_000_000)
    data = framed(request)
    reserved = set()
    for start in range(0, len(data), 50_000):
        feed(connection, transport, data[start : start + 50_000])
        reserved.add(owner.reserved_bytes)
        assert owner.reserved_bytes <= max(BUFFER_USUAL_BYTES, 2 * (start + 50_000))
    assert owner.frames[-1] == request
    assert len(reserved) < 20
    connection.give_back()
    assert owner.reserved_bytes == BUFFER_SMALLEST_BYTES


def test_a_request_without_a_response_takes_no_place_in_the_order() -> None:
    owner = Owner()
    connection, transport = connect(owner)
    feed(connection, transport, framed(b"n-acks-0", b"a-second"))
    assert transport.written == b"a-second"


def test_an_exclusive_request_holds_back_those_behind_it() -> None:
    owner = Owner()
    connection, transport = connect(owner)
    feed(connection, transport, framed(b"e-create", b"a-lookup"))
    assert owner.frames == [b"e-create"]
    assert not transport.reading
    owner.parked[b"e-create"].complete(b"created.")
    assert owner.frames == [b"e-create", b"a-lookup"]
    assert transport.written == b"created.a-lookup"
    assert transport.reading


def test_a_client_that_does_not_read_its_answers_is_not_read_from() -> None:
    owner = Owner()
    connection, transport = connect(owner)
    connection.pause_writing()
    assert not transport.reading
    connection.resume_writing()
    assert transport.reading


def test_requests_without_answers_are_bounded() -> None:
    owner = Owner()
    connection, transport = connect(owner)
    requests = [b"p%07d" % number for number in range(IN_FLIGHT_MAX + 10)]
    feed(connection, transport, framed(*requests))
    assert len(owner.frames) == IN_FLIGHT_MAX
    assert not transport.reading
    for request in requests[:20]:
        owner.parked[request].complete(request)
    assert len(owner.frames) == IN_FLIGHT_MAX + 10
    assert transport.reading


@pytest.mark.parametrize("size", [-1, 0, 7, Owner.frame_bytes_max + 1, 2**31 - 1])
def test_a_frame_of_an_impossible_size_closes_the_connection(size: int) -> None:
    connection, transport = connect(Owner())
    feed(connection, transport, struct.pack(">i", size))
    assert transport.closed


def test_a_malformed_frame_closes_the_connection_after_the_answers_before_it() -> None:
    connection, transport = connect(Owner())
    feed(connection, transport, framed(b"a-first.", b"!-broken", b"a-never."))
    assert transport.closed
    assert transport.written == b"a-first."


@pytest.mark.parametrize("is_alone", [False, True])
@pytest.mark.parametrize("failing", [b"0-acks-0", b"e-acks-0", b"!-malformed"])
def test_a_failure_without_an_answer_closes_the_connection_behind_the_answers_that_wait_before_it(
    failing: bytes, is_alone: bool
) -> None:
    owner = Owner()
    connection, transport = connect(owner)
    before = [] if is_alone else [b"p-first.", b"a-second", b"p-third."]
    feed(connection, transport, framed(*before, failing, b"a-never."))
    if failing in owner.parked:
        owner.parked[failing].complete(CLOSED)
    for each in before[::-2]:
        assert not transport.closed
        assert not transport.written
        owner.parked[each].complete(b"%b" % each)
    assert transport.closed
    assert transport.written == b"".join(before)
    assert owner.frames == [*before, failing]


def test_a_request_that_is_found_malformed_later_closes_the_connection() -> None:
    """Behind the answers before it, as one that is at once."""
    owner = _Logged()
    connection, transport = connect(owner)
    feed(connection, transport, framed(b"p-first.", b"e-broken", b"a-never."))
    owner.parked[b"e-broken"].complete(MalformedMessage("as asked"))
    assert owner.warnings == ["malformed"]
    assert not transport.closed
    owner.parked[b"p-first."].complete(b"p-first.")
    assert transport.closed
    assert transport.written == b"p-first."
    assert owner.frames == [b"p-first.", b"e-broken"]


def test_a_request_that_is_found_malformed_when_the_client_is_gone_changes_nothing() -> None:
    owner = _Logged()
    connection, transport = connect(owner)
    feed(connection, transport, framed(b"e-broken"))
    connection.connection_lost(None)
    owner.parked[b"e-broken"].complete(MalformedMessage("as asked"))
    assert owner.warnings == []


@pytest.mark.parametrize("is_released", [False, True])
@pytest.mark.parametrize("size", [3, 2**31 - 1])
def test_a_frame_of_an_impossible_size_has_its_turn_behind_an_exclusive_request(size: int, is_released: bool) -> None:
    """It was met when that request was read, and again at its end: one connection was counted twice."""
    owner = _Logged()
    connection, transport = connect(owner)
    request = b"e-first."
    feed(connection, transport, framed(request) + struct.pack(">i", size) + bytes(2 * BUFFER_USUAL_BYTES))
    assert owner.warnings == []
    assert owner.reserved_bytes <= BUFFER_USUAL_BYTES
    if is_released:
        connection._release()
        assert owner.warnings == ["malformed"]
        assert not transport.closed
    owner.parked[request].complete(request)
    assert transport.closed
    assert transport.written == request
    assert owner.warnings == ["malformed"]


def test_a_claimed_size_reserves_nothing_until_the_bytes_arrive() -> None:
    owner = Owner()
    connection, transport = connect(owner)
    feed(connection, transport, struct.pack(">i", Owner.frame_bytes_max) + b"x" * 1000)
    assert owner.reserved_bytes == BUFFER_SMALLEST_BYTES


def test_receive_buffers_of_all_connections_are_bounded_and_given_back() -> None:
    owner = Owner(receive_bytes_max=100_000)
    connection, transport = connect(owner)
    feed(connection, transport, framed(b"a" * 150_000))
    assert transport.closed
    assert owner.reserved_bytes <= 100_000
    connection.connection_lost(None)
    assert owner.reserved_bytes == 0


def test_an_idle_connection_gives_its_large_buffer_back() -> None:
    owner = Owner()
    connection, transport = connect(owner)
    feed(connection, transport, framed(b"a" * 150_000))
    assert owner.reserved_bytes > BUFFER_SMALLEST_BYTES
    connection.give_back()
    assert owner.reserved_bytes == BUFFER_SMALLEST_BYTES
    feed(connection, transport, framed(b"a-again."))
    assert owner.frames[-1] == b"a-again."


_LONE_FRAMES = (
    b"a-bytes.", b"l-a-list", b"p-parked", b"e-alone.", b"n-acks-0", b"c-closes", b"m-memory", b"!-broken", b"x-closes",
    b"?-raises", b"a" * 300, b"a" * 9000,
)  # fmt: skip


class _Logged(Owner):
    """Has two more kinds of frames, and keeps the warnings."""

    frame_bytes_max = 10_000

    def __init__(self) -> None:
        super().__init__()
        self.warnings: list[str] = []

    def dispatch(self, frame: memoryview, connection: KafkaConnection) -> Any:
        if bytes(frame[:1]) == b"x":
            connection.close()
        if bytes(frame[:1]) == b"?":
            raise RuntimeError("as asked")
        return super().dispatch(frame, connection)

    def warn(self, kind: str, text: str) -> None:
        self.warnings.append(kind)


def _play(steps: list[bytes | str], frame_bytes_max: int) -> list[Any]:
    """What the connection and its client see after each step: a frame that arrives alone, or an event."""
    owner, seen = _Logged(), []
    owner.frame_bytes_max = frame_bytes_max
    connection, transport = connect(owner)
    for step in steps:
        if isinstance(step, bytes):
            feed(connection, transport, framed(step))
        elif step == "complete" and owner.parked:
            owner.parked.pop(next(iter(owner.parked))).complete(b"complete")
        elif step == "full" and connection._writable:
            connection.pause_writing()
        elif step == "empty" and not connection._writable:
            connection.resume_writing()
        elif step == "read":  # the loop had read it already when reading was paused
            connection.get_buffer(-1)[:12] = framed(b"a-bytes.")
            connection.buffer_updated(12)
        owner.turn()
        partial = connection.partial
        unread_bytes = 0 if partial is None else partial[1] - partial[0]
        state = transport.reading, transport.closed, unread_bytes
        seen.append((len(owner.frames), bytes(transport.written), state, list(owner.warnings)))
    return seen


@given(
    st.lists(st.sampled_from([*_LONE_FRAMES, "complete", "full", "empty", "read"]), max_size=12),
    st.sampled_from([100, 10_000]),
)
@example([b"p-parked", b"a-bytes.", "complete"], 10_000)
@example([b"e-alone.", "read", "complete"], 10_000)
@example(["full", "read", "empty"], 10_000)
@example([b"a" * 300], 100)
@example([b"x-closes", "read"], 10_000)
def test_a_frame_that_arrives_alone_is_handled_as_one_of_many(steps: list[bytes | str], frame_bytes_max: int) -> None:
    alone = _play(steps, frame_bytes_max)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(KafkaConnection, "_process_single", lambda self, size_bytes: False)
        assert alone == _play(steps, frame_bytes_max)


def test_an_answer_completed_after_the_connection_is_gone_is_dropped() -> None:
    owner = Owner()
    connection, transport = connect(owner)
    feed(connection, transport, framed(b"p-parked"))
    connection.connection_lost(None)
    owner.parked[b"p-parked"].complete(b"too late")
    assert transport.written == b""


def test_answers_that_wait_for_an_earlier_one_are_bounded() -> None:
    owner = Owner()
    connection, transport = connect(owner)
    connection._resize(BUFFER_USUAL_BYTES)
    feed(connection, transport, framed(b"p-parked", *[b"m%07d" % number for number in range(500)]))
    assert len(owner.frames) - 1 <= WRITE_HIGH_WATER_BYTES // 200_000 + 1
    assert not transport.reading
    owner.parked[b"p-parked"].complete(b"<1>")
    owner.turn()
    assert len(owner.frames) == 501
    assert transport.reading
    assert len(transport.written) == 3 + 500 * 200_000


def test_large_answers_to_small_requests_are_written_before_all_are_made() -> None:
    owner = Owner()
    connection, transport = connect(owner)
    connection._resize(BUFFER_USUAL_BYTES)
    transport.high_bytes, transport.on_full = WRITE_HIGH_WATER_BYTES, connection.pause_writing
    feed(connection, transport, framed(*[b"m%07d" % number for number in range(500)]))
    assert len(transport.written) <= WRITE_HIGH_WATER_BYTES + CORKED_BYTES_MAX + 200_000
    assert not transport.reading
    transport.on_full = None
    connection.resume_writing()
    owner.turn()
    assert len(owner.frames) == 500


def test_what_is_read_from_a_connection_that_rests_is_served_when_it_wakes() -> None:
    """uvloop begins to read after `connection_made`, whatever that has paused."""
    owner = Owner()
    connection, transport = connect(owner)
    connection.rest()
    transport.reading = True
    feed(connection, transport, framed(b"a-early."))
    assert (bytes(transport.written), transport.reading) == (b"", False)
    connection.wake()
    assert (bytes(transport.written), transport.reading) == (b"a-early.", True)


def test_nothing_is_served_or_written_after_the_connection_was_closed() -> None:
    owner = Owner()
    connection, transport = connect(owner)
    feed(connection, transport, framed(b"p-parked", b"c-failed", b"a-behind"))
    assert transport.closed
    assert owner.frames == [b"p-parked", b"c-failed"]
    owner.parked[b"p-parked"].complete(b"too late")
    assert transport.written == b""


@pytest.mark.parametrize("kind", [b"p", b"e"], ids=["the next requests are served", "the next requests wait"])
def test_an_answer_for_a_client_that_is_gone_is_not_held(kind: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server counts what its clients have not read, and a connection that is gone would count for ever."""
    owner = Owner()
    unread: list[KafkaConnection] = []
    monkeypatch.setattr(owner, "not_read", unread.append)
    connection, transport = connect(owner)
    request = kind + b"x" * 100_000
    feed(connection, transport, framed(request))
    assert len(connection._buffer) > 100_000
    connection.connection_lost(None)
    assert len(connection._buffer) == 0, "requests that wait refer to the connection, and with it to its buffer"
    owner.parked[request].complete(bytes(CORKED_BYTES_MAX + 1))
    assert (unread, connection.unread_bytes, owner.reserved_bytes) == ([], 0, 0)


class SlowTransport(Transport):
    """Keeps what the client has not read. It takes nothing by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.unsent: deque[list[int]] = deque()  # the size of each buffer, and 1 for a part of a mapped file

    def write(self, data: Any) -> None:
        self.unsent.append([len(data), 0])

    def writelines(self, chunks: Any) -> None:
        self.unsent += ([len(each), int(is_mapped(each))] for each in chunks)

    def get_write_buffer_size(self) -> int:
        return sum(size for size, _ in self.unsent)

    def private_bytes(self) -> int:
        return sum(size for size, mapped in self.unsent if not mapped)

    def take(self, size_bytes: int) -> None:
        while size_bytes and self.unsent:
            taken = min(size_bytes, self.unsent[0][0])
            self.unsent[0][0] -= taken
            size_bytes -= taken
            if not self.unsent[0][0]:
                self.unsent.popleft()


class CopyingTransport(SlowTransport):
    __module__ = "asyncio.selector_events"


class FileOwner(Owner):
    """ "f" is answered with a head and two parts of a mapped file, "h" and "b" with memory, the latter in one piece."""

    def __init__(self) -> None:
        super().__init__()
        self.file = memoryview(mmap.mmap(-1, 1 << 20))

    def dispatch(self, frame: memoryview, connection: KafkaConnection) -> Any:
        kind, size_bytes = bytes(frame[:1]), 1000 * (frame[1] if len(frame) > 1 else 0)
        if kind == b"f":
            return [b"head", self.file[:size_bytes], b"next", self.file[-size_bytes:]]
        if kind == b"h":
            return [bytes(10), bytes(size_bytes)]
        if kind == b"b":
            return bytes(CORKED_BYTES_MAX + size_bytes)
        return super().dispatch(frame, connection)


def connect_slow(kind: type[SlowTransport]) -> tuple[FileOwner, KafkaConnection, SlowTransport]:
    owner, transport = FileOwner(), kind()
    connection = KafkaConnection(owner, "PLAINTEXT")
    connection.connection_made(transport)  # type: ignore[arg-type]
    return owner, connection, transport


def test_parts_of_a_file_that_a_slow_client_has_not_read_yet_are_not_memory() -> None:
    """Hundreds of clients that read large answers slowly were cut off, one after the other, before they had one."""
    _, connection, transport = connect_slow(SlowTransport)
    feed(connection, transport, framed(b"f\xff" + bytes(8)))
    assert transport.get_write_buffer_size() > 500_000
    assert connection.unread_bytes == 8
    feed(connection, transport, framed(b"h\xff" + bytes(8)))
    assert connection.unread_bytes == 8 + 10 + 255_000
    transport.take(510_008)
    assert connection.unread_bytes == transport.get_write_buffer_size() == 255_010
    transport.take(255_010)
    assert connection.unread_bytes == 0


def test_copies_of_parts_of_a_file_are_memory() -> None:
    """asyncio's transport makes copies before Python 3.12; from there on it keeps the parts."""
    copies = sys.version_info < (3, 12)
    assert keeps_buffers(asyncio.Transport()) is not copies
    _, connection, transport = connect_slow(CopyingTransport)
    feed(connection, transport, framed(b"f\xff" + bytes(8)))
    assert transport.get_write_buffer_size() == 510_008
    assert connection.unread_bytes == (510_008 if copies else 8)


@pytest.mark.parametrize("seed", range(20))
def test_at_least_the_memory_of_the_unread_answers_is_counted(seed: int) -> None:
    choice = random.Random(seed)
    owner, connection, transport = connect_slow(SlowTransport)
    parked = 0
    for _ in range(300):
        kind = choice.choice(b"ffhbxp-")
        size = choice.randrange(1, 255)
        if kind == ord("-"):
            transport.take(choice.randrange(1, 1_000_000))
        elif kind == ord("p"):
            parked += 1
            request = b"p%08d" % parked
            feed(connection, transport, framed(request))
            owner.parked[request].complete(bytes(1000 * size))
        elif kind == ord("x"):
            feed(connection, transport, framed(b"x" * (size + 8)))
        else:
            feed(connection, transport, framed(bytes((kind, size)) + bytes(8)))
        if choice.random() < 0.5:
            assert transport.private_bytes() <= connection.unread_bytes <= transport.get_write_buffer_size()
