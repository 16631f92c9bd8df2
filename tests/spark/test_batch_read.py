"""`spark.read.format("tidelog")` against a running node, in a real Spark session."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta

import pytest

from tidelog.client.model import NewTopic
from tidelog.client.sync import Admin, Producer

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

TIME = 1_700_000_000_123
CODECS = ("none", "gzip", "snappy", "lz4", "zstd")


@pytest.fixture(scope="module")
def topics(node):
    """`every`: 3 partitions, every codec, nulls and headers. `many`: 4 partitions of 25,000. `empty`: nothing."""
    with Admin(bootstrap_servers=node.bootstrap_servers) as admin:
        # Its records are years old: on a slow machine retention would come before the reads.
        admin.create_topics(
            [NewTopic("every", 3, configs={"retention.ms": "-1"}), NewTopic("many", 4), NewTopic("empty", 2)]
        )
    expected = []
    for number, codec in enumerate(CODECS):
        with Producer(bootstrap_servers=node.bootstrap_servers, compression_type=codec) as producer:
            for index in range(60):
                row = (
                    None if index % 5 == 0 else b"key %d" % index,
                    None if index % 7 == 0 else b"%s %d" % (codec.encode(), index),
                    index % 3,
                    number * 20 + index // 3,
                    TIME + index,
                    [("name", b"1"), ("none", None)] if index % 2 else None,
                )
                key, value, partition, _, timestamp, headers = row
                producer.send("every", value, key, partition=partition, timestamp_ms=timestamp, headers=headers or ())
                expected.append(row)
            producer.flush()
    with Producer(bootstrap_servers=node.bootstrap_servers, linger_ms=20, batch_size=100_000) as producer:
        for index in range(100_000):
            producer.send("many", b"%d" % index, partition=index % 4)
        producer.flush()
    return expected


@pytest.fixture
def load(spark, node, topics):
    def load(schema=None, **options):
        reader = (
            spark.read.format("tidelog").option("kafka.bootstrap.servers", node.bootstrap_servers).options(**options)
        )
        return (reader.schema(schema) if schema else reader).load()

    return load


def test_the_schema_is_that_of_sparks_own_kafka_source(load):
    from pyspark.sql.types import (
        ArrayType,
        BinaryType,
        IntegerType,
        LongType,
        StringType,
        StructType,
        TimestampType,
    )

    expected = (
        StructType()
        .add("key", BinaryType())
        .add("value", BinaryType())
        .add("topic", StringType())
        .add("partition", IntegerType())
        .add("offset", LongType())
        .add("timestamp", TimestampType())
        .add("timestampType", IntegerType())
    )
    assert load(subscribe="every").schema == expected
    header = StructType().add("key", StringType()).add("value", BinaryType())
    expected = expected.add("headers", ArrayType(header))
    assert load(subscribe="every", includeHeaders="true").schema == expected


def test_every_column_of_every_record_in_every_codec(load, topics):
    found = []
    for row in load(subscribe="every", includeHeaders="true").collect():
        assert (row.topic, row.timestampType) == ("every", 0)
        milliseconds = (row.timestamp.replace(tzinfo=UTC) - datetime(1970, 1, 1, tzinfo=UTC)) / timedelta(
            milliseconds=1
        )
        headers = [(header.key, None if header.value is None else bytes(header.value)) for header in row.headers or ()]
        key, value = (None if each is None else bytes(each) for each in (row.key, row.value))
        found.append((key, value, row.partition, row.offset, round(milliseconds), headers or None))
    assert sorted(found, key=lambda row: row[2:4]) == sorted(topics, key=lambda row: row[2:4])


def test_a_timestamp_is_a_moment_also_where_a_session_says_otherwise_of_the_word(spark, load):
    spark.conf.set("spark.sql.timestampType", "TIMESTAMP_NTZ")
    try:
        frame = load(subscribe="every")
        assert dict(frame.dtypes)["timestamp"] == "timestamp"
        assert frame.selectExpr("min(unix_millis(timestamp))").first()[0] == TIME
    finally:
        spark.conf.unset("spark.sql.timestampType")


def test_counts_and_sums_over_many_records(load):
    row = load(subscribe="many").selectExpr("count(*)", "sum(cast(cast(value as string) as bigint))").first()
    assert tuple(row) == (100_000, sum(range(100_000)))


def test_a_users_schema_is_the_projection(load):
    frame = load("offset bigint, value binary", subscribe="many")
    assert frame.columns == ["offset", "value"]
    assert tuple(frame.selectExpr("max(offset)", "sum(length(value))").first()) == (24_999, 488_890)


def test_an_empty_topic_is_an_empty_frame(load):
    assert load(subscribe="empty").count() == 0
    assert load(subscribe="empty", includeHeaders="true").collect() == []


def test_tasks_follow_partitions_and_the_options_that_divide_them(load):
    from pyspark.sql.functions import spark_partition_id

    def tasks(**options):
        frame = load("offset bigint", subscribe="many", **options)
        sizes = [row[1] for row in frame.groupBy(spark_partition_id().alias("task")).count().collect()]
        assert sum(sizes) == 100_000
        return sorted(sizes)

    assert tasks() == [25_000] * 4
    assert tasks(minPartitions="10") == tasks(maxRecordsPerPartition="10000") == [8333] * 8 + [8334] * 4
    assert tasks(maxRecordsPerPartition="12500") == [12_500] * 8
    assert tasks(minRecordsPerPartition="30000") == [50_000] * 2


def test_only_the_offsets_asked_for(load):
    starting = json.dumps({"many": {"0": 5, "1": -2, "2": 24_999, "3": 7}})
    ending = json.dumps({"many": {"0": 9, "1": 3, "2": -1, "3": 7}})
    frame = load(subscribe="many", startingOffsets=starting, endingOffsets=ending)
    found = sorted(tuple(row) for row in frame.select("partition", "offset").collect())
    assert found == [(0, 5), (0, 6), (0, 7), (0, 8), (1, 0), (1, 1), (1, 2), (2, 24_999)]


def test_patterns_assignments_and_timestamps(load):
    assert load(subscribePattern="e.*y").count() == 300
    assert load(assign='{"every":[1]}').count() == 100
    # In every partition the first record at or after the start is at offset 10; the end lies behind it only in one.
    assert load(subscribe="every", startingTimestamp=str(TIME + 30)).count() == 270
    assert load(subscribe="every", startingTimestamp=str(TIME + 30), endingTimestamp=str(TIME + 31)).count() == 1


def test_a_second_read_sees_what_came_in_between(load, node):
    before = load(subscribe="empty").count()
    with Producer(bootstrap_servers=node.bootstrap_servers) as producer:
        producer.send("empty", b"late", partition=0)
        producer.flush()
    try:
        assert load(subscribe="empty").count() == before + 1
    finally:
        with Admin(bootstrap_servers=node.bootstrap_servers) as admin:
            admin.delete_topics(["empty"])
            admin.create_topics([NewTopic("empty", 2)])


def test_a_task_reads_the_topic_that_was_planned_and_not_a_later_one_of_its_name(load, node):
    def create(*values):
        with Admin(bootstrap_servers=node.bootstrap_servers) as admin:
            admin.create_topics([NewTopic("again", 1)])
        with Producer(bootstrap_servers=node.bootstrap_servers) as producer:
            for value in values:
                producer.send("again", value)
            producer.flush()

    def planned(**options):
        rows = load("value binary", subscribe="again", **options).rdd
        assert rows.getNumPartitions() == 1  # the ranges are fixed here
        return rows

    create(b"old")
    strict, lenient = planned(), planned(failOnDataLoss="false")
    with Admin(bootstrap_servers=node.bootstrap_servers) as admin:
        admin.delete_topics(["again"])
    create(b"new", b"new")
    with pytest.raises(Exception, match="topic 'again' was created again"):
        strict.collect()
    assert lenient.collect() == []
    assert planned().count() == 2


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"subscribe": "many", "kafka.auto.offset.reset": "earliest"}, "say where to begin with startingOffsets"),
        ({"subscribe": "many", "startingOffsets": "latest"}, "startingOffsets cannot be latest"),
        ({"subscribe": "many", "startingOffset": "earliest"}, "did you mean startingOffsets?"),
        ({"subscribe": "many", "assign": '{"many":[0]}'}, "exactly one of"),
        ({"subscribe": "nowhere"}, "topic 'nowhere' does not exist"),
        ({"subscribe": "many", "endingOffsets": '{"many":{"0":99999,"1":-1,"2":-1,"3":-1}}'}, "its log ends at 25000"),
    ],
)
def test_what_cannot_be_read_says_why(load, options, says):
    with pytest.raises(Exception) as failure:
        load(**options).count()
    assert says in str(failure.value)


def test_a_broker_that_is_not_there_says_so(spark):
    frame = spark.read.format("tidelog").option("subscribe", "t").option("kafka.bootstrap.servers", "127.0.0.1:1")
    with pytest.raises(Exception, match=r"no broker reached at 127\.0\.0\.1:1"):
        frame.option("kafka.default.api.timeout.ms", "2000").load().count()


def test_filters_of_one_frame_do_not_narrow_its_other_reads(spark, load):
    """Spark reads what the filters of one scan have left also for the other scans of the same frame."""
    spark.conf.set("spark.sql.python.filterPushdown.enabled", "true")
    try:
        frame = load("offset bigint, partition int", subscribe="many", pushFilters="true")
        some = frame.where("partition = 0 and offset < 5").union(frame.where("partition = 1 and offset < 7"))
        assert sorted(map(tuple, some.groupBy("partition").count().collect())) == [(0, 5), (1, 7)]
        assert frame.where("partition = 3").count() == frame.count() / 4 == 25_000
    finally:
        spark.conf.unset("spark.sql.python.filterPushdown.enabled")
