"""An administrator finds what it has just changed, though brokers learn of it one after the other."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.client.fake_broker import FakeCluster, FakeNode
from tests.unit.client.test_admin import FAST
from tidelog.client import Admin, NewTopic, TopicPartition
from tidelog.client.admin import base
from tidelog.protocol.errors import ErrorCode, KafkaError
from tidelog.protocol.messages.create_topics import CreateTopicsRequest
from tidelog.protocol.messages.metadata import MetadataRequest, MetadataResponse, MetadataResponseTopic


def lag(request: Any, node: FakeNode) -> Any:
    """The answer of a broker that does not know the topics yet."""
    response = node.on_metadata(request)
    assert isinstance(response, MetadataResponse)
    response.topics = [
        MetadataResponseTopic(name=topic.name, error_code=ErrorCode.UNKNOWN_TOPIC_OR_PARTITION)
        for topic in response.topics
    ]
    return response


def admin(cluster: FakeCluster) -> Admin:
    return Admin(bootstrap_servers=cluster.bootstrap, **FAST)


async def test_a_topic_just_created_is_asked_for_again_where_a_broker_lags() -> None:
    async with FakeCluster(nodes=3) as cluster, admin(cluster) as administrator:
        await administrator.create_topics([NewTopic("orders")])
        cluster.script(MetadataRequest, lag, lag, lag)
        described = await administrator.describe_topics(["orders"])
        assert [partition.leader for partition in described["orders"].partitions] == [1]


async def test_any_other_topic_is_unknown_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async with FakeCluster(orders=1) as cluster, admin(cluster) as administrator:
        await administrator.create_topics([NewTopic("new"), NewTopic("other")])
        for names in (["orders"], ["nowhere", "new"]):
            before = len(cluster.sent(MetadataRequest))
            cluster.script(MetadataRequest, *([lag] if names == ["orders"] else []))
            with pytest.raises(KafkaError) as caught:
                await administrator.describe_topics(names)
            assert caught.value.code is ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
            assert len(cluster.sent(MetadataRequest)) == before + 1
        monkeypatch.setattr(base, "CREATION_SPREADS_MS", 0)
        await administrator.create_topics([NewTopic("late")])
        cluster.script(MetadataRequest, lag)
        with pytest.raises(KafkaError):
            await administrator.describe_topics(["late"])


async def test_what_any_broker_answers_is_asked_of_the_same_one_while_it_is_connected() -> None:
    async with FakeCluster(nodes=2, t=2) as cluster, admin(cluster) as administrator:
        await administrator.create_topics([NewTopic("a")])
        (changed_at,) = [node for node, _, each in cluster.requests if isinstance(each, CreateTopicsRequest)]
        other = next(number for number, each in enumerate(cluster.topics["t"]) if each.leader != changed_at)
        await administrator.list_offsets({TopicPartition("t", other): "latest"})
        before = len(cluster.requests)
        for _ in range(5):
            await administrator.describe_topics(["a"])
        assert {node for node, _, _ in cluster.requests[before:]} == {changed_at}
        cluster.nodes[changed_at].drop_connections()
        assert await administrator.list_topics() == ["a", "t"]


async def test_partitions_that_were_added_since_the_last_look_are_found() -> None:
    async with FakeCluster(orders=1) as cluster, admin(cluster) as administrator:
        await administrator.list_offsets({TopicPartition("orders", 0): "latest"})
        cluster.create("orders", 3)  # as by another client
        assert await administrator.describe_producers([TopicPartition("orders", 2)])
        cluster.create("orders", 4)
        assert await administrator.list_offsets({TopicPartition("orders", 3): "latest"})
        with pytest.raises(KafkaError, match="not one numbered 9"):
            await administrator.describe_producers([TopicPartition("orders", 9)])
        with pytest.raises(KafkaError, match="not one numbered 9"):
            await administrator.list_offsets({TopicPartition("orders", 9): "latest"})
