"""Requests that mean something: filled at random, but with names, ids and batches that a fuzzed node knows.

Chance alone never names an existing topic. Which value a field gets is decided by its name, so that a new API needs
nothing here.
"""

from __future__ import annotations

from random import Random
from typing import Any

from tests.properties.test_messages_against_kio import fields_of, filled
from tidelog.protocol.batches.batch_builder import encode_batch
from tidelog.protocol.codec.fields import Field
from tidelog.protocol.codec.schema import Message

NOW_MS = 1_700_001_000_000
STAYS_RANDOM = 0.1

_NAMES: dict[str, list[Any]] = {
    "topic": ["t", "c"], "name": ["t", "c", "retention.ms", "cleanup.policy"], "topic_name": ["t"],
    "group_id": ["g", "h"], "group_ids": ["g"], "groups_names": ["g"], "member_id": ["", "f-0", "f-1", "f-2", "i-3"],
    "protocol_type": ["consumer"], "protocol_name": ["range"], "resource_name": ["t", "1", ""],
    "group_instance_id": ["i", "j"], "transactional_id": [None], "config_name": ["retention.ms", "segment.bytes"],
    "value": ["1000", "delete"], "cluster_id": [""], "coordinator_keys": ["g"], "key": ["g"],
}  # fmt: skip
_NUMBERS: dict[str, list[Any]] = {
    "partition_index": [0, 1], "partition": [0, 1], "index": [0, 1], "partition_indexes": [0, 1], "partitions": [0, 1],
    "acks": [-1, 0, 1], "timeout_ms": [0, 100], "max_wait_ms": [0, 50], "min_bytes": [0, 1], "max_bytes": [1 << 20],
    "partition_max_bytes": [1 << 16, 1], "fetch_offset": [0, 1, 5], "offset": [0, 1, -1], "timestamp": [-1, -2, 0],
    "current_leader_epoch": [-1, 0], "leader_epoch": [-1, 0], "replica_id": [-1], "session_id": [0],
    "session_epoch": [-1, 0], "isolation_level": [0, 1], "session_timeout_ms": [10_000],
    "rebalance_timeout_ms": [1_000], "generation_id": [-1, 1], "generation_id_or_member_epoch": [-1],
    "resource_type": [2, 4], "committed_offset": [5], "num_partitions": [1, 3], "replication_factor": [1, -1],
    "count": [3, 4], "key_type": [0], "config_operation": [0, 1, 2, 3], "broker_ids": [1], "replicas": [1],
    "last_fetched_epoch": [-1, 0], "log_start_offset": [-1], "producer_id": [-1, 0, 1], "producer_epoch": [-1, 0],
    "transaction_timeout_ms": [1000], "retention_time_ms": [-1],
}  # fmt: skip


def plausible(rng: Random, message: type[Message], version: int, topic_id: bytes) -> Message:
    """One of `message` for a node where topic `t` has this id."""
    request = filled(rng, message, version)
    _mend(rng, request, version, topic_id)
    return request


def _mend(rng: Random, message: Message, version: int, topic_id: bytes) -> None:
    for name, field in fields_of(type(message), version):
        value: Any = getattr(message, name)
        if isinstance(value, Message):
            _mend(rng, value, version, topic_id)
        elif isinstance(value, list) and value and isinstance(value[0], Message):
            for each in value:
                _mend(rng, each, version, topic_id)
        elif rng.random() >= STAYS_RANDOM:
            setattr(message, name, _value(rng, name, field, version, value, topic_id))


def _value(rng: Random, name: str, field: Field, version: int, value: Any, topic_id: bytes) -> Any:
    kind = field.element if field.kind == "array" else field.kind
    if isinstance(kind, type):
        return value
    if kind == "records":
        return _batch(rng)
    if kind == "uuid":
        known: list[Any] = [topic_id]
    elif kind == "string":
        may_be_null = field.kind != "array" and version in field.nullable
        known = [each for each in _NAMES.get(name, [None]) if each is not None or may_be_null]
    else:
        known = _NUMBERS.get(name, [])
    if not known:
        return value
    if field.kind == "array":
        return [rng.choice(known)] if value is not None else value
    return rng.choice(known)


def _batch(rng: Random) -> bytes:
    records = [(NOW_MS + n, b"key-%d" % (n % 3), b"value" * rng.randint(0, 5), ()) for n in range(rng.randint(1, 4))]
    options: dict[str, Any] = {"compression": rng.randrange(5)}
    if rng.random() < 0.3:
        options |= {"producer_id": rng.randrange(2), "producer_epoch": 0, "base_sequence": rng.choice([0, 1])}
    return bytes(encode_batch(records, **options))
