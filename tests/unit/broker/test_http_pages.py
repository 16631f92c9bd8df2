"""Metrics and health of a real node over HTTP: what the pages say, and that nobody can hold them up."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.unit.broker.conftest import RunningNode, StartNode, batch
from tests.unit.broker.test_node import fetch, produce
from tidelog.protocol.messages.fetch import FetchResponse
from tidelog.protocol.messages.produce import ProduceResponse


async def get(node: RunningNode, path: str, method: str = "GET") -> tuple[int, str]:
    """Status and body."""
    socket: Any = node.node._metrics_socket
    reader, writer = await asyncio.open_connection(*socket.getsockname())
    writer.write(f"{method} {path} HTTP/1.1\r\nHost: node\r\nConnection: close\r\n\r\n".encode())
    answer = (await reader.read()).decode()
    writer.close()
    head, _, body = answer.partition("\r\n\r\n")
    return int(head.split(" ")[1]), body


async def samples(node: RunningNode) -> dict[str, float]:
    """Every line of a scrape: the series as it is written -> its value."""
    status, body = await get(node, "/metrics")
    assert status == 200
    lines = [line for line in body.splitlines() if not line.startswith("#")]
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines}


@pytest.fixture
async def measured(start_node: StartNode) -> RunningNode:
    return await start_node(**{"metrics.port": "0"})


async def test_a_ready_node_says_so(measured: RunningNode):
    assert await get(measured, "/healthz") == (200, "ok\n")
    assert await get(measured, "/readyz") == (200, "ok\n")
    assert (await get(measured, "/elsewhere"))[0] == 404
    assert await get(measured, "/readyz", "HEAD") == (200, "")


async def test_what_is_produced_and_fetched_is_counted(measured: RunningNode):
    wire = await measured.connect()
    await wire.create_topic("t")
    data = batch(b"one", b"two")
    await wire.call(produce("t", data), 9, ProduceResponse)
    await wire.call(produce("t", data), 9, ProduceResponse)
    await wire.call(fetch("t"), 11, FetchResponse)
    found = await samples(measured)
    assert found['tidelog_topic_records_in_total{topic="t"}'] == 4
    assert found['tidelog_topic_bytes_in_total{topic="t"}'] == 2 * len(data)
    assert found['tidelog_topic_bytes_out_total{topic="t"}'] == 2 * len(data)
    assert found["tidelog_leader_partitions"] == 1
    assert found['tidelog_connections{listener="PLAINTEXT"}'] == 1
    assert found["process_resident_memory_bytes"] > 1e6


async def test_without_a_port_nothing_listens(running: RunningNode):
    assert running.node._metrics_socket is None
    assert running.node._metrics is None
