"""BrokerHeartbeat (key 63, versions 0-2): a broker is alive, and learns whether it is fenced and whether it may stop.

The node records the connection with the broker's epoch. When the connection closes, the broker may have died, and the
controller checks it at once instead of waiting for the end of its session (not in Kafka).
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
    services.known_connections.on_heartbeat(context.connection, request.broker_id)
    return response
