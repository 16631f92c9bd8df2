"""Committed offsets: the store, the rules for commits, and expiration.

The state of groups lives in `group`. Offsets change only in `replay`. Offsets of an open
transaction are kept apart, by producer id, until the transaction's marker is replayed. Invariant:
of two commits for the same partition the one with the larger offset in the log wins, even if its
transaction ends first. Source: Kafka's `OffsetMetadataManager`.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice, starmap
from sys import maxsize
from typing import NamedTuple, overload

from tidelog.broker.coordinators.group.group import Group
from tidelog.broker.coordinators.group.memory import (
    PENDING_OFFSET_BYTES,
    GroupMemory,
    GroupMemoryBudget,
    group_offsets_size_bytes,
    offset_size_bytes,
    pending_offset_size_bytes,
    topic_offsets_size_bytes,
)
from tidelog.broker.coordinators.group.records import OffsetCommit
from tidelog.broker.coordinators.group.states import COMMIT_ANSWER, GroupState
from tidelog.protocol.errors import ErrorCode
from tidelog.protocol.messages.group_records import OffsetCommitValue
from tidelog.protocol.messages.offset_commit import (
    OffsetCommitRequest,
    OffsetCommitRequestPartition,
    OffsetCommitResponse,
    OffsetCommitResponsePartition,
    OffsetCommitResponseTopic,
)
from tidelog.protocol.messages.txn_offset_commit import (
    TxnOffsetCommitRequest,
    TxnOffsetCommitRequestPartition,
    TxnOffsetCommitResponse,
    TxnOffsetCommitResponsePartition,
    TxnOffsetCommitResponseTopic,
)

GROUP_ID_NOT_FOUND_VERSION_MIN = 9
NO_TOPIC_ID = bytes(16)


class CommittedOffset(NamedTuple):
    """`record_offset`: of the commit's record. `expire_timestamp_ms` and `leader_epoch` are -1
    where unknown.
    """

    offset: int
    leader_epoch: int
    metadata: str
    commit_timestamp_ms: int
    expire_timestamp_ms: int
    topic_id: bytes
    record_offset: int


class FetchedOffset(NamedTuple):
    """One partition's answer to OffsetFetch; offset -1 means that the group has no committed
    offset. `topic_id`: that of the commit, zero where unknown.
    """

    partition: int
    offset: int = -1
    leader_epoch: int = -1
    metadata: str = ""
    error: ErrorCode = ErrorCode.NONE
    topic_id: bytes = NO_TOPIC_ID


class OffsetWrite(NamedTuple):
    """The context of a write of offsets. `growth_bytes`: the memory they need beyond the offsets
    they replace.
    """

    records: list[OffsetCommit]
    growth_bytes: int = 0


class DeletedTopic(NamedTuple):
    """`end_offset`: what was written behind it is no longer of this topic, but of one that was created since."""

    topic_id: bytes
    end_offset: int


TopicOffsets = dict[str, dict[int, CommittedOffset]]
RequestedTopics = list[tuple[str, bytes, list[int]]]  # (name, topic id or zero, partitions)


class FetchedPartitions(Sequence[FetchedOffset]):
    """The answers for partitions of one topic, of one moment. Each is made when it is asked for: there may be hundreds
    of thousands, and other requests are served between them.

    `unstable`: the partitions with an offset in an open transaction.
    """

    __slots__ = ("_entries", "_topic_id", "_unstable")

    def __init__(
        self, topic_id: bytes, entries: list[tuple[int, CommittedOffset | None]], unstable: Collection[int]
    ) -> None:
        self._topic_id = topic_id
        self._entries = entries
        self._unstable = unstable

    def __len__(self) -> int:
        return len(self._entries)

    @overload
    def __getitem__(self, place: int) -> FetchedOffset: ...
    @overload
    def __getitem__(self, place: slice) -> list[FetchedOffset]: ...
    def __getitem__(self, place: int | slice) -> FetchedOffset | list[FetchedOffset]:
        if isinstance(place, slice):
            return [*starmap(self._made, self._entries[place])]
        return self._made(*self._entries[place])

    def __iter__(self) -> Iterator[FetchedOffset]:
        return starmap(self._made, self._entries)

    def of_topic(self, topic_id: bytes) -> FetchedPartitions:
        """Without the offsets of former topics of the name, if this id is known."""
        entries, unstable = self._entries, self._unstable
        if topic_id != NO_TOPIC_ID:
            ids = (topic_id, NO_TOPIC_ID)
            entries = [each for each in entries if each[1] is None or each[1].topic_id in ids or each[0] in unstable]
        return FetchedPartitions(topic_id, entries, unstable)

    def _made(self, index: int, entry: CommittedOffset | None) -> FetchedOffset:
        if index in self._unstable:
            return FetchedOffset(index, error=ErrorCode.UNSTABLE_OFFSET_COMMIT)
        if entry is None or is_of_another_topic(entry.topic_id, self._topic_id):
            return FetchedOffset(index)
        return FetchedOffset(index, entry.offset, entry.leader_epoch, entry.metadata, ErrorCode.NONE, entry.topic_id)


FetchedTopics = list[tuple[str, FetchedPartitions]]


class PendingOffsets:
    """The offsets of open transactions by producer id, and which producers have one of a partition.

    There may be thousands of producers, and a request may name thousands of partitions: none is looked for among the
    offsets of each. The sizes are changes of memory in bytes.
    """

    def __init__(self) -> None:
        self._by_producer: dict[int, dict[str, TopicOffsets]] = {}
        # By group and (topic, partition); never an empty set or an empty group.
        self._producers: dict[str, dict[tuple[str, int], set[int]]] = {}

    def __bool__(self) -> bool:
        return bool(self._by_producer)

    def has_group(self, group_id: str) -> bool:
        return group_id in self._producers

    def has(self, group_id: str, topic: str, partition: int) -> bool:
        return group_id in self._producers and (topic, partition) in self._producers[group_id]

    def of_producer(self, producer_id: int) -> dict[str, TopicOffsets]:
        return self._by_producer.get(producer_id, {})

    def groups(self) -> Iterable[str]:
        return self._producers

    def partitions_of(self, group_id: str) -> Iterable[tuple[str, int]]:
        return self._producers.get(group_id, ())

    def of_partition(self, group_id: str, topic: str, partition: int) -> Iterator[CommittedOffset]:
        """Those of all producers."""
        for producer_id in self._producers.get(group_id, {}).get((topic, partition), ()):
            yield self._by_producer[producer_id][group_id][topic][partition]

    def put(self, producer_id: int, record: OffsetCommit, entry: CommittedOffset) -> int:
        key = (record.topic, record.partition)
        producers = self._producers.setdefault(record.group_id, {}).setdefault(key, set())
        is_new = producer_id not in producers
        producers.add(producer_id)
        groups = self._by_producer.setdefault(producer_id, {})
        return _put(groups, record.group_id, *key, entry) + is_new * PENDING_OFFSET_BYTES

    def remove(self, record: OffsetCommit) -> int:
        """Forget what open transactions of any producer would commit for a partition whose offset is deleted."""
        size_bytes = 0
        if not self.has(record.group_id, record.topic, record.partition):
            return size_bytes
        for producer_id in tuple(self._producers[record.group_id][record.topic, record.partition]):
            size_bytes += self.remove_of_producer(producer_id, record)
        return size_bytes

    def first(self, producer_id: int, count_max: int) -> list[tuple[OffsetCommit, CommittedOffset]]:
        """The first `count_max` offsets of the producer, each with the record that would delete it."""
        return list(islice(self._of_producer(producer_id), count_max))

    def _of_producer(self, producer_id: int) -> Iterator[tuple[OffsetCommit, CommittedOffset]]:
        for group_id, topics in self._by_producer.get(producer_id, {}).items():
            for topic, partitions in topics.items():
                for partition, entry in partitions.items():
                    yield OffsetCommit(group_id, topic, partition, None), entry

    def remove_of_producer(self, producer_id: int, record: OffsetCommit) -> int:
        """Remove the offset of one producer, whose transaction has ended; those of other producers stay."""
        group_id, topic, partition, _ = record
        producers = self._producers[group_id][topic, partition]
        producers.discard(producer_id)
        if not producers:
            self._forget(group_id, topic, partition)
        pending = self._by_producer[producer_id]
        size_bytes = _remove(pending, record) - PENDING_OFFSET_BYTES
        if not pending:
            del self._by_producer[producer_id]
        return size_bytes

    def _forget(self, group_id: str, topic: str, partition: int) -> None:
        of_group = self._producers[group_id]
        del of_group[topic, partition]
        if not of_group:
            del self._producers[group_id]


class OffsetStore:
    """`memory` is charged for offsets that are committed, in an open transaction, or being written."""

    def __init__(self, memory: GroupMemory | None = None) -> None:
        self.memory = memory or GroupMemory(GroupMemoryBudget(maxsize))
        self._groups: dict[str, TopicOffsets] = {}
        self._pending = PendingOffsets()
        # The number of unreplayed records, by group and (topic, partition); never an empty group.
        self._in_flight: dict[str, dict[tuple[str, int], int]] = {}

    def __contains__(self, group_id: object) -> bool:
        """Whether the group has an offset, committed or in an open transaction."""
        return group_id in self._groups or (isinstance(group_id, str) and self._pending.has_group(group_id))

    def group_ids(self) -> list[str]:
        """Ids of the groups that have an offset: committed, in an open transaction, or being written."""
        return list(dict.fromkeys((*self._groups, *self._pending.groups(), *self._in_flight)))

    def of_group(self, group_id: str) -> TopicOffsets:
        return self._groups.get(group_id, {})

    def positions(self) -> Iterator[tuple[str, str, int, int]]:
        """(group, topic, partition, offset) of every committed offset."""
        for group_id, topics in self._groups.items():
            for topic, partitions in topics.items():
                for index, entry in partitions.items():
                    yield group_id, topic, index, entry.offset

    def is_pending(self, group_id: str, topic: str, partition: int) -> bool:
        return self._pending.has(group_id, topic, partition)

    # -- writes under way --------------------------------------------------------------------------------------------

    def begin(self, write: OffsetWrite) -> None:
        """Register records before their append: the offsets that they replace are not deleted meanwhile."""
        for group_id, topic, partition, _ in write.records:
            in_flight = self._in_flight.get(group_id)
            if in_flight is None:
                in_flight = self._in_flight[group_id] = {}
            in_flight[topic, partition] = in_flight.get((topic, partition), 0) + 1
        self._charge(write.growth_bytes)

    def end(self, write: OffsetWrite) -> None:
        """Unregister records that are replayed, or whose write has failed."""
        self._charge(-write.growth_bytes)
        for group_id, topic, partition, _ in write.records:
            in_flight = self._in_flight[group_id]
            in_flight[topic, partition] -= 1
            if not in_flight[topic, partition]:
                del in_flight[topic, partition]
                if not in_flight:
                    del self._in_flight[group_id]

    # -- memory ------------------------------------------------------------------------------------------------------

    def growth_by(self, records: Iterable[OffsetCommit], producer_id: int = -1) -> int:
        """The memory, in bytes, that these commits need beyond the offsets that they replace.

        The offsets of a transaction are kept beside the others, by its producer id.
        """
        is_pending = producer_id >= 0
        groups = self._pending.of_producer(producer_id) if is_pending else self._groups
        size_of = pending_offset_size_bytes if is_pending else offset_size_bytes
        size_bytes = 0
        new_entries: set[object] = set()
        for record in records:
            if record.value is None:
                continue
            topics = groups.get(record.group_id)
            partitions = topics.get(record.topic) if topics is not None else None
            previous = partitions.get(record.partition) if partitions is not None else None
            size_bytes += size_of(record.value.metadata)
            if previous is not None:
                size_bytes -= size_of(previous.metadata)
            if partitions is None and (record.group_id, record.topic) not in new_entries:
                new_entries.add((record.group_id, record.topic))
                size_bytes += topic_offsets_size_bytes(record.topic)
            if topics is None and record.group_id not in new_entries:
                new_entries.add(record.group_id)
                size_bytes += group_offsets_size_bytes(record.group_id)
        return size_bytes

    def _charge(self, size_bytes: int) -> None:
        self.memory.hold(self.memory.held_bytes + size_bytes)

    # -- replay ------------------------------------------------------------------------------------------------------

    def replay(self, record_offset: int, record: OffsetCommit, producer_id: int) -> None:
        value = record.value
        if value is None:
            self._charge(_remove(self._groups, record))
            self._charge(self._pending.remove(record))
            return
        entry = CommittedOffset(
            value.offset,
            value.leader_epoch,
            value.metadata,
            value.commit_timestamp,
            value.expire_timestamp,
            value.topic_id,
            record_offset,
        )
        if producer_id < 0:
            self._charge(_put(self._groups, record.group_id, record.topic, record.partition, entry))
        else:
            self._charge(self._pending.put(producer_id, record, entry))

    def replay_end_transaction(self, producer_id: int, committed: bool, count_max: int = maxsize) -> int:
        """Commit the next `count_max` of the transaction's offsets, or drop them. Returns how many there were."""
        pending = self._pending.first(producer_id, count_max)
        for record, entry in pending:
            self._charge(self._pending.remove_of_producer(producer_id, record))
            group_id, topic, partition, _ = record
            previous = self._groups.get(group_id, {}).get(topic, {}).get(partition)
            if committed and (previous is None or previous.record_offset < entry.record_offset):
                self._charge(_put(self._groups, group_id, topic, partition, entry))
        return len(pending)

    # -- fetch -------------------------------------------------------------------------------------------------------

    def fetch(self, group_id: str, topics: RequestedTopics | None, require_stable: bool) -> FetchedTopics:
        """The offsets of `topics`, or of all topics for None. An unknown group has no offsets."""
        group_offsets = self._groups.get(group_id, {})
        is_pending = require_stable and self._pending.has_group(group_id)
        answer: FetchedTopics = []
        if topics is None:
            topics = [(topic, NO_TOPIC_ID, list(partitions)) for topic, partitions in group_offsets.items()]
        for topic, topic_id, indexes in topics:
            entry_of = group_offsets.get(topic, {}).get
            unstable = {index for index in indexes if self.is_pending(group_id, topic, index)} if is_pending else ()
            answer.append((topic, FetchedPartitions(topic_id, [*zip(indexes, map(entry_of, indexes))], unstable)))
        return answer

    # -- deletion ----------------------------------------------------------------------------------------------------

    def keys(self, group_id: str, topics: Collection[str] | None = None) -> Iterator[tuple[str, int]]:
        """(topic, partition) of the group's offsets, also those in open transactions and those being written; of all
        topics for None.

        There may be hundreds of thousands, to be looked at in many turns of the loop. The offsets may change
        meanwhile: each that was there at the first turn is found, unless it has been deleted.
        """
        group_offsets = self.of_group(group_id)
        # The intersection iterates over the smaller set: there may be thousands of topics.
        names = sorted(group_offsets if topics is None else group_offsets.keys() & topics)
        pending = [
            (topic, index)
            for topic, index in dict.fromkeys(
                chain(self._pending.partitions_of(group_id), self._in_flight_of(group_id))
            )
            if (topics is None or topic in topics) and index not in group_offsets.get(topic, ())
        ]
        for topic in names:
            for index in list(self.of_group(group_id).get(topic, ())):
                yield topic, index
        yield from pending  # some may be committed by now

    def tombstone(self, group_id: str, topic: str, partition: int) -> OffsetCommit | None:
        """The record that deletes this offset, also in open transactions or being written; None if there is none."""
        if (
            partition in self.of_group(group_id).get(topic, ())
            or self.is_pending(group_id, topic, partition)
            or (topic, partition) in self._in_flight_of(group_id)
        ):
            return OffsetCommit(group_id, topic, partition, None)
        return None

    def tombstones_of_topics(
        self, group_id: str, topics: Mapping[str, Sequence[DeletedTopic]], keys: Iterable[tuple[str, int]]
    ) -> tuple[list[OffsetCommit], bool]:
        """Records that delete those of the group's offsets that are of deleted topics, each by name, and whether any is
        not deleted yet.

        They cover the offsets with that topic id, and those without a topic id. A tombstone follows a commit that is
        under way in the log, and deletes it; and it deletes the partition's committed offset together with those of
        all open transactions. Where one of them may be of a new topic, all stay until a later call.
        """
        in_flight = self._in_flight_of(group_id)
        tombstones: list[OffsetCommit] = []
        is_left = False
        for topic, index in keys:
            are_deleted = [_is_of_deleted(entry, topics[topic]) for entry in self._entries(group_id, topic, index)]
            is_left |= any(are_deleted)
            if are_deleted and all(are_deleted) and (topic, index) not in in_flight:
                tombstones.append(OffsetCommit(group_id, topic, index, None))
        return tombstones, is_left

    def _entries(self, group_id: str, topic: str, partition: int) -> Iterator[CommittedOffset]:
        """The committed offset, and those in open transactions."""
        committed = self.of_group(group_id).get(topic, {}).get(partition)
        if committed is not None:
            yield committed
        yield from self._pending.of_partition(group_id, topic, partition)

    def _in_flight_of(self, group_id: str) -> Mapping[tuple[str, int], int]:
        return self._in_flight.get(group_id, {})

    def is_being_written(self, group_id: str, topics: Container[str]) -> bool:
        """Whether a write of an offset of one of these topics is under way."""
        return any(topic in topics for topic, _ in self._in_flight_of(group_id))

    def expiration_records(
        self, group: Group, keys: Iterable[tuple[str, int]], wall_ms: int, retention_ms: int
    ) -> tuple[list[OffsetCommit], bool]:
        """Records that delete those of these offsets that are expired, and whether all are, and the group waits for no
        transaction and no write.

        The retention time of an empty group's offsets starts when the group became empty. It starts
        at the commit for a group that never had members (manual assignment), and for topics without
        a subscriber. A commit with an expiry time of its own expires then (KIP-211). An offset with
        a commit under way stays: the tombstone would follow the new commit in the log, and delete
        it.
        """
        topics = self.of_group(group.group_id)
        in_flight = self._in_flight_of(group.group_id)
        is_waiting = bool(in_flight) or self._pending.has_group(group.group_id)
        empty_since_ms = -1
        if group.protocol_type is not None:
            if group.state is GroupState.EMPTY:
                empty_since_ms = group.state_since_ms
            elif group.state is not GroupState.STABLE or group.subscribed_topics is None:
                return [], not topics and not is_waiting
        records: list[OffsetCommit] = []
        all_expired = not is_waiting
        for topic, index in keys:
            entry = topics.get(topic, {}).get(index)
            if entry is None:
                continue
            if group.is_subscribed_to(topic) and group.state is not GroupState.EMPTY:
                all_expired = False
                continue
            base_ms = entry.commit_timestamp_ms if empty_since_ms < 0 else empty_since_ms
            if entry.expire_timestamp_ms != -1:
                is_due = wall_ms >= entry.expire_timestamp_ms
            else:
                is_due = wall_ms - base_ms >= retention_ms
            is_renewed = (topic, index) in in_flight
            if is_due and not is_renewed and not self.is_pending(group.group_id, topic, index):
                records.append(OffsetCommit(group.group_id, topic, index, None))
            else:
                all_expired = False
        return records, all_expired


