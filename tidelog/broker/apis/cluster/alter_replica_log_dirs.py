"""AlterReplicaLogDirs (key 34, versions 1-2): move replicas to other log directories of this broker.

The answer leaves when the moves have begun; DescribeLogDirs shows their progress. For a replica that this broker does
not have, the answer is REPLICA_NOT_AVAILABLE, and a later replica is created in the requested directory, as in Kafka.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from tidelog.broker.apis.services import Services
from tidelog.broker.network.request import RequestContext
from tidelog.broker.scheduling.large_answers import in_pieces
from tidelog.broker.scheduling.pieces import PIECE_ELEMENTS_MAX
from tidelog.protocol.errors import ErrorCode, KafkaError
from tidelog.protocol.messages.alter_replica_log_dirs import (
    AlterReplicaLogDirPartitionResult,
    AlterReplicaLogDirsRequest,
    AlterReplicaLogDirsResponse,
    AlterReplicaLogDirTopicResult,
)

REQUEST = AlterReplicaLogDirsRequest

_Order = tuple[tuple[str, int], str]  # a replica and its directory
_Results = dict[str, AlterReplicaLogDirTopicResult]


def handle(services: Services, context: RequestContext, request: AlterReplicaLogDirsRequest) -> Any:
    # For a duplicate replica the last directory counts.
    directories = {
        (topic.name, index): each.path for each in request.dirs for topic in each.topics for index in topic.partitions
    }
    orders = list(directories.items())
    results: _Results = {}
    if len(orders) > PIECE_ELEMENTS_MAX:
        return _ordered_in_pieces(services, orders, results)
    for each in orders:
        _order(services, results, each)
    return AlterReplicaLogDirsResponse(results=list(results.values()))


async def _ordered_in_pieces(
    services: Services, orders: list[_Order], results: _Results
) -> AlterReplicaLogDirsResponse:
    await in_pieces(services.scheduler, orders, partial(_order, services, results))
    return AlterReplicaLogDirsResponse(results=list(results.values()))


def _order(services: Services, results: _Results, order: _Order) -> None:
    (topic, index), path = order
    code = ErrorCode.NONE
    try:
        services.moves.order(topic, index, path)
    except KafkaError as error:
        code = error.code
    result = results.get(topic)
    if result is None:
        result = results[topic] = AlterReplicaLogDirTopicResult(topic_name=topic)
    result.partitions.append(AlterReplicaLogDirPartitionResult(partition_index=index, error_code=code))


def refuse(request: AlterReplicaLogDirsRequest, error: KafkaError, version: int) -> AlterReplicaLogDirsResponse:
    topics: dict[str, AlterReplicaLogDirTopicResult] = {}
    for each in request.dirs:
        for topic in each.topics:
            result = topics.setdefault(topic.name, AlterReplicaLogDirTopicResult(topic_name=topic.name))
            for index in topic.partitions:
                result.partitions.append(
                    AlterReplicaLogDirPartitionResult(partition_index=index, error_code=error.code)
                )
    return AlterReplicaLogDirsResponse(results=list(topics.values()))
