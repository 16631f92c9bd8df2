from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidelog.client.config import ConsumerConfig
from tidelog.client.model import TopicPartition
from tidelog.protocol.errors import ConfigError
from tidelog.spark_ingest.option_table import BATCH, KAFKA_SUPPORTED, SPELLING, STREAM
from tidelog.spark_ingest.options import (
    EARLIEST,
    LATEST,
    SourceOptions,
    parse_partition_values,
    to_partition_object,
)
from tidelog.spark_ingest.sink_options import SinkOptions

SERVERS = {"kafka.bootstrap.servers": "127.0.0.1:9092"}


def parsed(**options: str) -> SourceOptions:
    return SourceOptions.parse({**SERVERS, **{name.replace("__", "."): value for name, value in options.items()}})


def refusal(**options: str) -> str:
    with pytest.raises(ConfigError) as failure:
        parsed(**options)
    message = str(failure.value)
    assert "\n" not in message
    return message


LONG = "x" * 100_000
LONG_VALUES = [
    LONG,
    "[" * 100_000,
    "1" * 100_000,
    *(json.dumps(value) for value in ({LONG: {"0": -7}}, {LONG: 1}, {"t": LONG}, {"t": [LONG]}, {"t": {LONG: 1}})),
    rf"(?<n{LONG}",
    rf"\k<{LONG}>",
    rf"\p{{{LONG}}}",
    f"a(?{'i' * 100_000})",
]


@pytest.mark.slow
@pytest.mark.parametrize("mode", [BATCH, STREAM])
def test_an_error_does_not_repeat_a_value_or_a_name_of_any_length(mode):
    given = [(name, value) for name in (*SPELLING, *KAFKA_SUPPORTED) for value in LONG_VALUES]
    given += [(name, "1") for name in (LONG, f"kafka.{LONG}", f"kafka.sasl.{LONG}")]
    errors = []
    for name, value in given:
        what = {} if name in ("subscribepattern", "assign") else {"subscribe": "t"}
        try:
            SourceOptions.parse({**SERVERS, **what, name: value}, mode)
        except ConfigError as error:
            errors.append(str(error))
    assert len(errors) > 200
    assert max(map(len, errors)) < 1000
    one_sided = json.dumps({LONG: {"0": 1}})
    with pytest.raises(ConfigError) as refused:
        SourceOptions.parse({**SERVERS, "subscribe": "t", "startingOffsets": one_sided, "endingOffsets": "{}"})
    assert len(str(refused.value)) < 1000


@pytest.mark.parametrize("text", ["1_000", "0x10", "1e3", "", "1" * 5000])
def test_a_number_of_a_kafka_option_is_as_java_reads_it(text):
    assert "kafka.request.timeout.ms must be a whole number" in refusal(subscribe="t", kafka__request__timeout__ms=text)


def test_the_defaults_are_those_of_sparks_batch_source():
    options = parsed(subscribe="t")
    assert (options.topics, options.pattern, options.partitions) == (("t",), "", ())
    assert (options.starting.value, options.starting.by_time) == (EARLIEST, False)
    assert (options.ending.value, options.ending.by_time) == (LATEST, False)
    assert (options.min_partitions, options.max_records_per_partition) == (None, None)
    assert (options.fail_on_data_loss, options.include_headers) == (True, False)
    assert options.consumer.isolation_level == "read_uncommitted"
    assert options.consumer.check_crcs


def test_names_are_matched_without_regard_to_case():
    options = parsed(SUBSCRIBE="t", startingoffsets="Earliest", MinPartitions="7", INCLUDEHEADERS="TRUE")
    assert (options.min_partitions, options.include_headers) == (7, True)


def test_offsets_are_not_looked_at_where_a_timestamp_goes_before_them():
    options = parsed(subscribe="t", startingOffsets="latest", startingTimestamp="5")
    assert (options.starting.value, options.starting.by_time) == (5, True)
    options = parsed(subscribe="t", endingOffsets="earliest", endingOffsetsByTimestamp='{"t":{"0":7}}')
    assert (options.ending.value, options.ending.by_time) == ({TopicPartition("t", 0): 7}, True)
    options = parsed(subscribe="t", startingOffsets="committed", startingTimestamp="5")
    assert (options.starting.value, options.starting.group) == (5, "")


def test_topics_are_split_at_commas_and_named_once():
    assert parsed(subscribe=" a, b ,a,,").topics == ("a", "b")
    assert "no topic" in refusal(subscribe=" , ")


@pytest.mark.parametrize("name", ["topic", "path"])
def test_the_sinks_ways_to_name_a_topic_lead_to_the_sources(name):
    """Spark gives `load("t")` as a path."""
    assert "the option subscribe names the topics" in refusal(**{name: "t"})