def _put(groups: dict[str, TopicOffsets], group_id: str, topic: str, partition: int, entry: CommittedOffset) -> int:
    """Store the offset; returns the change of memory in bytes."""
    size_bytes = offset_size_bytes(entry.metadata)
    topics = groups.get(group_id)
    if topics is None:
        topics = groups[group_id] = {}
        size_bytes += group_offsets_size_bytes(group_id)
    partitions = topics.get(topic)
    if partitions is None:
        partitions = topics[topic] = {}
        size_bytes += topic_offsets_size_bytes(topic)
    previous = partitions.get(partition)
    if previous is not None:
        size_bytes -= offset_size_bytes(previous.metadata)
    partitions[partition] = entry
    return size_bytes


def _remove(groups: dict[str, TopicOffsets], record: OffsetCommit) -> int:
    """Delete the offset; returns the change of memory in bytes, which is 0 or negative."""
    topics = groups.get(record.group_id)
    partitions = topics.get(record.topic) if topics is not None else None
    if topics is None or partitions is None:
        return 0
    size_bytes = 0
    previous = partitions.pop(record.partition, None)
    if previous is not None:
        size_bytes -= offset_size_bytes(previous.metadata)
    if not partitions:
        del topics[record.topic]
        size_bytes -= topic_offsets_size_bytes(record.topic)
        if not topics:
            del groups[record.group_id]
            size_bytes -= group_offsets_size_bytes(record.group_id)
    return size_bytes


