"""DescribeLogDirs (key 35, versions 1-5): this broker's log directories, and the size of each replica in them.

An offline directory has only its error. A replica that moves appears twice: in its present directory and in its future
one (`is_future_key`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tidelog.broker.apis.refusals import refusing
from tidelog.broker.apis.services import Services
from tidelog.broker.network.request import RequestContext
from tidelog.broker.replicas.log_directories import CORDONED
from tidelog.broker.scheduling.large_answers import AnswerInPieces
from tidelog.broker.scheduling.pieces import PIECE_ELEMENTS_MAX
from tidelog.protocol.errors import ErrorCode
from tidelog.protocol.messages.describe_log_dirs import (
    DescribeLogDirsPartition,
    DescribeLogDirsRequest,
    DescribeLogDirsResponse,
    DescribeLogDirsResult,
    DescribeLogDirsTopic,
)
from tidelog.replication.controller.metadata.image import METADATA_VERSION
from tidelog.replication.controller.metadata.record_codec import CORDONED_VERSION

if TYPE_CHECKING:
    from tidelog.storage.log.directory import LogDirectory
    from tidelog.storage.log.partition_log import PartitionLog

REQUEST = DescribeLogDirsRequest
ANSWERS_MAY_BE_LARGE = True
refuse = refusing(DescribeLogDirsResponse)

LAG_UNKNOWN = -1

_PartitionsByTopic = dict[str, set[int]]


async def handle(
    services: Services, context: RequestContext, request: DescribeLogDirsRequest
) -> DescribeLogDirsResponse:
    requested: _PartitionsByTopic | None = None
    if request.topics is not None:
        requested = {}
        for topic in request.topics:
            requested.setdefault(topic.topic, set()).update(topic.partitions)
    knows = services.image().feature_level(METADATA_VERSION) >= CORDONED_VERSION
    cordoned = services.settings.items(CORDONED) if knows else []
    results = []
    async with AnswerInPieces(services.scheduler, context.connection) as answer:
        for path, absolute in services.directories.home_paths.items():
            is_cordoned = services.directories.is_cordoned(path, cordoned)
            result = DescribeLogDirsResult(log_dir=absolute, is_cordoned=is_cordoned)
            results.append(result)
            directory = services.directories.home_at(path)
            if directory is None:
                result.error_code = ErrorCode.KAFKA_STORAGE_ERROR
                continue
            result.total_bytes, result.usable_bytes = await services.directories.volume_bytes(directory)
            result.topics = await _topics(services, directory, requested, answer)
    return DescribeLogDirsResponse(results=results)


async def _topics(
    services: Services, directory: LogDirectory, requested: _PartitionsByTopic | None, answer: AnswerInPieces
) -> list[DescribeLogDirsTopic]:
    await answer.add_elements(len(directory.logs) + len(directory.futures))  # the list of all is held, too
    topics: dict[str, DescribeLogDirsTopic] = {}
    logs = [(*each, False) for each in directory.logs.items()] + [(*each, True) for each in directory.futures.items()]
    for start in range(0, len(logs), PIECE_ELEMENTS_MAX):
        piece = logs[start : start + PIECE_ELEMENTS_MAX]
        for (name, index), log, is_future in piece:
            if requested is None or index in requested.get(name, ()):
                topic = topics.setdefault(name, DescribeLogDirsTopic(name=name))
                topic.partitions.append(
                    DescribeLogDirsPartition(
                        partition_index=index,
                        partition_size=log.size_bytes,
                        offset_lag=_lag(services, name, index, log, is_future),
                        is_future_key=is_future,
                    )
                )
        await answer.add_elements(len(piece))
    return list(topics.values())


def _lag(services: Services, name: str, index: int, log: PartitionLog, is_future: bool) -> int:
    """The lag of a future replica behind the present one, or of a replica behind its known high watermark."""
    partition = services.partitions.find(name, index)
    if partition is None or partition.offline:
        return LAG_UNKNOWN
    if is_future:
        return partition.log.log_end_offset - log.log_end_offset
    return max(0, log.high_watermark - log.log_end_offset)
