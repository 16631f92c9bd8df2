"""The present leader of a partition in a refusal (KIP-951), so that the client need not fetch metadata.

The leader comes from the committed metadata. Invariant: a node's address is that of the client's own listener; a node
without one is omitted.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from tidelog.protocol.errors import ErrorCode
from tidelog.protocol.hot import NodeAddress

if TYPE_CHECKING:
    from tidelog.broker.apis.services import Services

STALE_LEADER = (ErrorCode.NOT_LEADER_OR_FOLLOWER, ErrorCode.FENCED_LEADER_EPOCH)


def leader_of(services: Services, topic: str | bytes, index: int) -> tuple[int, int] | None:
    """(leader id, leader epoch), or None without a leader or without such a partition."""
    image = services.image()
    topic_image = image.topics_by_id.get(topic) if isinstance(topic, bytes) else image.topics_by_name.get(topic)
    partition = topic_image.partitions.get(index) if topic_image is not None else None
    return (partition.leader, partition.leader_epoch) if partition is not None and partition.leader >= 0 else None


def addresses(services: Services, listener_name: str, leaders: Iterable[tuple[int, int] | None]) -> list[NodeAddress]:
    """The addresses of these leaders on the listener, without duplicates."""
    brokers = services.image().brokers
    nodes: dict[int, NodeAddress] = {}
    for leader in leaders:
        broker = brokers.get(leader[0]) if leader is not None else None
        endpoint = broker.endpoints.get(listener_name) if broker is not None else None
        if broker is not None and endpoint is not None:
            nodes[broker.node_id] = NodeAddress(broker.node_id, endpoint.host, endpoint.port, broker.rack)
    return list(nodes.values())
