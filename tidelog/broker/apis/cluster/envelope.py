"""Envelope (key 58, version 0): a broker passes on a request that only the active controller answers (KIP-590).

What is inside is a whole request and becomes a whole response, headers included. Deviation: the principal is not looked
at, there being no authorization yet; only what brokers forward is accepted.
"""

from __future__ import annotations

import ipaddress

from tidelog.broker.apis.cluster_roles import controller
from tidelog.broker.apis.refusals import refusing
from tidelog.broker.apis.services import Services
from tidelog.broker.network.request import RequestContext
from tidelog.protocol.errors import ErrorCode, KafkaError, MalformedMessage
from tidelog.protocol.messages.envelope import EnvelopeRequest, EnvelopeResponse

REQUEST = EnvelopeRequest
refuse = refusing(EnvelopeResponse)


async def handle(services: Services, context: RequestContext, request: EnvelopeRequest) -> EnvelopeResponse:
    controller(services)
    try:
        host = str(ipaddress.ip_address(bytes(request.client_host_address)))
    except ValueError:
        raise KafkaError(ErrorCode.INVALID_REQUEST, "the client's address is none") from None
    try:
        return EnvelopeResponse(response_data=await services.embedded(bytes(request.request_data), host))
    except MalformedMessage as error:
        raise KafkaError(ErrorCode.INVALID_REQUEST, str(error)) from None
