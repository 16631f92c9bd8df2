"""Every metric of a node: its name, its labels, what it means, and which of Kafka's says the same.

A table, no code. `docs/operations.md` shows it, and a scrape takes names, types and help from it; `metrics*.py` fill in
the values. Names follow Prometheus: base units, `_total` for what only grows, one prefix.
"""

from __future__ import annotations

from typing import NamedTuple

GAUGE, COUNTER, HISTOGRAM = "gauge", "counter", "histogram"


class Metric(NamedTuple):
    """`kafka`: the MBean, as type:name below `kafka.server` and its like; empty where Kafka has none."""

    name: str
    kind: str
    labels: tuple[str, ...]
    help: str
    kafka: str


_ROWS: tuple[tuple[str, str, str, str, str], ...] = (
    ("tidelog_topic_bytes_in_total", COUNTER, "topic",
     "Bytes of record batches appended for producers and coordinators.", "BrokerTopicMetrics:BytesInPerSec"),
    ("tidelog_topic_records_in_total", COUNTER, "topic",
     "Records appended for producers and coordinators.", "BrokerTopicMetrics:MessagesInPerSec"),
    ("tidelog_topic_bytes_out_total", COUNTER, "topic",
     "Bytes of record batches sent to consumers.", "BrokerTopicMetrics:BytesOutPerSec"),
    ("tidelog_connections", GAUGE, "listener",
     "Open connections.", "socket-server-metrics:connection-count"),
    ("tidelog_partitions", GAUGE, "",
     "Replicas that live on this node.", "ReplicaManager:PartitionCount"),
    ("tidelog_leader_partitions", GAUGE, "",
     "Replicas on this node that lead.", "ReplicaManager:LeaderCount"),
)  # fmt: skip

METRICS: dict[str, Metric] = {
    name: Metric(name, kind, tuple(labels.split()), text, kafka) for name, kind, labels, text, kafka in _ROWS
}
