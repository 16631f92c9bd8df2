from __future__ import annotations

import random
import struct

import pytest

from tidelog.protocol.batches import compression as codecs
from tidelog.protocol.batches.record_batch import (
    HEADER_SIZE,
    LOG_APPEND_TIME,
    CorruptRecord,
    check_crc,
    read_header,
    write_crc,
)
from tidelog.protocol.batches.record_columns import FEWEST_RECORDS, split_records
from tidelog.protocol.batches.record_walk import scan_records
from tidelog.protocol.batches.records import (
    HEADERS_MAX,
    BatchBuilder,
    ControlRecordType,
    Record,
    control_record_type,
    decode_batch,
    decode_end_txn_value,
    encode_batch,
    encode_control_batch,
    encode_end_txn_value,
    encode_varint,
    iter_data_batches,
    iter_records,
)
from tidelog.protocol.codec.primitives import write_varint
from tidelog.protocol.errors import ErrorCode, KafkaError

RECORDS = [
    Record(0, 1_700_000_000_000, b"key", b"value"),
    Record(1, 1_700_000_000_001, None, None),
    Record(2, 1_600_000_000_000, b"", b""),
    Record(3, 1_900_000_000_000, b"k" * 63, b"v" * 64, (("name", b"x"), ("none", None), ("", b""), ("hé", b"y" * 200))),
    Record(4, 1_700_000_000_000, b"k" * 64, b"v" * 2047),
    Record(5, 1_700_000_002_047, b"k" * 8191, b"v" * 2048),
    Record(6, 1_700_000_002_048, b"k" * 8192, b"v" * 100_000),
]


def with_section(batch: bytearray, section: bytes, count: int | None = None) -> bytearray:
    """The same batch holding other bytes where its records were, with length and CRC put right."""
    made = batch[:HEADER_SIZE] + section
    made[8:12] = struct.pack(">i", len(made) - 12)
    if count is not None:
        made[57:61] = struct.pack(">i", count)
    write_crc(made, 0, len(made))
    return made


@pytest.mark.parametrize("codec", codecs.NAMES)
def test_records_come_back_as_they_went_in(codec):
    batch = encode_batch(RECORDS, compression=codec)
    header = read_header(batch)
    assert decode_batch(batch) == RECORDS
    assert check_crc(batch, 0, header)
    assert header.compression == codec
    assert (header.record_count, header.last_offset_delta) == (7, 6)
    assert (header.base_timestamp, header.max_timestamp) == (1_700_000_000_000, 1_900_000_000_000)


LONG_MAX, LONG_MIN = 2**63 - 1, -(2**63)


@pytest.mark.parametrize(
    ("base", "delta", "timestamp"),
    [
        (LONG_MAX, 0, LONG_MAX),
        (LONG_MAX, -1, LONG_MAX - 1),
        (LONG_MAX, 1, LONG_MIN),
        (LONG_MIN, 0, LONG_MIN),
        (LONG_MIN, -5, LONG_MAX - 4),
        (1_700_000_000_000, LONG_MAX, 1_700_000_000_000 + LONG_MAX - 2**64),
        (-1, LONG_MIN, LONG_MAX),
        (LONG_MAX - 9000, 9001, LONG_MIN),
    ],
)
@pytest.mark.parametrize("count", [1, FEWEST_RECORDS])
def test_times_wrap_as_in_java(base, delta, timestamp, count):
    """A batch that a broker takes must not be unreadable, and Kafka takes these."""
    body = b"\0" + encode_varint(delta) + encode_varint(count - 1) + b"\2k\2v\0"
    others = encode_batch([(0, b"k", b"v", ())] * (count - 1)) if count > 1 else bytearray(HEADER_SIZE)
    batch = with_section(
        encode_batch([(0, None, None, ())] * count), bytes(others[HEADER_SIZE:]) + encode_varint(len(body)) + body
    )
    struct.pack_into(">qq", batch, 27, base, base)
    header = read_header(batch)
    expected = [base] * (count - 1) + [timestamp]
    assert [record.timestamp for record in decode_batch(batch)] == expected
    pytest.importorskip("numba")
    columns = split_records(bytes(batch[HEADER_SIZE:]), header, 0)
    assert columns is not None
    assert list(columns.timestamps) == expected


