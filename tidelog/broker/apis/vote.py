"""Vote (key 52, versions 0-2): a candidate, or one who might become it, asks this voter for its vote."""

from __future__ import annotations

from tidelog.broker.apis.cluster_roles import quorum
from tidelog.broker.apis.services import Services
from tidelog.broker.network.request import RequestContext
from tidelog.protocol.errors import KafkaError
from tidelog.protocol.messages.vote import VoteRequest, VoteResponse

REQUEST = VoteRequest


async def handle(services: Services, context: RequestContext, request: VoteRequest) -> VoteResponse:
    response: VoteResponse = await quorum(services).vote(request, context.api_version)
    return response


def refuse(request: VoteRequest, error: KafkaError, version: int) -> VoteResponse:
    return VoteResponse(error_code=error.code)
