"""Connections that are against the node: too many, too fast, idle, trickling, or reading nothing of what they asked."""

from __future__ import annotations

import asyncio
import importlib
import re
import socket
import struct
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.patience import PATIENCE_S, until
from tests.unit.broker.conftest import StartNode, Wire
from tests.unit.broker.test_node import fetch, produce
from tidelog.broker.apis.dispatch import _DeferredMessage
from tidelog.broker.network import server as server_module
from tidelog.broker.network.connection_quotas import ConnectionLimits
from tidelog.broker.network.receive_buffers import BUFFER_USUAL_BYTES
from tidelog.broker.network.request import Deferred
from tidelog.broker.network.server import ServerLimits
from tidelog.broker.network.server_limits import server_limits
from tidelog.broker.node_ports import os_ports
from tidelog.protocol.messages.fetch import FetchResponse
from tidelog.protocol.messages.heartbeat import HeartbeatRequest
from tidelog.protocol.messages.incremental_alter_configs import (
    AlterableConfig,
    AlterConfigsResource,
    IncrementalAlterConfigsRequest,
    IncrementalAlterConfigsResponse,
)
from tidelog.protocol.messages.join_group import JoinGroupRequest
from tidelog.protocol.messages.metadata import MetadataRequest, MetadataResponse
from tidelog.protocol.messages.produce import ProduceResponse

ALL = MetadataRequest(topics=[])


async def answers(wire: Wire, seconds: float = PATIENCE_S) -> bool:
    try:
        # In Python 3.11 `wait_for` keeps a cancellation to itself that comes together with the answer.
        async with asyncio.timeout(seconds):
            await wire.call(ALL, 9, MetadataResponse)
    except (asyncio.IncompleteReadError, ConnectionError):
        return False
    return True


async def closed(wire: Wire, seconds: float = PATIENCE_S) -> bool:
    try:
        return await asyncio.wait_for(wire.reader.read(1), seconds) == b""
    except ConnectionError:
        return True


async def test_beyond_max_connections_the_next_is_refused_until_one_has_gone(
    start_node: StartNode, caplog: pytest.LogCaptureFixture
) -> None:
    running = await start_node(**{"max.connections": "3"})
    wires = [await running.connect() for _ in range(3)]
    assert all([await answers(each) for each in wires])
    for _ in range(5):
        assert not await answers(await running.connect())
    refusals = [record.getMessage() for record in caplog.records if "refusing" in record.getMessage()]
    assert refusals == ["refusing a connection from 127.0.0.1: max.connections=3 is reached"]
    wires[0].writer.close()
    server: Any = running.node._broker_server
    await until(lambda: len(server.connections) == 2)
    assert await answers(await running.connect())


async def test_limits_change_without_a_restart(start_node: StartNode) -> None:
    running = await start_node()
    wire, other = await running.connect(), await running.connect()
    assert await answers(other)
    config = AlterableConfig(name="max.connections.per.ip", config_operation=0, value="2")
    resource = AlterConfigsResource(resource_type=4, resource_name="", configs=[config])
    answer = await wire.call(
        IncrementalAlterConfigsRequest(resources=[resource], validate_only=False), 1, IncrementalAlterConfigsResponse
    )
    assert answer.responses[0].error_code == 0
    await until(lambda: running.node.settings.integer("max.connections.per.ip") == 2)
    assert not await answers(await running.connect())
    assert await answers(other)


async def test_an_address_may_have_a_limit_of_its_own(start_node: StartNode) -> None:
    overrides = {"max.connections.per.ip": "1", "max.connections.per.ip.overrides": "localhost:2"}
    running = await start_node(**overrides)
    wires = [await running.connect() for _ in range(3)]
    assert [await answers(each) for each in wires] == [True, True, False]


async def test_beyond_the_rate_connections_are_read_later(start_node: StartNode) -> None:
    running = await start_node(**{"max.connection.creation.rate": "4"})
    loop = asyncio.get_running_loop()
    began = loop.time()
    wires = [await running.connect() for _ in range(6)]
    assert all(await asyncio.gather(*map(answers, wires)))
    assert 0.2 < loop.time() - began < PATIENCE_S


