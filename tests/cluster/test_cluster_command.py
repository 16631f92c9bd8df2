"""`tidelog cluster` as an operator uses it: one terminal starts, another looks, breaks and mends; nothing is left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.patience import PATIENCE_S, line_of
from tidelog.bench.metadata import await_brokers
from tidelog.testing.ports import free_port
from tidelog.testing.processes import accepts, answers_metadata

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]


class Terminal:
    """The command on one directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        # The brokers listen from there on, the controllers from 100 further on.
        self.port = free_port(also=[*range(1, 5), *range(100, 105)])

    def words(self, *words: str) -> list[str]:
        verb, *rest = words
        # -P: like the installed command, without the working directory on its path.
        return [sys.executable, "-P", "-m", "tidelog", "cluster", verb, "--data", str(self.directory), *rest]

    def __call__(self, *words: str, expected: int = 0) -> str:
        done = subprocess.run(
            self.words(*words), capture_output=True, text=True, timeout=240, check=False, env=self.environment()
        )
        assert done.returncode == expected, done
        return done.stderr if expected else done.stdout

    def start(self, *words: str) -> str:
        return self("start", "--port", str(self.port), "--detach", *words)

    @staticmethod
    def environment() -> dict[str, str]:
        return {**os.environ, "PYTHONPATH": str(ROOT)}

    def nodes(self) -> dict[int, dict[str, Any]]:
        """What cluster.json says."""
        content = json.loads((self.directory / "cluster.json").read_text())
        return {node["id"]: node for node in content["nodes"]}

    def states(self) -> dict[int, str]:
        return {node["id"]: node["state"] for node in json.loads(self("status", "--json"))["nodes"]}


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Terminal]:
    found = Terminal(tmp_path / "cluster")
    yield found
    if found.directory.exists():
        found("stop")


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_nodes_take_no_module_from_the_working_directory(
    terminal: Terminal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "struct.py").write_text("raise AssertionError('the module of the user')")
    monkeypatch.chdir(tmp_path)
    assert "ready" in terminal.start("--brokers", "1")


def test_brokers_leave_their_controllers_in_good_order(terminal: Terminal) -> None:
    terminal.start("--brokers", "2", "--controllers", "1")
    assert terminal("stop").splitlines() == ["stopped node 1", "stopped node 2", "stopped node 3"]
    for node, each in terminal.nodes().items():
        output = Path(each["output"]).read_text()
        assert f"node {node} has stopped, everything is on disk" in output
        assert "giving up" not in output


def test_three_brokers_are_started_broken_and_mended(terminal: Terminal) -> None:
    first = terminal.start("--brokers", "3").splitlines()[0]
    assert f"127.0.0.1:{terminal.port},127.0.0.1:{terminal.port + 1},127.0.0.1:{terminal.port + 2}" in first
    nodes = terminal.nodes()
    assert {node: each["role"] for node, each in nodes.items()} == dict.fromkeys((1, 2, 3), "broker,controller")
    assert all(is_alive(each["pid"]) for each in nodes.values())
    await_brokers([terminal.port + index for index in range(3)], 3)
    assert terminal.states() == dict.fromkeys((1, 2, 3), "running")

    assert "killed node 2" in terminal("kill", "2")
    assert not is_alive(nodes[2]["pid"])
    assert terminal.nodes()[2]["state"] == "killed"
    assert terminal.nodes()[2]["pid"] is None
    assert "is not running" in terminal("pause", "2", expected=1)
    terminal("pause", "3")
    assert terminal.states() == {1: "running", 2: "killed", 3: "paused"}
    assert "resumed node 3" in terminal("resume")
    assert "restarted node 2" in terminal("restart", "2")
    assert terminal.nodes()[2]["pid"] not in (None, nodes[2]["pid"])
    await_brokers([terminal.port + index for index in range(3)], 3)
    table = terminal("status")
    assert table.count("running") == 3
    assert "in sync" in table

    assert terminal("stop", "1").strip() == "stopped node 1"
    assert terminal.states() == {1: "stopped", 2: "running", 3: "running"}
    pids = [each["pid"] for each in terminal.nodes().values() if each["pid"]]
    terminal("stop")
    assert not any(map(is_alive, pids))
    assert set(terminal.states().values()) == {"stopped"}


def test_the_same_cluster_is_started_again_with_what_it_knows(terminal: Terminal) -> None:
    terminal.start("--brokers", "3", "-o", "num.partitions=3")
    admin = [sys.executable, "-m", "tidelog", "topics"]
    reach = ["-b", f"127.0.0.1:{terminal.port}"]
    environment = terminal.environment()
    subprocess.run(
        [*admin, "create", "kept", "-r", "3", *reach],
        check=True,
        env=environment,
        capture_output=True,
        timeout=PATIENCE_S,
    )
    cluster_id = json.loads((terminal.directory / "cluster.json").read_text())["cluster_id"]
    terminal("stop")
    assert "made with --brokers 3, not 4" in terminal("start", "--brokers", "4", "--detach", expected=1)
    assert cluster_id in terminal("start", "--detach")
    assert "is running already" in terminal("start", "--detach", expected=1)
    described = subprocess.run(
        [*admin, "describe", "kept", "--json", *reach],
        check=True,
        env=environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    ).stdout
    (topic,) = json.loads(described)
    assert len(topic["partitions"]) == 3
    assert all(len(each["replicas"]) == 3 for each in topic["partitions"])


