"""Produce (key 0, versions 3-13).

Versions 0-2 are advertised but refused, as in Kafka 4, because otherwise old librdkafka drops compression.
`protocol/hot.py` decodes and encodes. An acks=all request is answered when the high watermark has passed its batches.
An acks=1 request is answered after its append (and after the sync that `flush.messages` or a new log demands). An
acks=0 request gets no answer: an error closes the connection. Until its sync, or its timeout, the next request waits:
in Kafka it finds the records. The first batch of a transaction in a partition waits until the transaction coordinator
has confirmed the partition, or has added it (from version 12 on, KIP-890). Later requests of the connection wait too.
Deviation: requests pipelined behind one that waits for its acknowledgement are appended meanwhile (Kafka stops reading
the connection). Answers still leave in order.
"""

from __future__ import annotations

import logging
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

from tidelog.broker.apis.records.produce_waits import (
    ParkedOne,
    ParkedProduce,
    Responder,
    Topics,
    UncommittedAppend,
    refused,
    uncommitted,
)
from tidelog.broker.apis.services import Services
from tidelog.broker.network.order_of_requests import BEHIND_RECORDS
from tidelog.broker.network.request import CLOSED, Answer, Deferred, Peer
from tidelog.broker.scheduling.inspections import Inspection
from tidelog.broker.scheduling.pieces import (
    INSPECTED_PIECE_BYTES_MAX,
    INSPECTED_PIECE_MAX,
    PIECE_ELEMENTS_MAX,
    WHOLE_BYTES_MAX,
    flattened,
)
from tidelog.protocol.batches.compression import ZSTD
from tidelog.protocol.batches.record_batch import (
    ATTRIBUTES_LOW_OFFSET,
    COMPRESSION_MASK,
    HEADER_SIZE,
    LOG_OVERHEAD,
    MAGIC,
    TRANSACTIONAL_FLAG,
    BatchHeader,
    read_header,
)
from tidelog.protocol.errors import ErrorCode, KafkaError
from tidelog.protocol.hot import (
    ProducedPartition,
    ProduceRequest,
    decode_one_produce,
    decode_pipelined_produces,
    decode_produce,
    encode_one_produced,
    note_head,
)
from tidelog.replication.partition import ACKS_ALL
from tidelog.storage.producers.verification import TransactionAppend
from tidelog.storage.segments.append import NO_APPEND_TIME, AppendInfo, check_one_batch
from tidelog.storage.segments.inspection import NeedsInspection

if TYPE_CHECKING:
    import asyncio

    from tidelog.protocol.hot import OneProduce
    from tidelog.replication.partition import Partition

logger = logging.getLogger("tidelog.produce")

API_KEY = 0
VERSIONS = range(3, 14)
ZSTD_FROM = 7
ABORTABLE_FROM = 11  # clients know TRANSACTION_ABORTABLE
ADDS_FROM = 12  # this request adds partitions to the client's transaction
ACKS = (ACKS_ALL, 0, 1)
# A large acks=0 request whose client has disconnected is still appended up to this size.
ABANDONED_BYTES_MAX = 1024 * 1024

_NOT_REACHED = frozenset(
    (
        ErrorCode.NETWORK_EXCEPTION,
        ErrorCode.COORDINATOR_LOAD_IN_PROGRESS,
        ErrorCode.COORDINATOR_NOT_AVAILABLE,
        ErrorCode.NOT_COORDINATOR,
    )
)

_NOT_VERIFIED = TransactionAppend()

_Key = tuple[str | bytes, int]
"""(topic name or id, partition index), as in the request."""
_BatchesByTopic = dict[str | bytes, dict[int, memoryview | None]]
# Topic, partition index, the batch to inspect, the partition results of its topic, and the index of its result.
# Without a traceback: its frames would keep the batch, and its decompressed records, until a garbage collection.
_Uninspected = tuple[str | bytes, int, NeedsInspection, list[ProducedPartition], int]


