"""How long one request keeps all others waiting: the largest turn of the loop, for the largest requests of each API."""

from __future__ import annotations

import asyncio
import socket
import struct
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, Final

import pytest

from tests.doses import is_large
from tests.patience import PATIENCE_S
from tests.unit.broker.conftest import RunningNode, Wire
from tests.unit.broker.largest_requests import TOPIC, Large, frame_of, largest_requests
from tidelog.broker.apis.api_tables import BROKER_APIS
from tidelog.broker.apis.dispatch import DECODED_AT_ONCE_BYTES_MAX
from tidelog.broker.config.node_config import NodeConfig
from tidelog.broker.node import Node
from tidelog.broker.node_ports import os_ports
from tidelog.broker.scheduling.pieces import WHOLE_BYTES_MAX
from tidelog.protocol.api import response_header_version
from tidelog.protocol.codec.schema import Message
from tidelog.protocol.messages.add_offsets_to_txn import AddOffsetsToTxnRequest, AddOffsetsToTxnResponse
from tidelog.protocol.messages.add_partitions_to_txn import AddPartitionsToTxnRequest, AddPartitionsToTxnResponse
from tidelog.protocol.messages.describe_producers import DescribeProducersRequest, DescribeProducersResponse
from tidelog.protocol.messages.elect_leaders import ElectLeadersRequest, ElectLeadersResponse
from tidelog.protocol.messages.fetch import FetchRequest
from tidelog.protocol.messages.find_coordinator import FindCoordinatorRequest, FindCoordinatorResponse
from tidelog.protocol.messages.init_producer_id import InitProducerIdRequest, InitProducerIdResponse
from tidelog.protocol.messages.offset_commit import (
    OffsetCommitRequest,
    OffsetCommitRequestPartition,
    OffsetCommitRequestTopic,
)
from tidelog.protocol.messages.offset_fetch import OffsetFetchRequest, OffsetFetchResponse
from tidelog.protocol.messages.produce import ProduceRequest
from tidelog.protocol.messages.txn_offset_commit import (
    TxnOffsetCommitRequest,
    TxnOffsetCommitRequestPartition,
    TxnOffsetCommitRequestTopic,
)

HOT: Final = (ProduceRequest, FetchRequest)
"""They are decoded in one turn."""
REQUESTS: Final[list[Any]] = [*HOT, *(api.REQUEST for api in BROKER_APIS)]

SHARE: Final = 0.1
CALLS_MAX: Final = 14
"""The function calls of one turn for each element of the request: to sort, to count."""
CALLS_OF: Final = {"Produce": 12, "Fetch": 30, "OffsetFetch": 18, "TxnOffsetCommit": 20, "WriteTxnMarkers": 18}
"""Produce and Fetch have codecs of their own, OffsetFetch answers 250 groups in one turn, the answer of
TxnOffsetCommit is encoded in one, and a piece of WriteTxnMarkers is a quarter of these markers."""
CALLS_OF_PIECES: Final = 2_500

COMMITTED: Final = 10_000
CALLS_OF_COMMIT: Final = 28
"""Of the one turn that appends and applies a prepared commit, for each offset."""

ANSWERS_IN_STEPS: Final[list[tuple[Any, Any, int]]] = [
    (AddPartitionsToTxnRequest, AddPartitionsToTxnResponse, 5),
    (DescribeProducersRequest, DescribeProducersResponse, 0),
    (ElectLeadersRequest, ElectLeadersResponse, 2),
    (OffsetFetchRequest, OffsetFetchResponse, 7),
    (OffsetFetchRequest, OffsetFetchResponse, 10),
]
RUNS: Final = 3
TURN_PER_DECODING: Final = 0.4
"""Of the CPU time of the largest turn for that of decoding the whole answer, best of RUNS. It was 0.6 and more."""

TURN_S_MAX: Final = 0.4
"""Of the CPU time of one turn: twice what limits.md promises of two processors with little other load."""


class Turns:
    """The selector of a loop, and the largest of its turns by a measure that only grows."""

    def __init__(self, selector: Any, measure: Callable[[], float]) -> None:
        self.largest = 0.0
        self.selector = selector
        self._measure = measure
        self._before = measure()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.selector, name)

    def select(self, timeout: float | None = None) -> Any:
        self.largest = max(self.largest, self._measure() - self._before)
        events = self.selector.select(timeout)
        self._before = self._measure()
        return events


