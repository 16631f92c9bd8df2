"""One connection: frames however they arrive, answers in turn, versions agreed, and an end to every wait."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
import uvloop

from tests.patience import PATIENCE_S, until
from tests.stream_server import StreamServer
from tidelog.client.config import AdminConfig
from tidelog.client.model import Node
from tidelog.client.network import connection as connection_module
from tidelog.client.network.cluster import Cluster
from tidelog.client.network.connection import MAX_IN_FLIGHT, AnswerTooLarge, Connection, connect
from tidelog.protocol.errors import ErrorCode, KafkaError
from tidelog.protocol.messages.api_versions import ApiVersion, ApiVersionsResponse
from tidelog.protocol.messages.fetch import FetchableTopicResponse, FetchResponse, PartitionData
from tidelog.protocol.messages.headers import RequestHeader
from tidelog.protocol.messages.heartbeat import HeartbeatRequest, HeartbeatResponse
from tidelog.protocol.messages.metadata import MetadataRequest

PATIENCE_MS = int(PATIENCE_S * 1000)
Script = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


async def read_frame(reader: asyncio.StreamReader) -> bytes:
    return await reader.readexactly(int.from_bytes(await reader.readexactly(4), "big"))


def framed(correlation_id: bytes, body: bytes, *, flexible: bool = False) -> bytes:
    frame = correlation_id + (b"\0" if flexible else b"") + body
    return len(frame).to_bytes(4, "big") + frame


def versions(newest: int = 4) -> bytes:
    keys = [ApiVersion(api_key=12, min_version=0, max_version=newest)]
    return ApiVersionsResponse(api_keys=keys).encode(4)


class Server:
    """Agrees on versions, then does as the script says."""

    def __init__(self, script: Script, *, negotiate: bool = True) -> None:
        self.script = script
        self.negotiate = negotiate

    async def __aenter__(self) -> Server:
        self.server = StreamServer(self._serve)
        await self.server.listen()
        self.port = self.server.port
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.negotiate:
            request = await read_frame(reader)
            writer.write(framed(request[4:8], versions()))
        await self.script(reader, writer)

    async def connect(self, **options: int) -> Connection:
        return await connect(
            "127.0.0.1",
            self.port,
            client_id="test",
            max_frame_bytes=options.get("max_frame_bytes", 10_000_000),
            software_version="1",
            timeout_ms=options.get("timeout_ms", PATIENCE_MS),
        )


def beat(connection: Connection, timeout_ms: float = PATIENCE_MS) -> asyncio.Future[HeartbeatResponse]:
    return connection.send(HeartbeatRequest(group_id="g"), HeartbeatResponse, 4, timeout_ms)


def answer_beat(request: bytes, code: int) -> bytes:
    return framed(request[4:8], HeartbeatResponse(error_code=code).encode(4), flexible=True)


async def test_answers_are_matched_to_requests_however_the_bytes_are_cut():
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        requests = [await read_frame(reader) for _ in range(3)]
        stream = b"".join(answer_beat(request, code) for code, request in enumerate(requests, 1))
        for at in range(0, len(stream), 5):
            writer.write(stream[at : at + 5])
            await writer.drain()
            await asyncio.sleep(0.001)
        await reader.read()

    async with Server(script) as server:
        connection = await server.connect()
        answers = await asyncio.gather(beat(connection), beat(connection), beat(connection))
        assert [answer.error_code for answer in answers] == [1, 2, 3]
        connection.close()


async def test_answers_larger_than_the_inbox_keep_their_records_in_place():
    records = bytes(range(256)) * 2_000
    body = FetchResponse(
        responses=[FetchableTopicResponse(topic="t", partitions=[PartitionData(high_watermark=5, records=records)])]
    ).encode(4)

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for _ in range(3):
            request = await read_frame(reader)
            writer.write(framed(request[4:8], body))
        await reader.read()

    async with Server(script) as server:
        connection = await server.connect()
        waiting = [connection.send(HeartbeatRequest(group_id="g"), FetchResponse, 4, 1000) for _ in range(3)]
        for answer in await asyncio.gather(*waiting):
            data = answer.responses[0].partitions[0]
            assert isinstance(data.records, memoryview)
            assert bytes(data.records) == records
        connection.close()


async def test_a_wait_that_ends_while_its_answer_is_decoded_leaves_the_connection_whole(
    monkeypatch: pytest.MonkeyPatch,
):
    """As a Ctrl-C ends it: asyncio.run cancels its task from inside the signal."""

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for code in (1, 2):
            writer.write(answer_beat(await read_frame(reader), code))
        await reader.read()

    async with Server(script) as server:
        connection = await server.connect()
        cancelled = beat(connection)
        decode = connection._decode

        def interrupted(*arguments: Any) -> Any:
            cancelled.cancel()
            return decode(*arguments)

        monkeypatch.setattr(connection, "_decode", interrupted)
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(cancelled, PATIENCE_S)
        assert (await asyncio.wait_for(beat(connection), PATIENCE_S)).error_code == 2
        connection.close()


async def test_an_answer_out_of_turn_ends_the_connection():
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_frame(reader)
        second = await read_frame(reader)
        writer.write(answer_beat(second, 0))
        await reader.read()

    async with Server(script) as server:
        connection = await server.connect()
        first, second = beat(connection), beat(connection)
        for waiting in (first, second):
            with pytest.raises(KafkaError, match="out of turn"):
                await waiting
        assert connection.closed


async def test_silence_ends_in_a_timeout_and_takes_the_later_requests_along():
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()

    async with Server(script) as server:
        connection = await server.connect()
        patient, hasty = beat(connection, 10_000), beat(connection, 30)
        with pytest.raises(KafkaError) as caught:
            await hasty
        assert caught.value.code is ErrorCode.REQUEST_TIMED_OUT
        with pytest.raises(KafkaError) as caught:
            await patient
        assert caught.value.code is ErrorCode.NETWORK_EXCEPTION
        assert connection.closed


@pytest.mark.parametrize("announced", [10_001, 2**31 - 1, -5])
async def test_a_frame_beyond_the_bound_is_not_read(announced):
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_frame(reader)
        writer.write(announced.to_bytes(4, "big", signed=True))
        await reader.read()

    async with Server(script) as server:
        connection = await server.connect(max_frame_bytes=10_000)
        with pytest.raises(KafkaError, match="not a Kafka broker"):
            await beat(connection)


async def test_a_request_whose_answer_is_too_large_hears_so_and_the_next_one_of_the_end():
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        request = await read_frame(reader)
        await read_frame(reader)
        writer.write((10_001).to_bytes(4, "big") + request[4:8])
        await reader.read()

    async with Server(script) as server:
        connection = await server.connect(max_frame_bytes=10_000)
        first, second = beat(connection), beat(connection)
        text = "answered Heartbeat with 10001 bytes, receive_message_max_bytes is 10000"
        with pytest.raises(AnswerTooLarge, match=text) as caught:
            await first
        assert caught.value.code is ErrorCode.NETWORK_EXCEPTION
        with pytest.raises(KafkaError, match=text) as end:
            await second
        assert type(end.value) is KafkaError
        assert connection.closed


@pytest.mark.parametrize("garbage", [b"", b"\0", b"\0\0\0\0\0\xff\xff\xff"])
async def test_an_answer_that_cannot_be_read_is_an_error_and_the_end(garbage):
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        request = await read_frame(reader)
        writer.write(framed(request[4:8], garbage, flexible=True))
        await reader.read()

    async with Server(script) as server:
        connection = await server.connect()
        with pytest.raises(KafkaError):
            await beat(connection)
        assert connection.closed


@pytest.mark.parametrize(
    ("cause", "reason"),
    [
        (ConnectionRefusedError(111, "Connect call failed ('127.0.0.1', 9092)"), "Connection refused"),
        (
            OSError(
                "Multiple exceptions: [Errno 111] Connect call failed ('::1', 9092, 0, 0), "
                "[Errno 113] Connect call failed ('127.0.0.1', 9092)"
            ),
            "Connection refused, No route to host",
        ),
        (socket.gaierror(-3, "Temporary failure in name resolution"), "Temporary failure in name resolution"),
        (OSError("of no number"), "of no number"),
        (UnicodeError("label too long"), "label too long"),
    ],
)
async def test_a_connection_that_does_not_come_about_has_its_reason(
    cause: Exception, reason: str, monkeypatch: pytest.MonkeyPatch
):
    async def refuse(*_: object) -> None:
        raise cause

    monkeypatch.setattr(asyncio.get_running_loop(), "create_connection", refuse)
    with pytest.raises(KafkaError) as caught:
        await connect(
            "localhost", 9092, client_id="c", max_frame_bytes=100, software_version="0", timeout_ms=PATIENCE_MS
        )
    assert str(caught.value) == f"NETWORK_EXCEPTION: cannot connect to localhost:9092: {reason}"


async def test_a_lost_connection_fails_all_that_waits_and_says_so_once():
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_frame(reader)

    async with Server(script) as server:
        connection = await server.connect()
        closed: list[Connection] = []
        connection.on_close = closed.append
        waiting = [beat(connection) for _ in range(3)]
        outcomes = await asyncio.gather(*waiting, return_exceptions=True)
        assert [getattr(outcome, "code", None) for outcome in outcomes] == [ErrorCode.NETWORK_EXCEPTION] * 3
        connection.close()
        assert closed == [connection]
        with pytest.raises(KafkaError, match="not connected"):
            beat(connection)


async def test_a_callback_gets_its_response_in_the_pass_of_the_loop_that_reads_it():
    """A raising callback is reported, and costs neither the connection nor the next response."""

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        requests = [await read_frame(reader) for _ in range(3)]
        writer.write(b"".join(answer_beat(request, code) for code, request in enumerate(requests, 1)))
        await reader.read()

    async with Server(script) as server:
        connection = await server.connect()
        loop = asyncio.get_running_loop()
        problems: list[dict[str, object]] = []
        loop.set_exception_handler(lambda _, context: problems.append(context))
        calls: list[object] = []
        split_frames = connection._split_frames

        def read() -> None:
            split_frames()
            calls.append("end")

        connection._split_frames = read  # type: ignore[method-assign]

        def handle(response: HeartbeatResponse | None, error: Exception | None) -> None:
            assert response is not None
            assert error is None
            calls.append(response.error_code)
            if response.error_code == 1:
                raise KafkaError(ErrorCode.UNKNOWN_SERVER_ERROR, "of the callback")
            raise asyncio.CancelledError("of a future that the callback reads")

        for _ in range(2):
            connection.send_with_callback(HeartbeatRequest(group_id="g"), HeartbeatResponse, 4, PATIENCE_MS, handle)
        assert (await beat(connection)).error_code == 3
        assert [call for call in calls if call != "end"] == [1, 2]
        assert calls.index("end") == 1 or calls[:3] == [1, 2, "end"]
        assert [str(problem["exception"]) for problem in problems] == [
            "UNKNOWN_SERVER_ERROR: of the callback",
            "of a future that the callback reads",
        ]
        assert not connection.closed
        connection.close()


async def test_a_callback_gets_the_error_of_a_lost_connection_after_its_end():
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_frame(reader)

    async with Server(script) as server:
        connection = await server.connect()
        calls: list[object] = []
        connection.on_close = calls.append
        lost = asyncio.Event()

        def handle(response: HeartbeatResponse | None, error: Exception | None) -> None:
            assert isinstance(error, KafkaError)
            calls.append((response, error.code))
            lost.set()

        connection.send_with_callback(HeartbeatRequest(group_id="g"), HeartbeatResponse, 4, PATIENCE_MS, handle)
        async with asyncio.timeout(PATIENCE_S):
            await lost.wait()
        assert calls == [connection, (None, ErrorCode.NETWORK_EXCEPTION)]


async def test_each_request_names_its_own_api_version_and_number():
    headers: list[tuple[RequestHeader, bytes]] = []

    async def script(reader, writer):
        for version in (0, 4, 3, 4):
            request = await read_frame(reader)
            header, position = RequestHeader.read(request, 0, 2 if version == 4 else 1)
            headers.append((header, request[position:]))
            body = HeartbeatResponse().encode(version)
            writer.write(framed(request[4:8], body, flexible=version == 4))

    async with Server(script) as server:
        connection = await server.connect()
        for version in (0, 4, 3, 4):
            await connection.send(HeartbeatRequest(group_id="g"), HeartbeatResponse, version, PATIENCE_MS)
        connection.close()
    first = headers[0][0].correlation_id
    for place, (version, (header, body)) in enumerate(zip((0, 4, 3, 4), headers)):
        assert header == RequestHeader(
            request_api_key=12, request_api_version=version, correlation_id=first + place, client_id="test"
        )
        assert body == HeartbeatRequest(group_id="g").encode(version)


async def test_unanswered_requests_are_bounded():
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()

    async with Server(script) as server:
        connection = await server.connect()
        waiting = [beat(connection) for _ in range(MAX_IN_FLIGHT)]
        with pytest.raises(KafkaError, match="owes 128 answers"):
            beat(connection)
        connection.close()
        await asyncio.gather(*waiting, return_exceptions=True)


async def test_an_old_broker_refuses_our_api_versions_and_is_asked_in_its_own():
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        first = await read_frame(reader)
        assert first[2:4] == b"\0\4"
        writer.write(framed(first[4:8], ApiVersionsResponse(error_code=35).encode(0)))
        second = await read_frame(reader)
        assert second[2:4] == b"\0\0"
        keys = [ApiVersion(api_key=12, min_version=0, max_version=1)]
        writer.write(framed(second[4:8], ApiVersionsResponse(api_keys=keys).encode(0)))
        await reader.read()

    async with Server(script, negotiate=False) as server:
        connection = await server.connect()
        assert connection.version_of(HeartbeatRequest) == 1
        connection.close()


async def test_no_common_version_names_both_sides():
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()

    async with Server(script) as server:
        connection = await server.connect()
        connection._versions[12] = (7, 9)
        with pytest.raises(KafkaError, match="versions 7 to 9 of Heartbeat, this client 0 to 4") as caught:
            connection.version_of(HeartbeatRequest)
        assert caught.value.code is ErrorCode.UNSUPPORTED_VERSION
        connection.close()


async def test_the_address_of_a_controller_is_named_as_such():
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()

    async with Server(script) as server:
        connection = await server.connect()
        connection._versions = {18: (0, 4), 62: (0, 4)}
        with pytest.raises(KafkaError, match=r":\d+ is the address of a controller: clients connect to brokers"):
            connection.version_of(MetadataRequest)
        connection.close()


async def test_a_server_that_accepts_and_says_nothing_is_given_up():
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()

    async with Server(script, negotiate=False) as server:
        with pytest.raises(KafkaError):
            await server.connect(timeout_ms=50)


async def test_a_connection_that_closes_before_it_is_used_is_made_anew():
    cluster = Cluster(AdminConfig(reconnect_backoff_ms=0, reconnect_backoff_max_ms=0))
    cluster.metadata = cluster.metadata._replace(nodes={1: Node(1, "host", 9092)})
    dead, alive = Connection("host:9092", "test", 1000), Connection("host:9092", "test", 1000)
    dead.close()
    made = [dead, alive]

    async def opened(host: str, port: int) -> Connection:
        return made.pop(0)

    cluster._open_connection = opened  # type: ignore[method-assign]
    with pytest.raises(KafkaError, match="closed the connection"):
        await cluster.connection(1)
    assert await cluster.connection(1) is alive
    await cluster.close()


async def test_a_connection_that_fails_by_a_fault_is_not_tried_again_at_once():
    cluster = Cluster(AdminConfig(reconnect_backoff_ms=600_000, reconnect_backoff_max_ms=600_000))
    cluster.metadata = cluster.metadata._replace(nodes={1: Node(1, "host", 9092)})
    attempts: list[str] = []

    async def opened(host: str, port: int) -> Connection:
        attempts.append(host)
        raise LookupError("a fault")

    cluster._open_connection = opened  # type: ignore[method-assign]
    with pytest.raises(LookupError):
        await cluster.connection(1)
    second = asyncio.ensure_future(cluster.connection(1))
    await asyncio.sleep(0.05)
    assert not second.done()
    assert attempts == ["host"]
    await cluster.close()
    with pytest.raises(KafkaError):
        await second


async def test_a_name_that_cannot_be_looked_up_at_the_end_of_the_interpreter_is_an_error_of_the_network(monkeypatch):
    async def refuse(*arguments: object, **options: object) -> None:
        raise RuntimeError("cannot schedule new futures after interpreter shutdown")

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", refuse)
    with pytest.raises(KafkaError, match="cannot connect to host:9092: cannot schedule new futures"):
        await connect("host", 9092, client_id="c", max_frame_bytes=1000, software_version="1", timeout_ms=PATIENCE_MS)


def resolved(
    monkeypatch: pytest.MonkeyPatch, reached: dict[str, int | Callable[[], Awaitable[None]] | None]
) -> list[str]:
    """Let a name have these addresses: each is a port of this machine (None: as asked for), or fails as the function.

    Returns a list of the addresses that are given up.
    """
    loop = asyncio.get_running_loop()
    create_connection = loop.create_connection
    given_up: list[str] = []

    async def getaddrinfo(*arguments: Any, **options: Any) -> list[Any]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 0)) for address in reached]

    async def create(factory: Any, host: str = "", port: int = 0, **options: Any) -> Any:
        if host not in reached:  # the server's own
            return await create_connection(factory, **options)
        place = reached[host]
        try:
            if callable(place):
                await place()
                place = None
            return await create_connection(factory, "127.0.0.1", place or port)
        except asyncio.CancelledError:
            given_up.append(host)
            raise

    monkeypatch.setattr(loop, "getaddrinfo", getaddrinfo)
    monkeypatch.setattr(loop, "create_connection", create)
    monkeypatch.setattr(connection_module, "_ADDRESS_WAIT_S", 0.01)
    return given_up


async def hang() -> None:
    await asyncio.Event().wait()


async def refuse() -> None:
    raise ConnectionRefusedError(111, "Connection refused")


async def connect_by_name(port: int, timeout_ms: float = PATIENCE_MS) -> Connection:
    return await connect("name", port, client_id="c", max_frame_bytes=1000, software_version="1", timeout_ms=timeout_ms)


async def until_end(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read()


async def test_an_address_of_a_name_that_does_not_answer_does_not_hide_the_others(monkeypatch):
    given_up = resolved(monkeypatch, {"192.0.2.1": hang, "192.0.2.2": refuse, "192.0.2.3": hang, "192.0.2.4": None})
    async with Server(until_end) as server:
        connection = await connect_by_name(server.port)
        assert not connection.closed
        assert sorted(given_up) == ["192.0.2.1", "192.0.2.3"]
        connection.close()
        await connection.wait_closed(1)


async def test_an_address_that_accepts_and_says_nothing_does_not_hide_the_others(monkeypatch):
    ended = asyncio.Event()

    async def mute(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.read(1000):
            pass
        ended.set()

    async with Server(mute, negotiate=False) as silent, Server(until_end) as server:
        resolved(monkeypatch, {"192.0.2.1": silent.port, "192.0.2.2": None})
        connection = await connect_by_name(server.port)
        assert not connection.closed
        async with asyncio.timeout(PATIENCE_S):
            await ended.wait()  # the other connection is closed
        connection.close()
        await connection.wait_closed(1)


async def test_a_name_whose_addresses_all_fail_has_the_first_reason_and_all_that_hang_end_by_the_timeout(monkeypatch):
    resolved(monkeypatch, {"192.0.2.1": refuse, "192.0.2.2": refuse})
    with pytest.raises(KafkaError, match="cannot connect to name:9: Connection refused"):
        await connect_by_name(9)
    monkeypatch.undo()
    given_up = resolved(monkeypatch, {"192.0.2.1": hang, "192.0.2.2": hang})
    with pytest.raises(KafkaError, match="name:9 did not answer within 50 ms"):
        await connect_by_name(9, 50)
    assert sorted(given_up) == ["192.0.2.1", "192.0.2.2"]


# -- an exchange, without a turn of the event loop


@contextlib.asynccontextmanager
async def connected_pair() -> AsyncIterator[tuple[Connection, socket.socket]]:
    """A connection, and the broker's end of it."""
    own, other = socket.socketpair()
    other.setblocking(False)
    _, connection = await asyncio.get_running_loop().create_connection(
        lambda: Connection("b:1", "c", 1_000_000), sock=own
    )
    with other:
        yield connection, other
        connection.close()
        await connection.wait_closed(PATIENCE_S)


