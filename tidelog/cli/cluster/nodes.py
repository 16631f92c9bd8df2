"""Planning, launching and ending the processes of a local cluster; `cluster_state` remembers them.

A node is `tidelog start DIR/node-ID.yaml` in a session of its own, its output in DIR/node-ID.log, its data in
DIR/node-ID. A start appends to the output, so that what came before a crash can be read. The first line on standard
output says that the node is ready.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

import tidelog
from tidelog.cli.cluster.state import KILLED, PAUSED, RUNNING, STOPPED, ClusterFile, ClusterState, Node

STOP_S = 30.0
READY_S = 60.0
_CONTROLLERS_APART = 100
_POLL_S = 0.01
OUTPUT_BYTES_MAX = 16 * 1024 * 1024
"""From that size on, a start moves what is there to node-ID.log.1, over the one before."""
# Processes started here; the kernel keeps those that ended until somebody asks for them.
_children: dict[int, subprocess.Popen[bytes]] = {}


class ClusterFailed(Exception):
    """The cluster does not come up, or not as it was asked for; the message is for a person."""


def plan(directory: Path, brokers: int, controllers: int, port: int, options: Mapping[str, str]) -> ClusterState:
    """The nodes of a new cluster. Brokers come first; without controllers of their own the first 3 (or 1) are both."""
    from tidelog.protocol.uuids import uuid_to_text

    while (cluster_id := uuid_to_text(os.urandom(16))).startswith("-"):
        pass
    voters = range(brokers + 1, brokers + controllers + 1) if controllers else range(1, (3 if brokers >= 3 else 1) + 1)
    ids = sorted({*range(1, brokers + 1), *voters})
    first = port + _CONTROLLERS_APART
    controller_ports = {node: first + index for index, node in enumerate(voters)}
    if max(port + brokers, *controller_ports.values()) > 65535 or brokers > _CONTROLLERS_APART:
        raise ClusterFailed(f"from port {port} on there is no room for {brokers} brokers and {len(voters)} controllers")
    voter_list = ",".join(f"{node}@127.0.0.1:{each}" for node, each in controller_ports.items())
    nodes = []
    for node in ids:
        addresses = {"PLAINTEXT": f"127.0.0.1:{port + node - 1}"} if node <= brokers else {}
        if node in controller_ports:
            addresses["CONTROLLER"] = f"127.0.0.1:{controller_ports[node]}"
        role = ",".join(name for name, has in (("broker", node <= brokers), ("controller", node in voters)) if has)
        data = directory / f"node-{node}"
        config = {
            "node.id": str(node),
            "process.roles": role,
            "controller.quorum.voters": voter_list,
            "controller.listener.names": "CONTROLLER",
            "listeners": ",".join(f"{name}://{address}" for name, address in addresses.items()),
            "log.dirs": str(data),
            **_replicated(brokers),
            **options,
        }
        nodes.append(Node(node, role, addresses, str(data), str(directory / f"node-{node}.log"), config))
    return ClusterState(cluster_id, nodes)


def _replicated(brokers: int) -> dict[str, str]:
    """The topics that Kafka keeps for itself have as many replicas as there can be."""
    replicas, in_sync = str(min(3, brokers)), str(min(2, brokers))
    return {
        "offsets.topic.replication.factor": replicas,
        "transaction.state.log.replication.factor": replicas,
        "transaction.state.log.min.isr": in_sync,
        "share.coordinator.state.topic.replication.factor": replicas,
        "share.coordinator.state.topic.min.isr": in_sync,
    }


def check_configuration(nodes: Iterable[Node]) -> None:
    """Raises ConfigError before anything is on disk."""
    from tidelog.broker.config.node_config import NodeConfig
    from tidelog.broker.config.unserved import check_served

    for node in nodes:
        check_served(NodeConfig.load(None, node.config))


def check_ports(nodes: Iterable[Node]) -> None:
    """Raises ClusterFailed when somebody else listens where one of these nodes would."""
    for node in nodes:
        for name, address in node.addresses.items():
            host, _, port = address.rpartition(":")
            with socket.socket() as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                try:
                    probe.bind((host, int(port)))
                except OSError as error:
                    raise ClusterFailed(
                        f"node {node.id} cannot listen on {address} ({name}): {error.strerror}; choose another --port"
                    ) from None


def launch(node: Node, cluster_id: str) -> None:
    """Start a node's process, formatting its directory on first use."""
    from tidelog.storage.files.disk import OsDisk
    from tidelog.storage.log.directory import LogDirectory

    if not Path(node.data, "meta.properties").exists():
        LogDirectory.open(OsDisk(), node.data, node_id=node.id, cluster_id=cluster_id).close()
    file = Path(node.data).with_suffix(".yaml")
    lines = [f"{key}: {json.dumps(value)}\n" for key, value in node.config.items()]
    file.write_text("".join(lines), encoding="utf-8")
    output_file = Path(node.output)
    if output_file.exists() and output_file.stat().st_size >= OUTPUT_BYTES_MAX:
        output_file.replace(f"{node.output}.1")
    with open(node.output, "ab") as output:
        node.output_from = output.tell()
        child = subprocess.Popen(
            [sys.executable, "-m", "tidelog", "start", str(file)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=_environment(),
            start_new_session=True,
        )
    _children[child.pid] = child
    node.took(child.pid)


def _environment() -> dict[str, str]:
    """Ours; where this runs from a checkout, with it on the path, so that the nodes are of the same version."""
    environment = dict(os.environ)
    home = Path(tidelog.__file__).resolve().parents[1]
    if (home / "pyproject.toml").exists():
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(home), environment.get("PYTHONPATH"))))
    return environment


