"""Processes that start at once: a server process imports the node one time and forks each process from itself.

`ForkServer.spawn` runs `tidelog ARGUMENTS` in a fork and returns a `ForkedProcess`, which has the part
of `subprocess.Popen` that `processes.py` uses. A fork is a real process: signals kill, stop and
continue it alone. Invariant: all forks end when the process that asked for them ends, or when the
fork server does. Run as a module, this file is the fork server itself; it has one thread.
"""

from __future__ import annotations

import gc
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Mapping
from importlib import import_module
from queue import SimpleQueue
from typing import Any

PRELOADED = (
    "tidelog.cli.main",
    "tidelog.cli.commands",
    "tidelog.cli.start",
    "tidelog.broker.node",
    "tidelog.broker.logs",
)
"""What a fork finds imported: the command `tidelog start` and the node."""

_LENGTH = struct.Struct(">I")
_PID = struct.Struct(">i")
_REQUEST_BYTES_MAX = 1 << 24
_CLOSE_TIMEOUT_S = 10.0
_SET_PARENT_DEATH_SIGNAL = 1
_servers: dict[int, ForkServer] = {}
_servers_lock = threading.Lock()


def module_command(module: str) -> list[str]:
    """The command line that runs a module. -P: a struct.py in the working directory is the user's, not Python's."""
    return [sys.executable, "-P", "-m", module]


class ForkFailed(Exception):
    """The fork server ended, or could not fork."""


