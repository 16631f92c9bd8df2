"""`send_arrow`: whole tables arrive as single records would, and the outcome says what is written."""

from __future__ import annotations

import asyncio
import itertools
import threading
from typing import Any

import pytest

from tests.patience import PATIENCE_S, until
from tests.unit.client.fake_broker import SILENCE, FakeCluster, FakeNode, refuse_produce
from tests.unit.client.test_producer import producer, values
from tests.unit.client.transacting import cluster_of, transactional
from tidelog.client.assignment import column_partitions
from tidelog.client.assignment.partitioner import RoundRobinPartitioner, StickyPartitioner, positive_hash
from tidelog.client.config import ProducerConfig
from tidelog.client.producing import arrow_batches
from tidelog.client.producing.arrow_batches import ArrowBatches
from tidelog.client.producing.send_group import BatchSendError
from tidelog.protocol.batches import columnar_encoder, columnar_input
from tidelog.protocol.batches.columnar_input import iter_rows
from tidelog.protocol.batches.record_batch import read_header
from tidelog.protocol.batches.records import iter_records
from tidelog.protocol.errors import ErrorCode, KafkaError
from tidelog.protocol.messages.produce import ProduceRequest

pa = pytest.importorskip("pyarrow")
np = pytest.importorskip("numpy")

HEADERS = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))


@pytest.fixture(scope="module", autouse=True)
def loaded_loops() -> None:
    """The first load of a process takes longer than the limits of some tests."""
    ArrowBatches(ProducerConfig()).load_kernel()


@pytest.fixture(params=[True, False], ids=["numba", "numpy"])
def either_path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param:
        pytest.importorskip("numba")
    monkeypatch.setattr(columnar_encoder, "has_numba", lambda: request.param)


VIEWS = pa.list_(pa.struct([("key", pa.string_view()), ("value", pa.binary_view())]))


def table_of(count: int, **columns: Any) -> Any:
    return pa.table({"value": pa.array([b"%d" % n for n in range(count)], pa.binary()), **columns})


def records(cluster: FakeCluster, partition: int) -> list[Any]:
    return [record for batch in cluster.topics["t"][partition].batches for record in iter_records(batch)]


@pytest.mark.usefixtures("either_path")
async def test_rows_arrive_with_everything_they_have() -> None:
    rows = pa.table(
        {
            "key": pa.array(["k", None, "κ"], pa.string()),
            "value": pa.array([b"1", None, b""], pa.large_binary()),
            "headers": pa.array([[{"key": "h", "value": b"x"}, {"key": "i", "value": None}], None, []], HEADERS),
            "timestamp": pa.array([1_000_000, 2_000_999, 0], pa.timestamp("us", "UTC")),
            "partition": pa.array([1, 1, 0], pa.int32()),
            "topic": ["ignored"] * 3,
        }
    )
    async with FakeCluster(t=2) as cluster, producer(cluster) as sending:
        written = await (await sending.send_arrow("t", rows))
        assert written == [("t", 0, 0, 1), ("t", 1, 0, 2)]
        assert [tuple(record) for record in records(cluster, 0)] == [(0, 0, "κ".encode(), b"", ())]
        assert [tuple(record) for record in records(cluster, 1)] == [
            (0, 1000, b"k", b"1", (("h", b"x"), ("i", None))),
            (1, 2000, None, None, ()),
        ]


async def test_the_compiled_loops_are_loaded_beside_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[threading.Thread] = []

    def has_numba() -> bool:
        threads.append(threading.current_thread())
        return False

    monkeypatch.setattr(columnar_encoder, "has_numba", has_numba)
    monkeypatch.setattr(arrow_batches, "_loaded_batch_bytes", set())
    async with FakeCluster(t=1) as cluster:
        async with producer(cluster) as sending:
            await (await sending.send_arrow("t", table_of(3, key=[b"k"] * 3)))
        assert threads[0] is not threading.current_thread()
        assert threads[-1] is threading.current_thread()
        threads.clear()
        async with producer(cluster) as second:  # as the tasks of Spark, each with a producer, in one process
            await (await second.send_arrow("t", table_of(3, key=[b"k"] * 3)))
        assert set(threads) == {threading.current_thread()}


