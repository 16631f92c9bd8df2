"""Health of a real node over HTTP: what the pages say, and when."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.unit.broker.conftest import RunningNode, StartNode
from tests.unit.broker.scraping import get, scrape
from tidelog.broker.config.node_config import NodeConfig
from tidelog.broker.metrics.http_pages import liveness_problem, readiness_problem
from tidelog.broker.network.accepting import ListenError
from tidelog.broker.node import Node
from tidelog.broker.node_ports import os_ports
from tidelog.protocol.errors import ConfigError
from tidelog.storage.files.disk import OsDisk
from tidelog.storage.log.directory import LogDirectory


@pytest.fixture
async def measured(start_node: StartNode) -> RunningNode:
    return await start_node(**{"metrics.port": "0"})


async def test_a_ready_node_says_so(measured: RunningNode):
    assert await get(measured, "/healthz") == (200, "ok\n")
    assert await get(measured, "/readyz") == (200, "ok\n")
    assert await get(measured, "/readyz", "HEAD") == (200, "")
    status, text = await get(measured, "/elsewhere")
    assert status == 404
    assert "/metrics" in text


async def test_a_fenced_node_is_alive_and_not_ready(measured: RunningNode):
    broker: Any = measured.node._broker
    broker.lifecycle.is_fenced = True
    assert await get(measured, "/readyz") == (503, "fenced by the controller\n")
    assert (await get(measured, "/healthz"))[0] == 200


async def test_a_node_that_cannot_follow_the_metadata_is_sick(measured: RunningNode):
    metadata: Any = measured.node._metadata
    metadata.tracker.failure = ValueError("no such record")
    for path in ("/healthz", "/readyz"):
        assert await get(measured, path) == (503, "the metadata log cannot be followed: no such record\n")
    metadata.tracker.failure = None


def standing(**changed: Any) -> tuple[Any, Any]:
    """The metadata and the broker of a node that is ready, but for what is said."""
    says = {
        "failure": None,
        "offset": 9,
        "leader_id": 1,
        "high_watermark": 10,
        "epoch": 5,
        "is_fenced": False,
    } | changed
    metadata = SimpleNamespace(
        tracker=SimpleNamespace(failure=says["failure"], offset=says["offset"]),
        raft=SimpleNamespace(leader_id=says["leader_id"], high_watermark=says["high_watermark"]),
    )
    return metadata, SimpleNamespace(lifecycle=SimpleNamespace(epoch=says["epoch"], is_fenced=says["is_fenced"]))


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"offset": 4, "high_watermark": 2005}, "2000 metadata records behind"),
        ({"offset": -1, "high_watermark": -1}, "no metadata yet"),
        ({"epoch": -1}, "not registered with the controller"),
        ({"is_fenced": True}, "fenced by the controller"),
    ],
)
def test_why_a_node_is_not_ready(changed: dict[str, Any], reason: str):
    metadata, broker = standing(**changed)
    assert readiness_problem(metadata, broker) == reason
    assert liveness_problem(metadata) is None


def test_a_controller_alone_needs_no_registration():
    metadata, _ = standing()
    assert readiness_problem(metadata, None) is None
    astray, _ = standing(leader_id=-1)
    assert readiness_problem(astray, None) == "no leader of the metadata quorum is known"


def test_brokers_stay_ready_without_a_controller_and_while_a_record_is_on_its_way():
    assert readiness_problem(*standing(leader_id=-1)) is None
    assert readiness_problem(*standing(offset=8)) is None


async def test_without_a_port_nothing_listens(running: RunningNode):
    assert running.node._metrics_socket is None
    assert running.node._metrics is None


async def test_a_port_that_is_taken_is_told_before_a_file_is_touched(start_node: StartNode, tmp_path: Any):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        with pytest.raises(ListenError, match="cannot listen on"):
            await start_node(**{"metrics.port": str(other.getsockname()[1])})
    assert not (tmp_path / "data").exists()


async def test_a_port_that_is_none_is_refused(start_node: StartNode):
    with pytest.raises(ConfigError, match=r"metrics\.port"):
        await start_node(**{"metrics.port": "65536"})


async def test_the_port_is_free_again_after_a_stop(start_node: StartNode):
    first = await start_node(**{"metrics.port": "0"})
    sock: Any = first.node._metrics_socket
    port = sock.getsockname()[1]
    assert (await get(first, "/metrics"))[0] == 200
    await first.stop()
    again = await start_node(**{"metrics.port": str(port)})
    assert (await get(again, "/readyz"))[0] == 200


async def test_a_node_that_finds_no_controller_yet_says_so_and_can_be_measured(tmp_path: Path):
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        settings = {
            "process.roles": "broker",
            "node.id": "1",
            "listeners": "PLAINTEXT://127.0.0.1:0",
            "controller.quorum.voters": f"2@127.0.0.1:{nobody.getsockname()[1]}",
            "controller.listener.names": "CONTROLLER",
            "log.dirs": str(tmp_path / "data"),
            "metrics.port": "0",
        }
        LogDirectory.open(OsDisk(), settings["log.dirs"], node_id=1, cluster_id=None).close()
        node = Node(NodeConfig(settings), os_ports())
        starting = asyncio.create_task(node.start())
        try:
            while node._metrics is None and not starting.done():  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            running = RunningNode(node, 0)
            assert await get(running, "/healthz") == (200, "ok\n")
            assert await get(running, "/readyz") == (503, "no metadata yet\n")
            found = await scrape(running)
            assert (found("tidelog_ready"), found("tidelog_quorum_leader_id"), found("tidelog_partitions")) == (
                0,
                -1,
                0,
            )
        finally:
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)
            await node.stop()
