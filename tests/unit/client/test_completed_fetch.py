"""Records out of a fetched partition: from the offset asked for, in order, once, and none that must not be seen."""

from __future__ import annotations

import struct
from functools import partial
from typing import Any

import pytest

from tidelog.client.consuming import completed_fetch
from tidelog.client.consuming.completed_fetch import CompletedFetch
from tidelog.client.consuming.record_decoder import RecordDecoder
from tidelog.client.model import TopicPartition
from tidelog.protocol.batches.compression import GZIP, LZ4, SNAPPY, ZSTD
from tidelog.protocol.batches.record_batch import HEADER_SIZE, write_crc
from tidelog.protocol.batches.records import ControlRecordType, encode_batch, encode_control_batch, encode_end_txn_value
from tidelog.protocol.errors import ErrorCode, KafkaError

TP = TopicPartition("t", 3)


def batch(base_offset: int, count: int, **how: Any) -> bytes:
    records = [(1000 + n, b"k", b"%d" % (base_offset + n), ()) for n in range(count)]
    return bytes(encode_batch(records, base_offset=base_offset, leader_epoch=7, **how))


def offsets(fetched: CompletedFetch, limit: int = 1000) -> list[int]:
    return [record.offset for record in fetched.take(limit)]


def assert_stops_at_offset_2(fetched: CompletedFetch, code: ErrorCode, message: str, columns: bool) -> None:
    """Take records 0 and 1, then the same error each time, with the position left before offset 2.

    Args:
        fetched: A fetch whose batch at offset 2 cannot be read.
        code: The expected error code.
        message: What the error's text contains.
        columns: Whether records are taken as columns.
    """
    if columns:
        pytest.importorskip("pyarrow")
        piece = fetched.take_columns(("offset",))
        assert piece is not None
        assert piece["offset"].to_pylist() == [0, 1]
    else:
        assert offsets(fetched) == [0, 1]
    for _ in range(2):
        with pytest.raises(KafkaError, match=message) as caught:
            fetched.take_columns(("offset",)) if columns else fetched.take(10)
        assert caught.value.code is code
    assert (fetched.position, fetched.exhausted) == (2, False)


def test_a_batch_that_starts_before_the_offset_is_cut():
    fetched = CompletedFetch(TP, 12, batch(10, 5) + batch(15, 2))
    first, *_ = records = fetched.take(1000)
    assert [record.offset for record in records] == [12, 13, 14, 15, 16]
    assert (first.topic, first.partition, first.timestamp_ms, first.value, first.leader_epoch) == (
        "t",
        3,
        1002,
        b"12",
        7,
    )
    assert fetched.exhausted
    assert fetched.position == 17


def test_it_is_handed_out_in_bits_and_the_position_follows():
    fetched = CompletedFetch(TP, 0, batch(0, 5) + batch(5, 5))
    assert offsets(fetched, 3) == [0, 1, 2]
    assert (fetched.position, fetched.leader_epoch, fetched.exhausted) == (3, 7, False)
    assert offsets(fetched, 4) == [3, 4, 5, 6]
    assert offsets(fetched, 100) == [7, 8, 9]
    assert fetched.exhausted
    assert offsets(fetched) == []


def test_a_torn_last_batch_is_left_for_the_next_fetch():
    fetched = CompletedFetch(TP, 0, batch(0, 2) + batch(2, 2)[:-1])
    assert offsets(fetched) == [0, 1]
    assert fetched.position == fetched.end_offset == 2


def test_only_a_torn_batch_is_nothing():
    assert CompletedFetch(TP, 0, batch(0, 2)[:-1]).exhausted


@pytest.mark.parametrize("magic", [0, 1])
@pytest.mark.parametrize("size", [20, 34, 60])
def test_a_message_of_an_old_format_that_is_shorter_than_a_header_is_named(magic: int, size: int):
    with pytest.raises(KafkaError, match=f"magic {magic}") as refused:
        CompletedFetch(TP, 0, old_message(magic, size))
    assert refused.value.code is ErrorCode.INVALID_RECORD
    assert offsets(CompletedFetch(TP, 0, batch(0, 2) + old_message(magic, size))) == [0, 1]


def old_message(magic: int, size: int) -> bytes:
    """One message of format 0 or 1: offset, length, CRC, magic and the rest."""
    return struct.pack(">qiIb", 0, size - 12, 0, magic) + bytes(size - 17)


