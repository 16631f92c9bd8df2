from __future__ import annotations

import struct
import subprocess
import sys
import tracemalloc
from datetime import UTC, datetime

import pytest

from tests.patience import PATIENCE_S
from tidelog.protocol.batches import columnar
from tidelog.protocol.batches import compression as codecs
from tidelog.protocol.batches.columnar import COLUMNS, arrow_schema, decode_columns
from tidelog.protocol.batches.record_batch import HEADER_SIZE, LOG_APPEND_TIME, write_crc
from tidelog.protocol.batches.records import ControlRecordType, encode_batch, encode_control_batch, encode_end_txn_value
from tidelog.protocol.errors import ErrorCode, KafkaError

TIME = 1_700_000_000_123
HEADERS = (("first", b"1"), ("none", None), ("hé", b""))


@pytest.fixture(params=["compiled", "plain"], autouse=True)
def path(request, monkeypatch):
    """Every test runs on both paths: with numba, and as if it were not installed."""
    if request.param == "compiled":
        pytest.importorskip("numba")
    else:
        monkeypatch.setattr(columnar, "_has_numba", lambda: False)


def decode(batches, **options):
    """All pieces as one."""
    import pyarrow as pa

    pieces = list(decode_columns(batches, **{"topic": "t", "partition": 3, **options}))
    for piece in pieces:
        piece.validate(full=True)
    if len(pieces) == 1:
        return pieces[0]
    schema = arrow_schema(tuple(options.get("columns", COLUMNS)))
    return pa.concat_batches(pieces) if pieces else pa.RecordBatch.from_pylist([], schema)


def numbered(first, last, **options):
    records = [(TIME + offset, b"k%d" % offset, b"v" * offset, ()) for offset in range(first, last)]
    return bytes(encode_batch(records, base_offset=first, **options))


def test_a_record_becomes_a_row_with_all_columns_of_sparks_source():
    decoded = decode(encode_batch([(TIME, b"key", b"value", HEADERS)], base_offset=41))
    assert decoded.to_pylist() == [
        {
            "key": b"key",
            "value": b"value",
            "topic": "t",
            "partition": 3,
            "offset": 41,
            "timestamp": datetime(2023, 11, 14, 22, 13, 20, 123_000, UTC),
            "timestampType": 0,
            "headers": [
                {"key": "first", "value": b"1"},
                {"key": "none", "value": None},
                {"key": "hé", "value": b""},
            ],
        }
    ]


def test_the_schema_is_what_spark_takes():
    import pyarrow as pa

    header = pa.struct([("key", pa.string()), ("value", pa.binary())])
    assert arrow_schema() == pa.schema(
        [
            ("key", pa.binary()),
            ("value", pa.binary()),
            ("topic", pa.string()),
            ("partition", pa.int32()),
            ("offset", pa.int64()),
            ("timestamp", pa.timestamp("us", tz="UTC")),
            ("timestampType", pa.int32()),
            ("headers", pa.list_(header)),
        ]
    )
    assert decode(numbered(0, 3)).schema == arrow_schema()
    assert all(field.nullable for field in arrow_schema())


def test_nulls_are_nulls_and_empty_is_empty():
    decoded = decode(encode_batch([(TIME, None, b"", ()), (TIME, b"", None, ()), (TIME, None, None, HEADERS[:1])]))
    assert decoded["key"].to_pylist() == [None, b"", None]
    assert decoded["value"].to_pylist() == [b"", None, None]
    assert decoded["headers"].to_pylist() == [None, None, [{"key": "first", "value": b"1"}]]
    assert (decoded["key"].null_count, decoded["value"].null_count, decoded["headers"].null_count) == (2, 2, 2)


@pytest.mark.parametrize("codec", codecs.NAMES)
def test_every_codec_alone_and_mixed_with_others(codec):
    mixed = numbered(0, 50, compression=codec) + numbered(50, 60) + numbered(60, 200, compression=codec)
    decoded = decode(mixed)
    assert decoded["offset"].to_pylist() == list(range(200))
    assert decoded["value"].to_pylist() == [b"v" * offset for offset in range(200)]


def test_only_offsets_inside_the_range_are_kept():
    batches = numbered(0, 10) + numbered(10, 20) + numbered(20, 30)
    assert decode(batches, first_offset=5, end_offset=22)["offset"].to_pylist() == list(range(5, 22))
    assert decode(batches, first_offset=10, end_offset=20)["key"].to_pylist() == [b"k%d" % n for n in range(10, 20)]
    assert decode(batches, first_offset=30).num_rows == 0
    assert decode(batches, end_offset=0).num_rows == 0


