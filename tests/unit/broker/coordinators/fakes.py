"""A node in a few lines for the coordinators: logs in memory, commits when told, time that moves when told."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator
from random import Random
from typing import Any

from tidelog.broker.coordinators.group.config import GroupCoordinatorConfig
from tidelog.broker.coordinators.group.coordinator import GroupCoordinator
from tidelog.broker.coordinators.group.service import GroupCoordinatorService
from tidelog.broker.network.request import Deferred, RequestContext
from tidelog.protocol.batches.record_batch import read_header, stamp
from tidelog.protocol.errors import KafkaError
from tidelog.protocol.messages.heartbeat import HeartbeatRequest, HeartbeatResponse
from tidelog.protocol.messages.join_group import JoinGroupRequest, JoinGroupRequestProtocol, JoinGroupResponse
from tidelog.protocol.messages.leave_group import LeaveGroupRequest, LeaveGroupResponse, MemberIdentity
from tidelog.protocol.messages.list_groups import ListedGroup
from tidelog.protocol.messages.offset_commit import (
    OffsetCommitRequest,
    OffsetCommitRequestPartition,
    OffsetCommitRequestTopic,
    OffsetCommitResponse,
)
from tidelog.protocol.messages.sync_group import SyncGroupRequest, SyncGroupRequestAssignment, SyncGroupResponse
from tidelog.storage.producers.producer_state import ProducerState
from tidelog.storage.producers.verification import TransactionAppend, Verification

Committed = Callable[[Exception | None], None]


class Handle:
    def __init__(self, callback: Callable[[], None]) -> None:
        self.callback: Callable[[], None] | None = callback

    def cancel(self) -> None:
        self.callback = None


class FakePorts:
    """`commits_at_once` is a node alone; else nothing is committed before `commit()` says so."""

    def __init__(self, commits_at_once: bool = True) -> None:
        self.commits_at_once = commits_at_once
        self.commits_on_append = False  # an append makes known that everything before it is committed
        self.logs: dict[int, list[bytearray]] = {}
        self.end_offsets: dict[int, int] = {}
        self.high_watermarks: dict[int, int] = {}
        self.topic_ends: dict[tuple[str, int], int] = {}
        self.refuse_appends: KafkaError | None = None
        self.transactions: list[TransactionAppend | None] = []  # of each append
        self.verifies = False
        self.max_message_bytes = 1024 * 1024 + 12
        self.producers = ProducerState()  # of all partitions
        self.time_ms = 1_000_000
        self.wall_ahead_ms = 1_700_000_000_000
        self._waiting: dict[int, list[tuple[int, Committed]]] = {}
        self._timers: list[tuple[int, int, Handle]] = []
        self._sequence = 0

    def append(self, partition: int, batch: bytearray, transaction: TransactionAppend | None = None) -> int:
        self.transactions.append(transaction)
        if self.refuse_appends is not None:
            raise self.refuse_appends
        base_offset = self.end_offsets.get(partition, 0)
        stamp(batch, 0, base_offset, 0)
        self.logs.setdefault(partition, []).append(bytearray(batch))
        self.end_offsets[partition] = read_header(batch).next_offset
        if self.commits_on_append:
            self.commit(partition, base_offset)
        if self.commits_at_once:
            self.high_watermarks[partition] = self.end_offsets[partition]
        return self.end_offsets[partition]

    def batch_bytes_max(self, partition: int) -> int:
        return self.max_message_bytes

    def begin_verification(
        self, partition: int, producer_id: int, producer_epoch: int, adds: bool
    ) -> Verification | None:
        if not self.verifies:
            return None
        return self.producers.begin_verification(producer_id, producer_epoch, -1, adds, self.time_ms)

    def is_committed(self, partition: int, offset: int) -> bool:
        return self.high_watermarks.get(partition, 0) >= offset

    def when_committed(self, partition: int, offset: int, callback: Committed) -> None:
        if self.high_watermarks.get(partition, 0) >= offset:
            callback(None)
        else:
            self._waiting.setdefault(partition, []).append((offset, callback))

    def commit(self, partition: int, offset: int | None = None) -> None:
        """Move the high watermark, to the log end unless said otherwise."""
        end_offset = self.end_offsets.get(partition, 0) if offset is None else offset
        self.high_watermarks[partition] = max(end_offset, self.high_watermarks.get(partition, 0))
        waiting = self._waiting.pop(partition, [])
        self._waiting[partition] = [each for each in waiting if each[0] > end_offset]
        for required, callback in waiting:
            if required <= end_offset:
                callback(None)

    def lose(self, partition: int, error: KafkaError) -> None:
        for _, callback in self._waiting.pop(partition, []):
            callback(error)

    def truncate_uncommitted(self, partition: int) -> None:
        """What a new leader would not have is gone; nobody is called back any more."""
        kept = [
            b
            for b in self.logs.get(partition, [])
            if read_header(b).next_offset <= self.high_watermarks.get(partition, 0)
        ]
        self.logs[partition] = kept
        self.end_offsets[partition] = end_offset = read_header(kept[-1]).next_offset if kept else 0
        # It may have been in the midst of a batch.
        self.high_watermarks[partition] = min(self.high_watermarks.get(partition, 0), end_offset)
        self._waiting.pop(partition, None)

    def read_log(self, partition: int) -> Iterator[memoryview]:
        for batch in list(self.logs.get(partition, [])):
            yield memoryview(batch)

    def on_thread(self, work: Callable[[], bytes]) -> Callable[[], bytes | None]:
        section = work()
        return lambda: section

    def high_watermark(self, topic: str, partition: int) -> int | None:
        return self.topic_ends.get((topic, partition))

    def call_later(self, delay_ms: int, callback: Callable[[], None]) -> Handle:
        assert delay_ms >= 0
        handle = Handle(callback)
        self._sequence += 1
        heapq.heappush(self._timers, (self.time_ms + delay_ms, self._sequence, handle))
        return handle

    def now_ms(self) -> int:
        return self.time_ms

    def wall_ms(self) -> int:
        return self.time_ms + self.wall_ahead_ms

    def advance(self, by_ms: int) -> None:
        """Let time pass, running what comes due at its own moment."""
        end_ms = self.time_ms + by_ms
        while self._timers and self._timers[0][0] <= end_ms:
            due_ms, _, handle = heapq.heappop(self._timers)
            self.time_ms = max(self.time_ms, due_ms)
            if handle.callback is not None:
                handle.callback()
        self.time_ms = end_ms

    def turn(self) -> int:
        """One turn of the loop: what is due now. Returns the number of appended records."""
        before = sum(self.end_offsets.values())
        due = []
        while self._timers and self._timers[0][0] <= self.time_ms:
            due.append(heapq.heappop(self._timers)[2])
        for handle in due:
            if handle.callback is not None:
                handle.callback()
        return sum(self.end_offsets.values()) - before

    def turn_has_work(self, by_ms: int) -> bool:
        """One turn of the loop, after so long: whether anything was due."""
        self.time_ms += by_ms
        is_due = bool(self._timers) and self._timers[0][0] <= self.time_ms
        self.turn()
        return is_due

    def turns_after(self, wait_ms: int) -> list[int]:
        """Let the time jump; returns the appended records of each turn of the loop that follows, a millisecond each."""
        self.time_ms += wait_ms
        found = []
        while self._timers and self._timers[0][0] <= self.time_ms:
            found.append(self.turn())
            self.time_ms += 1
        return found


class Reply:
    """What one request got: `response` is None while it is parked; a refusal is a KafkaError."""

    def __init__(self, run: Callable[[], Any], clock_ms: Callable[[], int] = lambda: 0) -> None:
        self.response: Any = None
        self.answered_at_ms = -1
        self._clock_ms = clock_ms
        try:
            answer = run()
        except KafkaError as error:
            answer = error
        if isinstance(answer, Deferred):
            answer.on_complete(self._set)
        else:
            self._set(answer)

    def _set(self, response: Any) -> None:
        assert self.response is None, "answered twice"
        self.response = response
        self.answered_at_ms = self._clock_ms()

    @property
    def error(self) -> int:
        assert self.response is not None, "still parked"
        return int(self.response.code if isinstance(self.response, KafkaError) else self.response.error_code)

    @property
    def is_parked(self) -> bool:
        return self.response is None


class World:
    """A service with every partition elected, and requests with everything defaulted."""

    def __init__(
        self,
        config: GroupCoordinatorConfig | None = None,
        *,
        partitions: int = 1,
        commits_at_once: bool = True,
        seed: int = 0,
    ) -> None:
        self.ports = FakePorts(commits_at_once)
        self.config = config or GroupCoordinatorConfig()
        self.partitions = partitions
        self.epoch = 0
        self.has_session = True
        self.rng = Random(seed)
        self.service = self._start()

    def _start(self) -> GroupCoordinatorService:
        service = GroupCoordinatorService(
            self.config, self.ports, self.rng, lambda: self.partitions, lambda: self.has_session
        )
        self.epoch += 1
        for partition in range(self.partitions):
            service.on_partition_elected(partition, self.epoch)
        self.service = service
        self.ports.advance(0)
        return service

    def restart(self) -> None:
        """The node dies and comes back; parked requests die with their connections."""
        self.ports._timers.clear()
        self.ports._waiting.clear()
        for partition in range(self.partitions):
            self.ports.high_watermarks[partition] = self.ports.end_offsets.get(partition, 0)
        self._start()

    def coordinator(self, partition: int = 0) -> GroupCoordinator:
        return self.service._runtime._shards[partition].coordinator

    def advance(self, by_ms: int) -> None:
        self.ports.advance(by_ms)

    def ask(self, run: Callable[[], Any]) -> Reply:
        return Reply(run, self.ports.now_ms)

    # -- requests ----------------------------------------------------------------------------------------------------

    def join(
        self, group: str = "g", member: str = "", *, version: int = 9, client: str = "c", instance: str | None = None,
        protocols: dict[str, bytes] | None = None, protocol_type: str = "consumer", session_ms: int = 10_000,
        rebalance_ms: int = 60_000, reason: str | None = None,
    ) -> Reply:  # fmt: skip
        request = JoinGroupRequest(
            group_id=group, member_id=member, group_instance_id=instance, protocol_type=protocol_type,
            session_timeout_ms=session_ms, rebalance_timeout_ms=rebalance_ms, reason=reason,
            protocols=[
                JoinGroupRequestProtocol(name=name, metadata=metadata)
                for name, metadata in ({"range": b"meta"} if protocols is None else protocols).items()
            ],
        )  # fmt: skip
        return self.ask(lambda: self.service.join(context(11, version, client), request))

    def sync(
        self, group: str = "g", member: str = "", generation: int = 1, *, assignments: dict[str, bytes] | None = None,
        version: int = 5, instance: str | None = None, protocol_type: str | None = "consumer",
        protocol: str | None = "range",
    ) -> Reply:  # fmt: skip
        request = SyncGroupRequest(
            group_id=group, member_id=member, generation_id=generation, group_instance_id=instance,
            protocol_type=protocol_type, protocol_name=protocol,
            assignments=[
                SyncGroupRequestAssignment(member_id=name, assignment=value)
                for name, value in (assignments or {}).items()
            ],
        )  # fmt: skip
        return self.ask(lambda: self.service.sync(context(14, version), request))

    def heartbeat(
        self, group: str = "g", member: str = "", generation: int = 1, *, instance: str | None = None
    ) -> Reply:
        request = HeartbeatRequest(
            group_id=group, member_id=member, generation_id=generation, group_instance_id=instance
        )
        return self.ask(lambda: self.service.heartbeat(context(12, 4), request))

    def leave(self, group: str = "g", *members: str, version: int = 5, instances: tuple[str, ...] = ()) -> Reply:
        identities = [MemberIdentity(member_id=member) for member in members]
        identities += [MemberIdentity(group_instance_id=instance) for instance in instances]
        request = LeaveGroupRequest(group_id=group, members=identities)
        if version < 3:
            request = LeaveGroupRequest(group_id=group, member_id=members[0])
        return self.ask(lambda: self.service.leave(context(13, version), request))

    def commit(
        self, group: str = "g", offsets: dict[tuple[str, int], int] | None = None, *, member: str = "",
        generation: int = -1, instance: str | None = None, metadata: str | None = "", retention_ms: int = -1,
        version: int = 9, topic_id: bytes = bytes(16),
    ) -> Reply:  # fmt: skip
        topics: dict[str, OffsetCommitRequestTopic] = {}
        for (name, index), offset in (offsets or {("t", 0): 1}).items():
            topic = topics.setdefault(name, OffsetCommitRequestTopic(name=name, topic_id=topic_id))
            topic.partitions.append(
                OffsetCommitRequestPartition(
                    partition_index=index, committed_offset=offset, committed_metadata=metadata
                )
            )
        request = OffsetCommitRequest(
            group_id=group, member_id=member, generation_id_or_member_epoch=generation, group_instance_id=instance,
            retention_time_ms=retention_ms, topics=list(topics.values()),
        )  # fmt: skip
        return self.ask(lambda: self.service.commit_offsets(context(8, version), request))

    def committed(self, group: str = "g", topic: str = "t", partition: int = 0, *, stable: bool = False) -> Any:
        """The offset, -1 where there is none; a Reply if it has to wait."""
        reply = self.ask(lambda: self.service.fetch_offsets(group, [(topic, bytes(16), [partition])], stable))
        return reply if reply.is_parked else reply.response[0][1][0].offset

    def list_groups(self, states: Iterable[str], types: Iterable[str]) -> list[ListedGroup]:
        return [group for piece in self.service.list_groups(list(states), list(types)) for group in piece]

    # -- whole rituals -----------------------------------------------------------------------------------------------

    def member(self, group: str = "g", **options: Any) -> tuple[str, Reply]:
        """A new dynamic member's two joins; returns its id and the parked second."""
        first = self.join(group, **options)
        assert first.error == 79
        member_id = first.response.member_id
        return member_id, self.join(group, member_id, **options)

    def stable(self, group: str = "g", size: int = 1, **options: Any) -> list[str]:
        """A stable group of generation 1 whose members are each assigned their own id."""
        members, joins = zip(*(self.member(group, **options) for _ in range(size)))
        self.advance(self.config.group_initial_rebalance_delay_ms * (2 if size > 1 else 1))
        assert all(join.error == 0 for join in joins)
        protocol = joins[0].response.protocol_name
        generation = joins[0].response.generation_id
        leader = joins[0].response.leader
        assignments = {member: member.encode() for member in members}
        syncs = [
            self.sync(group, member, generation, protocol=protocol, assignments=assignments if member == leader else {})
            for member in sorted(members, key=lambda each: each == leader)
        ]
        for partition in range(self.partitions):
            self.ports.commit(partition)
        assert all(sync.error == 0 for sync in syncs)
        return list(members)


def context(api_key: int, version: int, client: str = "c") -> RequestContext:
    return RequestContext(api_key, version, 1, client, "127.0.0.1", "PLAINTEXT")


__all__ = [
    "FakePorts",
    "HeartbeatResponse",
    "JoinGroupResponse",
    "LeaveGroupResponse",
    "OffsetCommitResponse",
    "Reply",
    "SyncGroupResponse",
    "World",
    "context",
]
