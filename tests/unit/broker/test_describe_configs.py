from __future__ import annotations

import asyncio

import pytest

from tests.patience import PATIENCE_S
from tests.unit.broker.metadata_services import at_once, context, encoded, running_services
from tidelog.broker.apis.repeats import REPEATS_MAX
from tidelog.broker.apis.topics import describe_configs, list_config_resources
from tidelog.broker.config.definitions import BROKER, TOPIC
from tidelog.broker.config.entries import topic_entries
from tidelog.broker.scheduling.fair_scheduler import FairScheduler
from tidelog.protocol.errors import ErrorCode, KafkaError
from tidelog.protocol.messages.describe_configs import DescribeConfigsRequest, DescribeConfigsResource
from tidelog.protocol.messages.list_config_resources import ListConfigResourcesRequest
from tidelog.protocol.messages.metadata_records import ConfigRecord
from tidelog.replication.controller.decisions.state import NewTopic
from tidelog.replication.controller.metadata.records import ImageBuilder

TOPIC_TYPE, BROKER_TYPE, LOGGER_TYPE, METRICS_TYPE, GROUP_TYPE = 2, 4, 8, 16, 32


def ask(services, kind, name, keys=None, *, version=4, synonyms=True, documentation=False):
    resource = DescribeConfigsResource(resource_type=kind, resource_name=name, configuration_keys=keys)
    request = DescribeConfigsRequest(
        resources=[resource],
        include_synonyms=synonyms,
        **({"include_documentation": documentation} if version >= 3 else {}),
    )
    services.scheduler = FairScheduler(asyncio.get_running_loop().call_soon)  # a turn of the loop for this request
    (result,) = encoded(at_once(describe_configs.handle(services, context(version), request)), version).results
    return result


def shown(result):
    return {entry.name: entry for entry in result.configs}


def synonyms(entry):
    return [(one.name, one.value, one.source) for one in entry.synonyms]


async def with_topic(services, **configs):
    settings = [(key.replace("_", "."), value) for key, value in configs.items()]
    await services.controller.create_topics([NewTopic("t", 1, 1, configs=settings)])


def set_at_run_time(services, *changes):
    """(broker name or "", key, value): as if AlterConfigs had been there."""
    builder = ImageBuilder(services.image())
    for name, key, value in changes:
        builder.replay(ConfigRecord(resource_type=4, resource_name=name, name=key, value=value))
    image = builder.build(99, 1, 0, 1)[0]
    services.image = lambda: image


@pytest.mark.parametrize("version", DescribeConfigsRequest.VERSIONS)
async def test_every_key_of_a_topic_is_there(services, version):
    await with_topic(services, retention_ms="5", cleanup_policy="compact, delete")
    entries = shown(ask(services, TOPIC_TYPE, "t", version=version))
    assert set(entries) == set(TOPIC) - {"internal.segment.bytes"}
    own = entries["retention.ms"]
    assert (own.value, own.config_source, own.read_only, own.is_sensitive) == ("5", 1, False, False)
    assert synonyms(own) == [("retention.ms", "5", 1)]
    assert entries["cleanup.policy"].value == "compact,delete"
    default = entries["segment.bytes"]
    assert (default.value, default.config_source) == ("1073741824", 5)
    assert synonyms(default) == [("log.segment.bytes", "1073741824", 5)]


async def test_a_value_says_which_layer_it_comes_from(tmp_path):
    async with running_services(tmp_path, {"log.index.interval.bytes": "11"}) as services:
        await with_topic(services)
        set_at_run_time(
            services, ("1", "log.segment.bytes", "2000000"), ("", "log.segment.bytes", "3000000"), ("", "x", "1")
        )
        entries = shown(ask(services, TOPIC_TYPE, "t"))
    assert (entries["index.interval.bytes"].value, entries["index.interval.bytes"].config_source) == ("11", 4)
    assert (entries["segment.bytes"].value, entries["segment.bytes"].config_source) == ("2000000", 2)
    assert synonyms(entries["segment.bytes"]) == [
        ("log.segment.bytes", "2000000", 2),
        ("log.segment.bytes", "3000000", 3),
        ("log.segment.bytes", "1073741824", 5),
    ]


