"""The blocking admin client: every call runs the asynchronous call and waits for it; see `sync`."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from typing import Any, Never

from tidelog.client.admin import client as admin
from tidelog.client.admin.configs import ConfigChange, ConfigResource
from tidelog.client.arguments import check_named_options
from tidelog.client.groups.model import GroupDescription, GroupListing, PartitionLag
from tidelog.client.model import (
    BlockedPartition,
    BrokerVersions,
    ClusterDescription,
    ConfigEntry,
    LogDirDescription,
    NewTopic,
    OffsetAndMetadata,
    OffsetAndTimestamp,
    OpenTransaction,
    PartitionReassignment,
    ProducerState,
    QuorumDescription,
    Replica,
    ReplicaLogDirs,
    TopicDescription,
    TopicPartition,
    TransactionDescription,
    TransactionListing,
)
from tidelog.client.sync.loop_thread import BlockingClient
from tidelog.protocol.errors import KafkaError


class Admin(BlockingClient):
    """`tidelog.Admin`, blocking."""

    def __init__(self, *positional: Never, **options: Any) -> None:
        check_named_options("Admin", positional)
        super().__init__()
        self._admin = admin.Admin(**options)

    def start(self) -> None:
        self._run(self._admin.start)

    def close(self) -> None:
        self._close_with(self._admin.close)

    def _final_call(self) -> Callable[[], Coroutine[Any, Any, None]]:
        return self._admin.close

    def create_topics(self, topics: Iterable[NewTopic], **options: Any) -> dict[str, bytes]:
        return self._run(lambda: self._admin.create_topics(topics, **options))

    def delete_topics(self, names: Iterable[str], **options: Any) -> None:
        self._run(lambda: self._admin.delete_topics(names, **options))

    def list_topics(self, *, include_internal: bool = False) -> list[str]:
        return self._run(lambda: self._admin.list_topics(include_internal=include_internal))

    def describe_topics(self, names: Iterable[str] | None = None) -> dict[str, TopicDescription]:
        return self._run(lambda: self._admin.describe_topics(names))

    def describe_cluster(self, *, include_fenced: bool = False) -> ClusterDescription:
        return self._run(lambda: self._admin.describe_cluster(include_fenced=include_fenced))

    def unregister_broker(self, broker_id: int) -> None:
        self._run(lambda: self._admin.unregister_broker(broker_id))

    def create_partitions(self, counts: Mapping[str, int], **options: Any) -> None:
        self._run(lambda: self._admin.create_partitions(counts, **options))

    def elect_leaders(
        self, partitions: Iterable[TopicPartition] | None = None, **options: Any
    ) -> dict[TopicPartition, KafkaError | None]:
        return self._run(lambda: self._admin.elect_leaders(partitions, **options))

    def describe_log_dirs(
        self, broker_ids: Iterable[int], topics: Iterable[str] | None = None
    ) -> dict[int, list[LogDirDescription]]:
        return self._run(lambda: self._admin.describe_log_dirs(broker_ids, topics))

    def describe_versions(self, broker_id: int | None = None) -> BrokerVersions:
        return self._run(lambda: self._admin.describe_versions(broker_id))

    def update_features(self, levels: Mapping[str, int], **options: Any) -> None:
        self._run(lambda: self._admin.update_features(levels, **options))

    def describe_producers(self, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, list[ProducerState]]:
        return self._run(lambda: self._admin.describe_producers(partitions))

    def list_transactions(self, **filters: Any) -> list[TransactionListing]:
        return self._run(lambda: self._admin.list_transactions(**filters))

    def describe_transactions(self, transactional_ids: Iterable[str]) -> dict[str, TransactionDescription]:
        return self._run(lambda: self._admin.describe_transactions(transactional_ids))

    def open_transactions(self, partitions: Iterable[TopicPartition] | None = None) -> list[OpenTransaction]:
        return self._run(lambda: self._admin.open_transactions(partitions))

    def find_hanging_transactions(
        self, partitions: Iterable[TopicPartition] | None = None, **options: Any
    ) -> list[OpenTransaction]:
        return self._run(lambda: self._admin.find_hanging_transactions(partitions, **options))

    def blocked_partitions(self, partitions: Iterable[TopicPartition] | None = None) -> list[BlockedPartition]:
        return self._run(lambda: self._admin.blocked_partitions(partitions))

    def abort_transaction(
        self, partition: TopicPartition, producer_id: int, producer_epoch: int, coordinator_epoch: int
    ) -> None:
        self._run(lambda: self._admin.abort_transaction(partition, producer_id, producer_epoch, coordinator_epoch))

    def fence_producers(self, transactional_ids: Iterable[str]) -> dict[str, tuple[int, int] | KafkaError]:
        return self._run(lambda: self._admin.fence_producers(transactional_ids))

    def describe_replica_log_dirs(self, replicas: Iterable[Replica]) -> dict[Replica, ReplicaLogDirs]:
        return self._run(lambda: self._admin.describe_replica_log_dirs(replicas))

    def alter_replica_log_dirs(self, paths: Mapping[Replica, str]) -> dict[Replica, KafkaError | None]:
        return self._run(lambda: self._admin.alter_replica_log_dirs(paths))

    def alter_partition_reassignments(
        self, targets: Mapping[TopicPartition, Sequence[int] | None], **options: Any
    ) -> dict[TopicPartition, KafkaError | None]:
        return self._run(lambda: self._admin.alter_partition_reassignments(targets, **options))

    def list_partition_reassignments(
        self, partitions: Iterable[TopicPartition] | None = None, *, timeout_ms: int | None = None
    ) -> dict[TopicPartition, PartitionReassignment]:
        return self._run(lambda: self._admin.list_partition_reassignments(partitions, timeout_ms=timeout_ms))

    def incremental_alter_configs(self, **options: Any) -> None:
        self._run(lambda: self._admin.incremental_alter_configs(**options))

    def describe_quorum(self) -> QuorumDescription:
        return self._run(self._admin.describe_quorum)

    def add_raft_voter(self, node_id: int, directory_id: bytes, endpoints: Iterable[tuple[str, str, int]]) -> None:
        self._run(lambda: self._admin.add_raft_voter(node_id, directory_id, endpoints))

    def remove_raft_voter(self, node_id: int, directory_id: bytes) -> None:
        self._run(lambda: self._admin.remove_raft_voter(node_id, directory_id))

    def list_config_resources(self, types: Iterable[str] = ()) -> list[ConfigResource]:
        return self._run(lambda: self._admin.list_config_resources(types))

    def describe_config_resources(
        self, resources: Iterable[ConfigResource], **options: Any
    ) -> dict[ConfigResource, dict[str, ConfigEntry]]:
        return self._run(lambda: self._admin.describe_config_resources(resources, **options))

    def alter_config_resources(self, changes: Mapping[ConfigResource, Sequence[ConfigChange]], **options: Any) -> None:
        self._run(lambda: self._admin.alter_config_resources(changes, **options))

    def describe_configs(self, **options: Any) -> dict[str | int, dict[str, ConfigEntry]]:
        return self._run(lambda: self._admin.describe_configs(**options))

    def list_offsets(
        self, partitions: Mapping[TopicPartition, int | str], *, isolation_level: str = "read_uncommitted"
    ) -> dict[TopicPartition, OffsetAndTimestamp | None]:
        return self._run(lambda: self._admin.list_offsets(partitions, isolation_level=isolation_level))

    def delete_records(self, offsets: Mapping[TopicPartition, int]) -> dict[TopicPartition, int]:
        return self._run(lambda: self._admin.delete_records(offsets))

    def list_groups(self, **filters: Any) -> list[GroupListing]:
        return self._run(lambda: self._admin.list_groups(**filters))

    def describe_groups(self, group_ids: Iterable[str]) -> dict[str, GroupDescription]:
        return self._run(lambda: self._admin.describe_groups(group_ids))

    def delete_groups(self, group_ids: Iterable[str]) -> dict[str, KafkaError | None]:
        return self._run(lambda: self._admin.delete_groups(group_ids))

    def remove_group_members(
        self, group_id: str, instance_ids: Iterable[str] | None = None, **options: Any
    ) -> dict[str, KafkaError | None]:
        return self._run(lambda: self._admin.remove_group_members(group_id, instance_ids, **options))

    def list_group_offsets(
        self, group_id: str, partitions: Iterable[TopicPartition] | None = None, **options: Any
    ) -> dict[TopicPartition, OffsetAndMetadata]:
        return self._run(lambda: self._admin.list_group_offsets(group_id, partitions, **options))

    def list_consumer_group_offsets(
        self, group_id: str, partitions: Iterable[TopicPartition] | None = None
    ) -> dict[TopicPartition, OffsetAndMetadata]:
        return self._run(lambda: self._admin.list_consumer_group_offsets(group_id, partitions))

    def alter_group_offsets(self, group_id: str, offsets: Mapping[TopicPartition, OffsetAndMetadata | int]) -> None:
        self._run(lambda: self._admin.alter_group_offsets(group_id, offsets))

    def delete_group_offsets(
        self, group_id: str, partitions: Iterable[TopicPartition]
    ) -> dict[TopicPartition, KafkaError | None]:
        return self._run(lambda: self._admin.delete_group_offsets(group_id, partitions))

    def group_lag(
        self, group_id: str, partitions: Iterable[TopicPartition] | None = None, *, times: bool = False
    ) -> dict[TopicPartition, PartitionLag]:
        return self._run(lambda: self._admin.group_lag(group_id, partitions, times=times))
