"""Who gives the controller no time gets nothing decided, as in Kafka; and who asks for too much is told so at once."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.unit.broker.metadata_services import context, encoded, running_services
from tidelog.broker.apis.cluster import alter_partition_reassignments, elect_leaders
from tidelog.broker.apis.services import Services
from tidelog.broker.apis.topics import create_partitions, create_topics, delete_topics
from tidelog.protocol.errors import ErrorCode, KafkaError
from tidelog.protocol.messages.alter_partition_reassignments import AlterPartitionReassignmentsRequest
from tidelog.protocol.messages.create_partitions import CreatePartitionsRequest, CreatePartitionsTopic
from tidelog.protocol.messages.create_topics import CreatableTopic, CreateTopicsRequest
from tidelog.protocol.messages.delete_topics import DeleteTopicsRequest, DeleteTopicState
from tidelog.protocol.messages.elect_leaders import ElectLeadersRequest
from tidelog.replication.controller.decisions.state import NewTopic

WITHOUT_TIME: list[tuple[Any, Any]] = [
    (create_topics, CreateTopicsRequest(topics=[CreatableTopic(name=name) for name in ("a", "a", "b")])),
    (create_partitions, CreatePartitionsRequest(topics=[CreatePartitionsTopic(name="t", count=2)])),
    (delete_topics, DeleteTopicsRequest(topics=[DeleteTopicState(name="t")])),
    (elect_leaders, ElectLeadersRequest(topic_partitions=None)),
    (alter_partition_reassignments, AlterPartitionReassignmentsRequest()),
]


@pytest.fixture
async def services(tmp_path: Path) -> AsyncIterator[Services]:
    async with running_services(tmp_path) as found:
        assert found.controller is not None
        await found.controller.create_topics([NewTopic("t", 1, 1)])
        yield found


@pytest.mark.parametrize("timeout_ms", [0, -1])
@pytest.mark.parametrize(("api", "request_"), WITHOUT_TIME, ids=lambda one: getattr(one, "__name__", "")[-20:])
async def test_nothing_is_decided_in_no_time(services: Services, api: Any, request_: Any, timeout_ms: int) -> None:
    request_.timeout_ms = timeout_ms
    version = request_.VERSIONS[-1]
    with pytest.raises(KafkaError) as refused:
        await api.handle(services, context(version), request_)
    assert refused.value.code is ErrorCode.REQUEST_TIMED_OUT
    encoded(api.refuse(request_, refused.value, version), version)
    assert set(services.image().topics_by_name) == {"t"}
    assert len(services.image().topics_by_name["t"].partitions) == 1


@pytest.mark.parametrize("timeout_ms", [0, -1])
async def test_what_is_refused_without_the_controller_needs_no_time(services: Services, timeout_ms: int) -> None:
    created = await create_topics.handle(
        services, context(7), CreateTopicsRequest(topics=[CreatableTopic(name="a")] * 2, timeout_ms=timeout_ms)
    )
    grown = await create_partitions.handle(
        services,
        context(3),
        CreatePartitionsRequest(topics=[CreatePartitionsTopic(name="t", count=2)] * 2, timeout_ms=timeout_ms),
    )
    deleted = await delete_topics.handle(
        services, context(6), DeleteTopicsRequest(topics=[DeleteTopicState(name="t")] * 2, timeout_ms=timeout_ms)
    )
    for results in (created.topics, grown.results, deleted.responses):
        assert [each.error_code for each in results] == [ErrorCode.INVALID_REQUEST]
    elected = await elect_leaders.handle(
        services, context(2), ElectLeadersRequest(topic_partitions=[], timeout_ms=timeout_ms)
    )
    assert elected.error_code == ErrorCode.NONE


async def test_more_topics_than_one_request_may_create_are_not_looked_at(services: Services) -> None:
    request = CreateTopicsRequest(topics=[CreatableTopic(name="a b")] * 10_001, timeout_ms=1000)
    with pytest.raises(KafkaError) as refused:
        await create_topics.handle(services, context(7), request)
    assert refused.value.code is ErrorCode.POLICY_VIOLATION
