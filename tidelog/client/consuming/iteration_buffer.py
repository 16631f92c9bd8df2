"""Records that an iteration has polled and not handed out yet: they count as not consumed. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from tidelog.client.model import ConsumerRecord, OffsetAndMetadata, TopicPartition


class IterationBuffer:
    """One consumer's. Iterators take from the left of `records`."""

    __slots__ = ("records",)

    def __init__(self) -> None:
        self.records: deque[ConsumerRecord] = deque()

    def fill(self, polled: Iterable[Iterable[ConsumerRecord]]) -> None:
        for records in polled:
            self.records.extend(records)

    def not_consumed(self) -> dict[TopicPartition, OffsetAndMetadata]:
        """By partition the offset of the first record not handed out, and the leader epoch of that record."""
        first: dict[TopicPartition, OffsetAndMetadata] = {}
        for record in self.records.copy():  # an iterator in another thread may take one meanwhile
            partition = TopicPartition(record.topic, record.partition)
            if partition not in first:
                first[partition] = OffsetAndMetadata(record.offset, "", record.leader_epoch)
        return first