@pytest.mark.parametrize("delta", [2, 3, 50, -1])
@pytest.mark.parametrize("limit", [1, 2, 100])
@pytest.mark.parametrize("record", [0, 1])
def test_a_record_that_claims_an_offset_outside_of_its_batch_hides_none_of_another(delta: int, limit: int, record: int):
    records = batch(0, 2) + with_delta(batch(2, 2), record, delta) + batch(4, 2)
    fetched = CompletedFetch(TP, 0, records)
    taken = [record.value for _ in range(7) for record in fetched.take(limit)]
    expected = [b"0", b"1", b"2", b"3", b"4", b"5"]
    if delta < 0:
        del expected[2 + record]  # it claims an offset before the position
    assert taken == expected
    assert fetched.position == fetched.end_offset == 6


@pytest.mark.parametrize("delta", [2, 50])
@pytest.mark.parametrize("record", [0, 1])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_as_columns_it_is_not_dropped_either(delta: int, record: int, place: int):
    parts = [batch(0, 2), batch(2, 2), batch(4, 2)]
    parts[place] = with_delta(parts[place], record, delta)
    fetched = CompletedFetch(TP, 0, b"".join(parts))
    taken = []
    while (piece := fetched.take_columns(("value",))) is not None:
        taken += piece.column(0).to_pylist()
    assert taken == [b"0", b"1", b"2", b"3", b"4", b"5"]
    assert fetched.position == fetched.end_offset == 6


def with_delta(whole: bytes, record: int, delta: int) -> bytes:
    """The batch, one of whose records claims an offset of so many above the first. Its CRC is right."""
    changed = bytearray(whole)
    record_bytes = 1 + (changed[HEADER_SIZE] >> 1)
    changed[HEADER_SIZE + record * record_bytes + 3] = delta << 1 if delta >= 0 else -delta * 2 - 1
    write_crc(changed, 0, len(changed))
    return bytes(changed)


def test_control_batches_are_passed_over_but_the_position_moves_behind_them():
    marker = encode_control_batch(
        ControlRecordType.COMMIT, encode_end_txn_value(0), timestamp=5, base_offset=2, producer_id=9, producer_epoch=0
    )
    fetched = CompletedFetch(TP, 0, batch(0, 2) + bytes(marker))
    assert offsets(fetched) == [0, 1]
    assert fetched.position == 3


def test_aborted_records_are_not_seen():
    aborted = batch(0, 2, transactional=True, producer_id=9, producer_epoch=0, base_sequence=0)
    marker = encode_control_batch(
        ControlRecordType.ABORT, encode_end_txn_value(0), timestamp=5, base_offset=2, producer_id=9, producer_epoch=0
    )
    good = batch(3, 1, transactional=True, producer_id=9, producer_epoch=0, base_sequence=2)
    data = aborted + bytes(marker) + good
    assert offsets(CompletedFetch(TP, 0, data, [(9, 0)])) == [3]
    assert offsets(CompletedFetch(TP, 0, data)) == [0, 1, 3]
    plain = batch(2, 1, producer_id=9, producer_epoch=0, base_sequence=2)
    assert offsets(CompletedFetch(TP, 0, aborted + plain, [(9, 0)])) == [2]


@pytest.mark.parametrize("columns", [False, True])
def test_a_broken_batch_is_an_error_every_time_but_not_before_the_good_ones_are_out(columns: bool):
    broken = bytearray(batch(2, 2))
    broken[-1] ^= 1
    fetched = CompletedFetch(TP, 0, batch(0, 2) + bytes(broken) + batch(4, 1))
    assert_stops_at_offset_2(fetched, ErrorCode.CORRUPT_MESSAGE, "offset 2 fails its CRC", columns)


@pytest.mark.parametrize("columns", [False, True])
def test_so_is_a_malformed_marker(columns: bool):
    marker = encode_batch(
        [(5, b"\0", b"", ())], base_offset=2, producer_id=9, producer_epoch=0, transactional=True, control=True
    )
    fetched = CompletedFetch(TP, 0, batch(0, 2) + bytes(marker) + batch(3, 1), [(9, 1)])
    assert_stops_at_offset_2(fetched, ErrorCode.INVALID_RECORD, "control record key", columns)


