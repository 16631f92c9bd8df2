from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.patience import PATIENCE_S
from tidelog.broker.apis.cluster_roles import at_controller
from tidelog.broker.config.definitions import BROKER
from tidelog.broker.config.dynamic_config import DynamicConfig
from tidelog.broker.config.node_config import REMOVED, Listener, NodeConfig, nearest_keys, own_name
from tidelog.broker.config.validation import check_values
from tidelog.broker.metadata_wiring import controller_endpoints
from tidelog.broker.network.request import RequestContext
from tidelog.protocol.errors import ConfigError
from tidelog.storage.segments.log_config import INDEX_INTERVAL_BYTES_MAX


def test_nothing_given_is_one_node_on_loopback():
    config = NodeConfig.load()
    assert config.node_id == 1
    assert config.is_broker
    assert config.is_controller
    assert config.is_alone
    assert config.listeners == [Listener("PLAINTEXT", "127.0.0.1", 9092, "PLAINTEXT")]
    assert config.advertised_listeners() == config.listeners
    assert [str(path) for path in config.log_dirs] == ["tidelog-data"]
    assert config["auto.create.topics.enable"] is True


def test_values_are_typed():
    config = NodeConfig.load(None, {"num.partitions": "4", "log.cleaner.min.cleanable.ratio": "0.2"})
    assert config["num.partitions"] == config.integer("num.partitions") == 4
    assert config.number("log.cleaner.min.cleanable.ratio") == 0.2
    assert config.flag("delete.topic.enable") is True
    assert config.items("log.dir") == ["./tidelog-data"]
    assert config.text("broker.rack") == ""
    assert config["broker.rack"] is None
    with pytest.raises(KeyError):
        config["no.such.key"]


def test_a_node_alone_keeps_one_replica_of_internal_topics_unless_told_otherwise():
    assert NodeConfig.load()["offsets.topic.replication.factor"] == 1
    assert NodeConfig.load(None, {"offsets.topic.replication.factor": "3"})["offsets.topic.replication.factor"] == 3
    voters = {"controller.quorum.voters": "1@a:1,2@b:1,3@c:1", "controller.listener.names": "CONTROLLER"}
    assert NodeConfig.load(None, voters)["offsets.topic.replication.factor"] == 3
    assert not NodeConfig.load(None, {"process.roles": "broker", "controller.quorum.voters": "9@h:1"}).is_alone


def test_the_command_line_wins_over_the_file(tmp_path):
    file = tmp_path / "node.yaml"
    file.write_text("num.partitions: 3\nauto.create.topics.enable: false\nlog:\n  dirs: [a, b]\n  retention.hours: 5\n")
    config = NodeConfig.load(file, {"num.partitions": "9"})
    assert config["num.partitions"] == 9
    assert config["auto.create.topics.enable"] is False
    assert [str(path) for path in config.log_dirs] == ["a", "b"]
    assert config.topic_defaults()["retention.ms"] == str(5 * 3_600_000)


def test_kafkas_own_properties_file_is_taken(tmp_path):
    file = tmp_path / "server.properties"
    file.write_text("# a comment\n\nnode.id=7\nlog.dirs = /x,/y\n")
    config = NodeConfig.load(file)
    assert config.node_id == 7
    assert len(config.log_dirs) == 2


