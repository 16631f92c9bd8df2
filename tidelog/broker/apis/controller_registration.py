"""ControllerRegistration (key 70, version 0): a controller tells the active one where it listens."""

from __future__ import annotations

from tidelog.broker.apis.cluster_roles import controller
from tidelog.broker.apis.services import Services
from tidelog.broker.network.request import RequestContext
from tidelog.protocol.errors import KafkaError
from tidelog.protocol.messages.controller_registration import (
    ControllerRegistrationRequest,
    ControllerRegistrationResponse,
)

REQUEST = ControllerRegistrationRequest


async def handle(
    services: Services, context: RequestContext, request: ControllerRegistrationRequest
) -> ControllerRegistrationResponse:
    response: ControllerRegistrationResponse = await controller(services).register_controller(request)
    return response


def refuse(request: ControllerRegistrationRequest, error: KafkaError, version: int) -> ControllerRegistrationResponse:
    return ControllerRegistrationResponse(error_code=error.code, error_message=error.message)
