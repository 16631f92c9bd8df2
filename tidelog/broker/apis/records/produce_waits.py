"""Produce requests that wait until their batches are acknowledged, and the answers to producers.

`produce.py` appends the batches before. A wait ends with the acknowledgement in every partition, with an error, or with
the request's timeout. With acks=0 it ends without an answer.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from tidelog.broker.apis.leader_hints import STALE_LEADER, addresses, leader_of
from tidelog.broker.apis.services import Services
from tidelog.broker.network.order_of_requests import BEHIND_RECORDS
from tidelog.broker.network.request import CLOSED, Deferred
from tidelog.broker.scheduling.pieces import PIECE_ELEMENTS_MAX
from tidelog.broker.scheduling.purgatory import DEADLINE_RESOLUTION_MS, OffsetWaiter, discard_all
from tidelog.protocol.errors import ErrorCode, KafkaError
from tidelog.protocol.hot import (
    PRODUCE_ADDRESSES_FROM,
    ProducedPartition,
    encode_one_produced,
    encode_produce_response,
)

if TYPE_CHECKING:
    from tidelog.replication.partition import Partition
    from tidelog.storage.segments.append import AppendInfo

# error -> (the first version whose clients know it, the error for older clients)
_SINCE = {ErrorCode.KAFKA_STORAGE_ERROR: (4, ErrorCode.NOT_LEADER_OR_FOLLOWER)}

Topics = list[tuple[str | bytes, list[ProducedPartition]]]
# The partition, its in-sync replicas at the append (others once it has lost the lead), the offset to reach, whether the
# batch is a repeat, the partition results of its topic, and the index of its result in them. Not the batch, of which
# nothing else may hold the copy.
UncommittedAppend = tuple["Partition", object, int, bool, list[ProducedPartition], int]


class Responder(NamedTuple):
    """The client that gets the answer, and the form of the answer."""

    services: Services
    listener_name: str
    version: int
    correlation_id: int

    def encode(self, topics: Topics) -> bytearray:
        hints = []
        if self.version >= PRODUCE_ADDRESSES_FROM:
            for topic, results in topics:
                for position, each in enumerate(results):
                    if each.error_code in STALE_LEADER:
                        leader = leader_of(self.services, topic, each.partition_index)
                        results[position] = each._replace(current_leader=leader)
                        hints.append(leader)
        nodes = addresses(self.services, self.listener_name, hints) if hints else ()
        return encode_produce_response(self.correlation_id, self.version, topics, addresses=nodes)


class ParkedOne(Deferred):
    """A faster `ParkedProduce` for one partition, the most frequent case in a busy cluster."""

    delays = BEHIND_RECORDS
    __slots__ = ("_acks", "_bucket", "_info", "_partition", "_timeout_ms", "_to", "_topic", "_waiter")

    def __init__(
        self, to: Responder, partition: Partition, info: AppendInfo, topic: str | bytes, timeout_ms: int, acks: int
    ) -> None:
        self.exclusive = False
        self.response = self.timing = self._on_complete = None
        self.on_abandon = self._abandoned
        self._to = to
        self._topic = topic
        self._partition = partition
        self._info = info
        self._timeout_ms = timeout_ms
        self._acks = acks
        self._bucket = 0
        self._waiter: OffsetWaiter | None = None

    def on_complete(self, callback: Callable[[Any], None]) -> None:
        """Begin to wait. If the batches were acknowledged since their append, this completes it at once."""
        self._on_complete = callback
        partitions, timeout_ms, info = self._to.services.partitions, self._timeout_ms, self._info
        end, acks = info.last_offset + 1, self._acks
        self._bucket = partitions.deadlines.add(timeout_ms if timeout_ms > 0 else 0, self._expired)
        self._waiter = partitions.when_acknowledged(self._partition, end, acks, self._settled, info.duplicate)

    def overdue_s(self, waited_s: float, loop_time_s: float) -> float:
        return loop_time_s - self._bucket * DEADLINE_RESOLUTION_MS / 1000

    def _settled(self, error: Exception | None) -> None:
        if self.response is not None:
            return  # the request has timed out
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

    def _abandoned(self) -> None:
        self.on_abandon = self._on_complete = None
        discard_all((self._waiter,))
        self._to.services.partitions.deadlines.discard(self._bucket, self._expired)

    def _refuse(self, error: Exception) -> None:
        assert isinstance(error, KafkaError)
        discard_all((self._waiter,))
        to = self._to
        try:
            frame = to.encode([(self._topic, [refused(to.services, self._partition.index, error, to.version)])])
        except Exception as failure:
            self.failed(failure)
        else:
            self.complete(frame)


class ParkedProduce(Deferred):
    """A request that waits until its batches are acknowledged in every partition, or until its timeout."""

    delays = BEHIND_RECORDS
    __slots__ = ("_acks", "_bucket", "_open", "_timeout_ms", "_to", "_topics", "_waiters", "_waiting")

    def __init__(
        self, to: Responder, topics: Topics, waiting: list[UncommittedAppend], timeout_ms: int, acks: int
    ) -> None:
        has_room = to.services.partitions.acknowledgements.has_room(len(waiting))  # many would take hundreds of MB
        super().__init__(exclusive=acks == 0 or len(waiting) > PIECE_ELEMENTS_MAX or not has_room)
        self.on_abandon = self._abandoned
        self._to, self._topics, self._waiting = to, topics, waiting
        self._open = set(range(len(waiting)))
        self._timeout_ms, self._acks = timeout_ms, acks
        self._bucket = 0
        self._waiters: list[OffsetWaiter | None] = []

    def on_complete(self, callback: Callable[[Any], None]) -> None:
        """Begin to wait. If the batches were acknowledged since their append, this completes it at once."""
        self._on_complete = callback
        partitions = self._to.services.partitions
        self._bucket = partitions.deadlines.add(max(self._timeout_ms, 0), self._expired)
        partitions.acknowledgements.waiting_count += len(self._waiting)
        for number, (partition, in_sync, offset, is_duplicate, _, _) in enumerate(self._waiting):
            settled = partial(self._settled, number)
            if partition.in_sync is not in_sync:  # its log may have been truncated, and hold another batch there
                settled(KafkaError(ErrorCode.NOT_LEADER_OR_FOLLOWER))
                continue
            waiter = partitions.when_acknowledged(partition, offset, self._acks, settled, is_duplicate)
            self._waiters.append(waiter)

    def overdue_s(self, waited_s: float, loop_time_s: float) -> float:
        return loop_time_s - self._bucket * DEADLINE_RESOLUTION_MS / 1000

    def _settled(self, number: int, error: Exception | None) -> None:
        if number not in self._open:
            return  # the request has timed out
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
        if self._acks == 0 and error.code != ErrorCode.KAFKA_STORAGE_ERROR:
            return  # a later leader or a slow device: as in Kafka, the requests behind are not lost for it
        *_, results, position = self._waiting[number]
        results[position] = refused(self._to.services, results[position].partition_index, error, self._to.version)

    def _abandoned(self) -> None:
        self.on_abandon = self._on_complete = None
        self._open.clear()
        discard_all(self._waiters)
        self._to.services.partitions.deadlines.discard(self._bucket, self._expired)
        self._to.services.partitions.acknowledgements.waiting_count -= len(self._waiting)

    def _finish(self) -> None:
        discard_all(self._waiters)
        self._to.services.partitions.acknowledgements.waiting_count -= len(self._waiting)
        try:
            codes = (results[position].error_code for *_, results, position in self._waiting)
            frame = self._to.encode(self._topics) if self._acks != 0 else CLOSED if any(codes) else []
        except Exception as failure:
            self.failed(failure)
        else:
            self.complete(frame)


def uncommitted(of: Partition, info: AppendInfo, results: list[ProducedPartition], at: int) -> UncommittedAppend:
    return of, of.in_sync, info.last_offset + 1, info.duplicate, results, at


def refused(services: Services, index: int, error: KafkaError, version: int) -> ProducedPartition:
    code = error.code
    since, instead = _SINCE.get(code, (0, code))
    code = instead if version < since else code
    services.requests.produce.failed(code)
    return ProducedPartition(index, code, error_message=error.message, record_errors=error.record_errors)
