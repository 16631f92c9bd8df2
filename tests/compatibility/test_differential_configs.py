"""Configs of brokers, loggers, groups, metrics subscriptions and topics, changed at run time in Tidelog and Kafka."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest

from tests.compatibility.side_by_side import Brokers
from tests.compatibility.test_differential_cluster import BROKER, GROUP, LOGGER, METRICS, TOPIC, change

NewTopic = Callable[..., str]
SET, DELETE, APPEND, SUBTRACT = range(4)
ALL_BROKERS, THIS_BROKER = "", "1"

# Values of brokers' configs. What is not here is said in docs/compatibility.md.
BROKER_VALUES: dict[str, list[str]] = {
    "num.io.threads": ["0", "-1", "x", "", "3", "4", "8", "16", "17", "100"],
    "num.network.threads": ["1", "5", "7"],
    "num.replica.fetchers": ["2", "3"],
    "background.threads": ["4", "21"],
    "num.recovery.threads.per.data.dir": ["9"],
    "log.cleaner.threads": ["-1", "2", "3"],
    "log.cleaner.dedupe.buffer.size": ["0", "1048576", "1048577"],
    "log.cleaner.io.buffer.size": ["-1", "1"],
    "log.cleaner.io.buffer.load.factor": ["2", "x"],
    "log.cleaner.io.max.bytes.per.second": ["0"],
    "log.cleaner.backoff.ms": ["-1", "5"],
    "log.cleaner.enable": ["false"],
    "log.cleaner.min.cleanable.ratio": ["2", "0.3"],
    "log.cleaner.min.compaction.lag.ms": ["99999999999999", "-1"],
    "log.cleaner.max.compaction.lag.ms": ["0", "5"],
    "log.cleaner.delete.retention.ms": ["-1", "5"],
    "log.retention.ms": ["-2", "-1", "0", "1", "x", ""],
    "log.retention.hours": ["5"],
    "log.retention.minutes": ["5"],
    "log.retention.bytes": ["-5", "5"],
    "log.roll.ms": ["0", "5"],
    "log.roll.hours": ["5"],
    "log.roll.jitter.ms": ["-1", "5"],
    "log.local.retention.ms": ["-3", "-2", "-1", "5", "99999999999"],
    "log.local.retention.bytes": ["-1", "9"],
    "log.segment.bytes": ["5", "2000000"],
    "log.segment.delete.delay.ms": ["-1", "5"],
    "log.index.interval.bytes": ["-1", "5"],
    "log.index.size.max.bytes": ["3", "5"],
    "log.preallocate": ["true", "x"],
    "log.flush.interval.messages": ["0", "5"],
    "log.flush.interval.ms": ["0", "-5"],
    "log.flush.scheduler.interval.ms": ["5"],
    "log.message.timestamp.type": ["Foo", "LogAppendTime"],
    "log.message.timestamp.before.max.ms": ["-1", "5"],
    "log.message.timestamp.after.max.ms": ["-1", "5"],
    "log.cleanup.policy": ["", "foo", "compact", "compact,compact", "delete,,compact"],
    "message.max.bytes": ["-1", "2000"],
    "min.insync.replicas": ["0", "2"],
    "compression.type": ["zip", "zstd"],
    "compression.zstd.level": ["99", "5"],
    "compression.gzip.level": ["0", "-1", "10"],
    "compression.lz4.level": ["0", "18"],
    "unclean.leader.election.enable": ["maybe", "TRUE"],
    "max.connections": ["-1", "0", "100"],
    "max.connections.per.ip": ["-1", "50", "0"],
    "max.connections.per.ip.overrides": ["", "a", "127.0.0.1:5", "127.0.0.1:5,localhost:6", "localhost:x", "a:1,b"],
    "max.connection.creation.rate": ["-1", "0", "50"],
    "leader.replication.throttled.rate": ["-1", "100"],
    "follower.replication.throttled.rate": ["x", "100"],
    "replica.alter.log.dirs.io.max.bytes.per.second": ["5"],
    "producer.id.expiration.ms": ["-1", "0", "1000"],
    "transaction.partition.verification.enable": ["false", "5"],
    "remote.fetch.max.wait.ms": ["0", "5"],
    "remote.log.manager.copy.max.bytes.per.second": ["0"],
    "remote.log.index.file.cache.total.size.bytes": ["0"],
    "remote.log.reader.threads": ["0", "3", "5", "100"],
    "remote.log.manager.copier.thread.pool.size": ["1", "5"],
    "remote.log.manager.follower.thread.pool.size": ["9"],
    "metric.reporters": ["no.such.Class"],
    "ssl.keystore.location": ["/x"],
    "ssl.protocol": ["x"],
    "sasl.enabled.mechanisms": ["PLAIN"],
    "sasl.jaas.config": ["x"],
    "principal.builder.class": ["x"],
    "listener.name.plaintext.max.connections": ["10", "-1", "0", "x"],
    "listener.name.plaintext.max.connection.creation.rate": ["10"],
    "listener.name.plaintext.num.network.threads": ["5"],
    "listener.name.plaintext.ssl.keystore.location": ["/x"],
    "listener.name.plaintext.foo": ["3"],
    "listener.name.foo.max.connections": ["3", "0"],
    "advertised.listeners": ["PLAINTEXT://other:1"],
    "node.id": ["3"],
    "log.dirs": ["/x"],
    "num.partitions": ["3"],
    "auto.create.topics.enable": ["false"],
    "cordoned.log.dirs": ["/x", "*"],
    "config.providers": ["x"],
    "follower.fetch.last.tiered.offset.enable": ["true"],
    "group.coordinator.threads": ["3"],
    "group.consumer.assignment.interval.ms": ["-1", "5"],
    "foo.bar": ["1"],
    "": [""],
}
LIST_KEYS = [
    "log.cleanup.policy",
    "num.io.threads",
    "max.connections",
    "node.id",
    "foo",
    "leader.replication.throttled.rate",
]


def ask(
    brokers: Brokers, kind: int, name: str, *changes: tuple[str, int, str | None], validate_only: bool = True
) -> None:
    brokers.same("incremental_alter_configs", 1, resources=[change(kind, name, *changes)], validate_only=validate_only)


@pytest.mark.parametrize("name", [ALL_BROKERS, THIS_BROKER], ids=["all", "one"])
@pytest.mark.parametrize("key", BROKER_VALUES)
def test_what_a_broker_can_have(brokers: Brokers, key: str, name: str) -> None:
    for value in BROKER_VALUES[key]:
        ask(brokers, BROKER, name, (key, SET, value))
        entries = [{"name": key, "value": value}]
        if name:  # of all brokers the minimum of in-sync replicas cannot be taken back
            resources = [{"resource_type": BROKER, "resource_name": name, "configs": entries}]
            brokers.same("alter_configs", 2, resources=resources, validate_only=True)


@pytest.mark.parametrize("name", [ALL_BROKERS, THIS_BROKER], ids=["all", "one"])
@pytest.mark.parametrize("operation", [DELETE, APPEND, SUBTRACT, 4, -1])
@pytest.mark.parametrize("key", LIST_KEYS)
def test_ways_to_change_a_broker(brokers: Brokers, key: str, operation: int, name: str) -> None:
    for value in (None,) if operation == DELETE else ("compact", "delete", "foo", ""):
        ask(brokers, BROKER, name, (key, operation, value))


@pytest.mark.parametrize(
    "name", ["2", "x", "-1", "01", " 1", "+1", "1.0", "99999999999", "1_0", "0_1", "\u0661", "\uff11", "1\x00"]
)
def test_another_broker_than_the_one_asked(brokers: Brokers, name: str) -> None:
    ask(brokers, BROKER, name, ("max.connections", SET, "5"))
    entries = [{"name": "max.connections", "value": "5"}]
    resources = [{"resource_type": BROKER, "resource_name": name, "configs": entries}]
    brokers.same("alter_configs", 2, resources=resources, validate_only=True)
    described(brokers, BROKER, name, "max.connections")


# What Java takes for a number, and what Python would.
NUMBERS: dict[tuple[int, str], list[str]] = {
    (BROKER, "max.connections"): [
        "1_0",
        "\u0663",
        "\uff13",
        "\U0001d7d3",
        "5\u00a0",
        "\u20035",
        "\x015\x1f",
        "+5",
        "-+5",
        "--5",
        "0005",
        "5 5",
        "1e3",
        "5.0",
        "0x5",
        "2147483647",
        "2147483648",
        "5L",
        "+",
        "\u0660" * 12 + "7",
    ],
    (BROKER, "log.cleaner.min.cleanable.ratio"): [
        "nan",
        "NaN",
        "-NaN",
        "+NaN",
        "inf",
        "Infinity",
        "-Infinity",
        "infinity",
        "0x1p-2",
        "0x.8p0",
        "0x1",
        "0.5d",
        "0.5F",
        ".5",
        "1.",
        ".",
        "1_0.0",
        "\u0660.5",
        "1e-1",
        "5E-1",
        "1e400",
        "-1e-9",
        "1e10",
        "12345678",
        "1234567.5",
        "-0.0004",
        "-1e-400",
        "0.5 d",
        "\u20030.5",
        "\x000.5",
        "1e",
        "e1",
        "0.5dd",
        "NaNd",
        "1,5",
    ],
    (BROKER, "log.cleanup.policy"): [
        "compact\u00a0,delete",
        "compact ,\t delete",
        "compact\x01,delete",
        "\x01compact",
        "compact,",
    ],
    (TOPIC, "min.cleanable.dirty.ratio"): ["nan", "NaN", "0.25f", "0x1p-1", "1_0e-2", "1e22"],
    (TOPIC, "retention.ms"): ["1_0", "\u0661\u0662", "9223372036854775807", "9223372036854775808", " 5\t", "\u00a05"],
    (TOPIC, "preallocate"): ["TRUE ", "\u00a0true", "tr\u00fce", "\x1ftrue"],
    (TOPIC, "leader.replication.throttled.replicas"): ["\u0661:1", "1_0:1", "1:+1", "01:001"],
    (METRICS, "interval.ms"): ["1_000", "\u0661\u0660\u0660\u0660", "1000\u00a0", "\u0661", "99999999999"],
    (GROUP, "consumer.session.timeout.ms"): ["4500_0", "\uff14\uff15\uff10\uff10\uff10"],
}


@pytest.mark.parametrize(("kind", "key"), NUMBERS)
def test_numbers_are_what_java_takes_for_some(brokers: Brokers, topic_in_both: NewTopic, kind: int, key: str) -> None:
    name = {BROKER: THIS_BROKER, TOPIC: topic_in_both(), METRICS: "numbers", GROUP: "numbers"}[kind]
    for value in NUMBERS[kind, key]:
        ask(brokers, kind, name, (key, SET, value))


def test_numbers_in_odd_forms_are_in_force(brokers: Brokers, restored: Callable[..., None]) -> None:
    topic = "numbers-in-force"
    odd = {
        "min.cleanable.dirty.ratio": "0x1p-2d",
        "retention.ms": "\u0661\u0662\x01",
        "cleanup.policy": "compact ,\x0bdelete",
        "unclean.leader.election.enable": " TRUE ",
        "min.insync.replicas": "\uff11",
    }
    configs = [{"name": key, "value": value} for key, value in odd.items()]
    wanted = {"name": topic, "num_partitions": 1, "replication_factor": 1, "configs": configs}
    brokers.ignored = frozenset({"topic_id"})
    brokers.same("create_topics", 7, topics=[wanted], timeout=10_000, validate_only=False)
    at_last(lambda: described(brokers, TOPIC, topic, *odd))


def at_last(compare: Callable[[], None]) -> None:
    """Kafka's broker hears of a change some time after its controller has answered."""
    deadline = time.monotonic() + 60
    while True:
        try:
            return compare()
        except AssertionError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def described(brokers: Brokers, kind: int, name: str, *keys: str) -> None:
    resource = {"resource_type": kind, "resource_name": name, "configuration_keys": list(keys) or None}
    brokers.same("describe_configs", 4, resources=[resource], include_synonyms=True)


