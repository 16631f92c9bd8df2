"""A local cluster's plan and its file: who gets which role and port, and that only our own processes are ever meant."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.patience import PATIENCE_S
from tidelog.cli.cluster import command as cluster_command
from tidelog.cli.cluster import nodes as cluster_nodes
from tidelog.cli.cluster.command import command
from tidelog.cli.cluster.state import (
    DIED,
    KILLED,
    PAUSED,
    RUNNING,
    STOPPED,
    ClusterFile,
    ClusterState,
    NoCluster,
    Node,
    process_status,
)
from tidelog.cli.main import main


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield process
    process.kill()
    process.communicate(timeout=PATIENCE_S)


def node_of(pid: int) -> Node:
    node = Node(1, "broker", {"PLAINTEXT": "127.0.0.1:1"}, "data", "output", {})
    node.took(pid)
    return node


@pytest.mark.parametrize(
    ("brokers", "controllers", "roles"),
    [
        (1, 0, ["broker,controller"]),
        (2, 0, ["broker,controller", "broker"]),
        (4, 0, ["broker,controller"] * 3 + ["broker"]),
        (2, 3, ["broker"] * 2 + ["controller"] * 3),
    ],
)
def test_the_plan(tmp_path: Path, brokers: int, controllers: int, roles: list[str]) -> None:
    state = cluster_nodes.plan(tmp_path, brokers, controllers, 9092, {"num.partitions": "7"})
    assert [node.role for node in state.nodes] == roles
    assert state.bootstrap == ",".join(f"127.0.0.1:{9092 + index}" for index in range(brokers))
    assert state.nodes[-1].config["num.partitions"] == "7"
    assert state.nodes[0].config["offsets.topic.replication.factor"] == str(min(3, brokers))
    addresses = [address for node in state.nodes for address in node.addresses.values()]
    assert len(set(addresses)) == len(addresses)
    cluster_nodes.check_configuration(state.nodes)


def test_a_plan_that_does_not_fit(tmp_path: Path) -> None:
    with pytest.raises(cluster_nodes.ClusterFailed, match="no room"):
        cluster_nodes.plan(tmp_path, 3, 0, 65_500, {})


def test_the_states_of_a_process(child: subprocess.Popen[bytes]) -> None:
    node = node_of(child.pid)
    assert node.now == RUNNING
    assert node.signal(signal.SIGSTOP)
    os.waitid(os.P_PID, child.pid, os.WSTOPPED)
    assert node.now == PAUSED
    assert node.signal(signal.SIGKILL)
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert process_status(child.pid) is not None, "it is a zombie"
    assert node.now == DIED
    node.asked = KILLED
    assert node.now == KILLED
    assert not node.signal(signal.SIGTERM)


def test_a_process_that_has_only_the_id_is_not_ours(child: subprocess.Popen[bytes]) -> None:
    node = node_of(child.pid)
    node.started -= 1
    assert not node.is_there
    assert not node.signal(signal.SIGKILL)
    assert child.poll() is None


def test_the_file_is_written_whole_and_read_again(tmp_path: Path, child: subprocess.Popen[bytes]) -> None:
    file = ClusterFile(tmp_path / "new")
    with pytest.raises(NoCluster, match="no cluster in"):
        file.read()
    file.create(ClusterState("an-id", [node_of(child.pid)]))
    with file.changing() as state:
        state.nodes[0].config["key"] = "value"
    content = json.loads(file.path.read_text())
    assert content["cluster_id"] == "an-id"
    assert content["nodes"][0]["state"] == RUNNING
    assert content["nodes"][0]["pid"] == child.pid
    again = file.read().nodes[0]
    assert again.config == {"key": "value"}
    assert again.is_there
    child.kill()
    child.wait(PATIENCE_S)
    again.asked = STOPPED
    file.create(ClusterState("an-id", [again]))
    assert json.loads(file.path.read_text())["nodes"][0]["pid"] is None
    edited = [
        json.dumps(content | {"nodes": [content["nodes"][0] | {key: value}]})
        for key, value in (
            ("id", "1"), ("pid", "x"), ("started", 1.5), ("output_from", []), ("role", 1), ("data", None),
            ("output", {}), ("asked", 2), ("addresses", "x"), ("addresses", {}), ("config", {"key": 1}), ("config", [])
        )
    ]  # fmt: skip
    for text in ("{}", "[" * 100_000, json.dumps(content | {"nodes": "x"}), *edited):
        file.path.write_text(text)
        with pytest.raises(NoCluster, match="is not a cluster's file"):
            file.read()


@pytest.mark.parametrize("words", [["--seconds", "nan"], ["--weight", "leaders=nan"], ["--weight", "leaders=inf"]])
def test_a_balance_of_numbers_that_are_none_is_wrong_usage(
    tmp_path: Path, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["cluster", "balance", "--data", str(tmp_path), *words]) == 2
    assert "number" in capsys.readouterr().err


@pytest.mark.parametrize("change", [shutil.move, shutil.copytree])
def test_a_directory_that_was_moved_or_copied_holds_its_own_cluster(
    tmp_path: Path, child: subprocess.Popen[bytes], change: Callable[[Path, Path], object]
) -> None:
    before, after = tmp_path / "before", tmp_path / "after"
    file = ClusterFile(before)
    plan = cluster_nodes.plan(before, 2, 0, 9092, {"metadata.log.dir": "/mnt/elsewhere"})
    plan.nodes[0].took(child.pid)
    file.create(plan)
    change(before, after)
    state = ClusterFile(after).read()
    assert state.nodes[0].now == (RUNNING if change is shutil.move else STOPPED), "a copy has no process of its own yet"
    for node in state.nodes:
        assert node.data == node.config["log.dirs"] == str(after / f"node-{node.id}")
        assert node.output == str(after / f"node-{node.id}.log")
        assert node.arguments[-1] == str(after / f"node-{node.id}.yaml")
        assert node.config["metadata.log.dir"] == "/mnt/elsewhere"


def test_directories_that_the_user_has_chosen_stay(tmp_path: Path) -> None:
    file = ClusterFile(tmp_path)
    file.create(cluster_nodes.plan(tmp_path, 1, 0, 9092, {"log.dirs": "/mnt/a,/mnt/b"}))
    assert file.read().nodes[0].config["log.dirs"] == "/mnt/a,/mnt/b"


@pytest.mark.slow
def test_a_restart_keeps_what_a_node_has_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    # Away from the range of ports that the system gives out, the controller's is not checked here.
    (node,) = cluster_nodes.plan(tmp_path, 1, 0, min(port, 65000), {}).nodes
    log = Path(node.output)
    log.write_text("a traceback of the last process\nnode 1 ready: long ago\n")
    try:
        cluster_nodes.launch(node, "0XP3lYbQSHSPjHDVXXXXXX")
        assert node.output_from == len("a traceback of the last process\nnode 1 ready: long ago\n")
        cluster_nodes.await_ready([node])
        assert log.read_text().startswith("a traceback of the last process\n")
        assert "traceback" not in cluster_nodes.last_words(node)
    finally:
        cluster_nodes.kill([node])
    # Without end it does not grow.
    monkeypatch.setattr(cluster_nodes, "OUTPUT_BYTES_MAX", 10)
    try:
        cluster_nodes.launch(node, "0XP3lYbQSHSPjHDVXXXXXX")
        assert node.output_from == 0
        cluster_nodes.await_ready([node])
        assert "traceback" in Path(f"{node.output}.1").read_text()
    finally:
        cluster_nodes.kill([node])
    # Nor are its processes kept in the process table, where Python would say at its end that they run.
    assert cluster_nodes._children == {}


def test_a_start_that_the_disk_refuses_leaves_no_node_running(
    tmp_path: Path, child: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    def launch(node: Node, cluster_id: str) -> None:
        if node.id == 2:
            raise OSError(errno.ENOSPC, "No space left on device", str(tmp_path / "node-2.yaml"))
        node.took(child.pid)

    monkeypatch.setattr(cluster_nodes, "launch", launch)
    monkeypatch.setattr(cluster_nodes, "check_ports", lambda nodes: None)
    done = CliRunner().invoke(command, ["start", "--brokers", "3", "--data", str(tmp_path), "--detach"])
    assert done.exit_code == 1
    assert done.output == f"Error: {tmp_path}/node-2.yaml: No space left on device\n"
    assert child.wait(PATIENCE_S) == -signal.SIGKILL
    assert [node.now for node in ClusterFile(tmp_path).read().nodes] == [STOPPED] * 3


@pytest.mark.parametrize("key", sorted(cluster_nodes._OF_EACH_NODE))
def test_a_value_that_differs_from_node_to_node_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    monkeypatch.setattr(cluster_command, "_launch_all", lambda *_: None)
    done = CliRunner().invoke(command, ["start", "--data", str(tmp_path), "-o", f"{key}=1"])
    expected = f"Error: {key} differs from node to node: it follows from the other options\n"
    assert (done.exit_code, done.output, list(tmp_path.iterdir())) == (1, expected, [])


def test_brokers_that_would_advertise_the_same_address_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster_command, "_launch_all", lambda *_: None)
    monkeypatch.setattr(cluster_nodes, "check_ports", lambda nodes: None)
    words = ["start", "--data", str(tmp_path), "-o", "advertised.listeners=PLAINTEXT://localhost:7", "--brokers"]
    done = CliRunner().invoke(command, [*words, "2"])
    text = "nodes 1 and 2 would both advertise localhost:7: advertised.listeners is for a cluster of one broker"
    assert (done.exit_code, done.output, list(tmp_path.iterdir())) == (1, f"Error: {text}\n", [])
    assert CliRunner().invoke(command, [*words, "1"]).exit_code == 0


def test_a_node_and_a_cluster_do_not_share_a_directory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster_command, "_launch_all", lambda *_: None)
    (tmp_path / "meta.properties").touch()
    assert main(["cluster", "start", "--data", str(tmp_path)]) == 1
    ours = capsys.readouterr().err
    assert ours == f"tidelog: {tmp_path} is the directory of a node: choose another --data for a cluster\n"
    (tmp_path / "meta.properties").unlink()
    (tmp_path / "cluster.json").touch()
    for words in (["start"], ["format"]):
        assert main([*words, "-o", f"log.dirs={tmp_path}"]) == 1
        assert f"{tmp_path} is the directory of a cluster: `tidelog cluster start" in capsys.readouterr().err
    assert [each.name for each in tmp_path.iterdir()] == ["cluster.json"]


def test_a_new_cluster_takes_no_directory_of_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    launched: list[ClusterState] = []
    monkeypatch.setattr(cluster_command, "_launch_all", lambda file, state, *_: launched.append(state))
    monkeypatch.setattr(cluster_nodes, "check_ports", lambda nodes: None)
    for name in (".cluster.json.lock", "cluster.json.tmp", "lost+found"):
        (tmp_path / name).touch()
    (tmp_path / "notes.txt").touch()
    before = sorted(tmp_path.iterdir())
    words = ["cluster", "start", "--data", str(tmp_path)]
    assert main(words) == 1
    problem = f"{tmp_path} is not empty and has no cluster.json: it holds notes.txt"
    assert capsys.readouterr().err == f"tidelog: {problem} (choose another --data for a cluster)\n"
    assert (launched, sorted(tmp_path.iterdir())) == ([], before)
    (tmp_path / "notes.txt").unlink()
    assert main(words) == 0, "a first start that was killed leaves these files"
    assert len(launched) == 1


@pytest.mark.parametrize("verb", ["start", "restart"])
@pytest.mark.parametrize(
    ("properties", "problem"),
    [
        ("version=1\ncluster.id=another\nnode.id=1\n", "belongs to cluster another, this is cluster"),
        ("version=1\ncluster.id={id}\nnode.id=7\n", "belongs to node 7, this is node 1"),
        (None, "is not empty and has no meta.properties: it holds t-0"),
    ],
)
def test_a_node_whose_directory_is_not_its_own_is_one_line(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    verb: str,
    properties: str | None,
    problem: str,
) -> None:
    monkeypatch.setattr(cluster_nodes, "check_ports", lambda nodes: None)
    state = cluster_nodes.plan(tmp_path, 1, 0, 9092, {})
    ClusterFile(tmp_path).create(state)
    (tmp_path / "node-1" / "t-0").mkdir(parents=True)
    if properties is not None:
        (tmp_path / "node-1" / "meta.properties").write_text(properties.format(id=state.cluster_id))
    words = ["cluster", verb, "--data", str(tmp_path), *(["--detach"] if verb == "start" else [])]
    assert main(words) == 1
    said = capsys.readouterr().err
    assert said.startswith(f"tidelog: {tmp_path}/node-1 {problem}")
    assert said.count("\n") == 1
    assert [node.now for node in ClusterFile(tmp_path).read().nodes] == [STOPPED]


def test_a_cluster_under_nohup_outlives_its_terminal() -> None:
    before = {number: signal.getsignal(number) for number in (signal.SIGHUP, signal.SIGTERM)}
    try:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        cluster_command._EndSignals()
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        cluster_command._EndSignals()
        assert callable(signal.getsignal(signal.SIGHUP))
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@pytest.mark.parametrize("name", ["cluster.json.tmp", "node-1.yaml"])
def test_a_full_volume_is_told_with_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(cluster_nodes, "check_ports", lambda nodes: None)
    if name == "node-1.yaml":
        ClusterFile(tmp_path).create(cluster_nodes.plan(tmp_path, 1, 0, 9092, {}))
    (tmp_path / name).symlink_to("/dev/full")
    assert main(["cluster", "start", "--brokers", "1", "--data", str(tmp_path), "--detach"]) == 1
    assert capsys.readouterr().err == f"tidelog: {tmp_path / name}: No space left on device\n"


@pytest.mark.parametrize(("words", "code"), [(["--detach"], 1), ([], 0)])
def test_an_interrupt_before_a_cluster_is_ready_fails_where_it_was_to_run_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, words: list[str], code: int
) -> None:
    """It ended with 0, and a script went on without a cluster."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    monkeypatch.setattr(cluster_nodes, "check_ports", lambda nodes: None)
    monkeypatch.setattr(cluster_nodes, "launch_all", interrupt)
    try:
        assert main(["cluster", "start", "--brokers", "1", "--data", str(tmp_path), *words]) == code
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert capsys.readouterr().err == ("tidelog: interrupted\n" if code else "")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_between_two_launches_waits_until_the_file_has_all_processes(
    tmp_path: Path, child: subprocess.Popen[bytes], number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The nodes that had been launched ran on, and no command knew them."""

    def launch(node: Node, cluster_id: str) -> None:
        node.took(child.pid)
        signal.raise_signal(number)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cluster_nodes, "launch", launch)
    state = cluster_nodes.plan(tmp_path, 3, 0, 9092, {})
    file = ClusterFile(tmp_path)
    file.create(state)
    previous = signal.signal(number, interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            cluster_nodes.launch_all(file, state.nodes, "id")
        assert signal.getsignal(number) is interrupt
    finally:
        signal.signal(number, previous)
    assert [node.pid for node in file.read().nodes] == [child.pid] * 3
