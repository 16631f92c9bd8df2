"""Batches of Arrow columns are those of the record by record encoder, byte for byte, with numba and without."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidelog.protocol.batches import columnar_encoder, columnar_input
from tidelog.protocol.batches.batch_builder import BatchBuilder
from tidelog.protocol.batches.columnar_encoder import ColumnEncoder
from tidelog.protocol.batches.columnar_input import iter_rows

pa = pytest.importorskip("pyarrow")
np = pytest.importorskip("numpy")

PATHS = [True, False] if columnar_encoder.has_numba() else [False]
HEADER = pa.struct([("key", pa.string()), ("value", pa.binary())])

optional_bytes = st.none() | st.binary(max_size=40) | st.integers(0, 300).map(bytes)
headers = st.lists(st.tuples(st.text(max_size=8), st.none() | st.binary(max_size=8)), max_size=3)
timestamps = st.integers(0, 2**13) | st.integers(2**43, 2**43 + 300) | st.integers(0, 2**62 - 1)
row = st.tuples(timestamps, optional_bytes, optional_bytes, st.none() | headers, st.integers(0, 3))
tables = st.lists(row, min_size=1, max_size=60)


def as_table(rows: list[Any], binary: Any, cut: int) -> Any:
    """The rows as a table of two chunks, each a slice of a longer one, so that offsets are not 0."""
    first = [(7, b"unseen", b"unseen", [("unseen", b"unseen")], 0)]
    chunks = []
    for part in (rows[:cut], rows[cut:]):
        padded = first + part + first
        columns = [
            pa.array([each[1] for each in padded], binary),
            pa.array([each[2] for each in padded], binary),
            pa.array(
                [None if each[3] is None else [{"key": k, "value": v} for k, v in each[3]] for each in padded],
                pa.list_(HEADER),
            ),
            pa.array([each[0] for each in padded], pa.int64()),
        ]
        chunk = pa.record_batch(columns, ["key", "value", "headers", "timestamp"])
        chunks.append(chunk.slice(1, len(part)))
    return pa.Table.from_batches(chunks)


def by_builder(rows: list[Any], limit: int) -> list[tuple[int, bytes]]:
    """The batches of consecutive rows as the producer makes them: a builder for each partition."""
    batches: list[tuple[int, bytes]] = []
    for partition in sorted({each[4] for each in rows}):
        builder = BatchBuilder(limit)
        for timestamp, key, value, pairs, _ in (each for each in rows if each[4] == partition):
            if not builder.append(timestamp, key, value, pairs or ()):
                batches.append((partition, bytes(builder.build())))
                builder = BatchBuilder(limit)
                assert builder.append(timestamp, key, value, pairs or ())
        batches.append((partition, bytes(builder.build())))
    return batches


def by_columns(table: Any, partitions: list[int], limit: int, has_numba: bool, piece_bytes: int) -> Any:
    original = columnar_encoder.has_numba
    columnar_encoder.has_numba = lambda: has_numba  # type: ignore[assignment]
    try:
        encoder = ColumnEncoder(limit)
        pieces = []
        done = 0
        for rows in iter_rows(table, piece_bytes):
            chosen = np.array(partitions[done : done + rows.row_count], np.int64)
            done += rows.row_count
            pieces.append((rows.row_count, list(encoder.encode(rows, chosen))))
        assert done == len(partitions)
        return pieces
    finally:
        columnar_encoder.has_numba = original


def built(encoded: Any) -> bytes:
    builder = BatchBuilder(1)
    builder.adopt(encoded.buffer, encoded.record_count, encoded.base_timestamp, encoded.max_timestamp)
    return bytes(builder.build())


@pytest.mark.slow
@given(
    tables,
    st.sampled_from([pa.binary(), pa.large_binary()]),
    st.integers(0, 60),
    st.sampled_from([0, 61, 100, 400, 16_384]),
    st.sampled_from([1, 50, 1000, 2**20]),
)
def test_the_bytes_are_those_of_the_builder(rows, binary, cut, limit, piece_bytes):
    table = as_table(rows, binary, min(cut, len(rows)))
    for has_numba in PATHS:
        done = 0
        for count, encoded in by_columns(table, [each[4] for each in rows], limit, has_numba, piece_bytes):
            assert all(memoryview(each.buffer.obj).nbytes == len(each.buffer) for each in encoded)  # what it keeps
            assert len({id(each.buffer.obj) for each in encoded}) == len(encoded)
            expected = by_builder(rows[done : done + count], limit)
            assert [(each.partition, built(each)) for each in encoded] == expected
            done += count
        assert done == len(rows)


@given(tables)
def test_pieces_keep_to_their_size(rows):
    table = as_table(rows, pa.binary(), len(rows) // 2)
    for piece in iter_rows(table, 100):
        assert piece.row_count == 1 or piece.payload_sizes.sum() <= 100
        assert piece.row_count <= columnar_input.PIECE_ROWS


@given(st.binary(min_size=8, max_size=40), st.lists(st.integers(-(2**31), 2**31 - 1), min_size=3, max_size=3))
def test_damaged_offsets_are_refused_and_never_followed(data, offsets):
    """Arrow's own check of a batch does not see all of them."""
    places = np.zeros(3, np.int32)
    column = pa.Array.from_buffers(pa.binary(), 2, [None, pa.py_buffer(places), pa.py_buffer(data)])
    table = pa.RecordBatch.from_arrays([column], ["value"])
    places[:] = offsets
    is_whole = 0 <= offsets[0] <= offsets[1] <= offsets[2] <= len(data)
    if is_whole:
        [rows] = iter_rows(table, 2**20)
        assert rows.values.starts.tolist() == offsets[:2]
    else:
        with pytest.raises(ValueError, match=r"(?i)damaged|offset"):
            list(iter_rows(table, 2**20))


