"""Plans, launches and ends the processes of a local cluster; `state.py` stores them.

A node is `tidelog start DIR/node-ID.yaml` in a session of its own, with its output in DIR/node-ID.log and its data in
DIR/node-ID. A start appends to the output, so that the output before a crash stays. The first line on standard output
means that the node is ready.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import tidelog
from tidelog.cli.cluster.state import (
    FILE,
    KILLED,
    LOCK_FILE,
    PAUSED,
    RUNNING,
    STOPPED,
    ClusterFile,
    ClusterState,
    Node,
    is_formatted,
    write_named,
)
from tidelog.protocol.addresses import address_text
from tidelog.protocol.errors import counted

STOP_S = 30.0
READY_S = 60.0
_CONTROLLERS_APART = 100
_POLL_S = 0.01
OUTPUT_BYTES_MAX = 16 * 1024 * 1024
"""From this size on, a start renames the output to node-ID.log.1, and replaces an older one."""
_OF_EACH_NODE = frozenset(
    "node.id broker.id process.roles listeners controller.quorum.voters log.dir log.dirs metadata.log.dir".split()
)
_ANOTHER = "choose another --data for a cluster"
# The processes that this process has started. The kernel keeps ended ones until `bury` reads their exit codes.
_children: dict[int, subprocess.Popen[bytes]] = {}


class ClusterFailed(Exception):
    """The cluster does not start, or not as requested; the message is for the user."""


def plan(directory: Path, brokers: int, controllers: int, port: int, options: Mapping[str, str]) -> ClusterState:
    """The nodes of a new cluster, brokers first. Without separate controllers the first 3 brokers (1 if there are
    fewer than 3) are controllers too.
    """
    from tidelog.broker.config.node_config import internal_topic_options
    from tidelog.protocol.uuids import uuid_to_text

    if is_formatted(directory):
        raise ClusterFailed(f"{directory} is the directory of a node: {_ANOTHER}")
    strangers = sorted(name for name in _names_in(directory) if not _is_harmless(name))
    if strangers:
        raise ClusterFailed(f"{directory} is not empty and has no {FILE}: it holds {strangers[0]} ({_ANOTHER})")
    while (cluster_id := uuid_to_text(os.urandom(16))).startswith("-"):
        pass
    voters = range(brokers + 1, brokers + controllers + 1) if controllers else range(1, (3 if brokers >= 3 else 1) + 1)
    ids = sorted({*range(1, brokers + 1), *voters})
    first = port + _CONTROLLERS_APART
    controller_ports = {node: first + index for index, node in enumerate(voters)}
    if max(port + brokers, *controller_ports.values()) > 65535 or brokers > _CONTROLLERS_APART:
        both = f"{counted(brokers, 'broker')} and {counted(len(voters), 'controller')}"
        raise ClusterFailed(f"from port {port} on there is no room for {both}")
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
            **internal_topic_options(brokers),
            **options,
        }
        nodes.append(Node(node, role, addresses, str(data), str(directory / f"node-{node}.log"), config))
    return ClusterState(cluster_id, nodes)


def _names_in(directory: Path) -> list[str]:
    return os.listdir(directory) if directory.exists() else []


def _is_harmless(name: str) -> bool:
    """Whether a new cluster's directory may hold this: what a killed first start leaves, and what a new volume has."""
    return name in (LOCK_FILE, "lost+found") or name.endswith(".tmp")


def check_options(options: Iterable[str]) -> None:
    """Raises ClusterFailed for a configuration value that differs from node to node."""
    for key in options:
        if key in _OF_EACH_NODE:
            raise ClusterFailed(f"{key} differs from node to node: it follows from the other options")


def check_configuration(nodes: Iterable[Node]) -> None:
    """Raises ConfigError or ClusterFailed, before any file is written."""
    from tidelog.broker.config.dynamic_config import DynamicConfig
    from tidelog.broker.config.node_config import NodeConfig
    from tidelog.broker.config.unserved import check_served
    from tidelog.broker.config.validation import check_values

    owners: dict[tuple[str, int], int] = {}
    for node in nodes:
        config = NodeConfig.load(None, node.config)
        check_served(config)
        check_values(DynamicConfig(config))
        for listener in config.advertised_listeners():
            owner = owners.setdefault((listener.host, listener.port), node.id)
            if owner != node.id:
                text = f"nodes {owner} and {node.id} would both advertise {address_text(listener.host, listener.port)}"
                raise ClusterFailed(f"{text}: advertised.listeners is for a cluster of one broker")


def check_ports(nodes: Iterable[Node]) -> None:
    """Raises ClusterFailed if another process listens on an address of these nodes."""
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
    """Start a node's process, and format its directory at the first start. Raises ClusterFailed, OSError."""
    _format(node, cluster_id)
    file = Path(node.data).with_suffix(".yaml")
    lines = [f"{key}: {json.dumps(value)}\n" for key, value in node.config.items()]
    write_named(file, "".join(lines))
    output_file = Path(node.output)
    if output_file.exists() and output_file.stat().st_size >= OUTPUT_BYTES_MAX:
        output_file.replace(f"{node.output}.1")
    with open(node.output, "ab") as output:
        node.output_from = output.tell()
        child = subprocess.Popen(
            [sys.executable, *node.arguments],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=_environment(),
            start_new_session=True,
        )
    _children[child.pid] = child
    node.took(child.pid)


