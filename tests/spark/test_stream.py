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

    def checkpointed(self, **options: str) -> Any:
        """A stream into files with a checkpoint, which `written` reads."""
        options = {"subscribe": self.name, "startingOffsets": "earliest", **options}
        reader = self.spark.readStream.format("tidelog").option("kafka.bootstrap.servers", self.bootstrap)
        frame = reader.options(**options).load().selectExpr("cast(value as string) value")
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


def test_a_restart_goes_on_where_the_checkpoint_is(topic):
    topic.create(2)
    topic.produce(10, 10)
    run(topic.checkpointed())
    topic.produce(3, 0)
    run(topic.checkpointed())
    run(topic.checkpointed())
    assert topic.written() == topic.everything()
