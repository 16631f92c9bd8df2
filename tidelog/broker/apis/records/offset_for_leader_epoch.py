"""OffsetForLeaderEpoch (key 23, versions 2-4): the end offset of an epoch in the leader's log (KIP-101, KIP-320)."""

from __future__ import annotations

from functools import partial
from typing import Any

from tidelog.broker.apis.services import Services
from tidelog.broker.network.request import RequestContext
from tidelog.broker.scheduling.large_answers import in_pieces
from tidelog.broker.scheduling.pieces import PIECE_ELEMENTS_MAX
from tidelog.protocol.errors import ErrorCode, KafkaError
from tidelog.protocol.messages.offset_for_leader_epoch import (
    EpochEndOffset,
    OffsetForLeaderEpochRequest,
    OffsetForLeaderEpochResponse,
    OffsetForLeaderPartition,
    OffsetForLeaderTopicResult,
)
from tidelog.storage.segments.reader import ColdRead

REQUEST = OffsetForLeaderEpochRequest

_Asked = tuple[OffsetForLeaderTopicResult, OffsetForLeaderPartition]


def handle(services: Services, context: RequestContext, request: OffsetForLeaderEpochRequest) -> Any:
    results = [OffsetForLeaderTopicResult(topic=topic.topic) for topic in request.topics]
    asked = [(result, entry) for result, topic in zip(results, request.topics) for entry in topic.partitions]
    response = OffsetForLeaderEpochResponse(topics=results)
    if len(asked) > PIECE_ELEMENTS_MAX:
        return _answered_in_pieces(services, asked, response)
    for each in asked:
        _answer(services, each)
    return response


async def _answered_in_pieces(
    services: Services, asked: list[_Asked], response: OffsetForLeaderEpochResponse
) -> OffsetForLeaderEpochResponse:
    await in_pieces(services.scheduler, asked, partial(_answer, services))
    return response


def _answer(services: Services, asked: _Asked) -> None:
    result, entry = asked
    partition = None
    try:
        partition = services.partitions.leader(result.topic, entry.partition)
        partition.require_leader(entry.current_leader_epoch, -1)
        epoch, end_offset = partition.log.confirmed_end_of_epoch(entry.leader_epoch)
        end = EpochEndOffset(partition=entry.partition, leader_epoch=epoch, end_offset=end_offset)
    except ColdRead as cold:
        services.partitions.run_cold(cold, lambda: None)
        end = EpochEndOffset(partition=entry.partition, error_code=ErrorCode.KAFKA_STORAGE_ERROR)
    except Exception as error:
        code = services.partitions.refusal(partition, error).code
        end = EpochEndOffset(partition=entry.partition, error_code=code)
    result.partitions.append(end)


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
