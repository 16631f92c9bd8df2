"""The metrics of topics, replicas and disks: one look at every partition, in slices, then what it added up to.

A topic gets series of its own as long as there are fewer than `metrics.topics.max`; what came later is added up under
one name that no topic can have. Invariant: a counter never goes back, so a topic stays where it was first put, and what
the others had counted is kept when they are deleted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import TYPE_CHECKING

from tidelog.broker.network.counters import TopicTraffic

if TYPE_CHECKING:
    from tidelog.broker.broker_side import BrokerSide
    from tidelog.broker.metrics.exposition import Exposition
    from tidelog.replication.controller.metadata.image import MetadataImage
    from tidelog.replication.partition import Partition

# Partitions looked at in one turn of the loop: about a millisecond.
SLICE = 250
OTHERS = "(others)"

_TRAFFIC = {
    "tidelog_topic_bytes_in_total": "bytes_in",
    "tidelog_topic_records_in_total": "records_in",
    "tidelog_topic_bytes_out_total": "bytes_out",
    "tidelog_topic_bytes_rejected_total": "bytes_rejected",
    "tidelog_topic_produce_failures_total": "produce_failures",
}


class TopicSeries:
    """Which topics have series of their own, and what all others have counted so far."""

    def __init__(self, topics_max: int) -> None:
        self._topics_max = topics_max
        self.shown: dict[str, None] = {}
        self._others: dict[str, TopicTraffic] = {}
        self._gone = TopicTraffic()  # of others that are deleted, or were deleted and made again

    def update(self, traffic: dict[str, TopicTraffic]) -> None:
        for topic in [topic for topic in self.shown if topic not in traffic]:
            del self.shown[topic]
        for topic, last in list(self._others.items()):
            if traffic.get(topic) is not last:
                _add(self._gone, last)
                del self._others[topic]
        for topic, counters in traffic.items():
            if topic in self.shown or topic in self._others:
                continue
            if len(self.shown) < self._topics_max:
                self.shown[topic] = None
            else:
                self._others[topic] = counters

    def label(self, topic: str) -> str:
        return topic if topic in self.shown else OTHERS

    def others(self) -> TopicTraffic | None:
        """Everything that is not shown by itself; None when there was never any of it."""
        total = TopicTraffic()
        for each in (self._gone, *self._others.values()):
            _add(total, each)
        return total if self._others or any(getattr(total, name) for name in TopicTraffic.__slots__) else None


def _add(total: TopicTraffic, more: TopicTraffic) -> None:
    for name in TopicTraffic.__slots__:
        setattr(total, name, getattr(total, name) + getattr(more, name))


class Survey:
    """What the partitions of this node add up to. Counts are as Kafka's ReplicaManager and Partition define them."""

    def __init__(self) -> None:
        self.partitions = self.leaders = self.offline = 0
        self.under_replicated = self.under_min_isr = self.at_min_isr = self.reassigning = 0
        self.producer_ids = 0
        self.produces_waiting = 0
        self.damaged_ranges = 0
        self.sizes: dict[str, int] = {}
        self.directory_sizes: dict[str, int] = {}
        self.segments: dict[str, int] = {}

    def look_at(self, partitions: Iterable[Partition], image: MetadataImage) -> None:
        for partition in partitions:
            log, watch = partition.log, partition.watch
            self.partitions += 1
            self.offline += partition.offline
            self.producer_ids += len(log.producers)
            self.damaged_ranges += len(log.damaged_ranges())
            self.produces_waiting += len(watch.produces.waiting) + len(watch.syncs.waiting)
            topic, size_bytes = partition.topic, log.size_bytes
            directory = log.directory.rpartition("/")[0]
            self.sizes[topic] = self.sizes.get(topic, 0) + size_bytes
            self.directory_sizes[directory] = self.directory_sizes.get(directory, 0) + size_bytes
            self.segments[topic] = self.segments.get(topic, 0) + log.segment_count
            if partition.leads:
                self._look_at_leader(partition, image)

    def _look_at_leader(self, partition: Partition, image: MetadataImage) -> None:
        self.leaders += 1
        book = partition.in_sync
        in_sync = len(book.isr)
        replicas = len(book.replicas)
        topic = image.topics_by_id.get(partition.topic_id)
        placed = topic.partitions.get(partition.index) if topic is not None else None
        if placed is not None and (placed.adding_replicas or placed.removing_replicas):
            self.reassigning += 1
            replicas -= len(placed.adding_replicas)  # those it had before (Kafka's OngoingReassignmentState)
        needed = book.min_isr(partition.min_insync_replicas)
        self.under_replicated += in_sync < replicas
        self.under_min_isr += in_sync < needed
        self.at_min_isr += in_sync == needed


