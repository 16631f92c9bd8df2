"""The leader's side of followers' fetches: the sessions, the answers, and how long an answer waits.

A follower sends nearly the same request thousands of times a second. Its session therefore keeps the follower's offset
in every partition and the set of partitions that may have news: the cost of an answer depends only on the changes.
`apis/records/fetch.py` handles the `Fetch` requests of consumers. Invariants: the follower has all records of a
partition that is neither dirty nor in flight; a follower's offset is recorded (`Partition.follower_fetched`) only after
a check that its log agrees with the leader's.
"""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING

from tidelog.broker.network.request import Answer, Deferred, Peer
from tidelog.broker.replicas.fetching.fetch_sessions import are_short, forgotten_in
from tidelog.broker.replicas.fetching.follower_answers import FollowerAnswers, Frames
from tidelog.broker.replicas.fetching.follower_linger import LINGER_MS
from tidelog.broker.replicas.fetching.follower_sessions import (
    ENTRIES_MAX,
    EPOCH_FINAL,
    NOT_HOSTED_AT_ONCE_MAX,
    WAIT_MS_MAX,
    FollowerEntry,
    FollowerSession,
    HostedReplicas,
    Key,
    ParkedFetch,
    as_follower_request,
    has_place,
    is_gone,
    nothing,
)
from tidelog.protocol.errors import ErrorCode, KafkaError
from tidelog.protocol.hot import TOPIC_ID_FROM, FetchedPartition, encode_fetch_response
from tidelog.protocol.hot_replication import (
    VERSION,
    FollowerRequest,
    decode_follower_request,
    decode_one,
    read_repeated,
)
from tidelog.protocol.messages.fetch import FetchRequest
from tidelog.storage.segments.reader import ColdRead

if TYPE_CHECKING:
    import random
    from collections.abc import Iterable

    from tidelog.replication.isr import FollowerReplica
    from tidelog.replication.partition import Partition

logger = logging.getLogger("tidelog.followers")

EPOCH_INITIAL = 0
EPOCH_MAX = 2**31 - 1
KNOWN_REQUESTS_MAX = 1024
REFUSED_PER_TURN = 1_000

KnownRequest = tuple[FollowerEntry, int, int, int, int]
"""What a request says that a follower repeats: entry, max wait, leader epoch, last fetched epoch, log start."""


