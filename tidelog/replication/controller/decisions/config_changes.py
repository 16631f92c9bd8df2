"""AlterConfigs and IncrementalAlterConfigs: changes of dynamic configs. Pure.

This module applies the operations of one resource, all or none. The broker package knows the keys
and validates the result (`ControllerSettings`). A new min.insync.replicas clears the eligible
leader replicas (KIP-966), because a leader may commit without them from now on. Those of partitions
without a leader stay (not in Kafka). Follows Kafka's `ConfigurationControlManager` and
`ControllerConfigurationValidator`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Any, NamedTuple, TypeVar

from tidelog.protocol.errors import ErrorCode, KafkaError
from tidelog.protocol.java_text import parse_integer
from tidelog.protocol.messages import alter_configs as legacy
from tidelog.protocol.messages import incremental_alter_configs as incremental
from tidelog.protocol.messages.metadata_records import ClearElrRecord, ConfigRecord, PartitionChangeRecord
from tidelog.replication.controller.decisions.state import MAX_CONFIG_VALUE_LENGTH, ControllerState
from tidelog.replication.controller.decisions.topic_names import topic_name_problem
from tidelog.replication.controller.metadata.image import (
    BROKER_RESOURCE,
    CLIENT_METRICS_RESOURCE,
    GROUP_RESOURCE,
    TOPIC_RESOURCE,
)
from tidelog.replication.controller.metadata.record_codec import ELR_VERSION

Records = list[Any]
ResourceResponse = TypeVar(
    "ResourceResponse", incremental.AlterConfigsResourceResponse, legacy.AlterConfigsResourceResponse
)

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
    def changes_of(resource: incremental.AlterConfigsResource) -> list[_Change]:
        return [_Change(config.name, config.config_operation, config.value) for config in resource.configs]

    records, responses = _alter_all(state, request, changes_of, incremental.AlterConfigsResourceResponse)
    return records, incremental.IncrementalAlterConfigsResponse(responses=responses)


def alter_configs(
    state: ControllerState, request: legacy.AlterConfigsRequest
) -> tuple[Records, legacy.AlterConfigsResponse]:
    """Replace all configs of a resource; a config without a new value is reset."""

    def changes_of(resource: legacy.AlterConfigsResource) -> list[_Change]:
        new_values = {config.name: config.value for config in resource.configs}
        present = state.image.configs.get((resource.resource_type, resource.resource_name), {})
        return [
            *(
                _Change(key, Operation.DELETE if value is None else Operation.SET, value)
                for key, value in new_values.items()
            ),
            *(_Change(key, Operation.DELETE, None) for key in present if key not in new_values),
        ]

    records, responses = _alter_all(state, request, changes_of, legacy.AlterConfigsResourceResponse)
    return records, legacy.AlterConfigsResponse(responses=responses)


def _alter_all(
    state: ControllerState,
    request: Any,
    changes_of: Callable[[Any], Sequence[_Change]],
    response_type: type[ResourceResponse],
) -> tuple[Records, list[ResourceResponse]]:
    """Decide on each resource separately. A duplicate resource gets one response."""
    records: Records = []
    responses: list[ResourceResponse] = []
    resources = {(resource.resource_type, resource.resource_name): resource for resource in request.resources}
    counts = Counter((resource.resource_type, resource.resource_name) for resource in request.resources)
    for (resource_type, name), resource in resources.items():
        response: Any = response_type(resource_type=resource_type, resource_name=name, error_message=None)
        responses.append(response)
        try:
            if counts[resource_type, name] > 1:
                raise KafkaError(ErrorCode.INVALID_REQUEST, "Duplicate resource.")
            records += _alter(state, resource_type, name, changes_of(resource))
        except KafkaError as error:
            error.with_traceback(None)  # one of its frames may keep it, and the request
            response.error_code, response.error_message = error.code, error.message
    return [] if request.validate_only else records, responses


def _alter(state: ControllerState, resource_type: int, name: str, changes: Sequence[_Change]) -> Records:
    """Raises KafkaError for the resource."""
    if len({change.name for change in changes}) < len(changes):
        raise KafkaError(ErrorCode.INVALID_REQUEST, "Each config of a resource must appear at most once.")
    present = state.image.configs.get((resource_type, name), {})
    new_configs = dict(present)
    altered_configs: list[tuple[str, str | None]] = []
    for change in changes:
        value = _value_after(state, resource_type, change, present.get(change.name))
        if value is None:
            new_configs.pop(change.name, None)
        else:
            new_configs[change.name] = value
        # An unchanged broker config is written again, so that brokers reload the
        # files it names (KAFKA-14136).
        if value != present.get(change.name) or resource_type == BROKER_RESOURCE:
            altered_configs.append((change.name, value))
    _check_min_insync_replicas(state, resource_type, name, altered_configs)
    _check_name(resource_type, name)
    problem = state.settings.config_problem(resource_type, new_configs)
    if problem is not None:
        raise problem
    _check_existence(state, resource_type, name)
    records: Records = [
        ConfigRecord(resource_type=resource_type, resource_name=name, name=key, value=value)
        for key, value in altered_configs
    ]
    has_new_minimum = any(
        key == MIN_INSYNC_REPLICAS and value != present.get(MIN_INSYNC_REPLICAS) for key, value in altered_configs
    )
    if has_new_minimum and state.metadata_version >= ELR_VERSION:
        topic_name = name if resource_type == TOPIC_RESOURCE else ""
        records += [ClearElrRecord(topic_name=topic_name), *_elr_of_leaderless(state, topic_name)]
    return records


def _elr_of_leaderless(state: ControllerState, topic_name: str) -> Records:
    """Records that restore the eligible replicas of partitions without a leader, of one topic or of all.

    Nothing is committed there, so these replicas keep all that is. Without them no replica that returns could lead.
    """
    records: Records = []
    for topic_id, index in state.index.leaderless:
        topic = state.image.topics_by_id[topic_id]
        partition = topic.partitions[index]
        if topic_name in ("", topic.name) and (partition.elr or partition.last_known_elr):
            records.append(
                PartitionChangeRecord(
                    partition_id=index,
                    topic_id=topic_id,
                    eligible_leader_replicas=list(partition.elr),
                    last_known_elr=list(partition.last_known_elr),
                )
            )
    return records


def _check_min_insync_replicas(
    state: ControllerState, resource_type: int, name: str, altered_configs: Sequence[tuple[str, str | None]]
) -> None:
    """Require one minimum for all brokers while ELR is enabled, because ELR is computed from one
    minimum.
    """
    if resource_type != BROKER_RESOURCE or not state.elr_enabled:
        return
    for key, value in altered_configs:
        if key == MIN_INSYNC_REPLICAS and name:
            message = "Broker-level min.insync.replicas cannot be altered while ELR is enabled."
            raise KafkaError(ErrorCode.INVALID_CONFIG, message)
        if key == MIN_INSYNC_REPLICAS and value is None:
            message = "Cluster-level min.insync.replicas cannot be removed while ELR is enabled."
            raise KafkaError(ErrorCode.INVALID_CONFIG, message)


def min_insync_replicas_records(state: ControllerState) -> Records:
    """Records that set this controller's minimum for all brokers, for the start of ELR."""
    records: Records = []
    if MIN_INSYNC_REPLICAS not in state.image.configs.get((BROKER_RESOURCE, ""), {}):
        minimum = str(state.settings.min_insync_replicas)
        records.append(_minimum(name="", value=minimum))
    return records + [
        _minimum(name=name, value=None)
        for (resource_type, name), configs in state.image.configs.items()
        if resource_type == BROKER_RESOURCE and name and MIN_INSYNC_REPLICAS in configs
    ]


