"""Batches that take long to look at: answered as any other, in order, while others are served."""

from __future__ import annotations

import asyncio
import gc
import random
import threading
import time
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from tests.patience import PATIENCE_S, until
from tests.unit.broker.conftest import StartNode
from tests.unit.broker.test_node import fetch, fetched, produce, produced
from tidelog.broker.apis.records import produce as produce_api
from tidelog.broker.apis.records import produce_waits
from tidelog.broker.scheduling import inspections
from tidelog.broker.scheduling.fair_scheduler import FairScheduler
from tidelog.broker.scheduling.inspections import Inspection
from tidelog.protocol.batches.records import encode_batch
from tidelog.protocol.errors import ErrorCode, KafkaError
from tidelog.protocol.messages.fetch import FetchResponse
from tidelog.protocol.messages.produce import ProduceResponse
from tidelog.storage.segments.append_rules import INSPECTED_BYTES_MAX
from tidelog.storage.segments.inspection import AT_ONCE_RECORDS_MAX, NeedsInspection, inspect_batch

LONG = 5 * AT_ONCE_RECORDS_MAX


def keyed(count: int, value: bytes = b"v", key: bytes | None = b"k", compression: int = 4) -> bytes:
    now_ms = int(time.time() * 1000)
    return bytes(encode_batch([(now_ms, key, value, ())] * count, compression=compression))


BOMB = keyed(1, bytes(INSPECTED_BYTES_MAX + 1), compression=1)


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list[NeedsInspection]:
    found: list[NeedsInspection] = []
    begin = inspections.Inspections.begin

    def noted(self: Any, inspection: Inspection) -> None:
        assert isinstance(inspection.batch, NeedsInspection)
        found.append(inspection.batch)
        begin(self, inspection)

    monkeypatch.setattr(inspections.Inspections, "begin", noted)
    return found


async def test_answers_and_records_are_in_the_order_of_their_requests(
    start_node: StartNode, begun: list[NeedsInspection]
) -> None:
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


@pytest.mark.parametrize("piece_elements_max", [500, 20])
async def test_many_short_ones_of_one_request_are_looked_at_in_several_turns(
    start_node: StartNode, begun: list[NeedsInspection], monkeypatch: pytest.MonkeyPatch, piece_elements_max: int
) -> None:
    """Eighty of 2,000 records, a quarter of a megabyte together, held up all others for a quarter of a second."""
    running = await start_node()
    wire = await running.connect()
    await wire.create_topic("t", 60, cleanup_policy="compact")
    node: Any = running.node
    partitions = node._broker.partitions
    await until(lambda: sum(each.leads for each in partitions.hosted()) == 60)
    monkeypatch.setattr(produce_api, "INSPECTED_PIECE_MAX", 7)
    for module in (produce_api, produce_waits):
        monkeypatch.setattr(module, "PIECE_ELEMENTS_MAX", piece_elements_max)
    monkeypatch.setattr(produce_api, "WHOLE_BYTES_MAX", 0)
    monkeypatch.setattr("tidelog.storage.segments.inspection.AT_ONCE_RECORDS_MAX", 20)
    looks: list[int] = []
    turns: list[int] = []

    def counted(batches: memoryview, header: Any, *arguments: Any) -> memoryview:
        looks.append(header.record_count)
        return inspect_batch(batches, header, *arguments)

    monkeypatch.setattr("tidelog.storage.segments.append.inspect_batch", counted)
    loop = asyncio.get_running_loop()

    def turn(before: int) -> None:
        turns.append(len(looks) - before)
        if len(looks) < 60:
            loop.call_soon(turn, len(looks))

    loop.call_soon(turn, 0)
    batches = [keyed(1 + index % 20) for index in range(60)]
    answer = await wire.call(produce("t", *batches), 9, ProduceResponse)
    assert produced(answer) == [(0, 0)] * 60
    assert [each.index for topic in answer.responses for each in topic.partition_responses] == [*range(60)]
    assert looks == [1 + index % 20 for index in range(60)]
    assert max(turns) == 7
    assert not begun
    longer = await wire.call(produce("t", keyed(21)), 9, ProduceResponse)
    assert produced(longer) == [(0, 1)]
    assert len(begun) == 1


