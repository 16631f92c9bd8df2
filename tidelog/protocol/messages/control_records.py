"""Values of control records: transaction markers, and the metadata log's records about itself.

Each value starts with its version (int16): a prefix for `EndTxnMarker`, the first field for the
others. `batches.control_batches` has their keys, an int16 version and an int16 type. Kafka has two
structs called `Voter` here; their names here start with the name of the message.
"""

from __future__ import annotations

from struct import Struct
from typing import TypeVar

from tidelog.protocol.codec.schema import Bytes, Message, array, int16, int32, int64, string, struct, uint16, uuid
from tidelog.protocol.errors import KafkaError, MalformedMessage

M = TypeVar("M", bound=Message)

_VERSION = Struct(">h")


class EndTxnMarker(Message, versions="0"):
    coordinator_epoch: int = int32()


class LeaderChangeMessageVoter(Message):
    voter_id: int = int32()
    voter_directory_id: bytes = uuid("1+")


class LeaderChangeMessage(Message, versions="0-1", flexible="0+"):
    version: int = int16()
    leader_id: int = int32()
    voters: list[LeaderChangeMessageVoter] = array(LeaderChangeMessageVoter)
    granting_voters: list[LeaderChangeMessageVoter] = array(LeaderChangeMessageVoter)


class SnapshotHeaderRecord(Message, versions="0", flexible="0+"):
    version: int = int16()
    last_contained_log_timestamp: int = int64()


class SnapshotFooterRecord(Message, versions="0", flexible="0+"):
    version: int = int16()


class KRaftVersionRecord(Message, versions="0", flexible="0+"):
    version: int = int16()
    k_raft_version: int = int16()


class Endpoint(Message):
    name: str = string()
    host: str = string()
    port: int = uint16()


class KRaftVersionFeature(Message):
    min_supported_version: int = int16()
    max_supported_version: int = int16()


class VotersRecordVoter(Message):
    voter_id: int = int32()
    voter_directory_id: bytes = uuid()
    endpoints: list[Endpoint] = array(Endpoint)
    k_raft_version_feature: KRaftVersionFeature = struct(KRaftVersionFeature)


class VotersRecord(Message, versions="0", flexible="0+"):
    version: int = int16()
    voters: list[VotersRecordVoter] = array(VotersRecordVoter)


def encode_control_value(value: Message, version: int = 0) -> bytes:
    """The value of a control record.

    `version` must equal the message's own `version` field, if it has one.
    """
    if isinstance(value, EndTxnMarker):
        return _VERSION.pack(version) + value.encode(version)
    assert getattr(value, "version") == version, f"{value} is to be written as version {version}"  # noqa: B009
    return value.encode(version)


def decode_control_value(kind: type[M], data: Bytes) -> M:
    """The value of a control record whose key says it is a `kind`. Raises MalformedMessage.

    A version later than ours is read as our last one and what follows is ignored, as in Kafka.
    """
    if len(data) < _VERSION.size:
        raise MalformedMessage("a control record's value without its version")
    version = min(_VERSION.unpack_from(data)[0], kind.VERSIONS.stop - 1)
    position = _VERSION.size if issubclass(kind, EndTxnMarker) else 0
    try:
        return kind.read(data, position, version)[0]
    except KafkaError as error:
        raise MalformedMessage(str(error)) from error
