"""Records of `__cluster_metadata`, all of Kafka 4.3's, and their frame.

A record's value is: frame version 1, record type, message version (unsigned varints), message
(`frame`, `unframe`). `API_KEY` is the record type. The metadata.version feature decides which
version is written. Every version is readable.
"""

from __future__ import annotations

from tidelog.protocol.codec.primitives import read_uvarint, write_uvarint
from tidelog.protocol.codec.schema import (
    Bytes,
    Message,
    array,
    boolean,
    byte_string,
    float64,
    int8,
    int16,
    int32,
    int64,
    string,
    uint16,
    uuid,
)
from tidelog.protocol.errors import KafkaError, MalformedMessage


class BrokerEndpoint(Message):
    name: str = string()
    host: str = string()
    port: int = uint16()
    security_protocol: int = int16()


class BrokerFeature(Message):
    name: str = string()
    min_supported_version: int = int16()
    max_supported_version: int = int16()


class RegisterBrokerRecord(Message, key=0, versions="0-4", flexible="0+"):
    broker_id: int = int32()
    is_migrating_zk_broker: bool = boolean("2+")
    incarnation_id: bytes = uuid()
    broker_epoch: int = int64()
    end_points: list[BrokerEndpoint] = array(BrokerEndpoint)
    features: list[BrokerFeature] = array(BrokerFeature)
    rack: str | None = string(nullable="0+")
    fenced: bool = boolean(default=True)
    in_controlled_shutdown: bool = boolean("1+")
    log_dirs: list[bytes] = array(uuid, "3+", tag=0)
    cordoned_log_dirs: list[bytes] | None = array(uuid, "4+", nullable="4+", default=None, tag=1)


class UnregisterBrokerRecord(Message, key=1, versions="0", flexible="0+"):
    broker_id: int = int32()
    broker_epoch: int = int64()


class TopicRecord(Message, key=2, versions="0", flexible="0+"):
    name: str = string()
    topic_id: bytes = uuid()


class PartitionRecord(Message, key=3, versions="0-2", flexible="0+"):
    partition_id: int = int32(default=-1)
    topic_id: bytes = uuid()
    replicas: list[int] = array(int32)
    isr: list[int] = array(int32)
    removing_replicas: list[int] = array(int32)
    adding_replicas: list[int] = array(int32)
    leader: int = int32(default=-1)
    leader_recovery_state: int = int8(tag=0)
    leader_epoch: int = int32(default=-1)
    partition_epoch: int = int32(default=-1)
    directories: list[bytes] = array(uuid, "1+")
    eligible_leader_replicas: list[int] | None = array(int32, "2+", nullable="2+", default=None, tag=1)
    last_known_elr: list[int] | None = array(int32, "2+", nullable="2+", default=None, tag=2)


class ConfigRecord(Message, key=4, versions="0", flexible="0+"):
    resource_type: int = int8()
    resource_name: str = string()
    name: str = string()
    value: str | None = string(nullable="0+")


class PartitionChangeRecord(Message, key=5, versions="0-2", flexible="0+"):
    partition_id: int = int32(default=-1)
    topic_id: bytes = uuid()
    isr: list[int] | None = array(int32, nullable="0+", default=None, tag=0)
    leader: int = int32(default=-2, tag=1)
    replicas: list[int] | None = array(int32, nullable="0+", default=None, tag=2)
    removing_replicas: list[int] | None = array(int32, nullable="0+", default=None, tag=3)
    adding_replicas: list[int] | None = array(int32, nullable="0+", default=None, tag=4)
    leader_recovery_state: int = int8(default=-1, tag=5)
    directories: list[bytes] | None = array(uuid, "1+", nullable="1+", default=None, tag=8)
    eligible_leader_replicas: list[int] | None = array(int32, "2+", nullable="2+", default=None, tag=6)
    last_known_elr: list[int] | None = array(int32, "2+", nullable="2+", default=None, tag=7)


class FenceBrokerRecord(Message, key=7, versions="0", flexible="0+"):
    id: int = int32()
    epoch: int = int64()


class UnfenceBrokerRecord(Message, key=8, versions="0", flexible="0+"):
    id: int = int32()
    epoch: int = int64()


class RemoveTopicRecord(Message, key=9, versions="0", flexible="0+"):
    topic_id: bytes = uuid()


class DelegationTokenRecord(Message, key=10, versions="0", flexible="0+"):
    owner: str = string()
    requester: str = string()
    renewers: list[str] = array(string)
    issue_timestamp: int = int64()
    max_timestamp: int = int64()
    expiration_timestamp: int = int64()
    token_id: str = string()


