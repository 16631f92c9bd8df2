"""AlterPartition: a leader proposes another ISR, and is believed only while it leads and knows the newest state. Pure.

Three epochs protect a partition: the broker's (it is the registered incarnation), the leader epoch (it still leads) and
the partition epoch (it knows of every change before). A proposal that fails one changes nothing. Order of checks and
codes are those of Kafka's `ReplicationControlManager.alterPartition` (KIP-497, KIP-841, KIP-903).
"""

from __future__ import annotations

from typing import Any

from tidelog.protocol.errors import ErrorCode
from tidelog.protocol.messages.alter_partition import (
    AlterPartitionRequest,
    AlterPartitionRequestPartitionData,
    AlterPartitionResponse,
    AlterPartitionResponsePartitionData,
    AlterPartitionResponseTopicData,
    BrokerState,
)
from tidelog.replication.controller.decisions.partition_changes import Election, ElectionRules, PartitionChange
from tidelog.replication.controller.decisions.state import ControllerState
from tidelog.replication.controller.metadata.image import (
    NO_LEADER_CHANGE,
    RECOVERED,
    RECOVERING,
    PartitionImage,
    TopicImage,
)
from tidelog.replication.controller.metadata.records import merge_partition_change

Records = list[Any]

EPOCHS_FROM = 3  # the version from which each ISR member comes with its broker epoch


def alter_partition(
    state: ControllerState, request: AlterPartitionRequest, version: int
) -> tuple[Records, AlterPartitionResponse]:
    """Raises KafkaError(BROKER_ID_NOT_REGISTERED, STALE_BROKER_EPOCH) for the whole request."""
    state.check_broker_epoch(request.broker_id, request.broker_epoch)
    rules = state.election_rules()
    records: Records = []
    response = AlterPartitionResponse()
    for wanted_topic in request.topics:
        answer = AlterPartitionResponseTopicData(topic_id=wanted_topic.topic_id)
        response.topics.append(answer)
        topic = state.image.topics_by_id.get(wanted_topic.topic_id)
        seen: set[int] = set()
        for wanted in wanted_topic.partitions:
            isr = (
                wanted.new_isr_with_epochs
                if version >= EPOCHS_FROM
                else [BrokerState(broker_id=one) for one in wanted.new_isr]
            )
            if topic is None:
                error = ErrorCode.UNKNOWN_TOPIC_ID
            elif wanted.partition_index in seen:
                error = ErrorCode.INVALID_REQUEST  # a second proposal knows nothing of the first
            else:
                error = _problem(state, request.broker_id, topic, wanted, isr)
            seen.add(wanted.partition_index)
            if topic is None or error != ErrorCode.NONE:
                answer.partitions.append(
                    AlterPartitionResponsePartitionData(partition_index=wanted.partition_index, error_code=error)
                )
            else:
                answer.partitions.append(_apply(state, rules, request.broker_id, topic, wanted, isr, records))
    return records, response


def _apply(
    state: ControllerState,
    rules: ElectionRules,
    leader_id: int,
    topic: TopicImage,
    wanted: AlterPartitionRequestPartitionData,
    isr: list[BrokerState],
    records: Records,
) -> AlterPartitionResponsePartitionData:
    index = wanted.partition_index
    partition = topic.partitions[index]
    topic_rules = state.topic_rules(topic)
    change = PartitionChange(partition, index, topic_rules, rules)
    if topic_rules.unclean:
        change.election = Election.UNCLEAN
    change.isr = [member.broker_id for member in isr]
    change.recovery_state = wanted.leader_recovery_state
    record = change.build()
    if record is not None:
        records.append(record)
        partition = merge_partition_change(partition, record)
        if record.leader not in (leader_id, NO_LEADER_CHANGE):
            # It ended a reassignment that takes the leadership away: done, but not as the leader imagines.
            return AlterPartitionResponsePartitionData(partition_index=index, error_code=ErrorCode.NEW_LEADER_ELECTED)
    return AlterPartitionResponsePartitionData(
        partition_index=index,
        leader_id=partition.leader,
        leader_epoch=partition.leader_epoch,
        isr=list(partition.isr),
        leader_recovery_state=partition.leader_recovery_state,
        partition_epoch=partition.partition_epoch,
    )


def _problem(
    state: ControllerState,
    leader_id: int,
    topic: TopicImage,
    wanted: AlterPartitionRequestPartitionData,
    isr: list[BrokerState],
) -> ErrorCode:
    partition = topic.partitions.get(wanted.partition_index)
    if partition is None:
        return ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    if wanted.leader_epoch > partition.leader_epoch or wanted.partition_epoch > partition.partition_epoch:
        return ErrorCode.NOT_CONTROLLER  # it has heard of more than we know: somebody else decides by now
    if wanted.leader_epoch < partition.leader_epoch:
        return ErrorCode.FENCED_LEADER_EPOCH
    if leader_id != partition.leader:
        return ErrorCode.INVALID_REQUEST
    if wanted.partition_epoch < partition.partition_epoch:
        return ErrorCode.INVALID_UPDATE_VERSION
    members = [member.broker_id for member in isr]
    if not _is_valid_isr(partition, members, wanted.leader_recovery_state):
        return ErrorCode.INVALID_REQUEST
    if not all(_is_eligible(state, member) for member in isr):
        return ErrorCode.INELIGIBLE_REPLICA
    return ErrorCode.NONE


def _is_valid_isr(partition: PartitionImage, members: list[int], recovery_state: int) -> bool:
    if recovery_state not in (RECOVERED, RECOVERING):
        return False
    if recovery_state == RECOVERING and (len(members) > 1 or partition.leader_recovery_state == RECOVERED):
        return False
    distinct = set(members)
    return len(distinct) == len(members) and distinct <= set(partition.replicas) and partition.leader in distinct


def _is_eligible(state: ControllerState, member: BrokerState) -> bool:
    """Alive, and the incarnation that the leader means; -1 is any."""
    broker = state.image.brokers.get(member.broker_id)
    return broker is not None and broker.is_active and member.broker_epoch in (-1, broker.epoch)