def heartbeat_answer(correlation_id: int, error_code: int = 0) -> bytes:
    return framed(correlation_id.to_bytes(4, "big"), HeartbeatResponse(error_code=error_code).encode(3))


def exchange(connection: Connection, *, waits_s: float = PATIENCE_S) -> Any:
    """One heartbeat. The reader understands an answer without an error."""

    def read(frame: bytes | memoryview) -> str | None:
        message, _ = HeartbeatResponse.read(frame, 4, 3)
        return None if message.error_code else "usual"

    return connection.exchange(HeartbeatRequest(), 3, read, time.monotonic() + waits_s)


def then_awaited(connection: Connection) -> asyncio.Future[Any]:
    """What `await_answer` hands over."""
    outcome: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    def handle(answer: Any, error: Exception | None) -> None:
        outcome.set_result(error or answer)

    connection.await_answer(HeartbeatResponse, 3, PATIENCE_MS, handle)
    return outcome


async def test_an_exchange_reads_the_answer_at_once_and_leaves_the_connection_as_it_was() -> None:
    async with connected_pair() as (connection, broker):
        for number in range(1, 4):
            broker.sendall(heartbeat_answer(number))
            assert connection.can_exchange
            assert exchange(connection) == "usual"
        assert connection.in_flight == 0
        requests = broker.recv(10_000)
        size = int.from_bytes(requests[:4], "big") + 4
        assert [RequestHeader.read(requests, at + 4, 1)[0].correlation_id for at in (0, size, 2 * size)] == [1, 2, 3]
        usual = connection.send(HeartbeatRequest(), HeartbeatResponse, 3, PATIENCE_MS)
        assert not connection.can_exchange
        broker.sendall(heartbeat_answer(4))
        assert (await usual).error_code == 0
        assert connection.can_exchange


