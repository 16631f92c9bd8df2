"""`tidelog start`: one node in this process, until SIGTERM or SIGINT.

Turns what can be wrong from outside (a configuration, a port, a directory) into one line on standard error; whatever
else is raised is a bug and shows its traceback. What a node does is in `broker/node.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from tidelog.broker.config import ConfigError, NodeConfig


def start(file: str | None, overrides: dict[str, str]) -> int:
    """Runs a node until it is told to stop; the exit code."""
    from tidelog.broker.node import run_node
    from tidelog.storage.disk import DirectoryInUse
    from tidelog.storage.log_directory import ForeignDirectory

    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        config = NodeConfig.load(Path(file) if file is not None else None, overrides)
        _event_loop_run(_until_told(run_node(config, announce)))
    except (ConfigError, DirectoryInUse, ForeignDirectory) as error:
        return fail(str(error))
    except OSError as error:
        return fail(_reason(error))
    return 0


def announce(line: str) -> None:
    """Prints the first line: ready, and at which address."""
    sys.stdout.write(line + "\n")
    with contextlib.suppress(BrokenPipeError):
        sys.stdout.flush()


def fail(message: str) -> int:
    sys.stderr.write(f"tidelog: {' '.join(message.split())}\n")
    return 1


def _reason(error: OSError) -> str:
    where = f"{error.filename}: " if error.filename else ""
    return f"{where}{error.strerror}" if error.strerror else str(error)


def _event_loop_run(main: Coroutine[Any, Any, None]) -> None:
    factory: Callable[[], asyncio.AbstractEventLoop] | None
    try:
        from uvloop import new_event_loop as factory
    except ImportError:  # no uvloop on this platform; the node is the same, only slower
        factory = None
    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(main)


async def _until_told(node: Coroutine[Any, Any, None]) -> None:
    """Runs the node; the first SIGTERM or SIGINT cancels it, its clean way out, and later ones change nothing."""
    task = asyncio.ensure_future(node)
    loop = asyncio.get_running_loop()
    told = False

    def stop() -> None:
        nonlocal told
        if not told:
            told = True
            task.cancel()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    try:
        await task
    except asyncio.CancelledError:
        if not told:
            raise
