"""The cluster's metadata as one value: the result of replaying the metadata log up to an offset.

Invariant: a published image never changes. `records.py` builds the next image, which shares the
unchanged parts. Therefore a request may use an image across an await, and the controller may keep
uncommitted images. (The dataclasses have slots and are not frozen: freezing makes construction four
times as expensive, and a topic has thousands of partitions.)
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tidelog.protocol.internal_topics import INTERNAL_TOPICS
from tidelog.protocol.uuids import LOST_DIRECTORY, MIGRATING_DIRECTORY, UNASSIGNED_DIRECTORY

NO_LEADER = -1
NO_LEADER_CHANGE = -2
RECOVERED = 0
RECOVERING = 1

# ConfigRecord resource types (org.apache.kafka.common.config.ConfigResource.Type).
TOPIC_RESOURCE = 2
BROKER_RESOURCE = 4
BROKER_LOGGER_RESOURCE = 8
CLIENT_METRICS_RESOURCE = 16
GROUP_RESOURCE = 32

METADATA_VERSION = "metadata.version"
ELR_FEATURE = "eligible.leader.replicas.version"
TRANSACTION_VERSION = "transaction.version"  # 2: each transaction has an epoch of its own (KIP-890)


@dataclass(slots=True)
class PartitionImage:
    """One partition (Kafka's PartitionRegistration). `leader` is -1 while there is none."""

    replicas: tuple[int, ...]
    isr: tuple[int, ...]
    leader: int
    leader_epoch: int = 0
    partition_epoch: int = 0
    directories: tuple[bytes, ...] = ()
    removing_replicas: tuple[int, ...] = ()
    adding_replicas: tuple[int, ...] = ()
    leader_recovery_state: int = RECOVERED
    elr: tuple[int, ...] = ()
    last_known_elr: tuple[int, ...] = ()

    def directory_of(self, node_id: int) -> bytes:
        """The assigned log directory of this replica, or UNASSIGNED_DIRECTORY."""
        for replica, directory in zip(self.replicas, self.directories):
            if replica == node_id:
                return directory
        return UNASSIGNED_DIRECTORY


@dataclass(slots=True)
class TopicImage:
    name: str
    topic_id: bytes
    partitions: dict[int, PartitionImage] = field(default_factory=dict)

    @property
    def is_internal(self) -> bool:
        return self.name in INTERNAL_TOPICS


@dataclass(slots=True)
class EndpointImage:
    """The address of a node's listener.

    `security_protocol`: 0 PLAINTEXT, 1 SSL, 2 SASL_PLAINTEXT, 3 SASL_SSL.
    """

    name: str
    host: str
    port: int
    security_protocol: int = 0


@dataclass(slots=True)
class BrokerImage:
    """One broker's registration; `features` maps names to (lowest, highest) level it supports."""

    node_id: int
    epoch: int
    incarnation_id: bytes
    endpoints: dict[str, EndpointImage]
    features: dict[str, tuple[int, int]] = field(default_factory=dict)
    rack: str | None = None
    fenced: bool = True
    in_controlled_shutdown: bool = False
    log_dirs: tuple[bytes, ...] = ()
    cordoned_log_dirs: tuple[bytes, ...] = ()

    @property
    def is_active(self) -> bool:
        """Whether the broker may lead and join an ISR."""
        return not self.fenced and not self.in_controlled_shutdown

    def has_lost(self, directory: bytes) -> bool:
        """Whether a replica in this log directory cannot be used, as after a failure of its disk."""
        if directory in (UNASSIGNED_DIRECTORY, MIGRATING_DIRECTORY):
            return False
        return directory == LOST_DIRECTORY or bool(self.log_dirs and directory not in self.log_dirs)


@dataclass(slots=True)
class ControllerImage:
    node_id: int
    incarnation_id: bytes
    endpoints: dict[str, EndpointImage]
    features: dict[str, tuple[int, int]] = field(default_factory=dict)


@dataclass(slots=True)
class MetadataImage:
    """The metadata up to and including `offset`, written in leader epoch `epoch`.

    `carried` holds, by identity, the records that this version of Tidelog keeps but does not apply
    (ACLs, quotas, credentials, unknown kinds). Snapshots contain them unchanged, so that nothing is
    lost on the way back to Kafka.
    """

    offset: int = -1
    epoch: int = 0
    timestamp_ms: int = -1
    controller_id: int = -1
    brokers: dict[int, BrokerImage] = field(default_factory=dict)
    controllers: dict[int, ControllerImage] = field(default_factory=dict)
    topics_by_name: dict[str, TopicImage] = field(default_factory=dict)
    topics_by_id: dict[bytes, TopicImage] = field(default_factory=dict)
    configs: dict[tuple[int, str], dict[str, str]] = field(default_factory=dict)
    features: dict[str, int] = field(default_factory=dict)
    next_producer_id: int = 0
    carried: dict[tuple[object, ...], object] = field(default_factory=dict)

    def partition(self, topic: str, index: int) -> PartitionImage | None:
        topic_image = self.topics_by_name.get(topic)
        return None if topic_image is None else topic_image.partitions.get(index)

    def topic_config(self, topic: str) -> dict[str, str]:
        """The topic's own configs, without defaults. The caller must not change them."""
        return self.configs.get((TOPIC_RESOURCE, topic), {})

    def broker_config_layers(self, node_id: int) -> tuple[dict[str, str], dict[str, str]]:
        """Dynamic broker configs in order of precedence: the broker's own, then the cluster's."""
        return (
            self.configs.get((BROKER_RESOURCE, str(node_id)), {}),
            self.configs.get((BROKER_RESOURCE, ""), {}),
        )

    def feature_level(self, name: str) -> int:
        """The finalized level of a feature; 0 without a record."""
        return self.features.get(name, 0)


@dataclass(slots=True)
class MetadataDelta:
    """The difference between an image and the one published before it.

    `changed_partitions`: topic id -> partition indexes, those of created topics included.
    """

    created_topics: dict[bytes, TopicImage] = field(default_factory=dict)
    deleted_topics: dict[bytes, TopicImage] = field(default_factory=dict)
    changed_partitions: dict[bytes, set[int]] = field(default_factory=dict)
    changed_configs: set[tuple[int, str]] = field(default_factory=set)
    changed_brokers: set[int] = field(default_factory=set)
    changed_features: bool = False
