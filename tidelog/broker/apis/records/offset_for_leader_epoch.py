"""OffsetForLeaderEpoch (key 23, versions 2-4): the end offset of an epoch in the leader's log (KIP-101, KIP-320)."""

from __future__ import annotations

from tidelog.broker.apis.services import Services
from tidelog.broker.network.request import RequestContext
from tidelog.protocol.errors import ErrorCode, KafkaError
from tidelog.protocol.messages.offset_for_leader_epoch import (
    EpochEndOffset,
    OffsetForLeaderEpochRequest,
    OffsetForLeaderEpochResponse,
    OffsetForLeaderTopicResult,
)
from tidelog.storage.segments.reader import ColdRead

REQUEST = OffsetForLeaderEpochRequest


def handle(
    services: Services, context: RequestContext, request: OffsetForLeaderEpochRequest
) -> OffsetForLeaderEpochResponse:
    results = []
    for topic in request.topics:
        ends = []
        for entry in topic.partitions:
            partition = None
            try:
                partition = services.partitions.leader(topic.topic, entry.partition)
                partition.require_leader(entry.current_leader_epoch, -1)
                epoch, end_offset = partition.log.confirmed_end_of_epoch(entry.leader_epoch)
                ends.append(EpochEndOffset(partition=entry.partition, leader_epoch=epoch, end_offset=end_offset))
            except ColdRead as cold:
                services.partitions.run_cold(cold, lambda: None)
                ends.append(EpochEndOffset(partition=entry.partition, error_code=ErrorCode.KAFKA_STORAGE_ERROR))
            except Exception as error:
                code = services.partitions.refusal(partition, error).code
                ends.append(EpochEndOffset(partition=entry.partition, error_code=code))
        results.append(OffsetForLeaderTopicResult(topic=topic.topic, partitions=ends))
    return OffsetForLeaderEpochResponse(topics=results)


def refuse(request: OffsetForLeaderEpochRequest, error: KafkaError, version: int) -> OffsetForLeaderEpochResponse:
    return OffsetForLeaderEpochResponse(
        topics=[
            OffsetForLeaderTopicResult(
                topic=topic.topic,
                partitions=[
                    EpochEndOffset(partition=entry.partition, error_code=error.code) for entry in topic.partitions
                ],
            )
            for topic in request.topics
        ]
    )