def test_tuples_and_records_make_the_same_batch():
    assert encode_batch(RECORDS) == encode_batch([record[1:] for record in RECORDS])


def test_offsets_run_on_from_the_base_offset():
    batch = encode_batch(RECORDS, base_offset=2**40, leader_epoch=4)
    assert [record.offset for record in decode_batch(batch)] == list(range(2**40, 2**40 + 7))
    assert read_header(batch).partition_leader_epoch == 4


@pytest.mark.parametrize("milliseconds_apart", [0, 5])
def test_many_records_pass_every_width_of_the_offset_varint(milliseconds_apart):
    records = [Record(offset, milliseconds_apart * offset, None, b"") for offset in range(10_000)]
    assert decode_batch(encode_batch(records)) == records


def test_a_batch_is_found_behind_other_bytes():
    batch = encode_batch(RECORDS)
    assert decode_batch(b"before" + bytes(batch) + b"after", 6) == RECORDS
    assert decode_batch(memoryview(batch), 0, read_header(batch)) == RECORDS


def test_log_append_time_overrides_every_records_own():
    batch = encode_batch(RECORDS, timestamp_type=LOG_APPEND_TIME)
    assert {record.timestamp for record in decode_batch(batch)} == {1_900_000_000_000}


@pytest.mark.parametrize("timestamp", [-1, 0, 2**62, -(2**62)])
def test_timestamps_of_all_sizes(timestamp):
    records = [Record(0, timestamp, None, None), Record(1, 0, None, None)]
    assert decode_batch(encode_batch(records)) == records


@pytest.mark.parametrize(
    ("value", "encoded"),
    [
        (0, "00"),
        (-1, "01"),
        (1, "02"),
        (63, "7e"),
        (-64, "7f"),
        (64, "8001"),
        (-65, "8101"),
        (8191, "fe7f"),
        (8192, "808001"),
        (2**31 - 1, "feffffff0f"),
        (-(2**31), "ffffffff0f"),
        (2**63 - 1, "feffffffffffffffff01"),
        (-(2**63), "ffffffffffffffffff01"),
    ],
)
def test_varints_are_kafkas(value, encoded):
    assert encode_varint(value).hex() == encoded


# -- the builder


def test_a_builder_says_no_before_the_size_limit_is_passed():
    builder = BatchBuilder(200)
    taken = 0
    while builder.append(taken, b"key", b"value", ()):
        taken += 1
    assert builder.record_count == taken > 5
    batch = builder.build()
    assert len(batch) == builder.size_bytes <= 200
    assert len(decode_batch(batch)) == taken
    assert builder.size_bytes + 16 > 200


def test_the_first_record_is_taken_however_large():
    builder = BatchBuilder(100)
    assert builder.append(1, None, b"x" * 5000)
    assert not builder.append(1, None, b"")
    assert len(decode_batch(builder.build())) == 1


def test_a_refused_record_changes_nothing():
    builder = BatchBuilder(100)
    builder.append(7, b"k", b"v")
    before = bytes(builder.build())
    assert not builder.append(9, b"k", b"v" * 100)
    assert (bytes(builder.build()), builder.max_timestamp) == (before, 7)


@pytest.mark.parametrize("codec", codecs.NAMES)
def test_a_batch_is_built_again_with_another_sequence(codec):
    builder = BatchBuilder(100_000, codec)
    for record in RECORDS[:5]:
        builder.append(*record[1:])
    first = bytes(builder.build(9, 1, 100))
    second = builder.build(10, 0, 0)
    for batch, identity in ((first, (9, 1, 100)), (second, (10, 0, 0))):
        header = read_header(batch)
        assert header[9:12] == identity
        assert check_crc(batch, 0, header)
        assert decode_batch(batch) == RECORDS[:5]
    builder.append(*RECORDS[5][1:])
    assert decode_batch(builder.build()) == RECORDS[:6]


