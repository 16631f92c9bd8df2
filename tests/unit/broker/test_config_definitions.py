from __future__ import annotations

import pytest

from tests.unit.broker import configuration_page
from tidelog.broker.config.definition_types import (
    BOOLEAN,
    CLUSTER_WIDE,
    DOUBLE,
    INT,
    LIST,
    LONG,
    PER_BROKER,
    SHORT,
    STRING,
    parse_value,
)
from tidelog.broker.config.definitions import (
    BROKER,
    BROKER_SYNONYMS,
    CLIENT_METRICS,
    DYNAMIC_ONLY,
    GROUP,
    TOPIC,
    TOPIC_SYNONYMS,
    topic_config_problem,
    validate_topic_config,
)
from tidelog.broker.config.definitions_own import OWN
from tidelog.protocol.errors import ConfigError
from tidelog.storage.segments.log_config import LogConfig

TABLES = {**BROKER, **DYNAMIC_ONLY, **{f"topic {n}": d for n, d in TOPIC.items()}}
ALL = [*BROKER.values(), *TOPIC.values(), *GROUP.values(), *DYNAMIC_ONLY.values(), *CLIENT_METRICS.values()]


def test_the_tables_are_as_large_as_kafkas():
    # Kafka 4.3.1: KafkaConfig has 360 keys, LogConfig 34, GroupConfig 17; 102 keys may change at run time.
    assert (len(BROKER) - len(OWN), len(TOPIC), len(GROUP)) == (360, 34, 17)
    dynamic = [d for d in (BROKER | DYNAMIC_ONLY).values() if d.update_mode in (CLUSTER_WIDE, PER_BROKER)]
    assert len(dynamic) == 102


@pytest.mark.parametrize("definition", ALL, ids=lambda d: d.name)
def test_every_default_satisfies_its_own_rules_and_every_key_is_explained(definition):
    definition.parse(definition.default)
    assert definition.documentation.endswith(".")
    assert len(definition.documentation) <= 110
    assert definition.update_mode


def test_synonyms_are_keys_with_the_same_default():
    for name, synonyms in TOPIC_SYNONYMS.items():
        assert name in TOPIC
        for synonym, factor in synonyms:
            assert synonym in BROKER
            default = BROKER[synonym].default
            if default is not None and name != "segment.jitter.ms":
                own = TOPIC[name].default
                assert own is not None
                assert own == (default if factor == 1 else str(int(default) * factor))
    assert all(name in BROKER for name in BROKER_SYNONYMS)


def test_storages_own_defaults_are_the_tables():
    texts = {name: definition.default for name, definition in TOPIC.items() if definition.default is not None}
    assert LogConfig.from_topic_config(texts) == LogConfig()


@pytest.mark.parametrize(
    ("kind", "text", "value"),
    [
        (BOOLEAN, " True ", True),
        (BOOLEAN, "false", False),
        (INT, "-5", -5),
        (INT, " 7 ", 7),
        (SHORT, "32767", 32767),
        (LONG, "9223372036854775807", 2**63 - 1),
        (DOUBLE, "0.5", 0.5),
        (LIST, "a, b ,c", ["a", "b", "c"]),
        (LIST, "", []),
        (STRING, " x ", "x"),
    ],
)
def test_text_becomes_a_value_of_the_keys_type(kind, text, value):
    assert parse_value("k", kind, text) == value


@pytest.mark.parametrize(
    ("kind", "text", "reason"),
    [
        (BOOLEAN, "yes", "Expected value to be either true or false"),
        (INT, "1.5", "Not a number of type INT"),
        (INT, "2147483648", "Not a number of type INT"),
        (SHORT, "32768", "Not a number of type SHORT"),
        (LONG, "", "Not a number of type LONG"),
        (DOUBLE, "x", "Not a number of type DOUBLE"),
    ],
)
def test_other_text_is_refused_in_kafkas_words(kind, text, reason):
    with pytest.raises(ConfigError) as caught:
        parse_value("some.key", kind, text)
    assert str(caught.value) == f"Invalid value {text} for configuration some.key: {reason}"


@pytest.mark.parametrize(
    ("configs", "problem"),
    [
        ({"foo": "1"}, "Unknown topic config name: foo"),
        ({"retention.ms": "-5"}, "Invalid value -5 for configuration retention.ms: Value must be at least -1"),
        (
            {"cleanup.policy": "compact,never"},
            "Invalid value never for configuration cleanup.policy: String must be one of: compact, delete",
        ),
        (
            {"compression.type": "zip"},
            "Invalid value zip for configuration compression.type: "
            "String must be one of: uncompressed, zstd, lz4, snappy, gzip, producer",
        ),
        (
            {"min.cleanable.dirty.ratio": "2"},
            "Invalid value 2.0 for configuration min.cleanable.dirty.ratio: Value must be no more than 1",
        ),
        (
            {"compression.gzip.level": "12"},
            "Invalid value 12 for configuration compression.gzip.level: Value must be between 1 and 9 or equal to -1",
        ),
        (
            {"min.compaction.lag.ms": "10", "max.compaction.lag.ms": "5"},
            "conflict topic config setting min.compaction.lag.ms (10) > max.compaction.lag.ms (5)",
        ),
    ],
)
def test_topic_configs_are_refused_as_kafka_4_3_refuses_them(configs, problem):
    assert topic_config_problem(configs) == problem
    with pytest.raises(ConfigError):
        validate_topic_config(configs)


@pytest.mark.parametrize(
    "configs",
    [
        {},
        {"cleanup.policy": ""},
        {"cleanup.policy": "compact, delete"},
        {"cleanup.policy": "compact,compact"},
        {"leader.replication.throttled.replicas": "0:1,1:2"},
        {"leader.replication.throttled.replicas": "*"},
        {"compression.gzip.level": "-1"},
        {"internal.segment.bytes": "1000"},
    ],
)
def test_and_allowed_as_it_allows_them(configs):
    assert topic_config_problem(configs) is None


def test_a_rule_over_two_keys_takes_the_brokers_value_for_the_one_not_set():
    defaults = {"max.compaction.lag.ms": "5"}
    assert topic_config_problem({"min.compaction.lag.ms": "10"}, defaults) is not None
    assert topic_config_problem({"min.compaction.lag.ms": "10"}) is None


@pytest.mark.slow
def test_the_configuration_page_is_what_the_tables_and_the_code_say():
    page = configuration_page.PAGE.read_text(encoding="utf-8")
    assert page == configuration_page.render(), "run: python -m tests.unit.broker.configuration_page"


def test_the_configuration_page_names_every_key():
    page = configuration_page.PAGE.read_text(encoding="utf-8")
    hidden = {name for name, definition in BROKER.items() if definition.update_mode == "internal"}
    assert not [name for name in {*BROKER, *TOPIC, *GROUP} - hidden if f"`{name}`" not in page]
