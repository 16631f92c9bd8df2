"""A node that is told to end while it opens its logs opens no more of them, and the next start has every record."""

from __future__ import annotations

import asyncio
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.patience import PATIENCE_S, until
from tests.unit.broker.conftest import StartNode
from tests.unit.broker.test_node import fetch, fetched, produce, produced
from tidelog.broker.config.node_config import NodeConfig
from tidelog.broker.node import Node
from tidelog.broker.node_ports import os_ports
from tidelog.protocol.messages.fetch import FetchResponse
from tidelog.protocol.messages.produce import ProduceResponse
from tidelog.storage.log.directory import METADATA_TOPIC, LogDirectory

TOPICS = [f"topic-{number}" for number in range(5)]


@pytest.fixture
async def killed(start_node: StartNode, tmp_path: Path, make_batch: Callable[..., bytes]) -> Path:
    """The data of a node that was killed: each topic has a record."""
    running = await start_node()
    wire = await running.connect()
    for topic in TOPICS:
        await wire.create_topic(topic)
        assert produced(await wire.call(produce(topic, make_batch(b"x")), 9, ProduceResponse)) == [(0, 0)]
    return Path(shutil.copytree(tmp_path / "data", tmp_path / "killed"))


async def test_a_node_that_is_told_to_end_while_it_scans_its_logs_scans_no_more_of_them(
    killed: Path, start_node: StartNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []
    is_opening, goes_on = threading.Event(), threading.Event()
    open_log = LogDirectory._open_log

    def held(self: LogDirectory, topic: str, *rest: Any, **options: Any) -> Any:
        if topic != METADATA_TOPIC:
            opened.append(topic)
            is_opening.set()
            assert goes_on.wait(PATIENCE_S)
        return open_log(self, topic, *rest, **options)

    ports = os_ports()
    shut_down = ports.executor.shutdown  # type: ignore[union-attr]

    def go_on_and_shut_down(*, wait: bool) -> None:
        """The node waits for its threads last."""
        goes_on.set()
        shut_down(wait=wait)

    with monkeypatch.context() as patch:
        patch.setattr(LogDirectory, "_open_log", held)
        patch.setattr(ports.executor, "shutdown", go_on_and_shut_down)
        node = Node(NodeConfig({"listeners": "PLAINTEXT://127.0.0.1:0", "log.dirs": str(killed)}), ports)
        starting = asyncio.create_task(node.start())
        await until(is_opening.is_set)
        starting.cancel()
        await asyncio.wait([starting])
        await node.stop()
    assert len(opened) == 1
    wire = await (await start_node(**{"log.dirs": str(killed)})).connect()
    for topic in TOPICS:
        assert fetched(await wire.call(fetch(topic), 11, FetchResponse))[0] == b"x"
