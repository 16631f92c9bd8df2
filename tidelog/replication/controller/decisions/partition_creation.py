"""CreatePartitions: more partitions for an existing topic, by count or with manual assignments.
Pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Sequence
from typing import Any

from tidelog.protocol.errors import ErrorCode, KafkaError
from tidelog.protocol.internal_topics import COORDINATOR_TOPICS
from tidelog.protocol.messages.create_partitions import (
    CreatePartitionsRequest,
    CreatePartitionsResponse,
    CreatePartitionsTopic,
    CreatePartitionsTopicResult,
)
from tidelog.protocol.messages.metadata_records import PartitionRecord
from tidelog.replication.controller.decisions.placement import place_replicas
from tidelog.replication.controller.decisions.state import (
    ELEMENTS_AT_ONCE,
    FEW_NEW_PARTITIONS,
    MAX_PARTITIONS_PER_REQUEST,
    NEW_PARTITIONS_AT_ONCE,
    ControllerState,
    Steps,
    bad_assignment,
)

Records = list[Any]


def create_partitions(state: ControllerState, request: CreatePartitionsRequest) -> Steps[CreatePartitionsResponse]:
    """Decide on each topic separately; `count` is the new total of partitions."""
    records: Records = []
    response = CreatePartitionsResponse()
    counts = Counter(topic.name for topic in request.topics)
    topics = {topic.name: topic for topic in request.topics}
    if sum(_size_of(state, topic) for topic in topics.values()) > FEW_NEW_PARTITIONS:
        yield
    size = 0  # of the topics since the last pause
    for number, topic in enumerate(topics.values()):
        if number and (number % ELEMENTS_AT_ONCE == 0 or size >= NEW_PARTITIONS_AT_ONCE):
            size = 0
            yield
        size += len(topic.assignments or ())
        result = CreatePartitionsTopicResult(name=topic.name)
        response.results.append(result)
        try:
            if counts[topic.name] > 1:
                raise KafkaError(ErrorCode.INVALID_REQUEST, "Duplicate topic name.")
            new_records = yield from _create(state, topic, MAX_PARTITIONS_PER_REQUEST - len(records))
        except KafkaError as error:
            result.error_code, result.error_message = error.code, error.message
            continue
        records += new_records
        size += len(new_records)
    return records, response


def _size_of(state: ControllerState, topic_request: CreatePartitionsTopic) -> int:
    topic = state.image.topics_by_name.get(topic_request.name)
    return 1 if topic is None else max(topic_request.count - len(topic.partitions), 1)


def _create(
    state: ControllerState, topic_request: CreatePartitionsTopic, count_max: int
) -> Generator[None, None, list[PartitionRecord]]:
    topic = state.image.topics_by_name.get(topic_request.name)
    if topic is None:
        raise KafkaError(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION)
    present_count = len(topic.partitions)
    added_count = topic_request.count - present_count
    if topic_request.name in COORDINATOR_TOPICS and added_count > 0:
        raise KafkaError(
            ErrorCode.INVALID_PARTITIONS,
            f"{topic_request.name} keeps its {present_count} partition(s): their number places each group and "
            "transactional id, and these would lose what is stored of them.",
        )
    if added_count == 0:
        raise KafkaError(ErrorCode.INVALID_PARTITIONS, f"Topic already has {present_count} partition(s).")
    if added_count < 0:
        raise KafkaError(
            ErrorCode.INVALID_PARTITIONS,
            f"The topic {topic_request.name} currently has {present_count} partition(s); "
            f"{topic_request.count} would not be an increase.",
        )
    if added_count > count_max:
        raise KafkaError(ErrorCode.POLICY_VIOLATION, "Excessively large number of partitions per request.")
    if added_count > NEW_PARTITIONS_AT_ONCE:
        yield
    factor = len(topic.partitions[0].replicas)
    if topic_request.assignments is None:
        replica_lists: Sequence[tuple[int, ...]] = place_replicas(state.placeable(), added_count, factor, state.rng)
    else:
        replica_lists = _manual(state, topic_request, added_count, factor)
    # In the same step as the placement: other brokers may be live in the next one.
    isrs = [state.active(replicas) for replicas in replica_lists]
    for index, isr in enumerate(isrs, start=present_count):
        if isr:
            continue
        if topic_request.assignments is not None:
            raise bad_assignment(
                f"All brokers specified in the manual partition assignment for partition {index} "
                "are fenced or in controlled shutdown."
            )
        raise KafkaError(
            ErrorCode.INVALID_REPLICATION_FACTOR,
            f"Unable to replicate the partition {factor} time(s): "
            "All brokers are currently fenced or in controlled shutdown.",
        )
    records: list[PartitionRecord] = []
    for index, (replicas, isr) in enumerate(zip(replica_lists, isrs), start=present_count):
        if index % NEW_PARTITIONS_AT_ONCE == 0:
            yield
        records.append(state.partition_record(topic.topic_id, index, replicas, isr))
    return records


def _manual(
    state: ControllerState, topic_request: CreatePartitionsTopic, added_count: int, factor: int
) -> list[tuple[int, ...]]:
    assignments = topic_request.assignments or []
    if len(assignments) != added_count:
        raise bad_assignment(
            f"Attempted to add {added_count} additional partition(s), but only {len(assignments)} assignment(s) "
            "were specified."
        )
    for assignment in assignments:
        state.check_manual_assignment(assignment.broker_ids, factor)
    return [tuple(assignment.broker_ids) for assignment in assignments]