def serve(
    services: Services, frame: memoryview, position: int, version: int, correlation_id: int, connection: Peer
) -> Answer:
    """Append all batches of a request, whose body begins at `position`. Raises MalformedMessage."""
    one = decode_one_produce(frame, position, version)
    if one is None:
        connection.produce_topic_at = 0
    else:
        connection.produce_topic_at = note_head(frame, position, version, one)
        answer = serve_one(services, one, version, correlation_id, connection)
        if answer is not None:
            return answer
    return _serve_many(services, frame[position:], version, correlation_id, connection)


def serve_one(services: Services, one: OneProduce, version: int, correlation_id: int, connection: Peer) -> Answer:
    """Append the batch of a request of one partition. None, without a change, if `serve` must handle the request."""
    topic, index, records, acks, timeout_ms, transactional_id = one
    partitions = services.partitions
    given: TransactionAppend | None = None
    try:
        partition = partitions.leader(topic, index)
        if partition.is_internal:
            _check_records(partition, records, version, acks)
        if transactional_id is not None:
            verified = _verify_one(services, partition, one, version, correlation_id, connection)
            if not isinstance(verified, TransactionAppend):
                return verified
            given = verified
        info = partitions.append(partition, records, services.clock_ms(), acks, True, given)
    except NeedsInspection as needed:
        to = Responder(services, connection.listener_name, version, correlation_id)
        results = [ProducedPartition(index)]
        transaction = None if given is None else _Transaction({(topic, index): given}, {})
        progress = _Progress(connection, acks, timeout_ms, [(topic, results)], [], False, transaction)
        return _AwaitingInspection(to, progress, [(topic, index, needed.with_traceback(None), results, 0)])
    except KafkaError as error:
        partitions.note_refused(topic, index, records, error.code)
        to = Responder(services, connection.listener_name, version, correlation_id)
        return to.encode([(topic, [refused(services, index, error, version)])])
    first_offset, last_offset, log_append_time_ms, log_start_offset, _, _ = info
    if partition.log.high_watermark <= last_offset and not partition.may_answer(last_offset, acks):
        to = Responder(services, connection.listener_name, version, correlation_id)
        return ParkedOne(to, partition, info, topic, timeout_ms, acks)
    return encode_one_produced(correlation_id, topic, index, first_offset, log_append_time_ms, log_start_offset)


def _verify_one(
    services: Services, partition: Partition, one: OneProduce, version: int, correlation_id: int, connection: Peer
) -> TransactionAppend | Deferred | None:
    """`_serve_transaction` for one batch: what its append is given, or the answer that waits for the coordinator.

    None for a batch that the append refuses. Raises what `_check_form` and `begin_verification` raise, and the
    coordinator's refusal.
    """
    topic, index, records, acks, timeout_ms, transactional_id = one
    header = _transactional_header(records)
    if header is None:
        return None
    _check_form(records, version)
    assert transactional_id is not None
    producer_id, producer_epoch, adds = header.producer_id, header.producer_epoch, version >= ADDS_FROM
    verification = partition.begin_verification(
        producer_id, producer_epoch, header.base_sequence, adds, services.clock_ms()
    )
    if verification is None:
        return _NOT_VERIFIED
    given = TransactionAppend(verification)
    key = (partition.topic, index)
    answer = services.verifier.verify(transactional_id, producer_id, producer_epoch, (key,), adds=adds)
    if isinstance(answer, dict):
        error = answer.get(key, ErrorCode.UNKNOWN_SERVER_ERROR)
        if error is not ErrorCode.NONE:
            raise _not_verified(error, version)
        return given
    to = Responder(services, connection.listener_name, version, correlation_id)
    transaction = _Transaction({(topic, index): given}, {})
    progress = _Progress(connection, acks, timeout_ms, [], [], False, transaction)
    return _AwaitingVerification(to, progress, {topic: {index: records}}, len(records), {key: (topic, index)}, answer)