async def test_a_weaker_unit_gives_the_value_but_not_the_source(tmp_path):
    # As Kafka's ConfigHelper: the list of synonyms starts at the key itself.
    async with running_services(tmp_path, {"log.retention.hours": "1"}) as services:
        await with_topic(services)
        entry = shown(ask(services, TOPIC_TYPE, "t"))["retention.ms"]
    assert (entry.value, entry.config_source, synonyms(entry)) == ("3600000", 5, [])


async def test_every_key_of_the_broker_is_there(services):
    entries = shown(ask(services, BROKER_TYPE, "1"))
    # What AdminClient sees of Kafka 4.3.1.
    assert len(entries) == 340
    assert set(entries) == {name for name, definition in BROKER.items() if definition.update_mode != "internal"}
    assert entries["num.io.threads"].value == "8"
    assert not entries["num.io.threads"].read_only
    assert entries["node.id"].read_only
    assert entries["log.retention.ms"].value is None
    assert entries["offsets.topic.replication.factor"].value == "1"
    assert entries["offsets.topic.replication.factor"].config_source == 4


async def test_secrets_are_never_shown(tmp_path):
    options = {"ssl.key.password": "hunter2", "listener.name.plaintext.sasl.jaas.config": "hunter2"}
    async with running_services(tmp_path, options) as services:
        result = ask(services, BROKER_TYPE, "1")
    entry = shown(result)["ssl.key.password"]
    assert (entry.value, entry.is_sensitive, synonyms(entry)) == (None, True, [("ssl.key.password", None, 4)])
    assert "hunter2" not in repr(result)


async def test_the_clusters_own_configs_are_those_set(services):
    (minimum,) = ask(services, BROKER_TYPE, "").configs
    assert (minimum.name, minimum.value) == ("min.insync.replicas", "1")  # written down when the cluster is made
    set_at_run_time(services, ("", "message.max.bytes", "5"), ("1", "num.io.threads", "3"))
    entry, _ = ask(services, BROKER_TYPE, "").configs
    assert (entry.name, entry.value, entry.config_source) == ("message.max.bytes", "5", 3)
    own = shown(ask(services, BROKER_TYPE, "1"))
    assert (own["num.io.threads"].value, own["num.io.threads"].config_source) == ("3", 2)
    assert (own["message.max.bytes"].value, own["message.max.bytes"].config_source) == ("5", 3)


async def test_keys_of_one_listener_and_of_plugins(services):
    of_listener, of_plugin = "listener.name.plaintext.max.connections", "a.plugins.own"
    set_at_run_time(services, ("1", of_listener, "7"), ("", of_plugin, "hunter2"), ("1", of_plugin, "hunter3"))
    own = shown(ask(services, BROKER_TYPE, "1"))
    assert (own[of_listener].value, own[of_listener].config_type, own[of_listener].read_only) == ("7", 3, True)
    assert synonyms(own[of_listener]) == [(of_listener, "7", 2), ("max.connections", "2147483647", 5)]
    assert (own[of_plugin].value, own[of_plugin].is_sensitive, own[of_plugin].config_type) == (None, True, 0)
    assert synonyms(own[of_plugin]) == [(of_plugin, None, 2), (of_plugin, None, 3)]
    assert synonyms(shown(ask(services, BROKER_TYPE, ""))[of_plugin]) == [(of_plugin, None, 3)]


async def test_only_the_keys_asked_for(services):
    result = ask(services, BROKER_TYPE, "1", ["num.io.threads", "nope"])
    assert list(shown(result)) == ["num.io.threads"]
    assert len(ask(services, BROKER_TYPE, "1", []).configs) == 340


@pytest.mark.parametrize("version", [3, 4])
async def test_type_and_documentation(services, version):
    entry = shown(ask(services, BROKER_TYPE, "1", version=version, documentation=True))["num.partitions"]
    assert (entry.config_type, entry.documentation) == (3, BROKER["num.partitions"].documentation)
    assert shown(ask(services, BROKER_TYPE, "1", version=version))["num.partitions"].documentation is None