@pytest.fixture
def restored(brokers: Brokers) -> Iterator[Callable[..., None]]:
    """Changes in both for real; taken back at the end."""
    done: list[tuple[int, str, str]] = []

    def alter(kind: int, name: str, key: str, value: str | None) -> None:
        done.append((kind, name, key))
        wanted = (key, DELETE if value is None else SET, value)
        at_last(lambda: ask(brokers, kind, name, wanted, validate_only=False))

    yield alter
    for kind, name, key in dict.fromkeys(done):
        back = [change(kind, name, (key, DELETE, None))]
        brokers.get("incremental_alter_configs", 1, resources=back, validate_only=False)


STACKED = {
    "log.retention.ms": ("5000", "6000", "retention.ms"),
    "log.roll.ms": ("5000", "6000", "segment.ms"),
    "log.flush.interval.ms": ("5000", "6000", "flush.ms"),
    "message.max.bytes": ("5000", "6000", "max.message.bytes"),
    "log.cleanup.policy": ("compact", "compact,delete", "cleanup.policy"),
    "compression.type": ("zstd", "lz4", "compression.type"),
    "log.preallocate": ("true", "FALSE", "preallocate"),
    "log.cleaner.min.cleanable.ratio": ("0.25", "0.75", "min.cleanable.dirty.ratio"),
    "log.segment.bytes": (" 2000000 ", "3000000", "segment.bytes"),
}