def bury() -> None:
    """Take leave of children that ended, else they would stay in the process table."""
    for pid, child in list(_children.items()):
        if child.poll() is not None:
            del _children[pid]


def await_ready(nodes: Iterable[Node], timeout_s: float = READY_S) -> None:
    """Until each has said that it is ready. Raises ClusterFailed with the end of its output."""
    deadline = time.monotonic() + timeout_s
    for node in nodes:
        while not is_ready(node):
            bury()
            if not node.is_there:
                raise ClusterFailed(f"node {node.id} ended while it started: {last_words(node)}")
            if time.monotonic() > deadline:
                raise ClusterFailed(f"node {node.id} is not ready after {timeout_s:.0f} s: {last_words(node)}")
            time.sleep(_POLL_S)


def is_ready(node: Node) -> bool:
    return b" ready: " in _output(node)


def last_words(node: Node) -> str:
    """The last lines of a node's output in one."""
    lines = _output(node).decode(errors="replace").strip().splitlines()
    return " | ".join(lines[-3:]) + f" (see {node.output})"


def _output(node: Node) -> bytes:
    """What the present process of a node has written so far."""
    try:
        with open(node.output, "rb") as output:
            output.seek(node.output_from)
            return output.read()
    except OSError:
        return b""


def end(nodes: Iterable[Node], timeout_s: float = STOP_S) -> list[Node]:
    """SIGTERM to all at once, SIGKILL to what is left after `timeout_s`; those that ran."""
    told = []
    for node in nodes:
        node.signal(signal.SIGCONT)
        if node.signal(signal.SIGTERM):
            told.append(node)
    deadline = time.monotonic() + timeout_s
    for node in told:
        while node.is_there and time.monotonic() < deadline:
            bury()
            time.sleep(_POLL_S)
        if node.signal(signal.SIGKILL):
            _await_end(node)
    bury()
    return told


def kill(nodes: Iterable[Node]) -> list[Node]:
    """SIGKILL, and wait until they are gone; those that ran."""
    killed = [node for node in nodes if node.signal(signal.SIGKILL)]
    for node in killed:
        _await_end(node)
    return killed


def _await_end(node: Node, timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while node.is_there and time.monotonic() < deadline:
        bury()
        time.sleep(_POLL_S)


def set_asked(file: ClusterFile, nodes: Iterable[Node], state: str) -> None:
    """Write down what is asked of these nodes, before it is done (else it would look like a death of their own), and
    once more after it, for those who read what became of them."""
    assert state in (KILLED, PAUSED, RUNNING, STOPPED)
    wanted = {node.id for node in nodes}
    with file.changing() as cluster:
        for node in cluster.nodes:
            if node.id in wanted:
                node.asked = state


def take_processes(file: ClusterFile, nodes: Iterable[Node]) -> None:
    """Write down which processes these nodes are now."""
    taken = {node.id: node for node in nodes}
    with file.changing() as cluster:
        for node in cluster.nodes:
            if node.id in taken:
                mine = taken[node.id]
                node.pid, node.started, node.asked, node.config = mine.pid, mine.started, mine.asked, mine.config
                node.output_from = mine.output_from