async def test_synonyms_only_when_asked(services):
    assert all(not entry.synonyms for entry in ask(services, BROKER_TYPE, "1", synonyms=False).configs)


async def test_loggers_have_levels(services):
    entries = shown(ask(services, LOGGER_TYPE, "1"))
    assert entries["root"].config_source == 6
    assert "tidelog.controller" in entries


async def test_a_group_falls_back_to_the_broker(services):
    entries = shown(ask(services, GROUP_TYPE, "g"))
    assert len(entries) == 17
    timeout = entries["consumer.session.timeout.ms"]
    assert (timeout.value, synonyms(timeout)) == ("45000", [("group.consumer.session.timeout.ms", "45000", 5)])
    assert entries["share.auto.offset.reset"].value == "latest"


async def test_a_metrics_subscription_has_its_three_keys(services):
    entries = shown(ask(services, METRICS_TYPE, "m"))
    assert {name: entry.value for name, entry in entries.items()} == {
        "interval.ms": "300000",
        "match": "",
        "metrics": "",
    }


@pytest.mark.parametrize(
    ("kind", "name", "code", "message"),
    [
        (TOPIC_TYPE, "nope", ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, ""),
        (TOPIC_TYPE, "bad name", ErrorCode.INVALID_TOPIC_EXCEPTION, "Topic name is invalid"),
        (BROKER_TYPE, "2", ErrorCode.INVALID_REQUEST, "expected 1 or empty string, but received 2"),
        (BROKER_TYPE, "x", ErrorCode.INVALID_REQUEST, "Broker id must be an integer, but it is: x"),
        (LOGGER_TYPE, "", ErrorCode.INVALID_REQUEST, "Broker id must not be empty"),
        (LOGGER_TYPE, "2", ErrorCode.INVALID_REQUEST, "expected 1 but received 2"),
        (GROUP_TYPE, "", ErrorCode.INVALID_REQUEST, "Group name must not be empty"),
        (METRICS_TYPE, "", ErrorCode.INVALID_REQUEST, "subscription name must not be empty"),
    ],
)
async def test_what_is_not_there_is_an_error_of_its_resource(services, kind, name, code, message):
    result = ask(services, kind, name)
    assert result.error_code == code
    assert message in result.error_message
    assert result.configs == []


async def test_a_type_that_does_not_exist_makes_the_whole_request_fail(services):
    resources = [DescribeConfigsResource(resource_type=kind, resource_name="1") for kind in (BROKER_TYPE, 3)]
    with pytest.raises(KafkaError, match="Unsupported resource type: 3") as refused:
        await describe_configs.handle(services, context(4), DescribeConfigsRequest(resources=resources))
    assert refused.value.code is ErrorCode.INVALID_REQUEST


@pytest.mark.parametrize("version", DescribeConfigsRequest.VERSIONS)
def test_a_refusal_names_every_resource(version):
    request = DescribeConfigsRequest(resources=[DescribeConfigsResource(resource_type=2, resource_name="t")])
    response = encoded(describe_configs.refuse(request, KafkaError(ErrorCode.UNKNOWN_SERVER_ERROR), version), version)
    assert response.results[0].error_code == ErrorCode.UNKNOWN_SERVER_ERROR


async def test_a_resource_named_many_times_is_described_once(services):
    resources = [DescribeConfigsResource(resource_type=BROKER_TYPE, resource_name="1")] * REPEATS_MAX
    answer = await describe_configs.handle(services, context(4), DescribeConfigsRequest(resources=resources))
    assert len(answer.results) == REPEATS_MAX
    assert all(result is answer.results[0] for result in answer.results)


