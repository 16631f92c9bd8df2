"""Records that an iteration has polled and not handed out yet. They count as not consumed. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Mapping

from tidelog.client.model import ConsumerRecord, OffsetAndMetadata, TopicPartition


class IterationBuffer:
    """The iteration buffer of one consumer. Iterators take from the left of `records`."""

    __slots__ = ("_partitions", "records")

    def __init__(self) -> None:
        self.records: deque[ConsumerRecord] = deque()
        self._partitions: set[TopicPartition] = set()
        """The partitions that may have records here."""

    def fill(self, batch: Mapping[TopicPartition, Iterable[ConsumerRecord]]) -> None:
        self._partitions = set(batch)
        for records in batch.values():
            self.records.extend(records)

    def drop(self, partitions: Collection[TopicPartition] | None = None) -> dict[TopicPartition, OffsetAndMetadata]:
        """Drop the records of these partitions, of all by default. Returns their `unconsumed_positions`."""
        if not self.records:
            return {}
        if partitions is None:
            positions = self.unconsumed_positions()
            self.records.clear()
            return positions
        dropped = self._partitions.intersection(partitions)
        if not dropped:
            return {}
        self._partitions -= dropped
        positions = {
            partition: position for partition, position in self.unconsumed_positions().items() if partition in dropped
        }
        if positions:
            kept = [each for each in self.records.copy() if (each.topic, each.partition) not in positions]
            self.records.clear()
            self.records.extend(kept)
        return positions

    def unconsumed_positions(self) -> dict[TopicPartition, OffsetAndMetadata]:
        """By partition: the offset and the leader epoch of the first record not handed out."""
        positions: dict[TopicPartition, OffsetAndMetadata] = {}
        for record in self.records.copy():  # an iterator in another thread may take a record meanwhile
            partition = TopicPartition(record.topic, record.partition)
            if partition not in positions:
                positions[partition] = OffsetAndMetadata(record.offset, "", record.leader_epoch)
        return positions

    def first_offset(self, partition: TopicPartition) -> int | None:
        """The offset of the first record of this partition that is not handed out."""
        offsets = (each.offset for each in self.records.copy() if (each.topic, each.partition) == partition)
        return next(offsets, None)