def serve_pipelined(
    services: Services, frames: Sequence[memoryview], position: int, version: int, connection: Peer
) -> list[Answer]:
    """Append the batches of pipelined requests for one partition together. `position`: where the first body begins.

    Returns the answers to the requests at the start that were handled; `serve` must handle the others.
    """
    requests = decode_pipelined_produces(frames, position, version)
    if requests is None:
        return []
    topic, index, acks, timeout_ms, correlation_ids, batches = requests
    partitions = services.partitions
    try:
        partition = partitions.leader(topic, index)
        if partition.is_internal:
            return []
        appended = partitions.append_pipelined(partition, batches, services.clock_ms(), acks)
    except KafkaError:
        return []  # `serve` answers with the error
    log = partition.log
    log_start_offset, high_watermark = log.log_start_offset, log.high_watermark
    answers: list[Answer] = []
    for correlation_id, batch, (_, _, first_offset, last_offset, *_) in zip(correlation_ids, batches, appended):
        if high_watermark > last_offset or partition.may_answer(last_offset, acks):
            answers.append(
                encode_one_produced(correlation_id, topic, index, first_offset, NO_APPEND_TIME, log_start_offset)
            )
        else:
            to = Responder(services, connection.listener_name, version, correlation_id)
            info = AppendInfo(first_offset, last_offset, NO_APPEND_TIME, log_start_offset, False, batch)
            answers.append(ParkedOne(to, partition, info, topic, timeout_ms, acks))
    return answers


def _serve_many(services: Services, body: memoryview, version: int, correlation_id: int, connection: Peer) -> Answer:
    """Handle a request that `decode_one_produce` does not cover: several partitions, an old version, acks=0."""
    request = decode_produce(body, version)
    batches_of = _by_topic(request)
    to = Responder(services, connection.listener_name, version, correlation_id)
    progress = _Progress(connection, request.acks, request.timeout_ms, [], [], failed=False)
    if any(_is_transactional(records) for batches in batches_of.values() for records in batches.values()):
        return _serve_transaction(to, progress, batches_of, request.transactional_id, len(body))
    return _append_or_begin(to, progress, batches_of, len(body))


def _append_or_begin(to: Responder, progress: _Progress, batches_of: _BatchesByTopic, size_bytes: int) -> Answer:
    """Append all batches, or begin to, if they are very many or need a long inspection."""
    count = sum(map(len, batches_of.values()))
    is_large = size_bytes > WHOLE_BYTES_MAX and count > PIECE_ELEMENTS_MAX
    may_take_long = count > INSPECTED_PIECE_MAX or (count > 1 and size_bytes > INSPECTED_PIECE_BYTES_MAX)
    if is_large or (may_take_long and to.services.partitions.looks_inside(flattened(batches_of))):
        return _InPieces(to, progress, batches_of)
    progress, uninspected = _append_all(to, progress, batches_of)
    return _AwaitingInspection(to, progress, uninspected) if uninspected else _concluded(to, progress)


