"""Encoding and decoding of metadata records, and the record versions of each metadata.version.

A framed record of an unknown kind decodes to `UnknownRecord`, which encodes to the same bytes. A
log of a newer Kafka therefore stays readable and loses nothing. The rules are those of Kafka's
`MetadataVersion` and `MetadataRecordSerde`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from tidelog.protocol.codec.schema import Message
from tidelog.protocol.errors import MalformedMessage
from tidelog.protocol.messages import metadata_records as kafka

# The metadata.version levels that changed records or behaviour.
LOWEST_METADATA_VERSION = 7  # 3.3-IV3, the oldest that Kafka 4 can read
CONTROLLERS_VERSION = 15  # 3.7-IV0: registrations of controllers
DIRECTORIES_VERSION = 17  # 3.7-IV2
ELR_VERSION = 23  # 4.0-IV1
LATEST_METADATA_VERSION = 30  # 4.3-IV0
CORDONED_VERSION = 30  # cordoned log directories (KIP-1066)

# record -> (from metadata.version, record version), newest first
_VERSIONS: dict[type[Message], tuple[tuple[int, int], ...]] = {
    kafka.PartitionRecord: ((ELR_VERSION, 2), (DIRECTORIES_VERSION, 1), (0, 0)),
    kafka.PartitionChangeRecord: ((ELR_VERSION, 2), (DIRECTORIES_VERSION, 1), (0, 0)),
    kafka.RegisterBrokerRecord: ((LATEST_METADATA_VERSION, 4), (DIRECTORIES_VERSION, 3), (8, 2), (0, 1)),
    kafka.BrokerRegistrationChangeRecord: ((LATEST_METADATA_VERSION, 3), (DIRECTORIES_VERSION, 2), (0, 1)),
}


_FRAME_VERSION = 1
_KINDS: dict[int, type[Message]] = {
    kind.API_KEY: kind
    for kind in vars(kafka).values()
    if isinstance(kind, type) and issubclass(kind, Message) and hasattr(kind, "API_KEY") and kind.API_KEY is not None
}


class UnknownRecord(NamedTuple):
    """A framed record of an unknown kind or version."""

    value: bytes


def record_version(record: Any, metadata_version: int) -> int:
    """The version of the record that Kafka writes at this metadata.version."""
    for since, version in _VERSIONS.get(type(record), ()):
        if metadata_version >= since:
            return version
    return 0


def encode_record(record: Any, metadata_version: int) -> bytes:
    """The value of one record in the metadata log."""
    if isinstance(record, UnknownRecord):
        return record.value
    version = record_version(record, metadata_version)
    out = bytearray((_FRAME_VERSION, type(record).API_KEY, version))  # varints, all below 128
    record.write(out, version)
    return bytes(out)


def decode_record(value: bytes) -> Any:
    """A record of `metadata_records`, or `UnknownRecord`. Raises `MalformedMessage`
    for a known kind that is broken.
    """
    if len(value) < 3 or value[0] != _FRAME_VERSION:
        raise MalformedMessage("a metadata record is not framed as version 1")
    kind, version = value[1], value[2]
    record_type = _KINDS.get(kind)
    if kind > 127 or record_type is None or version > 127 or version not in record_type.VERSIONS:
        return UnknownRecord(bytes(value))
    return record_type.read(value, 3, version)[0]
