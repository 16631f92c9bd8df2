"""LeaveGroup (key 13, versions 0-5).

One member leaves, or from version 3 many, static ones by instance id too (KIP-345).
"""

from __future__ import annotations

from tidelog.broker.apis.services import Services
from tidelog.broker.network.request import Deferred, RequestContext
from tidelog.protocol.errors import KafkaError
from tidelog.protocol.messages.leave_group import LeaveGroupRequest, LeaveGroupResponse

REQUEST = LeaveGroupRequest


def handle(services: Services, context: RequestContext, request: LeaveGroupRequest) -> LeaveGroupResponse | Deferred:
    return services.groups.leave(context, request)


def refuse(request: LeaveGroupRequest, error: KafkaError, version: int) -> LeaveGroupResponse:
    return LeaveGroupResponse(error_code=error.code)