@pytest.mark.parametrize("columns", [False, True])
@pytest.mark.parametrize(("place", "flip"), [(22, 0x20), (50, 8 ^ 9)])
def test_a_damaged_header_does_not_hide_its_batch_as_a_control_batch_or_an_aborted_one(
    place: int, flip: int, columns: bool
):
    damaged = bytearray(batch(2, 2, transactional=True, producer_id=8, producer_epoch=0, base_sequence=0))
    damaged[place] ^= flip
    fetched = CompletedFetch(TP, 0, batch(0, 2) + bytes(damaged) + batch(4, 1), [(9, 1)])
    assert_stops_at_offset_2(fetched, ErrorCode.CORRUPT_MESSAGE, "offset 2 fails its CRC", columns)
    unchecked = CompletedFetch(TP, 0, batch(0, 2) + bytes(damaged) + batch(4, 1), [(9, 1)], check_crcs=False)
    assert offsets(unchecked) == [0, 1, 4]


def test_records_after_columns_begin_where_those_end():
    pytest.importorskip("pyarrow")
    fetched = CompletedFetch(TP, 0, batch(0, 2) + batch(2, 2) + batch(4, 2))
    assert offsets(fetched, 1) == [0]
    piece = fetched.take_columns(("offset",))
    assert piece is not None
    assert piece["offset"].to_pylist() == [1, 2, 3, 4, 5]
    assert offsets(fetched) == []
    assert fetched.take_columns(("offset",)) is None


def test_a_broken_batch_is_not_passed_over_by_the_other_kind_of_decoding():
    pytest.importorskip("pyarrow")
    broken = bytearray(batch(0, 2))
    broken[-1] ^= 1
    fetched = CompletedFetch(TP, 0, bytes(broken) + batch(2, 2))
    for _ in range(2):
        with pytest.raises(KafkaError, match="offset 0 fails its CRC"):
            fetched.take(10)
        with pytest.raises(KafkaError, match="offset 0 fails its CRC"):
            fetched.take_columns(("offset",))


def test_columns_that_found_no_memory_are_made_again(monkeypatch):
    pytest.importorskip("pyarrow")

    def fail(*_: Any, **__: Any) -> Any:
        raise MemoryError

    fetched = CompletedFetch(TP, 0, batch(0, 2))
    with monkeypatch.context() as patch:
        patch.setattr(completed_fetch, "decode_columns", fail)
        with pytest.raises(MemoryError):
            fetched.take_columns(("offset",))
    piece = fetched.take_columns(("offset",))
    assert piece is not None
    assert piece["offset"].to_pylist() == [0, 1]


def test_crcs_need_not_be_checked():
    broken = bytearray(batch(0, 1))
    broken[-2] ^= 1  # the last byte of the value
    assert len(CompletedFetch(TP, 0, bytes(broken), check_crcs=False).take(10)) == 1


def test_converters_see_what_is_not_null():
    data = bytes(encode_batch([(1, None, b"5", ()), (2, b"k", None, ())]))
    fetched = CompletedFetch(TP, 0, data, key_deserializer=bytes.decode, value_deserializer=int)
    assert [(record.key, record.value) for record in fetched.take(10)] == [(None, 5), ("k", None)]


