"""When a consumer loads the compiled loop, and what it does without one."""

from __future__ import annotations

import asyncio
import gc
import logging
import threading
from typing import Any

import pytest

from tests.patience import PATIENCE_S, until
from tests.unit.client.fake_broker import FakeCluster
from tests.unit.client.test_consumer import consumer
from tidelog.client.consuming import record_decoder
from tidelog.client.consuming.completed_fetch import CompletedFetch
from tidelog.client.consuming.record_decoder import RecordDecoder
from tidelog.client.model import TopicPartition
from tidelog.protocol.batches import record_columns
from tidelog.protocol.batches.record_batch import read_header
from tidelog.protocol.batches.record_columns import FEWEST_RECORDS
from tidelog.protocol.batches.records import encode_batch, record_section

PARTITION = TopicPartition("t", 3)


def read(decoder: RecordDecoder, count: int) -> int:
    batch = encode_batch([(5, None, b"v", ())] * count)
    header = read_header(batch)
    return len(decoder.decode(PARTITION, record_section(batch, 0, header), header, 0))


def refuse(error: Exception, tries: list[int]) -> Any:
    def load() -> None:
        tries.append(1)
        raise error

    return load


def test_the_loop_is_due_after_many_records_in_large_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record_decoder, "RECORDS_BEFORE_KERNEL", 2 * FEWEST_RECORDS)
    decoder = RecordDecoder()
    for _ in range(10):
        read(decoder, FEWEST_RECORDS - 1)
    read(decoder, FEWEST_RECORDS)
    assert not decoder.is_kernel_due
    read(decoder, FEWEST_RECORDS)
    assert decoder.is_kernel_due


