"""Fetched records that the consumer has not handed out yet, and errors to raise, by partition.

Invariant: records are handed out only when they continue at the partition's position. Records
fetched before a seek or a rebalance are dropped.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection

from tidelog.client.consuming.completed_fetch import CompletedFetch
from tidelog.client.consuming.subscription import Subscription
from tidelog.client.model import ConsumerRecord, TopicPartition
from tidelog.protocol.errors import KafkaError


class FetchBuffer:
    """The fetch buffer of one consumer."""

    def __init__(self, subscription: Subscription) -> None:
        self._subscription = subscription
        self._fetches: dict[TopicPartition, deque[CompletedFetch]] = {}
        self.errors: dict[TopicPartition, KafkaError] = {}
        """The next `take` without records to hand out raises one of these."""

    def add(self, fetch: CompletedFetch) -> None:
        self._fetches.setdefault(fetch.partition, deque()).append(fetch)

    def has_fetches(self, partition: TopicPartition) -> bool:
        return bool(self._fetches.get(partition))

    def fetch_count(self, partition: TopicPartition) -> int:
        """The number of responses of this partition that are not read to their end."""
        return len(self._fetches.get(partition, ()))

    def fetch_position(self, partition: TopicPartition) -> tuple[int, int]:
        """(offset, leader epoch of the record before it) at which the next fetch continues."""
        queue = self._fetches.get(partition)
        if queue:
            return queue[-1].end_offset, queue[-1].end_epoch
        state = self._subscription.assigned[partition]
        return state.position, state.leader_epoch

    def take(self, limit: int) -> dict[TopicPartition, list[ConsumerRecord]]:
        """Return up to `limit` records by partition and move the positions behind them.

        When no records remain, raises the KafkaError of a partition that cannot be read, or the
        exception of a deserializer. Batches that are damaged are fetched again after that: the
        broker, or another one, may have a whole copy by then.
        """
        records_by_partition: dict[TopicPartition, list[ConsumerRecord]] = {}
        remaining = limit
        errors: dict[TopicPartition, Exception] = {}
        progress = True
        while progress and remaining > 0:
            progress = False
            for partition in list(self._fetches):
                try:
                    records = self._take_from(partition, remaining)
                except Exception as error:
                    errors[partition] = error
                    continue
                if records:
                    records_by_partition.setdefault(partition, []).extend(records)
                    remaining -= len(records)
                    progress = True
                    if not remaining:
                        break
        if not records_by_partition:
            for partition, failure in errors.items():
                if isinstance(failure, KafkaError):
                    self.discard((partition,))
                raise failure
            self._raise_partition_error()
        return records_by_partition

    def _take_from(self, partition: TopicPartition, limit: int) -> list[ConsumerRecord]:
        queue = self._fetches[partition]
        fetch = queue[0]
        state = self._subscription.assigned.get(partition)
        if state is None or state.position != fetch.position:
            self.discard((partition,))
            return []
        if state.paused:
            return []
        before = fetch.position
        records = fetch.take(limit)
        self._subscription.advance_position(partition, before, fetch.position, fetch.leader_epoch)
        if fetch.exhausted:
            queue.popleft()
            del self._fetches[partition]
            if queue:
                self._fetches[partition] = queue  # moved to the end, behind the other partitions
        return records

    def is_readable(self, fetch: CompletedFetch) -> bool:
        """Whether this response has unread records and its partition is not paused."""
        queue = self._fetches.get(fetch.partition)
        if not queue or fetch not in queue:
            return False
        state = self._subscription.assigned.get(fetch.partition)
        return state is not None and not state.paused

    def discard(self, partitions: Collection[TopicPartition]) -> None:
        """Drop the records and errors of these partitions, as after a seek."""
        for partition in partitions:
            self._fetches.pop(partition, None)
            self.errors.pop(partition, None)

    def keep_only(self, partitions: Collection[TopicPartition]) -> None:
        """Drop the records and errors of all other partitions, as after a rebalance."""
        self.discard([partition for partition in [*self._fetches, *self.errors] if partition not in partitions])

    def _raise_partition_error(self) -> None:
        for partition, error in list(self.errors.items()):
            del self.errors[partition]
            if partition in self._subscription.assigned:
                raise error
