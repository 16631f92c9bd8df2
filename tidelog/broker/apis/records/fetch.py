"""Fetch (key 1, versions 4-18): sessions (KIP-227), long polling, read_committed, epoch checks (KIP-320, KIP-595).

`protocol/hot.py` encodes; batches leave as file regions and are never decoded. Deviations: one response has at most
RESPONSE_BYTES_MAX, even if the client allows more (its first batch is always whole). A wait is at most WAIT_MS_MAX, so
that the fetch of a vanished client ends.
"""

from __future__ import annotations

from collections.abc import Iterable

from tidelog.broker.apis.leader_hints import STALE_LEADER, addresses, leader_of
from tidelog.broker.apis.read_replicas import preferred_read_replica
from tidelog.broker.apis.services import Services
from tidelog.broker.network.counters import ApiCounters
from tidelog.broker.network.request import Answer, Deferred, Peer
from tidelog.broker.replicas.fetching.fetch_sessions import UNKNOWN, FetchSession, Need, SessionPartition
from tidelog.broker.replicas.repairs import REPAIR_COMMITTED_REPLICA_ID, REPAIR_REPLICA_ID
from tidelog.broker.scheduling.pieces import PIECE_ELEMENTS_MAX
from tidelog.protocol.errors import ErrorCode, KafkaError
from tidelog.protocol.hot import (
    FETCH_ADDRESSES_FROM,
    REPLICA_STATE_FROM,
    TOPIC_ID_FROM,
    Buffer,
    FetchedPartition,
    OneFetch,
    decode_one_fetch,
    encode_fetch_response,
    encode_one_read,
    neighbours,
)
from tidelog.protocol.hot_replication import ONE_REQUEST_BYTES
from tidelog.protocol.hot_replication import VERSION as FOLLOWER_VERSION
from tidelog.protocol.messages.fetch import FetchRequest
from tidelog.replication.partition import Isolation
from tidelog.storage.segments.damage import DamagedRecords
from tidelog.storage.segments.reader import ColdRead

API_KEY = 1
VERSIONS = range(4, 19)
STORAGE_ERROR_FROM = 6
ANY_REPLICA_FROM = 11  # clients may read from followers (KIP-392)

_NOT_THERE = (ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, ErrorCode.UNKNOWN_TOPIC_ID)
RESPONSE_BYTES_MAX = 2 * 1024 * 1024  # librdkafka would take 11 MB at a time, at three times the CPU
# An answer that has no more than this part of its bytes left is full. Nearly always a batch of another partition would
# not fit, and to find that out costs as much as to read it.
FULL_SHARE = 32
WAIT_MS_MAX = 300_000  # a client may name any time, and a waiting fetch holds memory
# A waiting fetch outside a session with more partitions than PARTITIONS_AT_ONCE is retried after a delay of one
# millisecond per PARTITIONS_PER_MS partitions.
PARTITIONS_AT_ONCE = 1000
PARTITIONS_PER_MS = 50
# An answer that need not name all partitions of its session ends after the piece in which it has news of so many. It is
# encoded in one turn of the loop, and a request of 30 bytes asks for all that may have news.
ANSWERED_MAX = 5_000
# A connection has at most one waiting fetch that reads more partitions than this. A thousand, as small ones may be,
# would hold hundreds of MB, and would take seconds of the loop when their waits end.
WAITING_PARTITIONS_MAX = 8
# A waiting fetch that reads more partitions is not tried again in a turn of the loop that has become long.
PARTITIONS_IN_TURN = 4