def test_the_loop_is_due_after_many_records_in_small_batches_that_came_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(record_decoder, "RECORDS_BEFORE_KERNEL", 2 * FEWEST_RECORDS)
    decoder = RecordDecoder()
    small = b"".join(encode_batch([(5, None, b"v", ())], base_offset=n) for n in range(FEWEST_RECORDS))
    for _ in range(10):
        assert len(CompletedFetch(PARTITION, 0, small[: len(small) // 2], decoder=decoder).take(1000)) > 1
    CompletedFetch(PARTITION, 0, small, decoder=decoder).take(1000)
    assert not decoder.is_kernel_due
    CompletedFetch(PARTITION, 0, small, decoder=decoder).take(1000)
    assert decoder.is_kernel_due


@pytest.mark.parametrize(("error", "warnings"), [(ImportError("no numba"), 0), (RuntimeError("a wrong numba"), 1)])
async def test_a_loop_that_cannot_be_loaded_is_tried_once(
    error: Exception, warnings: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(record_decoder, "RECORDS_BEFORE_KERNEL", FEWEST_RECORDS)
    tries: list[int] = []
    monkeypatch.setattr(record_columns, "load", refuse(error, tries))
    async with FakeCluster(t=1) as cluster, consumer(cluster, "t") as reading:
        for _ in range(3):
            cluster.topics["t"][0].append(bytes(encode_batch([(1000, None, b"v", ())] * FEWEST_RECORDS)))
        count = 0
        with caplog.at_level(logging.WARNING):
            while count < 3 * FEWEST_RECORDS:
                count += sum(map(len, (await reading.poll(1000, 20)).values()))
            await until(lambda: reading._record_kernel.is_over)
            await reading.poll()
    assert count == 3 * FEWEST_RECORDS
    assert tries == [1]
    assert len([each for each in caplog.records if "numba" in each.message]) == warnings


async def test_a_poll_waits_for_the_loop_no_longer_than_its_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record_decoder, "RECORDS_BEFORE_KERNEL", FEWEST_RECORDS)
    may_end = threading.Event()
    loads: list[bool] = []
    monkeypatch.setattr(record_columns, "load", lambda: loads.append(may_end.wait(PATIENCE_S)))
    async with FakeCluster(t=1) as cluster:
        async with consumer(cluster, "t") as reading:
            for _ in range(3):
                cluster.topics["t"][0].append(bytes(encode_batch([(1000, None, b"v", ())] * FEWEST_RECORDS)))
            count = 0
            while count < 3 * FEWEST_RECORDS:
                count += sum(map(len, (await reading.poll(10, 20)).values()))
            assert not loads
        # the thread still runs; no task waits for it
        assert not [task for task in asyncio.all_tasks() if "KernelLoading" in repr(task)]
        may_end.set()


@pytest.mark.parametrize("timeout_ms", [0, 60_000])
async def test_a_poll_gives_the_load_of_the_loop_its_time(timeout_ms: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record_decoder, "RECORDS_BEFORE_KERNEL", FEWEST_RECORDS)
    may_end = threading.Event()
    monkeypatch.setattr(record_columns, "load", lambda: may_end.wait(PATIENCE_S))
    async with FakeCluster(t=1) as cluster, consumer(cluster, "t") as reading:
        cluster.topics["t"][0].append(bytes(encode_batch([(1000, None, b"v", ())] * 2 * FEWEST_RECORDS)))
        assert await reading.poll(60_000, FEWEST_RECORDS)
        poll = asyncio.create_task(reading.poll(timeout_ms, FEWEST_RECORDS))
        done, _ = await asyncio.wait([poll], timeout=0.05 if timeout_ms else PATIENCE_S)
        assert bool(done) == (timeout_ms == 0)
        may_end.set()
        assert await poll


async def test_a_close_ends_a_poll_that_waits_for_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record_decoder, "RECORDS_BEFORE_KERNEL", FEWEST_RECORDS)
    may_end = threading.Event()
    monkeypatch.setattr(record_columns, "load", lambda: may_end.wait(PATIENCE_S))
    async with FakeCluster(t=1) as cluster, consumer(cluster, "t") as reading:
        cluster.topics["t"][0].append(bytes(encode_batch([(1000, None, b"v", ())] * FEWEST_RECORDS)))
        assert await reading.poll(60_000)
        poll = asyncio.create_task(reading.poll(60_000))
        await asyncio.sleep(0)
        async with asyncio.timeout(PATIENCE_S / 2):
            await reading.close()
            assert await poll == {}
        may_end.set()


async def test_a_consumer_that_reads_in_bulk_goes_on_with_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("numba")
    monkeypatch.setattr(record_decoder, "RECORDS_BEFORE_KERNEL", FEWEST_RECORDS)
    splits: list[int] = []

    def split(data: bytes, sections: Any, first_offset: int) -> Any:
        splits.append(sections[-1][2].base_offset)
        return record_columns.split_sections(data, sections, first_offset)

    monkeypatch.setattr(record_decoder, "split_sections", split)
    async with FakeCluster(t=1) as cluster, consumer(cluster, "t") as reading:
        for _ in range(3):
            rows = [(1000, b"k", b"v%d" % n, ()) for n in range(FEWEST_RECORDS)]
            cluster.topics["t"][0].append(bytes(encode_batch(rows)))
        records: list[Any] = []
        while len(records) < 3 * FEWEST_RECORDS:
            records += [each for polled in (await reading.poll(1000, 20)).values() for each in polled]
            if reading._record_kernel._task is not None:
                await until(lambda: reading._record_kernel.is_over)
    assert [record.offset for record in records] == list(range(3 * FEWEST_RECORDS))
    assert [record.value for record in records] == [b"v%d" % n for n in range(FEWEST_RECORDS)] * 3
    assert splits[-1] == 2 * FEWEST_RECORDS


@pytest.mark.parametrize("is_enabled", [True, False])
async def test_the_collector_rests_while_a_poll_makes_records_and_is_then_as_before(
    is_enabled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[bool] = []

    def deserialize(value: bytes) -> bytes:
        seen.append(gc.isenabled())
        if value == b"bad":
            raise ValueError(value)
        return value

    async with FakeCluster(t=1) as cluster, consumer(cluster, "t", value_deserializer=deserialize) as reading:
        cluster.topics["t"][0].append(bytes(encode_batch([(1000, None, b"good", ()), (1000, None, b"bad", ())])))
        was_enabled = gc.isenabled()
        (gc.enable if is_enabled else gc.disable)()
        try:
            assert len(await reading.poll(1000)) == 1
            assert gc.isenabled() == is_enabled
            with pytest.raises(ValueError, match="bad"):
                await reading.poll(1000)
            assert gc.isenabled() == is_enabled
        finally:
            (gc.enable if was_enabled else gc.disable)()
    assert seen
    assert not any(seen)
