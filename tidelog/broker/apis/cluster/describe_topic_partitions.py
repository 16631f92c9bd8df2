"""DescribeTopicPartitions (key 75, version 0, KIP-966): partitions with their eligible leaders, a page at a time.

Topics are sorted by name; a request without topics means all topics. An answer has at most
`max.request.partition.size.limit` partitions, even if the client allows more. Its cursor is the start of the next page.
"""

from __future__ import annotations

from typing import Final

from tidelog.broker.apis import authorized_operations
from tidelog.broker.apis.services import Services
from tidelog.broker.cluster.cluster_view import broker_endpoint, offline_replicas
from tidelog.broker.network.request import RequestContext
from tidelog.protocol.errors import ErrorCode, KafkaError
from tidelog.protocol.internal_topics import INTERNAL_TOPICS
from tidelog.protocol.messages.describe_topic_partitions import (
    DescribeTopicPartitionsRequest,
    DescribeTopicPartitionsResponse,
    DescribeTopicPartitionsResponseCursor,
    DescribeTopicPartitionsResponsePartition,
    DescribeTopicPartitionsResponseTopic,
)
from tidelog.replication.controller.decisions.topic_names import topic_name_problem
from tidelog.replication.controller.metadata.image import MetadataImage, PartitionImage

REQUEST = DescribeTopicPartitionsRequest

LIMIT: Final = "max.request.partition.size.limit"


def handle(
    services: Services, context: RequestContext, request: DescribeTopicPartitionsRequest
) -> DescribeTopicPartitionsResponse:
    image = services.image()
    cursor = request.cursor
    first = cursor.topic_name if cursor is not None else ""
    everything = not request.topics
    requested = image.topics_by_name if everything else {topic.name for topic in request.topics}
    names = sorted(name for name in requested if name >= first)
    if cursor is not None:
        if not everything and first not in names:
            raise KafkaError(ErrorCode.INVALID_REQUEST, f"the topics asked for lack that of the cursor: {first}")
        if cursor.partition_index < 0:
            raise KafkaError(ErrorCode.INVALID_REQUEST, f"a cursor at partition {cursor.partition_index}")
    response = DescribeTopicPartitionsResponse()
    left = max(min(request.response_partition_limit, services.config.integer(LIMIT)), 1)
    for name in names:
        if left <= 0:
            response.next_cursor = DescribeTopicPartitionsResponseCursor(topic_name=name, partition_index=0)
            break
        start = cursor.partition_index if cursor is not None and name == first else 0
        topic, goes_on_at = _topic(image, name, context.listener_name, start, left)
        response.topics.append(topic)
        if goes_on_at is not None:
            response.next_cursor = DescribeTopicPartitionsResponseCursor(topic_name=name, partition_index=goes_on_at)
            break
        left -= len(topic.partitions)
    return response


def _topic(
    image: MetadataImage, name: str, listener: str, start: int, count_max: int
) -> tuple[DescribeTopicPartitionsResponseTopic, int | None]:
    """The topic with its partitions from `start` on, and the next partition index if the page is full, or None."""
    answered = DescribeTopicPartitionsResponseTopic(
        name=name,
        is_internal=name in INTERNAL_TOPICS,
        topic_authorized_operations=authorized_operations.TOPIC,
    )
    topic = image.topics_by_name.get(name)
    if topic is None:
        is_good = topic_name_problem(name) is None
        answered.error_code = ErrorCode.UNKNOWN_TOPIC_OR_PARTITION if is_good else ErrorCode.INVALID_TOPIC_EXCEPTION
        return answered, None
    answered.topic_id = topic.topic_id
    end = min(start + count_max, len(topic.partitions))
    answered.partitions = [
        _partition(image, index, topic.partitions[index], listener)
        for index in range(start, end)
        if index in topic.partitions
    ]
    return answered, end if end < len(topic.partitions) else None


def _partition(
    image: MetadataImage, index: int, partition: PartitionImage, listener: str
) -> DescribeTopicPartitionsResponsePartition:
    is_reachable = broker_endpoint(image, partition.leader, listener) is not None
    return DescribeTopicPartitionsResponsePartition(
        partition_index=index,
        leader_id=partition.leader if is_reachable else -1,
        leader_epoch=partition.leader_epoch,
        replica_nodes=list(partition.replicas),
        isr_nodes=list(partition.isr),
        eligible_leader_replicas=list(partition.elr),
        last_known_elr=list(partition.last_known_elr),
        offline_replicas=offline_replicas(image, partition, listener),
    )


def refuse(request: DescribeTopicPartitionsRequest, error: KafkaError, version: int) -> DescribeTopicPartitionsResponse:
    return DescribeTopicPartitionsResponse(
        topics=[
            DescribeTopicPartitionsResponseTopic(error_code=error.code, name=topic.name) for topic in request.topics
        ]
    )
