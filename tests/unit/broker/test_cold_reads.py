"""What is not in memory is brought there on a thread: the loop never waits for a device to look something up."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from tests.patience import PATIENCE_S, until
from tests.unit.broker.test_node import produce
from tests.unit.storage.test_slow_lookups import untrue
from tidelog.broker.apis.records import list_offsets
from tidelog.broker.node_ports import IO_THREADS_MAX
from tidelog.protocol.batches.record_batch import read_header
from tidelog.protocol.batches.records import encode_batch, record_section
from tidelog.protocol.errors import ErrorCode
from tidelog.protocol.messages.find_coordinator import FindCoordinatorRequest, FindCoordinatorResponse
from tidelog.protocol.messages.list_offsets import (
    ListOffsetsPartition,
    ListOffsetsRequest,
    ListOffsetsResponse,
    ListOffsetsTopic,
)
from tidelog.protocol.messages.offset_commit import (
    OffsetCommitRequest,
    OffsetCommitRequestPartition,
    OffsetCommitRequestTopic,
    OffsetCommitResponse,
)
from tidelog.protocol.messages.offset_fetch import OffsetFetchRequest, OffsetFetchRequestTopic, OffsetFetchResponse
from tidelog.protocol.messages.produce import ProduceResponse
from tidelog.storage.files.disk import OsFile
from tidelog.storage.segments import lookup
from tidelog.storage.segments.lookup import SlowLookup
from tidelog.storage.segments.reader import ColdRead

MakeBatch = Callable[..., bytes]


@pytest.fixture
def cold(monkeypatch: pytest.MonkeyPatch) -> list[threading.Thread]:
    """Until it has been warmed, nothing of a file is in memory; who warmed what is not the metadata's."""
    warm: set[tuple[str, int]] = set()
    threads: list[threading.Thread] = []
    nowait, bring = OsFile.read_at_nowait, ColdRead.warm

    def read_at_nowait(file: OsFile, size_bytes: int, position: int) -> bytes | None:
        return nowait(file, size_bytes, position) if (file._path, position) in warm else None

    def warm_up(read: ColdRead) -> None:
        if "/__cluster_metadata-0/" not in read.path:
            threads.append(threading.current_thread())
        bring(read)
        warm.add((read.path, read._position))

    monkeypatch.setattr(OsFile, "read_at_nowait", read_at_nowait)
    monkeypatch.setattr(ColdRead, "warm", warm_up)
    return threads


async def test_offsets_are_found_by_time(
    start_node: Any, make_batch: MakeBatch, cold: list[threading.Thread], monkeypatch: pytest.MonkeyPatch
) -> None:
    node = await start_node()
    wire = await node.connect()
    await wire.create_topic("t", 2)
    for _ in range(3):
        await wire.call(produce("t", make_batch(b"a", b"b"), make_batch(b"c")), 9, ProduceResponse)
    await node.stop()
    wire = await (await start_node()).connect()
    asked = [ListOffsetsPartition(partition_index=index, timestamp=when) for index, when in ((0, 5), (1, -3), (9, 5))]
    request = ListOffsetsRequest(topics=[ListOffsetsTopic(name="t", partitions=asked)])
    answer = await wire.call(request, 7, ListOffsetsResponse)
    found = [(each.partition_index, each.error_code, each.offset) for each in answer.topics[0].partitions]
    assert found == [(0, 0, 0), (1, 0, 0), (9, 3, -1)]
    assert cold
    assert threading.current_thread() not in cold


