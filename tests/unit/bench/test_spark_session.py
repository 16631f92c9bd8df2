"""Spark's process in the comparison: a job that hangs or kills it fails alone. A stub plays the process."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest

from tests.patience import PATIENCE_S, wait_until
from tidelog.bench.raw import BenchError
from tidelog.bench.spark import compare
from tidelog.bench.spark.rows import OURS, RATE, THEIRS, select
from tidelog.bench.spark.session import Session

STUB = """
import json, subprocess, sys, time
jvm = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
print(json.dumps({}), flush=True)
for line in sys.stdin:
    job = json.loads(line)
    if job["topic"] == "hangs" or job["topic"] == "fill hangs" and job["kind"] == "fill":
        time.sleep(1000)
    if job["topic"] == "dies":
        sys.exit("out of memory")
    answer = {"elapsed_s": 0.5, "cpu_s": 1.0, "rows": job.get("records", 0), "jvm": jvm.pid}
    print(json.dumps({"failure": "no such topic"} if job["topic"] == "fails" else answer), flush=True)
jvm.kill()
"""
HANG_S = 0.2
"""The limit of jobs that never end; all others have the patience of the tests."""


def session(tmp_path: Path, program: str = STUB, start_timeout_s: float = PATIENCE_S) -> Session:
    return Session([sys.executable, "-c", program], tmp_path / "spark.log", start_timeout_s)


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_job_that_hangs_is_given_up_and_the_next_one_gets_a_new_process(tmp_path: Path):
    with session(tmp_path) as spark:
        first = spark.do(PATIENCE_S, kind="sink", topic="t")["jvm"]
        assert spark.do(PATIENCE_S, kind="sink", topic="t")["jvm"] == first
        with pytest.raises(BenchError, match=r"^Spark has not done the job 'sink' after 0\.2 s$"):
            spark.do(HANG_S, kind="sink", topic="hangs")
        wait_until(lambda: not runs(first))
        second = spark.do(PATIENCE_S, kind="sink", topic="t")["jvm"]
        assert runs(second)
    wait_until(lambda: not runs(second))


def test_a_process_that_dies_or_a_job_that_fails_is_one_line(tmp_path: Path):
    with session(tmp_path) as spark:
        with pytest.raises(BenchError, match=r"^no such topic$"):
            spark.do(PATIENCE_S, kind="sink", topic="fails")
        with pytest.raises(BenchError, match=r"^the Spark session has ended: out of memory$"):
            spark.do(PATIENCE_S, kind="sink", topic="dies")
        assert spark.do(PATIENCE_S, kind="sink", topic="t")


@pytest.mark.parametrize(
    ("program", "timeout_s", "why"),
    [
        ("import time; time.sleep(1000)", HANG_S, r"^Spark has not started after 0\.2 s$"),
        ("import sys; sys.exit('no Java')", PATIENCE_S, "^the Spark session has ended: no Java$"),
    ],
)
def test_spark_that_does_not_start_is_tried_once(tmp_path: Path, program: str, timeout_s: float, why: str):
    counting = f"open({str(tmp_path / 'starts')!r}, 'a').write('x'); {program}"
    with session(tmp_path, counting, timeout_s) as spark:
        for _ in range(2):
            with pytest.raises(BenchError, match=why):
                spark.do(PATIENCE_S, kind="sink", topic="t")
    assert len((tmp_path / "starts").read_text() if (tmp_path / "starts").exists() else "") <= 1


def test_an_interrupt_ends_the_process_at_once(tmp_path: Path):
    spark = session(tmp_path)
    jvm = spark.do(PATIENCE_S, kind="sink", topic="t")["jvm"]
    spark.__exit__(KeyboardInterrupt, KeyboardInterrupt(), None)
    wait_until(lambda: not runs(jvm))


@pytest.fixture
def topics(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was done with topics."""
    log: list[str] = []
    admin = MagicMock()
    admin.__enter__.return_value.create_topics = lambda new: log.append(f"+{new[0].name}")
    admin.__enter__.return_value.delete_topics = lambda names: log.append(f"-{names[0]}")
    monkeypatch.setattr(compare, "Admin", lambda **_: admin)
    return log


def test_a_row_that_hangs_fails_and_the_others_are_measured(tmp_path: Path, topics: list[str]):
    (row,) = select(["spark-sink-100b-none"])
    rows = [replace(row, name="first"), replace(row, name="hangs", timeout_s=HANG_S), replace(row, name="last")]
    measured = [compare.RowMeasurements(each) for each in rows]
    seen: list[str] = []
    with session(tmp_path) as spark:
        compare.measure_rows(
            spark,
            measured,
            {OURS: "here", THEIRS: "there"},
            rounds=1,
            scale=1.0,
            progress=lambda _: None,
            on_measured=lambda each, name: seen.append(each.last_round(name)),
        )
    assert [each.figures.get((OURS, RATE)) for each in measured] == [[4_000_000.0], None, [4_000_000.0]]
    why = "BenchError: Spark has not done the job 'sink' after 0.2 s"
    assert [each.failures for each in measured] == [{}, {THEIRS: why, OURS: why}, {}]
    assert seen[4:6] == [f"hangs, kafka failed: {why}", f"hangs, tidelog failed: {why}"]
    assert len(seen) == 4 + 2 + 4
    assert seen[-1] == "last, kafka: rows/s 4,000,000, CPU s per million rows 0.5"


def test_a_topic_that_was_filled_in_part_is_not_read_by_the_next_row(tmp_path: Path, topics: list[str]):
    (row,) = select(["spark-batch-100b-none"])
    measured: Any = compare.RowMeasurements(replace(row, timeout_s=HANG_S))
    topic = "bench-100-none"
    with session(tmp_path, STUB.replace("fill hangs", topic)) as spark:
        compare.measure_rows(spark, [measured], {OURS: "here"}, 1, 1.0, lambda _: None, lambda *_: None)
    assert "'fill'" in measured.failures[OURS]
    assert topics == [f"+{topic}", f"-{topic}"]


@pytest.mark.slow
def test_the_log_of_the_process_is_kept_over_its_restarts(tmp_path: Path):
    with session(tmp_path) as spark:
        for _ in range(2):
            with pytest.raises(BenchError):
                spark.do(PATIENCE_S, kind="sink", topic="dies")
    assert (tmp_path / "spark.log").read_text().count("out of memory") == 2