def _serve_transaction(
    to: Responder, progress: _Progress, batches_of: _BatchesByTopic, transactional_id: str | None, size_bytes: int
) -> Answer:
    """Handle a request with transactional batches. Batches that start the transaction in their partitions are verified
    first. Of several faults Kafka's first is answered: existence, form, coordinator, acks, then those of the append.
    """
    services, adds = to.services, to.version >= ADDS_FROM
    if transactional_id is None:
        error = KafkaError(ErrorCode.TRANSACTIONAL_ID_AUTHORIZATION_FAILED, "a transaction without an id")
        return _refuse_all(to, progress, batches_of, error)
    transaction = _Transaction({}, {})
    progress = progress._replace(transaction=transaction)
    to_verify = _transactional_batches(services, batches_of, to.version, transaction)
    producers = {(header.producer_id, header.producer_epoch) for _, _, header, _ in to_verify}
    if len(producers) > 1:
        error = KafkaError(ErrorCode.INVALID_PRODUCER_ID_MAPPING, "one transaction of several producers")
        return _refuse_all(to, progress, batches_of, error)
    keys: dict[tuple[str, int], _Key] = {}
    now_ms = services.clock_ms()
    for topic, index, header, partition in to_verify:
        try:
            verification = partition.begin_verification(
                header.producer_id, header.producer_epoch, header.base_sequence, adds, now_ms
            )
        except KafkaError as error:
            transaction.refusals[topic, index] = error.with_traceback(None)
            continue
        if verification is not None:
            transaction.appends[topic, index] = TransactionAppend(verification)
            keys[partition.topic, index] = (topic, index)
    if not keys:
        return _append_or_begin(to, progress, batches_of, size_bytes)
    ((producer_id, producer_epoch),) = producers
    answer = services.verifier.verify(transactional_id, producer_id, producer_epoch, keys, adds=adds)
    if isinstance(answer, dict):
        transaction.note(keys, answer, to.version)
        return _append_or_begin(to, progress, batches_of, size_bytes)
    return _AwaitingVerification(to, progress, batches_of, size_bytes, keys, answer)


def _transactional_batches(
    services: Services, batches_of: _BatchesByTopic, version: int, transaction: _Transaction
) -> list[tuple[str | bytes, int, BatchHeader, Partition]]:
    """Topic, index, header and partition of each transactional batch that the coordinator has to know of.

    Notes the refusals of the others.
    """
    to_verify = []
    for topic, records_of in batches_of.items():
        for index, records in records_of.items():
            header = _transactional_header(records)
            if header is None:
                continue
            try:
                partition = services.partitions.leader(topic, index)
                _check_form(records, version)
            except KafkaError as error:
                # The append raises the same error. But if this node leads the partition by then, the batch is not
                # verified.
                transaction.refusals[topic, index] = error
                continue
            if not partition.is_internal:
                to_verify.append((topic, index, header, partition))
    return to_verify


def _refuse_all(to: Responder, progress: _Progress, batches_of: _BatchesByTopic, error: KafkaError) -> Answer:
    if progress.acks == 0:
        return CLOSED
    return to.encode(
        [
            (topic, [refused(to.services, index, error, to.version) for index in batches])
            for topic, batches in batches_of.items()
        ]
    )


def _append_all(
    to: Responder, progress: _Progress, batches_of: _BatchesByTopic
) -> tuple[_Progress, list[_Uninspected]]:
    """Append these batches. Returns the new state, and the batches that need an inspection first."""
    services, version = to.services, to.version
    partitions = services.partitions
    now_ms = services.clock_ms()
    _, acks, _, topics, waiting, failed, transaction = progress
    is_doubtful = version < ZSTD_FROM or acks not in ACKS
    uninspected: list[_Uninspected] = []
    for topic, batches in batches_of.items():
        if not topics or topics[-1][0] != topic:
            topics.append((topic, []))
        results = topics[-1][1]
        for index, records in batches.items():
            try:
                partition = partitions.leader(topic, index)
                given = None if transaction is None else transaction.of(topic, index)
                if records is None or partition.is_internal or is_doubtful:
                    _check_records(partition, records, version, acks)
                assert records is not None
                info = partitions.append(partition, records, now_ms, acks, True, given)
            except NeedsInspection as needed:
                uninspected.append((topic, index, needed.with_traceback(None), results, len(results)))
                results.append(ProducedPartition(index))
                continue
            except KafkaError as error:
                failed = True
                partitions.note_refused(topic, index, records, error.code)
                results.append(refused(services, index, error, version))
                continue
            if not partition.may_answer(info.last_offset, acks):
                waiting.append(uncommitted(partition, info, results, len(results)))
            results.append(_appended(index, info))
    return progress._replace(failed=failed), uninspected


