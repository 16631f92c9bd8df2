"""Fetch sessions (KIP-227): the broker remembers what a client fetches; requests and answers carry only changes.

Pure: times and randomness are arguments. Beyond Kafka's, a session keeps the set of its *dirty* partitions: those that
may have something to say (asked for anew, changed, not yet drained, failed). Partitions report changes through
`FetchSession.touch`, so an answer costs what has changed, not what the session holds. Invariant: a partition that is
not dirty has no unread data, and its high watermark and log start are those last sent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Protocol

from tidelog.protocol.errors import ErrorCode, KafkaError
from tidelog.protocol.messages.fetch import FetchPartition, FetchRequest

if TYPE_CHECKING:
    import random

SESSION_ID_NONE = 0
EPOCH_INITIAL = 0
EPOCH_FINAL = -1
EPOCH_MAX = 2**31 - 1

# Partitions of all sessions together, and of the fetches that wait without one; each takes some 600 bytes here. Beyond
# it a client gets no session, or its answer at once.
PARTITIONS_MAX = 250_000
PARKED_MAX = 250_000
PARKED_COST = 4  # of one that waits, in partitions

# Kafka's min.incremental.fetch.session.eviction.ms: a session that was used since then is not pushed out by a new one.
EVICTION_MS_MIN = 120_000

Key = tuple[str | bytes, int]


class Watched(Protocol):
    """A partition that reports its changes; sessions register with it and leave again."""

    def watch(self, entry: SessionPartition) -> None: ...
    def unwatch(self, entry: SessionPartition) -> None: ...


class SessionPartition:
    """One partition of a session: what the client last asked and what it was last told."""

    __slots__ = ("asked", "key", "sent_high_watermark", "sent_log_start_offset", "session", "watched")

    def __init__(self, session: FetchSession, key: Key, asked: FetchPartition) -> None:
        self.session = session
        self.key = key
        self.asked = asked
        self.sent_high_watermark = -1
        self.sent_log_start_offset = -1
        self.watched: Watched | None = None

    def changed(self) -> None:
        """The partition has new data, a new high watermark or log start, or another leader."""
        self.session.touch(self)


class FetchSession:
    """`id` 0: made for one request and forgotten after it. `epoch` is the one the next request must carry."""

    __slots__ = ("dirty", "epoch", "id", "last_used_ms", "partitions", "uses_topic_ids", "waiters")

    def __init__(self, session_id: int, uses_topic_ids: bool, now_ms: int) -> None:
        self.id = session_id
        self.epoch = 1
        self.uses_topic_ids = uses_topic_ids
        self.last_used_ms = now_ms
        self.partitions: dict[Key, SessionPartition] = {}
        self.dirty: dict[Key, SessionPartition] = {}
        self.waiters: dict[Callable[[], None], None] = {}  # fetches of this session that wait; as a rule one

    def touch(self, entry: SessionPartition) -> None:
        self.dirty[entry.key] = entry
        for waiter in self.waiters:
            waiter()

    def ask(self, partitions: Iterable[tuple[Key, FetchPartition]]) -> None:
        """Take in what a request says of partitions; the newly asked go behind those that waited longer."""
        for key, asked in partitions:
            entry = self.partitions.get(key)
            if entry is None:
                entry = self.partitions[key] = SessionPartition(self, key, asked)
            else:
                entry.asked = asked
            self.dirty.pop(key, None)
            self.dirty[key] = entry

    def forget(self, keys: Iterable[Key]) -> None:
        for key in keys:
            entry = self.partitions.pop(key, None)
            self.dirty.pop(key, None)
            if entry is not None:
                _unwatch(entry)

    def close(self) -> None:
        """Leave every partition; also called for one-request sessions when they are answered."""
        self.forget(list(self.partitions))


def _asked(request: FetchRequest, uses_topic_ids: bool) -> Iterator[tuple[Key, FetchPartition]]:
    for topic in request.topics:
        name = topic.topic_id if uses_topic_ids else topic.topic
        for asked in topic.partitions:
            yield (name, asked.partition), asked


def forgotten_in(request: FetchRequest, uses_topic_ids: bool) -> list[Key]:
    return [
        (topic.topic_id if uses_topic_ids else topic.topic, index)
        for topic in request.forgotten_topics_data
        for index in topic.partitions
    ]


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
        self.evictions = 0

    def __len__(self) -> int:
        return len(self._sessions)

    def __iter__(self) -> Iterator[FetchSession]:
        return iter(self._sessions.values())

    def resolve(self, request: FetchRequest, uses_topic_ids: bool, now_ms: int) -> tuple[FetchSession, bool]:
        """The session a request belongs to, brought up to date, and whether all its partitions must be answered.

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
        session.ask(_asked(request, uses_topic_ids))
        session.forget(forgotten_in(request, uses_topic_ids))  # also what this request asks for: Kafka forgets last
        self._partition_count += len(session.partitions) - before
        if not session.partitions:
            self._remove(session.id)
            return FetchSession(SESSION_ID_NONE, uses_topic_ids, now_ms), True
        if self._partition_count > PARTITIONS_MAX and len(session.partitions) > before:
            self._remove(session.id)
            raise KafkaError(ErrorCode.FETCH_SESSION_ID_NOT_FOUND)  # it asks for all of them again, and gets no session
        session.epoch = 1 if session.epoch == EPOCH_MAX else session.epoch + 1
        session.last_used_ms = now_ms
        self._sessions[session.id] = self._sessions.pop(session.id)
        return session, False

    def _full(self, request: FetchRequest, uses_topic_ids: bool, now_ms: int) -> FetchSession:
        session = FetchSession(SESSION_ID_NONE, uses_topic_ids, now_ms)
        session.ask(_asked(request, uses_topic_ids))
        if request.session_epoch == EPOCH_INITIAL and request.topics and self._make_place(session, now_ms):
            session.id = self._free_id()
            self._sessions[session.id] = session
            self._partition_count += len(session.partitions)
        return session

    def _make_place(self, wanted: FetchSession, now_ms: int) -> bool:
        """Whether there is room, once what clients have left behind is pushed out, as far as it must be."""
        if self._has_room(wanted):
            return True
        for session in list(self._sessions.values()):
            if not session.waiters and now_ms - session.last_used_ms > EVICTION_MS_MIN:
                self._remove(session.id)
                self.evictions += 1
                if self._has_room(wanted):
                    return True
        return False

    def _has_room(self, wanted: FetchSession) -> bool:
        partitions = self._partition_count + len(wanted.partitions)
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

    def park(self, session: FetchSession) -> int:
        """Room for a fetch that would wait, to be given back to `unpark`; 0 if there is none."""
        cost = PARKED_COST if session.id else PARKED_COST + len(session.partitions)
        if self._parked + cost > PARKED_MAX:
            return 0
        self._parked += cost
        return cost

    def unpark(self, cost: int) -> None:
        self._parked -= cost
