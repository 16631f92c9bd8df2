"""OffsetFetch (key 9, versions 1-10): the committed offsets of groups.

A request has one group up to version 7, several from version 8 on. The coordinator of the group's partition answers for
each. From version 10 on topics have ids. A null list of topics means all topics. A partition without a committed offset
gets offset -1 and no error.

Invariant: a topic gets no offset of a former topic of its name, also where it is asked for by its name. The image of a
group's coordinator is never older than those with which the group's offsets were committed: each coordinator learned
from its image that it leads, and that it leads no more. Kafka compares ids from version 10 on.
"""

from __future__ import annotations

from functools import partial

from tidelog.broker.apis.repeats import check_repeats
from tidelog.broker.apis.services import Services
from tidelog.broker.coordinators.group.offsets import (
    FetchedOffset,
    FetchedTopics,
    RequestedTopics,
    is_of_another_topic,
)
from tidelog.broker.network.request import Deferred, RequestContext, gather
from tidelog.broker.scheduling.pieces import ID_CHARACTERS, Arrays
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
    count = 0
    for group in response.groups:
        count += len(group.group_id) // ID_CHARACTERS
        for topic in group.topics:
            count += len(topic.partitions)
    return count


IN_PIECES = Arrays("groups", "groups", response_elements=_size)


def check(request: OffsetFetchRequest) -> None:
    check_repeats(group.group_id for group in request.groups)


def handle(services: Services, context: RequestContext, request: OffsetFetchRequest) -> OffsetFetchResponse | Deferred:
    answer = _Answer(services.image(), context.api_version, request)
    check_repeats(group.group_id for group in answer.groups)
    fetch = services.groups.fetch_offsets
    return gather(
        [partial(fetch, group.group_id, answer.known_topics(group), request.require_stable) for group in answer.groups],
        answer.response,
    )


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
            topic_id = self._id_of(name)
            kept = [entry for entry in entries if not is_of_another_topic(entry.topic_id, topic_id)]
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
        return OffsetFetchResponse(
            topics=[
                OffsetFetchResponseTopic(
                    name=name,
                    partitions=[
                        OffsetFetchResponsePartition(
                            partition_index=entry.partition,
                            committed_offset=entry.offset,
                            committed_leader_epoch=entry.leader_epoch,
                            metadata=entry.metadata,
                            error_code=entry.error,
                        )
                        for entry in entries
                    ],
                )
                for name, entries in outcome
            ]
        )

    def _group(self, group: OffsetFetchRequestGroup, outcome: TopicsOrError) -> OffsetFetchResponseGroup:
        if isinstance(outcome, KafkaError):
            return OffsetFetchResponseGroup(group_id=group.group_id, error_code=outcome.code)
        by_name = self._image.topics_by_name
        topics: list[OffsetFetchResponseTopics] = []
        for name, entries in outcome:
            topic = by_name.get(name)
            if topic is None and self._version >= TOPIC_IDS_FROM:
                continue  # the topic is deleted, so it has no id, and this version has no names
            topic_id = NO_TOPIC_ID if topic is None else topic.topic_id
            topics.append(_topic(name, topic_id, entries))
        if self._version >= TOPIC_IDS_FROM:
            for entry in group.topics or ():
                if entry.topic_id not in self._image.topics_by_id:
                    unknown = [
                        FetchedOffset(index, error=ErrorCode.UNKNOWN_TOPIC_ID) for index in entry.partition_indexes
                    ]
                    topics.append(_topic("", entry.topic_id, unknown))
        return OffsetFetchResponseGroup(group_id=group.group_id, topics=topics)


def _groups(request: OffsetFetchRequest, version: int) -> list[OffsetFetchRequestGroup]:
    """The groups of the request, in the form of version 8 and later."""
    if version >= MANY_GROUPS_FROM:
        return request.groups
    topics = request.topics
    requested = None
    if topics is not None:
        requested = [
            OffsetFetchRequestTopics(name=topic.name, partition_indexes=topic.partition_indexes) for topic in topics
        ]
    return [OffsetFetchRequestGroup(group_id=request.group_id, topics=requested)]


def _topic(name: str, topic_id: bytes, entries: list[FetchedOffset]) -> OffsetFetchResponseTopics:
    return OffsetFetchResponseTopics(
        name=name,
        topic_id=topic_id,
        partitions=[
            OffsetFetchResponsePartitions(
                partition_index=entry.partition,
                committed_offset=entry.offset,
                committed_leader_epoch=entry.leader_epoch,
                metadata=entry.metadata,
                error_code=entry.error,
            )
            for entry in entries
        ],
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
