"""AddRaftVoter (key 80, versions 0-1): a controller becomes a voter of the metadata quorum."""

from __future__ import annotations

from tidelog.broker.apis.cluster_roles import quorum
from tidelog.broker.apis.services import Services
from tidelog.broker.network.request import RequestContext
from tidelog.protocol.errors import KafkaError
from tidelog.protocol.messages.add_raft_voter import AddRaftVoterRequest, AddRaftVoterResponse

REQUEST = AddRaftVoterRequest


async def handle(services: Services, context: RequestContext, request: AddRaftVoterRequest) -> AddRaftVoterResponse:
    response: AddRaftVoterResponse = await quorum(services).add_voter(request, context.api_version)
    return response


def refuse(request: AddRaftVoterRequest, error: KafkaError, version: int) -> AddRaftVoterResponse:
    return AddRaftVoterResponse(error_code=error.code, error_message=error.message)
