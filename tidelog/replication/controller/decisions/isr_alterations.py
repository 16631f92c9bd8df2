"""AlterPartition: a leader proposes another ISR. Pure.

Invariant: a proposal changes a partition only if three epochs are current: the broker epoch (the
registered incarnation), the leader epoch (the broker still leads) and the partition epoch (the
leader knows all earlier changes). The order of the checks and the error codes are those of Kafka's
`ReplicationControlManager.alterPartition` (KIP-497, KIP-841, KIP-903), with three additions. A
replica whose log directory has failed does not join. A leader that leaves itself out of the ISR
resigns: another replica is elected as if the leader had died; if no other replica may lead, nothing
changes and the answer is INELIGIBLE_REPLICA. A leader that proposes the ISR as it is says with that
that it has read its log; a reassignment that removes replicas waits for this.
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
from tidelog.replication.controller.decisions.partition_changes import (
    Election,
    ElectionRules,
    PartitionChange,
    TopicRules,
)
from tidelog.replication.controller.decisions.state import PROPOSALS_AT_ONCE, ControllerState, Steps
from tidelog.replication.controller.metadata.image import (
    NO_LEADER,
    NO_LEADER_CHANGE,
    RECOVERED,
    RECOVERING,
    PartitionImage,
    TopicImage,
)
from tidelog.replication.controller.metadata.records import merge_partition_change

Records = list[Any]

MEMBER_EPOCHS_VERSION_MIN = 3  # ISR members have broker epochs


def alter_partition(
    state: ControllerState, request: AlterPartitionRequest, version: int
) -> Steps[AlterPartitionResponse]:
    """Raises KafkaError(BROKER_ID_NOT_REGISTERED, STALE_BROKER_EPOCH) for the whole request."""
    state.check_broker_epoch(request.broker_id, request.broker_epoch)
    rules = state.election_rules()
    records: Records = []
    response = AlterPartitionResponse()
    named: set[tuple[bytes, int]] = set()
    number = 0
    for topic_data in request.topics:
        topic_response = AlterPartitionResponseTopicData(topic_id=topic_data.topic_id)
        response.topics.append(topic_response)
        topic = state.image.topics_by_id.get(topic_data.topic_id)
        for partition_data in topic_data.partitions:
            if number == PROPOSALS_AT_ONCE:
                number = 0
                yield
            number += 1
            isr = (
                partition_data.new_isr_with_epochs
                if version >= MEMBER_EPOCHS_VERSION_MIN
                else [BrokerState(broker_id=broker_id) for broker_id in partition_data.new_isr]
            )
            if topic is None:
                error = ErrorCode.UNKNOWN_TOPIC_ID
            elif (topic_data.topic_id, partition_data.partition_index) in named:
                error = ErrorCode.INVALID_REQUEST  # the second proposal for a partition ignores the first
            else:
                error = _problem(state, request.broker_id, topic, partition_data, isr)
            named.add((topic_data.topic_id, partition_data.partition_index))
            if topic is None or error != ErrorCode.NONE:
                topic_response.partitions.append(
                    AlterPartitionResponsePartitionData(
                        partition_index=partition_data.partition_index, error_code=error
                    )
                )
            else:
                topic_response.partitions.append(
                    _apply(state, rules, request.broker_id, topic, partition_data, isr, records)
                )
    return records, response


def _apply(
    state: ControllerState,
    rules: ElectionRules,
    leader_id: int,
    topic: TopicImage,
    partition_data: AlterPartitionRequestPartitionData,
    isr: list[BrokerState],
    records: Records,
) -> AlterPartitionResponsePartitionData:
    index = partition_data.partition_index
    partition = topic.partitions[index]
    topic_rules = state.topic_rules(topic)
    members = [member.broker_id for member in isr]
    if leader_id not in members:
        return _resign(state, leader_id, topic_rules, partition, index, members, records)
    change = PartitionChange(partition, index, topic_rules, rules)
    if topic_rules.unclean:
        change.election = Election.UNCLEAN
    change.isr = members
    change.recovery_state = partition_data.leader_recovery_state
    is_unchanged = set(members) == set(partition.isr) and change.recovery_state == partition.leader_recovery_state
    change.log_was_read = is_unchanged
    record = change.build()
    if record is not None:
        records.append(record)
        partition = merge_partition_change(partition, record)
        if record.leader not in (leader_id, NO_LEADER_CHANGE):
            # The change completed a reassignment, which elected another leader.
            return AlterPartitionResponsePartitionData(partition_index=index, error_code=ErrorCode.NEW_LEADER_ELECTED)
    return AlterPartitionResponsePartitionData(
        partition_index=index,
        leader_id=partition.leader,
        leader_epoch=partition.leader_epoch,
        isr=list(partition.isr),
        leader_recovery_state=partition.leader_recovery_state,
        partition_epoch=partition.partition_epoch,
    )


def _resign(
    state: ControllerState,
    leader_id: int,
    topic_rules: TopicRules,
    partition: PartitionImage,
    index: int,
    members: list[int],
    records: Records,
) -> AlterPartitionResponsePartitionData:
    """Elect another replica, from the rest of the ISR or from the ELR, never uncleanly."""
    change = PartitionChange(partition, index, topic_rules, state.election_rules(gone={leader_id}))
    change.isr = members
    record = change.build()
    if record is None or record.leader in (NO_LEADER, NO_LEADER_CHANGE):
        return AlterPartitionResponsePartitionData(partition_index=index, error_code=ErrorCode.INELIGIBLE_REPLICA)
    records.append(record)
    return AlterPartitionResponsePartitionData(partition_index=index, error_code=ErrorCode.NEW_LEADER_ELECTED)


def _problem(
    state: ControllerState,
    leader_id: int,
    topic: TopicImage,
    partition_data: AlterPartitionRequestPartitionData,
    isr: list[BrokerState],
) -> ErrorCode:
    partition = topic.partitions.get(partition_data.partition_index)
    if partition is None:
        return ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    if (
        partition_data.leader_epoch > partition.leader_epoch
        or partition_data.partition_epoch > partition.partition_epoch
    ):
        return ErrorCode.NOT_CONTROLLER  # the leader knows newer metadata, so another controller is active
    if partition_data.leader_epoch < partition.leader_epoch:
        return ErrorCode.FENCED_LEADER_EPOCH
    if leader_id != partition.leader:
        return ErrorCode.INVALID_REQUEST
    if partition_data.partition_epoch < partition.partition_epoch:
        return ErrorCode.INVALID_UPDATE_VERSION
    members = [member.broker_id for member in isr]
    if not _is_valid_isr(partition, members, partition_data.leader_recovery_state):
        return ErrorCode.INVALID_REQUEST
    if not all(_is_eligible(state, partition, member) for member in isr):
        return ErrorCode.INELIGIBLE_REPLICA
    return ErrorCode.NONE


def _is_valid_isr(partition: PartitionImage, members: list[int], recovery_state: int) -> bool:
    if recovery_state not in (RECOVERED, RECOVERING):
        return False
    if recovery_state == RECOVERING and (len(members) > 1 or partition.leader_recovery_state == RECOVERED):
        return False
    distinct_ids = set(members)
    if len(distinct_ids) != len(members) or not distinct_ids <= set(partition.replicas):
        return False
    # A leader that resigns proposes the whole rest of the ISR: no other replica joins or leaves with it.
    return partition.leader in distinct_ids or distinct_ids == set(partition.isr) - {partition.leader}


def _is_eligible(state: ControllerState, partition: PartitionImage, member: BrokerState) -> bool:
    """Whether the broker is active in the stated epoch (-1 stands for any epoch), and the log directory of a replica
    that joins has not failed. The leader may propose it before it hears of the failure.
    """
    broker = state.image.brokers.get(member.broker_id)
    if broker is None or not broker.is_active or member.broker_epoch not in (-1, broker.epoch):
        return False
    return member.broker_id in partition.isr or not broker.has_lost(partition.directory_of(member.broker_id))