class FollowerFetches:
    """`tells_high_watermark`: answer also if only a high watermark has moved, for consumers of followers (KIP-392)."""

    def __init__(
        self,
        partitions: HostedReplicas,
        loop: asyncio.AbstractEventLoop,
        rng: random.Random,
        *,
        tells_high_watermark: bool = False,
    ) -> None:
        self.tells_high_watermark = tells_high_watermark
        self.answers = FollowerAnswers(partitions, loop, self._answer_parked, tells_high_watermark)
        self._partitions = partitions
        self._loop = loop
        self._rng = rng
        self.sessions: dict[int, FollowerSession] = {}
        self._known: dict[tuple[bytes, bytes, bytes], KnownRequest] = {}
        self.entry_count = 0
        """Partitions of all sessions and of all fetches in progress."""

    def __len__(self) -> int:
        return len(self.sessions)

    # ------------------------------------------------------------------------------------------------------ requests

    def serve_one(self, body: memoryview, correlation_id: int) -> Answer:
        """The fast path for a follower's usual request of ONE_REQUEST_BYTES: one partition has moved. None for any
        other request.
        """
        head, session_epoch, middle, fetch_offset, end = read_repeated(body)
        known = self._known.get((head, middle, end))
        if known is None or known[0].partition is None:
            known = self._recognize(body, (head, middle, end))
            if known is None:
                return None
        entry = known[0]
        session = entry.session
        if session.epoch != session_epoch or not session.id:
            return None
        session.epoch = session_epoch + 1 if session_epoch < EPOCH_MAX else 1
        if session.parked is not None:
            self._release(session)
        if entry.in_flight:
            entry.in_flight = False
            del session.in_flight[entry]
        if session.in_flight:
            self._not_taken(session)
        entry.fetch_offset = fetch_offset
        _, session.max_wait_ms, entry.leader_epoch, entry.last_epoch, entry.log_start_offset = known
        session.last_fetch_ms = now_ms = self._loop.time() * 1000
        self._examine(entry, now_ms)
        if session.outside:
            self._let_in(session, now_ms)
        return self._answer_or_park(session, correlation_id, VERSION)

    def _recognize(self, body: memoryview, parts: tuple[bytes, bytes, bytes]) -> KnownRequest | None:
        """Decode a request for `serve_one`. A follower repeats all but session epoch and offset, the `parts` of it."""
        fields = decode_one(body)
        session = None if fields is None else self.sessions.get(fields[4])
        if fields is None or session is None or (session.replica_id, session.replica_epoch) != fields[22:24]:
            return None
        entry = session.entries.get((fields[7], fields[9]))  # type: ignore[arg-type]
        if entry is None:
            return None
        if len(self._known) >= KNOWN_REQUESTS_MAX:
            self._known.clear()
        known = self._known[parts] = (entry, fields[0], fields[10], fields[12], fields[13])
        return known

    def serve(self, request: FetchRequest, version: int, correlation_id: int, connection: Peer) -> Answer:
        """A follower's fetch of any version."""
        follower_request = as_follower_request(request, version)
        uses_topic_ids = version >= TOPIC_ID_FROM
        if follower_request.session_epoch <= 0:
            not_hosted = self._not_hosted(follower_request)
            if not_hosted is not None:
                return self._answer_in_pieces(follower_request, not_hosted, uses_topic_ids, correlation_id, version)
        try:
            session = self._resolve(follower_request, uses_topic_ids)
        except KafkaError as error:
            self.answers.count_error(error.code)
            return encode_fetch_response(correlation_id, version, error.code, 0, [])
        answer = self._take(session, follower_request, forgotten_in(request, uses_topic_ids), correlation_id, version)
        if follower_request.session_epoch == EPOCH_INITIAL and any(
            entry.follower for entry in session.entries.values()
        ):
            connection.send_much()
        return answer

    def serve_many(self, body: memoryview, correlation_id: int) -> Answer:
        """The same for the form of request that Tidelog's followers send; None for any other form."""
        request = decode_follower_request(body)
        if request is None or request.session_epoch in (EPOCH_INITIAL, EPOCH_FINAL):
            return None
        try:
            session = self._resolve(request, True)
        except KafkaError as error:
            self.answers.count_error(error.code)
            return encode_fetch_response(correlation_id, VERSION, error.code, 0, [])
        return self._take(session, request, (), correlation_id, VERSION)

    def _resolve(self, request: FollowerRequest, uses_topic_ids: bool) -> FollowerSession:
        if request.session_epoch in (EPOCH_INITIAL, EPOCH_FINAL):
            replaced = self.sessions.get(request.session_id)
            if replaced is not None and replaced.replica_id == request.replica_id:
                self._close(replaced.id)
            return self._begin(request, uses_topic_ids)
        session = self.sessions.get(request.session_id)
        if session is None or (session.replica_id, session.replica_epoch) != (
            request.replica_id,
            request.replica_epoch,
        ):
            raise KafkaError(ErrorCode.FETCH_SESSION_ID_NOT_FOUND)
        if session.epoch != request.session_epoch:
            raise KafkaError(ErrorCode.INVALID_FETCH_SESSION_EPOCH)
        if session.uses_topic_ids != uses_topic_ids:
            raise KafkaError(ErrorCode.FETCH_SESSION_TOPIC_ID_ERROR)
        if self._not_hosted(request) is not None or not _may_keep_topics(request, uses_topic_ids):
            self._close(session.id)
            raise KafkaError(ErrorCode.FETCH_SESSION_ID_NOT_FOUND)  # a full request is answered in pieces
        session.epoch = session.epoch + 1 if session.epoch < EPOCH_MAX else 1
        if session.parked is not None:
            self._release(session)
        return session

    def _not_hosted(self, request: FollowerRequest) -> list[Key] | None:
        """The partitions of the request that this node does not host, if they and those named again are too many for
        one turn of the loop. None: they are not.
        """
        if len(request.partitions) <= NOT_HOSTED_AT_ONCE_MAX:
            return None
        find = self._partitions.find
        keys: dict[Key, None] = dict.fromkeys((each.topic_id, each.partition) for each in request.partitions)
        not_hosted = [key for key in keys if find(*key) is None]
        hosted_count = len(keys) - len(not_hosted)
        return not_hosted if len(request.partitions) - hosted_count > NOT_HOSTED_AT_ONCE_MAX else None

    def _answer_in_pieces(
        self, request: FollowerRequest, not_hosted: list[Key], uses_topic_ids: bool, correlation_id: int, version: int
    ) -> Deferred:
        """Answer a full request without a session. Its partitions that are not hosted are refused in several turns."""
        known = set(not_hosted)
        hosted = {(each.topic_id, each.partition): each for each in request.partitions}
        request = request._replace(
            session_epoch=EPOCH_FINAL, partitions=[each for key, each in hosted.items() if key not in known]
        )
        answer = Deferred(exclusive=True)
        refused: list[FetchedPartition] = []
        left = iter(not_hosted)

        def refuse_next() -> None:
            piece = list(islice(left, REFUSED_PER_TURN))
            refused.extend(FetchedPartition(*key, self._error_of(key)) for key in piece)
            if len(piece) == REFUSED_PER_TURN:
                self._loop.call_soon(refuse_next)
                return
            try:
                session = self._resolve(request, uses_topic_ids)
                session.refused = refused
                answer.complete_as(self._take(session, request, (), correlation_id, version))
            except Exception as failure:
                answer.failed(failure)

        self._loop.call_soon(refuse_next)
        return answer

    def _error_of(self, key: Key) -> ErrorCode:
        try:
            self._partitions.leader(*key)
        except KafkaError as error:
            return error.code
        return ErrorCode.NOT_LEADER_OR_FOLLOWER  # it is hosted since

    def _begin(self, request: FollowerRequest, uses_topic_ids: bool) -> FollowerSession:
        self._close_ended(self._loop.time() * 1000)
        session_id = 0
        wants_session = request.session_epoch == EPOCH_INITIAL and request.partitions
        if wants_session and _may_keep_topics(request, uses_topic_ids) and self._may_have_session(request):
            while not session_id or session_id in self.sessions:
                session_id = self._rng.randint(1, 2**31 - 1)
        defer = self._partitions.callbacks.defer
        session = FollowerSession(session_id, request.replica_id, request.replica_epoch, defer, self._answer_parked)
        session.on_abandon = partial(self._abandoned, session)
        session.uses_topic_ids = uses_topic_ids
        if session_id:
            self.sessions[session_id] = session
        return session

    def _close_ended(self, now_ms: float) -> None:
        broker_of = self._partitions.replica_ports.broker
        for session in list(self.sessions.values()):
            if is_gone(session, broker_of(session.replica_id), now_ms):
                self._close(session.id)

    def _may_have_session(self, request: FollowerRequest) -> bool:
        if self.entry_count + len(request.partitions) > ENTRIES_MAX:
            return False
        return has_place(request, self._partitions.replica_ports.broker(request.replica_id), self.sessions.values())

    def _take(
        self,
        session: FollowerSession,
        request: FollowerRequest,
        forgotten: Iterable[Key],
        correlation_id: int,
        version: int,
    ) -> Answer:
        session.last_fetch_ms = now_ms = self._loop.time() * 1000
        session.max_wait_ms, session.min_bytes, session.max_bytes = (
            request.max_wait_ms,
            request.min_bytes,
            request.max_bytes,
        )
        entries_before = len(session.entries)
        for partition in request.partitions:
            key: Key = (partition.topic_id, partition.partition)
            entry = session.entries.get(key)
            if entry is None:
                entry = session.entries[key] = FollowerEntry(session, key)
                self.entry_count += 1
            elif entry.in_flight:
                entry.in_flight = False
                del session.in_flight[entry]
            entry.leader_epoch, entry.fetch_offset = partition.leader_epoch, partition.fetch_offset
            entry.last_epoch, entry.max_bytes = partition.last_fetched_epoch, partition.max_bytes
            entry.log_start_offset = partition.log_start_offset
            self._examine(entry, now_ms)
            session.not_hosted += entry.partition is None
        for key in forgotten:
            self._forget(session, key)
        if session.outside:
            self._let_in(session, now_ms)
        if session.in_flight:
            self._not_taken(session)
        if (
            session.id
            and len(session.entries) > entries_before
            and (self.entry_count > ENTRIES_MAX or session.knows_too_little())
        ):
            self._end_with_this_answer(session)
        return self._answer_or_park(session, correlation_id, version, is_full=request.session_epoch <= 0)

    def _end_with_this_answer(self, session: FollowerSession) -> None:
        """The answer names no session, so the follower's next request is a full one (KIP-227)."""
        del self.sessions[session.id]
        session.id = 0

    def _not_taken(self, session: FollowerSession) -> None:
        """Make partitions in flight dirty again: the follower did not use the last answer, so its offset is unchanged.

        A follower mentions every partition whose records it has appended.
        """
        for entry in session.in_flight:
            entry.in_flight = False
            session.dirty[entry] = None
        session.in_flight.clear()

    def _let_in(self, session: FollowerSession, now_ms: float) -> None:
        """Record a fetch also for partitions outside the ISR that the request does not mention.

        A fetch that does not mention a partition means that the follower's offset in it has not changed. In the ISR it
        counts after another session has named a lower offset or log start.
        """
        for entry in list(session.outside):
            partition, follower = entry.partition, entry.follower
            if partition is None or follower is None or not partition.leads:
                del session.outside[entry]
                continue
            # A new high watermark makes an entry dirty, too, and the follower does not mention it for that.
            has_news = entry in session.dirty or entry in session.held_back
            has_all = not has_news or entry.fetch_offset == partition.log.log_end_offset
            if entry.problem is not None or entry.in_flight or not has_all:
                del session.outside[entry]  # its follower mentions it after the answer
                continue
            is_news = entry.fetch_offset > follower.log_end_offset or not follower.in_maximal_isr
            starts_later = entry.log_start_offset > follower.log_start_offset
            if is_news or starts_later:
                try:
                    partition.require_epoch(entry.leader_epoch)
                    follower = partition.follower(session.replica_id, session.replica_epoch, entry.leader_epoch)
                except KafkaError:  # a later leader epoch, or a later process of this broker
                    del session.outside[entry]
                    continue
                if starts_later:
                    self._note_start(partition, follower, entry)
                if is_news:
                    partition.follower_fetched(follower, entry.fetch_offset, now_ms)
            # The controller may still refuse a proposed ISR. Then no later event would repeat the proposal.
            if follower.in_maximal_isr and follower.broker_id in partition.in_sync.isr:
                del session.outside[entry]

    # -------------------------------------------------------------------------------------------------- one partition

    def _examine(self, entry: FollowerEntry, now_ms: float) -> None:
        """Record the follower's offset, or the problem with it. Afterwards the entry is dirty if there is news."""
        session = entry.session
        partition = entry.partition
        if partition is None:
            partition = self._partitions.watch_as_follower(entry)
        entry.problem = entry.follower = None
        # Until this fetch is recorded: what the high watermark causes must not count this follower as caught up.
        session.dirty[entry] = None
        if session.held_back:
            session.held_back.pop(entry, None)
        session.unsettled[entry] = None
        # The follower drops an answer that crossed this request, and with it the high watermark in that answer.
        sent_high_watermark, entry.sent_high_watermark = entry.sent_high_watermark, -1
        try:
            if partition is None or not partition.leads or partition.offline:
                self._partitions.leader(*entry.key)  # raises the exact error
                raise KafkaError(ErrorCode.NOT_LEADER_OR_FOLLOWER)
            if entry.leader_epoch != partition.leader_epoch:
                partition.require_epoch(entry.leader_epoch)
            follower = partition.in_sync.followers.get(session.replica_id)
            if follower is None or follower.broker_epoch != session.replica_epoch:
                follower = partition.follower(session.replica_id, session.replica_epoch, entry.leader_epoch)
            log, offset = partition.log, entry.fetch_offset
            if entry.last_epoch < 0:
                is_empty_above = offset == entry.log_start_offset > log.log_start_offset
                if is_empty_above and not partition.in_sync.may_be_elected(follower):
                    entry.problem = partition.beginning()
            elif entry.last_epoch != log.leader_epochs.latest or offset > log.log_end_offset:
                entry.problem = partition.divergence(entry.last_epoch, offset)
            if entry.problem is None:
                if not log.log_start_offset <= offset <= log.log_end_offset:
                    raise KafkaError(ErrorCode.OFFSET_OUT_OF_RANGE)
                entry.follower = follower
                if offset < follower.log_end_offset or entry.log_start_offset < follower.log_start_offset:
                    self._doubt_others(partition, session)
                if entry.log_start_offset != follower.log_start_offset:
                    self._note_start(partition, follower, entry)
                partition.follower_fetched(follower, offset, now_ms)
                if session.replica_id not in partition.in_sync.isr:
                    session.outside[entry] = None
                if offset == log.log_end_offset and not (
                    self.tells_high_watermark and sent_high_watermark != log.high_watermark
                ):
                    session.dirty.pop(entry, None)
        except ColdRead as cold:  # a segment is examined before the follower truncates its log for it
            self._partitions.run_cold(cold, lambda: None)
            entry.problem = ErrorCode.KAFKA_STORAGE_ERROR
        except Exception as error:
            entry.problem = self._partitions.refusal(partition, error).code

    def _note_start(self, partition: Partition, follower: FollowerReplica, entry: FollowerEntry) -> None:
        follower.log_start_offset = entry.log_start_offset
        self._partitions.deletions.look(partition)

    @staticmethod
    def _doubt_others(partition: Partition, session: FollowerSession) -> None:
        """Record the last and the next fetch of the replica's other sessions: this one may have been late, or none of
        the replica's.

        Otherwise the replica could leave the ISR at once, an acknowledgement would wait for the next append, and
        DeleteRecords for the next change of the start.
        """
        for other in partition.watch.followers:
            if other.session is not session and other.session.replica_id == session.replica_id:
                other.note_caught_up()
                other.session.outside[other] = None

    def role_changed(self, entry: FollowerEntry) -> None:
        """The replica has another role or leader epoch, or is gone. The follower learns of it at once."""
        if entry.problem is None and not entry.in_flight:
            try:
                partition = self._partitions.leader(*entry.key)
                partition.require_epoch(entry.leader_epoch)
                entry.session.outside[entry] = None
                partition.follower(entry.session.replica_id, entry.session.replica_epoch, entry.leader_epoch)
            except KafkaError as error:
                entry.problem = error.code
                entry.appended()

    def _forget(self, session: FollowerSession, key: Key) -> None:
        entry = session.entries.pop(key, None)
        if entry is not None:
            self.entry_count -= 1
            self._known.clear()  # it refers to entries, and they to their sessions
            entry.note_caught_up()
            for place in (session.dirty, session.held_back, session.in_flight, session.outside, session.unsettled):
                place.pop(entry, None)
            if entry.partition is not None:
                entry.partition.watch.followers.pop(entry, None)
                entry.partition = None

    def _close(self, session_id: int) -> None:
        session = self.sessions.pop(session_id, None)
        if session is not None:
            for timer in (session.timer, session.linger_timer):
                if timer is not None:
                    timer.cancel()
            session.timer = session.linger_timer = None
            if session.parked is not None:
                self._release(session)
            self._empty(session)

    def _empty(self, session: FollowerSession) -> None:
        for key in list(session.entries):
            self._forget(session, key)

    # ------------------------------------------------------------------------------------------------------- waiting

    def _answer_or_park(
        self, session: FollowerSession, correlation_id: int, version: int, is_full: bool = False
    ) -> Answer:
        if session.dirty or is_full:
            if is_full:  # a full answer names every partition, with news or without
                session.dirty = dict.fromkeys(session.entries.values())
            must = (is_full and session.id != 0) or session.max_wait_ms <= 0
            if not session.id and (self.entry_count > ENTRIES_MAX or not session.entries):
                must = True  # there is no room for another waiting fetch, or no partition to wait for
            lingers = not (must or is_full) and session.linger.busy and self._lingers(session)
            frames = None if lingers else self._frames(session, correlation_id, version, must, is_full)
            if frames is not None:
                if not session.id:
                    self._empty(session)
                return frames
        wait_ms = session.max_wait_ms
        due_ms = session.last_fetch_ms + (wait_ms if wait_ms < WAIT_MS_MAX else WAIT_MS_MAX)
        parked = session.parked = ParkedFetch(correlation_id, version, due_ms, session.on_abandon)
        if session.timer is None:
            session.timer = self._loop.call_at(due_ms / 1000, self._wait_is_over, session)
        return parked

    def _answer_parked(self, session: FollowerSession, *, may_linger: bool = True, must_answer: bool = False) -> None:
        """Answer the fetch that waits, if there is news for it or it `must_answer`."""
        if may_linger and session.linger.busy and self._lingers(session):
            return
        parked = session.parked
        if parked is None or session.warming or not (session.dirty or must_answer):
            return
        try:
            frames = self.answers.frames(session, parked.correlation_id, parked.version, must_answer)
        except ColdRead as cold:
            self._warm(session, cold)
            return
        except Exception as error:  # a bug here: the follower tries again on another connection
            self._abandoned(session)
            parked.failed(error)
            return
        if frames is not None:
            session.parked = None
            parked.complete(frames)
            if not session.id:
                self._empty(session)

    def _lingers(self, session: FollowerSession) -> bool:
        """Whether the answer waits for more records. An answer with an error or a divergence never waits."""
        linger = session.linger
        if session.linger_timer is not None:
            if linger.holds_records or linger.news == linger.news_at_start:
                return True
            # The first records after a high watermark: a producer may wait for their acknowledgement.
            session.linger_timer.cancel()
            session.linger_timer = None
        if any(entry.problem is not None for entry in session.dirty):
            return False
        if not linger.may_wait(self._loop.time() * 1000):
            return False
        linger.holds_records = not self.tells_high_watermark or any(entry.has_records for entry in session.dirty)
        session.linger_timer = self._loop.call_later(LINGER_MS / 1000, self._lingered, session)
        return True

    def _lingered(self, session: FollowerSession) -> None:
        session.linger_timer = None
        session.linger.waited(self._loop.time() * 1000)
        self._answer_parked(session, may_linger=False)

    def _release(self, session: FollowerSession) -> None:
        """Send an empty answer to the waiting fetch, because the follower sends another request or the session ends."""
        parked, session.parked = session.parked, None
        if parked is not None:
            parked.complete(nothing(parked, session.id))

    def _wait_is_over(self, session: FollowerSession) -> None:
        """The session's only timer has fired. It starts again if the fetch that waits now is not due yet."""
        session.timer = None
        parked = session.parked
        if parked is None:
            return
        if parked.due_ms > self._loop.time() * 1000 + 1:
            session.timer = self._loop.call_at(parked.due_ms / 1000, self._wait_is_over, session)
            return
        if session.warming:
            return
        for entry in list(session.unsettled) if session.id else session.entries.values():
            partition = entry.partition
            if partition is None or entry in session.held_back:
                continue
            if entry.sent_high_watermark != partition.log.high_watermark:
                session.dirty[entry] = None
        self._answer_parked(session, may_linger=False, must_answer=True)

    def _abandoned(self, session: FollowerSession) -> None:
        """The follower is gone, or uses another connection and with it another session."""
        session.parked = None
        if session.id:
            self._close(session.id)
        else:
            self._empty(session)

    def _warm(self, session: FollowerSession, cold: ColdRead) -> None:
        """Load the pages that this read lacks into memory on a thread, then try again."""
        session.warming = True

        def warmed() -> None:
            session.warming = False
            if session.timer is None:
                self._wait_is_over(session)  # it was over meanwhile
            else:
                self._answer_parked(session, may_linger=False)

        self._partitions.run_cold(cold, warmed)

    def _frames(
        self, session: FollowerSession, correlation_id: int, version: int, must_answer: bool, is_full: bool = False
    ) -> Frames | None:
        """The answer. None when there is not enough data yet, or when it waits for the disk."""
        try:
            return self.answers.frames(session, correlation_id, version, must_answer, is_full)
        except ColdRead as cold:
            self._warm(session, cold)
            return None

    def close(self) -> None:
        for session_id in list(self.sessions):
            self._close(session_id)


def _may_keep_topics(request: FollowerRequest, uses_topic_ids: bool) -> bool:
    return uses_topic_ids or are_short(each.topic_id for each in request.partitions)
