from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any, cast

import pytest

from tests.patience import PATIENCE_S
from tests.unit.broker.metadata_services import context, encoded, running_services
from tidelog.broker.apis import authorized_operations
from tidelog.broker.apis.cluster import metadata
from tidelog.broker.network.request import Deferred, completed
from tidelog.broker.scheduling.fair_scheduler import LARGE_ANSWERS_MAX
from tidelog.protocol.errors import ErrorCode, KafkaError
from tidelog.protocol.messages.metadata import MetadataRequest, MetadataRequestTopic
from tidelog.protocol.messages.metadata_records import PartitionChangeRecord
from tidelog.protocol.uuids import LOST_DIRECTORY, UNASSIGNED_DIRECTORY, ZERO_UUID
from tidelog.replication.controller.decisions.state import NewTopic
from tidelog.replication.controller.metadata.image import MetadataImage
from tidelog.replication.controller.metadata.records import ImageBuilder

VERSIONS = MetadataRequest.VERSIONS


async def create(services, *names, partitions=2):
    await services.controller.create_topics([NewTopic(name, partitions, 1) for name in names])


def ask(services, version, *names, listener="PLAINTEXT", **fields):
    request = MetadataRequest(topics=[MetadataRequestTopic(name=name) for name in names], **fields)
    return encoded(metadata.handle(services, context(version, listener=listener), request), version)


@pytest.mark.parametrize("version", VERSIONS)
async def test_brokers_topics_and_leaders_in_every_version(services, version):
    await create(services, "a")
    response = ask(services, version, "a")
    assert [(broker.node_id, broker.host, broker.port) for broker in response.brokers] == [(1, "host", 9001)]
    (topic,) = response.topics
    assert (topic.name, topic.error_code, topic.is_internal) == ("a", ErrorCode.NONE, False)
    assert [(p.partition_index, p.leader_id, p.replica_nodes, p.isr_nodes) for p in topic.partitions] == [
        (0, 1, [1], [1]),
        (1, 1, [1], [1]),
    ]
    if version >= 1:
        assert response.controller_id == 1
    if version >= 2:
        assert response.cluster_id == services.cluster_id
    if version >= 7:
        assert topic.partitions[0].leader_epoch == 0
    if version >= 10:
        assert topic.topic_id == services.image().topics_by_name["a"].topic_id


@pytest.mark.parametrize("version", VERSIONS)
async def test_all_topics(services, version):
    await create(services, "b", "a")
    everything = MetadataRequest(topics=None if version else [])
    response = encoded(metadata.handle(services, context(version), everything), version)
    assert [topic.name for topic in response.topics] == ["a", "b"]


@pytest.mark.parametrize("version", range(1, 14))
async def test_no_topics_are_no_topics_from_version_1_on(services, version):
    await create(services, "a")
    assert ask(services, version).topics == []


async def test_unknown_and_invalid_names_keep_their_order_and_come_once(services):
    await create(services, "a")
    response = ask(services, 13, "nope", "a", "bad name", "nope", "", allow_auto_topic_creation=False)
    assert [(topic.name, topic.error_code) for topic in response.topics] == [
        ("nope", ErrorCode.UNKNOWN_TOPIC_OR_PARTITION),
        ("a", ErrorCode.NONE),
        ("bad name", ErrorCode.INVALID_TOPIC_EXCEPTION),
        ("", ErrorCode.INVALID_TOPIC_EXCEPTION),
    ]


async def settled(services):
    """Until creations under way are over."""
    await services.topic_creation.close()


@pytest.mark.parametrize("version", [0, 3, 4, 13])
async def test_an_unknown_topic_is_created_and_there_the_next_time(tmp_path, version):
    async with running_services(tmp_path, {"num.partitions": "4"}) as services:
        response = ask(services, version, "new", "bad name")
        assert [topic.error_code for topic in response.topics] == [3, 17]
        await settled(services)
        assert set(services.image().topics_by_name) == {"new"}
        (topic,) = ask(services, version, "new").topics
        assert (topic.error_code, len(topic.partitions)) == (ErrorCode.NONE, 4)


async def test_asking_often_creates_once(services):
    before = services.image().offset
    for _ in range(10):
        ask(services, 9, "new")
    await settled(services)
    assert len(services.image().topics_by_name) == 1
    assert services.image().offset == before + 2, "one TopicRecord and one PartitionRecord"


@pytest.mark.parametrize("allowed", [True, False])
async def test_creation_needs_the_clients_and_the_brokers_leave(tmp_path, allowed):
    options = {"auto.create.topics.enable": str(not allowed).lower()}
    async with running_services(tmp_path, options) as services:
        ask(services, 9, "new", allow_auto_topic_creation=allowed)
        await settled(services)
        assert not services.image().topics_by_name


