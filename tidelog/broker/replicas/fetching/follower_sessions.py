"""The state that a leader keeps for a fetching follower: its session, its offset per partition, its waiting fetch.

Also converts requests of every version to one form. This module holds only the data: `follower_fetches.py` decides
what to answer and when. Invariant: an entry is in at most one of `dirty`, `held_back` and `in_flight`. News of one in
flight were sent, and the follower has not confirmed them yet.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from functools import partial
from typing import TYPE_CHECKING, Protocol

from tidelog.broker.network.request import Deferred
from tidelog.broker.replicas.fetching.follower_linger import FollowerLinger
from tidelog.protocol.hot import TOPIC_ID_FROM, Buffer, FetchedPartition, encode_fetch_response
from tidelog.protocol.hot_replication import VERSION, FollowerPartition, FollowerRequest, encode_nothing_fetched

if TYPE_CHECKING:
    from tidelog.broker.replicas.deletions import Deletions
    from tidelog.broker.scheduling.deferred_callbacks import DeferredCallbacks
    from tidelog.protocol.errors import KafkaError
    from tidelog.protocol.messages.fetch import FetchRequest
    from tidelog.replication.controller.metadata.image import BrokerImage
    from tidelog.replication.isr import FollowerReplica
    from tidelog.replication.partition import Partition, ReplicaPorts
    from tidelog.storage.segments.reader import ColdRead

# Kafka wants replica.fetch.wait.max.ms to be below replica.lag.time.max.ms, 30 s by default.
WAIT_MS_MAX = 30_000
# Only brokers of the cluster get sessions. Beyond a bound a request is answered without a session.
SESSIONS_MAX = 1000
SESSIONS_OF_BROKER_MAX = 32  # one per num.replica.fetchers, and those of broken connections
ENTRIES_MAX = 250_000  # partitions of all sessions and of parked fetches; each takes about 500 bytes
# Bound for the partitions of a session that this node does not host. A follower may learn of a topic before its leader.
NOT_HOSTED_MAX = 1000
# A request that names more of those is answered in pieces: each partition takes 13 us, and any client can send one.
NOT_HOSTED_AT_ONCE_MAX = 5_000
# A live follower fetches all the time. A session that is silent for longer is closed when another session begins.
SILENT_MS_MAX = 10_000
EPOCH_FINAL = -1

Key = tuple[str | bytes, int]
Problem = int | tuple[int, int]  # an error code, or the (epoch, end offset) at which the logs diverge


class HostedReplicas(Protocol):
    """The part of `partitions.Partitions` that the followers' fetches use."""

    callbacks: DeferredCallbacks
    deletions: Deletions
    replica_ports: ReplicaPorts

    def leader(self, topic: str | bytes, index: int) -> Partition: ...
    def find(self, topic: str | bytes, index: int) -> Partition | None: ...
    def watch_as_follower(self, entry: FollowerEntry) -> Partition | None: ...
    def refusal(self, partition: Partition | None, error: Exception) -> KafkaError: ...
    def run_cold(self, cold: ColdRead, done: Callable[[], None]) -> None: ...


class FollowerEntry:
    """One partition of a follower's session: the follower's offset, and the problem with it, if there is one."""

    __slots__ = (
        "fetch_offset", "follower", "in_flight", "key", "last_epoch", "leader_epoch", "log_start_offset",
        "max_bytes", "partition", "problem", "sent_high_watermark", "session",
    )  # fmt: skip

    def __init__(self, session: FollowerSession, key: Key) -> None:
        self.session = session
        self.key = key
        self.partition: Partition | None = None
        self.follower: FollowerReplica | None = None
        self.leader_epoch = -1
        self.fetch_offset = -1
        self.last_epoch = -1
        self.log_start_offset = -1
        self.max_bytes = 0
        self.problem: Problem | None = None
        self.in_flight = False
        self.sent_high_watermark = -1

    def appended(self, news: int = 1) -> None:
        """The leader's log has grown, or the entry needs an answer for another reason. `news`: 0 for a high watermark,
        for which no answer waits longer.
        """
        if not self.in_flight:
            session = self.session
            if session.held_back and self in session.held_back:
                if self.problem is None:
                    return
                del session.held_back[self]
            session.linger.news += news
            if self not in session.dirty:
                follower = self.follower
                if follower is not None and session.last_fetch_ms > follower.last_caught_up_ms:
                    self.note_caught_up()
                session.dirty[self] = None
            if session.parked is not None:
                session.wake_soon(session.answer)

    @property
    def has_records(self) -> bool:
        """Whether the leader has records that the follower lacks."""
        return self.partition is not None and self.fetch_offset < self.partition.log.log_end_offset

    def note_caught_up(self) -> None:
        """Call it before the entry becomes dirty or ends, and before the follower's end becomes lower.

        A follower without news had all records at its last fetch, even if that fetch did not mention the partition.
        """
        session, follower = self.session, self.follower
        if self.in_flight or self in session.dirty or self in session.held_back:
            return
        if self.problem is not None or follower is None:
            return
        if session.last_fetch_ms > follower.last_caught_up_ms:
            follower.last_caught_up_ms = session.last_fetch_ms


