"""A bug of ours in one request: its connection ends or is answered, and nobody else is kept waiting."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.patience import PATIENCE_S, until
from tests.unit.broker.conftest import RunningNode, Wire
from tests.unit.broker.test_connection import Owner, connect, feed, framed
from tests.unit.broker.test_node import fetch, fetched, produce
from tests.unit.replication.replicas import Replicas
from tidelog.broker.apis.cluster import metadata
from tidelog.broker.apis.dispatch import _EncodedAnswer
from tidelog.broker.apis.records import fetch as fetch_api
from tidelog.broker.apis.records import list_offsets, produce_waits
from tidelog.broker.network.connection import TURN_REQUESTS_MAX, KafkaConnection
from tidelog.broker.network.request import Deferred, RequestContext, gather
from tidelog.broker.replicas.deletions import Deletions
from tidelog.broker.replicas.fetching.fetch_sessions import FetchSession
from tidelog.protocol.errors import ErrorCode
from tidelog.protocol.hot import encode_one_produced
from tidelog.protocol.messages.fetch import FetchPartition, FetchResponse
from tidelog.protocol.messages.list_offsets import ListOffsetsRequest
from tidelog.protocol.messages.metadata import MetadataRequest, MetadataResponse
from tidelog.protocol.messages.produce import ProduceResponse
from tidelog.replication.partition import Partition


class Failing(Owner):
    """Answers, and fails at what begins with `?`."""

    def __init__(self) -> None:
        super().__init__()
        self.warned: list[str] = []

    def dispatch(self, frame: memoryview, connection: KafkaConnection) -> Any:
        if bytes(frame[:1]) == b"?":
            raise RuntimeError("as planned")
        return super().dispatch(frame, connection)

    def warn(self, kind: str, text: str) -> None:
        self.warned.append(kind)


def fail(*arguments: Any) -> None:
    raise RuntimeError("as planned")


# ------------------------------------------------------------------------------------------------------- connections


def test_a_failure_closes_the_connection_after_the_answers_before_it(caplog: pytest.LogCaptureFixture) -> None:
    owner = Failing()
    connection, transport = connect(owner)
    feed(connection, transport, framed(b"a-first.", b"?-broken", b"a-never."))
    assert transport.closed
    assert transport.written == b"a-first."
    assert owner.warned == ["failed"]
    assert "as planned" in caplog.text


def test_a_failure_out_of_line_closes_the_connection_and_the_others_in_line_are_served() -> None:
    """Called by the turns of the loop, nobody looks at what `_process` raises: the connection stayed open and deaf."""
    owner = Failing()
    requests = framed(*[b"a-early."] * TURN_REQUESTS_MAX, b"?-broken", b"a-never.")
    connections = [connect(owner) for _ in range(2)]
    for connection, transport in connections:
        buffer = connection.get_buffer(-1)
        buffer[: len(requests)] = requests
        connection.buffer_updated(len(requests))
        assert not transport.closed
    owner.turn()
    assert [transport.closed for _, transport in connections] == [True, True]
    assert [transport.written for _, transport in connections] == [b"a-early." * TURN_REQUESTS_MAX] * 2


def test_a_failure_behind_a_parked_request_does_not_reach_who_completes_that(caplog: pytest.LogCaptureFixture) -> None:
    owner = Failing()
    connection, transport = connect(owner)
    feed(connection, transport, framed(b"e-exclusive", b"?-broken"))
    owner.parked[b"e-exclusive"].complete(b"answered")
    owner.turn()
    assert transport.written == b"answered"
    assert transport.closed


def test_without_memory_for_a_request_the_connection_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    owner = Failing()
    connection, transport = connect(owner)

    def nothing_left(*_: Any) -> Any:
        raise MemoryError

    monkeypatch.setattr("tidelog.broker.network.connection.new_buffer", nothing_left)
    feed(connection, transport, framed(b"a" * 100_000))
    assert transport.closed
    assert owner.warned == ["buffers"]


def test_every_request_of_a_connection_that_is_gone_is_told() -> None:
    owner = Owner()
    connection, transport = connect(owner)
    feed(connection, transport, framed(b"p-first.", b"p-second"))
    told: list[str] = []
    owner.parked[b"p-first."].on_abandon = fail
    owner.parked[b"p-second"].on_abandon = lambda: told.append("second")
    connection.on_close(fail)
    connection.on_close(lambda: told.append("closed"))
    connection.connection_lost(None)
    assert told == ["second", "closed"]


def test_what_cannot_be_answered_closes_the_connection() -> None:
    owner = Owner()
    for kind in (b"p-parked", b"e-parked"):
        connection, transport = connect(owner)
        feed(connection, transport, framed(kind))
        owner.parked[kind].failed(RuntimeError("as planned"))
        assert transport.closed


# ---------------------------------------------------------------------------------------------------------- dispatch


def test_an_answer_that_cannot_be_encoded_ends_the_wait(caplog: pytest.LogCaptureFixture) -> None:
    completed: list[Any] = []
    inner = Deferred()
    outer = _EncodedAnswer(inner, cast(Any, None), None, cast(Any, SimpleNamespace(framed=fail)))
    outer.on_complete(completed.append)
    inner.complete("anything")
    assert completed == [None]
    assert "as planned" in caplog.text


def test_a_gathered_answer_that_cannot_be_made_ends_the_wait() -> None:
    completed: list[Any] = []
    inner = Deferred()
    outer = gather([lambda: inner], cast(Any, fail))
    assert isinstance(outer, Deferred)
    outer.on_complete(completed.append)
    inner.complete("anything")
    assert completed == [None]


def test_who_wraps_an_answer_passes_on_that_the_client_is_gone() -> None:
    told: list[int] = []
    inner = Deferred()
    inner.on_abandon = lambda: told.append(1)
    outer = _EncodedAnswer(inner, cast(Any, None), None, cast(Any, None))
    assert outer.on_abandon is not None
    outer.on_abandon()
    assert told == [1]


@pytest.mark.parametrize("how", ["cancelled", "fails"])
async def test_a_handler_that_never_answers_closes_the_connection(
    running: RunningNode, wire: Wire, how: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def handle(*_: Any) -> Any:
        if how == "cancelled":
            raise asyncio.CancelledError
        raise RuntimeError("as planned")

    dispatcher = running.node._dispatchers[-1]
    api = dispatcher._apis[metadata.REQUEST.API_KEY]
    monkeypatch.setattr(api, "handle", handle)
    if how == "fails":
        monkeypatch.setattr(type(api), "framed_in_steps", fail)
    wire.send(MetadataRequest(topics=[]), 9)
    assert await asyncio.wait_for(wire.reader.read(1), PATIENCE_S) == b""
    monkeypatch.undo()
    assert ("a waiting request failed" in caplog.text) == (how == "fails"), "a node that stops is no failure"
    other = await running.connect()
    await other.call(MetadataRequest(topics=[]), 9, MetadataResponse)


async def test_a_handler_in_a_task_that_waits_is_told_that_the_client_is_gone(
    running: RunningNode, wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DeleteRecords of many partitions waits for followers, for as long as the client says."""
    told: list[int] = []
    connections: list[Any] = []
    waiting = Deferred()
    waiting.on_abandon = lambda: told.append(1)

    async def handle(services: Any, context: RequestContext, request: Any) -> Any:
        connections.append(context.connection)
        return waiting

    dispatcher = running.node._dispatchers[-1]
    api = dispatcher._apis[metadata.REQUEST.API_KEY]
    monkeypatch.setattr(api, "handle", handle)
    monkeypatch.setattr(api, "counted_above_bytes", 0)
    wire.send(MetadataRequest(topics=[]), 9)
    await until(lambda: dispatcher.tasks_under_way)
    await asyncio.sleep(0)
    assert dispatcher._scheduler._request_bytes == 0, "what waits takes no room"
    connections[0].abort()
    await until(lambda: not dispatcher.tasks_under_way)
    assert told == [1]
    assert dispatcher._scheduler._request_bytes == 0


