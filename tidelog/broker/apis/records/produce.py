"""Produce (key 0, versions 3-13; 0-2 are advertised but refused, as Kafka 4 does, or old librdkafka drops compression).

Decoded and encoded by `protocol/hot.py`. acks=all is answered when the high watermark has passed the batch, acks=1 when
it is appended (and synced, where `flush.messages` asks for it), acks=0 never: an error then closes the connection.
The first batch of a transaction in a partition waits until the transaction's coordinator has confirmed it, or has added
the partition (from version 12 on, KIP-890); what is behind it on its connection waits, too.
Deviation: requests pipelined behind one that waits are appended meanwhile (Kafka stops reading the connection); answers
still leave in order.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from tidelog.broker.apis.leader_hints import STALE_LEADER, addresses, leader_of
from tidelog.broker.apis.services import Services
from tidelog.broker.network.request import Answer, Deferred, Peer
from tidelog.broker.scheduling.inspections import Inspection
from tidelog.broker.scheduling.pieces import PIECE_ELEMENTS_MAX, WHOLE_BYTES_MAX
from tidelog.broker.scheduling.purgatory import DEADLINE_RESOLUTION_MS
from tidelog.protocol.batches.compression import ZSTD
from tidelog.protocol.batches.record_batch import ATTRIBUTES_LOW_OFFSET, HEADER_SIZE, TRANSACTIONAL_FLAG, read_header
from tidelog.protocol.errors import ErrorCode, KafkaError
from tidelog.protocol.hot import (
    PRODUCE_ADDRESSES_FROM,
    ProducedPartition,
    ProduceRequest,
    decode_one_produce,
    decode_produce,
    encode_one_produced,
    encode_produce_response,
)
from tidelog.replication.partition import ACKS_ALL
from tidelog.storage.producers.refused_batches import sequenced_header
from tidelog.storage.producers.verification import TransactionAppend
from tidelog.storage.segments.inspection import NeedsInspection

if TYPE_CHECKING:
    import asyncio

    from tidelog.broker.replicas.partitions import Committed, Partitions
    from tidelog.replication.partition import Partition
    from tidelog.storage.log.partition_log import AppendInfo

logger = logging.getLogger("tidelog.produce")

API_KEY = 0
VERSIONS = range(3, 14)
ZSTD_FROM = 7
ABORTABLE_FROM = 11  # clients know TRANSACTION_ABORTABLE
ADDS_FROM = 12  # clients leave it to this request to add partitions to their transaction
ACKS = (ACKS_ALL, 0, 1)
# A batch that is in the log already waits so long for an ISR that is too small. All answers behind it wait, too.
REPEATED_WAIT_MS_MAX = 1000
# Of a request with acks=0 for very many partitions, whose client is gone: so much is appended all the same.
ABANDONED_BYTES_MAX = 1024 * 1024

# From these versions on a client may be told of the errors on the left; older ones get the one on the right.
_SINCE = {ErrorCode.KAFKA_STORAGE_ERROR: (4, ErrorCode.NOT_LEADER_OR_FOLLOWER)}

_NOT_REACHED = frozenset(
    (
        ErrorCode.NETWORK_EXCEPTION,
        ErrorCode.COORDINATOR_LOAD_IN_PROGRESS,
        ErrorCode.COORDINATOR_NOT_AVAILABLE,
        ErrorCode.NOT_COORDINATOR,
    )
)

_Key = tuple[str | bytes, int]
"""A partition as the request names it."""
_Wanted = dict[str | bytes, dict[int, memoryview | None]]
_Topics = list[tuple[str | bytes, list[ProducedPartition]]]
# The partition, where the batch was appended, and where its answer stands.
_Waiting = tuple["Partition", "AppendInfo", list[ProducedPartition], int]
# Topic, partition, the batch to be looked at, and where its answer stands.
_Looking = tuple[str | bytes, int, NeedsInspection, list[ProducedPartition], int]


def serve(
    services: Services, frame: memoryview, position: int, version: int, correlation_id: int, connection: Peer
) -> Answer:
    """Append all batches of a request, whose body begins at `position`. Raises MalformedMessage."""
    one = decode_one_produce(frame, position, version)
    if one is None:
        return _serve_many(services, frame[position:], version, correlation_id, connection)
    topic, index, records, acks, timeout_ms = one
    partitions = services.partitions
    try:
        partition = partitions.leader(topic, index)
        if partition.is_internal:
            _refuse_what_the_log_would_take(partition, records, version, acks)
        info = partitions.append(partition, records, services.clock_ms(), acks)
    except NeedsInspection as unseen:
        to = _Asker(services, connection.listener_name, version, correlation_id)
        answered = [ProducedPartition(index)]
        so_far = _SoFar(connection, acks, timeout_ms, [(topic, answered)], [], failed=False)
        return _Looked(to, so_far, [(topic, index, unseen, answered, 0)])
    except KafkaError as error:
        partitions.note_refused(topic, index, records, error.code)
        to = _Asker(services, connection.listener_name, version, correlation_id)
        return to.encode([(topic, [_refused(services, index, error, version)])])
    first_offset, last_offset, log_append_time_ms, log_start_offset, _, _ = info
    if partition.log.high_watermark <= last_offset and not partition.may_answer(last_offset, acks):
        to = _Asker(services, connection.listener_name, version, correlation_id)
        return _ParkedOne(to, partition, info, topic, timeout_ms, acks)
    return encode_one_produced(correlation_id, topic, index, first_offset, log_append_time_ms, log_start_offset)


def _serve_many(services: Services, body: memoryview, version: int, correlation_id: int, connection: Peer) -> Answer:
    """A request of several partitions, of an older version, without an answer, or of a transaction."""
    request = decode_produce(body, version)
    wanted = _by_topic(request)
    to = _Asker(services, connection.listener_name, version, correlation_id)
    so_far = _SoFar(connection, request.acks, request.timeout_ms, [], [], failed=False)
    if any(_is_transactional(records) for batches in wanted.values() for records in batches.values()):
        return _serve_transaction(to, so_far, wanted, request.transactional_id, len(body))
    return _append_or_begin(to, so_far, wanted, len(body))


def _append_or_begin(to: _Asker, so_far: _SoFar, wanted: _Wanted, size_bytes: int) -> Answer:
    """Append all batches, or begin to, where they are very many or take long to look at."""
    if size_bytes > WHOLE_BYTES_MAX and sum(map(len, wanted.values())) > PIECE_ELEMENTS_MAX:
        return _InPieces(to, so_far, wanted)
    so_far, unseen_ones = _append_all(to, so_far, wanted)
    return _Looked(to, so_far, unseen_ones) if unseen_ones else _concluded(to, so_far)


def _serve_transaction(
    to: _Asker, so_far: _SoFar, wanted: _Wanted, transactional_id: str | None, size_bytes: int
) -> Answer:
    """A request with batches of a transaction: those that would open it in their partitions are verified first."""
    batches = [
        (topic, index, header)
        for topic, records_of in wanted.items()
        for index, records in records_of.items()
        if _is_transactional(records) and (header := sequenced_header(records)) is not None
    ]
    producers = {(header.producer_id, header.producer_epoch) for _, _, header in batches}
    if transactional_id is None:
        error = KafkaError(ErrorCode.TRANSACTIONAL_ID_AUTHORIZATION_FAILED, "a transaction without an id")
        return _refuse_all(to, so_far, wanted, error)
    if len(producers) > 1:
        error = KafkaError(ErrorCode.INVALID_PRODUCER_ID_MAPPING, "one transaction of several producers")
        return _refuse_all(to, so_far, wanted, error)
    services, adds = to.services, to.version >= ADDS_FROM
    transaction = _Transaction({}, {})
    asked: dict[tuple[str, int], _Key] = {}
    now_ms = services.clock_ms()
    for topic, index, header in batches:
        try:
            partition = services.partitions.leader(topic, index)
            if partition.is_internal:
                continue
            verification = partition.begin_verification(
                header.producer_id, header.producer_epoch, header.base_sequence, adds, now_ms
            )
        except KafkaError:
            continue  # the append meets the same
        if verification is not None:
            transaction.appends[topic, index] = TransactionAppend(verification)
            asked[partition.topic, index] = (topic, index)
    so_far = so_far._replace(transaction=transaction)
    if not asked:
        return _append_or_begin(to, so_far, wanted, size_bytes)
    ((producer_id, producer_epoch),) = producers
    answer = services.verifier.verify(transactional_id, producer_id, producer_epoch, asked, adds=adds)
    if answer.done():
        transaction.note(asked, answer.result(), to.version)
        return _append_or_begin(to, so_far, wanted, size_bytes)
    return _Verified(to, so_far, wanted, size_bytes, asked, answer)


def _refuse_all(to: _Asker, so_far: _SoFar, wanted: _Wanted, error: KafkaError) -> Answer:
    if so_far.acks == 0:
        so_far.connection.close()
        return None
    return to.encode(
        [
            (topic, [_refused(to.services, index, error, to.version) for index in batches])
            for topic, batches in wanted.items()
        ]
    )


def _append_all(to: _Asker, so_far: _SoFar, wanted: _Wanted) -> tuple[_SoFar, list[_Looking]]:
    """Append these batches; and those of them that must be looked at first, whose answers follow."""
    services, version = to.services, to.version
    partitions = services.partitions
    now_ms = services.clock_ms()
    _, acks, _, topics, waiting, failed, transaction = so_far
    is_doubtful = version < ZSTD_FROM or acks not in ACKS
    unseen_ones: list[_Looking] = []
    for topic, batches in wanted.items():
        if not topics or topics[-1][0] != topic:
            topics.append((topic, []))
        answered = topics[-1][1]
        for index, records in batches.items():
            try:
                partition = partitions.leader(topic, index)
                if records is None or partition.is_internal or is_doubtful:
                    _refuse_what_the_log_would_take(partition, records, version, acks)
                assert records is not None
                if transaction is None:
                    info = partitions.append(partition, records, now_ms, acks)
                else:
                    given = transaction.of(topic, index)
                    info = partitions.append(partition, records, now_ms, acks, True, given)
            except NeedsInspection as unseen:
                unseen_ones.append((topic, index, unseen, answered, len(answered)))
                answered.append(ProducedPartition(index))
                continue
            except KafkaError as error:
                failed = True
                partitions.note_refused(topic, index, records, error.code)
                answered.append(_refused(services, index, error, version))
                continue
            if acks != 0 and not partition.may_answer(info.last_offset, acks):
                waiting.append((partition, info, answered, len(answered)))
            answered.append(_appended(index, info))
    return so_far._replace(failed=failed), unseen_ones


def _concluded(to: _Asker, so_far: _SoFar) -> Answer:
    """The answer to a request of which everything that may be appended is."""
    connection, acks, timeout_ms, topics, waiting, failed, _ = so_far
    if acks == 0:
        if failed:
            logger.info("closing connection from %s: a produce with acks=0 failed", connection.host)
            connection.close()
        return None
    if not waiting:
        return to.encode(topics)
    return _Parked(to, topics, waiting, timeout_ms, acks)


class _Transaction(NamedTuple):
    """What the partitions of a request need of its transaction: verifications, and those that were refused."""

    appends: dict[_Key, TransactionAppend]
    refusals: dict[_Key, KafkaError]

    def note(
        self, asked: Mapping[tuple[str, int], _Key], errors: Mapping[tuple[str, int], ErrorCode], version: int
    ) -> None:
        """The coordinator's answer."""
        for partition, key in asked.items():
            error = errors.get(partition, ErrorCode.UNKNOWN_SERVER_ERROR)
            if error is not ErrorCode.NONE:
                self.refusals[key] = _not_verified(error, version)

    def of(self, topic: str | bytes, index: int) -> TransactionAppend | None:
        """For one partition. Raises the refusal."""
        refusal = self.refusals.get((topic, index))
        if refusal is not None:
            raise KafkaError(refusal.code, refusal.message)
        return self.appends.get((topic, index))


