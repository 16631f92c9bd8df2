"""Keys of Kafka's that stand for what is not served: refused where they promise security, else taken with a warning."""

from __future__ import annotations

import pytest

from tests.unit.broker import configuration_page
from tidelog.broker.config.definitions import BROKER
from tidelog.broker.config.node_config import NodeConfig
from tidelog.broker.config.unserved import check_served, has_effect, keys_without_effect
from tidelog.protocol.errors import ConfigError

CLUSTER = {
    "process.roles": "broker",
    "controller.quorum.voters": "7@127.0.0.1:1",
    "controller.listener.names": "CONTROLLER",
}


def refusal(**given: str) -> str:
    config = NodeConfig.load(None, {name.replace("__", "."): value for name, value in given.items()})
    with pytest.raises(ConfigError) as failure:
        check_served(config)
    message = str(failure.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("authorizer.class.name", "org.apache.kafka.metadata.authorizer.StandardAuthorizer"),
        ("ssl.keystore.location", "/etc/kafka/server.jks"),
        ("ssl.client.auth", "required"),
        ("sasl.enabled.mechanisms", "SCRAM-SHA-512"),
        ("sasl.jaas.config", "hunter2"),
        ("listener.name.plaintext.ssl.keystore.location", "/etc/kafka/server.jks"),
        ("listener.name.plaintext.sasl.enabled.mechanisms", "PLAIN"),
        ("listener.name.sasl_ssl.scram-sha-256.sasl.jaas.config", "hunter2"),
        ("listener.name.internal.principal.builder.class", "org.example.Builder"),
        ("delegation.token.secret.key", "hunter2"),
        ("principal.builder.class", "org.example.Builder"),
        ("create.topic.policy.class.name", "org.example.Policy"),
        ("alter.config.policy.class.name", "org.example.Policy"),
        ("connections.max.reauth.ms", "1000"),
        ("security.inter.broker.protocol", "SSL"),
    ],
)
def test_a_key_that_promises_security_stops_the_start_by_name(name: str, value: str):
    message = refusal(**{name: value})
    assert message.startswith(f"{name} promises what is not served yet")
    assert value not in message


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("authorizer.class.name", ""),
        ("ssl.client.auth", "none"),
        ("sasl.enabled.mechanisms", "GSSAPI"),
        ("sasl.mechanism.inter.broker.protocol", "GSSAPI"),
        ("connections.max.reauth.ms", "0"),
        ("security.inter.broker.protocol", "PLAINTEXT"),
        ("listener.name.plaintext.max.connections", "5"),
    ],
)
def test_its_default_promises_nothing(name: str, value: str):
    check_served(NodeConfig.load(None, {name: value}))


def test_listeners_with_tls_are_refused_wherever_they_are():
    assert refusal(listeners="SSL://127.0.0.1:9092") == "listener SSL: SSL is not served yet"
    own = {"listeners": "IN://127.0.0.1:9092", "listener.security.protocol.map": "IN:SASL_PLAINTEXT"}
    assert refusal(**own) == "listener IN: SASL_PLAINTEXT is not served yet"
    message = refusal(**CLUSTER, **{"listener.security.protocol.map": "CONTROLLER:SSL,PLAINTEXT:PLAINTEXT"})
    assert "SSL of listener CONTROLLER, over which this node reaches others, is not served yet" in message
    # As in Kafka's stock file: protocols of listeners that are not used.
    check_served(
        NodeConfig.load(None, {"listener.security.protocol.map": "A:PLAINTEXT,PLAINTEXT:PLAINTEXT,SSL:SSL,X:SASL_SSL"})
    )


@pytest.mark.parametrize(
    ("roles", "listeners", "message"),
    [
        ("controller", "CONTROLLER://h:1,PLAINTEXT://h:2", "process.roles=controller does not serve PLAINTEXT"),
        ("broker", "CONTROLLER://h:1,PLAINTEXT://h:2", "process.roles=broker does not serve CONTROLLER"),
    ],
)
def test_a_listener_that_the_roles_do_not_serve_is_refused(roles: str, listeners: str, message: str):
    voters = "1@h:1" if roles == "controller" else "7@h:1"
    given = CLUSTER | {"process.roles": roles, "listeners": listeners, "controller.quorum.voters": voters}
    assert message in refusal(**given)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"inter.broker.listener.name": "OTHER"},
            "inter.broker.listener.name is OTHER, which other brokers cannot find: advertised are PLAINTEXT",
        ),
        (
            {
                "listeners": "PLAINTEXT://h:1,OUTSIDE://h:2",
                "listener.security.protocol.map": "OUTSIDE:PLAINTEXT",
                "advertised.listeners": "OUTSIDE://h:2",
            },
            "inter.broker.listener.name is PLAINTEXT, which other brokers cannot find: advertised are OUTSIDE",
        ),
    ],
)
def test_the_listener_for_brokers_is_one_that_they_find(given: dict[str, str], message: str):
    assert refusal(**given) == message


def test_a_reference_to_a_provider_is_no_value():
    assert "log.dirs refers to one of config.providers" in refusal(
        **{"config.providers": "file,env", "log.dirs": "${env:DIRS}"}
    )
    check_served(NodeConfig.load(None, {"log.dirs": "${env:DIRS}"}))  # as Kafka takes it without providers


def test_other_keys_without_effect_are_named_when_they_ask_for_something():
    config = NodeConfig.load(
        None,
        {
            "num.io.threads": "16",
            "num.network.threads": "3",
            "quota.window.num": "12",
            "client.quota.callback.class": "org.example.Quotas",
            "transaction.state.log.replication.factor": "1",
            "log.retention.hours": "1",
        },
    )
    check_served(config)
    assert keys_without_effect(config) == ["client.quota.callback.class", "num.io.threads", "quota.window.num"]


@pytest.mark.slow
def test_the_list_of_keys_without_effect_is_what_the_code_does_not_read():
    _, effective = configuration_page.effective_keys()
    assert {name for name in BROKER if has_effect(name)} == effective
