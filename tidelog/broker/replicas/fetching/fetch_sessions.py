"""Fetch sessions (KIP-227): the broker remembers what a client fetches; requests and answers carry only changes.

Pure: times and randomness are arguments. Unlike Kafka's, a session keeps the set of its *dirty* partitions: those that
may have news (requested again, changed, not read to the end, failed). Partitions report changes through
`FetchSession.touch`, so the cost of an answer depends on the changes, not on the size of the session. Invariant: a
partition that is not dirty has no unread data, and the client knows its high watermark and log start offset.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple, Protocol

from tidelog.protocol.errors import ErrorCode, KafkaError
from tidelog.protocol.messages.fetch import FetchPartition, FetchRequest
from tidelog.replication.controller.decisions.topic_names import MAX_LENGTH

if TYPE_CHECKING:
    import random

    from tidelog.storage.segments.segment import Segment

SESSION_ID_NONE = 0
EPOCH_INITIAL = 0
EPOCH_FINAL = -1
EPOCH_MAX = 2**31 - 1

# PARTITIONS_MAX bounds the partitions of all sessions: beyond it a client gets no session. SESSION_PARTITIONS_MAX
# bounds those of one, because its end takes one turn of the loop: one request names no more. PARKED_MAX bounds the
# waiting fetches and the partitions of those without a session: beyond it those that have waited longest get their
# answers, because a client that got its own at once would ask again at once, and so would all others. A fetch that
# costs more than GIVEN_WAY_MAX gets its own. Each partition takes about 600 bytes.
PARTITIONS_MAX = 250_000
SESSION_PARTITIONS_MAX = 50_000
PARKED_MAX = 250_000
PARKED_COST = 4  # of a waiting fetch, in partitions
GIVEN_WAY_MAX = 2_500
WAITERS_MAX = 2  # waiting fetches of one session; clients send one at a time

# Kafka's min.incremental.fetch.session.eviction.ms: a new session does not evict one that was used since then.
EVICTION_MS_MIN = 120_000

Key = tuple[str | bytes, int]


class Need(NamedTuple):
    """While `segment` is the log's active one and has less than `size_bytes`, a try is in vain. No segment: unknown, a
    try may succeed after any change.
    """

    segment: Segment | None
    size_bytes: int


UNKNOWN = Need(None, 0)


class WatchedPartition(Protocol):
    """A partition that reports its changes to the registered session entries."""

    def watch(self, entry: SessionPartition) -> None: ...
    def unwatch(self, entry: SessionPartition) -> None: ...
    def tried_in_vain(self, entry: SessionPartition, need: Need) -> None: ...


class SessionPartition:
    """One partition of a session: the client's last request for it, and the offsets last sent to the client.

    `known_as`: the name of its topic, once a replica was watched for it, which may be gone.
    """

    __slots__ = ("key", "known_as", "request", "sent_high_watermark", "sent_log_start_offset", "session", "watched")

    def __init__(self, session: FetchSession, key: Key, request: FetchPartition) -> None:
        self.session = session
        self.key = key
        self.request = request
        self.sent_high_watermark = -1
        self.sent_log_start_offset = -1
        self.watched: WatchedPartition | None = None
        self.known_as: str | None = None

    def changed(self) -> None:
        """The partition has new data, a new high watermark or log start, or another leader."""
        self.session.touch(self)


class FetchSession:
    """A session with `id` 0 exists only for one request. `epoch` is the epoch that the next request must carry."""

    __slots__ = ("dirty", "epoch", "id", "last_used_ms", "partitions", "uses_topic_ids", "waiters")

    def __init__(self, session_id: int, uses_topic_ids: bool, now_ms: int) -> None:
        self.id = session_id
        self.epoch = 1
        self.uses_topic_ids = uses_topic_ids
        self.last_used_ms = now_ms
        self.partitions: dict[Key, SessionPartition] = {}
        self.dirty: dict[Key, SessionPartition] = {}
        self.waiters: dict[Callable[[], None], Callable[[], None]] = {}
        """Of each waiting fetch of this session, usually one: what `touch` calls, and what ends its wait."""

    def touch(self, entry: SessionPartition) -> None:
        self.dirty[entry.key] = entry
        for waiter in self.waiters:
            waiter()

    def wait(self, waiter: Callable[[], None], give_way: Callable[[], None]) -> None:
        """A fetch waits. Every change costs a try of each, so beyond WAITERS_MAX the oldest is answered."""
        if len(self.waiters) >= WAITERS_MAX:
            self.waiters.pop(next(iter(self.waiters)))()
        self.waiters[waiter] = give_way

    def ask(self, partitions: Iterable[tuple[Key, FetchPartition]]) -> None:
        """Store the partitions of a request. They become dirty, behind those that have waited longer."""
        for key, request in partitions:
            entry = self.partitions.get(key)
            if entry is None:
                entry = self.partitions[key] = SessionPartition(self, key, request)
            else:
                entry.request = request
            self.dirty.pop(key, None)
            self.dirty[key] = entry

    def forget(self, keys: Iterable[Key]) -> None:
        for key in keys:
            entry = self.partitions.pop(key, None)
            self.dirty.pop(key, None)
            if entry is not None:
                _unwatch(entry)

    def close(self) -> None:
        """Unregister from every partition. Sessions of one request call this when they are answered."""
        self.forget(list(self.partitions))


def _partitions_of(request: FetchRequest, uses_topic_ids: bool) -> Iterator[tuple[Key, FetchPartition]]:
    for topic in request.topics:
        name = topic.topic_id if uses_topic_ids else topic.topic
        for entry in topic.partitions:
            yield (name, entry.partition), entry


def forgotten_in(request: FetchRequest, uses_topic_ids: bool) -> list[Key]:
    return [
        (topic.topic_id if uses_topic_ids else topic.topic, index)
        for topic in request.forgotten_topics_data
        for index in topic.partitions
    ]


def are_short(names: Iterable[str | bytes]) -> bool:
    """Whether a session may keep these topics' names. Longer ones, up to 32 KB each, name no topic."""
    return all(len(name) <= MAX_LENGTH for name in names)


