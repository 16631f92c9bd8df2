"""CreatePartitions (key 37, versions 0-3): more partitions for existing topics, one result per topic.

This handler refuses duplicate names; the controller decides on all others.
"""

from __future__ import annotations

from collections import Counter

from tidelog.broker.apis.cluster_roles import check_time, controller
from tidelog.broker.apis.services import Services
from tidelog.broker.network.request import RequestContext
from tidelog.protocol.errors import ErrorCode, KafkaError
from tidelog.protocol.messages.create_partitions import (
    CreatePartitionsRequest,
    CreatePartitionsResponse,
    CreatePartitionsTopicResult,
)

REQUEST = CreatePartitionsRequest


async def handle(
    services: Services, context: RequestContext, request: CreatePartitionsRequest
) -> CreatePartitionsResponse:
    times = Counter(topic.name for topic in request.topics)
    duplicate = KafkaError(ErrorCode.INVALID_REQUEST, "Duplicate topic name.")
    refused = [_refused(name, duplicate) for name, count in times.items() if count > 1]
    remaining = CreatePartitionsRequest(
        topics=[topic for topic in request.topics if times[topic.name] == 1],
        timeout_ms=request.timeout_ms,
        validate_only=request.validate_only,
    )
    if remaining.topics:
        check_time(request.timeout_ms)
    response: CreatePartitionsResponse = await controller(services).create_partitions(remaining, context.api_version)
    response.results[:0] = refused
    return response


def _refused(name: str, error: KafkaError) -> CreatePartitionsTopicResult:
    return CreatePartitionsTopicResult(name=name, error_code=error.code, error_message=error.message)


def refuse(request: CreatePartitionsRequest, error: KafkaError, version: int) -> CreatePartitionsResponse:
    return CreatePartitionsResponse(results=[_refused(topic.name, error) for topic in request.topics])
