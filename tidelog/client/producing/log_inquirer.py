"""Fetches one producer's last sequence in the leaders' logs (DescribeProducers, KIP-664).

Here: one request per leader, retries, errors. `producer_session` decides when to inquire and what a
result means. Invariant: an open inquiry has a request in flight, waits for its retry, or starts
with the next `start`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Any

from tidelog.client.client_logging import client_logger
from tidelog.client.model import TopicPartition
from tidelog.client.network.cluster import Cluster
from tidelog.client.network.outcomes import start_task
from tidelog.client.producing.accumulator import ProducerBatch
from tidelog.client.producing.producer_session import ProducerSession
from tidelog.protocol.errors import ErrorCode, KafkaError
from tidelog.protocol.messages.describe_producers import (
    DescribeProducersRequest,
    DescribeProducersRequestTopicRequest,
    DescribeProducersResponse,
    DescribeProducersResponsePartitionResponse,
)

logger = client_logger(__name__)

Inquiry = tuple[TopicPartition, int]
OnLogEnd = Callable[[ProducerBatch[Any] | None], None]
OnUnanswerable = Callable[[TopicPartition, list[ProducerBatch[Any]], KafkaError], None]


class LogInquirer:
    """The inquirer of one sender. Its callbacks get what the session returns for a result."""

    def __init__(
        self, cluster: Cluster, session: ProducerSession, on_log_end: OnLogEnd, on_unanswerable: OnUnanswerable
    ) -> None:
        self._cluster = cluster
        self._session = session
        self._on_log_end = on_log_end
        self._on_unanswerable = on_unanswerable
        self._tasks: dict[asyncio.Task[None], None] = {}
        self._open_inquiries: set[Inquiry] = set()

    def start(self, inquiries: Iterable[Inquiry]) -> None:
        """Start the inquiries that are not running. Cheap without new ones."""
        new_inquiries = [inquiry for inquiry in inquiries if inquiry not in self._open_inquiries]
        if not new_inquiries:
            return
        self._open_inquiries.update(new_inquiries)
        by_leader: dict[int, list[Inquiry]] = {}
        for inquiry in new_inquiries:
            by_leader.setdefault(self._cluster.metadata.leader(inquiry[0]), []).append(inquiry)
        for part in by_leader.values():  # one that does not answer must not hold back those of others
            task = start_task(self._inquire_until_settled(part))
            self._tasks[task] = None
            task.add_done_callback(self._tasks.pop)

    def close(self) -> None:
        """Cancel the running inquiries."""
        for task in self._tasks:
            task.cancel()

    async def _inquire_until_settled(self, inquiries: list[Inquiry]) -> None:
        failures = 0
        try:
            remaining = inquiries
            while remaining:
                by_leader: dict[int, list[Inquiry]] = {}
                for inquiry in remaining:
                    by_leader.setdefault(self._cluster.metadata.leader(inquiry[0]), []).append(inquiry)
                calls = [self._inquire_at_leader(leader, part) for leader, part in by_leader.items()]
                to_retry = [inquiry for part in await asyncio.gather(*calls) for inquiry in part]
                # The producer's batches expire meanwhile, which closes their inquiries.
                remaining = [inquiry for inquiry in to_retry if self._session.is_open(*inquiry)]
                if remaining:
                    failures += 1
                    self._cluster.request_refresh()
                    await asyncio.sleep(self._cluster.retry_backoff.wait_ms(failures) / 1000)
        finally:
            self._open_inquiries.difference_update(inquiries)

    async def _inquire_at_leader(self, node_id: int, inquiries: list[Inquiry]) -> list[Inquiry]:
        """Send one request. Returns the inquiries to retry."""
        if node_id < 0:
            return inquiries
        topics: dict[str, DescribeProducersRequestTopicRequest] = {}
        for (topic, number), _ in inquiries:
            entry = topics.setdefault(topic, DescribeProducersRequestTopicRequest(name=topic))
            entry.partition_indexes.append(number)
        request = DescribeProducersRequest(topics=list(topics.values()))
        try:
            response = await self._cluster.call(node_id, request, DescribeProducersResponse)
        except KafkaError as error:
            if error.retriable:
                return inquiries
            for inquiry in inquiries:
                self._abandon(inquiry, error)
            return []
        results = {
            (topic.name, partition.partition_index): partition
            for topic in response.topics
            for partition in topic.partitions
        }
        return [inquiry for inquiry in inquiries if not self._settle(node_id, inquiry, results.get(inquiry[0]))]

    def _settle(
        self, node_id: int, inquiry: Inquiry, result: DescribeProducersResponsePartitionResponse | None
    ) -> bool:
        """Apply one partition's result; False when the inquiry must be retried."""
        if not self._session.is_open(*inquiry):
            return True
        if result is None:
            self._abandon(inquiry, KafkaError(ErrorCode.UNKNOWN_SERVER_ERROR, "the answer lacks the partition"))
            return True
        code = ErrorCode.of(result.error_code)
        if code is not ErrorCode.NONE:
            if not code.retriable:
                self._abandon(inquiry, KafkaError(code, result.error_message))
            return not code.retriable
        partition, number = inquiry
        producer_id = self._session.producer_id_of(partition)
        producer_epoch = last_sequence = -1
        for producer in result.active_producers:
            if producer.producer_id == producer_id:
                producer_epoch, last_sequence = producer.producer_epoch, producer.last_sequence
        if not self._session.is_known_epoch(partition, producer_epoch):
            text = f"its log has epoch {producer_epoch} of producer {producer_id}"
            self._abandon(inquiry, KafkaError(ErrorCode.INVALID_PRODUCER_EPOCH, text))
            return True
        logger.debug("%s: the leader's log ends at epoch %d, sequence %d", partition, producer_epoch, last_sequence)
        self._on_log_end(self._session.handle_log_end(partition, number, node_id, producer_epoch, last_sequence))
        return True

    def _abandon(self, inquiry: Inquiry, reason: KafkaError) -> None:
        self._on_unanswerable(inquiry[0], self._session.abandon_inquiry(*inquiry), reason)
