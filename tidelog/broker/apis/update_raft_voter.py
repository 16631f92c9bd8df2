"""UpdateRaftVoter (key 82, version 0): a voter tells the leader of its quorum how to reach it."""

from __future__ import annotations

from tidelog.broker.apis.cluster_roles import quorum
from tidelog.broker.apis.services import Services
from tidelog.broker.network.request import RequestContext
from tidelog.protocol.errors import KafkaError
from tidelog.protocol.messages.update_raft_voter import UpdateRaftVoterRequest, UpdateRaftVoterResponse

REQUEST = UpdateRaftVoterRequest


async def handle(
    services: Services, context: RequestContext, request: UpdateRaftVoterRequest
) -> UpdateRaftVoterResponse:
    response: UpdateRaftVoterResponse = await quorum(services).update_voter(request, context.api_version)
    return response


def refuse(request: UpdateRaftVoterRequest, error: KafkaError, version: int) -> UpdateRaftVoterResponse:
    return UpdateRaftVoterResponse(error_code=error.code)
