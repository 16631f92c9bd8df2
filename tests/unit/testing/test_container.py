"""The broker with the methods of testcontainers' `KafkaContainer`."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from tests.patience import wait_until
from tidelog.client.sync import Admin, Producer
from tidelog.protocol.errors import ConfigError
from tidelog.testing.container import TidelogContainer, _config_key
from tidelog.testing.ports import free_port


def test_a_suite_with_testcontainers_moves_by_one_import() -> None:
    container = TidelogContainer("confluentinc/cp-kafka:7.6.0", port=9093).with_kraft().with_name("kafka")
    container.with_env("KAFKA_NUM_PARTITIONS", "3").with_env("KAFKA_LISTENERS", "PLAINTEXT://:9092").with_env(
        "TZ", "UTC"
    )
    with pytest.raises(RuntimeError, match="stopped"):
        container.get_bootstrap_server()
    with container as kafka:
        assert kafka.get_bootstrap_server() == f"{kafka.get_container_host_ip()}:{kafka.get_exposed_port(9093)}"
        with Producer(bootstrap_servers=kafka.get_bootstrap_server()) as producer:
            assert producer.send_and_wait("t", b"x").offset == 0
            assert len(producer.partitions_for("t")) == 3


def test_a_container_has_the_broker_id_and_ignores_what_images_read_for_the_jvm() -> None:
    container = TidelogContainer().with_env("KAFKA_NODE_ID", "0").with_env("KAFKA_CONTROLLER_QUORUM_VOTERS", "0@k:9093")
    for name in ("OPTS", "HEAP_OPTS", "JMX_PORT", "LOG4J_LOGGERS", "JVM_PERFORMANCE_OPTS", "CONFLUENT_METRICS_ENABLE"):
        container.with_env(f"KAFKA_{name}", "x")
    with container as kafka, Admin(bootstrap_servers=kafka.get_bootstrap_server()) as admin:
        assert [node.node_id for node in admin.describe_cluster().nodes] == [0]


def test_methods_that_concern_only_containers_are_accepted() -> None:
    container = TidelogContainer(env={"TZ": "UTC"}, ports=[9093], name="kafka")
    returned = (
        container.with_envs(TZ="UTC", KAFKA_NUM_PARTITIONS="2")
        .with_kwargs(platform="linux/amd64")
        .with_network(object())
        .with_network_aliases("kafka", "broker")
        .with_exposed_ports(9093, "8080/tcp")
        .with_volume_mapping("/host", "/container", mode="ro")
        .with_tmpfs_mount("/data", size="1g")
        .with_copy_into_container(b"x", "/file")
        .with_command("run")
        .waiting_for(object())
        .maybe_emulate_amd64()
    )
    assert returned is container
    assert container.env == {"TZ": "UTC", "KAFKA_NUM_PARTITIONS": "2"}
    with pytest.raises(RuntimeError, match="no container; use an admin client"):
        container.exec(["kafka-topics", "--create"])


def test_a_listener_that_is_not_plaintext_is_refused() -> None:
    with pytest.raises(ValueError, match="SASL_SSL is not served"):
        TidelogContainer(security_protocol="SASL_SSL")
    with pytest.raises(ConfigError, match="authorizer"):
        TidelogContainer().with_env("KAFKA_AUTHORIZER_CLASS_NAME", "a.b.StandardAuthorizer").start()


@pytest.mark.slow
@pytest.mark.parametrize("process", [False, True])
def test_the_broker_listens_on_the_bound_port_and_has_the_cluster_id(process: bool) -> None:
    port = free_port()
    container = TidelogContainer(process=process).with_bind_ports("9093/tcp", port).with_bind_ports(8081, 1)
    container.with_cluster_id("MkU3OEVBNTcwNTJENDM2Qk==")
    for _ in range(2):
        with container as kafka, Admin(bootstrap_servers=f"127.0.0.1:{port}") as admin:
            assert kafka.get_exposed_port(9093) == port
            assert admin.describe_cluster().cluster_id == "MkU3OEVBNTcwNTJENDM2Qk=="


def test_the_only_bound_port_is_the_brokers() -> None:
    port = free_port()
    with TidelogContainer().with_bind_ports(9092, str(port)) as kafka:
        assert kafka.get_bootstrap_server() == f"127.0.0.1:{port}"


def test_a_key_that_kafka_does_not_know_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    container = TidelogContainer().with_env("KAFKA_INTER_BROKER_PROTOCOL_VERSION", "3.0")
    container.with_env("KAFKA_NUM_PARTITONS", "3").with_env("KAFKA_ZOOKEEPER_SESSION_TIMEOUT_MS", "1")
    with caplog.at_level(logging.WARNING, "tidelog.testing.container"), container:
        pass
    assert [message.partition(" ")[0] for message in caplog.messages if "no configuration key" in message] == [
        "KAFKA_INTER_BROKER_PROTOCOL_VERSION",
        "KAFKA_NUM_PARTITONS",
    ]


def test_underscores_are_read_as_kafkas_images_read_them() -> None:
    keys = ["KAFKA_NUM_PARTITIONS", "KAFKA_LISTENER_NAME_IN__SIDE_SSL_KEY", "KAFKA_CONFIG_PROVIDERS_A___B"]
    assert list(map(_config_key, keys)) == ["num.partitions", "listener.name.in_side.ssl.key", "config.providers.a-b"]


def test_variables_come_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "kafka.env"
    file.write_text("# a comment\n\nKAFKA_NUM_PARTITIONS=3 # three\nexport TZ='UTC # 1'\nEMPTY=\nA = \"b\"\n")
    container = TidelogContainer().with_env_file(file)
    assert container.env == {"KAFKA_NUM_PARTITIONS": "3", "TZ": "UTC # 1", "EMPTY": "", "A": "b"}
    file.write_text("KAFKA_NUM_PARTITIONS=3\nno variable\n")
    with pytest.raises(ValueError, match=r"kafka\.env: line 2 is not KEY=VALUE"):
        container.with_env_file(str(file))


def test_a_container_has_a_status_and_logs() -> None:
    container = TidelogContainer()
    assert container.status == "not_started"
    with pytest.raises(RuntimeError, match="stopped"):
        container.get_logs()
    with container:
        container.reload()
        assert container.status == "running"
        assert container.get_logs() == (b"", b"")
        wait = container.wait
        with pytest.raises(RuntimeError, match=r"call stop\(\)"):
            wait()
    assert container.status == "exited"


@pytest.mark.slow
def test_the_logs_of_a_process_are_its_output() -> None:
    with TidelogContainer(process=True) as kafka:
        address = kafka.get_bootstrap_server().encode()
        wait_until(lambda: address in kafka.get_logs()[0])  # it is served before it is written
        assert kafka.get_logs()[1] == b""