@pytest.mark.parametrize("key", STACKED)
def test_layers_of_a_config(brokers: Brokers, topic_in_both: NewTopic, restored: Callable[..., None], key: str) -> None:
    of_all, of_one, of_topic = STACKED[key]
    topic = topic_in_both()

    def compare() -> None:
        described(brokers, BROKER, THIS_BROKER, key)
        described(brokers, TOPIC, topic, of_topic)

    for name, value in ((ALL_BROKERS, of_all), (THIS_BROKER, of_one), (ALL_BROKERS, None), (THIS_BROKER, None)):
        restored(BROKER, name, key, value)
        at_last(compare)
    restored(BROKER, ALL_BROKERS, key, of_all)
    restored(TOPIC, topic, of_topic, of_one)
    at_last(compare)


def test_a_new_topic_is_told_what_it_falls_back_to(brokers: Brokers, restored: Callable[..., None]) -> None:
    set_to = {"log.retention.ms": "5000", "message.max.bytes": "6000", "log.cleanup.policy": "compact,delete"}
    for key, value in set_to.items():
        restored(BROKER, ALL_BROKERS, key, value)
    for key, value in (("log.segment.bytes", " 2000000 "), ("log.retention.ms", "7000"), ("log.preallocate", "TRUE")):
        restored(BROKER, THIS_BROKER, key, value)
    configs = [{"name": "message.timestamp.type", "value": "LogAppendTime"}, {"name": "segment.ms", "value": " 7 "}]
    topic = {"name": "falls-back", "num_partitions": 1, "replication_factor": 1, "configs": configs}
    brokers.ignored = frozenset({"topic_id"})

    def compare() -> None:
        brokers.same("create_topics", 7, topics=[topic], timeout=10_000, validate_only=True)

    at_last(compare)


