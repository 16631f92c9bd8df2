"""Kafka's four codecs as whole-buffer functions: snappy, lz4 and zstd on cramjam, gzip on zlib.

zlib writes gzip at the default level in half of cramjam's time, and it can stop at a bound. The
output formats are those of Java's client: snappy in xerial's framing, lz4 frames of independent
blocks. The input formats include those of other clients: raw snappy, any lz4 frame, zstd with
and without a content size. Invariant: `decompress` never holds more than `max_bytes` of output, and
input that cannot be decompressed raises KafkaError. `docs/formats/compression.md` has the framings
byte by byte.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from struct import Struct, error
from typing import Final

import cramjam

from tidelog.protocol.errors import ErrorCode, KafkaError

Buffer = bytes | bytearray | memoryview

NONE: Final = 0
GZIP: Final = 1
SNAPPY: Final = 2
LZ4: Final = 3
ZSTD: Final = 4

NAMES: Final = {NONE: "none", GZIP: "gzip", SNAPPY: "snappy", LZ4: "lz4", ZSTD: "zstd"}
"""The names in Kafka's compression.type. "producer" and "uncompressed" are configuration, not
codecs.
"""
CODECS: Final = {name: codec for codec, name in NAMES.items()}

LEVELS: Final = {GZIP: range(1, 10), LZ4: range(1, 18), ZSTD: range(-131072, 23)}
"""The levels that Kafka accepts, by codec (CompressionType). Snappy has none."""
DEFAULT_LEVELS: Final = {GZIP: 6, LZ4: 9, ZSTD: 3}

DEFAULT_MAX_BYTES: Final = 128 * 1024 * 1024

_GZIP_WINDOW_BITS: Final = 31
"""zlib's code for gzip framing with the largest window."""

_GZIP_PIECE_BYTES: Final = 1024 * 1024
_GZIP_INPUT_BYTES: Final = 64 * 1024
_GZIP_MEMBER_START: Final = b"\x1f\x8b\x08"
_GZIP_MEMBER_MIN: Final = 18
"""The bytes of the header and the trailer of a member."""

_XERIAL_MAGIC: Final = b"\x82SNAPPY\x00"
_XERIAL_HEADER: Final = _XERIAL_MAGIC + b"\x00\x00\x00\x01" * 2
_XERIAL_BLOCK_BYTES: Final = 32 * 1024
_SNAPPY_MAX_RATIO: Final = 32
"""A snappy element of 3 bytes decompresses to at most 64, so a block with a higher claim is
corrupt.
"""

_LZ4_MAGIC: Final = 0x184D2204
_LZ4_HEADER: Final = b"\x04\x22\x4d\x18\x60\x40\x82"
"""Version 1, independent blocks, no checksums, 64 KiB blocks: Java's descriptor with its checksum
byte.
"""
_LZ4_BLOCK_BYTES: Final = 64 * 1024
_LZ4_LARGE_HEADER: Final = b"\x04\x22\x4d\x18\x60\x50\xfb"
"""The same with blocks of 256 KiB, which Java's reader takes too.

Larger blocks find more in most data, and cost half the time in data of few repetitions.
"""
_LZ4_LARGE_BLOCK_BYTES: Final = 256 * 1024
_LZ4_STORED: Final = 0x80000000
"""The flag in a block's size word for an uncompressed block."""
_LZ4_INDEPENDENT: Final = 0x20

_LZ4_DESCRIPTOR: Final = Struct("<IBB")
"""Magic, flags, and the byte of the block size."""

_LZ4_END_MARK: Final = bytes(4)
_LZ4_WALKED_BLOCKS_MAX: Final = 16
_SNAPPY_FRAMED_MAGIC: Final = b"\xff\x06\x00\x00sNaPpY"
"""The first bytes in snappy's own framing."""

_ZSTD_MAGIC: Final = 0xFD2FB528
_ZSTD_BLOCK_BYTES: Final = 128 * 1024

_UINT16_LE: Final = Struct("<H")
_UINT32_LE: Final = Struct("<I")
_INT32: Final = Struct(">i")


