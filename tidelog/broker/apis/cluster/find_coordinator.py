"""FindCoordinator (key 10, versions 0-6): the coordinator of a group or a transactional id.

From version 4 on a request has several keys. `__consumer_offsets` and `__transaction_state` are created on demand.
Deviation: the answer waits for that creation; Kafka answers COORDINATOR_NOT_AVAILABLE, and the client retries. Share
groups have no coordinator yet.
"""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any

from tidelog.broker.apis.services import Services
from tidelog.broker.cluster.cluster_view import broker_endpoint
from tidelog.broker.network.request import RequestContext
from tidelog.broker.scheduling.pieces import Arrays
from tidelog.protocol.errors import ErrorCode, KafkaError
from tidelog.protocol.internal_topics import OFFSETS_TOPIC, TRANSACTIONS_TOPIC
from tidelog.protocol.messages.find_coordinator import Coordinator, FindCoordinatorRequest, FindCoordinatorResponse

REQUEST = FindCoordinatorRequest
# A long key takes half a millisecond: its hash chooses the partition.
IN_PIECES = Arrays("coordinator_keys", "coordinators", piece_elements=25)

GROUP_KEY = 0
TRANSACTION_KEY = 1
MANY_KEYS_FROM = 4
TOPICS = {GROUP_KEY: OFFSETS_TOPIC, TRANSACTION_KEY: TRANSACTIONS_TOPIC}

_MESSAGES = {int(ErrorCode.COORDINATOR_NOT_AVAILABLE): "The coordinator is not available."}


def handle(
    services: Services, context: RequestContext, request: FindCoordinatorRequest
) -> FindCoordinatorResponse | Coroutine[Any, Any, FindCoordinatorResponse]:
    topic = TOPICS.get(request.key_type)
    if topic is not None and topic not in services.image().topics_by_name:
        return _after_creation(services, context, request, topic)
    return _answer(services, context, request)


async def _after_creation(
    services: Services, context: RequestContext, request: FindCoordinatorRequest, topic: str
) -> FindCoordinatorResponse:
    try:
        await services.topic_creation.ensure(topic)
    except KafkaError:
        pass  # the creation logs the error; the answer is COORDINATOR_NOT_AVAILABLE
    return _answer(services, context, request)


def _answer(services: Services, context: RequestContext, request: FindCoordinatorRequest) -> FindCoordinatorResponse:
    if context.api_version >= MANY_KEYS_FROM:
        keys = request.coordinator_keys
        return FindCoordinatorResponse(coordinators=[_find(services, context, request.key_type, key) for key in keys])
    coordinator = _find(services, context, request.key_type, request.key)
    return FindCoordinatorResponse(
        error_code=coordinator.error_code,
        error_message=coordinator.error_message
        or _MESSAGES.get(coordinator.error_code, ErrorCode(coordinator.error_code).name),
        node_id=coordinator.node_id,
        host=coordinator.host,
        port=coordinator.port,
    )


def _find(services: Services, context: RequestContext, key_type: int, key: str) -> Coordinator:
    topic = TOPICS.get(key_type)
    if topic is None:
        return _no_coordinator(key, ErrorCode.INVALID_REQUEST)
    image = services.image()
    coordinator = services.groups if key_type == GROUP_KEY else services.transactions
    partition = image.partition(topic, coordinator.partition_for(key))
    if partition is None:
        return _no_coordinator(key, ErrorCode.COORDINATOR_NOT_AVAILABLE)
    endpoint = broker_endpoint(image, partition.leader, context.listener_name)
    if endpoint is None:
        return _no_coordinator(key, ErrorCode.COORDINATOR_NOT_AVAILABLE)
    return Coordinator(key=key, node_id=partition.leader, host=endpoint.host, port=endpoint.port)


def _no_coordinator(key: str, error: ErrorCode) -> Coordinator:
    return Coordinator(key=key, node_id=-1, host="", port=-1, error_code=error, error_message=None)


def refuse(request: FindCoordinatorRequest, error: KafkaError, version: int) -> FindCoordinatorResponse:
    if version >= MANY_KEYS_FROM:
        return FindCoordinatorResponse(
            coordinators=[_no_coordinator(key, error.code) for key in request.coordinator_keys]
        )
    return FindCoordinatorResponse(error_code=error.code, error_message=error.message, node_id=-1, port=-1)
