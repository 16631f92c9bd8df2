"""The metrics of topics, replicas and disks: totals over all partitions,
counted with pauses for the loop.

The first `metrics.topics.max` topics have series of their own. Later topics share one series, whose
name no topic can have. Invariant: a counter never decreases. Therefore a topic keeps its series,
and the shared series keeps the counts of deleted topics.
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

# The number of partitions that one turn of the loop counts, in about a millisecond.
PARTITIONS_PER_TURN = 250
OTHERS = "(others)"
# A transaction is late when it is open for longer than transaction.max.timeout.ms and this, as in Kafka.
LATE_GRACE_MS = 300_000

_TRAFFIC = {
    "tidelog_topic_bytes_in_total": "bytes_in",
    "tidelog_topic_records_in_total": "records_in",
    "tidelog_topic_bytes_out_total": "bytes_out",
    "tidelog_topic_bytes_rejected_total": "bytes_rejected",
    "tidelog_topic_produce_failures_total": "produce_failures",
}


class TopicSeries:
    """The topics with series of their own, and the counts of all other topics."""

    def __init__(self, topics_max: int) -> None:
        self._topics_max = topics_max
        self.shown: dict[str, None] = {}
        self._others: dict[str, TopicTraffic] = {}
        self._deleted = TopicTraffic()  # of other topics that were deleted, or deleted and created again

    def update(self, traffic: dict[str, TopicTraffic]) -> None:
        for topic in [topic for topic in self.shown if topic not in traffic]:
            del self.shown[topic]
        for topic, counters in list(self._others.items()):
            if traffic.get(topic) is not counters:
                _add(self._deleted, counters)
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
        """The totals of the topics without series of their own; None if there never was such a
        topic.
        """
        total = TopicTraffic()
        for counters in (self._deleted, *self._others.values()):
            _add(total, counters)
        return total if self._others or any(getattr(total, name) for name in TopicTraffic.__slots__) else None


def _add(total: TopicTraffic, more: TopicTraffic) -> None:
    for name in TopicTraffic.__slots__:
        setattr(total, name, getattr(total, name) + getattr(more, name))


class PartitionTotals:
    """The totals over the partitions of this node, by the definitions of
    Kafka's ReplicaManager and Partition.
    """

    def __init__(self, now_ms: int = 0, late_after_ms: int = 0) -> None:
        """`late_after_ms`: a transaction whose producer has been silent for longer should be over."""
        self._now_ms = now_ms
        self._late_after_ms = late_after_ms
        self.partitions = self.leaders = self.offline = 0
        self.under_replicated = self.under_min_isr = self.at_min_isr = self.reassigning = 0
        self.producer_ids = 0
        self.produces_waiting = 0
        self.damaged_ranges = 0
        self.sizes: dict[str, int] = {}
        self.directory_sizes: dict[str, int] = {}
        self.segments: dict[str, int] = {}
        self.open_transactions = self.late_transactions = 0
        self.oldest_transaction_ms = 0
        self.stable_offset_lags: dict[str, int] = {}

    def add_partitions(self, partitions: Iterable[Partition], image: MetadataImage) -> None:
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
                self._add_leader(partition, image)

    def _add_leader(self, partition: Partition, image: MetadataImage) -> None:
        self.leaders += 1
        self._add_transactions(partition)
        in_sync = partition.in_sync
        isr_size = len(in_sync.isr)
        replicas = len(in_sync.replicas)
        topic = image.topics_by_id.get(partition.topic_id)
        assignment = topic.partitions.get(partition.index) if topic is not None else None
        if assignment is not None and (assignment.adding_replicas or assignment.removing_replicas):
            self.reassigning += 1
            replicas -= len(
                assignment.adding_replicas
            )  # the replicas before the reassignment (Kafka's OngoingReassignmentState)
        min_isr = in_sync.min_isr(partition.min_insync_replicas)
        self.under_replicated += isr_size < replicas
        self.under_min_isr += isr_size < min_isr
        self.at_min_isr += isr_size == min_isr

    def _add_transactions(self, partition: Partition) -> None:
        log, topic = partition.log, partition.topic
        lag = log.high_watermark - log.last_stable_offset
        if lag >= self.stable_offset_lags.get(topic, 0):
            self.stable_offset_lags[topic] = lag
        oldest_ms = log.producers.oldest_transaction_timestamp
        if oldest_ms >= 0:
            age_ms = max(self._now_ms - oldest_ms, 0)
            self.open_transactions += log.producers.open_transaction_count
            self.oldest_transaction_ms = max(self.oldest_transaction_ms, age_ms)
            self.late_transactions += age_ms > self._late_after_ms


async def partition_totals(broker: BrokerSide, image: MetadataImage) -> PartitionTotals:
    totals = PartitionTotals(broker.partitions.wall_ms(), broker.transaction_timeout_ms_max + LATE_GRACE_MS)
    hosted = list(broker.partitions.hosted())
    for start in range(0, len(hosted), PARTITIONS_PER_TURN):
        totals.add_partitions(
            (partition for partition in hosted[start : start + PARTITIONS_PER_TURN] if partition.watch is not None),
            image,
        )
        await asyncio.sleep(0)
    totals.offline += broker.partitions.unavailable_count
    return totals


def collect_replicas(totals: PartitionTotals, broker: BrokerSide, out: Exposition) -> None:
    out.add("tidelog_partitions", totals.partitions)
    out.add("tidelog_leader_partitions", totals.leaders)
    out.add("tidelog_under_replicated_partitions", totals.under_replicated)
    out.add("tidelog_under_min_isr_partitions", totals.under_min_isr)
    out.add("tidelog_at_min_isr_partitions", totals.at_min_isr)
    out.add("tidelog_offline_replicas", totals.offline)
    out.add("tidelog_reassigning_partitions", totals.reassigning)
    out.add("tidelog_producer_ids", totals.producer_ids)
    ports = broker.partitions.replica_ports
    out.add("tidelog_isr_shrinks_total", ports.isr_shrinks)
    out.add("tidelog_isr_expands_total", ports.isr_expands)
    out.add("tidelog_isr_failed_updates_total", ports.isr_rejections)
    out.add("tidelog_replication_bytes_in_total", broker.fetchers.bytes_in)
    out.add("tidelog_replication_bytes_out_total", broker.partitions.follower_fetches.answers.bytes_out)
    out.add("tidelog_replica_lag_records_max", broker.fetchers.lag_records_max)
    out.add("tidelog_replica_fetches_failing", broker.fetchers.failing_count)


def collect_transactions(totals: PartitionTotals, broker: BrokerSide, out: Exposition) -> None:
    out.add("tidelog_open_transactions", totals.open_transactions)
    out.add("tidelog_oldest_open_transaction_seconds", totals.oldest_transaction_ms / 1000)
    out.add("tidelog_partitions_with_late_transactions", totals.late_transactions)
    starts_ms = list(broker.transactions.open_start_times_ms())
    oldest_ms = broker.partitions.wall_ms() - min(starts_ms) if starts_ms else 0
    out.add("tidelog_transactional_ids", broker.transactions.id_count)
    out.add("tidelog_ongoing_transactions", len(starts_ms))
    out.add("tidelog_oldest_ongoing_transaction_seconds", max(oldest_ms, 0) / 1000)
    out.add("tidelog_transaction_markers_waiting", len(broker.marker_sender))
    out.add("tidelog_transaction_markers_retried", broker.marker_sender.waiting_partitions)
    out.add("tidelog_transaction_verification_failures_total", broker.verifier.failures)


def collect_topics(totals: PartitionTotals, broker: BrokerSide, series: TopicSeries, out: Exposition) -> None:
    traffic = broker.partitions.traffic
    series.update(traffic)
    others = series.others()
    for name, attribute in _TRAFFIC.items():
        for topic in series.shown:
            out.add(name, getattr(traffic[topic], attribute), topic)
        if others is not None:
            out.add(name, getattr(others, attribute), OTHERS)
    for name, values in (("tidelog_log_size_bytes", totals.sizes), ("tidelog_log_segments", totals.segments)):
        by_label: dict[str, int] = {}
        for topic, value in values.items():
            label = series.label(topic)
            by_label[label] = by_label.get(label, 0) + value
        for label, value in by_label.items():
            out.add(name, value, label)
    lags: dict[str, int] = {}
    for topic, lag in totals.stable_offset_lags.items():
        label = series.label(topic)
        lags[label] = max(lags.get(label, 0), lag)
    for label, lag in lags.items():
        out.add("tidelog_stable_offset_lag_records", lag, label)


def collect_disks(totals: PartitionTotals, broker: BrokerSide, out: Exposition) -> None:
    directories = broker.directories
    for directory in directories:
        out.add("tidelog_log_directory_offline", 0, directory.path)
        out.add("tidelog_log_directory_size_bytes", totals.directory_sizes.get(directory.path, 0), directory.path)
    for path in directories.offline:
        out.add("tidelog_log_directory_offline", 1, path)
    out.add("tidelog_offline_log_directories", len(directories.offline))
    out.add_histogram("tidelog_log_flush_duration_seconds", broker.partitions.flushes.durations)


def collect_damage(totals: PartitionTotals, broker: BrokerSide, out: Exposition) -> None:
    scrub_counters, repairs = broker.scrubber.counters, broker.repairs.counters
    out.add("tidelog_scrub_verified_bytes_total", scrub_counters.verified_bytes)
    out.add("tidelog_scrub_passes_total", scrub_counters.passes)
    out.add("tidelog_damaged_ranges_found_total", repairs.ranges_found)
    out.add("tidelog_damaged_ranges_repaired_total", repairs.ranges_repaired)
    out.add("tidelog_damaged_ranges_lost_total", repairs.ranges_lost)
    out.add("tidelog_damaged_ranges", totals.damaged_ranges)


def collect_cleaner(broker: BrokerSide, out: Exposition) -> None:
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
