"""JoinGroup (key 11, versions 0-9): join a classic group, or rejoin it in a rebalance (KIP-62, KIP-394).

The answer waits until the end of the join phase. An answer with an `error_code` has the member id of the request.
"""

from __future__ import annotations

from tidelog.broker.apis.services import Services
from tidelog.broker.network.request import Deferred, RequestContext
from tidelog.protocol.errors import KafkaError
from tidelog.protocol.messages.join_group import JoinGroupRequest, JoinGroupResponse

REQUEST = JoinGroupRequest
NULL_PROTOCOL_VERSION_MIN = 7


def handle(services: Services, context: RequestContext, request: JoinGroupRequest) -> JoinGroupResponse | Deferred:
    answer = services.groups.join(context, request)
    if isinstance(answer, Deferred):
        request.protocols, request.reason = [], None  # it may wait for long, and the member has what counts
    return answer


def refuse(request: JoinGroupRequest, error: KafkaError, version: int) -> JoinGroupResponse:
    return JoinGroupResponse(
        error_code=error.code,
        member_id=request.member_id,
        protocol_name=None if version >= NULL_PROTOCOL_VERSION_MIN else "",
    )
