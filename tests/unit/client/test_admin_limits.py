"""`default_api_timeout_ms` limits a call of the admin client as a whole."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.unit.client.fake_broker import HANDLERS, FakeCluster, FakeNode
from tests.unit.client.test_admin import FAST, T0
from tidelog.client import Admin
from tidelog.protocol.errors import ErrorCode, KafkaError
from tidelog.protocol.messages.find_coordinator import FindCoordinatorRequest
from tidelog.protocol.messages.init_producer_id import InitProducerIdRequest
from tidelog.protocol.messages.list_offsets import ListOffsetsRequest
from tidelog.protocol.messages.offset_fetch import OffsetFetchRequest

LIMIT_MS = 600
STEP_S = 0.4


def admin(cluster: FakeCluster) -> Admin:
    return Admin(bootstrap_servers=cluster.bootstrap, default_api_timeout_ms=LIMIT_MS, request_timeout_ms=500, **FAST)


async def late(request: Any, node: FakeNode) -> Any:
    await asyncio.sleep(STEP_S)
    return HANDLERS[request.API_KEY][2](node, request)


async def test_the_steps_of_a_call_share_its_limit():
    async with FakeCluster(t=1) as cluster, admin(cluster) as administrator:
        cluster.script(OffsetFetchRequest, late)
        assert await administrator.group_lag("g", [T0])  # one late step is in time
        cluster.script(OffsetFetchRequest, late)
        cluster.script(ListOffsetsRequest, late)
        with pytest.raises(KafkaError, match=f"default_api_timeout_ms={LIMIT_MS}") as caught:
            await administrator.group_lag("g", [T0])
        assert caught.value.code is ErrorCode.REQUEST_TIMED_OUT


async def test_producers_are_fenced_at_the_same_time_within_one_limit():
    lookups: list[int] = []

    async with FakeCluster() as cluster, admin(cluster) as administrator:

        async def note(request: Any, node: FakeNode) -> Any:
            lookups.append(len(cluster.sent(FindCoordinatorRequest)))
            return node.on_init_producer_id(request)

        cluster.script(InitProducerIdRequest, note)
        results = await administrator.fence_producers(["a", "b"])
        assert [type(result) for result in results.values()] == [tuple, tuple]
        assert list(results) == ["a", "b"]
        assert lookups == [2], "the second one waited for the first"