class _SoFar(NamedTuple):
    """A request whose batches have been appended, refused, or left to be looked at."""

    connection: Peer
    acks: int
    timeout_ms: int
    topics: _Topics
    waiting: list[_Waiting]
    failed: bool
    transaction: _Transaction | None = None


class _Asker(NamedTuple):
    """To whom the answer goes, and in which form."""

    services: Services
    listener_name: str
    version: int
    correlation_id: int

    def encode(self, topics: _Topics) -> bytearray:
        hints = []
        if self.version >= PRODUCE_ADDRESSES_FROM:
            for topic, answered in topics:
                for position, each in enumerate(answered):
                    if each.error_code in STALE_LEADER:
                        leader = leader_of(self.services, topic, each.partition_index)
                        answered[position] = each._replace(current_leader=leader)
                        hints.append(leader)
        found = addresses(self.services, self.listener_name, hints) if hints else ()
        return encode_produce_response(self.correlation_id, self.version, topics, addresses=found)


class _ParkedOne(Deferred):
    """The same as `_Parked` for one partition, as most produces of a busy cluster are."""

    __slots__ = ("_acks", "_bucket", "_info", "_partition", "_timeout_ms", "_to", "_topic")

    def __init__(
        self, to: _Asker, partition: Partition, info: AppendInfo, topic: str, timeout_ms: int, acks: int
    ) -> None:
        self.exclusive = False
        self.response = self.on_abandon = self.timing = self._on_complete = None
        self._to = to
        self._topic = topic
        self._partition = partition
        self._info = info
        self._timeout_ms = timeout_ms
        self._acks = acks
        self._bucket = 0

    def on_complete(self, callback: Callable[[Any], None]) -> None:
        """Begins to wait. Those for whom it waits may have been woken since it was made."""
        self._on_complete = callback
        partition, info, partitions = self._partition, self._info, self._to.services.partitions
        timeout_ms = self._timeout_ms
        self._bucket = partitions.deadlines.add(timeout_ms if timeout_ms > 0 else 0, self._expired)
        partitions.when_acknowledged(partition, info.last_offset + 1, self._acks, self._settled)
        if info.duplicate:
            _limit_wait(partitions, partition, self._settled)

    def overdue_s(self, waited_s: float, loop_time_s: float) -> float:
        return loop_time_s - self._bucket * DEADLINE_RESOLUTION_MS / 1000

    def _settled(self, error: Exception | None) -> None:
        if self.response is not None:
            return  # it had timed out
        to, info = self._to, self._info
        if error is not None:
            self._refuse(error)
        else:
            try:
                frame = encode_one_produced(
                    to.correlation_id, self._topic, self._partition.index, info.first_offset, info.log_append_time_ms,
                    info.log_start_offset,
                )  # fmt: skip
            except Exception as failure:
                self.failed(failure)
            else:
                self.complete(frame)
        to.services.partitions.deadlines.discard(self._bucket, self._expired)

    def _expired(self) -> None:
        self._refuse(KafkaError(ErrorCode.REQUEST_TIMED_OUT))

    def _refuse(self, error: Exception) -> None:
        assert isinstance(error, KafkaError)
        to = self._to
        try:
            frame = to.encode([(self._topic, [_refused(to.services, self._partition.index, error, to.version)])])
        except Exception as failure:
            self.failed(failure)
        else:
            self.complete(frame)


