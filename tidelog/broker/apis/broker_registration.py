"""BrokerRegistration (key 62, versions 0-4): a broker has started, and is given an epoch."""

from __future__ import annotations

from tidelog.broker.apis.cluster_roles import controller
from tidelog.broker.apis.services import Services
from tidelog.broker.network.request import RequestContext
from tidelog.protocol.errors import KafkaError
from tidelog.protocol.messages.broker_registration import BrokerRegistrationRequest, BrokerRegistrationResponse

REQUEST = BrokerRegistrationRequest


async def handle(
    services: Services, context: RequestContext, request: BrokerRegistrationRequest
) -> BrokerRegistrationResponse:
    response: BrokerRegistrationResponse = await controller(services).register_broker(request, context.api_version)
    return response


def refuse(request: BrokerRegistrationRequest, error: KafkaError, version: int) -> BrokerRegistrationResponse:
    return BrokerRegistrationResponse(error_code=error.code)