@contextmanager
def measured(measure: Callable[[], float]) -> Iterator[Turns]:
    loop: Any = asyncio.get_running_loop()
    turns = loop._selector = Turns(loop._selector, measure)
    try:
        yield turns
    finally:
        loop._selector = turns.selector


class Calls:
    """Counts the calls of functions in this thread."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, frame: Any, event: str, argument: Any) -> None:
        if event == "call" or event == "c_call":
            self.count += 1


@contextmanager
def counted() -> Iterator[Calls]:
    calls = Calls()
    sys.setprofile(calls)
    try:
        yield calls
    finally:
        sys.setprofile(None)


def ask(port: int, frame: bytes) -> bytes:
    """The answer, which a thread of its own reads, or nothing if the node has closed the connection."""
    answer = bytearray()
    with socket.create_connection(("127.0.0.1", port), PATIENCE_S) as client:
        client.settimeout(PATIENCE_S)
        try:
            client.sendall(frame)
            head = client.recv(4, socket.MSG_WAITALL)
            size = struct.unpack(">i", head)[0] if len(head) == 4 else 0
            while len(answer) < size and (more := client.recv(min(size - len(answer), 1 << 20))):
                answer += more
        except ConnectionError:
            return b""
    return bytes(answer)


@asynccontextmanager
async def started(directory: Path) -> AsyncIterator[int]:
    """The port of a node with a topic and the coordinators' topics."""
    settings = {
        "listeners": "PLAINTEXT://127.0.0.1:0",
        "log.dirs": str(directory),
        "auto.create.topics.enable": "false",
        "offsets.topic.num.partitions": "2",
        "transaction.state.log.num.partitions": "2",
    }
    node = Node(NodeConfig(settings), os_ports())
    try:
        line = await node.start()
        running = RunningNode(node, int(line.partition("://")[2].partition(" ")[0].rpartition(":")[2]))
        wire = await running.connect()
        await wire.create_topic(TOPIC, 10)
        for key_type in (0, 1):
            request = FindCoordinatorRequest(key_type=key_type, coordinator_keys=["any"])
            await wire.call(request, 6, FindCoordinatorResponse)
        wire.writer.close()
        assert node._broker is not None
        for partition in node._broker.partitions.hosted():
            partition.log.flush()  # markers would wait for the first one, and not be counted as those of a used topic
        yield running.port
    finally:
        await node.stop()


def on_a_loop_of_its_own(work: Coroutine[Any, Any, None]) -> None:
    """On asyncio's own loop, whose turns can be seen. uvloop, which the other tests use, shows none."""
    with asyncio.Runner(loop_factory=asyncio.SelectorEventLoop) as runner:
        runner.run(work)


def all_largest(share: float, *, every_version: bool) -> Iterator[Large]:
    """Of the newest version of each API, and of older ones what it has no more; or of every version."""
    for message in REQUESTS:
        known = set[str]()
        for version in reversed(message.VERSIONS):
            made = list(largest_requests(message, version, share, but=frozenset() if every_version else known))
            known.update(large.wide for large in made)
            yield from made


async def decode_then_go_on_in_pieces(directory: Path) -> None:
    unfair = []
    async with started(directory) as port:
        for large in all_largest(SHARE, every_version=False):
            frame, body = large.frame(), large.request.encode(large.version)
            if len(frame) <= WHOLE_BYTES_MAX:
                continue
            with counted() as calls:
                type(large.request).decode(body, large.version)
            is_decoded_at_once = len(frame) <= DECODED_AT_ONCE_BYTES_MAX or isinstance(large.request, HOT)
            decoding = calls.count if is_decoded_at_once else 0
            with counted() as calls, measured(lambda: calls.count) as turns:
                assert await asyncio.to_thread(ask, port, frame), str(large)
            of_each = CALLS_OF.get(type(large.request).__name__.removesuffix("Request"), CALLS_MAX)
            if turns.largest > decoding + CALLS_OF_PIECES + of_each * large.elements:
                of_one = (turns.largest - decoding) / large.elements
                unfair.append(f"{large}: {of_one:.1f} calls for each of {large.elements}")
    assert not unfair, "\n".join(unfair)


@pytest.mark.slow
def test_a_request_is_decoded_and_served_in_pieces(tmp_path: Path) -> None:
    """AlterReplicaLogDirs for 400,000 replicas, 1.6 MB, took 1.2 s of the loop; the calls were 16 for each of them."""
    on_a_loop_of_its_own(decode_then_go_on_in_pieces(tmp_path))