def test_an_empty_file_is_the_defaults(tmp_path):
    file = tmp_path / "node.yaml"
    file.write_text("# nothing yet\n")
    assert NodeConfig.load(file).explicit == {}


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("n.yaml", "a: [1", "not valid YAML"),
        ("n.yaml", "- 1\n- 2\n", "expected `key: value` lines"),
        ("n.yaml", "nonsense: 1\n", "unknown configuration key 'nonsense'"),
        ("n.yaml", "num.partitions: 3\nnode.id: 1\nnum.partitions: 4\n", "num.partitions is there twice"),
        ("n.yaml", "num.partitions: !!bool x\n", "a value does not fit its tag"),
        ("n.yaml", "log:\n  dirs: a\nlog.dirs: b\n", "log.dirs is there twice"),
        ("n.properties", "node.id\n", "is not key=value"),
    ],
)
def test_a_bad_file_is_one_clear_line(tmp_path, name, content, message):
    file = tmp_path / name
    file.write_text(content)
    with pytest.raises(ConfigError) as caught:
        NodeConfig.load(file)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("written", "value"),
    [("1.10", "1.10"), ("012", "012"), ("1:30", "1:30"), ("2026-01-01", "2026-01-01"), ("NO", "NO"), ("a", "a")],
)
def test_yaml_does_not_change_a_value(tmp_path, written, value):
    """YAML 1.1 has octal and sexagesimal numbers, and a rack 1.10 was told from 1.1 by nobody."""
    file = tmp_path / "node.yaml"
    file.write_text(f"broker.rack: {written}\nlog.dirs: [{written}, {written}0]\n")
    config = NodeConfig.load(file)
    assert config.text("broker.rack") == value
    assert list(map(str, config.log_dirs)) == [value, value + "0"]


def test_yaml_has_its_own_words_for_true_false_and_nothing(tmp_path):
    file = tmp_path / "node.yaml"
    file.write_text(
        "auto.create.topics.enable: no\ndelete.topic.enable: Yes\nbroker.rack: ~\nlog.dirs: null\nnode.id: 7\n"
    )
    with pytest.raises(ConfigError, match=r"^log\.dirs is empty"):
        NodeConfig.load(file)
    config = NodeConfig.load(file, {"log.dirs": "a"})
    assert (config.flag("auto.create.topics.enable"), config.flag("delete.topic.enable")) == (False, True)
    assert (config.text("broker.rack"), config.node_id) == ("", 7)


@pytest.mark.parametrize(
    "content",
    [b"# caf\xe9\nbroker.rack=caf\xe9\n", "broker.rack=caf\u00e9\n".encode(), b"\xef\xbb\xbfbroker.rack=caf\\u00e9\n"],
)
def test_a_properties_file_is_latin_1_as_in_java_where_it_is_not_utf_8(tmp_path, content):
    file = tmp_path / "server.properties"
    file.write_bytes(content)
    assert NodeConfig.load(file).text("broker.rack") == "caf\u00e9"


def test_a_missing_file_is_one_clear_line(tmp_path):
    with pytest.raises(ConfigError, match=r"cannot read .*No such file"):
        NodeConfig.load(tmp_path / "none.yaml")


