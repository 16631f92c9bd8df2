"""EndQuorumEpoch (key 54, versions 0-1): the leader of the metadata quorum resigns."""

from __future__ import annotations

from tidelog.broker.apis.cluster_roles import quorum
from tidelog.broker.apis.services import Services
from tidelog.broker.network.request import RequestContext
from tidelog.protocol.errors import KafkaError
from tidelog.protocol.messages.end_quorum_epoch import EndQuorumEpochRequest, EndQuorumEpochResponse

REQUEST = EndQuorumEpochRequest


async def handle(services: Services, context: RequestContext, request: EndQuorumEpochRequest) -> EndQuorumEpochResponse:
    response: EndQuorumEpochResponse = await quorum(services).end_quorum_epoch(request, context.api_version)
    return response


def refuse(request: EndQuorumEpochRequest, error: KafkaError, version: int) -> EndQuorumEpochResponse:
    return EndQuorumEpochResponse(error_code=error.code)
