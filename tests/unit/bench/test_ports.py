"""A free port is given to one process at a time, for as long as that process lives."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.patience import PATIENCE_S, line_of
from tidelog.testing import ports
from tidelog.testing.ports import NoFreePort, free_port

ROOT = Path(__file__).resolve().parents[3]
# Claims a port that the next lower one is free beside, says which, and lives until its input ends.
OTHER = """
import sys
from tidelog.testing import ports
port = ports.free_port(also=[1])
ports.fcntl.lockf(ports._claims_file(ports.os.getpid()), ports.fcntl.LOCK_UN, 1, port)
print(port + 1, flush=True)
sys.stdin.read()
"""


def only(monkeypatch: pytest.MonkeyPatch, first: int, last: int) -> None:
    monkeypatch.setattr(ports, "FIRST_PORT", first)
    monkeypatch.setattr(ports, "LAST_PORT", last)


def test_a_port_is_given_once(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [free_port() for _ in range(50)]
    assert len(set(found)) == 50
    only(monkeypatch, found[0], found[0])
    with pytest.raises(NoFreePort):
        free_port()


def test_a_port_that_is_in_use_is_not_given(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        only(monkeypatch, port, port)
        with pytest.raises(NoFreePort):
            free_port()


def test_ports_that_belong_together_are_claimed_together(monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port(also=[1, 100])
    for one in (port, port + 1, port + 100):
        only(monkeypatch, one, one)
        with pytest.raises(NoFreePort):
            free_port()


@pytest.fixture
def other() -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", OTHER], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    yield process
    process.kill()
    process.communicate(timeout=PATIENCE_S)


def test_what_another_process_has_claimed_is_not_given_until_it_ends(
    monkeypatch: pytest.MonkeyPatch, other: subprocess.Popen[str]
) -> None:
    """However it ends. Of ports that belong together none is claimed when one cannot be."""
    assert other.stdout is not None
    port = int(line_of(other))
    only(monkeypatch, port, port)
    with pytest.raises(NoFreePort):
        free_port()
    only(monkeypatch, port - 1, port)
    with pytest.raises(NoFreePort):
        free_port(also=[1])
    only(monkeypatch, port - 1, port - 1)
    assert free_port() == port - 1
    other.send_signal(signal.SIGKILL)
    other.wait(PATIENCE_S)
    only(monkeypatch, port, port)
    assert free_port() == port
