"""Who leads a partition: elections that lose nothing that was committed. Pure.

Works on one image and gives PartitionChangeRecords; naming a leader in such a record starts a new leader epoch. Follows
Kafka's `PartitionChangeBuilder`; eligible leader replicas (KIP-966) are read, as a log of Kafka's may hold them.
"""

from __future__ import annotations

from typing import Any

from tidelog.protocol.messages.metadata_records import PartitionChangeRecord
from tidelog.replication.controller.image import NO_LEADER, RECOVERED, RECOVERING, MetadataImage, PartitionImage


def elect_returning_broker(image: MetadataImage, node_id: int, *, new_epochs: bool) -> list[PartitionChangeRecord]:
    """The broker is back: it leads what has no leader and can have it.

    `new_epochs`: also a new leader epoch where it led before. Needed when its logs may have lost their tails (a power
    cut): what it appends now must be told apart from what was at the same offsets (KIP-101).
    """
    records: list[PartitionChangeRecord] = []
    for topic in image.topics_by_name.values():
        for index, partition in topic.partitions.items():
            change: dict[str, Any] | None = None
            if partition.leader == NO_LEADER:
                change = _clean_election(partition, node_id)
            elif partition.leader == node_id and new_epochs:
                change = {"leader": node_id}
            if change is not None:
                records.append(PartitionChangeRecord(partition_id=index, topic_id=topic.topic_id, **change))
    return records


def _clean_election(partition: PartitionImage, node_id: int) -> dict[str, Any] | None:
    """The fields of the change that makes `node_id` leader of a leaderless partition; None if it may not lead."""
    isr, elr = partition.isr, partition.elr
    last_known = not isr and not elr and partition.last_known_elr == (node_id,)
    if node_id not in isr and node_id not in elr and not last_known:
        return None
    change: dict[str, Any] = {"leader": node_id}
    if node_id not in isr:
        change["isr"] = [node_id]
    if partition.leader_recovery_state == RECOVERING and len(partition.replicas) == 1:
        change["leader_recovery_state"] = RECOVERED  # there is nobody to recover from
    if node_id in elr:
        change["eligible_leader_replicas"] = [replica for replica in elr if replica != node_id]
    if partition.last_known_elr:
        change["last_known_elr"] = []
    return change
