"""Spark's own Kafka connector and ours read the same topics: row for row, offset for offset, refusal for refusal.

The connector is a jar that runs in the JVM of the Spark session, beside our Python source.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.patience import PATIENCE_S
from tidelog.bench import peers
from tidelog.client.model import NewTopic, TopicPartition
from tidelog.client.sync import Admin, Producer
from tidelog.testing.processes import ServerProcess

pytestmark = pytest.mark.filterwarnings("ignore")

FORMATS = ("kafka", "tidelog")
TIME = 1_700_000_000_123
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def spark(need_java: None) -> Iterator[Any]:
    pytest.importorskip("pyspark")
    try:
        jars = sorted(map(str, peers.jars("spark", peers.SPARK_CONNECTOR).glob("*.jar")))
    except peers.PeerUnavailable as unavailable:
        pytest.skip(str(unavailable))
    os.environ.update(PYTHONPATH=str(ROOT), PYSPARK_PYTHON=sys.executable, SPARK_LOCAL_IP="127.0.0.1")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from pyspark.sql import SparkSession

        builder = SparkSession.builder.master("local[2]").appName("tidelog-beside-the-connector")
        for name, value in {
            "spark.jars": ",".join(jars),
            "spark.ui.enabled": "false",
            "spark.ui.showConsoleProgress": "false",
            "spark.sql.shuffle.partitions": "2",
            "spark.sql.session.timeZone": "Asia/Tokyo",
            "spark.driver.host": "127.0.0.1",
            "spark.driver.bindAddress": "127.0.0.1",
            "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
        }.items():
            builder = builder.config(name, value)
        session = builder.getOrCreate()
    session.sparkContext.setLogLevel("OFF")
    yield session
    session.stop()


@pytest.fixture(scope="module")
def topics(server: ServerProcess) -> str:
    """`beside-every`: codecs, headers, nulls and gaps. `beside-appended`: log-append time. `beside-trimmed`."""
    bootstrap = server.bootstrap_servers
    with Admin(bootstrap_servers=bootstrap) as admin:
        keep = {"retention.ms": "-1"}
        appended = {**keep, "message.timestamp.type": "LogAppendTime"}
        names = ("every", "appended", "trimmed", "empty")
        admin.create_topics(
            [NewTopic(f"beside-{name}", 3, 1, appended if name == "appended" else keep) for name in names]
        )
        for codec in ("none", "gzip", "snappy", "lz4", "zstd"):
            with Producer(bootstrap_servers=bootstrap, compression_type=codec) as producer:
                for index in range(90):
                    headers = [("a", b"1"), ("b", None), ("a", b"")] if index % 2 else []
                    key = None if index % 5 == 0 else b"key %d" % index
                    value = None if index % 7 == 0 else b"" if index % 11 == 0 else b"\xff%d" % index * (index + 1)
                    for name in names[:3]:
                        timestamp = TIME + index % 50
                        producer.send(
                            f"beside-{name}", value, key, partition=index % 3, timestamp_ms=timestamp, headers=headers
                        )
                producer.flush()
        admin.delete_records({TopicPartition("beside-trimmed", 1): 40})
    return bootstrap


@pytest.fixture
def read(spark: Any, topics: str) -> Callable[..., list[tuple]]:
    def read(format_name: str, **options: str) -> list[tuple]:
        reader = spark.read.format(format_name).option("kafka.bootstrap.servers", topics)
        rows = reader.options(**options).load().collect()
        return sorted((tuple(row) for row in rows), key=lambda row: row[2:5])

    return read


def by_partition(topic: str, *values: int) -> str:
    return json.dumps({topic: {str(number): value for number, value in enumerate(values)}})


@pytest.mark.parametrize(
    "options",
    [
        {"subscribe": "beside-every", "includeHeaders": "true"},
        {"subscribe": "beside-appended"},
        {"subscribe": "beside-empty"},
        {"subscribePattern": "side-(every|app[a-z&&[^x]]+ed)$"},
        {"assign": '{"beside-every":[2,0]}'},
        {"subscribe": "beside-every", "startingOffsets": by_partition("beside-every", 5, -2, 149)},
        {"subscribe": "beside-every", "endingOffsets": by_partition("beside-every", 5, -1, 149)},
        {"subscribe": "beside-every", "startingTimestamp": str(TIME + 40)},
        {"subscribe": "beside-every", "startingTimestamp": str(TIME + 10), "endingTimestamp": str(TIME + 30)},
        {"subscribe": "beside-every", "startingOffsetsByTimestamp": by_partition("beside-every", TIME, TIME + 9, 0)},
        {"subscribe": "beside-every", "minPartitions": "11"},
        {"subscribe": "beside-every", "maxRecordsPerPartition": "13"},
        {"subscribe": "beside-trimmed"},
        {
            "subscribe": "beside-every",
            "startingTimestamp": str(TIME + 10_000),
            "startingOffsetsByTimestampStrategy": "latest",
        },
    ],
    ids=lambda options: ",".join(options)[:60],
)
def test_a_batch_read_gives_the_same_rows(read, options):
    theirs, ours = (read(each, **options) for each in FORMATS)
    assert ours == theirs
    empty = "empty" in options.get("subscribe", "") or "startingOffsetsByTimestampStrategy" in options
    assert bool(ours) != empty


@pytest.mark.parametrize(
    "options",
    [
        {"subscribe": "beside-every", "startingOffsets": "latest"},
        {"subscribe": "beside-every", "endingOffsets": "earliest"},
        {"subscribe": "beside-every", "startingOffsets": by_partition("beside-every", 5)},
        {"subscribe": "beside-every", "startingOffsets": by_partition("beside-every", 5, 5, -1)},
        {"subscribe": "beside-every", "startingOffsets": by_partition("beside-every", 5, 5, 9, 9)},
        {
            "subscribe": "beside-every",
            "startingOffsets": by_partition("beside-every", 5, 5, 5),
            "endingOffsets": by_partition("beside-every", 5, 5, 4),
        },
        {"subscribe": "beside-every", "startingTimestamp": str(TIME + 10_000)},
        {"subscribe": "beside-trimmed", "startingOffsets": by_partition("beside-trimmed", 0, 0, 0)},
        {"subscribe": "beside-nowhere"},
        {"subscribe": "beside-every", "kafka.auto.offset.reset": "earliest"},
        {"subscribe": "beside-every", "kafka.enable.auto.commit": "true"},
        {"subscribe": "beside-every", "assign": '{"beside-every":[0]}'},
        {"subscribe": " , "},
        {"subscribePattern": "("},
        {"subscribePattern": ""},
        {"subscribe": "beside-every", "minPartitions": "0"},
        {},
    ],
    ids=lambda options: ",".join(options)[:60],
)
def test_what_one_refuses_the_other_refuses(read, options):
    for each in FORMATS:
        with pytest.raises(Exception):  # noqa: B017
            read(each, **options)


class Streams:
    """Runs of the same query, each with the trigger AvailableNow, with one checkpoint for each name."""

    def __init__(self, spark: Any, bootstrap: str, directory: Path) -> None:
        self.spark, self.bootstrap, self.directory = spark, bootstrap, directory

    def run(self, format_name: str, checkpoint: str, **options: str) -> list[tuple[int, dict]]:
        """The rows and the end of each micro-batch that had rows."""
        frame = (
            self.spark.readStream.format(format_name)
            .option("kafka.bootstrap.servers", self.bootstrap)
            .options(**{"startingOffsets": "earliest", **options})
            .load()
        )
        writer = frame.writeStream.foreachBatch(lambda frame, number: frame.write.format("noop").mode("append").save())
        query = writer.option("checkpointLocation", str(self.directory / checkpoint)).trigger(availableNow=True).start()
        try:
            assert query.awaitTermination(PATIENCE_S * 3)
            progress = [json.loads(each.json) for each in query.recentProgress]
        finally:
            query.stop()
        return [(each["numInputRows"], each["sources"][0]["endOffset"]) for each in progress if each["numInputRows"]]


def as_offsets(batches: list[tuple[int, Any]]) -> list[tuple[int, Any]]:
    """Their connector reports offsets as text."""
    return [(rows, json.loads(end) if isinstance(end, str) else end) for rows, end in batches]


def test_a_stream_makes_the_same_batches_and_goes_on_from_the_others_checkpoint(spark, topics, tmp_path):
    name = f"beside-stream-{os.getpid()}"
    with Admin(bootstrap_servers=topics) as admin:
        admin.create_topics([NewTopic(name, 2, 1)])
        with Producer(bootstrap_servers=topics) as producer:
            for number in range(100):
                producer.send(name, b"%d" % number, partition=int(number % 5 == 0))
            producer.flush()
        streams = Streams(spark, topics, tmp_path)
        limited = {"subscribe": name, "maxOffsetsPerTrigger": "30"}
        theirs, ours = (as_offsets(streams.run(each, each, **limited)) for each in FORMATS)
        assert ours == theirs
        assert sum(rows for rows, _ in ours) == 100
        admin.create_partitions({name: 3})
        with Producer(bootstrap_servers=topics) as producer:
            for number in range(30):
                producer.send(name, b"%d" % number, partition=number % 3)
            producer.flush()
    # Each goes on where the other has stopped.
    crossed = [as_offsets(streams.run(each, other, **limited)) for each, other in zip(FORMATS, reversed(FORMATS))]
    assert crossed[0] == crossed[1]
    assert crossed[0][-1][1] == {name: {"0": 90, "1": 30, "2": 10}}


def test_transactions_are_read_alike(spark, server, topics, tmp_path):
    confluent = pytest.importorskip("confluent_kafka")
    name = f"beside-transactions-{os.getpid()}"
    with Admin(bootstrap_servers=topics) as admin:
        admin.create_topics([NewTopic(name, 1, 1)])
    open_producers = []
    for number, end in enumerate(("commit", "abort", "commit", "abort", "open")):
        producer = confluent.Producer(
            {"bootstrap.servers": topics, "transactional.id": f"{name}-{number}", "log_level": 0}
        )
        try:
            producer.init_transactions(PATIENCE_S)
        except confluent.KafkaException as error:
            if error.args[0].code() == confluent.KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED:
                pytest.skip("this broker serves no transactions")
            raise
        producer.begin_transaction()
        for index in range(10 + number):
            producer.produce(name, f"{end} {index}", partition=0)
        producer.flush(PATIENCE_S)
        if end == "commit":
            producer.commit_transaction(PATIENCE_S)
        elif end == "abort":
            producer.abort_transaction(PATIENCE_S)
        else:
            open_producers.append(producer)
    try:
        for isolation, rows in (("read_committed", 22), ("read_uncommitted", 60)):
            options = {"subscribe": name, "kafka.isolation.level": isolation}
            found = []
            for each in FORMATS:
                reader = spark.read.format(each).option("kafka.bootstrap.servers", topics).options(**options)
                found.append(sorted(map(tuple, reader.load().select("offset", "value").collect())))
            assert found[0] == found[1]
            assert len(found[1]) == rows
        committed = {"subscribe": name, "kafka.isolation.level": "read_committed"}
        streams = Streams(spark, topics, tmp_path)
        theirs, ours = (as_offsets(streams.run(each, each, **committed)) for each in FORMATS)
        assert ours == theirs
    finally:
        for producer in open_producers:
            producer.abort_transaction(PATIENCE_S)
