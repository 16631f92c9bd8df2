"""A Spark job of its own process that copies a topic into files, and kills itself at a chosen step of its stream.

`python killed_job.py '{"bootstrap": ..., "topic": ..., "directory": ..., "step": "partitions", "call": 2}'`. The step
is a method of the stream's reader, before (`partitions`) or after (`partitions-done`) it has run. Without a step the
job runs to its end and prints what the files hold.

With `"target": "topic"` it copies into that topic instead, exactly once, and a step may be one of the sink's: `write`,
`write-done`, `sink-commit`, `sink-commit-half` and `sink-commit-done`, in a micro-batch that `"seed"` chooses. At
`worker-write` and `worker-write-done` the first attempt of a task alone dies, and Spark runs the task again. With
`"guard": false` a task does not look for the micro-batch that it has committed.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from tidelog.spark_ingest import sink
from tidelog.spark_ingest.held_rows import HeldRows
from tidelog.spark_ingest.micro_batches import CommittedBatch
from tidelog.spark_ingest.sink import TaskOutput
from tidelog.spark_ingest.source import TidelogDataSource, TidelogStreamReader
from tidelog.spark_ingest.writers import TaskWritten, TidelogStreamWriter

PLANNED = ("initialOffset", "latestOffset", "partitions", "commit", "read")


def die(directory: str) -> None:
    """Kill the driver's JVM and the job, as a machine that loses power does."""
    for pid in (Path(directory) / "pids").read_text().split():
        os.kill(int(pid), signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


def reader_that_dies(reader: TidelogStreamReader, plan: dict[str, Any]) -> TidelogStreamReader:
    """The reader with each of its steps watched."""
    step, _, moment = plan.get("step", "").partition("-")
    calls: Counter[str] = Counter()

    def watched(name: str) -> Any:
        real = getattr(reader, name)

        def call(*args: Any) -> Any:
            calls[name] += 1
            is_due = name == step and calls[name] == plan["call"]
            if is_due and not moment:
                die(plan["directory"])
            result = real(*args)
            if name == "read" and is_due:
                return half_read(result, plan["directory"])
            if is_due:
                die(plan["directory"])
            return result

        return call

    for name in PLANNED:
        setattr(reader, name, watched(name))
    return reader


def half_read(batches: Any, directory: str) -> Any:
    yield next(batches)
    die(directory)


async def forget(*arguments: Any, **named: Any) -> CommittedBatch:
    return CommittedBatch(-1, 0)


def has_rows(written: TaskOutput | HeldRows) -> bool:
    """Whether the commit of a task writes rows of it, or ends their transaction."""
    return bool(written.content if isinstance(written, HeldRows) else written.transaction)


def writer_that_dies(writer: Any, plan: dict[str, Any]) -> TidelogStreamWriter:
    """The writer with each of its steps watched."""
    step, directory = plan.get("step", ""), plan["directory"]

    def die_at(name: str, batch: int) -> None:
        if step == name and random.Random(f"{plan.get('seed', 0)}-{batch}").random() < 0.5:
            die(directory)

    def worker_dies_at(name: str, batch: int, attempt: int) -> None:
        if step == name and not attempt and random.Random(f"{plan.get('seed', 0)}-{batch}").random() < 0.5:
            os.kill(os.getpid(), signal.SIGKILL)

    class WatchedWriter(TidelogStreamWriter):  # type: ignore[misc,unused-ignore]
        def write(self, iterator: Any) -> Any:
            from pyspark import TaskContext

            context = TaskContext.get()
            assert context is not None
            batch = int(context.getLocalProperty("streaming.sql.batchId") or 0)
            if not plan.get("guard", True):
                vars(sink)["committed_batch"] = forget
            die_at("write", batch)
            worker_dies_at("worker-write", batch, context.attemptNumber())
            message = TidelogStreamWriter.write(self, iterator)
            die_at("write-done", batch)
            worker_dies_at("worker-write-done", batch, context.attemptNumber())
            return message

        def commit(self, messages: Any, batchId: int) -> None:
            die_at("sink-commit", batchId)
            if step == "sink-commit-half":
                whole = sink.end_transactions

                def half(options: Any, transactions: Any, *, committed: bool) -> None:
                    whole(options, transactions[:1], committed=committed)
                    die_at("sink-commit-half", batchId)
                    whole(options, transactions[1:], committed=committed)

                sink.end_transactions = half
            TidelogStreamWriter.commit(self, messages, batchId)
            if any(isinstance(each, TaskWritten) and has_rows(each.written) for each in messages):
                die_at("sink-commit-done", batchId)

    return WatchedWriter(writer._options)


def main(plan: dict[str, Any]) -> None:
    from pyspark.sql import SparkSession

    class WatchedSource(TidelogDataSource):  # type: ignore[misc,unused-ignore]
        @classmethod
        def name(cls) -> str:
            return "watched"

        def streamReader(self, schema: Any) -> TidelogStreamReader:
            class WatchedReader(TidelogStreamReader):  # type: ignore[misc,unused-ignore]
                def __reduce__(self) -> Any:
                    return make, (self._options, self._columns)

            def make(options: Any, columns: Any) -> TidelogStreamReader:
                return reader_that_dies(WatchedReader(options, columns), plan)

            given = super().streamReader(schema)
            assert isinstance(given, TidelogStreamReader)
            return make(given._options, given._columns)

        def streamWriter(self, schema: Any, overwrite: bool) -> Any:
            return writer_that_dies(super().streamWriter(schema, overwrite), plan)

    builder = SparkSession.builder.master("local[2,4]").appName("killed")
    for name, value in {
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
        "spark.local.dir": plan["directory"],
    }.items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    spark.sparkContext.setLogLevel("OFF")
    directory = Path(plan["directory"])
    gateway = spark.sparkContext._gateway
    assert gateway is not None
    (directory / "pids").write_text(f"{gateway.proc.pid} {os.getpid()}")
    spark.dataSource.register(WatchedSource)
    records = (
        spark.readStream.format("watched")
        .option("kafka.bootstrap.servers", plan["bootstrap"])
        .options(subscribe=plan["topic"], startingOffsets="earliest", maxOffsetsPerTrigger=str(plan.get("limit", 40)))
        .load()
        .selectExpr("cast(value as string) value")
    )
    if "target" in plan:
        writer = records.writeStream.format("watched").option("kafka.bootstrap.servers", plan["bootstrap"])
        writer = writer.options(topic=plan["target"], exactlyOnce="true", atomic=plan.get("atomic", "false")).queryName(
            "copy"
        )
    else:
        writer = records.writeStream.format("json").option("path", str(directory / "out"))
    writer = writer.option("checkpointLocation", str(directory / "checkpoint"))
    writer.trigger(availableNow=True).start().awaitTermination()
    if "target" not in plan:
        rows = spark.read.schema("value string").json(str(directory / "out")).collect()
        print(json.dumps(sorted(row.value for row in rows)))
    spark.stop()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