@pytest.mark.parametrize(
    ("wrong", "meant"),
    [
        ("num.partitons", "num.partitions"),
        ("num_partitions", "num.partitions"),
        ("Log.Dirs", "log.dirs"),
        ("retention.ms", "log.retention.ms"),
        ("advertised.listener", "advertised.listeners"),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest_known(wrong, meant):
    assert meant in nearest_keys(wrong)
    with pytest.raises(ConfigError, match=rf"unknown configuration key '{wrong}'; did you mean .*{meant}"):
        NodeConfig.load(None, {wrong: "1"})


def test_a_file_of_an_older_kafka_is_refused_in_one_line_that_says_what_to_do_with_each_removed_key(tmp_path):
    file = tmp_path / "server.properties"
    file.write_text(
        "broker.id=0\nport=9092\nzookeeper.connect=z:2181\nzookeeper.session.timeout.ms=6000\n"
        "control.plane.listener.name=C\nnum.partitons=3\n"
    )
    with pytest.raises(ConfigError) as caught:
        NodeConfig.load(file)
    assert str(caught.value).split("; unknown ") == [
        "unknown configuration key 'port' (Kafka has removed it: set listeners)",
        "configuration key 'zookeeper.connect' (Kafka has removed it: leave it out)",
        "configuration key 'zookeeper.session.timeout.ms' (Kafka has removed it: leave it out)",
        "configuration key 'control.plane.listener.name' (Kafka has removed it: leave it out)",
        "configuration key 'num.partitons'; did you mean num.partitions?",
    ]


@pytest.mark.parametrize("key", ["super.users", "allow.everyone.if.no.acl.found"])
def test_a_key_of_the_authorizer_is_refused_with_what_it_promises(key: str) -> None:
    with pytest.raises(ConfigError, match=r"of Kafka's authorizer: there is no authorization yet, .* would be open"):
        NodeConfig({"node.id": "1", key: "User:ANONYMOUS"})


def test_no_removed_key_is_known_and_each_successor_is():
    assert not [name for name in REMOVED if name in BROKER]
    assert {successor for successor in REMOVED.values() if successor} <= BROKER.keys()


def test_a_key_like_nothing_known_has_no_suggestion():
    with pytest.raises(ConfigError) as caught:
        NodeConfig.load(None, {"zzz": "1"})
    assert str(caught.value) == "unknown configuration key 'zzz'"


def test_keys_of_listeners_and_plugins_have_free_names():
    config = NodeConfig.load(None, {"listener.name.internal.ssl.keystore.type": "PEM", "rsm.config.x": "1"})
    assert config.explicit["rsm.config.x"] == "1"


def test_a_key_only_for_run_time_is_refused():
    with pytest.raises(ConfigError, match="running cluster"):
        NodeConfig.load(None, {"leader.replication.throttled.rate": "1"})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"listeners": "127.0.0.1:9092"}, "not an address of the form NAME://host:port"),
        ({"listeners": "PLAINTEXT://h:99999"}, "not an address"),
        ({"listeners": ""}, "must name at least one address"),
        ({"advertised.listeners": ""}, "advertised.listeners is empty"),
        ({"log.dirs": ""}, "log.dirs is empty"),
        ({"log.dirs": " ", "log.dir": "here"}, "log.dirs is empty"),
        ({"log.dir": ""}, "log.dir is empty"),
        ({"listeners": "MINE://h:1"}, "no security protocol for listener MINE"),
        ({"listeners": "PLAINTEXT://h:1,PLAINTEXT://h:2"}, "different name"),
        ({"listeners": "PLAINTEXT://h:1,SSL://h:1"}, "different port"),
        ({"listeners": "PLAINTEXT://0.0.0.0:9092"}, "cannot connect to 0.0.0.0"),
        ({"advertised.listeners": "PLAINTEXT://0.0.0.0:9092"}, "cannot connect to 0.0.0.0"),
        ({"advertised.listeners": "SSL://h:9092"}, "advertised.listeners names SSL"),
        ({"process.roles": ""}, "process.roles"),
        ({"process.roles": "zookeeper"}, "String must be one of: broker, controller"),
        ({"node.id": "-1"}, "Value must be at least 0"),
        ({"log.dirs": os.fsdecode(b"/srv/d\xe2t\xe4")}, "log.dirs is not UTF-8: '/srv/d\\udce2t\\udce4'"),
        ({"listeners": "PLAINTEXT://my host:9092"}, "'PLAINTEXT://my host:9092' is not an address"),
        ({"advertised.listeners": "PLAINTEXT://h\u00f4st:9092"}, "is not an address"),
        ({"offsets.topic.segment.bytes": "1000"}, "offsets.topic.segment.bytes: Invalid value 1000"),
        ({"transaction.state.log.segment.bytes": "1000"}, "transaction.state.log.segment.bytes: Invalid value 1000"),
        (
            {"controller.quorum.voters": "2@a:1,3@b:1", "controller.listener.names": "CONTROLLER"},
            "not among controller.quorum.voters",
        ),
        (
            {"controller.quorum.voters": "a:1", "controller.listener.names": "CONTROLLER"},
            "controller.quorum.voters: 'a:1' is not of the form ID@host:port",
        ),
        (
            {"process.roles": "broker"},
            "controller.quorum.bootstrap.servers, or controller.quorum.voters, must say where",
        ),
        ({"controller.quorum.voters": "2@a:1"}, "node.id 1 has the controller role but is not among"),
        (
            {"controller.quorum.voters": "1@a:1,2@b:1", "process.roles": "broker"},
            "node.id 1 is among controller.quorum.voters (1, 2) but has no controller role",
        ),
        ({"node.id": "1", "broker.id": "2"}, "node.id is 1 and broker.id is 2"),
    ],
)
def test_a_configuration_that_cannot_work_is_one_clear_line(settings, message):
    with pytest.raises(ConfigError) as caught:
        NodeConfig.load(None, settings)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("log.retention.ms", "0", "log.retention.ms must be unlimited (-1) or"),
        ("log.retention.hours", "0", "log.retention.ms must be unlimited (-1) or"),
        ("log.roll.ms", "0", "log.roll.ms must be greater than or equal to 1"),
        ("log.cleaner.threads", "0", "Log cleaner threads should be at least 1"),
        ("log.cleaner.dedupe.buffer.size", "1000", "at least 1MB per cleaner thread"),
        ("max.connections.per.ip", "0", "can be set to zero only if"),
        ("cordoned.log.dirs", "/x", "Missing entries : /x"),
    ],
)
def test_a_value_that_kafka_refuses_at_a_start_is_refused(key: str, value: str, message: str):
    with pytest.raises(ConfigError) as caught:
        check_values(DynamicConfig(NodeConfig.load(None, {key: value})))
    assert message in str(caught.value)
    assert not str(caught.value).startswith("requirement")
    check_values(DynamicConfig(NodeConfig.load(None, {"log.retention.ms": "-1", "log.retention.hours": "0"})))


