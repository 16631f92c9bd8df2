"""A job that is killed at any step of its stream, and started again from its checkpoint, writes each record once."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.spark.spark_home import spark_environment
from tidelog.client.model import NewTopic
from tidelog.client.sync import Admin, Producer

pytestmark = [pytest.mark.hunt, pytest.mark.filterwarnings("ignore")]

JOB = Path(__file__).with_name("killed_job.py")
RECORDS = 80
# A task has a reader of its own, so that only its first call can be meant.
STEPS = (
    ("initialOffset-done", 1),
    ("latestOffset", 2),
    ("latestOffset-done", 2),
    ("partitions", 2),
    ("partitions-done", 2),
    ("read", 1),
    ("read-half", 1),
    ("commit", 1),
    ("commit-done", 1),
)


def job(plan: dict[str, Any]) -> subprocess.CompletedProcess[str]:
    environment = os.environ | spark_environment(Path(plan["directory"])) | {"PYSPARK_PYTHON": sys.executable}
    return subprocess.run(
        [sys.executable, str(JOB), json.dumps(plan)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=500,
    )


@pytest.mark.parametrize(("step", "call"), STEPS, ids=lambda value: str(value))
def test_a_job_that_is_killed_at_a_step_writes_each_record_once(node, tmp_path, step, call):
    if shutil.which("java") is None:
        pytest.skip("needs Java")
    topic = f"killed-{step}"
    with Admin(bootstrap_servers=node.bootstrap_servers) as admin:
        admin.create_topics([NewTopic(topic, 2)])
    plan = {"bootstrap": node.bootstrap_servers, "topic": topic, "directory": str(tmp_path)}
    expected = []
    with Producer(bootstrap_servers=node.bootstrap_servers) as producer:
        for turn, plan_of_turn in enumerate((plan | {"step": step, "call": call}, plan)):
            for number in range(RECORDS):
                producer.send(topic, b"%d/%d" % (turn, number), partition=number % 2)
                expected.append(f"{turn}/{number}")
            producer.flush()
            done = job(plan_of_turn)
            is_killed = "step" in plan_of_turn
            assert (done.returncode < 0) == is_killed, done.stderr[-2000:]
            assert is_killed or done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout.splitlines()[-1]) == sorted(expected)
