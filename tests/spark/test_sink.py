"""`write.format("tidelog")` and `writeStream`: rows in, records out, and what a replay does."""

from __future__ import annotations

import datetime
import time
import uuid
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.patience import PATIENCE_S
from tidelog.client.model import NewTopic
from tidelog.client.sync import Admin, Consumer

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


@pytest.fixture
def topic(node) -> str:
    name = f"sink-{uuid.uuid4().hex[:12]}"
    with Admin(bootstrap_servers=node.bootstrap_servers) as admin:
        # Some of its records are years old: on a slow machine retention would come before the read.
        admin.create_topics([NewTopic(name, 3, configs={"retention.ms": "-1"})])
    return name


@pytest.fixture(autouse=True)
def source(spark):
    from tidelog.spark_ingest.source import TidelogDataSource

    spark.dataSource.register(TidelogDataSource)


def records(node, topic: str, isolation: str = "read_committed") -> list[Any]:
    with Consumer(
        bootstrap_servers=node.bootstrap_servers, auto_offset_reset="earliest", isolation_level=isolation
    ) as consumer:
        from tidelog.client.model import TopicPartition

        partitions = [TopicPartition(topic, number) for number in range(3)]
        ends = consumer.end_offsets(partitions)
        consumer.assign(partitions)
        found: list[Any] = []
        deadline = time.monotonic() + 2 * PATIENCE_S
        while any(consumer.position(partition) < end for partition, end in ends.items()):
            assert time.monotonic() < deadline, f"{len(found)} records are read, the ends are {ends}"
            for some in consumer.poll(1000).values():
                found += some
        return found


def sink(writer: Any, node: Any, **options: str) -> Any:
    return writer.format("tidelog").option("kafka.bootstrap.servers", node.bootstrap_servers).options(**options)


def test_every_column_reaches_its_record(spark, node, topic):
    at = datetime.datetime(2024, 5, 6, 7, 8, 9, 123000, tzinfo=datetime.UTC)
    rows = [
        ("k1", bytearray(b"\x00\xff"), 0, at, [("h", bytearray(b"1")), ("h", None)]),
        (None, bytearray(b""), 1, at, None),
        ("k3", None, 2, at, []),
    ]
    schema = (
        "key string, value binary, partition int, timestamp timestamp, headers array<struct<key:string,value:binary>>"
    )
    sink(spark.createDataFrame(rows, schema).write.mode("append"), node, topic=topic).save()
    found = {record.partition: record for record in records(node, topic)}
    assert {number: (record.key, record.value) for number, record in found.items()} == {
        0: (b"k1", b"\x00\xff"),
        1: (None, b""),
        2: (b"k3", None),
    }
    assert list(found[0].headers) == [("h", b"1"), ("h", None)]
    assert {record.timestamp_ms for record in found.values()} == {int(at.timestamp() * 1000)}


def test_the_column_names_the_topic_unless_the_option_does(spark, node, topic):
    frame = spark.createDataFrame([(topic, "a"), (topic, "b")], "topic string, value string")
    sink(frame.write.mode("append"), node).save()
    sink(
        spark.createDataFrame([("other", "c")], "topic string, value string").write.mode("append"), node, topic=topic
    ).save()
    assert sorted(record.value for record in records(node, topic)) == [b"a", b"b", b"c"]


@pytest.mark.parametrize(
    ("schema", "options", "message"),
    [
        ("value string", {}, "topic option required"),
        ("key string", {"topic": "t"}, "Required attribute 'value' not found"),
        ("value int", {"topic": "t"}, "value attribute type must be a string or binary"),
        ("value string", {"topic": "t", "kafka.lingr.ms": "5"}, "kafka.linger.ms"),
        ("value string", {"topic": "t", "exactlyonce": "perhaps"}, "exactlyOnce must be true or false"),
    ],
)
def test_what_cannot_be_written_is_refused(spark, node, schema, options, message):
    frame = spark.createDataFrame([], schema)
    with pytest.raises(Exception, match=message):
        sink(frame.write.mode("append"), node, **options).save()


def test_a_row_without_a_topic_fails_the_write(spark, node, topic):
    frame = spark.createDataFrame([(None, "a")], "topic string, value string")
    with pytest.raises(Exception, match="null topic present in the data"):
        sink(frame.write.mode("append"), node).save()


@pytest.mark.parametrize("atomic", ["false", "true"])
def test_a_batch_write_with_transactions_is_committed_whole(spark, node, topic, atomic):
    frame = spark.range(0, 3000, numPartitions=3).selectExpr("cast(id as string) value")
    sink(frame.write.mode("append"), node, topic=topic, exactlyOnce="true", atomic=atomic).save()
    assert sorted(int(record.value) for record in records(node, topic)) == list(range(3000))


def test_a_batch_write_that_fails_leaves_nothing_to_see(spark, node, topic):
    frame = spark.range(0, 300, numPartitions=3).selectExpr(
        "cast(if(id = 250, raise_error('broken'), id) as string) value"
    )
    with pytest.raises(Exception, match="broken"):
        sink(frame.write.mode("append"), node, topic=topic, exactlyOnce="true").save()
    assert records(node, topic) == []


