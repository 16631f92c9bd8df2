"""Keys and values of the coordinators' records, as they lie in internal topics.

A key starts with its type (int16), which is the API_KEY of its declaration, a value with its version
(int16). The declarations are in `group_records` and `transaction_records`.
"""

from __future__ import annotations

from struct import Struct
from typing import TypeVar

from tidelog.protocol.codec.schema import Bytes, Message
from tidelog.protocol.errors import KafkaError, MalformedMessage

M = TypeVar("M", bound=Message)

_PREFIX = Struct(">h")
PREFIX_BYTES = _PREFIX.size


def encode_key(key: Message) -> bytes:
    """A record's key: the type, then the key itself."""
    assert key.API_KEY is not None
    return _PREFIX.pack(key.API_KEY) + key.encode(0)


def encode_value(value: Message, version: int) -> bytes:
    """A record's value: the version, then the value itself. Raises as `Message.encode`."""
    return _PREFIX.pack(version) + value.encode(version)


def decode_value(kind: type[M], data: Bytes) -> M:
    """The value of a record whose key says it is a `kind`. Raises MalformedMessage.

    Versions later than ours only add tagged fields (KIP-915), so they are read as our last one.
    """
    version = min(prefix_of(data), kind.VERSIONS.stop - 1)
    try:
        return kind.decode(data[PREFIX_BYTES:], version)
    except KafkaError as error:
        raise MalformedMessage(str(error)) from error


def prefix_of(data: Bytes) -> int:
    """The type of a key, or the version of a value. Raises MalformedMessage."""
    if len(data) < PREFIX_BYTES:
        raise MalformedMessage("a coordinator record without its two-byte prefix")
    prefix: int = _PREFIX.unpack_from(data)[0]
    return prefix
