"""Records that an iteration has polled and not handed out yet. They count as not consumed. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from tidelog.client.model import ConsumerRecord, OffsetAndMetadata, TopicPartition


class IterationBuffer:
    """The iteration buffer of one consumer. Iterators take from the left of `records`."""

    __slots__ = ("records",)

    def __init__(self) -> None:
        self.records: deque[ConsumerRecord] = deque()

    def fill(self, batches: Iterable[Iterable[ConsumerRecord]]) -> None:
        for records in batches:
            self.records.extend(records)

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
