"""Connections to other nodes: order, what breaks them, and what whoever waits is told."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import socket
import struct
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from itertools import accumulate
from unittest.mock import Mock

import pytest

from tests.patience import PATIENCE_S
from tests.stream_server import Serve, StreamServer
from tidelog.broker.network import channel
from tidelog.broker.network.channel import BUFFER_INITIAL_BYTES, FRAME_BYTES_MAX, Channel, Channels
from tidelog.protocol.errors import MalformedMessage
from tidelog.protocol.messages.api_versions import ApiVersion, ApiVersionsRequest, ApiVersionsResponse
from tidelog.protocol.messages.broker_heartbeat import BrokerHeartbeatRequest, BrokerHeartbeatResponse
from tidelog.replication.answer_size import ARRIVING_BYTES
from tidelog.replication.ports import Endpoint, PeerUnreachable, PortState

HEARTBEAT = 63
API_VERSIONS = 18  # its answer's header has no tags


@asynccontextmanager
async def peer(serve: Serve) -> AsyncIterator[Endpoint]:
    """A node that answers as `serve` says."""
    server = StreamServer(serve)
    await server.listen()
    yield Endpoint("127.0.0.1", server.port)
    await server.close()


async def read_request(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    """(correlation id, body behind a flexible header)."""
    size = struct.unpack(">i", await reader.readexactly(4))[0]
    frame = await reader.readexactly(size)
    _, _, correlation_id, client_id_bytes = struct.unpack_from(">hhih", frame)
    return correlation_id, frame[10 + client_id_bytes + 1 :]


def answer(correlation_id: int, body: bytes) -> bytes:
    return struct.pack(">iiB", len(body) + 5, correlation_id, 0) + body


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while True:
        correlation_id, body = await read_request(reader)
        writer.write(answer(correlation_id, body))


async def heartbeats(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while True:
        correlation_id, body = await read_request(reader)
        asked = BrokerHeartbeatRequest.decode(body, 1)
        response = BrokerHeartbeatResponse(is_fenced=False, is_caught_up=asked.broker_id == 7)
        writer.write(answer(correlation_id, response.encode(1)))


async def silence(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while True:
        await read_request(reader)


def kept(answers: list[bytes | None]) -> Callable[[memoryview | None], None]:
    """Takes answers in; they are valid only during the call."""
    return lambda body: answers.append(None if body is None else bytes(body))


async def settled(answers: list[bytes | None], count: int) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while len(answers) < count:  # noqa: ASYNC110
            await asyncio.sleep(0.001)


async def test_answers_come_in_order_also_those_asked_before_the_connection_was_there() -> None:
    async with peer(echo) as endpoint:
        channel = Channel(asyncio.get_running_loop(), endpoint, "tidelog-1")
        answers: list[bytes | None] = []
        for number in range(5):
            channel.request(HEARTBEAT, 1, b"%d" % number, kept(answers))
        await settled(answers, 5)
        channel.request(HEARTBEAT, 1, b"later", kept(answers))
        await settled(answers, 6)
        assert answers == [b"0", b"1", b"2", b"3", b"4", b"later"]
        channel.close()
        await channel.closed()


@pytest.mark.parametrize("size_bytes", [BUFFER_INITIAL_BYTES - 9, BUFFER_INITIAL_BYTES + 1, 5_000_000])
async def test_an_answer_larger_than_the_buffer_arrives_whole(size_bytes: int) -> None:
    body = bytes(range(256)) * (size_bytes // 256 + 1)
    async with peer(echo) as endpoint:
        channel = Channel(asyncio.get_running_loop(), endpoint, "tidelog-1")
        answers: list[bytes | None] = []
        for sent in (b"small", body, b"small again"):
            channel.request(HEARTBEAT, 1, sent, kept(answers))
        await settled(answers, 3)
        assert answers == [b"small", body, b"small again"]
        channel.close()
        await channel.closed()


async def test_the_arrived_bytes_are_those_of_an_answer_that_is_not_whole() -> None:
    link = Channel(asyncio.get_running_loop(), Endpoint("127.0.0.1", 9), "test")
    taken: list[bytes | None] = []
    for _ in range(3):
        link.request(HEARTBEAT, 1, b"", kept(taken))
    frames = [answer(1, b"first"), answer(2, bytes(3 * BUFFER_INITIAL_BYTES)), answer(3, b"third")]
    stops = list(accumulate(map(len, frames)))
    received, position = b"".join(frames), 0
    while position < len(received):
        room = link.get_buffer(-1)
        piece = received[position : position + min(len(room), 40_000)]
        room[: len(piece)] = piece
        link.buffer_updated(len(piece))
        position += len(piece)
        whole_bytes = max(stop for stop in [0, *stops] if stop <= position)
        assert link.arrived_bytes == position - whole_bytes
    assert len(taken) == 3
    link.close()
    await link.closed()


@pytest.mark.slow
@pytest.mark.parametrize("is_whole", [True, False])
async def test_an_answer_that_goes_on_arriving_is_awaited_longer_than_the_timeout(is_whole: bool) -> None:
    body = ApiVersionsResponse(api_keys=[ApiVersion()] * (2 * ARRIVING_BYTES)).encode(0)  # 12 times as many bytes

    async def answer_slowly(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        correlation_id, _ = await read_request(reader)
        frame = struct.pack(">ii", len(body) + 4, correlation_id) + body
        for position in range(0, len(frame) if is_whole else len(frame) // 2, ARRIVING_BYTES):
            writer.write(frame[position : position + ARRIVING_BYTES])
            await asyncio.sleep(0.2)
        await read_request(reader)

    loop = asyncio.get_running_loop()
    marks: list[float] = []
    async with peer(answer_slowly) as endpoint:
        channels = Channels(loop, "tidelog-1")
        began_s = loop.time()
        exchange = channels.exchange(
            endpoint, ApiVersionsRequest(), 0, timeout_ms=1000, on_arriving=lambda: marks.append(loop.time())
        )
        if is_whole:
            await asyncio.wait_for(exchange, PATIENCE_S)
            assert loop.time() - began_s > 1
        else:
            with pytest.raises(PeerUnreachable, match="no answer within 1000 ms"):
                await asyncio.wait_for(exchange, PATIENCE_S)
            assert loop.time() - marks[-1] > 0.9
        assert marks
        await channels.close()


async def test_no_answer_is_awaited_for_ever_because_it_goes_on_arriving(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel, "ARRIVING_TIMEOUTS_MAX", 4)

    async def answer_without_end(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        correlation_id, _ = await read_request(reader)
        writer.write(struct.pack(">ii", FRAME_BYTES_MAX, correlation_id))
        while not writer.is_closing():
            writer.write(bytes(ARRIVING_BYTES))
            await asyncio.sleep(0.02)

    async with peer(answer_without_end) as endpoint:
        channels = Channels(asyncio.get_running_loop(), "tidelog-1")
        with pytest.raises(PeerUnreachable, match="no answer within 200 ms"):
            await asyncio.wait_for(channels.exchange(endpoint, ApiVersionsRequest(), 0, timeout_ms=200), PATIENCE_S)
        await channels.close()


async def test_an_answer_behind_one_that_goes_on_arriving_is_lost_in_time() -> None:
    async def answer_slowly(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        correlation_id, _ = await read_request(reader)
        writer.write(struct.pack(">ii", 100 * ARRIVING_BYTES, correlation_id))
        for _ in range(99):
            writer.write(bytes(ARRIVING_BYTES))
            await asyncio.sleep(0.05)

    async with peer(answer_slowly) as endpoint:
        channels = Channels(asyncio.get_running_loop(), "tidelog-1")
        first = asyncio.create_task(channels.exchange(endpoint, ApiVersionsRequest(), 0, timeout_ms=1000))
        await asyncio.sleep(0)
        with pytest.raises(PeerUnreachable, match="no answer within 300 ms"):
            await asyncio.wait_for(channels.exchange(endpoint, ApiVersionsRequest(), 0, timeout_ms=300), PATIENCE_S)
        with pytest.raises(PeerUnreachable, match="no answer in time"):
            await asyncio.wait_for(first, PATIENCE_S)
        await channels.close()


async def test_who_waits_is_told_once_when_the_connection_breaks() -> None:
    async def answer_one(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        correlation_id, body = await read_request(reader)
        writer.write(answer(correlation_id, body))
        await read_request(reader)
        writer.close()

    async with peer(answer_one) as endpoint:
        channel = Channel(asyncio.get_running_loop(), endpoint, "tidelog-1")
        answers: list[bytes | None] = []
        for number in range(3):
            channel.request(HEARTBEAT, 1, b"%d" % number, kept(answers))
        await settled(answers, 3)
        assert answers == [b"0", None, None]
        assert channel.broken
        assert not channel.refused
        channel.request(HEARTBEAT, 1, b"too late", kept(answers))
        await settled(answers, 4)
        assert answers[3] is None


async def test_an_answer_out_of_order_breaks_the_connection() -> None:
    async def wrong(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        correlation_id, body = await read_request(reader)
        writer.write(answer(correlation_id + 1, body))
        await read_request(reader)

    async with peer(wrong) as endpoint:
        channels = Channels(asyncio.get_running_loop(), "tidelog-1")
        with pytest.raises(PeerUnreachable, match="out of order"):
            await channels.exchange(endpoint, BrokerHeartbeatRequest(), 1, timeout_ms=60_000)
        await channels.close()


async def test_an_answer_that_ends_in_its_header_is_one_that_never_came() -> None:
    async def cut(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        correlation_id, _ = await read_request(reader)
        writer.write((4).to_bytes(4, "big") + correlation_id.to_bytes(4, "big"))
        await reader.read()

    async with peer(cut) as endpoint:
        channel = Channel(asyncio.get_running_loop(), endpoint, "tidelog-1")
        answers: list[bytes | None] = []
        channel.request(HEARTBEAT, 1, b"", kept(answers))
        await settled(answers, 1)
        assert answers == [None]
        assert channel.broken
        await channel.closed()


@pytest.mark.parametrize(
    "received",
    [
        answer(1, b"one"),
        answer(1, b""),
        answer(1, b"one") + answer(2, b"two"),
        answer(1, b"one") + answer(2, b"two")[:9],
        answer(1, b"one")[:-1],
        answer(1, b"one") + b"\0",
        struct.pack(">iiBBB1s3s", 11, 1, 1, 5, 1, b"x", b"one"),  # one tag, of number 5 and one byte
        struct.pack(">ii", 4, 1),
        struct.pack(">iib", 4, 1, 0),
        struct.pack(">iib", 3, 1, 0),
        struct.pack(">iib", -1, 1, 0),
        answer(2, b"two"),
        answer(1, b"one") + answer(3, b"three"),
        answer(1, b"one") + answer(2, b"two") + answer(3, b"nothing was asked"),
    ],
)
@pytest.mark.parametrize("api_key", [HEARTBEAT, API_VERSIONS])
async def test_what_was_received_means_the_same_however_it_was_cut(received: bytes, api_key: int) -> None:
    """One whole answer has a short way; what comes byte by byte never takes it."""

    def read(reads: list[bytes]) -> tuple[list[bytes | None], str]:
        told: list[bytes | None] = []
        link = Channel(asyncio.get_running_loop(), Endpoint("127.0.0.1", 9), "test")
        link.connection_made(Mock())
        for _ in range(2):
            link.request(api_key, 1 if api_key == HEARTBEAT else 3, b"asked", kept(told))
        for data in reads:
            if not link.broken:
                link.get_buffer(-1)[: len(data)] = data
                link.buffer_updated(len(data))
        found = list(told), link.reason
        link.close()
        return found

    whole, ends, start = [], 0, 0
    while len(received) - start >= 4 and (ends := start + 4 + struct.unpack_from(">i", received, start)[0]) > start:
        whole.append(received[start:ends])
        start = ends
    in_bytes = read([bytes((each,)) for each in received])
    assert read([received]) == in_bytes
    assert read([*whole, received[start:]]) == in_bytes
    length = len(answer(1, b"one"))  # the second read is as long as the answer that began in the first
    for cut in range(1, length):
        assert read([received[:cut], received[cut : cut + length], received[cut + length :]]) == in_bytes


async def test_an_answer_that_its_taker_cannot_read_breaks_the_connection() -> None:
    async with peer(echo) as endpoint:
        link, later = Channel(asyncio.get_running_loop(), endpoint, "test"), list[bytes | None]()

        def take(body: memoryview | None) -> None:
            raise MalformedMessage("no number")

        link.request(HEARTBEAT, 1, b"1", take)
        link.request(HEARTBEAT, 1, b"2", kept(later))
        await settled(later, 1)
    assert (later, link.reason) == ([None], "an answer that cannot be read: no number")


async def test_an_exchange_gives_the_message_of_the_answer() -> None:
    async with peer(heartbeats) as endpoint:
        channels = Channels(asyncio.get_running_loop(), "tidelog-1")
        first, second = await asyncio.gather(
            channels.exchange(endpoint, BrokerHeartbeatRequest(broker_id=7), 1, timeout_ms=60_000),
            channels.exchange(endpoint, BrokerHeartbeatRequest(broker_id=8), 1, timeout_ms=60_000),
        )
        assert (first.is_caught_up, second.is_caught_up) == (True, False)
        await channels.close()


async def test_nobody_listening_is_told_from_one_who_does_not_answer() -> None:
    async with peer(silence) as endpoint:
        channels = Channels(asyncio.get_running_loop(), "tidelog-1")
        with pytest.raises(PeerUnreachable) as hung:
            await channels.exchange(endpoint, BrokerHeartbeatRequest(), 1, timeout_ms=50)
        assert not hung.value.refused
        assert await channels.probe(endpoint) is PortState.ACCEPTS
    with pytest.raises(PeerUnreachable) as gone:
        await channels.exchange(endpoint, BrokerHeartbeatRequest(), 1, timeout_ms=60_000)
    assert gone.value.refused
    assert await channels.probe(endpoint) is PortState.REFUSES
    await channels.close()


async def closes(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """As the kernel does for a process that dies: accepted, and reset."""
    writer.close()


async def answers_api_versions(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while True:
        size = int.from_bytes(await reader.readexactly(4), "big")
        frame = await reader.readexactly(size)
        body = frame[4:8] + ApiVersionsResponse().encode(3)
        writer.write(len(body).to_bytes(4, "big") + body)


async def test_a_process_that_accepts_connections_and_drops_them_gives_no_sign_of_life() -> None:
    channels = Channels(asyncio.get_running_loop(), "tidelog-1")
    async with peer(closes) as endpoint:
        assert await channels.probe(endpoint) is PortState.ACCEPTS
        assert await channels.sign_of_life(endpoint, 60_000) is PortState.REFUSES
    assert await channels.sign_of_life(endpoint, 60_000) is PortState.REFUSES
    async with peer(silence) as endpoint:
        assert await channels.sign_of_life(endpoint, 20) is PortState.UNKNOWN
    async with peer(answers_api_versions) as endpoint:
        for _ in range(2):
            assert await channels.sign_of_life(endpoint, 60_000) is PortState.ACCEPTS
    await channels.close()


async def test_a_life_is_not_over_when_its_idle_connection_was_closed() -> None:
    connections = 0

    async def drops_the_first(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        await (closes if connections == 1 else answers_api_versions)(reader, writer)

    channels = Channels(asyncio.get_running_loop(), "tidelog-1")
    async with peer(drops_the_first) as endpoint:
        assert await channels.sign_of_life(endpoint, 60_000) is PortState.ACCEPTS
    await channels.close()


async def test_a_process_that_hangs_for_long_is_not_taken_for_one_that_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel, "IN_FLIGHT_MAX", 20)
    channels = Channels(asyncio.get_running_loop(), "tidelog-1")
    async with peer(silence) as endpoint:
        found = {await channels.sign_of_life(endpoint, 5) for _ in range(30)}
        await channels.close()
    assert found == {PortState.UNKNOWN}


async def test_a_lane_that_timed_out_is_connected_anew_and_others_are_not_touched() -> None:
    connections = 0

    async def first_hangs(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        await (silence if connections == 1 else heartbeats)(reader, writer)

    async with peer(first_hangs) as endpoint:
        channels = Channels(asyncio.get_running_loop(), "tidelog-1")
        with pytest.raises(PeerUnreachable):
            await channels.exchange(endpoint, BrokerHeartbeatRequest(), 1, timeout_ms=50, lane="a")
        response = await channels.exchange(
            endpoint, BrokerHeartbeatRequest(broker_id=7), 1, timeout_ms=60_000, lane="a"
        )
        assert response.is_caught_up
        await channels.exchange(endpoint, BrokerHeartbeatRequest(), 1, timeout_ms=60_000, lane="b")
        assert connections == 3
        await channels.close()


async def test_a_link_is_its_owners_alone_and_ends_with_the_node() -> None:
    async with peer(silence) as endpoint:
        channels = Channels(asyncio.get_running_loop(), "tidelog-1")
        one, other = channels.connect(endpoint), channels.connect(endpoint)
        assert one is not other
        answers: list[bytes | None] = []
        one.request(HEARTBEAT, 1, b"", kept(answers))
        await channels.close()
        assert answers == [None]
        assert one.broken
        assert other.broken


def test_a_lookup_that_fails_after_the_connection_was_given_up_is_no_error_in_the_log() -> None:
    """A node whose names did not resolve wrote "Future exception was never retrieved" for each attempt."""
    uvloop = pytest.importorskip("uvloop")
    nowhere = Endpoint("nobody.invalid", 9)
    lost: list[dict[str, object]] = []

    async def give_up() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda loop, context: lost.append(context))
        given_up = [Channel(loop, nowhere, "test") for _ in range(4)]
        await asyncio.sleep(0)
        for each in given_up:
            each.close()
            await each.closed()
        with contextlib.suppress(OSError):
            await loop.getaddrinfo(nowhere.host, nowhere.port)
        await asyncio.sleep(0.1)
        gc.collect()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(give_up())
    assert not lost


@pytest.mark.parametrize("host", ["node..example", "n" * 64])
async def test_a_name_that_cannot_be_encoded_is_unreachable_at_once(host: str) -> None:
    """One such broker ended the check of all brokers' ports, and what was sent there waited for its whole timeout."""
    with ThreadPoolExecutor(1) as names:
        for resolver in (None, names):
            channels = Channels(asyncio.get_running_loop(), "test", resolver)
            endpoint = Endpoint(host, 9092)
            assert await channels.probe(endpoint, 60_000) is PortState.UNKNOWN
            with pytest.raises(PeerUnreachable, match="label") as unreachable:
                await channels.exchange(endpoint, BrokerHeartbeatRequest(), 1, timeout_ms=60_000)
            assert not unreachable.value.refused
            await channels.close()


