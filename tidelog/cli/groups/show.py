"""The output of `tidelog groups describe`: rows of tables, and JSON. Pure.

The columns are those of Kafka's ConsumerGroupCommand, with the lag in seconds beside the lag in records.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from tidelog.client.assignment.protocol import by_topic
from tidelog.client.groups.model import DEAD, EMPTY, STABLE, GroupDescription, GroupMember, PartitionLag
from tidelog.client.model import TopicPartition
from tidelog.protocol.addresses import address_text

NOTHING = "-"
OFFSET_COLUMNS = (
    "GROUP", "TOPIC", "PARTITION", "CURRENT-OFFSET", "LOG-END-OFFSET", "LAG", "LAG-SECONDS",
    "CONSUMER-ID", "HOST", "CLIENT-ID",
)  # fmt: skip
MEMBER_COLUMNS = ("GROUP", "CONSUMER-ID", "GROUP-INSTANCE-ID", "HOST", "CLIENT-ID", "#PARTITIONS")
STATE_COLUMNS = ("GROUP", "COORDINATOR (ID)", "ASSIGNMENT-STRATEGY", "STATE", "#MEMBERS")

Row = tuple[object, ...]


class ShownGroup(NamedTuple):
    """`lags`: sorted by partition. `now_ms`: the present time, for lags in seconds."""

    group: GroupDescription
    lags: Mapping[TopicPartition, PartitionLag]
    now_ms: int


def remark(group: GroupDescription) -> str | None:
    """A remark for the user above the rows, or None."""
    if group.state == EMPTY:
        return f"Group {group.group_id} has no members."
    if group.state not in (STABLE, DEAD):
        return f"Group {group.group_id} is rebalancing."
    return None


def partitions_of(group: GroupDescription) -> set[TopicPartition]:
    """The partitions that are assigned to the group's members."""
    return {partition for member in group.members for partition in member.assignment}


def lag_seconds(lag: PartitionLag, now_ms: int) -> float | None:
    """The age of the first unread record; 0 if all records are read, None if unknown."""
    if lag.lag is None:
        return None
    if lag.unread_since_ms is None:
        # All records are read, or only transaction markers are left.
        return 0.0
    return max(now_ms - lag.unread_since_ms, 0) / 1000


def offset_rows(shown: ShownGroup) -> list[Row]:
    owners = _owners(shown.group)
    rows: list[Row] = []
    for partition, lag in shown.lags.items():
        member = owners.get(partition)
        seconds = lag_seconds(lag, shown.now_ms)
        rows.append(
            (shown.group.group_id, partition.topic, partition.partition, _or_nothing(lag.committed))
            + (_or_nothing(lag.log_end_offset), _or_nothing(lag.lag))
            + (NOTHING if seconds is None else f"{seconds:.1f}", *_who(member))
        )
    idle = [member for member in shown.group.members if not member.assignment]
    return rows + [(shown.group.group_id, *[NOTHING] * 6, *_who(member)) for member in idle]


def member_rows(group: GroupDescription, verbose: bool) -> list[Row]:
    rows: list[Row] = []
    for member in group.members:
        instance_id = member.instance_id or NOTHING
        row: Row = (group.group_id, member.member_id, instance_id, member.client_host, member.client_id)
        rows.append((*row, len(member.assignment), *([_assigned(member)] if verbose else [])))
    return rows


def state_row(group: GroupDescription) -> Row:
    node = group.coordinator
    where = NOTHING if node is None else f"{address_text(node.host, node.port)} ({node.node_id})"
    return (group.group_id, where, group.protocol or NOTHING, group.state, len(group.members))


def as_dict(shown: ShownGroup, with_offsets: bool) -> dict[str, Any]:
    group = shown.group
    node = group.coordinator
    values: dict[str, Any] = {
        "group": group.group_id,
        "state": group.state,
        "protocol_type": group.protocol_type,
        "assignment_strategy": group.protocol or None,
        "coordinator": None if node is None else {"id": node.node_id, "host": node.host, "port": node.port},
        "members": [_member_dict(member) for member in group.members],
    }
    if with_offsets:
        owners = _owners(group)
        values["offsets"] = [_lag_dict(each, lag, owners, shown.now_ms) for each, lag in shown.lags.items()]
    return values


def _lag_dict(
    partition: TopicPartition, lag: PartitionLag, owners: Mapping[TopicPartition, GroupMember], now_ms: int
) -> dict[str, Any]:
    member = owners.get(partition)
    return {
        "topic": partition.topic,
        "partition": partition.partition,
        "current_offset": lag.committed,
        "log_end_offset": lag.log_end_offset,
        "lag": lag.lag,
        "lag_seconds": lag_seconds(lag, now_ms),
        "member_id": None if member is None else member.member_id,
    }


def _member_dict(member: GroupMember) -> dict[str, Any]:
    return {
        "member_id": member.member_id,
        "instance_id": member.instance_id,
        "client_id": member.client_id,
        "host": member.client_host,
        "topics": list(member.topics),
        "assignment": by_topic(member.assignment),
    }


def _owners(group: GroupDescription) -> dict[TopicPartition, GroupMember]:
    return {partition: member for member in group.members for partition in member.assignment}


def _who(member: GroupMember | None) -> tuple[str, str, str]:
    if member is None:
        return NOTHING, NOTHING, NOTHING
    return member.member_id, member.client_host, member.client_id


def _assigned(member: GroupMember) -> str:
    topics = by_topic(member.assignment)
    return ", ".join(f"{topic}({','.join(map(str, numbers))})" for topic, numbers in topics.items()) or NOTHING


def _or_nothing(value: int | None) -> object:
    return NOTHING if value is None else value
