"""Server processes on loopback: start, wait until ready, kill, stop, restart, and what they use.

`ServerProcess` is what a scenario or a test needs from any broker; `TidelogProcess` is ours (Kafka's is in `peers`).
Ready means the same for both: a Metadata request is answered with at least one broker. Every process started here is
ended by `stop`, by leaving the `with` block, or at the latest when this interpreter exits, however it does.
"""

from __future__ import annotations

import atexit
import os
import random
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import IO

from tidelog.bench.usage import Usage, usage

_METADATA_NO_TOPICS = struct.pack(">hhih5si", 3, 1, 7, 5, b"probe", 0)
_POLL_S = 0.005
_running: weakref.WeakSet[ServerProcess] = weakref.WeakSet()


class ServerFailed(Exception):
    """The process ended, or did not become ready; carries the end of its output."""


def free_port() -> int:
    """A port nobody listens on, below the range that outgoing connections take theirs from."""
    choice = random.SystemRandom()
    for _ in range(200):
        port = choice.randrange(15000, 32000)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise ServerFailed("no free port between 15000 and 32000")


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
        """Start and wait until ready; the seconds from launch to ready. ServerFailed when it does not come up."""
        self.prepare()
        began = time.monotonic()
        self.launch()
        self.await_ready(timeout_s)
        self.ready_s = time.monotonic() - began
        return self.ready_s

    def await_ready(self, timeout_s: float = 60.0) -> None:
        """Until the port answers Metadata with a broker in it."""
        deadline = time.monotonic() + timeout_s
        while not answers_metadata(self.port):
            if not self.alive:
                raise ServerFailed(f"{self.name} ended with {self.exit_code}:\n{self.output_tail()}")
            if time.monotonic() > deadline:
                raise ServerFailed(f"{self.name} is not ready after {timeout_s} s:\n{self.output_tail()}")
            time.sleep(_POLL_S)

    @property
    def exit_code(self) -> int | None:
        """Exit status of the last run, negative for a signal; None while it runs or before the first start."""
        return self._process.poll() if self._process is not None else None

    def output_tail(self, size_bytes: int = 2000) -> str:
        """The end of what the process printed, for messages."""
        try:
            return self.output_file.read_bytes()[-size_bytes:].decode(errors="replace")
        except OSError:
            return ""

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def pause(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def stop(self, timeout_s: float = 20.0) -> int | None:
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
        """Start again on the same data and port, stopping it first when it still runs; seconds to ready."""
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
    """One Tidelog node, `python -m tidelog start`: data in DIRECTORY/data, output in DIRECTORY/tidelog.log."""

    name = "tidelog"

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
        """This interpreter's environment, with the checkout first on the path: the code under test is the code here."""
        environment = super().environment()
        checkout = str(Path(__file__).resolve().parents[2])
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (checkout, environment.get("PYTHONPATH"))))
        # An installed package is compiled once; a start that compiles anew each time would measure the compiler.
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        return environment

    def __enter__(self) -> TidelogProcess:
        super().__enter__()
        return self


def _tied_to_us() -> list[str]:
    """What to put before a command so that the kernel ends it with us, also when we are killed (`setpriv`, util-linux).

    It is tied to the thread that starts it, so only the main thread, which lives as long as we do, may ask for this.
    """
    if threading.current_thread() is not threading.main_thread() or shutil.which("setpriv") is None:
        return []
    return ["setpriv", "--pdeathsig", "KILL"]


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
