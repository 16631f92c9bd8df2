"""OffsetCommit (key 8, versions 2-10): commits a group's offsets.

Topics have names, from version 10 on ids. Each unknown partition is refused separately (UNKNOWN_TOPIC_OR_PARTITION,
UNKNOWN_TOPIC_ID). The coordinator handles the others; the answer leaves after their commit.
"""

from __future__ import annotations

from typing import Any

from tidelog.broker.apis.services import Services
from tidelog.broker.coordinators.group.large_commits import PreparedCommit, is_large_commit
from tidelog.broker.network.request import Deferred, RequestContext
from tidelog.protocol.errors import ErrorCode, KafkaError
from tidelog.protocol.messages.offset_commit import (
    OffsetCommitRequest,
    OffsetCommitRequestTopic,
    OffsetCommitResponse,
    OffsetCommitResponsePartition,
    OffsetCommitResponseTopic,
)

REQUEST = OffsetCommitRequest
TOPIC_IDS_FROM = 10


def handle(services: Services, context: RequestContext, request: OffsetCommitRequest) -> Any:
    image = services.image()
    by_id = context.api_version >= TOPIC_IDS_FROM
    known: list[OffsetCommitRequestTopic] = []
    refused: dict[str | bytes, OffsetCommitResponseTopic] = {}
    """By topic: one that is named twice has one entry in the answer."""
    for topic in request.topics:
        key = topic.topic_id if by_id else topic.name
        topic_image = image.topics_by_id.get(topic.topic_id) if by_id else image.topics_by_name.get(topic.name)
        if topic_image is None:
            error = ErrorCode.UNKNOWN_TOPIC_ID if by_id else ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
            missing = [each.partition_index for each in topic.partitions]
        else:
            error, partitions = ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, topic_image.partitions
            existing = [each for each in topic.partitions if each.partition_index in partitions]
            missing = []
            if len(existing) < len(topic.partitions):
                missing = [each.partition_index for each in topic.partitions if each.partition_index not in partitions]
            if existing:
                known.append(
                    OffsetCommitRequestTopic(name=topic_image.name, topic_id=topic_image.topic_id, partitions=existing)
                )
        if missing or topic_image is None:
            answered = _refused(topic, missing, error)
            if key in refused:
                refused[key].partitions += answered.partitions
            else:
                refused[key] = answered
    if refused and not known:
        return OffsetCommitResponse(topics=[*refused.values()])
    commit = OffsetCommitRequest(
        group_id=request.group_id,
        generation_id_or_member_epoch=request.generation_id_or_member_epoch,
        member_id=request.member_id,
        group_instance_id=request.group_instance_id,
        retention_time_ms=request.retention_time_ms,
        topics=known,
    )
    if is_large_commit(commit):
        return _commit_in_pieces(services, context, commit, refused)
    return _commit(services, context, commit, refused, None)


async def _commit_in_pieces(
    services: Services,
    context: RequestContext,
    commit: OffsetCommitRequest,
    refused: dict[str | bytes, OffsetCommitResponseTopic],
) -> Any:
    by_id = context.api_version >= TOPIC_IDS_FROM
    try:
        prepared = await services.groups.prepare_commit(context, commit, {}, services.scheduler.pause)
        present = services.image().topics_by_id
        if any(topic.topic_id not in present for topic in commit.topics):
            # Behind the first commit for a new topic of this name, its offset would stay. The client tries again.
            code = ErrorCode.UNKNOWN_TOPIC_ID if by_id else ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
            raise KafkaError(code, "a topic was deleted meanwhile")
    except KafkaError as error:
        return _merged(refuse(commit, error, context.api_version), refused, by_id)
    return _commit(services, context, commit, refused, prepared)


def _commit(
    services: Services,
    context: RequestContext,
    commit: OffsetCommitRequest,
    refused: dict[str | bytes, OffsetCommitResponseTopic],
    prepared: PreparedCommit | None,
) -> Any:
    by_id = context.api_version >= TOPIC_IDS_FROM
    if not refused:
        return services.groups.commit_offsets(context, commit, prepared)
    # Unknown partitions keep their own errors even if the coordinator refuses all the others.
    try:
        answer = services.groups.commit_offsets(context, commit, prepared)
    except KafkaError as error:
        return _merged(refuse(commit, error, context.api_version), refused, by_id)
    merged = Deferred()

    def commit_answered(response: OffsetCommitResponse | KafkaError) -> None:
        if isinstance(response, KafkaError):
            response = refuse(commit, response, context.api_version)
        merged.complete(_merged(response, refused, by_id))

    if not isinstance(answer, Deferred):
        return _merged(answer, refused, by_id)
    answer.on_complete(commit_answered)
    return merged


def refuse(request: OffsetCommitRequest, error: KafkaError, version: int) -> OffsetCommitResponse:
    return OffsetCommitResponse(
        topics=[
            _refused(topic, [each.partition_index for each in topic.partitions], error.code)
            for topic in request.topics
            if topic.partitions
        ]
    )


def _refused(topic: OffsetCommitRequestTopic, indexes: list[int], error: ErrorCode) -> OffsetCommitResponseTopic:
    return OffsetCommitResponseTopic(
        name=topic.name,
        topic_id=topic.topic_id,
        partitions=[OffsetCommitResponsePartition(partition_index=index, error_code=error) for index in indexes],
    )


def _merged(
    response: OffsetCommitResponse, refused: dict[str | bytes, OffsetCommitResponseTopic], by_id: bool
) -> OffsetCommitResponse:
    """The response with one entry per topic, for refused and committed partitions together."""
    for topic in response.topics:
        earlier = refused.setdefault(topic.topic_id if by_id else topic.name, topic)
        if earlier is not topic:
            earlier.partitions.extend(topic.partitions)
    return OffsetCommitResponse(topics=[*refused.values()])
