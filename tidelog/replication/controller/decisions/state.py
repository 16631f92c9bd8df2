"""The state of the controller's decisions, with the decisions about topics and producer ids. Pure.

Invariant: a decision changes no state. Only the replay of its records does (`adopt`,
after their append), so that a controller that takes over decides alike. Rules and
messages follow Kafka's `ReplicationControlManager`. Decisions about nodes are in
`brokers.py`, about leaders in `leaders.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from tidelog.protocol.errors import ErrorCode, KafkaError
from tidelog.protocol.java_text import parse_integer, trim
from tidelog.protocol.messages.metadata_records import (
    ConfigRecord,
    PartitionRecord,
    ProducerIdsRecord,
    RemoveTopicRecord,
    TopicRecord,
)
from tidelog.protocol.uuids import UNASSIGNED_DIRECTORY
from tidelog.replication.controller.decisions.partition_changes import ElectionRules, TopicRules
from tidelog.replication.controller.decisions.placement import place_replicas
from tidelog.replication.controller.decisions.supported_features import READS_BEFORE_REMOVAL
from tidelog.replication.controller.decisions.topic_names import (
    METADATA_TOPIC,
    collision_key,
    may_collide,
    topic_name_problem,
)
from tidelog.replication.controller.metadata.image import (
    ELR_FEATURE,
    METADATA_VERSION,
    TOPIC_RESOURCE,
    BrokerImage,
    MetadataDelta,
    MetadataImage,
    TopicImage,
)
from tidelog.replication.controller.metadata.partition_index import PartitionIndex
from tidelog.replication.controller.metadata.record_codec import DIRECTORIES_VERSION, ELR_VERSION

if TYPE_CHECKING:
    import random

PRODUCER_ID_BLOCK = 1000  # Kafka's PRODUCER_ID_BLOCK_SIZE
MAX_PARTITIONS_PER_REQUEST = 10_000  # Kafka's MAX_PARTITIONS_PER_BATCH
MAX_CONFIG_VALUE_LENGTH = 32_767
MAX_PRODUCER_ID = 2**63 - 1

Records = list[Any]
T = TypeVar("T")
Steps = Generator[None, None, tuple[Records, T]]
"""A decision that yields, so that others are served between two steps. It holds for the image with which it began."""
ELEMENTS_AT_ONCE = 100
NEW_PARTITIONS_AT_ONCE = 500
# Partitions whose ISR or directory a broker proposes. A broker of this cluster sends as many at most.
PROPOSALS_AT_ONCE = 2_000
# A creation of more yields before it begins: very many requests may arrive in one turn of the loop. The topics of the
# coordinators have 50 partitions and five configs: a first group must not wait behind others' large creations.
FEW_NEW_PARTITIONS = 60


def at_once(steps: Steps[T]) -> tuple[Records, T]:
    """All the steps."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            decided: tuple[Records, T] = end.value
            return decided


class NewTopic(NamedTuple):
    """A topic to create. A count of -1 is the cluster's default; `assignments` are (partition,
    replicas).
    """

    name: str
    partition_count: int = -1
    replication_factor: int = -1
    assignments: Sequence[tuple[int, Sequence[int]]] = ()
    configs: Sequence[tuple[str, str | None]] = ()


class CreatedTopic(NamedTuple):
    name: str
    topic_id: bytes
    partition_count: int
    replication_factor: int
    configs: dict[str, str]


class ProducerIdBlock(NamedTuple):
    """`size` producer ids from `first` on, allocated to one broker."""

    first: int
    size: int


def _no_problem(resource_type: int, configs: Mapping[str, str]) -> KafkaError | None:
    return None


def _no_list(resource_type: int, name: str) -> str | None:
    raise KeyError(name)


