"""DescribeProducers (key 61, version 0, KIP-664): the producers that a replica knows, on a leader or a follower."""

from __future__ import annotations

from tidelog.broker.apis.repeats import check_repeats
from tidelog.broker.apis.services import Services
from tidelog.broker.cluster.cluster_view import NO_SUCH_TOPIC
from tidelog.broker.network.request import RequestContext
from tidelog.broker.scheduling.large_answers import AnswerInPieces, made
from tidelog.broker.scheduling.pieces import PIECE_ELEMENTS_MAX, UNCOUNTED_BYTES_MAX
from tidelog.protocol.errors import ErrorCode, KafkaError
from tidelog.protocol.messages.describe_producers import (
    DescribeProducersRequest,
    DescribeProducersRequestTopicRequest,
    DescribeProducersResponse,
    DescribeProducersResponsePartitionResponse,
    DescribeProducersResponseProducerState,
    DescribeProducersResponseTopicResponse,
)
from tidelog.replication.controller.decisions.topic_names import topic_name_problem

REQUEST = DescribeProducersRequest
ANSWERS_MAY_BE_LARGE = True
COUNTED_ABOVE_BYTES = UNCOUNTED_BYTES_MAX


# Clients ask for it again.
_FULL = KafkaError(ErrorCode.NOT_LEADER_OR_FOLLOWER, "the answer has no room for more")


async def handle(
    services: Services, context: RequestContext, request: DescribeProducersRequest
) -> DescribeProducersResponse:
    check_repeats((topic.name, index) for topic in request.topics for index in topic.partition_indexes)
    image = services.image()
    topics = []
    async with AnswerInPieces(services.scheduler, context.connection) as answer:
        for topic in request.topics:
            problem = topic_name_problem(topic.name)
            if problem is not None:
                error: KafkaError | None = KafkaError(ErrorCode.INVALID_TOPIC_EXCEPTION, problem)
            elif topic.name not in image.topics_by_name:
                error = KafkaError(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, NO_SUCH_TOPIC)
            else:
                error = None
            partitions = []
            for index in topic.partition_indexes:
                refusal = _FULL if answer.is_full else error
                await answer.add_elements(1)
                if refusal is None:
                    partitions.append(await _partition(services, topic.name, index, answer))
                else:
                    partitions.append(_refused(index, refusal))
            topics.append(DescribeProducersResponseTopicResponse(name=topic.name, partitions=partitions))
    return DescribeProducersResponse(topics=topics)


def _refused(index: int, error: KafkaError) -> DescribeProducersResponsePartitionResponse:
    return DescribeProducersResponsePartitionResponse(
        partition_index=index, error_code=error.code, error_message=error.message or None
    )


async def _partition(
    services: Services, topic: str, index: int, answer: AnswerInPieces
) -> DescribeProducersResponsePartitionResponse:
    try:
        partition = services.partitions.readable(topic, index)
    except KafkaError as error:
        return DescribeProducersResponsePartitionResponse(partition_index=index, error_code=error.code)
    described = DescribeProducersResponsePartitionResponse(partition_index=index)
    entries = list(partition.log.producers.entries.values())
    for start in range(0, len(entries), PIECE_ELEMENTS_MAX):
        piece = entries[start : start + PIECE_ELEMENTS_MAX]
        described.active_producers += [
            DescribeProducersResponseProducerState(
                producer_id=entry.producer_id,
                producer_epoch=entry.epoch,
                last_sequence=entry.last_sequence,
                last_timestamp=entry.last_timestamp,
                coordinator_epoch=entry.coordinator_epoch,
                current_txn_start_offset=entry.transaction_first_offset,
            )
            for entry in piece
        ]
        await answer.add_elements(len(piece))
    return described


def refuse(request: DescribeProducersRequest, error: KafkaError, version: int) -> DescribeProducersResponse:
    def refused_topic(topic: DescribeProducersRequestTopicRequest) -> DescribeProducersResponseTopicResponse:
        partitions = made(topic.partition_indexes, lambda index: _refused(index, error))
        return DescribeProducersResponseTopicResponse(name=topic.name, partitions=partitions)

    return DescribeProducersResponse(topics=made(request.topics, refused_topic))