def compress(codec: int, data: Buffer, level: int | None = None) -> bytes:
    """Compress `data` with `codec` (0 to 4). `level` None means Kafka's default.

    Raises ValueError for a level out of range.
    """
    if level is not None and level not in LEVELS.get(codec, ()):
        raise ValueError(f"{NAMES.get(codec, codec)} has no compression level {level}")
    if codec == NONE:
        return bytes(data)
    return _COMPRESSORS[codec](data, level)


def decompress(codec: int, data: Buffer, max_bytes: int = DEFAULT_MAX_BYTES) -> bytes:
    """Decompress `data` with `codec` to at most `max_bytes`.

    Raises KafkaError: UNSUPPORTED_COMPRESSION_TYPE for an unknown codec, MESSAGE_TOO_LARGE for an
    output above the bound, CORRUPT_MESSAGE for an incomplete or malformed stream.
    """
    if codec == NONE:
        if len(data) > max_bytes:
            raise _too_large(codec, max_bytes)
        return bytes(data)
    decompressor = _DECOMPRESSORS.get(codec)
    if decompressor is None:
        raise KafkaError(ErrorCode.UNSUPPORTED_COMPRESSION_TYPE, f"unknown compression codec {codec}")
    try:
        return decompressor(data, max_bytes)
    except (cramjam.DecompressionError, zlib.error, error, IndexError) as failure:
        raise KafkaError(ErrorCode.CORRUPT_MESSAGE, f"{NAMES[codec]}: {failure}") from None


def decompress_into(codec: int, data: Buffer, out: memoryview) -> int | None:
    """Decompress `data` into the start of `out`. Returns the size, or None when the output has no room or
    `data` is malformed: `decompress` tells which. What lies in `out` behind the size may change.
    """
    try:
        if codec == ZSTD:
            return cramjam.zstd.decompress_into(data, out)
        if codec == LZ4 and len(data) > 4 and data[4] & _LZ4_INDEPENDENT:
            view = memoryview(data)
            blocks, block_bytes, _ = _scan_lz4_frame(view)
            return _decompress_lz4_blocks(view, blocks, block_bytes, out, is_bounded=True)
        whole = decompress(codec, data, len(out))
    except (KafkaError, cramjam.DecompressionError, zlib.error, error, IndexError, ValueError):
        return None
    out[: len(whole)] = whole
    return len(whole)


def check_lz4_descriptor(data: Buffer) -> None:
    """Raise INVALID_RECORD for an lz4 frame of a kind that this module reads, but Java's clients and brokers do not.

    Checksums are not compared: the batch has its own.
    """
    if len(data) < _LZ4_DESCRIPTOR.size:
        return
    magic, flags, block_size = _LZ4_DESCRIPTOR.unpack_from(data)
    if magic != _LZ4_MAGIC:
        reason = "the records are no lz4 frame"
    elif not flags & _LZ4_INDEPENDENT:
        reason = "the blocks of the lz4 frame are linked, which Java's clients do not read"
    elif flags & 0xC3 != 0x40 or block_size & 0x8F or block_size < 0x40:
        reason = "the lz4 frame has a dictionary, reserved bits or an unknown version"
    else:
        return
    raise KafkaError(ErrorCode.INVALID_RECORD, reason)


def check_snappy_framing(data: Buffer) -> None:
    """Raise INVALID_RECORD for snappy's own framing, which Java's clients do not read."""
    if data[0] == _SNAPPY_FRAMED_MAGIC[0] and data[: len(_SNAPPY_FRAMED_MAGIC)] == _SNAPPY_FRAMED_MAGIC:
        raise KafkaError(ErrorCode.INVALID_RECORD, "the records are in snappy's own framing, not in xerial's or none")


