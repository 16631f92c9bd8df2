"""The view of the metadata image for clients of one listener: reachable brokers and the controller.
Pure.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from tidelog.replication.controller.metadata.image import BrokerImage, EndpointImage, MetadataImage, PartitionImage

# Kafka's error messages for an unknown topic.
NO_SUCH_TOPIC: Final = "This server does not host this topic-partition."
NO_SUCH_TOPIC_ID: Final = "This server does not host this topic ID."


def reachable_brokers(
    image: MetadataImage, listener_name: str, *, include_fenced: bool = False, fenced: Collection[int] = ()
) -> list[tuple[BrokerImage, EndpointImage]]:
    """Unfenced brokers that have this listener, in order of id, and the fenced brokers in `fenced`."""
    return [
        (broker, broker.endpoints[listener_name])
        for _, broker in sorted(image.brokers.items())
        if listener_name in broker.endpoints and (include_fenced or not broker.fenced or broker.node_id in fenced)
    ]


def broker_endpoint(image: MetadataImage, node_id: int, listener_name: str) -> EndpointImage | None:
    """The endpoint of an unfenced broker; None if it is fenced or lacks the listener."""
    broker = image.brokers.get(node_id)
    return None if broker is None or broker.fenced else broker.endpoints.get(listener_name)


def offline_replicas(image: MetadataImage, partition: PartitionImage, listener_name: str) -> list[int]:
    """The replicas with a lost log directory, or with a broker that is fenced,
    unknown or without this listener.
    """
    offline_ids = []
    for replica, directory in zip(partition.replicas, partition.directories):
        broker = image.brokers.get(replica)
        if broker is None or broker.fenced or listener_name not in broker.endpoints or broker.has_lost(directory):
            offline_ids.append(replica)
    return offline_ids


def cluster_controller(image: MetadataImage, own_id: int, leader_id: int | None = None) -> int:
    """The id of the broker to which clients send administrative requests; never a lone controller
    (KIP-631).

    Kafka names any unfenced broker, which forwards. This function names the active controller if it
    is a broker, which saves the forwarding. `leader_id`: the quorum's present leader. While it
    differs from the image's controller, which may be dead, this broker names itself: librdkafka
    waits long for a controller that does not answer.
    """
    is_current = leader_id is None or leader_id == image.controller_id
    for node_id in (image.controller_id if is_current else own_id, own_id, *sorted(image.brokers)):
        broker = image.brokers.get(node_id)
        if broker is not None and not broker.fenced:
            return node_id
    return -1
