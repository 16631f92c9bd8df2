from __future__ import annotations

import pytest

from tests.unit.broker.metadata_services import context, encoded, running_services
from tidelog.broker.apis.topics import create_topics
from tidelog.protocol.errors import ErrorCode, KafkaError
from tidelog.protocol.messages.create_topics import (
    CreatableReplicaAssignment,
    CreatableTopic,
    CreatableTopicConfig,
    CreateTopicsRequest,
)

VERSIONS = CreateTopicsRequest.VERSIONS


def topic(name, partitions=1, factor=1, **configs):
    return CreatableTopic(
        name=name,
        num_partitions=partitions,
        replication_factor=factor,
        configs=[CreatableTopicConfig(name=key.replace("_", "."), value=value) for key, value in configs.items()],
    )


async def ask(services, *topics, version=7, **fields):
    request = CreateTopicsRequest(topics=list(topics), **fields)
    response = encoded(await create_topics.handle(services, context(version), request), version)
    return {result.name: result for result in response.topics}


@pytest.mark.parametrize("version", VERSIONS)
async def test_topics_are_created_in_every_version(services, version):
    results = await ask(services, topic("a", 3), topic("bad name"), version=version)
    assert results["a"].error_code == ErrorCode.NONE
    assert results["bad name"].error_code == ErrorCode.INVALID_TOPIC_EXCEPTION
    assert len(services.image().topics_by_name["a"].partitions) == 3
    if version >= 5:
        assert (results["a"].num_partitions, results["a"].replication_factor) == (3, 1)
    if version >= 7:
        assert results["a"].topic_id == services.image().topics_by_name["a"].topic_id


async def test_the_configs_in_effect_come_back_with_their_source(tmp_path):
    async with running_services(tmp_path, {"log.segment.bytes": "5000000", "log.retention.hours": "2"}) as services:
        result = (await ask(services, topic("a", retention_bytes="77")))["a"]
    shown = {config.name: (config.value, config.config_source) for config in result.configs}
    assert shown["retention.bytes"] == ("77", 1)
    assert shown["segment.bytes"] == ("5000000", 4)
    assert shown["retention.ms"] == ("7200000", 4)
    assert shown["flush.ms"] == (str(2**63 - 1), 5)
    assert [config.name for config in result.configs] == sorted(shown)


async def test_a_name_given_twice_is_refused_once_and_not_created(services):
    results = await ask(services, topic("a"), topic("a"), topic("b"))
    assert results["a"].error_code == ErrorCode.INVALID_REQUEST
    assert results["a"].error_message == "Duplicate topic name."
    assert set(services.image().topics_by_name) == {"b"}


async def test_the_metadata_topic_cannot_be_created(services):
    result = (await ask(services, topic("__cluster_metadata")))["__cluster_metadata"]
    assert result.error_code == ErrorCode.INVALID_REQUEST
    assert "prohibited" in result.error_message


async def test_configs_are_checked_by_the_brokers_table(services):
    result = (await ask(services, topic("a", foo="1")))["a"]
    assert (result.error_code, result.error_message) == (ErrorCode.INVALID_CONFIG, "Unknown topic config name: foo")


async def test_validating_creates_nothing(services):
    results = await ask(services, topic("a"), validate_only=True)
    assert results["a"].error_code == ErrorCode.NONE
    assert not services.image().topics_by_name


async def test_an_assignment_by_hand(services):
    by_hand = CreatableTopic(
        name="a",
        num_partitions=-1,
        replication_factor=-1,
        assignments=[CreatableReplicaAssignment(partition_index=index, broker_ids=[1]) for index in (0, 1)],
    )
    assert (await ask(services, by_hand))["a"].num_partitions == 2


@pytest.mark.parametrize("version", VERSIONS)
def test_a_refusal_names_every_topic(version):
    request = CreateTopicsRequest(topics=[topic("a"), topic("b")])
    error = KafkaError(ErrorCode.POLICY_VIOLATION, "no")
    response = encoded(create_topics.refuse(request, error, version), version)
    assert [(result.name, result.error_code) for result in response.topics] == [("a", 44), ("b", 44)]