@pytest.mark.parametrize("read_at_once", [0, 1, 3, 4, 7, 8, 9], ids=lambda count: f"{count} bytes")
async def test_an_answer_that_is_not_whole_goes_on_as_any_other(read_at_once: int) -> None:
    async with connected_pair() as (connection, broker):
        answer = heartbeat_answer(1)
        broker.sendall(answer[:read_at_once])
        assert exchange(connection, waits_s=0.001) is None
        outcome = then_awaited(connection)
        assert connection.in_flight == 1
        broker.sendall(answer[read_at_once:])
        assert (await asyncio.wait_for(outcome, PATIENCE_S)).error_code == 0
        broker.sendall(heartbeat_answer(2))
        assert exchange(connection) == "usual"


async def test_an_answer_that_the_reader_does_not_understand_is_decoded() -> None:
    async with connected_pair() as (connection, broker):
        broker.sendall(heartbeat_answer(1, ErrorCode.REBALANCE_IN_PROGRESS))
        assert exchange(connection) is None
        assert then_awaited(connection).result().error_code == ErrorCode.REBALANCE_IN_PROGRESS
        assert connection.can_exchange


@pytest.mark.parametrize(
    "answer", [heartbeat_answer(7), (2_000_000).to_bytes(4, "big") * 4], ids=["other", "too large"]
)
async def test_a_wrong_answer_to_an_exchange_ends_the_connection(answer: bytes) -> None:
    async with connected_pair() as (connection, broker):
        broker.sendall(answer)
        assert exchange(connection) is None
        outcome = await asyncio.wait_for(then_awaited(connection), PATIENCE_S)
        assert outcome.code is ErrorCode.NETWORK_EXCEPTION
        assert connection.closed
        assert not connection.can_exchange


