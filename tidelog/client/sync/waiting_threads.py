"""Threads that wait for what another thread brings about, and may be interrupted at any moment.

An interrupt is Ctrl-C, or a signal handler that raises. `threading.Condition`, `threading.Event` and
`concurrent.futures.Future` take their lock in Python code on both sides: an interrupt there leaves it taken, and the
client's loop waits for it for good. Invariant: a waiting thread takes no lock but its own, and the thread that wakes it
only releases that.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable


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


class ThreadEvent:
    """As `threading.Event`, of which a thread that waits has no lock that `set` waits for."""

    __slots__ = ("_is_set", "_threads")

    def __init__(self) -> None:
        self._is_set = False
        self._threads = WaitingThreads()

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        self._is_set = True
        self._threads.wake()

    def clear(self) -> None:
        self._is_set = False

    def wait(self, timeout: float | None = None) -> bool:
        return self._threads.wait(self.is_set, timeout)
