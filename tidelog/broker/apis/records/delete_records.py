"""DeleteRecords (key 21, versions 0-2): advance log starts, and wait until every unfenced replica has advanced too.

The next retention check removes the segments below. Offset -1 means the high watermark. Records of internal topics and
of topics that are only compacted cannot be deleted this way.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from tidelog.broker.apis.services import Services
from tidelog.broker.network.request import Deferred, RequestContext
from tidelog.broker.scheduling.large_answers import in_pieces
from tidelog.broker.scheduling.pieces import PIECE_ELEMENTS_MAX
from tidelog.protocol.errors import ErrorCode, KafkaError
from tidelog.protocol.internal_topics import INTERNAL_TOPICS
from tidelog.protocol.messages.delete_records import (
    DeleteRecordsPartitionResult,
    DeleteRecordsRequest,
    DeleteRecordsResponse,
    DeleteRecordsTopicResult,
)

if TYPE_CHECKING:
    from tidelog.broker.replicas.deletions import Deleted
    from tidelog.broker.replicas.partitions import Partitions
    from tidelog.replication.partition import Partition

REQUEST = DeleteRecordsRequest

_Deletion = tuple[DeleteRecordsTopicResult, int, int]  # with the index and the offset


def handle(services: Services, context: RequestContext, request: DeleteRecordsRequest) -> Any:
    offset_of: dict[str, dict[int, int]] = {}
    for topic in request.topics:
        for entry in topic.partitions:
            offset_of.setdefault(topic.name, {})[entry.partition_index] = entry.offset
    results = {name: DeleteRecordsTopicResult(name=name) for name in offset_of}
    to_delete = [(results[name], *each) for name, offsets in offset_of.items() for each in offsets.items()]
    parked = _ParkedDelete(services.partitions, DeleteRecordsResponse(topics=list(results.values())))
    if len(to_delete) > PIECE_ELEMENTS_MAX:
        return _deleted_in_pieces(services, to_delete, parked, request.timeout_ms)
    for each in to_delete:
        _delete(services.partitions, parked, each)
    return parked.now_or_later(request.timeout_ms)


async def _deleted_in_pieces(
    services: Services, to_delete: list[_Deletion], parked: _ParkedDelete, timeout_ms: int
) -> DeleteRecordsResponse | Deferred:
    try:
        await in_pieces(services.scheduler, to_delete, partial(_delete, services.partitions, parked))
    except BaseException:
        parked.forget()
        raise
    return parked.now_or_later(timeout_ms)


def _delete(partitions: Partitions, parked: _ParkedDelete, deletion: _Deletion) -> None:
    answered, index, offset = deletion
    name = answered.name
    result = DeleteRecordsPartitionResult(partition_index=index, low_watermark=-1)
    answered.partitions.append(result)
    try:
        if name in INTERNAL_TOPICS:
            known = partitions.is_known(name, index)
            raise KafkaError(ErrorCode.INVALID_TOPIC_EXCEPTION if known else ErrorCode.UNKNOWN_TOPIC_OR_PARTITION)
        partition = partitions.leader(name, index)
        required_offset = partitions.delete_records(partition, offset)
    except KafkaError as error:
        result.error_code = error.code
        return
    result.low_watermark = partition.low_watermark
    if result.low_watermark >= required_offset:
        return
    if partitions.deletions.is_full:
        result.error_code = ErrorCode.REQUEST_TIMED_OUT
    else:
        parked.await_deletion(partition, required_offset, result)


class _ParkedDelete(Deferred):
    """Waits until followers have advanced their log starts, or until the timeout. The other partitions then get
    REQUEST_TIMED_OUT.
    """

    __slots__ = ("_answer", "_bucket", "_has_deadline", "_partitions", "_waiting")

    def __init__(self, partitions: Partitions, answer: DeleteRecordsResponse) -> None:
        super().__init__()
        self._partitions = partitions
        self._answer = answer
        self._bucket = -1
        self._has_deadline = False  # before, others are still to be deleted
        self._waiting: dict[Deleted, tuple[Partition, DeleteRecordsPartitionResult]] = {}

    def now_or_later(self, timeout_ms: int) -> DeleteRecordsResponse | Deferred:
        """The answer if nothing is waited for any more, otherwise the Deferred that waits for the rest."""
        if not self._waiting:
            return self._answer
        self._has_deadline = True
        self.on_abandon = self._stop_waiting
        self._bucket = self._partitions.deadlines.add(max(timeout_ms, 0), self._time_is_up)
        return self

    def await_deletion(self, partition: Partition, required_offset: int, result: DeleteRecordsPartitionResult) -> None:
        def deleted(low_watermark: int, code: ErrorCode) -> None:
            del self._waiting[deleted]
            result.low_watermark, result.error_code = low_watermark, code
            if not self._waiting and self._has_deadline:
                self._partitions.deadlines.discard(self._bucket, self._time_is_up)
                self.complete(self._answer)

        self._waiting[deleted] = (partition, result)
        self._partitions.deletions.wait(partition, required_offset, deleted)

    def _time_is_up(self) -> None:
        for _, result in self._waiting.values():
            result.error_code = ErrorCode.REQUEST_TIMED_OUT
        self.forget()
        self.complete(self._answer)

    def _stop_waiting(self) -> None:
        self._partitions.deadlines.discard(self._bucket, self._time_is_up)
        self.forget()

    def forget(self) -> None:
        for callback, (partition, _) in self._waiting.items():
            self._partitions.deletions.forget(partition, callback)
        self._waiting.clear()


def refuse(request: DeleteRecordsRequest, error: KafkaError, version: int) -> DeleteRecordsResponse:
    return DeleteRecordsResponse(
        topics=[
            DeleteRecordsTopicResult(
                name=topic.name,
                partitions=[
                    DeleteRecordsPartitionResult(
                        partition_index=entry.partition_index, low_watermark=-1, error_code=error.code
                    )
                    for entry in topic.partitions
                ],
            )
            for topic in request.topics
        ]
    )