@pytest.mark.parametrize("value", ["", "RackAwareReplicaSelector", "org.example.NearestReplicaSelector"])
def test_a_selector_of_replicas_is_one_of_kafkas(value: str):
    """Any text made consumers read from followers."""
    with pytest.raises(ConfigError, match=r"replica\.selector\.class: String must be one of: .*RackAware"):
        NodeConfig.load(None, {"replica.selector.class": value})


def test_listeners_with_names_of_their_own():
    config = NodeConfig.load(
        None,
        {
            "listeners": "INSIDE://:9093,outside://[::1]:0",
            "listener.security.protocol.map": "INSIDE:PLAINTEXT,OUTSIDE:SASL_SSL",
            "advertised.listeners": "INSIDE://broker1:9093,OUTSIDE://example.org:0",
        },
    )
    assert config.listeners == [
        Listener("INSIDE", "", 9093, "PLAINTEXT"),
        Listener("OUTSIDE", "::1", 0, "SASL_SSL"),
    ]
    advertised = config.advertised_listeners({"OUTSIDE": 4711})
    assert [(one.host, one.port) for one in advertised] == [("broker1", 9093), ("example.org", 4711)]


def test_a_port_chosen_by_the_system_is_advertised_as_bound():
    config = NodeConfig.load(None, {"listeners": "PLAINTEXT://127.0.0.1:0"})
    assert config.advertised_listeners({"PLAINTEXT": 4711})[0].port == 4711


def test_the_controllers_listener_is_not_for_clients():
    config = NodeConfig.load(
        None,
        {"listeners": "PLAINTEXT://h:1,CONTROLLER://h:2", "controller.listener.names": "CONTROLLER"},
    )
    assert [one.name for one in config.advertised_listeners()] == ["PLAINTEXT"]


def test_the_controllers_listener_is_not_for_clients_in_whatever_case_it_is_named():
    config = NodeConfig.load(
        None, {"listeners": "PLAINTEXT://h:1,controller://h:2", "controller.listener.names": "controller"}
    )
    assert [listener.name for listener in config.advertised_listeners()] == ["PLAINTEXT"]
    at_controllers = RequestContext(0, 0, 0, None, "h", "CONTROLLER")
    assert at_controller(cast(Any, SimpleNamespace(config=config)), at_controllers)


