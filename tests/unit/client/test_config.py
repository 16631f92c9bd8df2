"""Options: Kafka's names, its defaults (but for the size of batches), and one clear line for each that is wrong."""

from __future__ import annotations

from dataclasses import fields

import pytest

from tidelog.client import Consumer, sync
from tidelog.client.config import AdminConfig, ClientConfig, ConsumerConfig, ProducerConfig
from tidelog.protocol.errors import ConfigError


def test_the_defaults_are_kafkas_but_for_larger_batches():
    producer, consumer = ProducerConfig.from_options({}), ConsumerConfig.from_options({})
    assert (producer.acks, producer.full_linger_ms, producer.delivery_timeout_ms) == ("all", 5, 120_000)
    assert producer.batch_size == 4 * 16_384
    assert producer.idempotent
    assert (consumer.session_timeout_ms, consumer.max_poll_records, consumer.auto_offset_reset) == (
        45_000,
        500,
        "latest",
    )
    assert consumer.strategies == ["range", "cooperative-sticky"]


def test_kafkas_dotted_names_and_strings_are_taken():
    config = ProducerConfig.from_options({"linger.ms": "20", "acks": 1, "enable.idempotence": "false"})
    assert (config.linger_ms, config.required_acks, config.idempotent) == (20, 1, False)


@pytest.mark.parametrize("name", ["client_id", "client_rack", "group_id", "group_instance_id", "transactional_id"])
def test_a_string_that_no_request_could_carry_is_refused_at_once(name):
    kind = ProducerConfig if name == "transactional_id" else ConsumerConfig
    options = {"group_id": "g"} if kind is ConsumerConfig else {}
    kind.from_options({**options, name: "é" * 16_383})
    with pytest.raises(ConfigError, match=f"^{name} must be at most 32767 bytes, not 32768$"):
        kind.from_options({**options, name: "é" * 16_384})
    with pytest.raises(ConfigError, match=f"^{name} is not text that UTF-8 can encode: surrogates not allowed$"):
        kind.from_options({**options, name: "a\udc80"})


@pytest.mark.parametrize(
    ("kind", "options", "words"),
    [
        (ProducerConfig, {"lingerms": 5}, ["'lingerms'", "did you mean linger_ms?"]),
        (ProducerConfig, {"group_id": "g"}, ["Producer has no option 'group_id'"]),
        (ProducerConfig, {"linger_ms": "soon"}, ["linger_ms", "whole number", "'soon'"]),
        (ProducerConfig, {"linger_ms": True}, ["linger_ms", "whole number"]),
        (ProducerConfig, {"linger_ms": -1}, ["linger_ms", "between 0"]),
        (ProducerConfig, {"acks": "2"}, ["acks", "one of all, -1, 0, 1"]),
        (ProducerConfig, {"acks": 1, "enable_idempotence": True}, ["enable_idempotence", "acks=1"]),
        (ProducerConfig, {"enable_idempotence": True, "retries": 0}, ["enable_idempotence", "retries=0"]),
        (ProducerConfig, {"compression_type": "brotli"}, ["compression_type", "zstd"]),
        (ProducerConfig, {"compression_type": "gzip", "compression_level": 99}, ["gzip", "99"]),
        (ProducerConfig, {"delivery_timeout_ms": 10}, ["delivery_timeout_ms", "request_timeout_ms"]),
        (ProducerConfig, {"partitioner": "magic"}, ["partitioner", "'magic'"]),
        (ProducerConfig, {"value_serializer": "json"}, ["value_serializer", "function"]),
        (ConsumerConfig, {"auto_offset_reset": "middle"}, ["auto_offset_reset", "earliest"]),
        (ConsumerConfig, {"enable_auto_commit": True}, ["enable_auto_commit needs a group_id"]),
        (ConsumerConfig, {"group_id": ""}, ["group_id must not be empty"]),
        (ConsumerConfig, {"group_id": "g", "group_instance_id": ""}, ["group_instance_id must not be empty"]),
        (ConsumerConfig, {"partition_assignment_strategy": "random"}, ["'random'", "cooperative-sticky"]),
        (ConsumerConfig, {"heartbeat_interval_ms": 60_000}, ["heartbeat_interval_ms", "session_timeout_ms"]),
        (ConsumerConfig, {"group_instance_id": "i"}, ["group_instance_id needs a group_id"]),
        (ClientConfig, {"bootstrap_servers": "localhost"}, ["bootstrap_servers", "'localhost' is not host:port"]),
        (ClientConfig, {"bootstrap_servers": "http://h:1"}, ["'http://h:1' is not host:port"]),
        (ClientConfig, {"bootstrap_servers": "http://127.0.0.1:9092"}, ["is not host:port; it is without a scheme"]),
        (ClientConfig, {"bootstrap_servers": []}, ["bootstrap_servers is empty"]),
        (ClientConfig, {"bootstrap_servers": "h:99999"}, ["not host:port"]),
        (ClientConfig, {"bootstrap_servers": "[::1"}, ["'[::1' is not host:port", "needs brackets, as [::1]:9092"]),
        (ClientConfig, {"bootstrap_servers": "::1"}, ["'::1' is not host:port", "needs brackets, as [::1]:9092"]),
        (ClientConfig, {"bootstrap_servers": "1:2:3:4:5:6:7:8"}, ["is not host:port", "needs brackets"]),
        (ClientConfig, {"bootstrap_servers": "::1]:9092"}, ["'::1]:9092' is not host:port"]),
        (ClientConfig, {"bootstrap_servers": "[a]:9092"}, ["'[a]:9092' is not host:port"]),
        (ClientConfig, {"bootstrap_servers": "a b:9092"}, ["'a b:9092' is not host:port"]),
        (ClientConfig, {"bootstrap_servers": "h\udcff:9092"}, [r"'h\udcff:9092' is not host:port"]),
        (ClientConfig, {"bootstrap_servers": "h:٩٠"}, ["is not host:port"]),
        (ConsumerConfig, {"request_timeout_ms": "1_000"}, ["request_timeout_ms must be a whole number, not '1_000'"]),
        (ConsumerConfig, {"retries": 10**100}, ["retries must be between 0 and"]),
        (ClientConfig, {"security_protocol": "SSL"}, ["security_protocol", "PLAINTEXT"]),
    ],
)
def test_a_wrong_option_is_one_line_that_names_it(kind, options, words):
    with pytest.raises(ConfigError) as caught:
        kind.from_options(options)
    text = str(caught.value)
    assert "\n" not in text
    for word in words:
        assert word in text


