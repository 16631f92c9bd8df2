"""The demo as a user runs it: it finishes with every check green, and however it ends, it leaves nothing behind."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("java") is None and "JAVA_HOME" not in os.environ, reason="needs Java"),
]

ROOT = Path(__file__).resolve().parents[2]


def demo(temporary: Path, *words: str) -> subprocess.Popen[str]:
    """The demo in a process of its own, with its temporary files where they can be looked for."""
    return subprocess.Popen(
        [sys.executable, "-m", "tidelog.bench.demo", "--rows", "2000", "--out", str(temporary / "out"), *words],
        env={**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(temporary)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        # A shell starts background jobs with SIGINT ignored, and children inherit it; a terminal does not.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def processes_of(temporary: Path) -> list[str]:
    """Command lines that name the demo's directory: its node, its Spark job, the JVM."""
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = file.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if f"{temporary}/tidelog-demo-" in words:
            found.append(words)
    return found


def test_it_finishes_and_leaves_only_the_chart(tmp_path: Path):
    """Three brokers. CI runs the demo of one by itself, as a user does."""
    run = demo(tmp_path, "--brokers", "3")
    out, _ = run.communicate(timeout=420)
    assert run.returncode == 0, out
    assert "Demo finished in" in out
    assert out.count("✓") >= 6
    assert "✗" not in out
    assert (tmp_path / "out" / "arrival-delay-by-carrier.png").read_bytes().startswith(b"\x89PNG")
    assert not list(tmp_path.glob("tidelog-demo-*"))
    assert not processes_of(tmp_path)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_stopping_it_leaves_nothing(tmp_path: Path, number: signal.Signals):
    run = demo(tmp_path)
    deadline = time.monotonic() + 180
    while len(processes_of(tmp_path)) < 2 and run.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    assert len(processes_of(tmp_path)) >= 2, "the node and the Spark job are running"
    run.send_signal(number)
    out, _ = run.communicate(timeout=180)
    assert run.returncode == 1
    assert "demo: stopped" in out
    assert "Traceback" not in out
    assert not list(tmp_path.glob("tidelog-demo-*"))
    assert not processes_of(tmp_path)


def test_a_node_that_dies_fails_the_demo_in_words(tmp_path: Path):
    run = demo(tmp_path)
    deadline = time.monotonic() + 180
    node: list[int] = []
    while not node and time.monotonic() < deadline:
        time.sleep(0.05)
        node = [
            int(file.parent.name)
            for file in Path("/proc").glob("[0-9]*/cmdline")
            if f"log.dirs={tmp_path}/tidelog-demo-" in _text(file)
        ]
    os.kill(node[0], signal.SIGKILL)
    out, _ = run.communicate(timeout=420)
    assert run.returncode == 1
    assert "demo failed: " in out
    assert not processes_of(tmp_path)


def _text(file: Path) -> str:
    try:
        return file.read_text(errors="replace")
    except OSError:
        return ""
