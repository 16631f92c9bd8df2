from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidelog.protocol.batches import crc

KNOWN = [
    (b"", 0),
    (b"123456789", 0xE3069283),
    (bytes(32), 0x8A9136AA),  # the vectors of RFC 3720, appendix B.4
    (b"\xff" * 32, 0x62A8AB43),
    (bytes(range(32)), 0x46DD794E),
]


@pytest.mark.parametrize("checksum", [crc.crc32c, crc.crc32c_portable])
@pytest.mark.parametrize(("data", "expected"), KNOWN)
def test_known_checksums(checksum, data, expected):
    assert checksum(data) == expected


def test_the_package_is_used_where_it_is_installed():
    assert crc.IS_HARDWARE_BACKED
    assert crc.crc32c is not crc.crc32c_portable


@given(st.binary(max_size=2000), st.integers(0, 2000))
def test_the_portable_checksum_equals_the_fast_one_whole_and_in_two_steps(data, cut):
    whole = crc.crc32c(data)
    assert crc.crc32c_portable(data) == whole
    head, tail = data[:cut], data[cut:]
    assert crc.crc32c(tail, crc.crc32c(head)) == whole
    assert crc.crc32c_portable(tail, crc.crc32c_portable(head)) == whole


@pytest.mark.parametrize("checksum", [crc.crc32c, crc.crc32c_portable])
def test_any_buffer_is_taken(checksum):
    data = b"0123456789"
    assert checksum(memoryview(bytearray(data))[1:]) == checksum(bytearray(data[1:])) == checksum(data[1:])
