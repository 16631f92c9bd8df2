"""IncrementalAlterConfigs (key 44, versions 0-1): single configs of topics and brokers are set or deleted.

Deviations: those of `config_changes`.
"""

from __future__ import annotations

from tidelog.broker import config_changes
from tidelog.broker.cluster_roles import controller
from tidelog.broker.request import RequestContext
from tidelog.broker.services import Services
from tidelog.protocol.errors import KafkaError
from tidelog.protocol.messages.incremental_alter_configs import (
    AlterConfigsResourceResponse,
    IncrementalAlterConfigsRequest,
    IncrementalAlterConfigsResponse,
)

REQUEST = IncrementalAlterConfigsRequest


async def handle(
    services: Services, context: RequestContext, request: IncrementalAlterConfigsRequest
) -> IncrementalAlterConfigsResponse:
    problems = config_changes.refused(request.resources)
    wanted = [each for each in request.resources if (each.resource_type, each.resource_name) not in problems]
    allowed = IncrementalAlterConfigsRequest(resources=wanted, validate_only=request.validate_only)
    response: IncrementalAlterConfigsResponse = await controller(services).incremental_alter_configs(allowed)
    response.responses = config_changes.in_order(
        request.resources, problems, response.responses, AlterConfigsResourceResponse
    )
    return response


def refuse(request: IncrementalAlterConfigsRequest, error: KafkaError, version: int) -> IncrementalAlterConfigsResponse:
    return IncrementalAlterConfigsResponse(
        responses=[config_changes.refusal(each, error, AlterConfigsResourceResponse) for each in request.resources]
    )
