"""WriteTxnMarkers (key 27, versions 1-2): a transaction coordinator ends transactions in partitions led here.

Answered when every marker is committed, or refused. Before version 2 (KIP-1228) the transaction version is unknown, and
markers are checked as those of version 0.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from tidelog.broker.apis.services import Services
from tidelog.broker.coordinators.marker_writer import Marker, TopicPartition
from tidelog.broker.network.request import Deferred, RequestContext
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
# Markers of one request, counted for each partition; a coordinator sends the rest with its next one.
MARKERS_MAX = 20_000

Results = dict[int, dict[TopicPartition, ErrorCode]]
"""Producer id -> partition -> error. As in Kafka, markers of one producer share one result."""


def handle(services: Services, context: RequestContext, request: WriteTxnMarkersRequest) -> Any:
    markers = [(each, _partitions(each)) for each in request.markers]
    open_count = sum(len(partitions) for _, partitions in markers)
    if open_count > MARKERS_MAX:
        raise KafkaError(ErrorCode.INVALID_REQUEST, f"{open_count} markers in one request, above {MARKERS_MAX}")
    results: Results = {each.producer_id: {} for each in request.markers}
    deferred = Deferred()

    def on_written(producer_id: int, partition: TopicPartition, error: ErrorCode) -> None:
        nonlocal open_count
        results[producer_id][partition] = error
        open_count -= 1
        if open_count == 0 and is_begun:
            deferred.complete(_response(results))

    is_begun = False
    for each, partitions in markers:
        marker = Marker(
            each.producer_id,
            each.producer_epoch,
            each.transaction_result,
            each.coordinator_epoch,
            each.transaction_version,
        )
        services.markers.write(marker, partitions, partial(on_written, each.producer_id))
    is_begun = True
    return deferred if open_count else _response(results)


def _partitions(marker: WritableTxnMarker) -> dict[TopicPartition, None]:
    """Each partition once."""
    return {(topic.name, index): None for topic in marker.topics for index in topic.partition_indexes}


def _response(results: Results) -> WriteTxnMarkersResponse:
    answered = []
    for producer_id, partitions in results.items():
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
    for marker in request.markers:
        results.setdefault(marker.producer_id, {}).update(dict.fromkeys(_partitions(marker), error.code))
    return _response(results)
