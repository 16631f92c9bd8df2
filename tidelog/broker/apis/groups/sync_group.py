"""SyncGroup (key 14, versions 0-5): the group's leader sends the assignment, and every member gets its part.

The answer waits until the leader's assignment is committed to `__consumer_offsets`.
"""

from __future__ import annotations

from tidelog.broker.apis.refusals import refusing
from tidelog.broker.apis.services import Services
from tidelog.broker.network.request import Deferred, RequestContext
from tidelog.protocol.messages.sync_group import SyncGroupRequest, SyncGroupResponse

REQUEST = SyncGroupRequest
refuse = refusing(SyncGroupResponse)


def handle(services: Services, context: RequestContext, request: SyncGroupRequest) -> SyncGroupResponse | Deferred:
    answer = services.groups.sync(context, request)
    if isinstance(answer, Deferred):
        request.assignments = []  # it may wait for long, and the coordinator has those that count
    return answer
