"""UnregisterBroker (key 64, version 0): a broker will not come back; its registration goes."""

from __future__ import annotations

from tidelog.broker.apis.cluster_roles import controller
from tidelog.broker.apis.services import Services
from tidelog.broker.network.request import RequestContext
from tidelog.protocol.errors import KafkaError
from tidelog.protocol.messages.unregister_broker import UnregisterBrokerRequest, UnregisterBrokerResponse

REQUEST = UnregisterBrokerRequest


async def handle(
    services: Services, context: RequestContext, request: UnregisterBrokerRequest
) -> UnregisterBrokerResponse:
    response: UnregisterBrokerResponse = await controller(services).unregister_broker(request)
    return response


def refuse(request: UnregisterBrokerRequest, error: KafkaError, version: int) -> UnregisterBrokerResponse:
    return UnregisterBrokerResponse(error_code=error.code, error_message=error.message)
