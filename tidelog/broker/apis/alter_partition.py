"""AlterPartition (key 56, versions 2-3): a leader asks for another ISR."""

from __future__ import annotations

from tidelog.broker.apis.cluster_roles import controller
from tidelog.broker.apis.services import Services
from tidelog.broker.network.request import RequestContext
from tidelog.protocol.errors import KafkaError
from tidelog.protocol.messages.alter_partition import AlterPartitionRequest, AlterPartitionResponse

REQUEST = AlterPartitionRequest


async def handle(services: Services, context: RequestContext, request: AlterPartitionRequest) -> AlterPartitionResponse:
    response: AlterPartitionResponse = await controller(services).alter_partition(request, context.api_version)
    return response


def refuse(request: AlterPartitionRequest, error: KafkaError, version: int) -> AlterPartitionResponse:
    return AlterPartitionResponse(error_code=error.code)