async def test_topics_with_the_same_configs_are_answered_from_one_look(services, monkeypatch):
    """It took nearly a millisecond of the broker for each of a thousand topics without configs of their own."""
    names = [f"t{number}" for number in range(20)]
    for name in names:
        own = [("retention.ms", name[1:])] if name in ("t7", "t9") else []
        await services.controller.create_topics([NewTopic(name, 1, 1, configs=own)])
    asked = [(name, keys) for keys in (None, ["retention.ms"]) for name in names]
    expected = [ask(services, TOPIC_TYPE, name, keys).configs for name, keys in asked]
    looked_at = []

    def look(*arguments):
        looked_at.append(arguments)
        yield from topic_entries(*arguments)

    monkeypatch.setattr(describe_configs, "topic_entries", look)
    resources = [
        DescribeConfigsResource(resource_type=TOPIC_TYPE, resource_name=name, configuration_keys=keys)
        for name, keys in [*asked, ("no such topic", None)]
    ]
    request = DescribeConfigsRequest(resources=resources, include_synonyms=True)
    answer = encoded(await describe_configs.handle(services, context(4), request), 4)
    assert [each.configs for each in answer.results[:-1]] == expected
    assert answer.results[-1].error_code == ErrorCode.INVALID_TOPIC_EXCEPTION
    assert len(looked_at) == 3 * 2


async def test_others_have_their_turn_while_many_are_described(services):
    resources = [DescribeConfigsResource(resource_type=2, resource_name=f"t{n}") for n in range(100)]
    answer = describe_configs.handle(services, context(4), DescribeConfigsRequest(resources=resources))
    others = 0

    async def count() -> None:
        nonlocal others
        while True:
            await asyncio.sleep(0)
            others += 1

    counting = asyncio.create_task(count())
    await asyncio.wait_for(answer, PATIENCE_S)
    counting.cancel()
    assert others >= 3


# ------------------------------------------------------------------------------------------- which resources there are


def listed(services, *types, version=1):
    request = ListConfigResourcesRequest(resource_types=list(types))
    answer = list_config_resources.handle(services, context(version), request)
    return [(each.resource_type, each.resource_name) for each in encoded(answer, version).config_resources]


async def test_what_can_have_configs_is_listed_by_type(services):
    await services.controller.create_topics([NewTopic("a", 1, 1), NewTopic("b", 1, 1)])
    assert listed(services, 4) == [(4, "1")]
    assert listed(services, 8) == [(8, "1")]
    assert set(listed(services, 2, 2)) >= {(2, "a"), (2, "b")}
    assert listed(services, 16) == listed(services, 32) == []
    services.image().configs[16, "subscription"] = {"interval.ms": "500"}
    services.image().configs[32, "group"] = {"consumer.session.timeout.ms": "50000"}
    assert listed(services, 16) == [(16, "subscription")]
    assert listed(services, 32) == [(32, "group")]
    assert {kind for kind, _ in listed(services)} == {2, 4, 8, 16, 32}


async def test_older_clients_hear_of_metrics_subscriptions_only(services):
    services.image().configs[16, "subscription"] = {"interval.ms": "500"}
    assert listed(services, version=0) == [(16, "subscription")]


@pytest.mark.parametrize("kind", [0, 1, 3, 64, -1])
async def test_a_type_that_has_no_configs_is_refused(services, kind):
    with pytest.raises(KafkaError, match="Unexpected resource type") as refused:
        listed(services, 2, kind)
    assert list_config_resources.refuse(ListConfigResourcesRequest(), refused.value, 1).error_code == 35


async def test_of_many_descriptions_of_a_broker_one_runs_in_a_turn_of_the_loop(services):
    loop = asyncio.get_running_loop()
    resource = DescribeConfigsResource(resource_type=BROKER_TYPE, resource_name="1", configuration_keys=None)
    request = DescribeConfigsRequest(resources=[resource])
    turn = 0
    described_in: list[int] = []

    def count_turns():
        nonlocal turn
        turn += 1
        counting = loop.call_soon(count_turns)
        if len(described_in) == 20:
            counting.cancel()

    async def describe():
        await describe_configs.handle(services, context(4), request)
        described_in.append(turn)

    count_turns()
    await asyncio.wait_for(asyncio.gather(*(describe() for _ in range(20))), PATIENCE_S)
    assert len(set(described_in)) == 20
