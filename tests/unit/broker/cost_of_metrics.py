"""What metrics cost, in CPU: counting a produce, and a scrape of many partitions. Run as a module; no test.

Both ways of dispatching take turns in one process, and the best round of each counts, so that a busy machine disturbs
them alike.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

from tests.unit.broker.conftest import Wire, batch
from tests.unit.broker.test_node import produce
from tidelog.broker.apis import dispatch
from tidelog.broker.apis.dispatch import Dispatcher
from tidelog.broker.apis.records import produce as produce_api
from tidelog.broker.config.node_config import NodeConfig
from tidelog.broker.node import Node
from tidelog.broker.node_ports import os_ports
from tidelog.protocol.hot import PRODUCE_FLEXIBLE_FROM
from tidelog.protocol.messages.headers import RequestHeader

ROUNDS, CALLS = 60, 1000
VERSION = 9


class Peer:
    host, listener_name = "127.0.0.1", "PLAINTEXT"
    is_gone, known_key = False, -1
    costly_waits = 0
    produce_topic_at = 0

    def close(self) -> None:
        raise AssertionError("the produce failed")

    def send_much(self) -> None:
        raise AssertionError("nobody follows")

    def on_close(self, callback: Callable[[], None]) -> None:
        pass


async def connect(sock: Any) -> Wire:
    return Wire(*await asyncio.open_connection(*sock.getsockname()))


async def counting(node: Any) -> None:
    wire = await connect(node._sockets[0][1])
    await wire.create_topic("one")
    data = batch(b"v" * 200)
    header = RequestHeader(request_api_key=0, request_api_version=VERSION, correlation_id=1, client_id="cost")
    head = header.encode(2)
    frame = memoryview(bytearray(head + produce("one", data).encode(VERSION)))
    start = bytes(frame).index(data)
    dispatcher: Dispatcher = node._dispatchers[-1]
    services, peer = dispatcher._services, Peer()

    def uncounted() -> object:
        key, version, correlation_id, client_id_bytes = dispatch._HEADER.unpack_from(frame)
        position = 10 + client_id_bytes if client_id_bytes > 0 else 10
        assert key == produce_api.API_KEY and version in produce_api.VERSIONS  # noqa: PT018 - as dispatch looks
        if version >= PRODUCE_FLEXIBLE_FROM:
            position = dispatch._skip_header_tags(frame, position)
        return produce_api.serve(services, frame, position, version, correlation_id, peer)

    ways: dict[str, Callable[[], object]] = {
        "counted": lambda: dispatcher.dispatch(frame, peer),
        "not counted": uncounted,
    }
    best = dict.fromkeys(ways, 1e9)
    for _ in range(ROUNDS):
        for name, way in ways.items():
            began = time.thread_time()
            for _ in range(CALLS):
                frame[start : start + 16] = data[:16]  # what the log stamps
                way()
            best[name] = min(best[name], (time.thread_time() - began) / CALLS)
    print("200 B produce, dispatched:", ", ".join(f"{way} {1e6 * cost:.2f} us" for way, cost in best.items()))


async def scraping(node: Any, topics: int, partitions: int) -> None:
    wire = await connect(node._sockets[0][1])
    for number in range(topics):
        await wire.create_topic(f"many-{number}", partitions)
    while sum(1 for _ in node._broker.partitions.hosted()) < topics * partitions:  # noqa: ASYNC110
        await asyncio.sleep(0.1)
    metrics, costs, page = node._metrics._metrics, [], b""
    for _ in range(5):
        began = time.thread_time()
        page, _ = await metrics.scrape()
        costs.append(time.thread_time() - began)
    print(f"scrape of {topics} x {partitions} partitions: {1e3 * min(costs):.1f} ms, {len(page):,} bytes")


async def main(topics: int, partitions: int) -> None:
    with tempfile.TemporaryDirectory() as directory:
        settings = {"listeners": "PLAINTEXT://127.0.0.1:0", "log.dirs": directory, "metrics.port": "0"}
        node = Node(NodeConfig(settings), os_ports())
        try:
            await node.start()
            await counting(node)
            await scraping(node, topics, partitions)
        finally:
            await node.stop()


if __name__ == "__main__":
    asyncio.run(main(*map(int, sys.argv[1:] or ("100", "100"))))
