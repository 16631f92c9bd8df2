"""Arrow columns say the same as decoded records, on both paths, and broken input is refused alike."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidelog.protocol.batches import columnar
from tidelog.protocol.batches.columnar import arrow_schema, decode_columns
from tidelog.protocol.batches.records import encode_batch, iter_records
from tidelog.protocol.errors import KafkaError

pytest.importorskip("pyarrow")

optional_bytes = st.none() | st.binary(max_size=40) | st.integers(0, 300).map(bytes)
headers = st.lists(st.tuples(st.text(max_size=8), st.none() | st.binary(max_size=8)), max_size=3).map(tuple)
timestamps = st.integers(-1, 2**43) | st.integers(-(2**52), 2**52)
record = st.tuples(timestamps, optional_bytes, optional_bytes, headers)
batch = st.tuples(st.lists(record, min_size=1, max_size=30), st.integers(0, 4), st.integers(0, 1), st.integers(0, 5))


def encoded(batches) -> bytes:
    out = b""
    offset = 0
    for records, codec, timestamp_type, gap in batches:
        offset += gap
        out += encode_batch(records, base_offset=offset, compression=codec, timestamp_type=timestamp_type)
        offset += len(records)
    return out


def columns(buffer, has_numba: bool, **options):
    """All pieces as one; the small bounds make several of them."""
    import pyarrow as pa

    original = columnar._has_numba, columnar.PIECE_ROWS, columnar.PIECE_BYTES
    columnar._has_numba = lambda: has_numba  # type: ignore[assignment]
    columnar.PIECE_ROWS, columnar.PIECE_BYTES = 17, 900  # type: ignore[misc]
    try:
        pieces = list(decode_columns(buffer, topic="topic", partition=1, **options))
        for piece in pieces:
            piece.validate(full=True)
        return pa.concat_batches(pieces) if pieces else pa.RecordBatch.from_pylist([], arrow_schema())
    finally:
        columnar._has_numba, columnar.PIECE_ROWS, columnar.PIECE_BYTES = original  # type: ignore[misc]


PATHS = [True, False] if columnar._has_numba() else [False]


@pytest.mark.slow
@given(st.lists(batch, max_size=4), st.integers(0, 60), st.integers(0, 60))
def test_columns_are_the_records(batches, first, length):
    import pyarrow as pa

    buffer = encoded(batches)
    rows = [row for row in iter_records(buffer) if first <= row.offset < first + length]
    for has_numba in PATHS:
        decoded = columns(buffer, has_numba, first_offset=first, end_offset=first + length)
        assert decoded["offset"].to_pylist() == [row.offset for row in rows]
        assert decoded["key"].to_pylist() == [row.key for row in rows]
        assert decoded["value"].to_pylist() == [row.value for row in rows]
        assert decoded["timestamp"].view(pa.int64()).to_pylist() == [row.timestamp * 1000 for row in rows]
        listed = [
            None if pairs is None else [(pair["key"], pair["value"]) for pair in pairs] for pairs in headers_of(decoded)
        ]
        assert listed == [list(row.headers) or None for row in rows]


def headers_of(decoded):
    return decoded["headers"].to_pylist()


def outcome(decode, buffer):
    """The columns, or that they were refused: with two broken batches, which is met first is each path's own affair."""
    try:
        return decode(buffer)
    except KafkaError:
        return "refused"


@pytest.mark.slow
@given(st.lists(batch, min_size=1, max_size=3), st.randoms(use_true_random=False))
def test_broken_batches_are_refused_or_read_alike_on_both_paths(batches, rng: random.Random):
    """The compiled loops check no bounds by themselves, so this is also the search for reads outside the buffer."""
    whole = encoded(batches)
    for _ in range(20):
        broken = bytearray(whole)
        for _ in range(rng.randrange(1, 5)):
            at = rng.randrange(min(len(broken), rng.choice((120, 10**6))))
            # Bytes that make long varints and boundaries, more often than others.
            broken[at] = rng.choice((0, 1, 0x7F, 0x80, 0xFE, 0xFF, rng.randrange(256)))
        outcomes = [
            outcome(lambda buffer, way=way: columns(buffer, way, max_batch_bytes=100_000), bytes(broken))
            for way in PATHS
        ]
        assert all(each == outcomes[0] for each in outcomes)