async def test_the_last_files_are_for_logs(start_node: StartNode) -> None:
    running = await start_node()
    server: Any = running.node._broker_server
    limits = server_limits(running.node.settings, os_ports().files_max)
    assert 0 < limits.files_max < os_ports().files_max
    with socket.socket() as probe:
        next_file = probe.fileno()
    server.reconfigure(server_limits(running.node.settings, 0))
    assert await answers(await running.connect())
    server._limits = ServerLimits(1 << 20, -1, 1 << 30, files_max=next_file)
    shortages: list[None] = []
    server.on_file_shortage = lambda: shortages.append(None)
    assert not await answers(await running.connect())
    assert shortages == [None]


async def test_brokers_find_a_place_and_the_idlest_client_goes(start_node: StartNode) -> None:
    running = await start_node(
        **{
            "listeners": "PLAINTEXT://127.0.0.1:0,OTHER://127.0.0.1:0",
            "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,OTHER:PLAINTEXT",
            "inter.broker.listener.name": "PLAINTEXT",
        }
    )
    server: Any = running.node._broker_server
    ports = running.node._bound_ports
    own = len(server.connections)
    assert own == 0
    clients = [Wire(*await asyncio.open_connection("127.0.0.1", ports["OTHER"])) for _ in range(2)]
    assert all([await answers(each) for each in clients])
    server._quotas.limits = ConnectionLimits(total=2)
    broker = Wire(*await asyncio.open_connection("127.0.0.1", ports["PLAINTEXT"]))
    assert await answers(broker)
    assert await closed(clients[0])
    assert await answers(clients[1])
    for each in (*clients, broker):
        each.writer.close()


async def test_who_sends_nothing_or_next_to_nothing_is_idle(start_node: StartNode) -> None:
    idle_s = 0.4
    running = await start_node(**{"connections.max.idle.ms": str(int(idle_s * 1000))})
    silent, trickling, busy = [await running.connect() for _ in range(3)]
    assert await answers(silent)
    trickling.writer.write(struct.pack(">i", 100_000))

    async def trickle() -> None:
        while True:
            trickling.writer.write(b"x")
            await asyncio.sleep(0.05)

    async def work(connection: Wire) -> None:
        clock = asyncio.get_running_loop().time
        last_s = clock()
        while True:
            if not await answers(connection):
                assert clock() - last_s > idle_s / 2, "it was not idle; only a machine that stood still makes it so"
                connection = await running.connect()
            last_s = clock()
            await asyncio.sleep(0.05)

    tasks = [asyncio.create_task(trickle()), asyncio.create_task(work(busy))]
    try:
        assert await closed(silent)
        assert await closed(trickling)
        assert not tasks[1].done()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def test_who_is_closed_and_does_not_take_its_answers_is_cut_off(start_node: StartNode, make_batch: Any) -> None:
    running = await start_node(**{"connections.max.idle.ms": "300"})
    server: Any = running.node._broker_server
    wire = await running.connect()
    await wire.create_topic("t")
    for _ in range(4):
        await wire.call(produce("t", make_batch(bytes(900_000))), 9, ProduceResponse)
    lazy = await running.connect()
    lazy.writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    lazy.writer.transport.pause_reading()  # type: ignore[attr-defined]
    for _ in range(5):
        lazy.send(fetch("t"), 11)
    async with asyncio.timeout(PATIENCE_S):
        while server.connections:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    assert server.cut["idle"] == 2


async def test_a_large_request_may_take_its_time(start_node: StartNode) -> None:
    running = await start_node(**{"connections.max.idle.ms": "300"})
    wire = await running.connect()
    wire.writer.write(struct.pack(">i", 60_000))
    for _ in range(15):
        wire.writer.write(bytes(2000))
        await asyncio.sleep(0.05)
    assert not wire.reader.at_eof()


