"""The metrics of the cluster as this node has it: its part in the quorum, the metadata, and for a controller what all
the cluster's partitions add up to.

Counted anew only when the image is another one, in slices of the loop's time.
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

# Partitions looked at in one turn of the loop.
SLICE = 2_000
OBSERVER = "observer"  # a follower that has no vote


class ClusterCounts:
    """Kafka's ControllerMetadataMetrics, of one image."""

    def __init__(self) -> None:
        self._image: MetadataImage | None = None
        self._previous: MetadataImage | None = None
        self.partitions = self.offline = self.imbalance = 0
        self.unclean_elections = 0
        """Leaders that were not in the ISR before, in the images told of since the start."""

    def on_image(self, image: MetadataImage, delta: MetadataDelta) -> None:
        before, self._previous = self._previous, image
        for topic_id, indexes in delta.changed_partitions.items():
            topic = image.topics_by_id.get(topic_id)
            earlier = before.topics_by_id.get(topic_id) if before is not None else None
            if topic is None or earlier is None:
                continue
            for index in indexes:
                now, then = topic.partitions.get(index), earlier.partitions.get(index)
                if now is not None and then is not None:
                    self.unclean_elections += now.leader != NO_LEADER and now.leader not in then.isr

    async def update(self, image: MetadataImage) -> None:
        if image is self._image:
            return
        partitions = offline = imbalance = looked_at = 0
        for topic in image.topics_by_name.values():
            for placed in topic.partitions.values():
                offline += placed.leader == NO_LEADER
                imbalance += not placed.replicas or placed.leader != placed.replicas[0]
            partitions += len(topic.partitions)
            if partitions - looked_at > SLICE:
                looked_at = partitions
                await asyncio.sleep(0)
        self.partitions, self.offline, self.imbalance = partitions, offline, imbalance
        self._image = image


def tell_quorum(metadata: MetadataSide, out: Exposition) -> None:
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


async def tell_controller(metadata: MetadataSide, counts: ClusterCounts, out: Exposition) -> None:
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