class _Verified(Deferred):
    """A request with batches that their transaction's coordinator is asked about. What is behind it waits."""

    __slots__ = ("_asked", "_size_bytes", "_so_far", "_to", "_wanted")

    def __init__(
        self, to: _Asker, so_far: _SoFar, wanted: _Wanted, size_bytes: int, asked: Mapping[tuple[str, int], _Key],
        answer: asyncio.Future[dict[tuple[str, int], ErrorCode]],
    ) -> None:  # fmt: skip
        super().__init__(exclusive=True)
        self._to = to
        self._so_far = so_far
        # The connection's buffer is used again.
        self._wanted: _Wanted = {
            topic: {index: None if records is None else memoryview(bytearray(records)) for index, records in of.items()}
            for topic, of in wanted.items()
        }
        self._size_bytes = size_bytes
        self._asked = asked
        answer.add_done_callback(self._answered)

    def _answered(self, answer: asyncio.Future[dict[tuple[str, int], ErrorCode]]) -> None:
        if answer.cancelled():
            return  # the node stops
        try:
            transaction = self._so_far.transaction
            assert transaction is not None
            transaction.note(self._asked, answer.result(), self._to.version)
            wanted, self._wanted = self._wanted, {}
            frames = _append_or_begin(self._to, self._so_far, wanted, self._size_bytes)
        except Exception as failure:
            self.failed(failure)
            return
        if isinstance(frames, Deferred):
            self.on_abandon = frames.on_abandon
            frames.on_complete(self.complete)
        else:
            self.complete([] if frames is None else frames)


