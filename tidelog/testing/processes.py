"""Server processes on loopback: start, wait until ready, kill, stop, restart, and resource usage.

`ServerProcess` is any broker, `TidelogProcess` a Tidelog node (Kafka's is in `peers`),
`TidelogCluster` several nodes. A broker is ready when a Metadata response lists at least one
broker. Invariant: `stop`, the end of the `with` block, or any exit of this interpreter ends every
process that this module started.
"""

from __future__ import annotations

import atexit
import base64
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import IO, TYPE_CHECKING

from tidelog.testing.layout import NodeLayout, cluster_layout
from tidelog.testing.ports import free_port
from tidelog.testing.usage import Usage, usage

if TYPE_CHECKING:
    from tidelog.testing.links import Links

_METADATA_NO_TOPICS = struct.pack(">hhih5si", 3, 1, 7, 5, b"probe", 0)
_POLL_S = 0.005
_running: weakref.WeakSet[ServerProcess] = weakref.WeakSet()


class ServerFailed(Exception):
    """The process ended, or did not become ready; carries the end of its output."""


class ServerProcess:
    """A broker in a process of its own, listening on 127.0.0.1. Subclasses say how to start it."""

    name = "server"

    def __init__(
        self, directory: str | Path, port: int | None = None, options: Mapping[str, str] | None = None
    ) -> None:
        self.directory = Path(directory).resolve()
        self.port = port if port is not None else free_port()
        self.options = dict(options or {})
        self.ready_s = 0.0
        self._process: subprocess.Popen[bytes] | None = None
        self._owner_pid = os.getpid()

    @property
    def bootstrap(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def data_directory(self) -> Path:
        """Where the node keeps its logs (`log.dirs`)."""
        return Path(self.options.get("log.dirs", self.directory / "data"))

    @property
    def output_file(self) -> Path:
        return self.directory / f"{self.name}.log"

    @property
    def pid(self) -> int:
        assert self._process is not None, "not started"
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def command(self) -> list[str]:
        """The command line that runs the server in the foreground."""
        raise NotImplementedError

    def environment(self) -> dict[str, str]:
        return dict(os.environ)

    def prepare(self) -> None:
        """What must exist before the command runs; not part of the time to ready."""
        self.directory.mkdir(parents=True, exist_ok=True)

    def launch(self) -> None:
        """Start the process without waiting for it."""
        assert not self.alive, "already running"
        self.prepare()
        command = [*_tied_to_us(), *self.command()]
        with open(self.output_file, "ab") as output:
            self._process = self._spawn(command, output)
        _running.add(self)

    def _spawn(self, command: list[str], output: IO[bytes]) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=self.environment(),
            start_new_session=True,
        )

    def start(self, timeout_s: float = 60.0) -> float:
        """Start and wait until ready; the seconds from launch to ready.
        ServerFailed when it does not come up.
        """
        self.prepare()
        start_s = time.monotonic()
        self.launch()
        self.await_ready(timeout_s)
        self.ready_s = time.monotonic() - start_s
        return self.ready_s

    def is_ready(self) -> bool:
        """The port answers Metadata with a broker in it; a controller has none to tell of, it only
        listens.
        """
        if self.options.get("process.roles") == "controller":
            return accepts(self.port)
        return answers_metadata(self.port)

    def await_ready(self, timeout_s: float = 60.0) -> None:
        """Until `is_ready`; ServerFailed when it ends or takes longer."""
        deadline = time.monotonic() + timeout_s
        while not self.is_ready():
            if not self.alive:
                raise ServerFailed(f"{self.name} ended with {self.exit_code}:\n{self.output_tail()}")
            if time.monotonic() > deadline:
                raise ServerFailed(f"{self.name} is not ready after {timeout_s} s:\n{self.output_tail()}")
            time.sleep(_POLL_S)

    @property
    def exit_code(self) -> int | None:
        """Exit status of the last run, negative for a signal; None while it
        runs or before the first start.
        """
        return self._process.poll() if self._process is not None else None

    def output_tail(self, size_bytes: int = 2000) -> str:
        """The end of what the process printed, for messages."""
        try:
            return self.output_file.read_bytes()[-size_bytes:].decode(errors="replace")
        except OSError:
            return ""

    def kill(self) -> None:
        """SIGKILL, and wait until the process has ended."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def pause(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def stop(self, timeout_s: float = 60.0) -> int | None:
        """SIGTERM, then SIGKILL after `timeout_s`; returns the exit status."""
        process = self._process
        if process is None or process.poll() is not None:
            return self.exit_code
        process.send_signal(signal.SIGCONT)
        process.terminate()
        try:
            process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        return process.returncode

    def restart(self, timeout_s: float = 60.0) -> float:
        """Start again on the same data and port, stopping it first when it still runs; seconds to
        ready.
        """
        self.stop()
        return self.start(timeout_s)

    def usage(self) -> Usage:
        return usage(self.pid)

    def __enter__(self) -> ServerProcess:
        try:
            self.start()
        except BaseException:
            self.kill()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


class TidelogProcess(ServerProcess):
    """One Tidelog node, `python -m tidelog start`: data in DIRECTORY/data,
    output in DIRECTORY/tidelog.log.
    """

    name = "tidelog"
    cluster_id: str | None = None
    """Set where several nodes must agree on it: the directory is formatted with it."""

    def prepare(self) -> None:
        super().prepare()
        if self.cluster_id is not None:
            format_directory(self.data_directory, int(self.options["node.id"]), self.cluster_id)

    def command(self) -> list[str]:
        settings = {
            "listeners": f"PLAINTEXT://127.0.0.1:{self.port}",
            "log.dirs": str(self.data_directory),
            **self.options,
        }
        command = [sys.executable, "-m", "tidelog", "start"]
        for key, value in settings.items():
            command += ["-o", f"{key}={value}"]
        return command

    def environment(self) -> dict[str, str]:
        """This interpreter's environment, with the checkout first on the path: the
        code under test is the code here.
        """
        environment = super().environment()
        checkout = str(Path(__file__).resolve().parents[2])
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (checkout, environment.get("PYTHONPATH"))))
        # An installed package is compiled once; a start that compiles anew each
        # time would measure the compiler.
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        return environment

    def __enter__(self) -> TidelogProcess:
        super().__enter__()
        return self


MakeNode = Callable[[NodeLayout, Path, Mapping[str, str]], ServerProcess]


def tidelog_node(layout: NodeLayout, directory: Path, options: Mapping[str, str]) -> ServerProcess:
    """Makes a Tidelog node from a layout."""
    return TidelogProcess(directory, layout.port, options)


class TidelogCluster:
    """Several nodes on loopback that are one cluster; who is what is in `layout`.
    `nodes` has the brokers first.

    `options` go to every node, `node_options` to those named. With `links` the network between the
    nodes can be cut; then the cluster tells them who runs, and nodes are to be killed and started
    through it. `make_node` makes another kind of node than ours.
    """

    def __init__(
        self,
        directory: str | Path,
        brokers: int = 3,
        controllers: int | None = None,
        options: Mapping[str, str] | None = None,
        *,
        node_options: Mapping[int, Mapping[str, str]] | None = None,
        links: Links | None = None,
        make_node: MakeNode = tidelog_node,
    ) -> None:
        self.layouts = cluster_layout(brokers, controllers or 0, free_port, links)
        self.links = links
        self.cluster_id = _random_uuid()
        self.ready_s = 0.0
        self.nodes: dict[int, ServerProcess] = {}
        for node, layout in self.layouts.items():
            own = (node_options or {}).get(node, {})
            server = make_node(layout, Path(directory, f"node-{node}"), {**layout.options, **(options or {}), **own})
            if isinstance(server, TidelogProcess):
                server.cluster_id = self.cluster_id
            self.nodes[node] = server

    @property
    def broker_ids(self) -> list[int]:
        return [node for node, layout in self.layouts.items() if "broker" in layout.roles]

    @property
    def controller_ids(self) -> list[int]:
        return [node for node, layout in self.layouts.items() if "controller" in layout.roles]

    @property
    def bootstrap(self) -> str:
        return ",".join(self.nodes[node].bootstrap for node in self.broker_ids)

    def launch(self, node: int) -> None:
        """Start one node without waiting for it."""
        if self.links is not None:
            self.links.up(node)
        self.nodes[node].launch()

    def start(self, timeout_s: float = 60.0) -> float:
        """Launch every node, then wait for all: none is ready before a majority
        of the voters runs. The seconds.
        """
        for server in self.nodes.values():
            server.prepare()
        start_s = time.monotonic()
        for node in self.nodes:
            self.launch(node)
        for server in self.nodes.values():
            server.await_ready(timeout_s)
        self.ready_s = time.monotonic() - start_s
        return self.ready_s

    def kill(self, *nodes: int) -> None:
        """SIGKILL to all these nodes at one moment."""
        for node in nodes:
            os.kill(self.nodes[node].pid, signal.SIGKILL)
        for node in nodes:
            self.nodes[node].kill()
            if self.links is not None:
                self.links.down(node)

    def restart(self, node: int, timeout_s: float = 60.0) -> float:
        """Start a stopped node; returns the seconds until it is ready."""
        start_s = time.monotonic()
        self.launch(node)
        self.nodes[node].await_ready(timeout_s)
        return time.monotonic() - start_s

    def stop(self, timeout_s: float = 60.0) -> None:
        """SIGTERM to all at once: the last ones could not hand over to anybody; then SIGKILL."""
        for server in self.nodes.values():
            if server.alive:
                os.kill(server.pid, signal.SIGCONT)
                os.kill(server.pid, signal.SIGTERM)
        deadline = time.monotonic() + timeout_s
        for server in self.nodes.values():
            server.stop(max(deadline - time.monotonic(), 0.0))

    def __enter__(self) -> TidelogCluster:
        try:
            self.start()
        except BaseException:
            for server in self.nodes.values():
                server.kill()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def format_directory(directory: Path, node_id: int, cluster_id: str) -> None:
    """Say in an empty log directory whose it is, in Kafka's words, before its
    node does with an id of its own.
    """
    file = directory / "meta.properties"
    if not file.exists():
        directory.mkdir(parents=True, exist_ok=True)
        file.write_text(f"version=1\ncluster.id={cluster_id}\nnode.id={node_id}\ndirectory.id={_random_uuid()}\n")


def _random_uuid() -> str:
    """As Kafka writes one: version 4, base64 for URLs, and never with a dash in front."""
    while True:
        text = base64.urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")
        if not text.startswith("-"):
            return text


def _tied_to_us() -> list[str]:
    """What to put before a command so that the kernel ends it with us, also when we are
    killed (`setpriv`, util-linux).

    It is tied to the thread that starts it, so only the main thread, which lives as
    long as we do, may ask for this.
    """
    if threading.current_thread() is not threading.main_thread() or shutil.which("setpriv") is None:
        return []
    return ["setpriv", "--pdeathsig", "KILL"]


def accepts(port: int) -> bool:
    """Whether a process listens on this port."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def answers_metadata(port: int) -> bool:
    """Whether a broker on this port answers Metadata v1 and lists at least one broker."""
    try:
        with socket.create_connection(("127.0.0.1", port), 1) as connection:
            connection.settimeout(2)
            connection.sendall(struct.pack(">i", len(_METADATA_NO_TOPICS)) + _METADATA_NO_TOPICS)
            answer = b""
            while len(answer) < 12:
                part = connection.recv(65536)
                if not part:
                    return False
                answer += part
            brokers: int = struct.unpack_from(">i", answer, 8)[0]
            return brokers >= 1
    except OSError:
        return False


@atexit.register
def _end_all() -> None:
    for server in list(_running):
        if server._owner_pid == os.getpid():
            server.kill()
