"""AlterPartitionReassignments (key 45, versions 0-1): move replicas to other brokers, or cancel a move."""

from __future__ import annotations

from tidelog.broker.apis.cluster_roles import check_time, controller
from tidelog.broker.apis.services import Services
from tidelog.broker.network.request import RequestContext
from tidelog.protocol.errors import KafkaError
from tidelog.protocol.messages.alter_partition_reassignments import (
    AlterPartitionReassignmentsRequest,
    AlterPartitionReassignmentsResponse,
    ReassignablePartitionResponse,
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
    return AlterPartitionReassignmentsResponse(
        error_code=error.code,
        error_message=error.message,
        responses=[
            ReassignableTopicResponse(
                name=topic.name,
                partitions=[
                    ReassignablePartitionResponse(
                        partition_index=each.partition_index, error_code=error.code, error_message=error.message
                    )
                    for each in topic.partitions
                ],
            )
            for topic in request.topics
        ],
    )
