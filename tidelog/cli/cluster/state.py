"""`DIR/cluster.json`: the nodes of a local cluster, with their roles, addresses and processes.

All terminals read and change the same file, one at a time, as a whole. A process is identified by its id and its start
time, so that no signal reaches another process that got the id later. A command that is killed may leave a process that
it has not written down: that one is found by its command line.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

from tidelog.protocol.errors import ConfigError

RUNNING, PAUSED, KILLED, STOPPED = "running", "paused", "killed", "stopped"
DIED = "died"
FILE = "cluster.json"
LOCK_FILE = f".{FILE}.lock"


class NoCluster(Exception):
    """There is no cluster in this directory, or its file cannot be read; the message has one line."""


@dataclass(slots=True)
class Node:
    """`asked`: the last requested state; `Node.now`: the present state."""

    id: int
    role: str
    addresses: dict[str, str]
    data: str
    output: str
    config: dict[str, str]
    pid: int = 0
    started: int = 0
    """The start time of the process, in the kernel's ticks since boot."""
    asked: str = STOPPED
    output_from: int = 0
    """The position in `output`, in bytes, at which the output of the present process begins."""

    @property
    def arguments(self) -> list[str]:
        """The arguments of the process after the name of the interpreter. No other node of this machine has them."""
        # -P: a struct.py in the working directory is the user's, not Python's.
        return ["-P", "-m", "tidelog", "start", str(Path(self.data).with_suffix(".yaml"))]

    @property
    def is_broker(self) -> bool:
        return "broker" in self.role.split(",")

    @property
    def now(self) -> str:
        """The present state: `running` or `paused` from the process, or `died` if it has ended without a command."""
        letter = self._letter()
        if letter is None:
            return self.asked if self.asked in (KILLED, STOPPED) else DIED
        return PAUSED if letter == "T" else RUNNING

    @property
    def is_there(self) -> bool:
        return self._letter() is not None

    def signal(self, number: signal.Signals) -> bool:
        """Send a signal. Returns False if the process is gone."""
        if not self.is_there:
            return False
        try:
            os.kill(self.pid, number)
        except ProcessLookupError:
            return False
        return True

    def took(self, pid: int) -> None:
        """Set the process of this node."""
        status = process_status(pid)
        self.pid, self.started, self.asked = pid, status[1] if status is not None else 0, RUNNING

    def _letter(self) -> str | None:
        """The kernel's letter for the state of the process; None if it is gone or has ended (a zombie)."""
        status = process_status(self.pid) if self.pid > 0 else None
        if status is None or status[1] != self.started or status[0] in "ZX":
            return None
        return status[0]


