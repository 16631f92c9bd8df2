"""AlterConfigs (key 33, versions 0-2): everything that is set for a topic or broker is replaced.

Deviations: those of `config_changes`.
"""

from __future__ import annotations

from tidelog.broker import config_changes
from tidelog.broker.cluster_roles import controller
from tidelog.broker.request import RequestContext
from tidelog.broker.services import Services
from tidelog.protocol.errors import KafkaError
from tidelog.protocol.messages.alter_configs import (
    AlterConfigsRequest,
    AlterConfigsResourceResponse,
    AlterConfigsResponse,
)

REQUEST = AlterConfigsRequest


async def handle(services: Services, context: RequestContext, request: AlterConfigsRequest) -> AlterConfigsResponse:
    problems = config_changes.refused(request.resources)
    wanted = [each for each in request.resources if (each.resource_type, each.resource_name) not in problems]
    allowed = AlterConfigsRequest(resources=wanted, validate_only=request.validate_only)
    response: AlterConfigsResponse = await controller(services).alter_configs(allowed)
    response.responses = config_changes.in_order(
        request.resources, problems, response.responses, AlterConfigsResourceResponse
    )
    return response


def refuse(request: AlterConfigsRequest, error: KafkaError, version: int) -> AlterConfigsResponse:
    return AlterConfigsResponse(
        responses=[config_changes.refusal(each, error, AlterConfigsResourceResponse) for each in request.resources]
    )
