"""RemoveRaftVoter (key 81, version 0): a voter leaves the metadata quorum."""

from __future__ import annotations

from tidelog.broker.apis.cluster_roles import quorum
from tidelog.broker.apis.services import Services
from tidelog.broker.network.request import RequestContext
from tidelog.protocol.errors import KafkaError
from tidelog.protocol.messages.remove_raft_voter import RemoveRaftVoterRequest, RemoveRaftVoterResponse

REQUEST = RemoveRaftVoterRequest


async def handle(
    services: Services, context: RequestContext, request: RemoveRaftVoterRequest
) -> RemoveRaftVoterResponse:
    response: RemoveRaftVoterResponse = await quorum(services).remove_voter(request, context.api_version)
    return response


def refuse(request: RemoveRaftVoterRequest, error: KafkaError, version: int) -> RemoveRaftVoterResponse:
    return RemoveRaftVoterResponse(error_code=error.code, error_message=error.message)
