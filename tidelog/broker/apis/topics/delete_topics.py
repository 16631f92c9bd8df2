"""DeleteTopics (key 20, versions 1-6): deletes topics by name, from version 6 on also by id.

Deviation: results are in the order of the request. Kafka shuffles them to hide topics that a client may not see.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Iterable
from typing import Final, TypeVar

from tidelog.broker.apis.cluster_roles import check_time, controller
from tidelog.broker.apis.services import Services
from tidelog.broker.cluster.cluster_view import NO_SUCH_TOPIC, NO_SUCH_TOPIC_ID
from tidelog.broker.network.request import RequestContext
from tidelog.protocol.errors import ErrorCode, KafkaError
from tidelog.protocol.messages.delete_topics import (
    DeletableTopicResult,
    DeleteTopicsRequest,
    DeleteTopicsResponse,
    DeleteTopicState,
)
from tidelog.protocol.uuids import ZERO_UUID

REQUEST = DeleteTopicsRequest

DISABLED_CODE_FROM = 3
# The topics of a request that are looked up in one turn of the loop.
TOPICS_AT_ONCE: Final = 1_000

T = TypeVar("T")


async def handle(services: Services, context: RequestContext, request: DeleteTopicsRequest) -> DeleteTopicsResponse:
    if not services.config.flag("delete.topic.enable"):
        if context.api_version < DISABLED_CODE_FROM:
            raise KafkaError(ErrorCode.INVALID_REQUEST, "Topic deletion is disabled.")
        raise KafkaError(ErrorCode.TOPIC_DELETION_DISABLED, "Topic deletion is disabled.")
    states = _states(request)
    if 1 in Counter((state.name, state.topic_id) for state in states if _is_valid(state)).values():
        check_time(request.timeout_ms)
    results, names_by_id = await _resolve(services, states)
    errors = await controller(services).delete_topics(list(names_by_id), timeout_ms=request.timeout_ms)
    for topic_id, name in names_by_id.items():
        error = errors[topic_id]
        results.append(_result(name, topic_id, error) if error else DeletableTopicResult(name=name, topic_id=topic_id))
    return DeleteTopicsResponse(responses=results)


def _states(request: DeleteTopicsRequest) -> list[DeleteTopicState]:
    return request.topics or [DeleteTopicState(name=name, topic_id=ZERO_UUID) for name in request.topic_names]


def _is_valid(state: DeleteTopicState) -> bool:
    """Whether it has either a name or an id."""
    return (state.name is None) != (state.topic_id == ZERO_UUID)


async def _resolve(
    services: Services, states: list[DeleteTopicState]
) -> tuple[list[DeletableTopicResult], dict[bytes, str]]:
    """(the results of topics that cannot be deleted, topic id -> name of the others)."""
    image = services.image()
    names: Counter[str] = Counter()
    ids: Counter[bytes] = Counter()
    results: list[DeletableTopicResult] = []
    async for state in _in_turns(services, states):
        name, topic_id = state.name, state.topic_id
        if name is not None and topic_id != ZERO_UUID:
            results.append(_invalid(name, topic_id, "You may not specify both topic name and topic id."))
        elif name is not None:
            names[name] += 1
        elif topic_id != ZERO_UUID:
            ids[topic_id] += 1
        else:
            results.append(_invalid(None, ZERO_UUID, "Neither topic name nor id were specified."))
    names_by_id: dict[bytes, str] = {}
    async for topic_id, times in _in_turns(services, ids.items()):
        topic = image.topics_by_id.get(topic_id)
        if times > 1:
            results.append(_invalid(None, topic_id, "Duplicate topic id."))
        elif topic is None:
            results.append(_result(None, topic_id, KafkaError(ErrorCode.UNKNOWN_TOPIC_ID, NO_SUCH_TOPIC_ID)))
        else:
            names_by_id[topic_id] = topic.name
    async for name, times in _in_turns(services, names.items()):
        topic = image.topics_by_name.get(name)
        if times > 1:
            results.append(_invalid(name, ZERO_UUID, "Duplicate topic name."))
        elif topic is None:
            results.append(_result(name, ZERO_UUID, KafkaError(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, NO_SUCH_TOPIC)))
        elif topic.topic_id in ids:
            names_by_id.pop(topic.topic_id, None)
            message = "The provided topic name maps to an ID that was already supplied."
            results.append(_invalid(name, topic.topic_id, message))
        else:
            names_by_id[topic.topic_id] = name
    return results, names_by_id


async def _in_turns(services: Services, elements: Iterable[T]) -> AsyncIterator[T]:
    """The elements, TOPICS_AT_ONCE in a turn of the loop."""
    for number, element in enumerate(elements, 1):
        yield element
        if number % TOPICS_AT_ONCE == 0:
            await services.scheduler.pause()


def _invalid(name: str | None, topic_id: bytes, message: str) -> DeletableTopicResult:
    return _result(name, topic_id, KafkaError(ErrorCode.INVALID_REQUEST, message))


def _result(name: str | None, topic_id: bytes, error: KafkaError) -> DeletableTopicResult:
    return DeletableTopicResult(name=name, topic_id=topic_id, error_code=error.code, error_message=error.message)


def refuse(request: DeleteTopicsRequest, error: KafkaError, version: int) -> DeleteTopicsResponse:
    return DeleteTopicsResponse(responses=[_result(state.name, state.topic_id, error) for state in _states(request)])
