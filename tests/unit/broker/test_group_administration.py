"""DescribeGroups, ListGroups, DeleteGroups and OffsetDelete of a real node, in every version."""

from __future__ import annotations

import asyncio

import pytest

from tests.unit.broker.conftest import RunningNode, Wire
from tidelog.broker.apis.groups import delete_groups, describe_groups, list_groups, offset_delete
from tidelog.protocol.errors import ErrorCode, KafkaError
from tidelog.protocol.messages.delete_groups import DeleteGroupsRequest, DeleteGroupsResponse
from tidelog.protocol.messages.describe_groups import DescribeGroupsRequest, DescribeGroupsResponse
from tidelog.protocol.messages.find_coordinator import FindCoordinatorRequest, FindCoordinatorResponse
from tidelog.protocol.messages.join_group import JoinGroupRequest, JoinGroupRequestProtocol, JoinGroupResponse
from tidelog.protocol.messages.list_groups import ListGroupsRequest, ListGroupsResponse
from tidelog.protocol.messages.offset_commit import (
    OffsetCommitRequest,
    OffsetCommitRequestPartition,
    OffsetCommitRequestTopic,
    OffsetCommitResponse,
)
from tidelog.protocol.messages.offset_delete import (
    OffsetDeleteRequest,
    OffsetDeleteRequestPartition,
    OffsetDeleteRequestTopic,
    OffsetDeleteResponse,
)

E = ErrorCode
ALL_OPERATIONS = sum(1 << operation for operation in (3, 6, 8, 10, 11))
NOT_ASKED = -(2**31)


@pytest.fixture
async def coordinated(wire: Wire) -> Wire:
    """The coordinator's partitions are there and loaded; so is the topic t."""
    await wire.create_topic("t", 2)
    for group in ("a", "b", "c"):
        for _ in range(3000):
            await wire.call(FindCoordinatorRequest(key=group), 3, FindCoordinatorResponse)
            response = await wire.call(DescribeGroupsRequest(groups=[group]), 5, DescribeGroupsResponse)
            if not response.groups[0].error_code:
                break
            await asyncio.sleep(0.02)
    return wire


async def commit(wire: Wire, *groups: str) -> None:
    for group in groups:
        partitions = [
            OffsetCommitRequestPartition(partition_index=index, committed_offset=1, committed_metadata="")
            for index in (0, 1)
        ]
        request = OffsetCommitRequest(
            group_id=group, topics=[OffsetCommitRequestTopic(name="t", partitions=partitions)]
        )
        response = await wire.call(request, 8, OffsetCommitResponse)
        assert [each.error_code for each in response.topics[0].partitions] == [0, 0]


async def join(wire: Wire, group: str) -> JoinGroupResponse:
    request = JoinGroupRequest(
        group_id=group, session_timeout_ms=10_000, rebalance_timeout_ms=10_000, protocol_type="consumer",
        group_instance_id="i", protocols=[JoinGroupRequestProtocol(name="range", metadata=b"m")],
    )  # fmt: skip
    response: JoinGroupResponse = await wire.call(request, 5, JoinGroupResponse)
    assert response.error_code == 0
    return response


@pytest.mark.parametrize("version", describe_groups.REQUEST.VERSIONS)
async def test_groups_are_described_in_every_version(coordinated: Wire, version: int):
    await commit(coordinated, "a")
    member = await join(coordinated, "b")
    request = DescribeGroupsRequest(groups=["a", "b", "c"], include_authorized_operations=version >= 3)
    response = await coordinated.call(request, version, DescribeGroupsResponse)
    alone, group, unknown = response.groups
    assert [each.group_id for each in response.groups] == ["a", "b", "c"]
    assert (alone.group_state, alone.members) == ("Empty", [])
    assert (group.group_state, group.protocol_type, group.protocol_data) == ("CompletingRebalance", "consumer", "")
    (described,) = group.members
    assert (described.member_id, described.client_id, described.client_host) == (member.member_id, "test", "/127.0.0.1")
    assert described.group_instance_id == ("i" if version >= 4 else None)
    assert unknown.group_state == "Dead"
    assert unknown.error_code == (E.GROUP_ID_NOT_FOUND if version >= 6 else E.NONE)
    assert unknown.error_message == ("Group c not found." if version >= 6 else None)
    told = [each.authorized_operations for each in response.groups]
    if version >= 3:
        assert told == [ALL_OPERATIONS, ALL_OPERATIONS, NOT_ASKED if version >= 6 else ALL_OPERATIONS]
    else:
        assert set(told) == {NOT_ASKED}