@pytest.mark.parametrize("columns", [("value",), ("offset", "key"), ("headers", "topic"), COLUMNS[::-1], ()])
def test_only_the_columns_asked_for_come_in_the_order_asked(columns):
    decoded = decode(numbered(0, 5), columns=columns)
    assert decoded.schema.names == list(columns)
    if columns:
        assert decoded.num_rows == 5


def test_nothing_in_nothing_out():
    for batches in (b"", numbered(0, 5)[:-1], numbered(0, 5)[:30]):
        decoded = decode(batches)
        assert (decoded.num_rows, decoded.schema) == (0, arrow_schema())


def test_a_torn_last_batch_is_left_out():
    assert decode(numbered(0, 5) + numbered(5, 9)[:-1]).num_rows == 5


def test_any_buffer_is_taken():
    whole = numbered(0, 5)
    assert decode(bytearray(whole)) == decode(memoryview(b"x" + whole)[1:]) == decode(whole)


def test_log_append_time_is_every_rows_time():
    decoded = decode(encode_batch([(5, b"", b"", ()), (9, b"", b"", ())], timestamp_type=LOG_APPEND_TIME))
    assert decoded["timestamp"].to_pylist() == [datetime(1970, 1, 1, 0, 0, 0, 9000, UTC)] * 2
    assert decoded["timestampType"].to_pylist() == [1, 1]


def test_timestamps_that_microseconds_cannot_hold_become_the_furthest_they_can():
    import pyarrow as pa

    decoded = decode(encode_batch([(2**62, None, None, ()), (-(2**62), None, None, ()), (-1, None, None, ())]))
    furthest = (2**63 - 1) // 1000 * 1000
    assert decoded["timestamp"].view(pa.int64()).to_pylist() == [furthest, -furthest, -1000]


