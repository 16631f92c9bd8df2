"""The admin client: topics and records. The other modules of this package have the rest.

Requests go to any broker, which forwards those for the controller; requests for a partition go to
its leader, those for a group to its coordinator. Invariant: a refusal is a KafkaError that names
the refused resource. A retriable error (a leader election, a broken connection) is retried for
`default_api_timeout_ms`, unless the request is not repeatable.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from typing import Any

from tidelog.client.admin.base import error_of, in_one_limit, raise_on_error
from tidelog.client.admin.cluster import ClusterAdmin
from tidelog.client.admin.configs import ConfigAdmin
from tidelog.client.admin.features import FeaturesAdmin
from tidelog.client.admin.groups import GroupAdmin
from tidelog.client.admin.log_dirs import LogDirsAdmin
from tidelog.client.admin.producers import Answers
from tidelog.client.admin.transactions import TransactionAdmin
from tidelog.client.arguments import (
    INT16_MAX,
    INT32_MAX,
    INT64_MAX,
    WrongArgument,
    as_broker_ids,
    as_choice,
    as_config_value,
    as_flag,
    as_int,
    as_list,
    as_mapping,
    as_partition_mapping,
    as_text,
    as_topic_name,
    as_topic_names,
    shown,
)
from tidelog.client.model import (
    EARLIEST_TIMESTAMP,
    LATEST_TIMESTAMP,
    MAX_TIMESTAMP,
    NewTopic,
    OffsetAndTimestamp,
    PartitionDescription,
    TopicDescription,
    TopicPartition,
)
from tidelog.client.network.cluster import Cluster
from tidelog.client.network.offsets import ISOLATION, list_offsets
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
from tidelog.protocol.messages.metadata import MetadataResponse, MetadataResponseTopic

_SPECIAL_TIMESTAMPS = {"earliest": EARLIEST_TIMESTAMP, "latest": LATEST_TIMESTAMP, "max_timestamp": MAX_TIMESTAMP}
_TIMESTAMP_MIN = -6
"""The lowest of the numbers that ListOffsets takes for something else than a time."""


class Admin(ClusterAdmin, ConfigAdmin, FeaturesAdmin, GroupAdmin, LogDirsAdmin, TransactionAdmin):
    """Manages a cluster. Options are Kafka's admin options with underscores.

    async with Admin(bootstrap_servers="127.0.0.1:9092") as admin:
        await admin.create_topics([NewTopic("flights", num_partitions=6)])
    """

    # -- topics

    async def create_topics(
        self, topics: Iterable[NewTopic], *, validate_only: bool = False, timeout_ms: int | None = None
    ) -> dict[str, bytes]:
        """Create topics. Returns their ids by name.

        Raises the KafkaError of the first refused topic, such as TOPIC_ALREADY_EXISTS,
        INVALID_REPLICATION_FACTOR, INVALID_CONFIG. Other topics may have been created. Waits while a
        quota of the controller refuses some, for `default_api_timeout_ms` at most.

        TOPIC_ALREADY_EXISTS may be about a topic of this very call, where the controller dies during it: a broker
        repeats the request at the next controller, as Kafka's brokers do.
        """
        request = CreateTopicsRequest(
            topics=[_to_creatable_topic(topic) for topic in as_list("topics", topics, "NewTopic")],
            timeout_ms=self._timeout_ms(timeout_ms),
            validate_only=as_flag("validate_only", validate_only),
        )

        results = await self._call_controller_within_quota(request, CreateTopicsResponse, lambda answer: answer.topics)
        for topic in results:
            if not topic.error_code and not validate_only:
                self._note_created(topic.name)
        for topic in results:
            raise_on_error(topic.error_code, topic.error_message, f"topic {topic.name!r}")
        return {topic.name: topic.topic_id for topic in results}

    async def delete_topics(self, names: Iterable[str], *, timeout_ms: int | None = None) -> None:
        """Delete topics. Raises the KafkaError of the first refused topic.

        Other topics may have been deleted. Waits for a quota as `create_topics` does.
        """
        topic_names = as_topic_names("names", names)
        broker_timeout_ms = self._timeout_ms(timeout_ms)

        async def attempt() -> DeleteTopicsResponse:
            cluster = await self._connected_cluster()
            connection = await self._controller()
            uses_topic_states = connection.version_of(DeleteTopicsRequest) >= 6
            request = DeleteTopicsRequest(
                topics=[DeleteTopicState(name=name) for name in topic_names] if uses_topic_states else [],
                topic_names=[] if uses_topic_states else topic_names,
                timeout_ms=broker_timeout_ms,
            )
            response = await connection.call(request, DeleteTopicsResponse, self._config.request_timeout_ms)
            self._redirect(cluster, (result.error_code for result in response.responses))
            return response

        async def ask(deadline: float) -> DeleteTopicsResponse:
            return await self._retry(attempt, repeatable=False, deadline=deadline)

        def keep(refused: set[str]) -> None:
            topic_names[:] = [name for name in topic_names if name in refused]

        for name in topic_names:
            self._note_deleted(name)
        for result in await self._within_quota(ask, lambda answer: answer.responses, keep):
            raise_on_error(result.error_code, result.error_message, f"topic {result.name!r}")

    async def list_topics(self, *, include_internal: bool = False) -> list[str]:
        """The names of all topics, sorted."""
        as_flag("include_internal", include_internal)
        response = await self._fetch_metadata(None)
        return sorted(
            topic.name for topic in response.topics if topic.name and (include_internal or not topic.is_internal)
        )

    async def describe_topics(self, names: Iterable[str] | None = None) -> dict[str, TopicDescription]:
        """Topics by name; all topics without `names`.

        Raises KafkaError(UNKNOWN_TOPIC_OR_PARTITION).
        """
        topic_names = None if names is None else as_topic_names("names", names)
        response = await self._fetch_metadata(topic_names)
        descriptions: dict[str, TopicDescription] = {}
        for topic in response.topics:
            if topic_names is not None:
                raise_on_error(topic.error_code, None, f"topic {topic.name!r}")
            if topic.name is not None:
                descriptions[topic.name] = _to_description(topic)
        return descriptions

    async def _fetch_metadata(self, topics: list[str] | None) -> MetadataResponse:
        async def attempt() -> MetadataResponse:
            response = await (await self._connected_cluster()).fetch_metadata(topics)
            for topic in response.topics:
                self._retry_if_new(topic.name, topic.error_code)
            return response

        return await self._retry(attempt)

    # -- offsets

    async def list_offsets(
        self,
        partitions: Mapping[TopicPartition, int | str],
        *,
        isolation_level: str = "read_uncommitted",
    ) -> dict[TopicPartition, OffsetAndTimestamp | None]:
        """Offsets by partition for "earliest", "latest", "max_timestamp" or a time in ms; None: no
        record that late.

        Raises KafkaError; PartitionErrors, with the offsets of the other partitions, where leaders have not answered.
        """
        timestamps = as_partition_mapping("partitions", partitions, "times", _as_special_time)
        as_choice("isolation_level", isolation_level, ISOLATION)
        deadline = self._deadline()
        cluster = await self._connected_cluster()
        timeout_ms = (deadline - asyncio.get_running_loop().time()) * 1000
        return await list_offsets(cluster, timestamps, isolation_level=isolation_level, timeout_ms=timeout_ms)

    @in_one_limit
    async def delete_records(self, offsets: Mapping[TopicPartition, int]) -> dict[TopicPartition, int]:
        """Delete the records before these offsets (-1: all).

        Returns the new log start offsets by partition. Raises KafkaError; PartitionErrors, with those of the other
        partitions, where leaders have failed.
        """
        targets = as_partition_mapping("offsets", offsets, "offsets", _as_offset_to_delete)

        async def ask(cluster: Cluster, leader: int, led: list[TopicPartition]) -> Answers[int]:
            topics: dict[str, DeleteRecordsTopic] = {}
            for partition in led:
                entry = topics.setdefault(partition.topic, DeleteRecordsTopic(name=partition.topic))
                number, offset = partition.partition, targets[partition]
                entry.partitions.append(DeleteRecordsPartition(partition_index=number, offset=offset))
            request = DeleteRecordsRequest(topics=list(topics.values()), timeout_ms=self._config.request_timeout_ms)
            response = await cluster.call(leader, request, DeleteRecordsResponse)
            return {
                (partition := TopicPartition(topic_result.name, result.partition_index)): (
                    error_of(result.error_code, None, str(partition)) or result.low_watermark
                )
                for topic_result in response.topics
                for result in topic_result.partitions
            }

        # A partition that has answered is not asked again: -1 would be a later end, and newer records would go.
        return await self._ask_leaders(targets, ask)


def _to_creatable_topic(topic: Any) -> CreatableTopic:
    if not isinstance(topic, NewTopic):
        raise TypeError(f"topics must be a list of NewTopic, not one of {shown(topic)}")
    name = as_topic_name("NewTopic.name", topic.name)
    num_partitions = as_int("NewTopic.num_partitions", topic.num_partitions, -INT32_MAX)
    replication_factor = as_int("NewTopic.replication_factor", topic.replication_factor, -INT16_MAX, INT16_MAX)
    configs = as_mapping("NewTopic.configs", topic.configs, "values by key")
    assignments = as_mapping("NewTopic.replica_assignments", topic.replica_assignments, "broker ids by partition")
    if assignments and (num_partitions != -1 or replication_factor != -1):
        raise WrongArgument("NewTopic.replica_assignments gives the numbers of partitions and replicas already")
    return CreatableTopic(
        name=name,
        num_partitions=num_partitions,
        replication_factor=replication_factor,
        assignments=[
            CreatableReplicaAssignment(
                partition_index=as_int("a key of NewTopic.replica_assignments", partition),
                broker_ids=as_broker_ids(f"NewTopic.replica_assignments[{partition}]", brokers),
            )
            for partition, brokers in assignments.items()
        ],
        configs=[
            CreatableTopicConfig(
                name=as_text("a key of NewTopic.configs", key),
                value=as_config_value(f"NewTopic.configs[{key!r}]", value),
            )
            for key, value in configs.items()
        ],
    )


def _as_special_time(name: str, value: Any) -> int:
    if not isinstance(value, str):
        return as_int(name, value, _TIMESTAMP_MIN, INT64_MAX)
    if value not in _SPECIAL_TIMESTAMPS:
        raise WrongArgument(f"{name}: {shown(value)} is none of {', '.join(_SPECIAL_TIMESTAMPS)}, nor a time in ms")
    return _SPECIAL_TIMESTAMPS[value]


def _as_offset_to_delete(name: str, value: Any) -> int:
    return as_int(name, value, -1, INT64_MAX)


def _to_description(topic: MetadataResponseTopic) -> TopicDescription:
    partitions = tuple(
        PartitionDescription(
            partition.partition_index,
            partition.leader_id if partition.leader_id >= 0 else None,
            partition.leader_epoch,
            tuple(partition.replica_nodes),
            tuple(partition.isr_nodes),
            tuple(partition.offline_replicas),
        )
        for partition in sorted(topic.partitions, key=lambda partition: partition.partition_index)
    )
    return TopicDescription(topic.name or "", topic.topic_id, topic.is_internal, partitions)
