"""One request cannot have the same told again and again: a kilobyte would be answered with gigabytes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tidelog.broker.apis.repeats import REPEATS_MAX
from tidelog.protocol.errors import ErrorCode
from tidelog.protocol.messages.describe_configs import (
    DescribeConfigsRequest,
    DescribeConfigsResource,
    DescribeConfigsResponse,
)
from tidelog.protocol.messages.describe_groups import DescribeGroupsRequest, DescribeGroupsResponse
from tidelog.protocol.messages.describe_producers import (
    DescribeProducersRequest,
    DescribeProducersRequestTopicRequest,
    DescribeProducersResponse,
)
from tidelog.protocol.messages.offset_fetch import OffsetFetchRequest, OffsetFetchRequestGroup, OffsetFetchResponse

BROKER = 4
REFUSED = ErrorCode.INVALID_REQUEST


def configs(times: int) -> DescribeConfigsRequest:
    """Under several names that mean the same."""
    names = [f"{'0' * (number % 5)}1" for number in range(times)]
    return DescribeConfigsRequest(
        resources=[DescribeConfigsResource(resource_type=BROKER, resource_name=name) for name in names]
    )


def producers(times: int) -> DescribeProducersRequest:
    """In several entries."""
    topics = [DescribeProducersRequestTopicRequest(name="t", partition_indexes=[1, 0]) for _ in range(times)]
    return DescribeProducersRequest(topics=topics)


Asked = tuple[Callable[[int], Any], int, Any, Callable[[Any], list[int]]]
EVERY: dict[str, Asked] = {
    "groups": (
        lambda times: DescribeGroupsRequest(groups=["g"] * times), 5, DescribeGroupsResponse,
        lambda answer: [each.error_code for each in answer.groups],
    ),
    "offsets": (
        lambda times: OffsetFetchRequest(groups=[OffsetFetchRequestGroup(group_id="g", topics=None)] * times), 8,
        OffsetFetchResponse, lambda answer: [each.error_code for each in answer.groups],
    ),
    "configs": (configs, 4, DescribeConfigsResponse, lambda answer: [each.error_code for each in answer.results]),
    "producers": (
        producers, 0, DescribeProducersResponse,
        lambda answer: [each.error_code for topic in answer.topics for each in topic.partitions],
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", EVERY)
async def test_as_often_as_nobody_does_and_no_more(wire: Any, what: str) -> None:
    await wire.create_topic("t", 2)
    request, version, response, errors = EVERY[what]
    answered = errors(await wire.call(request(REPEATS_MAX), version, response))
    assert len(answered) >= REPEATS_MAX
    assert REFUSED not in answered
    refused = errors(await wire.call(request(REPEATS_MAX + 1), version, response))
    assert len(refused) > REPEATS_MAX
    assert set(refused) == {REFUSED}


async def test_different_things_are_counted_apart(wire: Any) -> None:
    request = DescribeGroupsRequest(groups=[f"g{number}" for number in range(5 * REPEATS_MAX)] * 2)
    answer = await wire.call(request, 5, DescribeGroupsResponse)
    assert REFUSED not in {each.error_code for each in answer.groups}
