from __future__ import annotations

import gzip
import io
import os
import random
import struct
import zlib
from pathlib import Path

import cramjam
import pytest

from tidelog.protocol.batches import compression as codecs
from tidelog.protocol.errors import ErrorCode, KafkaError

COMPRESSED = [codecs.GZIP, codecs.SNAPPY, codecs.LZ4, codecs.ZSTD]
NOISE = os.urandom(200_000)
TEXT = b"".join(b'{"flight":%d,"delay":%d}' % (index, index * 7 % 113) for index in range(9000))


@pytest.mark.parametrize("codec", codecs.NAMES)
@pytest.mark.parametrize("data", [b"", b"x", b"abc" * 3, TEXT, NOISE, bytes(1_000_000)], ids=len)
@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_what_is_compressed_comes_back(codec, data, kind):
    packed = codecs.compress(codec, kind(data))
    assert codecs.decompress(codec, kind(packed), len(data)) == data


@pytest.mark.parametrize("codec", codecs.NAMES)
@pytest.mark.parametrize("data", [b"", b"x", TEXT, NOISE, bytes(1_000_000)], ids=len)
def test_it_is_decompressed_into_memory_that_has_room_and_else_not(codec, data):
    packed = codecs.compress(codec, data)
    room = bytearray(len(data) + 100_000)
    assert codecs.decompress_into(codec, packed, memoryview(room)) == len(data)
    assert room[: len(data)] == data
    assert codecs.decompress_into(codec, packed, memoryview(bytearray(len(data)))) == len(data)
    if data:
        rest = bytearray(b"\xaa" * 64)
        narrow = bytearray(len(data) - 1) + rest
        assert codecs.decompress_into(codec, packed, memoryview(narrow)[: len(data) - 1]) is None
        assert narrow[len(data) - 1 :] == rest


@pytest.mark.parametrize("codec", COMPRESSED)
def test_bytes_that_are_changed_are_decompressed_into_memory_as_they_are_else_or_not_at_all(codec):
    packed = codecs.compress(codec, TEXT[:5000])
    rng = random.Random(7)
    for _ in range(300):
        changed = bytearray(packed)
        changed[rng.randrange(len(changed))] = rng.randrange(256)
        room = bytearray(200_000)
        size = codecs.decompress_into(codec, changed, memoryview(room)[:150_000])
        assert not any(room[150_000:])
        if size is not None:
            assert room[:size] == codecs.decompress(codec, changed, 150_000)


@pytest.mark.parametrize("codec", COMPRESSED)
def test_text_gets_smaller(codec):
    assert len(codecs.compress(codec, TEXT)) < len(TEXT) / 2


@pytest.mark.slow
@pytest.mark.parametrize("codec", codecs.LEVELS)
def test_every_level_comes_back_and_a_wrong_one_is_refused(codec):
    levels = codecs.LEVELS[codec]
    for level in {max(levels.start, -7), 1, codecs.DEFAULT_LEVELS[codec], levels[-1]}:
        assert codecs.decompress(codec, codecs.compress(codec, TEXT, level)) == TEXT
    with pytest.raises(ValueError, match="level"):
        codecs.compress(codec, TEXT, levels.stop)


def test_snappy_has_no_level():
    with pytest.raises(ValueError, match="snappy"):
        codecs.compress(codecs.SNAPPY, TEXT, 1)


