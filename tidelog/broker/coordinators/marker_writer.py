"""Writes transaction markers into the partitions that this node leads.

A marker of a plain partition is appended and is done when it is committed. One of `__consumer_offsets` goes through the
group coordinator, so that the offsets of the transaction become visible, or are dropped, in the order of the log.
Invariant: every partition gets one result. Source: Kafka's `KafkaApis.handleWriteTxnMarkersRequest`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from tidelog.broker.coordinators.outcome import TransactionEnd, WriteTransaction
from tidelog.broker.network.request import Deferred
from tidelog.protocol.batches.records import ControlRecordType, encode_control_batch, encode_end_txn_value
from tidelog.protocol.errors import ErrorCode, KafkaError
from tidelog.protocol.internal_topics import OFFSETS_TOPIC
from tidelog.replication.partition import ACKS_ALL
from tidelog.storage.producers.verification import TransactionAppend

if TYPE_CHECKING:
    from tidelog.broker.coordinators.group.service import GroupCoordinatorService
    from tidelog.broker.replicas.partitions import Partitions

TopicPartition = tuple[str, int]
OnWritten = Callable[[TopicPartition, ErrorCode], None]

# The sender of markers knows no coordinator at the other end: it looks for the partition's leader, and tries again.
_NOT_READY = (
    ErrorCode.COORDINATOR_NOT_AVAILABLE,
    ErrorCode.COORDINATOR_LOAD_IN_PROGRESS,
    ErrorCode.NOT_COORDINATOR,
)


class Marker(NamedTuple):
    """The end of one transaction. `transaction_version`: of the client (KIP-1228)."""

    producer_id: int
    producer_epoch: int
    is_commit: bool
    coordinator_epoch: int
    transaction_version: int


class MarkerWriter:
    """`timeout_ms`: after so long a marker that is in the log and not committed is answered with REQUEST_TIMED_OUT."""

    def __init__(
        self,
        partitions: Partitions,
        groups: GroupCoordinatorService,
        clock_ms: Callable[[], int],
        timeout_ms: int,
    ) -> None:
        self._partitions = partitions
        self._groups = groups
        self._clock_ms = clock_ms
        self._timeout_ms = timeout_ms

    def write(self, marker: Marker, partitions: Iterable[TopicPartition], on_written: OnWritten) -> None:
        """Append the marker. `on_written` is called once for each partition, at once or later."""
        refusal = _refusal(marker)
        for partition in partitions:
            if refusal is not ErrorCode.NONE:
                on_written(partition, refusal)
                continue
            try:
                if partition[0] == OFFSETS_TOPIC:
                    self._end_offsets(marker, partition, on_written)
                else:
                    self._append(marker, partition, on_written)
            except KafkaError as error:
                on_written(partition, _for_sender(error))

    def _end_offsets(self, marker: Marker, partition: TopicPartition, on_written: OnWritten) -> None:
        self._partitions.leader(*partition)  # no coordinator knows whether a partition exists
        answer = self._groups.end_transaction(
            partition[1],
            WriteTransaction(
                marker.producer_id,
                marker.producer_epoch,
                TransactionAppend(transaction_version=marker.transaction_version),
            ),
            TransactionEnd(marker.is_commit, marker.coordinator_epoch),
        )
        if isinstance(answer, Deferred):
            answer.on_complete(partial(_ended, partition, on_written))
        else:
            _ended(partition, on_written, answer)

    def _append(self, marker: Marker, partition: TopicPartition, on_written: OnWritten) -> None:
        leader = self._partitions.leader(*partition)
        if leader.is_internal:
            raise KafkaError(ErrorCode.INVALID_TOPIC_EXCEPTION, f"{partition[0]} takes no part in transactions")
        now_ms = self._clock_ms()
        batch = encode_control_batch(
            ControlRecordType.COMMIT if marker.is_commit else ControlRecordType.ABORT,
            encode_end_txn_value(marker.coordinator_epoch),
            timestamp=now_ms,
            producer_id=marker.producer_id,
            producer_epoch=marker.producer_epoch,
        )
        transaction = TransactionAppend(transaction_version=marker.transaction_version)
        info = self._partitions.append(leader, memoryview(batch), now_ms, ACKS_ALL, False, transaction)
        if leader.high_watermark > info.last_offset:
            on_written(partition, ErrorCode.NONE)
            return
        waiting = _WaitingMarker(self._partitions, partition, on_written)
        waiting.begin(self._timeout_ms)
        self._partitions.when_committed(leader, info.last_offset + 1, waiting.committed)


class _WaitingMarker:
    """One marker that is in the log and not committed."""

    __slots__ = ("_bucket", "_is_over", "_on_written", "_partition", "_partitions")

    def __init__(self, partitions: Partitions, partition: TopicPartition, on_written: OnWritten) -> None:
        self._partitions = partitions
        self._partition = partition
        self._on_written = on_written
        self._bucket = 0
        self._is_over = False

    def begin(self, timeout_ms: int) -> None:
        self._bucket = self._partitions.deadlines.add(timeout_ms, self._expired)

    def committed(self, error: Exception | None) -> None:
        if not self._is_over:
            self._partitions.deadlines.discard(self._bucket, self._expired)
            self._end(ErrorCode.NONE if error is None else _for_sender(error))

    def _expired(self) -> None:
        self._end(ErrorCode.REQUEST_TIMED_OUT)

    def _end(self, error: ErrorCode) -> None:
        self._is_over = True
        self._on_written(self._partition, error)


def _refusal(marker: Marker) -> ErrorCode:
    """NONE, or the error of a marker that no coordinator writes."""
    if marker.producer_id < 0 or marker.transaction_version < 0:
        return ErrorCode.INVALID_REQUEST
    return ErrorCode.INVALID_PRODUCER_EPOCH if marker.producer_epoch < 0 else ErrorCode.NONE


def _ended(partition: TopicPartition, on_written: OnWritten, answer: object) -> None:
    on_written(partition, _for_sender(answer) if isinstance(answer, Exception) else ErrorCode.NONE)


def _for_sender(error: Exception) -> ErrorCode:
    if not isinstance(error, KafkaError):
        return ErrorCode.UNKNOWN_SERVER_ERROR
    return ErrorCode.NOT_LEADER_OR_FOLLOWER if error.code in _NOT_READY else error.code