def _concluded(to: Responder, progress: _Progress) -> Answer:
    """The answer after all batches have been appended or refused."""
    connection, acks, timeout_ms, topics, waiting, failed, _ = progress
    if acks == 0 and failed:
        logger.info("closing connection from %s: a produce with acks=0 failed", connection.host)
        return CLOSED
    if waiting:
        return ParkedProduce(to, topics, waiting, timeout_ms, acks)
    return None if acks == 0 else to.encode(topics)


class _Transaction(NamedTuple):
    """The transaction of a request: the verifications of its partitions, and the partitions that have none."""

    appends: dict[_Key, TransactionAppend]
    refusals: dict[_Key, KafkaError]

    def note(
        self, keys: Mapping[tuple[str, int], _Key], errors: Mapping[tuple[str, int], ErrorCode], version: int
    ) -> None:
        """Record the refusals in the coordinator's answer."""
        for partition, key in keys.items():
            error = errors.get(partition, ErrorCode.UNKNOWN_SERVER_ERROR)
            if error is not ErrorCode.NONE:
                self.refusals[key] = _not_verified(error, version)

    def of(self, topic: str | bytes, index: int) -> TransactionAppend | None:
        """The verification for one partition, or None. Raises the refusal, of the coordinator or of this node."""
        refusal = self.refusals.get((topic, index))
        if refusal is not None:
            raise KafkaError(refusal.code, refusal.message)
        return self.appends.get((topic, index))


class _Progress(NamedTuple):
    """The state of a request while its batches are appended, refused or inspected."""

    connection: Peer
    acks: int
    timeout_ms: int
    topics: Topics
    waiting: list[UncommittedAppend]
    failed: bool
    transaction: _Transaction | None = None


class _InSteps(Deferred):
    """A request whose batches are appended later. Later requests of the connection wait until then."""

    delays = BEHIND_RECORDS
    __slots__ = ("_progress", "_to")

    def __init__(self, to: Responder, progress: _Progress) -> None:
        super().__init__(exclusive=True)
        self._to, self._progress = to, progress

    def overdue_s(self, waited_s: float, loop_time_s: float) -> float:
        return waited_s - self._progress.timeout_ms / 1000


class _AwaitingVerification(_InSteps):
    """A request that waits for its transaction coordinator's answer."""

    __slots__ = ("_batches", "_keys", "_size_bytes")

    def __init__(
        self,
        to: Responder,
        progress: _Progress,
        batches_of: _BatchesByTopic,
        size_bytes: int,
        keys: Mapping[tuple[str, int], _Key],
        answer: asyncio.Future[dict[tuple[str, int], ErrorCode]],
    ) -> None:
        super().__init__(to, progress)
        # A copy, because the connection reuses its buffer.
        self._batches: _BatchesByTopic = {
            topic: {index: None if records is None else memoryview(bytearray(records)) for index, records in of.items()}
            for topic, of in batches_of.items()
        }
        self._size_bytes = size_bytes
        self._keys = keys
        answer.add_done_callback(self._on_verified)

    def _on_verified(self, answer: asyncio.Future[dict[tuple[str, int], ErrorCode]]) -> None:
        if answer.cancelled():
            return  # the node is stopping
        try:
            transaction = self._progress.transaction
            assert transaction is not None
            transaction.note(self._keys, answer.result(), self._to.version)
            batches_of, self._batches = self._batches, {}
            answer_to_client = _append_or_begin(self._to, self._progress, batches_of, self._size_bytes)
        except Exception as failure:
            self.failed(failure)
        else:
            self.complete_as(answer_to_client)


