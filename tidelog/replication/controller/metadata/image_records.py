"""The records of an image, for a snapshot of the metadata log. Pure, the inverse of replay.

The order is that of Kafka's `MetadataImage.write`: features, nodes, topics with their partitions,
configs, producer ids, and last the carried records.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tidelog.protocol.messages.metadata_records import (
    BrokerEndpoint,
    BrokerFeature,
    ConfigRecord,
    ControllerEndpoint,
    ControllerFeature,
    FeatureLevelRecord,
    PartitionRecord,
    ProducerIdsRecord,
    RegisterBrokerRecord,
    RegisterControllerRecord,
    TopicRecord,
)
from tidelog.replication.controller.metadata.image import (
    METADATA_VERSION,
    BrokerImage,
    ControllerImage,
    MetadataImage,
    PartitionImage,
)
from tidelog.replication.controller.metadata.record_codec import CONTROLLERS_VERSION, DIRECTORIES_VERSION


def image_records(image: MetadataImage) -> Iterator[Any]:
    """The records whose replay on an empty image gives this image."""
    level = image.feature_level(METADATA_VERSION)
    for name in sorted(image.features, key=lambda name: (name != METADATA_VERSION, name)):
        yield FeatureLevelRecord(name=name, feature_level=image.features[name])
    if level >= CONTROLLERS_VERSION:
        for controller in image.controllers.values():
            yield _controller_record(controller)
    for broker in image.brokers.values():
        yield _broker_record(broker)
    has_directories = level >= DIRECTORIES_VERSION
    for topic in image.topics_by_name.values():
        yield TopicRecord(name=topic.name, topic_id=topic.topic_id)
        for index, partition in topic.partitions.items():
            yield _partition_record(topic.topic_id, index, partition, has_directories)
    for (resource_type, resource_name), config in image.configs.items():
        for name, value in config.items():
            yield ConfigRecord(resource_type=resource_type, resource_name=resource_name, name=name, value=value)
    if image.next_producer_id:
        # The image does not hold the broker of the last block; Kafka writes -1 too.
        yield ProducerIdsRecord(broker_id=-1, broker_epoch=-1, next_producer_id=image.next_producer_id)
    yield from image.carried.values()


def _controller_record(controller: ControllerImage) -> RegisterControllerRecord:
    return RegisterControllerRecord(
        controller_id=controller.node_id,
        incarnation_id=controller.incarnation_id,
        end_points=[
            ControllerEndpoint(
                name=endpoint.name, host=endpoint.host, port=endpoint.port, security_protocol=endpoint.security_protocol
            )
            for endpoint in controller.endpoints.values()
        ],
        features=[
            ControllerFeature(name=name, min_supported_version=low, max_supported_version=high)
            for name, (low, high) in controller.features.items()
        ],
    )


def _broker_record(broker: BrokerImage) -> RegisterBrokerRecord:
    return RegisterBrokerRecord(
        broker_id=broker.node_id,
        incarnation_id=broker.incarnation_id,
        broker_epoch=broker.epoch,
        end_points=[
            BrokerEndpoint(
                name=endpoint.name, host=endpoint.host, port=endpoint.port, security_protocol=endpoint.security_protocol
            )
            for endpoint in broker.endpoints.values()
        ],
        features=[
            BrokerFeature(name=name, min_supported_version=low, max_supported_version=high)
            for name, (low, high) in broker.features.items()
        ],
        rack=broker.rack,
        fenced=broker.fenced,
        in_controlled_shutdown=broker.in_controlled_shutdown,
        log_dirs=list(broker.log_dirs),
        cordoned_log_dirs=list(broker.cordoned_log_dirs) or None,
    )


def _partition_record(topic_id: bytes, index: int, partition: PartitionImage, has_directories: bool) -> PartitionRecord:
    return PartitionRecord(
        partition_id=index,
        topic_id=topic_id,
        replicas=list(partition.replicas),
        isr=list(partition.isr),
        removing_replicas=list(partition.removing_replicas),
        adding_replicas=list(partition.adding_replicas),
        leader=partition.leader,
        leader_recovery_state=partition.leader_recovery_state,
        leader_epoch=partition.leader_epoch,
        partition_epoch=partition.partition_epoch,
        directories=list(partition.directories) if has_directories else [],
        eligible_leader_replicas=list(partition.elr) or None,
        last_known_elr=list(partition.last_known_elr) or None,
    )
