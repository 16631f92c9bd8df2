"""One Spark session that measures both formats: a job as JSON on each line of stdin, its figures on a line of stdout.

An empty object is printed first, when Spark has started. CPU is that of the whole process tree: the JVM, the driver's
Python and the tasks' Python.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple

_TICKS = os.sysconf("SC_CLK_TCK")
_TASKS = 4
_SETTLE_S = 6.0
"""A stream's first micro-batches do not count for its latency."""
_PAUSE_S = 0.02


class ProcessTimes(NamedTuple):
    """The CPU seconds of one process."""

    parent: int
    own_s: float
    ended_children_s: float
    """Of children that have ended and were waited for, and of theirs."""


def tree_times(root: int) -> dict[int, ProcessTimes]:
    """The processes from `root` on down, as they are now."""
    processes: dict[int, ProcessTimes] = {}
    for directory in Path("/proc").iterdir():
        if not directory.name.isdigit():
            continue
        try:
            fields = (directory / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        user, system, children_user, children_system = (int(each) / _TICKS for each in fields[11:15])
        processes[int(directory.name)] = ProcessTimes(int(fields[1]), user + system, children_user + children_system)
    below = {root}
    while grown := {pid for pid, each in processes.items() if each.parent in below} - below:
        below |= grown
    return {pid: each for pid, each in processes.items() if pid in below}


def cpu_between(before: Mapping[int, ProcessTimes], after: Mapping[int, ProcessTimes]) -> float:
    """The CPU seconds of a tree between two looks, also of processes that were not there at one of them.

    Spark ends Python workers after a minute without work, and nothing waits for them: their seconds leave the tree.
    Those of a child that was waited for go to its parent. Neither changes what was used between the looks.
    """
    gone: dict[int, float] = {}
    for pid, each in before.items():
        if pid not in after:
            parent = each.parent
            while parent not in after and parent in before:
                parent = before[parent].parent
            gone[parent] = gone.get(parent, 0.0) + each.own_s + each.ended_children_s
    nothing = ProcessTimes(0, 0.0, 0.0)
    return sum(
        each.own_s
        - (earlier := before.get(pid, nothing)).own_s
        + max(0.0, each.ended_children_s - earlier.ended_children_s - gone.get(pid, 0.0))
        for pid, each in after.items()
    )


def start_session(jars: str, directory: str) -> Any:
    from pyspark.sql import SparkSession

    os.environ.update(PYSPARK_PYTHON=sys.executable, SPARK_LOCAL_IP="127.0.0.1")
    settings = {
        "spark.jars": jars,
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.sql.shuffle.partitions": "2",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.memory": "3g",
        "spark.local.dir": directory,
    }
    builder = SparkSession.builder.master("local[2]").appName("tidelog-bench")
    for name, value in settings.items():
        if value:
            builder = builder.config(name, value)
    session = builder.getOrCreate()
    session.sparkContext.setLogLevel("OFF")
    return session


class Jobs:
    """The jobs of one session. Each returns its figures as a dict."""

    def __init__(self, spark: Any, directory: str) -> None:
        self._spark = spark
        self._directory = directory
        self._frames: dict[tuple[int, int], Any] = {}

    def values(self, job: Mapping[str, Any]) -> Any:
        """A table of so many values of so many bytes, in memory: half of each is random."""
        key = job["records"], job["size_bytes"]
        if key not in self._frames:
            for frame in self._frames.values():
                frame.unpersist()
            digests = ", ".join(f"sha2(concat('{part}', id), 256)" for part in range(max(1, key[1] // 128)))
            text = f"rpad(concat('{{\"flight\":', id, ',\"seat\":\"', {digests}), {key[1]}, '\"}}       ')"
            frame = self._spark.range(key[0], numPartitions=_TASKS).selectExpr(f"cast({text} as binary) value")
            frame.cache().count()
            self._frames = {key: frame}
        return self._frames[key]

    def fill(self, job: Mapping[str, Any]) -> dict[str, Any]:
        """Write a topic to read from, in the batches of our sink."""
        options = {"topic": job["topic"], "kafka.compression.type": job["codec"]}
        self.values(job).write.format("tidelog").mode("append").options(**_servers(job), **options).save()
        return {}

    def batch(self, job: Mapping[str, Any]) -> dict[str, Any]:
        from pyspark.sql import Observation
        from pyspark.sql import functions as F

        seen = Observation()
        reader = self._spark.read.format(job["format"]).options(**_servers(job), subscribe=job["topic"])
        frame = reader.load().observe(seen, F.count(F.lit(1)).alias("rows"))
        figures = _measured(lambda: frame.write.format("noop").mode("overwrite").save())
        return figures | {"rows": seen.get["rows"]}

    def stream(self, job: Mapping[str, Any]) -> dict[str, Any]:
        reader = self._spark.readStream.format(job["format"]).options(**_servers(job), subscribe=job["topic"])
        frame = reader.option("startingOffsets", "earliest").load()
        rows: list[int] = []

        def run() -> None:
            with tempfile.TemporaryDirectory(dir=self._directory) as checkpoint:
                writer = frame.writeStream.format("noop").option("checkpointLocation", checkpoint)
                query = writer.trigger(availableNow=True).start()
                query.awaitTermination()
                rows.extend(each.numInputRows for each in query.recentProgress)

        figures = _measured(run)
        return figures | {"rows": sum(rows)}

    def sink(self, job: Mapping[str, Any]) -> dict[str, Any]:
        writer = self.values(job).write.format(job["format"]).mode("append")
        writer = writer.options(**_servers(job), topic=job["topic"])
        writer = writer.option("kafka.compression.type", job["codec"])
        return _measured(writer.save) | {"rows": job["records"]}

    def latency(self, job: Mapping[str, Any]) -> dict[str, Any]:
        """From `send` to the row in foreachBatch, trigger as fast as possible."""
        latencies_ms: list[float] = []

        def take(frame: Any, _: int) -> None:
            values = [bytes(row.value) for row in frame.select("value").collect()]
            now_ns = time.time_ns()
            latencies_ms.extend((now_ns - int(value.split()[0])) / 1e6 for value in values)

        reader = self._spark.readStream.format(job["format"]).options(**_servers(job), subscribe=job["topic"])
        with tempfile.TemporaryDirectory(dir=self._directory) as checkpoint:
            writer = reader.option("startingOffsets", "latest").load().writeStream.foreachBatch(take)
            query = writer.option("checkpointLocation", checkpoint).start()
            try:
                ignored = _produce(job, lambda: len(latencies_ms))
                deadline = time.monotonic() + 60
                while len(latencies_ms) < ignored + job["records"] // 2 and time.monotonic() < deadline:
                    time.sleep(0.1)
            finally:
                query.stop()
        return {"latencies_ms": sorted(latencies_ms[ignored:])}


def _produce(job: Mapping[str, Any], received: Callable[[], int]) -> int:
    """Send records at a steady rate; how many had arrived when the measurement began.

    It begins some seconds after the first record has arrived.
    """
    from tidelog.client.sync import Producer

    began_s: float | None = None
    ignored, sent = 0, 0
    with Producer(bootstrap_servers=job["bootstrap"], linger_ms=0) as producer:
        while sent < job["records"]:
            value = f"{time.time_ns()} ".encode()
            producer.send(job["topic"], value.ljust(job["size_bytes"]))
            time.sleep(_PAUSE_S)
            began_s = began_s or (time.monotonic() if received() else None)
            if began_s is None or time.monotonic() < began_s + _SETTLE_S:
                ignored = received()
            else:
                sent += 1
        producer.flush()
    return ignored


def _measured(run: Callable[[], None]) -> dict[str, Any]:
    before, start_s = tree_times(os.getpid()), time.perf_counter()
    run()
    elapsed_s = time.perf_counter() - start_s
    return {"elapsed_s": elapsed_s, "cpu_s": cpu_between(before, tree_times(os.getpid()))}


def _servers(job: Mapping[str, Any]) -> dict[str, str]:
    return {"kafka.bootstrap.servers": job["bootstrap"]}


def main(jars: str, directory: str) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the JVM prints is no answer
    with redirect_stdout(sys.stderr):
        jobs = Jobs(start_session(jars, directory), directory)
        answers.write("{}\n")  # ready
        answers.flush()
        for line in sys.stdin:
            job = json.loads(line)
            try:
                answer = getattr(jobs, job["kind"])(job)
            except Exception as error:
                answer = {"failure": " ".join(f"{type(error).__name__}: {error}".split())[:300]}
            answers.write(json.dumps(answer) + "\n")
            answers.flush()
        jobs._spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