def is_of_another_topic(stored_id: bytes, requested_id: bytes) -> bool:
    """Whether both ids are known and differ: the topic was deleted and created again after the
    commit.
    """
    return stored_id != requested_id and stored_id != NO_TOPIC_ID and requested_id != NO_TOPIC_ID


def _is_of_deleted(entry: CommittedOffset, topics: Sequence[DeletedTopic]) -> bool:
    """Whether the offset is of one of these topics of its name."""
    return any(
        entry.record_offset < deleted.end_offset and not is_of_another_topic(entry.topic_id, deleted.topic_id)
        for deleted in topics
    )


def commit_refusal(group: Group | None, request: OffsetCommitRequest, api_version: int) -> ErrorCode:
    """NONE, or the error of a member that may not commit now; generation -1 is a client outside of
    any group.
    """
    generation = request.generation_id_or_member_epoch
    if group is None:
        if generation < 0:
            return ErrorCode.NONE
        has_code = api_version >= GROUP_ID_NOT_FOUND_VERSION_MIN
        return ErrorCode.GROUP_ID_NOT_FOUND if has_code else ErrorCode.ILLEGAL_GENERATION
    if group.is_being_deleted:
        return ErrorCode.COORDINATOR_NOT_AVAILABLE
    if generation < 0 and group.state is GroupState.EMPTY:
        return ErrorCode.NONE
    if generation < 0 and not request.member_id and request.group_instance_id is None:
        return ErrorCode.UNKNOWN_MEMBER_ID  # only members commit for a group with members
    error = group.check_member(request.member_id, request.group_instance_id)
    if error is ErrorCode.NONE and generation != group.generation:
        error = ErrorCode.ILLEGAL_GENERATION
    return COMMIT_ANSWER[group.state] if error is ErrorCode.NONE else error


