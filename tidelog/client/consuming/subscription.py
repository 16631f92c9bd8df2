"""What a consumer reads and how far it is: subscribed topics, assigned partitions, positions, pauses, resets.

Pure state; who assigns (`membership`) and who fetches (`fetcher`) are told through it. Invariants: a partition is
fetched only with a position and unpaused; a position changes only by consuming, by seeking, or by a reset that was
asked for, so a late answer for an older position is recognised and dropped; a position that a new leader may not have
is not fetched from until it was checked (KIP-320).
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence

from tidelog.client.consuming.log_truncation import LogTruncation
from tidelog.client.model import OffsetAndMetadata, TopicPartition
from tidelog.client.network.metadata import NO_TOPIC_ID

Pattern = re.Pattern[str]


class RebalanceListener:
    """Hears of rebalances, inside `poll`: subclass and override. The methods may be plain or `async def`."""

    def on_partitions_revoked(self, revoked: Collection[TopicPartition]) -> Awaitable[None] | None:
        """Before the partitions go to others: the place to commit or to save positions."""
        return None

    def on_partitions_assigned(self, assigned: Collection[TopicPartition]) -> Awaitable[None] | None:
        """The partitions that are new: the place to seek."""
        return None

    def on_partitions_lost(self, lost: Collection[TopicPartition]) -> Awaitable[None] | None:
        """The partitions are others' already, so a commit would be refused. By default as if they were revoked."""
        return self.on_partitions_revoked(lost)


class PartitionState:
    """One assigned partition. Offsets are -1 while unknown."""

    __slots__ = (
        "current_epoch",
        "high_watermark",
        "last_stable_offset",
        "leader_epoch",
        "log_start_offset",
        "paused",
        "position",
        "read_replica",
        "read_replica_until_ms",
        "reset_to",
        "retry_at_ms",
        "topic_id",
        "unvalidated",
    )

    def __init__(self) -> None:
        self.position = -1
        """The next offset to hand out."""
        self.leader_epoch = -1
        """The epoch of the last batch handed out, to be committed beside the position."""
        self.current_epoch = -1
        """The leader epoch for which the position was found, or is to be checked."""
        self.unvalidated = False
        """Whether the leader of the current epoch has the records before the position is not known."""
        self.read_replica = -1
        """The replica that the leader named to read from instead of itself (KIP-392)."""
        self.read_replica_until_ms = 0.0
        self.reset_to: int | None = None
        """A ListOffsets timestamp (-1 latest, -2 earliest) from which the position is to be found."""
        self.paused = False
        self.high_watermark = -1
        self.last_stable_offset = -1
        self.log_start_offset = -1
        self.retry_at_ms = 0.0
        """No fetch before this time."""
        self.topic_id = NO_TOPIC_ID
        """Of the topic in which the position lies."""