def serve(
    services: Services, body: memoryview, version: int, correlation_id: int, connection: Peer
) -> tuple[Answer, ApiCounters]:
    """The answer, at once if enough records exist, otherwise when they do or the wait ends; and the counters of
    consumers' or followers' fetches. Raises MalformedMessage.
    """
    followers = services.partitions.follower_fetches
    counters = services.requests.fetch_follower
    if version == FOLLOWER_VERSION and followers.sessions:
        # Nearly all fetches in a busy cluster have one of these two forms.
        answer = followers.serve_one(body, correlation_id) if len(body) == ONE_REQUEST_BYTES else None
        answer = answer or followers.serve_many(body, correlation_id)
        if answer is not None:
            return answer, counters
    one = decode_one_fetch(body, version)
    if one is not None:
        frame = _serve_usual(services, one, correlation_id)
        if frame is not None:
            return frame, services.requests.fetch_consumer
    stopwatch = services.requests.stopwatch
    began = stopwatch()
    request, _ = FetchRequest.read(body, 0, version)
    replica_id = request.replica_state.replica_id if version >= 15 else request.replica_id
    if replica_id >= 0:
        return followers.serve(request, version, correlation_id, connection), counters
    counters = services.requests.fetch_consumer
    try:
        session, answer_all = services.partitions.fetch_sessions.resolve(
            request, version >= TOPIC_ID_FROM, services.clock_ms()
        )
    except KafkaError as error:
        counters.failed(error.code)
        return encode_fetch_response(correlation_id, version, error.code, 0, []), counters
    request.topics, request.forgotten_topics_data = [], []  # thousands may wait, and the session has what they need
    fetch = _Fetch(services, request, session, answer_all, version, correlation_id, connection)
    answer = fetch.start()
    if isinstance(answer, Deferred):
        services.scheduler.add_work(stopwatch() - began)
    return answer, counters


def _serve_usual(services: Services, one: OneFetch, correlation_id: int) -> bytes | list[Buffer] | None:
    """A fast answer to a consumer near the log end, in the usual case without a wait; otherwise None.

    It equals the answer of `_Fetch`, without a session for one request. Every poll of a consumer that keeps up takes
    this path.
    """
    topic, index, leader_epoch, offset, partition_max_bytes, max_bytes, min_bytes, wait_ms, isolation = one
    partitions = services.partitions
    partition = partitions.find(topic, index)
    if partition is None or partition.offline or 0 <= leader_epoch != partition.leader_epoch:
        return None
    log = partition.log
    high_watermark, log_start_offset = log.high_watermark, log.log_start_offset
    if not log_start_offset <= offset <= log.log_end_offset or log.producers.has_transactions:
        return None
    budget_bytes = min(max_bytes, partitions.fetch_bytes_max, RESPONSE_BYTES_MAX)
    records: bytes | None = b""
    if offset < high_watermark:
        try:
            records = log.read_tail(offset, min(budget_bytes, partition_max_bytes), high_watermark)
        except OSError:
            return None  # the slow path meets and handles the error
        if records is None or (
            isolation == 1 and (log.hidden_ends or log.aborted_transactions(offset, high_watermark))
        ):
            return None
    assert records is not None
    size_bytes = len(records)
    if wait_ms > 0 and size_bytes < min_bytes and size_bytes < budget_bytes:
        return None
    partition.watch.traffic.bytes_out += size_bytes
    return encode_one_read(correlation_id, topic, index, high_watermark, log_start_offset, isolation == 1, records)


class _Attempt:
    """The partitions of a fetch that were read so far. `later`: the remaining partitions of a large fetch. `is_full`:
    the response has no room for them.
    """

    __slots__ = ("answered", "is_full", "is_large", "later", "must_answer", "news_count", "total_bytes")

    def __init__(self, must_answer: bool) -> None:
        self.answered: list[tuple[SessionPartition, FetchedPartition]] = []
        self.later: list[SessionPartition] = []
        self.must_answer = must_answer
        self.is_full = self.is_large = False
        self.total_bytes = self.news_count = 0


