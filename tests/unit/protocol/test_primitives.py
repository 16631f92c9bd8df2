"""Varints, compact bytes and tagged fields: the bytes Kafka writes, and no others accepted."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidelog.protocol.codec import primitives
from tidelog.protocol.errors import MalformedMessage


@pytest.mark.parametrize(
    ("value", "encoded"),
    [
        (0, "00"),
        (1, "01"),
        (127, "7f"),
        (128, "8001"),
        (300, "ac02"),
        (16383, "ff7f"),
        (16384, "808001"),
        ((1 << 31) - 1, "ffffffff07"),
        ((1 << 32) - 1, "ffffffff0f"),
    ],
)
def test_an_unsigned_varint_is_seven_bits_a_byte_least_first(value: int, encoded: str):
    out = bytearray()
    primitives.write_uvarint(out, value)
    assert out.hex() == encoded
    assert primitives.read_uvarint(out, 0) == (value, len(out))


@pytest.mark.parametrize(
    ("value", "encoded"), [(0, "00"), (-1, "01"), (1, "02"), (-2, "03"), (63, "7e"), (-64, "7f"), (64, "8001")]
)
def test_a_signed_varint_is_zigzag(value: int, encoded: str):
    out = bytearray()
    primitives.write_varint(out, value)
    assert out.hex() == encoded
    assert primitives.read_varint(out, 0) == (value, len(out))


@given(st.integers(-(1 << 31), (1 << 31) - 1))
def test_every_int32_survives(value: int):
    out = bytearray()
    primitives.write_varint(out, value)
    assert len(out) <= primitives.UVARINT_SIZE_MAX
    assert primitives.read_varint(out, 0) == (value, len(out))


@pytest.mark.parametrize("encoded", ["ffffffff10", "808080808001", "ffffffffffffffffffff"])
def test_an_unsigned_varint_of_more_than_32_bits_is_malformed(encoded: str):
    with pytest.raises(MalformedMessage):
        primitives.read_uvarint(bytes.fromhex(encoded), 0)


@pytest.mark.parametrize("encoded", ["ffffffffffffffffff02", "8080808080808080808001"])
def test_a_varlong_of_more_than_64_bits_is_malformed(encoded: str):
    with pytest.raises(MalformedMessage):
        primitives.read_uvarlong(bytes.fromhex(encoded), 0)


def test_a_varint_may_be_longer_than_need_be():
    assert primitives.read_uvarint(b"\x80\x00", 0) == (0, 2)  # Java's reader takes it, and so do we


@pytest.mark.parametrize("read", [primitives.read_uvarint, primitives.read_uvarlong, primitives.read_varint])
def test_the_end_of_the_buffer_is_an_index_error(read):
    for cut in (b"", b"\x80", b"\xff\xff"):
        with pytest.raises(IndexError):
            read(cut, 0)


def test_tagged_fields_of_any_number_and_size_are_skipped():
    section = bytearray()
    primitives.write_uvarint(section, 200)
    for tag in range(200):
        primitives.write_uvarint(section, tag * 1000)
        section += b"\x03abc"
    after = primitives.skip_tagged_fields(section + b"next", 2, 200)
    assert after == len(section)
