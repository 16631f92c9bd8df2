"""Server processes on loopback: start, wait until ready, kill, stop, restart, and resource usage.

`ServerProcess` is any broker, `TidelogProcess` a Tidelog node as the command line starts it,
`ForkedNode` one that is forked from a process that has imported it (Kafka's is in `peers`). A broker
is ready when a Metadata response lists at least one broker. Invariant: `stop`, the end of the `with`
block, or any exit of this interpreter ends every process that this module started, and deletes what
`make_temporary_directory` made. If an interpreter is killed, the next one deletes what it made.
"""

from __future__ import annotations

import atexit
import base64
import fcntl
import os
import shutil
import signal
import socket
import struct
import subprocess
import tempfile
import threading
import time
import uuid
import weakref
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import IO, Any, NamedTuple

from tidelog.protocol.addresses import address_text
from tidelog.protocol.errors import ConfigError
from tidelog.testing.fork_server import ForkedProcess, close_fork_server, fork_server, module_command
from tidelog.testing.ports import free_port
from tidelog.testing.usage import Usage, usage

_METADATA_NO_TOPICS = struct.pack(">hhih5si", 3, 1, 7, 5, b"probe", 0)
_POLL_S = 0.005
_running: weakref.WeakSet[ServerProcess] = weakref.WeakSet()
_OWNER_SUFFIX = ".owner"


class _Owner(NamedTuple):
    """The process that made a temporary directory, because a fork deletes none of its parent's, and its lock on the
    file beside the directory: without a lock on it, the owner was killed.
    """

    pid: int
    lock_fd: int


_temporary: dict[Path, _Owner] = {}


class ServerFailed(Exception):
    """The process ended, or did not become ready; carries the end of its output."""


