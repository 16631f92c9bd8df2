"""The comparison of two snapshots: rates, lag, and the rows of the three tables. Pure.

Rates are per second between the snapshots; None without an earlier snapshot. A log that was truncated or restarted
counts as not grown.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from tidelog.client.model import TopicPartition
from tidelog.protocol.addresses import address_text

if TYPE_CHECKING:
    from tidelog.cli.top.snapshot import Snapshot

Key = TypeVar("Key")
Growth = dict[TopicPartition, int]
Rate = Callable[[int], float | None]

SORTS = ("rate", "name", "lag", "size")


@dataclass(frozen=True, slots=True)
class TopicRow:
    topic: str
    partitions: int
    under_replicated: int
    without_leader: int
    size_bytes: int
    records_per_s: float | None
    bytes_per_s: float | None


@dataclass(frozen=True, slots=True)
class GroupRow:
    group: str
    state: str
    members: int
    topics: int
    lag: int
    records_per_s: float | None


@dataclass(frozen=True, slots=True)
class BrokerRow:
    broker: int
    address: str
    state: str
    leaders: int
    replicas: int
    size_bytes: int | None
    records_per_s: float | None
    bytes_per_s: float | None


@dataclass(frozen=True, slots=True)
class View:
    """The content of one view."""

    cluster_id: str | None
    leader_id: int
    topics: list[TopicRow]
    groups: list[GroupRow]
    brokers: list[BrokerRow]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def view(
    before: Snapshot | None, now: Snapshot, *, sort: str = "rate", pattern: str | None = None, internal: bool = False
) -> View:
    """`pattern`: selects topics and groups by their whole names. `internal`: includes internal topics."""
    matcher = re.compile(pattern or ".*", re.DOTALL)
    duration_s = 0.0 if before is None else now.at_s - before.at_s
    grown = _growth(before.end_offsets if before else {}, now.end_offsets)
    sizes = {
        broker_id: _growth(before.sizes.get(broker_id, {}) if before else {}, now.sizes[broker_id])
        for broker_id in now.sizes
    }

    def rate(amount: int) -> float | None:
        return round(amount / duration_s, 3) if duration_s > 0 else None

    topics = [
        _topic_row(now, name, grown, sizes, rate)
        for name, topic in now.topics.items()
        if matcher.fullmatch(name) and (internal or not topic.internal)
    ]
    groups = [_group_row(before, now, group_id, rate) for group_id in now.groups if matcher.fullmatch(group_id)]
    brokers = _broker_rows(now, grown, sizes, rate)
    return View(
        now.cluster.cluster_id,
        now.leader_id,
        sorted(topics, key=lambda row: _topic_key(row, sort)),
        sorted(groups, key=lambda row: _group_key(row, sort)),
        brokers,
    )


def _growth(before: Mapping[Key, int], now: Mapping[Key, int]) -> dict[Key, int]:
    return {key: max(0, value - before.get(key, value)) for key, value in now.items()}


def _topic_key(row: TopicRow, sort: str) -> tuple[float, str]:
    amounts = {"rate": row.records_per_s or 0.0, "size": row.size_bytes}
    return -amounts.get(sort, 0.0), row.topic


def _group_key(row: GroupRow, sort: str) -> tuple[float, str]:
    amounts = {"rate": row.records_per_s or 0.0, "lag": row.lag}
    return -amounts.get(sort, 0.0), row.group


def _topic_row(now: Snapshot, name: str, grown: Growth, sizes: dict[int, Growth], rate: Rate) -> TopicRow:
    partitions = now.topics[name].partitions
    at_leaders = [(TopicPartition(name, each.partition), each.leader) for each in partitions if each.leader is not None]
    return TopicRow(
        name,
        len(partitions),
        sum(len(each.isr) < len(each.replicas) for each in partitions),
        sum(each.leader is None for each in partitions),
        sum(now.sizes.get(leader, {}).get(partition, 0) for partition, leader in at_leaders),
        rate(sum(grown.get(partition, 0) for partition, _ in at_leaders)),
        rate(sum(sizes.get(leader, {}).get(partition, 0) for partition, leader in at_leaders)),
    )


def _group_row(before: Snapshot | None, now: Snapshot, group_id: str, rate: Rate) -> GroupRow:
    group, committed = now.groups[group_id], now.committed.get(group_id, {})
    read = _growth(before.committed.get(group_id, {}) if before else {}, committed)
    return GroupRow(
        group_id,
        group.state,
        len(group.members),
        len({partition.topic for partition in committed}),
        sum(max(0, now.end_offsets.get(partition, offset) - offset) for partition, offset in committed.items()),
        rate(sum(read.values())),
    )


def _broker_rows(now: Snapshot, grown: Growth, sizes: dict[int, Growth], rate: Rate) -> list[BrokerRow]:
    leaders: Counter[int] = Counter()
    replicas: Counter[int] = Counter()
    records: Counter[int] = Counter()
    for name, topic in now.topics.items():
        for each in topic.partitions:
            replicas.update(each.replicas)
            if each.leader is not None:
                leaders[each.leader] += 1
                records[each.leader] += grown.get(TopicPartition(name, each.partition), 0)
    return [
        BrokerRow(
            node.node_id,
            address_text(node.host, node.port),
            "fenced" if node.fenced else "running" if node.node_id in now.sizes else "unreachable",
            leaders[node.node_id],
            replicas[node.node_id],
            sum(now.sizes[node.node_id].values()) if node.node_id in now.sizes else None,
            rate(records[node.node_id]),
            rate(sum(sizes[node.node_id].values())) if node.node_id in sizes else None,
        )
        for node in sorted(now.cluster.nodes, key=lambda node: node.node_id)
    ]
