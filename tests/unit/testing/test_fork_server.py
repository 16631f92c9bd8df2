"""The fork server of a test process: its end, which the end of the process waits for."""

from __future__ import annotations

import os
import signal

import pytest

from tidelog.testing.fork_server import ForkServer, _servers, close_fork_server


def test_a_fork_server_that_hangs_is_killed_at_its_end() -> None:
    server = ForkServer([], os.environ)
    try:
        server._process.send_signal(signal.SIGSTOP)
        server.close(timeout_s=0.1)
        assert server._process.returncode == -signal.SIGKILL
    finally:
        server._process.kill()


def test_a_forked_child_does_not_end_the_fork_server_of_its_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    server = ForkServer([], os.environ)
    try:
        monkeypatch.setitem(_servers, os.getppid(), server)  # as the child of the process that has it
        monkeypatch.delitem(_servers, os.getpid(), raising=False)
        close_fork_server()
        assert server.alive
    finally:
        server.close()