def test_speculation_is_refused_where_rows_are_to_be_written_once(spark, node, topic):
    frame = spark.range(3).selectExpr("cast(id as string) value")
    # So a task sees the session's setting.
    spark.sparkContext.setLocalProperty("spark.speculation", "true")
    try:
        with pytest.raises(Exception, match=r"exactlyOnce cannot be used with spark\.speculation=true"):
            sink(frame.write.mode("append"), node, topic=topic, exactlyOnce="true").save()
        sink(frame.write.mode("append"), node, topic=topic).save()
    finally:
        spark.sparkContext.setLocalProperty("spark.speculation", None)
    assert sorted(record.value for record in records(node, topic)) == [b"0", b"1", b"2"]


class Stream:
    """A stream of files into a topic, whose checkpoint can be set back as a crash leaves it."""

    def __init__(self, spark: Any, node: Any, topic: str, directory: Path) -> None:
        self.spark, self.node, self.topic, self.directory = spark, node, topic, directory
        self.count = 0

    def add(self, rows: int) -> None:
        home = self.directory / "in"
        home.mkdir(exist_ok=True)
        text = "".join(f"{number}\n" for number in range(self.count, self.count + rows))
        (home / f"{self.count:08d}.txt").write_text(text)
        self.count += rows

    def run(self, counted: bool = False, **options: str) -> None:
        frame = self.spark.readStream.schema("value string").text(str(self.directory / "in"))
        if counted:
            frame = frame.groupBy().agg({"*": "count"}).selectExpr("cast(`count(1)` as string) value")
        writer = sink(frame.writeStream, self.node, topic=self.topic, **options)
        writer = writer.outputMode("complete" if counted else "append")
        writer = writer.option("checkpointLocation", str(self.directory / "checkpoint"))
        query = writer.queryName(f"into-{self.topic}").trigger(availableNow=True).start()
        query.awaitTermination()

    def forget_the_last_commit(self) -> None:
        """As when the driver dies after the sink's commit and before its own."""
        commits = [path for path in (self.directory / "checkpoint" / "commits").iterdir() if path.name.isdigit()]
        last = max(commits, key=lambda path: int(path.name))
        last.unlink()
        last.with_name(f".{last.name}.crc").unlink(missing_ok=True)

    def written(self) -> Counter[int]:
        return Counter(int(record.value) for record in records(self.node, self.topic))


@pytest.fixture
def stream(spark, node, topic, tmp_path):
    return Stream(spark, node, topic, tmp_path)


@pytest.mark.parametrize("atomic", ["false", "true"])
def test_a_replayed_micro_batch_is_written_once(stream, atomic):
    stream.add(100)
    stream.run(exactlyOnce="true", atomic=atomic)
    stream.add(100)
    stream.run(exactlyOnce="true", atomic=atomic)
    stream.forget_the_last_commit()
    stream.add(100)
    stream.run(exactlyOnce="true", atomic=atomic)
    assert stream.written() == Counter(range(300))


def test_without_transactions_a_replay_is_written_again(stream):
    stream.add(50)
    stream.run()
    stream.forget_the_last_commit()
    stream.run()
    assert stream.written() == Counter(dict.fromkeys(range(50), 2))


def test_the_mode_complete_appends_the_whole_result_of_each_micro_batch(stream):
    """As Spark's own connector does."""
    stream.add(10)
    stream.run(counted=True, exactlyOnce="true")
    stream.add(5)
    stream.run(counted=True, exactlyOnce="true")
    assert stream.written() == Counter([10, 15])


# In New York the hour from 05:00 UTC comes twice that day, and in Chatham all is 45 minutes aside.
ZONES = ("America/New_York", "Pacific/Chatham", "UTC")
HOUR_MS = 3_600_000
TIMES_MS = [1_730_610_000_123 + hour * HOUR_MS for hour in range(4)] + [0, 1, 1_710_054_000_999]


def test_a_timestamp_is_the_same_moment_in_every_time_zone_of_a_session(spark, node, topic):
    zone_before = spark.conf.get("spark.sql.session.timeZone")
    rows = [(f"{time_ms}", time_ms) for time_ms in TIMES_MS]
    shown: list[tuple[str, set[tuple[int, str, bool]]]] = []
    try:
        for zone in ZONES:
            spark.conf.set("spark.sql.session.timeZone", zone)
            frame = spark.createDataFrame(rows, "value string, at long")
            frame = frame.selectExpr("value", "timestamp_millis(at) timestamp", "0 partition")
            sink(frame.write.mode("append"), node, topic=topic).save()
            reader = spark.read.format("tidelog").option("kafka.bootstrap.servers", node.bootstrap_servers)
            read = reader.option("subscribe", topic).load()
            text = "cast(timestamp as string) = cast(timestamp_millis(cast(cast(value as string) as bigint)) as string)"
            found = read.selectExpr("unix_millis(timestamp) at", "cast(value as string) value", f"{text} is_shown")
            shown.append((zone, {(row.at, row.value, row.is_shown) for row in found.collect()}))
    finally:
        spark.conf.set("spark.sql.session.timeZone", zone_before)
    assert Counter(record.timestamp_ms for record in records(node, topic)) == Counter(TIMES_MS * len(ZONES))
    for zone, seen in shown:
        assert seen == {(time_ms, f"{time_ms}", True) for time_ms in TIMES_MS}, zone
