"""A job for a cluster of Spark: writes a topic, copies it into another by a stream, each exactly once, and reads both.

`job.py '{"bootstrap": ..., "source": ..., "target": ..., "rows": 3000, "checkpoint": ...}'` prints what
it finds as JSON.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from typing import Any


def home(_: Iterable[int]) -> Iterable[str]:
    """Where a task has the package from."""
    import tidelog

    yield str(tidelog.__file__)


def main(plan: dict[str, Any]) -> None:
    from pyspark.sql import SparkSession

    spark = SparkSession.builder.getOrCreate()
    kafka = {"kafka.bootstrap.servers": plan["bootstrap"]}
    frame = spark.range(plan["rows"], numPartitions=4).selectExpr("cast(id as string) value", "cast(id as string) key")
    frame.write.format("tidelog").mode("append").options(**kafka, topic=plan["source"], exactlyOnce="true").save()
    reader = spark.readStream.format("tidelog").options(**kafka, subscribe=plan["source"], startingOffsets="earliest")
    writer = (
        reader.option("kafka.isolation.level", "read_committed")
        .option("maxOffsetsPerTrigger", str(plan["rows"] // 3))
        .load()
        .select("key", "value")
        .writeStream.queryName("copy")
        .format("tidelog")
        .options(**kafka, topic=plan["target"], exactlyOnce="true", checkpointLocation=plan["checkpoint"])
    )
    writer.trigger(availableNow=True).start().awaitTermination()
    found: dict[str, Any] = {}
    for topic in (plan["source"], plan["target"]):
        rows = spark.read.format("tidelog").options(
            **kafka, subscribe=topic, **{"kafka.isolation.level": "read_committed"}
        )
        found[topic] = sorted(int(row.value) for row in rows.load().selectExpr("cast(value as string) value").collect())
    found["homes"] = sorted(set(spark.sparkContext.range(4, numSlices=4).mapPartitions(home).collect()))
    found["executors"] = spark.sparkContext._jsc.sc().getExecutorMemoryStatus().size() - 1
    print(json.dumps(found))
    spark.stop()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