async def test_two_answers_to_one_exchange_end_the_connection() -> None:
    async with connected_pair() as (connection, broker):
        broker.sendall(heartbeat_answer(1) * 2)
        assert exchange(connection) is None
        assert then_awaited(connection).result().error_code == 0
        assert connection.closed


async def test_an_end_of_the_stream_in_an_exchange_is_met_by_the_loop() -> None:
    async with connected_pair() as (connection, broker):
        broker.shutdown(socket.SHUT_WR)
        assert exchange(connection) is None
        outcome = await asyncio.wait_for(then_awaited(connection), PATIENCE_S)
        assert outcome.code is ErrorCode.NETWORK_EXCEPTION


async def test_no_exchange_on_a_closed_connection() -> None:
    async with connected_pair() as (connection, _):
        connection.close()
        assert not connection.can_exchange


async def test_an_exchange_reads_no_descriptor_that_is_closed() -> None:
    """The write may meet an error and close the socket: its number may be that of another connection then."""
    async with connected_pair() as (connection, broker):
        assert connection._transport is not None
        connection._transport.abort()
        broker.sendall(heartbeat_answer(1))
        assert connection.can_exchange
        assert exchange(connection) is None
        outcome = await asyncio.wait_for(then_awaited(connection), PATIENCE_S)
        assert outcome.code is ErrorCode.NETWORK_EXCEPTION


