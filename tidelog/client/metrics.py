"""What `metrics()` of a producer and a consumer returns: totals since the start, and the present state.

Plain values of one moment. Names are Kafka's where the meaning is the same, units last.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tidelog.client.model import TopicPartition


@dataclass(frozen=True, slots=True)
class ProducerMetrics:
    """A producer at one moment. A total never falls."""

    record_delivered_total: int
    """Records that a broker has acknowledged; with acks=0 those that were sent."""
    record_error_total: int
    """Records that had a place in a batch and are not delivered."""
    record_retry_total: int
    """Records in batches that were sent again."""
    batch_split_total: int
    request_total: int
    """Produce requests."""
    byte_total: int
    """Bytes of record batches in these requests, after compression."""
    request_latency_avg_ms: float
    """Of the answered requests; 0 without one."""
    request_latency_max_ms: float
    requests_in_flight: int
    incomplete_batches: int
    """Batches in memory that are not delivered and have not failed."""
    buffer_total_bytes: int
    buffer_available_bytes: int
    waiting_calls: int
    """Calls that wait for memory."""


@dataclass(frozen=True, slots=True)
class ConsumerMetrics:
    """A consumer at one moment."""

    records_consumed_total: int
    """Records that polls and iterations have taken."""
    assigned_partitions: int
    lag: Mapping[TopicPartition, int | None]
    """As `lag()` of each assigned partition."""

    @property
    def records_lag_max(self) -> int | None:
        """The largest known lag; None while none is known."""
        return max((lag for lag in self.lag.values() if lag is not None), default=None)
