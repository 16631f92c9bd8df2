"""A test that waits has a limit of its own: one that hangs would stop the whole run for ten minutes."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.patience import PATIENCE_S, join, line_of

TESTS = Path(__file__).resolve().parents[1]

# A wait for a thread, a process, or a line of its output. `world` is a coordinator that members join.
WITHOUT_LIMIT = re.compile(
    r"(?<!\bworld)\.(?:join|wait|communicate)\(\)|\.std(?:out|err)\.readline\(\)"
    r"|run_coroutine_threadsafe\(.*\)\.result\(\)"
)
RUN = re.compile(r"(?<!import )\bsubprocess\.(?:run|call|check_call|check_output)\(")


def arguments(source: str, start: int) -> str:
    """What stands between the parenthesis at `start` and the one that closes it."""
    depth = 0
    for place in range(start, len(source)):
        depth += {"(": 1, ")": -1}.get(source[place], 0)
        if depth == 0:
            return source[start:place]
    return source[start:]


def waits_without_limit(source: str) -> Iterator[int]:
    """The lines of such waits. What a coroutine waits for is limited by `asyncio.timeout` around it."""
    for number, line in enumerate(source.splitlines(), 1):
        if WITHOUT_LIMIT.search(line) and "await" not in line:
            yield number
    for found in RUN.finditer(source):
        if "timeout" not in arguments(source, found.end() - 1):
            yield source.count("\n", 0, found.start()) + 1


def test_every_wait_has_a_limit():
    files = [path for path in TESTS.rglob("*.py") if path != Path(__file__).resolve()]
    found = [f"{path.relative_to(TESTS)}:{line}" for path in files for line in waits_without_limit(path.read_text())]
    assert not found, f"without a limit, for which tests/patience.py has `join`, `line_of` and PATIENCE_S: {found}"


@pytest.mark.parametrize(
    "source",
    [
        "thread.join()",
        "process.wait()",
        "process.communicate()",
        "x = process.stdout.readline()",
        "asyncio.run_coroutine_threadsafe(start(), loop).result()",
        "subprocess.run(\n    [f(1), 'x'],\n    check=True,\n)",
    ],
)
def test_a_wait_without_a_limit_is_found(source: str):
    assert list(waits_without_limit(f"\n{source}\n")) == [2]


@pytest.mark.parametrize(
    "source",
    [
        "thread.join(1)",
        "', '.join(words)",
        "world.join().error",
        "await event.wait()",
        "process.communicate(timeout=1)",
        "subprocess.run(\n    [f(1)],\n    timeout=1,\n)",
    ],
)
def test_a_wait_with_a_limit_is_not(source: str):
    assert list(waits_without_limit(f"\n{source}\n")) == []


def test_a_thread_that_does_not_end_is_named():
    may_end = threading.Event()
    thread = threading.Thread(target=may_end.wait, args=(PATIENCE_S,), name="stuck")
    thread.start()
    with pytest.raises(AssertionError, match=r"thread stuck does not end within 0 s"):
        join(thread, 0.01)
    may_end.set()
    join(thread)


def python(program: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)


def test_a_process_that_writes_no_line_is_killed_and_named():
    with python("import time; time.sleep(600)  # silent") as process:
        with pytest.raises(AssertionError, match=r"# silent.* wrote no line within 0 s"):
            line_of(process, patience_s=0.1)
        assert process.wait(PATIENCE_S) < 0


def test_the_lines_of_a_process_come_one_by_one_until_it_ends():
    with python("print('one'); print('two')") as process:
        assert [line_of(process) for _ in range(3)] == ["one\n", "two\n", ""]