async def test_by_id(services):
    await create(services, "a")
    topic_id = services.image().topics_by_name["a"].topic_id
    request = MetadataRequest(topics=[MetadataRequestTopic(name=None, topic_id=one) for one in (topic_id, b"?" * 16)])
    response = encoded(metadata.handle(services, context(12), request), 12)
    assert [(topic.name, topic.topic_id, topic.error_code) for topic in response.topics] == [
        ("a", topic_id, ErrorCode.NONE),
        (None, b"?" * 16, ErrorCode.UNKNOWN_TOPIC_ID),
    ]


@pytest.mark.parametrize("version", [10, 11])
@pytest.mark.parametrize(("name", "topic_id"), [(None, ZERO_UUID), ("a", b"i" * 16)])
async def test_ids_are_refused_before_version_12(services, version, name, topic_id):
    request = MetadataRequest(topics=[MetadataRequestTopic(name=name, topic_id=topic_id)])
    with pytest.raises(KafkaError) as caught:
        metadata.handle(services, context(version), request)
    assert caught.value.code is ErrorCode.INVALID_REQUEST
    refused = encoded(metadata.refuse(request, caught.value, version), version)
    assert refused.topics[0].error_code == ErrorCode.INVALID_REQUEST


async def test_internal_topics_are_marked(services):
    await create(services, "__consumer_offsets")
    assert ask(services, 9, "__consumer_offsets").topics[0].is_internal


async def test_allowed_operations_only_when_asked(services):
    await create(services, "a")
    assert ask(services, 8, "a").topics[0].topic_authorized_operations == authorized_operations.NOT_ASKED
    asked = ask(services, 8, "a", include_topic_authorized_operations=True, include_cluster_authorized_operations=True)
    assert asked.topics[0].topic_authorized_operations == authorized_operations.TOPIC == 3576
    assert asked.cluster_authorized_operations == authorized_operations.CLUSTER == 8096


def with_change(services, **change) -> MetadataImage:
    topic_id = services.image().topics_by_name["a"].topic_id
    builder = ImageBuilder(services.image())
    builder.replay(PartitionChangeRecord(partition_id=0, topic_id=topic_id, **change))
    return builder.build(99, 1, 0, 1)[0]


async def test_a_partition_without_a_leader_says_so(services):
    await create(services, "a")
    image = with_change(services, leader=-1, isr=[])
    services.image = lambda: image
    partition = ask(services, 9, "a").topics[0].partitions[0]
    assert (partition.error_code, partition.leader_id) == (ErrorCode.LEADER_NOT_AVAILABLE, -1)


@pytest.mark.parametrize(("version", "code"), [(5, ErrorCode.LEADER_NOT_AVAILABLE), (6, ErrorCode.LISTENER_NOT_FOUND)])
async def test_a_leader_without_the_clients_listener_is_not_reachable(services, version, code):
    await create(services, "a")
    response = ask(services, version, "a", listener="OTHER")
    assert response.brokers == []
    assert response.topics[0].partitions[0].error_code == code


@pytest.mark.parametrize(
    ("version", "code", "replicas"), [(0, ErrorCode.REPLICA_NOT_AVAILABLE, [1]), (5, ErrorCode.NONE, [1, 2])]
)
async def test_a_replica_on_a_broker_that_is_gone_is_offline(services, version, code, replicas):
    await create(services, "a")
    home = services.image().brokers[1].log_dirs[0]
    image = with_change(services, replicas=[1, 2], directories=[home, b"e" * 16])
    services.image = lambda: image
    partition = ask(services, version, "a").topics[0].partitions[0]
    assert (partition.error_code, partition.replica_nodes) == (code, replicas)
    if version >= 5:
        assert partition.offline_replicas == [2]


@pytest.mark.parametrize(
    ("directory", "offline"), [(UNASSIGNED_DIRECTORY, []), (LOST_DIRECTORY, [1]), (b"x" * 16, [1])]
)
async def test_a_replica_in_a_directory_that_is_gone_is_offline(services, directory, offline):
    await create(services, "a")
    image = with_change(services, replicas=[1], directories=[directory])
    services.image = lambda: image
    assert ask(services, 12, "a").topics[0].partitions[0].offline_replicas == offline


@pytest.mark.parametrize("version", VERSIONS)
def test_a_refusal_can_be_said_in_every_version(version):
    request = MetadataRequest(topics=[MetadataRequestTopic(name="a")])
    response = encoded(metadata.refuse(request, KafkaError(ErrorCode.UNKNOWN_SERVER_ERROR), version), version)
    assert response.topics[0].error_code == ErrorCode.UNKNOWN_SERVER_ERROR


