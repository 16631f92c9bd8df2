"""AlterReplicaLogDirs (key 34, versions 1-2): move replicas to other log directories of this broker.

The answer leaves when the moves have begun; DescribeLogDirs shows their progress. For a replica that this broker does
not have, the answer is REPLICA_NOT_AVAILABLE, and a later replica is created in the requested directory, as in Kafka.
"""

from __future__ import annotations

from tidelog.broker.apis.services import Services
from tidelog.broker.network.request import RequestContext
from tidelog.protocol.errors import ErrorCode, KafkaError
from tidelog.protocol.messages.alter_replica_log_dirs import (
    AlterReplicaLogDirPartitionResult,
    AlterReplicaLogDirsRequest,
    AlterReplicaLogDirsResponse,
    AlterReplicaLogDirTopicResult,
)

REQUEST = AlterReplicaLogDirsRequest


def handle(
    services: Services, context: RequestContext, request: AlterReplicaLogDirsRequest
) -> AlterReplicaLogDirsResponse:
    # For a duplicate replica the last directory counts.
    directories = {
        (topic.name, index): each.path for each in request.dirs for topic in each.topics for index in topic.partitions
    }
    results: dict[str, AlterReplicaLogDirTopicResult] = {}
    for (topic, index), path in directories.items():
        code = ErrorCode.NONE
        try:
            services.moves.order(topic, index, path)
        except KafkaError as error:
            code = error.code
        result = results.setdefault(topic, AlterReplicaLogDirTopicResult(topic_name=topic))
        result.partitions.append(AlterReplicaLogDirPartitionResult(partition_index=index, error_code=code))
    return AlterReplicaLogDirsResponse(results=list(results.values()))


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