class _InPieces(_InSteps):
    """A request handled in pieces, small ones if records are looked at, with other requests in between. Waiting batches
    are copied, because the connection reuses its buffer. When the client disconnects, the remaining batches are
    dropped, except with acks=0 and at most ABANDONED_BYTES_MAX left.
    """

    __slots__ = ("_piece_max", "_remaining", "_uninspected")

    def __init__(self, to: Responder, progress: _Progress, batches_of: _BatchesByTopic) -> None:
        super().__init__(to, progress)
        self._piece_max = PIECE_ELEMENTS_MAX
        self._remaining = deque(
            (topic, index, None if records is None else bytearray(records))
            for topic, index, records in flattened(batches_of)
        )
        self._uninspected: list[_Uninspected] = []
        self.on_abandon = self._abandoned
        self._wait()

    def _wait(self) -> None:
        host = self._progress.connection.host
        self._to.services.scheduler.wait(self._next, is_first=False, for_records=True, host=host)

    def _abandoned(self) -> None:
        left_bytes = sum(len(records) for _, _, records in self._remaining if records is not None)
        if self._progress.acks != 0 or left_bytes > ABANDONED_BYTES_MAX:
            self._remaining.clear()

    def _next(self) -> None:
        piece: _BatchesByTopic = {}
        left_bytes = sys.maxsize
        if self._to.services.partitions.looks_inside(islice(self._remaining, self._piece_max)):
            self._piece_max, left_bytes = INSPECTED_PIECE_MAX, INSPECTED_PIECE_BYTES_MAX
        for _ in range(min(self._piece_max, len(self._remaining))):
            left_bytes -= _compressed_bytes(self._remaining[0][2])
            if left_bytes < 0 and piece:
                break
            topic, index, records = self._remaining.popleft()
            piece.setdefault(topic, {})[index] = None if records is None else memoryview(records)
        try:
            self._progress, uninspected = _append_all(self._to, self._progress, piece)
            self._uninspected += uninspected
            if self._remaining:
                self._wait()
            else:
                self._end()
        except Exception as failure:
            self.failed(failure)

    def _end(self) -> None:
        to, progress, uninspected = self._to, self._progress, self._uninspected
        self.complete_as(_AwaitingInspection(to, progress, uninspected) if uninspected else _concluded(to, progress))


class _AwaitingInspection(_InSteps):
    """A request with batches that need a long inspection. Its other batches are appended already."""

    __slots__ = ("_inspection", "_remaining")

    def __init__(self, to: Responder, progress: _Progress, needed: list[_Uninspected]) -> None:
        super().__init__(to, progress)
        self._remaining = needed
        self._begin()
        self.on_abandon = self._abandoned

    def _begin(self) -> None:
        held_bytes = sum(len(needed.batches) for _, _, needed, _, _ in self._remaining)
        host = self._progress.connection.host
        self._inspection = Inspection(self._remaining[-1][2], self._on_inspected, held_bytes, host)
        inspections = self._to.services.inspections
        inspections.begin(self._inspection)
        if self.is_abandoned:
            inspections.abandon(self._inspection)

    def _abandoned(self) -> None:
        self._to.services.inspections.abandon(self._inspection)

    def _on_inspected(self, refused_with: KafkaError | None) -> None:
        topic, index, needed, results, position = self._remaining.pop()
        to, progress, acks = self._to, self._progress, self._progress.acks
        partitions = to.services.partitions
        try:
            partition = partitions.leader(topic, index)
            if refused_with is not None:
                partition.watch.traffic.refused(refused_with.code, len(needed.batches))
                # Raise a copy: the error would refer to this frame, and the frame to it and the batch, until a
                # garbage collection.
                raise KafkaError(refused_with.code, refused_with.message, refused_with.record_errors)
            needed.rules.inspected_batch = needed.batches
            given = progress.transaction.of(topic, index) if progress.transaction is not None else None
            info = partitions.append(partition, needed.batches, to.services.clock_ms(), acks, True, given)
        except NeedsInspection as again:  # the rules have changed meanwhile
            self._remaining.append((topic, index, again.with_traceback(None), results, position))
        except Exception as error:
            self._progress = progress._replace(failed=True)
            # Without a traceback: this frame refers to it, and it would to this frame and the batch, until a garbage
            # collection.
            refusal = partitions.refusal(None, error).with_traceback(None)
            partitions.note_refused(topic, index, needed.batches, refusal.code)
            results[position] = refused(to.services, index, refusal, to.version)
        else:
            results[position] = _appended(index, info)
            if not partition.may_answer(info.last_offset, acks):
                progress.waiting.append(uncommitted(partition, info, results, position))
        finally:
            needed.rules.inspected_batch = None
        if self._remaining:
            self._begin()
            return
        try:
            answer = _concluded(to, self._progress)
        except Exception as failure:
            self.failed(failure)
        else:
            self.complete_as(answer)


