from __future__ import annotations

import pytest

from tidelog.protocol.batches import record_batch as rb
from tidelog.protocol.batches.records import Record, decode_batch, encode_batch
from tidelog.protocol.errors import ErrorCode, KafkaError

# One batch written out by hand: base offset 0, one record of key "k" and value "v".
GOLDEN = bytes.fromhex(
    "0000000000000000"  # base offset
    "0000003a"  # length: 58
    "00000000"  # partition leader epoch
    "02"  # magic
    "00000000"  # CRC, filled in below
    "0000"  # attributes
    "00000000"  # last offset delta
    "0000018bcfe56800"  # base timestamp
    "0000018bcfe56800"  # max timestamp
    "ffffffffffffffff"  # producer id
    "ffff"  # producer epoch
    "ffffffff"  # base sequence
    "00000001"  # record count
    "10"  # record of 8 bytes
    "00"  # attributes
    "00"  # timestamp delta
    "00"  # offset delta
    "026b"  # key
    "0276"  # value
    "00"  # header count
)


def batch(count: int = 3, **options) -> bytearray:
    return encode_batch([(1000 + index, b"key", b"value", ()) for index in range(count)], **options)


def test_the_bytes_are_those_of_the_format():
    made = encode_batch([(1700000000000, b"k", b"v", ())], leader_epoch=0)
    assert made[: rb.CRC_OFFSET] == GOLDEN[: rb.CRC_OFFSET]
    assert made[rb.ATTRIBUTES_OFFSET :] == GOLDEN[rb.ATTRIBUTES_OFFSET :]


def test_every_header_field_is_read_from_its_place():
    made = batch(
        base_offset=7,
        leader_epoch=5,
        compression=3,
        producer_id=11,
        producer_epoch=2,
        base_sequence=9,
        transactional=True,
    )
    header = rb.read_header(made)
    assert header == (
        7,
        len(made) - 12,
        5,
        2,
        header.crc,
        0x13,
        2,
        1000,
        1002,
        11,
        2,
        9,
        3,
    )
    assert header.size_bytes == len(made)
    assert (header.last_offset, header.next_offset, header.last_sequence) == (9, 10, 11)
    assert (header.compression, header.timestamp_type) == (3, rb.CREATE_TIME)
    assert (header.is_transactional, header.is_control, header.has_delete_horizon) == (True, False, False)


def test_flags_are_told_apart():
    header = rb.read_header(batch())
    assert header._replace(attributes=rb.CONTROL_FLAG).is_control
    assert header._replace(attributes=rb.DELETE_HORIZON_FLAG).has_delete_horizon
    assert header._replace(attributes=rb.LOG_APPEND_TIME_FLAG).timestamp_type == rb.LOG_APPEND_TIME
    assert not header._replace(attributes=0xFF & ~rb.TRANSACTIONAL_FLAG).is_transactional
    assert header._replace(attributes=7).compression == 7


def test_sequences_wrap_after_the_greatest_int32():
    header = rb.read_header(batch())
    assert header._replace(base_sequence=2**31 - 1).last_sequence == 1
    assert header._replace(base_sequence=2**31 - 3).last_sequence == 2**31 - 1
    assert header._replace(base_sequence=-1).last_sequence == -1
    assert rb.increment_sequence(2**31 - 1, 1) == 0


def test_stamping_offset_and_epoch_leaves_the_crc_valid():
    made = bytearray(b"before") + batch()
    rb.stamp(made, 6, 2**40, 17)
    header = rb.read_header(made, 6)
    assert (header.base_offset, header.partition_leader_epoch) == (2**40, 17)
    assert rb.check_crc(made, 6, header)
    assert [record.offset for record in decode_batch(made, 6)] == [2**40, 2**40 + 1, 2**40 + 2]
    assert made[:6] == b"before"