def test_what_is_set_for_all_brokers_is_described(brokers: Brokers, restored: Callable[..., None]) -> None:
    restored(BROKER, ALL_BROKERS, "max.connections", "5000")
    restored(BROKER, ALL_BROKERS, "leader.replication.throttled.rate", "70")
    restored(BROKER, THIS_BROKER, "follower.replication.throttled.rate", "70")
    restored(BROKER, ALL_BROKERS, "min.insync.replicas", "1")
    at_last(lambda: described(brokers, BROKER, ALL_BROKERS))
    keys = ["max.connections", "leader.replication.throttled.rate", "follower.replication.throttled.rate"]
    at_last(lambda: described(brokers, BROKER, THIS_BROKER, *keys))
    ask(brokers, BROKER, ALL_BROKERS, ("min.insync.replicas", DELETE, None))
    ask(brokers, BROKER, THIS_BROKER, ("min.insync.replicas", SET, "2"))


def test_keys_that_no_table_knows(brokers: Brokers, restored: Callable[..., None]) -> None:
    keys = ["foo.bar", "listener.name.plaintext.max.connections", "listener.name.plaintext.foo", "listener.name.x.foo"]
    for key in keys:
        restored(BROKER, THIS_BROKER, key, "5")
    for key in keys[:2]:
        restored(BROKER, ALL_BROKERS, key, "6")
    at_last(lambda: described(brokers, BROKER, THIS_BROKER, *keys))
    at_last(lambda: described(brokers, BROKER, ALL_BROKERS, *keys))
    restored(BROKER, THIS_BROKER, keys[0], None)
    restored(BROKER, THIS_BROKER, keys[1], None)
    at_last(lambda: described(brokers, BROKER, THIS_BROKER, *keys))


def test_secrets_that_are_set_are_not_shown(brokers: Brokers, restored: Callable[..., None]) -> None:
    keys = ["listener.name.plaintext.ssl.key.password", "listener.name.plaintext.ssl.keystore.type", "sasl.jaas.config"]
    for key in keys:
        restored(BROKER, THIS_BROKER, key, "PKCS12")
    at_last(lambda: described(brokers, BROKER, THIS_BROKER, *keys))


def test_threads_grow_from_what_they_are(brokers: Brokers, restored: Callable[..., None]) -> None:
    for threads in ("16", "32"):
        restored(BROKER, THIS_BROKER, "num.io.threads", threads)
    for threads in ("8", "15", "16", "65"):
        at_last(lambda threads=threads: ask(brokers, BROKER, THIS_BROKER, ("num.io.threads", SET, threads)))  # type: ignore[misc]
    for threads in ("16", "8"):
        restored(BROKER, THIS_BROKER, "num.io.threads", threads)


