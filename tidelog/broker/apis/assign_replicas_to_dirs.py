"""AssignReplicasToDirs (key 73, version 0): a broker says in which of its directories replicas are."""

from __future__ import annotations

from tidelog.broker.apis.cluster_roles import controller
from tidelog.broker.apis.services import Services
from tidelog.broker.network.request import RequestContext
from tidelog.protocol.errors import KafkaError
from tidelog.protocol.messages.assign_replicas_to_dirs import AssignReplicasToDirsRequest, AssignReplicasToDirsResponse

REQUEST = AssignReplicasToDirsRequest


async def handle(
    services: Services, context: RequestContext, request: AssignReplicasToDirsRequest
) -> AssignReplicasToDirsResponse:
    response: AssignReplicasToDirsResponse = await controller(services).assign_replicas_to_dirs(request)
    return response


def refuse(request: AssignReplicasToDirsRequest, error: KafkaError, version: int) -> AssignReplicasToDirsResponse:
    return AssignReplicasToDirsResponse(error_code=error.code)