def txn_commit_refusal(group: Group | None, request: TxnOffsetCommitRequest) -> ErrorCode:
    """As `commit_refusal`, for offsets of a transaction, whose sender need not be a member.

    Unlike other commits they are accepted while the group rebalances, and from clients of versions
    that do not name the member (Kafka's ClassicGroup.validateOffsetCommit).
    """
    generation, member_id = request.generation_id, request.member_id
    if group is None:
        return ErrorCode.NONE if generation < 0 else ErrorCode.ILLEGAL_GENERATION
    if group.state is GroupState.DEAD or group.is_being_deleted:
        return ErrorCode.COORDINATOR_NOT_AVAILABLE
    if generation < 0 and (group.state is GroupState.EMPTY or (not member_id and request.group_instance_id is None)):
        return ErrorCode.NONE
    error = group.check_member(member_id, request.group_instance_id)
    if error is ErrorCode.NONE and generation != group.generation:
        error = ErrorCode.ILLEGAL_GENERATION
    return error


def txn_commit_records(
    request: TxnOffsetCommitRequest, topic_ids: Mapping[str, bytes], wall_ms: int, max_metadata_bytes: int
) -> tuple[list[OffsetCommit], TxnOffsetCommitResponse]:
    """The records of accepted offsets of a transaction, and the response.

    A topic without an id was deleted meanwhile, and its offsets with it.
    """
    records: list[OffsetCommit] = []
    response = TxnOffsetCommitResponse()
    for topic in request.topics:
        answer = TxnOffsetCommitResponseTopic(name=topic.name)
        response.topics.append(answer)
        for partition in topic.partitions:
            value = _commit_value(partition, wall_ms, max_metadata_bytes)
            error = ErrorCode.OFFSET_METADATA_TOO_LARGE if value is None else ErrorCode.NONE
            answer.partitions.append(
                TxnOffsetCommitResponsePartition(partition_index=partition.partition_index, error_code=error)
            )
            if value is not None and topic.name in topic_ids:
                value.topic_id = topic_ids[topic.name]
                records.append(OffsetCommit(request.group_id, topic.name, partition.partition_index, value))
    return records, response