def test_any_buffer_may_be_key_and_value():
    builder = BatchBuilder(1000)
    builder.append(0, bytearray(b"key"), memoryview(b"value"))  # type: ignore[arg-type]
    assert decode_batch(builder.build()) == [Record(0, 0, b"key", b"value")]


# -- refusing what is not a batch


def refusal(batch: bytes | bytearray, **options) -> ErrorCode:
    with pytest.raises(KafkaError) as failure:
        decode_batch(batch, **options)
    return failure.value.code


def test_a_batch_that_is_not_whole_is_corrupt():
    batch = encode_batch(RECORDS)
    for size in (0, 11, 60, 61, len(batch) - 1):
        assert refusal(batch[:size]) is ErrorCode.CORRUPT_MESSAGE


@pytest.mark.parametrize("count", [-1, 0, 6, 8, 2**31 - 1])
def test_a_wrong_record_count_is_invalid(count):
    batch = encode_batch(RECORDS)
    batch[57:61] = struct.pack(">i", count)
    assert refusal(batch) is ErrorCode.INVALID_RECORD


@pytest.mark.parametrize(
    "record",
    [
        "0c 00 00 00 01 01",  # ends before its header count
        "0e 00 00 00 01 01 00 00",  # a byte too many
        "0a 00 00 00 01 01 00",  # too short to be a record
        "01 00 00 00 01 01 00",  # negative length
        "0c 00 00 00 02 01 00",  # key past the end
        "0c 00 00 00 01 02 00",  # value past the end
        "0c 00 00 00 feffffff0f 01 00",  # a key of 2 GiB
        "0c 00 00 00 01 01 02",  # a header that is not there
        "0c 00 00 00 01 01 01",  # -1 headers
        "10 00 00 00 01 01 02 01 00",  # header key of -1 bytes
        "10 00 00 00 01 01 02 10 00",  # header key past the end
        "10 00 00 00 01 01 02 00 10",  # header value past the end
        "10 00 00 00 01 01 feffffff0f",  # 2**31 - 1 headers
        "ffffffffffff 00 00 00 01 01 00",  # length of more than 32 bits
        "20 00 ffffffffffffffffffff01 00 01 01 00",  # timestamp delta of more than 64 bits
        "1a 00 ffffffffff01 00 00 01 01 00",
    ],
)
@pytest.mark.parametrize("codec", [codecs.NONE, codecs.LZ4])
def test_malformed_records_are_invalid(record, codec):
    section = codecs.compress(codec, bytes.fromhex(record))
    batch = with_section(encode_batch(RECORDS[:1], compression=codec), section, 1)
    assert refusal(batch) is ErrorCode.INVALID_RECORD


@pytest.mark.slow
@pytest.mark.parametrize("count", [HEADERS_MAX, HEADERS_MAX + 1])
def test_a_record_has_no_more_than_a_million_headers(count: int):
    record = bytearray(b"\0\0\0\1\1")
    write_varint(record, count)
    record += b"\0\1" * count  # each an empty key and no value
    section = bytearray()
    write_varint(section, len(record))
    section += record
    batch = with_section(encode_batch(RECORDS[:1]), bytes(section), 1)
    if count == HEADERS_MAX:
        assert len(decode_batch(batch)[0].headers) == count
        assert len(list(scan_records(section, 1))) == 1
        return
    assert refusal(batch) is ErrorCode.INVALID_RECORD
    with pytest.raises(KafkaError, match="headers"):
        list(scan_records(section, 1))


def test_other_negative_lengths_are_null_as_in_java():
    batch = with_section(encode_batch(RECORDS[:1]), bytes.fromhex("0c 00 00 00 03 05 00"), 1)
    assert decode_batch(batch) == [Record(0, 1_700_000_000_000, None, None)]


def test_a_header_key_that_is_not_utf8_does_not_stop_a_reader():
    batch = with_section(encode_batch(RECORDS[:1]), bytes.fromhex("14 00 00 00 01 01 02 04 ff61 01"), 1)
    assert decode_batch(batch)[0].headers == (("\ufffda", None),)


