"""BeginQuorumEpoch (key 53, versions 0-1): the new leader of the metadata quorum makes itself known."""

from __future__ import annotations

from tidelog.broker.apis.cluster_roles import quorum
from tidelog.broker.apis.services import Services
from tidelog.broker.network.request import RequestContext
from tidelog.protocol.errors import KafkaError
from tidelog.protocol.messages.begin_quorum_epoch import BeginQuorumEpochRequest, BeginQuorumEpochResponse

REQUEST = BeginQuorumEpochRequest


async def handle(
    services: Services, context: RequestContext, request: BeginQuorumEpochRequest
) -> BeginQuorumEpochResponse:
    response: BeginQuorumEpochResponse = await quorum(services).begin_quorum_epoch(request, context.api_version)
    return response


def refuse(request: BeginQuorumEpochRequest, error: KafkaError, version: int) -> BeginQuorumEpochResponse:
    return BeginQuorumEpochResponse(error_code=error.code)
