"""Fetch (key 1) on the controller's listener: replicas of the metadata log ask its leader for more.

Versions as for partitions of topics, though a member of the quorum needs 12, which detects divergence, or higher.
"""

from __future__ import annotations

from tidelog.broker.apis.cluster_roles import quorum
from tidelog.broker.apis.services import Services
from tidelog.broker.network.request import RequestContext
from tidelog.protocol.errors import KafkaError
from tidelog.protocol.messages.fetch import FetchableTopicResponse, FetchRequest, FetchResponse, PartitionData

REQUEST = FetchRequest

NO_PARTITIONS_IN_ERRORS_FROM = 13


async def handle(services: Services, context: RequestContext, request: FetchRequest) -> FetchResponse:
    response: FetchResponse = await quorum(services).fetch(request, context.api_version)
    return response


def refuse(request: FetchRequest, error: KafkaError, version: int) -> FetchResponse:
    topics = [] if version >= NO_PARTITIONS_IN_ERRORS_FROM else request.topics
    return FetchResponse(
        error_code=error.code,
        session_id=request.session_id,
        responses=[
            FetchableTopicResponse(
                topic=topic.topic,
                partitions=[
                    PartitionData(partition_index=each.partition, error_code=error.code, high_watermark=-1)
                    for each in topic.partitions
                ],
            )
            for topic in topics
        ],
    )