async def survey(broker: BrokerSide, image: MetadataImage) -> Survey:
    found = Survey()
    hosted = list(broker.partitions.hosted())
    for start in range(0, len(hosted), SLICE):
        found.look_at((each for each in hosted[start : start + SLICE] if each.watch is not None), image)
        await asyncio.sleep(0)
    found.offline += broker.partitions.unavailable_count
    return found


def tell_replicas(found: Survey, broker: BrokerSide, out: Exposition) -> None:
    out.add("tidelog_partitions", found.partitions)
    out.add("tidelog_leader_partitions", found.leaders)
    out.add("tidelog_under_replicated_partitions", found.under_replicated)
    out.add("tidelog_under_min_isr_partitions", found.under_min_isr)
    out.add("tidelog_at_min_isr_partitions", found.at_min_isr)
    out.add("tidelog_offline_replicas", found.offline)
    out.add("tidelog_reassigning_partitions", found.reassigning)
    out.add("tidelog_producer_ids", found.producer_ids)
    ports = broker.partitions.replica_ports
    out.add("tidelog_isr_shrinks_total", ports.isr_shrinks)
    out.add("tidelog_isr_expands_total", ports.isr_expands)
    out.add("tidelog_isr_failed_updates_total", ports.isr_rejections)
    out.add("tidelog_replication_bytes_in_total", broker.fetchers.bytes_in)
    out.add("tidelog_replication_bytes_out_total", broker.partitions.follower_fetches.answers.bytes_out)
    out.add("tidelog_replica_lag_records_max", broker.fetchers.lag_records_max)
    out.add("tidelog_replica_fetches_failing", broker.fetchers.failing_count)


def tell_topics(found: Survey, broker: BrokerSide, series: TopicSeries, out: Exposition) -> None:
    traffic = broker.partitions.traffic
    series.update(traffic)
    others = series.others()
    for name, attribute in _TRAFFIC.items():
        for topic in series.shown:
            out.add(name, getattr(traffic[topic], attribute), topic)
        if others is not None:
            out.add(name, getattr(others, attribute), OTHERS)
    for name, values in (("tidelog_log_size_bytes", found.sizes), ("tidelog_log_segments", found.segments)):
        totals: dict[str, int] = {}
        for topic, value in values.items():
            label = series.label(topic)
            totals[label] = totals.get(label, 0) + value
        for label, value in totals.items():
            out.add(name, value, label)


def tell_disks(found: Survey, broker: BrokerSide, out: Exposition) -> None:
    directories = broker.directories
    for directory in directories:
        out.add("tidelog_log_directory_offline", 0, directory.path)
        out.add("tidelog_log_directory_size_bytes", found.directory_sizes.get(directory.path, 0), directory.path)
    for path in directories.offline:
        out.add("tidelog_log_directory_offline", 1, path)
    out.add("tidelog_offline_log_directories", len(directories.offline))
    out.add_histogram("tidelog_log_flush_duration_seconds", broker.partitions.flushes.durations)


def tell_damage(found: Survey, broker: BrokerSide, out: Exposition) -> None:
    scrubbed, repairs = broker.scrubber.counters, broker.repairs.counters
    out.add("tidelog_scrub_verified_bytes_total", scrubbed.verified_bytes)
    out.add("tidelog_scrub_passes_total", scrubbed.passes)
    out.add("tidelog_damaged_ranges_found_total", repairs.ranges_found)
    out.add("tidelog_damaged_ranges_repaired_total", repairs.ranges_repaired)
    out.add("tidelog_damaged_ranges_lost_total", repairs.ranges_lost)
    out.add("tidelog_damaged_ranges", found.damaged_ranges)


def tell_cleaner(broker: BrokerSide, out: Exposition) -> None:
    cleaner = broker.cleaner
    totals = cleaner.totals
    out.add("tidelog_cleaner_runs_total", totals.cleanings)
    out.add("tidelog_cleaner_bytes_read_total", totals.bytes_read)
    out.add("tidelog_cleaner_bytes_written_total", totals.bytes_written)
    out.add("tidelog_cleaner_recopy_ratio", totals.last_recopy_percent / 100)
    out.add("tidelog_cleaner_buffer_utilization_ratio", totals.last_buffer_utilization_percent / 100)
    out.add("tidelog_cleaner_last_run_seconds", totals.last_duration_s)
    out.add("tidelog_cleaner_dirty_ratio_max", cleaner.dirtiest_percent / 100)
    out.add("tidelog_cleaner_delay_seconds_max", cleaner.delay_ms_max / 1000)
    out.add("tidelog_cleaner_last_look_seconds", cleaner.since_last_look_ms / 1000)
    out.add("tidelog_cleaner_uncleanable_partitions", len(cleaner.uncleanable))
