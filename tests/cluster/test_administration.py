"""Our command line on three running nodes: the quorum, elections, moves under a throttle, partitions in trouble."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import pytest

from tests.cluster.asking import create_topic
from tests.cluster.conftest import NewCluster

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
STILL = {"auto.leader.rebalance.enable": "false"}
PATIENCE_S = 120.0


class HasBootstrap(Protocol):
    @property
    def bootstrap_servers(self) -> str: ...


class Cli:
    """`tidelog WORDS` with the cluster's address."""

    def __init__(self, cluster: HasBootstrap) -> None:
        self.environment = {
            **os.environ,
            "TIDELOG_BOOTSTRAP_SERVER": cluster.bootstrap_servers,
            "PYTHONPATH": str(ROOT),
        }

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "tidelog", *words]
        done = subprocess.run(
            command, env=self.environment, capture_output=True, text=True, check=False, timeout=240, cwd=ROOT
        )
        assert "Traceback" not in done.stderr, done.stderr
        return done

    def __call__(self, *words: str) -> str:
        done = self.run(*words)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def partitions(self, topic: str) -> list[dict[str, Any]]:
        ((described),) = json.loads(self("topics", "describe", topic, "--json"))
        return list(described["partitions"])

    def troubled(self, option: str) -> set[tuple[str, int]]:
        shown = json.loads(self("topics", "describe", option, "--json"))
        return {(topic["name"], each["partition"]) for topic in shown for each in topic["partitions"]}


