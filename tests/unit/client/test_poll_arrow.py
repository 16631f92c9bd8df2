"""`poll_arrow`: the records of polls as columns, from both consumers, beside polls, and what it refuses."""

from __future__ import annotations

import asyncio
import importlib
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.patience import PATIENCE_S
from tests.unit.client.fake_broker import FakeCluster
from tests.unit.client.test_admin import served
from tests.unit.client.test_consumer import FAST, T0, T1, consumer, fill
from tidelog.client import Consumer, sync
from tidelog.protocol.batches import columnar
from tidelog.protocol.batches.columnar import COLUMNS, arrow_schema
from tidelog.protocol.batches.records import ControlRecordType, encode_batch, encode_control_batch, encode_end_txn_value
from tidelog.protocol.errors import ErrorCode, KafkaError

pa = pytest.importorskip("pyarrow")


async def read_table(reading: Consumer, count: int, **options: Any) -> Any:
    tables: list[Any] = []
    async with asyncio.timeout(PATIENCE_S):
        while sum(table.num_rows for table in tables) < count:
            tables.append(await reading.poll_arrow(1000, **options))
    return pa.concat_tables(tables)


@pytest.mark.slow
@pytest.mark.parametrize("has_numba", [True, False])
async def test_a_table_has_what_polls_have(has_numba: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if has_numba:
        pytest.importorskip("numba")
    monkeypatch.setattr(columnar, "_has_numba", lambda: has_numba)
    rows = [(1000 + n, b"k%d" % n if n % 3 else None, b"v" * n or None, (("h", b"x"),) * (n % 2)) for n in range(20)]
    async with FakeCluster(t=2) as cluster, consumer(cluster, "t") as reading, consumer(cluster, "t") as beside:
        for codec, partition in ((0, 0), (3, 1)):
            cluster.topics["t"][partition].append(bytes(encode_batch(rows, compression=codec)))
        table = await read_table(reading, 40)
        assert table.schema == arrow_schema()
        records: list[Any] = []
        while len(records) < 40:
            records += [each for polled in (await beside.poll(1000)).values() for each in polled]
        expected = sorted(
            (r.topic, r.partition, r.offset, r.timestamp_ms, r.key, r.value, list(r.headers) or None) for r in records
        )
        found = []
        for row in table.to_pylist():
            headers = row["headers"] and [(pair["key"], pair["value"]) for pair in row["headers"]]
            timestamp_ms = round(row["timestamp"].timestamp() * 1000)
            found.append(
                (row["topic"], row["partition"], row["offset"], timestamp_ms, row["key"], row["value"], headers)
            )
        assert sorted(found) == expected
        assert (await reading.position(T0), await reading.position(T1)) == (20, 20)


async def test_without_records_the_table_is_empty_and_has_its_columns() -> None:
    async with FakeCluster(t=1) as cluster, consumer(cluster, "t") as reading:
        table = await reading.poll_arrow(10, columns=("offset", "value"))
        assert (table.num_rows, table.column_names) == (0, ["offset", "value"])


_IMPORTS = """
import asyncio, sys, threading
from tidelog import Consumer

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "pyarrow":
            print("on the loop" if threading.current_thread() is threading.main_thread() else "beside it")

async def main():
    async def poll():
        consumer = Consumer("t", bootstrap_servers="127.0.0.1:1")
        table = await consumer.poll_arrow(1, columns=["offset"])
        print(table.num_rows, table.column_names)
        await consumer.close()
    await asyncio.gather(poll(), poll())

assert "pyarrow" not in sys.modules
sys.meta_path.insert(0, Finder())
asyncio.run(main())
"""


def test_pyarrow_is_imported_beside_the_event_loop() -> None:
    result = subprocess.run(
        [sys.executable, "-c", _IMPORTS], capture_output=True, text=True, timeout=PATIENCE_S, check=True
    )
    assert result.stdout.splitlines() == ["beside it", "0 ['offset']", "0 ['offset']"]


async def test_a_close_ends_a_call_that_imports_pyarrow(monkeypatch: pytest.MonkeyPatch) -> None:
    may_end = threading.Event()
    monkeypatch.setattr(importlib, "import_module", lambda name: may_end.wait(PATIENCE_S))
    async with FakeCluster(t=1) as cluster, consumer(cluster, "t") as reading:
        polling = asyncio.create_task(reading.poll_arrow(PATIENCE_S * 1000))
        await asyncio.sleep(0.01)
        await reading.close()
        may_end.set()
        async with asyncio.timeout(PATIENCE_S):
            assert (await polling).num_rows == 0


def held_load(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """The loops are loaded when this event is set."""
    may_end = threading.Event()
    load = columnar.load_kernel

    def wait_and_load() -> None:
        assert may_end.wait(PATIENCE_S)
        load()

    monkeypatch.setattr(columnar, "load_kernel", wait_and_load)
    return may_end


async def test_a_call_does_not_wait_for_the_loops_beyond_its_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    may_end = held_load(monkeypatch)
    async with FakeCluster(t=1) as cluster, consumer(cluster, "t") as reading:
        fill(cluster, "t", 0, 5)
        async with asyncio.timeout(PATIENCE_S):
            for _ in range(3):
                assert (await reading.poll_arrow(10)).num_rows == 0
        may_end.set()
        assert (await read_table(reading, 5))["offset"].to_pylist() == list(range(5))


async def test_loads_that_wait_for_one_another_leave_the_threads_of_the_loop_free(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Six consumers that waited for one compilation held all of them: names were not looked up, and a call of
    `poll_arrow` with 20 ms took as long as the compilation.
    """
    may_end = held_load(monkeypatch)
    loop = asyncio.get_running_loop()
    loop.set_default_executor(ThreadPoolExecutor(1))
    async with FakeCluster(t=1) as cluster, consumer(cluster, "t") as first, consumer(cluster, "t") as second:
        fill(cluster, "t", 0, 5)
        try:
            async with asyncio.timeout(PATIENCE_S / 2):
                for reading in (first, second):
                    assert (await reading.poll_arrow(10)).num_rows == 0
                assert await loop.getaddrinfo("localhost", 9092)
        finally:
            may_end.set()
        assert (await read_table(second, 5))["offset"].to_pylist() == list(range(5))


@pytest.mark.parametrize("columns", [("value",), ("value", "offset"), ("topic", "partition", "key")])
async def test_only_the_wanted_columns_come_in_the_wanted_order(columns: tuple[str, ...]) -> None:
    async with FakeCluster(t=1) as cluster, consumer(cluster, "t") as reading:
        fill(cluster, "t", 0, 5)
        table = await read_table(reading, 5, columns=columns)
        assert table.schema == arrow_schema(columns)
        assert await reading.position(T0) == 5


async def test_polls_and_tables_alternate() -> None:
    async with FakeCluster(t=1) as cluster, consumer(cluster, "t", group_id="g") as reading:
        fill(cluster, "t", 0, 9, per_batch=4)
        offsets: list[int] = []
        async with asyncio.timeout(PATIENCE_S):
            while not offsets:
                offsets += [record.offset for record in (await reading.poll(1000, max_records=2)).get(T0, [])]
            offsets += (await read_table(reading, 7))["offset"].to_pylist()
            await reading.commit()
        assert offsets == list(range(9))
        assert cluster.groups.group("g").offsets["t", 0][0] == 9
        reading.seek(T0, 6)
        assert (await read_table(reading, 3))["offset"].to_pylist() == [6, 7, 8]


async def test_a_limit_ends_a_table_with_the_piece_that_reaches_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(columnar, "PIECE_ROWS", 4)
    async with FakeCluster(t=1) as cluster, consumer(cluster, "t") as reading:
        fill(cluster, "t", 0, 30, per_batch=4)
        sizes: list[int] = []
        async with asyncio.timeout(PATIENCE_S):
            while sum(sizes) < 30:
                sizes.append((await reading.poll_arrow(1000, max_records=6)).num_rows)
        assert max(sizes) == 8


async def test_aborted_and_control_records_are_left_out() -> None:
    async with FakeCluster(t=1) as cluster:
        log = cluster.topics["t"][0]
        kept = bytes(encode_batch([(1, None, b"kept", ())]))
        log.append(kept)
        value = encode_end_txn_value(0)
        marker = encode_control_batch(ControlRecordType.COMMIT, value, producer_id=1, producer_epoch=0, timestamp=1)
        log.append(bytes(marker))
        log.append(kept)
        async with consumer(cluster, "t", isolation_level="read_committed") as reading:
            table = await read_table(reading, 2)
            assert table["offset"].to_pylist() == [0, 2]


async def test_a_damaged_batch_is_raised_after_the_records_before_it() -> None:
    async with FakeCluster(t=1) as cluster, consumer(cluster, "t") as reading:
        whole = bytes(encode_batch([(1, None, b"a", ()), (1, None, b"b", ())]))
        log = cluster.topics["t"][0]
        log.append(whole)
        log.append(whole[:-1] + bytes([whole[-1] ^ 1]))
        assert (await read_table(reading, 2))["value"].to_pylist() == [b"a", b"b"]
        with pytest.raises(KafkaError, match="batch at offset 2 fails its CRC") as caught:
            await read_table(reading, 1)
        assert caught.value.code is ErrorCode.CORRUPT_MESSAGE


def test_the_blocking_twin_reads_tables() -> None:
    with served(t=2) as cluster:
        fill(cluster, "t", 0, 5)
        with sync.Consumer("t", **{"bootstrap_servers": cluster.bootstrap, **FAST}) as reading:
            rows = 0
            while rows < 5:
                table = reading.poll_arrow(1000, columns=("value",))
                rows += table.num_rows
            assert table.schema == arrow_schema(("value",))


async def test_what_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    async with FakeCluster(t=1) as cluster:
        async with consumer(cluster, "t", value_deserializer=bytes.decode) as reading:
            with pytest.raises(RuntimeError, match="has a deserializer"):
                await reading.poll_arrow()
        async with consumer(cluster, "t") as reading:
            with pytest.raises(ValueError, match="no column 'offsets'; the columns are key, value"):
                await reading.poll_arrow(columns=("offsets",))
            monkeypatch.setitem(sys.modules, "pyarrow", None)
            arrow_schema.cache_clear()
            with pytest.raises(ImportError, match=r"pip install 'tidelog\[arrow\]'"):
                await reading.poll_arrow(columns=COLUMNS)
