"""Produces with acks=0: the next request of the connection waits for the sync that an acknowledgement would wait for.

Kafka syncs a new log's topic id, and with flush.messages the records, in the append itself.
"""

from __future__ import annotations

import asyncio

import pytest

from tests.patience import PATIENCE_S, until
from tests.unit.broker.conftest import StartNode
from tests.unit.broker.test_abandoned_produces import connections_of, partitions_of
from tests.unit.broker.test_inspections import LONG, keyed
from tests.unit.broker.test_node import fetch, fetched, hold_flushes, produce
from tidelog.broker.apis.records import produce as produce_api
from tidelog.broker.apis.records import produce_waits
from tidelog.protocol.errors import ErrorCode
from tidelog.protocol.messages.fetch import FetchResponse

COUNT = 6


@pytest.mark.parametrize("kind", ["at once", "in pieces", "inspected"])
async def test_the_next_request_finds_the_first_record_of_a_new_log(
    start_node: StartNode, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    node = await start_node()
    wire = await node.connect()
    await wire.create_topic("t", 2, **({"cleanup_policy": "compact"} if kind == "inspected" else {}))
    if kind == "in pieces":
        for module in (produce_api, produce_waits):
            monkeypatch.setattr(module, "PIECE_ELEMENTS_MAX", 1)
    gate = hold_flushes(monkeypatch)
    batch = keyed(LONG) if kind == "inspected" else keyed(1)
    try:
        wire.send(produce("t", batch, keyed(1), acks=0), 9)
        wire.send(fetch("t"), 11)
        await until(lambda: [each.log.log_end_offset > 0 for each in partitions_of(node)] == [True, True])
        await asyncio.sleep(0.05)  # the fetch would be answered without records meanwhile
    finally:
        gate.set()
    answer = await asyncio.wait_for(wire.receive(FetchResponse, 11), PATIENCE_S)
    assert fetched(answer)


async def test_what_a_client_sent_before_it_disconnected_is_appended(
    start_node: StartNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also requests that the node has not read, because their connection waits for the sync."""
    node = await start_node()
    wire = await node.connect()
    await wire.create_topic("t")
    gate = hold_flushes(monkeypatch)
    other = await node.connect()
    try:
        for _ in range(COUNT):
            other.send(produce("t", keyed(1, bytes(20_000), compression=0), acks=0), 9)
            await asyncio.wait_for(other.writer.drain(), PATIENCE_S)
            await asyncio.sleep(0.005)
        (partition,) = partitions_of(node)
        await until(lambda: partition.log.log_end_offset > 0)
        other.writer.close()
        await asyncio.wait_for(other.writer.wait_closed(), PATIENCE_S)
    finally:
        gate.set()
    await until(lambda: partition.log.log_end_offset == COUNT)
    await until(lambda: len(connections_of(node)) == 1)
    assert node.node._broker.partitions.acknowledgements.waiting_count == 0  # type: ignore[union-attr]


@pytest.mark.parametrize("timeout_ms", [0, 50])
async def test_a_sync_that_lasts_longer_than_the_timeout_ends_the_wait_alone(
    start_node: StartNode, monkeypatch: pytest.MonkeyPatch, timeout_ms: int
) -> None:
    """Kafka has no timeout for acks=0. A closed connection would lose the requests behind, unnoticed."""
    node = await start_node()
    wire = await node.connect()
    await wire.create_topic("t")
    gate = hold_flushes(monkeypatch)
    try:
        for _ in range(COUNT):
            wire.send(produce("t", keyed(1), acks=0, timeout_ms=timeout_ms), 9)
        (partition,) = partitions_of(node)
        await until(lambda: partition.log.log_end_offset == COUNT)
    finally:
        gate.set()
    await until(lambda: partition.log.high_watermark == COUNT)
    wire.send(fetch("t"), 11)
    answer = await asyncio.wait_for(wire.receive(FetchResponse, 11), PATIENCE_S)
    assert len(fetched(answer)) == COUNT


@pytest.mark.parametrize("kind", ["one partition", "one of several"])
async def test_a_leader_change_during_the_sync_loses_no_request_behind(
    start_node: StartNode, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """The append has succeeded: Kafka serves the next requests. The connection was closed, and they were lost."""
    node = await start_node()
    wire = await node.connect()
    await wire.create_topic("t", 2)
    await wire.create_topic("u")
    gate = hold_flushes(monkeypatch)
    broker = node.node._broker
    assert broker is not None
    led, other, behind = (broker.partitions.find(*key) for key in (("t", 0), ("t", 1), ("u", 0)))
    assert led is not None
    assert other is not None
    assert behind is not None
    batches = [keyed(1)] if kind == "one partition" else [keyed(1), keyed(1)]
    try:
        wire.send(produce("t", *batches, acks=0), 9)
        wire.send(produce("u", keyed(1), acks=0), 9)
        await until(lambda: led.log.log_end_offset == 1)
        await asyncio.sleep(0.05)
        assert not behind.log.log_end_offset, "it waits"
        broker.partitions.fail_waiting_requests(led, ErrorCode.NOT_LEADER_OR_FOLLOWER)
    finally:
        gate.set()
    await until(lambda: behind.log.log_end_offset == 1)
    assert len(connections_of(node)) == 1
