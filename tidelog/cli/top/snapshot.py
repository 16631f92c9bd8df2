"""The state of a cluster at one moment: offsets and sizes of partitions, offsets of groups, brokers.

The values of a part that does not answer are omitted, because the view must work for a cluster with failures.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field

from tidelog.client import Admin, BrokerErrors, OffsetAndTimestamp, PartitionErrors, TopicPartition
from tidelog.client.groups.model import DESCRIBED_TYPES, GroupDescription
from tidelog.client.model import ClusterDescription, TopicDescription
from tidelog.protocol.errors import ErrorCode, KafkaError

_GROUPS_AT_ONCE = 16


@dataclass(slots=True)
class Snapshot:
    """`at_s`: the time of the event loop's clock. Offsets and sizes exist only for brokers that have answered."""

    at_s: float
    cluster: ClusterDescription
    topics: dict[str, TopicDescription]
    leader_id: int = -1
    end_offsets: dict[TopicPartition, int] = field(default_factory=dict)
    sizes: dict[int, dict[TopicPartition, int]] = field(default_factory=dict)
    """Broker -> partition -> bytes, for the brokers that have answered."""
    groups: dict[str, GroupDescription] = field(default_factory=dict)
    committed: dict[str, dict[TopicPartition, int]] = field(default_factory=dict)


async def take(admin: Admin, quorum: Admin) -> Snapshot:
    """Query the cluster. Raises KafkaError if no broker answers.

    `quorum` asks for the leader of the metadata quorum, over connections of its own: without one a broker keeps that
    question, and all that its client asks next.
    """
    cluster = await admin.describe_cluster(include_fenced=True)
    topics = await admin.describe_topics()
    snapshot = Snapshot(asyncio.get_running_loop().time(), cluster, topics)
    parts = (_add_leader(quorum, snapshot), _add_offsets(admin, snapshot), _add_groups(admin, snapshot))
    sizes = [_add_sizes(admin, snapshot, node.node_id) for node in cluster.nodes if not node.fenced]
    for outcome in await asyncio.gather(*parts, *sizes, return_exceptions=True):
        if isinstance(outcome, BaseException) and not isinstance(outcome, KafkaError):
            raise outcome
    return snapshot


async def _add_leader(admin: Admin, snapshot: Snapshot) -> None:
    snapshot.leader_id = (await admin.describe_quorum()).leader_id


async def _add_offsets(admin: Admin, snapshot: Snapshot) -> None:
    led = {
        TopicPartition(name, each.partition): "latest"
        for name, topic in snapshot.topics.items()
        for each in topic.partitions
        if each.leader is not None
    }
    try:
        offsets: Mapping[TopicPartition, OffsetAndTimestamp | None] = await admin.list_offsets(led)
    except PartitionErrors as error:
        offsets = error.answers
    snapshot.end_offsets = {partition: at.offset for partition, at in offsets.items() if at is not None}
    snapshot.at_s = asyncio.get_running_loop().time()


async def _add_sizes(admin: Admin, snapshot: Snapshot, broker_id: int) -> None:
    (directories,) = (await admin.describe_log_dirs([broker_id])).values()
    snapshot.sizes[broker_id] = {
        TopicPartition(replica.topic, replica.partition): replica.size_bytes
        for directory in directories
        for replica in directory.replicas
        if not replica.is_future
    }


async def _add_groups(admin: Admin, snapshot: Snapshot) -> None:
    try:
        listings = await admin.list_groups()
    except BrokerErrors as error:
        listings = error.answers
    listed = [group.group_id for group in listings if group.type.lower() in DESCRIBED_TYPES]
    snapshot.groups = await admin.describe_groups(listed) if listed else {}
    room = asyncio.Semaphore(_GROUPS_AT_ONCE)

    async def ask(group_id: str) -> None:
        async with room:
            committed = await admin.list_group_offsets(group_id)
        snapshot.committed[group_id] = {partition: at.offset for partition, at in committed.items()}

    outcomes = await asyncio.gather(*(ask(group_id) for group_id in snapshot.groups), return_exceptions=True)
    for outcome in outcomes:
        # A group may be deleted between the list and its description.
        if isinstance(outcome, BaseException) and not (
            isinstance(outcome, KafkaError) and outcome.code is ErrorCode.GROUP_ID_NOT_FOUND
        ):
            raise outcome
