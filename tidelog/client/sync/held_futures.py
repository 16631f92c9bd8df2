"""Futures that are settled while a thread keeps their lock: they are told of it as soon as the lock is free.

A thread in `concurrent.futures.wait` has the locks of all its futures: for milliseconds, or for as long as a signal
handler or a finalizer runs there. That one may wait for the client's loop, or for a thread that closes the client.
Invariant: neither waits for such a lock without a limit, unless it is the main thread, where the handlers run.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Final, Protocol

HELD_UP_S: Final = 0.05
"""The wait for one lock, and the pause between two looks at those that are kept for longer."""


class Settled(Protocol):
    """A settled future."""

    @property
    def is_told(self) -> bool: ...

    def handle_settled(self) -> None:
        """Tell it, or `add` it again. More than once has no effect."""


class HeldFutures:
    """Those of one client. `find_loop`: the loop that tells them, which may be closed; None without one."""

    def __init__(self, find_loop: Callable[[], asyncio.AbstractEventLoop | None]) -> None:
        self.main_thread_id = threading.main_thread().ident
        self._find_loop = find_loop
        self._futures: dict[Settled, None] = {}
        self._has_thread = False

    @property
    def patience_s(self) -> float:
        """The time for which the calling thread may wait for the lock of a settled future."""
        return 0.0 if self._futures else HELD_UP_S

    def add(self, future: Settled) -> None:
        """Tell this future later: on the loop, or on a thread of its own once the loop has ended."""
        self._futures[future] = None
        if not self._has_thread:
            self._has_thread = True
            try:
                threading.Thread(target=self._tell_later, name="tidelog-futures", daemon=True).start()
            except BaseException as error:
                self._has_thread = False
                if not isinstance(error, RuntimeError):  # the interpreter is ending
                    raise

    def _tell_later(self) -> None:
        while self._has_thread:
            while self._futures:
                time.sleep(HELD_UP_S)
                self._call_on_loop()
            # Clear the flag first, then look again: a thread that saw it set has added its future by then.
            self._has_thread = False
            self._has_thread = bool(self._futures)

    def _call_on_loop(self) -> None:
        loop = self._find_loop()
        if loop is not None:
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(self.tell)  # it may end before: the futures stay until they are told
                return
        self.tell()

    def tell(self) -> None:
        """Tell those whose lock is free, or is this thread's: an interrupt in `wait` may have left it taken."""
        for future in list(self._futures):
            future.handle_settled()
            if future.is_told:
                self._futures.pop(future, None)
