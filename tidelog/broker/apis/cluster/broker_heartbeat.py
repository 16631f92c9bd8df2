"""BrokerHeartbeat (key 63, versions 0-2): a broker is alive; it learns whether it is fenced and may shut down.

The connection is remembered with the broker's epoch: when it closes, the broker may have died, and the controller looks
at once instead of waiting for the session to end (not in Kafka).
"""

from __future__ import annotations

from tidelog.broker.apis.cluster_roles import controller
from tidelog.broker.apis.refusals import refusing
from tidelog.broker.apis.services import Services
from tidelog.broker.network.request import RequestContext
from tidelog.protocol.messages.broker_heartbeat import BrokerHeartbeatRequest, BrokerHeartbeatResponse

REQUEST = BrokerHeartbeatRequest
refuse = refusing(BrokerHeartbeatResponse)


async def handle(
    services: Services, context: RequestContext, request: BrokerHeartbeatRequest
) -> BrokerHeartbeatResponse:
    active = controller(services)
    if context.connection is not None:
        services.heartbeats.on_heartbeat(context.connection, request.broker_id, request.broker_epoch)
    response: BrokerHeartbeatResponse = await active.broker_heartbeat(request, context.api_version)
    return response
