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
from tidelog.protocol.messages.elect_leaders import ElectLeadersRequest, ElectLeadersResponse, TopicPartitions
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


@pytest.mark.parametrize("indexes", [[0] * 300, list(range(300))], ids=["repeated", "different"])
async def test_a_long_name_is_not_quoted_in_full_for_each_partition(wire: Any, indexes: list[int]) -> None:
    """A request of 70 KB had an answer of 300 MB, for which all others waited for 2.7 s."""
    topic = DescribeProducersRequestTopicRequest(name="x" * 30_000, partition_indexes=indexes)
    answer = await wire.call(DescribeProducersRequest(topics=[topic]), 0, DescribeProducersResponse)
    (answered,) = answer.topics
    assert [each.partition_index for each in answered.partitions] == indexes
    assert all(each.error_code != ErrorCode.NONE for each in answered.partitions)
    assert len(answer.encode(0)) < 30_000 + 300 * 600


async def test_a_long_name_is_not_quoted_in_full_for_each_election(wire: Any) -> None:
    partitions = TopicPartitions(topic="x" * 30_000, partitions=list(range(300)))
    answer = await wire.call(ElectLeadersRequest(topic_partitions=[partitions]), 2, ElectLeadersResponse)
    (answered,) = answer.replica_election_results
    unknown = ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    assert [each.error_code for each in answered.partition_result] == [unknown] * 300
    assert len(answer.encode(2)) < 30_000 + 300 * 600


async def test_a_long_name_that_is_repeated_is_not_quoted_for_the_others(wire: Any) -> None:
    names = ["x" * 30_000] * (REPEATS_MAX + 1) + [f"t{number}" for number in range(300)]
    resources = [DescribeConfigsResource(resource_type=2, resource_name=name) for name in names]
    answer = await wire.call(DescribeConfigsRequest(resources=resources), 4, DescribeConfigsResponse)
    assert {each.error_code for each in answer.results} == {REFUSED}
    assert len(answer.encode(4)) < (REPEATS_MAX + 1) * 30_000 + 311 * 100
