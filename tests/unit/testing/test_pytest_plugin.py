"""The fixtures that users of pytest get: what they give, in parallel too, and that they cost nothing unused."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from importlib import import_module
from pathlib import Path

import pytest

from tests.patience import PATIENCE_S

ROOT = Path(__file__).resolve().parents[3]
PLUGIN = "tidelog.testing.pytest_plugin"


def run_pytest(directory: Path, test: str, *arguments: str, conftest: str = "") -> str:
    """Run a test file with this plugin alone, in a process of its own; returns what pytest printed."""
    (directory / "test_users.py").write_text(test)
    (directory / "conftest.py").write_text(conftest)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", PLUGIN, "-p", "no:cacheprovider", "--strict-markers", *arguments],
        cwd=directory,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        timeout=2 * PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


BROKER = """
import pytest
from tidelog.client.sync import Admin, Producer
from tidelog.testing import produced

@pytest.mark.tidelog_topic(partitions=3, configs={"cleanup.policy": "compact"})
def test_a_topic_as_marked(tidelog_broker, tidelog_topic):
    with Admin(bootstrap_servers=tidelog_broker.bootstrap_servers) as admin:
        assert len(admin.describe_topics([tidelog_topic])[tidelog_topic].partitions) == 3

seen = set()

@pytest.mark.parametrize("name", ["a/b", "a b", "ä"])
def test_each_test_has_a_topic_of_its_own(tidelog_broker, tidelog_topic, name):
    assert not produced(tidelog_broker, tidelog_topic, 0)
    seen.add((tidelog_broker.bootstrap_servers, tidelog_topic))
    with Producer(bootstrap_servers=tidelog_broker.bootstrap_servers) as producer:
        producer.send_and_wait(tidelog_topic, b"x")
    assert len(produced(tidelog_broker, tidelog_topic)) == 1

@pytest.mark.tidelog_topic(2, configs={"cleanup.policy": "compact"})
def test_a_topic_as_marked_by_position_which_the_test_deletes(tidelog_broker, tidelog_topic):
    with Admin(bootstrap_servers=tidelog_broker.bootstrap_servers) as admin:
        assert len(admin.describe_topics([tidelog_topic])[tidelog_topic].partitions) == 2
        admin.delete_topics([tidelog_topic])

def test_there_was_one_broker_and_the_topics_are_gone(tidelog_broker):
    assert len({broker for broker, _ in seen}) <= 1
    with Admin(bootstrap_servers=tidelog_broker.bootstrap_servers) as admin:
        assert not {topic for _, topic in seen} & set(admin.list_topics())
        assert len(admin.list_topics()) <= 1

def test_the_configuration_is_the_users(tidelog_broker):
    with Producer(bootstrap_servers=tidelog_broker.bootstrap_servers) as producer:
        assert len(producer.partitions_for("automatic")) == 5
"""
CONFIG = """
import pytest

@pytest.fixture(scope="session")
def tidelog_config():
    return {"num.partitions": 5}
"""


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_a_broker_for_the_run_and_a_topic_for_each_test(tmp_path: Path, workers: int) -> None:
    parallel = ("-p", "xdist", "-n", str(workers)) if workers else ()
    assert "7 passed" in run_pytest(tmp_path, BROKER, *parallel, conftest=CONFIG)


CLUSTER = """
import pytest
from tidelog.client.sync import Admin, Producer
from tidelog.testing import produced

def test_a_fault_ends_with_its_test(tidelog_cluster, tidelog_topic):
    with Admin(bootstrap_servers=tidelog_cluster.bootstrap_servers) as admin:
        assert len(admin.describe_topics([tidelog_topic])[tidelog_topic].partitions[0].replicas) == 3
    tidelog_cluster.kill(1, 2)
    tidelog_cluster.cut(3)

def test_the_next_test_has_all_brokers(tidelog_topic, tidelog_cluster):
    assert all(server.alive for server in tidelog_cluster.nodes.values())
    with Producer(bootstrap_servers=tidelog_cluster.bootstrap_servers, acks="all") as producer:
        producer.send_and_wait(tidelog_topic, b"x")
    assert len(produced(tidelog_cluster, tidelog_topic)) == 1

def test_a_cluster_may_be_stopped(tidelog_cluster, tidelog_topic):
    tidelog_cluster.stop()

@pytest.fixture(scope="module")
def shared(tidelog_cluster):
    return tidelog_cluster

def test_a_fault_through_a_fixture_of_the_module(shared):
    shared.kill(1)

def test_it_ended_with_its_test(shared):
    assert all(server.alive for server in shared.nodes.values())
"""


@pytest.mark.slow
def test_a_cluster_for_the_run_whose_faults_end_with_each_test(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    assert "5 passed" in run_pytest(tmp_path, CLUSTER)
    assert [path.name for path in temporary.glob("tidelog-*")] == [f"tidelog-ports-{os.getuid()}"]


UNUSED = """
import sys

def test_nothing_of_tidelog_is_loaded():
    loaded = {name for name in sys.modules if name.partition(".")[0] == "tidelog"}
    assert loaded == {"tidelog", "tidelog.version", "tidelog.testing", "tidelog.testing.pytest_plugin"}
    assert "asyncio" not in sys.modules
"""


@pytest.mark.slow
def test_a_run_without_the_fixtures_loads_only_the_plugin(tmp_path: Path) -> None:
    assert "1 passed" in run_pytest(tmp_path, UNUSED, "-p", "no:unraisableexception", "-p", "no:threadexception")


@pytest.mark.slow
def test_a_wrong_argument_of_the_marker_is_named(tmp_path: Path) -> None:
    test = "import pytest\n@pytest.mark.tidelog_topic(partition=3)\ndef test_it(tidelog_topic): ...\n"
    with pytest.raises(AssertionError, match="marker tidelog_topic: got an unexpected keyword argument 'partition'"):
        run_pytest(tmp_path, test)


def test_the_package_declares_the_plugin() -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["pytest11"]
    assert declared == {"tidelog": PLUGIN}
    assert {"tidelog_broker", "tidelog_cluster", "tidelog_topic"} <= vars(import_module(PLUGIN)).keys()