def test_a_base_offset_at_the_end_of_64_bits_is_invalid():
    batch = encode_batch(RECORDS[:1])
    batch[:8] = struct.pack(">q", 2**63 - 1)
    assert refusal(batch) is ErrorCode.INVALID_RECORD


def test_a_codec_nobody_knows_is_invalid():
    batch = encode_batch(RECORDS)
    batch[22] |= 5
    assert refusal(batch) is ErrorCode.INVALID_RECORD


def test_bytes_that_do_not_decompress_are_corrupt():
    for codec in range(1, 5):
        batch = with_section(encode_batch(RECORDS, compression=codec), b"not compressed at all")
        assert refusal(batch) is ErrorCode.CORRUPT_MESSAGE


def test_a_bomb_is_refused():
    batch = encode_batch([(0, None, bytes(10_000_000), ())], compression=codecs.ZSTD)
    assert len(batch) < 2000
    assert refusal(batch, max_decompressed_bytes=1_000_000) is ErrorCode.MESSAGE_TOO_LARGE
    assert len(decode_batch(batch)) == 1


def test_old_formats_are_refused():
    batch = encode_batch(RECORDS)
    batch[16] = 1
    assert refusal(batch) is ErrorCode.INVALID_RECORD


@pytest.mark.slow
def test_flipped_bytes_never_raise_anything_but_a_kafka_error():
    rng = random.Random(5)
    refusals = set()
    for codec in codecs.NAMES:
        batch = encode_batch(RECORDS[:5], compression=codec)
        for _ in range(1500):
            broken = batch.copy()
            for _ in range(rng.randrange(1, 4)):
                broken[rng.randrange(8, min(len(broken), rng.choice((100, 10**6))))] = rng.randrange(256)
            try:
                decode_batch(broken, max_decompressed_bytes=1_000_000)
            except KafkaError as failure:
                refusals.add(failure.code)
    assert refusals == {ErrorCode.CORRUPT_MESSAGE, ErrorCode.INVALID_RECORD, ErrorCode.MESSAGE_TOO_LARGE}


# -- many batches, control records and transactions


def test_records_of_many_batches_come_in_order_without_control_records():
    buffer = (
        encode_batch(RECORDS[:2])
        + marker(ControlRecordType.COMMIT, 2, 1)
        + encode_batch(RECORDS[2:4], base_offset=3, compression=2)
    )
    assert [record.offset for record in iter_records(buffer)] == [0, 1, 3, 4]
    assert [record.offset for record in iter_records(buffer[:-1])] == [0, 1]


def marker(kind: ControlRecordType, offset: int, producer_id: int) -> bytearray:
    value = encode_end_txn_value(3)
    return encode_control_batch(kind, value, timestamp=1, base_offset=offset, producer_id=producer_id, producer_epoch=0)


def part(offset: int, producer_id: int, transactional: bool = True) -> bytearray:
    return encode_batch(
        [(0, None, b"", ())],
        base_offset=offset,
        producer_id=producer_id,
        producer_epoch=0,
        base_sequence=0,
        transactional=transactional,
    )


def test_aborted_transactions_are_left_out_up_to_their_marker():
    buffer = b"".join(
        (
            part(0, 1),
            part(1, 2),
            part(2, 1),
            marker(ControlRecordType.ABORT, 3, 1),
            part(4, 1),  # the next transaction of the same producer, which commits
            marker(ControlRecordType.COMMIT, 5, 2),
            marker(ControlRecordType.COMMIT, 6, 1),
            part(7, 1),
            part(8, 1, transactional=False),
            marker(ControlRecordType.ABORT, 9, 1),
        )
    )

    def seen(aborted):
        return [header.base_offset for _, header in iter_data_batches(buffer, aborted)]

    assert seen([]) == [0, 1, 2, 4, 7, 8]
    assert seen([(1, 0), (1, 7)]) == [1, 4, 8]
    assert seen([(1, 7), (2, 1)]) == [0, 2, 4, 8]


