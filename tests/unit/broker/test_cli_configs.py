"""`tidelog configs`, and the rest of `tidelog topics`, against a real node: what is printed, changed, refused."""

from __future__ import annotations

import itertools
import json
import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tidelog import EmbeddedBroker
from tidelog.cli.main import main
from tidelog.client import sync
from tidelog.client.admin.configs import ConfigChange, ConfigResource
from tidelog.protocol.errors import KafkaError

Cli = Callable[..., tuple[int, str, str]]
_numbers = itertools.count(1)


@pytest.fixture(scope="module")
def bootstrap() -> Iterator[str]:
    with EmbeddedBroker() as broker:
        yield broker.bootstrap_servers


@pytest.fixture
def cli(bootstrap: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Cli:
    monkeypatch.setenv("TIDELOG_BOOTSTRAP_SERVER", bootstrap)

    def run(*words: str) -> tuple[int, str, str]:
        capfd.readouterr()
        status = main(list(words))
        return status, *capfd.readouterr()

    return run


@pytest.fixture
def topic(cli: Cli) -> str:
    name = f"topic-{next(_numbers)}"
    assert cli("topics", "create", name, "-c", "retention.ms=5000")[0] == 0
    return name


def described(cli: Cli, *words: str) -> dict[str, Any]:
    ((resource),) = json.loads(cli("configs", "describe", *words, "--json")[1])
    return {each["name"]: each for each in resource["configs"]}


def test_what_is_set_for_a_topic_and_what_it_falls_back_to(cli: Cli, topic: str) -> None:
    status, out, err = cli("configs", "describe", "topics", topic)
    assert (status, err) == (0, "")
    assert [line.split() for line in out.splitlines()] == [
        ["TOPIC", "CONFIG", "VALUE", "FROM"],
        [topic, "retention.ms", "5000", "topic"],
    ]
    nothing = cli("configs", "describe", "topics", topic, "--key", "segment.ms")
    assert nothing[::2] == (0, "nothing is set at run time; --all prints every value\n")
    everything = described(cli, "topics", topic, "--all")
    assert len(everything) > 25
    assert everything["segment.ms"]["source"] == "default"
    assert everything["retention.ms"]["synonyms"][0] == {"name": "retention.ms", "value": "5000", "source": "topic"}
    assert set(described(cli, "topics", topic, "--all", "-k", "segment.ms", "-k", "flush.ms")) == {
        "segment.ms",
        "flush.ms",
    }


def test_a_topic_is_altered_in_every_way(cli: Cli, topic: str) -> None:
    words = ("configs", "alter", "topics", topic)
    assert cli(*words, "--set", "segment.ms=9000", "--delete", "retention.ms", "--append", "cleanup.policy=compact")[
        :2
    ] == (0, f"Changed the configuration of topic '{topic}'.\n")
    assert {name: each["value"] for name, each in described(cli, "topics", topic).items()} == {
        "segment.ms": "9000",
        "cleanup.policy": "delete,compact",
    }
    cli(*words, "--subtract", "cleanup.policy=delete")
    assert described(cli, "topics", topic)["cleanup.policy"]["value"] == "compact"
    assert "Would change" in cli(*words, "--set", "segment.ms=1", "--dry-run")[1]
    assert described(cli, "topics", topic)["segment.ms"]["value"] == "9000"


def test_without_names_all_are_described(cli: Cli, topic: str) -> None:
    assert topic in cli("configs", "describe", "topics")[1]
    cli("configs", "alter", "groups", "billing", "--set", "consumer.session.timeout.ms=50000")
    cli("configs", "alter", "client-metrics", "slow", "--set", "interval.ms=500", "--set", "metrics=*")
    assert "billing  consumer.session.timeout.ms  50000  group" in cli("configs", "describe", "groups")[1]
    assert described(cli, "client-metrics")["interval.ms"]["source"] == "subscription"


def test_brokers_have_configs_of_their_own_and_of_all(cli: Cli) -> None:
    assert cli("configs", "alter", "brokers", "--default", "--set", "max.connections=500")[:2] == (
        0,
        "Changed the configuration of every broker.\n",
    )
    cli("configs", "alter", "brokers", "1", "--set", "max.connections=400")
    assert described(cli, "brokers", "--default")["max.connections"]["value"] == "500"
    own = described(cli, "brokers", "1")["max.connections"]
    assert (own["value"], own["source"]) == ("400", "broker")
    cli("configs", "alter", "brokers", "1", "--delete", "max.connections")
    assert described(cli, "brokers")["max.connections"]["source"] == "all brokers"
    cli("configs", "alter", "brokers", "--default", "--delete", "max.connections")
    assert "max.connections" not in described(cli, "brokers", "1")
    assert described(cli, "brokers", "1", "--all", "-k", "ssl.key.password")["ssl.key.password"]["sensitive"]


def test_the_refusal_of_one_change_does_not_end_the_others(cli: Cli, topic: str) -> None:
    words = ("configs", "alter", "topics", "nowhere", topic, "--set", "segment.ms=9000")
    for more in (), ("--json",):
        cli("configs", "alter", "topics", topic, "--delete", "segment.ms")
        status, out, err = cli(*words, *more)
        assert (status, err.count("\n"), "topic 'nowhere'" in err) == (1, 1, True)
        assert described(cli, "topics", topic)["segment.ms"]["value"] == "9000"
    assert [each["outcome"] for each in json.loads(out)] == ["failed", "changed"]
    status, out, err = cli("topics", "delete", "nowhere", topic, "--json")
    assert (status, err.count("\n")) == (1, 1)
    assert json.loads(out) == [{"name": "nowhere", "outcome": "failed"}, {"name": topic, "outcome": "deleted"}]


@pytest.mark.parametrize(
    ("words", "warning"),
    [
        (("brokers", "1", "--set", "log.retention.mss=5"), "'log.retention.mss' of brokers; did you mean log.retenti"),
        (("brokers", "--default", "--delete", "max.conections"), "'max.conections' of brokers; did you mean max.conn"),
        (("topics", "{topic}", "--set", "retention.hours=5"), "'retention.hours' of topics; did you mean retention"),
        (("groups", "g", "--set", "zzz=5"), "'zzz' of groups"),
    ],
)
def test_a_config_that_kafka_does_not_know_gets_a_warning_with_the_nearest(
    cli: Cli, topic: str, words: tuple[str, ...], warning: str
) -> None:
    _, _, err = cli("configs", "alter", *(word.format(topic=topic) for word in words), "--dry-run")
    assert f"tidelog: warning: Kafka knows no config {warning}" in err


def test_a_key_to_describe_that_kafka_does_not_know_gets_one_too(cli: Cli, topic: str) -> None:
    status, _, err = cli("configs", "describe", "topics", topic, "--key", "retentoin.ms", "--all")
    assert (status, err) == (
        0, "tidelog: warning: Kafka knows no config 'retentoin.ms' of topics; did you mean retention.ms?\n"
    )  # fmt: skip
    assert "warning" not in cli("configs", "describe", "topics", topic, "--key", "retention.ms", "--all")[2]


def test_a_config_that_kafka_knows_gets_none(cli: Cli, topic: str) -> None:
    plugin = ("brokers", "1", "--set", "listener.name.plaintext.max.connections=5")
    for words in (plugin, ("topics", topic, "--set", "retention.ms=5"), ("broker-loggers", "1", "--set", "root=INFO")):
        assert "warning" not in cli("configs", "alter", *words, "--dry-run")[2]


def test_changes_are_told_in_json(cli: Cli, topic: str) -> None:
    words = ("configs", "alter", "topics", topic, "--set", "segment.ms=9000", "--json")
    assert json.loads(cli(*words)[1]) == [{"type": "topic", "name": topic, "outcome": "changed"}]
    more = ("topics", "alter", topic, "--partitions", "2", "--config", "segment.ms=9001", "--json")
    assert json.loads(cli(*more)[1]) == {
        "name": topic,
        "partitions": 2,
        "configs": {"segment.ms": "9001"},
        "outcome": "changed",
    }
    missing = json.loads(cli("topics", "alter", "nowhere", "-p", "2", "--if-exists", "--json")[1])
    assert missing["outcome"] == "missing"


def test_a_loggers_level_is_changed(cli: Cli) -> None:
    name = "tidelog.tests.cli"
    logging.getLogger(name)
    assert cli("configs", "alter", "broker-loggers", "1", "--set", f"{name}=DEBUG")[0] == 0
    assert described(cli, "broker-loggers", "1")[name]["value"] == "DEBUG"
    assert cli("configs", "alter", "broker-loggers", "1", "--delete", name)[0] == 0
    assert logging.getLogger(name).level == logging.NOTSET


@pytest.mark.parametrize(
    ("words", "status", "told"),
    [
        (("alter", "topics", "TOPIC", "--set", "foo=1"), 1, "INVALID_CONFIG: configuration of topic 'TOPIC': Unknown"),
        (("alter", "topics", "nowhere", "--set", "retention.ms=1"), 1, "UNKNOWN_TOPIC_OR_PARTITION"),
        (("describe", "topics", "nowhere"), 1, "UNKNOWN_TOPIC_OR_PARTITION: configuration of topic 'nowhere'"),
        (("alter", "brokers", "1", "--set", "node.id=3"), 1, "Cannot update these configs dynamically: [node.id]"),
        (("alter", "topics", "TOPIC"), 2, "nothing to change"),
        (("alter", "topics", "--set", "a=1"), 2, "give the name of the resource to change"),
        (("alter", "brokers", "--set", "a=1"), 2, "or --default"),
        (("alter", "brokers", "one", "--set", "a=1"), 2, "a broker's name is its id"),
        (("describe", "topics", "--default"), 2, "--default is only for all brokers"),
        (("describe", "brokers", "1", "--default"), 2, "--default is only for all brokers"),
        (("describe", "colours"), 2, "'colours' is not one of"),
    ],
)
def test_what_cannot_be_is_said_in_one_line(
    cli: Cli, topic: str, words: tuple[str, ...], status: int, told: str
) -> None:
    found, out, err = cli("configs", *(word.replace("TOPIC", topic) for word in words))
    assert (found, out) == (status, "")
    assert told.replace("TOPIC'", f"{topic}'") in err


# -------------------------------------------------------------------------------------------------------------- topics


@pytest.mark.parametrize(
    "words",
    [
        ("describe", "brokers", "1", "7"),
        ("describe", "broker-loggers", "7"),
        ("alter", "brokers", "7", "--set", "max.connections=5"),
        ("alter", "broker-loggers", "7", "--set", "tidelog=DEBUG"),
    ],
)
def test_a_broker_that_is_not_there_is_named(cli: Cli, words: tuple[str, ...]) -> None:
    assert cli("configs", *words) == (1, "", "tidelog: BROKER_NOT_AVAILABLE: there is no broker 7\n")


def test_a_topic_is_created_where_one_wants_it(cli: Cli) -> None:
    created = json.loads(cli("topics", "create", "placed", "--assignment", "1,1,1", "--json")[1])
    assert (created["name"], created["outcome"], len(created["topic_id"])) == ("placed", "created", 22)
    (topic,) = json.loads(cli("topics", "describe", "placed", "--json")[1])
    assert [part["replicas"] for part in topic["partitions"]] == [[1], [1], [1]]
    assert json.loads(cli("topics", "create", "placed", "--if-not-exists", "--json")[1])["outcome"] == "exists"
    assert cli("topics", "alter", "placed", "-p", "4", "-a", "1")[1] == "Topic placed has 4 partitions.\n"


def test_a_topic_is_only_tried(cli: Cli, topic: str) -> None:
    assert cli("topics", "create", "tried", "--dry-run")[1] == "Would create topic tried.\n"
    assert cli("topics", "alter", topic, "-p", "3", "--dry-run")[1] == f"Topic {topic} would have 3 partitions.\n"
    assert "tried" not in cli("topics", "list")[1]
    assert cli("topics", "create", "tried", "-c", "foo=1", "--dry-run")[0] == 1
    (found,) = json.loads(cli("topics", "describe", topic, "--json")[1])
    assert len(found["partitions"]) == 1


def test_a_topic_that_is_not_there(cli: Cli, topic: str) -> None:
    assert cli("topics", "delete", "nowhere")[0] == cli("topics", "alter", "nowhere", "-p", "3")[0] == 1
    assert cli("topics", "alter", "nowhere", "-p", "3", "--if-exists")[0] == 0
    assert json.loads(cli("topics", "delete", "nowhere", topic, "--if-exists", "--json")[1]) == [
        {"name": "nowhere", "outcome": "not there"},
        {"name": topic, "outcome": "deleted"},
    ]


@pytest.mark.parametrize(
    "words",
    [
        ("create", "x", "-a", "1:a"),
        ("create", "x", "-a", "1", "-p", "2"),
        ("create", "x", "-a", "1", "-r", "2"),
        ("alter", "x", "-a", "1"),
    ],
)
def test_an_assignment_that_is_none_is_wrong_usage(cli: Cli, words: tuple[str, ...]) -> None:
    assert cli("topics", *words)[:2] == (2, "")


# -------------------------------------------------------------------------------------------------- the blocking client


def test_every_kind_of_resource_is_addressed_alike(bootstrap: str, topic: str) -> None:
    resource = ConfigResource("topic", topic)
    with sync.Admin(bootstrap_servers=bootstrap) as admin:
        assert resource in admin.list_config_resources(["topic"])
        assert ConfigResource("broker-logger", "1") in admin.list_config_resources()
        admin.alter_config_resources({resource: [ConfigChange("segment.ms", "77")]})
        found = admin.describe_config_resources([resource, ConfigResource("broker", "1")], documentation=True)
        assert found[resource]["segment.ms"].value == "77"
        assert found[resource]["segment.ms"].documentation
        assert found[ConfigResource("broker", "1")]["node.id"].value == "1"
        with pytest.raises(KafkaError, match="configuration of topic"):
            admin.alter_config_resources({resource: [ConfigChange("segment.ms", "x")]})
