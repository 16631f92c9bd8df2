"""AlterConfigs (key 33, versions 0-2): replaces all dynamic configs of topics and brokers.

`config_changes` has the checks and decisions.
"""

from __future__ import annotations

from tidelog.broker.apis import config_changes
from tidelog.broker.apis.services import Services
from tidelog.broker.network.request import RequestContext
from tidelog.broker.scheduling.pieces import UNCOUNTED_BYTES_MAX
from tidelog.protocol.errors import KafkaError
from tidelog.protocol.messages.alter_configs import (
    AlterConfigsRequest,
    AlterConfigsResourceResponse,
    AlterConfigsResponse,
)

REQUEST = AlterConfigsRequest
COUNTED_ABOVE_BYTES = UNCOUNTED_BYTES_MAX
FORWARDS_ITSELF = True


async def handle(services: Services, context: RequestContext, request: AlterConfigsRequest) -> AlterConfigsResponse:
    answers = await config_changes.alter(services, context, request, AlterConfigsResourceResponse)
    return AlterConfigsResponse(responses=answers)


def refuse(request: AlterConfigsRequest, error: KafkaError, version: int) -> AlterConfigsResponse:
    return AlterConfigsResponse(
        responses=[config_changes.refusal(each, error, AlterConfigsResourceResponse) for each in request.resources]
    )