def until(attempt: Callable[[], bool]) -> None:
    """Whichever broker a command asks may be a moment behind, and refuse what it does not know yet."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            if attempt():
                return
        except AssertionError:
            if time.monotonic() > deadline:
                raise
        assert time.monotonic() < deadline, "it did not come to pass"
        time.sleep(0.2)


def test_a_cluster_is_administered(new_cluster: NewCluster, tmp_path: Path) -> None:
    cluster = new_cluster(options=STILL)
    cli = Cli(cluster)
    described = json.loads(cli("quorum", "describe", "--json"))
    assert described["leader_id"] in cluster.nodes
    assert {each["node_id"] for each in described["replicas"]} == set(cluster.controller_ids)
    cli("topics", "create", "flights", "-p", "3", "-r", "3")
    until(lambda: all(len(each["isr"]) == 3 for each in cli.partitions("flights")))
    first_leaders = [each["leader"] for each in cli.partitions("flights")]
    assert first_leaders == [each["replicas"][0] for each in cli.partitions("flights")]

    gone = first_leaders[0]
    cluster.kill(gone)
    everything = {("flights", number) for number in range(3)}
    until(lambda: cli.troubled("--under-replicated") >= everything)
    until(lambda: not cli.troubled("--unavailable"))
    until(lambda: gone not in [each["leader"] for each in cli.partitions("flights")])
    preferred = cli.run("elect-leaders", "--topic", "flights", "--partition", "0")
    assert preferred.returncode == 1
    assert "PREFERRED_LEADER_NOT_AVAILABLE" in preferred.stderr
    cluster.restart(gone)
    until(lambda: not cli.troubled("--under-replicated"))
    cli("elect-leaders", "--all")
    until(lambda: [each["leader"] for each in cli.partitions("flights")] == first_leaders)

    cli("topics", "alter", "flights", "-p", "4", "-c", "retention.ms=1234567")
    until(lambda: len(cli.partitions("flights")) == 4)
    altered = {"retention.ms": "1234567"}
    until(lambda: json.loads(cli("topics", "describe", "flights", "--json"))[0]["configs"] == altered)


def test_partitions_move_and_come_back(new_cluster: NewCluster, tmp_path: Path) -> None:
    cluster = new_cluster(options=STILL)
    cli = Cli(cluster)
    cli("topics", "create", "moving", "-p", "2", "-r", "2")
    until(lambda: all(len(each["isr"]) == 2 for each in cli.partitions("moving")))
    before = [each["replicas"] for each in cli.partitions("moving")]
    targets = [[*(node for node in cluster.nodes if node not in replicas), replicas[0]] for replicas in before]
    plan = tmp_path / "plan.json"
    moves = [{"topic": "moving", "partition": number, "replicas": target} for number, target in enumerate(targets)]
    plan.write_text(json.dumps({"version": 1, "partitions": moves}))
    back = cli("reassign", "--json", str(plan), "--execute", "--throttle", "50000000")
    until(lambda: cli.run("reassign", "--json", str(plan), "--verify").returncode == 0)
    until(lambda: [each["replicas"] for each in cli.partitions("moving")] == targets)
    assert json.loads(cli("reassign", "--list", "--output-json")) == []
    until(lambda: json.loads(cli("topics", "describe", "moving", "--json"))[0]["configs"] == {})
    plan.write_text(back)
    cli("reassign", "--json", str(plan), "--execute")
    until(lambda: cli.run("reassign", "--json", str(plan), "--verify").returncode == 0)
    until(lambda: [each["replicas"] for each in cli.partitions("moving")] == before)
    stopped = cli.run("reassign", "--json", str(plan), "--cancel")
    assert "cancelled 0 of 0 moves" in stopped.stderr


def test_a_move_that_cannot_end_is_cancelled(new_cluster: NewCluster, tmp_path: Path) -> None:
    cluster = new_cluster(options=STILL)
    cli = Cli(cluster)
    leads = json.loads(cli("quorum", "describe", "--json"))["leader_id"]
    free, other = (node for node in cluster.nodes if node != leads)
    before = [leads, other]
    create_topic(cluster, "stuck", [before])
    cluster.nodes[free].pause()
    try:
        plan = tmp_path / "plan.json"
        moves = [{"topic": "stuck", "partition": 0, "replicas": [free, before[0]]}]
        plan.write_text(json.dumps({"version": 1, "partitions": moves}))
        bootstrap = [cluster.nodes[node].bootstrap_servers for node in before]
        started = cli.run("reassign", "--json", str(plan), "--execute", "-b", ",".join(bootstrap))
        assert started.returncode == 0, started.stderr
        (move,) = json.loads(cli.run("reassign", "--list", "--output-json", "-b", ",".join(bootstrap)).stdout)
        assert (move["adding"], move["removing"]) == ([free], [before[1]])
        assert cli.run("reassign", "--json", str(plan), "--cancel", "-b", ",".join(bootstrap)).returncode == 0
        assert json.loads(cli.run("reassign", "--list", "--output-json", "-b", ",".join(bootstrap)).stdout) == []
    finally:
        cluster.nodes[free].resume()
    until(lambda: [each["replicas"] for each in cli.partitions("stuck")] == [before])


def test_a_throttle_holds_a_move_back(new_cluster: NewCluster, tmp_path: Path) -> None:
    """Ten megabytes at a tenth of one a second take their time, until the throttle is raised."""
    cluster = new_cluster(options=STILL)
    cli = Cli(cluster)
    one, two, three = cluster.nodes
    create_topic(cluster, "heavy", [[one, two]])
    lines = ("x" * 999 + "\n") * 10_000
    command = [sys.executable, "-m", "tidelog", "produce", "heavy", "-X", "acks=all"]
    subprocess.run(command, env=cli.environment, input=lines, text=True, check=True, timeout=240, cwd=ROOT)
    plan = tmp_path / "plan.json"
    moves = [{"topic": "heavy", "partition": 0, "replicas": [one, three]}]
    plan.write_text(json.dumps({"version": 1, "partitions": moves}))
    began = time.monotonic()
    cli("reassign", "--json", str(plan), "--execute", "--throttle", "100000")
    while time.monotonic() < began + 4:
        assert cli.run("reassign", "--json", str(plan), "--verify").returncode == 1, "too fast"
    cli("reassign", "--json", str(plan), "--execute", "--additional", "--throttle", "1000000000")
    until(lambda: cli.run("reassign", "--json", str(plan), "--verify").returncode == 0)
    until(lambda: set(cli.partitions("heavy")[0]["isr"]) == {one, three})
    until(lambda: cli.partitions("heavy")[0]["replicas"] == [one, three])
