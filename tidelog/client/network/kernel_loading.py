"""Loads compiled loops beside the event loop, so that no call waits for them beyond its timeout.

A load takes half a second, and more where the loops are not compiled yet on this machine. It runs in a thread of its
own.
Invariant: it runs once, and `close` leaves no task.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from tidelog.client.client_logging import client_logger
from tidelog.client.network.outcomes import start_task

logger = client_logger(__name__)
Result = TypeVar("Result")


async def run_in_own_thread(work: Callable[[], Result]) -> Result:
    """Run `work` in a thread that ends with it. The event loop has few threads, which also look up host names: six
    consumers that wait for one compilation would hold all of them.
    """
    pool = ThreadPoolExecutor(1, "tidelog-load")
    try:
        return await asyncio.get_running_loop().run_in_executor(pool, work)
    finally:
        pool.shutdown(wait=False)


class KernelLoading:
    """The load of one kernel. `load` imports and compiles it; it raises ImportError where numba is not installed."""

    def __init__(self, load: Callable[[], None], on_end: Callable[[], None]) -> None:
        self._load = load
        self._on_end = on_end
        self._task: asyncio.Task[None] | None = None
        self.is_over = False
        """The kernel is loaded, or cannot be."""

    def start(self) -> None:
        """Begin the load; later calls do nothing."""
        if self._task is None:
            self._task = start_task(self._run())

    async def load_within(self, timeout_s: float) -> None:
        """Begin the load, and wait for it so long. Beside a busy thread it takes several times as long."""
        if not self.is_over:
            self.start()
            assert self._task is not None
            if timeout_s > 0:
                await asyncio.wait([self._task], timeout=timeout_s)

    async def close(self) -> None:
        """Stop waiting for the load. A thread cannot be interrupted: it ends by itself."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    async def _run(self) -> None:
        try:
            await run_in_own_thread(self._load)
        except ImportError:
            logger.debug("numba is not installed")
        except Exception as error:
            logger.warning("numba does not work here: %r", error)
        self.is_over = True
        self._on_end()
