"""AlterPartitionReassignments (key 45, versions 0-1): move replicas to other brokers, or cancel a move."""

from __future__ import annotations

from tidelog.broker.apis.cluster_roles import check_time, controller
from tidelog.broker.apis.services import Services
from tidelog.broker.network.request import RequestContext
from tidelog.broker.scheduling.large_answers import made
from tidelog.protocol.errors import KafkaError
from tidelog.protocol.messages.alter_partition_reassignments import (
    AlterPartitionReassignmentsRequest,
    AlterPartitionReassignmentsResponse,
    ReassignablePartition,
    ReassignablePartitionResponse,
    ReassignableTopic,
    ReassignableTopicResponse,
)

REQUEST = AlterPartitionReassignmentsRequest


async def handle(
    services: Services, context: RequestContext, request: AlterPartitionReassignmentsRequest
) -> AlterPartitionReassignmentsResponse:
    check_time(request.timeout_ms)
    response: AlterPartitionReassignmentsResponse = await controller(services).alter_partition_reassignments(
        request, context.api_version
    )
    return response


def refuse(
    request: AlterPartitionReassignmentsRequest, error: KafkaError, version: int
) -> AlterPartitionReassignmentsResponse:
    def refused(partition: ReassignablePartition) -> ReassignablePartitionResponse:
        return ReassignablePartitionResponse(
            partition_index=partition.partition_index, error_code=error.code, error_message=error.message
        )

    def refused_topic(topic: ReassignableTopic) -> ReassignableTopicResponse:
        return ReassignableTopicResponse(name=topic.name, partitions=made(topic.partitions, refused))

    return AlterPartitionReassignmentsResponse(
        error_code=error.code, error_message=error.message, responses=made(request.topics, refused_topic)
    )
