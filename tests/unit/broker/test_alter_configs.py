"""Changing configs through a broker: what it refuses itself, what the controller says, and what then holds."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.unit.broker.metadata_services import at_once, context, encoded, running_services
from tidelog.broker.apis.api_tables import BROKER_APIS, CONTROLLER_APIS, FORWARDED
from tidelog.broker.apis.dispatch import Dispatcher
from tidelog.broker.apis.services import Services
from tidelog.broker.apis.topics import alter_configs, describe_configs, incremental_alter_configs
from tidelog.broker.cluster.controller_channel import ControllerChannel
from tidelog.broker.scheduling.fair_scheduler import FairScheduler
from tidelog.protocol.messages import alter_configs as legacy
from tidelog.protocol.messages import incremental_alter_configs as incremental
from tidelog.protocol.messages.create_topics import CreateTopicsRequest
from tidelog.protocol.messages.describe_configs import DescribeConfigsRequest, DescribeConfigsResource
from tidelog.protocol.messages.envelope import EnvelopeResponse
from tidelog.replication.controller.decisions.state import NewTopic
from tidelog.replication.ports import Endpoint

TOPIC, BROKER, LOGGER, METRICS, GROUP = 2, 4, 8, 16, 32
SET, DELETE, APPEND, SUBTRACT = range(4)
OK = (0, None)


@pytest.fixture
async def services(tmp_path: Path) -> AsyncIterator[Services]:
    async with running_services(tmp_path) as found:
        assert found.controller is not None
        await found.controller.create_topics([NewTopic("t", 1, 1)])
        yield found


@pytest.fixture
def quiet_logger() -> Iterator[logging.Logger]:
    logger = logging.getLogger("tidelog.tests.levels")
    yield logger
    logger.setLevel(logging.NOTSET)


def resource(kind: int, name: str, *changes: tuple[str, int, str | None]) -> Any:
    configs = [
        incremental.AlterableConfig(name=key, config_operation=kind, value=value) for key, kind, value in changes
    ]
    return incremental.AlterConfigsResource(resource_type=kind, resource_name=name, configs=configs)


async def alter(
    services: Services, *resources: Any, validate_only: bool = False, listener: str = "PLAINTEXT", version: int = 1
) -> list[tuple[int, str | None]]:
    request = incremental.IncrementalAlterConfigsRequest(resources=list(resources), validate_only=validate_only)
    asked = incremental.IncrementalAlterConfigsRequest.decode(request.encode(version), version)
    answer = await incremental_alter_configs.handle(services, context(version, listener=listener), asked)
    return [(each.error_code, each.error_message) for each in encoded(answer, version).responses]


async def set_one(services: Services, kind: int, name: str, key: str, value: str | None) -> tuple[int, str | None]:
    (told,) = await alter(services, resource(kind, name, (key, SET, value)))
    return told


async def replace(
    services: Services, kind: int, name: str, version: int = 2, *, listener: str = "PLAINTEXT", **configs: str | None
) -> Any:
    entries = [legacy.AlterableConfig(name=key.replace("_", "."), value=value) for key, value in configs.items()]
    each = legacy.AlterConfigsResource(resource_type=kind, resource_name=name, configs=entries)
    request = legacy.AlterConfigsRequest(resources=[each])
    answer = await alter_configs.handle(services, context(version, listener=listener), request)
    (told,) = encoded(answer, version).responses
    return told.error_code, told.error_message


async def test_each_resource_is_answered_in_the_order_of_the_request(services: Services) -> None:
    told = await alter(
        services,
        resource(TOPIC, "twice"),
        resource(TOPIC, "t", ("retention.ms", SET, "7")),
        resource(TOPIC, "keys", ("x", SET, "1"), ("x", SET, "2")),
        resource(TOPIC, "null", ("x", SET, None), ("y", SET, None), ("z", DELETE, None)),
        resource(99, "?"),
        resource(BROKER, "", ("max.connections", SET, "7")),
        resource(TOPIC, "twice"),
    )
    assert told == [
        (42, "Each resource must appear at most once."),
        OK,
        (42, "Error due to duplicate config keys"),
        (42, "Null value not supported for : x, y"),
        (42, "Unknown resource type 99"),
        OK,
        (42, "Each resource must appear at most once."),
    ]
    assert services.image().topic_config("t") == {"retention.ms": "7"}
    assert services.settings.integer("max.connections") == 7


@pytest.mark.parametrize("version", incremental.IncrementalAlterConfigsRequest.VERSIONS)
async def test_what_is_set_is_put_back(services: Services, version: int) -> None:
    default = services.settings.integer("message.max.bytes")
    one, cluster = (
        resource(BROKER, name, ("message.max.bytes", SET, value)) for name, value in (("1", "5"), ("", "6"))
    )
    assert await alter(services, one, cluster, version=version) == [OK, OK]
    assert services.settings.integer("message.max.bytes") == 5
    assert await alter(services, resource(BROKER, "1", ("message.max.bytes", DELETE, None)), version=version) == [OK]
    assert services.settings.integer("message.max.bytes") == 6
    assert await alter(services, resource(BROKER, "", ("message.max.bytes", DELETE, None)), version=version) == [OK]
    assert services.settings.integer("message.max.bytes") == default


@pytest.mark.parametrize("version", legacy.AlterConfigsRequest.VERSIONS)
async def test_the_older_request_replaces_all_that_was_set(services: Services, version: int) -> None:
    await alter(services, resource(TOPIC, "t", ("retention.ms", SET, "7"), ("segment.ms", SET, "8")))
    assert await replace(services, TOPIC, "t", version, retention_ms="9") == OK
    assert services.image().topic_config("t") == {"retention.ms": "9"}
    assert await replace(services, TOPIC, "t", version, retention_ms=None) == (
        42,
        "Null value not supported for : retention.ms",
    )
    assert (await replace(services, LOGGER, "1", version, root="INFO"))[0] == 42
    at_controller = await replace(services, LOGGER, "1", version, listener="", root="INFO")
    assert at_controller[0] == 35


async def test_a_dry_run_changes_nothing(services: Services) -> None:
    for name in ("", "1"):
        change = resource(BROKER, name, ("max.connections", SET, "7"))
        assert await alter(services, change, validate_only=True) == [OK]
    assert not services.settings.layers[0]
    assert services.settings.integer("max.connections") == 2**31 - 1


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("2", "Unexpected broker id, expected 1, but received 2"),
        ("-1", "Unexpected broker id, expected 1, but received -1"),
        ("x", "Node id must be an integer, but it is: x"),
        (" 1", "Node id must be an integer, but it is:  1"),
    ],
)
async def test_a_broker_takes_only_its_own_configs(services: Services, name: str, message: str) -> None:
    assert await set_one(services, BROKER, name, "max.connections", "5") == (42, message)
    assert await replace(services, BROKER, name, max_connections="5") == (42, message)


async def test_a_controller_takes_those_of_any_node(services: Services) -> None:
    """As the broker forwards them; and a controller need not know what a value means to a broker."""
    change = resource(BROKER, "1", ("num.io.threads", SET, "100"))
    assert await alter(services, change, listener="") == [OK]
    assert services.settings.integer("num.io.threads") == 100
    unknown = resource(BROKER, "7", ("num.io.threads", SET, "8"))
    assert await alter(services, unknown, listener="") == [(102, "No node with id 7 found.")]


THREADS = "Dynamic thread count update validation failed for num.io.threads="
REFUSED = {
    ("max.connections", " 0"): "Invalid max.connections 0",
    ("max.connection.creation.rate", "0"): "Invalid max.connection.creation.rate 0",
    ("listener.name.plaintext.max.connections", "0"): "Invalid max.connections 0",
    ("num.io.threads", "0"): "Invalid value 0 for configuration num.io.threads: Value must be at least 1",
    ("num.io.threads", "3"): f"{THREADS}3, value should be at least half the current value 8",
    ("num.io.threads", "17"): f"{THREADS}17, value should not be greater than double the current value 8",
    ("node.id", "3"): "Cannot update these configs dynamically: [node.id]",
    ("log.retention.hours", "3"): "Cannot update these configs dynamically: [log.retention.hours]",
    ("log.roll.ms", "0"): "requirement failed: log.roll.ms must be greater than or equal to 1",
    ("log.roll.jitter.ms", "-1"): "requirement failed: log.roll.jitter.ms must be greater than or equal to 0",
    ("log.retention.ms", "0"): (
        "requirement failed: log.retention.ms must be unlimited (-1) or, greater than or equal to 1"
    ),
    ("log.cleaner.dedupe.buffer.size", "1048576"): (
        "requirement failed: log.cleaner.dedupe.buffer.size must be at least 1MB per cleaner thread."
    ),
    ("log.cleaner.threads", "0"): "Log cleaner threads should be at least 1",
    ("log.cleaner.threads", "3"): "Log cleaner threads cannot be increased to more than double the current value 1",
    ("log.local.retention.ms", "-1"): (
        "Invalid value -1 for configuration log.local.retention.ms: "
        "Value must not be -1 as log.retention.ms value is set as 604800000."
    ),
    ("max.connections.per.ip", "0"): (
        "requirement failed: max.connections.per.ip can be set to zero only if "
        "max.connections.per.ip.overrides property is set."
    ),
    ("max.connections.per.ip.overrides", "a"): (
        "Error parsing configuration property 'max.connections.per.ip.overrides': begin 0, end -1, length 1"
    ),
    ("max.connections.per.ip.overrides", "localhost:x"): 'For input string: "x"',
    ("listeners", "PLAINTEXT://127.0.0.1:1"): "The listeners of a running node cannot be changed.",
    ("ssl.keystore.location", "/x"): (
        "These security configs can be dynamically updated only per-listener using the listener prefix: "
        "[ssl.keystore.location]"
    ),
    ("listener.name.plaintext.max.connections", "-1"): (
        "Invalid value -1 for configuration max.connections: Value must be at least 0"
    ),
    ("principal.builder.class", "x"): (
        "Invalid value x for configuration principal.builder.class: Class x could not be found."
    ),
    ("cordoned.log.dirs", "/x"): (
        "requirement failed: All entries in cordoned.log.dirs must be present in log.dirs or log.dir. "
        "Missing entries : /x"
    ),
}


@pytest.mark.parametrize(("key", "value"), REFUSED)
async def test_a_broker_says_what_it_cannot_have(services: Services, key: str, value: str) -> None:
    assert await set_one(services, BROKER, "1", key, value) == (42, REFUSED[key, value])
    assert not services.settings.layers[0]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num.io.threads", "4"),
        ("num.io.threads", "16"),
        ("log.retention.ms", "-2"),
        ("log.retention.ms", "-1"),
        ("a.plugins.own", "1"),
        ("max.connections.per.ip.overrides", "127.0.0.1:5,example.org:6"),
        ("listener.name.plaintext.max.connections", "10"),
        ("listener.name.other.max.connections", "0"),
        ("leader.replication.throttled.rate", "100"),
        ("cordoned.log.dirs", "*"),
    ],
)
async def test_a_broker_takes_what_it_can_have(services: Services, key: str, value: str) -> None:
    assert await set_one(services, BROKER, "1", key, value) == OK
    assert services.settings.layers[0] == {key: value}


@pytest.mark.parametrize(
    "key", ["sasl.enabled.mechanisms", "listener.name.plaintext.ssl.keystore.location", "cordoned.log.dirs"]
)
async def test_what_each_broker_has_for_itself_is_not_set_for_all(services: Services, key: str) -> None:
    message = f"Cannot update these configs at default cluster level, broker id must be specified: [{key}]"
    assert await set_one(services, BROKER, "", key, "x") == (42, message)


async def test_threads_double_from_what_they_are_now(services: Services) -> None:
    for threads in ("16", "32"):
        assert await set_one(services, BROKER, "1", "num.io.threads", threads) == OK
    assert services.settings.integer("num.io.threads") == 32


@pytest.mark.parametrize(
    ("key", "operation", "told"),
    [
        ("log.cleanup.policy", APPEND, OK),
        ("max.connections", APPEND, (40, "Config value append is not allowed for config key: max.connections")),
        ("node.id", SUBTRACT, (40, "Config value subtract is not allowed for config key: node.id")),
        ("foo", APPEND, (40, "Unknown config name: foo")),
        ("foo", 9, (42, "Unknown operations type 9")),
    ],
)
async def test_lists_of_brokers_grow_and_shrink(services: Services, key: str, operation: int, told: Any) -> None:
    assert await alter(services, resource(BROKER, "1", (key, operation, "compact"))) == [told]
    if told == OK:
        assert services.settings.items(key) == ["delete", "compact"]


@pytest.mark.parametrize(
    ("key", "value", "told"),
    [
        ("consumer.session.timeout.ms", "50000", OK),
        ("foo", "1", (40, "Unknown group config name: foo")),
        (
            "consumer.session.timeout.ms",
            "0",
            (40, "Invalid value 0 for configuration consumer.session.timeout.ms: Value must be at least 1"),
        ),
        (
            "consumer.session.timeout.ms",
            "44999",
            (
                40,
                "consumer.session.timeout.ms must be greater than or equal to group.consumer.min.session.timeout.ms",
            ),
        ),
        (
            "share.delivery.count.limit",
            "11",
            (40, "share.delivery.count.limit must be less than or equal to group.share.max.delivery.count.limit"),
        ),
        (
            "streams.num.standby.replicas",
            "3",
            (40, "streams.num.standby.replicas must be less than or equal to group.streams.max.standby.replicas"),
        ),
        ("share.auto.offset.reset", "by_duration:PT1S", OK),
        (
            "share.auto.offset.reset",
            "LATEST",
            (
                40,
                "Invalid value LATEST for configuration share.auto.offset.reset: Invalid value `LATEST` for "
                "configuration share.auto.offset.reset. The value must be either 'earliest', 'latest' or of the "
                "format 'by_duration:<PnDTnHnMn.nS>'.",
            ),
        ),
    ],
)
async def test_configs_of_groups_are_judged(services: Services, key: str, value: str, told: Any) -> None:
    assert await set_one(services, GROUP, "g", key, value) == told


@pytest.mark.parametrize(
    ("key", "value", "told"),
    [
        ("interval.ms", "100", OK),
        ("match", "client_id=a.*", OK),
        ("metrics", "a,a", OK),
        (
            "interval.ms",
            "5",
            (42, "Invalid value 5 for interval.ms, interval must be between 100 and 3600000 (1 hour)"),
        ),
        ("interval.ms", "x", (40, "Invalid value x for configuration interval.ms: Not a number of type INT")),
        ("match", "client_id=[", (40, "Illegal client matching pattern: client_id=[")),
        ("match", f"client_id={'a' * 257}", (40, f"Illegal client matching pattern: client_id={'a' * 257}")),
        ("match", r"client_id=(?i)[a-\U0010ffff]", OK),
        ("match", "colour=x", (40, "Illegal client matching pattern: colour=x")),
        ("metrics", "a,,b", (40, "Configuration 'metrics' values must not be empty.")),
        ("foo", "1", (42, "Unknown client metrics configuration: foo")),
    ],
)
async def test_metrics_subscriptions_are_judged(services: Services, key: str, value: str, told: Any) -> None:
    assert await set_one(services, METRICS, "s", key, value) == told


async def test_long_values_are_judged_in_pieces(services: Services) -> None:
    """Those that stay count, too: all values of a resource are judged when one of them changes."""
    match = ",".join(["client_id=a"] * 2_700)
    subscriptions = [resource(METRICS, f"s{number}", ("match", SET, match)) for number in range(6)]
    pauses = services.scheduler.pauses
    assert await alter(services, *subscriptions) == [OK] * 6
    assert services.scheduler.pauses == pauses + 2
    intervals = [resource(METRICS, f"s{number}", ("interval.ms", SET, "100")) for number in range(6)]
    assert await alter(services, *intervals) == [OK] * 6
    assert services.scheduler.pauses == pauses + 4


async def test_a_list_grows_to_the_bound_of_all_values(services: Services) -> None:
    """A request cannot carry a longer value."""
    told = (40, "The configuration value cannot be added because it exceeds the maximum value size of 32767 bytes.")
    key, replicas = "leader.replication.throttled.replicas", ",".join(f"{number}:1" for number in range(10_000, 14_000))
    assert await set_one(services, TOPIC, "t", key, replicas) == OK
    assert await alter(services, resource(TOPIC, "t", (key, APPEND, "20000:1"))) == [OK]
    assert await alter(services, resource(TOPIC, "t", (key, APPEND, replicas.replace(":1", ":2")))) == [told]
    assert await set_one(services, BROKER, "", "log.cleaner.min.cleanable.ratio", "0" * 32_767) == OK


async def test_a_subscription_with_very_many_patterns_is_judged_in_milliseconds(services: Services) -> None:
    """To compile one of these classes takes 4 ms, because Python makes a table of 65,536 letters; all of them, 15 s."""
    pattern = "[a\u0101-\uffff]" * 35
    value = ",".join(f"client_id={pattern}{number}" for number in range(99))
    began_s = time.process_time()
    assert await set_one(services, METRICS, "s", "match", value) == OK
    assert time.process_time() - began_s < 1


# ----------------------------------------------------------------------------------------- where another node controls


@pytest.fixture
async def elsewhere(services: Services) -> AsyncIterator[Services]:
    """As a broker sees it that does not control: the active controller answers envelopes at the other end."""
    at_controller = Dispatcher(services, CONTROLLER_APIS, FORWARDED)
    here = services.controller_channel

    async def exchange(endpoint: Endpoint, request: Any, version: int, **_: Any) -> EnvelopeResponse:
        return EnvelopeResponse(response_data=await at_controller.embedded(bytes(request.request_data), "127.0.0.1"))

    services.controller_channel = ControllerChannel(
        is_local=lambda: False,
        local=here.call,
        leader=lambda: Endpoint("controller", 1),
        exchange=exchange,
        loop=asyncio.get_running_loop(),
        rng=services.rng,
    )
    yield services
    services.controller_channel = here


@pytest.mark.parametrize("version", incremental.IncrementalAlterConfigsRequest.VERSIONS)
async def test_only_what_the_controller_is_to_decide_is_sent_on(elsewhere: Services, version: int) -> None:
    told = await alter(
        elsewhere,
        resource(TOPIC, "nowhere", ("retention.ms", SET, "7")),
        resource(BROKER, "1", ("max.connections", SET, "7")),
        resource(BROKER, "2", ("max.connections", SET, "7")),
        resource(BROKER, "", ("num.io.threads", SET, "1000")),
        resource(LOGGER, "1", ("root", SET, "LOUD")),
        resource(TOPIC, "t", ("retention.ms", SET, "7")),
        version=version,
    )
    assert [code for code, _ in told] == [3, 0, 42, 42, 40, 0]
    assert elsewhere.image().topic_config("t") == {"retention.ms": "7"}
    assert elsewhere.settings.integer("max.connections") == 7


@pytest.mark.parametrize("version", legacy.AlterConfigsRequest.VERSIONS)
async def test_the_older_request_is_sent_on_too(elsewhere: Services, version: int) -> None:
    assert await replace(elsewhere, TOPIC, "t", version, retention_ms="9") == OK
    assert await replace(elsewhere, TOPIC, "t", version, foo="9") == (40, "Unknown topic config name: foo")
    assert elsewhere.image().topic_config("t") == {"retention.ms": "9"}


async def test_dispatch_leaves_it_to_the_broker_what_to_send_on(elsewhere: Services) -> None:
    dispatcher = Dispatcher(elsewhere, BROKER_APIS, FORWARDED)
    for module in (alter_configs, incremental_alter_configs):
        assert not dispatcher._apis[module.REQUEST.API_KEY].is_forwarded
    assert dispatcher._apis[CreateTopicsRequest.API_KEY or 0].is_forwarded


# ------------------------------------------------------------------------------------------------------------- loggers


def level_of(services: Services, name: str) -> str | None:
    wanted = DescribeConfigsResource(resource_type=LOGGER, resource_name="1", configuration_keys=[name])
    services.scheduler = FairScheduler(asyncio.get_running_loop().call_soon)  # a turn of the loop for this request
    answer = at_once(describe_configs.handle(services, context(4), DescribeConfigsRequest(resources=[wanted])))
    ((entry,),) = [result.configs for result in answer.results]
    assert (entry.config_source, entry.config_type) == (6, 0)
    return entry.value


async def test_a_loggers_level_is_changed_and_put_back(services: Services, quiet_logger: logging.Logger) -> None:
    name = quiet_logger.name
    inherited = level_of(services, name)
    for level, number in (("TRACE", 5), ("DEBUG", 10), ("WARN", 30), ("FATAL", 50)):
        assert await set_one(services, LOGGER, "1", name, level) == OK
        assert (quiet_logger.level, level_of(services, name)) == (number, level)
    assert await alter(services, resource(LOGGER, "1", (name, DELETE, None))) == [OK]
    assert level_of(services, name) == inherited


async def test_a_dry_run_leaves_levels_alone(services: Services, quiet_logger: logging.Logger) -> None:
    assert await alter(services, resource(LOGGER, "1", (quiet_logger.name, SET, "DEBUG")), validate_only=True) == [OK]
    assert quiet_logger.level == logging.NOTSET


@pytest.mark.parametrize(
    ("node", "change", "told"),
    [
        ("2", ("root", SET, "INFO"), (42, "Unexpected node id. Expected 1, but received 2")),
        ("", ("root", SET, "INFO"), (42, "Node id must be an integer, but it is: ")),
        ("+-1", ("root", SET, "INFO"), (42, "Node id must be an integer, but it is: +-1")),
        ("1", ("no.such", SET, "INFO"), (40, "Logger no.such does not exist!")),
        ("1", ("no.such", DELETE, None), (40, "Logger no.such does not exist!")),
        ("1", ("root", DELETE, None), (42, "Removing the log level of the root logger is not allowed")),
        ("1", ("root", APPEND, "INFO"), (42, "APPEND operation is not allowed for the BROKER_LOGGER resource")),
        ("1", ("root", 9, "INFO"), (42, "Unknown operation type 9 is not allowed for the BROKER_LOGGER resource")),
        (
            "1",
            ("root", SET, "debug"),
            (
                40,
                "Cannot set the log level of root to debug as it is not a supported log level. "
                "Valid log levels are DEBUG, ERROR, FATAL, INFO, TRACE, WARN",
            ),
        ),
    ],
)
async def test_levels_that_cannot_be_are_refused(services: Services, node: str, change: Any, told: Any) -> None:
    before = logging.getLogger().level
    assert await alter(services, resource(LOGGER, node, change)) == [told]
    assert logging.getLogger().level == before


async def test_one_bad_level_spoils_the_others(services: Services, quiet_logger: logging.Logger) -> None:
    both = resource(LOGGER, "1", (quiet_logger.name, SET, "DEBUG"), ("root", SET, "LOUD"))
    ((code, _),) = await alter(services, both)
    assert code == 40
    assert quiet_logger.level == logging.NOTSET