def _minimum(name: str, value: str | None) -> ConfigRecord:
    return ConfigRecord(resource_type=BROKER_RESOURCE, resource_name=name, name=MIN_INSYNC_REPLICAS, value=value)


def _check_name(resource_type: int, name: str) -> None:
    problem: str | None = None
    code = ErrorCode.INVALID_REQUEST
    if resource_type == TOPIC_RESOURCE:
        code, problem = ErrorCode.INVALID_TOPIC_EXCEPTION, topic_name_problem(name)
        if not name:
            code, problem = ErrorCode.INVALID_REQUEST, "Default topic resources are not allowed."
    elif resource_type == BROKER_RESOURCE:
        try:
            problem = "Invalid negative broker ID." if name and parse_integer(name) < 0 else None
        except ValueError:
            problem = "Unable to parse broker name as a base 10 number."
    elif resource_type == GROUP_RESOURCE:
        problem = None if name else "Default group resources are not allowed."
    elif resource_type == CLIENT_METRICS_RESOURCE:
        problem = None if name else "Subscription name can't be empty"
    else:
        code, problem = ErrorCode.UNSUPPORTED_VERSION, f"Unknown resource type {resource_type}."
    if problem is not None:
        raise KafkaError(code, problem)


def _check_existence(state: ControllerState, resource_type: int, name: str) -> None:
    if resource_type == TOPIC_RESOURCE and name not in state.image.topics_by_name:
        raise KafkaError(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, f"The topic '{name}' does not exist.")
    if resource_type == BROKER_RESOURCE and name:
        node_id = parse_integer(name)
        if node_id not in state.image.brokers and node_id not in state.image.controllers:
            raise KafkaError(ErrorCode.BROKER_ID_NOT_REGISTERED, f"No node with id {name} found.")


def _value_after(state: ControllerState, resource_type: int, change: _Change, present: str | None) -> str | None:
    """The config's value after the change; None for not set."""
    if change.operation == Operation.DELETE:
        return None
    if change.value is None:
        raise KafkaError(ErrorCode.INVALID_REQUEST, f"Null value not supported for : {change.name}")
    check_length(change.value)
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
    value = list_after(change.operation, change.value, default if present is None else present)
    if change.operation == Operation.APPEND:
        check_length(value)  # each step writes the whole list: without a bound the log grows with its square
    return value


def check_length(value: str) -> None:
    """Raises INVALID_CONFIG."""
    if len(value) > MAX_CONFIG_VALUE_LENGTH:
        raise KafkaError(
            ErrorCode.INVALID_CONFIG,
            "The configuration value cannot be added because it exceeds the maximum value size of "
            f"{MAX_CONFIG_VALUE_LENGTH} bytes.",
        )


def list_after(operation: int, value: str, present: str | None) -> str:
    """The list config after APPEND or SUBTRACT of the items of `value`."""
    parts = [part for part in (present or "").split(",") if part]
    if operation == Operation.APPEND:
        there = set(parts)
        return ",".join([*parts, *(part for part in dict.fromkeys(value.split(",")) if part not in there)])
    left = Counter(value.split(","))
    kept = []
    for part in parts:
        if left[part]:
            left[part] -= 1
        else:
            kept.append(part)
    return ",".join(kept)
