"""The state of a consumer's reading: topics, assigned partitions, positions, pauses, resets.

Pure. `membership` assigns partitions and `fetcher` fetches them; both work on this state.
Invariants: a partition is fetched only when it has a position and is not paused. A position changes
only by consuming, by a seek, or by a requested reset; so a late response for an older position is
recognised and dropped. A position that a new leader may not have is validated before it is fetched
from (KIP-320).
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence

from tidelog.client.consuming.log_truncation import LogTruncation
from tidelog.client.model import OffsetAndMetadata, TopicPartition
from tidelog.client.network.metadata import NO_TOPIC_ID

Pattern = re.Pattern[str]
LEFT_PARTITIONS_MAX = 10_000
"""So many states are kept of partitions that have left the metadata; the latest ones."""


class RebalanceListener:
    """Callbacks for rebalances, called inside `poll`.

    Subclass it; methods may be plain or `async def`.
    """

    def on_partitions_revoked(self, revoked: Collection[TopicPartition]) -> Awaitable[None] | None:
        """Called before the partitions go to other members: the place to commit or to save
        positions.
        """
        return None

    def on_partitions_assigned(self, assigned: Collection[TopicPartition]) -> Awaitable[None] | None:
        """Called with the new partitions: the place to seek."""
        return None

    def on_partitions_lost(self, lost: Collection[TopicPartition]) -> Awaitable[None] | None:
        """Called when other members own the partitions already, so that a commit would be refused.

        The default calls `on_partitions_revoked`.
        """
        return self.on_partitions_revoked(lost)


class PartitionState:
    """The state of one assigned partition. Unknown offsets are -1."""

    __slots__ = (
        "awaiting_validation",
        "current_epoch",
        "high_watermark",
        "is_reset_untried",
        "last_stable_offset",
        "leader_epoch",
        "log_start_offset",
        "paused",
        "position",
        "read_replica",
        "read_replica_until_ms",
        "replaced",
        "reset_to",
        "retry_at_ms",
        "topic_id",
    )

    def __init__(self) -> None:
        self.position = -1
        """The next offset to hand out."""
        self.leader_epoch = -1
        """The epoch of the last batch handed out. It is committed with the position."""
        self.current_epoch = -1
        """The leader epoch in which the position was looked up or must be validated."""
        self.awaiting_validation = False
        """The current leader has not confirmed yet that it has the records before the position."""
        self.read_replica = -1
        """The replica to read from instead of the leader, as named by the leader (KIP-392)."""
        self.read_replica_until_ms = 0.0
        self.reset_to: int | None = None
        """The ListOffsets timestamp (-1 latest, -2 earliest) of a pending reset."""
        self.is_reset_untried = False
        """The position is the outcome of a reset, and no fetch from it has succeeded yet."""
        self.paused = False
        self.high_watermark = -1
        self.last_stable_offset = -1
        self.log_start_offset = -1
        self.retry_at_ms = 0.0
        """The earliest time of the next fetch."""
        self.topic_id = NO_TOPIC_ID
        """The id of the topic to which the position belongs."""
        self.replaced: tuple[bytes, int, int] | None = None
        """The topic id before this one, and the position and its leader epoch there."""


class Subscription:
    """The subscription of one consumer.

    `subscribe` and `assign` exclude each other, as in Kafka.
    """

    def __init__(self) -> None:
        self.topics: frozenset[str] = frozenset()
        self.pattern: Pattern | str | None = None
        """Text in the consumer protocol (KIP-848), whose broker evaluates it."""
        self.listener: RebalanceListener | None = None
        self.is_user_assigned = False
        """The partitions come from `assign`, not from a group."""
        self._assigned: dict[TopicPartition, PartitionState] = {}
        self._left: dict[TopicPartition, PartitionState] = {}
        """Without a group: the states of partitions that have left the metadata, the latest last."""
        self._may_have_unsettled = False
        """Some position may be missing or in doubt. Every poll asks for those, and one of thousands of partitions
        must not look at each of them for a record or two.
        """
        self.pause_changes: set[TopicPartition] = set()
        """Assigned partitions that were paused or resumed since the fetcher has looked at them."""
        self.topic_change_count = 0
        """Grows with every change of the topics, so that a caller can detect a change."""
        self.call_count = 0
        """Grows with every call of `subscribe` and `assign`."""

    # -- what to read

    def subscribe(
        self, topics: Iterable[str], pattern: Pattern | str | None, listener: RebalanceListener | None
    ) -> None:
        """Read these topics, or the topics that match. The group assigns the partitions."""
        if self.is_user_assigned and self._assigned:
            raise ValueError("this consumer was given partitions by assign(); unsubscribe() first")
        self.call_count += 1
        self._left.clear()
        self.is_user_assigned = False
        self.pattern = pattern
        self.listener = listener
        self.set_topics(topics)

    def set_topics(self, topics: Iterable[str]) -> bool:
        """Replace the topics, for example when a new topic matches the pattern; True when they
        differ.
        """
        new_topics = frozenset(topics)
        if new_topics == self.topics:
            return False
        self.topics = new_topics
        self.topic_change_count += 1
        return True

    def assign(self, partitions: Iterable[TopicPartition]) -> None:
        """Read exactly these partitions. Partitions assigned before keep their positions."""
        if self.subscribed:
            raise ValueError("this consumer subscribed to topics; unsubscribe() first")
        self.call_count += 1
        self.is_user_assigned = True
        self.set_assigned(partitions)

    def unsubscribe(self) -> None:
        self.is_user_assigned = False
        self.pattern = self.listener = None
        self.set_topics(())
        self._assigned = {}
        self._left.clear()
        self.pause_changes.clear()

    @property
    def subscribed(self) -> bool:
        return bool(self.topics) or self.pattern is not None

    def set_assigned(self, partitions: Iterable[TopicPartition]) -> None:
        """Replace the assignment; a partition in both keeps its state."""
        self._replace_assigned(partitions, self._assigned)

    def follow_metadata(self, partitions: Iterable[TopicPartition]) -> None:
        """Read exactly these partitions, all of the topics in the metadata, without a group.

        One that the metadata lacked for a while keeps its state: a broker that is behind does not have a new topic yet,
        or has a deleted one of that name, with fewer partitions. The topic id tells whether the position is of the
        topic that came back.
        """
        known = {**self._left, **self._assigned}
        self._replace_assigned(partitions, known)
        left = [each for each in known.items() if each[0] not in self._assigned]
        self._left = dict(left[-LEFT_PARTITIONS_MAX:])

    def _replace_assigned(
        self, partitions: Iterable[TopicPartition], known: Mapping[TopicPartition, PartitionState]
    ) -> None:
        self._assigned = {partition: known.get(partition) or PartitionState() for partition in partitions}
        self.pause_changes.clear()
        self._may_have_unsettled = True

    @property
    def assigned(self) -> Mapping[TopicPartition, PartitionState]:
        return self._assigned

    def state(self, partition: TopicPartition) -> PartitionState:
        """The state of an assigned partition. Raises ValueError for any other partition."""
        state = self._assigned.get(partition)
        if state is None:
            raise ValueError(f"{partition} is not assigned to this consumer")
        return state

    # -- positions

    def seek(self, partition: TopicPartition, offset: int, leader_epoch: int = -1) -> None:
        """Continue at `offset`. Raises ValueError for a negative offset or an unassigned partition.

        With the leader epoch of the record before `offset`, the position is validated first: the
        leader must have that record.
        """
        state = self.state(partition)
        if offset < 0:
            raise ValueError(f"cannot seek {partition} to {offset}: offsets are not negative")
        state.position = offset
        state.leader_epoch = leader_epoch
        state.awaiting_validation = leader_epoch >= 0
        self._may_have_unsettled |= state.awaiting_validation
        state.reset_to = None
        state.is_reset_untried = False
        state.replaced = None
        state.retry_at_ms = 0.0

    def request_reset(self, partition: TopicPartition, timestamp: int) -> None:
        """Drop the position and look it up again: -1 end, -2 beginning, else a time in ms."""
        state = self.state(partition)
        self._may_have_unsettled = True
        state.position = -1
        state.leader_epoch = -1
        state.awaiting_validation = False
        state.read_replica = -1
        state.reset_to = timestamp
        state.retry_at_ms = 0.0

    def finish_reset(
        self, partition: TopicPartition, timestamp: int, offset: int, leader_epoch: int, current_epoch: int
    ) -> bool:
        """Apply the reset offset from the leader of `current_epoch`; False when this reset is not
        pending any more.
        """
        state = self._assigned.get(partition)
        if state is None or state.reset_to != timestamp:
            return False
        self.seek(partition, offset, leader_epoch)
        state.is_reset_untried = True
        state.awaiting_validation = leader_epoch >= 0 and 0 <= current_epoch < state.current_epoch
        self._may_have_unsettled |= state.awaiting_validation
        state.current_epoch = max(state.current_epoch, current_epoch)
        return True

    def update_leader_epochs(self, epoch_of: Callable[[TopicPartition], int]) -> list[TopicPartition]:
        """Store the leaders' epochs.

        Returns the partitions whose position must be validated now.
        """
        to_validate = []
        for partition, state in self._assigned.items():
            epoch = epoch_of(partition)
            if epoch < 0 or epoch == state.current_epoch:
                continue
            state.current_epoch = epoch
            state.read_replica = -1
            if state.position >= 0 and state.leader_epoch >= 0:
                state.awaiting_validation = self._may_have_unsettled = True
                to_validate.append(partition)
        return to_validate

    def update_topic_ids(self, id_of: Callable[[str], bytes]) -> tuple[list[TopicPartition], list[TopicPartition]]:
        """Store the topics' ids.

        Returns the partitions whose position belongs to a deleted topic, and those that have the position of before
        again: a broker that was behind has named the deleted topic for a while.
        """
        replaced: list[TopicPartition] = []
        restored: list[TopicPartition] = []
        for partition, state in self._assigned.items():
            topic_id = id_of(partition.topic)
            if topic_id in (NO_TOPIC_ID, state.topic_id):
                continue
            previous, present = state.replaced, (state.topic_id, state.position, state.leader_epoch)
            has_position = state.topic_id != NO_TOPIC_ID and state.position >= 0
            if previous is not None and previous[0] == topic_id:
                self.seek(partition, *previous[1:])
                restored.append(partition)
            elif has_position:
                replaced.append(partition)
            if has_position:
                state.replaced = present
            state.topic_id = topic_id
        return replaced, restored

    def is_of_topic(self, partition: TopicPartition, topic_id: bytes) -> bool:
        """Whether the position, if there is one, may be of this topic: it has the id, or one of both is unknown."""
        state = self._assigned.get(partition)
        return state is None or NO_TOPIC_ID in (topic_id, state.topic_id) or topic_id == state.topic_id

    def topic_ids(self, topics: Iterable[str], id_of: Callable[[str], bytes]) -> dict[str, bytes]:
        """The ids of the topics to which the positions belong; of topics without a position, those of the metadata."""
        known = {
            partition.topic: state.topic_id
            for partition, state in self._assigned.items()
            if state.topic_id != NO_TOPIC_ID
        }
        return {topic: known.get(topic) or id_of(topic) for topic in topics}

    def of_deleted_topics(self, id_of: Callable[[str], bytes]) -> list[TopicPartition]:
        """The partitions whose topic the metadata had, and has no longer."""
        return [
            partition
            for partition, state in self._assigned.items()
            if state.topic_id != NO_TOPIC_ID and id_of(partition.topic) == NO_TOPIC_ID
        ]

    def _unsettled(self) -> list[tuple[TopicPartition, PartitionState]]:
        """The partitions whose position is missing or in doubt."""
        if not self._may_have_unsettled:
            return []
        unsettled = [each for each in self._assigned.items() if each[1].position < 0 or each[1].awaiting_validation]
        self._may_have_unsettled = bool(unsettled)
        return unsettled

    def awaiting_validation(self) -> list[TopicPartition]:
        return [
            partition for partition, state in self._unsettled() if state.awaiting_validation and state.position >= 0
        ]

    def handle_divergence(
        self, partition: TopicPartition, epoch: int, end_offset: int, reset_to: int | None
    ) -> LogTruncation | None:
        """Apply the leader's answer about the epoch of the position.

        `epoch` is the leader's largest epoch at or below that of the position, and `end_offset` is
        the end of `epoch`. -1 means that the leader has no such epoch. A position beyond the end
        goes back to the end. Without a reset policy (`reset_to` None) it stays, and the error is
        returned.
        """
        state = self.state(partition)
        has_epoch = epoch >= 0 and end_offset >= 0
        if has_epoch and end_offset >= state.position:
            state.leader_epoch = min(state.leader_epoch, epoch)
            state.awaiting_validation = False
        elif reset_to is None:
            state.awaiting_validation = self._may_have_unsettled = True
            divergent = OffsetAndMetadata(end_offset, "", epoch) if has_epoch else None
            return LogTruncation(partition, OffsetAndMetadata(state.position, "", state.leader_epoch), divergent)
        elif has_epoch:
            state.position, state.leader_epoch, state.awaiting_validation = end_offset, epoch, False
        else:
            self.request_reset(partition, reset_to)
        return None

    def advance_position(
        self, partition: TopicPartition, from_offset: int, next_offset: int, leader_epoch: int
    ) -> bool:
        """Move the position behind records to hand out; False, and they must be dropped, when it
        moved meanwhile.
        """
        state = self._assigned.get(partition)
        if state is None or state.position != from_offset:
            return False
        state.position = next_offset
        state.leader_epoch = leader_epoch
        return True

    def rewind(self, partition: TopicPartition, offset: int, leader_epoch: int) -> None:
        """Move the position back to `offset` with its leader epoch: an iterator did not hand out
        the rest.
        """
        state = self._assigned.get(partition)
        if state is not None and state.position > offset:
            state.position = offset
            state.leader_epoch = leader_epoch

    def positions(self) -> dict[TopicPartition, OffsetAndMetadata]:
        """The offsets to commit for everything consumed."""
        return {
            partition: OffsetAndMetadata(state.position, "", state.leader_epoch)
            for partition, state in self._assigned.items()
            if state.position >= 0
        }

    # -- partitions to work on

    def partitions_without_position(self) -> list[TopicPartition]:
        """Partitions without a position and without a pending reset."""
        return [partition for partition, state in self._unsettled() if state.position < 0 and state.reset_to is None]

    def pending_resets(self, now_ms: float) -> dict[TopicPartition, int]:
        """Partitions with a pending reset that is due, with its ListOffsets timestamp."""
        return {
            partition: state.reset_to
            for partition, state in self._unsettled()
            if state.reset_to is not None and state.retry_at_ms <= now_ms
        }

    def fetchable_partitions(self, partitions: Iterable[TopicPartition], now_ms: float) -> list[TopicPartition]:
        """Those of these assigned partitions that may be fetched."""
        assigned = self._assigned
        return [
            partition
            for partition in partitions
            if not (state := assigned[partition]).paused
            and state.position >= 0
            and not state.awaiting_validation
            and state.retry_at_ms <= now_ms
        ]

    def pause(self, partitions: Sequence[TopicPartition]) -> None:
        for state in [self.state(partition) for partition in partitions]:
            state.paused = True
        self.pause_changes.update(partitions)

    def resume(self, partitions: Sequence[TopicPartition]) -> None:
        for state in [self.state(partition) for partition in partitions]:
            state.paused = False
        self.pause_changes.update(partitions)

    def paused(self) -> set[TopicPartition]:
        return {partition for partition, state in self._assigned.items() if state.paused}

    def lag(self, partition: TopicPartition) -> int | None:
        """Records between the position and the last known high watermark; None while either is
        unknown.
        """
        state = self.state(partition)
        if state.position < 0 or state.high_watermark < 0:
            return None
        return max(0, state.high_watermark - state.position)
