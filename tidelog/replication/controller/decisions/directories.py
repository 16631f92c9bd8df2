"""Log directories of brokers: assignment of replicas to directories, and failed directories
(KIP-858). Pure.
"""

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
from tidelog.replication.controller.decisions.state import PROPOSALS_AT_ONCE, ControllerState, Steps
from tidelog.replication.controller.metadata.record_codec import DIRECTORIES_VERSION

Records = list[Any]


def directories_offline(
    state: ControllerState, broker_id: int, offline: Sequence[bytes], decided_records: Sequence[Any] = ()
) -> Records:
    """Remove the replicas in failed directories from ISRs and leaderships; the broker's others
    stay.

    `decided_records`: earlier records of the same decision. If they change partitions, the failure
    is handled at the next heartbeat.
    """
    broker = state.image.brokers[broker_id]
    failed_ids = set(broker.log_dirs).intersection(offline)
    changed_partitions = {
        (record.topic_id, record.partition_id)
        for record in decided_records
        if isinstance(record, PartitionChangeRecord)
    }
    if not failed_ids or changed_partitions:
        return []
    topics = state.image.topics_by_id
    affected_partitions = [
        (topic_id, index)
        for topic_id, index in state.index.in_isr(broker_id)
        if topics[topic_id].partitions[index].directory_of(broker_id) in failed_ids
    ]
    records = update_leaders_and_isrs(state, affected_partitions, gone=(broker_id,))
    online_ids = [directory for directory in broker.log_dirs if directory not in failed_ids]
    records.append(BrokerRegistrationChangeRecord(broker_id=broker_id, broker_epoch=broker.epoch, log_dirs=online_ids))
    return records


def assign_replicas_to_dirs(
    state: ControllerState, request: AssignReplicasToDirsRequest
) -> Steps[AssignReplicasToDirsResponse]:
    """Raises KafkaError(UNSUPPORTED_VERSION, BROKER_ID_NOT_REGISTERED, STALE_BROKER_EPOCH)."""
    if state.metadata_version < DIRECTORIES_VERSION:
        raise KafkaError(ErrorCode.UNSUPPORTED_VERSION, "Directory assignment is not supported yet.")
    broker_id = request.broker_id
    state.check_broker_epoch(broker_id, request.broker_epoch)
    log_dirs = state.image.brokers[broker_id].log_dirs
    rules = state.election_rules()
    records: Records = []
    lost_partitions: list[tuple[bytes, int]] = []
    named: set[tuple[bytes, int]] = set()
    number = 0
    response = AssignReplicasToDirsResponse()
    for directory_data in request.directories:
        directory_response = AssignReplicasToDirsResponseDirectoryData(id=directory_data.id)
        response.directories.append(directory_response)
        for topic_data in directory_data.topics:
            topic_response = AssignReplicasToDirsResponseTopicData(topic_id=topic_data.topic_id)
            directory_response.topics.append(topic_response)
            topic = state.image.topics_by_id.get(topic_data.topic_id)
            for index in (partition_data.partition_index for partition_data in topic_data.partitions):
                if number == PROPOSALS_AT_ONCE:
                    number = 0
                    yield
                number += 1
                partition = None if topic is None else topic.partitions.get(index)
                error = ErrorCode.NONE
                if topic is None:
                    error = ErrorCode.UNKNOWN_TOPIC_ID
                elif partition is None:
                    error = ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
                elif (topic.topic_id, index) in named:
                    error = ErrorCode.INVALID_REQUEST  # each mention would be one more record
                elif broker_id not in partition.replicas:
                    error = ErrorCode.NOT_LEADER_OR_FOLLOWER
                elif log_dirs and directory_data.id not in log_dirs:
                    # The directory has failed meanwhile, with the replica in it.
                    lost_partitions.append((topic.topic_id, index))
                else:
                    change = PartitionChange(partition, index, state.topic_rules(topic), rules)
                    change.directories[broker_id] = directory_data.id
                    record = change.build()
                    if record is not None:
                        records.append(record)
                named.add((topic_data.topic_id, index))
                topic_response.partitions.append(
                    AssignReplicasToDirsResponsePartitionData(partition_index=index, error_code=error)
                )
    if lost_partitions:
        records += update_leaders_and_isrs(state, dict.fromkeys(lost_partitions), gone=(broker_id,))
    return records, response
