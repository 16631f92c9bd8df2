"""The partitions of a producer's topics: their queues, and the choice among them for a record.

Pure. Invariant: a route has the partitions of the newest metadata. A topic that is deleted or
recreated loses its route, its queues and its sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from tidelog.client.assignment.partitioner import (
    CustomPartitioner,
    RoundRobinPartitioner,
    StickyPartitioner,
    UnkeyedPartitioner,
    choose_custom,
    positive_hash,
)
from tidelog.client.config import ProducerConfig
from tidelog.client.model import TopicPartition
from tidelog.client.network.metadata import TopicMetadata
from tidelog.client.producing.accumulator import Accumulator, PartitionQueue
from tidelog.client.producing.producer_session import ProducerSession

if TYPE_CHECKING:
    from random import Random

RECORD_OVERHEAD_BYTES = 16
"""What a sticky partitioner counts for a record beside its key and value."""


class Route:
    """The partition queues of one topic. Replaced when its metadata changes."""

    __slots__ = ("available_partitions", "count", "queues", "spread", "topic", "unkeyed_partitioner")

    def __init__(
        self,
        topic: TopicMetadata,
        queues: list[PartitionQueue[Any]],
        unkeyed_partitioner: UnkeyedPartitioner,
        *,
        has_custom_partitioner: bool,
    ) -> None:
        self.topic = topic
        self.available_partitions = topic.available_partitions
        self.count = len(queues)
        self.queues = queues
        self.unkeyed_partitioner = unkeyed_partitioner
        self.spread = None if has_custom_partitioner else unkeyed_partitioner.choose_for
        """Chooses the partition of a record without a key, by its size and the available partitions. None with a
        custom partitioner, which chooses for all records."""


class TopicRoutes:
    """The routes of one producer. `is_stuck` says that a partition's leader takes no batch."""

    def __init__(
        self,
        config: ProducerConfig,
        accumulator: Accumulator[Any],
        session: ProducerSession,
        rng: Random,
        is_stuck: Callable[[TopicPartition], bool],
    ) -> None:
        self._config = config
        self._accumulator = accumulator
        self._session = session
        self._rng = rng
        self._is_stuck = is_stuck
        self._custom_partitioner: CustomPartitioner | None = (
            None if isinstance(config.partitioner, str) else config.partitioner
        )
        self._hashes_keys = config.partitioner == "default" and not config.partitioner_ignore_keys
        self.by_topic: dict[str, Route] = {}

    # -- the choice for one record

    def choose(self, route: Route, key: bytes | None, value: bytes | None) -> int:
        """The partition of a record that names none. Raises ValueError for a wrong custom choice."""
        if self._custom_partitioner is not None:
            return choose_custom(self._custom_partitioner, route.topic.name, key, value, route.count)
        size_bytes = RECORD_OVERHEAD_BYTES if value is None else len(value) + RECORD_OVERHEAD_BYTES
        if key is not None:
            if self._hashes_keys:
                return positive_hash(key) % route.count
            size_bytes += len(key)
        return route.unkeyed_partitioner.choose_for(size_bytes, route.available_partitions)

    # -- metadata

    def make(self, topic: TopicMetadata) -> Route:
        """The route of a topic with this metadata, in place of an older one."""
        queues = [
            self._accumulator.queue(TopicPartition(topic.name, number)) for number in range(len(topic.partitions))
        ]
        old_route = self.by_topic.get(topic.name)
        unkeyed_partitioner = (
            self._new_unkeyed_partitioner(topic.name) if old_route is None else old_route.unkeyed_partitioner
        )
        route = self.by_topic[topic.name] = Route(
            topic, queues, unkeyed_partitioner, has_custom_partitioner=self._custom_partitioner is not None
        )
        return route

    def update(self, topics: Mapping[str, TopicMetadata]) -> None:
        """Adopt the metadata of all topics.

        A deleted topic, or a recreated one of the same name, loses its state.
        """
        for name, route in [each for each in self.by_topic.items() if topics.get(each[0]) is not each[1].topic]:
            topic = topics.get(name)
            if topic is None or not topic.partitions or topic.topic_id != route.topic.topic_id:
                del self.by_topic[name]
                self._session.forget(queue.partition for queue in route.queues)
                for queue in route.queues:
                    self._accumulator.forget(queue.partition)
            else:
                self.make(topic)

    def _new_unkeyed_partitioner(self, topic: str) -> UnkeyedPartitioner:
        config = self._config
        if config.partitioner == "round_robin":
            return RoundRobinPartitioner()
        is_adaptive = config.partitioner_adaptive_partitioning_enable
        return StickyPartitioner(self._rng, config.batch_size, partial(self._loads_of, topic) if is_adaptive else None)

    def _loads_of(self, topic: str, numbers: Sequence[int]) -> list[int | None]:
        """The batches that wait for each partition, None for one whose leader takes none for too long."""
        queues = self.by_topic[topic].queues
        loads: list[int | None] = [len(queues[number].waiting_batches) for number in numbers]
        if self._config.partitioner_availability_timeout_ms:
            for place, number in enumerate(numbers):
                if self._is_stuck(queues[number].partition):
                    loads[place] = None
        return loads