class _InPieces(Deferred):
    """A request for very many partitions: PIECE_ELEMENTS_MAX of them, then others are served.

    What is behind it on its connection waits. Batches that wait are copied: the connection's buffer is used again. When
    the client is gone, what is left is dropped, unless it wanted no answer and little is left.
    """

    __slots__ = ("_is_abandoned", "_left", "_so_far", "_to", "_unseen_ones")

    def __init__(self, to: _Asker, so_far: _SoFar, wanted: _Wanted) -> None:
        super().__init__(exclusive=True)
        self._is_abandoned = False
        self._to = to
        self._so_far = so_far
        self._left = deque(
            (topic, index, None if records is None else bytearray(records))
            for topic, batches in wanted.items()
            for index, records in batches.items()
        )
        self._unseen_ones: list[_Looking] = []
        self.on_abandon = self._abandoned
        self._wait()

    def _wait(self) -> None:
        self._to.services.turns.wait(self._next, is_first=False, for_records=True)

    def _abandoned(self) -> None:
        self._is_abandoned = True
        left_bytes = sum(len(records) for _, _, records in self._left if records is not None)
        if self._so_far.acks != 0 or left_bytes > ABANDONED_BYTES_MAX:
            self._left.clear()

    def _next(self) -> None:
        piece: _Wanted = {}
        for _ in range(min(PIECE_ELEMENTS_MAX, len(self._left))):
            topic, index, records = self._left.popleft()
            piece.setdefault(topic, {})[index] = None if records is None else memoryview(records)
        try:
            self._so_far, unseen_ones = _append_all(self._to, self._so_far, piece)
            self._unseen_ones += unseen_ones
            if self._left:
                self._wait()
            else:
                self._end()
        except Exception as failure:
            self.failed(failure)

    def _end(self) -> None:
        unseen_ones = self._unseen_ones
        answer = _Looked(self._to, self._so_far, unseen_ones) if unseen_ones else _concluded(self._to, self._so_far)
        if isinstance(answer, Deferred):
            self.on_abandon = answer.on_abandon
            if self._is_abandoned and answer.on_abandon is not None:
                answer.on_abandon()
            answer.on_complete(self.complete)
        else:
            self.complete([] if answer is None else answer)


