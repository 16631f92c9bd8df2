"""Threads that wait for what another thread brings about, and may be interrupted at any moment.

An interrupt is Ctrl-C, or a signal handler that raises. `threading.Condition`, `threading.Event` and
`concurrent.futures.Future` take their lock in Python code on both sides: an interrupt there leaves it taken, and the
client's loop waits for it for good. Invariant: a waiting thread takes no lock but its own, and the thread that wakes it
only releases that.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any


class WaitingThreads:
    """The threads that wait for the same thing."""

    __slots__ = ("_locks",)

    def __init__(self) -> None:
        self._locks: deque[threading.Lock] = deque()
        """One for each thread that waits, which that thread has taken and waits to take again."""

    def wait(self, is_met: Callable[[], bool], timeout_s: float | None = None) -> bool:
        """Wait until `is_met()`. False when it is not within `timeout_s`, which may be infinite."""
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            lock = threading.Lock()
            lock.acquire()
            self._locks.append(lock)
            try:
                # Looked at after the lock is in place: a change from now on releases it.
                if is_met():
                    return True
                remaining_s = -1.0 if deadline_s is None else deadline_s - time.monotonic()
                if deadline_s is not None and remaining_s <= 0:
                    return False
                lock.acquire(timeout=min(remaining_s, threading.TIMEOUT_MAX))
            finally:
                self._forget(lock)

    def wake(self) -> None:
        """What the threads wait for may have come about. Never waits."""
        while True:
            try:
                self._locks.popleft().release()
            except IndexError:
                return

    def _forget(self, lock: threading.Lock) -> None:
        try:
            self._locks.remove(lock)
        except ValueError:
            pass  # `wake` has taken it


class WaiterEvent:
    """Takes the place of the `threading.Event` of a waiter of `concurrent.futures`.

    A loop leaves the futures that have ended here, and never waits. The thread that waits passes them on to its waiter,
    whose lock the loop so never takes.
    """

    __slots__ = ("_check_may_wait", "_ended", "_is_set", "_threads", "_waiter")

    def __init__(self, waiter: Any, check_may_wait: Callable[[], None]) -> None:
        self._waiter = weakref.ref(waiter)  # no cycle: the waiter keeps the futures
        self._check_may_wait = check_may_wait
        self._is_set: bool = waiter.event.is_set()
        self._ended: deque[Any] = deque()
        self._threads = WaitingThreads()

    def tell(self, future: Any) -> None:
        self._ended.append(future)
        self._threads.wake()

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        self._is_set = True
        self._threads.wake()

    def clear(self) -> None:
        self._is_set = False

    def wait(self, timeout: float | None = None) -> bool:
        """Raises RuntimeError on the loop, and in the child of a fork."""
        self._check_may_wait()
        return self._threads.wait(self._pass_on, timeout)

    def _pass_on(self) -> bool:
        waiter = self._waiter()
        while self._ended and waiter is not None:
            future = self._ended.popleft()
            (waiter.add_result if future._exception is None else waiter.add_exception)(future)
        return self._is_set
