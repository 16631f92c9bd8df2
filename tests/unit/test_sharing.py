"""Which tests run in one process when several run tests."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.patience import PATIENCE_S
from tests.sharing import scope_of

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("node_id", "scope"),
    [
        ("tests/unit/test_sharing.py::test_a[b::c]", "tests/unit/test_sharing.py"),
        ("tests/compatibility/test_confluent.py::test_a", "tests/compatibility/test_confluent.py"),
        ("tests/cluster/test_named_cases.py::test_a[1]", "tests/cluster/test_named_cases.py::test_a[1]"),
        ("tests/cluster/test_client_node.py::test_a", "tests/cluster/test_client_node.py"),
        ("tests/spark/test_batch_read.py::test_a", "tests/spark/"),
        ("tests/spark/test_broker_death.py::test_a", "tests/spark/"),
    ],
)
def test_what_stays_together(node_id: str, scope: str) -> None:
    assert scope_of(node_id) == scope


@pytest.mark.slow
def test_pytest_keeps_a_file_in_one_process() -> None:
    """With the scheduler of its own choice the tests of one file go to both."""

    def processes(dist: str) -> set[str]:
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", "-n", "2", "--dist", dist]
            + ["tests/unit/test_sharing.py", "-k", "test_what_stays_together"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
            timeout=4 * PATIENCE_S,
        )
        return {line.split("]")[0] for line in done.stdout.splitlines() if line.startswith("[gw")}

    assert len(processes("loadscope")) == 1
    assert len(processes("load")) == 2