def stop_reading(wire: Any) -> None:
    """Read nothing more, and take little into the socket."""
    wire.writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    wire.writer.transport.pause_reading()


async def test_readers_that_leave_their_answers_lying_are_cut_off_when_it_is_too_much(
    start_node: StartNode, make_batch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "UNREAD_CHECK_S", 0.05)
    running = await start_node()
    server: Any = running.node._broker_server
    wire = await running.connect()
    await wire.create_topic("t")
    for _ in range(8):
        await wire.call(produce("t", make_batch(bytes(50_000))), 9, ProduceResponse)
    lazy = [await running.connect() for _ in range(4)]
    for each in lazy:
        stop_reading(each)
        for _ in range(400):
            each.send(fetch("t", most=60_000), 11)  # small enough that the answer is a copy, not a part of the file

    def unread_bytes() -> list[int]:
        return [connection.unread_bytes for connection in server.connections]

    looks: list[list[int]] = []

    def is_settled() -> bool:
        looks.append(unread_bytes())
        return len(looks) > 20 and looks[-20:] == [looks[-1]] * 20

    await until(lambda: sum(size > 1_000_000 for size in unread_bytes()) == 4)
    await until(is_settled)
    unread = looks[-1]
    assert len(server.connections) == 5
    server._limits = ServerLimits(1 << 27, -1, 1 << 30, unread_bytes_max=sum(unread) // 2)
    await until(lambda: sum(unread_bytes()) <= sum(unread) // 2)
    assert len(server.connections) >= 2
    await wire.call(fetch("t"), 11, FetchResponse)


async def test_readers_are_cut_off_that_each_leave_less_lying_than_the_transport_reports(
    start_node: StartNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parts of a snapshot, each written alone, to 800 connections that read none: the node held 6 GB."""
    monkeypatch.setattr(server_module, "UNREAD_CHECK_S", 0.05)
    running = await start_node()
    server: Any = running.node._broker_server
    server._limits = replace(server._limits, unread_bytes_max=12_000_000)
    server.dispatch = lambda frame, connection: bytes(7_000_000)
    for _ in range(4):
        wire = await running.connect()
        stop_reading(wire)
        wire.send(fetch("t"), 11)
    await until(lambda: server.cut["unread"] >= 2)
    await until(lambda: sum(connection.unread_bytes for connection in server.connections) <= 12_000_000)


@pytest.mark.skipif(
    sys.platform == "win32", reason="uvloop, which keeps parts of files as they are, is not for Windows"
)
async def test_readers_of_large_answers_that_lie_in_files_are_not_cut_off(
    start_node: StartNode, make_batch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "UNREAD_CHECK_S", 0.02)
    running = await start_node()
    server: Any = running.node._broker_server
    wire = await running.connect()
    await wire.create_topic("t")
    await wire.call(produce("t", make_batch(bytes(900_000))), 9, ProduceResponse)
    slow = [await running.connect() for _ in range(4)]
    for each in slow:
        stop_reading(each)
        for _ in range(10):
            each.send(fetch("t"), 11)

    def unsent() -> list[int]:
        return [each._transport.get_write_buffer_size() for each in server.connections]

    await until(lambda: sum(size > 1_000_000 for size in unsent()) == 4)
    server._limits = ServerLimits(1 << 27, -1, 1 << 30, unread_bytes_max=100_000)
    await asyncio.sleep(0.3)  # many checks
    assert sum(unsent()) > 4_000_000
    assert (server.cut["unread"], len(server.connections)) == (0, 5)


async def test_nobody_can_fill_the_node_with_half_requests(
    start_node: StartNode, caplog: pytest.LogCaptureFixture
) -> None:
    running = await start_node(**{"queued.max.request.bytes": "2000000"})
    wires = [await running.connect() for _ in range(6)]
    for each in wires:
        each.writer.write(struct.pack(">i", 2_000_000_000 if each is wires[0] else 900_000) + bytes(600_000))
    server: Any = running.node._broker_server
    reasons = ("receive buffers are full", "frame of 2000000000 bytes")
    await until(lambda: len(server.connections) < 4 and all(reason in caplog.text for reason in reasons))
    assert server.connections
    assert server.receive_bytes <= 2_000_000
    texts = [record.getMessage() for record in caplog.records]
    assert [sum(reason in text for text in texts) for reason in reasons] == [1, 1]
    for each in wires:
        each.writer.close()
    await until(lambda: not server.connections)
    assert await answers(await running.connect())


async def test_a_client_with_small_requests_is_served_while_large_ones_fill_the_receive_buffers(
    start_node: StartNode, make_batch: Any
) -> None:
    bound_bytes = 2_000_000
    running = await start_node(**{"queued.max.request.bytes": str(bound_bytes)})
    quiet = await running.connect()
    await quiet.create_topic("t")
    server: Any = running.node._broker_server
    sizes = (600_000, 300_000, 150_000, 70_000, 20_000)  # in buffers of 1 MiB, 512 KiB, 256 KiB, 128 KiB, 32 KiB
    strangers = [await running.connect() for _ in sizes]
    for each, size in zip(strangers, sizes, strict=True):
        each.writer.write(struct.pack(">i", 900_000) + bytes(size))
    await until(lambda: bound_bytes - server.receive_bytes < BUFFER_USUAL_BYTES)
    for _ in range(3):
        answer = await (await running.connect()).call(produce("t", make_batch(bytes(5_000))), 9, ProduceResponse)
        assert answer.responses[0].partition_responses[0].error_code == 0
    assert await answers(quiet)
    assert len(server.connections) == 9
    # Only what is small: the next step of a stranger is refused.
    strangers[-1].writer.write(bytes(50_000))
    await until(lambda: len(server.connections) == 8)


async def test_requests_that_hardly_arrive_make_room_for_others(
    start_node: StartNode, make_batch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A host that left 500 requests of 1 MB unfinished kept out all large requests of others, for as long as it sent
    64 bytes of each in a second.
    """
    monkeypatch.setattr(server_module, "ARRIVALS_CHECK_S", 0.5)
    running = await start_node(**{"queued.max.request.bytes": "4000000"})
    quiet = await running.connect()
    await quiet.create_topic("t")
    server: Any = running.node._broker_server
    fast, *strangers = [await running.connect() for _ in range(7)]
    for number, each in enumerate((fast, *strangers)):
        each.writer.write(struct.pack(">ihhi", 1_000_000, 0, 9, number) + bytes(400_000))
    await until(lambda: server.receive_bytes > 7 * 2**19)

    async def go_on() -> None:
        for _ in range(200):
            for each, size in ((fast, 500), *((each, 1) for each in strangers)):
                each.writer.write(bytes(size))
            await asyncio.sleep(0.05)

    sending = asyncio.create_task(go_on())
    large = produce("t", make_batch(bytes(600_000)))

    async def is_served() -> bool:
        try:
            answer = await (await running.connect()).call(large, 9, ProduceResponse)
        except (asyncio.IncompleteReadError, ConnectionError):
            return False
        return bool(answer.responses[0].partition_responses[0].error_code == 0)

    assert not await is_served(), "the buffers are full"
    await until(lambda: server.receive_bytes < 2_500_000)
    assert await is_served()
    sending.cancel()
    assert not fast.reader.at_eof(), "the slowest go first"
    assert sum(each.reader.at_eof() for each in strangers) == 4, "half of the buffers are free"
    assert await answers(quiet)


async def test_the_page_of_limits_names_the_constants_as_they_are() -> None:
    page = (Path(__file__).parents[3] / "docs" / "limits.md").read_text()
    for module, names in {
        "broker.network.connection": {"IN_FLIGHT_MAX": "1024", "TURN_REQUESTS_MAX": "16",
            "WRITE_HIGH_WATER_BYTES": "8 MiB"},
        "broker.network.server_limits": {"RECEIVE_BYTES_MAX": "512 MiB", "UNREAD_BYTES_MAX": "512 MiB"},
        "broker.network.server": {"BACKLOG": "4096", "TRICKLE_BYTES_PER_S": "64 B",
            "ARRIVALS_CHECK_S": "5"},
        "broker.apis.dispatch": {"COLD_TASKS_MAX": "4096"},
        "broker.scheduling.fair_scheduler": {"REQUEST_BYTES_MAX": "2 MiB", "LARGE_ANSWERS_MAX": "4"},
        "broker.network.accepting": {"ACCEPTED_PER_TURN": "16"},
        "broker.scheduling.large_answers": {"ANSWER_ELEMENTS_MAX": "50,000"},
        "broker.cluster.topic_creation": {"CREATIONS_MAX": "100"},
        "broker.cluster.controller_channel": {"FORWARDED_REQUESTS_MAX": "160"},
        "broker.apis.records.fetch": {"RESPONSE_BYTES_MAX": "2 MiB"},
        "broker.replicas.fetching.fetch_sessions": {"PARKED_MAX": "250,000", "PARTITIONS_MAX": "250,000"},
        "broker.replicas.fetching.follower_sessions": {
            "SESSIONS_OF_BROKER_MAX": "32", "ENTRIES_MAX": "250,000", "NOT_HOSTED_MAX": "1,000",
        },
        "broker.coordinators.runtime": {
            "PENDING_WRITES_MAX": "10,000", "PENDING_BYTES_MAX": "64 MiB", "PENDING_BYTES_OF_NODE_MAX": "256 MiB",
            "PARKED_REQUESTS_MAX": "100,000",
        },
        "broker.coordinators.group.config": {
            "METADATA_BYTES_MAX": "1 MiB", "ASSIGNMENT_BYTES_MAX": "1 MiB", "GROUP_MEMORY_BYTES_MAX": "64 MiB",
            "GROUPS_MEMORY_BYTES_MAX": "256 MiB",
        },
        "replication.controller.decisions.brokers": {
            "NODES_MAX": "1,000", "NAMED_MAX": "500", "NAMED_CHARACTERS_MAX": "16,384",
        },
        "protocol.codec.decoding": {
            "REQUEST_BUDGET": "400,000", "ELEMENTS_MAX": "1,000,000", "TAGGED_FIELDS_MAX": "10,000",
        },
    }.items():  # fmt: skip
        for name, said in names.items():
            value = getattr(importlib.import_module(f"tidelog.{module}"), name)
            units = {"MiB": 1 << 20, "B": 1}
            number, _, unit = said.replace(",", "").partition(" ")
            assert value == int(number) * units.get(unit, 1), name
            (line,) = [line for line in page.splitlines() if re.search(rf"\b{name}\b", line)]
            assert said in line, (name, line)


async def test_an_answer_that_never_comes_ends_the_connection(
    start_node: StartNode, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A client that waits without a limit of its own would wait for ever; here it also goes on asking behind it."""
    monkeypatch.setattr(server_module, "SWEEP_INTERVAL_S", 0.05)
    monkeypatch.setattr(server_module, "OVERDUE_S_MAX", 0.3)
    running = await start_node()
    deaf, other = await running.connect(), await running.connect()
    await other.create_topic("t")
    deaf.send(fetch("t", wait_ms=100_000), 4)

    async def ask_on() -> None:
        while True:
            deaf.send(ALL, 9)
            await asyncio.sleep(0.05)

    asking = asyncio.create_task(ask_on())
    assert await closed(deaf, PATIENCE_S), "it answers behind an answer that was never given"
    asking.cancel()
    assert "FetchConsumer was not answered in 0 s" in caplog.text
    assert await answers(other, PATIENCE_S)


def test_a_request_that_names_its_time_is_given_it() -> None:
    assert Deferred().overdue_s(700.0, 0.0) == 700.0
    waiting = _DeferredMessage(JoinGroupRequest(session_timeout_ms=10_000, rebalance_timeout_ms=300_000))
    assert waiting.overdue_s(700.0, 0.0) == 400.0
    assert _DeferredMessage(HeartbeatRequest()).overdue_s(700.0, 0.0) == 700.0
