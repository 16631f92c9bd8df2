"""Fetched records that the consumer has not handed out yet, and errors to raise, by partition.

Invariant: records are handed out only when they continue at the partition's position. Records
fetched before a seek or a rebalance are dropped.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from tidelog.client.consuming.completed_fetch import CompletedFetch
from tidelog.client.consuming.subscription import Subscription
from tidelog.client.model import ConsumerRecord, TopicPartition
from tidelog.protocol.errors import KafkaError

if TYPE_CHECKING:
    import pyarrow as pa


class FetchBuffer:
    """The fetch buffer of one consumer. `back_off` delays the next fetch of a partition."""

    def __init__(self, subscription: Subscription, back_off: Callable[[TopicPartition], None]) -> None:
        self._subscription = subscription
        self._back_off = back_off
        self._fetches: dict[TopicPartition, deque[CompletedFetch]] = {}
        self.errors: dict[TopicPartition, KafkaError] = {}
        """A `take` raises one of these: the next one without records to hand out, or the one after the next."""
        self._kept_back: Collection[TopicPartition] = ()
        """The partitions whose errors the last `take` has not raised, because it had records of others."""
        self.starts: dict[TopicPartition, tuple[int, int]] = {}
        """(position, leader epoch) before the last `take`, of the partitions that it has looked at."""

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

        Raises the KafkaError of a partition that cannot be read, or the exception of a deserializer: when no records
        remain, or else in the call after one that has returned records in its place. Batches that are damaged are
        fetched again after that and a wait: the broker, or another one, may have a whole copy by then. So are those for
        which there was no memory. What is raised and is no Exception (an interrupt, or a deserializer's CancelledError)
        leaves all positions as they were.
        """
        self._raise_kept_back()
        records_by_partition: dict[TopicPartition, list[ConsumerRecord]] = {}
        remaining = limit
        errors: dict[TopicPartition, Exception] = {}
        self.starts = {}
        progress = True
        while progress and remaining > 0:
            progress = False
            for partition in self._in_turn():
                if partition in errors:  # a deserializer may have waited for long
                    continue
                try:
                    self._note_start(partition)
                    records = self._take_from(partition, remaining)
                except Exception as error:
                    errors[partition] = error
                    if partition in self._kept_back and not records_by_partition:
                        break
                    continue
                except BaseException:
                    self._go_back()
                    raise
                if records:
                    records_by_partition.setdefault(partition, []).extend(records)
                    remaining -= len(records)
                    progress = True
                    if not remaining:
                        break
        self._kept_back = {*errors, *self.errors} if records_by_partition else ()
        if not records_by_partition:
            self._raise_first(errors)
        return records_by_partition

    def _raise_kept_back(self) -> None:
        """Raise a broker's error that the last call has kept back: behind a backlog it would stay unseen."""
        if not self.errors.keys().isdisjoint(self._kept_back):
            self._kept_back = ()
            self._raise_partition_error()

    def _in_turn(self) -> Iterator[TopicPartition]:
        """The partitions with records that are not paused. First those whose records could not be decoded: they raise
        now, or go on.
        """
        partitions = list(self._fetches)
        if self._kept_back:
            partitions.sort(key=lambda partition: partition not in self._kept_back)
        assigned = self._subscription.assigned
        return (each for each in partitions if (state := assigned.get(each)) is None or not state.paused)

    def _note_start(self, partition: TopicPartition) -> None:
        """Note the position before the first records of a call."""
        state = self._subscription.assigned.get(partition)
        if state is not None and state.position >= 0 and partition not in self.starts:
            self.starts[partition] = state.position, state.leader_epoch

    def _go_back(self) -> None:
        """Let no record of the last call count as consumed, because its caller gets none. They are fetched again: a
        batch that was being decoded is not whole any more.
        """
        starts, self.starts = self.starts, {}
        for partition, (offset, leader_epoch) in starts.items():
            self._subscription.rewind(partition, offset, leader_epoch)
        self.discard(starts)

    def _raise_first(self, errors: Mapping[TopicPartition, Exception]) -> None:
        for partition, failure in errors.items():
            if isinstance(failure, KafkaError | MemoryError):
                self.discard((partition,))
                if partition in self._subscription.assigned:
                    self._back_off(partition)
            raise failure
        self._raise_partition_error()

    def _take_from(self, partition: TopicPartition, limit: int) -> list[ConsumerRecord]:
        fetch = self._due_fetch(partition)
        if fetch is None:
            return []
        before = fetch.position
        try:
            records = fetch.take(limit)
        except Exception:
            if fetch.position != before:  # up to a record that a deserializer has refused
                self._advance(fetch, before)
            raise
        return records if self._advance(fetch, before) else []

    def _due_fetch(self, partition: TopicPartition) -> CompletedFetch | None:
        """The fetch that continues at the position, unless the partition is paused."""
        queue = self._fetches.get(partition)
        if queue is None:  # a deserializer of another partition has called `seek` or `assign`
            return None
        fetch = queue[0]
        state = self._subscription.assigned.get(partition)
        if state is None or state.position != fetch.position:
            self.discard((partition,))
            return None
        return None if state.paused else fetch

    def _advance(self, fetch: CompletedFetch, before: int) -> bool:
        """Move the position behind what was taken, and go on with the next fetch at the end of one. False, and it must
        be dropped, when the deserializer has moved the position.
        """
        partition = fetch.partition
        queue = self._fetches.get(partition)
        if queue is None or not self._subscription.advance_position(
            partition, before, fetch.position, fetch.leader_epoch
        ):
            return False
        if fetch.exhausted:
            queue.popleft()
            del self._fetches[partition]
            if queue:
                self._fetches[partition] = queue  # moved to the end, behind the other partitions
        return True

    def take_columns(self, columns: Sequence[str], rows: int, size_bytes: int) -> list[pa.RecordBatch]:
        """Return records as Arrow columns, a batch or more a partition, and move the positions behind
        them. Ends after the batch with which there are this many rows or bytes.

        Raises as `take`.
        """
        self._raise_kept_back()
        taken: list[pa.RecordBatch] = []
        errors: dict[TopicPartition, Exception] = {}
        self.starts = {}
        progress = True
        while progress and rows > 0 and size_bytes > 0:
            progress = False
            for partition in self._in_turn():
                try:
                    self._note_start(partition)
                    piece = self._take_piece(partition, columns)
                except Exception as error:
                    errors[partition] = error
                    if partition in self._kept_back and not taken:
                        break
                    continue
                except BaseException:
                    self._go_back()
                    raise
                if piece is not None:
                    taken.append(piece)
                    rows -= piece.num_rows
                    size_bytes -= piece.nbytes
                    progress = True
                    if rows <= 0 or size_bytes <= 0:
                        break
        self._kept_back = {*errors, *self.errors} if taken else ()
        if not taken:
            self._raise_first(errors)
        return taken

    def _take_piece(self, partition: TopicPartition, columns: Sequence[str]) -> pa.RecordBatch | None:
        fetch = self._due_fetch(partition)
        if fetch is None:
            return None
        before = fetch.position
        piece = fetch.take_columns(columns)
        return piece if self._advance(fetch, before) else None

    def is_readable(self, fetch: CompletedFetch) -> bool:
        """Whether this response has unread records that can be decoded, and its partition is not paused. Others count
        against their partition alone: they must not hold up those of the same broker.
        """
        queue = self._fetches.get(fetch.partition)
        if not queue or fetch not in queue or queue[0].has_failed:
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