# ------------------------------------------------------------------------------------------------------------- loggers


@pytest.mark.parametrize("value", ["DEBUG", "WARN", "FATAL", "TRACE", "debug", "FOO", "", "INFO ", "OFF", "ALL"])
def test_levels(brokers: Brokers, value: str) -> None:
    ask(brokers, LOGGER, "1", ("root", SET, value))


@pytest.mark.parametrize("node", ["2", "", "x", "01", "1_0", "\u0661", " 1", "99999999999"])
def test_loggers_of_another_node(brokers: Brokers, node: str) -> None:
    ask(brokers, LOGGER, node, ("root", SET, "INFO"))
    described(brokers, LOGGER, node, "root") if node not in ("01", "\u0661") else None


@pytest.mark.parametrize(
    "changes",
    [
        [("root", DELETE, "DEBUG")],
        [("root", APPEND, "DEBUG")],
        [("root", SUBTRACT, "DEBUG")],
        [("no.such", SET, "DEBUG")],
        [("no.such", DELETE, None)],
        [("", SET, "INFO")],
        [("root", SET, None)],
        [("root", SET, "DEBUG"), ("root", SET, "INFO")],
        [("root", SET, "INFO"), ("no.such", SET, "INFO")],
        [],
    ],
    ids=str,
)
def test_loggers_in_odd_ways(brokers: Brokers, changes: list[tuple[str, int, str | None]]) -> None:
    ask(brokers, LOGGER, "1", *changes)


def test_the_root_logger(brokers: Brokers) -> None:
    ask(brokers, LOGGER, "1", ("root", SET, "ERROR"), validate_only=False)
    described(brokers, LOGGER, "1", "root")
    ask(brokers, LOGGER, "1", ("root", SET, "INFO"), validate_only=False)
    described(brokers, LOGGER, "1", "root")


# ------------------------------------------------------------------------------------------- groups and subscriptions

GROUP_VALUES: dict[str, list[str]] = {
    "consumer.session.timeout.ms": ["0", "1", "44999", "45000", "50000", "60001", "x", "1e3"],
    "consumer.heartbeat.interval.ms": ["0", "1", "4999", "5000", "15000", "15001"],
    "consumer.assignment.interval.ms": ["-1", "0", "15000", "15001"],
    "share.session.timeout.ms": ["0", "1", "45000", "46000", "60001"],
    "share.heartbeat.interval.ms": ["0", "1", "5000", "15001"],
    "share.assignment.interval.ms": ["-1", "0", "15001"],
    "share.record.lock.duration.ms": ["1", "1000", "14999", "15000", "60001"],
    "share.delivery.count.limit": ["0", "1", "2", "10", "11"],
    "share.partition.max.record.locks": ["0", "99", "100", "10001"],
    "share.auto.offset.reset": ["foo", "earliest", "LATEST", "by_duration:PT1S", "by_duration:x", "by_duration:-PT1S"],
    "share.isolation.level": ["foo", "read_committed", "READ_COMMITTED"],
    "share.renew.acknowledge.enable": ["x", "false"],
    "streams.session.timeout.ms": ["1", "45000", "70000"],
    "streams.heartbeat.interval.ms": ["1", "5000", "70000"],
    "streams.assignment.interval.ms": ["-1", "5"],
    "streams.num.standby.replicas": ["-1", "2", "3"],
    "streams.initial.rebalance.delay.ms": ["-1", "5"],
    "foo": ["1"],
    "": [""],
}
METRICS_VALUES: dict[str, list[str]] = {
    "interval.ms": ["5", "100", "x", "3600000", "3600001", "99999999999", ""],
    "match": ["a", "client_id=x", "client_id=[", "client_id=x,client_id=y", "foo=x", "client_id=", "client_id=a=b", ""],
    "metrics": ["", "*", "a,a", "a,,b", "org.apache.kafka."],
    "foo": ["1"],
    "": ["x"],
}


@pytest.mark.parametrize("key", GROUP_VALUES)
def test_what_a_group_can_have(brokers: Brokers, key: str) -> None:
    for value in GROUP_VALUES[key]:
        for name in ("g", ""):
            ask(brokers, GROUP, name, (key, SET, value))


@pytest.mark.parametrize("key", METRICS_VALUES)
def test_what_a_metrics_subscription_can_have(brokers: Brokers, key: str) -> None:
    for value in METRICS_VALUES[key]:
        for name in ("s", ""):
            ask(brokers, METRICS, name, (key, SET, value))