async def test_many_records_are_looked_at_beside_the_loop(
    wire: Any, make_batch: MakeBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A small batch can stand for a hundred thousand of them, and be asked about again and again."""
    threads: list[threading.Thread] = []
    decompress = SlowLookup.decompress

    def noted(slow: SlowLookup) -> None:
        threads.append(threading.current_thread())
        decompress(slow)

    monkeypatch.setattr(SlowLookup, "decompress", noted)
    await wire.create_topic("t")
    await wire.call(produce("t", make_batch(*[b"x"] * 5000, compression=4)), 9, ProduceResponse)
    asked = [ListOffsetsPartition(partition_index=0, timestamp=when) for when in (5, -3)]
    for partition in asked:
        request = ListOffsetsRequest(topics=[ListOffsetsTopic(name="t", partitions=[partition])])
        answer = await wire.call(request, 7, ListOffsetsResponse)
        assert [(each.error_code, each.offset) for each in answer.topics[0].partitions] == [(0, 0)]
    assert len(threads) == 2
    assert threading.current_thread() not in threads


async def test_searches_leave_the_threads_to_others(
    start_node: Any, make_batch: MakeBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """2,000 requests of 50 B took all of them for minutes: no topic could be created, and no vote was synced."""
    node = await start_node()
    wire = await node.connect()
    await wire.create_topic("t")
    await wire.call(produce("t", make_batch(*[b"x"] * 5000, compression=4)), 9, ProduceResponse)
    running, at_most = 0, 0
    goes_on = threading.Event()
    section = record_section

    def waiting(*arguments: Any) -> bytes:
        nonlocal running, at_most
        running += 1
        at_most = max(at_most, running)
        assert goes_on.wait(PATIENCE_S)
        running -= 1
        return section(*arguments)

    monkeypatch.setattr(lookup, "record_section", waiting)
    others = [await node.connect() for _ in range(2 * IO_THREADS_MAX)]
    try:
        for when, other in enumerate(others):
            partition = ListOffsetsPartition(partition_index=0, timestamp=when)
            request = ListOffsetsRequest(topics=[ListOffsetsTopic(name="t", partitions=[partition])])
            for _ in range(2):
                other.send(request, 7)
        await until(lambda: running > 0)
        await asyncio.wait_for(wire.create_topic("another"), PATIENCE_S / 2)
    finally:
        goes_on.set()
    for other in others * 2:
        answer = await other.receive(ListOffsetsResponse, 7)
        assert [(each.error_code, each.offset) for each in answer.topics[0].partitions] == [(0, 0)]
    assert at_most == 1


async def test_the_quorum_does_not_wait_for_the_threads_of_cold_reads(start_node: Any) -> None:
    """A stranger's cold reads may take all of them. Topics are created then, and votes synced, all the same."""
    node = await start_node()
    wire = await node.connect()
    goes_on = threading.Event()
    executor = node.node._ports.executor
    busy = [executor.submit(goes_on.wait, PATIENCE_S) for _ in range(IO_THREADS_MAX)]
    try:
        await until(lambda: all(each.running() for each in busy))
        await asyncio.wait_for(wire.create_topic("t"), PATIENCE_S / 2)
    finally:
        goes_on.set()
    assert all(each.result(PATIENCE_S) for each in busy)


async def test_searches_of_many_partitions_let_others_run(
    wire: Any, make_batch: MakeBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each may look at 2,000 records: 500 of them in one turn took more than a second."""
    await wire.create_topic("t", 5)
    await wire.call(produce("t", *[make_batch(b"x")] * 5), 9, ProduceResponse)
    find, found_in, turn = list_offsets._find, Counter[int](), 0

    def slow(*arguments: Any) -> Any:
        found_in[turn] += 1
        time.sleep(list_offsets.PIECE_S)
        return find(*arguments)

    monkeypatch.setattr(list_offsets, "_find", slow)
    partitions = [ListOffsetsPartition(partition_index=index, timestamp=0) for index in range(5)]
    request = ListOffsetsRequest(topics=[ListOffsetsTopic(name="t", partitions=partitions)])
    answering = asyncio.ensure_future(wire.call(request, 7, ListOffsetsResponse))
    while not answering.done():
        turn += 1
        await asyncio.sleep(0)
    assert [each.offset for each in answering.result().topics[0].partitions] == [0] * 5
    assert max(found_in.values()) <= 2


async def test_a_search_through_many_batches_lets_others_run(wire: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookup, "HEADERS_AT_ONCE_MAX", 5)
    await wire.create_topic("t", 2)
    now_ms = int(time.time() * 1000)
    older, newer = (bytes(encode_batch([(when, None, b"x", ())])) for when in (now_ms - 10, now_ms))
    for _ in range(40):
        await wire.call(produce("t", older), 9, ProduceResponse)
    await wire.call(produce("t", newer, newer), 9, ProduceResponse)
    find, turns, turn = list_offsets._find, set[int](), 0

    def noted(*arguments: Any) -> Any:
        turns.add(turn)
        return find(*arguments)

    monkeypatch.setattr(list_offsets, "_find", noted)
    partitions = [ListOffsetsPartition(partition_index=index, timestamp=now_ms - 5) for index in range(2)]
    request = ListOffsetsRequest(topics=[ListOffsetsTopic(name="t", partitions=partitions)])
    answering = asyncio.ensure_future(wire.call(request, 7, ListOffsetsResponse))
    while not answering.done():
        turn += 1
        await asyncio.sleep(0)
    assert [each.offset for each in answering.result().topics[0].partitions] == [40, 0]
    assert len(turns) >= 40 // 5


@pytest.mark.slow
async def test_a_search_ends_though_others_crowd_out_what_it_found(
    wire: Any, make_batch: MakeBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of several would look for ever at batches whose headers are untrue."""
    monkeypatch.setattr(lookup, "_FOUND_MAX", 3)
    monkeypatch.setattr(list_offsets, "_SLOW_LOOKUPS_MAX", 20)
    await wire.create_topic("t")
    batch = memoryview(make_batch(*[b"x"] * 2500, compression=4))
    claimed_ms = read_header(batch).max_timestamp + 1_800_000
    found = []
    for _ in range(5):
        await wire.call(produce("t", bytes(untrue(batch, claimed_ms))), 9, ProduceResponse)
        partition = ListOffsetsPartition(partition_index=0, timestamp=claimed_ms)
        request = ListOffsetsRequest(topics=[ListOffsetsTopic(name="t", partitions=[partition])])
        async with asyncio.timeout(PATIENCE_S):
            answer = await wire.call(request, 7, ListOffsetsResponse)
        found += [(each.error_code, each.offset) for each in answer.topics[0].partitions]
    assert found == [(0, -1)] * 3 + [(ErrorCode.INVALID_RECORD, -1)] * 2


async def test_committed_offsets_are_loaded(start_node: Any, cold: list[threading.Thread]) -> None:
    node = await start_node()
    wire = await node.connect()
    await wire.create_topic("t")
    assert (await wire.call(FindCoordinatorRequest(key="g"), 2, FindCoordinatorResponse)).error_code == 0
    partition = OffsetCommitRequestPartition(partition_index=0, committed_offset=7, committed_metadata="")
    commit = OffsetCommitRequest(
        group_id="g",
        generation_id_or_member_epoch=-1,
        topics=[OffsetCommitRequestTopic(name="t", partitions=[partition])],
    )
    async with asyncio.timeout(PATIENCE_S):
        while (await wire.call(commit, 8, OffsetCommitResponse)).topics[0].partitions[0].error_code:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    await node.stop()
    assert not cold
    wire = await (await start_node()).connect()
    fetch = OffsetFetchRequest(group_id="g", topics=[OffsetFetchRequestTopic(name="t", partition_indexes=[0])])
    async with asyncio.timeout(PATIENCE_S):
        while (found := await wire.call(fetch, 7, OffsetFetchResponse)).error_code:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    assert found.topics[0].partitions[0].committed_offset == 7
    assert cold
    assert threading.current_thread() not in cold
