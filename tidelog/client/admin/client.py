"""The administrator's client: topics and records; `admin_cluster`, `admin_configs` and `admin_groups` have the rest.

Requests go to any broker, the controller's through it, a partition's to its leader, a group's to its coordinator.
Invariant: what a cluster refuses is a KafkaError naming what was refused; what may pass (a leader being elected, a
connection that broke) is tried again for `default_api_timeout_ms`, unless trying twice could do it twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from tidelog.client.admin.base import check
from tidelog.client.admin.cluster import ClusterAdmin
from tidelog.client.admin.configs import ConfigAdmin
from tidelog.client.admin.features import FeaturesAdmin
from tidelog.client.admin.groups import GroupAdmin
from tidelog.client.admin.log_dirs import LogDirsAdmin
from tidelog.client.model import (
    EARLIEST_TIMESTAMP,
    LATEST_TIMESTAMP,
    MAX_TIMESTAMP,
    NewTopic,
    OffsetAndTimestamp,
    PartitionDescription,
    ProducerState,
    TopicDescription,
    TopicPartition,
    as_names,
    as_partition,
)
from tidelog.client.network.cluster import Cluster
from tidelog.client.network.offsets import list_offsets, raise_for_missing_partitions
from tidelog.protocol.errors import ErrorCode, KafkaError
from tidelog.protocol.messages.create_topics import (
    CreatableReplicaAssignment,
    CreatableTopic,
    CreatableTopicConfig,
    CreateTopicsRequest,
    CreateTopicsResponse,
)
from tidelog.protocol.messages.delete_records import (
    DeleteRecordsPartition,
    DeleteRecordsRequest,
    DeleteRecordsResponse,
    DeleteRecordsTopic,
)
from tidelog.protocol.messages.delete_topics import DeleteTopicsRequest, DeleteTopicsResponse, DeleteTopicState
from tidelog.protocol.messages.describe_producers import (
    DescribeProducersRequest,
    DescribeProducersRequestTopicRequest,
    DescribeProducersResponse,
    DescribeProducersResponseProducerState,
)
from tidelog.protocol.messages.metadata import MetadataResponse, MetadataResponseTopic

_SPECS = {"earliest": EARLIEST_TIMESTAMP, "latest": LATEST_TIMESTAMP, "max_timestamp": MAX_TIMESTAMP}


class Admin(ClusterAdmin, ConfigAdmin, FeaturesAdmin, GroupAdmin, LogDirsAdmin):
    """Manages a cluster. Options are Kafka's admin configuration with underscores.

    async with Admin(bootstrap_servers="127.0.0.1:9092") as admin:
        await admin.create_topics([NewTopic("flights", num_partitions=6)])
    """

    # -- topics

    async def create_topics(
        self, topics: Iterable[NewTopic], *, validate_only: bool = False, timeout_ms: int | None = None
    ) -> dict[str, bytes]:
        """Create topics; their ids by name. Raises the KafkaError of the first that was refused, such as
        TOPIC_ALREADY_EXISTS, INVALID_REPLICATION_FACTOR, INVALID_CONFIG; the others may have been created.
        """
        request = CreateTopicsRequest(
            topics=[_creatable(topic) for topic in topics],
            timeout_ms=timeout_ms or self._config.request_timeout_ms,
            validate_only=validate_only,
        )
        response = await self._ask_controller(
            request, CreateTopicsResponse, lambda answer: [each.error_code for each in answer.topics], repeatable=False
        )
        for each in response.topics:
            check(each.error_code, each.error_message, f"topic {each.name!r}")
        return {each.name: each.topic_id for each in response.topics}

    async def delete_topics(self, names: Iterable[str], *, timeout_ms: int | None = None) -> None:
        """Delete topics. Raises the KafkaError of the first that was refused; the others may have been deleted."""
        wanted = as_names(names)

        async def attempt() -> DeleteTopicsResponse:
            cluster = await self._reach()
            connection = await self._controller()
            by_state = connection.version_of(DeleteTopicsRequest) >= 6
            request = DeleteTopicsRequest(
                topics=[DeleteTopicState(name=name) for name in wanted] if by_state else [],
                topic_names=[] if by_state else wanted,
                timeout_ms=timeout_ms or self._config.request_timeout_ms,
            )
            response = await connection.call(request, DeleteTopicsResponse, self._config.request_timeout_ms)
            self._redirect(cluster, (each.error_code for each in response.responses))
            return response

        response = await self._until(attempt, repeatable=False)
        for each in response.responses:
            check(each.error_code, each.error_message, f"topic {each.name!r}")

    async def list_topics(self, *, include_internal: bool = False) -> list[str]:
        """The names of all topics, sorted."""
        response = await self._metadata(None)
        return sorted(
            topic.name for topic in response.topics if topic.name and (include_internal or not topic.is_internal)
        )

    async def describe_topics(self, names: Iterable[str] | None = None) -> dict[str, TopicDescription]:
        """Topics by name, all of them without `names`. Raises KafkaError(UNKNOWN_TOPIC_OR_PARTITION)."""
        wanted = None if names is None else as_names(names)
        response = await self._metadata(wanted)
        described: dict[str, TopicDescription] = {}
        for topic in response.topics:
            if wanted is not None:
                check(topic.error_code, None, f"topic {topic.name!r}")
            if topic.name is not None:
                described[topic.name] = _described(topic)
        return described

    async def _metadata(self, topics: list[str] | None) -> MetadataResponse:
        async def attempt() -> MetadataResponse:
            return await (await self._reach()).fetch_metadata(topics)

        return await self._until(attempt)

    # -- offsets

    async def list_offsets(
        self,
        partitions: Mapping[TopicPartition, int | str],
        *,
        isolation_level: str = "read_uncommitted",
    ) -> dict[TopicPartition, OffsetAndTimestamp | None]:
        """Offsets by partition for "earliest", "latest", "max_timestamp", or a time in ms (None: nothing that late)."""
        timestamps = {}
        for partition, given in partitions.items():
            timestamp = _SPECS.get(given) if isinstance(given, str) else given
            if timestamp is None:
                raise ValueError(f"{given!r} is none of {', '.join(_SPECS)}, nor a time in ms")
            timestamps[as_partition(partition)] = timestamp
        cluster = await self._reach()
        timeout_ms = self._config.default_api_timeout_ms
        return await list_offsets(cluster, timestamps, isolation_level=isolation_level, timeout_ms=timeout_ms)

    async def delete_records(self, offsets: Mapping[TopicPartition, int]) -> dict[TopicPartition, int]:
        """Delete what is before these offsets (-1: everything); the first offset left, by partition."""
        cluster = await self._reach()
        wanted = {as_partition(partition): offset for partition, offset in offsets.items()}
        for topic in {partition.topic for partition in wanted}:
            await cluster.topic(topic, self._config.default_api_timeout_ms)
        left: dict[TopicPartition, int] = {}

        async def attempt() -> None:
            for leader, partitions in self._by_leader(cluster, [each for each in wanted if each not in left]).items():
                topics: dict[str, DeleteRecordsTopic] = {}
                for partition in partitions:
                    entry = topics.setdefault(partition.topic, DeleteRecordsTopic(name=partition.topic))
                    number, offset = partition.partition, wanted[partition]
                    entry.partitions.append(DeleteRecordsPartition(partition_index=number, offset=offset))
                request = DeleteRecordsRequest(topics=list(topics.values()), timeout_ms=self._config.request_timeout_ms)
                response = await cluster.call(leader, request, DeleteRecordsResponse)
                for answer in response.topics:
                    for each in answer.partitions:
                        partition = TopicPartition(answer.name, each.partition_index)
                        if ErrorCode.of(each.error_code).invalidates_metadata:
                            cluster.request_refresh()
                        check(each.error_code, None, str(partition))
                        left[partition] = each.low_watermark

        await self._until(attempt)
        return left

    async def describe_producers(
        self, partitions: Iterable[TopicPartition]
    ) -> dict[TopicPartition, list[ProducerState]]:
        """Who has written to these partitions with a producer id, as their leaders remember it (KIP-664).

        Raises KafkaError of the first partition that cannot be described, such as UNKNOWN_TOPIC_OR_PARTITION.
        """
        cluster = await self._reach()
        wanted = [as_partition(each) for each in partitions]
        for topic in {partition.topic for partition in wanted}:
            await cluster.topic(topic, self._config.default_api_timeout_ms)
        described: dict[TopicPartition, list[ProducerState]] = {}

        async def attempt() -> None:
            missing = [each for each in wanted if each not in described]
            for leader, own in self._by_leader(cluster, missing).items():
                topics: dict[str, DescribeProducersRequestTopicRequest] = {}
                for topic, number in own:
                    entry = topics.setdefault(topic, DescribeProducersRequestTopicRequest(name=topic))
                    entry.partition_indexes.append(number)
                request = DescribeProducersRequest(topics=list(topics.values()))
                response = await cluster.call(leader, request, DescribeProducersResponse)
                for answer in response.topics:
                    for each in answer.partitions:
                        partition = TopicPartition(answer.name, each.partition_index)
                        if ErrorCode.of(each.error_code).invalidates_metadata:
                            cluster.request_refresh()
                        check(each.error_code, each.error_message, str(partition))
                        described[partition] = sorted(_producer(one) for one in each.active_producers)

        await self._until(attempt)
        return {partition: described[partition] for partition in wanted if partition in described}

    @staticmethod
    def _by_leader(cluster: Cluster, partitions: Iterable[TopicPartition]) -> dict[int, list[TopicPartition]]:
        """Raises KafkaError: UNKNOWN_TOPIC_OR_PARTITION, LEADER_NOT_AVAILABLE."""
        by_leader: dict[int, list[TopicPartition]] = {}
        for partition in partitions:
            leader = cluster.metadata.leader(partition)
            if leader < 0:
                raise_for_missing_partitions(cluster, [partition])
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


def _creatable(topic: Any) -> CreatableTopic:
    if not isinstance(topic, NewTopic):
        raise TypeError(f"expected a list of NewTopic, not one of {topic!r}")
    assigned = bool(topic.replica_assignments)
    return CreatableTopic(
        name=topic.name,
        num_partitions=-1 if assigned else topic.num_partitions,
        replication_factor=-1 if assigned else topic.replication_factor,
        assignments=[
            CreatableReplicaAssignment(partition_index=partition, broker_ids=list(brokers))
            for partition, brokers in topic.replica_assignments.items()
        ],
        configs=[CreatableTopicConfig(name=name, value=str(value)) for name, value in topic.configs.items()],
    )


def _described(topic: MetadataResponseTopic) -> TopicDescription:
    partitions = tuple(
        PartitionDescription(
            each.partition_index,
            each.leader_id if each.leader_id >= 0 else None,
            each.leader_epoch,
            tuple(each.replica_nodes),
            tuple(each.isr_nodes),
            tuple(each.offline_replicas),
        )
        for each in sorted(topic.partitions, key=lambda partition: partition.partition_index)
    )
    return TopicDescription(topic.name or "", topic.topic_id, topic.is_internal, partitions)
