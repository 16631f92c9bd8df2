"""Envelope (key 58, version 0): a broker forwards a request that only the active controller handles (KIP-590).

The envelope has a whole request, and its answer a whole response, both with headers. Deviation: the principal is
ignored, because there is no authorization yet. Only APIs that brokers forward are accepted.
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
        # Kafka answers so for a request in the envelope that cannot be read.
        raise KafkaError(ErrorCode.UNSUPPORTED_VERSION, str(error)) from None
