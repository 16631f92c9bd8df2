"""The cluster as a client holds it: how many connections there are, and what `close` leaves."""

from __future__ import annotations

import asyncio

import pytest

from tests.patience import until
from tests.unit.client.fake_broker import SILENCE, FakeCluster
from tidelog.client.cluster import Cluster
from tidelog.client.config import ClientConfig
from tidelog.protocol.errors import ErrorCode, KafkaError
from tidelog.protocol.messages.api_versions import ApiVersionsRequest


def connections(fake: FakeCluster) -> int:
    return sum(len(node._writers) for node in fake.nodes.values())


async def test_all_who_need_any_connection_at_once_share_one():
    async with FakeCluster(nodes=2) as fake:
        cluster = Cluster(ClientConfig(bootstrap_servers=fake.bootstrap))
        given = await asyncio.gather(*(cluster.any_connection() for _ in range(10)))
        assert len(set(given)) == 1
        assert len(fake.sent(ApiVersionsRequest)) == 1
        await cluster.close()
        await until(lambda: connections(fake) == 0)


async def test_one_who_gives_up_does_not_take_the_connection_from_the_others():
    async with FakeCluster() as fake:
        cluster = Cluster(ClientConfig(bootstrap_servers=fake.bootstrap))
        first, second = (asyncio.ensure_future(cluster.any_connection()) for _ in range(2))
        await asyncio.sleep(0)
        first.cancel()
        assert not (await second).closed
        await cluster.close()


async def test_closing_ends_a_connection_on_its_way_with_an_error():
    async with FakeCluster() as fake:
        fake.script(ApiVersionsRequest, lambda request, node: SILENCE)
        cluster = Cluster(ClientConfig(bootstrap_servers=fake.bootstrap))
        waiting = asyncio.ensure_future(cluster.any_connection())
        await until(lambda: fake.sent(ApiVersionsRequest))
        await cluster.close()
        with pytest.raises(KafkaError) as caught:
            await waiting
        assert caught.value.code is ErrorCode.NETWORK_EXCEPTION
        await until(lambda: connections(fake) == 0)