async def valid_commits(port: int) -> list[tuple[Message, int]]:
    """Of COMMITTED offsets, which the coordinators accept: each with its version. Those of `largest_requests` are of
    unknown topics, members and transactions.
    """
    wire = Wire(*await asyncio.open_connection("127.0.0.1", port))
    begin = InitProducerIdRequest(transactional_id="x", transaction_timeout_ms=60_000)
    async with asyncio.timeout(PATIENCE_S):
        while (producer := await wire.call(begin, 4, InitProducerIdResponse)).error_code:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    transaction: dict[str, Any] = {"transactional_id": "x", "producer_id": producer.producer_id, "group_id": "g"}
    transaction["producer_epoch"] = producer.producer_epoch
    added = await wire.call(AddOffsetsToTxnRequest(**transaction), 3, AddOffsetsToTxnResponse)
    assert added.error_code == 0
    wire.writer.close()
    fields: list[dict[str, Any]] = [
        {"partition_index": i % 10, "committed_offset": i, "committed_metadata": ""} for i in range(COMMITTED)
    ]
    partitions = [OffsetCommitRequestPartition(**each) for each in fields]
    commit = OffsetCommitRequest(group_id="g", topics=[OffsetCommitRequestTopic(name=TOPIC, partitions=partitions)])
    in_transaction = TxnOffsetCommitRequest(
        topics=[
            TxnOffsetCommitRequestTopic(
                name=TOPIC, partitions=[TxnOffsetCommitRequestPartition(**each) for each in fields]
            )
        ],
        **transaction,
    )
    return [(commit, 8), (in_transaction, 3)]


async def commit_in_pieces(directory: Path) -> None:
    async with started(directory) as port:
        for request, version in await valid_commits(port):
            frame = frame_of(request, version)
            assert len(frame) > DECODED_AT_ONCE_BYTES_MAX
            with counted() as calls, measured(lambda: calls.count) as turns:
                assert await asyncio.to_thread(ask, port, frame)
            of_one = turns.largest / COMMITTED
            assert of_one < CALLS_OF_COMMIT, f"{type(request).__name__}: {of_one:.1f} calls for each offset"


@pytest.mark.slow
def test_a_commit_of_very_many_offsets_is_made_in_pieces(tmp_path: Path) -> None:
    """It was encoded in one turn: 10,000 offsets took 200 ms of the loop, 1 MB of them 900 ms."""
    on_a_loop_of_its_own(commit_in_pieces(tmp_path))


async def answer_in_steps(directory: Path) -> None:
    slow = []
    async with started(directory) as port:
        for message, response, version in ANSWERS_IN_STEPS:
            for large in largest_requests(message, version, 1.0):
                if large.is_distinct or not large.wide.endswith((".partitions", ".partition_indexes")):
                    continue
                frame, skipped = large.frame(), 5 if response_header_version(message.API_KEY, version) else 4
                ratios = []
                for _ in range(RUNS):
                    with measured(time.thread_time) as turns:
                        answer = await asyncio.to_thread(ask, port, frame)
                        await asyncio.sleep(0)
                    begun = time.thread_time()
                    response.decode(answer[skipped:], version)
                    ratios.append(turns.largest / (time.thread_time() - begun))
                if min(ratios) > TURN_PER_DECODING:
                    slow.append(f"{large}: {min(ratios):.2f}")
    assert not slow, "\n".join(slow)


@pytest.mark.slow
def test_a_large_answer_is_made_in_steps(tmp_path: Path) -> None:
    """It was encoded in steps, but made in one turn: that of OffsetFetch for 100,000 partitions took 200 ms."""
    on_a_loop_of_its_own(answer_in_steps(tmp_path))


async def take_no_long_turn(directory: Path) -> None:
    slow = []
    async with started(directory) as port:
        with measured(time.thread_time) as turns:
            for large in all_largest(1.0, every_version=is_large()):
                frame = large.frame()
                await asyncio.sleep(0)
                turns.largest = 0.0
                assert await asyncio.to_thread(ask, port, frame), str(large)
                if turns.largest > TURN_S_MAX:
                    slow.append(f"{large}: {turns.largest * 1000:.0f} ms")
    assert not slow, "\n".join(slow)


@pytest.mark.hunt
def test_no_request_keeps_the_others_waiting_for_long(tmp_path: Path) -> None:
    on_a_loop_of_its_own(take_no_long_turn(tmp_path))
