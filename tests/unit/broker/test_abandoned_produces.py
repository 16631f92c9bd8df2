"""Produces that are verified, looked into or split first, and then wait: as others they end with their client."""

from __future__ import annotations

import asyncio
import time
import tracemalloc
from dataclasses import replace
from threading import Event
from typing import Any

import pytest

from tests.patience import PATIENCE_S, until
from tests.unit.broker.conftest import RunningNode, StartNode, Wire
from tests.unit.broker.test_hostile_requests import waiting_count
from tests.unit.broker.test_inspections import LONG, keyed
from tests.unit.broker.test_node import hold_flushes, produce, produced
from tidelog.broker.apis.records import produce as produce_api
from tidelog.broker.apis.records import produce_waits
from tidelog.broker.scheduling import acknowledgements
from tidelog.broker.scheduling.inspections import Inspection, Inspections
from tidelog.broker.scheduling.pieces import INSPECTED_PIECE_MAX
from tidelog.protocol.batches.records import encode_batch
from tidelog.protocol.errors import ErrorCode
from tidelog.protocol.messages.find_coordinator import FindCoordinatorRequest, FindCoordinatorResponse
from tidelog.protocol.messages.init_producer_id import InitProducerIdRequest, InitProducerIdResponse
from tidelog.protocol.messages.produce import ProduceRequest, ProduceResponse

NEVER_MS = 2**31 - 1
COUNT = INSPECTED_PIECE_MAX + 3
KINDS = ["verified", "inspected", "in pieces", "in pieces and inspected"]


async def answered(wire: Wire, request: FindCoordinatorRequest | InitProducerIdRequest) -> Any:
    is_init = isinstance(request, InitProducerIdRequest)
    version, response = (4, InitProducerIdResponse) if is_init else (3, FindCoordinatorResponse)
    while (answer := await wire.call(request, version, response)).error_code:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    return answer


async def request_of(kind: str, wire: Wire) -> tuple[ProduceRequest, int]:
    """A request that is answered in steps, and its version."""
    if kind != "verified":
        short = [keyed(1)] * (COUNT - 1) if "pieces" in kind else []
        last = keyed(LONG) if "inspected" in kind else keyed(1)
        return produce("t", *short, last, timeout_ms=NEVER_MS), 9
    for each in (
        FindCoordinatorRequest(key="one", key_type=1),
        InitProducerIdRequest(transactional_id="one", transaction_timeout_ms=60_000),
    ):
        async with asyncio.timeout(PATIENCE_S):
            got = await answered(wire, each)
    batch = encode_batch(
        [(int(time.time() * 1000), b"k", b"v", ())],
        producer_id=got.producer_id, producer_epoch=got.producer_epoch, base_sequence=0, transactional=True,
    )  # fmt: skip
    request = produce("t", bytes(batch), timeout_ms=NEVER_MS)
    request.transactional_id = "one"
    return request, 12


async def begin(start_node: StartNode) -> tuple[RunningNode, Wire]:
    node = await start_node()
    wire = await node.connect()
    await wire.create_topic("t", COUNT, cleanup_policy="compact", flush_messages="1")
    broker: Any = node.node._broker
    await until(lambda: sum(each.leads for each in broker.partitions.hosted() if each.topic == "t") == COUNT)
    loop = asyncio.get_running_loop()

    def verify_later(*arguments: Any, **options: Any) -> Any:
        answer = verify(*arguments, **options)
        if isinstance(answer, dict):
            errors, answer = answer, loop.create_future()
            loop.call_soon(answer.set_result, errors)
        return answer

    verifier = broker.verifier
    verify, verifier.verify = verifier.verify, verify_later
    return node, wire


async def begin_with(
    kind: str, start_node: StartNode, monkeypatch: pytest.MonkeyPatch
) -> tuple[RunningNode, ProduceRequest, int, Event]:
    """A node, a request that is answered in steps with its version, and the gate that holds flushes."""
    node, wire = await begin(start_node)
    request, version = await request_of(kind, wire)
    return node, request, version, hold_flushes(monkeypatch)


def partitions_of(node: Any) -> list[Any]:
    return [each for each in node.node._broker.partitions.hosted() if each.topic == "t"]


def connections_of(node: Any) -> Any:
    return node.node._broker_server.connections


def parked(node: Any) -> int:
    return sum(len(each.watch.produces.waiting) for each in partitions_of(node))


