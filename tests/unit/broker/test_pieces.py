"""Requests that name very much: one answer, and others are served meanwhile."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.unit.broker.conftest import RunningNode, Wire, served_meanwhile
from tidelog.broker.coordinators.group import service
from tidelog.broker.scheduling import pieces
from tidelog.broker.scheduling.pieces import PIECE_ELEMENTS_MAX, Arrays, join, split
from tidelog.protocol.errors import ErrorCode
from tidelog.protocol.messages.delete_groups import DeletableGroupResult, DeleteGroupsRequest, DeleteGroupsResponse
from tidelog.protocol.messages.describe_groups import DescribeGroupsRequest, DescribeGroupsResponse
from tidelog.protocol.messages.describe_transactions import DescribeTransactionsRequest, DescribeTransactionsResponse
from tidelog.protocol.messages.find_coordinator import FindCoordinatorRequest, FindCoordinatorResponse
from tidelog.protocol.messages.metadata import MetadataRequest, MetadataResponse
from tidelog.protocol.messages.offset_fetch import OffsetFetchRequest, OffsetFetchRequestGroup, OffsetFetchResponse

GROUPS = Arrays("groups_names", "results")


def names(count: int) -> list[str]:
    return [f"group-{number}" for number in range(count)]


@pytest.mark.parametrize("count", [0, 1, PIECE_ELEMENTS_MAX, PIECE_ELEMENTS_MAX + 1, 3 * PIECE_ELEMENTS_MAX])
def test_every_element_is_in_one_piece_and_in_one_answer(count: int) -> None:
    request = DeleteGroupsRequest(groups_names=names(count))
    parts = list(split(request, GROUPS))
    assert [name for part in parts for name in part.groups_names] == names(count)
    assert all(len(part.groups_names) <= PIECE_ELEMENTS_MAX for part in parts)
    assert request.groups_names == names(count)
    answers = [
        DeleteGroupsResponse(results=[DeletableGroupResult(group_id=name) for name in part.groups_names])
        for part in parts
    ]
    assert [each.group_id for each in join(answers, GROUPS).results] == names(count)


def requests(count: int) -> list[tuple[Any, int, Any]]:
    return [
        (DeleteGroupsRequest(groups_names=[*names(count), *names(3)]), 2, DeleteGroupsResponse),
        (DescribeGroupsRequest(groups=[*names(count), *names(3)]), 6, DescribeGroupsResponse),
        (FindCoordinatorRequest(coordinator_keys=[*names(count), *names(3)]), 6, FindCoordinatorResponse),
        (
            OffsetFetchRequest(groups=[OffsetFetchRequestGroup(group_id=name, topics=None) for name in names(count)]),
            9,
            OffsetFetchResponse,
        ),
    ]


async def test_the_answer_is_the_same_as_in_one_go(wire: Wire, monkeypatch: pytest.MonkeyPatch) -> None:
    await wire.call(FindCoordinatorRequest(coordinator_keys=["any"]), 6, FindCoordinatorResponse)
    whole = [await wire.call(request, version, response) for request, version, response in requests(20)]
    monkeypatch.setattr(pieces, "PIECE_ELEMENTS_MAX", 3)
    monkeypatch.setattr(pieces, "WHOLE_BYTES_MAX", 0)
    assert [await wire.call(request, version, response) for request, version, response in requests(20)] == whole


@pytest.mark.slow
async def test_others_are_served_between_the_pieces(running: RunningNode, wire: Wire) -> None:
    """Forty thousand groups took a second and a half of the loop, in which nobody else was served."""
    await wire.call(FindCoordinatorRequest(coordinator_keys=["any"]), 6, FindCoordinatorResponse)
    for request, version, response in requests(10_000):
        served = await served_meanwhile(running, wire, request, version, response)
        assert served >= 8, type(request).__name__


async def test_groups_are_deleted_few_at_once_because_each_is_written(running: RunningNode, wire: Wire) -> None:
    """Thousands of groups with ids of few letters make a small request."""
    await wire.call(FindCoordinatorRequest(coordinator_keys=["any"]), 6, FindCoordinatorResponse)
    other = await running.connect()
    wire.send(DeleteGroupsRequest(groups_names=[str(number) for number in range(2000)]), 2)
    answered = asyncio.create_task(wire.receive(DeleteGroupsResponse, 2))
    served = 0
    while not answered.done():
        await other.call(MetadataRequest(topics=[]), 9, MetadataResponse)
        served += 1
    assert served >= 40
    assert [each.group_id for each in (await answered).results] == [str(number) for number in range(2000)]


async def test_what_is_named_too_often_is_refused_however_far_apart(wire: Wire) -> None:
    await wire.call(FindCoordinatorRequest(coordinator_keys=["any"]), 6, FindCoordinatorResponse)
    often = [name for number in range(11) for name in (*names(600), "again")][: 11 * 601]
    answer = await wire.call(DescribeGroupsRequest(groups=often), 6, DescribeGroupsResponse)
    assert {each.error_code for each in answer.groups} == {ErrorCode.INVALID_REQUEST}


@pytest.mark.parametrize("kind", range(4))
async def test_few_long_ids_are_hashed_at_once(wire: Wire, monkeypatch: pytest.MonkeyPatch, kind: int) -> None:
    """The hash of 30,000 characters takes half a millisecond, and 500 of them were one piece."""
    await wire.call(FindCoordinatorRequest(coordinator_keys=["any"]), 6, FindCoordinatorResponse)
    await wire.call(FindCoordinatorRequest(key_type=1, coordinator_keys=["any"]), 6, FindCoordinatorResponse)
    ids = [f"{number}{'x' * 30_000}" for number in range(100)]
    request, version, response = [
        (DescribeGroupsRequest(groups=ids), 6, DescribeGroupsResponse),
        (FindCoordinatorRequest(coordinator_keys=ids), 6, FindCoordinatorResponse),
        (
            OffsetFetchRequest(groups=[OffsetFetchRequestGroup(group_id=each, topics=None) for each in ids]),
            9,
            OffsetFetchResponse,
        ),
        (DescribeTransactionsRequest(transactional_ids=ids), 0, DescribeTransactionsResponse),
    ][kind]
    hashed: list[int] = [0]
    java_hash = service.java_hash

    def counted(text: str) -> int:
        hashed[-1] += len(text)
        return java_hash(text)

    monkeypatch.setattr(service, "java_hash", counted)
    call = asyncio.ensure_future(wire.call(request, version, response))
    while not call.done():
        await asyncio.sleep(0)
        hashed.append(0)
    call.result()
    assert sum(hashed) >= 3_000_000
    assert max(hashed) <= 25 * 30_002
