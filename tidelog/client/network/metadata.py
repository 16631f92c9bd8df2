"""The cluster as the last Metadata answers described it: brokers, topics, who leads what.

Pure values; `cluster` asks and keeps them fresh. Invariant: per partition the leader of the highest leader epoch heard
of is kept, so that the answer of a broker that lags behind does not send requests back to an old leader (KIP-320), and
so is a partition that such a broker does not know of yet.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from tidelog.client.model import Node, TopicPartition
from tidelog.protocol.errors import ErrorCode
from tidelog.protocol.messages.metadata import MetadataResponse, MetadataResponseTopic

NO_TOPIC_ID = bytes(16)


class PartitionMetadata(NamedTuple):
    """One partition; `leader` is -1 while there is none."""

    partition: int
    error: ErrorCode
    leader: int
    leader_epoch: int
    replicas: tuple[int, ...]
    isr: tuple[int, ...]
    offline_replicas: tuple[int, ...]


class TopicMetadata:
    """One topic. `partitions` are in order of their number."""

    __slots__ = ("available", "error", "internal", "name", "partitions", "topic_id")

    def __init__(
        self,
        name: str,
        topic_id: bytes,
        error: ErrorCode,
        internal: bool,
        partitions: tuple[PartitionMetadata, ...],
    ) -> None:
        self.name = name
        self.topic_id = topic_id
        self.error = error
        self.internal = internal
        self.partitions = partitions
        with_leader = tuple(each.partition for each in partitions if each.leader >= 0)
        self.available = with_leader or tuple(each.partition for each in partitions)
        """Partitions that have a leader; all of them when none has."""

    @property
    def usable(self) -> bool:
        return self.error is ErrorCode.NONE and bool(self.partitions)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TopicMetadata):
            return NotImplemented
        return all(getattr(self, name) == getattr(other, name) for name in self.__slots__)

    __hash__ = None  # type: ignore[assignment]


class ClusterMetadata(NamedTuple):
    """Replaced as a whole by every answer."""

    cluster_id: str | None
    controller_id: int
    nodes: Mapping[int, Node]
    topics: Mapping[str, TopicMetadata]

    def leader(self, partition: TopicPartition) -> int:
        """The leader's node id, -1 while none is known."""
        topic = self.topics.get(partition.topic)
        if topic is None or not 0 <= partition.partition < len(topic.partitions):
            return -1
        return topic.partitions[partition.partition].leader

    def leader_epoch(self, partition: TopicPartition) -> int:
        topic = self.topics.get(partition.topic)
        if topic is None or not 0 <= partition.partition < len(topic.partitions):
            return -1
        return topic.partitions[partition.partition].leader_epoch

    def is_online(self, partition: TopicPartition, node_id: int) -> bool:
        """Whether this broker is known and holds a replica that can be read from."""
        topic = self.topics.get(partition.topic)
        if node_id not in self.nodes or topic is None or not 0 <= partition.partition < len(topic.partitions):
            return False
        found = topic.partitions[partition.partition]
        return node_id in found.replicas and node_id not in found.offline_replicas

    def topic_id(self, name: str) -> bytes:
        topic = self.topics.get(name)
        return NO_TOPIC_ID if topic is None else topic.topic_id


EMPTY = ClusterMetadata(None, -1, {}, {})


def merged(old: ClusterMetadata, response: MetadataResponse, wanted: Iterable[str] | None) -> ClusterMetadata:
    """The metadata after an answer that covers the topics `wanted` (None: all there are); others are dropped."""
    nodes = {each.node_id: Node(each.node_id, each.host, each.port, each.rack) for each in response.brokers}
    answered = {topic.name: topic for topic in response.topics if topic.name is not None}
    topics: dict[str, TopicMetadata] = {}
    for name in answered if wanted is None else wanted:
        found = answered.get(name)
        before = old.topics.get(name)
        if found is not None:
            now = _topic(found, before)
            # The same object while nothing changed: holders compare by identity.
            topics[name] = before if before is not None and before == now else now
        elif before is not None:
            topics[name] = before
    return ClusterMetadata(response.cluster_id, response.controller_id, nodes, topics)


def _topic(found: MetadataResponseTopic, before: TopicMetadata | None) -> TopicMetadata:
    name = found.name or ""
    error = ErrorCode.of(found.error_code)
    if error.retriable and before is not None and before.partitions and not found.partitions:
        # The broker cannot say just now; what was known keeps those going that still can be served.
        return TopicMetadata(name, before.topic_id, error, before.internal, before.partitions)
    same_topic = before is not None and before.topic_id == found.topic_id
    known = {each.partition: each for each in before.partitions} if same_topic and before is not None else {}
    partitions = []
    if error is ErrorCode.NONE and found.topic_id != NO_TOPIC_ID:
        # A topic never has fewer partitions than before: a broker that lags behind does not know of the others yet.
        answered = {each.partition_index for each in found.partitions}
        partitions = [each for number, each in known.items() if number not in answered]
    for each in sorted(found.partitions, key=lambda partition: partition.partition_index):
        fresh = PartitionMetadata(
            each.partition_index,
            ErrorCode.of(each.error_code),
            each.leader_id,
            each.leader_epoch,
            tuple(each.replica_nodes),
            tuple(each.isr_nodes),
            tuple(each.offline_replicas),
        )
        old = known.get(each.partition_index)
        stale = old is not None and 0 <= fresh.leader_epoch < old.leader_epoch
        partitions.append(old if stale and old is not None else fresh)
    partitions.sort()
    return TopicMetadata(name, found.topic_id, error, found.is_internal, tuple(partitions))
