"""The admin call about producers in partitions (KIP-664), and the requests to leaders that other modules share."""

from __future__ import annotations

from collections.abc import Iterable

from tidelog.client.admin.base import AdminBase, in_one_limit, raise_on_error
from tidelog.client.arguments import as_partitions
from tidelog.client.model import ProducerState, TopicPartition
from tidelog.client.network.cluster import Cluster
from tidelog.client.network.offsets import raise_for_missing_partitions
from tidelog.protocol.errors import ErrorCode, KafkaError
from tidelog.protocol.messages.describe_producers import (
    DescribeProducersRequest,
    DescribeProducersRequestTopicRequest,
    DescribeProducersResponse,
    DescribeProducersResponseProducerState,
)


class ProducersAdmin(AdminBase):
    """The calls of `Admin` about producers."""

    @in_one_limit
    async def describe_producers(
        self, partitions: Iterable[TopicPartition]
    ) -> dict[TopicPartition, list[ProducerState]]:
        """The state of the active producer ids in these partitions, from their leaders (KIP-664).

        Raises the KafkaError of the first failed partition, such as UNKNOWN_TOPIC_OR_PARTITION.
        """
        targets = as_partitions("partitions", partitions)
        cluster = await self._connected_cluster()
        refreshes_before = cluster.refreshes_begun
        await self._await_topics(cluster, (partition.topic for partition in targets))
        producers: dict[TopicPartition, list[ProducerState]] = {}

        async def attempt() -> None:
            missing = [partition for partition in targets if partition not in producers]
            for leader, led_partitions in self._by_leader(cluster, missing, refreshes_before).items():
                topics: dict[str, DescribeProducersRequestTopicRequest] = {}
                for topic, number in led_partitions:
                    entry = topics.setdefault(topic, DescribeProducersRequestTopicRequest(name=topic))
                    entry.partition_indexes.append(number)
                request = DescribeProducersRequest(topics=list(topics.values()))
                response = await cluster.call(leader, request, DescribeProducersResponse)
                for topic_result in response.topics:
                    for result in topic_result.partitions:
                        partition = TopicPartition(topic_result.name, result.partition_index)
                        if ErrorCode.of(result.error_code).invalidates_metadata:
                            cluster.request_refresh()
                        raise_on_error(result.error_code, result.error_message, str(partition))
                        producers[partition] = sorted(_producer(state) for state in result.active_producers)

        await self._retry(attempt)
        return {partition: producers[partition] for partition in targets if partition in producers}

    @staticmethod
    def _by_leader(
        cluster: Cluster, partitions: Iterable[TopicPartition], refreshes_before: int
    ) -> dict[int, list[TopicPartition]]:
        """Partitions by leader, for a call that began after `refreshes_before` refreshes.

        Raises KafkaError: UNKNOWN_TOPIC_OR_PARTITION, LEADER_NOT_AVAILABLE.
        """
        by_leader: dict[int, list[TopicPartition]] = {}
        for partition in partitions:
            leader = cluster.metadata.leader(partition)
            if leader < 0:
                raise_for_missing_partitions(cluster, [partition], refreshes_before)
                cluster.request_refresh()
                raise KafkaError(ErrorCode.LEADER_NOT_AVAILABLE, str(partition))
            by_leader.setdefault(leader, []).append(partition)
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