@pytest.mark.parametrize("kind", KINDS)
async def test_they_end_when_their_client_disconnects(
    start_node: StartNode, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Their connection was not read, so that they and it stayed for up to 24 days where a device hangs."""
    node, request, version, gate = await begin_with(kind, start_node, monkeypatch)
    other = await node.connect()
    other.send(request, version)
    try:
        await until(lambda: parked(node) == len(request.topic_data[0].partition_data))
        assert waiting_count(node) == 1
        assert len(connections_of(node)) == 2
        other.writer.close()
        await until(lambda: waiting_count(node) == 0)
        await until(lambda: len(connections_of(node)) == 1)
    finally:
        gate.set()


@pytest.mark.parametrize("kind", KINDS)
async def test_they_wait_for_nothing_if_their_client_disconnects_before(
    start_node: StartNode, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """With whichever batches are appended all the same."""
    node, request, version, gate = await begin_with(kind, start_node, monkeypatch)
    concluded: list[Any] = []
    conclude = produce_api._concluded

    def abort_first(to: Any, progress: Any) -> Any:
        transport = progress.connection._transport
        progress.connection.connection_lost(None)
        transport.abort()
        concluded.append(conclude(to, progress))
        return concluded[-1]

    monkeypatch.setattr(produce_api, "_concluded", abort_first)
    other = await node.connect()
    other.send(request, version)
    try:
        await until(lambda: concluded)
        await until(lambda: waiting_count(node) == 0)
        partitions = partitions_of(node)
        assert sum(each.log.log_end_offset > 0 for each in partitions) == len(request.topic_data[0].partition_data)
        assert all(waiter.is_discarded for each in partitions for waiter in each.watch.produces.waiting)
    finally:
        gate.set()


@pytest.mark.parametrize("kind", KINDS)
async def test_the_next_requests_are_appended_while_they_wait_and_answered_behind_them(
    start_node: StartNode, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    node, request, version, gate = await begin_with(kind, start_node, monkeypatch)
    other = await node.connect()
    sent = [other.send(request, version)]
    sent += [other.send(produce("t", *[None] * (COUNT - 1), keyed(LONG), timeout_ms=NEVER_MS), 9) for _ in range(3)]
    sent.append(other.send(produce("t", keyed(1), timeout_ms=0), 9))
    (partition,) = (each for each in partitions_of(node) if each.index == COUNT - 1)
    try:
        await until(lambda: waiting_count(node) == 4)
        (busy,) = (each for each in connections_of(node) if each.awaited is not None)
        assert busy.awaited.overdue_s(10_000, 0) < 0
    finally:
        gate.set()
    codes: list[int] = []
    for correlation_id in sent:
        answer = await asyncio.wait_for(other.receive(ProduceResponse, version if not codes else 9), PATIENCE_S)
        assert other.last_correlation_id == correlation_id
        codes.append(produced(answer)[-1][0])
    assert codes[:4] == [0] * 4
    assert partition.log.high_watermark == partition.log.log_end_offset >= 3 * LONG


async def test_they_do_not_hold_their_batches_while_they_wait(
    start_node: StartNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A connection may have a thousand of them, and their batches are copies."""
    node, wire = await begin(start_node)
    gate = hold_flushes(monkeypatch)
    request = produce("t", *[keyed(1, bytes(20_000), compression=0)] * COUNT, timeout_ms=NEVER_MS)
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        for number in range(1, 21):
            wire.send(request, 9)
            await until(lambda: parked(node) == number * COUNT)  # noqa: B023
        after, _ = tracemalloc.get_traced_memory()
        assert after - before < 20 * COUNT * 20_000 // 2
    finally:
        tracemalloc.stop()
        gate.set()


@pytest.mark.parametrize("pieces", [COUNT, COUNT - 1])
async def test_those_of_many_partitions_wait_one_at_a_time(
    start_node: StartNode, monkeypatch: pytest.MonkeyPatch, pieces: int
) -> None:
    node, wire = await begin(start_node)
    for module in (produce_api, produce_waits):
        monkeypatch.setattr(module, "PIECE_ELEMENTS_MAX", pieces)
    request, version = await request_of("in pieces", wire)
    gate = hold_flushes(monkeypatch)
    other = await node.connect()
    sent = [other.send(request, version), other.send(request, version)]
    try:
        await until(lambda: waiting_count(node) == (1 if pieces < COUNT else 2))
        assert sum(each._exclusive for each in connections_of(node)) == (pieces < COUNT)
    finally:
        gate.set()
    for correlation_id in sent:
        answer = await asyncio.wait_for(other.receive(ProduceResponse, version), PATIENCE_S)
        assert other.last_correlation_id == correlation_id
        assert {code for code, _ in produced(answer)} == {0}


async def test_where_too_much_waits_already_a_connection_has_one_more_at_most(
    start_node: StartNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thousand of a connection that each wait for 500 partitions took 410 MB."""
    node, wire = await begin(start_node)
    monkeypatch.setattr(acknowledgements, "WAITING_MAX", 3 * COUNT)
    inner: Any = node.node
    waiting = inner._broker.partitions.acknowledgements
    request, version = await request_of("in pieces", wire)
    gate = hold_flushes(monkeypatch)
    clients = [await node.connect() for _ in range(2)]
    try:
        for client, count in zip(clients, (3, 4), strict=True):
            for _ in range(3):
                client.send(request, version)
            await until(lambda: waiting_count(node) == count)  # noqa: B023
        await until(lambda: sum(each._exclusive for each in connections_of(node)) == 1)
        assert waiting.waiting_count == 4 * COUNT
        clients[0].writer.close()
        await until(lambda: waiting.waiting_count == COUNT)
    finally:
        gate.set()
    for _ in range(3):
        answer = await asyncio.wait_for(clients[1].receive(ProduceResponse, version), PATIENCE_S)
        assert {code for code, _ in produced(answer)} == {0}
    assert waiting.waiting_count == 0


@pytest.mark.parametrize("is_inspected", [False, True])
async def test_a_failure_with_acks_0_closes_the_connection_behind_the_answers_before_it(
    start_node: StartNode, monkeypatch: pytest.MonkeyPatch, is_inspected: bool
) -> None:
    """librdkafka has acks per topic. Their batches are in the log, and without an answer they would be sent again."""
    node, _ = await begin(start_node)
    gate = hold_flushes(monkeypatch)
    other = await node.connect()
    for index in range(3):
        other.send(produce("t", *[None] * index, keyed(1), timeout_ms=NEVER_MS), 9)
    failing = produce("t", keyed(LONG, key=None), acks=0) if is_inspected else produce("nowhere", keyed(1), acks=0)
    other.send(failing, 9)
    await until(lambda: waiting_count(node) == 3)
    (unread,) = (each for each in connections_of(node) if each.awaited is not None)
    try:
        await until(lambda: unread._exclusive and unread._pending[-1].response is not None)
    finally:
        gate.set()
    for _ in range(3):
        answer = await asyncio.wait_for(other.receive(ProduceResponse, 9), PATIENCE_S)
        assert produced(answer)[-1] == (0, 0)
    assert await asyncio.wait_for(other.reader.read(), PATIENCE_S) == b""


async def test_those_of_many_partitions_end_soon_after_their_client_has_disconnected(
    start_node: StartNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their connection is not read. It was closed as idle, after ten minutes or never."""
    node, _ = await begin(start_node)
    for module in (produce_api, produce_waits):
        monkeypatch.setattr(module, "PIECE_ELEMENTS_MAX", 1)
    gate = hold_flushes(monkeypatch)
    clients = [await node.connect() for _ in range(2)]
    for each in clients:
        each.send(produce("t", keyed(1), keyed(1), timeout_ms=NEVER_MS), 9)
    inner: Any = node.node
    server = inner._broker_server
    try:
        await until(lambda: waiting_count(node) == 2)
        for _ in range(3):
            server._sweep_idle()
        clients[0].writer.close()
        await clients[0].writer.wait_closed()
        assert len(connections_of(node)) == 3
        server._sweep_idle()
        await until(lambda: len(connections_of(node)) == 2)
        assert waiting_count(node) == 1
    finally:
        gate.set()
    answer = await asyncio.wait_for(clients[1].receive(ProduceResponse, 9), PATIENCE_S)
    assert {code for code, _ in produced(answer)} == {0}


@pytest.mark.parametrize("does_follow", [True, False])
async def test_a_batch_whose_partition_had_another_leader_before_the_others_were_looked_at_is_not_acknowledged(
    start_node: StartNode, monkeypatch: pytest.MonkeyPatch, does_follow: bool
) -> None:
    """The log was truncated meanwhile, and another batch at its offset acknowledged it: it was lost."""
    node, wire = await begin(start_node)
    gate = hold_flushes(monkeypatch)
    inner: Any = node.node
    begun: list[Inspection] = []
    monkeypatch.setattr(Inspections, "begin", lambda _, inspection: begun.append(inspection))
    other = await node.connect()
    other.send(produce("t", keyed(1, b"first"), keyed(LONG), timeout_ms=NEVER_MS), 9)
    try:
        await until(lambda: begun)
        (partition,) = (each for each in partitions_of(node) if each.index == 0)
        hosting: Any = inner._broker._hosting
        was = hosting._image.topics_by_name["t"].partitions[0]
        for step in (1, 2):
            leader = -1 if step == 1 and does_follow else was.leader
            epochs = {"leader_epoch": was.leader_epoch + step, "partition_epoch": was.partition_epoch + step}
            hosting._apply_role(partition, replace(was, leader=leader, **epochs))
            assert partition.leads is (leader >= 0)
    finally:
        gate.set()
    if does_follow:
        partition.log.truncate_to(0)
    behind = await wire.call(produce("t", keyed(1, b"another")), 9, ProduceResponse)
    assert produced(behind) == [(0, 0 if does_follow else 1)]
    monkeypatch.undo()
    inner._services.inspections.begin(*begun)
    answer = await asyncio.wait_for(other.receive(ProduceResponse, 9), PATIENCE_S)
    first = (ErrorCode.NOT_LEADER_OR_FOLLOWER, -1) if does_follow else (ErrorCode.NONE, 0)
    assert produced(answer) == [first, (ErrorCode.NONE, 0)]
