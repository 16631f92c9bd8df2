"""Reassignment of partitions to other brokers (KIP-455): begin, cancel, list. Pure.

During a reassignment `replicas` holds the target replicas, followed by the replicas to remove.
`partition_changes.py` completes it when all target replicas are in sync. Follows Kafka's
`ReplicationControlManager`, `PartitionReassignmentReplicas` and `PartitionReassignmentRevert`.
"""

from __future__ import annotations

from typing import Any

from tidelog.protocol.errors import ErrorCode, KafkaError
from tidelog.protocol.messages.alter_partition_reassignments import (
    AlterPartitionReassignmentsRequest,
    AlterPartitionReassignmentsResponse,
    ReassignablePartitionResponse,
    ReassignableTopicResponse,
)
from tidelog.protocol.messages.list_partition_reassignments import (
    ListPartitionReassignmentsRequest,
    ListPartitionReassignmentsResponse,
    OngoingPartitionReassignment,
    OngoingTopicReassignment,
)
from tidelog.protocol.messages.metadata_records import PartitionChangeRecord
from tidelog.replication.controller.decisions.partition_changes import Election, PartitionChange
from tidelog.replication.controller.decisions.state import ELEMENTS_AT_ONCE, ControllerState, Steps
from tidelog.replication.controller.metadata.image import PartitionImage, TopicImage
from tidelog.replication.controller.metadata.records import merge_partition_change

Records = list[Any]


def alter_partition_reassignments(
    state: ControllerState, request: AlterPartitionReassignmentsRequest
) -> Steps[AlterPartitionReassignmentsResponse]:
    """Decide on each partition separately; null replicas cancel its reassignment.

    A partition that is named again is decided on as the earlier change leaves it.
    """
    changed: dict[tuple[bytes, int], PartitionImage] = {}
    records: Records = []
    response = AlterPartitionReassignmentsResponse(
        allow_replication_factor_change=request.allow_replication_factor_change, error_message=None
    )
    number = 0
    for topic_data in request.topics:
        topic_response = ReassignableTopicResponse(name=topic_data.name)
        response.responses.append(topic_response)
        for partition_data in topic_data.partitions:
            number += 1
            if number % ELEMENTS_AT_ONCE == 0:
                yield
            index = partition_data.partition_index
            partition_response = ReassignablePartitionResponse(partition_index=index, error_message=None)
            topic_response.partitions.append(partition_response)
            try:
                topic, partition = _find(state, topic_data.name, index)
                partition = changed.get((topic.topic_id, index), partition)
                record = (
                    _cancel(state, topic, index, partition)
                    if partition_data.replicas is None
                    else _begin(
                        state, topic, index, partition, partition_data.replicas, request.allow_replication_factor_change
                    )
                )
            except KafkaError as error:
                partition_response.error_code, partition_response.error_message = error.code, error.message
                continue
            if record is not None:
                records.append(record)
                changed[topic.topic_id, index] = merge_partition_change(partition, record)
    return records, response


def _find(state: ControllerState, name: str, index: int) -> tuple[TopicImage, PartitionImage]:
    topic = state.image.topics_by_name.get(name)
    if topic is None:
        raise KafkaError(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, f"Unable to find a topic named {name}.")
    partition = topic.partitions.get(index)
    if partition is None:
        raise KafkaError(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, f"Unable to find partition {name}:{index}.")
    return topic, partition


def _begin(
    state: ControllerState,
    topic: TopicImage,
    index: int,
    partition: PartitionImage,
    target: list[int],
    may_change_factor: bool,
) -> PartitionChangeRecord | None:
    state.check_manual_assignment(target, None)
    present_replicas = [replica for replica in partition.replicas if replica not in partition.adding_replicas]
    if not may_change_factor and len(target) != len(present_replicas):
        raise KafkaError(
            ErrorCode.INVALID_REPLICATION_FACTOR,
            f"The replication factor is changed from {len(present_replicas)} to {len(target)}",
        )
    removing = sorted(set(partition.replicas) - set(target))
    change = PartitionChange(partition, index, state.topic_rules(topic), state.election_rules())
    change.replicas = [*target, *removing]
    change.removing = removing
    # A replica that the replaced reassignment was adding is still being added.
    change.adding = sorted((set(target) - set(partition.replicas)) | (set(target) & set(partition.adding_replicas)))
    return change.build()


def _cancel(
    state: ControllerState, topic: TopicImage, index: int, partition: PartitionImage
) -> PartitionChangeRecord | None:
    if not is_reassigning(partition):
        raise KafkaError(ErrorCode.NO_REASSIGNMENT_IN_PROGRESS)
    replicas = [replica for replica in partition.replicas if replica not in partition.adding_replicas]
    isr = [replica for replica in partition.isr if replica not in partition.adding_replicas]
    # Those that have all records, also while the partition has no leader. Replicas that leave remove their copies.
    complete = partition.isr or partition.elr or partition.last_known_elr
    if complete and set(complete).isdisjoint(replicas):
        if not state.unclean_enabled(topic.name):
            raise KafkaError(
                ErrorCode.INVALID_REPLICA_ASSIGNMENT,
                f"Unable to revert partition assignment for {topic.name}:{index} because it would require an "
                "unclean leader election.",
            )
        isr = replicas[:1] if partition.isr else []
    change = PartitionChange(partition, index, state.topic_rules(topic), state.election_rules())
    if state.unclean_enabled(topic.name):
        change.election = Election.UNCLEAN
    change.isr, change.replicas, change.removing, change.adding = isr, replicas, (), ()
    return change.build()


def is_reassigning(partition: PartitionImage) -> bool:
    return bool(partition.adding_replicas or partition.removing_replicas)


def list_partition_reassignments(
    state: ControllerState, request: ListPartitionReassignmentsRequest
) -> ListPartitionReassignmentsResponse:
    """The reassignments under way, of the requested partitions or of all."""
    indexes_by_topic: dict[str, list[int]] = {}
    if request.topics is None:
        for topic_id, index in state.index.reassigning:
            indexes_by_topic.setdefault(state.image.topics_by_id[topic_id].name, []).append(index)
    else:
        indexes_by_topic = {topic_data.name: topic_data.partition_indexes for topic_data in request.topics}
    response = ListPartitionReassignmentsResponse(error_message=None)
    for name, indexes in indexes_by_topic.items():
        ongoing = OngoingTopicReassignment(name=name)
        for index in sorted(set(indexes)):
            partition = state.image.partition(name, index)
            if partition is not None and is_reassigning(partition):
                ongoing.partitions.append(
                    OngoingPartitionReassignment(
                        partition_index=index,
                        replicas=list(partition.replicas),
                        adding_replicas=list(partition.adding_replicas),
                        removing_replicas=list(partition.removing_replicas),
                    )
                )
        if ongoing.partitions:
            response.topics.append(ongoing)
    return response