async def test_a_fetch_that_fails_while_it_waits_closes_its_connection(
    running: RunningNode, wire: Wire, make_batch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    await wire.create_topic("t")
    waiting = await running.connect()
    other = await running.connect()
    waiting.send(fetch("t", wait_ms=60_000), 11)
    assert running.node._broker is not None
    sessions = running.node._broker.partitions.fetch_sessions
    await until(lambda: sessions._parked)
    attempt = fetch_api._Fetch._attempt
    monkeypatch.setattr(fetch_api._Fetch, "_attempt", fail)
    await wire.call(produce("t", make_batch(b"a")), 9, ProduceResponse)
    assert await asyncio.wait_for(waiting.reader.read(1), PATIENCE_S) == b""
    monkeypatch.setattr(fetch_api._Fetch, "_attempt", attempt)
    assert fetched(await other.call(fetch("t"), 11, FetchResponse)) == [b"a"]
    assert sessions._parked == 0


def test_an_acknowledgement_that_cannot_be_encoded_keeps_no_other_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Replicas(2)
    first, second = cluster.nodes[1].produce(b"a"), cluster.nodes[1].produce(b"b")
    calls: list[int] = []

    def fails_once(*arguments: Any) -> bytes:
        calls.append(1)
        if len(calls) == 1:
            raise RuntimeError("as planned")
        return encode_one_produced(*arguments)

    monkeypatch.setattr(produce_waits, "encode_one_produced", fails_once)
    cluster.loop.settle()
    assert first.code is None
    assert second.code == 0


def test_metadata_that_waited_and_fails_ends_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    completed: list[Any] = []
    answer = Deferred()
    answer.on_complete(completed.append)
    monkeypatch.setattr(metadata, "_answer", fail)
    metadata._complete(answer, cast(Any, None), cast(Any, None), cast(Any, None))
    assert completed == [None]


def test_a_listing_that_fails_after_records_were_brought_ends_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    completed: list[Any] = []
    context = RequestContext(2, 8, 1, None, "127.0.0.1", "PLAINTEXT")
    listing = list_offsets._Listing(cast(Any, None), context, ListOffsetsRequest())
    listing.deferred = Deferred()
    listing.deferred.on_complete(completed.append)
    monkeypatch.setattr(listing, "_answer", fail)
    listing._complete_if(cast(Any, fail))
    assert completed == [None]


# ----------------------------------------------------------------------------------------------- who waits for a mark


def test_every_waiter_of_a_high_watermark_is_called_though_one_fails(caplog: pytest.LogCaptureFixture) -> None:
    cluster = Replicas(2)
    partitions, partition = cluster.nodes[1].partitions, cluster.nodes[1].partition
    told: list[Any] = []
    for for_client in (True, False):
        partitions.when_committed(partition, 1, fail, for_client=for_client)
        partitions.when_committed(partition, 1, told.append, for_client=for_client)
    assert cluster.nodes[1].produce(b"a") is not None
    cluster.loop.settle()
    assert told == [None, None]
    assert "as planned" in caplog.text


@pytest.mark.parametrize("how", ["fail_waiting_requests", "fail_waiting_acks_all"])
def test_every_waiter_is_told_that_it_waits_in_vain_though_one_fails(how: str) -> None:
    cluster = Replicas(2)
    partitions, partition = cluster.nodes[1].partitions, cluster.nodes[1].partition
    told: list[Any] = []
    partitions.when_committed(partition, 1, fail, for_client=True)
    partitions.when_committed(partition, 1, told.append, for_client=True)
    code = ErrorCode.NOT_LEADER_OR_FOLLOWER
    if how == "fail_waiting_requests":
        partitions.fail_waiting_requests(partition, code)
    else:
        partitions.fail_waiting_acks_all(partition)
    assert len(told) == 1


def test_every_waiter_of_the_device_is_called_though_one_fails() -> None:
    cluster = Replicas(1, log_flush_interval_messages="1")
    partitions, partition = cluster.nodes[1].partitions, cluster.nodes[1].partition
    cluster.loop.device_waits = True
    cluster.nodes[1].produce(b"a", acks=1)
    told: list[Any] = []
    partitions.when_acknowledged(partition, 1, 1, fail)
    partitions.when_acknowledged(partition, 1, 1, told.append)
    while cluster.loop.waiting:
        cluster.loop.waiting.pop()()
        cluster.loop.settle()
    assert told == [None]


class Low:
    low_watermark = 5


@pytest.mark.parametrize("how", ["look", "give_up"])
def test_every_waiter_of_a_deletion_is_called_though_one_fails(how: str) -> None:
    partition = cast(Partition, Low())
    deletions = Deletions()
    told: list[tuple[int, ErrorCode]] = []

    def note(low_watermark: int, code: ErrorCode) -> None:
        told.append((low_watermark, code))

    deletions.wait(partition, 5, fail)
    deletions.wait(partition, 5, note)
    deletions.look(partition) if how == "look" else deletions.give_up(partition, ErrorCode.KAFKA_STORAGE_ERROR)
    assert len(told) == 1
    assert len(deletions) == 0


@pytest.mark.parametrize("how", ["_advanced", "reported_values_changed", "role_changed"])
def test_every_fetch_of_a_partition_is_woken_though_one_fails(how: str) -> None:
    cluster = Replicas(1)
    partitions, partition = cluster.nodes[1].partitions, cluster.nodes[1].partition
    woken: list[Any] = []
    for waiter in (fail, lambda: woken.append(1)):
        session = FetchSession(7, False, 0)
        session.ask([(("t", 0), FetchPartition(partition=0))])
        partitions.watch(session.partitions["t", 0])
        session.wait(waiter, fail)
    getattr(partitions, how)(partition)
    assert woken == [1]
