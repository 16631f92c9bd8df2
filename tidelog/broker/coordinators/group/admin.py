"""The operators' requests about groups: describe, list, delete groups, delete offsets.

This module makes the answers of DescribeGroups, ListGroups, DeleteGroups and OffsetDelete for
one coordinator. The groups themselves live in `coordinator`. Invariant: describing and listing
change nothing, and a deletion changes state only through records. Source: Kafka's
`GroupMetadataManager.describeGroups`, `ClassicGroup` and `OffsetMetadataManager.deleteOffsets`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from tidelog.broker.coordinators.group.group import CONSUMER_PROTOCOL_TYPE, Group
from tidelog.broker.coordinators.group.states import DELETE_ANSWER, GroupState
from tidelog.protocol.errors import ErrorCode
from tidelog.protocol.messages.describe_groups import DescribedGroup, DescribedGroupMember
from tidelog.protocol.messages.list_groups import ListedGroup

GROUP_TYPE = "classic"
GROUP_ID_NOT_FOUND_VERSION_MIN = 6  # DescribeGroups; older versions show an unknown group as Dead


def describe(group: Group | None, group_id: str, api_version: int) -> DescribedGroup:
    """Show assignments in every state, even old ones, and subscriptions only in state Stable, as
    Kafka does.
    """
    if group is None:
        if api_version < GROUP_ID_NOT_FOUND_VERSION_MIN:
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


def list_groups(groups: Iterable[Group], states: Collection[str], types: Collection[str]) -> list[ListedGroup]:
    """Groups in one of the states and of one of the types, in any letter case; an empty filter
    accepts all.
    """
    state_filter = {state.strip().lower() for state in states}
    if types and GROUP_TYPE not in {group_type.lower() for group_type in types}:
        return []
    return [
        ListedGroup(
            group_id=group.group_id,
            protocol_type=group.protocol_type or "",
            group_state=group.state.value,
            group_type=GROUP_TYPE,
        )
        for group in groups
        if not state_filter or group.state.value.lower() in state_filter
    ]


def deletion_error(group: Group | None) -> ErrorCode:
    """NONE, or the error of a group that is not empty."""
    return ErrorCode.GROUP_ID_NOT_FOUND if group is None else DELETE_ANSWER[group.state]


def offset_deletion_errors(
    group: Group | None, topics: Iterable[tuple[str, list[int]]]
) -> tuple[ErrorCode, dict[tuple[str, int], ErrorCode]]:
    """The error of the whole request, and the error of each partition whose offset is to be deleted.

    A group with members keeps the offsets of the topics to which it subscribes. A group with
    members whose protocol does not name topics keeps all its offsets.
    """
    if group is None:
        return ErrorCode.GROUP_ID_NOT_FOUND, {}
    if group.state is not GroupState.EMPTY and group.protocol_type != CONSUMER_PROTOCOL_TYPE:
        return ErrorCode.NON_EMPTY_GROUP, {}
    errors: dict[tuple[str, int], ErrorCode] = {}
    for topic, partitions in topics:
        error = ErrorCode.GROUP_SUBSCRIBED_TO_TOPIC if _keeps_offsets_of(group, topic) else ErrorCode.NONE
        for partition in partitions:
            errors[topic, partition] = error
    return ErrorCode.NONE, errors


def _keeps_offsets_of(group: Group, topic: str) -> bool:
    """Whether the group has members that subscribe to the topic."""
    return group.state is not GroupState.EMPTY and group.is_subscribed_to(topic)