def test_a_producer_with_other_batches_loads_the_compiled_loops_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    encoded: list[int] = []
    encode = columnar_encoder.ColumnEncoder.encode

    def counted(self: columnar_encoder.ColumnEncoder, *arguments: Any) -> Any:
        encoded.append(self._batch_bytes)
        return encode(self, *arguments)

    monkeypatch.setattr(columnar_encoder.ColumnEncoder, "encode", counted)
    monkeypatch.setattr(arrow_batches, "_loaded_batch_bytes", set())
    for batch_size in (200_000, 200_000, 300_000):
        ArrowBatches(ProducerConfig(batch_size=batch_size)).load_kernel()
    assert (encoded.count(200_000), encoded.count(300_000)) == (3, 3)


@pytest.mark.slow
async def test_a_table_waits_for_the_compiled_loops_no_longer_than_max_block_ms(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    may_end = threading.Event()
    loads: list[bool] = []
    monkeypatch.setattr(ArrowBatches, "load_kernel", lambda self: loads.append(may_end.wait(PATIENCE_S)))
    async with FakeCluster(t=1) as cluster, producer(cluster, max_block_ms=1000) as sending:
        for _ in range(2):
            with pytest.raises(KafkaError, match="max_block_ms=1000") as refused:
                await sending.send_arrow("t", table_of(3))
            assert refused.value.code is ErrorCode.REQUEST_TIMED_OUT
            await sending.send_and_wait("t", b"single")
        unloaded = producer(cluster)
        task = asyncio.ensure_future(unloaded.send_arrow("t", table_of(3)))
        await asyncio.sleep(0)
        await unloaded.close(0)
        with pytest.raises(RuntimeError, match="closed"):
            await task
        may_end.set()
        await until(lambda: True in loads and sending._arrow_kernel.is_over)
        assert await (await sending.send_arrow("t", table_of(3))) == [("t", 0, 2, 3)]


@pytest.mark.usefixtures("either_path")
@pytest.mark.parametrize("codec", ["none", "gzip", "lz4"])
async def test_keys_choose_as_for_single_records_and_batches_fit_a_request(codec: str) -> None:
    keys = [b"key-%d" % (n * 7919) for n in range(500)]
    rows = table_of(500, key=pa.array(keys, pa.binary()))
    async with FakeCluster(t=3) as cluster, producer(cluster, max_request_size=1000, compression_type=codec) as sending:
        written = await (await sending.send_arrow("t", rows))
        assert [each[:3] for each in written] == [("t", partition, 0) for partition in range(3)]
        assert sum(each.record_count for each in written) == 500
        for partition in range(3):
            expected = [b"%d" % n for n, key in enumerate(keys) if positive_hash(key) % 3 == partition]
            assert values(cluster, "t", partition) == expected
            assert len(cluster.topics["t"][partition].batches) > 1
            if codec == "none":
                assert max(map(len, cluster.topics["t"][partition].batches)) <= 1000


@pytest.mark.usefixtures("either_path")
async def test_a_small_batch_size_does_not_cut_a_table() -> None:
    async with FakeCluster(t=1) as cluster, producer(cluster, batch_size=100) as sending:
        await (await sending.send_arrow("t", table_of(300)))
        assert len(cluster.topics["t"][0].batches) == 1
        wide = table_of(300, value=pa.array([bytes(1000)] * 300, pa.binary()))
        await (await sending.send_arrow("t", wide))
        sizes = [len(batch) for batch in cluster.topics["t"][0].batches[1:]]
        assert len(sizes) == 3
        assert max(sizes) <= 128 * 1024


@pytest.mark.usefixtures("either_path")
@pytest.mark.parametrize(
    ("options", "batch_bytes"),
    [({}, 500 * 1024), ({"compression_type": "zstd"}, 128 * 1024), ({"batch_size": 300_000}, 300_000)],
)
async def test_the_batches_of_a_table_are_large(options: dict[str, Any], batch_bytes: int) -> None:
    rows = table_of(2_000, value=pa.array([bytes(1000)] * 2_000, pa.binary()))
    async with FakeCluster(t=1) as cluster, producer(cluster, **options) as sending:
        await (await sending.send_arrow("t", rows))
        counts = [read_header(batch).record_count for batch in cluster.topics["t"][0].batches]
        assert sum(counts) == 2_000
        assert (batch_bytes - 2_000) / 1_020 < max(counts) <= batch_bytes / 1_000


@pytest.mark.usefixtures("either_path")
async def test_rows_without_a_key_stay_on_a_partition_for_a_batch_of_a_table() -> None:
    rows = pa.table({"value": pa.array([b"%03d" % n + bytes(1000) for n in range(300)], pa.binary())})
    async with FakeCluster(t=8) as cluster, producer(cluster, batch_size=100) as sending:
        await (await sending.send_arrow("t", rows))
        numbers = [[int((value or b"")[:3]) for value in values(cluster, "t", partition)] for partition in range(8)]
        runs = [each for each in numbers if each]
        assert sorted(len(each) for each in runs) == [42, 129, 129]
        assert all(each == list(range(each[0], each[0] + len(each))) for each in runs)


async def test_a_large_batch_is_sent_before_the_next_one_is_encoded(monkeypatch: pytest.MonkeyPatch) -> None:
    """All batches of 4 MiB were encoded first: they had left the processor's cache when the sender read them."""
    pytest.importorskip("numba")
    rows = table_of(4_000, value=pa.array([bytes(1000)] * 4_000, pa.binary()))
    encode = columnar_encoder._encode_by_kernel
    requests: list[int] = []
    async with FakeCluster(t=1) as cluster, producer(cluster) as sending:

        def counted(*arguments: Any) -> Any:
            requests.append(sending._sender.totals.requests)  # type: ignore[union-attr]
            return encode(*arguments)

        await sending.send_and_wait("t", b"before")
        monkeypatch.setattr(columnar_encoder, "_encode_by_kernel", counted)
        assert await (await sending.send_arrow("t", rows)) == [("t", 0, 1, 4_000)]
    assert requests[:5] == [1, 2, 3, 4, 5]


@pytest.mark.usefixtures("either_path")
async def test_records_before_and_after_a_table_keep_their_order() -> None:
    async with FakeCluster(t=1) as cluster, producer(cluster, linger_ms=60_000) as sending:
        await sending.send("t", b"before")
        first, second = [await sending.send_arrow("t", table_of(count)) for count in (300, 2)]
        await sending.send("t", b"after")
        await sending.flush()
        assert await first == [("t", 0, 1, 300)]
        assert await second == [("t", 0, 301, 2)]
        assert values(cluster) == [b"before", *(b"%d" % n for n in range(300)), b"0", b"1", b"after"]


async def test_a_refused_batch_is_sent_again_in_sequence() -> None:
    async with FakeCluster(t=1) as cluster, producer(cluster, batch_size=200) as sending:
        for _ in range(3):
            cluster.script(ProduceRequest, refuse_produce(ErrorCode.NOT_LEADER_OR_FOLLOWER, append=True))
        assert await (await sending.send_arrow("t", table_of(200))) == [("t", 0, 0, 200)]
        assert values(cluster) == [b"%d" % n for n in range(200)]


async def test_a_batch_that_is_too_large_is_split() -> None:
    async with FakeCluster(t=1) as cluster, producer(cluster) as sending:
        cluster.topics["t"][0].max_batch_bytes = 300
        assert await (await sending.send_arrow("t", table_of(500))) == [("t", 0, 0, 500)]
        assert values(cluster) == [b"%d" % n for n in range(500)]
        headers = [read_header(batch) for batch in cluster.topics["t"][0].batches]
        assert [header.base_sequence for header in headers] == [header.base_offset for header in headers]


async def test_a_table_larger_than_the_memory_waits_for_it() -> None:
    async with FakeCluster(t=2) as cluster, producer(cluster, buffer_memory=5_000, batch_size=500) as sending:
        written = await (await sending.send_arrow("t", table_of(3_000)))
        assert sum(each.record_count for each in written) == 3_000
        assert len(values(cluster, "t", 0)) + len(values(cluster, "t", 1)) == 3_000


async def test_what_waits_for_a_silent_leader_keeps_no_memory_of_what_is_delivered() -> None:
    """Batches of several partitions shared memory, and one that waited kept all of it: 140 MB for 31 counted."""
    buffer_memory, count = 2 * 1024 * 1024, 20_000
    numbers = pa.array([n % 8 for n in range(count)])
    rows = table_of(count, value=pa.array([bytes(1000)] * count, pa.binary()), partition=numbers)
    async with FakeCluster(nodes=2, t=8) as cluster, producer(cluster, buffer_memory=buffer_memory) as sending:
        for number, partition in enumerate(cluster.topics["t"]):
            partition.leader = 1 if number == 0 else 2

        def answer(request: Any, node: FakeNode) -> Any:
            return SILENCE if node.node_id == 1 else node.on_produce(request)

        cluster.script(ProduceRequest, *[answer] * 1_000)
        await sending.partitions_for("t")
        allocated_before = pa.total_allocated_bytes()
        task = asyncio.ensure_future(sending.send_arrow("t", rows))
        incomplete_batches = sending._accumulator.incomplete_batches
        await until(
            lambda: (
                sending.metrics().waiting_calls and not any(each.partition.partition for each in incomplete_batches())
            )
        )
        counted = sending._accumulator.used_bytes
        held = pa.total_allocated_bytes() - allocated_before
        task.cancel()
        await asyncio.wait([task])
        await sending.close(0)
    assert counted > buffer_memory // 2
    piece = buffer_memory // 2  # without numba it is encoded already, and waits
    waiting = piece // 8 if columnar_encoder.has_numba() else piece
    assert held < (counted + waiting) * 1.1


async def test_a_failure_says_what_is_written() -> None:
    async with FakeCluster(t=2) as cluster, producer(cluster) as sending:
        cluster.topics["t"][1].max_batch_bytes = 10  # no record fits
        rows = table_of(4, partition=pa.array([0, 1, 0, 1], pa.int64()))
        outcome = await sending.send_arrow("t", rows)
        with pytest.raises(BatchSendError) as raised:
            await outcome
        error = raised.value
        assert (error.code, error.written, error.failed_count) == (
            ErrorCode.MESSAGE_TOO_LARGE,
            [("t", 0, 0, 2)],
            2,
        )


async def test_rows_that_find_no_memory_in_time_are_counted_as_failed() -> None:
    async with FakeCluster(t=1) as cluster:
        options = {"buffer_memory": 500, "batch_size": 100, "max_block_ms": 200, "retry_backoff_ms": 60_000}
        sending = producer(cluster, **options, retry_backoff_max_ms=60_000)
        await sending.start()
        await sending.partitions_for("t")
        for _ in range(50):
            cluster.script(ProduceRequest, refuse_produce(ErrorCode.NOT_ENOUGH_REPLICAS))
        outcome = await sending.send_arrow("t", table_of(1_000))
        await sending.close(0)
        with pytest.raises(BatchSendError) as raised:
            await outcome
        assert (raised.value.written, raised.value.failed_count) == ([], 1_000)
        with pytest.raises(RuntimeError, match="closed"):
            await sending.send_arrow("t", table_of(1))


async def test_an_empty_table_writes_nothing() -> None:
    async with FakeCluster(t=1) as cluster, producer(cluster) as sending:
        assert await (await sending.send_arrow("t", table_of(0))) == []


@pytest.mark.parametrize(
    ("table", "error", "match"),
    [
        ([1], TypeError, "table must be a pyarrow"),
        (pa.table({"value": [b"v"], "keys": [b"k"]}), ValueError, "no column 'keys'"),
        (pa.table({"timestamp": [1]}), ValueError, "neither"),
        (pa.table({"value": [1]}), TypeError, "'value' must be binary"),
        (pa.table({"value": [b"v"], "timestamp": [-2]}), ValueError, "timestamp"),
        (pa.table({"value": [b"v"], "timestamp": [1.5]}), TypeError, "timestamp"),
        (table_of(1, timestamp=pa.array([2**61], pa.timestamp("s"))), ValueError, f"not {2**61 * 1000}"),
        (table_of(2, timestamp=pa.array([None, 2**61 + 5], pa.timestamp("s", "UTC"))), ValueError, "timestamp"),
        (table_of(1, timestamp=pa.array([-1], pa.timestamp("s"))), ValueError, "not -1000"),
        (pa.table({"value": [b"v"], "partition": [-1]}), ValueError, "negative"),
        (pa.table({"value": [b"v"], "partition": ["0"]}), TypeError, "whole numbers"),
        (pa.table({"value": [b"v"], "headers": [[b"h"]]}), TypeError, "structs"),
        (
            pa.table({"value": [b"v"], "headers": pa.array([[{"key": None, "value": b""}]], HEADERS)}),
            ValueError,
            "key must not be null",
        ),
        (pa.table({"value": [b"v" * 2_000_000]}), KafkaError, "max_request_size"),
        (pa.table({"value": [b"v"], "partition": [2]}), KafkaError, "2 partitions"),
    ],
)
async def test_a_table_that_cannot_be_sent_sends_nothing(table: Any, error: type[Exception], match: str) -> None:
    async with FakeCluster(t=2) as cluster, producer(cluster, max_block_ms=300) as sending:
        with pytest.raises(error, match=match):
            await sending.send_arrow("t", table)
        await sending.flush()
        assert not values(cluster, "t", 0)
        assert not values(cluster, "t", 1)


async def test_timestamps_of_every_unit_become_milliseconds() -> None:
    async with FakeCluster(t=1) as cluster, producer(cluster) as sending:
        for unit, per_second in (("s", 1), ("ms", 10**3), ("us", 10**6), ("ns", 10**9)):
            times = pa.array([7 * per_second, 0, None], pa.timestamp(unit, "UTC"))
            await (await sending.send_arrow("t", table_of(3, timestamp=times)))
            sent = [record.timestamp for record in records(cluster, 0)[-3:]]
            assert sent[:2] == [7000, 0]
            assert sent[2] > 10**12  # the present time


async def test_columns_of_views_are_read_as_others() -> None:
    """Polars hands its text on so, to `pa.table` and to pyarrow's other constructors."""
    headers = [[{"key": "h" * 20, "value": b"x" * 20}], None, [{"key": "h", "value": None}]]
    rows = pa.table(
        {
            "key": pa.array(["k", None, "a key that is longer than twelve bytes"], pa.string_view()),
            "value": pa.array([b"1", b"a value that is longer than twelve bytes", None], pa.binary_view()),
            "headers": pa.array(headers, VIEWS),
        }
    )
    async with FakeCluster(t=1) as cluster, producer(cluster) as sending:
        await (await sending.send_arrow("t", rows.slice(1)))
        assert [(record.key, record.value, tuple(record.headers)) for record in records(cluster, 0)] == [
            (None, b"a value that is longer than twelve bytes", ()),
            (b"a key that is longer than twelve bytes", None, (("h", None),)),
        ]


@pytest.mark.parametrize("kind", [pa.string(), pa.large_binary(), pa.string_view(), pa.binary_view()])
async def test_columns_of_dictionaries_are_read_as_others(kind: Any) -> None:
    """Polars hands its categories to `pa.table` as dictionaries of views."""
    texts = pa.array(["k", None, "a key that is longer than twelve bytes"]).cast(kind)
    keys = pa.DictionaryArray.from_arrays(pa.array([0, 2, None, 1, 2], pa.uint32()), texts)
    rows = pa.table({"key": keys, "value": [b"0", b"1", b"2", b"3", b"4"]})
    async with FakeCluster(t=1) as cluster, producer(cluster) as sending:
        await (await sending.send_arrow("t", rows.slice(1)))
        long_key = b"a key that is longer than twelve bytes"
        assert [record.key for record in records(cluster, 0)] == [long_key, None, None, long_key]


@pytest.mark.parametrize("kind", [pa.string(), pa.string_view()])
def test_a_dictionary_without_the_value_of_a_row_is_refused(kind: Any) -> None:
    keys = pa.DictionaryArray.from_arrays(pa.array([0, 5], pa.int32()), pa.array(["k"], kind), safe=False)
    with pytest.raises(ValueError, match="'key' is damaged"):
        list(iter_rows(pa.table({"key": keys}), 2**20))


def test_a_piece_looks_at_its_own_headers_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A check of the whole column for each piece cost the square of the rows: twelve times for four times the rows."""
    monkeypatch.setattr(columnar_input, "PIECE_ROWS", 10)
    names = pa.array([b"h"] * 29 + [b"\xff"], pa.binary()).view(pa.string())
    pairs = pa.StructArray.from_arrays([names, pa.array([b"v"] * 30)], ["key", "value"])
    headers = pa.ListArray.from_arrays(pa.array(range(31), pa.int32()), pairs)
    pieces = iter_rows(pa.RecordBatch.from_arrays([pa.nulls(30), headers], ["value", "headers"]), 2**20)
    assert [next(pieces).header_counts.tolist() for _ in range(2)] == [[1] * 10] * 2
    with pytest.raises(ValueError, match="UTF8"):
        next(pieces)


@pytest.mark.parametrize("offsets", [[0, 2, 1, 3], [0, 9, 2, 3], [-1, 0, 2, 3], [0, 1, 2, 4]])
def test_damaged_offsets_of_headers_are_refused(offsets: list[int]) -> None:
    pairs = pa.StructArray.from_arrays([pa.array(["h"] * 3), pa.array([b"v"] * 3)], ["key", "value"])
    places = np.array([0, 1, 2, 3], np.int32)
    headers = pa.Array.from_buffers(HEADERS, 3, [None, pa.py_buffer(places)], children=[pairs])
    table = pa.RecordBatch.from_arrays([pa.nulls(3), headers], ["value", "headers"])
    places[:] = offsets
    with pytest.raises(ValueError, match=r"(?i)damaged|offset|length"):
        list(iter_rows(table, 2**20))


async def test_a_table_ends_with_the_producer() -> None:
    """Rows of a table that was still on its way were taken after the end, and its future was never done."""
    count = 20_000
    rows = table_of(count, key=pa.array([b"x" * 1_000] * count))
    for passes in range(1, 8):
        async with FakeCluster(t=1) as cluster:
            sending = producer(cluster)
            await sending.partitions_for("t")
            await sending._load_arrow_kernel()
            task = asyncio.ensure_future(sending.send_arrow("t", rows))
            for _ in range(passes):
                await asyncio.sleep(0)
            await sending.close(0)
            async with asyncio.timeout(PATIENCE_S):
                try:
                    outcome = await task
                except RuntimeError:
                    continue  # before its first row
                with pytest.raises(BatchSendError, match="closed before this was delivered") as failure:
                    await outcome
            assert failure.value.code is ErrorCode.NETWORK_EXCEPTION
            assert sum(each.record_count for each in failure.value.written) + failure.value.failed_count == count
            assert sending.metrics().incomplete_batches == 0


async def test_a_custom_partitioner_is_called_for_each_row() -> None:
    calls: list[Any] = []

    def choose(*arguments: Any) -> int:
        calls.append(arguments)
        return 1

    rows = pa.table({"key": [b"k", None], "value": [None, b"v"]})
    async with FakeCluster(t=2) as cluster, producer(cluster, partitioner=choose) as sending:
        assert await (await sending.send_arrow("t", rows)) == [("t", 1, 0, 2)]
    assert calls == [("t", b"k", None, 2), ("t", None, b"v", 2)]


@pytest.mark.parametrize("chosen", [0.5, "0", None, 2])
async def test_a_custom_partitioner_must_choose_a_partition_for_each_row(chosen: Any) -> None:
    async with FakeCluster(t=2) as cluster, producer(cluster, partitioner=lambda *_: chosen) as sending:
        with pytest.raises(ValueError, match=r"the partitioner chose .* of the 2 partitions of t"):
            await sending.send_arrow("t", table_of(1))


async def test_a_serializer_excludes_tables() -> None:
    async with FakeCluster(t=1) as cluster, producer(cluster, value_serializer=str.encode) as sending:
        with pytest.raises(RuntimeError, match="serializer"):
            await sending.send_arrow("t", table_of(1))


@pytest.mark.parametrize("version", [1, 2])
async def test_a_transaction_holds_tables(version: int) -> None:
    async with cluster_of(version) as cluster, transactional(cluster) as sending:
        async with sending.transaction():
            first = await sending.send_arrow("t", table_of(10, partition=pa.array([n % 2 for n in range(10)])))
        assert sum(each.record_count for each in await first) == 10
        with pytest.raises(RuntimeError, match="needs an open transaction"):
            await sending.send_arrow("t", table_of(1))
        headers = [read_header(batch) for partition in (0, 1) for batch in cluster.topics["t"][partition].batches]
        assert all(header.is_transactional for header in headers)
        assert sum(header.record_count for header in headers if not header.is_control) == 10


async def test_a_cancelled_call_keeps_what_it_has_appended() -> None:
    async with FakeCluster(t=1) as cluster, producer(cluster, buffer_memory=500, batch_size=100) as sending:
        await sending.partitions_for("t")
        task = asyncio.ensure_future(sending.send_arrow("t", table_of(5_000)))
        await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.wait([task])
        await sending.flush()
        await sending.send_and_wait("t", b"after")
        written = values(cluster)
        assert written[-1] == b"after"
        assert written[:-1] == [b"%d" % n for n in range(len(written) - 1)]


# -- partitions


@pytest.mark.usefixtures("either_path")
def test_hashes_are_those_of_the_partitioner() -> None:
    keys = [
        None,
        *(bytes((n * 37 + i) % 256 for i in range(n % 23)) for n in range(400)),
        b"x" * 1001,
        b"",
        b"\xff" * 77,
    ]
    [rows] = iter_rows(pa.table({"key": pa.array(keys, pa.binary())}), 2**20)
    partitions = np.full(len(keys), -1, np.int64)
    column_partitions.hash_keys(rows.keys, 13, partitions)
    assert partitions.tolist() == [-1 if key is None else positive_hash(key) % 13 for key in keys]


@pytest.mark.parametrize("kind", ["sticky", "round_robin"])
def test_rows_without_a_key_spread_as_single_records_do(kind: str) -> None:
    import random

    def new() -> Any:
        return StickyPartitioner(random.Random(5), 300) if kind == "sticky" else RoundRobinPartitioner()

    sizes = [size % 90 + 16 for size in range(0, 5000, 13)]
    available = [0, 2, 3]
    expected = []
    one_by_one = new()
    for size in sizes:
        expected.append(one_by_one.choose(available))
        one_by_one.record_sent(size)
    at_once = new()
    found = np.full(len(sizes), -1, np.int64)
    for rows in np.array_split(np.arange(len(sizes)), 7):
        column_partitions.spread_unkeyed(at_once, available, np.array(sizes)[rows], rows, found)
    assert found.tolist() == expected
    assert len(list(itertools.groupby(expected))) > 5