def test_idempotence_gives_way_to_options_that_rule_it_out_unless_asked_for():
    assert not ProducerConfig.from_options({"acks": "1"}).idempotent
    assert not ProducerConfig.from_options({"max_in_flight_requests_per_connection": 6}).idempotent


def test_bootstrap_addresses_may_be_text_list_or_ipv6():
    config = ClientConfig.from_options({"bootstrap_servers": "a:1, b:2"})
    assert config.bootstrap_addresses() == [("a", 1), ("b", 2)]
    config = ClientConfig.from_options({"bootstrap_servers": ["[::1]:9092"]})
    assert config.bootstrap_addresses() == [("::1", 9092)]


def test_auto_commit_follows_the_group():
    assert ConsumerConfig.from_options({"group_id": "g"}).auto_commit
    assert not ConsumerConfig.from_options({}).auto_commit
    assert not ConsumerConfig.from_options({"group_id": "g", "enable_auto_commit": "false"}).auto_commit


def test_an_address_may_be_as_a_node_names_it():
    config = ClientConfig.from_options({"bootstrap_servers": "PLAINTEXT://127.0.0.1:9092,h:1"})
    assert config.bootstrap_addresses() == [("127.0.0.1", 9092), ("h", 1)]


@pytest.mark.parametrize("topics", [["a"], {"bootstrap.servers": "h:1"}])
@pytest.mark.parametrize("kind", [Consumer, sync.Consumer])
def test_a_list_of_topics_or_a_dict_of_options_is_told_how_they_are_passed(kind, topics):
    with pytest.raises(TypeError, match=r"Consumer\('a', 'b', group_id='g'\)"):
        kind(topics)


LONGS_OF_EVERY_CLIENT = (
    "connections_max_idle_ms", "metadata_max_age_ms", "reconnect_backoff_max_ms", "reconnect_backoff_ms",
    "retry_backoff_max_ms", "retry_backoff_ms", "socket_connection_setup_timeout_ms",
)  # fmt: skip
LONGS_OF_A_PRODUCER = (
    "buffer_memory", "linger_ms", "max_block_ms", "metadata_max_idle_ms", "partitioner_availability_timeout_ms",
)  # fmt: skip


@pytest.mark.parametrize("kind", [ProducerConfig, ConsumerConfig, AdminConfig])
def test_what_is_a_long_in_kafka_may_be_as_large_as_there(kind):
    """Kafka Connect, for one, sets max.block.ms to 2^63 - 1."""
    longs = LONGS_OF_EVERY_CLIENT + (LONGS_OF_A_PRODUCER if kind is ProducerConfig else ())
    for name in longs:
        options = {name: str(2**63 - 1)}
        if name == "linger_ms":
            with pytest.raises(ConfigError, match=r"delivery_timeout_ms .* must be at least linger_ms"):
                kind.from_options(options)
        else:
            assert getattr(kind.from_options(options), name) == 2**63 - 1
        with pytest.raises(ConfigError, match=f"{name} must be between"):
            kind.from_options({name: str(2**63)})
    limits = {each.name: each.metadata["bounds"][1] for each in fields(kind) if "bounds" in each.metadata}
    assert {name for name, limit in limits.items() if limit > 2**31 - 1} == set(longs)


@pytest.mark.parametrize("options", [{"request_timeout_ms": 2**31 - 1}, {"linger_ms": 2**63 - 1}])
def test_the_largest_delivery_timeout_is_long_enough_for_any_request(options):
    config = ProducerConfig.from_options({"delivery.timeout.ms": 2**31 - 1, **options})
    assert config.delivery_timeout_ms == 2**31 - 1


def test_a_list_that_the_program_changes_later_changes_no_option():
    servers, strategies = ["127.0.0.1:9092"], ["range"]
    config = ConsumerConfig.from_options({"bootstrap_servers": servers, "partition_assignment_strategy": strategies})
    servers.clear()
    strategies.append("no strategy")
    assert config.bootstrap_addresses() == [("127.0.0.1", 9092)]
    assert config.strategies == ["range"]