class ForkedProcess:
    """A process that the fork server forked; `returncode` is negative for a signal."""

    def __init__(self, pid: int, status_fd: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._status_fd = status_fd
        self._lock = threading.Lock()

    def poll(self) -> int | None:
        """The exit status, or None while the process runs."""
        return self._await_status(0.0)

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end; subprocess.TimeoutExpired after `timeout` seconds."""
        status = self._await_status(timeout)
        if status is None:
            raise subprocess.TimeoutExpired("tidelog", timeout or 0.0)
        return status

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the process has ended."""
        if self.poll() is None:
            try:
                os.kill(self.pid, number)
            except ProcessLookupError:
                pass  # its status is on the way

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _await_status(self, timeout_s: float | None) -> int | None:
        if self.returncode is not None:
            return self.returncode
        waiting = select.poll()
        waiting.register(self._status_fd, select.POLLIN)
        if not waiting.poll(None if timeout_s is None else timeout_s * 1000):
            return None
        with self._lock:
            if self.returncode is None:
                status = os.read(self._status_fd, _PID.size)
                os.close(self._status_fd)
                # The fork server has ended without a word: its forks ended with it.
                self.returncode = _PID.unpack(status)[0] if status else -signal.SIGKILL
            return self.returncode

    def __del__(self) -> None:
        if self.returncode is None:
            os.close(self._status_fd)


class ForkServer:
    """The connection to one fork server. Any thread may call `spawn`."""

    def __init__(self, command_prefix: list[str], environment: Mapping[str, str]) -> None:
        self._lock = threading.Lock()
        self._socket, other_end = socket.socketpair()
        with other_end:
            self._process = subprocess.Popen(
                [*command_prefix, *module_command("tidelog.testing.fork_server"), *PRELOADED],
                stdin=other_end.fileno(),
                env=dict(environment),
                start_new_session=True,
            )

    def spawn(self, arguments: list[str], output_fd: int, environment: Mapping[str, str]) -> ForkedProcess:
        """Run `tidelog ARGUMENTS` in a fork that writes to `output_fd`; ForkFailed.

        A thread talks to the fork server. The exception of a signal handler (Ctrl-C, a time limit of a test)
        would leave an answer unread, and each later caller would get the process of another one.
        """
        request = json.dumps(
            {"arguments": arguments, "environment": dict(environment), "directory": _working_directory()}
        ).encode()
        answers: list[ForkedProcess | ForkFailed] = []
        answered: SimpleQueue[None] = SimpleQueue()
        interrupts: list[BaseException] = []

        def talk(own_output_fd: int) -> None:
            try:
                answers.append(self._fork(request, own_output_fd))
            finally:
                os.close(own_output_fd)
            answered.put(None)
            if interrupts:
                _kill_forked(answers)

        try:
            own_output_fd = os.dup(output_fd)  # an interrupted caller closes its own before the answer
            threading.Thread(target=talk, args=(own_output_fd,), name="tidelog-spawn", daemon=True).start()
            answered.get()
        except BaseException as interrupt:
            interrupts.append(interrupt)
            _kill_forked(answers)
            raise
        (answer,) = answers
        if isinstance(answer, ForkFailed):
            raise answer
        return answer

    def _fork(self, request: bytes, output_fd: int) -> ForkedProcess | ForkFailed:
        status_fd, status_of_fork = os.pipe()
        try:
            with self._lock:
                # The first byte of a request carries the descriptors.
                socket.send_fds(self._socket, [b"+"], [output_fd, status_of_fork])
                self._socket.sendall(_LENGTH.pack(len(request)) + request)
                answer = _receive(self._socket, _PID.size)
        except OSError:
            answer = b""
        finally:
            os.close(status_of_fork)
        pid = _PID.unpack(answer)[0] if answer else 0
        if pid > 0:
            return ForkedProcess(pid, status_fd)
        os.close(status_fd)
        return ForkFailed(f"the fork server {'could not fork: ' + os.strerror(-pid) if pid else 'has ended'}")

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def close(self, timeout_s: float = _CLOSE_TIMEOUT_S) -> None:
        """End the fork server and all its forks: in good order, or by SIGKILL when it does not end in time."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)  # a thread may wait for an answer; a close alone would wait for it
        except OSError:
            pass  # the fork server has ended
        self._socket.close()
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(_CLOSE_TIMEOUT_S)


def fork_server(command_prefix: list[str], environment: Mapping[str, str]) -> ForkServer:
    """The fork server of this process; started by the first call and again if it has ended."""
    with _servers_lock:
        server = _servers.get(os.getpid())
        if server is None or not server.alive:
            server = _servers[os.getpid()] = ForkServer(command_prefix, environment)
        return server


def close_fork_server() -> None:
    """End the fork server of this process, if it has one."""
    with _servers_lock:
        server = _servers.pop(os.getpid(), None)
    if server is not None:
        server.close()


def _kill_forked(answers: list[ForkedProcess | ForkFailed]) -> None:
    """End the process that a caller asked for and does not take."""
    for answer in answers:
        if isinstance(answer, ForkedProcess):
            answer.kill()


def _working_directory() -> str:
    """Where the process runs: where this one does, unless that directory is deleted."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        return os.sep


def _receive(connection: socket.socket, size_bytes: int) -> bytes:
    """Exactly so many bytes, or none at the end of the connection."""
    parts = b""
    while len(parts) < size_bytes:
        part = connection.recv(size_bytes - len(parts))
        if not part:
            return b""
        parts += part
    return parts


# The fork server


class _Server:
    def __init__(self, requests: socket.socket) -> None:
        self._requests = requests
        self._status_fds: dict[int, int] = {}
        """By the pid of each running fork, the pipe for its exit status."""
        self._wakeup, wakeup = socket.socketpair()
        self._signals = wakeup
        for end in (self._wakeup, wakeup):
            end.setblocking(False)
        signal.set_wakeup_fd(wakeup.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self._poll = select.poll()  # forks share no state of it, as they would of an epoll
        for end in (self._requests, self._wakeup):
            self._poll.register(end, select.POLLIN)

    def serve(self) -> dict[str, Any] | None:
        """Fork for each request. Returns None in the server when the connection ends, and in each fork its request."""
        while True:
            ready = {fd for fd, _ in self._poll.poll()}
            if self._wakeup.fileno() in ready:
                self._wakeup.recv(4096)
                self._reap()
            if self._requests.fileno() in ready:
                request, descriptors = self._next_request()
                if request is None:
                    self._end_all()
                    return None
                if self._fork(request, *descriptors):
                    return request

    def _next_request(self) -> tuple[dict[str, Any] | None, list[int]]:
        """A request and its descriptors; None at the end of the connection, also at one amid a request or with an
        answer unread: the caller was killed.
        """
        try:
            mark, descriptors, _, _ = socket.recv_fds(self._requests, 1, 2)
            header = _receive(self._requests, _LENGTH.size) if mark else b""
            size_bytes = _LENGTH.unpack(header)[0] if header else 0
            assert size_bytes <= _REQUEST_BYTES_MAX
            request = _receive(self._requests, size_bytes) if size_bytes else b""
        except ConnectionError:
            return None, []
        return (json.loads(request) if request else None), descriptors

    def _fork(self, request: dict[str, Any], output_fd: int, status_fd: int) -> bool:
        """Whether this is the fork."""
        server_pid = os.getpid()
        try:
            pid = os.fork()
        except OSError as error:
            pid = -(error.errno or 1)
        if pid == 0:
            os.close(status_fd)
            self._become_fork(request, output_fd, server_pid)
            return True
        os.close(output_fd)
        if pid > 0:
            self._status_fds[pid] = status_fd
        else:
            os.close(status_fd)
        try:
            self._requests.sendall(_PID.pack(pid))
        except ConnectionError:
            pass  # the caller was killed, and the next request is the end
        return False

    def _become_fork(self, request: dict[str, Any], output_fd: int, server_pid: int) -> None:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for status_fd in self._status_fds.values():
            os.close(status_fd)
        for end in (self._requests, self._wakeup, self._signals):
            end.close()
        os.setsid()
        _end_with_parent(server_pid)
        with open(os.devnull, "rb") as nothing:
            os.dup2(nothing.fileno(), 0)
        for standard in (1, 2):
            os.dup2(output_fd, standard)
        os.close(output_fd)
        os.environ.clear()
        os.environ.update(request["environment"])
        os.chdir(request["directory"])

    def _reap(self) -> None:
        while self._status_fds:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            status_fd = self._status_fds.pop(pid)
            try:
                os.write(status_fd, _PID.pack(os.waitstatus_to_exitcode(status)))
            except BrokenPipeError:
                pass  # the caller has dropped the process
            os.close(status_fd)

    def _end_all(self) -> None:
        for pid in self._status_fds:
            os.kill(pid, signal.SIGKILL)


def _end_with_parent(parent_pid: int) -> None:
    """Let the kernel end this process when the fork server is killed (Linux)."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, int(signal.SIGKILL), 0, 0, 0)
        if os.getppid() != parent_pid:
            os._exit(1)


def main(modules: list[str]) -> int:
    """Serve until the connection on standard input ends; the exit status of the server, or of a fork."""
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for module in modules:
        import_module(module)
    for optional in ("uvloop", "ctypes"):
        try:
            import_module(optional)
        except ImportError:
            pass
    gc.collect()
    gc.freeze()  # a fork does not touch the pages of what was imported
    request = _Server(socket.socket(fileno=os.dup(0))).serve()
    if request is None:
        return 0
    gc.unfreeze()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.argv = ["tidelog", *request["arguments"]]
    status: int = import_module("tidelog.cli.main").main(request["arguments"])
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
