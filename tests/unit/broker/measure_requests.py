"""What a small Produce, a Fetch at the log's end, ApiVersions and a transaction cost in one process. No test.

    python -m tests.unit.broker.measure_requests [--against DIRECTORY] [--rounds 7] [--calls]

A real node runs on uvloop, with its logs in memory (/dev/shm) where there is such a thing. Frames are handed to a
connection of its server as the event loop does it, without a socket, and the answers are dropped. The figures are CPU
microseconds of the thread per request, so that other work on the machine disturbs them little; still, only figures of
one run compare. `--against` measures another tree of the sources in turn with this one: processes alternate, medians
are shown. `--calls` counts calls of Python functions per request, and names them.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import uvloop

from tests.patience import PATIENCE_S, until

ROUND_REQUESTS = 20_000
ROUND_TRANSACTIONS = 2_000
WARM_TRANSACTIONS = 300
WARM_REQUESTS = 3_000
ROUNDS_OF_PROCESS = 5
COUNTED_REQUESTS = 200
TOPICS = ("hot", "still", "sold")
MEMORY = "/dev/shm"
TREE = Path(__file__).resolve().parents[3]


class Transport:
    """As much of a transport as a connection asks for. What is written is dropped, without a call of Python."""

    def __init__(self) -> None:
        self.is_closed = False
        self.written: deque[Any] = deque(maxlen=1)
        self.write = self.written.append
        self.writelines = self.written.append

    def get_extra_info(self, name: str) -> Any:
        return ("127.0.0.1", 1) if name == "peername" else None

    def set_write_buffer_limits(self, high: int) -> None:
        pass

    def get_write_buffer_size(self) -> int:
        return 0

    def pause_reading(self) -> None:
        raise AssertionError("a small request was not answered at once")

    def resume_reading(self) -> None:
        pass

    def close(self) -> None:
        self.is_closed = True

    abort = close


def feed(connection: Any, data: bytes, times: int) -> None:
    size = len(data)
    for _ in range(times):
        connection.get_buffer(-1)[:size] = data
        connection.buffer_updated(size)


class WaitingTransport(Transport):
    """Also for requests that are answered in a later turn of the loop."""

    def pause_reading(self) -> None:
        pass


def connected(node: Any, transport: Transport) -> tuple[Any, Transport]:
    """A connection of the node's server."""
    from tidelog.broker.network.connection import KafkaConnection

    connection = KafkaConnection(node._broker_server, "PLAINTEXT")
    connection.connection_made(transport)  # type: ignore[arg-type]
    connection._resize(16 * 1024)  # what a connection gets that once filled the smallest buffer
    return connection, transport