def _may_keep_topics(request: FetchRequest, uses_topic_ids: bool) -> bool:
    return uses_topic_ids or are_short(topic.topic for topic in request.topics)


def _unwatch(entry: SessionPartition) -> None:
    if entry.watched is not None:
        entry.watched.unwatch(entry)
        entry.watched = None


class FetchSessions:
    """The node's sessions, at most `slots_max` (max.incremental.fetch.session.cache.slots)."""

    def __init__(self, slots_max: int, rng: random.Random) -> None:
        self._slots_max = slots_max
        self._rng = rng
        self._sessions: dict[int, FetchSession] = {}  # least recently used first
        self._partition_count = 0
        self._parked = 0
        self._waiting: dict[Callable[[], None], int] = {}  # the cost by `give_way`, in the order of `park`
        self.evictions = 0

    def __len__(self) -> int:
        return len(self._sessions)

    def __iter__(self) -> Iterator[FetchSession]:
        return iter(self._sessions.values())

    def resolve(self, request: FetchRequest, uses_topic_ids: bool, now_ms: int) -> tuple[FetchSession, bool]:
        """The session of a request, updated with that request, and whether the answer must name all its partitions.

        Raises FETCH_SESSION_ID_NOT_FOUND, INVALID_FETCH_SESSION_EPOCH or FETCH_SESSION_TOPIC_ID_ERROR.
        """
        if request.session_epoch in (EPOCH_INITIAL, EPOCH_FINAL):
            if request.session_id != SESSION_ID_NONE:
                self._remove(request.session_id)
            return self._full(request, uses_topic_ids, now_ms), True
        session = self._sessions.get(request.session_id)
        if session is None:
            raise KafkaError(ErrorCode.FETCH_SESSION_ID_NOT_FOUND)
        if session.epoch != request.session_epoch:
            raise KafkaError(ErrorCode.INVALID_FETCH_SESSION_EPOCH)
        if session.uses_topic_ids != uses_topic_ids:
            raise KafkaError(ErrorCode.FETCH_SESSION_TOPIC_ID_ERROR)
        before = len(session.partitions)
        session.ask(_partitions_of(request, uses_topic_ids))
        session.forget(forgotten_in(request, uses_topic_ids))  # last, as in Kafka: also partitions added just before
        self._partition_count += len(session.partitions) - before
        if not session.partitions:
            self._remove(session.id)
            return FetchSession(SESSION_ID_NONE, uses_topic_ids, now_ms), True
        is_too_large = len(session.partitions) > SESSION_PARTITIONS_MAX or self._partition_count > PARTITIONS_MAX
        if (is_too_large and len(session.partitions) > before) or not _may_keep_topics(request, uses_topic_ids):
            self._remove(session.id)
            raise KafkaError(ErrorCode.FETCH_SESSION_ID_NOT_FOUND)  # the client sends a full request, without a session
        session.epoch = 1 if session.epoch == EPOCH_MAX else session.epoch + 1
        session.last_used_ms = now_ms
        self._sessions[session.id] = self._sessions.pop(session.id)
        return session, False

    def _full(self, request: FetchRequest, uses_topic_ids: bool, now_ms: int) -> FetchSession:
        session = FetchSession(SESSION_ID_NONE, uses_topic_ids, now_ms)
        session.ask(_partitions_of(request, uses_topic_ids))
        wants_session = request.session_epoch == EPOCH_INITIAL and request.topics
        if wants_session and _may_keep_topics(request, uses_topic_ids) and self._make_place(session, now_ms):
            session.id = self._free_id()
            self._sessions[session.id] = session
            self._partition_count += len(session.partitions)
        return session

    def _make_place(self, new_session: FetchSession, now_ms: int) -> bool:
        """Evict as many unused sessions as needed. Whether there is room for the new session afterwards."""
        if self._has_room(new_session):
            return True
        for session in list(self._sessions.values()):
            if not session.waiters and now_ms - session.last_used_ms > EVICTION_MS_MIN:
                self._remove(session.id)
                self.evictions += 1
                if self._has_room(new_session):
                    return True
        return False

    def _has_room(self, new_session: FetchSession) -> bool:
        partitions = self._partition_count + len(new_session.partitions)
        return len(self._sessions) < self._slots_max and partitions <= PARTITIONS_MAX

    def _free_id(self) -> int:
        while True:
            session_id = self._rng.randint(1, 2**31 - 1)
            if session_id not in self._sessions:
                return session_id

    def _remove(self, session_id: int) -> None:
        session = self._sessions.pop(session_id, None)
        if session is not None:
            self._partition_count -= len(session.partitions)
            session.close()

    def park(self, session: FetchSession, give_way: Callable[[], None]) -> bool:
        """Reserve room for a waiting fetch until `unpark`; False if there is no room. `give_way` is called where a
        later fetch gets the room.
        """
        cost = PARKED_COST if session.id else PARKED_COST + len(session.partitions)
        if cost <= GIVEN_WAY_MAX:
            while self._parked + cost > PARKED_MAX and self._waiting:
                first = next(iter(self._waiting))
                self.unpark(first)
                first()
        if self._parked + cost > PARKED_MAX:
            return False
        self._parked += cost
        self._waiting[give_way] = cost
        return True

    def unpark(self, give_way: Callable[[], None]) -> None:
        """The fetch does not wait any more. No effect on one that was not parked, or has given way."""
        self._parked -= self._waiting.pop(give_way, 0)
