"""A Spark job that writes exactly once is killed after its sink has committed: the restart writes nothing twice."""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.spark.jobs import PARTITIONS, committed_values, create_topics, run_to_its_end
from tidelog.client.sync import Producer

pytestmark = [pytest.mark.hunt, pytest.mark.filterwarnings("ignore")]


@pytest.fixture
def plan(tmp_path: Path) -> dict[str, Any]:
    if shutil.which("java") is None:
        pytest.skip("needs Java")
    return {"directory": str(tmp_path), "limit": 300}


@pytest.mark.parametrize("guard", [True, False])
def test_a_kill_after_the_sinks_commit_doubles_only_without_the_guard(
    node: Any, tmp_path: Path, plan: dict[str, Any], guard: bool
) -> None:
    """The planted mistake: were it not seen, the case with the guard would show nothing."""
    source, target = f"guarded-in-{guard}".lower(), f"guarded-out-{guard}".lower()
    create_topics(node.bootstrap_servers, 1, source, target)
    with Producer(bootstrap_servers=node.bootstrap_servers) as producer:
        for number in range(600):
            producer.send(source, b"%d" % number, partition=number % PARTITIONS)
        producer.flush()
    plan |= {"bootstrap": node.bootstrap_servers, "guard": guard, "topic": source, "target": target}
    # With this seed it is the first micro-batch.
    run_to_its_end(plan | {"step": "sink-commit-done", "seed": 0})
    run_to_its_end(plan)
    found = committed_values(node.bootstrap_servers, target)
    assert found.keys() == set(range(600))
    assert (found == Counter(range(600))) is guard
