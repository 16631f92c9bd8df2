"""Records counted and scanned where they lie: what the decoder takes is taken, and what it refuses is noticed."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidelog.protocol.batches.batch_builder import encode_batch
from tidelog.protocol.batches.record import encode_varint
from tidelog.protocol.batches.record_batch import HEADER_SIZE, read_header
from tidelog.protocol.batches.record_walk import (
    CHECKED_RECORDS,
    check_plausible,
    check_records,
    first_eight,
    keyless_record_size,
    scan_records,
)
from tidelog.protocol.batches.records import Record, decode_section
from tidelog.protocol.errors import ErrorCode, KafkaError

NOW_MS = 1_700_000_000_000

optional_bytes = st.none() | st.binary(max_size=300)
records = st.lists(
    st.tuples(
        st.integers(NOW_MS, NOW_MS + 100_000),
        optional_bytes,
        optional_bytes,
        st.lists(st.tuples(st.text(max_size=5), optional_bytes), max_size=3),
    ),
    min_size=1,
    max_size=40,
)


def section_of(values: object) -> bytes:
    return bytes(encode_batch(values)[HEADER_SIZE:])  # type: ignore[arg-type]


def check(section: bytes, count: int, padding: bytes = b"") -> None:
    data = memoryview(padding + section + padding)
    check_records(data, len(padding), len(padding) + len(section), count)


def refused(section: bytes, count: int) -> None:
    with pytest.raises(KafkaError) as caught:
        check(section, count, b"\x0e\0\0\0\1\1\0" * 3)  # behind it lies the next batch
    assert caught.value.code is ErrorCode.INVALID_RECORD


@given(records)
def test_what_was_encoded_is_taken_and_scanned_as_it_is_decoded(values: list[tuple[object, ...]]) -> None:
    batch = encode_batch(values)  # type: ignore[arg-type]
    section = bytes(batch[HEADER_SIZE:])
    check(section, len(values), b"padding")
    decoded: list[Record] = decode_section(section, read_header(batch))
    base = read_header(batch).base_timestamp
    scanned = [(offset, base + delta, has_key) for offset, delta, has_key in scan_records(section, len(values))]
    assert scanned == [(each.offset, each.timestamp, each.key is not None) for each in decoded]


@pytest.mark.parametrize("value_bytes", [64, 70, 120, 200, 8170])
def test_a_keyless_record_of_its_size_needs_no_other_check(value_bytes: int) -> None:
    section = section_of([Record(0, 0, None, bytes(value_bytes))])
    known = 0
    for place in range(8):
        for byte in range(256):
            data = bytearray(section)
            data[place] = byte
            if keyless_record_size(first_eight(data)[0]) == len(data):
                check(bytes(data), 1)
                known += 1
    assert known
    assert keyless_record_size(first_eight(section)[0]) == len(section)


@given(records, st.integers(-45, 45).filter(bool))
def test_another_count_is_refused(values: list[tuple[object, ...]], more: int) -> None:
    refused(section_of(values), max(1, len(values) + more) if len(values) + more != 0 and len(values) > 1 else 2)


@pytest.mark.parametrize("count", [1, 2, CHECKED_RECORDS, CHECKED_RECORDS + 20])
@pytest.mark.parametrize("delta", [-1, 5, 2**31 - 1])
def test_offset_deltas_that_are_not_0_1_2_are_refused_where_they_are_counted(count: int, delta: int) -> None:
    values = [Record(index, NOW_MS, None, b"v") for index in range(count)]
    section = section_of(values)
    check_records(section, 0, len(section), count, counted=True)
    for wrong in range(min(count, CHECKED_RECORDS)):
        fields = b"\0\0" + encode_varint(delta) + b"\1\2v\0"
        size = len(section) // count
        start = size * wrong
        lying = section[:start] + encode_varint(len(fields)) + fields + section[start + size :]
        check_records(lying, 0, len(lying), count)
        with pytest.raises(KafkaError) as caught:
            check_records(lying, 0, len(lying), count, counted=True)
        assert caught.value.code is ErrorCode.INVALID_RECORD


@given(records, st.integers(0, 2**32), st.integers(0, 255))
def test_a_scan_refuses_what_the_decoder_refuses(values: list[tuple[object, ...]], place: int, byte: int) -> None:
    batch = encode_batch(values)  # type: ignore[arg-type]
    section = bytearray(batch[HEADER_SIZE:])
    section[place % len(section)] = byte
    header = read_header(batch)
    try:
        decoded = len(decode_section(bytes(section), header))
    except KafkaError as error:
        if "64 bits" in str(error.message):
            return
        decoded = -1
    try:
        found = len(list(scan_records(section, header.record_count)))
    except KafkaError:
        found = -1
    assert found == decoded


@pytest.mark.parametrize("key", [None, 0, 20, 70])
@pytest.mark.parametrize("value", [None, 0, 40, 57, 63, 64, 8191, 8192])
def test_the_check_of_one_record_agrees_with_its_scan(key: int | None, value: int | None) -> None:
    """Whatever one of its bytes is, and also if some are missing or more follow."""
    fields = [None if size is None else bytes(size) for size in (key, value)]
    section = section_of([(NOW_MS, *fields, ())])
    places = {*range(10), *range(18, 30), *range(70, 82), len(section) - 1} & set(range(len(section)))
    values = (*range(4), *range(0x10, 0x100, 0x11), 0x7F, 0x80, 0x81)
    changed = [section[:place] + bytes((byte,)) + section[place + 1 :] for place in places for byte in values]
    bit = [bytes((section[0] ^ 1,)) + section[1:], section[:1] + bytes((section[1] ^ 1,)) + section[2:]]
    for each in (section, section[:-1], section[:-2], section + b"\0", section + b"\0\0", *changed, *bit):
        try:
            expected = len(list(scan_records(each, 1)))
        except KafkaError:
            expected = -1
        try:
            check(each, 1, b"\0\0\0\1\1\0" * 3)
            found = 1
        except KafkaError:
            found = -1
        assert found == expected, each


@pytest.mark.parametrize("sizes", [[100] * 5000, [7, 300] * 2000, list(range(3000)), [60] * 200 + [20_000] * 200])
def test_long_batches(sizes: list[int]) -> None:
    section = section_of([(NOW_MS + n // 7, None, bytes(size), ()) for n, size in enumerate(sizes)])
    check(section, len(sizes))
    for wrong in (len(sizes) - 1, len(sizes) + 1):
        refused(section, wrong)
    refused(section[:-1], len(sizes))
    refused(section + b"\0", len(sizes))


def test_random_bytes_are_refused() -> None:
    rng = random.Random(3)
    for count in (1, 2, 5, 40):
        for _ in range(200):
            refused(rng.randbytes(rng.randrange(1, 500)), count)


@pytest.mark.parametrize("number", range(CHECKED_RECORDS))
@pytest.mark.parametrize(
    "fields",
    [
        b"\0\0" + encode_varint(9) + b"\1" + encode_varint(50) + b"v" * 3 + b"\0",  # a value beyond the record
        b"\0\0\0" + encode_varint(40) + b"k" * 4 + b"\1\0",  # a key beyond it
        b"\0\0\0\1\1" + encode_varint(-2),  # a negative number of headers
        b"\0\0\0\1\1" + encode_varint(9),  # more headers than bytes
        b"\0\0\0\1\1" + encode_varint(1) + encode_varint(-1) + b"\1",  # a header without a key
        b"\0\0\0\1\1\0" + b"more",  # bytes behind the headers
        b"\0" + b"\xff" * 12 + b"\0\1\1\0",  # a timestamp of more than 64 bits
        b"\0\0\0\1",  # nothing behind the key
    ],
)
def test_fields_of_the_first_records_must_fill_them(number: int, fields: bytes) -> None:
    whole = [b"\0\0" + encode_varint(n) + b"\1" + encode_varint(5) + b"value\0" for n in range(6)]
    whole[number] = fields
    refused(b"".join(encode_varint(len(each)) + each for each in whole), len(whole))


def test_a_count_that_so_many_bytes_cannot_hold_is_refused_whatever_the_codec() -> None:
    check_plausible(1_000, 200, 1)
    for codec in range(5):
        with pytest.raises(KafkaError):
            check_plausible(2**31 - 1, 300, codec)
