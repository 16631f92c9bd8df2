"""The preferred read replica of a consumer: a replica in its own rack, if the leader is in another rack (KIP-392).

The rule is that of Kafka's RackAwareReplicaSelector, the only supported selector. Invariant: the replica is in sync,
alive, reachable on the consumer's listener, and has the fetch offset.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tidelog.broker.apis.services import Services
    from tidelog.replication.isr import FollowerReplica
    from tidelog.replication.partition import Partition

NO_PREFERENCE = -1


def preferred_read_replica(
    services: Services, partition: Partition, rack: str, fetch_offset: int, listener_name: str
) -> int:
    """The id of the preferred broker, or -1 if the consumer should read from this leader."""
    brokers = services.image().brokers
    own = brokers.get(services.node_id)
    if own is not None and own.rack == rack:
        return NO_PREFERENCE
    nearby: list[FollowerReplica] = []
    for follower in partition.in_sync.followers.values():
        broker = brokers.get(follower.broker_id)
        if (
            broker is not None
            and broker.rack == rack
            and not broker.fenced
            and listener_name in broker.endpoints
            and follower.broker_id in partition.in_sync.isr
            and follower.log_start_offset <= fetch_offset <= follower.log_end_offset
        ):
            nearby.append(follower)
    if not nearby:
        return NO_PREFERENCE
    return max(nearby, key=lambda each: (each.log_end_offset, each.last_caught_up_ms)).broker_id
