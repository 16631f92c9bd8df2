"""Heartbeat (key 12, versions 0-4): a member shows that it is alive, and learns whether it must rejoin."""

from __future__ import annotations

from tidelog.broker.apis.refusals import refusing
from tidelog.broker.apis.services import Services
from tidelog.broker.network.request import Deferred, RequestContext
from tidelog.protocol.messages.heartbeat import HeartbeatRequest, HeartbeatResponse

REQUEST = HeartbeatRequest
refuse = refusing(HeartbeatResponse)


def handle(services: Services, context: RequestContext, request: HeartbeatRequest) -> HeartbeatResponse | Deferred:
    return services.groups.heartbeat(context, request)
