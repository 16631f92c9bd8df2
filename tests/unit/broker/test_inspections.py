"""Batches that take long to look at: answered as any other, in order, while others are served."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from tests.unit.broker.conftest import StartNode
from tests.unit.broker.test_node import fetch, fetched, produce, produced
from tidelog.broker import inspections
from tidelog.protocol.errors import ErrorCode
from tidelog.protocol.messages.fetch import FetchResponse
from tidelog.protocol.messages.produce import ProduceResponse
from tidelog.protocol.records import encode_batch
from tidelog.storage.inspection import AT_ONCE_RECORDS_MAX, INSPECTED_BYTES_MAX, Unseen

LONG = AT_ONCE_RECORDS_MAX + 500


def keyed(count: int, value: bytes = b"v", key: bytes | None = b"k", compression: int = 4) -> bytes:
    now_ms = int(time.time() * 1000)
    return bytes(encode_batch([(now_ms, key, value, ())] * count, compression=compression))


BOMB = keyed(1, bytes(INSPECTED_BYTES_MAX + 1), compression=1)


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list[Unseen]:
    found: list[Unseen] = []
    begin = inspections.Inspections.begin

    def noted(self: Any, unseen: Unseen, looked: Any) -> None:
        found.append(unseen)
        begin(self, unseen, looked)

    monkeypatch.setattr(inspections.Inspections, "begin", noted)
    return found


@pytest.mark.parametrize("waiting_max", [0, inspections.WAITING_MAX])
async def test_answers_and_records_are_in_the_order_of_their_requests(
    start_node: StartNode, begun: list[Unseen], waiting_max: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inspections, "WAITING_MAX", waiting_max)
    running = await start_node()
    wire = await running.connect()
    await wire.create_topic("t", 2, cleanup_policy="compact")
    sent = [keyed(1, b"first"), keyed(LONG), keyed(2, b"behind"), keyed(LONG, key=None), BOMB, keyed(1, b"last")]
    for batch in sent:
        wire.send(produce("t", batch), 9)
    found = []
    for _ in sent:
        answer = await wire.receive(ProduceResponse, 9)
        found += produced(answer)
    refusals = [(ErrorCode.INVALID_RECORD, -1), (ErrorCode.MESSAGE_TOO_LARGE, -1)]
    assert found == [(0, 0), (0, 1), (0, 1 + LONG), *refusals, (0, 3 + LONG)]
    assert len(begun) == 3
    both = await wire.call(produce("t", keyed(1), keyed(LONG)), 9, ProduceResponse)
    assert produced(both) == [(0, 4 + LONG), (0, 0)]
    values = fetched(await wire.call(fetch("t", most=1 << 22), 11, FetchResponse))
    assert values == [b"first", *[b"v"] * LONG, b"behind", b"behind", b"last", b"v"]


async def test_a_refusal_names_the_records(start_node: StartNode) -> None:
    running = await start_node()
    wire = await running.connect()
    await wire.create_topic("t", cleanup_policy="compact")
    answer = await wire.call(produce("t", keyed(LONG, key=None)), 9, ProduceResponse)
    (partition,) = answer.responses[0].partition_responses
    assert len(partition.record_errors) == 1000
    assert partition.record_errors[0].batch_index_error_message == "a compacted topic takes no record without a key"


async def test_with_acks_0_a_refusal_ends_the_connection_and_nothing_else_is_answered(start_node: StartNode) -> None:
    running = await start_node()
    wire, other = await running.connect(), await running.connect()
    await wire.create_topic("t", cleanup_policy="compact")
    wire.send(produce("t", keyed(LONG), acks=0), 9)
    answer = await wire.call(produce("t", keyed(1)), 9, ProduceResponse)
    assert produced(answer) == [(0, LONG)]
    wire.send(produce("t", keyed(LONG, key=None), acks=0), 9)
    assert await asyncio.wait_for(wire.reader.read(1), 10) == b""
    assert produced(await other.call(produce("t", keyed(1)), 9, ProduceResponse)) == [(0, LONG + 1)]


async def test_others_are_served_while_many_are_looked_at(start_node: StartNode, begun: list[Unseen]) -> None:
    running = await start_node()
    setup = await running.connect()
    await setup.create_topic("t", cleanup_policy="compact")
    await setup.create_topic("other")
    wires = [await running.connect() for _ in range(8)]
    for wire in wires:
        wire.send(produce("t", BOMB), 9)
        wire.send(produce("t", keyed(100_000, b"")), 9)
    served = 0
    looking = asyncio.gather(*(wire.receive(ProduceResponse, 9) for wire in wires))
    while not looking.done():
        await setup.call(produce("other", keyed(1)), 9, ProduceResponse)
        served += 1
    assert [produced(answer) for answer in looking.result()] == [[(ErrorCode.MESSAGE_TOO_LARGE, -1)]] * 8
    last = [produced(await wire.receive(ProduceResponse, 9))[0] for wire in wires]
    assert sorted(last) == [(0, number * 100_000) for number in range(8)]
    assert len(begun) == 16
    assert served > 8


async def test_a_node_stops_while_batches_are_looked_at(start_node: StartNode) -> None:
    running = await start_node()
    wire = await running.connect()
    await wire.create_topic("t", cleanup_policy="compact")
    for _ in range(20):
        wire.send(produce("t", BOMB), 9)
    await asyncio.sleep(0.01)
    await running.stop()
    assert not running.node._services.inspections._tasks  # type: ignore[union-attr]