@pytest.mark.parametrize(
    ("advertised", "found"),
    [
        ("CONTROLLER://broker-1:9093,PLAINTEXT://broker-1:9092", ("broker-1", 9093)),
        ("PLAINTEXT://broker-1:9092", (own_name(), 4711)),
    ],
)
def test_a_controller_is_reached_where_kafkas_would_be(advertised: str, found: tuple[str, int]):
    config = NodeConfig.load(
        None,
        {
            "listeners": "PLAINTEXT://0.0.0.0:9092,CONTROLLER://0.0.0.0:0",
            "advertised.listeners": advertised,
            "controller.listener.names": "CONTROLLER",
            "controller.quorum.bootstrap.servers": "broker-1:9093",
        },
    )
    assert [(one.name, one.host) for one in config.advertised_listeners()] == [("PLAINTEXT", "broker-1")]
    assert [(one.host, one.port) for one in controller_endpoints(config, {"CONTROLLER": 4711})] == [found]


def test_a_controller_that_is_a_voter_for_good_is_reached_where_the_voters_say():
    config = NodeConfig.load(
        None,
        {
            "listeners": "PLAINTEXT://:9092,CONTROLLER://:9093",
            "controller.listener.names": "CONTROLLER",
            "controller.quorum.voters": "1@host1:9093",
        },
    )
    assert [(one.host, one.port) for one in controller_endpoints(config, {})] == [("host1", 9093)]


def test_a_voter_whose_controller_listener_is_advertised_is_reached_there_as_kafkas_is():
    config = NodeConfig.load(
        None,
        {
            "listeners": "PLAINTEXT://:9092,CONTROLLER://:9093",
            "advertised.listeners": "PLAINTEXT://outside:9092,CONTROLLER://outside:19093",
            "controller.listener.names": "CONTROLLER",
            "controller.quorum.voters": "1@host1:9093",
        },
    )
    assert [(one.host, one.port) for one in controller_endpoints(config, {})] == [("outside", 19093)]


def test_node_id_has_an_older_name():
    assert NodeConfig.load(None, {"broker.id": "5"}).node_id == 5
    assert NodeConfig.load(None, {"node.id": "5"})["broker.id"] == 5


def test_what_a_topic_gets_comes_from_the_strongest_layer():
    config = NodeConfig.load(None, {"log.retention.hours": "1", "log.segment.bytes": "2000000"})
    assert config.topic_default("retention.ms") == "3600000"
    assert config.topic_default("segment.bytes") == "2000000"
    assert config.topic_default("flush.ms") == str(2**63 - 1)
    own, cluster = {"log.retention.minutes": "2"}, {"log.retention.ms": "7"}
    assert config.topic_default("retention.ms", [{}, cluster]) == "7"
    assert config.topic_default("retention.ms", [own, cluster]) == "120000"
    assert config.topic_default("retention.ms", [{"log.retention.minutes": "-1"}]) == "-1"


def test_a_topics_own_configs_win_in_storage():
    config = NodeConfig.load(None, {"log.segment.bytes": "2000000"})
    storage = config.log_config({"retention.ms": "5"}, [{"log.index.interval.bytes": "11"}])
    assert (storage.segment_bytes, storage.retention_ms, storage.index_interval_bytes) == (2_000_000, 5, 11)
    sparse = config.log_config({"index.interval.bytes": "2147483647"})
    assert sparse.index_interval_bytes == INDEX_INTERVAL_BYTES_MAX, "nobody walks over a whole segment for an offset"


def test_importing_it_is_cheap():
    # On the path of every start: nothing heavy may come along.
    code = "import sys, tidelog.broker.config.node_config; print(*sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=PATIENCE_S
    ).stdout.split()
    assert not {"yaml", "click", "asyncio", "socket", "rich", "difflib"} & set(loaded)
