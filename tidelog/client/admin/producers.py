"""The admin call about producers in partitions (KIP-664), and the requests to leaders that other modules share."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import TypeVar

from tidelog.client.admin.base import WAIT_SHARE, AdminBase, error_of, in_one_limit, is_final, run_all
from tidelog.client.arguments import as_partitions
from tidelog.client.model import PartitionErrors, ProducerState, TopicPartition
from tidelog.client.network.cluster import Cluster
from tidelog.client.network.offsets import raise_for_missing_partitions
from tidelog.protocol.errors import ErrorCode, KafkaError
from tidelog.protocol.messages.describe_producers import (
    DescribeProducersRequest,
    DescribeProducersRequestTopicRequest,
    DescribeProducersResponse,
    DescribeProducersResponseProducerState,
)

Answer = TypeVar("Answer")
Answers = Mapping[TopicPartition, Answer | KafkaError]


class ProducersAdmin(AdminBase):
    """The calls of `Admin` about producers."""

    @in_one_limit
    async def describe_producers(
        self, partitions: Iterable[TopicPartition]
    ) -> dict[TopicPartition, list[ProducerState]]:
        """The state of the active producer ids in these partitions, from their leaders (KIP-664).

        Raises a KafkaError such as UNKNOWN_TOPIC_OR_PARTITION; PartitionErrors, with the results of the other
        partitions, where leaders have failed.
        """

        async def ask(cluster: Cluster, leader: int, led: list[TopicPartition]) -> Answers[list[ProducerState]]:
            topics: dict[str, DescribeProducersRequestTopicRequest] = {}
            for topic, number in led:
                entry = topics.setdefault(topic, DescribeProducersRequestTopicRequest(name=topic))
                entry.partition_indexes.append(number)
            request = DescribeProducersRequest(topics=list(topics.values()))
            response = await cluster.call(leader, request, DescribeProducersResponse)
            return {
                (partition := TopicPartition(topic_result.name, result.partition_index)): (
                    error_of(result.error_code, result.error_message, str(partition))
                    or sorted(_producer(state) for state in result.active_producers)
                )
                for topic_result in response.topics
                for result in topic_result.partitions
            }

        return await self._ask_leaders(as_partitions("partitions", partitions), ask)

    async def _ask_leaders(
        self,
        partitions: Iterable[TopicPartition],
        ask: Callable[[Cluster, int, list[TopicPartition]], Awaitable[Answers[Answer]]],
    ) -> dict[TopicPartition, Answer]:
        """The answers of the leaders of these partitions, all asked at the same time, in a call that is `in_one_limit`.

        Only partitions with a retriable error are asked for again, also where others are refused, as in Java. Raises
        KafkaError, PartitionErrors where leaders fail: a little before that limit, which knows no answers.
        """
        targets = list(partitions)
        missing = dict.fromkeys(targets)
        deadline = self._deadline(WAIT_SHARE)
        cluster = await self._connected_cluster()
        refreshes_before = cluster.refreshes_begun
        await self._await_topics(cluster, (partition.topic for partition in missing))
        answers: dict[TopicPartition, Answer] = {}
        errors: dict[TopicPartition, KafkaError] = {}
        refused: dict[TopicPartition, KafkaError] = {}

        async def ask_leader(leader: int, led: list[TopicPartition]) -> None:
            try:
                results = await ask(cluster, leader, led)
            except KafkaError as error:
                results = dict.fromkeys(led, error)
            silence = KafkaError(ErrorCode.UNKNOWN_SERVER_ERROR, "the leader's answer does not mention it")
            for partition in led:
                result = results.get(partition, silence)
                if isinstance(result, KafkaError) and result.code.invalidates_metadata:
                    cluster.request_refresh()
                if not isinstance(result, KafkaError):
                    answers[partition] = result
                elif is_final(result):
                    refused[partition] = result
                else:
                    errors[partition] = result
                    continue
                del missing[partition]

        async def attempt() -> None:
            errors.clear()
            by_leader = self._by_leader(cluster, missing, refreshes_before)
            for partition in by_leader.pop(-1, ()):
                errors[partition] = KafkaError(ErrorCode.LEADER_NOT_AVAILABLE, str(partition))
                cluster.request_refresh()
            await run_all(ask_leader(leader, led) for leader, led in by_leader.items())
            if errors:
                raise next(iter(errors.values()))

        problem: KafkaError | None = None
        try:
            await self._retry(attempt, deadline=deadline)
        except KafkaError as error:
            if not answers and not errors and not refused:
                raise  # before any leader was asked, or none has answered
            problem = error
            for each in missing:
                errors.setdefault(each, KafkaError(error.code, f"{each}: {error.message}"))
        problem = next(iter(refused.values()), problem)
        if problem is not None:
            raise PartitionErrors(problem.code, problem.message, answers, refused | errors)
        return {partition: answers[partition] for partition in targets}

    @staticmethod
    def _by_leader(
        cluster: Cluster, partitions: Iterable[TopicPartition], refreshes_before: int
    ) -> dict[int, list[TopicPartition]]:
        """Partitions by leader (-1: none), for a call that began after `refreshes_before` refreshes.

        Raises KafkaError: UNKNOWN_TOPIC_OR_PARTITION.
        """
        by_leader: dict[int, list[TopicPartition]] = {}
        for partition in partitions:
            by_leader.setdefault(cluster.metadata.leader(partition), []).append(partition)
        raise_for_missing_partitions(cluster, by_leader.get(-1, ()), refreshes_before)
        return by_leader


def _producer(state: DescribeProducersResponseProducerState) -> ProducerState:
    return ProducerState(
        state.producer_id,
        state.producer_epoch,
        state.last_sequence,
        state.last_timestamp,
        state.coordinator_epoch,
        state.current_txn_start_offset,
    )
