"""OffsetFetch (key 9, versions 1-10): the committed offsets of groups.

A request has one group up to version 7, several from version 8 on. The coordinator of the group's partition answers for
each. From version 10 on topics have ids. A null list of topics means all topics. A partition without a committed offset
gets offset -1 and no error.

Invariant: a topic gets no offset of a former topic of its name, also where it is asked for by its name. The image of a
group's coordinator is never older than those with which the group's offsets were committed: each coordinator learned
from its image that it leads, and that it leads no more. Kafka compares ids from version 10 on.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, cast

from tidelog.broker.apis.repeats import check_repeats
from tidelog.broker.apis.services import Services
from tidelog.broker.coordinators.group.offsets import (
    FetchedOffset,
    FetchedPartitions,
    FetchedTopics,
    RequestedTopics,
)
from tidelog.broker.network.request import Deferred, RequestContext, gather
from tidelog.broker.scheduling.large_answers import Made, in_steps, made
from tidelog.broker.scheduling.pieces import ID_CHARACTERS, PIECE_ELEMENTS_MAX, Arrays
from tidelog.protocol.errors import ErrorCode, KafkaError
from tidelog.protocol.messages.offset_fetch import (
    OffsetFetchRequest,
    OffsetFetchRequestGroup,
    OffsetFetchRequestTopics,
    OffsetFetchResponse,
    OffsetFetchResponseGroup,
    OffsetFetchResponsePartition,
    OffsetFetchResponsePartitions,
    OffsetFetchResponseTopic,
    OffsetFetchResponseTopics,
)
from tidelog.replication.controller.metadata.image import MetadataImage

REQUEST = OffsetFetchRequest
GROUP_ERROR_FROM = 2
MANY_GROUPS_FROM = 8
TOPIC_IDS_FROM = 10
NO_TOPIC_ID = bytes(16)

TopicsOrError = FetchedTopics | KafkaError


def _size(response: OffsetFetchResponse) -> int:
    count = _partition_count(response.topics)
    for group in response.groups:
        count += len(group.group_id) // ID_CHARACTERS + _partition_count(group.topics)
    return count


def _partition_count(topics: Sequence[Any] | Made[Any, Any]) -> int:
    if isinstance(topics, Made):  # counted without making the topics
        sources = topics.sources
        return sum(len(each[1] if isinstance(each, tuple) else each.partition_indexes) for each in sources)
    return sum(len(topic.partitions) for topic in topics)


IN_PIECES = Arrays("groups", "groups", response_elements=_size)


def check(request: OffsetFetchRequest) -> None:
    check_repeats(group.group_id for group in request.groups)


def handle(services: Services, context: RequestContext, request: OffsetFetchRequest) -> Any:
    answer = _Answer(services.image(), context.api_version, request)
    check_repeats(group.group_id for group in answer.groups)
    fetch = services.groups.fetch_offsets
    response = gather(
        [partial(fetch, group.group_id, answer.known_topics(group), request.require_stable) for group in answer.groups],
        answer.response,
    )
    is_of_all_topics = len(answer.groups) == 1 and answer.groups[0].topics is None
    if is_of_all_topics and (isinstance(response, Deferred) or _size(response) > PIECE_ELEMENTS_MAX):
        return in_steps(response)
    return response


def refuse(request: OffsetFetchRequest, error: KafkaError, version: int) -> OffsetFetchResponse:
    groups = _groups(request, version)
    if version >= MANY_GROUPS_FROM:
        return OffsetFetchResponse(
            groups=[OffsetFetchResponseGroup(group_id=group.group_id, error_code=error.code) for group in groups]
        )
    return _refused_single(groups[0], error.code, version)


class _Answer:
    """The groups and topics of a request, and the conversion of the coordinators' answers to its response."""

    def __init__(self, image: MetadataImage, version: int, request: OffsetFetchRequest) -> None:
        self.groups = _groups(request, version)
        self._image = image
        self._version = version

    def known_topics(self, group: OffsetFetchRequestGroup) -> RequestedTopics | None:
        if group.topics is None:
            return None
        if self._version < TOPIC_IDS_FROM:
            return [(topic.name, self._id_of(topic.name), topic.partition_indexes) for topic in group.topics]
        by_id = self._image.topics_by_id
        return [
            (by_id[topic.topic_id].name, topic.topic_id, topic.partition_indexes)
            for topic in group.topics
            if topic.topic_id in by_id
        ]

    def _id_of(self, name: str) -> bytes:
        topic = self._image.topics_by_name.get(name)
        return NO_TOPIC_ID if topic is None else topic.topic_id

    def _present(self, group: OffsetFetchRequestGroup, outcome: TopicsOrError) -> TopicsOrError:
        """Without the offsets of former topics, where all topics were asked for."""
        if group.topics is not None or isinstance(outcome, KafkaError):
            return outcome
        present: FetchedTopics = []
        for name, entries in outcome:
            kept = entries.of_topic(self._id_of(name))
            if kept:
                present.append((name, kept))
        return present

    def response(self, answers: list[TopicsOrError]) -> OffsetFetchResponse:
        answers = [self._present(group, outcome) for group, outcome in zip(self.groups, answers)]
        if self._version >= MANY_GROUPS_FROM:
            return OffsetFetchResponse(
                groups=[self._group(group, outcome) for group, outcome in zip(self.groups, answers)]
            )
        outcome = answers[0]
        if isinstance(outcome, KafkaError):
            return _refused_single(self.groups[0], outcome.code, self._version)
        return OffsetFetchResponse(topics=made(outcome, _old_topic))

    def _group(self, group: OffsetFetchRequestGroup, outcome: TopicsOrError) -> OffsetFetchResponseGroup:
        if isinstance(outcome, KafkaError):
            return OffsetFetchResponseGroup(group_id=group.group_id, error_code=outcome.code)
        if self._version < TOPIC_IDS_FROM:
            topics = made(outcome, self._topic)
        else:
            by_name, by_id = self._image.topics_by_name, self._image.topics_by_id
            # A deleted topic has no id, and this version has no names.
            known = [each for each in outcome if each[0] in by_name]
            unknown = [topic for topic in group.topics or () if topic.topic_id not in by_id]
            sources: list[tuple[str, FetchedPartitions] | OffsetFetchRequestTopics] = [*known, *unknown]
            topics = made(sources, self._topic_or_unknown)
        return OffsetFetchResponseGroup(group_id=group.group_id, topics=topics)

    def _topic_or_unknown(
        self, topic: tuple[str, FetchedPartitions] | OffsetFetchRequestTopics
    ) -> OffsetFetchResponseTopics:
        return self._topic(topic) if isinstance(topic, tuple) else _unknown_topic(topic)

    def _topic(self, fetched: tuple[str, FetchedPartitions]) -> OffsetFetchResponseTopics:
        name, entries = fetched
        partitions = made(entries, _partition)
        return OffsetFetchResponseTopics(name=name, topic_id=self._id_of(name), partitions=partitions)


