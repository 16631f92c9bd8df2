"""Records survive encoding and decoding, and kio reads what we write and writes what we read."""

from __future__ import annotations

import datetime
import io
from itertools import chain

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidelog.protocol.batches import record_batch
from tidelog.protocol.batches.records import (
    BatchBuilder,
    ControlRecordType,
    Record,
    control_record_type,
    decode_batch,
    decode_end_txn_value,
    decode_in_pieces,
    encode_batch,
    encode_control_batch,
    encode_end_txn_value,
    encode_one,
    encode_varint,
    iter_records,
    read_usual_marker,
    record_section,
)
from tidelog.protocol.errors import ErrorCode, KafkaError

optional_bytes = st.none() | st.binary(max_size=60) | st.integers(0, 70_000).map(bytes)
headers = st.lists(st.tuples(st.text(max_size=70), st.none() | st.binary(max_size=70)), max_size=4).map(tuple)
timestamps = st.integers(-(2**61), 2**61) | st.integers(1_700_000_000_000, 1_700_000_010_000)
rows = st.lists(st.tuples(timestamps, optional_bytes, optional_bytes, headers), min_size=1, max_size=20)


@given(rows, st.integers(0, 4), st.integers(0, 2**62), st.integers(-1, 2**31 - 1))
def test_a_batch_round_trips(records, codec, base_offset, leader_epoch):
    expected = [Record(base_offset + index, *record) for index, record in enumerate(records)]
    batch = encode_batch(records, compression=codec, base_offset=base_offset, leader_epoch=leader_epoch)
    header = record_batch.read_header(batch)
    assert record_batch.check_crc(batch, 0, header)
    assert header.partition_leader_epoch == leader_epoch
    assert decode_batch(batch) == expected
    pieces = list(decode_in_pieces(record_section(batch, 0, header), header, 3))
    assert (list(chain(*pieces)), max(map(len, pieces))) == (expected, min(3, len(records)))


@given(timestamps, st.binary(max_size=60) | st.integers(0, 70_000).map(bytes), optional_bytes)
def test_one_record_alone_has_the_bytes_of_any_batch(timestamp, key, value):
    assert encode_one(timestamp, key, value) == encode_batch([(timestamp, key, value, ())])
    flags = record_batch.TRANSACTIONAL_FLAG | record_batch.CONTROL_FLAG
    producer = {"producer_id": 7, "producer_epoch": 3}
    assert encode_one(timestamp, key, value, flags=flags, **producer) == encode_batch(
        [(timestamp, key, value, ())], transactional=True, control=True, **producer
    )


marker_bytes = st.builds(
    lambda kind, epoch, timestamp: encode_control_batch(
        ControlRecordType(kind), encode_end_txn_value(epoch), timestamp=timestamp, producer_id=5, producer_epoch=2
    ),
    st.integers(0, 2), st.integers(0, 2**31 - 1), timestamps,
)  # fmt: skip
changes = st.lists(st.tuples(st.integers(record_batch.HEADER_SIZE, 77), st.integers(0, 255)), max_size=2)


@given(marker_bytes, changes)
def test_a_marker_in_the_usual_form_is_read_as_any_other(batch, changed):
    for position, value in changed:
        batch[position] = value
    usual = read_usual_marker(batch)
    assert changed or batch[21:23] == b"\x00\x20" or usual is not None
    if usual is not None:
        (record,) = decode_batch(batch)
        assert usual == (control_record_type(record.key), decode_end_txn_value(record.value))
        assert (record.timestamp, record.headers) == (record_batch.read_header(batch).base_timestamp, ())


@given(st.lists(rows, max_size=3), st.binary(max_size=80))
def test_concatenated_batches_are_read_in_order_whatever_torn_tail_follows(groups, tail):
    buffer = b""
    expected: list[Record] = []
    for records in groups:
        buffer += encode_batch(records, base_offset=len(expected))
        expected += [Record(len(expected) + index, *record) for index, record in enumerate(records)]
    torn = encode_batch([(0, None, b"x" * 100, ())])[: len(tail)]
    assert list(iter_records(buffer + torn)) == expected