def test_what_a_deserializer_refuses_is_not_passed_over():
    """Nor are the records around it: those before come first, and it is said again until somebody seeks past it."""
    fetched = CompletedFetch(TP, 0, batch(0, 5) + batch(5, 2), value_deserializer=lambda value: 1 // (int(value) - 2))
    assert offsets(fetched) == [0, 1]
    assert fetched.position == 2
    for _ in range(3):
        with pytest.raises(ZeroDivisionError) as raised:
            fetched.take(1000)
        assert raised.value.__notes__ == ["at offset 2 of t-3"]
        assert len(raised.traceback) < 6
        assert (fetched.position, fetched.exhausted) == (2, False)


def test_what_a_deserializer_refuses_for_a_time_is_deserialized_in_a_later_call():
    """A schema registry was away for a moment: each later call raised what the first one had."""
    values: list[bytes] = []
    problem = ConnectionError("away")

    def deserialized(value: bytes) -> bytes:
        values.append(value)
        if value in (b"0", b"2") and values.count(value) < 4:
            raise problem
        return value

    fetched = CompletedFetch(TP, 0, batch(0, 5) + batch(5, 2), value_deserializer=deserialized)
    for _ in range(3):
        with pytest.raises(ConnectionError):
            fetched.take(1)
    assert problem.__notes__ == ["at offset 0 of t-3"]
    assert offsets(fetched) == [0, 1]
    for _ in range(2):
        with pytest.raises(ConnectionError):
            fetched.take(1)
    assert (fetched.position, fetched.has_failed) == (2, True)
    assert [record.offset for record in fetched.take(2)] == [2, 3]
    assert offsets(fetched) == [4, 5, 6]
    assert values == [b"0"] * 4 + [b"1"] + [b"2"] * 4 + [b"3", b"4", b"5", b"6"]
    assert fetched.exhausted


def test_the_position_is_at_a_record_that_a_deserializer_refuses_behind_removed_ones():
    """A `seek` behind the position did not skip it, but read it again for each offset without a record."""
    fetched = CompletedFetch(TP, 0, batch(0, 2) + batch(40, 2), value_deserializer=lambda value: 1 // (int(value) % 40))
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            fetched.take(1)
        assert (fetched.position, fetched.leader_epoch) == (0, -1)
    fetched = CompletedFetch(TP, 1, batch(0, 2) + batch(40, 2), value_deserializer=lambda value: 1 // (int(value) % 40))
    assert offsets(fetched) == [1]
    assert fetched.position == 2
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            fetched.take(1)
        assert (fetched.position, fetched.leader_epoch) == (40, 7)


def test_a_batch_whose_first_record_is_refused_is_not_passed_over():
    fetched = CompletedFetch(TP, 0, batch(0, 3) + batch(3, 2), value_deserializer=lambda value: 1 // int(value))
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            fetched.take(1000)
    assert fetched.position == 0


@pytest.mark.parametrize(
    ("bases", "high_watermark"),
    [
        ((9,), 100),  # ends before the offset asked for
        ((12, 11), 100),  # overlaps the one before
        ((12, 14), 100),  # with one record
        ((500, 15), 100),  # the first begins after the second
        ((500,), 100),  # above everything there is
        ((101,), 100),
        ((2**60, 15, 18), -1),
        ((-5,), 100),
    ],
)
def test_a_batch_out_of_place_is_an_error_although_its_crc_is_right(bases, high_watermark):
    """The base offset is outside of the CRC. Taken as it is, records would have wrong offsets, or be passed over."""
    buffer = b"".join(batch(base, 3) for base in bases)
    with pytest.raises(KafkaError, match="a batch says that it begins at offset") as caught:
        CompletedFetch(TP, 12, buffer, high_watermark=high_watermark)
    assert caught.value.code is ErrorCode.CORRUPT_MESSAGE


def test_gaps_of_compaction_and_batches_beyond_a_high_watermark_that_lags_are_in_place():
    buffer = batch(11, 3) + batch(40, 3) + batch(90, 30)
    assert offsets(CompletedFetch(TP, 12, buffer, high_watermark=95)) == [12, 13, 40, 41, 42, *range(90, 120)]
    assert offsets(CompletedFetch(TP, 12, batch(12, 3), high_watermark=12)) == [12, 13, 14]


def test_batches_before_one_of_an_impossible_length_are_handed_out():
    damaged = bytearray(batch(15, 3))
    damaged[8:12] = (5).to_bytes(4, "big")
    fetched = CompletedFetch(TP, 12, batch(12, 3) + damaged)
    assert offsets(fetched, 3) == [12, 13, 14]
    assert fetched.exhausted
    with pytest.raises(KafkaError):
        CompletedFetch(TP, 15, bytes(damaged))


@pytest.mark.parametrize("in_columns", [False, True])
@pytest.mark.parametrize("compression", [GZIP, SNAPPY, LZ4, ZSTD])
def test_a_batch_that_decompresses_to_more_than_the_limit_is_an_error_that_names_it(compression, in_columns):
    if in_columns:
        pytest.importorskip("pyarrow")
    large = bytes(encode_batch([(1000, None, bytes(100_000), ())] * 2, base_offset=5, compression=compression))
    for limit, is_read in ((150_000, False), (250_000, True)):
        fetched = CompletedFetch(TP, 0, batch(0, 5) + large, decoder=RecordDecoder(limit))

        def take(fetched: CompletedFetch = fetched) -> int:
            if in_columns:
                return sum(piece.num_rows for piece in iter(partial(fetched.take_columns, ("offset",)), None))
            return len(offsets(fetched)) + len(offsets(fetched))

        if is_read:
            assert take() == 7
        else:
            with pytest.raises(KafkaError, match=r"t-3: batch at offset 5: .* decompresses to more than") as failure:
                take()
            assert failure.value.code is ErrorCode.MESSAGE_TOO_LARGE
            assert fetched.position == 5
