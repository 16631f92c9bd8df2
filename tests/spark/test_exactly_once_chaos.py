"""Chaos from topic to topic: a job with `exactlyOnce` is killed at every step, brokers die: output is input.

`make spark-chaos MINUTES=30`. TIDELOG_SEED chooses the faults.
"""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.doses import dose
from tests.patience import PATIENCE_S, join
from tests.spark.jobs import PARTITIONS, committed_values, create_topics, kill_job, run_to_its_end, start_job
from tidelog.client.sync import Producer
from tidelog.testing import EmbeddedCluster

pytestmark = [pytest.mark.hunt, pytest.mark.filterwarnings("ignore")]

MINUTES = dose("TIDELOG_SPARK_CHAOS_MINUTES")
SEED = int(os.environ.get("TIDELOG_SEED") or 1)
SOURCE, TARGET = "chaos-in", "chaos-out"
STEPS = (
    *(
        "write",
        "write-done",
        "sink-commit",
        "sink-commit-half",
        "sink-commit-done",
        "worker-write",
        "worker-write-done",
    ),
    *("latestOffset-done", "partitions-done", "read-half", "commit", "commit-done"),
)
AFTER_COMMITS = ("sink-commit-half", "sink-commit-done")


class Input:
    """Sends numbers into the source until it is stopped."""

    def __init__(self, bootstrap: str) -> None:
        self.bootstrap, self.count = bootstrap, 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        timeouts = {"delivery_timeout_ms": 600_000, "max_block_ms": 600_000}
        with Producer(bootstrap_servers=self.bootstrap, **timeouts) as producer:
            while not self._stop.wait(0.05):
                for _ in range(10):
                    producer.send(SOURCE, b"%d" % self.count, partition=self.count % PARTITIONS)
                    self.count += 1
            producer.flush()

    def stop(self) -> None:
        self._stop.set()
        join(self._thread, 5 * PATIENCE_S)


class BrokerDeaths:
    """Kills a broker now and then, one at a time, and starts it again."""

    def __init__(self, cluster: EmbeddedCluster, rng: random.Random) -> None:
        self.cluster, self.rng, self.count = cluster, rng, 0
        self.failure: BaseException | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            while not self._stop.wait(self.rng.uniform(5, 15)):
                broker = self.rng.choice(sorted(self.cluster.nodes))
                self.cluster.kill(broker)
                self.count += 1
                self._stop.wait(self.rng.uniform(0.5, 5))
                self.cluster.restart(broker)
                self.cluster.restore()
        except BaseException as error:
            self.failure = error

    def stop(self) -> None:
        self._stop.set()
        join(self._thread, 5 * PATIENCE_S)
        if self.failure is not None:
            raise self.failure


@pytest.fixture
def plan(tmp_path: Path) -> dict[str, Any]:
    if shutil.which("java") is None:
        pytest.skip("needs Java")
    return {"topic": SOURCE, "target": TARGET, "directory": str(tmp_path), "limit": 300}


def kill_at_steps(plan: dict[str, Any], steps: tuple[str, ...], rng: random.Random, minutes: float) -> Counter[str]:
    """Start the job again and again, each time to be killed at one of the steps; how often that was which."""
    kills, end = Counter[str](), time.monotonic() + minutes * 60
    queue: list[str] = []
    while time.monotonic() < end:
        queue = queue or rng.sample(steps, len(steps))
        step = queue.pop()
        (Path(plan["directory"]) / "pids").unlink(missing_ok=True)
        this_plan = plan | {"step": step, "call": rng.choice((1, 2)), "seed": rng.random()}
        job = start_job(this_plan)
        try:
            # A read's call is counted for each task; the others' for the query.
            code = job.wait(max(30, min(3 * PATIENCE_S, end - time.monotonic())))
        except subprocess.TimeoutExpired:
            code = None
        kill_job(this_plan, job)
        outcome = step if code is not None and code < 0 else "any time" if code is None else f"{step}: not killed"
        kills[outcome] += 1
    return kills


def copy_under_chaos(
    directory: Path, plan: dict[str, Any], steps: tuple[str, ...], minutes: float
) -> tuple[Counter[int], Counter[int]]:
    """The committed numbers of the output and of the input."""
    rng = random.Random(SEED)
    with EmbeddedCluster(brokers=3, directory=directory / "cluster") as cluster:
        create_topics(cluster.bootstrap_servers, 3, SOURCE, TARGET)
        plan = plan | {"bootstrap": cluster.bootstrap_servers}
        source, deaths = Input(cluster.bootstrap_servers), BrokerDeaths(cluster, random.Random(SEED))
        try:
            kills = kill_at_steps(plan, steps, rng, minutes)
        finally:
            source.stop()
            deaths.stop()
        # The kills have left much to do.
        run_to_its_end(plan | {"limit": 100_000})
        output, sent = (committed_values(cluster.bootstrap_servers, topic) for topic in (TARGET, SOURCE))
    print(f"{source.count} records, jobs ended at {dict(kills)}, {deaths.count} deaths of brokers")
    assert sent == Counter(range(source.count)), "the producer has lost or doubled records"
    assert any(step in kills for step in steps), "no job was killed"
    return output, sent


@pytest.mark.parametrize("atomic", ["false", "true"])
def test_output_equals_input_wherever_a_kill_comes(tmp_path: Path, plan: dict[str, Any], atomic: str) -> None:
    output, sent = copy_under_chaos(tmp_path, plan | {"atomic": atomic}, STEPS, MINUTES)
    lost, doubled = sent - output, output - sent
    assert not lost, f"{lost.total()} records lost, as {sorted(lost)[:5]}"
    assert not doubled, f"{doubled.total()} records too many, as {sorted(doubled)[:5]}"


def test_without_the_look_at_committed_micro_batches_the_same_comparison_fails(
    tmp_path: Path, plan: dict[str, Any]
) -> None:
    """The planted mistake: were it not seen, the test above would show nothing."""
    output, sent = copy_under_chaos(tmp_path, plan | {"guard": False}, AFTER_COMMITS, min(MINUTES, 2))
    assert output - sent, "the planted mistake was not seen"
