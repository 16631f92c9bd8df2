"""The metrics of the cluster: this node's role in the quorum, the metadata, and a
controller's partition counts.

The partitions are counted again only for a new image, with pauses for the event loop.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from tidelog.replication.controller.metadata.image import NO_LEADER
from tidelog.replication.quorum.raft.state import Role

if TYPE_CHECKING:
    from tidelog.broker.metadata_side import MetadataSide
    from tidelog.broker.metrics.exposition import Exposition
    from tidelog.replication.controller.metadata.image import MetadataDelta, MetadataImage

# The number of partitions that one turn of the loop counts.
PARTITIONS_PER_TURN = 2_000
OBSERVER = "observer"  # a follower without a vote


class ClusterCounts:
    """Kafka's ControllerMetadataMetrics for one image."""

    def __init__(self) -> None:
        self._image: MetadataImage | None = None
        self._previous: MetadataImage | None = None
        self.partitions = self.offline = self.imbalance = 0
        self.unclean_elections = 0
        """Elections of leaders outside of the ISR, in all images since the start."""

    def on_image(self, image: MetadataImage, delta: MetadataDelta) -> None:
        previous_image, self._previous = self._previous, image
        for topic_id, indexes in delta.changed_partitions.items():
            topic = image.topics_by_id.get(topic_id)
            old_topic = previous_image.topics_by_id.get(topic_id) if previous_image is not None else None
            if topic is None or old_topic is None:
                continue
            for index in indexes:
                new_partition, old_partition = topic.partitions.get(index), old_topic.partitions.get(index)
                if new_partition is not None and old_partition is not None:
                    self.unclean_elections += (
                        new_partition.leader != NO_LEADER and new_partition.leader not in old_partition.isr
                    )

    async def update(self, image: MetadataImage) -> None:
        if image is self._image:
            return
        partitions = offline = imbalance = counted = 0
        for topic in image.topics_by_name.values():
            for partition in topic.partitions.values():
                offline += partition.leader == NO_LEADER
                imbalance += not partition.replicas or partition.leader != partition.replicas[0]
            partitions += len(topic.partitions)
            if partitions - counted > PARTITIONS_PER_TURN:
                counted = partitions
                await asyncio.sleep(0)
        self.partitions, self.offline, self.imbalance = partitions, offline, imbalance
        self._image = image


def collect_quorum(metadata: MetadataSide, out: Exposition) -> None:
    raft, tracker = metadata.raft, metadata.tracker
    out.add("tidelog_metadata_applied_offset", tracker.offset)
    out.add("tidelog_metadata_applied_timestamp_seconds", max(tracker.image.timestamp_ms, 0) / 1000)
    own = raft.raft.role.value.lower() if raft.raft.can_vote or raft.raft.role is not Role.FOLLOWER else OBSERVER
    for role in (*(role.value.lower() for role in Role), OBSERVER):
        out.add("tidelog_quorum_role", own == role, role)
    out.add("tidelog_quorum_leader_id", raft.leader_id)
    out.add("tidelog_quorum_epoch", raft.epoch)
    out.add("tidelog_quorum_voters", len(raft.voter_ids()))
    out.add("tidelog_quorum_log_end_offset", raft.end_offset)
    out.add("tidelog_quorum_high_watermark", raft.high_watermark)


async def collect_controller(metadata: MetadataSide, counts: ClusterCounts, out: Exposition) -> None:
    if metadata.controller is None:
        return
    image = metadata.image
    await counts.update(image)
    fenced = sum(broker.fenced for broker in image.brokers.values())
    out.add("tidelog_controller_active", metadata.controller.is_active)
    out.add("tidelog_controller_active_brokers", len(image.brokers) - fenced)
    out.add("tidelog_controller_fenced_brokers", fenced)
    out.add("tidelog_controller_topics", len(image.topics_by_name))
    out.add("tidelog_controller_partitions", counts.partitions)
    out.add("tidelog_controller_offline_partitions", counts.offline)
    out.add("tidelog_controller_preferred_replica_imbalance", counts.imbalance)
    out.add("tidelog_controller_unclean_elections_total", counts.unclean_elections)
