"""IncrementalAlterConfigs (key 44, versions 0-1): changes single dynamic configs of topics and brokers.

`config_changes` has the checks and decisions.
"""

from __future__ import annotations

from tidelog.broker.apis import config_changes
from tidelog.broker.apis.services import Services
from tidelog.broker.network.request import RequestContext
from tidelog.broker.scheduling.pieces import UNCOUNTED_BYTES_MAX
from tidelog.protocol.errors import KafkaError
from tidelog.protocol.messages.incremental_alter_configs import (
    AlterConfigsResourceResponse,
    IncrementalAlterConfigsRequest,
    IncrementalAlterConfigsResponse,
)

REQUEST = IncrementalAlterConfigsRequest
COUNTED_ABOVE_BYTES = UNCOUNTED_BYTES_MAX
FORWARDS_ITSELF = True


async def handle(
    services: Services, context: RequestContext, request: IncrementalAlterConfigsRequest
) -> IncrementalAlterConfigsResponse:
    answers = await config_changes.alter(services, context, request, AlterConfigsResourceResponse)
    return IncrementalAlterConfigsResponse(responses=answers)


def refuse(request: IncrementalAlterConfigsRequest, error: KafkaError, version: int) -> IncrementalAlterConfigsResponse:
    return IncrementalAlterConfigsResponse(
        responses=[config_changes.refusal(each, error, AlterConfigsResourceResponse) for each in request.resources]
    )
