"""The values a user of the client holds: partitions, records, offsets, descriptions.

Plain immutable tuples and dataclasses in Kafka's words; nothing here talks to anybody. Timestamps are milliseconds
since the epoch, offsets are absolute, -1 says "not known" wherever Kafka says so.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from tidelog.protocol.errors import KafkaError

EARLIEST_TIMESTAMP = -2
LATEST_TIMESTAMP = -1
MAX_TIMESTAMP = -3

CREATE_TIME = 0
LOG_APPEND_TIME = 1


class TopicPartition(NamedTuple):
    """One partition of one topic, the key of nearly every map in the client."""

    topic: str
    partition: int

    def __str__(self) -> str:
        return f"{self.topic}-{self.partition}"


def as_partition(given: Any) -> TopicPartition:
    """A TopicPartition, or a plain (topic, number). Raises TypeError for anything else, such as a topic's name."""
    if isinstance(given, tuple) and len(given) == 2 and isinstance(given[0], str) and isinstance(given[1], int):
        return given if isinstance(given, TopicPartition) else TopicPartition(*given)
    raise TypeError(f"expected a TopicPartition, not {given!r}")


def as_names(given: Iterable[str]) -> list[str]:
    """Topic names as a list. Raises TypeError for one string, which would be taken for many of one letter each."""
    names = given if isinstance(given, str) else list(given)
    if isinstance(names, str) or not all(isinstance(name, str) for name in names):
        raise TypeError(f"expected a list of topic names, not {names!r}")
    return names


class RecordMetadata(NamedTuple):
    """Where a record landed.

    `offset` is -1 when it is not known: with acks=0, when the broker only said that it was a duplicate, and when its
    acknowledgement was lost and the broker was killed. A batch that follows it proves then that it is in the log.
    """

    topic: str
    partition: int
    offset: int
    timestamp_ms: int


class ConsumerRecord(NamedTuple):
    """One record as a consumer sees it; `headers` is a tuple of (name, value or None)."""

    topic: str
    partition: int
    offset: int
    timestamp_ms: int
    timestamp_type: int
    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes | None], ...]
    leader_epoch: int


class OffsetAndMetadata(NamedTuple):
    """A position to commit: the next offset to read, and a free text kept beside it."""

    offset: int
    metadata: str = ""
    leader_epoch: int = -1


class OffsetAndTimestamp(NamedTuple):
    """The first offset whose timestamp is at or after the one asked for."""

    offset: int
    timestamp_ms: int
    leader_epoch: int = -1


@dataclass(frozen=True, slots=True)
class NewTopic:
    """A topic to create. -1 asks for the broker's own default; `replica_assignments` excludes the two numbers."""

    name: str
    num_partitions: int = -1
    replication_factor: int = -1
    configs: Mapping[str, str] = field(default_factory=dict)
    replica_assignments: Mapping[int, Sequence[int]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Node:
    """A broker as its clients reach it. `fenced`: registered, but not taking part at present."""

    node_id: int
    host: str
    port: int
    rack: str | None = None
    fenced: bool = False


@dataclass(frozen=True, slots=True)
class PartitionDescription:
    """Who holds a partition. `leader` is None while there is none."""

    partition: int
    leader: int | None
    leader_epoch: int
    replicas: tuple[int, ...]
    isr: tuple[int, ...]
    offline_replicas: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class TopicDescription:
    """A topic and its partitions in order. `topic_id` is 16 raw bytes, all zero from brokers that have none."""

    name: str
    topic_id: bytes
    internal: bool
    partitions: tuple[PartitionDescription, ...]


@dataclass(frozen=True, slots=True)
class ClusterDescription:
    """The cluster as one broker described it."""

    cluster_id: str | None
    controller_id: int
    nodes: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class PartitionReassignment:
    """A move under way: `replicas` are all that hold the partition meanwhile."""

    replicas: tuple[int, ...]
    adding: tuple[int, ...]
    removing: tuple[int, ...]

    @property
    def target(self) -> tuple[int, ...]:
        """The replicas when the move is done."""
        return tuple(replica for replica in self.replicas if replica not in self.removing)


class Replica(NamedTuple):
    """Of one partition on one broker."""

    topic: str
    partition: int
    broker_id: int


class ReplicaLogDirs(NamedTuple):
    """The log directory a replica lies in, and the one it is on its way to."""

    current: str | None = None
    future: str | None = None


class ReplicaSize(NamedTuple):
    """A replica in a log directory. `offset_lag`: behind the high watermark; if it is a future one, the current."""

    topic: str
    partition: int
    size_bytes: int
    offset_lag: int
    is_future: bool


@dataclass(frozen=True, slots=True)
class LogDirDescription:
    """A log directory of a broker. `error` is None while it can be used; sizes of the volume are -1 where not known."""

    path: str
    error: KafkaError | None
    replicas: tuple[ReplicaSize, ...]
    total_bytes: int = -1
    usable_bytes: int = -1
    is_cordoned: bool = False


@dataclass(frozen=True, slots=True)
class BrokerVersions:
    """What a broker serves: (lowest, highest) version by API key and by feature; finalized levels are the cluster's."""

    apis: Mapping[int, tuple[int, int]]
    supported_features: Mapping[str, tuple[int, int]]
    finalized_features: Mapping[str, int]
    finalized_epoch: int = -1


class ProducerState(NamedTuple):
    """A producer as a partition's leader knows it; -1 where there is nothing to tell."""

    producer_id: int
    producer_epoch: int
    last_sequence: int
    last_timestamp_ms: int
    coordinator_epoch: int
    transaction_start_offset: int


@dataclass(frozen=True, slots=True)
class QuorumReplica:
    """A voter or observer of the metadata quorum as its leader sees it; timestamps in ms, -1 where not known."""

    node_id: int
    directory_id: bytes
    log_end_offset: int
    last_fetch_ms: int
    last_caught_up_ms: int


@dataclass(frozen=True, slots=True)
class QuorumDescription:
    """The metadata quorum. `endpoints`: (listener, host, port) of each voter by id, empty from old brokers."""

    leader_id: int
    leader_epoch: int
    high_watermark: int
    voters: tuple[QuorumReplica, ...]
    observers: tuple[QuorumReplica, ...]
    endpoints: Mapping[int, tuple[tuple[str, str, int], ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ConfigEntry:
    """One configuration value; `source` as in DescribeConfigs: 1 topic, 2 and 3 dynamic, 4 static, 5 default."""

    name: str
    value: str | None
    source: int
    read_only: bool
    sensitive: bool
    synonyms: tuple[tuple[str, str | None, int], ...] = ()
    documentation: str | None = None

    @property
    def is_default(self) -> bool:
        return self.source == 5
