"""A Spark job of its own process that copies a topic into files, and kills itself at a chosen step of its stream.

`python killed_job.py '{"bootstrap": ..., "topic": ..., "directory": ..., "step": "partitions", "call": 2}'`. The step
is a method of the stream's reader, before (`partitions`) or after (`partitions-done`) it has run. Without a step the
job runs to its end and prints what the files hold.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from tidelog.spark_ingest.source import TidelogDataSource, TidelogStreamReader

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
            return make(given._options, given._columns)

    builder = SparkSession.builder.master("local[2]").appName("killed")
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
        .options(subscribe=plan["topic"], startingOffsets="earliest", maxOffsetsPerTrigger="40")
        .load()
        .selectExpr("cast(value as string) value")
    )
    writer = records.writeStream.format("json").option("path", str(directory / "out"))
    writer = writer.option("checkpointLocation", str(directory / "checkpoint"))
    writer.trigger(availableNow=True).start().awaitTermination()
    rows = spark.read.schema("value string").json(str(directory / "out")).collect()
    print(json.dumps(sorted(row.value for row in rows)))
    spark.stop()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