@pytest.mark.parametrize("codec", codecs.NAMES)
def test_more_than_the_bound_is_refused(codec):
    for data in (TEXT, bytes(300_000), NOISE):
        packed = codecs.compress(codec, data)
        for bound in (0, 1, len(data) // 2, len(data) - 1):
            with pytest.raises(KafkaError) as failure:
                codecs.decompress(codec, packed, bound)
            assert failure.value.code is ErrorCode.MESSAGE_TOO_LARGE


@pytest.mark.slow
@pytest.mark.parametrize("codec", COMPRESSED)
def test_a_bomb_is_refused_without_holding_what_it_stands_for(codec):
    bomb = codecs.compress(codec, bytes(100_000_000))
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    before = peak_memory_bytes()
    with pytest.raises(KafkaError) as failure:
        codecs.decompress(codec, bomb, 1_000_000)
    assert failure.value.code is ErrorCode.MESSAGE_TOO_LARGE
    assert peak_memory_bytes() - before < 20_000_000


def peak_memory_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024


@pytest.mark.parametrize("codec", COMPRESSED)
def test_every_truncation_is_noticed(codec):
    packed = codecs.compress(codec, TEXT[:3000])
    for size in [*range(40), len(packed) // 2, len(packed) - 4, len(packed) - 1]:
        if codec == codecs.SNAPPY and size == 16:
            continue  # a stream header and no block is an empty stream
        with pytest.raises(KafkaError) as failure:
            codecs.decompress(codec, packed[:size])
        assert failure.value.code is ErrorCode.CORRUPT_MESSAGE


@pytest.mark.parametrize("codec", [5, 6, 7, -1])
def test_an_unknown_codec_is_refused(codec):
    with pytest.raises(KafkaError) as failure:
        codecs.decompress(codec, b"data")
    assert failure.value.code is ErrorCode.UNSUPPORTED_COMPRESSION_TYPE


# -- snappy


def test_snappy_is_written_in_xerials_framing():
    packed = codecs.compress(codecs.SNAPPY, bytes(40_000))
    assert packed[:16] == b"\x82SNAPPY\x00" + bytes.fromhex("0000000100000001")
    (size,) = struct.unpack_from(">i", packed, 16)
    assert cramjam.snappy.decompress_raw_len(packed[20 : 20 + size]) == 32 * 1024
    assert cramjam.snappy.decompress_raw_len(packed[24 + size :]) == 40_000 - 32 * 1024


def test_raw_snappy_is_read_too():
    assert codecs.decompress(codecs.SNAPPY, bytes(cramjam.snappy.compress_raw(TEXT))) == TEXT


def test_snappy_streams_may_follow_each_other():
    packed = codecs.compress(codecs.SNAPPY, b"one") + codecs.compress(codecs.SNAPPY, b"two")
    assert codecs.decompress(codecs.SNAPPY, packed) == b"onetwo"


@pytest.mark.parametrize("size", [-1, 0, 2**31 - 1, 100])
def test_a_lying_snappy_block_size_is_corrupt(size):
    packed = b"\x82SNAPPY\x00" + bytes.fromhex("0000000100000001") + struct.pack(">i", size) + b"\x01\x00x"
    with pytest.raises(KafkaError) as failure:
        codecs.decompress(codecs.SNAPPY, packed)
    assert failure.value.code is ErrorCode.CORRUPT_MESSAGE


def test_a_raw_snappy_length_is_not_believed():
    claim = b"\xff\xff\xff\x3f" + b"123"  # 134 million bytes from three
    with pytest.raises(KafkaError) as failure:
        codecs.decompress(codecs.SNAPPY, claim, 2**31)
    assert failure.value.code is ErrorCode.CORRUPT_MESSAGE


# -- lz4


def test_lz4_frames_have_javas_descriptor():
    for data in (TEXT[:65_536], NOISE[:65_536]):
        packed = codecs.compress(codecs.LZ4, data)
        assert packed[:7] == bytes.fromhex("04224d18604082")
        assert packed[-4:] == bytes(4)
        assert bytes(cramjam.lz4.decompress(packed)) == data  # the descriptor's checksum byte is right


@pytest.mark.parametrize("size", [65_537, 131_072, 262_144, 262_145, 600_000])
def test_lz4_frames_of_more_than_64_kib_have_blocks_of_256(size):
    for data in ((TEXT * (size // len(TEXT) + 1))[:size], random.Random(size).randbytes(size)):
        packed = codecs.compress(codecs.LZ4, data)
        assert packed[:7] == bytes.fromhex("04224d186050fb")
        assert packed[-4:] == bytes(4)
        assert bytes(cramjam.lz4.decompress(packed)) == data  # the descriptor's checksum byte is right
        assert codecs.decompress(codecs.LZ4, packed) == data


@pytest.mark.parametrize("linked", [True, False])
@pytest.mark.parametrize("checksum", [True, False])
def test_lz4_frames_of_other_writers_are_read(linked, checksum):
    compressor = cramjam.lz4.Compressor(level=3, content_checksum=checksum, block_linked=linked)
    compressor.compress(TEXT)
    assert codecs.decompress(codecs.LZ4, bytes(compressor.finish())) == TEXT


def test_what_follows_an_lz4_frame_is_ignored_as_in_java():
    assert codecs.decompress(codecs.LZ4, codecs.compress(codecs.LZ4, TEXT) + b"more") == TEXT


def test_an_lz4_block_above_the_frames_size_is_corrupt():
    packed = bytes.fromhex("04224d18604082") + struct.pack("<I", 70_000 | 1 << 31) + bytes(70_000) + bytes(4)
    with pytest.raises(KafkaError) as failure:
        codecs.decompress(codecs.LZ4, packed)
    assert failure.value.code is ErrorCode.CORRUPT_MESSAGE


@pytest.mark.parametrize("byte", [4, 5])
@pytest.mark.parametrize("value", [0x00, 0x10, 0xA0])
def test_an_unknown_lz4_descriptor_is_corrupt(byte, value):
    packed = bytearray(codecs.compress(codecs.LZ4, TEXT))
    packed[byte] = value
    with pytest.raises(KafkaError) as failure:
        codecs.decompress(codecs.LZ4, packed)
    assert failure.value.code is ErrorCode.CORRUPT_MESSAGE


# -- gzip and zstd


@pytest.mark.parametrize(
    "garbage", [b"garbage" * 10, b"\x1f", b"\x1f\x8b", b"\x1f\x8b\x08" + bytes(14), b"\x1f\x8b\x07" + bytes(50)]
)
def test_gzip_members_are_joined_and_garbage_behind_them_ignored(garbage):
    packed = gzip.compress(b"one") + gzip.compress(b"") + gzip.compress(b"two") + garbage
    assert codecs.decompress(codecs.GZIP, packed) == b"onetwo"


def test_a_gzip_member_behind_others_must_be_whole():
    with pytest.raises(KafkaError) as failure:
        codecs.decompress(codecs.GZIP, gzip.compress(b"one") + gzip.compress(NOISE)[:-1])
    assert failure.value.code is ErrorCode.CORRUPT_MESSAGE


def test_zlib_gets_no_more_of_many_gzip_members_than_it_may_copy_for_each(monkeypatch):
    """It copies what is left behind a member: a megabyte of empty ones took a second."""
    given = []

    class Counting:
        def __init__(self, *args):
            self._member = zlib_decompressobj(*args)

        def __getattr__(self, name):
            return getattr(self._member, name)

        def decompress(self, data, limit):
            given.append(len(data))
            return self._member.decompress(data, limit)

    zlib_decompressobj = zlib.decompressobj
    packed = gzip.compress(NOISE[:70_000]) + gzip.compress(b"") * 10_000 + gzip.compress(TEXT)
    monkeypatch.setattr(zlib, "decompressobj", Counting)
    assert codecs.decompress(codecs.GZIP, packed) == NOISE[:70_000] + TEXT
    assert max(given) == 64 * 1024


def test_gzip_with_a_name_in_its_header_is_read():
    out = io.BytesIO()
    with gzip.GzipFile("name.txt", "wb", fileobj=out) as file:
        file.write(TEXT)
    assert codecs.decompress(codecs.GZIP, out.getvalue()) == TEXT


def test_zstd_without_a_content_size_is_read():
    compressor = cramjam.zstd.Compressor(3)
    for start in range(0, len(TEXT), 10_000):
        compressor.compress(TEXT[start : start + 10_000])
    assert codecs.decompress(codecs.ZSTD, bytes(compressor.finish())) == TEXT


def test_zstd_frames_are_joined_and_skippable_ones_skipped():
    skippable = struct.pack("<II", 0x184D2A53, 5) + b"aside"
    packed = codecs.compress(codecs.ZSTD, b"one") + skippable + codecs.compress(codecs.ZSTD, b"two" * 200)
    assert codecs.decompress(codecs.ZSTD, packed) == b"one" + b"two" * 200


@pytest.mark.parametrize("codec", COMPRESSED)
def test_flipped_bytes_never_raise_anything_but_a_kafka_error(codec):
    rng = random.Random(codec)
    packed = codecs.compress(codec, TEXT[:5000] + NOISE[:500])
    refusals = set()
    for _ in range(1500):
        broken = bytearray(packed)
        for _ in range(rng.randrange(1, 4)):
            broken[rng.randrange(min(len(broken), rng.choice((32, 10**6))))] = rng.randrange(256)
        try:
            size = len(codecs.decompress(codec, broken, 100_000))
        except KafkaError as failure:
            refusals.add(failure.code)
        else:
            assert size <= 100_000
    assert refusals <= {ErrorCode.CORRUPT_MESSAGE, ErrorCode.MESSAGE_TOO_LARGE}
    assert ErrorCode.CORRUPT_MESSAGE in refusals
