"""Log directories of brokers: which replica is in which, and what one that fails takes with it (KIP-858). Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tidelog.protocol.errors import ErrorCode, KafkaError
from tidelog.protocol.messages.assign_replicas_to_dirs import (
    AssignReplicasToDirsRequest,
    AssignReplicasToDirsResponse,
    AssignReplicasToDirsResponseDirectoryData,
    AssignReplicasToDirsResponsePartitionData,
    AssignReplicasToDirsResponseTopicData,
)
from tidelog.protocol.messages.metadata_records import BrokerRegistrationChangeRecord, PartitionChangeRecord
from tidelog.replication.controller.decisions.leaders import update_leaders_and_isrs
from tidelog.replication.controller.decisions.partition_changes import PartitionChange
from tidelog.replication.controller.decisions.state import ControllerState
from tidelog.replication.controller.metadata.record_codec import DIRECTORIES_VERSION

Records = list[Any]


def directories_offline(
    state: ControllerState, broker_id: int, offline: Sequence[bytes], decided: Sequence[Any] = ()
) -> Records:
    """Their replicas leave ISRs and leaderships; the broker lives on with the rest.

    `decided`: records of the same decision; partitions that they change already are left to the next heartbeat.
    """
    broker = state.image.brokers[broker_id]
    failed = [directory for directory in broker.log_dirs if directory in offline]
    changed = {(one.topic_id, one.partition_id) for one in decided if isinstance(one, PartitionChangeRecord)}
    if not failed or changed:
        return []
    topics = state.image.topics_by_id
    affected = [
        (topic_id, index)
        for topic_id, index in state.index.in_isr(broker_id)
        if topics[topic_id].partitions[index].directory_of(broker_id) in failed
    ]
    records = update_leaders_and_isrs(state, affected, gone=(broker_id,))
    online = [directory for directory in broker.log_dirs if directory not in failed]
    records.append(BrokerRegistrationChangeRecord(broker_id=broker_id, broker_epoch=broker.epoch, log_dirs=online))
    return records


def assign_replicas_to_dirs(
    state: ControllerState, request: AssignReplicasToDirsRequest
) -> tuple[Records, AssignReplicasToDirsResponse]:
    """Raises KafkaError(UNSUPPORTED_VERSION, BROKER_ID_NOT_REGISTERED, STALE_BROKER_EPOCH)."""
    if state.metadata_version < DIRECTORIES_VERSION:
        raise KafkaError(ErrorCode.UNSUPPORTED_VERSION, "Directory assignment is not supported yet.")
    broker_id = request.broker_id
    state.check_broker_epoch(broker_id, request.broker_epoch)
    log_dirs = state.image.brokers[broker_id].log_dirs
    rules = state.election_rules()
    records: Records = []
    lost: list[tuple[bytes, int]] = []
    response = AssignReplicasToDirsResponse()
    for wanted in request.directories:
        answer = AssignReplicasToDirsResponseDirectoryData(id=wanted.id)
        response.directories.append(answer)
        for wanted_topic in wanted.topics:
            answers = AssignReplicasToDirsResponseTopicData(topic_id=wanted_topic.topic_id)
            answer.topics.append(answers)
            topic = state.image.topics_by_id.get(wanted_topic.topic_id)
            for index in (one.partition_index for one in wanted_topic.partitions):
                partition = None if topic is None else topic.partitions.get(index)
                error = ErrorCode.NONE
                if topic is None:
                    error = ErrorCode.UNKNOWN_TOPIC_ID
                elif partition is None:
                    error = ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
                elif broker_id not in partition.replicas:
                    error = ErrorCode.NOT_LEADER_OR_FOLLOWER
                elif log_dirs and wanted.id not in log_dirs:
                    # It failed meanwhile, and the replica in it.
                    lost.append((topic.topic_id, index))
                else:
                    change = PartitionChange(partition, index, state.topic_rules(topic), rules)
                    change.directories[broker_id] = wanted.id
                    record = change.build()
                    if record is not None:
                        records.append(record)
                answers.partitions.append(
                    AssignReplicasToDirsResponsePartitionData(partition_index=index, error_code=error)
                )
    if lost:
        records += update_leaders_and_isrs(state, dict.fromkeys(lost), gone=(broker_id,))
    return records, response
