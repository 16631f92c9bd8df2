"""Encoded requests for the raw connection: Produce v9, Fetch v12, and their record batches.

Written out by hand, without `tidelog.protocol`: a benchmark that sends what the broker's own codecs made would agree
with their mistakes. Only what the scenarios need is here; compression, keys and headers are librdkafka's part.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass

import crc32c

PRODUCE_KEY, PRODUCE_VERSION = 0, 9
FETCH_KEY, FETCH_VERSION = 1, 12
BATCH_HEADER_BYTES = 61
CORRELATION_ID_OFFSET = 8
_CLIENT_ID = b"tidelog-bench"
_NO_TAGS = b"\x00"


@dataclass(frozen=True, slots=True)
class ProducePlan:
    """One kind of Produce request: the batches it carries and how its answer looks."""

    topic: str
    batches: Mapping[int, bytes]
    acks: int = -1
    timeout_ms: int = 30_000

    @property
    def answer_size_bytes(self) -> int:
        """Length of a v9 answer, after its own size field, that has no error in it."""
        name = self.topic.encode()
        header = 4 + 1 + 1 + len(_compact_bytes(name)) + len(_uvarint(len(self.batches) + 1))
        return header + 33 * len(self.batches) + 1 + 4 + 1

    @property
    def first_error_offset(self) -> int:
        """Where the first partition's error code stands in an answer, size field included; the next is 33 further."""
        return 4 + 4 + 1 + 1 + len(_compact_bytes(self.topic.encode())) + len(_uvarint(len(self.batches) + 1)) + 4

    def errors(self, answer: memoryview | bytearray, position: int = 0) -> list[int]:
        """The error code of every partition in an answer that starts, with its size field, at `position`."""
        if struct.unpack_from(">i", answer, position)[0] != self.answer_size_bytes:
            # An error message shifted what follows: the first code is still where it is.
            return [struct.unpack_from(">h", answer, position + self.first_error_offset)[0] or -1]
        first = position + self.first_error_offset
        return [struct.unpack_from(">h", answer, first + 33 * number)[0] for number in range(len(self.batches))]


def record_batch(values: list[bytes], timestamp_ms: int) -> bytes:
    """An uncompressed record batch (magic 2) without producer id, each record with a null key and no headers.

    The time must be of today: retention of either broker would delete older segments under the benchmark.
    """
    records = bytearray()
    for delta, value in enumerate(values):
        body = b"\x00" + _varint(0) + _varint(delta) + _varint(-1) + _varint(len(value)) + value + _varint(0)
        records += _varint(len(body)) + body
    last = len(values) - 1
    covered = struct.pack(">hiqqqhii", 0, last, timestamp_ms, timestamp_ms, -1, -1, -1, len(values)) + records
    return struct.pack(">qiibI", 0, len(covered) + 9, -1, 2, crc32c.crc32c(covered)) + covered


def produce(plan: ProducePlan, correlation_id: int) -> bytes:
    """A whole Produce v9 frame, size field included."""
    parts = [b"\x00", struct.pack(">hi", plan.acks, plan.timeout_ms), _uvarint(2), _compact_bytes(plan.topic.encode())]
    parts.append(_uvarint(len(plan.batches) + 1))
    for index, batch in plan.batches.items():
        parts += [struct.pack(">i", index), _compact_bytes(batch), _NO_TAGS]
    return _frame(PRODUCE_KEY, PRODUCE_VERSION, correlation_id, b"".join(parts) + _NO_TAGS + _NO_TAGS)


def fetch(
    topic: str, offsets: Mapping[int, int], correlation_id: int, *, max_wait_ms: int = 500, max_bytes: int = 2 << 20
) -> bytes:
    """A whole Fetch v12 frame without a session, from `offsets` (partition -> offset) of one topic."""
    body = struct.pack(">iiiibii", -1, max_wait_ms, 1, max_bytes, 0, 0, -1)
    body += _uvarint(2) + _compact_bytes(topic.encode()) + _uvarint(len(offsets) + 1)
    for index, offset in offsets.items():
        body += struct.pack(">iiqiqi", index, -1, offset, -1, -1, max_bytes) + _NO_TAGS
    return _frame(FETCH_KEY, FETCH_VERSION, correlation_id, body + _NO_TAGS + _uvarint(1) + _uvarint(1) + _NO_TAGS)


@dataclass(frozen=True, slots=True)
class FetchedPartition:
    """What a Fetch v12 answer says of its only partition; `records_at` is where its records start in the answer."""

    error_code: int
    high_watermark: int
    records_at: int
    records_size_bytes: int


def read_fetch_answer(answer: memoryview | bytearray | bytes) -> FetchedPartition:
    """Read a Fetch v12 answer (size field included) about one topic and one partition."""
    error_code = struct.unpack_from(">h", answer, 4 + 4 + 1 + 4)[0]
    position = 4 + 4 + 1 + 4 + 2 + 4
    topics, position = _read_uvarint(answer, position)
    if error_code or topics != 2:
        return FetchedPartition(error_code or -1, -1, position, 0)
    name_length, position = _read_uvarint(answer, position)
    _, position = _read_uvarint(answer, position + name_length - 1)
    error_code, high_watermark = struct.unpack_from(">hq", answer, position + 4)
    aborted, position = _read_uvarint(answer, position + 4 + 2 + 8 + 8 + 8)
    assert aborted <= 1, "the benchmark writes no transactions"
    length, position = _read_uvarint(answer, position + 4)
    return FetchedPartition(error_code, high_watermark, position, max(length - 1, 0))


def _frame(api_key: int, api_version: int, correlation_id: int, body: bytes) -> bytes:
    header = struct.pack(">hhih", api_key, api_version, correlation_id, len(_CLIENT_ID)) + _CLIENT_ID + _NO_TAGS
    return struct.pack(">i", len(header) + len(body)) + header + body


def _uvarint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _varint(value: int) -> bytes:
    return _uvarint(value << 1 if value >= 0 else (-value << 1) - 1)


def _compact_bytes(value: bytes) -> bytes:
    return _uvarint(len(value) + 1) + value


def _read_uvarint(buffer: memoryview | bytearray | bytes, position: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = buffer[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
        shift += 7
