"""The options and columns of the sink, without Spark and without a broker."""

from __future__ import annotations

import pytest

from tidelog.client.config import ProducerConfig
from tidelog.protocol.errors import ConfigError
from tidelog.spark_ingest.options import SourceOptions
from tidelog.spark_ingest.sink_options import KAFKA_SUPPORTED, SINK_OPTIONS, SinkOptions, column_places

KAFKAS_PRODUCER = """
    acks batch.size bootstrap.servers buffer.memory client.dns.lookup client.id compression.gzip.level
    compression.lz4.level compression.type compression.zstd.level config.providers connections.max.idle.ms
    delivery.timeout.ms enable.idempotence enable.metrics.push interceptor.classes key.serializer linger.ms max.block.ms
    max.in.flight.requests.per.connection max.request.size metadata.max.age.ms metadata.max.idle.ms
    metadata.recovery.rebootstrap.trigger.ms metadata.recovery.strategy metric.reporters metrics.num.samples
    metrics.recording.level metrics.sample.window.ms partitioner.adaptive.partitioning.enable
    partitioner.availability.timeout.ms partitioner.class partitioner.ignore.keys receive.buffer.bytes
    reconnect.backoff.max.ms reconnect.backoff.ms request.timeout.ms retries retry.backoff.max.ms retry.backoff.ms
    security.protocol security.providers send.buffer.bytes socket.connection.setup.timeout.max.ms
    socket.connection.setup.timeout.ms transaction.timeout.ms transactional.id value.serializer
""".split()
"""The options of Kafka 4.3's producer, but for those of TLS, SASL and two-phase commit."""


def parsed(**options: str) -> SinkOptions:
    return SinkOptions.parse({"kafka.bootstrap.servers": "localhost:1", "topic": "t", **options})


@pytest.mark.parametrize("name", KAFKAS_PRODUCER)
def test_every_option_of_kafkas_producer_is_served_refused_with_a_reason_or_said_to_have_no_effect(name):
    try:
        parsed(**{f"kafka.{name}": "1"})
    except ConfigError as error:
        if "has no option" in str(error):
            raise


@pytest.mark.parametrize("value", ["x" * 100_000, "1" * 100_000])
def test_an_error_does_not_repeat_a_value_of_any_length(value):
    errors = []
    for name in (*(option.name for option in SINK_OPTIONS), *KAFKA_SUPPORTED):
        try:
            parsed(**{"exactlyOnce": "true", "atomic": "true", name: value})
        except ConfigError as error:
            errors.append(str(error))
    assert len(errors) > 10
    assert max(map(len, errors)) < 1000


def test_an_error_of_the_client_names_the_option_as_it_is_written():
    with pytest.raises(ConfigError, match=r"^kafka\.max\.block\.ms must be a whole number, not 'linger_ms'$"):
        parsed(**{"kafka.max.block.ms": "linger_ms"})
    with pytest.raises(ConfigError, match=r"^exactlyOnce needs idempotence.* not kafka\.acks=1$"):
        parsed(**{"exactlyOnce": "true", "kafka.acks": "1"})
    with pytest.raises(ConfigError, match=r"^kafka\.isolation\.level must be one of read_uncommitted, read_committed"):
        SourceOptions.parse(
            {"kafka.bootstrap.servers": "localhost:1", "subscribe": "t", "kafka.isolation.level": "read_comitted"}
        )


def test_options_without_effect_are_taken_and_noted():
    options = parsed(**{"kafka.send.buffer.bytes": "131072", "kafka.Client.DNS.Lookup": "use_all_dns_ips"})
    assert options.without_effect == ("kafka.client.dns.lookup", "kafka.send.buffer.bytes")
    assert not {"send_buffer_bytes", "client_dns_lookup"} & set(options.producer)
    ProducerConfig.from_options(options.producer)


def test_an_insert_into_a_view_that_reads_a_topic_is_refused_with_the_reason():
    with pytest.raises(ConfigError, match=r"option 'subscribe' is not allowed.*A view .* cannot be written to"):
        parsed(subscribe="flights")


def test_a_path_is_refused_rather_than_passed_over():
    with pytest.raises(ConfigError, match=r"option 'path' is not allowed.*the option topic"):
        parsed(path="flights")


def test_the_options_of_the_partitioner_reach_the_producer():
    options = parsed(
        **{"kafka.partitioner.ignore.keys": "true", "kafka.partitioner.adaptive.partitioning.enable": "false"}
    )
    producer = ProducerConfig.from_options(options.producer)
    assert producer.partitioner_ignore_keys
    assert not producer.partitioner_adaptive_partitioning_enable


def test_columns_are_found_without_regard_to_case():
    assert column_places(["id", "VALUE", "Key"]) == {"value": 1, "key": 2}


@pytest.mark.parametrize("names", [["value", "VALUE"], ["VALUE", "Value", "value"]])
def test_of_columns_that_differ_in_case_the_one_in_lower_case_is_written(names):
    assert column_places(names) == {"value": names.index("value")}


def test_columns_that_differ_in_case_are_refused_without_one_in_lower_case():
    assert column_places(["value", "ID", "id"]) == {"value": 0}
    with pytest.raises(ConfigError, match="the columns 'VALUE', 'Value' differ in their case only; name one 'value'"):
        column_places(["VALUE", "Value"])