class Transactions:
    """Transactions of one record of 1 KB, one after another. `version`: of the protocol, 1 or 2.

    Their frames are made before they are measured. The loop has its turns after each one, for the markers.
    """

    def __init__(self, node: Any, version: int) -> None:
        self._connection, self._transport = connected(node, WaitingTransport())
        self._log = node._services.partitions.find("sold", 0).log
        self._version = version
        self._id = f"measure-{version}"
        self._sequence = 0
        self._producer_id = self._epoch = -1

    async def begin(self) -> None:
        """Get a producer id."""
        from tidelog.protocol.messages.find_coordinator import FindCoordinatorRequest
        from tidelog.protocol.messages.init_producer_id import InitProducerIdRequest, InitProducerIdResponse

        find = FindCoordinatorRequest(key_type=1, coordinator_keys=[self._id])  # makes the coordinator's topic
        request = InitProducerIdRequest(
            transactional_id=self._id, transaction_timeout_ms=60_000, producer_id=-1, producer_epoch=-1
        )
        async with asyncio.timeout(PATIENCE_S):
            while self._producer_id < 0:
                await self._answer(framed(find, 6))
                answer = InitProducerIdResponse.decode(await self._answer(framed(request, 4)), 4)
                self._producer_id, self._epoch = answer.producer_id, answer.producer_epoch

    async def _answer(self, data: bytes) -> bytes:
        """The body of the answer."""
        self._transport.written.clear()
        feed(self._connection, data, 1)
        await asyncio.sleep(0.01)  # a pause before the next attempt, too
        await until(lambda: bool(self._transport.written))
        return bytes(self._transport.written[0])[9:]

    def frames(self, count: int) -> list[list[bytes]]:
        """The requests of so many transactions, each once."""
        return [self._requests() for _ in range(count)]

    def _requests(self) -> list[bytes]:
        from tidelog.protocol.batches.records import encode_batch
        from tidelog.protocol.messages.add_partitions_to_txn import AddPartitionsToTxnRequest, AddPartitionsToTxnTopic
        from tidelog.protocol.messages.end_txn import EndTxnRequest
        from tidelog.protocol.messages.produce import PartitionProduceData, ProduceRequest, TopicProduceData

        batch = encode_batch(
            [(int(time.time() * 1000), None, b"v" * 1000, ())], producer_id=self._producer_id,
            producer_epoch=self._epoch, base_sequence=self._sequence, transactional=True,
        )  # fmt: skip
        data = TopicProduceData(name="sold", partition_data=[PartitionProduceData(index=0, records=bytes(batch))])
        produce = ProduceRequest(transactional_id=self._id, acks=-1, timeout_ms=30_000, topic_data=[data])
        end = EndTxnRequest(
            transactional_id=self._id, producer_id=self._producer_id, producer_epoch=self._epoch, committed=True
        )
        if self._version == 2:
            self._epoch += 1
            return [framed(produce, 12), framed(end, 5)]
        self._sequence += 1
        add = AddPartitionsToTxnRequest(
            v3_and_below_transactional_id=self._id, v3_and_below_producer_id=self._producer_id,
            v3_and_below_producer_epoch=self._epoch,
            v3_and_below_topics=[AddPartitionsToTxnTopic(name="sold", partitions=[0])],
        )  # fmt: skip
        return [framed(add, 3), framed(produce, 11), framed(end, 3)]

    async def run(self, transactions: list[list[bytes]]) -> None:
        end_offset = self._log.log_end_offset + 2 * len(transactions)  # each a record and a marker
        for requests in transactions:
            for data in requests:
                feed(self._connection, data, 1)
            await asyncio.sleep(0)
        assert self._log.last_stable_offset == end_offset, "a transaction was refused"

    async def cost_us(self) -> float:
        transactions = self.frames(ROUND_TRANSACTIONS)
        began = time.thread_time()
        await self.run(transactions)
        return (time.thread_time() - began) * 1e6 / len(transactions)


def framed(request: Any, version: int) -> bytes:
    from tidelog.protocol.api import request_header_version

    tags = b"\0" if request_header_version(request.API_KEY, version) == 2 else b""
    head = request.API_KEY.to_bytes(2, "big") + version.to_bytes(2, "big") + (7).to_bytes(4, "big") + b"\xff\xff" + tags
    frame = head + bytes(request.encode(version))
    return len(frame).to_bytes(4, "big") + frame


def cost_us(connection: Any, data: bytes, requests_in_data: int) -> float:
    times = ROUND_REQUESTS // requests_in_data
    began = time.thread_time()
    feed(connection, data, times)
    return (time.thread_time() - began) * 1e6 / times / requests_in_data


