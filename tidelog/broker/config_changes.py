"""What AlterConfigs and IncrementalAlterConfigs have in common: what is refused at once. Pure.

Kafka's `ConfigAdminManager` does this on the broker before it forwards; whether a value is allowed is the controller's
to say. Deviations: any broker takes the configs of any broker (Kafka: only its own), and loggers' levels are not set.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Final

from tidelog.protocol.errors import ErrorCode, KafkaError
from tidelog.replication.controller.image import (
    BROKER_LOGGER_RESOURCE,
    BROKER_RESOURCE,
    CLIENT_METRICS_RESOURCE,
    GROUP_RESOURCE,
    TOPIC_RESOURCE,
)

SET, DELETE, APPEND, SUBTRACT = range(4)

_RESOURCES: Final = (TOPIC_RESOURCE, BROKER_RESOURCE, CLIENT_METRICS_RESOURCE, GROUP_RESOURCE)

Key = tuple[int, str]


def refused(resources: Sequence[Any]) -> dict[Key, KafkaError]:
    """Resources, by type and name, that need not be asked for. `resources`: of either request."""
    times = Counter((resource.resource_type, resource.resource_name) for resource in resources)
    problems: dict[Key, KafkaError] = {}
    for resource in resources:
        key = resource.resource_type, resource.resource_name
        problem = "Each resource must appear at most once." if times[key] > 1 else _problem(resource)
        if problem is not None:
            problems[key] = KafkaError(ErrorCode.INVALID_REQUEST, problem)
    return problems


def _problem(resource: Any) -> str | None:
    names = [config.name for config in resource.configs]
    if len(set(names)) < len(names):
        return "Error due to duplicate config keys"
    without_value = [
        config.name
        for config in resource.configs
        if config.value is None and getattr(config, "config_operation", SET) != DELETE
    ]
    if without_value:
        return f"Null value not supported for : {', '.join(without_value)}"
    if resource.resource_type == BROKER_LOGGER_RESOURCE:
        return "The levels of loggers cannot be changed while the broker runs."
    if resource.resource_type == TOPIC_RESOURCE and not resource.resource_name:
        return "Default topic resources are not allowed."
    if resource.resource_type == BROKER_RESOURCE and resource.resource_name and not _is_int(resource.resource_name):
        return f"Node id must be an integer, but it is: {resource.resource_name}"
    if resource.resource_type not in _RESOURCES:
        return f"Unknown resource type {resource.resource_type}"
    return None


def _is_int(text: str) -> bool:
    try:
        int(text)
    except ValueError:
        return False
    return True


def in_order(
    resources: Sequence[Any], problems: Mapping[Key, KafkaError], answers: Sequence[Any], answer: type[Any]
) -> list[Any]:
    """One `answer` message per resource, in the request's order. `answers`: the controller's."""
    by_key = {(each.resource_type, each.resource_name): each for each in answers}
    for each in answers:
        if each.resource_type == BROKER_RESOURCE and each.error_code == ErrorCode.INVALID_CONFIG:
            each.error_code = ErrorCode.INVALID_REQUEST  # what Kafka's brokers say of their own configs
    results: list[Any] = []
    for resource in resources:
        key = resource.resource_type, resource.resource_name
        if key in problems:
            results.append(refusal(resource, problems[key], answer))
        else:
            results.append(by_key[key])
    return results


def refusal(resource: Any, error: KafkaError, answer: type[Any]) -> Any:
    return answer(
        error_code=error.code,
        error_message=error.message,
        resource_type=resource.resource_type,
        resource_name=resource.resource_name,
    )
