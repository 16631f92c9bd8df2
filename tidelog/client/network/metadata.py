"""The cluster as described by the last Metadata responses: brokers, topics, leaders.

Pure values; `cluster` refreshes them. Invariant: each partition keeps the leader of the highest
known leader epoch, so that the response of a lagging broker does not send requests back to an old
leader (KIP-320). A partition that such a broker does not have yet is kept too.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

from tidelog.client.model import Node, TopicPartition
from tidelog.protocol.errors import ErrorCode
from tidelog.protocol.messages.metadata import MetadataResponse, MetadataResponseTopic

NO_TOPIC_ID = bytes(16)
_MISSING_ERRORS = frozenset((ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, ErrorCode.UNKNOWN_TOPIC_ID))


class PartitionMetadata(NamedTuple):
    """One partition. `leader` is -1 without a leader."""

    partition: int
    error: ErrorCode
    leader: int
    leader_epoch: int
    replicas: tuple[int, ...]
    isr: tuple[int, ...]
    offline_replicas: tuple[int, ...]


class TopicMetadata:
    """One topic. `partitions` are ordered by number."""

    __slots__ = ("available_partitions", "error", "is_internal", "name", "partitions", "topic_id")

    def __init__(
        self,
        name: str,
        topic_id: bytes,
        error: ErrorCode,
        is_internal: bool,
        partitions: tuple[PartitionMetadata, ...],
    ) -> None:
        self.name = name
        self.topic_id = topic_id
        self.error = error
        self.is_internal = is_internal
        self.partitions = partitions
        led_partitions = tuple(entry.partition for entry in partitions if entry.leader >= 0)
        self.available_partitions = led_partitions or tuple(entry.partition for entry in partitions)
        """Partitions with a leader, or all partitions when none has a leader."""

    @property
    def is_usable(self) -> bool:
        return self.error is ErrorCode.NONE and bool(self.partitions)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TopicMetadata):
            return NotImplemented
        return all(getattr(self, name) == getattr(other, name) for name in self.__slots__)

    __hash__ = None  # type: ignore[assignment]


class ClusterMetadata(NamedTuple):
    """The metadata of a cluster. Every response replaces it as a whole."""

    cluster_id: str | None
    controller_id: int
    nodes: Mapping[int, Node]
    topics: Mapping[str, TopicMetadata]

    def leader(self, partition: TopicPartition) -> int:
        """The leader's node id, -1 without a known leader."""
        name, number = partition
        topic = self.topics.get(name)
        if topic is None or not 0 <= number < len(topic.partitions):
            return -1
        return topic.partitions[number].leader

    def leader_epoch(self, partition: TopicPartition) -> int:
        topic = self.topics.get(partition.topic)
        if topic is None or not 0 <= partition.partition < len(topic.partitions):
            return -1
        return topic.partitions[partition.partition].leader_epoch

    def is_online(self, partition: TopicPartition, node_id: int) -> bool:
        """Whether this broker is in the cluster and has an online replica of the partition."""
        topic = self.topics.get(partition.topic)
        if node_id not in self.nodes or topic is None or not 0 <= partition.partition < len(topic.partitions):
            return False
        entry = topic.partitions[partition.partition]
        return node_id in entry.replicas and node_id not in entry.offline_replicas

    def topic_id(self, name: str) -> bytes:
        topic = self.topics.get(name)
        return NO_TOPIC_ID if topic is None else topic.topic_id

    def is_deleted(self, name: str) -> bool:
        """Whether the last answer no longer has the topic, whose id and partitions are those of before."""
        topic = self.topics.get(name)
        return topic is not None and topic.error in _MISSING_ERRORS and topic.topic_id != NO_TOPIC_ID


EMPTY = ClusterMetadata(None, -1, {}, {})


def merge_metadata(
    previous: ClusterMetadata, response: MetadataResponse, wanted_topics: Collection[str] | None
) -> ClusterMetadata:
    """Merge a response into the metadata of the topics `wanted_topics` (None: those of the response).

    A wanted topic that the response leaves out stays as it is. Topics that are not wanted are dropped.
    """
    nodes = {broker.node_id: Node(broker.node_id, broker.host, broker.port, broker.rack) for broker in response.brokers}
    by_name = {topic.name: topic for topic in response.topics if topic.name is not None}
    # Without a step for each topic that stays: a producer names its topics one by one, and may have thousands.
    topics: dict[str, TopicMetadata] = {} if wanted_topics is None else dict(previous.topics)
    for name in () if wanted_topics is None else topics.keys() - set(wanted_topics):
        del topics[name]
    for name, topic in by_name.items():
        if wanted_topics is None or name in wanted_topics:
            previous_topic = previous.topics.get(name)
            current_topic = _merge_topic(topic, previous_topic)
            # An unchanged topic keeps its object: callers compare by identity.
            topics[name] = (
                previous_topic if previous_topic is not None and previous_topic == current_topic else current_topic
            )
    return ClusterMetadata(response.cluster_id, response.controller_id, nodes, topics)


def _merge_topic(topic: MetadataResponseTopic, previous_topic: TopicMetadata | None) -> TopicMetadata:
    name = topic.name or ""
    error = ErrorCode.of(topic.error_code)
    if error.retriable and previous_topic is not None and previous_topic.partitions and not topic.partitions:
        # The broker has no partitions at the moment; partitions known before may still be usable.
        return TopicMetadata(
            name, previous_topic.topic_id, error, previous_topic.is_internal, previous_topic.partitions
        )
    is_same_topic = previous_topic is not None and previous_topic.topic_id == topic.topic_id
    by_number = (
        {entry.partition: entry for entry in previous_topic.partitions}
        if is_same_topic and previous_topic is not None
        else {}
    )
    partitions = []
    if error is ErrorCode.NONE and topic.topic_id != NO_TOPIC_ID:
        # A topic never loses partitions: a lagging broker does not have the missing ones yet.
        numbers = {entry.partition_index for entry in topic.partitions}
        partitions = [entry for number, entry in by_number.items() if number not in numbers]
    for partition in sorted(topic.partitions, key=lambda partition: partition.partition_index):
        current = PartitionMetadata(
            partition.partition_index,
            ErrorCode.of(partition.error_code),
            partition.leader_id,
            partition.leader_epoch,
            tuple(partition.replica_nodes),
            tuple(partition.isr_nodes),
            tuple(partition.offline_replicas),
        )
        previous = by_number.get(partition.partition_index)
        is_stale = previous is not None and 0 <= current.leader_epoch < previous.leader_epoch
        partitions.append(previous if is_stale and previous is not None else current)
    partitions.sort()
    # Partitions are looked up by their place. An answer that leaves out a number ends there.
    numbered = tuple(entry for place, entry in enumerate(partitions) if entry.partition == place)
    return TopicMetadata(name, topic.topic_id, error, topic.is_internal, numbered)
