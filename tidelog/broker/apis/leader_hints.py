"""Who leads a partition instead, told with the refusal itself (KIP-951), so that a client need not ask for metadata.

What is told is the committed metadata. Invariant: a node is named only with an address on the client's own listener.
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
    """(leader id, leader epoch); None where there is no leader or no such partition."""
    image = services.image()
    found = image.topics_by_id.get(topic) if isinstance(topic, bytes) else image.topics_by_name.get(topic)
    placed = found.partitions.get(index) if found is not None else None
    return (placed.leader, placed.leader_epoch) if placed is not None and placed.leader >= 0 else None


def addresses(services: Services, listener_name: str, leaders: Iterable[tuple[int, int] | None]) -> list[NodeAddress]:
    """Where these leaders are reached on the listener, each once."""
    brokers = services.image().brokers
    found: dict[int, NodeAddress] = {}
    for leader in leaders:
        broker = brokers.get(leader[0]) if leader is not None else None
        endpoint = broker.endpoints.get(listener_name) if broker is not None else None
        if broker is not None and endpoint is not None:
            found[broker.node_id] = NodeAddress(broker.node_id, endpoint.host, endpoint.port, broker.rack)
    return list(found.values())
