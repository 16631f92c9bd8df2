"""The fuzz target that is a whole node: a client's bytes through connection, dispatch and handlers, on virtual time.

The node lives in a simulated world, on a disk in memory, and for some hundred inputs, so that requests meet the
topics, groups, sessions and producers that earlier ones left. Each input is what one connection sends. Invariants:
nothing raises, nothing is logged as an error, every answer is a response to its request that can be decoded, in order,
and when the connection is gone nothing of it is left.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import logging
from collections.abc import Iterator
from random import Random
from struct import Struct
from typing import Any

from tests.fuzz.decoders import mend_crcs
from tests.fuzz.plausible import plausible
from tests.fuzz.target import Target
from tests.properties.test_messages_against_kio import MESSAGES
from tests.simulation.host import Host
from tests.simulation.simulated_network import Network
from tests.simulation.world import World
from tidelog.broker.apis.records import fetch, produce
from tidelog.broker.config.node_config import NodeConfig
from tidelog.broker.coordinators.group import joins
from tidelog.broker.node import Node
from tidelog.broker.node_ports import NodePorts
from tidelog.protocol.api import request_header_version, response_header_version
from tidelog.protocol.errors import KafkaError, MalformedMessage
from tidelog.protocol.hot import decode_produce
from tidelog.protocol.messages.create_topics import CreatableTopic, CreateTopicsRequest
from tidelog.protocol.messages.headers import RequestHeader, ResponseHeader

INPUTS_PER_NODE = 300
INPUTS_WITHOUT_TOPIC = 20
PARTITIONS_MAX = 40
SEEDS_PER_VERSION, SEEDS_OF_SEVERAL = 2, 300
ANSWERED_S, GONE_S = 0.3, 1.0

PRODUCE, API_VERSIONS, CREATE_TOPICS, CREATE_PARTITIONS = 0, 18, 19, 37
# What ends the node by design, asked by whoever may ask it: UnregisterBroker, AddRaftVoter, RemoveRaftVoter.
LEFT_OUT = frozenset({64, 80, 81})
CONFIG = {
    "node.id": "1",
    "process.roles": "broker,controller",
    "listeners": "PLAINTEXT://n1:9092,CONTROLLER://n1:9093",
    "controller.listener.names": "CONTROLLER",
    "log.dirs": "/data",
    "offsets.topic.num.partitions": "1",
    "group.initial.rebalance.delay.ms": "0",
    "socket.request.max.bytes": "65536",
    "auto.create.topics.enable": "false",
}

_HEADER = Struct(">hhih")
_SIZE = Struct(">i")
_API_MESSAGES = [
    each
    for each in MESSAGES
    if each.API_KEY is not None and each.__module__.rpartition(".")[2] not in ("metadata_records", "headers")
]
REQUESTS = {each.API_KEY: each for each in _API_MESSAGES if each.__name__.endswith("Request")}
RESPONSES = {each.API_KEY: each for each in _API_MESSAGES if each.__name__.endswith("Response")}


class _Errors(logging.Handler):
    """What the node says went wrong."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


class _Client(asyncio.Protocol):
    def __init__(self) -> None:
        self.received = bytearray()
        self.transport: Any = None
        self.lost = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.received += data

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost = True