def test_a_pattern_must_be_one():
    assert parsed(subscribePattern="flights-.*").pattern == "flights-.*"
    assert "regular expression" in refusal(subscribePattern="(")
    assert "is refused" in refusal(subscribePattern="(?x)a b")
    assert "empty" in refusal(subscribePattern="")


def test_partitions_are_assigned_by_json():
    assert parsed(assign='{"b":[1,0],"a":[2]}').partitions == (("a", 2), ("b", 0), ("b", 1))
    too_much = ('{"a":[2147483648]}', '{"a":[0],"a":[1]}')
    for text in (
        *too_much,
        "",
        "[]",
        '{"a":1}',
        '{"a":["0"]}',
        '{"a":[-1]}',
        '{"a":[true]}',
        "{}",
        '{"a":[]}',
        "nonsense",
    ):
        assert "assign must be JSON" in refusal(assign=text)


def test_exactly_one_way_of_saying_what_to_read():
    assert "none is given" in refusal()
    assert "not subscribe and assign" in refusal(subscribe="t", assign='{"t":[0]}')
    assert "subscribePattern" in refusal(subscribe="t", subscribePattern="t")


def test_offsets_by_partition():
    options = parsed(subscribe="t", startingOffsets='{"t":{"0":5,"1":-2}}', endingOffsets='{"t":{"0":9,"1":-1}}')
    assert options.starting.value == {("t", 0): 5, ("t", 1): EARLIEST}
    assert options.ending.value == {("t", 0): 9, ("t", 1): LATEST}


