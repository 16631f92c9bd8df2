"""LeaveGroup (key 13, versions 0-5).

One member leaves, or from version 3 on several, static members also by instance id (KIP-345).
"""

from __future__ import annotations

from tidelog.broker.apis.refusals import refusing
from tidelog.broker.apis.services import Services
from tidelog.broker.network.request import Deferred, RequestContext
from tidelog.protocol.messages.leave_group import LeaveGroupRequest, LeaveGroupResponse

REQUEST = LeaveGroupRequest
refuse = refusing(LeaveGroupResponse)


def handle(services: Services, context: RequestContext, request: LeaveGroupRequest) -> LeaveGroupResponse | Deferred:
    return services.groups.leave(context, request)
