"""The demo's Spark job, a process of its own: read the topic with `format("tidelog")`, sum by carrier, report.

The session is started while the flights are still being produced, which hides most of the JVM's start; the read begins
when the parent says so.
"""

from __future__ import annotations

import sys
import threading
import time
from typing import Any

from tidelog.bench.demo.events import emit
from tidelog.bench.demo.tally import LATE_AFTER_MINUTES

_FLIGHT_SCHEMA = "arr_delay INT, distance INT"


def start_session(directory: str) -> Any:
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.master("local[2]").appName("tidelog-demo")
    settings = {
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.memory": "1g",
        "spark.local.dir": directory,
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.shuffle.partitions": "2",
        "spark.sql.warehouse.dir": f"{directory}/warehouse",
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.driver.extraJavaOptions": "-XX:+UseSerialGC -XX:TieredStopAtLevel=1",
    }
    for key, value in settings.items():
        builder = builder.config(key, value)
    return builder.getOrCreate()


def delays_by_carrier(session: Any, bootstrap: str, topic: str) -> dict[str, dict[str, int]]:
    """Tallies as in `tally.py`, made by Spark from the records' keys and JSON values."""
    from pyspark.sql import functions as F

    records = (
        session.read.format("tidelog").option("kafka.bootstrap.servers", bootstrap).option("subscribe", topic).load()
    )
    flights = records.select(
        F.col("key").cast("string").alias("carrier"),
        F.from_json(F.col("value").cast("string"), _FLIGHT_SCHEMA).alias("flight"),
    ).select("carrier", "flight.arr_delay", "flight.distance")
    late = F.sum(F.when(F.col("arr_delay") > LATE_AFTER_MINUTES, 1).otherwise(0))
    sums = flights.groupBy("carrier").agg(
        F.count("*").alias("flights"),
        F.count("arr_delay").alias("arrived"),
        F.coalesce(F.sum("arr_delay"), F.lit(0)).alias("arrival_delay_minutes"),
        late.alias("late"),
        F.sum("distance").alias("distance_miles"),
    )
    return {row.pop("carrier"): row for row in (line.asDict() for line in sums.collect())}


def report_tasks(session: Any, finished: threading.Event) -> None:
    """Tells the parent how many of the running jobs' tasks are done, until finished."""
    tracker = session.sparkContext.statusTracker()
    while not finished.wait(0.1):
        done = every = 0
        for stage in tracker.getActiveStageIds():
            info = tracker.getStageInfo(stage)
            if info is not None and info.numTasks > 1:
                done, every = done + info.numCompletedTasks, every + info.numTasks
        if every:
            emit("tasks", done=done, every=every)


def main(bootstrap: str, topic: str, directory: str) -> None:
    began = time.monotonic()
    session = start_session(directory)
    emit("session", seconds=time.monotonic() - began, version=session.version)
    if sys.stdin.readline().strip() == "read":
        began = time.monotonic()
        emit("reading")
        finished = threading.Event()
        reporter = threading.Thread(target=report_tasks, args=(session, finished), daemon=True)
        reporter.start()
        try:
            tallies = delays_by_carrier(session, bootstrap, topic)
        finally:
            finished.set()
            reporter.join()
        emit("done", seconds=time.monotonic() - began, tallies=tallies)
    session.stop()


if __name__ == "__main__":
    main(*sys.argv[1:4])