@pytest.mark.parametrize("by_id", [False, True])
async def test_thousands_of_topics_are_answered_in_pieces(services, by_id):
    await create(services, "a")
    a_id = services.image().topics_by_name["a"].topic_id
    count = metadata.AT_ONCE_MAX * 4 + 1
    asked = [MetadataRequestTopic(name=f"none-{number}") for number in range(count)]
    asked.append(MetadataRequestTopic(name="a"))
    if by_id:
        asked = [MetadataRequestTopic(name=None, topic_id=number.to_bytes(16, "big")) for number in range(1, count)]
        asked.append(MetadataRequestTopic(name=None, topic_id=a_id))
    request = MetadataRequest(topics=asked, allow_auto_topic_creation=False)
    answer = asyncio.ensure_future(cast(Any, metadata.handle(services, context(12), request)))
    turns = 0
    while not answer.done():
        await asyncio.sleep(0)
        turns += 1
    assert turns > 5
    response = encoded(answer.result(), 12)
    assert len(response.topics) == len(asked)
    assert [(topic.name, len(topic.partitions)) for topic in response.topics if not topic.error_code] == [("a", 2)]
    missing = {topic.error_code for topic in response.topics} - {ErrorCode.NONE}
    assert missing == {ErrorCode.UNKNOWN_TOPIC_ID if by_id else ErrorCode.UNKNOWN_TOPIC_OR_PARTITION}
    at_once = metadata._answer(services, context(12), request)
    assert response == encoded(at_once, 12)


async def test_among_thousands_of_topics_too_a_version_may_be_wrong(services):
    asked = [MetadataRequestTopic(name=f"none-{number}") for number in range(metadata.AT_ONCE_MAX * 2)]
    asked.append(MetadataRequestTopic(name=None))
    with pytest.raises(KafkaError):
        await cast(Any, metadata.handle(services, context(10), MetadataRequest(topics=asked)))


@pytest.mark.parametrize("asked", ["by name", "by id", "all", "all, in version 0"])
async def test_a_topic_of_thousands_of_partitions_is_answered_in_pieces(services, asked):
    await create(services, "a", partitions=metadata.AT_ONCE_MAX * 5)
    version = 0 if asked == "all, in version 0" else 12
    request = MetadataRequest(topics=None if version else [])
    if asked.startswith("by"):
        topic_id = services.image().topics_by_name["a"].topic_id
        one = (
            MetadataRequestTopic(name="a") if asked == "by name" else MetadataRequestTopic(name=None, topic_id=topic_id)
        )
        request = MetadataRequest(topics=[one])
    answer = asyncio.ensure_future(cast(Any, metadata.handle(services, context(version), request)))
    turns = 0
    while not answer.done():
        await asyncio.sleep(0)
        turns += 1
    assert turns > 10
    response = encoded(answer.result(), version)
    indexes = [partition.partition_index for partition in response.topics[0].partitions]
    assert indexes == [*range(metadata.AT_ONCE_MAX * 5)]
    assert response == encoded(metadata._answer(services, context(version), request), version)


async def test_few_large_answers_are_made_at_a_time(services, monkeypatch):
    """Each holds its partitions while it is made: 300 that were asked for together took 235 MB."""
    await create(services, "a", partitions=metadata.AT_ONCE_MAX * 2)
    begun = []

    class Counted(metadata._View):
        def __init__(self, *arguments):
            begun.append(self)
            super().__init__(*arguments)

    monkeypatch.setattr(metadata, "_View", Counted)
    answers = [
        asyncio.ensure_future(cast(Any, metadata.handle(services, context(12), MetadataRequest(topics=None))))
        for _ in range(20)
    ]
    while not any(answer.done() for answer in answers):
        await asyncio.sleep(0)
        assert len(begun) <= LARGE_ANSWERS_MAX
    for answer in answers:
        assert len(encoded(await answer, 12).topics[0].partitions) == metadata.AT_ONCE_MAX * 2


def without_brokers(image: MetadataImage) -> MetadataImage:
    return replace(image, brokers={node_id: replace(one, fenced=True) for node_id, one in image.brokers.items()})


async def test_the_answer_waits_for_a_first_broker(services):
    """librdkafka's AdminClient stands still after an answer that names none."""
    image = services.image()
    fenced = without_brokers(image)
    services.image = lambda: fenced
    answer = metadata.handle(services, context(12), MetadataRequest(topics=[]))
    assert isinstance(answer, Deferred)
    await asyncio.sleep(0.05)
    assert answer.response is None
    services.image = lambda: image
    response = await asyncio.wait_for(completed(answer), PATIENCE_S)
    assert ([broker.node_id for broker in response.brokers], response.controller_id) == ([1], 1)


async def test_but_not_for_long(services, monkeypatch):
    monkeypatch.setattr(metadata, "FIRST_BROKER_S_MAX", 0.05)
    fenced = without_brokers(services.image())
    services.image = lambda: fenced
    answer = metadata.handle(services, context(12), MetadataRequest(topics=[]))
    assert isinstance(answer, Deferred)
    response = await asyncio.wait_for(completed(answer), PATIENCE_S)
    assert (response.brokers, response.controller_id) == ([], -1)