class _Fetch:
    """One fetch request from its arrival to its answer."""

    __slots__ = (
        "_answer_all", "_bucket", "_correlation_id", "_deferred", "_expired", "_found_bytes", "_has_more", "_host",
        "_is_repair", "_isolation", "_listener_name", "_moved", "_rack", "_request", "_retry_due", "_services",
        "_session", "_unfinished", "_version", "_warming",
    )  # fmt: skip

    def __init__(
        self, services: Services, request: FetchRequest, session: FetchSession, answer_all: bool, version: int,
        correlation_id: int, connection: Peer,
    ) -> None:  # fmt: skip
        self._services = services
        self._listener_name, self._host = connection.listener_name, connection.host
        self._rack = ""
        if request.rack_id and services.partitions.follower_fetches.tells_high_watermark:
            # The broker's own string: that of the request may be long.
            racks = {broker.rack: broker.rack for broker in services.image().brokers.values() if broker.rack}
            self._rack = racks.get(request.rack_id, "")
        request.rack_id, request.cluster_id = "", None
        self._request = request
        self._session = session
        self._answer_all = answer_all
        self._version = version
        self._correlation_id = correlation_id
        self._isolation = Isolation.READ_COMMITTED if request.isolation_level == 1 else Isolation.READ_UNCOMMITTED
        repair_ids = (REPAIR_REPLICA_ID, REPAIR_COMMITTED_REPLICA_ID)
        self._is_repair = version < REPLICA_STATE_FROM and request.replica_id in repair_ids
        if self._is_repair and request.replica_id == REPAIR_REPLICA_ID:
            self._isolation = Isolation.LOG_END  # a replica that repairs its log checks the records itself
        self._deferred: Deferred | None = None
        self._unfinished: _Attempt | None = None
        self._bucket = self._found_bytes = 0
        self._expired = request.max_wait_ms <= 0 or not session.partitions
        self._warming = self._retry_due = self._has_more = self._moved = False

    def start(self) -> Answer:
        session = self._session
        is_large = len(session.dirty) > PIECE_ELEMENTS_MAX
        is_exclusive = len(session.dirty) > WAITING_PARTITIONS_MAX
        if session.id and not is_large:
            self._watch(session.dirty.values())
        frames = self._attempt()
        if frames is not None:
            return frames
        is_parked = self._services.partitions.fetch_sessions.park(session, self._give_way)
        if not is_parked and not self._warming:
            self._expired = True
            frames = self._attempt()
            if frames is not None:
                return frames
        self._expired = self._expired or not is_parked
        if not session.id and not is_large:
            self._watch(session.partitions.values())
        self._deferred = Deferred(is_exclusive)
        self._deferred.on_abandon = self._abandoned
        session.wait(self._touched, self._give_way)
        if not self._expired:
            wait_ms = min(self._request.max_wait_ms, WAIT_MS_MAX)
            self._bucket = self._services.partitions.deadlines.add(wait_ms, self._wait_is_over)
        return self._deferred

    def _watch(self, entries: Iterable[SessionPartition]) -> None:
        watch, partitions = self._services.partitions.watch, self._session.partitions
        for entry in entries:
            # The session of a fetch in pieces may have been closed since: nothing would take its entry out again.
            if entry.watched is None and partitions.get(entry.key) is entry:
                watch(entry)

    # ------------------------------------------------------------------------------------------------------ waiting

    def _touched(self) -> None:
        partitions = self._services.partitions
        if self._session.id or len(self._session.partitions) <= PARTITIONS_AT_ONCE:
            partitions.callbacks.defer(self._retry)
        elif not self._retry_due:
            # A retry reads all partitions, even if one has changed. The delay keeps a few such fetches from using up
            # the event loop.
            self._retry_due = True
            partitions.deadlines.add(int(len(self._session.partitions) / PARTITIONS_PER_MS), self._retry_later)

    def _retry_later(self) -> None:
        self._retry_due = False
        self._retry()

    def _wait_is_over(self) -> None:
        self._expired = True
        self._retry()

    def _give_way(self) -> None:
        """Too many fetches wait, and this one has waited longest; or the next one of its session waits."""
        self._services.partitions.callbacks.defer(self._wait_is_over)

    def _retry(self) -> None:
        if self._warming or self._deferred is None or self._deferred.response is not None:
            self._moved = True
            return
        session, services = self._session, self._services
        is_small = len(session.partitions if self._answer_all else session.dirty) <= PARTITIONS_IN_TURN
        if not is_small and services.scheduler.is_turn_long:
            self._pause()
            return
        began = 0.0 if is_small else services.requests.stopwatch()
        try:
            frames = self._attempt()
        except Exception as error:
            self._waits_no_longer()
            self._deferred.failed(error)
            return
        if not is_small:
            services.scheduler.add_work(services.requests.stopwatch() - began)
        if frames is not None:
            self._waits_no_longer()
            self._deferred.complete(frames)
        elif is_small and not session.id and not self._warming:
            for entry in session.partitions.values():
                if entry.watched is not None:
                    entry.watched.tried_in_vain(entry, self._need(entry))

    def _need(self, entry: SessionPartition) -> Need:
        """What the log must hold before another try of the fetch of this partition can succeed."""
        partition = self._services.partitions.find(*entry.key)
        if partition is None or self._rack or len(self._session.partitions) > 1:
            return UNKNOWN
        log = partition.log
        if log.hidden_ends or partition.read_bound(self._isolation) != log.log_end_offset:
            return UNKNOWN  # more can become readable than is appended
        enough_bytes = min(self._request.min_bytes, self._budget_bytes(), entry.request.partition_max_bytes)
        segment = log.segments.active
        return Need(segment, segment.size_bytes + enough_bytes - self._found_bytes)

    def _waits_no_longer(self) -> None:
        self._session.waiters.pop(self._touched, None)
        self._services.partitions.deadlines.discard(self._bucket, self._wait_is_over)
        self._services.partitions.fetch_sessions.unpark(self._give_way)

    def _abandoned(self) -> None:
        """The client has disconnected: end the wait."""
        self._deferred = None
        self._waits_no_longer()
        if self._unfinished is not None:
            for entry, _ in self._unfinished.answered:
                self._remain_dirty(entry)
        if not self._session.id:
            self._session.close()

    def _warm(self, cold: ColdRead) -> None:
        """Pages of this read are not in memory: load them on a thread, then retry."""
        self._warming = True

        def warmed() -> None:
            self._warming = False
            self._retry()

        self._services.partitions.run_cold(cold, warmed)

    # ------------------------------------------------------------------------------------------------------- answer

    def _attempt(self) -> list[Buffer] | None:
        """The response frames, or None if the fetch must wait."""
        if self._unfinished is not None:
            return self._next_piece(self._unfinished)
        session = self._session
        self._has_more = self._moved = False
        attempt = _Attempt(self._expired)
        entries = list(session.partitions.values() if self._answer_all else session.dirty.values())
        if len(entries) > PIECE_ELEMENTS_MAX:
            attempt.is_large, attempt.later, self._unfinished = True, entries, attempt
            self._pause()
            return None
        if self._deferred is not None:
            # A topic that was deleted and created again meanwhile has other partitions of the same names.
            self._watch(entries)
        return self._outcome(attempt) if self._read_all(attempt, entries) else None

    def _pause(self) -> None:
        """Let other requests run before the next piece."""

        def resume() -> None:
            self._warming = False
            self._retry()

        self._warming = True
        self._services.scheduler.wait(resume, is_first=False, for_records=True, host=self._host)

    def _next_piece(self, attempt: _Attempt) -> list[Buffer] | None:
        """Read the next piece of a large attempt. A partition that changes after its piece becomes dirty again."""
        entries, attempt.later = attempt.later[:PIECE_ELEMENTS_MAX], attempt.later[PIECE_ELEMENTS_MAX:]
        self._watch(entries)
        begun = len(attempt.answered)
        is_read = self._read_all(attempt, entries)
        read = attempt.answered[begun:]
        for entry, _ in read:
            self._session.dirty.pop(entry.key, None)
        if not self._answer_all:
            attempt.news_count += sum(_is_news(*each) for each in read)
        if not is_read:
            attempt.later = entries[len(read) :] + attempt.later
            return None
        if attempt.news_count >= ANSWERED_MAX:
            attempt.must_answer = attempt.is_full = True
        if attempt.later and not attempt.is_full:
            self._pause()
            return None
        self._unfinished = None
        attempt.must_answer = attempt.must_answer or self._expired
        frames = self._outcome(attempt)
        if frames is None:
            for entry, _ in attempt.answered:
                self._remain_dirty(entry)
            if self._moved:
                return self._attempt()
        return frames

    def _remain_dirty(self, entry: SessionPartition) -> None:
        session = self._session
        if session.partitions.get(entry.key) is entry:
            session.dirty.setdefault(entry.key, entry)

    def _budget_bytes(self) -> int:
        return min(self._request.max_bytes, self._services.partitions.fetch_bytes_max, RESPONSE_BYTES_MAX)

    def _read_all(self, attempt: _Attempt, entries: list[SessionPartition]) -> bool:
        """Read these partitions. Returns False if a read is cold; the fetch continues when its pages are loaded."""
        request, answered, answer_all = self._request, attempt.answered, self._answer_all
        budget_bytes = self._budget_bytes()
        for entry in entries:
            left_bytes = budget_bytes - attempt.total_bytes
            is_first = not attempt.total_bytes
            if left_bytes <= budget_bytes // FULL_SHARE and not is_first and not answer_all:
                attempt.must_answer = attempt.is_full = True
                break
            try:
                fetched = self._read(entry, min(max(left_bytes, 0), entry.request.partition_max_bytes), is_first)
            except ColdRead as cold:
                if 0 < attempt.total_bytes >= request.min_bytes and not answer_all:
                    attempt.is_full = True
                    break
                self._warm(cold)
                return False
            if fetched.size_bytes:
                attempt.total_bytes += fetched.size_bytes
            elif fetched.error_code or fetched.diverging or fetched.preferred_read_replica >= 0:
                attempt.must_answer = True
            answered.append((entry, fetched))
        return True

    def _outcome(self, attempt: _Attempt) -> list[Buffer] | None:
        """The response frames, or None if the fetch must wait."""
        enough_bytes = min(self._request.min_bytes, self._budget_bytes())
        if attempt.total_bytes < enough_bytes and not attempt.must_answer and not self._has_more:
            self._found_bytes = attempt.total_bytes
            return None
        return self._encode(attempt)

    def _encode(self, attempt: _Attempt) -> list[Buffer]:
        session, dirty, is_large = self._session, self._session.dirty, attempt.is_large
        partitions: list[FetchedPartition] = []
        for entry, fetched in attempt.answered:
            news = fetched.size_bytes or fetched.error_code or fetched.diverging or fetched.preferred_read_replica >= 0
            if fetched.size_bytes:
                partition = self._services.partitions.find(*entry.key)
                if partition is not None:
                    partition.watch.traffic.bytes_out += fetched.size_bytes
            elif fetched.error_code:
                self._services.requests.fetch_consumer.failed(fetched.error_code)
            if (
                news
                or self._answer_all
                or fetched.high_watermark != entry.sent_high_watermark
                or fetched.log_start_offset != entry.sent_log_start_offset
            ):
                partitions.append(fetched)
                entry.sent_high_watermark = fetched.high_watermark
                entry.sent_log_start_offset = fetched.log_start_offset
            if news or entry.request.fetch_offset < fetched.high_watermark:
                if is_large:
                    self._remain_dirty(entry)
            elif not is_large:  # a large attempt did this at the read, so dirty partitions have changed since
                dirty.pop(entry.key, None)
        if not session.id:
            session.close()
        hints = []
        if self._version >= FETCH_ADDRESSES_FROM:
            for fetched in partitions:
                if fetched.error_code in STALE_LEADER:
                    fetched.current_leader = leader_of(self._services, fetched.topic, fetched.index)
                    hints.append(fetched.current_leader)
        nodes = addresses(self._services, self._listener_name, hints) if hints else ()
        return encode_fetch_response(
            self._correlation_id, self._version, 0, session.id, neighbours(partitions), addresses=nodes
        )

    def _read(self, entry: SessionPartition, max_bytes: int, min_one_batch: bool) -> FetchedPartition:
        request = entry.request
        topic, index = entry.key
        partitions = self._services.partitions
        partition = None
        try:
            if self._version >= ANY_REPLICA_FROM:
                partition = partitions.readable(topic, index)
                partition.require_epoch(request.current_leader_epoch)
            else:
                partition = partitions.leader(topic, index)
                partition.require_leader(request.current_leader_epoch)
            log = partition.log
            offset = request.fetch_offset
            aborted = None
            if request.last_fetched_epoch >= 0:
                diverging = partition.divergence(request.last_fetched_epoch, offset)
                if diverging is not None:
                    return FetchedPartition(
                        topic, index, 0, log.high_watermark, log.last_stable_offset, log.log_start_offset,
                        diverging=diverging,
                    )  # fmt: skip
            if self._rack and partition.leads and self._version >= ANY_REPLICA_FROM:
                nearby = preferred_read_replica(self._services, partition, self._rack, offset, self._listener_name)
                if nearby >= 0:
                    return FetchedPartition(
                        topic, index, 0, log.high_watermark, log.last_stable_offset, log.log_start_offset,
                        preferred_read_replica=nearby,
                    )  # fmt: skip
            result = partition.read(offset, max_bytes, self._isolation, min_one_batch)
            if result.size_bytes < self._request.min_bytes and (result.size_bytes or not min_one_batch):
                # Whole batches are usually a little smaller than the limit. Waiting for more would be in vain.
                self._has_more = self._has_more or result.next_offset < partition.read_bound(self._isolation)
            if self._isolation == Isolation.READ_COMMITTED:
                aborted = log.aborted_transactions(offset, result.next_offset) if result.size_bytes else []
            return FetchedPartition(
                topic, index, 0, log.high_watermark, log.last_stable_offset, log.log_start_offset,
                result.regions, result.size_bytes, aborted,
            )  # fmt: skip
        except ColdRead:
            raise
        except Exception as error:
            code = partitions.refusal(partition, error).code
            if self._is_repair and isinstance(error, DamagedRecords):
                code = ErrorCode.CORRUPT_MESSAGE  # no retry: two damaged replicas could wait for each other
            if code == ErrorCode.UNKNOWN_TOPIC_ID and entry.known_as is not None:
                code = _gone(self._services, entry.known_as)
            if code == ErrorCode.KAFKA_STORAGE_ERROR and self._version < STORAGE_ERROR_FROM:
                code = ErrorCode.NOT_LEADER_OR_FOLLOWER  # old clients know this error and retry
            failed = _failed(topic, index, code)
            if self._is_repair and partition is not None and code == ErrorCode.OFFSET_OUT_OF_RANGE:
                failed.log_start_offset = partition.log.log_start_offset  # the other replica may ask for what is left
            return failed


def _is_news(entry: SessionPartition, fetched: FetchedPartition) -> bool:
    """Whether the answer names the partition if it need not name all."""
    has_moved = (
        fetched.high_watermark != entry.sent_high_watermark or fetched.log_start_offset != entry.sent_log_start_offset
    )
    news = fetched.size_bytes or fetched.error_code or fetched.diverging or fetched.preferred_read_replica >= 0
    return bool(has_moved or news)


def _gone(services: Services, topic: str) -> ErrorCode:
    """The error for a topic that was deleted while a fetch of its id waits or has a session: it is the one for its
    name, as in Kafka, where only an id that was never known is UNKNOWN_TOPIC_ID.
    """
    is_there_again = topic in services.image().topics_by_name
    return ErrorCode.INCONSISTENT_TOPIC_ID if is_there_again else ErrorCode.UNKNOWN_TOPIC_OR_PARTITION


def _failed(topic: str | bytes, index: int, code: ErrorCode) -> FetchedPartition:
    # In Kafka the list of aborted transactions is null after a failed read, and empty for an unknown partition.
    return FetchedPartition(topic, index, code, aborted=() if code in _NOT_THERE else None)
