"""Metadata (key 3, versions 0-13): brokers, topics and partition leaders; creates unknown topics if allowed.

As in Kafka, the answer for a new topic is UNKNOWN_TOPIC_OR_PARTITION, and clients retry at once. Topics requested by id
(from version 12 on) are never created. Topics are in the order of the request, or sorted by name for all topics.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Generator, Iterator
from functools import partial
from itertools import islice
from typing import Any

from tidelog.broker.apis import authorized_operations
from tidelog.broker.apis.error_counts import count_errors_in_steps
from tidelog.broker.apis.services import Services
from tidelog.broker.cluster.cluster_view import broker_endpoint, cluster_controller, offline_replicas, reachable_brokers
from tidelog.broker.cluster.metadata_answers import AnswerKey, EncodedAnswer
from tidelog.broker.network.request import Deferred, RequestContext
from tidelog.broker.scheduling.large_answers import AnswerInPieces
from tidelog.broker.scheduling.pieces import PIECE_ELEMENTS_MAX, WHOLE_BYTES_MAX
from tidelog.protocol.errors import ErrorCode, KafkaError
from tidelog.protocol.internal_topics import INTERNAL_TOPICS
from tidelog.protocol.messages.metadata import (
    MetadataRequest,
    MetadataResponse,
    MetadataResponseBroker,
    MetadataResponsePartition,
    MetadataResponseTopic,
)
from tidelog.protocol.uuids import ZERO_UUID
from tidelog.replication.controller.decisions.topic_names import topic_name_problem
from tidelog.replication.controller.metadata.image import (
    MetadataImage,
    PartitionImage,
    TopicImage,
)

REQUEST = MetadataRequest
COUNTED_ABOVE_BYTES = WHOLE_BYTES_MAX
ANSWERS_MAY_BE_LARGE = True

# The topics and partitions of an answer that is made in one turn of the loop; they take a millisecond or two.
AT_ONCE_MAX = 1000
TOPIC_IDS_FROM = 12
LISTENER_NOT_FOUND_FROM = 6
OPERATIONS_FROM = 8
CLUSTER_OPERATIONS_TO = 10

# How long an answer waits for a first unfenced broker: a broker that starts listens shortly before it is one.
FIRST_BROKER_S_MAX = 1.0
FIRST_BROKER_LOOK_S = 0.01

_Ids = tuple[int, ...]
_Look = tuple[ErrorCode, int, list[int], list[int], list[int]]
"""Error, leader, replicas, in-sync replicas, offline replicas."""
_Wait = Callable[[Callable[[], object]], None]
"""Calls back when the wait is over."""
_Response = MetadataResponse | EncodedAnswer


def handle(
    services: Services, context: RequestContext, request: MetadataRequest
) -> _Response | Deferred | Coroutine[Any, Any, _Response]:
    if context.api_version == 0 and not request.topics:
        request.topics = None  # version 0 has no null
    wait = _wait_for_leaders(services, context, request)
    if _is_large(services.image(), request):
        return _answer_in_pieces(services, context, request, wait)
    if wait is None:
        return _answer(services, context, request)
    answer = Deferred()
    complete = partial(_complete, answer, services, context, request)
    # Very many may wait for the same broker: they are answered as fast as requests that arrive.
    wait(partial(services.scheduler.wait, complete, is_first=False, for_records=False, host=context.client_host))
    return answer


async def _answer_in_pieces(
    services: Services, context: RequestContext, request: MetadataRequest, wait: _Wait | None
) -> _Response:
    """The response, computed with pauses in which other requests run."""
    if wait is not None:
        over = asyncio.Event()
        wait(over.set)
        await over.wait()
    async with AnswerInPieces(services.scheduler, context.connection) as answer:
        await answer.add_elements(PIECE_ELEMENTS_MAX)  # it is large: before it holds anything it waits for its turn
        steps = _shared(services, context, request)
        while True:
            try:
                elements = next(steps)
            except StopIteration as end:
                response: _Response = end.value
                return response
            if elements:
                await answer.add_elements(elements)
            else:
                await services.scheduler.pause()


def _topics(image: MetadataImage, request: MetadataRequest) -> Iterator[TopicImage | None]:
    """The requested topics; None for one that does not exist."""
    if request.topics is None:
        yield from image.topics_by_name.values()
        return
    for one in request.topics:
        yield image.topics_by_id.get(one.topic_id) if one.name is None else image.topics_by_name.get(one.name)


def _is_large(image: MetadataImage, request: MetadataRequest) -> bool:
    """Whether the answer has more than AT_ONCE_MAX topics and partitions."""
    count = 0
    for topic in _topics(image, request):
        count += 1 if topic is None else 1 + len(topic.partitions)
        if count > AT_ONCE_MAX:
            return True
    return False


def _leaders(image: MetadataImage, request: MetadataRequest) -> Iterator[int]:
    """The leaders of the requested partitions."""
    for topic in _topics(image, request):
        if topic is not None:
            yield from (partition.leader for partition in topic.partitions.values())


def _wait_for_leaders(services: Services, context: RequestContext, request: MetadataRequest) -> _Wait | None:
    """Waits until the outcome for the leaders that may be lost is known, or until a broker is there to be named.
    None if the answer need not wait.
    """
    lost_brokers, image = services.lost_brokers, services.image()
    if _names_nothing(services, context, request):
        return partial(_await_broker, services, context, request)
    if lost_brokers and lost_brokers.contains_any(_leaders(image, request)):
        return lost_brokers.when_resolved
    if request.topics:
        # So many partitions name all leaders that a client may ask for because it lost one.
        leaders = lost_brokers.unverified(islice(_leaders(image, request), AT_ONCE_MAX))
        if leaders:
            return partial(_try, services, request, leaders)
    return None


def _names_nothing(services: Services, context: RequestContext, request: MetadataRequest) -> bool:
    """Whether the answer would have neither topics nor brokers."""
    image = services.image()
    if request.topics or (request.topics is None and image.topics_by_name):
        return False
    return not reachable_brokers(image, context.listener_name, fenced=services.lost_brokers.recently_fenced())


def _await_broker(
    services: Services,
    context: RequestContext,
    request: MetadataRequest,
    then: Callable[[], object],
    pause_s: float = FIRST_BROKER_LOOK_S,
) -> None:
    """Wait until there is a broker to be named, FIRST_BROKER_S_MAX at most, with ever longer pauses between the looks.

    librdkafka's AdminClient asks no more after an answer that names none, and its call stands still. Kafka opens its
    ports when it is unfenced.
    """
    if pause_s > FIRST_BROKER_S_MAX / 2 or not _names_nothing(services, context, request):
        then()
    else:
        loop = asyncio.get_running_loop()
        loop.call_later(pause_s, _await_broker, services, context, request, then, 2 * pause_s)


def _try(services: Services, request: MetadataRequest, leaders: list[int], then: Callable[[], object]) -> None:
    """Try to connect to these leaders. If one refuses, wait until the outcome is known."""
    lost_brokers = services.lost_brokers

    def tried() -> None:
        if lost_brokers.contains_any(_leaders(services.image(), request)):
            lost_brokers.when_resolved(then)
        else:
            then()

    lost_brokers.probe_all(leaders, tried)


def _complete(answer: Deferred, services: Services, context: RequestContext, request: MetadataRequest) -> None:
    try:
        response: _Response | KafkaError = _answer(services, context, request)
    except KafkaError as error:
        response = error.with_traceback(None)
    except Exception as error:
        answer.failed(error)
        return
    answer.complete(response)


def _answer(services: Services, context: RequestContext, request: MetadataRequest) -> _Response:
    steps = _shared(services, context, request)
    while True:
        try:
            next(steps)
        except StopIteration as end:
            response: _Response = end.value
            return response


def _shared(services: Services, context: RequestContext, request: MetadataRequest) -> Generator[int, None, _Response]:
    """Answer as `_answering` does. An answer with all topics is encoded here, and kept for the next clients.

    Each step yields the elements that it has added to the answer. A step that encodes yields 0.
    """
    if request.topics is not None:
        return (yield from _answering(services, context, request))
    key = _key(services, context, request)
    answer = services.metadata_answers.find(key)
    if answer is None:
        response = yield from _answering(services, context, request)
        is_current = key == _key(services, context, request)
        errors: dict[int, int] = {}
        for _ in count_errors_in_steps(response, errors):
            yield 0
        body = bytearray()
        for _ in response.write_in_steps(body, context.api_version):
            yield 0
        answer = EncodedAnswer(bytes(body), errors)
        if is_current:
            services.metadata_answers.keep(key, answer)
    counters = services.requests.of("Metadata", MetadataRequest.VERSIONS)
    for code, times in answer.errors.items():
        counters.failed(code, times)
    return answer


def _key(services: Services, context: RequestContext, request: MetadataRequest) -> AnswerKey:
    image = services.image()
    return AnswerKey(
        offset=image.offset,
        epoch=image.epoch,
        controller_id=cluster_controller(image, services.node_id, services.quorum_leader_id()),
        recently_fenced=frozenset(services.lost_brokers.recently_fenced()),
        listener_name=context.listener_name,
        version=context.api_version,
        has_topic_operations=request.include_topic_authorized_operations,
        has_cluster_operations=request.include_cluster_authorized_operations,
    )


def _answering(
    services: Services, context: RequestContext, request: MetadataRequest
) -> Generator[int, None, MetadataResponse]:
    """Compute the response in steps, and yield the number of topics and partitions of each. All steps use the image of
    the first one.
    """
    version = context.api_version
    image = services.image()
    if request.topics is None:
        view = _View(image, context)
        topics = []
        for _, topic in sorted(image.topics_by_name.items()):
            topics.append((yield from view.known(topic)))
    else:
        topics = yield from _requested(services, context, request, image)
    if version >= OPERATIONS_FROM and request.include_topic_authorized_operations:
        for answered in topics:
            answered.topic_authorized_operations = authorized_operations.TOPIC
    response = MetadataResponse(
        brokers=_brokers(services, context, image, has_topics=bool(topics)),
        cluster_id=services.cluster_id,
        controller_id=cluster_controller(image, services.node_id, services.quorum_leader_id()),
        topics=topics,
    )
    if OPERATIONS_FROM <= version <= CLUSTER_OPERATIONS_TO and request.include_cluster_authorized_operations:
        response.cluster_authorized_operations = authorized_operations.CLUSTER
    return response


def _brokers(
    services: Services, context: RequestContext, image: MetadataImage, *, has_topics: bool
) -> list[MetadataResponseBroker]:
    """The unfenced and the recently fenced brokers. If there are none, all registered brokers.

    librdkafka trusts an answer with topics and without brokers, and drops all its addresses, even its bootstrap
    servers. Java clients ignore such an answer. Both retry after an answer without brokers and topics.
    """
    listener = context.listener_name
    brokers = reachable_brokers(image, listener, fenced=services.lost_brokers.recently_fenced())
    if not brokers and has_topics:
        brokers = reachable_brokers(image, listener, include_fenced=True)
    return [
        MetadataResponseBroker(node_id=broker.node_id, host=endpoint.host, port=endpoint.port, rack=broker.rack)
        for broker, endpoint in brokers
    ]


def _requested(
    services: Services, context: RequestContext, request: MetadataRequest, image: MetadataImage
) -> Generator[int, None, list[MetadataResponseTopic]]:
    assert request.topics is not None
    if context.api_version < TOPIC_IDS_FROM:
        for entry in request.topics:
            if entry.name is None:
                message = f"Topic name can not be null for version {context.api_version}"
                raise KafkaError(ErrorCode.INVALID_REQUEST, message)
            if entry.topic_id != ZERO_UUID:
                message = f"Topic IDs are not supported in requests for version {context.api_version}"
                raise KafkaError(ErrorCode.INVALID_REQUEST, message)
    view = _View(image, context)
    ids = dict.fromkeys(entry.topic_id for entry in request.topics if entry.topic_id != ZERO_UUID)
    topics: list[MetadataResponseTopic] = []
    if ids:
        for topic_id in ids:
            answered = yield from view.by_id(topic_id)
            topics.append(answered)
        return topics
    missing: list[str] = []
    for name in dict.fromkeys(entry.name for entry in request.topics if entry.name is not None):
        topic = image.topics_by_name.get(name)
        if topic is not None:
            topics.append((yield from view.known(topic)))
            continue
        yield 1
        if topic_name_problem(name) is None:
            missing.append(name)
            error = ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
        else:
            error = ErrorCode.INVALID_TOPIC_EXCEPTION
        topics.append(MetadataResponseTopic(error_code=error, name=name, is_internal=name in INTERNAL_TOPICS))
    if missing and request.allow_auto_topic_creation and services.config.flag("auto.create.topics.enable"):
        services.topic_creation.start(missing)
    return topics


class _View:
    """The content of one answer. Most partitions have the same leader and replicas as others, so each combination is
    computed once.
    """

    def __init__(self, image: MetadataImage, context: RequestContext) -> None:
        self._image = image
        self._version, self._listener = context.api_version, context.listener_name
        self._looks: dict[tuple[int, _Ids, _Ids, tuple[bytes, ...]], _Look] = {}

    def by_id(self, topic_id: bytes) -> Generator[int, None, MetadataResponseTopic]:
        topic = self._image.topics_by_id.get(topic_id)
        if topic is not None:
            return (yield from self.known(topic))
        yield 1
        return MetadataResponseTopic(error_code=ErrorCode.UNKNOWN_TOPIC_ID, name=None, topic_id=topic_id)

    def known(self, topic: TopicImage) -> Generator[int, None, MetadataResponseTopic]:
        partitions: list[MetadataResponsePartition] = []
        in_order = sorted(topic.partitions)
        for start in range(0, len(in_order), PIECE_ELEMENTS_MAX):
            piece = in_order[start : start + PIECE_ELEMENTS_MAX]
            partitions += [self._partition(index, topic.partitions[index]) for index in piece]
            yield 1 + len(piece)
        return MetadataResponseTopic(
            name=topic.name, topic_id=topic.topic_id, is_internal=topic.is_internal, partitions=partitions
        )

    def _partition(self, index: int, partition: PartitionImage) -> MetadataResponsePartition:
        key = (partition.leader, partition.replicas, partition.isr, partition.directories)
        look = self._looks.get(key)
        if look is None:
            look = self._looks[key] = self._look(partition)
        error, leader, replicas, isr, offline = look
        return MetadataResponsePartition(
            error_code=error,
            partition_index=index,
            leader_id=leader,
            leader_epoch=partition.leader_epoch,
            replica_nodes=replicas,
            isr_nodes=isr,
            offline_replicas=offline,
        )

    def _look(self, partition: PartitionImage) -> _Look:
        image, version = self._image, self._version
        offline = offline_replicas(image, partition, self._listener)
        leader = partition.leader
        error = ErrorCode.NONE
        if broker_endpoint(image, leader, self._listener) is None:
            leader_is_up = leader in image.brokers and not image.brokers[leader].fenced
            leader = -1
            error = ErrorCode.LEADER_NOT_AVAILABLE
            if leader_is_up and version >= LISTENER_NOT_FOUND_FROM:
                error = ErrorCode.LISTENER_NOT_FOUND
        elif version == 0 and offline:
            # Version 0 has no field for offline replicas: they are omitted, and the partition has an error.
            error = ErrorCode.REPLICA_NOT_AVAILABLE
        replicas, isr = list(partition.replicas), list(partition.isr)
        if version == 0:
            replicas = [replica for replica in replicas if replica not in offline]
            isr = [replica for replica in isr if replica not in offline]
        return error, leader, replicas, isr, offline


def refuse(request: MetadataRequest, error: KafkaError, version: int) -> MetadataResponse:
    topics = [
        MetadataResponseTopic(
            error_code=error.code,
            name=topic.name if topic.name is not None or version >= TOPIC_IDS_FROM else "",
            topic_id=topic.topic_id,
        )
        for topic in request.topics or ()
    ]
    return MetadataResponse(topics=topics, error_code=error.code)