async def test_a_name_is_looked_up_on_the_threads_given_and_its_next_address_is_tried(monkeypatch: pytest.MonkeyPatch):
    """uvloop looks names up on threads of its own, and aborted the process of a node that got none."""
    threads: list[str] = []
    hosts = ("127.0.0.2", "127.0.0.1", "127.0.0.3")  # the peer listens at the second

    def look_up(host: str, port: int, **options: object) -> list[object]:
        threads.append(threading.current_thread().name)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in hosts]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    async with peer(silence) as endpoint:
        with ThreadPoolExecutor(1, thread_name_prefix="names") as resolver:
            channels = Channels(asyncio.get_running_loop(), "test", resolver)
            assert await channels.probe(endpoint._replace(host="a-name.example")) is PortState.ACCEPTS
            await channels.close()
    assert threads == ["names_0"]


async def test_a_new_connection_takes_the_place_of_the_one_that_is_unused_for_longest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """160 to each controller that had led lately left no place for the heartbeats to the next one."""
    monkeypatch.setattr(channel, "CHANNELS_MAX", 3)
    async with peer(heartbeats) as endpoint, peer(silence) as silent:
        channels = Channels(asyncio.get_running_loop(), "tidelog-1")

        async def beat(lane: str, at: Endpoint = endpoint) -> None:
            await channels.exchange(at, BrokerHeartbeatRequest(), 1, timeout_ms=int(PATIENCE_S * 1000), lane=lane)

        busy = asyncio.create_task(beat("busy", silent))
        await asyncio.sleep(0)
        for lane in ("first", "second", "first", "third"):
            await beat(lane)
        assert [lane for _, lane in channels._channels] == ["busy", "first", "third"]
        for lane in ("first", "third"):
            channels._channel(endpoint, lane).request(
                HEARTBEAT, 1, BrokerHeartbeatRequest().encode(1), lambda body: None
            )
        with pytest.raises(PeerUnreachable, match="too many"):
            await beat("second")
        busy.cancel()
        await asyncio.gather(busy, return_exceptions=True)
        await channels.close()
