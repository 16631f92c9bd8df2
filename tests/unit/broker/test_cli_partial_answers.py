"""What commands print when a part of the cluster cannot answer: a partition without a leader, a quorum without one."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.patience import PATIENCE_S, wait_until
from tidelog import EmbeddedBroker, EmbeddedCluster, NewTopic
from tidelog.cli.main import main
from tidelog.client.sync import Admin, Producer

Cli = Callable[..., tuple[int, str, str]]
MISSING = "tidelog: LEADER_NOT_AVAILABLE: without flights-1: no leader, see `tidelog topics describe --unavailable`\n"


@pytest.fixture
def cluster() -> Iterator[EmbeddedCluster]:
    """Three nodes; partition 0 of `flights` with three records on the first, an empty partition 1 on the second."""
    with EmbeddedCluster(brokers=3) as running:
        with Admin(bootstrap_servers=running.bootstrap_servers) as admin:
            admin.create_topics([NewTopic("flights", replica_assignments={0: [1], 1: [2]})])
        with Producer(bootstrap_servers=running.bootstrap_servers) as producer:
            for number in range(3):
                producer.send_and_wait("flights", b"%d" % number, partition=0)
        yield running


@pytest.fixture
def cli(cluster: EmbeddedCluster, capfd: pytest.CaptureFixture[str]) -> Cli:
    """Runs a command: (exit code, standard output, standard error)."""

    def run(*words: str) -> tuple[int, str, str]:
        capfd.readouterr()
        status = main([*words, "-b", cluster.bootstrap_servers, "-X", "default.api.timeout.ms=2000"])
        return (status, *capfd.readouterr())

    return run


def test_a_partition_without_a_leader_does_not_hide_the_others(cluster: EmbeddedCluster, cli: Cli):
    cluster.kill(2)
    wait_until(lambda: len(json.loads(cli("topics", "describe", "--unavailable", "--json")[1])) == 1)
    row = {"topic": "flights", "partition": 0}

    status, out, problem = cli("topics", "offsets", "flights", "--json")
    assert (status, json.loads(out), problem) == (1, [row | {"earliest": 0, "latest": 3}], MISSING)
    status, out, problem = cli("producers", "flights", "--json")
    assert (status, [each["partition"] for each in json.loads(out)], problem) == (1, [0], MISSING)
    assert cli("transactions", "blocking", "--json") == (1, "[]\n", MISSING)
    assert cli("transactions", "find-hanging", "flights", "--json") == (1, "[]\n", MISSING)
    assert cli("consume", "flights", "--from-beginning", "-n", "3") == (0, "0\n1\n2\n", "3 records\n")
    words = ("consume", "flights", "--from-beginning", "--timeout-ms", "100")
    unread = "tidelog: without flights-1: REQUEST_TIMED_OUT: the position of flights-1 was not found"
    for more, out in ((), "0\n1\n2\n"), (("-p", "1"), ""), (("-g", "readers"), "0\n1\n2\n"):
        status, records, problem = cli(*words, *more)
        assert (status, records, unread in problem, problem.count("\n")) == (1, out, True, 2)
    assert cli(*words, "-p", "0") == (0, "0\n1\n2\n", "3 records\n")
    status, out, problem = cli("topics", "delete-records", "flights", "--all", "--json")
    assert (status, json.loads(out), problem) == (1, [row | {"low_watermark": 3}], MISSING)
    assert cli("topics", "offsets", "flights", "-p", "0")[::2] == (0, "")


def test_a_signal_ends_a_read_that_waits_for_a_partition(cluster: EmbeddedCluster):
    cluster.kill(2)
    words = ["consume", "flights", "-p", "1", "--timeout-ms", "1", "-b", cluster.bootstrap_servers]
    reading = subprocess.Popen(
        [sys.executable, "-m", "tidelog", *words, "-X", f"default.api.timeout.ms={PATIENCE_S * 1000:.0f}"],
        stderr=subprocess.PIPE,
        text=True,
    )
    time.sleep(3)  # it is past the timeout, and waits for a position
    reading.send_signal(signal.SIGINT)
    assert "Traceback" not in reading.communicate(timeout=PATIENCE_S)[1]
    assert reading.returncode == 0


def test_a_quorum_without_a_leader_does_not_hide_the_brokers(cluster: EmbeddedCluster, cli: Cli):
    cluster.kill(2, 3)
    wait_until(lambda: cli("quorum", "describe")[0] == 1)
    status, out, problem = cli("brokers", "list", "--json")
    states = {each["broker"]: each["state"] for each in json.loads(out)}
    assert (status, states[1], sorted(states)) == (1, "running", [1, 2, 3])
    assert "running" not in (states[2], states[3])
    assert "without the roles: the metadata quorum does not answer" in problem

    status, out, _ = cli("top", "--once", "--delay", "0.1", "--json")
    assert status == 0
    assert next(each["state"] for each in json.loads(out)["brokers"]) == "running"


def test_a_partition_whose_leader_lacks_its_log_does_not_hide_the_others(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    with EmbeddedBroker(tmp_path) as broker:
        with Admin(bootstrap_servers=broker.bootstrap_servers) as admin:
            admin.create_topics([NewTopic("flights", num_partitions=2)])
        with Producer(bootstrap_servers=broker.bootstrap_servers) as producer:
            for number in (0, 1):
                producer.send_and_wait("flights", b"x", partition=number)
    shutil.rmtree(tmp_path / "flights-1")
    with EmbeddedBroker(tmp_path) as broker:
        words = ["topics", "offsets", "flights", "--json", "-X", "default.api.timeout.ms=1000"]
        capfd.readouterr()
        status = main([*words, "-b", broker.bootstrap_servers])
        out, problem = capfd.readouterr()
        words[1:3] = ["describe", "flights", "--offsets"]
        described = main([*words, "-b", broker.bootstrap_servers]), capfd.readouterr().out
    assert (status, [each["partition"] for each in json.loads(out)]) == (1, [0])
    assert "offsets of flights-1 not found in 1000 ms: KAFKA_STORAGE_ERROR: flights-1" in problem
    partitions = json.loads(described[1])[0]["partitions"]
    assert (described[0], [each["latest"] for each in partitions]) == (1, [1, None])
