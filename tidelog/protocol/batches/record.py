"""One record, and the zigzag varints of its fields.

`batch_builder.py` builds the bytes of whole batches, `records.py` decodes them. The tables hold the
varints of nearly all fields, so that neither module computes them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from tidelog.protocol.errors import ErrorCode, KafkaError

Headers = Sequence[tuple[str, bytes | None]]


class Record(NamedTuple):
    """One record. `timestamp` in ms since 1970; a header is (key, value), its value may be null."""

    offset: int
    timestamp: int
    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes | None], ...] = ()


RecordLike = Record | tuple[int, bytes | None, bytes | None, Headers]
"""Input of a batch: a Record, whose offset is ignored, or (timestamp, key, value, headers)."""


def encode_varint(value: int) -> bytes:
    """Zigzag varint of a signed number of at most 64 bits (Kafka's ByteUtils.writeVarlong)."""
    number = (value << 1) ^ (value >> 63)
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


TABLE_SIZE: Final = 2048
VARINTS: Final = [encode_varint(value) for value in range(TABLE_SIZE)] + [encode_varint(-1)]
"""The varints of 0 to 2047, and at index -1 the varint of -1, which is the length of a null."""

ZIGZAG: Final = tuple((number >> 1) ^ -(number & 1) for number in range(0x4000))
"""The signed value of the number in a varint of one or two bytes."""


def read_varint(data: bytes | bytearray | memoryview, position: int, max_bits: int) -> tuple[int, int]:
    """The slow path: read a varint of up to `max_bits` (32 or 64).

    Raises IndexError past the end.
    """
    number = shift = 0
    while True:
        byte = data[position]
        position += 1
        number |= (byte & 0x7F) << shift
        if byte < 0x80:
            break
        shift += 7
        if shift >= max_bits:
            raise KafkaError(ErrorCode.INVALID_RECORD, f"varint of more than {max_bits} bits")
    number &= (1 << max_bits) - 1
    return (number >> 1) ^ -(number & 1), position


def wrapped(timestamp: int) -> int:
    """The sum of a base and a delta in 64 bits, as Java adds: no timestamp makes a batch unreadable."""
    return (timestamp + 2**63) % 2**64 - 2**63
