"""The totals of a sender for `metrics()`: of records, batches and requests. Pure."""

from __future__ import annotations

from tidelog.client.metrics import ProducerMetrics


class SenderTotals:
    """Counts since the start of the producer."""

    __slots__ = (
        "answered_requests",
        "batches_split",
        "bytes_sent",
        "latency_max_ms",
        "latency_sum_ms",
        "records_delivered",
        "records_failed",
        "records_retried",
        "requests",
        "requests_in_flight",
    )

    def __init__(self) -> None:
        self.records_delivered = 0
        self.records_failed = 0
        self.records_retried = 0
        self.batches_split = 0
        self.requests = 0
        self.requests_in_flight = 0
        self.answered_requests = 0
        self.bytes_sent = 0
        self.latency_sum_ms = 0.0
        self.latency_max_ms = 0.0

    def handle_end(self, latency_ms: float, is_answered: bool) -> None:
        """Note that a request was answered, or that it ended without an answer."""
        self.requests_in_flight -= 1
        if is_answered:
            self.answered_requests += 1
            self.latency_sum_ms += latency_ms
            if latency_ms > self.latency_max_ms:
                self.latency_max_ms = latency_ms

    def note_direct_send(self, size_bytes: int, latency_ms: float) -> None:
        """Note a request with one record that is delivered."""
        self.requests += 1
        self.requests_in_flight += 1
        self.bytes_sent += size_bytes
        self.records_delivered += 1
        self.handle_end(latency_ms, is_answered=True)

    def snapshot(
        self, buffer_bytes: int, used_bytes: int, incomplete_batches: int, waiting_calls: int
    ) -> ProducerMetrics:
        """The totals now, beside the state of the producer's memory."""
        return ProducerMetrics(
            record_delivered_total=self.records_delivered,
            record_error_total=self.records_failed,
            record_retry_total=self.records_retried,
            batch_split_total=self.batches_split,
            request_total=self.requests,
            byte_total=self.bytes_sent,
            request_latency_avg_ms=self.latency_sum_ms / max(1, self.answered_requests),
            request_latency_max_ms=self.latency_max_ms,
            requests_in_flight=self.requests_in_flight,
            incomplete_batches=incomplete_batches,
            buffer_total_bytes=buffer_bytes,
            buffer_available_bytes=max(0, buffer_bytes - used_bytes),
            waiting_calls=waiting_calls,
        )
