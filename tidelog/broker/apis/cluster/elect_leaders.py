"""ElectLeaders (key 43, versions 0-2): the preferred replica, or any that is alive, becomes leader.

Version 0 has no error for the whole request, so each partition has it.
"""

from __future__ import annotations

from typing import Final

from tidelog.broker.apis.cluster_roles import check_time, controller
from tidelog.broker.apis.services import Services
from tidelog.broker.network.request import RequestContext
from tidelog.broker.scheduling.large_answers import made
from tidelog.protocol.errors import ErrorCode, KafkaError
from tidelog.protocol.messages.elect_leaders import (
    ElectLeadersRequest,
    ElectLeadersResponse,
    PartitionResult,
    ReplicaElectionResult,
)

REQUEST = ElectLeadersRequest

TOP_LEVEL_ERROR_FROM = 1
# The number of elements in requests whose elements are more than a number. A refusal of 400,000 took half a second.
ELECTIONS_MAX: Final = 50_000


async def handle(services: Services, context: RequestContext, request: ElectLeadersRequest) -> ElectLeadersResponse:
    if request.topic_partitions != []:
        check_time(request.timeout_ms)
    if sum(len(topic.partitions) for topic in request.topic_partitions or ()) > ELECTIONS_MAX:
        raise KafkaError(ErrorCode.POLICY_VIOLATION, "Excessively large number of partitions per request.")
    response: ElectLeadersResponse = await controller(services).elect_leaders(request, context.api_version)
    return response


def refuse(request: ElectLeadersRequest, error: KafkaError, version: int) -> ElectLeadersResponse:
    topics: list[tuple[str, list[int]]] = []
    left = ELECTIONS_MAX
    for topic in request.topic_partitions or ():
        topics.append((topic.topic, topic.partitions[:left]))
        left -= min(left, len(topic.partitions))

    def refused(index: int) -> PartitionResult:
        return PartitionResult(partition_id=index, error_code=error.code, error_message=error.message)

    def refused_topic(topic: tuple[str, list[int]]) -> ReplicaElectionResult:
        return ReplicaElectionResult(topic=topic[0], partition_result=made(topic[1], refused))

    return ElectLeadersResponse(
        error_code=error.code if version >= TOP_LEVEL_ERROR_FROM else 0,
        replica_election_results=made(topics, refused_topic),
    )