@dataclass(slots=True)
class ControllerSettings:
    """The controller's settings from its node's configuration.

    `config_problem(resource type, configs)`: the error of a resource's configs, or None (the broker
    knows the keys). `list_config_default(resource type, name)`: the default of a config of type
    LIST; KeyError for other types. `voters()`: the ids of the quorum's voters. `kraft_version()`:
    the quorum's feature level. An empty `cluster_id` is not checked.
    """

    default_partition_count: int = 1
    default_replication_factor: int = 1
    config_problem: Callable[[int, Mapping[str, str]], KafkaError | None] = _no_problem
    list_config_default: Callable[[int, str], str | None] = _no_list
    voters: Callable[[], Sequence[int]] = lambda: ()
    kraft_version: Callable[[], int] = lambda: 0
    cluster_id: str = ""
    min_insync_replicas: int = 1
    unclean_leader_election: bool = False
    session_timeout_ms: int = 9_000
    auto_rebalance: bool = True
    imbalance_percent: int = 10
    imbalance_check_interval_ms: int = 300_000
    unclean_check_interval_ms: int = 300_000
    inter_broker_listener: str = "PLAINTEXT"
    probe_timeout_ms: int = 200


@dataclass(slots=True)
class ControllerState:
    """The controller's newest image, committed or not, and the indexes that replay maintains."""

    settings: ControllerSettings
    rng: random.Random
    node_id: int = -1
    image: MetadataImage = field(default_factory=MetadataImage)
    index: PartitionIndex = field(default_factory=PartitionIndex)
    _collisions: dict[str, set[str]] = field(default_factory=dict)

    def adopt(self, image: MetadataImage, delta: MetadataDelta) -> None:
        """Decide on this image from now on, after the replay of its records."""
        self.index.update(self.image, image, delta)
        self.image = image
        for topic in delta.deleted_topics.values():
            if may_collide(topic.name):
                names = self._collisions[collision_key(topic.name)]
                names.discard(topic.name)
                if not names:
                    del self._collisions[collision_key(topic.name)]
        for topic in delta.created_topics.values():
            if may_collide(topic.name):
                self._collisions.setdefault(collision_key(topic.name), set()).add(topic.name)

    # -- rules from the image and the configuration ------------------------------------------------------------------

    @property
    def metadata_version(self) -> int:
        return self.image.feature_level(METADATA_VERSION)

    @property
    def elr_enabled(self) -> bool:
        return self.image.feature_level(ELR_FEATURE) > 0 and self.metadata_version >= ELR_VERSION

    def effective_topic_config(self, topic: str, name: str, static_value: str) -> str:
        """The topic's own value, else the controller's run-time one, else the
        cluster's, else `static_value`.
        """
        for configs in (self.image.topic_config(topic), *self.image.broker_config_layers(self.node_id)):
            if name in configs:
                return configs[name]
        return static_value

    def topic_rules(self, topic: TopicImage) -> TopicRules:
        settings = self.settings
        minimum = self.effective_topic_config(topic.name, "min.insync.replicas", str(settings.min_insync_replicas))
        return TopicRules(
            topic.topic_id,
            min(parse_integer(trim(minimum)), len(topic.partitions[0].replicas)),
            self.unclean_enabled(topic.name),
        )

    def unclean_enabled(self, topic: str) -> bool:
        static_value = "true" if self.settings.unclean_leader_election else "false"
        return (
            trim(self.effective_topic_config(topic, "unclean.leader.election.enable", static_value)).lower() == "true"
        )

    def election_rules(self, *, gone: Collection[int] = (), back: Collection[int] = ()) -> ElectionRules:
        """Brokers in `gone` may not lead; brokers in `back` may lead even if the image has them
        fenced.
        """
        return ElectionRules(
            electable={
                broker.node_id: broker.log_dirs
                for broker in self.image.brokers.values()
                if broker.node_id not in gone and (broker.is_active or broker.node_id in back)
            },
            elr_enabled=self.elr_enabled,
            metadata_version=self.metadata_version,
            default_directory=self.default_directory,
            readers={
                broker.node_id for broker in self.image.brokers.values() if READS_BEFORE_REMOVAL in broker.features
            },
        )

    def check_broker_epoch(self, broker_id: int, broker_epoch: int) -> None:
        """Raises KafkaError(BROKER_ID_NOT_REGISTERED, STALE_BROKER_EPOCH)."""
        broker = self.image.brokers.get(broker_id)
        if broker is None:
            raise KafkaError(ErrorCode.BROKER_ID_NOT_REGISTERED, f"Broker ID {broker_id} is not registered.")
        if broker.epoch != broker_epoch:
            raise KafkaError(
                ErrorCode.STALE_BROKER_EPOCH,
                f"Expected broker epoch {broker.epoch}, but got broker epoch {broker_epoch}",
            )

    # -- topics ------------------------------------------------------------------------------------------------------

    def create_topics(self, topics: Sequence[NewTopic]) -> tuple[Records, dict[str, CreatedTopic | KafkaError]]:
        """As `create_topics_in_steps`, in one."""
        return at_once(self.create_topics_in_steps(topics))

    def create_topics_in_steps(self, topics: Sequence[NewTopic]) -> Steps[dict[str, CreatedTopic | KafkaError]]:
        """Decide on each topic separately; names are distinct (the API's handler refuses
        duplicates).

        Raises KafkaError(POLICY_VIOLATION) for more partitions than one request may create.
        """
        records: Records = []
        results: dict[str, CreatedTopic | KafkaError] = {}
        partition_count = 0
        if sum(map(self._size_of, topics)) > FEW_NEW_PARTITIONS:
            yield
        size = 0  # of the topics since the last pause
        for number, topic in enumerate(topics):
            if number and (number % ELEMENTS_AT_ONCE == 0 or size >= NEW_PARTITIONS_AT_ONCE):
                size = 0
                yield
            size += len(topic.assignments) + len(topic.configs)
            try:
                topic_records, created_topic = yield from self._create_topic(topic)
            except KafkaError as error:
                results[topic.name] = error.with_traceback(None)  # its frames keep the results
                continue
            partition_count += created_topic.partition_count
            size += created_topic.partition_count
            if partition_count > MAX_PARTITIONS_PER_REQUEST:
                raise KafkaError(ErrorCode.POLICY_VIOLATION, "Excessively large number of partitions per request.")
            results[topic.name] = created_topic
            records += topic_records
        return records, results

    def _size_of(self, topic: NewTopic) -> int:
        """What a decision on this topic looks at: partitions, replicas and configs."""
        count = self.settings.default_partition_count if topic.partition_count == -1 else topic.partition_count
        return max(count, len(topic.assignments), 1) + len(topic.configs)

    def _create_topic(self, topic: NewTopic) -> Steps[CreatedTopic]:
        self._check_new_name(topic.name)
        configs = self._check_new_configs(topic.configs)
        if len(topic.assignments) > MAX_PARTITIONS_PER_REQUEST:
            raise KafkaError(ErrorCode.POLICY_VIOLATION, "Excessively large number of partitions per request.")
        if NEW_PARTITIONS_AT_ONCE < max(topic.partition_count, len(topic.assignments)) <= MAX_PARTITIONS_PER_REQUEST:
            yield
        if topic.assignments:
            assignments = self._manual_assignments(topic)
        else:
            assignments = self._automatic_assignments(topic)
        topic_id = self._new_id()
        records: Records = [TopicRecord(name=topic.name, topic_id=topic_id)]
        records += [
            ConfigRecord(resource_type=TOPIC_RESOURCE, resource_name=topic.name, name=name, value=value)
            for name, value in configs.items()
        ]
        for index, (replicas, isr) in enumerate(assignments):
            if index and index % NEW_PARTITIONS_AT_ONCE == 0:
                yield
            records.append(self.partition_record(topic_id, index, replicas, isr))
        created_topic = CreatedTopic(topic.name, topic_id, len(assignments), len(assignments[0][0]), configs)
        return records, created_topic

    def partition_record(self, topic_id: bytes, index: int, replicas: Sequence[int], isr: list[int]) -> PartitionRecord:
        """The record of a new partition, with the first ISR member as leader."""
        has_directories = self.metadata_version >= DIRECTORIES_VERSION
        return PartitionRecord(
            partition_id=index,
            topic_id=topic_id,
            replicas=list(replicas),
            isr=isr,
            leader=isr[0],
            leader_epoch=0,
            partition_epoch=0,
            directories=[self.default_directory(replica) for replica in replicas] if has_directories else [],
        )

    def _check_new_name(self, name: str) -> None:
        if name == METADATA_TOPIC:
            raise KafkaError(ErrorCode.INVALID_REQUEST, f"Creation of internal topic {name} is prohibited.")
        problem = topic_name_problem(name)
        if problem is None and may_collide(name):
            for other_name in sorted(self._collisions.get(collision_key(name), ())):
                if other_name != name:
                    problem = f"Topic '{name}' collides with existing topic: {other_name}"
                    break
        if problem is not None:
            raise KafkaError(ErrorCode.INVALID_TOPIC_EXCEPTION, problem)
        if name in self.image.topics_by_name:
            raise KafkaError(ErrorCode.TOPIC_ALREADY_EXISTS, f"Topic '{name}' already exists.")

    def _check_new_configs(self, configs: Sequence[tuple[str, str | None]]) -> dict[str, str]:
        null_names = [name for name, value in configs if value is None]
        problem: str | None = None
        if null_names:
            problem = f"Null value not supported for topic configs: {','.join(null_names)}"
        config_values = {name: value for name, value in configs if value is not None}
        if problem is None and any(len(value) > MAX_CONFIG_VALUE_LENGTH for value in config_values.values()):
            problem = (
                "The configuration value cannot be added because it exceeds the maximum value size of "
                f"{MAX_CONFIG_VALUE_LENGTH} bytes."
            )
        if problem is not None:
            raise KafkaError(ErrorCode.INVALID_CONFIG, problem)
        refusal = self.settings.config_problem(TOPIC_RESOURCE, config_values) if config_values else None
        if refusal is not None:
            raise refusal
        return config_values

    def _automatic_assignments(self, topic: NewTopic) -> list[tuple[tuple[int, ...], list[int]]]:
        if topic.replication_factor < -1 or topic.replication_factor == 0:
            raise KafkaError(
                ErrorCode.INVALID_REPLICATION_FACTOR,
                "Replication factor must be larger than 0, or -1 to use the default value.",
            )
        if topic.partition_count < -1 or topic.partition_count == 0:
            raise KafkaError(
                ErrorCode.INVALID_PARTITIONS, "Number of partitions was set to an invalid non-positive value."
            )
        count = self.settings.default_partition_count if topic.partition_count == -1 else topic.partition_count
        factor = (
            self.settings.default_replication_factor if topic.replication_factor == -1 else topic.replication_factor
        )
        if count > MAX_PARTITIONS_PER_REQUEST:
            raise KafkaError(ErrorCode.POLICY_VIOLATION, "Excessively large number of partitions per request.")
        replica_lists = place_replicas(self.placeable(), count, factor, self.rng)
        assignments = [(replicas, self.active(replicas)) for replicas in replica_lists]
        if not all(isr for _, isr in assignments):
            raise KafkaError(
                ErrorCode.INVALID_REPLICATION_FACTOR,
                f"Unable to replicate the partition {factor} time(s): "
                "All brokers are currently fenced or in controlled shutdown.",
            )
        return assignments

    def _manual_assignments(self, topic: NewTopic) -> list[tuple[tuple[int, ...], list[int]]]:
        if topic.replication_factor != -1:
            raise KafkaError(
                ErrorCode.INVALID_REQUEST,
                "A manual partition assignment was specified, but replication factor was not set to -1.",
            )
        if topic.partition_count != -1:
            raise KafkaError(
                ErrorCode.INVALID_REQUEST,
                "A manual partition assignment was specified, but numPartitions was not set to -1.",
            )
        assignments_by_index: dict[int, tuple[tuple[int, ...], list[int]]] = {}
        factor: int | None = None
        for index, brokers in topic.assignments:
            if index in assignments_by_index:
                raise bad_assignment(f"Found multiple manual partition assignments for partition {index}")
            self.check_manual_assignment(brokers, factor)
            factor = len(brokers)
            isr = self.active(brokers)
            if not isr:
                raise bad_assignment(
                    f"All brokers specified in the manual partition assignment for partition {index} "
                    "are fenced or in controlled shutdown."
                )
            assignments_by_index[index] = (tuple(brokers), isr)
        if sorted(assignments_by_index) != list(range(len(assignments_by_index))):
            raise bad_assignment("partitions should be a consecutive 0-based integer sequence")
        return [assignments_by_index[index] for index in range(len(assignments_by_index))]

    def check_manual_assignment(self, brokers: Sequence[int], replication_factor: int | None) -> None:
        """Raises KafkaError(INVALID_REPLICA_ASSIGNMENT). `replication_factor`: that
        of the topic's other partitions.
        """
        if not brokers:
            raise bad_assignment("The manual partition assignment includes an empty replica list.")
        for broker in sorted(brokers):
            if broker not in self.image.brokers:
                raise bad_assignment(
                    f"The manual partition assignment includes broker {broker}, but no such broker is registered."
                )
            if brokers.count(broker) > 1:
                raise bad_assignment(f"The manual partition assignment includes the broker {broker} more than once.")
        if replication_factor is not None and len(brokers) != replication_factor:
            raise bad_assignment(
                f"The manual partition assignment includes a partition with {len(brokers)} replica(s), but this is "
                f"not consistent with previous partitions, which have {replication_factor} replica(s)."
            )

    def placeable(self) -> list[BrokerImage]:
        """The brokers for new replicas: all but those in controlled shutdown or
        with only cordoned directories.
        """
        return [
            broker
            for broker in self.image.brokers.values()
            if (broker.fenced or not broker.in_controlled_shutdown)
            and not (broker.cordoned_log_dirs and set(broker.log_dirs) <= set(broker.cordoned_log_dirs))
        ]

    def active(self, replicas: Iterable[int]) -> list[int]:
        brokers = self.image.brokers
        return [replica for replica in replicas if replica in brokers and brokers[replica].is_active]

    def default_directory(self, node_id: int) -> bytes:
        """The directory of a broker with one directory; other brokers assign it later (KIP-858)."""
        broker = self.image.brokers.get(node_id)
        return broker.log_dirs[0] if broker is not None and len(broker.log_dirs) == 1 else UNASSIGNED_DIRECTORY

    def _new_id(self) -> bytes:
        """A random (version 4) UUID that neither exists nor starts with '-' in
        text (Kafka's Uuid.randomUuid).
        """
        while True:
            value = bytearray(self.rng.randbytes(16))
            value[6] = value[6] & 0x0F | 0x40
            value[8] = value[8] & 0x3F | 0x80
            topic_id = bytes(value)
            if topic_id[0] >> 2 != 62 and topic_id not in self.image.topics_by_id:
                return topic_id

    def delete_topics(self, topic_ids: Iterable[bytes]) -> tuple[Records, dict[bytes, KafkaError | None]]:
        """Decide on each topic id separately; None for a deleted topic."""
        records: Records = []
        results: dict[bytes, KafkaError | None] = {}
        for topic_id in topic_ids:
            if topic_id not in self.image.topics_by_id:
                results[topic_id] = KafkaError(ErrorCode.UNKNOWN_TOPIC_ID)
                continue
            records.append(RemoveTopicRecord(topic_id=topic_id))
            results[topic_id] = None
        return records, results

    # -- producer ids ------------------------------------------------------------------------------------------------

    def allocate_producer_ids(self, broker_id: int) -> tuple[Records, ProducerIdBlock]:
        """The next block for one broker (KIP-730). Raises KafkaError(BROKER_ID_NOT_REGISTERED)."""
        broker = self.image.brokers.get(broker_id)
        if broker is None:
            raise KafkaError(ErrorCode.BROKER_ID_NOT_REGISTERED, f"Broker ID {broker_id} is not registered.")
        first = self.image.next_producer_id
        if first > MAX_PRODUCER_ID - PRODUCER_ID_BLOCK:
            raise KafkaError(ErrorCode.UNKNOWN_SERVER_ERROR, "Exhausted all producerIds.")
        record = ProducerIdsRecord(
            broker_id=broker_id, broker_epoch=broker.epoch, next_producer_id=first + PRODUCER_ID_BLOCK
        )
        return [record], ProducerIdBlock(first, PRODUCER_ID_BLOCK)


def bad_assignment(message: str) -> KafkaError:
    return KafkaError(ErrorCode.INVALID_REPLICA_ASSIGNMENT, message)
