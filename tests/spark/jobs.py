"""Runs `killed_job.py` in a process of its own, kills it, and reads what it has committed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from tests.patience import PATIENCE_S
from tests.spark.spark_home import spark_environment
from tidelog.client.model import NewTopic, TopicPartition
from tidelog.client.sync import Admin, Consumer

JOB = Path(__file__).with_name("killed_job.py")
PARTITIONS = 3


def start_job(plan: dict[str, Any]) -> subprocess.Popen[str]:
    directory = Path(plan["directory"])
    environment = os.environ | spark_environment(directory) | {"PYSPARK_PYTHON": sys.executable}
    with (directory / "job.log").open("ab") as output:
        return subprocess.Popen(
            [sys.executable, str(JOB), json.dumps(plan)], env=environment, stdout=output, stderr=output, text=True
        )


def kill_job(plan: dict[str, Any], job: subprocess.Popen[str]) -> None:
    """Kill the job and its JVM, as far as they run."""
    pids = Path(plan["directory"]) / "pids"
    for pid in [*(pids.read_text().split() if pids.exists() else ()), str(job.pid)]:
        try:
            os.kill(int(pid), signal.SIGKILL)
        except ProcessLookupError:
            continue
    job.wait(PATIENCE_S)


def run_to_its_end(plan: dict[str, Any]) -> None:
    """Run the job until all is copied, or until it is killed where its plan has a step.

    A broker's death may end a query, and so does a busy machine, on which a worker of Spark starts too late: its user
    starts it again.
    """
    for _ in range(8):
        (Path(plan["directory"]) / "pids").unlink(missing_ok=True)
        job = start_job(plan)
        try:
            was_killed = job.wait(8 * PATIENCE_S) < 0
        finally:
            kill_job(plan, job)
        if was_killed == ("step" in plan) and job.returncode <= 0:
            return
    raise AssertionError(Path(plan["directory"], "job.log").read_text()[-3000:])


def committed_values(bootstrap: str, topic: str) -> Counter[int]:
    partitions = [TopicPartition(topic, number) for number in range(PARTITIONS)]
    with Consumer(
        bootstrap_servers=bootstrap, auto_offset_reset="earliest", isolation_level="read_committed"
    ) as consumer:
        ends = consumer.end_offsets(partitions)
        consumer.assign(partitions)
        found: Counter[int] = Counter()
        deadline = time.monotonic() + 2 * PATIENCE_S
        while any(consumer.position(partition) < end for partition, end in ends.items()):
            assert time.monotonic() < deadline, f"{found.total()} records are read, the ends are {ends}"
            for records in consumer.poll(1000).values():
                found.update(int(record.value or b"-1") for record in records)
    return found


def create_topics(bootstrap: str, replicas: int, *names: str) -> None:
    with Admin(bootstrap_servers=bootstrap) as admin:
        admin.create_topics([NewTopic(name, PARTITIONS, replicas) for name in names])
