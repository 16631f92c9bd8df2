"""The admin call about producers in partitions (KIP-664), and the requests to leaders that other modules share."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import TypeVar

from tidelog.client.admin.base import WAIT_SHARE, AdminBase, error_of, in_one_limit, is_final, timed_out
from tidelog.client.arguments import as_partitions
from tidelog.client.model import PartitionErrors, ProducerState, TopicPartition
from tidelog.client.network.cluster import Cluster
from tidelog.client.network.leaders import ask_leaders
from tidelog.client.network.offsets import no_leader, raise_for_missing_partitions
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

        Only partitions with a retriable error are asked for again, also where others are refused, as in Java. A topic
        that the metadata lacks holds back only its own partitions. Raises KafkaError, PartitionErrors where leaders
        fail: a little before that limit, which knows no answers.
        """
        targets = list(partitions)
        deadline = self._deadline(WAIT_SHARE)
        cluster = await self._connected_cluster()
        refreshes_before = cluster.refreshes_begun
        await self._await_topics(cluster, (partition.topic for partition in targets), deadline)
        answers: dict[TopicPartition, Answer] = {}
        errors: dict[TopicPartition, KafkaError] = {}
        refused: dict[TopicPartition, KafkaError] = {}

        async def ask_led(led: list[TopicPartition]) -> list[TopicPartition]:
            again: list[TopicPartition] = []
            leader = cluster.metadata.leader(led[0])
            if leader < 0:
                for partition in led:
                    try:
                        raise_for_missing_partitions(cluster, [partition], refreshes_before)
                        errors[partition] = no_leader(cluster, partition)
                        again.append(partition)
                    except KafkaError as error:
                        refused[partition] = error
                return again
            try:
                results = await ask(cluster, leader, led)
            except KafkaError as error:
                results = dict.fromkeys(led, error)
            silence = KafkaError(ErrorCode.UNKNOWN_SERVER_ERROR, "the leader's answer does not mention it")
            for partition in led:
                result = results.get(partition, silence)
                if not isinstance(result, KafkaError):
                    answers[partition] = result
                elif is_final(result):
                    refused[partition] = result
                else:
                    errors[partition] = result
                    again.append(partition)
            return again

        leaderless = [each for each in targets if cluster.metadata.leader(each) < 0]
        raise_for_missing_partitions(cluster, leaderless, refreshes_before)
        await ask_leaders(cluster, targets, ask_led, deadline)
        missing = [each for each in targets if each not in answers and each not in refused]
        errors = {each: errors[each] for each in missing if each in errors}
        problem = next(iter(errors.values()), timed_out(self._config.default_api_timeout_ms)) if missing else None
        if problem is not None:
            if not answers and not errors and not refused:
                raise problem  # no leader has answered
            for each in missing:
                errors.setdefault(each, KafkaError(problem.code, f"{each}: {problem.message}"))
        problem = next(iter(refused.values()), problem)
        if problem is not None:
            raise PartitionErrors(problem.code, problem.message, answers, refused | errors)
        return {partition: answers[partition] for partition in targets}


def _producer(state: DescribeProducersResponseProducerState) -> ProducerState:
    return ProducerState(
        state.producer_id,
        state.producer_epoch,
        state.last_sequence,
        state.last_timestamp,
        state.coordinator_epoch,
        state.current_txn_start_offset,
    )
