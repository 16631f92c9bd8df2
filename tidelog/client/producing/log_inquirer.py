"""Asks partition leaders how far their logs reach for one producer (DescribeProducers, KIP-664).

Here: one request per leader, retries, errors. When to ask and what an answer means is the session's
(`producer_session`). Invariant: an inquiry that is open has a request under way, waits for its retry, or is taken up by
the next `ask`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from typing import Any

from tidelog.client.model import TopicPartition
from tidelog.client.network.cluster import Cluster
from tidelog.client.producing.accumulator import ProducerBatch
from tidelog.client.producing.producer_session import ProducerSession
from tidelog.protocol.errors import ErrorCode, KafkaError
from tidelog.protocol.messages.describe_producers import (
    DescribeProducersRequest,
    DescribeProducersRequestTopicRequest,
    DescribeProducersResponse,
    DescribeProducersResponsePartitionResponse,
)

logger = logging.getLogger(__name__)

Inquiry = tuple[TopicPartition, int]
Learned = Callable[[ProducerBatch[Any] | None], None]
Unanswerable = Callable[[TopicPartition, list[ProducerBatch[Any]], KafkaError], None]


class LogInquirer:
    """One per sender. `learned` and `unanswerable` hand on what the session returns."""

    def __init__(
        self, cluster: Cluster, session: ProducerSession, learned: Learned, unanswerable: Unanswerable
    ) -> None:
        self._cluster = cluster
        self._session = session
        self._learned = learned
        self._unanswerable = unanswerable
        self._tasks: dict[asyncio.Task[None], None] = {}
        self._taken: set[Inquiry] = set()

    def ask(self, inquiries: Iterable[Inquiry]) -> None:
        """Start what has not been started. Cheap when there is nothing."""
        new = [inquiry for inquiry in inquiries if inquiry not in self._taken]
        if not new:
            return
        self._taken.update(new)
        task = asyncio.get_running_loop().create_task(self._ask_until_answered(new))
        self._tasks[task] = None
        task.add_done_callback(self._tasks.pop)

    def close(self) -> None:
        """End what is under way, unanswered."""
        for task in self._tasks:
            task.cancel()

    async def _ask_until_answered(self, inquiries: list[Inquiry]) -> None:
        failures = 0
        try:
            left = inquiries
            while left:
                by_leader: dict[int, list[Inquiry]] = {}
                for inquiry in left:
                    by_leader.setdefault(self._cluster.metadata.leader(inquiry[0]), []).append(inquiry)
                unanswered = await asyncio.gather(*(self._ask_leader(*each) for each in by_leader.items()))
                # The producer's batches expire meanwhile, which closes their inquiries.
                left = [each for some in unanswered for each in some if self._session.is_open(*each)]
                if left:
                    failures += 1
                    self._cluster.request_refresh()
                    await asyncio.sleep(self._cluster.retry_backoff.wait_ms(failures) / 1000)
        finally:
            self._taken.difference_update(inquiries)

    async def _ask_leader(self, node_id: int, inquiries: list[Inquiry]) -> list[Inquiry]:
        """Returns those to ask for again."""
        if node_id < 0:
            return inquiries
        topics: dict[str, DescribeProducersRequestTopicRequest] = {}
        for (topic, number), _ in inquiries:
            wanted = topics.setdefault(topic, DescribeProducersRequestTopicRequest(name=topic))
            wanted.partition_indexes.append(number)
        request = DescribeProducersRequest(topics=list(topics.values()))
        try:
            response = await self._cluster.call(node_id, request, DescribeProducersResponse)
        except KafkaError as error:
            if error.retriable:
                return inquiries
            for inquiry in inquiries:
                self._give_up(inquiry, error)
            return []
        answers = {
            (topic.name, partition.partition_index): partition
            for topic in response.topics
            for partition in topic.partitions
        }
        return [inquiry for inquiry in inquiries if not self._settle(node_id, inquiry, answers.get(inquiry[0]))]

    def _settle(
        self, node_id: int, inquiry: Inquiry, answer: DescribeProducersResponsePartitionResponse | None
    ) -> bool:
        """False when it is to be asked again."""
        if not self._session.is_open(*inquiry):
            return True
        if answer is None:
            self._give_up(inquiry, KafkaError(ErrorCode.UNKNOWN_SERVER_ERROR, "the answer lacks the partition"))
            return True
        code = ErrorCode.of(answer.error_code)
        if code is not ErrorCode.NONE:
            if not code.retriable:
                self._give_up(inquiry, KafkaError(code, answer.error_message))
            return not code.retriable
        partition, number = inquiry
        producer_id = self._session.producer_id_of(partition)
        epoch = last_sequence = -1
        for producer in answer.active_producers:
            if producer.producer_id == producer_id:
                epoch, last_sequence = producer.producer_epoch, producer.last_sequence
        if not self._session.knows_epoch(partition, epoch):
            text = f"its log has epoch {epoch} of producer {producer_id}"
            self._give_up(inquiry, KafkaError(ErrorCode.INVALID_PRODUCER_EPOCH, text))
            return True
        logger.debug("%s: the leader's log ends at epoch %d, sequence %d", partition, epoch, last_sequence)
        self._learned(self._session.learned(partition, number, node_id, epoch, last_sequence))
        return True

    def _give_up(self, inquiry: Inquiry, reason: KafkaError) -> None:
        self._unanswerable(inquiry[0], self._session.unanswerable(*inquiry), reason)