def _check_records(partition: Partition, records: memoryview | None, version: int, acks: int) -> None:
    """The checks before an append that few batches need. Raises in Kafka's order."""
    _check_form(records, version)
    if acks not in ACKS:
        raise KafkaError(ErrorCode.INVALID_REQUIRED_ACKS)
    if partition.is_internal:
        raise KafkaError(ErrorCode.INVALID_TOPIC_EXCEPTION, f"{partition.topic} is written by its coordinator alone")


def _check_form(records: memoryview | None, version: int) -> None:
    """Refuse what no partition takes in this version (Kafka's ProduceRequest.validateRecords)."""
    if records is None:
        raise KafkaError(ErrorCode.INVALID_RECORD, "no records")
    check_one_batch(records)
    if version < ZSTD_FROM and read_header(records).compression == ZSTD:
        raise KafkaError(ErrorCode.UNSUPPORTED_COMPRESSION_TYPE, f"zstd needs Produce version {ZSTD_FROM}")


def _appended(index: int, info: AppendInfo) -> ProducedPartition:
    return ProducedPartition(index, 0, info.first_offset, info.log_append_time_ms, info.log_start_offset)


def _by_topic(request: ProduceRequest) -> _BatchesByTopic:
    """The batches by topic and partition. The last of duplicate partitions counts; topics without partitions are
    ignored.
    """
    batches_of: _BatchesByTopic = {}
    for topic, batches in request.topics:
        if batches:
            batches_of.setdefault(topic, {}).update(batches)
    return batches_of


def _compressed_bytes(records: bytearray | None) -> int:
    if records is None or len(records) < HEADER_SIZE or not records[ATTRIBUTES_LOW_OFFSET] & COMPRESSION_MASK:
        return 0
    return len(records)


def _is_transactional(records: memoryview | None) -> bool:
    """Whether the first batch is transactional; False for bytes that are no whole batch."""
    if records is None or len(records) < HEADER_SIZE or not records[ATTRIBUTES_LOW_OFFSET] & TRANSACTIONAL_FLAG:
        return False
    try:
        header = read_header(records)
    except KafkaError:
        return False
    return header.magic == MAGIC and header.batch_length <= len(records) - LOG_OVERHEAD


def _transactional_header(records: memoryview | None) -> BatchHeader | None:
    """The header of a producer's transactional batch, None for another batch. Nothing else of it is checked."""
    if records is None or not _is_transactional(records):
        return None
    header = read_header(records)
    return header if header.producer_id >= 0 else None


def _not_verified(error: ErrorCode, version: int) -> KafkaError:
    """The producer's error for the coordinator's error (Kafka's ReplicaManager.handleProduceAppend).

    Older clients do not retry coordinator errors of a Produce request, but they retry NOT_ENOUGH_REPLICAS.
    """
    if error is ErrorCode.TRANSACTION_ABORTABLE and version < ABORTABLE_FROM:
        error = ErrorCode.INVALID_TXN_STATE
    if error is ErrorCode.INVALID_TXN_STATE:
        return KafkaError(error, "the partition was not added to the transaction")
    if error in _NOT_REACHED or (error is ErrorCode.CONCURRENT_TRANSACTIONS and version < ADDS_FROM):
        message = f"the transaction's coordinator did not confirm the partition: {error.name}"
        return KafkaError(ErrorCode.NOT_ENOUGH_REPLICAS, message)
    return KafkaError(error)