def check_lz4_end(data: Buffer) -> None:
    """Raise INVALID_RECORD for an lz4 frame that has no end: its writer was not closed, or it is cut.

    Nothing is decompressed. The bytes of an end mark at the end are enough; without them the frame's first blocks are
    passed, because a checksum or other bytes may follow it.
    """
    flags = data[4]
    if data[-4:] == _LZ4_END_MARK and not flags & 0x04:
        return
    position = 15 if flags & 0x08 else 7
    try:
        for _ in range(_LZ4_WALKED_BLOCKS_MAX):
            size = _UINT32_LE.unpack_from(data, position)[0] & ~_LZ4_STORED
            position += 4
            if not size:
                position += 4 if flags & 0x04 else 0
                break
            position += size + (4 if flags & 0x10 else 0)
    except error:
        position = len(data) + 1
    if position > len(data):
        raise KafkaError(ErrorCode.INVALID_RECORD, "the lz4 frame has no end")


def _too_large(codec: int, max_bytes: int) -> KafkaError:
    return KafkaError(ErrorCode.MESSAGE_TOO_LARGE, f"{NAMES[codec]}: decompresses to more than {max_bytes} bytes")


def _corrupt(codec: int, reason: str) -> KafkaError:
    return KafkaError(ErrorCode.CORRUPT_MESSAGE, f"{NAMES[codec]}: {reason}")


def _compress_gzip(data: Buffer, level: int | None) -> bytes:
    return zlib.compress(data, 6 if level is None else level, _GZIP_WINDOW_BITS)


def _compress_zstd(data: Buffer, level: int | None) -> bytes:
    return bytes(cramjam.zstd.compress(data, level=3 if level is None else level))


def _compress_snappy(data: Buffer, level: int | None) -> bytes:
    view = memoryview(data)
    out = [_XERIAL_HEADER]
    for start in range(0, len(view), _XERIAL_BLOCK_BYTES):
        block = bytes(cramjam.snappy.compress_raw(view[start : start + _XERIAL_BLOCK_BYTES]))
        out += (_INT32.pack(len(block)), block)
    return b"".join(out)


def _compress_lz4(data: Buffer, level: int | None) -> bytes:
    if level is not None and level != DEFAULT_LEVELS[LZ4]:
        compressor = cramjam.lz4.Compressor(level=level, content_checksum=False, block_linked=False)
        compressor.compress(bytes(data))
        return bytes(compressor.finish())
    # As Java, the fast compressor at the default level. The frame is assembled here, because
    # cramjam's frames link their blocks, which Java's reader refuses.
    view = memoryview(data)
    is_large = len(view) > _LZ4_BLOCK_BYTES
    block_bytes = _LZ4_LARGE_BLOCK_BYTES if is_large else _LZ4_BLOCK_BYTES
    out = [_LZ4_LARGE_HEADER if is_large else _LZ4_HEADER]
    for start in range(0, len(view), block_bytes):
        chunk = view[start : start + block_bytes]
        block = bytes(cramjam.lz4.compress_block(chunk, store_size=False))
        if len(block) < len(chunk):
            out += (_UINT32_LE.pack(len(block)), block)
        else:
            out += (_UINT32_LE.pack(len(chunk) | _LZ4_STORED), bytes(chunk))
    out.append(b"\x00\x00\x00\x00")
    return b"".join(out)