def _groups(request: OffsetFetchRequest, version: int) -> list[OffsetFetchRequestGroup]:
    """The groups of the request, in the form of version 8 and later."""
    if version >= MANY_GROUPS_FROM:
        return request.groups
    # The topics of both forms have a name and partition indexes. Their other field, the id, is only of version 10.
    topics = cast("list[OffsetFetchRequestTopics] | None", request.topics)
    return [OffsetFetchRequestGroup(group_id=request.group_id, topics=topics)]


def _unknown_topic(topic: OffsetFetchRequestTopics) -> OffsetFetchResponseTopics:
    return OffsetFetchResponseTopics(
        topic_id=topic.topic_id, partitions=made(topic.partition_indexes, _partition_of_unknown)
    )


def _partition_of_unknown(index: int) -> OffsetFetchResponsePartitions:
    return _partition(FetchedOffset(index, error=ErrorCode.UNKNOWN_TOPIC_ID))


def _partition(entry: FetchedOffset) -> OffsetFetchResponsePartitions:
    return OffsetFetchResponsePartitions(
        partition_index=entry.partition,
        committed_offset=entry.offset,
        committed_leader_epoch=entry.leader_epoch,
        metadata=entry.metadata,
        error_code=entry.error,
    )


def _old_topic(fetched: tuple[str, FetchedPartitions]) -> OffsetFetchResponseTopic:
    name, entries = fetched
    return OffsetFetchResponseTopic(name=name, partitions=made(entries, _old_partition))


def _old_partition(entry: FetchedOffset) -> OffsetFetchResponsePartition:
    return OffsetFetchResponsePartition(
        partition_index=entry.partition,
        committed_offset=entry.offset,
        committed_leader_epoch=entry.leader_epoch,
        metadata=entry.metadata,
        error_code=entry.error,
    )


def _refused_single(group: OffsetFetchRequestGroup, error: ErrorCode, version: int) -> OffsetFetchResponse:
    if version >= GROUP_ERROR_FROM:
        return OffsetFetchResponse(error_code=error)
    return OffsetFetchResponse(
        topics=[
            OffsetFetchResponseTopic(
                name=topic.name,
                partitions=[
                    OffsetFetchResponsePartition(
                        partition_index=index, committed_offset=-1, metadata="", error_code=error
                    )
                    for index in topic.partition_indexes
                ],
            )
            for topic in group.topics or ()
        ]
    )