def test_timestamps_go_before_offsets_and_one_for_all_before_many():
    options = parsed(
        subscribe="t",
        startingTimestamp="5",
        startingOffsetsByTimestamp='{"t":{"0":7}}',
        startingOffsets='{"t":{"0":9}}',
        endingOffsetsByTimestamp='{"t":{"0":8}}',
        endingOffsets="latest",
    )
    assert (options.starting.value, options.starting.by_time, options.starting.option) == (5, True, "startingTimestamp")
    assert (options.ending.value, options.ending.by_time) == ({("t", 0): 8}, True)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"startingOffsets": "latest"}, "cannot be latest"),
        ({"endingOffsets": "earliest"}, "cannot be earliest"),
        ({"startingOffsets": '{"t":{"0":-1}}'}, "-2 (earliest) or an offset"),
        ({"endingOffsets": '{"t":{"0":-2}}'}, "-1 (latest) or an offset"),
        ({"startingOffsets": '{"t":{"0":-3}}'}, "cannot be -3"),
        ({"startingOffsets": "soon"}, "must be earliest, committed, or JSON"),
        ({"endingOffsets": "soon"}, "endingOffsets must be latest, or JSON"),
        ({"startingOffsets": '{"t":{"x":1}}'}, "startingOffsets must be JSON"),
        ({"startingOffsets": '{"t":{"0":"1"}}'}, "startingOffsets must be JSON"),
        ({"startingOffsets": '{"t":[0]}'}, "startingOffsets must be JSON"),
        ({"startingOffsets": '{"t":{"0":99999999999999999999}}'}, "startingOffsets must be JSON"),
        ({"startingTimestamp": "yesterday"}, "milliseconds"),
        ({"startingOffsetsByTimestamp": '{"t":{"0":-5}}'}, "negative"),
        ({"startingOffsetsByTimestampStrategy": "guess"}, "error or latest"),
        ({"minPartitions": "0"}, "at least 1"),
        ({"minPartitions": "few"}, "whole number"),
        ({"maxRecordsPerPartition": "-4"}, "whole number"),
        ({"minRecordsPerPartition": "9", "minPartitions": "4"}, "give one of them"),
        ({"minRecordsPerPartition": "9", "maxRecordsPerPartition": "8"}, "(9) is above maxRecordsPerPartition (8)"),
        ({"failOnDataLoss": "maybe"}, "true or false"),
        ({"startingOffset": "earliest"}, "did you mean startingOffsets?"),
        ({"zzz": "1"}, "no option 'zzz'"),
        ({"kafka.isolation.levl": "read_committed"}, "did you mean kafka.isolation.level?"),
        ({"kafka.some.future.option": "x"}, "no option 'kafka.some.future.option'"),
        ({"maxOffsetsPerTrigger": "5"}, "'maxOffsetsPerTrigger' is not allowed in a batch read: it shapes streams"),
        ({"minOffsetsPerTrigger": "5"}, "'minOffsetsPerTrigger' is not allowed in a batch read: it shapes streams"),
        ({"maxTriggerDelay": "15m"}, "'maxTriggerDelay' is not allowed in a batch read: it shapes streams"),
        ({"maxDecompressedBatchBytes": "0"}, "at least 1"),
        ({"minPartitions": "9" * 5000}, "a whole number, at least 1 and below 2^31"),
        ({"minPartitions": "\u0663"}, "whole number"),
        ({"startingTimestamp": "9" * 19}, "milliseconds"),
        ({"startingTimestamp": "9" * 5000}, "milliseconds"),
        ({"startingOffsets": '{"t":{"%s":1}}' % ("9" * 5000)}, "startingOffsets must be JSON"),
        ({"startingOffsets": '{"t":{"0":1,"0":2}}'}, "must be earliest, committed, or JSON"),
        ({"startingOffsets": '{"t":{"0":1,"00":2}}'}, "startingOffsets must be JSON"),
        ({"startingOffsets": '{"t":{"0":1},"t":{"0":2}}'}, "must be earliest, committed, or JSON"),
        ({"kafka.auto.offset.reset": "earliest"}, "startingOffsets"),
        ({"kafka.enable.auto.commit": "true"}, "commits nothing"),
        ({"kafka.key.deserializer": "X"}, "binary"),
        ({"kafka.value.deserializer": "X"}, "binary"),
        ({"kafka.interceptor.classes": "X"}, "JVM"),
        ({"provider": "tidelog"}, "temporary view"),  # CREATE TABLE ... USING tidelog
        ({"kafka.sasl.mechanism": "PLAIN"}, "PLAINTEXT"),
        ({"kafka.ssl.truststore.location": "x"}, "PLAINTEXT"),
        ({"kafka.security.protocol": "SSL"}, "PLAINTEXT"),
        ({"kafka.isolation.level": "chaos"}, "kafka.isolation.level must be one of"),
        ({"kafka.bootstrap.servers": ""}, "kafka.bootstrap.servers"),
        ({"kafka.bootstrap.servers": "nowhere"}, "host:port"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(options, says):
    assert says in refusal(subscribe="t", **options)


def test_a_deeply_nested_json_is_refused():
    assert "must be earliest, committed, or JSON" in refusal(subscribe="t", startingOffsets="[" * 100_000)


def test_kafka_options_reach_the_consumer():
    options = parsed(
        subscribe="t",
        **{
            "kafka.isolation.level": "read_committed",
            "kafka.request.timeout.ms": "5000",
            "kafka.max.partition.fetch.bytes": "1000",
            "kafka.check.crcs": "false",
        },
    )
    assert options.consumer.isolation_level == "read_committed"
    assert options.consumer.request_timeout_ms == 5000
    assert options.consumer.max_partition_fetch_bytes == 1000
    assert not options.consumer.check_crcs


def test_kafkas_consumer_options_without_effect_are_taken_and_noted():
    options = parsed(subscribe="t", groupIdPrefix="x", **{"kafka.group.id": "mine", "kafka.max.poll.records": "9"})
    assert options.consumer.group_id is None
    assert options.without_effect == ("kafka.group.id", "kafka.max.poll.records")
    assert parsed(subscribe="t", pushFilters="true").without_effect == ("pushFilters",)
    assert parsed(subscribe="t", pushFilters="false").without_effect == ()


def test_every_option_of_kafkas_consumer_is_served_refused_or_said_to_have_no_effect():
    for name in ConsumerConfig.__dataclass_fields__:
        if name.startswith(("client_id", "retries", "receive_message")):
            continue
        try:
            parsed(subscribe="t", **{f"kafka.{name.replace('_', '.')}": "1"})
        except ConfigError as error:
            if "has no option" in str(error):
                raise


def test_options_travel_to_the_tasks():
    import pickle

    options = parsed(subscribe="t", startingOffsets='{"t":{"0":5}}')
    assert pickle.loads(pickle.dumps(options)) == options  # noqa: S301


topics = st.text(st.sampled_from("abc.-_Ü"), min_size=1, max_size=5)
values = st.dictionaries(st.tuples(topics, st.integers(0, 2**31 - 1)), st.integers(-2, 2**62), max_size=6)


@given(values)
def test_offsets_survive_their_json(values):
    offsets = {TopicPartition(*partition): offset for partition, offset in values.items()}
    text = json.dumps(to_partition_object(offsets))
    assert parse_partition_values("startingOffsets", text) == offsets
    assert json.dumps(to_partition_object(parse_partition_values("startingOffsets", text))) == text


@pytest.mark.parametrize("parse", [SourceOptions.parse, SinkOptions.parse])
def test_a_table_which_hands_on_no_option_says_what_to_use_instead(parse):
    with pytest.raises(ConfigError, match=r"no option is given. A table has none.*TEMPORARY VIEW.*save\(\)"):
        parse({})
