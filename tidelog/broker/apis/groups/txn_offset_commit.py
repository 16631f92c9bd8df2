"""TxnOffsetCommit (key 28, versions 0-5): commits a group's offsets as a part of a transaction.

Unknown partitions are refused separately. The group coordinator stages the other offsets until the transaction's marker
arrives. Before that, the transaction coordinator must have added the `__consumer_offsets` partition to the transaction.
Clients of versions 0-4 have added it by AddOffsetsToTxn, and this broker only verifies it. From version 5 on this
broker adds it (KIP-890).
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from tidelog.broker.apis.services import Services
from tidelog.broker.coordinators.group.large_commits import PreparedCommit, is_large_commit, offset_count
from tidelog.broker.network.request import Deferred, RequestContext, completed
from tidelog.protocol.errors import ErrorCode, KafkaError
from tidelog.protocol.internal_topics import OFFSETS_TOPIC
from tidelog.protocol.messages.txn_offset_commit import (
    TxnOffsetCommitRequest,
    TxnOffsetCommitRequestPartition,
    TxnOffsetCommitRequestTopic,
    TxnOffsetCommitResponse,
    TxnOffsetCommitResponsePartition,
    TxnOffsetCommitResponseTopic,
)

REQUEST = TxnOffsetCommitRequest
ADDS_FROM = 5
ABORTABLE_FROM = 4
# It waits for the coordinator of the transaction, which may have no room meanwhile: a circle of two nodes.
COUNTED_ABOVE_BYTES = sys.maxsize
# Older clients crashed on COORDINATOR_LOAD_IN_PROGRESS (KAFKA-7296).
LOADING_FROM = 2
# error -> the error that a client gets instead, because it may not know the first
# (Kafka's CoordinatorOperationExceptionHelper)
_TOLD_INSTEAD = {
    ErrorCode.NETWORK_EXCEPTION: ErrorCode.COORDINATOR_LOAD_IN_PROGRESS,
    ErrorCode.UNKNOWN_TOPIC_OR_PARTITION: ErrorCode.COORDINATOR_NOT_AVAILABLE,
    ErrorCode.NOT_ENOUGH_REPLICAS: ErrorCode.COORDINATOR_NOT_AVAILABLE,
    ErrorCode.REQUEST_TIMED_OUT: ErrorCode.COORDINATOR_NOT_AVAILABLE,
    ErrorCode.NOT_LEADER_OR_FOLLOWER: ErrorCode.NOT_COORDINATOR,
    ErrorCode.KAFKA_STORAGE_ERROR: ErrorCode.NOT_COORDINATOR,
}


async def handle(services: Services, context: RequestContext, request: TxnOffsetCommitRequest) -> Any:
    topic_ids = _topic_ids(services, request.topics)
    known, missing = _by_existence(services, request.topics)
    if not known:
        return _response(missing)
    commit = TxnOffsetCommitRequest(
        transactional_id=request.transactional_id,
        group_id=request.group_id,
        producer_id=request.producer_id,
        producer_epoch=request.producer_epoch,
        generation_id=request.generation_id,
        member_id=request.member_id,
        group_instance_id=request.group_instance_id,
        topics=known,
    )
    try:
        answer = await _commit(services, context, commit, topic_ids)
        if isinstance(answer, Deferred):
            answer = await completed(answer)
    except KafkaError as error:
        answer = refuse(commit, error, context.api_version)
    return _response([*answer.topics, *missing])


async def _commit(
    services: Services, context: RequestContext, request: TxnOffsetCommitRequest, topic_ids: Mapping[str, bytes]
) -> Any:
    if not is_large_commit(request):
        return await _commit_verified(services, context, request, topic_ids, None)
    with services.groups.preparing(offset_count(request)):
        prepared = await services.groups.prepare_commit(context, request, topic_ids, services.scheduler.pause)
        return await _commit_verified(services, context, request, topic_ids, prepared)


async def _commit_verified(
    services: Services,
    context: RequestContext,
    request: TxnOffsetCommitRequest,
    topic_ids: Mapping[str, bytes],
    prepared: PreparedCommit | None,
) -> Any:
    adds = context.api_version >= ADDS_FROM
    verification = services.groups.begin_verification(
        request.group_id, request.producer_id, request.producer_epoch, adds
    )
    if verification is not None:
        partition = (OFFSETS_TOPIC, services.groups.partition_for(request.group_id))
        answer = services.verifier.verify(
            request.transactional_id, request.producer_id, request.producer_epoch, (partition,), adds=adds
        )
        error = (answer if isinstance(answer, dict) else await answer)[partition]
        if error is not ErrorCode.NONE:
            raise KafkaError(error, "the coordinator of the transaction refuses the offsets")
    if verification is not None or prepared is not None:
        # Behind the first commit for a new topic, an offset of the deleted one would take its place.
        present = _topic_ids(services, request.topics)
        known_ids = {name: topic_id for name, topic_id in topic_ids.items() if present.get(name) == topic_id}
        if prepared is not None and len(known_ids) < len(topic_ids):
            raise KafkaError(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, "a topic was deleted meanwhile")
        topic_ids = known_ids
    return services.groups.commit_offsets_of_transaction(context, request, topic_ids, verification, prepared)


def _topic_ids(services: Services, topics: list[TxnOffsetCommitRequestTopic]) -> dict[str, bytes]:
    """By name, of the topics that exist. One may be deleted and made anew before its offsets are verified."""
    by_name = services.image().topics_by_name
    return {topic.name: by_name[topic.name].topic_id for topic in topics if topic.name in by_name}


def _by_existence(
    services: Services, topics: list[TxnOffsetCommitRequestTopic]
) -> tuple[list[TxnOffsetCommitRequestTopic], list[TxnOffsetCommitResponseTopic]]:
    """(the topics with their existing partitions, the refusals of the other partitions)."""
    image = services.image()
    known: list[TxnOffsetCommitRequestTopic] = []
    refused: list[TxnOffsetCommitResponseTopic] = []
    for topic in topics:
        topic_image = image.topics_by_name.get(topic.name)
        indexes = topic_image.partitions if topic_image is not None else {}
        existing: list[TxnOffsetCommitRequestPartition] = []
        missing: list[int] = []
        for each in topic.partitions:
            if each.partition_index in indexes:
                existing.append(each)
            else:
                missing.append(each.partition_index)
        if existing:
            known.append(TxnOffsetCommitRequestTopic(name=topic.name, partitions=existing))
        if missing:
            refused.append(_refused(topic.name, missing, ErrorCode.UNKNOWN_TOPIC_OR_PARTITION))
    return known, refused


def _refused(name: str, indexes: list[int], error: ErrorCode) -> TxnOffsetCommitResponseTopic:
    partitions = [TxnOffsetCommitResponsePartition(partition_index=index, error_code=error) for index in indexes]
    return TxnOffsetCommitResponseTopic(name=name, partitions=partitions)


def _response(topics: list[TxnOffsetCommitResponseTopic]) -> TxnOffsetCommitResponse:
    """The response with one entry per topic."""
    by_name: dict[str, TxnOffsetCommitResponseTopic] = {}
    for topic in topics:
        earlier = by_name.setdefault(topic.name, topic)
        if earlier is not topic:
            earlier.partitions.extend(topic.partitions)
    return TxnOffsetCommitResponse(topics=list(by_name.values()))


def refuse(request: TxnOffsetCommitRequest, error: KafkaError, version: int) -> TxnOffsetCommitResponse:
    code = _TOLD_INSTEAD.get(error.code, error.code)
    if code is ErrorCode.COORDINATOR_LOAD_IN_PROGRESS and version < LOADING_FROM:
        code = ErrorCode.COORDINATOR_NOT_AVAILABLE
    if code is ErrorCode.TRANSACTION_ABORTABLE and version < ABORTABLE_FROM:
        code = ErrorCode.INVALID_TXN_STATE
    return _response(
        [
            _refused(topic.name, [each.partition_index for each in topic.partitions], code)
            for topic in request.topics
            if topic.partitions
        ]
    )