async def test_few_short_ones_with_many_compressed_bytes_are_looked_at_in_several_turns(
    start_node: StartNode, begun: list[NeedsInspection], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ten of 63 KB, which are ten thousand empty blocks each, held up all others for a quarter of a second."""
    running = await start_node()
    wire = await running.connect()
    await wire.create_topic("t", 9, cleanup_policy="compact")
    node: Any = running.node
    partitions = node._broker.partitions
    await until(lambda: sum(each.leads for each in partitions.hosted()) == 9)
    small, plain = keyed(1, compression=1), keyed(1, compression=0)
    large = keyed(1, random.Random(1).randbytes(900), compression=1)
    batches = [small, small, plain, large, large, plain, small, small, small]
    monkeypatch.setattr(produce_api, "INSPECTED_PIECE_BYTES_MAX", 3 * len(small))
    turns: list[list[int]] = []

    def counted(batches: memoryview, header: Any, *arguments: Any) -> memoryview:
        turns[-1].append(header.size_bytes)
        return inspect_batch(batches, header, *arguments)

    monkeypatch.setattr("tidelog.storage.segments.append.inspect_batch", counted)
    loop = asyncio.get_running_loop()

    def turn() -> None:
        turns.append([])
        if sum(map(len, turns)) < 9:
            loop.call_soon(turn)

    turn()
    answer = await wire.call(produce("t", *batches), 9, ProduceResponse)
    assert produced(answer) == [(0, 0)] * 9
    sizes = list(map(len, batches))
    assert [each for each in turns if each] == [sizes[:3], sizes[3:4], sizes[4:5], sizes[5:]]
    assert not begun


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
    assert await asyncio.wait_for(wire.reader.read(1), PATIENCE_S) == b""
    assert produced(await other.call(produce("t", keyed(1)), 9, ProduceResponse)) == [(0, LONG + 1)]


@pytest.fixture
def uncollected() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def kept() -> int:
    """The batches that are in memory although their requests are answered, or their clients gone."""
    return sum(type(each) is NeedsInspection for each in gc.get_objects())


@pytest.mark.usefixtures("uncollected")
@pytest.mark.parametrize("partitions", [1, 2])
async def test_no_batch_is_kept_for_the_garbage_collector(start_node: StartNode, partitions: int) -> None:
    """A node that had refused 283 requests of 734 B kept 4.3 GB: 15 MiB of decompressed records of each of them."""
    running = await start_node()
    wire = await running.connect()
    await wire.create_topic("t", 2, compression_type="uncompressed")
    for batch, error in (
        (keyed(10, bytes(200_000)), ErrorCode.MESSAGE_TOO_LARGE),  # when it is compressed anew
        (keyed(1, bytes(INSPECTED_BYTES_MAX + 1)), ErrorCode.MESSAGE_TOO_LARGE),
        (keyed(LONG), ErrorCode.NONE),
    ):
        for _ in range(2):
            answer = await wire.call(produce("t", *[batch] * partitions), 9, ProduceResponse)
            assert [code for code, _ in produced(answer)] == [error] * partitions
    await until(lambda: not kept())


@pytest.mark.slow
async def test_others_are_served_while_many_are_looked_at(start_node: StartNode, begun: list[NeedsInspection]) -> None:
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
    assert running.node._services is not None
    assert running.node._services.inspections._worker is None


@pytest.mark.slow
async def test_none_of_very_many_is_looked_at_on_the_loop(
    start_node: StartNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beyond sixty-four they were: a hundred connections stopped the node for seconds."""
    threads: list[threading.Thread] = []
    decompress = NeedsInspection.decompress

    def noted(self: NeedsInspection) -> None:
        threads.append(threading.current_thread())
        decompress(self)

    monkeypatch.setattr(NeedsInspection, "decompress", noted)
    running = await start_node()
    setup = await running.connect()
    await setup.create_topic("t", cleanup_policy="compact")
    wires = [await running.connect() for _ in range(80)]
    for wire in wires:
        wire.send(produce("t", keyed(LONG, b"")), 9)
    answers = [produced(await wire.receive(ProduceResponse, 9))[0] for wire in wires]
    assert sorted(answers) == [(0, number * LONG) for number in range(80)]
    assert len(threads) == 80
    assert threading.main_thread() not in threads


def note(looked: list[int], number: int, outcome: Any) -> None:
    looked.append(number)


class FakeUnseen:
    """One that notes when it is looked at, and may fail."""

    def __init__(self, seen: list[int], number: int) -> None:
        self._seen = seen
        self._number = number

    def decompress(self) -> None:
        self._seen.append(self._number)

    def inspect(self) -> Iterator[None]:
        yield

    def rebuild(self) -> None:
        pass


async def test_one_that_cannot_be_taken_on_does_not_keep_the_others_waiting(caplog: pytest.LogCaptureFixture) -> None:
    loop = asyncio.get_running_loop()
    all_of_them = inspections.Inspections(loop, None, FairScheduler(loop.call_soon))
    seen: list[int] = []
    looked: list[int] = []

    def fail(outcome: Any) -> None:
        raise RuntimeError("as planned")

    for number in range(3):
        callback = fail if number == 1 else partial(note, looked, number)
        all_of_them.begin(Inspection(FakeUnseen(seen, number), callback, 1))
    await until(lambda: len(looked) == 2)
    assert (seen, looked) == ([0, 1, 2], [0, 2])
    assert "as planned" in caplog.text
    await all_of_them.close()


async def test_hosts_take_turns() -> None:
    """A large batch of one host waited for 86 s behind those of 200 connections of another one."""
    loop = asyncio.get_running_loop()
    all_of_them = inspections.Inspections(loop, None, FairScheduler(loop.call_soon))
    seen: list[int] = []
    for number, host in enumerate("aaaabbca"):
        one = Inspection(FakeUnseen(seen, number), lambda _: None, 1, host)
        all_of_them.begin(one)
    assert len(all_of_them) == 8
    await until(lambda: len(seen) == 8)
    assert seen == [0, 4, 6, 1, 5, 2, 3, 7]
    await until(lambda: not all_of_them._waiting)  # no host is kept
    await all_of_them.close()


async def test_a_search_whose_client_is_gone_is_not_begun() -> None:
    loop = asyncio.get_running_loop()
    all_of_them = inspections.Inspections(loop, None, FairScheduler(loop.call_soon))
    seen: list[int] = []
    refusals: list[KafkaError | None] = []
    for number, is_gone in enumerate((True, False)):
        client = SimpleNamespace(is_gone=is_gone)
        all_of_them.begin(Inspection(FakeUnseen(seen, number), refusals.append, 0, client=client))
    await until(lambda: len(refusals) == 2)
    assert seen == [1]
    assert [refused and refused.code for refused in refusals] == [ErrorCode.NETWORK_EXCEPTION, None]
    await all_of_them.close()


async def test_what_clients_left_behind_is_dropped_when_it_becomes_too_much(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inspections, "ABANDONED_BYTES_MAX", 20)
    loop = asyncio.get_running_loop()
    all_of_them = inspections.Inspections(loop, None, FairScheduler(loop.call_soon))
    seen: list[int] = []
    looked: list[int] = []
    for number in range(10):
        one = Inspection(FakeUnseen(seen, number), partial(note, looked, number), 10)
        all_of_them.begin(one)
        if number < 9:
            all_of_them.abandon(one)
        assert hasattr(one, "batch") == (number not in range(2, 9))
    await until(lambda: 9 in looked)
    assert looked == [0, 1, 9]
    await all_of_them.close()


async def test_a_connection_that_waits_for_an_inspection_keeps_its_buffer(
    start_node: StartNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It bounds the copies that wait; given back, a client could have a new one filled, and so on."""
    running = await start_node()
    wire = await running.connect()
    await wire.create_topic("t", cleanup_policy="compact")
    server = running.node._broker_server
    assert server is not None
    goes_on = asyncio.Event()
    refusal = inspections.Inspections._refusal

    async def wait(self: Any, inspection: Inspection) -> Any:
        await goes_on.wait()
        return await refusal(self, inspection)

    monkeypatch.setattr(inspections.Inspections, "_refusal", wait)
    wire.send(produce("t", keyed(LONG, bytes(100), compression=0)), 9)
    await until(lambda: any(each._exclusive for each in server.connections))
    before = server.receive_bytes
    for _ in range(3):
        server._sweep_idle()
    assert server.receive_bytes == before > 200_000
    goes_on.set()
    assert produced(await wire.receive(ProduceResponse, 9)) == [(0, 0)]
    for _ in range(3):
        server._sweep_idle()
    assert server.receive_bytes < 200_000