@pytest.mark.parametrize("version", list_groups.REQUEST.VERSIONS)
async def test_groups_are_listed_in_every_version(coordinated: Wire, version: int):
    await commit(coordinated, "a", "c")
    await join(coordinated, "b")
    filters = {"states_filter": ["Empty"]} if version >= 4 else {}
    if version >= 5:
        filters["types_filter"] = ["Classic"]
    response = await coordinated.call(ListGroupsRequest(**filters), version, ListGroupsResponse)
    listed = {each.group_id: each for each in response.groups}
    assert response.error_code == 0
    assert sorted(listed) == (["a", "c"] if version >= 4 else ["a", "b", "c"])
    assert listed["a"].group_state == ("Empty" if version >= 4 else "")
    assert listed["a"].group_type == ("classic" if version >= 5 else "")


@pytest.mark.parametrize("version", delete_groups.REQUEST.VERSIONS)
async def test_groups_are_deleted_in_every_version(coordinated: Wire, version: int):
    await commit(coordinated, "a")
    await join(coordinated, "b")
    request = DeleteGroupsRequest(groups_names=["b", "a", "nobody", "a"])
    for first in (E.NONE, E.GROUP_ID_NOT_FOUND):
        response = await coordinated.call(request, version, DeleteGroupsResponse)
        assert [(each.group_id, each.error_code) for each in response.results] == [
            ("b", E.NON_EMPTY_GROUP), ("a", first), ("nobody", E.GROUP_ID_NOT_FOUND),
        ]  # fmt: skip


async def test_offsets_are_forgotten(coordinated: Wire):
    await commit(coordinated, "a")

    async def forget(group: str, **topics: list[int]) -> OffsetDeleteResponse:
        request = OffsetDeleteRequest(
            group_id=group,
            topics=[
                OffsetDeleteRequestTopic(
                    name=name, partitions=[OffsetDeleteRequestPartition(partition_index=index) for index in indexes]
                )
                for name, indexes in topics.items()
            ],
        )
        response: OffsetDeleteResponse = await coordinated.call(request, 0, OffsetDeleteResponse)
        return response

    response = await forget("a", t=[1, 5, 1], nowhere=[0])
    assert response.error_code == 0
    missing = E.UNKNOWN_TOPIC_OR_PARTITION
    assert [
        (topic.name, [(each.partition_index, each.error_code) for each in topic.partitions])
        for topic in response.topics
    ] == [("t", [(1, 0), (5, missing), (1, 0)]), ("nowhere", [(0, missing)])]
    assert (await forget("", t=[0])).error_code == E.INVALID_GROUP_ID
    refused = await forget("nobody", t=[0], nowhere=[0])
    assert (refused.error_code, refused.topics) == (E.GROUP_ID_NOT_FOUND, [])


async def test_what_was_deleted_stays_so_over_a_restart(coordinated: Wire, running: RunningNode, start_node):
    await commit(coordinated, "a", "b")
    await coordinated.call(DeleteGroupsRequest(groups_names=["a"]), 2, DeleteGroupsResponse)
    await running.stop()
    again = await (await start_node()).connect()
    for _ in range(3000):
        response = await again.call(ListGroupsRequest(), 5, ListGroupsResponse)
        if not response.error_code and response.groups:
            break
        assert response.error_code in (E.NONE, E.COORDINATOR_LOAD_IN_PROGRESS)
        await asyncio.sleep(0.02)
    assert [each.group_id for each in response.groups] == ["b"]


@pytest.mark.parametrize(
    ("module", "request_", "codes"),
    [
        (describe_groups, DescribeGroupsRequest(groups=["a", "b"]), lambda told: [g.error_code for g in told.groups]),
        (list_groups, ListGroupsRequest(), lambda told: [told.error_code] * 2),
        (delete_groups, DeleteGroupsRequest(groups_names=["a", "b"]), lambda t: [a.error_code for a in t.results]),
        (offset_delete, OffsetDeleteRequest(group_id="a"), lambda told: [told.error_code] * 2),
    ],
)  # fmt: skip
def test_a_refusal_can_be_told_in_every_version(module, request_, codes):
    for version in module.REQUEST.VERSIONS:
        refused = module.refuse(request_, KafkaError(E.UNKNOWN_SERVER_ERROR), version)
        told = type(refused).decode(refused.encode(version), version)
        assert codes(told) == [E.UNKNOWN_SERVER_ERROR] * 2
