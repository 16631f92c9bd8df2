"""The common part of AlterConfigs and IncrementalAlterConfigs: checks on the broker, then the controller's decision.

A client sends the request to any broker. The broker checks its own configs and its loggers, and the form of all other
changes. Then the active controller decides and writes (Kafka's `ConfigAdminManager`). For a request on a controller's
listener or in an envelope, the controller checks all, except loggers, which every node has.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from tidelog.broker.apis.cluster_roles import at_controller, controller
from tidelog.broker.apis.services import Services
from tidelog.broker.config import logger_levels
from tidelog.broker.config.definition_types import LIST
from tidelog.broker.config.definitions import BROKER
from tidelog.broker.config.validation import broker_change_problem
from tidelog.broker.network.request import RequestContext
from tidelog.broker.scheduling.pieces import PIECE_ELEMENTS_MAX
from tidelog.protocol.api import ApiKey
from tidelog.protocol.errors import ErrorCode, KafkaError
from tidelog.protocol.java_text import parse_integer
from tidelog.replication.controller.decisions.config_changes import Operation, check_length, list_after
from tidelog.replication.controller.metadata.image import (
    BROKER_LOGGER_RESOURCE,
    BROKER_RESOURCE,
    CLIENT_METRICS_RESOURCE,
    GROUP_RESOURCE,
    TOPIC_RESOURCE,
)

_FOR_THE_CONTROLLER: Final = (TOPIC_RESOURCE, CLIENT_METRICS_RESOURCE, GROUP_RESOURCE)

# Several times the number of known keys, because brokers accept unknown keys.
CONFIGS_MAX: Final = 1000

# Characters of the values that are judged at once; a single resource may have more.
PIECE_CHARACTERS_MAX: Final = 65_536

Key = tuple[int, str]


async def alter(services: Services, context: RequestContext, request: Any, answer: type[Any]) -> list[Any]:
    """One `answer` message per resource, in the request's order. `request`: a request of either API.

    Resources are changed separately, so for a large request some are decided before others are checked.
    """
    from_client = bool(context.listener_name) and not at_controller(services, context)
    times = Counter((each.resource_type, each.resource_name) for each in request.resources)
    settled: dict[Key, KafkaError | None] = {}
    for number, resource in enumerate(request.resources, 1):
        if number % PIECE_ELEMENTS_MAX == 0:
            await services.scheduler.pause()
        key = resource.resource_type, resource.resource_name
        try:
            if len(resource.configs) > CONFIGS_MAX:
                raise _invalid(f"More than {CONFIGS_MAX} configs of one resource")
            if from_client:
                _check(services, request, resource, times[key])
            elif times[key] > 1:
                raise _invalid("Duplicate resource.")
            if _is_of_logger(request, resource):
                logger_levels.alter(services.node_id, resource, validate_only=request.validate_only)
                settled[key] = None
        except KafkaError as error:
            settled[key] = error.with_traceback(None)
    resources = [each for each in request.resources if (each.resource_type, each.resource_name) not in settled]
    by_key: dict[Key, Any] = {}
    for piece in _pieces(services, resources):
        if by_key:
            await services.scheduler.pause()
        answers = await _decided(services, context, request, piece)
        by_key |= {(each.resource_type, each.resource_name): each for each in answers}
    return [
        _answer(resource, settled[key], answer) if key in settled else by_key[key]
        for resource in request.resources
        for key in [(resource.resource_type, resource.resource_name)]
    ]


def _pieces(services: Services, resources: Sequence[Any]) -> Iterator[list[Any]]:
    """The resources in pieces that are decided at once. All configs of a resource are judged, also those that stay."""
    present = services.image().configs
    piece: list[Any] = []
    characters = 0
    for resource in resources:
        values = [each.value or "" for each in resource.configs]
        values += present.get((resource.resource_type, resource.resource_name), {}).values()
        size = sum(map(len, values))
        if piece and (len(piece) == PIECE_ELEMENTS_MAX or characters + size > PIECE_CHARACTERS_MAX):
            yield piece
            piece, characters = [], 0
        piece.append(resource)
        characters += size
    if piece:
        yield piece


async def _decided(
    services: Services, context: RequestContext, request: Any, resources: Sequence[Any]
) -> Sequence[Any]:
    rest = type(request)(resources=resources, validate_only=request.validate_only)
    channel = services.controller_channel
    is_forwarded = not context.listener_name
    response: Any = None
    if is_forwarded or channel.is_local():
        try:
            active = controller(services)
            incremental = request.API_KEY == ApiKey.INCREMENTAL_ALTER_CONFIGS
            response = await (active.incremental_alter_configs(rest) if incremental else active.alter_configs(rest))
        except KafkaError as error:
            # Where this node has lost the lead meanwhile, the next controller decides, as for all other requests.
            if error.code != ErrorCode.NOT_CONTROLLER or is_forwarded:
                raise
    if response is None:
        response = await channel.forward_message(rest, context.api_version, context.client_host)
    return response.responses  # type: ignore[no-any-return]


def _check(services: Services, request: Any, resource: Any, times: int) -> None:
    """Raises KafkaError for errors that this node can detect without the controller."""
    if times > 1:
        raise _invalid("Each resource must appear at most once.")
    names = [config.name for config in resource.configs]
    if len(set(names)) < len(names):
        raise _invalid("Error due to duplicate config keys")
    without_value = [
        each.name for each in resource.configs if each.value is None and _operation(each) != Operation.DELETE
    ]
    if without_value:
        raise _invalid(f"Null value not supported for : {', '.join(without_value)}")
    kind, name = resource.resource_type, resource.resource_name
    if kind == BROKER_RESOURCE:
        if name:
            _check_own_id(services, name)
        for each in resource.configs:
            if _operation(each) != Operation.DELETE:
                check_length(each.value)
        after = _applied(services, request, resource)
        problem = broker_change_problem(services.settings, not name, after)
        if problem is not None:
            raise _invalid(problem)
    elif _is_of_logger(request, resource):
        return
    elif kind not in _FOR_THE_CONTROLLER:
        raise _invalid(f"Unknown resource type {kind}")


def _is_of_logger(request: Any, resource: Any) -> bool:
    """Levels of loggers; AlterConfigs does not know them."""
    kind: int = resource.resource_type
    return kind == BROKER_LOGGER_RESOURCE and bool(request.API_KEY == ApiKey.INCREMENTAL_ALTER_CONFIGS)


def _check_own_id(services: Services, name: str) -> None:
    try:
        is_own = parse_integer(name) == services.node_id
    except ValueError:
        raise _invalid(f"Node id must be an integer, but it is: {name}") from None
    if not is_own:
        raise _invalid(f"Unexpected broker id, expected {services.node_id}, but received {name}")


def _applied(services: Services, request: Any, resource: Any) -> Mapping[str, str]:
    """The dynamic configs of this broker, or of all brokers, after the change."""
    if request.API_KEY == ApiKey.ALTER_CONFIGS:
        return {each.name: each.value for each in resource.configs}
    own, cluster = services.settings.layers
    after = dict(own if resource.resource_name else cluster)
    for each in resource.configs:
        operation = _operation(each)
        if operation == Operation.SET:
            after[each.name] = each.value
        elif operation == Operation.DELETE:
            after.pop(each.name, None)
        elif operation in (Operation.APPEND, Operation.SUBTRACT):
            after[each.name] = _list_after(each.name, operation, each.value, after.get(each.name))
        else:
            raise _invalid(f"Unknown operations type {operation}")
    return after


def _list_after(name: str, operation: int, value: str, present: str | None) -> str:
    definition = BROKER.get(name)
    if definition is None:
        raise KafkaError(ErrorCode.INVALID_CONFIG, f"Unknown config name: {name}")
    if definition.type != LIST:
        verb = "append" if operation == Operation.APPEND else "subtract"
        raise KafkaError(ErrorCode.INVALID_CONFIG, f"Config value {verb} is not allowed for config key: {name}")
    return list_after(operation, value, definition.default if present is None else present)


def _operation(config: Any) -> int:
    return int(getattr(config, "config_operation", Operation.SET))


def _invalid(message: str) -> KafkaError:
    return KafkaError(ErrorCode.INVALID_REQUEST, message)


def _answer(resource: Any, error: KafkaError | None, answer: type[Any]) -> Any:
    return answer(
        error_code=error.code if error is not None else ErrorCode.NONE,
        error_message=error.message if error is not None else None,
        resource_type=resource.resource_type,
        resource_name=resource.resource_name,
    )


def refusal(resource: Any, error: KafkaError, answer: type[Any]) -> Any:
    return _answer(resource, error, answer)
