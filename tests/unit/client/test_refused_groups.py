"""A group that the broker refuses: a program that polls on after the error sends few requests, and joins at last."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.patience import PATIENCE_S
from tests.unit.client.fake_broker import FakeCluster
from tests.unit.client.test_consumer import fill
from tidelog.client import Consumer, TopicPartition
from tidelog.client.assignment.assignors import Assignor
from tidelog.protocol.errors import ErrorCode, KafkaError
from tidelog.protocol.messages.consumer_group_heartbeat import (
    ConsumerGroupHeartbeatRequest,
    ConsumerGroupHeartbeatResponse,
)
from tidelog.protocol.messages.find_coordinator import Coordinator, FindCoordinatorRequest, FindCoordinatorResponse
from tidelog.protocol.messages.join_group import JoinGroupRequest, JoinGroupResponse

REFUSED = ErrorCode.GROUP_AUTHORIZATION_FAILED
REFUSALS_MANY = 10_000
NO_COORDINATOR = FindCoordinatorResponse(coordinators=[Coordinator(key="g", error_code=REFUSED)])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("protocol", "request_type", "refusal"),
    [
        ("classic", JoinGroupRequest, JoinGroupResponse(error_code=REFUSED)),
        ("consumer", ConsumerGroupHeartbeatRequest, ConsumerGroupHeartbeatResponse(error_code=REFUSED)),
        ("classic", FindCoordinatorRequest, NO_COORDINATOR),
        ("consumer", FindCoordinatorRequest, NO_COORDINATOR),
    ],
)
async def test_polls_of_a_refused_group_back_off(protocol: str, request_type: Any, refusal: Any) -> None:
    options: dict[str, Any] = {"group_id": "g", "group_protocol": protocol, "auto_offset_reset": "earliest"}
    options |= {"retry_backoff_ms": 50, "retry_backoff_max_ms": 100}
    async with FakeCluster(t=1) as cluster, Consumer("t", bootstrap_servers=cluster.bootstrap, **options) as consumer:
        fill(cluster, "t", 0, 3)
        cluster.script(request_type, *([lambda request, node: refusal] * REFUSALS_MANY))
        errors: list[ErrorCode] = []

        async def poll() -> int:
            try:
                return sum(map(len, (await consumer.poll(20)).values()))
            except KafkaError as error:
                errors.append(error.code)
                return 0

        loop = asyncio.get_running_loop()
        end_s = loop.time() + 1
        while loop.time() < end_s:
            await poll()
        assert len(errors) > 1, "each refusal is raised"
        assert len(cluster.sent(request_type)) <= 25
        cluster.scripts[request_type].clear()
        async with asyncio.timeout(PATIENCE_S):
            while not await poll():
                pass
        assert set(errors) == {REFUSED}


async def test_polls_after_errors_of_an_assignor_back_off() -> None:
    class Failing(Assignor):
        name = "failing"
        cooperative = False
        has_to_fail = True

        def user_data(self, owned: Any, generation: int) -> bytes:
            return b""

        def assign(self, partition_counts: Any, members: Any) -> Any:
            if self.has_to_fail:
                raise LookupError("no such rack")
            return {member: [TopicPartition("t", 0)] for member in members}

    assignor = Failing()
    options: dict[str, Any] = {"group_id": "g", "auto_offset_reset": "earliest"}
    options |= {"retry_backoff_ms": 50, "retry_backoff_max_ms": 100, "partition_assignment_strategy": [assignor]}
    async with FakeCluster(t=1) as cluster, Consumer("t", bootstrap_servers=cluster.bootstrap, **options) as consumer:
        fill(cluster, "t", 0, 3)
        errors = 0
        loop = asyncio.get_running_loop()
        end_s = loop.time() + 1
        while loop.time() < end_s:
            try:
                await consumer.poll(20)
            except LookupError:
                errors += 1
        assert errors > 1, "each is raised"
        assert len(cluster.sent(JoinGroupRequest)) <= 40
        assignor.has_to_fail = False
        async with asyncio.timeout(PATIENCE_S):
            while not await consumer.poll(20):
                pass


async def test_a_consumer_that_leaves_a_group_that_refused_it_may_join_another_time_at_once() -> None:
    refusal = JoinGroupResponse(error_code=REFUSED)
    options: dict[str, Any] = {"group_id": "g", "auto_offset_reset": "earliest"}
    options |= {"retry_backoff_ms": 3_600_000, "retry_backoff_max_ms": 3_600_000}
    async with FakeCluster(t=1) as cluster, Consumer("t", bootstrap_servers=cluster.bootstrap, **options) as consumer:
        fill(cluster, "t", 0, 3)
        cluster.script(JoinGroupRequest, lambda request, node: refusal)

        async def read() -> None:
            while not await consumer.poll(20):
                pass

        async with asyncio.timeout(PATIENCE_S):
            with pytest.raises(KafkaError):
                await read()
            await consumer.unsubscribe()
            consumer.subscribe("t")
            await read()