class UserScramCredentialRecord(Message, key=11, versions="0", flexible="0+"):
    name: str = string()
    mechanism: int = int8()
    salt: bytes = byte_string()
    stored_key: bytes = byte_string()
    server_key: bytes = byte_string()
    iterations: int = int32()


class FeatureLevelRecord(Message, key=12, versions="0", flexible="0+"):
    name: str = string()
    feature_level: int = int16()


class EntityData(Message):
    entity_type: str = string()
    entity_name: str | None = string(nullable="0+")


class ClientQuotaRecord(Message, key=14, versions="0", flexible="0+"):
    entity: list[EntityData] = array(EntityData)
    key: str = string()
    value: float = float64()
    remove: bool = boolean()


class ProducerIdsRecord(Message, key=15, versions="0", flexible="0+"):
    broker_id: int = int32()
    broker_epoch: int = int64(default=-1)
    next_producer_id: int = int64()


class BrokerRegistrationChangeRecord(Message, key=17, versions="0-3", flexible="0+"):
    broker_id: int = int32()
    broker_epoch: int = int64()
    fenced: int = int8(tag=0)
    in_controlled_shutdown: int = int8("1+", tag=1)
    log_dirs: list[bytes] = array(uuid, "2+", tag=2)
    cordoned_log_dirs: list[bytes] | None = array(uuid, "3+", nullable="3+", default=None, tag=3)


class AccessControlEntryRecord(Message, key=18, versions="0", flexible="0+"):
    id: bytes = uuid()
    resource_type: int = int8()
    resource_name: str = string()
    pattern_type: int = int8()
    principal: str = string()
    host: str = string()
    operation: int = int8()
    permission_type: int = int8()


class RemoveAccessControlEntryRecord(Message, key=19, versions="0", flexible="0+"):
    id: bytes = uuid()


class NoOpRecord(Message, key=20, versions="0", flexible="0+"):
    pass


class ZkMigrationStateRecord(Message, key=21, versions="0", flexible="0+"):
    zk_migration_state: int = int8()


class RemoveUserScramCredentialRecord(Message, key=22, versions="0", flexible="0+"):
    name: str = string()
    mechanism: int = int8()


class BeginTransactionRecord(Message, key=23, versions="0", flexible="0+"):
    name: str | None = string(nullable="0+", default=None, tag=0)


class EndTransactionRecord(Message, key=24, versions="0", flexible="0+"):
    pass


class AbortTransactionRecord(Message, key=25, versions="0", flexible="0+"):
    reason: str | None = string(nullable="0+", default=None, tag=0)


class RemoveDelegationTokenRecord(Message, key=26, versions="0", flexible="0+"):
    token_id: str = string()


class ControllerEndpoint(Message):
    name: str = string()
    host: str = string()
    port: int = uint16()
    security_protocol: int = int16()


class ControllerFeature(Message):
    name: str = string()
    min_supported_version: int = int16()
    max_supported_version: int = int16()


class RegisterControllerRecord(Message, key=27, versions="0", flexible="0+"):
    controller_id: int = int32()
    incarnation_id: bytes = uuid()
    zk_migration_ready: bool = boolean()
    end_points: list[ControllerEndpoint] = array(ControllerEndpoint)
    features: list[ControllerFeature] = array(ControllerFeature)


class ClearElrRecord(Message, key=28, versions="0", flexible="0+"):
    topic_name: str = string()


RECORD_TYPES: dict[int, type[Message]] = {
    kind.API_KEY: kind
    for kind in list(globals().values())
    if isinstance(kind, type) and issubclass(kind, Message) and kind.API_KEY is not None
}

_FRAME_VERSION = 1


def frame(record: Message, version: int) -> bytes:
    """The value of a metadata log record. Raises as `Message.encode`."""
    record_type = record.API_KEY
    assert record_type is not None, f"{type(record).__name__} is no record of its own"
    out = bytearray((_FRAME_VERSION,))
    write_uvarint(out, record_type)
    write_uvarint(out, version)
    record.write(out, version)
    return bytes(out)


def unframe(value: Bytes) -> Message:
    """The record in a value that `frame` or Kafka wrote; MalformedMessage for anything else, also
    unknown types.
    """
    try:
        frame_version, position = read_uvarint(value, 0)
        record_type, position = read_uvarint(value, position)
        version, position = read_uvarint(value, position)
    except IndexError as error:
        raise MalformedMessage("a metadata record ends inside its frame") from error
    if frame_version != _FRAME_VERSION:
        raise MalformedMessage(f"metadata record frame of version {frame_version}")
    kind = RECORD_TYPES.get(record_type)
    if kind is None:
        raise MalformedMessage(f"metadata record of unknown type {record_type}")
    try:
        return kind.decode(value[position:], version)
    except KafkaError as error:
        raise MalformedMessage(str(error)) from error
