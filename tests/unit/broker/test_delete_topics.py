from __future__ import annotations

import pytest

from tests.unit.broker.metadata_services import context, encoded, running_services
from tidelog.broker.apis.topics import delete_topics
from tidelog.protocol.errors import ErrorCode, KafkaError
from tidelog.protocol.messages.delete_topics import DeleteTopicsRequest, DeleteTopicState
from tidelog.protocol.uuids import ZERO_UUID
from tidelog.replication.controller.decisions.state import NewTopic


async def create(services, *names):
    await services.controller.create_topics([NewTopic(name, 1, 1) for name in names])
    return [services.image().topics_by_name[name].topic_id for name in names]


def by_name(name):
    return DeleteTopicState(name=name, topic_id=ZERO_UUID)


def by_id(topic_id):
    return DeleteTopicState(name=None, topic_id=topic_id)


async def ask(services, version, **fields):
    request = DeleteTopicsRequest(timeout_ms=1000, **fields)
    return encoded(await delete_topics.handle(services, context(version), request), version).responses


@pytest.mark.parametrize("version", range(1, 6))
async def test_by_name_in_the_older_versions(services, version):
    await create(services, "a", "b")
    results = {r.name: r.error_code for r in await ask(services, version, topic_names=["a", "nope", "twice", "twice"])}
    assert results == {
        "a": ErrorCode.NONE,
        "nope": ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
        "twice": ErrorCode.INVALID_REQUEST,
    }
    assert set(services.image().topics_by_name) == {"b"}


async def test_by_name_or_id_in_version_6(services):
    first, second = await create(services, "a", "b")
    results = await ask(services, 6, topics=[by_name("a"), by_id(second)])
    assert [(r.name, r.topic_id, r.error_code) for r in results] == [("b", second, 0), ("a", first, 0)]
    assert not services.image().topics_by_name


@pytest.mark.parametrize(
    ("states", "code"),
    [
        ([by_id(b"?" * 16)], ErrorCode.UNKNOWN_TOPIC_ID),
        ([by_id(b"?" * 16)] * 2, ErrorCode.INVALID_REQUEST),
        ([by_id(ZERO_UUID)], ErrorCode.INVALID_REQUEST),
        ([DeleteTopicState(name="a", topic_id=b"?" * 16)], ErrorCode.INVALID_REQUEST),
    ],
)
async def test_what_cannot_be_meant_is_refused(services, states, code):
    await create(services, "a")
    results = await ask(services, 6, topics=states)
    assert [r.error_code for r in results] == [code]
    assert "a" in services.image().topics_by_name


async def test_a_topic_named_and_identified_at_once_stays(services):
    (topic_id,) = await create(services, "a")
    results = await ask(services, 6, topics=[by_name("a"), by_id(topic_id)])
    assert [r.error_code for r in results] == [ErrorCode.INVALID_REQUEST]
    assert "a" in services.image().topics_by_name


@pytest.mark.parametrize(
    ("version", "code"),
    [(1, ErrorCode.INVALID_REQUEST), (3, ErrorCode.TOPIC_DELETION_DISABLED), (6, ErrorCode.TOPIC_DELETION_DISABLED)],
)
async def test_deletion_can_be_disabled(tmp_path, version, code):
    async with running_services(tmp_path, {"delete.topic.enable": "false"}) as services:
        request = DeleteTopicsRequest(topics=[by_name("a")])
        with pytest.raises(KafkaError) as caught:
            await delete_topics.handle(services, context(version), request)
    assert caught.value.code is code


@pytest.mark.parametrize("version", DeleteTopicsRequest.VERSIONS)
def test_a_refusal_names_every_topic(version):
    request = (
        DeleteTopicsRequest(topics=[by_name("a"), by_id(b"i" * 16)])
        if version >= 6
        else DeleteTopicsRequest(topic_names=["a", "b"])
    )
    error = KafkaError(ErrorCode.REQUEST_TIMED_OUT)
    response = encoded(delete_topics.refuse(request, error, version), version)
    assert [r.error_code for r in response.responses] == [ErrorCode.REQUEST_TIMED_OUT] * 2
