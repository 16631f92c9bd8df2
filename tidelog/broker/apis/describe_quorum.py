"""DescribeQuorum (key 55, versions 0-2): voters and observers of the metadata quorum, as its leader sees them.

Version 2 has room for a message at the top; earlier ones leave it out.
"""

from __future__ import annotations

from tidelog.broker.apis.cluster_roles import quorum
from tidelog.broker.apis.services import Services
from tidelog.broker.network.request import RequestContext
from tidelog.protocol.errors import KafkaError
from tidelog.protocol.messages.describe_quorum import DescribeQuorumRequest, DescribeQuorumResponse

REQUEST = DescribeQuorumRequest


async def handle(services: Services, context: RequestContext, request: DescribeQuorumRequest) -> DescribeQuorumResponse:
    response: DescribeQuorumResponse = await quorum(services).describe_quorum(request, context.api_version)
    return response


def refuse(request: DescribeQuorumRequest, error: KafkaError, version: int) -> DescribeQuorumResponse:
    return DescribeQuorumResponse(error_code=error.code, error_message=error.message)
