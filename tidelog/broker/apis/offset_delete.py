"""OffsetDelete (key 47, version 0): a group forgets where it has read to in some partitions.

Partitions that do not exist are refused one by one (UNKNOWN_TOPIC_OR_PARTITION), those of topics that the group's
members subscribe to with GROUP_SUBSCRIBED_TO_TOPIC; what is wrong with the group is said of the whole.
"""

from __future__ import annotations

from tidelog.broker.request import Deferred, RequestContext
from tidelog.broker.services import Services
from tidelog.protocol.errors import ErrorCode, KafkaError
from tidelog.protocol.messages.offset_delete import (
    OffsetDeleteRequest,
    OffsetDeleteResponse,
    OffsetDeleteResponsePartition,
    OffsetDeleteResponseTopic,
)

REQUEST = OffsetDeleteRequest

Errors = dict[tuple[str, int], ErrorCode]


def handle(
    services: Services, context: RequestContext, request: OffsetDeleteRequest
) -> OffsetDeleteResponse | Deferred:
    topics_by_name = services.image().topics_by_name
    known: list[tuple[str, list[int]]] = []
    errors: Errors = {}
    for topic in request.topics:
        found = topics_by_name.get(topic.name)
        existing = [] if found is None else found.partitions
        indexes = [partition.partition_index for partition in topic.partitions]
        errors |= {(topic.name, index): ErrorCode.UNKNOWN_TOPIC_OR_PARTITION for index in indexes}
        known.append((topic.name, [index for index in indexes if index in existing]))
    answer = services.groups.delete_offsets(context, request.group_id, [topic for topic in known if topic[1]])
    if not isinstance(answer, Deferred):
        return _response(errors | answer)
    deferred = Deferred()

    def answered(result: Errors | KafkaError) -> None:
        deferred.complete(result if isinstance(result, KafkaError) else _response(errors | result))

    answer.on_complete(answered)
    return deferred


def refuse(request: OffsetDeleteRequest, error: KafkaError, version: int) -> OffsetDeleteResponse:
    return OffsetDeleteResponse(error_code=error.code)


def _response(errors: Errors) -> OffsetDeleteResponse:
    topics: dict[str, OffsetDeleteResponseTopic] = {}
    for (name, index), error in errors.items():
        topic = topics.setdefault(name, OffsetDeleteResponseTopic(name=name))
        topic.partitions.append(OffsetDeleteResponsePartition(partition_index=index, error_code=error))
    return OffsetDeleteResponse(topics=list(topics.values()))
