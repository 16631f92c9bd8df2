"""The fork server of a test process: its end, which the end of the process waits for."""

from __future__ import annotations

import os
import signal
import socket
import threading
from pathlib import Path

import pytest

from tests.patience import PATIENCE_S, wait_until
from tidelog.testing.embedded import EmbeddedBroker
from tidelog.testing.fork_server import ForkServer, _servers, close_fork_server
from tidelog.version import __version__


def test_a_fork_server_that_hangs_is_killed_at_its_end() -> None:
    server = ForkServer([], os.environ)
    try:
        server._process.send_signal(signal.SIGSTOP)
        server.close(timeout_s=0.1)
        assert server._process.returncode == -signal.SIGKILL
    finally:
        server._process.kill()


@pytest.mark.slow
def test_a_forked_child_does_not_end_the_fork_server_of_its_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    server = ForkServer([], os.environ)
    try:
        monkeypatch.setitem(_servers, os.getppid(), server)  # as the child of the process that has it
        monkeypatch.delitem(_servers, os.getpid(), raising=False)
        close_fork_server()
        assert server.alive
    finally:
        server.close()


NODE = ["start", "-o", "log.dirs=data", "-o", "listeners=PLAINTEXT://127.0.0.1:0"]


class Interrupt(Exception):
    """What a signal handler raises, as Ctrl-C and the time limits of tests do."""


@pytest.mark.slow
def test_an_interrupted_caller_leaves_no_process_and_no_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next caller had the process of the interrupted one, and killed and awaited that."""

    def interrupt(*_: object) -> None:
        raise Interrupt

    monkeypatch.chdir(tmp_path)
    server = ForkServer([], os.environ)
    children = Path(f"/proc/{server._process.pid}/task/{server._process.pid}/children")
    before = signal.signal(signal.SIGUSR1, interrupt)
    try:
        with open(tmp_path / "interrupted", "wb") as output:
            server._process.send_signal(signal.SIGSTOP)  # no answer comes before the interrupt
            timer = threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGUSR1))
            timer.start()
            with pytest.raises(Interrupt):
                server.spawn(NODE, output.fileno(), os.environ)
            timer.join(PATIENCE_S)
            server._process.send_signal(signal.SIGCONT)
        with open(tmp_path / "version", "wb") as output:
            process = server.spawn(["--version"], output.fileno(), os.environ)
        assert process.wait(PATIENCE_S) == 0
        assert (tmp_path / "version").read_text() == f"tidelog {__version__}\n"
        wait_until(lambda: not children.read_text())
    finally:
        signal.signal(signal.SIGUSR1, before)
        server.close()


@pytest.mark.slow
def test_the_working_directory_is_not_where_a_node_finds_its_modules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    close_fork_server()  # the next one is started in the other directory
    (tmp_path / "struct.py").write_text("raise AssertionError('the module of the user')")
    monkeypatch.chdir(tmp_path)
    with EmbeddedBroker(process=True) as broker:
        assert broker.bootstrap_servers


@pytest.mark.slow
def test_a_node_starts_where_the_working_directory_is_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "deleted").mkdir()
    monkeypatch.chdir(tmp_path / "deleted")
    (tmp_path / "deleted").rmdir()
    with EmbeddedBroker(process=True) as broker:
        assert broker.bootstrap_servers


@pytest.mark.slow
def test_a_fork_server_ends_quietly_when_its_caller_is_killed_amid_a_request(
    capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    server = ForkServer([], os.environ)
    with open(tmp_path / "output", "wb") as output:
        socket.send_fds(server._socket, [b"+"], [output.fileno(), output.fileno()])
    server._socket.sendall(b"\0")
    server.close()
    assert server._process.returncode == 0
    assert capfd.readouterr().err == ""
