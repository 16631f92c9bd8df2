"""Waiting for what must come to pass, as long as a slow and busy machine needs: only a failure takes the whole time.

A test that waits says for what, never how long; how long something takes is measured where that is what is tested.
"""

from __future__ import annotations

import asyncio
import select
import subprocess
import threading
import time
from collections.abc import Callable
from typing import IO, Any, AnyStr

PATIENCE_S = 60.0


async def until(condition: Callable[[], Any], every_s: float = 0.005) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(every_s)


def wait_until(condition: Callable[[], Any], every_s: float = 0.01) -> None:
    """The same where no event loop runs."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "it does not come to pass"
        time.sleep(every_s)


def join(thread: threading.Thread, patience_s: float = PATIENCE_S) -> None:
    """Wait for the end of a thread; one that does not end fails the test instead of stopping the whole run."""
    thread.join(patience_s)
    assert not thread.is_alive(), f"thread {thread.name} does not end within {patience_s:.0f} s"


def readable(descriptor: int, patience_s: float = PATIENCE_S) -> bool:
    """Whether there is something to read. A poll: select() takes no descriptor above 1,023."""
    waiting = select.poll()
    waiting.register(descriptor, select.POLLIN)
    return bool(waiting.poll(patience_s * 1000))


def line_of(
    process: subprocess.Popen[AnyStr], stream: IO[AnyStr] | None = None, patience_s: float = PATIENCE_S
) -> AnyStr:
    """The next line that a process writes to this pipe, by default its output. It is killed if it writes none."""
    pipe = stream or process.stdout
    assert pipe is not None
    is_over = threading.Event()

    def give_up() -> None:
        is_over.set()
        process.kill()

    timer = threading.Timer(patience_s, give_up)
    timer.start()
    try:
        line = pipe.readline()
    finally:
        timer.cancel()
    assert not is_over.is_set(), f"{process.args!r} wrote no line within {patience_s:.0f} s"
    return line