async def test_no_exchange_while_something_unasked_arrives() -> None:
    async with connected_pair() as (connection, broker):
        broker.sendall((200_000).to_bytes(4, "big") + b"unasked")
        await until(lambda: not connection.can_exchange)
        assert not connection.closed


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_what_arrives_while_the_connection_reads_later_is_read_after_that(run: Callable[[Any], None]) -> None:
    """Linux does not tell the loop of the bytes until the connection reads again, and must tell it then."""
    is_linux = sys.platform == "linux"

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for _ in range(3):
            writer.write(answer_beat(await read_frame(reader), 7))
        await reader.read()

    async def beats() -> None:
        async with Server(script) as server:
            connection = await server.connect()
            for _ in range(3):
                answer = beat(connection)
                connection.set_reads_later(True)
                assert (unread_bytes_awaited(connection) == connection_module.UNREAD_BYTES) is is_linux
                await asyncio.sleep(0.02)
                assert answer.done() is not is_linux
                connection.set_reads_later(False)
                assert unread_bytes_awaited(connection) == 1
                assert (await asyncio.wait_for(answer, PATIENCE_S)).error_code == 7
            connection.close()
            await connection.wait_closed(PATIENCE_S)
            connection.set_reads_later(True)

    run(beats())


async def test_a_system_without_the_option_reads_on() -> None:
    class Socket:
        def setsockopt(self, *_: int) -> None:
            raise OSError(errno.ENOPROTOOPT, "Protocol not available")

    connection = Connection("b:1", "c", 1_000_000)
    transport = SimpleNamespace(is_closing=lambda: False, get_extra_info=lambda _: Socket())
    connection._transport = cast(Any, transport)
    connection.set_reads_later(True)
    connection.set_reads_later(False)


def unread_bytes_awaited(connection: Connection) -> int:
    assert connection._transport is not None
    sock = connection._transport.get_extra_info("socket")
    return int(sock.getsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT))