@pytest.mark.slow
def test_full_batches_of_a_large_piece_are_not_copied() -> None:
    count, limit = 6_000, 128 * 1024
    table = pa.table({"value": pa.array([bytes([at % 6]) * 1_000 for at in range(count)], pa.binary())})
    for has_numba in PATHS:
        [(_, encoded)] = by_columns(table, [at % 6 for at in range(count)], limit, has_numba, 2**30)
        for each in encoded:
            assert bytes(each.buffer).count(bytes([each.partition]) * 1_000) == each.record_count
        assert [sum(each.record_count for each in encoded if each.partition == at) for at in range(6)] == [1_000] * 6
        full = [each for each in encoded if len(each.buffer) > limit * 0.9]
        assert sum(len(each.buffer) for each in full) > 5_000_000
        assert not any(isinstance(each.buffer.obj, bytearray) for each in full)
        assert all(memoryview(each.buffer.obj).nbytes <= 10 * len(each.buffer) for each in encoded)


@pytest.mark.slow
@given(st.lists(st.integers(0, 90_000), min_size=1, max_size=40), st.sampled_from([65_536, 100_000, 300_000]))
def test_large_batches_are_those_of_the_builder_and_keep_only_their_memory(sizes, limit):
    """With numba each is encoded where it stays, also beside records that are larger than a batch."""
    rows = [(at, None, bytes([at]) * size, None, at % 2) for at, size in enumerate(sizes)]
    table = as_table(rows, pa.binary(), len(rows) // 2)
    for has_numba in PATHS:
        done = 0
        for count, encoded in by_columns(table, [each[4] for each in rows], limit, has_numba, 2**30):
            assert all(memoryview(each.buffer.obj).nbytes <= len(each.buffer) * 8 // 7 + 1 for each in encoded)
            assert len({id(each.buffer.obj) for each in encoded}) == len(encoded)
            expected = by_builder(rows[done : done + count], limit)
            assert [(each.partition, built(each)) for each in encoded] == expected
            done += count
        assert done == len(rows)