class LivingNode:
    """A node with a topic `t` of two partitions and one `c` that is compacted, and a client beside it."""

    def __init__(self) -> None:
        self.inputs: list[bytes] = []
        members = itertools.count()
        joins.random_uuid = lambda rng: str(next(members))  # so that an input can name a member
        self._world = World(1)
        network = Network(self._world)
        network.weather.splits = 0.2
        self._host = Host(self._world, network, "n1")
        self._client = Host(self._world, network, "c1")
        self._client.start(_forever)
        self._node: Any = None
        self._host.start(self._serve)
        self._world.run_for(20, lambda: self._node is not None)
        assert self._node is not None, "the node did not start"
        topics = [
            CreatableTopic(name="t", num_partitions=2, replication_factor=1),
            CreatableTopic(name="c", num_partitions=1, replication_factor=1, configs=[]),
        ]
        self.send(framed(CreateTopicsRequest(topics=topics, timeout_ms=5000), 7), 5.0)
        self.topic_id: bytes = self.image.topics_by_name["t"].topic_id
        self.served: dict[int, range] = self._node._dispatchers[-1].supported_versions

    @property
    def image(self) -> Any:
        return self._node._metadata.tracker.image

    @property
    def worn(self) -> bool:
        """Whether another node should be asked: most of what inputs name is gone."""
        many = len(self.inputs)
        return many >= INPUTS_PER_NODE or (not many % INPUTS_WITHOUT_TOPIC and "t" not in self.image.topics_by_name)

    async def _serve(self) -> None:
        host = self._host
        ports = NodePorts(host.disk, host.bind, host.clock_ms, host.rng, None, host.boot_id)
        node = Node(NodeConfig.load(None, CONFIG), ports)
        await node.start()
        self._node = node
        await _forever()

    def send(self, data: bytes, wait_s: float = ANSWERED_S) -> tuple[bytes, bool]:
        """What comes back on a connection of its own, and whether the node closed it. Raises Broken."""
        world, client = self._world, _Client()
        world.events = 0
        loop: Any = self._client.loop
        loop.inject(lambda: loop.create_task(loop.create_connection(lambda: client, "n1", 9092)))
        if not world.run_for(1, lambda: client.transport is not None):
            raise AssertionError("the node does not accept")
        loop.inject(client.transport.write, data)
        world.run_for(wait_s, lambda: client.lost)
        received, closed = bytes(client.received), client.lost
        loop.inject(client.transport.close)
        world.run_for(GONE_S)
        server = self._node._broker_server
        assert not server.connections, "a connection that is gone is still there"
        assert server.receive_bytes == 0, "buffers that were not given back"
        return received, closed

    def end(self) -> None:
        for host in (self._host, self._client):
            host.kill()
        self._world.end()


async def _forever() -> None:
    await asyncio.get_running_loop().create_future()


_living: LivingNode | None = None
_errors = _Errors()


def living() -> LivingNode:
    global _living
    if _living is not None and _living.worn:
        end()
    if _living is None:
        logger = logging.getLogger("tidelog")
        if _errors not in logger.handlers:
            logger.addHandler(_errors)
            logger.propagate = False
        _errors.records.clear()
        _living = LivingNode()
    return _living


def end() -> None:
    global _living
    if _living is not None:
        _living.end()
        _living = None
        gc.collect()


def framed(request: Any, version: int, correlation_id: int = 7) -> bytes:
    key = request.API_KEY
    header = RequestHeader(
        request_api_key=key, request_api_version=version, correlation_id=correlation_id, client_id="f"
    )
    frame = header.encode(request_header_version(key, version)) + request.encode(version)
    return _SIZE.pack(len(frame)) + frame


# ------------------------------------------------------------------------------------------------------- the target


def node(data: bytes) -> None:
    requests = list(_requests(data))
    if any(_is_left_out(*each) for each in requests):
        return
    found = living()
    found.inputs.append(data)
    try:
        received, _ = found.send(data)
        errors = list(_errors.records)
        if errors:
            failure = errors[0].exc_info[1] if errors[0].exc_info else None
            raise failure or AssertionError(f"logged as an error: {errors[0].getMessage()}")
        _check_answers(requests, received)
    except BaseException:
        _end_later()
        raise


def _end_later() -> None:
    """After a finding another node is asked; what this one was asked is still wanted."""
    global _living, _last_inputs
    if _living is not None:
        _last_inputs = _living.inputs
    end()


_last_inputs: list[bytes] = []


def history() -> list[bytes]:
    return _living.inputs if _living is not None else _last_inputs


def _requests(data: bytes) -> Iterator[tuple[int, int, int, bytes]]:
    """Key, version, correlation id and frame of every request in a stream, as far as it can be read."""
    position = 0
    while len(data) - position >= 14:
        (size,) = _SIZE.unpack_from(data, position)
        if size < 8 or position + 4 + size > len(data):
            return
        frame = data[position + 4 : position + 4 + size]
        if size >= 10:
            key, version, correlation_id, _ = _HEADER.unpack_from(frame)
            yield key, version, correlation_id, frame
        position += 4 + size