def _format(node: Node, cluster_id: str) -> None:
    """Format the node's directory, or check that it is this node's. Raises ClusterFailed, OSError."""
    from tidelog.storage.files.checkpoints import META_PROPERTIES_FILE, read_if_exists
    from tidelog.storage.files.disk import DirectoryInUse, OsDisk
    from tidelog.storage.files.meta_properties import ForeignDirectory, check_properties
    from tidelog.storage.log.directory import LogDirectory

    disk = OsDisk()
    try:
        properties = read_if_exists(disk, f"{node.data}/{META_PROPERTIES_FILE}")
        if properties is None:
            LogDirectory.open(disk, node.data, node_id=node.id, cluster_id=cluster_id).close()
        else:
            check_properties(disk, node.data, properties, node.id, cluster_id)
    except (DirectoryInUse, ForeignDirectory) as error:
        raise ClusterFailed(str(error)) from None


def launch_all(file: ClusterFile, nodes: Sequence[Node], cluster_id: str) -> None:
    """Start the processes of these nodes, and save them in the file.

    Signals that end this process wait until both are done, so that no process runs that the file does not know.
    """
    held: list[int] = []
    previous = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    caught = [number for number, handler in previous.items() if handler is not signal.SIG_IGN]
    for number in caught:
        signal.signal(number, lambda number, frame: held.append(number))
    try:
        try:
            for node in nodes:
                launch(node, cluster_id)
        finally:
            take_processes(file, nodes)
    finally:
        for number in caught:
            signal.signal(number, previous[number])
    if held:
        signal.raise_signal(held[0])


def _environment() -> dict[str, str]:
    """This process's environment. In a checkout it also has the checkout on the path, so that all nodes run the same
    version.
    """
    environment = dict(os.environ)
    home = Path(tidelog.__file__).resolve().parents[1]
    if (home / "pyproject.toml").exists():
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(home), environment.get("PYTHONPATH"))))
    return environment


def bury() -> None:
    """Read the exit codes of ended children, which otherwise stay in the process table."""
    for pid, child in list(_children.items()):
        if child.poll() is not None:
            del _children[pid]


def await_ready(nodes: Iterable[Node], timeout_s: float = READY_S) -> None:
    """Wait until all nodes are ready. Raises ClusterFailed with the end of a node's output."""
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
    """The last lines of a node's output, joined to one line."""
    lines = _output(node).decode(errors="replace").strip().splitlines()
    return " | ".join(lines[-3:]) + f" (see {node.output})"


def _output(node: Node) -> bytes:
    """The output of a node's present process."""
    try:
        with open(node.output, "rb") as output:
            output.seek(node.output_from)
            return output.read()
    except OSError:
        return b""


def end(nodes: Iterable[Node], timeout_s: float = STOP_S) -> list[Node]:
    """Send SIGTERM to all brokers, then to the controllers, without which the brokers would wait for an answer, and
    SIGKILL to those that still run after `timeout_s`. Returns those that ran.
    """
    ending = [node for node in nodes if node.signal(signal.SIGCONT)]
    deadline = time.monotonic() + timeout_s
    signalled = []
    for is_broker in (True, False):
        group = [node for node in ending if node.is_broker == is_broker and node.signal(signal.SIGTERM)]
        for node in group:
            while node.is_there and time.monotonic() < deadline:
                bury()
                time.sleep(_POLL_S)
            node.signal(signal.SIGKILL)
            _await_end(node)
        signalled += group
    return signalled


def kill(nodes: Iterable[Node]) -> list[Node]:
    """Send SIGKILL and wait for the end of the processes. Returns the nodes that ran."""
    killed = [node for node in nodes if node.signal(signal.SIGKILL)]
    for node in killed:
        _await_end(node)
    return killed


def _await_end(node: Node, timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while node.is_there and time.monotonic() < deadline:
        bury()
        time.sleep(_POLL_S)
    # A process whose main thread has ended is not there any more, but has no exit code before its other threads end.
    child = _children.get(node.pid)
    if child is not None:
        try:
            child.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            return
        del _children[node.pid]


def set_requested(file: ClusterFile, nodes: Iterable[Node], state: str) -> None:
    """Save the requested state of these nodes. Callers do so before the action, so that its effect does not look like a
    crash, and again after it, so that other terminals see the outcome.
    """
    assert state in (KILLED, PAUSED, RUNNING, STOPPED)
    node_ids = {node.id for node in nodes}
    with file.changing() as cluster:
        for node in cluster.nodes:
            if node.id in node_ids:
                node.asked = state


def take_processes(file: ClusterFile, nodes: Iterable[Node]) -> None:
    """Save the present processes of these nodes."""
    taken = {node.id: node for node in nodes}
    with file.changing() as cluster:
        for node in cluster.nodes:
            if node.id in taken:
                mine = taken[node.id]
                node.pid, node.started, node.asked, node.config = mine.pid, mine.started, mine.asked, mine.config
                node.output_from = mine.output_from
