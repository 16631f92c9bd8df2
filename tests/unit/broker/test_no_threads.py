"""A machine that refuses a process its threads: every command ends with one line that says so."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.patience import PATIENCE_S
from tests.unit.broker.test_cli_start import environment
from tidelog.testing.ports import free_port

pytestmark = pytest.mark.slow  # each starts a process

# `tidelog` with at most as many threads as the first word says.
FEW_THREADS = """
import sys, threading
from tidelog.cli.main import main
left, start = int(sys.argv[1]), threading.Thread.start
def start_if_any_is_left(thread):
    global left
    if not left:
        raise RuntimeError("can't start new thread")
    left -= 1
    start(thread)
threading.Thread.start = start_if_any_is_left
sys.exit(main(sys.argv[2:]))
"""


def refused(threads: int, *words: str) -> str:
    """The one line of a command that ends because it gets no further thread."""
    done = subprocess.run(
        [sys.executable, "-c", FEW_THREADS, str(threads), *words],
        env=environment(), capture_output=True, text=True, timeout=PATIENCE_S, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (1, ""), done
    (line,) = done.stderr.splitlines()
    return line


@pytest.mark.parametrize("threads", [0, 1, 5, 8])
def test_a_node_that_does_not_get_its_threads_does_not_start(threads: int, tmp_path: Path):
    """It stood still in its start, and SIGTERM ended it with a traceback."""
    line = refused(threads, "start", "-o", "listeners=PLAINTEXT://127.0.0.1:0", "-o", f"log.dirs={tmp_path / 'data'}")
    assert line.startswith("tidelog: can't start new thread (`ulimit -u` and ")
    assert not (tmp_path / "data").exists()


def test_a_command_that_gets_no_thread_to_look_a_name_up_says_so():
    """It ended with a traceback."""
    assert "can't start new thread" in refused(0, "topics", "list", "-b", f"localhost:{free_port()}")