def process_status(pid: int) -> tuple[str, int] | None:
    """State letter and start time of a process; None if it does not exist."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()
    return fields[0], int(fields[19])


def find_processes(nodes: Iterable[Node]) -> None:
    """Set the processes of nodes that run without being known, because the command that started them was killed."""
    unknown = {"\0".join(node.arguments): node for node in nodes if not node.is_there}
    for pid in map(int, filter(str.isdecimal, os.listdir("/proc"))) if unknown else ():
        try:
            line = Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            continue
        _, _, arguments = os.fsdecode(line).rstrip("\0").partition("\0")
        node = unknown.get(arguments)
        if node is not None:
            node.took(pid)


@dataclass(slots=True)
class ClusterState:
    cluster_id: str
    nodes: list[Node] = field(default_factory=list)

    @property
    def bootstrap(self) -> str:
        return ",".join(node.addresses["PLAINTEXT"] for node in self.nodes if node.is_broker)

    @property
    def running_bootstrap(self) -> str:
        """The addresses of the running brokers, or of all brokers if none runs."""
        running = [node.addresses["PLAINTEXT"] for node in self.nodes if node.is_broker and node.now == RUNNING]
        return ",".join(running) or self.bootstrap

    def chosen(self, ids: tuple[int, ...]) -> list[Node]:
        """The nodes with these ids, or all nodes without ids. Raises NoCluster with the unknown ids."""
        known = {node.id: node for node in self.nodes}
        unknown = [str(each) for each in ids if each not in known]
        if unknown:
            raise NoCluster(f"no node {', '.join(unknown)}; the cluster has {', '.join(map(str, known))}")
        return [known[each] for each in dict.fromkeys(ids)] if ids else self.nodes


class ClusterFile:
    """The cluster file of one directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory.resolve()
        self.path = self.directory / FILE

    def exists(self) -> bool:
        return self.path.exists()

    def read(self) -> ClusterState:
        """Raises NoCluster."""
        try:
            content = json.loads(self.path.read_text(encoding="utf-8"))
            state = ClusterState(content["cluster_id"], [_node(each, self.directory) for each in content["nodes"]])
        except FileNotFoundError:
            raise NoCluster(
                f"no cluster in {self.directory}: it has no {FILE} (tidelog cluster start makes one)"
            ) from None
        except (AttributeError, KeyError, TypeError, ValueError, RecursionError):
            raise NoCluster(f"{self.path} is not a cluster's file") from None
        find_processes(state.nodes)
        return state

    @contextmanager
    def changing(self) -> Iterator[ClusterState]:
        """Read the state to change it, and write it at the end of the block. Other processes wait meanwhile."""
        with self._alone():
            state = self.read()
            yield state
            self._write(state)

    def create(self, state: ClusterState) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        with self._alone():
            self._write(state)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        if not self.directory.is_dir():
            raise NoCluster(f"no cluster in {self.directory}: there is no such directory")
        with open(self.directory / LOCK_FILE, "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def _write(self, state: ClusterState) -> None:
        content = {
            "cluster_id": state.cluster_id,
            "bootstrap_servers": state.bootstrap,
            "nodes": [_content(node) for node in state.nodes],
        }
        part = self.path.with_suffix(".json.tmp")
        write_named(part, json.dumps(content, indent=2) + "\n")
        part.replace(self.path)


def is_formatted(directory: Path) -> bool:
    """Whether this is the log directory of a node. False for one that may not be searched, where Path.exists raises an
    error: the node has its own words for it.
    """
    return os.path.exists(directory / "meta.properties")


def refuse_cluster_directories(log_dirs: Iterable[Path]) -> None:
    """Raise ConfigError for a log directory that is a local cluster's: a node would take `node-1` for a partition of a
    topic `node`, and set it aside.
    """
    for directory in log_dirs:
        if os.path.exists(directory / FILE) and not is_formatted(directory):
            nodes = f"`tidelog cluster start --data {directory}` starts its nodes"
            raise ConfigError(f"{directory} is the directory of a cluster: {nodes}")


def write_named(path: Path, text: str) -> None:
    """Write a file. The error of a write, as on a full volume, has no name of its own: it gets that of the file."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None


def _content(node: Node) -> dict[str, Any]:
    is_there = node.is_there
    return asdict(node) | {
        "state": node.now,
        "pid": node.pid if is_there else None,
        "started": node.started if is_there else None,
    }


def _node(content: Mapping[str, Any], directory: Path) -> Node:
    """The node with its paths in this directory. The file has those of the directory in which it was written, and that
    one may have been moved or copied since.
    """
    node = Node(**{key: value for key, value in content.items() if key != "state"})
    node.pid, node.started = node.pid or 0, node.started or 0
    _check_types(node)
    before = Path(node.data).parent
    if before != directory and (before / FILE).exists():
        node.pid, node.asked = 0, STOPPED  # this is a copy, and the processes are the original's
    data = str(directory / Path(node.data).name)
    if node.config.get("log.dirs") == node.data:
        node.config["log.dirs"] = data
    node.data, node.output = data, str(directory / Path(node.output).name)
    return node


def _check_types(node: Node) -> None:
    """Raise TypeError for a value of another type: a file may have been edited by hand. KeyError without an address."""
    numbers, maps = (node.id, node.pid, node.started, node.output_from), (node.addresses, node.config)
    if any(type(each) is not int for each in numbers) or any(type(each) is not dict for each in maps):
        raise TypeError(numbers, maps)
    texts = (node.role, node.data, node.output, node.asked, *chain(*maps, *(each.values() for each in maps)))
    if not all(isinstance(each, str) for each in texts):
        raise TypeError(texts)
    if node.is_broker and "PLAINTEXT" not in node.addresses:
        raise KeyError("PLAINTEXT")