class FollowerSession:
    """A session with `id` 0 exists only for one request."""

    __slots__ = (
        "answer", "dirty", "entries", "epoch", "held_back", "id", "in_flight", "last_fetch_ms", "linger",
        "linger_timer", "max_bytes", "max_wait_ms", "min_bytes", "not_hosted", "on_abandon", "outside", "parked",
        "refused", "replica_epoch", "replica_id", "throttled", "timer", "unsettled", "uses_topic_ids", "wake_soon",
        "warming",
    )  # fmt: skip

    def __init__(
        self, session_id: int, replica_id: int, replica_epoch: int, wake_soon: Callable[[Callable[[], None]], None],
        answer_parked: Callable[[FollowerSession], None],
    ) -> None:  # fmt: skip
        self.wake_soon = wake_soon
        self.answer = partial(answer_parked, self)
        self.id = session_id
        self.epoch = 1
        self.replica_id = replica_id
        self.replica_epoch = replica_epoch
        self.uses_topic_ids = True
        self.max_wait_ms = self.min_bytes = self.max_bytes = 0
        self.entries: dict[Key, FollowerEntry] = {}
        self.dirty: dict[FollowerEntry, None] = {}  # may have news for the follower
        self.held_back: dict[FollowerEntry, None] = {}  # have news, and wait for the rate of the throttle
        self.in_flight: dict[FollowerEntry, None] = {}  # news sent, not confirmed by the follower
        self.unsettled: dict[FollowerEntry, None] = {}  # the follower may not know the high watermark
        self.outside: dict[FollowerEntry, None] = {}  # outside the ISR; may join it with a fetch that does not name it
        self.not_hosted = 0
        """Upper bound for the number of entries whose partitions this node does not host."""
        self.refused: list[FetchedPartition] = []
        """The errors of the partitions of a large request that this node does not host. They have no entries."""
        self.last_fetch_ms = 0.0
        self.parked: ParkedFetch | None = None
        self.on_abandon: Callable[[], None] | None = None
        self.timer: asyncio.TimerHandle | None = None
        self.linger = FollowerLinger()
        self.linger_timer: asyncio.TimerHandle | None = None
        self.warming = False
        self.throttled = False

    def knows_too_little(self) -> bool:
        """Whether this node does not host too many of the session's partitions."""
        if self.not_hosted > NOT_HOSTED_MAX:
            self.not_hosted = sum(entry.partition is None for entry in self.entries.values())
        return self.not_hosted > NOT_HOSTED_MAX


class ParkedFetch(Deferred):
    """A follower's fetch that waits for news."""

    __slots__ = ("correlation_id", "due_ms", "version")

    def __init__(self, correlation_id: int, version: int, due_ms: float, on_abandon: Callable[[], None] | None) -> None:
        self.exclusive = False
        self.response = self.timing = self._on_complete = None
        self.on_abandon = on_abandon
        self.correlation_id, self.version, self.due_ms = correlation_id, version, due_ms


def is_gone(session: FollowerSession, broker: BrokerImage | None, now_ms: float) -> bool:
    """Whether the session belongs to a removed broker, to an earlier process of a broker, or to a broken connection.

    `broker`: the session's broker in the metadata; None if the metadata has no such broker.
    """
    if broker is None or 0 <= session.replica_epoch < broker.epoch:
        return True
    wait_ms = min(max(session.max_wait_ms, 0), WAIT_MS_MAX)
    return session.parked is None and now_ms - session.last_fetch_ms > SILENT_MS_MAX + wait_ms


def has_place(request: FollowerRequest, broker: BrokerImage | None, sessions: Collection[FollowerSession]) -> bool:
    """Whether this request may begin another session. Bounded, because any client can claim to be a broker."""
    if broker is None or 0 <= request.replica_epoch < broker.epoch or len(sessions) >= SESSIONS_MAX:
        return False
    of_broker = sum(session.replica_id == request.replica_id for session in sessions)
    return of_broker < SESSIONS_OF_BROKER_MAX


def nothing(parked: ParkedFetch, session_id: int) -> bytes | list[Buffer]:
    if parked.version == VERSION:
        return encode_nothing_fetched(parked.correlation_id, session_id)
    return encode_fetch_response(parked.correlation_id, parked.version, 0, session_id, [])


def as_follower_request(request: FetchRequest, version: int) -> FollowerRequest:
    state = request.replica_state
    by_id = version >= TOPIC_ID_FROM
    return FollowerRequest(
        request.max_wait_ms,
        request.min_bytes,
        request.max_bytes,
        request.session_id,
        request.session_epoch if version >= 7 else EPOCH_FINAL,
        state.replica_id if version >= 15 else request.replica_id,
        state.replica_epoch if version >= 15 else -1,
        [
            FollowerPartition(
                topic.topic_id if by_id else topic.topic,  # type: ignore[arg-type]
                entry.partition,
                entry.current_leader_epoch,
                entry.fetch_offset,
                entry.last_fetched_epoch,
                entry.log_start_offset,
                entry.partition_max_bytes,
            )
            for topic in request.topics
            for entry in topic.partitions
        ],
    )