def _decompress_gzip(data: Buffer, max_bytes: int) -> bytes:
    view = memoryview(data)
    pieces: list[bytes] = []
    remaining_bytes = max_bytes
    position = 0
    while True:
        member = zlib.decompressobj(_GZIP_WINDOW_BITS)
        source: Buffer = b""
        while True:
            # zlib copies the input that it leaves. Without a bound, a megabyte of tiny members would copy gigabytes.
            if not source:
                source = view[position : position + _GZIP_INPUT_BYTES]
                position += len(source)
            # In pieces, so that an output above the bound is never held whole. The extra byte keeps
            # the limit above 0, which would mean "no limit".
            piece = member.decompress(source, min(_GZIP_PIECE_BYTES, remaining_bytes + 1))
            source = member.unconsumed_tail
            remaining_bytes -= len(piece)
            if remaining_bytes < 0:
                raise _too_large(GZIP, max_bytes)
            if piece:
                pieces.append(piece)
            if member.eof:
                break
            if position == len(view) and not piece and not source:
                raise _corrupt(GZIP, "truncated stream")
        position -= len(member.unused_data)
        # As Java, bytes after the last member are ignored.
        if len(view) - position < _GZIP_MEMBER_MIN or bytes(view[position : position + 3]) != _GZIP_MEMBER_START:
            return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def _decompress_snappy(data: Buffer, max_bytes: int) -> bytes:
    view = memoryview(data)
    if bytes(view[:8]) != _XERIAL_MAGIC:
        return _decompress_snappy_block(view, max_bytes)
    out: list[bytes] = []
    total = 0
    position = len(_XERIAL_HEADER)
    if len(view) < position:
        raise _corrupt(SNAPPY, "truncated header")
    while position < len(view):
        (size,) = _INT32.unpack_from(view, position)
        if size < 0 and bytes(view[position : position + 8]) == _XERIAL_MAGIC:
            position += len(_XERIAL_HEADER)  # another stream with its own header may follow
            continue
        position += 4
        if not 0 < size <= len(view) - position:
            raise _corrupt(SNAPPY, f"block of {size} bytes where {len(view) - position} are left")
        block = _decompress_snappy_block(view[position : position + size], max_bytes - total)
        out.append(block)
        total += len(block)
        position += size
    return out[0] if len(out) == 1 else b"".join(out)


def _decompress_snappy_block(block: memoryview, max_bytes: int) -> bytes:
    if not block:
        raise _corrupt(SNAPPY, "empty block")
    size = cramjam.snappy.decompress_raw_len(block)
    if size > max_bytes:
        raise _too_large(SNAPPY, max_bytes)
    if size > len(block) * _SNAPPY_MAX_RATIO:
        raise _corrupt(SNAPPY, f"claims {size} bytes from {len(block)}")
    return bytes(cramjam.snappy.decompress_raw(block))


def _decompress_lz4(data: Buffer, max_bytes: int) -> bytes:
    view = memoryview(data)
    blocks, block_bytes, end = _scan_lz4_frame(view)
    max_size = 0
    for size, _ in blocks:
        # One byte of a compressed block decompresses to at most 255.
        max_size += size & ~_LZ4_STORED if size & _LZ4_STORED else min(block_bytes, size * 255)
    if not view[4] & _LZ4_INDEPENDENT:
        return _decompress_bounded(LZ4, cramjam.lz4.decompress_into, view[:end], max_size, max_bytes)
    out = memoryview(bytearray(min(max_size, max_bytes)))
    return bytes(out[: _decompress_lz4_blocks(view, blocks, block_bytes, out, is_bounded=max_size > max_bytes)])


def _decompress_lz4_blocks(
    view: memoryview, blocks: list[tuple[int, int]], block_bytes: int, out: memoryview, *, is_bounded: bool
) -> int:
    """Decompress independent blocks into the start of `out`: the size. `is_bounded`: they may not fit.

    Block by block, which is three times faster than cramjam's frame reader.
    """
    filled = 0
    for size, start in blocks:
        if size & _LZ4_STORED:
            size &= ~_LZ4_STORED
            if size > min(block_bytes, len(out) - filled):
                raise (
                    _too_large(LZ4, len(out)) if size <= block_bytes else _corrupt(LZ4, "block above the frame's size")
                )
            out[filled : filled + size] = view[start : start + size]
            filled += size
            continue
        try:
            target = out[filled : filled + block_bytes]
            filled += cramjam.lz4.decompress_block_into(view[start : start + size], target)
        except cramjam.DecompressionError:
            # A block that does not fit and a broken block raise the same error.
            if is_bounded and len(out) - filled < block_bytes:
                raise _too_large(LZ4, len(out)) from None
            raise
    return filled


