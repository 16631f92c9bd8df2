"""Replay of metadata records: it builds the next image and its difference from the last one. Pure.

No other code makes images. The table at the end has one function for each kind of record; records
that are not applied are carried. A record that contradicts the image (a partition of an unknown
topic) raises `MetadataError`, after which the log must not be used. The rules are those of Kafka's
`TopicDelta`, `PartitionRegistration.merge` and `ClusterDelta`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from tidelog.protocol.messages import metadata_records as kafka
from tidelog.protocol.uuids import MIGRATING_DIRECTORY, uuid_to_text
from tidelog.replication.controller.metadata.image import (
    NO_LEADER_CHANGE,
    TOPIC_RESOURCE,
    BrokerImage,
    ControllerImage,
    EndpointImage,
    MetadataDelta,
    MetadataImage,
    PartitionImage,
    TopicImage,
)
from tidelog.replication.controller.metadata.record_codec import UnknownRecord


class MetadataError(Exception):
    """The metadata log contradicts itself."""


class ImageBuilder:
    """Applies records to a copy of an image, which `build` returns. Only changed parts are copied."""

    def __init__(self, image: MetadataImage) -> None:
        self._next = replace(image)
        self._delta = MetadataDelta()
        self._copied: set[str] = set()
        self._copied_topics: set[bytes] = set()
        self._copied_configs: set[tuple[int, str]] = set()

    def replay_all(self, records: Iterable[Any]) -> None:
        for record in records:
            self.replay(record)

    def replay(self, record: Any) -> None:
        """Apply one record. Raises `MetadataError`."""
        _REPLAY[type(record)](self, record)

    def feature_level(self, name: str) -> int:
        return self._next.feature_level(name)

    def build(
        self, offset: int, epoch: int, timestamp_ms: int, controller_id: int
    ) -> tuple[MetadataImage, MetadataDelta]:
        """The image after the record at `offset`, and its difference. Ends the use of the builder."""
        image = self._next
        image.offset, image.epoch, image.timestamp_ms, image.controller_id = offset, epoch, timestamp_ms, controller_id
        return image, self._delta

    # -- copy before the first change --------------------------------------------------------------------------------

    def _own(self, name: str) -> Any:
        if name not in self._copied:
            self._copied.add(name)
            setattr(self._next, name, dict(getattr(self._next, name)))
        return getattr(self._next, name)

    def _own_topic(self, topic_id: bytes, record: Any) -> TopicImage:
        topic = self._next.topics_by_id.get(topic_id)
        if topic is None:
            raise MetadataError(f"{type(record).__name__} for topic id {uuid_to_text(topic_id)}, which does not exist")
        if topic_id not in self._copied_topics:
            topic = TopicImage(topic.name, topic_id, dict(topic.partitions))
            self._put_topic(topic)
        return topic

    def _put_topic(self, topic: TopicImage) -> None:
        self._copied_topics.add(topic.topic_id)
        self._own("topics_by_name")[topic.name] = topic
        self._own("topics_by_id")[topic.topic_id] = topic

    def _put_partition(self, topic: TopicImage, index: int, partition: PartitionImage) -> None:
        topic.partitions[index] = partition
        self._delta.changed_partitions.setdefault(topic.topic_id, set()).add(index)

    def _own_config(self, key: tuple[int, str]) -> dict[str, str]:
        configs: dict[tuple[int, str], dict[str, str]] = self._own("configs")
        if key not in self._copied_configs:
            self._copied_configs.add(key)
            configs[key] = dict(configs.get(key, {}))
        return configs.setdefault(key, {})

    # -- topics ------------------------------------------------------------------------------------------------------

    def _topic(self, record: kafka.TopicRecord) -> None:
        existing = self._next.topics_by_name.get(record.name)
        if existing is not None or record.topic_id in self._next.topics_by_id:
            raise MetadataError(f"topic {record.name} is created twice")
        topic = TopicImage(record.name, record.topic_id)
        self._put_topic(topic)
        self._delta.created_topics[record.topic_id] = topic

    def _partition(self, record: kafka.PartitionRecord) -> None:
        topic = self._own_topic(record.topic_id, record)
        replicas = tuple(record.replicas)
        self._put_partition(
            topic,
            record.partition_id,
            PartitionImage(
                replicas=replicas,
                isr=tuple(record.isr),
                leader=record.leader,
                leader_epoch=record.leader_epoch,
                partition_epoch=record.partition_epoch,
                # Records before 3.7 have no directories: the replica stays in its present one.
                directories=tuple(record.directories) or (MIGRATING_DIRECTORY,) * len(replicas),
                removing_replicas=tuple(record.removing_replicas),
                adding_replicas=tuple(record.adding_replicas),
                leader_recovery_state=record.leader_recovery_state,
                elr=tuple(record.eligible_leader_replicas or ()),
                last_known_elr=tuple(record.last_known_elr or ()),
            ),
        )

    def _partition_change(self, record: kafka.PartitionChangeRecord) -> None:
        topic = self._own_topic(record.topic_id, record)
        before = topic.partitions.get(record.partition_id)
        if before is None:
            raise MetadataError(f"a change of {topic.name}-{record.partition_id}, which does not exist")
        self._put_partition(topic, record.partition_id, merge_partition_change(before, record))

    def _remove_topic(self, record: kafka.RemoveTopicRecord) -> None:
        topic = self._next.topics_by_id.get(record.topic_id)
        if topic is None:
            raise MetadataError(f"topic id {uuid_to_text(record.topic_id)} is removed but does not exist")
        del self._own("topics_by_id")[topic.topic_id]
        del self._own("topics_by_name")[topic.name]
        key = (TOPIC_RESOURCE, topic.name)
        if key in self._next.configs:
            del self._own("configs")[key]
            self._copied_configs.discard(key)
            self._delta.changed_configs.discard(key)
        self._delta.changed_partitions.pop(topic.topic_id, None)
        if self._delta.created_topics.pop(topic.topic_id, None) is None:
            self._delta.deleted_topics[topic.topic_id] = topic

    def _clear_elr(self, record: kafka.ClearElrRecord) -> None:
        if record.topic_name and record.topic_name not in self._next.topics_by_name:
            raise MetadataError(f"the eligible replicas of {record.topic_name} are cleared but it does not exist")
        names = [record.topic_name] if record.topic_name else list(self._next.topics_by_name)
        for name in names:
            topic = self._next.topics_by_name[name]
            for index, partition in list(topic.partitions.items()):
                if partition.elr or partition.last_known_elr:
                    topic = self._own_topic(topic.topic_id, record)
                    # As in Kafka, this is a change of the partition: its epoch must be the same on Kafka's nodes.
                    change = kafka.PartitionChangeRecord(eligible_leader_replicas=[], last_known_elr=[])
                    self._put_partition(topic, index, merge_partition_change(partition, change))

    # -- configs, features, producer ids -----------------------------------------------------------------------------

    def _config(self, record: kafka.ConfigRecord) -> None:
        key = (record.resource_type, record.resource_name)
        config = self._own_config(key)
        if record.value is None:
            config.pop(record.name, None)
            if not config:
                del self._own("configs")[key]
                self._copied_configs.discard(key)
        else:
            config[record.name] = record.value
        self._delta.changed_configs.add(key)

    def _feature_level(self, record: kafka.FeatureLevelRecord) -> None:
        features = self._own("features")
        if record.feature_level == 0:
            features.pop(record.name, None)
        else:
            features[record.name] = record.feature_level
        self._delta.changed_features = True

    def _producer_ids(self, record: kafka.ProducerIdsRecord) -> None:
        self._next.next_producer_id = record.next_producer_id

    # -- nodes -------------------------------------------------------------------------------------------------------

    def _register_broker(self, record: kafka.RegisterBrokerRecord) -> None:
        self._own("brokers")[record.broker_id] = BrokerImage(
            node_id=record.broker_id,
            epoch=record.broker_epoch,
            incarnation_id=record.incarnation_id,
            endpoints=_endpoints(record.end_points),
            features=_feature_ranges(record.features),
            rack=record.rack,
            fenced=record.fenced,
            in_controlled_shutdown=record.in_controlled_shutdown,
            log_dirs=tuple(record.log_dirs),
            cordoned_log_dirs=tuple(record.cordoned_log_dirs or ()),
        )
        self._delta.changed_brokers.add(record.broker_id)

    def _unregister_broker(self, record: kafka.UnregisterBrokerRecord) -> None:
        if self._own("brokers").pop(record.broker_id, None) is None:
            raise MetadataError(f"broker {record.broker_id} is unregistered but was not registered")
        self._delta.changed_brokers.add(record.broker_id)

    def _change_broker(self, broker_id: int, epoch: int, **changes: Any) -> None:
        broker = self._next.brokers.get(broker_id)
        if broker is None or broker.epoch != epoch:
            raise MetadataError(f"a change of broker {broker_id} in epoch {epoch}, which is not registered")
        self._own("brokers")[broker_id] = replace(broker, **changes)
        self._delta.changed_brokers.add(broker_id)

    def _fence_broker(self, record: kafka.FenceBrokerRecord) -> None:
        self._change_broker(record.id, record.epoch, fenced=True)

    def _unfence_broker(self, record: kafka.UnfenceBrokerRecord) -> None:
        self._change_broker(record.id, record.epoch, fenced=False)

    def _change_registration(self, record: kafka.BrokerRegistrationChangeRecord) -> None:
        changes: dict[str, Any] = {}
        if record.fenced:  # 1 fences, -1 unfences
            changes["fenced"] = record.fenced > 0
        if record.in_controlled_shutdown:
            changes["in_controlled_shutdown"] = True
        if record.log_dirs:
            changes["log_dirs"] = tuple(record.log_dirs)
        if record.cordoned_log_dirs is not None:
            changes["cordoned_log_dirs"] = tuple(record.cordoned_log_dirs)
        self._change_broker(record.broker_id, record.broker_epoch, **changes)

    def _register_controller(self, record: kafka.RegisterControllerRecord) -> None:
        self._own("controllers")[record.controller_id] = ControllerImage(
            node_id=record.controller_id,
            incarnation_id=record.incarnation_id,
            endpoints=_endpoints(record.end_points),
            features=_feature_ranges(record.features),
        )

    # -- carried records ---------------------------------------------------------------------------------------------

    def _carry(self, record: Any) -> None:
        identity, is_removal = _identity(record)
        if is_removal:
            self._own("carried").pop(identity, None)
        else:
            self._own("carried")[identity] = record

    def _ignore(self, record: Any) -> None:
        pass

    def _reject_nested(self, record: Any) -> None:
        raise MetadataError(f"{type(record).__name__} inside a transaction that is already being replayed")


def merge_partition_change(before: PartitionImage, record: kafka.PartitionChangeRecord) -> PartitionImage:
    """The partition after one change. A record with a leader, even the present
    one, starts a new leader epoch.
    """
    replicas = before.replicas if record.replicas is None else tuple(record.replicas)
    if record.directories is not None:
        directories = tuple(record.directories)
    elif len(replicas) == len(before.directories):
        directories = before.directories
    else:
        directories = (MIGRATING_DIRECTORY,) * len(replicas)  # as in a record before 3.7
    new_leader = record.leader != NO_LEADER_CHANGE
    return PartitionImage(
        replicas=replicas,
        isr=before.isr if record.isr is None else tuple(record.isr),
        leader=record.leader if new_leader else before.leader,
        leader_epoch=before.leader_epoch + 1 if new_leader else before.leader_epoch,
        partition_epoch=before.partition_epoch + 1,
        directories=directories,
        removing_replicas=_changed(before.removing_replicas, record.removing_replicas),
        adding_replicas=_changed(before.adding_replicas, record.adding_replicas),
        leader_recovery_state=(
            before.leader_recovery_state if record.leader_recovery_state < 0 else record.leader_recovery_state
        ),
        elr=_changed(before.elr, record.eligible_leader_replicas),
        last_known_elr=_changed(before.last_known_elr, record.last_known_elr),
    )


def _changed(before: tuple[int, ...], after: list[int] | None) -> tuple[int, ...]:
    return before if after is None else tuple(after)


def _endpoints(records: Iterable[Any]) -> dict[str, EndpointImage]:
    return {
        endpoint.name: EndpointImage(endpoint.name, endpoint.host, endpoint.port, endpoint.security_protocol)
        for endpoint in records
    }


def _feature_ranges(records: Iterable[Any]) -> dict[str, tuple[int, int]]:
    return {feature.name: (feature.min_supported_version, feature.max_supported_version) for feature in records}


def _identity(record: Any) -> tuple[tuple[object, ...], bool]:
    """(the identity of the carried record, whether the record removes it)."""
    match record:
        case kafka.AccessControlEntryRecord():
            return ("acl", record.id), False
        case kafka.RemoveAccessControlEntryRecord():
            return ("acl", record.id), True
        case kafka.UserScramCredentialRecord():
            return ("scram", record.name, record.mechanism), False
        case kafka.RemoveUserScramCredentialRecord():
            return ("scram", record.name, record.mechanism), True
        case kafka.DelegationTokenRecord():
            return ("token", record.token_id), False
        case kafka.RemoveDelegationTokenRecord():
            return ("token", record.token_id), True
        case kafka.ClientQuotaRecord():
            entity = tuple(sorted((part.entity_type, part.entity_name or "") for part in record.entity))
            return ("quota", entity, record.key), record.remove
        case kafka.ZkMigrationStateRecord():
            return ("migration",), False
    # The meaning of an unknown record is unknown, so its bytes are its identity.
    assert isinstance(record, UnknownRecord)
    return ("unknown", record.value), False


_REPLAY: dict[type, Callable[[ImageBuilder, Any], None]] = {
    kafka.TopicRecord: ImageBuilder._topic,
    kafka.PartitionRecord: ImageBuilder._partition,
    kafka.PartitionChangeRecord: ImageBuilder._partition_change,
    kafka.RemoveTopicRecord: ImageBuilder._remove_topic,
    kafka.ClearElrRecord: ImageBuilder._clear_elr,
    kafka.ConfigRecord: ImageBuilder._config,
    kafka.FeatureLevelRecord: ImageBuilder._feature_level,
    kafka.ProducerIdsRecord: ImageBuilder._producer_ids,
    kafka.RegisterBrokerRecord: ImageBuilder._register_broker,
    kafka.UnregisterBrokerRecord: ImageBuilder._unregister_broker,
    kafka.FenceBrokerRecord: ImageBuilder._fence_broker,
    kafka.UnfenceBrokerRecord: ImageBuilder._unfence_broker,
    kafka.BrokerRegistrationChangeRecord: ImageBuilder._change_registration,
    kafka.RegisterControllerRecord: ImageBuilder._register_controller,
    kafka.NoOpRecord: ImageBuilder._ignore,
    kafka.BeginTransactionRecord: ImageBuilder._reject_nested,
    kafka.EndTransactionRecord: ImageBuilder._reject_nested,
    kafka.AbortTransactionRecord: ImageBuilder._reject_nested,
    kafka.AccessControlEntryRecord: ImageBuilder._carry,
    kafka.RemoveAccessControlEntryRecord: ImageBuilder._carry,
    kafka.UserScramCredentialRecord: ImageBuilder._carry,
    kafka.RemoveUserScramCredentialRecord: ImageBuilder._carry,
    kafka.DelegationTokenRecord: ImageBuilder._carry,
    kafka.RemoveDelegationTokenRecord: ImageBuilder._carry,
    kafka.ClientQuotaRecord: ImageBuilder._carry,
    kafka.ZkMigrationStateRecord: ImageBuilder._carry,
    UnknownRecord: ImageBuilder._carry,
}
