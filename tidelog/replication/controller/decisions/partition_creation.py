"""More partitions for a topic that exists (CreatePartitions), by count or with their replicas. Pure."""

from __future__ import annotations

from collections import Counter
from typing import Any

from tidelog.protocol.errors import ErrorCode, KafkaError
from tidelog.protocol.messages.create_partitions import (
    CreatePartitionsRequest,
    CreatePartitionsResponse,
    CreatePartitionsTopic,
    CreatePartitionsTopicResult,
)
from tidelog.protocol.messages.metadata_records import PartitionRecord
from tidelog.replication.controller.decisions.placement import place_replicas
from tidelog.replication.controller.decisions.state import MAX_PARTITIONS_PER_REQUEST, ControllerState, bad_assignment

Records = list[Any]


def create_partitions(
    state: ControllerState, request: CreatePartitionsRequest
) -> tuple[Records, CreatePartitionsResponse]:
    """Each topic is decided on its own; `count` is the new total."""
    records: Records = []
    response = CreatePartitionsResponse()
    times = Counter(topic.name for topic in request.topics)
    for topic in {topic.name: topic for topic in request.topics}.values():
        result = CreatePartitionsTopicResult(name=topic.name)
        response.results.append(result)
        try:
            if times[topic.name] > 1:
                raise KafkaError(ErrorCode.INVALID_REQUEST, "Duplicate topic name.")
            added = _create(state, topic)
            if len(records) + len(added) > MAX_PARTITIONS_PER_REQUEST:
                raise KafkaError(ErrorCode.POLICY_VIOLATION, "Excessively large number of partitions per request.")
        except KafkaError as error:
            result.error_code, result.error_message = error.code, error.message
            continue
        records += added
    return records, response


def _create(state: ControllerState, wanted: CreatePartitionsTopic) -> list[PartitionRecord]:
    topic = state.image.topics_by_name.get(wanted.name)
    if topic is None:
        raise KafkaError(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION)
    present = len(topic.partitions)
    added = wanted.count - present
    if added == 0:
        raise KafkaError(ErrorCode.INVALID_PARTITIONS, f"Topic already has {present} partition(s).")
    if added < 0:
        raise KafkaError(
            ErrorCode.INVALID_PARTITIONS,
            f"The topic {wanted.name} currently has {present} partition(s); {wanted.count} would not be an increase.",
        )
    if added > MAX_PARTITIONS_PER_REQUEST:
        raise KafkaError(ErrorCode.POLICY_VIOLATION, "Excessively large number of partitions per request.")
    factor = len(topic.partitions[0].replicas)
    if wanted.assignments is None:
        placed = place_replicas(state.placeable(), added, factor, state.rng)
    else:
        placed = _manual(state, wanted, added, factor)
    records: list[PartitionRecord] = []
    for index, replicas in enumerate(placed, start=present):
        isr = state.active(replicas)
        if not isr:
            text = "All brokers are currently fenced or in controlled shutdown."
            if wanted.assignments is not None:
                raise bad_assignment(
                    f"All brokers specified in the manual partition assignment for partition {index} "
                    "are fenced or in controlled shutdown."
                )
            raise KafkaError(
                ErrorCode.INVALID_REPLICATION_FACTOR, f"Unable to replicate the partition {factor} time(s): {text}"
            )
        records.append(state.partition_record(topic.topic_id, index, replicas, isr))
    return records


def _manual(state: ControllerState, wanted: CreatePartitionsTopic, added: int, factor: int) -> list[tuple[int, ...]]:
    assignments = wanted.assignments or []
    if len(assignments) != added:
        raise bad_assignment(
            f"Attempted to add {added} additional partition(s), but only {len(assignments)} assignment(s) "
            "were specified."
        )
    for assignment in assignments:
        state.check_manual_assignment(assignment.broker_ids, factor)
    return [tuple(assignment.broker_ids) for assignment in assignments]
