"""Controllers become voters and cease to be while the cluster runs, on the command line (KIP-853)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.test_administration import Cli, until
from tidelog.testing.ports import free_port
from tidelog.testing.processes import TidelogProcess

pytestmark = pytest.mark.slow

CLUSTER = "AQEBAQEBQEGBAQEBAQEBAQ"
BROKER = 9


class ChangingQuorum:
    """Controllers 1 to 3, of which only the first votes as yet, and a broker."""

    def __init__(self, directory: Path) -> None:
        ports = {node: free_port() for node in (1, 2, 3, BROKER)}
        controllers = ",".join(f"127.0.0.1:{ports[node]}" for node in (1, 2, 3))
        self.nodes: dict[int, TidelogProcess] = {}
        for node, port in ports.items():
            role, listener = ("broker", "PLAINTEXT") if node == BROKER else ("controller", "CONTROLLER")
            options = {
                "node.id": str(node),
                "process.roles": role,
                "listeners": f"{listener}://127.0.0.1:{port}",
                "controller.listener.names": "CONTROLLER",
                "controller.quorum.bootstrap.servers": controllers,
            }
            self.nodes[node] = TidelogProcess(directory / str(node), port, options)
        self.bootstrap_servers = f"127.0.0.1:{ports[BROKER]}"
        self.cli = Cli(self)

    def format(self) -> None:
        for node, server in self.nodes.items():
            server.prepare()
            settings = {**server.options, "log.dirs": str(server.data_directory)}
            words = [word for key, value in settings.items() for word in ("-o", f"{key}={value}")]
            self.cli("format", "-t", CLUSTER, *words, *(["--standalone"] if node == 1 else []))

    def directory_id(self, node: int) -> str:
        lines = (self.nodes[node].data_directory / "meta.properties").read_text().splitlines()
        return next(line.partition("=")[2] for line in lines if line.startswith("directory.id="))

    def add(self, node: int) -> None:
        self.cli("quorum", "add-voter", str(node), self.directory_id(node), f"CONTROLLER://127.0.0.1:{self.port(node)}")

    def port(self, node: int) -> int:
        return self.nodes[node].port

    def voters(self) -> tuple[int, list[int]]:
        """The leader and all voters."""
        told = json.loads(self.cli("quorum", "describe", "--json"))
        return told["leader_id"], [each["node_id"] for each in told["replicas"] if each["role"] != "observer"]


@pytest.fixture
def quorum(tmp_path: Path) -> Iterator[ChangingQuorum]:
    made = ChangingQuorum(tmp_path)
    made.format()
    try:
        for server in made.nodes.values():
            server.launch()
        made.nodes[BROKER].await_ready()
        yield made
    finally:
        for server in made.nodes.values():
            server.kill()


def test_voters_come_and_the_first_one_goes(quorum: ChangingQuorum) -> None:
    assert quorum.voters() == (1, [1])
    quorum.add(2)
    quorum.add(3)
    leader, voters = quorum.voters()
    assert (leader, sorted(voters)) == (1, [1, 2, 3])
    assert quorum.cli.run("quorum", "remove-voter", "7", CLUSTER).returncode == 1
    quorum.cli("topics", "create", "before")
    quorum.nodes[1].kill()
    until(lambda: quorum.voters()[0] in (2, 3))
    quorum.cli("topics", "create", "without")
    quorum.cli("quorum", "remove-voter", "1", quorum.directory_id(1))
    leader, voters = quorum.voters()
    assert sorted(voters) == [2, 3]
    quorum.nodes[1].launch()
    until(lambda: 1 in [each["node_id"] for each in json.loads(quorum.cli("quorum", "describe", "--json"))["replicas"]])
    assert sorted(quorum.voters()[1]) == [2, 3], "it follows, and does not vote"
    quorum.cli("quorum", "remove-voter", str(leader), quorum.directory_id(leader))
    (left,) = {2, 3} - {leader}
    until(lambda: quorum.voters() == (left, [left]))
    quorum.cli("topics", "create", "after")
    assert sorted(json.loads(quorum.cli("topics", "list", "--json"))) == ["after", "before", "without"]