def test_the_end_of_one_aborted_transaction_does_not_end_another():
    buffer = b"".join(
        (
            part(0, 1),
            part(1, 2),
            marker(ControlRecordType.ABORT, 2, 1),
            part(3, 2),
            part(4, 1),
            marker(ControlRecordType.ABORT, 5, 2),
            part(6, 2),
        )
    )
    seen = [header.base_offset for _, header in iter_data_batches(buffer, [(1, 0), (2, 1)])]
    assert seen == [4, 6]


def test_control_batches_are_marked_and_of_one_record():
    batch = marker(ControlRecordType.ABORT, 12, 7)
    header = read_header(batch)
    assert (header.is_control, header.is_transactional, header.record_count) == (True, True, 1)
    assert (header.producer_id, header.producer_epoch, header.base_sequence) == (7, 0, -1)
    (record,) = decode_batch(batch)
    assert record.key == bytes.fromhex("00000000")
    assert control_record_type(record.key) is ControlRecordType.ABORT
    assert record.value == bytes.fromhex("000000000003")
    assert decode_end_txn_value(record.value) == 3


def test_the_quorums_control_batches_are_not_transactional():
    batch = encode_control_batch(ControlRecordType.LEADER_CHANGE, b"message", timestamp=5, leader_epoch=2)
    header = read_header(batch)
    assert (header.is_control, header.is_transactional, header.partition_leader_epoch) == (True, False, 2)
    assert header.producer_id == -1
    (record,) = decode_batch(batch)
    assert (record.key, record.value) == (bytes.fromhex("00000002"), b"message")


@pytest.mark.parametrize(
    ("key", "kind"),
    [
        ("00000001", ControlRecordType.COMMIT),
        ("00010006ff", ControlRecordType.KRAFT_VOTERS),
        ("00000007", -1),
        ("0000ffff", -1),
    ],
)
def test_control_types_are_read_and_future_ones_unknown(key, kind):
    assert control_record_type(bytes.fromhex(key)) == kind


@pytest.mark.parametrize("key", [None, b"", b"\0\0\0", b"\xff\xff\0\0"])
def test_a_control_key_that_is_none_is_invalid(key):
    with pytest.raises(KafkaError) as failure:
        control_record_type(key)
    assert failure.value.code is ErrorCode.INVALID_RECORD


@pytest.mark.parametrize("value", [None, b"", b"\0\0\0\0\0", b"\xff\xff\0\0\0\0"])
def test_an_end_marker_that_is_none_is_invalid(value):
    with pytest.raises(KafkaError) as failure:
        decode_end_txn_value(value)
    assert failure.value.code is ErrorCode.INVALID_RECORD


def test_corrupt_record_is_a_kafka_error():
    assert CorruptRecord("why").code is ErrorCode.CORRUPT_MESSAGE


def test_records_whose_numbers_are_at_the_ends_of_the_tables_are_read_back():
    """Sizes, counts and time deltas up to 2047 are looked up; -1 is a null."""
    sizes: list[int | None] = [None, 0, 1, 63, 64, 2046, 2047, 2048, 2049, 9000]
    contents = [None if size is None else b"x" * size for size in sizes]
    written = [(delta, key, value) for delta in (0, 2047, 2048, 2049, -1) for key in contents for value in contents]
    written += [(number % 3, None, b"v") for number in range(2060)]
    builder = BatchBuilder(2**30)
    for delta, key, value in written:
        assert builder.append(5_000 + delta, key, value)
    read = decode_batch(builder.build())
    assert [(record.timestamp - 5_000, record.key, record.value) for record in read] == written


@pytest.mark.parametrize(("count", "size"), [(1, 2047), (1, 2048), (1, 2049), (2050, 0)])
def test_one_number_alone_at_the_end_of_the_tables_is_read_back(count: int, size: int):
    """The numbers of a record are compared with the tables together: another one may hide a bit."""
    builder = BatchBuilder(2**30)
    for _ in range(count):
        assert builder.append(5_000, None, b"x" * size)
    assert [record.value for record in decode_batch(builder.build())] == [b"x" * size] * count
