"""WriteTxnMarkers (key 27, versions 1-2): a transaction coordinator ends transactions in partitions led here.

The answer leaves when every marker is committed or refused. Before version 2 (KIP-1228) the transaction version is
unknown, and markers are checked as those of transaction version 0.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from tidelog.broker.apis.services import Services
from tidelog.broker.coordinators.marker_writer import Marker, TopicPartition
from tidelog.broker.network.request import Deferred, RequestContext
from tidelog.broker.scheduling.pieces import PIECE_ELEMENTS_MAX
from tidelog.protocol.errors import ErrorCode, KafkaError
from tidelog.protocol.messages.write_txn_markers import (
    WritableTxnMarker,
    WritableTxnMarkerPartitionResult,
    WritableTxnMarkerResult,
    WritableTxnMarkerTopicResult,
    WriteTxnMarkersRequest,
    WriteTxnMarkersResponse,
)

REQUEST = WriteTxnMarkersRequest
# The maximum of markers in one request, counted per partition; a coordinator sends the rest in its next request. A
# larger request gets an answer with only the first partition of each marker.
MARKERS_MAX = 20_000

Results = dict[int, dict[TopicPartition, ErrorCode]]
"""Producer id -> partition -> error. As in Kafka, markers of one producer share one result."""


class _Answer(Deferred):
    """The results of a request; the answer leaves when all results exist."""

    __slots__ = ("_open_count", "_results")

    def __init__(self, request: WriteTxnMarkersRequest, count: int) -> None:
        super().__init__()
        self._results: Results = {each.producer_id: {} for each in request.markers}
        self._open_count = count
        if not count:
            self.complete(_response(self._results))

    def on_written(self, producer_id: int, partition: TopicPartition, error: ErrorCode) -> None:
        self._results[producer_id][partition] = error
        self._open_count -= 1
        if not self._open_count:
            self.complete(_response(self._results))


def handle(services: Services, context: RequestContext, request: WriteTxnMarkersRequest) -> Any:
    if (count := _count(request)) > MARKERS_MAX:
        raise KafkaError(ErrorCode.INVALID_REQUEST, f"{count} markers in one request, above {MARKERS_MAX}")
    markers = [
        (_marker(each), partition) for each in request.markers for partition in _partitions(each)
    ]  # one per partition
    answer = _Answer(request, len(markers))
    if len(markers) > PIECE_ELEMENTS_MAX:
        return _write_in_pieces(services, markers, answer)
    _write(services, markers, answer)
    return answer


def _write(services: Services, markers: list[tuple[Marker, TopicPartition]], answer: _Answer) -> None:
    for marker, partition in markers:
        services.markers.write(marker, (partition,), partial(answer.on_written, marker.producer_id))


async def _write_in_pieces(
    services: Services, markers: list[tuple[Marker, TopicPartition]], answer: _Answer
) -> _Answer:
    """Write the markers in pieces, so that other requests can run in between."""
    for start in range(0, len(markers), PIECE_ELEMENTS_MAX):
        await services.scheduler.pause(for_records=True)
        _write(services, markers[start : start + PIECE_ELEMENTS_MAX], answer)
    return answer


def _marker(marker: WritableTxnMarker) -> Marker:
    return Marker(
        marker.producer_id,
        marker.producer_epoch,
        marker.transaction_result,
        marker.coordinator_epoch,
        marker.transaction_version,
    )


def _count(request: WriteTxnMarkersRequest) -> int:
    return sum(len(topic.partition_indexes) for marker in request.markers for topic in marker.topics)


def _partitions(marker: WritableTxnMarker) -> dict[TopicPartition, None]:
    """The partitions of the marker without duplicates."""
    return {(topic.name, index): None for topic in marker.topics for index in topic.partition_indexes}


def _response(results: Results) -> WriteTxnMarkersResponse:
    answered = []
    for producer_id, partitions in results.items():
        if not partitions:
            continue  # as in Kafka
        topics: dict[str, WritableTxnMarkerTopicResult] = {}
        for (name, index), error in partitions.items():
            topic = topics.get(name)
            if topic is None:
                topic = topics[name] = WritableTxnMarkerTopicResult(name=name)
            topic.partitions.append(WritableTxnMarkerPartitionResult(partition_index=index, error_code=error))
        answered.append(WritableTxnMarkerResult(producer_id=producer_id, topics=list(topics.values())))
    return WriteTxnMarkersResponse(markers=answered)


def refuse(request: WriteTxnMarkersRequest, error: KafkaError, version: int) -> WriteTxnMarkersResponse:
    results: Results = {}
    is_excessive = _count(request) > MARKERS_MAX
    for marker in request.markers:
        if is_excessive:
            del marker.topics[1:]
            for topic in marker.topics:
                del topic.partition_indexes[1:]
        results.setdefault(marker.producer_id, {}).update(dict.fromkeys(_partitions(marker), error.code))
    return _response(results)
