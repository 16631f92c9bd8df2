"""`spark.readStream.format("tidelog")` against a running node: what a user of Structured Streaming sees."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tidelog.client.model import NewTopic
from tidelog.client.sync import Admin, Producer

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


class Topic:
    """A topic of one test, and streams that read it into memory tables."""

    def __init__(self, spark: Any, bootstrap: str, name: str, directory: Path) -> None:
        self.spark, self.bootstrap, self.name, self.directory = spark, bootstrap, name, directory
        self.sizes: list[int] = []

    def create(self, partitions: int) -> None:
        with Admin(bootstrap_servers=self.bootstrap) as admin:
            admin.create_topics([NewTopic(self.name, partitions)])
        self.sizes = [0] * partitions

    def produce(self, *counts: int) -> None:
        """So many records more in each partition; a value is its partition and offset."""
        with Producer(bootstrap_servers=self.bootstrap) as producer:
            for partition, count in enumerate(counts):
                for offset in range(self.sizes[partition], self.sizes[partition] + count):
                    producer.send(self.name, b"%d/%d" % (partition, offset), partition=partition)
            producer.flush()
        self.sizes = [size + count for size, count in zip(self.sizes, counts)]

    def everything(self) -> list[str]:
        return sorted(f"{number}/{offset}" for number, size in enumerate(self.sizes) for offset in range(size))

    def stream(self, table: str, **options: str) -> Any:
        """A stream from the beginning into a memory table, not started yet."""
        options = {"subscribe": self.name, "startingOffsets": "earliest", **options}
        reader = self.spark.readStream.format("tidelog").option("kafka.bootstrap.servers", self.bootstrap)
        frame = reader.options(**options).load().selectExpr("cast(value as string) value", "partition", "offset")
        return frame.writeStream.format("memory").queryName(table).outputMode("append")

    def batch(self, **options: str) -> Any:
        reader = self.spark.read.format("tidelog").option("kafka.bootstrap.servers", self.bootstrap)
        return reader.options(subscribe=self.name, **options).load()

    def checkpointed(self, **options: str) -> Any:
        """A stream into files with a checkpoint, which `written` reads."""
        options = {"subscribe": self.name, "startingOffsets": "earliest", **options}
        reader = self.spark.readStream.format("tidelog").option("kafka.bootstrap.servers", self.bootstrap)
        frame = reader.options(**options).schema("value binary").load().selectExpr("cast(value as string) value")
        writer = frame.writeStream.format("json").option("path", str(self.directory / "out"))
        return writer.option("checkpointLocation", str(self.directory / "checkpoint"))

    def written(self) -> list[str]:
        return sorted(
            row.value for row in self.spark.read.schema("value string").json(str(self.directory / "out")).collect()
        )

    def read(self, table: str) -> list[str]:
        return sorted(row.value for row in self.spark.table(table).collect())


@pytest.fixture
def topic(spark, node, tmp_path, request):
    return Topic(spark, node.bootstrap_servers, f"stream-{abs(hash(request.node.name)) % 10**9}", tmp_path)


def run(query_of: Any) -> list[dict]:
    """Start the stream with the trigger AvailableNow and wait for its end; the progress of its batches."""
    query = query_of.trigger(availableNow=True).start()
    try:
        query.awaitTermination()
        return [json.loads(progress.json) for progress in query.recentProgress]
    finally:
        query.stop()


def test_a_stream_reads_what_was_there_and_what_comes(topic):
    topic.create(3)
    topic.produce(5, 0, 2)
    query = topic.stream("all_that_comes").start()
    try:
        query.processAllAvailable()
        assert topic.read("all_that_comes") == topic.everything()
        topic.produce(1, 4, 0)
        query.processAllAvailable()
        assert topic.read("all_that_comes") == topic.everything()
        source = json.loads(query.lastProgress.json)["sources"][0]
    finally:
        query.stop()
    assert source["endOffset"] == {topic.name: {"0": 6, "1": 4, "2": 2}}
    assert source["latestOffset"] == source["endOffset"]


def test_a_limit_makes_several_batches_and_a_restart_goes_on_where_the_checkpoint_is(topic):
    topic.create(2)
    topic.produce(60, 20)
    batches = run(topic.checkpointed(maxOffsetsPerTrigger="40"))
    assert [batch["numInputRows"] for batch in batches if batch["numInputRows"]] == [40, 40]
    topic.produce(3, 0)
    batches = run(topic.checkpointed(maxOffsetsPerTrigger="1000", minOffsetsPerTrigger="900"))
    assert [batch["numInputRows"] for batch in batches if batch["numInputRows"]] == [3]
    assert topic.written() == topic.everything()


def test_new_partitions_are_read_from_their_beginning(topic):
    topic.create(1)
    topic.produce(2)
    query = topic.stream("of_new_partitions", startingOffsets="latest").start()
    try:
        query.processAllAvailable()
        with Admin(bootstrap_servers=topic.bootstrap) as admin:
            admin.create_partitions({topic.name: 3})
        topic.sizes += [0, 0]
        topic.produce(1, 5, 0)
        query.processAllAvailable()
        assert topic.read("of_new_partitions") == ["0/2", *(f"1/{offset}" for offset in range(5))]
    finally:
        query.stop()


def test_every_lag_tool_sees_the_progress_of_a_stream(topic):
    topic.create(2)
    topic.produce(5, 7)
    run(topic.checkpointed(commitOffsetsToGroup=f"group-{topic.name}"))
    with Admin(bootstrap_servers=topic.bootstrap) as admin:
        lags = admin.group_lag(f"group-{topic.name}")
    assert {partition.partition: (lag.committed, lag.lag) for partition, lag in lags.items()} == {0: (5, 0), 1: (7, 0)}
    topic.produce(0, 2)
    rest = topic.batch(startingOffsets="committed", startingOffsetsGroup=f"group-{topic.name}")
    assert sorted(tuple(row) for row in rest.select("partition", "offset").collect()) == [(1, 7), (1, 8)]


def test_a_stream_ends_with_the_reason_when_records_are_gone(topic):
    topic.create(1)
    topic.produce(5)
    run(topic.checkpointed())
    with Admin(bootstrap_servers=topic.bootstrap) as admin:
        admin.delete_topics([topic.name])
    topic.create(1)
    topic.produce(2)
    with pytest.raises(Exception, match="was deleted and created again; the stream was at offset 5"):
        run(topic.checkpointed())
    run(topic.checkpointed(failOnDataLoss="false"))
    assert topic.written() == sorted([f"0/{offset}" for offset in range(5)] + ["0/0", "0/1"])


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"endingOffsets": "latest"}, "'endingOffsets' is not allowed in a stream: ending offset not valid"),
        ({"subscribe": "no-such-topic"}, "topic 'no-such-topic' does not exist"),
    ],
)
def test_what_cannot_be_streamed_says_why(topic, options, says):
    topic.create(1)
    with pytest.raises(Exception) as failure:
        run(topic.stream("refused", **options))
    assert says in str(failure.value)
    assert "UnboundLocalError" not in str(failure.value)  # of Spark, where the reader is not made
