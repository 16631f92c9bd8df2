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
# Each chain is one query: killed at the first step, started again from its checkpoint, killed at the next. A start is
# most of the cost. A task has a reader of its own, so that only its first call can be meant.
CHAINS = {
    "before": (("initialOffset-done", 1), ("latestOffset", 2), ("partitions", 2), ("read", 1), ("commit", 1)),
    "after": (("latestOffset-done", 2), ("partitions-done", 2), ("read-half", 1), ("commit-done", 1)),
}


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


@pytest.mark.parametrize("chain", CHAINS)
def test_a_job_that_is_killed_at_each_step_writes_each_record_once(node, tmp_path, chain):
    if shutil.which("java") is None:
        pytest.skip("needs Java")
    topic = f"killed-{chain}"
    with Admin(bootstrap_servers=node.bootstrap_servers) as admin:
        admin.create_topics([NewTopic(topic, 2)])
    plan = {"bootstrap": node.bootstrap_servers, "topic": topic, "directory": str(tmp_path)}
    kills = [plan | {"step": step, "call": call} for step, call in CHAINS[chain]]
    expected = []
    with Producer(bootstrap_servers=node.bootstrap_servers) as producer:
        for turn, plan_of_turn in enumerate((*kills, plan)):
            for number in range(RECORDS):
                producer.send(topic, b"%d/%d" % (turn, number), partition=number % 2)
                expected.append(f"{turn}/{number}")
            producer.flush()
            done = job(plan_of_turn)
            step = plan_of_turn.get("step")
            assert (done.returncode < 0) == (step is not None), f"{step}: {done.stderr[-2000:]}"
            assert step is not None or done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout.splitlines()[-1]) == sorted(expected)