@pytest.mark.parametrize("kind", [GROUP, METRICS])
@pytest.mark.parametrize("name", ["n", ""])
def test_other_ways_to_change_groups_and_subscriptions(brokers: Brokers, kind: int, name: str) -> None:
    key, value = ("consumer.session.timeout.ms", "50000") if kind == GROUP else ("interval.ms", "500")
    for operation in (DELETE, APPEND, SUBTRACT):
        ask(brokers, kind, name, (key, operation, value))
        ask(brokers, kind, name, ("metrics", operation, "a"))
    ask(brokers, kind, name)
    for entries in (
        [],
        [{"name": key, "value": value}],
        [{"name": key, "value": "1"}],
        [{"name": "foo", "value": "1"}],
    ):
        resources = [{"resource_type": kind, "resource_name": name, "configs": entries}]
        brokers.same("alter_configs", 2, resources=resources, validate_only=True)


def test_groups_and_subscriptions_are_described_and_listed(brokers: Brokers, restored: Callable[..., None]) -> None:
    def compare() -> None:
        described(brokers, GROUP, "listed")
        described(brokers, METRICS, "listed")
        for types in ([METRICS], [GROUP], [BROKER], [LOGGER], [BROKER, GROUP, GROUP]):
            brokers.same("list_config_resources", 1, resource_types=types)
        brokers.same("list_config_resources", 0)

    at_last(compare)
    restored(GROUP, "listed", "consumer.session.timeout.ms", "50000")
    restored(METRICS, "listed", "interval.ms", "500")
    restored(METRICS, "listed", "match", " client_id = x , client_software_name=y")
    at_last(compare)
    restored(GROUP, "listed", "consumer.session.timeout.ms", None)
    restored(METRICS, "listed", "interval.ms", None)
    at_last(compare)


@pytest.mark.parametrize("kind", [0, 1, 3, 64, -1])
def test_types_of_nothing_are_not_listed(brokers: Brokers, kind: int) -> None:
    brokers.same("list_config_resources", 1, resource_types=[kind])


def test_topics_are_listed(brokers: Brokers, topic_in_both: NewTopic) -> None:
    topic = topic_in_both()
    answers = brokers.get("list_config_resources", 1, resource_types=[TOPIC])
    for answer in answers:
        assert (topic, TOPIC) in {(each.resource_name, each.resource_type) for each in answer.config_resources}


# -------------------------------------------------------------------------------------------------------------- topics

TOPIC_VALUES: dict[str, list[str]] = {
    "retention.ms": ["-1", "-2", "0", "x", "", "9" * 30],
    "cleanup.policy": ["", "compact", "foo", "compact,compact", "delete,,compact", " compact", "COMPACT"],
    "min.compaction.lag.ms": ["9223372036854775807", "-1"],
    "max.compaction.lag.ms": ["0", "1"],
    "segment.bytes": ["5", "1048576"],
    "segment.ms": ["0", "1"],
    "segment.jitter.ms": ["-1", "0"],
    "remote.storage.enable": ["true", "false"],
    "remote.log.copy.disable": ["true"],
    "remote.log.delete.on.disable": ["true"],
    "local.retention.ms": ["-3", "-1", "99999999999999"],
    "local.retention.bytes": ["5"],
    "flush.messages": ["0", "1"],
    "flush.ms": ["-1", "0"],
    "internal.segment.bytes": ["5"],
    "min.insync.replicas": ["0", "9"],
    "compression.type": ["none", "gzip", "GZIP"],
    "message.timestamp.type": ["x", "LogAppendTime"],
    "message.format.version": ["3.0"],
    "max.message.bytes": ["-1", "0"],
    "leader.replication.throttled.replicas": ["*", "1", "0:1,0:1", "", "0:1,*", " 0:1"],
    "errors.deadletterqueue.topic.name": ["x"],
    "log.retention.ms": ["5"],
    "unclean.leader.election.enable": ["x", "True"],
    "foo": ["1"],
    "": [""],
}


@pytest.mark.parametrize("key", TOPIC_VALUES)
def test_what_a_topic_can_have(brokers: Brokers, topic_in_both: NewTopic, key: str) -> None:
    topic = topic_in_both()
    for value in TOPIC_VALUES[key]:
        ask(brokers, TOPIC, topic, (key, SET, value))
        ask(brokers, TOPIC, "nowhere", (key, SET, value))
