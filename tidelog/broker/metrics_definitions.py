"""Every metric of a node: its name, its labels, what it means, and which of Kafka's says the same.

A table, no code. `docs/operations.md` shows it, and a scrape takes names, types and help from it; `metrics_*.py` fill
in the values. Names follow Prometheus: base units, `_total` for what only grows, one prefix.
"""

from __future__ import annotations

from typing import NamedTuple

GAUGE, COUNTER, HISTOGRAM = "gauge", "counter", "histogram"


class Metric(NamedTuple):
    """`kafka`: the MBean's type and name that mean the same; empty where Kafka has none."""

    name: str
    kind: str
    labels: tuple[str, ...]
    help: str
    kafka: str


# fmt: off
_ROWS: tuple[tuple[str, str, str, str, str], ...] = (
    # The node
    ("tidelog_info", GAUGE, "version node_id cluster_id roles",
     "Always 1; says which node this is.", "app-info"),
    ("tidelog_ready", GAUGE, "",
     "1 where /readyz answers 200: registered, unfenced, caught up with the metadata.", "KafkaServer BrokerState"),
    ("tidelog_loop_delay_seconds", HISTOGRAM, "",
     "How late the event loop is for a timer: what every client waits on top.", ""),
    ("tidelog_loop_cpu_seconds_total", COUNTER, "",
     "CPU time of the event loop's thread; its rate is the share of one core in use.",
     "SocketServer NetworkProcessorAvgIdlePercent"),
    # Requests
    ("tidelog_requests_total", COUNTER, "api version",
     "Requests taken in, by API and version.", "RequestMetrics RequestsPerSec"),
    ("tidelog_request_duration_seconds", HISTOGRAM, "api",
     "From a request's being read whole to its answer's being handed to the socket, waiting included.",
     "RequestMetrics TotalTimeMs"),
    ("tidelog_request_errors_total", COUNTER, "api error",
     "Error codes in answers; an answer may hold several.", "RequestMetrics ErrorsPerSec"),
    ("tidelog_requests_waiting", GAUGE, "operation",
     "What waits: produces, by partition, for replicas or the device; fetches for records; other tasks.",
     "DelayedOperationPurgatory PurgatorySize"),
    ("tidelog_connections", GAUGE, "listener",
     "Open connections.", "socket-server-metrics connection-count"),
    ("tidelog_connections_accepted_total", COUNTER, "server",
     "Connections accepted.", "socket-server-metrics connection-creation-total"),
    ("tidelog_connections_refused_total", COUNTER, "server",
     "Connections closed at once because a limit was reached.", ""),
    ("tidelog_connections_cut_total", COUNTER, "server reason",
     "Connections closed from this side: malformed or failed requests, no buffers, answers unread, idle, or never "
     "answered.",
     "socket-server-metrics expired-connections-killed-count"),
    ("tidelog_receive_buffer_bytes", GAUGE, "server",
     "Memory held for requests on their way in.", "MemoryPoolUsed"),
    ("tidelog_fetch_sessions", GAUGE, "kind",
     "Fetch sessions of consumers and of followers.", "FetchSessionCache NumIncrementalFetchSessions"),
    ("tidelog_fetch_session_partitions", GAUGE, "kind",
     "Partitions in them.", "FetchSessionCache NumIncrementalFetchPartitionsCached"),
    ("tidelog_fetch_session_evictions_total", COUNTER, "",
     "Consumers' sessions given up for newer ones.", "FetchSessionCache IncrementalFetchSessionEvictionsPerSec"),
    # Topics
    ("tidelog_topic_bytes_in_total", COUNTER, "topic",
     "Bytes of record batches appended as leader.", "BrokerTopicMetrics BytesInPerSec"),
    ("tidelog_topic_records_in_total", COUNTER, "topic",
     "Records appended as leader.", "BrokerTopicMetrics MessagesInPerSec"),
    ("tidelog_topic_bytes_out_total", COUNTER, "topic",
     "Bytes of record batches sent to consumers.", "BrokerTopicMetrics BytesOutPerSec"),
    ("tidelog_topic_bytes_rejected_total", COUNTER, "topic",
     "Bytes of batches refused for being larger than max.message.bytes.", "BrokerTopicMetrics BytesRejectedPerSec"),
    ("tidelog_topic_produce_failures_total", COUNTER, "topic",
     "Appends that failed for a reason the producer could not have known.",
     "BrokerTopicMetrics FailedProduceRequestsPerSec"),
    ("tidelog_log_size_bytes", GAUGE, "topic",
     "Size of the topic's segments on this node.", "Log Size"),
    ("tidelog_log_segments", GAUGE, "topic",
     "The topic's segments on this node.", "Log NumLogSegments"),
    # Replicas
    ("tidelog_partitions", GAUGE, "",
     "Replicas that live on this node.", "ReplicaManager PartitionCount"),
    ("tidelog_leader_partitions", GAUGE, "",
     "Those of them that lead.", "ReplicaManager LeaderCount"),
    ("tidelog_under_replicated_partitions", GAUGE, "",
     "Partitions led here with fewer replicas in sync than it has.", "ReplicaManager UnderReplicatedPartitions"),
    ("tidelog_under_min_isr_partitions", GAUGE, "",
     "Partitions led here with fewer in sync than min.insync.replicas: acks=all is refused.",
     "ReplicaManager UnderMinIsrPartitionCount"),
    ("tidelog_at_min_isr_partitions", GAUGE, "",
     "Partitions led here where one replica less would be too few.", "ReplicaManager AtMinIsrPartitionCount"),
    ("tidelog_offline_replicas", GAUGE, "",
     "Replicas of this node whose log cannot be used.", "ReplicaManager OfflineReplicaCount"),
    ("tidelog_reassigning_partitions", GAUGE, "",
     "Partitions led here that are being moved.", "ReplicaManager ReassigningPartitions"),
    ("tidelog_producer_ids", GAUGE, "",
     "Idempotent producers remembered, added up over partitions.", "ReplicaManager ProducerIdCount"),
    ("tidelog_isr_shrinks_total", COUNTER, "",
     "Times a leader here had a replica that lagged taken out of the ISR.", "ReplicaManager IsrShrinksPerSec"),
    ("tidelog_isr_expands_total", COUNTER, "",
     "Times one had it taken in again.", "ReplicaManager IsrExpandsPerSec"),
    ("tidelog_isr_failed_updates_total", COUNTER, "",
     "Changes of an ISR that the controller refused.", "ReplicaManager FailedIsrUpdatesPerSec"),
    ("tidelog_replication_bytes_in_total", COUNTER, "",
     "Bytes of record batches fetched from leaders.", "BrokerTopicMetrics ReplicationBytesInPerSec"),
    ("tidelog_replication_bytes_out_total", COUNTER, "",
     "Bytes of record batches sent to followers.", "BrokerTopicMetrics ReplicationBytesOutPerSec"),
    ("tidelog_replica_lag_records_max", GAUGE, "",
     "How far the replica here that is furthest behind its leader is.", "ReplicaFetcherManager MaxLag"),
    ("tidelog_replica_fetches_failing", GAUGE, "",
     "Replicas here whose last fetch was refused.", "ReplicaFetcherManager FailedPartitionsCount"),
    # Disks
    ("tidelog_log_directory_size_bytes", GAUGE, "directory",
     "Size of all segments in the directory.", ""),
    ("tidelog_log_directory_offline", GAUGE, "directory",
     "1 where the directory has failed.", "LogManager LogDirectoryOffline"),
    ("tidelog_offline_log_directories", GAUGE, "",
     "How many have.", "LogManager OfflineLogDirectoryCount"),
    ("tidelog_log_flush_duration_seconds", HISTOGRAM, "",
     "From wanting a log on the device to having it there.", "LogFlushStats LogFlushRateAndTimeMs"),
    ("tidelog_cleaner_runs_total", COUNTER, "",
     "Logs cleaned.", ""),
    ("tidelog_cleaner_bytes_read_total", COUNTER, "",
     "Bytes read while cleaning.", ""),
    ("tidelog_cleaner_bytes_written_total", COUNTER, "",
     "Bytes kept.", ""),
    ("tidelog_cleaner_recopy_ratio", GAUGE, "",
     "What of the log cleaned last was kept.", "LogCleaner cleaner-recopy-percent"),
    ("tidelog_cleaner_buffer_utilization_ratio", GAUGE, "",
     "How full the last cleaning's table of keys was.", "LogCleaner max-buffer-utilization-percent"),
    ("tidelog_cleaner_last_run_seconds", GAUGE, "",
     "How long the last cleaning took.", "LogCleaner max-clean-time-secs"),
    ("tidelog_cleaner_dirty_ratio_max", GAUGE, "",
     "The dirty part of the dirtiest log that could be cleaned.", "LogCleanerManager max-dirty-percent"),
    ("tidelog_cleaner_delay_seconds_max", GAUGE, "",
     "How overdue the most urgent cleaning is (max.compaction.lag.ms).", "LogCleaner max-compaction-delay-secs"),
    ("tidelog_cleaner_last_look_seconds", GAUGE, "",
     "Time since the cleaner last looked for work.", "LogCleanerManager time-since-last-run-ms"),
    ("tidelog_cleaner_uncleanable_partitions", GAUGE, "",
     "Logs that could not be cleaned and are left as they are.", "LogCleanerManager uncleanable-partitions-count"),
    # Groups
    ("tidelog_groups", GAUGE, "state",
     "Groups coordinated here.", "GroupMetadataManager NumGroups, NumGroupsStable and others"),
    ("tidelog_group_lag_records", GAUGE, "group topic partition",
     "Records committed by producers and not yet by the group.", ""),
    ("tidelog_group_lag_series_left_out", GAUGE, "",
     "1 where there are more group lags than are shown.", ""),
    # The cluster
    ("tidelog_metadata_applied_offset", GAUGE, "",
     "The last metadata record this node acts upon.", "broker-metadata-metrics last-applied-record-offset"),
    ("tidelog_metadata_applied_timestamp_seconds", GAUGE, "",
     "When it was written.", "broker-metadata-metrics last-applied-record-timestamp"),
    ("tidelog_quorum_role", GAUGE, "role",
     "1 for this node's role in the metadata quorum.", "raft-metrics current-state"),
    ("tidelog_quorum_leader_id", GAUGE, "",
     "Its leader, -1 while none is known.", "raft-metrics current-leader"),
    ("tidelog_quorum_epoch", GAUGE, "",
     "The epoch it is in.", "raft-metrics current-epoch"),
    ("tidelog_quorum_voters", GAUGE, "",
     "Its voters.", "raft-metrics number-of-voters"),
    ("tidelog_quorum_log_end_offset", GAUGE, "",
     "Where this node's metadata log ends.", "raft-metrics log-end-offset"),
    ("tidelog_quorum_high_watermark", GAUGE, "",
     "Up to where it is committed, -1 while unknown.", "raft-metrics high-watermark"),
    ("tidelog_controller_active", GAUGE, "",
     "1 where this node's controller is the active one.", "KafkaController ActiveControllerCount"),
    ("tidelog_controller_active_brokers", GAUGE, "",
     "Brokers that are registered and not fenced.", "KafkaController ActiveBrokerCount"),
    ("tidelog_controller_fenced_brokers", GAUGE, "",
     "Brokers that are registered and fenced.", "KafkaController FencedBrokerCount"),
    ("tidelog_controller_topics", GAUGE, "",
     "Topics in the cluster.", "KafkaController GlobalTopicCount"),
    ("tidelog_controller_partitions", GAUGE, "",
     "Partitions in the cluster.", "KafkaController GlobalPartitionCount"),
    ("tidelog_controller_offline_partitions", GAUGE, "",
     "Partitions without a leader.", "KafkaController OfflinePartitionsCount"),
    ("tidelog_controller_preferred_replica_imbalance", GAUGE, "",
     "Partitions led by another than their first replica.", "KafkaController PreferredReplicaImbalanceCount"),
    ("tidelog_controller_unclean_elections_total", COUNTER, "",
     "Elections of a leader that was not in sync: records were lost.", "ControllerStats UncleanLeaderElectionsPerSec"),
)
# fmt: on

METRICS: dict[str, Metric] = {
    name: Metric(name, kind, tuple(labels.split()), text, kafka) for name, kind, labels, text, kafka in _ROWS
}
