"""What is not in memory is brought there on a thread: the loop never waits for a device to look something up."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest

from tests.patience import PATIENCE_S
from tests.unit.broker.test_node import produce
from tests.unit.storage.test_slow_lookups import untrue
from tidelog.broker.apis.records import list_offsets
from tidelog.protocol.batches.record_batch import read_header
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
    look = SlowLookup.warm

    def noted(slow: SlowLookup) -> None:
        threads.append(threading.current_thread())
        look(slow)

    monkeypatch.setattr(SlowLookup, "warm", noted)
    await wire.create_topic("t")
    await wire.call(produce("t", make_batch(*[b"x"] * 5000, compression=4)), 9, ProduceResponse)
    asked = [ListOffsetsPartition(partition_index=0, timestamp=when) for when in (5, -3)]
    for partition in asked:
        request = ListOffsetsRequest(topics=[ListOffsetsTopic(name="t", partitions=[partition])])
        answer = await wire.call(request, 7, ListOffsetsResponse)
        assert [(each.error_code, each.offset) for each in answer.topics[0].partitions] == [(0, 0)]
    assert len(threads) == 2
    assert threading.current_thread() not in threads


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
