"""What a topic is like that a broker has created because somebody asked for it."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from tidelog.broker.cluster.topic_creation import TopicCreator
from tidelog.broker.config.node_config import NodeConfig
from tidelog.protocol.errors import ErrorCode, KafkaError
from tidelog.protocol.internal_topics import OFFSETS_TOPIC
from tidelog.replication.controller.decisions.state import NewTopic


class Controller:
    """Takes everything, and notes it."""

    def __init__(self) -> None:
        self.asked: list[NewTopic] = []

    async def create_topics(self, topics: list[NewTopic]) -> dict[str, None]:
        self.asked += topics
        return dict.fromkeys(topic.name for topic in topics)


@pytest.mark.parametrize(
    ("name", "partitions", "replicas"), [("t", 4, 2), (OFFSETS_TOPIC, 7, 3)], ids=["a user's", "the groups'"]
)
async def test_its_numbers_are_the_brokers_own(name: str, partitions: int, replicas: int) -> None:
    """The controller may be a node of its own, whose file says nothing of them."""
    config = NodeConfig.load(
        None,
        {
            "num.partitions": "4",
            "default.replication.factor": "2",
            "offsets.topic.num.partitions": "7",
            "offsets.topic.replication.factor": "3",
        },
    )
    controller = Controller()
    await TopicCreator(config, cast(Any, controller)).ensure(name)
    (asked,) = controller.asked
    assert (asked.name, asked.partition_count, asked.replication_factor) == (name, partitions, replicas)


@pytest.mark.parametrize(
    ("own", "partitions", "replicas"),
    [({}, -1, -1), ({"num.partitions": "4"}, 4, -1), ({"default.replication.factor": "2"}, -1, 2)],
    ids=["nothing", "partitions", "replicas"],
)
async def test_the_controllers_numbers_count_where_the_broker_sets_none(
    own: dict[str, str], partitions: int, replicas: int
) -> None:
    controller = Controller()
    await TopicCreator(NodeConfig.load(None, own), cast(Any, controller)).ensure("t")
    (asked,) = controller.asked
    assert (asked.partition_count, asked.replication_factor) == (partitions, replicas)


async def test_another_broker_may_create_it_at_the_same_moment(caplog: pytest.LogCaptureFixture) -> None:
    """It is there, as wanted; only what keeps a topic from being there is worth a warning."""

    class Refusing(Controller):
        async def create_topics(self, topics: list[NewTopic]) -> dict[str, Any]:
            codes = {"twice": ErrorCode.TOPIC_ALREADY_EXISTS, "bad": ErrorCode.INVALID_REPLICATION_FACTOR}
            return {topic.name: KafkaError(codes[topic.name]) for topic in topics}

    creation = TopicCreator(NodeConfig.load(None, {}), cast(Any, Refusing()))
    await creation.ensure("twice")
    assert caplog.records == []
    with pytest.raises(KafkaError):
        await creation.ensure("bad")
    (record,) = caplog.records
    assert "bad" in record.getMessage()


async def test_a_node_stops_without_an_answer_of_a_controller() -> None:
    """Most of a cluster may be gone, and a controller with it, while a client asks for a topic."""

    class Silent(Controller):
        async def create_topics(self, topics: list[NewTopic]) -> dict[str, None]:
            await asyncio.sleep(30)
            return await super().create_topics(topics)

    controller = Silent()
    creation = TopicCreator(NodeConfig.load(None, {}), cast(Any, controller))
    waiting = asyncio.ensure_future(creation.ensure(OFFSETS_TOPIC))
    await asyncio.sleep(0)
    async with asyncio.timeout(10):
        await creation.close()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert controller.asked == []


async def test_a_node_that_stops_waits_for_the_answer_that_is_on_its_way() -> None:
    creation = TopicCreator(NodeConfig.load(None, {}), cast(Any, controller := Controller()))
    creation.start(["t"])
    await creation.close()
    assert [topic.name for topic in controller.asked] == ["t"]
