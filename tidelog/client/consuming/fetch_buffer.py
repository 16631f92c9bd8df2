"""What a consumer has fetched and not handed out yet, and the errors that wait to be raised, by partition.

Invariant: records are handed out only for the position at which they continue, so what was fetched before a seek or a
rebalance is dropped.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection

from tidelog.client.consuming.completed_fetch import CompletedFetch
from tidelog.client.consuming.subscription import Subscription
from tidelog.client.model import ConsumerRecord, TopicPartition
from tidelog.protocol.errors import KafkaError


class FetchBuffer:
    """One consumer's."""

    def __init__(self, subscription: Subscription) -> None:
        self._subscription = subscription
        self._fetched: dict[TopicPartition, deque[CompletedFetch]] = {}
        self.problems: dict[TopicPartition, KafkaError] = {}
        """Raised by the next `take` that finds nothing to hand out."""

    def add(self, fetched: CompletedFetch) -> None:
        self._fetched.setdefault(fetched.partition, deque()).append(fetched)

    def holds(self, partition: TopicPartition) -> bool:
        return bool(self._fetched.get(partition))

    def count(self, partition: TopicPartition) -> int:
        """How many answers of this partition wait, read in part or not at all."""
        return len(self._fetched.get(partition, ()))

    def end(self, partition: TopicPartition) -> tuple[int, int]:
        """(offset, leader epoch of the record before it) from which the next fetch goes on."""
        waiting = self._fetched.get(partition)
        if waiting:
            return waiting[-1].end_offset, waiting[-1].end_epoch
        state = self._subscription.assigned[partition]
        return state.position, state.leader_epoch

    def take(self, limit: int) -> dict[TopicPartition, list[ConsumerRecord]]:
        """Up to `limit` records by partition, and positions move behind them.

        Raises the KafkaError of a partition that cannot be read, or what a deserializer raised, once nothing else is to
        be handed out.
        """
        taken: dict[TopicPartition, list[ConsumerRecord]] = {}
        room = limit
        problem: Exception | None = None
        progress = True
        while progress and room > 0:
            progress = False
            for partition in list(self._fetched):
                try:
                    records = self._take_from(partition, room)
                except Exception as error:
                    problem = problem or error
                    continue
                if records:
                    taken.setdefault(partition, []).extend(records)
                    room -= len(records)
                    progress = True
                    if not room:
                        break
        if not taken:
            if problem is not None:
                raise problem
            self._raise_problem()
        return taken

    def _take_from(self, partition: TopicPartition, limit: int) -> list[ConsumerRecord]:
        waiting = self._fetched[partition]
        fetched = waiting[0]
        state = self._subscription.assigned.get(partition)
        if state is None or state.position != fetched.position:
            self.discard((partition,))
            return []
        if state.paused:
            return []
        before = fetched.position
        records = fetched.take(limit)
        self._subscription.consumed(partition, before, fetched.position, fetched.leader_epoch)
        if fetched.exhausted:
            waiting.popleft()
            del self._fetched[partition]
            if waiting:
                self._fetched[partition] = waiting  # at the end: others have their turn first
        return records

    def holds_unread(self, fetched: CompletedFetch) -> bool:
        """Whether this answer is still to be read, and not of a paused partition."""
        waiting = self._fetched.get(fetched.partition)
        if not waiting or fetched not in waiting:
            return False
        state = self._subscription.assigned.get(fetched.partition)
        return state is not None and not state.paused

    def discard(self, partitions: Collection[TopicPartition]) -> None:
        """Forget what was fetched of these partitions, as after a seek."""
        for partition in partitions:
            self._fetched.pop(partition, None)
            self.problems.pop(partition, None)

    def keep_only(self, partitions: Collection[TopicPartition]) -> None:
        """Forget everything else, as after a rebalance."""
        self.discard([partition for partition in [*self._fetched, *self.problems] if partition not in partitions])

    def _raise_problem(self) -> None:
        for partition, problem in list(self.problems.items()):
            del self.problems[partition]
            if partition in self._subscription.assigned:
                raise problem