def _scan_lz4_frame(view: memoryview) -> tuple[list[tuple[int, int]], int, int]:
    """The first frame's blocks as (size word, start), its block size and its end.

    As in Java, bytes after the frame are ignored.
    """
    if _UINT32_LE.unpack_from(view)[0] != _LZ4_MAGIC:
        raise _corrupt(LZ4, "no frame magic")
    flags, descriptor = view[4], view[5]
    block_bytes = 1 << (8 + 2 * (descriptor >> 4 & 7))
    if flags >> 6 != 1 or block_bytes < _LZ4_BLOCK_BYTES:
        raise _corrupt(LZ4, "unknown frame version or block size")
    position = 7 + (8 if flags & 0x08 else 0) + (4 if flags & 0x01 else 0)
    checksum_bytes = 4 if flags & 0x10 else 0
    blocks: list[tuple[int, int]] = []
    while True:
        (size,) = _UINT32_LE.unpack_from(view, position)
        position += 4
        if size == 0:
            break
        blocks.append((size, position))
        position += (size & ~_LZ4_STORED) + checksum_bytes
    position += 4 if flags & 0x04 else 0
    if position > len(view):
        raise _corrupt(LZ4, "truncated frame")
    return blocks, block_bytes, position


def _decompress_zstd(data: Buffer, max_bytes: int) -> bytes:
    max_size = _max_zstd_size(memoryview(data))
    return _decompress_bounded(ZSTD, cramjam.zstd.decompress_into, data, max_size, max_bytes)


def _max_zstd_size(view: memoryview) -> int:
    """The maximum decompressed size of the frames, from their block headers (RFC 8878)."""
    position = max_size = 0
    while position < len(view):
        (magic,) = _UINT32_LE.unpack_from(view, position)
        if magic & 0xFFFFFFF0 == 0x184D2A50:  # a skippable frame
            position += 8 + _UINT32_LE.unpack_from(view, position + 4)[0]
            continue
        if magic != _ZSTD_MAGIC:
            raise _corrupt(ZSTD, "no frame magic")
        descriptor = view[position + 4]
        single_segment = descriptor >> 5 & 1
        size_bytes = (single_segment, 2, 4, 8)[descriptor >> 6]
        size_start = position + 5 + (1 - single_segment) + (0, 1, 2, 4)[descriptor & 3]
        position = size_start + size_bytes
        is_last = 0
        blocks = 0
        while not is_last:
            header = _UINT16_LE.unpack_from(view, position)[0] | view[position + 2] << 16
            is_last, kind, size = header & 1, header >> 1 & 3, header >> 3
            position += 3 + (1 if kind == 1 else size)
            # Kind 0 is raw, 1 is one repeated byte. A compressed block decompresses to at most 128
            # KiB.
            blocks += size if kind < 2 else _ZSTD_BLOCK_BYTES
        if size_bytes:
            content_size = int.from_bytes(view[size_start : size_start + size_bytes], "little") + (
                256 if size_bytes == 2 else 0
            )
            blocks = min(blocks, content_size)
        max_size += blocks
        position += 4 if descriptor & 4 else 0
    if position > len(view):
        raise _corrupt(ZSTD, "truncated frame")
    return max_size


def _decompress_bounded(
    codec: int, decompress_into: Callable[[Buffer, bytearray], int], data: Buffer, max_size: int, max_bytes: int
) -> bytes:
    try:
        return _decompress_into(decompress_into, data, min(max_size, max_bytes))
    except cramjam.DecompressionError as failure:
        if max_size > max_bytes and _is_output_full(failure):
            raise _too_large(codec, max_bytes) from None
        raise


def _decompress_into(decompress_into: Callable[[Buffer, bytearray], int], data: Buffer, capacity: int) -> bytes:
    out = bytearray(capacity)
    size = decompress_into(data, out)
    return bytes(memoryview(out)[:size])


def _is_output_full(failure: Exception) -> bool:
    return "whole buffer" in str(failure)


_COMPRESSORS: Final[dict[int, Callable[[Buffer, int | None], bytes]]] = {
    GZIP: _compress_gzip,
    SNAPPY: _compress_snappy,
    LZ4: _compress_lz4,
    ZSTD: _compress_zstd,
}
_DECOMPRESSORS: Final[dict[int, Callable[[Buffer, int], bytes]]] = {
    GZIP: _decompress_gzip,
    SNAPPY: _decompress_snappy,
    LZ4: _decompress_lz4,
    ZSTD: _decompress_zstd,
}