def commit_records(
    request: OffsetCommitRequest, wall_ms: int, max_metadata_bytes: int
) -> tuple[list[OffsetCommit], OffsetCommitResponse]:
    """The records of an accepted commit, and its response."""
    records: list[OffsetCommit] = []
    response = OffsetCommitResponse()
    retention_ms = request.retention_time_ms
    expire_timestamp_ms = -1 if retention_ms == -1 else wall_ms + retention_ms
    for topic in request.topics:
        answer = OffsetCommitResponseTopic(name=topic.name, topic_id=topic.topic_id)
        response.topics.append(answer)
        for partition in topic.partitions:
            value = _commit_value(partition, wall_ms, max_metadata_bytes)
            error = ErrorCode.OFFSET_METADATA_TOO_LARGE if value is None else ErrorCode.NONE
            answer.partitions.append(
                OffsetCommitResponsePartition(partition_index=partition.partition_index, error_code=error)
            )
            if value is not None:
                value.expire_timestamp = expire_timestamp_ms
                value.topic_id = topic.topic_id
                records.append(OffsetCommit(request.group_id, topic.name, partition.partition_index, value))
    return records, response


def _commit_value(
    partition: OffsetCommitRequestPartition | TxnOffsetCommitRequestPartition, wall_ms: int, max_metadata_bytes: int
) -> OffsetCommitValue | None:
    """The value of the commit's record; None if its metadata is too large."""
    metadata = partition.committed_metadata or ""
    # Kafka counts UTF-16 units here, though the key's name ends in `bytes`.
    if len(metadata) > max_metadata_bytes or (
        not metadata.isascii() and len(metadata.encode("utf-16-le")) // 2 > max_metadata_bytes
    ):
        return None
    return OffsetCommitValue(
        offset=partition.committed_offset,
        leader_epoch=partition.committed_leader_epoch,
        metadata=metadata,
        commit_timestamp=wall_ms,
        expire_timestamp=-1,
    )