def test_controllers_on_their_own(terminal: Terminal) -> None:
    terminal.start("--brokers", "2", "--controllers", "3")
    roles = {node: each["role"] for node, each in terminal.nodes().items()}
    assert roles == {1: "broker", 2: "broker", 3: "controller", 4: "controller", 5: "controller"}
    await_brokers([terminal.port, terminal.port + 1], 2)
    assert accepts(terminal.port + 100)
    assert not answers_metadata(terminal.port + 2)


def test_balance_tells_who_carries_what(terminal: Terminal) -> None:
    terminal.start("--brokers", "3")
    await_brokers([terminal.port + index for index in range(3)], 3)
    environment = terminal.environment()
    create = [sys.executable, "-m", "tidelog", "topics", "create", "one", "-p", "1", "-r", "1"]
    subprocess.run(
        [*create, "-b", f"127.0.0.1:{terminal.port}"],
        check=True,
        env=environment,
        capture_output=True,
        timeout=PATIENCE_S,
    )
    words = ("--seconds", "0.5", "--measure", "leaders", "--measure", "open files")
    found = json.loads(terminal("balance", *words, "--json"))
    by_broker = {each["id"]: each for each in found["brokers"]}
    assert sum(each["measures"]["leaders"] for each in by_broker.values()) == 1
    assert sum(each["share"] for each in by_broker.values()) == pytest.approx(1)
    assert found["spread_alarm"], "one broker leads everything"
    assert "ALARM" in terminal("balance", *words)
    assert "measures are" in terminal("balance", "--measure", "luck", expected=2)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_terminal_that_shows_the_cluster_ends_it(terminal: Terminal, number: signal.Signals) -> None:
    shown = subprocess.Popen(
        terminal.words("start", "--brokers", "3", "--port", str(terminal.port)),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=terminal.environment(),
        # A shell starts background jobs with SIGINT ignored, and children inherit it; a terminal does not.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert shown.stdout is not None
    assert "ready in" in line_of(shown)
    terminal("kill", "2")
    assert line_of(shown).strip() == "node 2: killed"
    terminal("restart", "2")
    pids = [each["pid"] for each in terminal.nodes().values()]
    assert all(map(is_alive, pids))
    shown.send_signal(number)
    out, _ = shown.communicate(timeout=120)
    assert "Traceback" not in out
    assert not any(map(is_alive, pids)), "also the one that another terminal started"
    assert set(terminal.states().values()) == {"stopped"}


def test_a_process_that_got_the_id_later_is_left_alone(terminal: Terminal) -> None:
    terminal.start("--brokers", "1")
    file = terminal.directory / "cluster.json"
    content = json.loads(file.read_text())
    os.kill(content["nodes"][0]["pid"], signal.SIGKILL)
    stranger = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        content["nodes"][0]["pid"] = stranger.pid
        file.write_text(json.dumps(content))
        assert "is not running (died)" in terminal("kill", "1", expected=1)
        assert terminal.states() == {1: "died"}
        terminal("stop")
        assert stranger.poll() is None
    finally:
        stranger.communicate(b"\n")


def test_a_node_that_the_file_does_not_know_is_found(terminal: Terminal) -> None:
    """The command that started it was killed before it wrote the process down."""
    terminal.start("--brokers", "2")
    file = terminal.directory / "cluster.json"
    content = json.loads(file.read_text())
    pids = [node["pid"] for node in content["nodes"]]
    for node in content["nodes"]:
        node |= {"pid": None, "started": None, "asked": "stopped", "state": "stopped"}
    file.write_text(json.dumps(content))
    try:
        assert terminal.states() == {1: "running", 2: "running"}
        assert "is running already: node 1, 2" in terminal("start", "--detach", expected=1)
        assert "killed node 1" in terminal("kill", "1")
        assert not is_alive(pids[0])
        assert terminal("stop").strip() == "stopped node 2"
        assert not is_alive(pids[1])
        assert terminal.states() == {1: "killed", 2: "stopped"}
    finally:
        for pid in filter(is_alive, pids):
            os.kill(pid, signal.SIGKILL)


def test_what_cannot_be_is_said_in_one_line(terminal: Terminal) -> None:
    assert "no cluster in" in terminal("status", expected=1)
    assert "unknown configuration key" in terminal("start", "--detach", "-o", "no.such.key=1", expected=1)
    assert not (terminal.directory / "cluster.json").exists(), "nothing is made of a wrong start"
    terminal.start("--brokers", "1")
    assert "no node 7" in terminal("kill", "7", expected=1)
    other = Terminal(terminal.directory.with_name("other"))
    other.port = terminal.port
    assert "cannot listen on" in other("start", "--brokers", "1", "--port", str(other.port), "--detach", expected=1)
    pid = terminal.nodes()[1]["pid"]
    os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + 60
    while terminal.states() != {1: "died"}:
        assert time.monotonic() < deadline