@contextmanager
def counted_calls() -> Iterator[Counter[str]]:
    """Calls of Python functions inside the `with` block, by file and name."""
    found: Counter[str] = Counter()

    def profile(frame: Any, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename != __file__:
            code = frame.f_code
            found[f"{code.co_filename.partition('tidelog/')[2]}:{code.co_name}"] += 1

    sys.setprofile(profile)
    try:
        yield found
    finally:
        sys.setprofile(None)


def requests(now_ms: int) -> dict[str, tuple[bytes, int]]:
    """What the connection receives at once, and how many requests are in it."""
    from tidelog.bench import frames
    from tidelog.protocol.messages.api_versions import ApiVersionsRequest

    produce = frames.produce(frames.ProducePlan("hot", {0: frames.record_batch([b"v" * 200], now_ms)}), 7)
    empty = frames.fetch("still", {0: 1}, 7, max_wait_ms=0)
    record = frames.fetch("still", {0: 0}, 7)
    versions = ApiVersionsRequest(client_software_name="measure", client_software_version="1").encode(3)
    head = (18).to_bytes(2, "big") + (3).to_bytes(2, "big") + (7).to_bytes(4, "big") + b"\xff\xff\0"
    asked = head + versions
    return {
        "produce 200 B": (produce, 1),
        "produce 200 B, 16 at once": (produce * 16, 16),
        "fetch, one record": (record, 1),
        "fetch, nothing new": (empty, 1),
        "api versions": (len(asked).to_bytes(4, "big") + asked, 1),
    }


async def measure(directory: str, counts_calls: bool, only: str) -> dict[str, Any]:
    from tidelog.bench import frames
    from tidelog.bench.topics import NewTopic, create
    from tidelog.broker.config.node_config import NodeConfig
    from tidelog.broker.node import Node
    from tidelog.broker.node_ports import os_ports

    node: Any = Node(NodeConfig({"listeners": "PLAINTEXT://127.0.0.1:0", "log.dirs": directory}), os_ports())
    try:
        await node.start()
        node._services.scheduler._stopwatch = None  # or another process's turn on this processor counts as a long turn
        port = node._sockets[0][1].getsockname()[1]
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(None, create, port, [NewTopic(name, 1, 1, {}) for name in TOPICS])
        for partition in node._broker.partitions.hosted():
            partition.log.flush()  # the first records of a new log wait for its first flush
        connection, transport = connected(node, Transport())
        now_ms = int(time.time() * 1000)
        one = frames.produce(frames.ProducePlan("still", {0: frames.record_batch([b"v" * 200], now_ms)}), 1)
        feed(connection, one, 1)
        costs: dict[str, Any] = {}
        gc.freeze()
        for name, (data, count) in requests(now_ms).items():
            if only not in name:
                continue
            feed(connection, data, WARM_REQUESTS // count)
            await asyncio.sleep(0)
            if counts_calls:
                with counted_calls() as costs[name]:
                    feed(connection, data, COUNTED_REQUESTS)
                continue
            figures = []
            for _ in range(ROUNDS_OF_PROCESS):
                figures.append(cost_us(connection, data, count))
                assert not transport.is_closed
                await asyncio.sleep(0)
            costs[name] = min(figures)
        for version in (1, 2):
            name = f"transaction, version {version}"
            if only in name:
                transactions = Transactions(node, version)
                await transactions.begin()
                await transactions.run(transactions.frames(WARM_TRANSACTIONS))
                if counts_calls:
                    counted = transactions.frames(COUNTED_REQUESTS)
                    with counted_calls() as costs[name]:
                        await transactions.run(counted)
                else:
                    costs[name] = min([await transactions.cost_us() for _ in range(ROUNDS_OF_PROCESS)])
        connection.connection_lost(None)
        return costs
    finally:
        await node.stop()


def in_process(tree: Path, counts_calls: bool, only: str) -> dict[str, Any]:
    """The figures of one process that runs the sources of that tree."""
    command = [sys.executable, __file__, "--child", "--only", only, *(["--calls"] if counts_calls else [])]
    done = subprocess.run(
        command,
        check=True,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(tree)},
        cwd=tree,
        timeout=PATIENCE_S,
    )
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def show_calls(tree: Path, only: str) -> None:
    for name, found in in_process(tree, True, only).items():
        files = {key.partition(":")[0] for key in found}
        per_request = sum(found.values()) / COUNTED_REQUESTS
        print(f"{tree}: {name}: {per_request:.2f} calls in {len(files)} files")
        for key, count in found.items():
            print(f"    {count / COUNTED_REQUESTS:8.2f}  {key}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", type=Path, help="another tree, measured in turn with this one")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--calls", action="store_true")
    parser.add_argument("--only", default="", help="requests whose name contains this")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        with tempfile.TemporaryDirectory(prefix="measure-", dir=MEMORY if os.path.isdir(MEMORY) else None) as directory:
            print(json.dumps(uvloop.run(measure(directory, arguments.calls, arguments.only))))
        return
    trees = [TREE, *([arguments.against.resolve()] if arguments.against else [])]
    if arguments.calls:
        for tree in trees:
            show_calls(tree, arguments.only)
        return
    figures: dict[Path, dict[str, list[float]]] = {tree: {} for tree in trees}
    for number in range(arguments.rounds):
        for tree in trees if number % 2 else trees[::-1]:
            for name, cost in in_process(tree, False, arguments.only).items():
                figures[tree].setdefault(name, []).append(cost)
    for name in figures[TREE]:
        medians = [median(figures[tree][name]) for tree in trees]
        row = "  ".join(f"{cost:8.2f} us" for cost in medians)
        ratio = f"  {medians[0] / medians[1]:.2f}" if len(medians) > 1 else ""
        print(f"{name:28} {row}{ratio}")


if __name__ == "__main__":
    main()