class Subscription:
    """One consumer's. `subscribe` and `assign` exclude each other, as in Kafka."""

    def __init__(self) -> None:
        self.topics: frozenset[str] = frozenset()
        self.pattern: Pattern | None = None
        self.listener: RebalanceListener | None = None
        self.by_user = False
        """The partitions were given by `assign`, not by a group."""
        self._assigned: dict[TopicPartition, PartitionState] = {}
        self.changes = 0
        """Grows with every change of topics, to be compared by those who acted on an older state."""
        self.calls = 0
        """Grows with every call of `subscribe` and `assign`."""

    # -- what to read

    def subscribe(self, topics: Iterable[str], pattern: Pattern | None, listener: RebalanceListener | None) -> None:
        """Read these topics, or those that match, with a group that deals out the partitions."""
        if self.by_user and self._assigned:
            raise ValueError("this consumer was given partitions by assign(); unsubscribe() first")
        self.calls += 1
        self.by_user = False
        self.pattern = pattern
        self.listener = listener
        self.set_topics(topics)

    def set_topics(self, topics: Iterable[str]) -> bool:
        """Replace the topics, as when the cluster has a new one that matches the pattern; True when they differ."""
        new = frozenset(topics)
        if new == self.topics:
            return False
        self.topics = new
        self.changes += 1
        return True

    def assign(self, partitions: Iterable[TopicPartition]) -> None:
        """Read exactly these partitions; those read before keep their positions."""
        if self.subscribed:
            raise ValueError("this consumer subscribed to topics; unsubscribe() first")
        self.calls += 1
        self.by_user = True
        self.set_assigned(partitions)

    def unsubscribe(self) -> None:
        self.by_user = False
        self.pattern = self.listener = None
        self.set_topics(())
        self._assigned = {}

    @property
    def subscribed(self) -> bool:
        return bool(self.topics) or self.pattern is not None

    def set_assigned(self, partitions: Iterable[TopicPartition]) -> None:
        """Replace the assignment; a partition in both keeps its state."""
        known = self._assigned
        self._assigned = {partition: known.get(partition) or PartitionState() for partition in partitions}

    @property
    def assigned(self) -> Mapping[TopicPartition, PartitionState]:
        return self._assigned

    def state(self, partition: TopicPartition) -> PartitionState:
        """Raises ValueError for a partition this consumer was not assigned."""
        found = self._assigned.get(partition)
        if found is None:
            raise ValueError(f"{partition} is not assigned to this consumer")
        return found

    # -- how far

    def seek(self, partition: TopicPartition, offset: int, leader_epoch: int = -1) -> None:
        """Go on at `offset`; raises ValueError for a negative one or a partition not assigned.

        With the leader epoch of the record before it, the leader is asked first whether it has that record.
        """
        state = self.state(partition)
        if offset < 0:
            raise ValueError(f"cannot seek {partition} to {offset}: offsets are not negative")
        state.position = offset
        state.leader_epoch = leader_epoch
        state.unvalidated = leader_epoch >= 0
        state.reset_to = None
        state.retry_at_ms = 0.0

    def ask_reset(self, partition: TopicPartition, timestamp: int) -> None:
        """Forget the position and find it anew: -1 the end, -2 the beginning, else by time in ms."""
        state = self.state(partition)
        state.position = -1
        state.leader_epoch = -1
        state.unvalidated = False
        state.read_replica = -1
        state.reset_to = timestamp
        state.retry_at_ms = 0.0

    def finish_reset(
        self, partition: TopicPartition, timestamp: int, offset: int, leader_epoch: int, current_epoch: int
    ) -> bool:
        """The answer to a reset, of the leader of `current_epoch`; False, and nothing done, when no longer wanted."""
        state = self._assigned.get(partition)
        if state is None or state.reset_to != timestamp:
            return False
        self.seek(partition, offset, leader_epoch)
        state.unvalidated = leader_epoch >= 0 and 0 <= current_epoch < state.current_epoch
        state.current_epoch = max(state.current_epoch, current_epoch)
        return True

    def note_leader_epochs(self, epoch_of: Callable[[TopicPartition], int]) -> list[TopicPartition]:
        """Compare the leaders' epochs with those known so far; the partitions whose position is to be checked now."""
        doubtful = []
        for partition, state in self._assigned.items():
            epoch = epoch_of(partition)
            if epoch < 0 or epoch == state.current_epoch:
                continue
            state.current_epoch = epoch
            state.read_replica = -1
            if state.position >= 0 and state.leader_epoch >= 0:
                state.unvalidated = True
                doubtful.append(partition)
        return doubtful

    def note_topic_ids(self, id_of: Callable[[str], bytes]) -> list[TopicPartition]:
        """Compare the topics' ids with those known so far; the partitions with a position in a topic that is gone."""
        replaced = []
        for partition, state in self._assigned.items():
            topic_id = id_of(partition.topic)
            if topic_id in (NO_TOPIC_ID, state.topic_id):
                continue
            if state.topic_id != NO_TOPIC_ID and state.position >= 0:
                replaced.append(partition)
            state.topic_id = topic_id
        return replaced

    def unvalidated(self) -> list[TopicPartition]:
        return [partition for partition, state in self._assigned.items() if state.unvalidated and state.position >= 0]

    def diverged(
        self, partition: TopicPartition, epoch: int, end_offset: int, reset_to: int | None
    ) -> LogTruncation | None:
        """The leader's answer about the epoch of the position: the largest epoch it has that is not above, and where
        that ends. A position beyond the end goes back to it, to where reading must begin anew; without a reset policy
        (`reset_to` None) it stays, and the error is returned. -1 says that the leader knows no such epoch.
        """
        state = self.state(partition)
        known = epoch >= 0 and end_offset >= 0
        if known and end_offset >= state.position:
            state.leader_epoch = min(state.leader_epoch, epoch)
            state.unvalidated = False
        elif reset_to is None:
            state.unvalidated = True
            divergent = OffsetAndMetadata(end_offset, "", epoch) if known else None
            return LogTruncation(partition, OffsetAndMetadata(state.position, "", state.leader_epoch), divergent)
        elif known:
            state.position, state.leader_epoch, state.unvalidated = end_offset, epoch, False
        else:
            self.ask_reset(partition, reset_to)
        return None

    def consumed(self, partition: TopicPartition, from_offset: int, next_offset: int, leader_epoch: int) -> bool:
        """Records were handed out; False when the position had moved meanwhile: then they must not be."""
        state = self._assigned.get(partition)
        if state is None or state.position != from_offset:
            return False
        state.position = next_offset
        state.leader_epoch = leader_epoch
        return True

    def rewind(self, partition: TopicPartition, offset: int, leader_epoch: int) -> None:
        """Records from `offset`, which has this leader epoch, were handed to an iterator that did not pass them on."""
        state = self._assigned.get(partition)
        if state is not None and state.position > offset:
            state.position = offset
            state.leader_epoch = leader_epoch

    def positions(self) -> dict[TopicPartition, OffsetAndMetadata]:
        """What a commit of everything consumed commits."""
        return {
            partition: OffsetAndMetadata(state.position, "", state.leader_epoch)
            for partition, state in self._assigned.items()
            if state.position >= 0
        }

    # -- what needs doing

    def without_position(self) -> list[TopicPartition]:
        """Partitions whose position is neither known nor being looked for."""
        return [
            partition for partition, state in self._assigned.items() if state.position < 0 and state.reset_to is None
        ]

    def to_reset(self, now_ms: float) -> dict[TopicPartition, int]:
        """Partitions with a reset outstanding, and to what."""
        return {
            partition: state.reset_to
            for partition, state in self._assigned.items()
            if state.reset_to is not None and state.retry_at_ms <= now_ms
        }

    def fetchable(self, now_ms: float) -> list[TopicPartition]:
        """Partitions that may be fetched, in the order of assignment."""
        return [
            partition
            for partition, state in self._assigned.items()
            if state.position >= 0 and not state.paused and not state.unvalidated and state.retry_at_ms <= now_ms
        ]

    def pause(self, partitions: Sequence[TopicPartition]) -> None:
        for state in [self.state(partition) for partition in partitions]:
            state.paused = True

    def resume(self, partitions: Sequence[TopicPartition]) -> None:
        for state in [self.state(partition) for partition in partitions]:
            state.paused = False

    def paused(self) -> set[TopicPartition]:
        return {partition for partition, state in self._assigned.items() if state.paused}

    def lag(self, partition: TopicPartition) -> int | None:
        """Records between the position and the end last heard of; None while either is unknown."""
        state = self.state(partition)
        if state.position < 0 or state.high_watermark < 0:
            return None
        return max(0, state.high_watermark - state.position)
