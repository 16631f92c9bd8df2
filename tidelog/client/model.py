"""The values of the client's API: partitions, records, offsets, descriptions.

Plain immutable tuples and dataclasses in Kafka's terms. Nothing here does network I/O. Timestamps
are milliseconds since the epoch. Offsets are absolute. -1 means "unknown" where Kafka uses it so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from tidelog.protocol.errors import ErrorCode, KafkaError

EARLIEST_TIMESTAMP = -2
LATEST_TIMESTAMP = -1
MAX_TIMESTAMP = -3

CREATE_TIME = 0
LOG_APPEND_TIME = 1


TRANSACTION_STATES = (
    "Empty", "Ongoing", "PrepareCommit", "PrepareAbort", "CompleteCommit", "CompleteAbort", "Dead", "PrepareEpochFence",
)  # fmt: skip


class TopicPartition(NamedTuple):
    """One partition of one topic, the key of nearly every map in the client."""

    topic: str
    partition: int

    def __str__(self) -> str:
        return f"{self.topic}-{self.partition}"


class PartitionErrors(KafkaError):
    """The leaders of some partitions have failed: `errors` has the KafkaError of each, `answers` the results of the
    other partitions. It is itself the error that ended the call.
    """

    def __init__(
        self,
        code: ErrorCode,
        message: str | None = None,
        answers: Mapping[TopicPartition, Any] | None = None,
        errors: Mapping[TopicPartition, KafkaError] | None = None,
    ) -> None:
        super().__init__(code, message)
        self.answers: Mapping[TopicPartition, Any] = answers or {}
        self.errors: Mapping[TopicPartition, KafkaError] = errors or {}


class BrokerErrors(KafkaError):
    """Some brokers have failed: `errors` has the KafkaError of each by broker id, `answers` what the call returns for
    the others. It is itself the error that ended the call.
    """

    def __init__(
        self,
        code: ErrorCode,
        message: str | None = None,
        answers: Any = None,
        errors: Mapping[int, KafkaError] | None = None,
    ) -> None:
        super().__init__(code, message)
        self.answers = answers
        self.errors: Mapping[int, KafkaError] = errors or {}


class RecordMetadata(NamedTuple):
    """The position of a sent record in the log.

    `offset` is -1 when it is unknown: with acks=0, when the broker reported a duplicate, and when
    the acknowledgement was lost and the broker was killed. In the last case a later batch proves
    that the record is in the log.
    """

    topic: str
    partition: int
    offset: int
    timestamp_ms: int


class ProducerRecord(NamedTuple):
    """One record of `send_many` and `send_batch`. `value` and `key` as for `send`."""

    value: Any = None
    key: Any = None
    headers: Sequence[tuple[str, bytes | None]] = ()
    partition: int | None = None
    timestamp_ms: int | None = None


class WrittenRange(NamedTuple):
    """Consecutive records of one call in the log: `record_count` offsets from `base_offset` on.

    `base_offset` is -1 when it is unknown, as `RecordMetadata.offset`.
    """

    topic: str
    partition: int
    base_offset: int
    record_count: int


class ConsumerRecord(NamedTuple):
    """One consumed record. `headers` is a tuple of (name, value or None)."""

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
    """A position to commit: the next offset to read, and free text stored with it."""

    offset: int
    metadata: str = ""
    leader_epoch: int = -1


class ConsumerGroupMetadata(NamedTuple):
    """A member of a consumer group, for `send_offsets_to_transaction`.

    With the defaults the group's coordinator does not check whether the member is still one.
    """

    group_id: str
    generation_id: int = -1
    member_id: str = ""
    group_instance_id: str | None = None


class OffsetAndTimestamp(NamedTuple):
    """The first offset with a timestamp at or after the requested one."""

    offset: int
    timestamp_ms: int
    leader_epoch: int = -1


@dataclass(frozen=True, slots=True)
class NewTopic:
    """A topic to create. -1 means the broker's default.

    `replica_assignments`, broker ids by partition, excludes the two numbers: ValueError with both.
    """

    name: str
    num_partitions: int = -1
    replication_factor: int = -1
    configs: Mapping[str, str] = field(default_factory=dict)
    replica_assignments: Mapping[int, Sequence[int]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Node:
    """A broker and its address for clients. `fenced`: registered, but not active at present."""

    node_id: int
    host: str
    port: int
    rack: str | None = None
    fenced: bool = False


@dataclass(frozen=True, slots=True)
class PartitionDescription:
    """A partition and its replicas. `leader` is None without a leader."""

    partition: int
    leader: int | None
    leader_epoch: int
    replicas: tuple[int, ...]
    isr: tuple[int, ...]
    offline_replicas: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class TopicDescription:
    """A topic and its partitions in order.

    `topic_id` is 16 raw bytes, all zero from brokers without topic ids.
    """

    name: str
    topic_id: bytes
    internal: bool
    partitions: tuple[PartitionDescription, ...]


@dataclass(frozen=True, slots=True)
class ClusterDescription:
    """The cluster as described by one broker."""

    cluster_id: str | None
    controller_id: int
    nodes: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class PartitionReassignment:
    """An ongoing reassignment. `replicas` are all replicas during the move."""

    replicas: tuple[int, ...]
    adding: tuple[int, ...]
    removing: tuple[int, ...]

    @property
    def target(self) -> tuple[int, ...]:
        """The replicas after the move."""
        return tuple(replica for replica in self.replicas if replica not in self.removing)


class Replica(NamedTuple):
    """The replica of one partition on one broker."""

    topic: str
    partition: int
    broker_id: int


class ReplicaLogDirs(NamedTuple):
    """The log directory of a replica, and the target directory of its move."""

    current: str | None = None
    future: str | None = None


class ReplicaSize(NamedTuple):
    """A replica in a log directory.

    `offset_lag`: behind the high watermark; if it is a future one, the current.
    """

    topic: str
    partition: int
    size_bytes: int
    offset_lag: int
    is_future: bool


@dataclass(frozen=True, slots=True)
class LogDirDescription:
    """A log directory of a broker.

    `error` is None while it can be used; sizes of the volume are -1 where not known.
    """

    path: str
    error: KafkaError | None
    replicas: tuple[ReplicaSize, ...]
    total_bytes: int = -1
    usable_bytes: int = -1
    is_cordoned: bool = False


@dataclass(frozen=True, slots=True)
class BrokerVersions:
    """What a broker serves: (lowest, highest) version by API key and by feature; finalized levels
    are the cluster's.
    """

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
class TransactionListing:
    """A transactional id in the list of its coordinator."""

    transactional_id: str
    producer_id: int
    state: str
    coordinator_id: int


@dataclass(frozen=True, slots=True)
class TransactionDescription:
    """A transactional id and its transaction.

    `start_time_ms` is None without an open transaction. `partitions` are those that have no marker
    yet.
    """

    transactional_id: str
    state: str
    producer_id: int
    producer_epoch: int
    timeout_ms: int
    start_time_ms: int | None
    partitions: tuple[TopicPartition, ...]
    coordinator_id: int


@dataclass(frozen=True, slots=True)
class OpenTransaction:
    """A transaction that is open in a partition.

    `description` is None when no coordinator knows the producer id. `is_expected` says whether a
    coordinator will end it in this partition; otherwise it hangs, unless it ended meanwhile.
    """

    partition: TopicPartition
    producer: ProducerState
    description: TransactionDescription | None

    @property
    def is_expected(self) -> bool:
        return self.description is not None and self.partition in self.description.partitions

    @property
    def open_since_ms(self) -> int:
        """The start of the transaction, or the last write of its producer where only that is known."""
        start_ms = self.description.start_time_ms if self.description is not None and self.is_expected else None
        return self.producer.last_timestamp_ms if start_ms is None else start_ms


@dataclass(frozen=True, slots=True)
class BlockedPartition:
    """A partition whose last stable offset is held back by an open transaction."""

    partition: TopicPartition
    last_stable_offset: int
    high_watermark: int
    blocker: OpenTransaction


@dataclass(frozen=True, slots=True)
class QuorumReplica:
    """A voter or observer of the metadata quorum in its leader's view.

    Timestamps in ms, -1 when unknown.
    """

    node_id: int
    directory_id: bytes
    log_end_offset: int
    last_fetch_ms: int
    last_caught_up_ms: int


@dataclass(frozen=True, slots=True)
class QuorumDescription:
    """The metadata quorum.

    `endpoints`: (listener, host, port) of each voter by id, empty from old brokers.
    """

    leader_id: int
    leader_epoch: int
    high_watermark: int
    voters: tuple[QuorumReplica, ...]
    observers: tuple[QuorumReplica, ...]
    endpoints: Mapping[int, tuple[tuple[str, str, int], ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ConfigEntry:
    """One configuration value; `source` as in DescribeConfigs: 1 topic, 2 and 3 dynamic, 4 static,
    5 default.
    """

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
