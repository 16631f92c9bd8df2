"""What operators see of groups and do to them: describe, list, delete, forget offsets.

Here live the answers of DescribeGroups, ListGroups, DeleteGroups and OffsetDelete for one coordinator; the groups
themselves live in `coordinator`. The invariant: looking changes nothing, and deleting changes state only through
records. Source: Kafka's `GroupMetadataManager.describeGroups`, `ClassicGroup` and
`OffsetMetadataManager.deleteOffsets`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from tidelog.broker.coordinators.group.group import CONSUMER_PROTOCOL_TYPE, Group
from tidelog.broker.coordinators.group.offsets import OffsetStore
from tidelog.broker.coordinators.group.records import GroupMetadata, OffsetCommit
from tidelog.broker.coordinators.group.states import DELETE_ANSWER, GroupState
from tidelog.protocol.errors import ErrorCode
from tidelog.protocol.messages.describe_groups import DescribedGroup, DescribedGroupMember
from tidelog.protocol.messages.list_groups import ListedGroup

GROUP_TYPE = "classic"
NOT_FOUND_SAID_FROM = 6  # DescribeGroups; before, an unknown group is one that is Dead


def describe(group: Group | None, group_id: str, api_version: int) -> DescribedGroup:
    """Subscriptions are shown in a stable group alone; assignments always, as in Kafka, old as they may be."""
    if group is None:
        if api_version < NOT_FOUND_SAID_FROM:
            return DescribedGroup(group_id=group_id, group_state=GroupState.DEAD.value)
        return DescribedGroup(
            group_id=group_id,
            group_state=GroupState.DEAD.value,
            error_code=ErrorCode.GROUP_ID_NOT_FOUND,
            error_message=f"Group {group_id} not found.",
        )
    is_stable = group.state is GroupState.STABLE
    name = (group.protocol_name or "") if is_stable else ""
    return DescribedGroup(
        group_id=group_id,
        group_state=group.state.value,
        protocol_type=group.protocol_type or "",
        protocol_data=name,
        members=[
            DescribedGroupMember(
                member_id=member.member_id,
                group_instance_id=member.instance_id,
                client_id=member.client_id,
                client_host=member.client_host,
                member_metadata=member.protocols.get(name, b"") if is_stable else b"",
                member_assignment=member.assignment,
            )
            for member in group.members.values()
        ],
    )


def listed(groups: Iterable[Group], states: Collection[str], types: Collection[str]) -> list[ListedGroup]:
    """Groups in one of the states and of one of the types, in any spelling; an empty filter lets all pass."""
    wanted_states = {state.strip().lower() for state in states}
    if types and GROUP_TYPE not in {each.lower() for each in types}:
        return []
    return [
        ListedGroup(
            group_id=group.group_id,
            protocol_type=group.protocol_type or "",
            group_state=group.state.value,
            group_type=GROUP_TYPE,
        )
        for group in groups
        if not wanted_states or group.state.value.lower() in wanted_states
    ]


def deletion(group: Group | None, offsets: OffsetStore) -> tuple[ErrorCode, list[GroupMetadata | OffsetCommit]]:
    """The records that delete a group with all it has committed; only an empty one may go."""
    if group is None:
        return ErrorCode.GROUP_ID_NOT_FOUND, []
    error = DELETE_ANSWER[group.state]
    if error is not ErrorCode.NONE:
        return error, []
    return error, [*offsets.tombstones(group.group_id), GroupMetadata(group.group_id, None)]


def offset_deletion(
    group: Group | None, offsets: OffsetStore, topics: Iterable[tuple[str, list[int]]]
) -> tuple[ErrorCode, dict[tuple[str, int], ErrorCode], list[OffsetCommit]]:
    """What the whole is refused with, what each partition is, and the records that forget the rest.

    A group with members keeps the offsets of topics it subscribes to; one whose protocol says nothing of topics keeps
    all.
    """
    if group is None:
        return ErrorCode.GROUP_ID_NOT_FOUND, {}, []
    if group.state is not GroupState.EMPTY and group.protocol_type != CONSUMER_PROTOCOL_TYPE:
        return ErrorCode.NON_EMPTY_GROUP, {}, []
    stored = offsets.of_group(group.group_id)
    errors: dict[tuple[str, int], ErrorCode] = {}
    records: list[OffsetCommit] = []
    for topic, partitions in topics:
        subscribed = group.state is not GroupState.EMPTY and group.is_subscribed_to(topic)
        for partition in partitions:
            errors[topic, partition] = ErrorCode.GROUP_SUBSCRIBED_TO_TOPIC if subscribed else ErrorCode.NONE
            known = partition in stored.get(topic, {}) or offsets.is_pending(group.group_id, topic, partition)
            if known and not subscribed:
                records.append(OffsetCommit(group.group_id, topic, partition, None))
    return ErrorCode.NONE, errors, records
