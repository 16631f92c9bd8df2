"""AlterConfigs and IncrementalAlterConfigs: what is set at run time for topics and brokers. Pure.

The broker floor knows the keys and judges the result (`ControllerSettings`); here the operations are applied, all or
none of one resource. A new min.insync.replicas makes what is known of eligible leaders void (KIP-966): it was collected
for another minimum. Follows Kafka's `ConfigurationControlManager` and `ControllerConfigurationValidator`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from enum import IntEnum
from typing import Any, NamedTuple, TypeVar

from tidelog.protocol.errors import ErrorCode, KafkaError
from tidelog.protocol.messages import alter_configs as legacy
from tidelog.protocol.messages import incremental_alter_configs as incremental
from tidelog.protocol.messages.metadata_records import ClearElrRecord, ConfigRecord
from tidelog.replication.controller.image import (
    BROKER_RESOURCE,
    CLIENT_METRICS_RESOURCE,
    GROUP_RESOURCE,
    TOPIC_RESOURCE,
)
from tidelog.replication.controller.record_codec import ELR_VERSION
from tidelog.replication.controller.state import MAX_CONFIG_VALUE_LENGTH, ControllerState
from tidelog.replication.controller.topic_names import topic_name_problem

Records = list[Any]
Response = TypeVar("Response", incremental.IncrementalAlterConfigsResponse, legacy.AlterConfigsResponse)

MIN_INSYNC_REPLICAS = "min.insync.replicas"


class Operation(IntEnum):
    SET = 0
    DELETE = 1
    APPEND = 2
    SUBTRACT = 3


class _Change(NamedTuple):
    name: str
    operation: int
    value: str | None


def incremental_alter_configs(
    state: ControllerState, request: incremental.IncrementalAlterConfigsRequest
) -> tuple[Records, incremental.IncrementalAlterConfigsResponse]:
    records: Records = []
    response = incremental.IncrementalAlterConfigsResponse()
    times = Counter((one.resource_type, one.resource_name) for one in request.resources)
    for (resource_type, name), resource in _distinct(request.resources).items():
        answer = incremental.AlterConfigsResourceResponse(
            resource_type=resource_type, resource_name=name, error_message=None
        )
        response.responses.append(answer)
        changes = [_Change(one.name, one.config_operation, one.value) for one in resource.configs]
        try:
            if times[resource_type, name] > 1:
                raise KafkaError(ErrorCode.INVALID_REQUEST, "Each resource must appear at most once.")
            records += _alter(state, resource_type, name, changes)
        except KafkaError as error:
            answer.error_code, answer.error_message = error.code, error.message
    return [] if request.validate_only else records, response


def alter_configs(
    state: ControllerState, request: legacy.AlterConfigsRequest
) -> tuple[Records, legacy.AlterConfigsResponse]:
    """What is not named is reset."""
    records: Records = []
    response = legacy.AlterConfigsResponse()
    times = Counter((one.resource_type, one.resource_name) for one in request.resources)
    for (resource_type, name), resource in _distinct(request.resources).items():
        answer = legacy.AlterConfigsResourceResponse(
            resource_type=resource_type, resource_name=name, error_message=None
        )
        response.responses.append(answer)
        wanted = {one.name: one.value for one in resource.configs}
        changes = [
            _Change(key, Operation.DELETE if value is None else Operation.SET, value) for key, value in wanted.items()
        ]
        present = state.image.configs.get((resource_type, name), {})
        changes += [_Change(key, Operation.DELETE, None) for key in present if key not in wanted]
        try:
            if times[resource_type, name] > 1:
                raise KafkaError(ErrorCode.INVALID_REQUEST, "Each resource must appear at most once.")
            records += _alter(state, resource_type, name, changes)
        except KafkaError as error:
            answer.error_code, answer.error_message = error.code, error.message
    return [] if request.validate_only else records, response


def _distinct(resources: Iterable[Any]) -> dict[tuple[int, str], Any]:
    return {(one.resource_type, one.resource_name): one for one in resources}


def _alter(state: ControllerState, resource_type: int, name: str, changes: Sequence[_Change]) -> Records:
    """Raises KafkaError for the resource."""
    if len({change.name for change in changes}) < len(changes):
        raise KafkaError(ErrorCode.INVALID_REQUEST, "Each config of a resource must appear at most once.")
    _check_resource(state, resource_type, name)
    present = state.image.configs.get((resource_type, name), {})
    after = dict(present)
    altered: list[tuple[str, str | None]] = []
    for change in changes:
        value = _applied(state, resource_type, change, present.get(change.name))
        if value is None:
            after.pop(change.name, None)
        else:
            after[change.name] = value
        # An unchanged broker config is written again: it makes brokers read what it names anew (KAFKA-14136).
        if value != present.get(change.name) or resource_type == BROKER_RESOURCE:
            altered.append((change.name, value))
    problem = _problem(state, resource_type, after)
    if problem is not None:
        raise KafkaError(ErrorCode.INVALID_CONFIG, problem)
    records: Records = [
        ConfigRecord(resource_type=resource_type, resource_name=name, name=key, value=value) for key, value in altered
    ]
    new_minimum = any(
        key == MIN_INSYNC_REPLICAS and value != present.get(MIN_INSYNC_REPLICAS) for key, value in altered
    )
    if new_minimum and state.metadata_version >= ELR_VERSION:
        records.append(ClearElrRecord(topic_name=name if resource_type == TOPIC_RESOURCE else ""))
    return records


def _check_resource(state: ControllerState, resource_type: int, name: str) -> None:
    if resource_type == TOPIC_RESOURCE:
        problem = topic_name_problem(name)
        if problem is not None:
            raise KafkaError(ErrorCode.INVALID_TOPIC_EXCEPTION, problem)
        if name not in state.image.topics_by_name:
            raise KafkaError(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, f"The topic '{name}' does not exist.")
    elif resource_type == BROKER_RESOURCE:
        if name and not name.isdecimal():
            raise KafkaError(ErrorCode.INVALID_REQUEST, f"Unable to parse broker name '{name}' as a number.")
        if name and int(name) not in state.image.brokers and int(name) not in state.image.controllers:
            raise KafkaError(ErrorCode.BROKER_ID_NOT_REGISTERED, f"No node with id {name} found.")
    elif resource_type not in (CLIENT_METRICS_RESOURCE, GROUP_RESOURCE) or not name:
        raise KafkaError(ErrorCode.INVALID_REQUEST, f"Unexpected resource type {resource_type} or empty name.")


def _applied(state: ControllerState, resource_type: int, change: _Change, present: str | None) -> str | None:
    """The config's value after the change; None for not set."""
    if change.operation == Operation.DELETE:
        return None
    if change.value is None:
        raise KafkaError(ErrorCode.INVALID_REQUEST, f"Null value not supported for : {change.name}")
    if len(change.value) > MAX_CONFIG_VALUE_LENGTH:
        raise KafkaError(
            ErrorCode.INVALID_CONFIG,
            "The configuration value cannot be added because it exceeds the maximum value size of "
            f"{MAX_CONFIG_VALUE_LENGTH} bytes.",
        )
    if change.operation == Operation.SET:
        return change.value
    if change.operation not in (Operation.APPEND, Operation.SUBTRACT):
        raise KafkaError(ErrorCode.INVALID_REQUEST, f"Unknown operation {change.operation} for {change.name}")
    try:
        default = state.settings.list_config_default(resource_type, change.name)
    except KeyError:
        raise KafkaError(
            ErrorCode.INVALID_CONFIG,
            f"Can't {Operation(change.operation).name} to key {change.name} because its type is not LIST.",
        ) from None
    parts = [part for part in ((default if present is None else present) or "").split(",") if part]
    for part in change.value.split(","):
        if change.operation == Operation.APPEND and part not in parts:
            parts.append(part)
        elif change.operation == Operation.SUBTRACT and part in parts:
            parts.remove(part)
    return ",".join(parts)


def _problem(state: ControllerState, resource_type: int, configs: dict[str, str]) -> str | None:
    if resource_type == TOPIC_RESOURCE:
        return state.settings.topic_config_problem(configs)
    if resource_type == BROKER_RESOURCE:
        return state.settings.broker_config_problem(configs)
    return None
