"""Record batches with any field set to anything: the broker under test must judge them, so nothing here is checked.

Written out by hand, without `tidelog.protocol`, because a client's batch made by the broker's own codec would agree
with its mistakes.
"""

from __future__ import annotations

import gzip
import struct
import time
from typing import NamedTuple

import crc32c

_HEADER = struct.Struct(">qiibIhiqqqhii")
_LOG_OVERHEAD = 12
_CRC_OFFSET = 17
_ATTRIBUTES_OFFSET = 21
NOW_MS = int(time.time() * 1000)
NO_PRODUCER = (-1, -1, -1)


class Batch(NamedTuple):
    """A batch read back; `crc` and times are those of the bytes."""

    base_offset: int
    leader_epoch: int
    magic: int
    attributes: int
    last_offset_delta: int
    base_timestamp: int
    max_timestamp: int
    producer_id: int
    producer_epoch: int
    base_sequence: int
    record_count: int
    records: bytes


def varint(value: int) -> bytes:
    value = (value << 1) ^ (value >> 63)
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _sized(data: bytes | None) -> bytes:
    return varint(-1) if data is None else varint(len(data)) + data


def record(
    value: bytes | None, *, key: bytes | None = b"k", delta: int = 0, time_delta: int = 0,
    headers: tuple[tuple[bytes | None, bytes | None], ...] = (), attributes: int = 0,
) -> bytes:  # fmt: skip
    """One record of a batch, its length in front."""
    body = struct.pack(">b", attributes) + varint(time_delta) + varint(delta) + _sized(key) + _sized(value)
    body += varint(len(headers)) + b"".join(_sized(name) + _sized(data) for name, data in headers)
    return varint(len(body)) + body


def batch(
    values: int | list[bytes | None] = 1, *, base_offset: int = 0, length: int | None = None, leader_epoch: int = -1,
    magic: int = 2, crc: int | None = None, attributes: int = 0, last_delta: int | None = None,
    timestamp: int = NOW_MS, max_timestamp: int | None = None, producer: tuple[int, int, int] = NO_PRODUCER,
    count: int | None = None, key: bytes | None = b"k", payload: bytes | None = None, compress: bool = False,
) -> bytes:  # fmt: skip
    """`values`: the records' values, or how many records; `producer`: id, epoch and base sequence.

    Whatever is left out is as it should be.
    """
    if isinstance(values, int):
        values = [b"value-%d" % number for number in range(values)]
    if payload is None:
        payload = b"".join(record(value, key=key, delta=delta) for delta, value in enumerate(values))
    if compress:
        payload = gzip.compress(payload, mtime=0)
        attributes |= 1
    delta = len(values) - 1 if last_delta is None else last_delta
    body = struct.pack(
        ">hiqqqhii", attributes, delta, timestamp, timestamp if max_timestamp is None else max_timestamp, *producer,
        len(values) if count is None else count,
    )  # fmt: skip
    body += payload
    size = 9 + len(body) if length is None else length
    checksum = crc32c.crc32c(body) if crc is None else crc
    return struct.pack(">qiibI", base_offset, size, leader_epoch, magic, checksum) + body


def message_set(magic: int, value: bytes = b"v") -> bytes:
    """One message of the formats before record batches."""
    import zlib

    body = struct.pack(">bb", magic, 0) + (struct.pack(">q", NOW_MS) if magic else b"")
    body += struct.pack(">i", -1) + struct.pack(">i", len(value)) + value
    return struct.pack(">qiI", 0, 4 + len(body), zlib.crc32(body)) + body


def read_batches(data: bytes) -> list[Batch]:
    """The whole batches in front; each must have the right CRC. A partial last one is left out."""
    found = []
    position = 0
    while position + _HEADER.size <= len(data):
        fields = _HEADER.unpack_from(data, position)
        end = position + _LOG_OVERHEAD + fields[1]
        if end > len(data):
            break
        assert crc32c.crc32c(data[position + _ATTRIBUTES_OFFSET : end]) == fields[4], "a batch with a wrong CRC"
        found.append(Batch._make((fields[0], *fields[2:4], *fields[5:], data[position + _HEADER.size : end])))
        position = end
    return found
