"""Indexes from a broker to its partitions, so that no event has to visit all partitions. Pure.

A partition's key is (topic id, index). Dictionaries serve as ordered sets, which makes decisions
repeatable. The indexes are those of Kafka's `BrokersToIsrs` and `BrokersToElrs`, with leaders and
reassignments besides.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from tidelog.replication.controller.metadata.image import NO_LEADER, MetadataDelta, MetadataImage, PartitionImage

Key = tuple[bytes, int]
Members = dict[Key, None]


class PartitionIndex:
    """`update` takes every image in order."""

    def __init__(self) -> None:
        self._in_isr: dict[int, Members] = {}
        self._in_elr: dict[int, Members] = {}
        self._led: dict[int, Members] = {}
        self._imbalanced: dict[int, Members] = {}
        self._preferring: dict[int, int] = {}
        self.leaderless: Members = {}
        self.reassigning: Members = {}

    def in_isr(self, broker_id: int) -> Iterable[Key]:
        return tuple(self._in_isr.get(broker_id, ()))

    def in_elr(self, broker_id: int) -> Iterable[Key]:
        return tuple(self._in_elr.get(broker_id, ()))

    def led_count(self, broker_id: int) -> int:
        return len(self._led.get(broker_id, ()))

    def imbalanced(self) -> Iterable[tuple[int, Mapping[Key, None], int]]:
        """(broker, the partitions that prefer it and have another leader, the number that prefer
        it).
        """
        for broker_id, members in self._imbalanced.items():
            if members:
                yield broker_id, members, self._preferring[broker_id]

    def update(self, before: MetadataImage, after: MetadataImage, delta: MetadataDelta) -> None:
        for topic_id in delta.deleted_topics:
            for index, partition in before.topics_by_id[topic_id].partitions.items():
                self._remove((topic_id, index), partition)
        for topic_id, indexes in delta.changed_partitions.items():
            topic = after.topics_by_id[topic_id]
            old_topic = before.topics_by_id.get(topic_id)
            for index in sorted(indexes):
                key = (topic_id, index)
                if old_topic is not None:
                    old_partition = old_topic.partitions.get(index)
                    if old_partition is not None:
                        self._remove(key, old_partition)
                self._add(key, topic.partitions[index])

    def _add(self, key: Key, partition: PartitionImage) -> None:
        preferred, leader = partition.replicas[0], partition.leader
        for broker_id in partition.isr:
            self._in_isr.setdefault(broker_id, {})[key] = None
        for broker_id in partition.elr:
            self._in_elr.setdefault(broker_id, {})[key] = None
        self._preferring[preferred] = self._preferring.get(preferred, 0) + 1
        if leader == NO_LEADER:
            self.leaderless[key] = None
        else:
            self._led.setdefault(leader, {})[key] = None
            if leader != preferred:
                self._imbalanced.setdefault(preferred, {})[key] = None
        if partition.adding_replicas or partition.removing_replicas:
            self.reassigning[key] = None

    def _remove(self, key: Key, partition: PartitionImage) -> None:
        preferred, leader = partition.replicas[0], partition.leader
        for broker_id in partition.isr:
            del self._in_isr[broker_id][key]
        for broker_id in partition.elr:
            del self._in_elr[broker_id][key]
        self._preferring[preferred] -= 1
        if leader == NO_LEADER:
            del self.leaderless[key]
        else:
            del self._led[leader][key]
            if leader != preferred:
                del self._imbalanced[preferred][key]
        if partition.adding_replicas or partition.removing_replicas:
            del self.reassigning[key]