def _body(key: int, version: int, frame: bytes) -> Any:
    """The decoded request, or None."""
    message = REQUESTS.get(key)
    if message is None or version not in message.VERSIONS:
        return None
    start = 10 + max(_HEADER.unpack_from(frame)[3], 0) + (request_header_version(key, version) == 2)
    try:
        return message.read(memoryview(bytearray(frame)), start, version)[0]
    except (MalformedMessage, KafkaError, IndexError):
        return None


def _is_left_out(key: int, version: int, correlation_id: int, frame: bytes) -> bool:
    """What would end the node, or keep the simulated disk busy with a thousand directories."""
    if key in LEFT_OUT:
        return True
    if key not in (CREATE_TOPICS, CREATE_PARTITIONS):
        return False
    request = _body(key, version, frame)
    if request is None:
        return False
    if key == CREATE_PARTITIONS:
        return any(each.count > PARTITIONS_MAX for each in request.topics)
    return sum(max(each.num_partitions, len(each.assignments), 1) for each in request.topics) > PARTITIONS_MAX


def _check_answers(requests: list[tuple[int, int, int, bytes]], received: bytes) -> None:
    """Every whole answer belongs to the next request that has one, and is a response of its version."""
    waiting = iter(requests)
    position = 0
    while len(received) - position >= 4:
        (size,) = _SIZE.unpack_from(received, position)
        if position + 4 + size > len(received):
            raise AssertionError("an answer that is not whole")
        answer = received[position + 4 : position + 4 + size]
        position += 4 + size
        correlation_id = _SIZE.unpack_from(answer)[0]
        for key, version, asked, _ in waiting:
            if asked == correlation_id and _is_response(answer, key, version):
                break
            assert key == PRODUCE, f"an answer {correlation_id} where {asked} was asked, of API {key} version {version}"
        else:
            raise AssertionError(f"an answer {correlation_id} that nobody asked for")
    assert position == len(received), "a piece of an answer"


def _is_response(answer: bytes, key: int, version: int) -> bool:
    response = RESPONSES[key]
    if key == API_VERSIONS and version not in response.VERSIONS:
        version = 0
    try:
        _, start = ResponseHeader.read(answer, 0, response_header_version(key, version))
        response.decode(answer[start:], version)
    except (MalformedMessage, KafkaError):
        if key != PRODUCE:  # one that expects no answer may have the same correlation id
            raise
        return False
    return True


# ------------------------------------------------------------------------------------------------- seeds and mutation


def seeds() -> Iterator[bytes]:
    """Every request at every version, with values that mean something to this node; then a few in a row."""
    found = living()
    rng = Random(9)
    every: list[bytes] = []
    for key, versions in sorted(found.served.items()):
        if key in LEFT_OUT:
            continue
        for version in versions:
            if key == API_VERSIONS or version in REQUESTS[key].VERSIONS:
                requests = [plausible(rng, REQUESTS[key], version, found.topic_id) for _ in range(SEEDS_PER_VERSION)]
                every.extend(framed(request, version) for request in requests)
    yield from every
    for _ in range(SEEDS_OF_SEVERAL):
        yield b"".join(rng.choice(every) for _ in range(rng.randint(2, 6)))


def mend(data: bytearray, rng: Random) -> None:
    """Give the stream the frame sizes that its first request is given, and produced batches their CRCs."""
    position = 0
    while len(data) - position >= 14:
        (size,) = _SIZE.unpack_from(data, position)
        left = len(data) - position - 4
        if size < 10 or size > left:
            size = left
            _SIZE.pack_into(data, position, size)
        key, version, _, client_id = _HEADER.unpack_from(data, position + 4)
        if key == produce.API_KEY and version in produce.VERSIONS:
            start = position + 14 + max(client_id, 0) + (version >= 9)
            _mend_produce(memoryview(data)[start : position + 4 + size], version)
        position += 4 + size


def _mend_produce(body: memoryview, version: int) -> None:
    try:
        request = decode_produce(body, version)
    except (MalformedMessage, KafkaError):
        return
    for _, partitions in request.topics:
        for _, records in partitions:
            if records:
                fixed = bytearray(records)
                mend_crcs(fixed)
                records[:] = fixed


assert fetch.API_KEY in REQUESTS

TARGET = Target("node", node, seeds, mend, history)
