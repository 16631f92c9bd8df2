"""Kafka's variable-length primitives: varints, and the section of tagged fields.

Readers take (buffer, position) and return (value, next position); writers append to a bytearray. A
reader raises IndexError at the end of the buffer and MalformedMessage for an impossible value.
Callers with untrusted input convert the first into the second, as `schema.Message.read` does. A
skipped field may end beyond the buffer: then the next read, or the check at the end, fails.
"""

from __future__ import annotations

from tidelog.protocol.errors import MalformedMessage

Buffer = bytes | bytearray | memoryview

UVARINT_SIZE_MAX = 5  # 32 bits
VARLONG_SIZE_MAX = 10  # 64 bits
_INT32_LIMIT = 1 << 32
_INT64_LIMIT = 1 << 64


def read_uvarint(buffer: Buffer, position: int) -> tuple[int, int]:
    """Read an unsigned 32-bit varint, least significant seven bits first."""
    byte = buffer[position]
    position += 1
    if byte < 0x80:
        return byte, position
    return continue_uvarint(buffer, position, byte)


def continue_uvarint(buffer: Buffer, position: int, first: int) -> tuple[int, int]:
    """Read the rest of an unsigned varint after its `first` byte."""
    value = first & 0x7F
    shift = 7
    while True:
        byte = buffer[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            break
        shift += 7
        if shift > 28:
            raise MalformedMessage(f"varint of more than {UVARINT_SIZE_MAX} bytes")
    if value >= _INT32_LIMIT:
        raise MalformedMessage(f"varint {value} needs more than 32 bits")
    return value, position


def read_uvarlong(buffer: Buffer, position: int) -> tuple[int, int]:
    """Read an unsigned 64-bit varint."""
    value = shift = 0
    while True:
        byte = buffer[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            break
        shift += 7
        if shift > 63:
            raise MalformedMessage(f"varlong of more than {VARLONG_SIZE_MAX} bytes")
    if value >= _INT64_LIMIT:
        raise MalformedMessage(f"varlong {value} needs more than 64 bits")
    return value, position


def read_varint(buffer: Buffer, position: int) -> tuple[int, int]:
    """Read a signed 32-bit varint (zigzag), as in records."""
    value, position = read_uvarint(buffer, position)
    return (value >> 1) ^ -(value & 1), position


def write_uvarint(out: bytearray, value: int) -> None:
    """Append an unsigned varint. The caller checks the range of the value."""
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)


def write_varint(out: bytearray, value: int) -> None:
    """Append a signed 32-bit varint (zigzag)."""
    write_uvarint(out, (value << 1) ^ (value >> 31))


def skip_tagged_fields(buffer: Buffer, position: int, count: int) -> int:
    """The position after `count` unknown tagged fields."""
    while count:
        _, position = read_uvarint(buffer, position)
        size_bytes, position = read_uvarint(buffer, position)
        position += size_bytes
        count -= 1
    return position
