"""OffsetDelete (key 47, version 0): deletes a group's committed offsets of some partitions.

Unknown partitions are refused separately (UNKNOWN_TOPIC_OR_PARTITION), partitions of topics that the group's members
subscribe to with GROUP_SUBSCRIBED_TO_TOPIC. An error of the group is the error of the whole response.
"""

from __future__ import annotations

from tidelog.broker.apis.refusals import refusing
from tidelog.broker.apis.services import Services
from tidelog.broker.network.request import Deferred, RequestContext
from tidelog.protocol.errors import ErrorCode, KafkaError
from tidelog.protocol.messages.offset_delete import (
    OffsetDeleteRequest,
    OffsetDeleteResponse,
    OffsetDeleteResponsePartition,
    OffsetDeleteResponseTopic,
)

REQUEST = OffsetDeleteRequest
refuse = refusing(OffsetDeleteResponse)

Errors = dict[tuple[str, int], ErrorCode]


def handle(
    services: Services, context: RequestContext, request: OffsetDeleteRequest
) -> OffsetDeleteResponse | Deferred:
    topics_by_name = services.image().topics_by_name
    known: list[tuple[str, list[int]]] = []
    for topic in request.topics:
        topic_image = topics_by_name.get(topic.name)
        indexes = [partition.partition_index for partition in topic.partitions]
        existing = [index for index in indexes if topic_image is not None and index in topic_image.partitions]
        if existing:
            known.append((topic.name, existing))
    answer = services.groups.delete_offsets(context, request.group_id, known)
    if not isinstance(answer, Deferred):
        return _response(request, answer)
    deferred = Deferred()

    def answered(result: Errors | KafkaError) -> None:
        deferred.complete(result if isinstance(result, KafkaError) else _response(request, result))

    answer.on_complete(answered)
    return deferred


def _response(request: OffsetDeleteRequest, errors: Errors) -> OffsetDeleteResponse:
    """The response with every partition of the request, duplicates included. A partition without a result of the
    coordinator does not exist.
    """
    topics: dict[str, OffsetDeleteResponseTopic] = {}
    for entry in request.topics:
        for partition in entry.partitions:
            index = partition.partition_index
            error = errors.get((entry.name, index), ErrorCode.UNKNOWN_TOPIC_OR_PARTITION)
            topic = topics.setdefault(entry.name, OffsetDeleteResponseTopic(name=entry.name))
            topic.partitions.append(OffsetDeleteResponsePartition(partition_index=index, error_code=error))
    return OffsetDeleteResponse(topics=list(topics.values()))
