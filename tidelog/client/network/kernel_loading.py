"""Loads compiled loops beside the event loop, so that no call waits for them beyond its timeout.

A load takes half a second, and more where the loops are not compiled yet on this machine. It runs in a thread of its
own. At the end of the interpreter the thread stops at its next step of Python: a compilation takes up to half a minute,
and a program does not wait for what it no longer uses. Until it has stopped the interpreter stays, as machine code
would go on without it.
Invariant: a load runs once, and `close` leaves no task.
"""

from __future__ import annotations

import asyncio
import atexit
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

from tidelog.client.client_logging import client_logger
from tidelog.client.network.outcomes import start_task

logger = client_logger(__name__)
Result = TypeVar("Result")


_STOP_INTERVAL_S = 0.05
_STOP_LIMIT_S = 30
_threads: set[threading.Thread] = set()
"""Those that have work."""


async def run_in_own_thread(work: Callable[[], Result]) -> Result:
    """Run `work` in a thread that ends with it. The event loop has few threads, which also look up host names: six
    consumers that wait for one compilation would hold all of them.
    """
    outcome: Future[Result] = Future()
    outcome.set_running_or_notify_cancel()

    def run() -> None:
        try:
            outcome.set_result(work())
        except SystemExit:
            pass  # the interpreter ends, and its log with it
        except BaseException as error:
            outcome.set_exception(error)
        finally:
            _threads.discard(thread)

    thread = threading.Thread(target=run, name="tidelog-load", daemon=True)
    _threads.add(thread)
    thread.start()
    return await asyncio.wrap_future(outcome)


def _stop_threads() -> None:
    """At the end of the interpreter: raise SystemExit in the threads, again where a handler of theirs has taken it."""
    sys.unraisablehook = partial(_report_unraisable, sys.unraisablehook)
    deadline_s = time.monotonic() + _STOP_LIMIT_S
    while (threads := [each for each in list(_threads) if each.is_alive()]) and time.monotonic() < deadline_s:
        for each in threads:
            _raise_exit_in(each)
        threads[0].join(_STOP_INTERVAL_S)


def _report_unraisable(report: Callable[[Any], object], unraisable: Any) -> None:
    if unraisable.exc_type is not SystemExit:  # that was raised in a callback of the compiler
        report(unraisable)


def _raise_exit_in(thread: threading.Thread) -> None:
    import ctypes

    assert thread.ident is not None
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(SystemExit))


atexit.register(_stop_threads)


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