class _Looked(Deferred):
    """A request with batches that take long to look at; what else it has is appended, and what is behind it waits."""

    __slots__ = ("_inspection", "_is_abandoned", "_left", "_so_far", "_to")

    def __init__(self, to: _Asker, so_far: _SoFar, unseen: list[_Looking]) -> None:
        super().__init__(exclusive=True)
        self._to = to
        self._so_far = so_far
        self._left = unseen
        self._is_abandoned = False
        self._begin()
        self.on_abandon = self._abandoned

    def _begin(self) -> None:
        held_bytes = sum(len(unseen.batches) for _, _, unseen, _, _ in self._left)
        self._inspection = Inspection(self._left[-1][2], self._seen, held_bytes)
        inspections = self._to.services.inspections
        inspections.begin(self._inspection)
        if self._is_abandoned:
            inspections.abandon(self._inspection)

    def _abandoned(self) -> None:
        self._is_abandoned = True
        self._to.services.inspections.abandon(self._inspection)

    def _seen(self, outcome: memoryview | KafkaError) -> None:
        topic, index, unseen, answered, position = self._left.pop()
        to, so_far = self._to, self._so_far
        acks = so_far.acks
        partitions = to.services.partitions
        try:
            partition = partitions.leader(topic, index)
            if isinstance(outcome, KafkaError):
                partition.watch.traffic.refused(outcome.code, len(unseen.batches))
                # Raised itself, it would hold this frame, which holds it and the batch, until a collection.
                raise KafkaError(outcome.code, outcome.message, outcome.record_errors)
            unseen.rules.seen = outcome
            given = so_far.transaction.of(topic, index) if so_far.transaction is not None else None
            info = partitions.append(partition, outcome, to.services.clock_ms(), acks, True, given)
        except NeedsInspection as again:  # under other rules than before
            self._left.append((topic, index, again, answered, position))
        except Exception as error:
            self._so_far = so_far._replace(failed=True)
            refusal = partitions.refusal(None, error)
            partitions.note_refused(topic, index, unseen.batches, refusal.code)
            answered[position] = _refused(to.services, index, refusal, to.version)
        else:
            answered[position] = _appended(index, info)
            if acks != 0 and not partition.may_answer(info.last_offset, acks):
                so_far.waiting.append((partition, info, answered, position))
        finally:
            unseen.rules.seen = None
        if self._left:
            self._begin()
            return
        try:
            answer = _concluded(to, self._so_far)
        except Exception as failure:
            self.failed(failure)
            return
        if isinstance(answer, Deferred):
            answer.on_complete(self.complete)
        else:
            self.complete([] if answer is None else answer)