@pytest.mark.parametrize(("base", "expected"), [(2**63 - 1, 2**63 // 1000), (-(2**63), -(2**63 // 1000))])
def test_so_do_those_at_the_end_of_64_bits(base, expected):
    batch = encode_batch([(0, b"k", b"v", ())])
    struct.pack_into(">qq", batch, 27, base, base)
    write_crc(batch, 0, len(batch))
    (piece,) = decode_columns(batch, topic="t", partition=0, columns=("timestamp",))
    assert piece["timestamp"].cast("int64").to_pylist() == [expected * 1000]


def test_control_batches_and_aborted_transactions_are_left_out():
    abort = encode_control_batch(
        ControlRecordType.ABORT, encode_end_txn_value(0), timestamp=1, base_offset=3, producer_id=9, producer_epoch=0
    )
    batches = (
        numbered(0, 3, producer_id=9, transactional=True) + abort + numbered(4, 6, producer_id=9, transactional=True)
    )
    assert decode(batches)["offset"].to_pylist() == [0, 1, 2, 4, 5]
    assert decode(batches, aborted=[(9, 0)])["offset"].to_pylist() == [4, 5]


def test_header_keys_that_are_not_utf8_are_mended_each_for_itself():
    # Two keys that are one valid character only when joined.
    section = bytes.fromhex("16 00 00 00 01 01 04 02 c3 01 02 a9 01".replace(" ", ""))
    section = bytes([(len(section) - 1) * 2]) + section[1:]
    made = bytearray(encode_batch([(TIME, None, None, ())])[:HEADER_SIZE]) + section
    made[8:12] = struct.pack(">i", len(made) - 12)
    write_crc(made, 0, len(made))
    headers = decode(made)["headers"].to_pylist()
    assert headers == [[{"key": "\ufffd", "value": None}, {"key": "\ufffd", "value": None}]]


# -- refusing


def refusal(batches, **options) -> KafkaError:
    with pytest.raises(KafkaError) as failure:
        decode(batches, **options)
    return failure.value


@pytest.mark.parametrize("count", [-1, 2, 4, 2**31 - 1])
def test_a_wrong_count_is_invalid(count):
    batches = bytearray(numbered(0, 3))
    batches[57:61] = struct.pack(">i", count)
    assert refusal(batches).code is ErrorCode.INVALID_RECORD


def test_old_formats_and_unknown_codecs_are_refused():
    old = bytearray(numbered(0, 3))
    old[16] = 1
    assert refusal(old).code is ErrorCode.INVALID_RECORD
    unknown = bytearray(numbered(0, 3))
    unknown[22] |= 6
    assert refusal(unknown).code is ErrorCode.INVALID_RECORD


@pytest.mark.parametrize("codec", [codecs.GZIP, codecs.SNAPPY, codecs.LZ4, codecs.ZSTD])
def test_a_bomb_is_refused_by_partition_and_offset(codec):
    bomb = numbered(0, 5) + bytes(encode_batch([(0, None, bytes(3_000_000), ())], base_offset=5, compression=codec))
    error = refusal(bomb, max_batch_bytes=1_000_000)
    assert error.code is ErrorCode.MESSAGE_TOO_LARGE
    assert "t-3: batch at offset 5: " in str(error)
    assert decode(bomb, max_batch_bytes=3_000_100).num_rows == 6


@pytest.mark.parametrize("codec", codecs.NAMES)
def test_the_bound_is_on_each_batch_and_not_on_all_of_them(codec):
    batches = b"".join(
        bytes(encode_batch([(0, None, bytes(900_000), ())], base_offset=offset, compression=codec))
        for offset in range(5)
    )
    assert decode(batches, max_batch_bytes=1_000_000)["offset"].to_pylist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("codec", codecs.NAMES)
def test_pieces_are_bounded_in_rows_and_bytes(monkeypatch, codec):
    monkeypatch.setattr(columnar, "PIECE_ROWS", 100)
    monkeypatch.setattr(columnar, "PIECE_BYTES", 5_000)
    sizes = (30, 30, 30, 30, 250, 1, 99, 1, 500)
    batches = b""
    offset = 0
    for count in sizes:
        values = [(TIME + n, b"%d" % n, b"v" * (60 if count == 500 else 1), ()) for n in range(count)]
        batches += bytes(encode_batch(values, base_offset=offset, compression=codec))
        offset += count
    batches += bytes(encode_batch([(TIME, None, bytes(20_000), ())], base_offset=offset, compression=codec))
    pieces = list(decode_columns(batches, topic="t", partition=3))
    assert [row for piece in pieces for row in piece["offset"].to_pylist()] == list(range(sum(sizes) + 1))
    assert max(piece.num_rows for piece in pieces) == 100
    # One record may be larger than a piece; nothing else is.
    assert max(len(b"".join(piece["value"].to_pylist())) for piece in pieces[:-1]) <= 5_000
    assert pieces[-1].num_rows == 1


@pytest.mark.parametrize("codec", codecs.NAMES)
def test_batches_that_are_larger_than_the_room_that_is_left_for_them_lose_nothing(monkeypatch, codec):
    # Many small batches of a high ratio, so that the buffer for them is far smaller than all of them.
    monkeypatch.setattr(columnar, "_BUFFER_BYTES_MIN", 1)
    batches = b"".join(
        bytes(encode_batch([(TIME, None, b"%d" % (n % 10) * (n * 97 % 4000), ())], base_offset=n, compression=codec))
        for n in range(200)
    )
    pieces = list(decode_columns(batches, topic="t", partition=3))
    assert [row for piece in pieces for row in piece["offset"].to_pylist()] == list(range(200))
    values = [value for piece in pieces for value in piece["value"].to_pylist()]
    assert values == [b"%d" % (n % 10) * (n * 97 % 4000) for n in range(200)]


@pytest.mark.slow
@pytest.mark.parametrize("codec", ["none", "lz4"])
def test_a_large_batch_that_is_broken_is_refused_in_whichever_part(monkeypatch, codec):
    monkeypatch.setattr(columnar, "PIECE_ROWS", 10)
    whole = numbered(0, 95)
    records = bytearray(whole[HEADER_SIZE:])

    def batch(section, count=95):
        packed = codecs.compress(codecs.CODECS[codec], bytes(section))
        made = bytearray(whole[:HEADER_SIZE]) + packed
        made[8:12] = struct.pack(">i", len(made) - 12)
        made[22] |= codecs.CODECS[codec]
        made[57:61] = struct.pack(">i", count)
        return made

    assert decode(batch(records)).num_rows == 95
    for broken in (batch(records, 94), batch(records, 96), batch(records[:-1]), batch(records + b"\x00")):
        error = refusal(broken)
        assert error.code is ErrorCode.INVALID_RECORD
        assert "t-3: batch at offset 0: " in str(error)
    for place in range(0, len(records), 101):
        for value in (0x00, 0x7F, 0xFF):
            changed = bytearray(records)
            changed[place] = value
            try:
                rows = decode(batch(changed)).num_rows
            except KafkaError:
                continue
            assert rows == 95


def test_importing_it_loads_no_heavy_library():
    script = (
        "import sys, tidelog.protocol.batches.columnar; "
        "print([m for m in ('numpy','numba','pyarrow') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=PATIENCE_S
    )
    assert done.stdout.strip() == "[]"


@pytest.mark.slow
def test_a_large_batch_is_not_held_while_the_next_one_is_decompressed():
    size = 32 << 20
    batch = bytes(encode_batch([(0, None, bytes(size // 32), ())] * 32, compression=codecs.GZIP))
    decode(numbered(0, 2))  # numba's own memory
    tracemalloc.start()
    try:
        for columns in decode_columns(batch * 3, topic="t", partition=0):
            del columns
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    # The decompressed pieces and the whole that is made of them; the batch before would be a third.
    assert 2 * size <= peak < 2.5 * size
