"""A real node on the test's own event loop, and a wire to it that speaks compiled messages."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from tests.unit.broker.metadata_services import running_services
from tidelog.broker.apis.services import Services
from tidelog.broker.config.node_config import NodeConfig
from tidelog.broker.node import Node
from tidelog.broker.node_ports import os_ports
from tidelog.protocol.api import request_header_version, response_header_version
from tidelog.protocol.batches.records import encode_batch
from tidelog.protocol.messages.create_topics import (
    CreatableTopic,
    CreatableTopicConfig,
    CreateTopicsRequest,
    CreateTopicsResponse,
)
from tidelog.protocol.messages.headers import RequestHeader, ResponseHeader
from tidelog.protocol.messages.metadata import MetadataRequest, MetadataResponse


class Wire:
    """One connection: `await wire.call(request, version, ResponseClass)`, or `send` and `receive` apart."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer
        self._correlation_id = 0

    def send(self, request: Any, version: int) -> int:
        self._correlation_id += 1
        key = request.API_KEY
        header = RequestHeader(
            request_api_key=key,
            request_api_version=version,
            correlation_id=self._correlation_id,
            client_id="test",
        )
        frame = header.encode(request_header_version(key, version)) + request.encode(version)
        self.writer.write(struct.pack(">i", len(frame)) + frame)
        return self._correlation_id

    async def frame(self) -> bytes:
        (size,) = struct.unpack(">i", await self.reader.readexactly(4))
        return await self.reader.readexactly(size)

    async def receive(self, response: Any, version: int) -> Any:
        frame = await self.frame()
        header, position = ResponseHeader.read(frame, 0, response_header_version(response.API_KEY, version))
        self.last_correlation_id = header.correlation_id
        return response.decode(frame[position:], version)

    async def call(self, request: Any, version: int, response: Any) -> Any:
        self.send(request, version)
        return await self.receive(response, version)

    async def create_topic(self, name: str, partitions: int = 1, **configs: str) -> bytes:
        """Topic configs with underscores for dots; the new topic's id."""
        request = CreateTopicsRequest(
            topics=[
                CreatableTopic(
                    name=name,
                    num_partitions=partitions,
                    replication_factor=1,
                    configs=[
                        CreatableTopicConfig(name=key.replace("_", "."), value=value) for key, value in configs.items()
                    ],
                )
            ],
            timeout_ms=60_000,
        )
        answer = await self.call(request, 7, CreateTopicsResponse)
        assert answer.topics[0].error_code == 0, answer
        topic_id: bytes = answer.topics[0].topic_id
        return topic_id


StartNode = Callable[..., Coroutine[Any, Any, "RunningNode"]]


class RunningNode:
    def __init__(self, node: Node, port: int) -> None:
        self.node = node
        self.port = port
        self._wires: list[Wire] = []

    async def connect(self) -> Wire:
        wire = Wire(*await asyncio.open_connection("127.0.0.1", self.port))
        self._wires.append(wire)
        return wire

    async def stop(self) -> None:
        for wire in self._wires:
            wire.writer.close()
        self._wires.clear()
        await self.node.stop()


@pytest.fixture
async def start_node(tmp_path: Path) -> AsyncIterator[StartNode]:
    """`await start_node(**{"log.flush.interval.messages": "1"})`; the same data each time within one test."""
    running: list[RunningNode] = []

    async def start(**config: str) -> RunningNode:
        settings = {
            "listeners": "PLAINTEXT://127.0.0.1:0",
            "log.dirs": str(tmp_path / "data"),
            "offsets.topic.num.partitions": "2",
            "group.initial.rebalance.delay.ms": "0",
        }
        node = Node(NodeConfig(settings | config), os_ports())
        try:
            line = await node.start()
        except BaseException:
            await node.stop()
            raise
        found = RunningNode(node, int(line.partition("://")[2].partition(" ")[0].rpartition(":")[2]))
        running.append(found)
        return found

    yield start
    for each in running:
        await each.stop()


@pytest.fixture
async def running(start_node: StartNode) -> RunningNode:
    return await start_node()


@pytest.fixture
async def wire(running: RunningNode) -> Wire:
    return await running.connect()


def batch(*values: bytes, timestamp: int = 1_700_000_000_000, **options: Any) -> bytes:
    """One record batch of these values, keyless."""
    return bytes(encode_batch([(timestamp, None, value, ()) for value in values], **options))


@pytest.fixture
def make_batch() -> Callable[..., bytes]:
    return batch


@pytest.fixture
async def services(tmp_path: Path) -> AsyncIterator[Services]:
    """What the handlers of cluster metadata need, without a socket."""
    async with running_services(tmp_path) as running:
        yield running


async def served_meanwhile(running: RunningNode, wire: Wire, request: Any, version: int, response: Any) -> int:
    """How many small requests of another client are served until this one has its answer."""
    other = await running.connect()
    wire.send(request, version)
    answered = asyncio.create_task(wire.receive(response, version))
    served = 0
    while not answered.done():
        await other.call(MetadataRequest(topics=[]), 9, MetadataResponse)
        served += 1
    await answered
    return served