class _Parked(Deferred):
    """A request until every partition's high watermark has passed it, or its time is up."""

    __slots__ = ("_acks", "_bucket", "_open", "_timeout_ms", "_to", "_topics", "_waiting")

    def __init__(self, to: _Asker, topics: _Topics, waiting: list[_Waiting], timeout_ms: int, acks: int) -> None:
        super().__init__()
        self._to = to
        self._topics = topics
        self._waiting = waiting
        self._open = set(range(len(waiting)))
        self._timeout_ms = timeout_ms
        self._acks = acks
        self._bucket = 0

    def on_complete(self, callback: Callable[[Any], None]) -> None:
        """Begins to wait. Those for whom it waits may have been woken since it was made."""
        self._on_complete = callback
        partitions = self._to.services.partitions
        self._bucket = partitions.deadlines.add(max(self._timeout_ms, 0), self._expired)
        for number, (partition, info, _, _) in enumerate(self._waiting):
            settled = partial(self._settled, number)
            partitions.when_acknowledged(partition, info.last_offset + 1, self._acks, settled)
            if info.duplicate:
                _limit_wait(partitions, partition, settled)

    def overdue_s(self, waited_s: float, loop_time_s: float) -> float:
        return loop_time_s - self._bucket * DEADLINE_RESOLUTION_MS / 1000

    def _settled(self, number: int, error: Exception | None) -> None:
        if number not in self._open:
            return  # it had timed out
        self._open.discard(number)
        if error is not None:
            self._fail(number, error)
        if not self._open:
            self._to.services.partitions.deadlines.discard(self._bucket, self._expired)
            self._finish()

    def _expired(self) -> None:
        for number in self._open:
            self._fail(number, KafkaError(ErrorCode.REQUEST_TIMED_OUT))
        self._open.clear()
        self._finish()

    def _fail(self, number: int, error: Exception) -> None:
        assert isinstance(error, KafkaError)
        _, _, answered, position = self._waiting[number]
        answered[position] = _refused(self._to.services, answered[position].partition_index, error, self._to.version)

    def _finish(self) -> None:
        try:
            frame = self._to.encode(self._topics)
        except Exception as failure:
            self.failed(failure)
        else:
            self.complete(frame)


