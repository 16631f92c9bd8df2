"""DescribeLogDirs (key 35, versions 1-5): this broker's log directories, and the size of each replica in them.

Deviation: the size of the volume is not told (-1, as Kafka says it where it cannot tell).
"""

from __future__ import annotations

from tidelog.broker.request import RequestContext
from tidelog.broker.services import Services
from tidelog.protocol.errors import KafkaError
from tidelog.protocol.messages.describe_log_dirs import (
    DescribeLogDirsPartition,
    DescribeLogDirsRequest,
    DescribeLogDirsResponse,
    DescribeLogDirsResult,
    DescribeLogDirsTopic,
)

REQUEST = DescribeLogDirsRequest


def handle(services: Services, context: RequestContext, request: DescribeLogDirsRequest) -> DescribeLogDirsResponse:
    wanted = None if request.topics is None else {topic.topic: set(topic.partitions) for topic in request.topics}
    found: dict[str, dict[str, DescribeLogDirsTopic]] = {str(path): {} for path in services.config.log_dirs}
    for partition in services.partitions.hosted():
        if wanted is not None and partition.index not in wanted.get(partition.topic, ()):
            continue
        log = partition.log
        topics = found[log.directory.rpartition("/")[0]]
        topic = topics.setdefault(partition.topic, DescribeLogDirsTopic(name=partition.topic))
        topic.partitions.append(
            DescribeLogDirsPartition(
                partition_index=partition.index,
                partition_size=log.size_bytes,
                offset_lag=max(0, log.high_watermark - log.log_end_offset),
            )
        )
    return DescribeLogDirsResponse(
        results=[DescribeLogDirsResult(log_dir=path, topics=list(topics.values())) for path, topics in found.items()]
    )


def refuse(request: DescribeLogDirsRequest, error: KafkaError, version: int) -> DescribeLogDirsResponse:
    return DescribeLogDirsResponse(error_code=error.code)