def test_stamping_log_append_time_renews_the_crc_and_dates_every_record():
    made = batch(compression=1)
    view = memoryview(made)
    header = rb.stamp_log_append_time(view, 0, rb.read_header(view), 5_000)
    assert header == rb.read_header(made)
    assert rb.check_crc(made, 0, header)
    assert (header.timestamp_type, header.max_timestamp, header.base_timestamp) == (rb.LOG_APPEND_TIME, 5_000, 1000)
    assert [record.timestamp for record in decode_batch(made)] == [5_000] * 3
    assert header.compression == 1


@pytest.mark.parametrize("position", range(rb.ATTRIBUTES_OFFSET, 61 + 10))
def test_a_flipped_bit_behind_the_crc_is_noticed(position):
    made = batch()
    header = rb.read_header(made)
    assert rb.check_crc(made, 0, header)
    made[position] ^= 1
    assert not rb.check_crc(made, 0, header)


def test_a_batch_that_is_not_whole_has_no_valid_crc():
    made = batch()
    assert not rb.check_crc(made[:-1], 0, rb.read_header(made))


@pytest.mark.parametrize("size", [0, 1, 16, 17, 60])
def test_too_few_bytes_for_a_header_are_corrupt(size):
    with pytest.raises(rb.CorruptRecord) as failure:
        rb.read_header(batch()[:size])
    assert failure.value.code is ErrorCode.CORRUPT_MESSAGE


@pytest.mark.parametrize("length", [-(2**31), -1, 0, 48])
def test_a_length_that_cannot_hold_a_header_is_corrupt(length):
    made = batch()
    made[8:12] = length.to_bytes(4, "big", signed=True)
    with pytest.raises(rb.CorruptRecord):
        rb.read_header(made)
    with pytest.raises(rb.CorruptRecord):
        list(rb.iter_headers(made))


@pytest.mark.parametrize("magic", [0, 1])
def test_old_message_sets_are_refused_by_name(magic):
    # A message of magic 0 or 1 is 26 bytes or more: offset, size, crc, magic, attributes, key, value.
    message = bytes(8) + (14).to_bytes(4, "big") + bytes(4) + bytes([magic]) + bytes(9)
    for data in (message, message + bytes(100)):
        with pytest.raises(KafkaError, match=f"magic {magic}") as failure:
            rb.read_header(data)
        assert failure.value.code is ErrorCode.INVALID_RECORD
    large = batch()
    large[rb.MAGIC_OFFSET] = magic
    with pytest.raises(KafkaError) as failure:
        rb.check_magic(rb.read_header(large))
    assert failure.value.code is ErrorCode.INVALID_RECORD


def test_an_unknown_magic_is_corrupt():
    made = batch()
    made[rb.MAGIC_OFFSET] = 3
    with pytest.raises(rb.CorruptRecord):
        rb.check_magic(rb.read_header(made))


def test_walking_batches_stops_before_a_torn_one():
    one, two = batch(1), batch(2, base_offset=1)
    both = bytes(one + two)
    walked = list(rb.iter_headers(both))
    assert [(position, header.base_offset) for position, header in walked] == [(0, 0), (len(one), 1)]
    assert len(list(rb.iter_headers(both[:-1]))) == 1
    assert len(list(rb.iter_headers(both, 0, len(one) + 70))) == 1
    assert [position for position, _ in rb.iter_headers(both, len(one))] == [len(one)]
    assert list(rb.iter_headers(both[:60])) == []
    assert list(rb.iter_headers(b"")) == []


def test_batches_without_records_are_walked_too():
    made = batch()
    made[8:12] = (49).to_bytes(4, "big")
    positions = [position for position, header in rb.iter_headers(bytes(made[:61]) * 3)]
    assert positions == [0, 61, 122]


def test_decoding_an_own_record_round_trips_through_the_header():
    records = [Record(offset, 5, None, b"x") for offset in range(4)]
    assert decode_batch(encode_batch(records)) == records
