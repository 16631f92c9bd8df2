"""Servers as processes: ready, killed, stopped, failed; and what a process used. A stub plays the server."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tests.patience import PATIENCE_S, join, line_of
from tidelog.bench import peers
from tidelog.testing.ports import free_port
from tidelog.testing.processes import ServerFailed, ServerProcess, answers_metadata
from tidelog.testing.usage import cpu_ns, rss_bytes, usage, warm_pages

# Answers every request with a Metadata v1 answer of one broker (only the count is there, which is all that is read).
STUB = """
import socket, struct, sys, time
time.sleep(float(sys.argv[2]))
listener = socket.create_server(("127.0.0.1", int(sys.argv[1])))
while True:
    connection = listener.accept()[0]
    if connection.recv(1000):
        connection.sendall(struct.pack(">iii", 8, 7, 1))
    connection.close()
"""

# Starts a stub and waits to be killed.
OWNER = """
import sys
from tidelog.testing.processes import ServerProcess

class Stub(ServerProcess):
    def command(self):
        return [sys.argv[2], "-c", sys.argv[3], str(self.port), "0"]

with Stub(sys.argv[1]) as server:
    print(server.port, flush=True)
    input()
"""


class Stub(ServerProcess):
    name = "stub"
    delay_s = 0.05

    def command(self) -> list[str]:
        return [sys.executable, "-c", STUB, str(self.port), str(self.delay_s)]


class Broken(ServerProcess):
    name = "broken"

    def command(self) -> list[str]:
        return [sys.executable, "-c", "import sys; sys.exit('no such option')"]


def test_a_server_is_started_killed_and_started_again(tmp_path: Path) -> None:
    with Stub(tmp_path) as server:
        assert server.ready_s > Stub.delay_s
        assert answers_metadata(server.port)
        first = server.pid
        server.kill()
        assert not server.alive
        assert server.exit_code == -signal.SIGKILL
        server.start()
        assert server.pid != first
        server.restart()
        assert server.alive
    assert server.exit_code == -signal.SIGTERM
    assert not answers_metadata(server.port)


def test_a_server_that_ends_says_why(tmp_path: Path) -> None:
    with pytest.raises(ServerFailed, match="broken ended with 1:\nno such option"):
        Broken(tmp_path).start()


def test_a_server_that_is_never_ready(tmp_path: Path) -> None:
    server = Stub(tmp_path)
    server.delay_s = 30
    with pytest.raises(ServerFailed, match=r"not ready after 0\.2 s"):
        server.start(timeout_s=0.2)
    server.kill()


@pytest.mark.skipif(shutil.which("setpriv") is None, reason="util-linux's setpriv is not here to tie processes to us")
def test_a_server_ends_with_its_owner_even_when_that_is_killed(tmp_path: Path) -> None:
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(tmp_path), sys.executable, STUB],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert owner.stdout is not None
    port = int(line_of(owner))
    assert answers_metadata(port)
    owner.kill()
    owner.communicate(timeout=PATIENCE_S)
    deadline = time.monotonic() + PATIENCE_S
    while answers_metadata(port):
        assert time.monotonic() < deadline


def test_free_ports_can_be_bound_and_differ() -> None:
    assert len({free_port() for _ in range(5)}) > 1


def test_cpu_counts_every_thread_also_those_that_ended() -> None:
    def burn() -> None:
        end = time.thread_time() + 0.05
        while time.thread_time() < end:
            pass

    before = cpu_ns(os.getpid())
    thread = threading.Thread(target=burn)
    thread.start()
    join(thread)
    assert 40e6 < cpu_ns(os.getpid()) - before < 5e9


def test_cpu_and_memory_of_another_process() -> None:
    program = "print(flush=True); input()"
    child = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert child.stdout is not None
        line_of(child)  # until it runs
        assert usage(child.pid).cpu_s > 0
        assert 1 << 20 < rss_bytes(child.pid) < 1 << 30
    finally:
        child.communicate(b"\n")
    with pytest.raises(OSError, match=r".*"):
        cpu_ns(child.pid)


def test_warming_pages_tells_their_cost() -> None:
    assert 0 < warm_pages(1 << 20) < 1000


def test_kafka_is_skipped_with_a_line_when_there_is_no_java(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("KAFKA_PEER_HOME", str(tmp_path / "cache"))
    assert "no `java`" in (peers.why_unavailable() or "")
    with pytest.raises(peers.PeerUnavailable, match="no `java`"):
        peers.jars()
    (tmp_path / "java").touch(mode=0o755)
    assert "no `mvn`" in (peers.why_unavailable() or "")
    (tmp_path / "mvn").touch(mode=0o755)
    assert peers.why_unavailable() is None
    (tmp_path / "mvn").write_text("#!/bin/sh\nexec /bin/sleep 60\n")
    monkeypatch.setattr(peers, "_MAVEN_S", 0.1)
    assert "Maven did not bring its jars" in (peers.bring_kafka() or "")


def test_the_maven_project_names_kafka() -> None:
    import xml.etree.ElementTree as tree

    root = tree.fromstring(peers.pom())
    names = {element.text for element in root.iter("{http://maven.apache.org/POM/4.0.0}artifactId")}
    assert {"kafka_2.13", "kafka-tools"} <= names
