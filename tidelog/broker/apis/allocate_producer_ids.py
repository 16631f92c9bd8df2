"""AllocateProducerIds (key 67, version 0): the next block of producer ids for a broker."""

from __future__ import annotations

from tidelog.broker.apis.cluster_roles import controller
from tidelog.broker.apis.services import Services
from tidelog.broker.network.request import RequestContext
from tidelog.protocol.errors import KafkaError
from tidelog.protocol.messages.allocate_producer_ids import AllocateProducerIdsRequest, AllocateProducerIdsResponse

REQUEST = AllocateProducerIdsRequest


async def handle(
    services: Services, context: RequestContext, request: AllocateProducerIdsRequest
) -> AllocateProducerIdsResponse:
    response: AllocateProducerIdsResponse = await controller(services).allocate_producer_ids_for(request)
    return response


def refuse(request: AllocateProducerIdsRequest, error: KafkaError, version: int) -> AllocateProducerIdsResponse:
    return AllocateProducerIdsResponse(error_code=error.code)