class ServerProcess:
    """A broker in a process of its own, listening on loopback. Subclasses say how to start it."""

    name = "server"
    host = "127.0.0.1"

    def __init__(
        self, directory: str | Path, port: int | None = None, options: Mapping[str, str] | None = None
    ) -> None:
        self.directory = Path(directory).resolve()
        self.port = port if port is not None else free_port()
        self.options = dict(options or {})
        self.ready_s = 0.0
        self.lock = threading.RLock()
        """Held while the process is started or stopped. Two threads that started it at once had two processes."""
        self._process: subprocess.Popen[bytes] | ForkedProcess | None = None
        self._owner_pid = os.getpid()

    @property
    def bootstrap_servers(self) -> str:
        return address_text(self.host, self.port)

    @property
    def data_directory(self) -> Path:
        """Where the node keeps its logs: the first of `log.dirs`."""
        return self.log_dirs[0]

    @property
    def log_dirs(self) -> list[Path]:
        named = self.options.get("log.dirs") or self.options.get("log.dir") or str(self.directory / "data")
        return [Path(each.strip()) for each in named.split(",")]

    @property
    def output_file(self) -> Path:
        return self.directory / f"{self.name}.log"

    @property
    def pid(self) -> int:
        assert self._process is not None, "not started"
        return self._process.pid

    @property
    def is_ours(self) -> bool:
        """Whether this process started it last, or made it, and is no fork of the one that did."""
        return self._owner_pid == os.getpid()

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
        """Start the process without waiting for it. Raises ServerFailed when another process listens on
        its port, which would be taken for this one, and RuntimeError when it runs.
        """
        with self.lock:
            if self.alive:
                raise RuntimeError(f"{self.name} runs already")
            if accepts(self.port, self.host):
                raise ServerFailed(f"{self.name} did not start: its port {self.port} is in use")
            self.prepare()
            command = [*_tied_to_us(), *self.command()]
            self._owner_pid = os.getpid()
            _running.add(self)
            with open(self.output_file, "ab") as output:
                self._process = self._spawn(command, output)

    def _spawn(self, command: list[str], output: IO[bytes]) -> subprocess.Popen[bytes] | ForkedProcess:
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
            return accepts(self.port, self.host)
        return answers_metadata(self.port, self.host)

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

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the process has ended: its id may be that of another process then."""
        if self._process is not None:
            self._process.send_signal(number)

    def pause(self) -> None:
        """SIGSTOP. Raises RuntimeError when the process does not run."""
        self._require_alive()
        self.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """SIGCONT. Raises RuntimeError when the process does not run."""
        self._require_alive()
        self.send_signal(signal.SIGCONT)

    def _require_alive(self) -> None:
        if not self.alive:
            raise RuntimeError(f"{self.name} on port {self.port} does not run; start it first")

    def stop(self, timeout_s: float = 60.0) -> int | None:
        """SIGTERM, then SIGKILL after `timeout_s`; returns the exit status. A fork of the process that started it
        leaves it running.
        """
        if not self.is_ours:
            return None
        with self.lock:
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
        with self.lock:
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
            metadata_dir = self.options.get("metadata.log.dir")
            for directory in (*self.log_dirs, *([Path(metadata_dir)] if metadata_dir else [])):
                format_directory(directory, int(self.options["node.id"]), self.cluster_id)

    def arguments(self) -> list[str]:
        """The arguments of the command `tidelog`."""
        settings = {
            "listeners": f"PLAINTEXT://127.0.0.1:{self.port}",
            "log.dirs": ",".join(map(str, self.log_dirs)),
            **self.options,
        }
        arguments = ["start"]
        for key, value in settings.items():
            arguments += ["-o", f"{key}={value}"]
        return arguments

    def command(self) -> list[str]:
        return [*module_command("tidelog"), *self.arguments()]

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


class ForkedNode(TidelogProcess):
    """A Tidelog node that is forked from the fork server of this process, which has imported it: it
    is ready in a tenth of the time that `TidelogProcess` takes.
    """

    def _spawn(self, command: list[str], output: IO[bytes]) -> ForkedProcess:
        environment = self.environment()
        return fork_server(_tied_to_us(), environment).spawn(self.arguments(), output.fileno(), environment)


def format_directory(directory: Path, node_id: int, cluster_id: str) -> None:
    """Say in an empty log directory whose it is, in Kafka's words, before its
    node does with an id of its own.
    """
    file = directory / "meta.properties"
    if not file.exists():
        directory.mkdir(parents=True, exist_ok=True)
        file.write_text(f"version=1\ncluster.id={cluster_id}\nnode.id={node_id}\ndirectory.id={random_uuid()}\n")


def check_keys(name: str, config: Mapping[Any, Any]) -> None:
    """Raise TypeError for a configuration key that is no text. `name`: of the argument."""
    for key in config:
        if not isinstance(key, str):
            raise TypeError(f"{name}: a configuration key is text, such as 'num.partitions', not {key!r}")


def check_log_directory(directory: Path) -> None:
    """Raises ConfigError for a path that `log.dirs` would take for two."""
    if "," in str(directory):
        raise ConfigError(f"log.dirs separates directories by commas, and there is one in {directory}")


def random_uuid() -> str:
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


def accepts(port: int, host: str = "127.0.0.1") -> bool:
    """Whether a process listens on this port."""
    try:
        socket.create_connection((host, port), 1).close()
    except OSError:
        return False
    return True


def answers_metadata(port: int, host: str = "127.0.0.1") -> bool:
    """Whether a broker on this port answers Metadata v1 and lists at least one broker."""
    return listed_brokers(port, host) >= 1


def listed_brokers(port: int, host: str = "127.0.0.1") -> int:
    """How many brokers a broker on this port lists (Metadata v1); 0 without an answer."""
    try:
        with socket.create_connection((host, port), 1) as connection:
            connection.settimeout(2)
            connection.sendall(struct.pack(">i", len(_METADATA_NO_TOPICS)) + _METADATA_NO_TOPICS)
            answer = b""
            while len(answer) < 12:
                part = connection.recv(65536)
                if not part:
                    return 0
                answer += part
            brokers: int = struct.unpack_from(">i", answer, 8)[0]
            return brokers
    except OSError:
        return 0


def make_temporary_directory(prefix: str) -> Path:
    """A new directory, which is deleted by `delete_temporary_directory`, and at the latest at the exit of this
    interpreter. What is left of processes that were killed is deleted by the first call of the next process.
    """
    directory = Path(tempfile.mkdtemp(prefix=prefix)).resolve()
    _delete_abandoned(directory.parent)
    return own_temporary_directory(directory)


def own_temporary_directory(directory: Path) -> Path:
    """Let `delete_temporary_directory` delete this one, again."""
    owner = _temporary.get(directory)
    if owner is None or owner.pid != os.getpid():
        _temporary[directory] = _Owner(os.getpid(), _lock_owner_file(directory))
    return directory


def delete_temporary_directory(directory: Path) -> None:
    """Delete what `make_temporary_directory` made, unless this process is a fork of the one that made it."""
    owner = _temporary.get(directory)
    if owner is None:
        return
    if owner.pid == os.getpid():
        _delete(directory)  # an interrupt leaves it to another call
    if _temporary.pop(directory, None) is not None:
        os.close(owner.lock_fd)


def _delete(directory: Path) -> None:
    shutil.rmtree(directory, ignore_errors=True)
    if not directory.exists():
        _owner_file(directory).unlink(missing_ok=True)


def _owner_file(directory: Path) -> Path:
    """Beside the directory: a node accepts no other files in it."""
    return directory.with_name(directory.name + _OWNER_SUFFIX)


def _lock_owner_file(directory: Path) -> int:
    file = _owner_file(directory)
    unlocked = file.with_name(f"{file.name}.{os.getpid()}")
    descriptor = os.open(unlocked, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    unlocked.rename(file)  # no other process sees it without the lock
    return descriptor


@cache
def _delete_abandoned(parent: Path) -> None:
    """Delete the temporary directories here whose owners were killed."""
    for file in parent.glob(f"tidelog-*{_OWNER_SUFFIX}"):
        try:
            descriptor = os.open(file, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            status = os.fstat(descriptor)
            if status.st_uid == os.getuid() and os.path.samestat(status, file.stat()):
                _delete(file.with_suffix(""))
        except OSError:
            pass  # its owner lives, or another process deletes it
        finally:
            os.close(descriptor)


@atexit.register
def _end_all() -> None:
    for server in list(_running):
        if server.is_ours:
            server.kill()
    close_fork_server()
    for directory in list(_temporary):
        delete_temporary_directory(directory)