def _limit_wait(partitions: Partitions, partition: Partition, settled: Committed) -> None:
    """A batch that is sent again waits for a while only, where the ISR is too small for any acknowledgement."""
    if partition.is_under_min_isr:
        error = KafkaError(ErrorCode.NOT_ENOUGH_REPLICAS_AFTER_APPEND)
        partitions.deadlines.add(REPEATED_WAIT_MS_MAX, partial(settled, error))


def _refuse_what_the_log_would_take(partition: Partition, records: memoryview | None, version: int, acks: int) -> None:
    if acks not in ACKS:
        raise KafkaError(ErrorCode.INVALID_REQUIRED_ACKS)
    if records is None:
        raise KafkaError(ErrorCode.INVALID_RECORD, f"no records for {partition.topic}-{partition.index}")
    if partition.is_internal:
        raise KafkaError(ErrorCode.INVALID_TOPIC_EXCEPTION, f"{partition.topic} is written by its coordinator alone")
    if version < ZSTD_FROM and len(records) >= HEADER_SIZE and read_header(records).compression == ZSTD:
        raise KafkaError(ErrorCode.UNSUPPORTED_COMPRESSION_TYPE, f"zstd needs Produce version {ZSTD_FROM}")


def _appended(index: int, info: AppendInfo) -> ProducedPartition:
    return ProducedPartition(index, 0, info.first_offset, info.log_append_time_ms, info.log_start_offset)


def _refused(services: Services, index: int, error: KafkaError, version: int) -> ProducedPartition:
    code = error.code
    since, instead = _SINCE.get(code, (0, code))
    code = instead if version < since else code
    services.requests.produce.failed(code)
    return ProducedPartition(index, code, error_message=error.message, record_errors=error.record_errors)


def _by_topic(request: ProduceRequest) -> _Wanted:
    """Each partition once: of those named twice the last counts, and topics without partitions are passed over."""
    wanted: _Wanted = {}
    for topic, batches in request.topics:
        if batches:
            wanted.setdefault(topic, {}).update(batches)
    return wanted


def _is_transactional(records: memoryview | None) -> bool:
    if records is None or len(records) < HEADER_SIZE:
        return False
    return bool(records[ATTRIBUTES_LOW_OFFSET] & TRANSACTIONAL_FLAG)


def _not_verified(error: ErrorCode, version: int) -> KafkaError:
    """What the producer is told of its coordinator's answer (Kafka's ReplicaManager.handleProduceAppend).

    Older clients do not retry what only a coordinator answers; NOT_ENOUGH_REPLICAS they do.
    """
    if error is ErrorCode.TRANSACTION_ABORTABLE and version < ABORTABLE_FROM:
        error = ErrorCode.INVALID_TXN_STATE
    if error is ErrorCode.INVALID_TXN_STATE:
        return KafkaError(error, "the partition was not added to the transaction")
    if error in _NOT_REACHED or (error is ErrorCode.CONCURRENT_TRANSACTIONS and version < ADDS_FROM):
        message = f"the transaction's coordinator did not confirm the partition: {error.name}"
        return KafkaError(ErrorCode.NOT_ENOUGH_REPLICAS, message)
    return KafkaError(error)
