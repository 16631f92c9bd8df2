"""FindCoordinator (key 10, versions 0-6): the broker that coordinates a group; from version 4 on for many keys at once.

`__consumer_offsets` is created on demand. Deviation: the answer waits for that creation, where Kafka answers
COORDINATOR_NOT_AVAILABLE and lets the client ask again. Transactions and share groups have no coordinator here yet: a
transactional id is refused in a way that every stock client takes as final (`NO_TRANSACTIONS`).
"""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any

from tidelog.broker.apis.records.init_producer_id import NO_TRANSACTIONS
from tidelog.broker.apis.services import Services
from tidelog.broker.cluster.cluster_view import broker_endpoint
from tidelog.broker.cluster.topic_creation import GROUP_TOPIC
from tidelog.broker.network.request import RequestContext
from tidelog.broker.scheduling.pieces import Arrays
from tidelog.protocol.errors import ErrorCode, KafkaError
from tidelog.protocol.messages.find_coordinator import Coordinator, FindCoordinatorRequest, FindCoordinatorResponse

REQUEST = FindCoordinatorRequest
IN_PIECES = Arrays("coordinator_keys", "coordinators")

GROUP_KEY = 0
TRANSACTION_KEY = 1
MANY_KEYS_FROM = 4

_MESSAGES = {int(ErrorCode.COORDINATOR_NOT_AVAILABLE): "The coordinator is not available."}


def handle(
    services: Services, context: RequestContext, request: FindCoordinatorRequest
) -> FindCoordinatorResponse | Coroutine[Any, Any, FindCoordinatorResponse]:
    if request.key_type == GROUP_KEY and GROUP_TOPIC not in services.image().topics_by_name:
        return _after_creation(services, context, request)
    return _answer(services, context, request)


async def _after_creation(
    services: Services, context: RequestContext, request: FindCoordinatorRequest
) -> FindCoordinatorResponse:
    try:
        await services.topic_creation.ensure(GROUP_TOPIC)
    except KafkaError:
        pass  # logged there; the client is told below that there is no coordinator
    return _answer(services, context, request)


def _answer(services: Services, context: RequestContext, request: FindCoordinatorRequest) -> FindCoordinatorResponse:
    if context.api_version >= MANY_KEYS_FROM:
        keys = request.coordinator_keys
        return FindCoordinatorResponse(coordinators=[_find(services, context, request.key_type, key) for key in keys])
    found = _find(services, context, request.key_type, request.key)
    return FindCoordinatorResponse(
        error_code=found.error_code,
        error_message=found.error_message or _MESSAGES.get(found.error_code, ErrorCode(found.error_code).name),
        node_id=found.node_id,
        host=found.host,
        port=found.port,
    )


def _find(services: Services, context: RequestContext, key_type: int, key: str) -> Coordinator:
    if key_type == TRANSACTION_KEY:
        return _nobody(key, NO_TRANSACTIONS.code, NO_TRANSACTIONS.message)
    if key_type != GROUP_KEY:
        return _nobody(key, ErrorCode.INVALID_REQUEST)
    image = services.image()
    partition = image.partition(GROUP_TOPIC, services.groups.partition_for(key))
    if partition is None:
        return _nobody(key, ErrorCode.COORDINATOR_NOT_AVAILABLE)
    endpoint = broker_endpoint(image, partition.leader, context.listener_name)
    if endpoint is None:
        return _nobody(key, ErrorCode.COORDINATOR_NOT_AVAILABLE)
    return Coordinator(key=key, node_id=partition.leader, host=endpoint.host, port=endpoint.port)


def _nobody(key: str, error: ErrorCode, message: str | None = None) -> Coordinator:
    return Coordinator(key=key, node_id=-1, host="", port=-1, error_code=error, error_message=message)


def refuse(request: FindCoordinatorRequest, error: KafkaError, version: int) -> FindCoordinatorResponse:
    if version >= MANY_KEYS_FROM:
        return FindCoordinatorResponse(coordinators=[_nobody(key, error.code) for key in request.coordinator_keys])
    return FindCoordinatorResponse(error_code=error.code, error_message=error.message, node_id=-1, port=-1)