@given(rows, st.integers(100, 3000))
def test_a_builder_holds_what_it_took_and_no_more_than_its_limit(records, limit):
    builder = BatchBuilder(limit)
    taken = [record for record in records if builder.append(*record)]
    batch = builder.build()
    assert [record[1:] for record in decode_batch(batch)] == taken
    assert len(batch) == builder.size_bytes
    assert len(batch) <= limit or len(taken) == 1


@given(st.binary(max_size=300), st.integers(0, 4), st.integers(-2, 50))
def test_arbitrary_bytes_as_records_are_refused_or_decoded(section, codec, count):
    made = encode_batch([(0, None, None, ())])[: record_batch.HEADER_SIZE] + section
    made[8:12] = (len(made) - 12).to_bytes(4, "big")
    made[22] = codec
    made[57:61] = count.to_bytes(4, "big", signed=True)
    try:
        records = decode_batch(made, max_decompressed_bytes=100_000)
    except KafkaError as failure:
        refused = failure.code
    else:
        assert len(records) == count
        return
    assert refused in (ErrorCode.INVALID_RECORD, ErrorCode.CORRUPT_MESSAGE, ErrorCode.MESSAGE_TOO_LARGE)


@given(st.integers(-(2**63), 2**63 - 1))
def test_a_varint_is_as_short_as_it_can_be(value):
    zigzag = value << 1 if value >= 0 else (-value << 1) - 1
    assert len(encode_varint(value)) == max(1, -(-zigzag.bit_length() // 7))


# -- kio, an independent implementation (it knows no compression, and cuts timestamps to seconds when it reads)

seconds = st.integers(0, 2**31).map(lambda second: second * 1000)
small = st.none() | st.binary(max_size=300)
kio_rows = st.lists(st.tuples(seconds, small, small, headers), min_size=1, max_size=10)


def to_kio(record: Record):
    from kio.records.schema import Record as KioRecord
    from kio.records.schema import RecordHeader
    from kio.static.primitive import TZAwareMicros, i8, i64

    return KioRecord(
        attributes=i8(0),
        timestamp=TZAwareMicros.parse(datetime.datetime.fromtimestamp(record.timestamp / 1000, datetime.UTC)),
        offset=i64(record.offset),
        key=record.key,
        value=record.value,
        headers=tuple(RecordHeader(key=key.encode(), value=value) for key, value in record.headers),
    )


@given(kio_rows, st.integers(0, 2**40))
def test_kio_reads_what_we_write(records, base_offset):
    readers = pytest.importorskip("kio.records.readers")
    batch = encode_batch(
        records, base_offset=base_offset, leader_epoch=3, producer_id=5, producer_epoch=1, base_sequence=9
    )
    read, size = readers.read_batch(bytes(batch), 0)
    header = record_batch.read_header(batch)
    assert size == len(batch)
    assert read.records == tuple(to_kio(record) for record in decode_batch(batch))
    assert (read.base_offset, read.batch_length, read.partition_leader_epoch) == header[:3]
    assert (read.crc, read.attributes, read.last_offset_delta, read.base_timestamp, read.max_timestamp) == header[4:9]
    assert (read.producer_id, read.producer_epoch, read.base_sequence) == header[9:12]


@given(kio_rows)
def test_we_read_what_kio_writes(records):
    writers = pytest.importorskip("kio.records.writers")
    from kio.records.schema import NewRecordBatch
    from kio.static.primitive import i16, i32, i64

    expected = [Record(index, *record) for index, record in enumerate(records)]
    out = io.BytesIO()
    writers.write_new_batch(
        out,
        NewRecordBatch(
            producer_id=i64(4),
            producer_epoch=i16(2),
            base_sequence=i32(7),
            attributes=i16(0),
            records=tuple(to_kio(record) for record in expected),
        ),
    )
    batch = out.getvalue()
    header = record_batch.read_header(batch)
    assert record_batch.check_crc(batch, 0, header)
    assert decode_batch(batch) == expected
    assert (header.producer_id, header.producer_epoch, header.base_sequence) == (4, 2, 7)
