"""Virtual time: everything that happens in a simulated cluster is an event of one World, one at a time, in one order.

Here: the clock, the queue of events, the trace by which two runs are compared, and what went wrong. Not here: what the
events are (`simulated_loop`, `simulated_network`, `host`). Invariant: an event's order depends on the seed alone, so
nothing may be ordered by address, hash or real time.
"""

from __future__ import annotations

import gc
import warnings
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from heapq import heappop, heappush
from random import Random
from struct import pack
from typing import Any

START_S = 1_000.0
EVENTS_MAX = 100_000
HISTORIES_PER_COLLECTION = 4


class Broken(AssertionError):
    """An invariant does not hold; the message begins with its name."""


class World:
    """`rng` is the chance of schedules and networks. What breaks is kept in `failures` until somebody looks."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.rng = Random(seed)
        self.now = START_S
        self.events = 0
        self.failures: list[str] = []
        self.on_step: Callable[[Any], None] | None = None
        """Called with the loop that has just run."""
        self.graveyard: list[Any] = []
        self._queue: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._sequence = 0
        self._trace = 0

    def at(self, when: float, callback: Callable[..., None], *args: Any) -> None:
        self._sequence += 1
        heappush(self._queue, (when if when > self.now else self.now, self._sequence, callback, args))

    def after(self, delay_s: float, callback: Callable[..., None], *args: Any) -> None:
        self.at(self.now + delay_s, callback, *args)

    def record(self, data: bytes) -> None:
        """Make this moment and these bytes part of the trace."""
        self._trace = zlib.crc32(data, zlib.crc32(pack("<d", self.now), self._trace))

    @property
    def trace(self) -> str:
        """The same for two runs exactly when the same was sent at the same moments."""
        return f"{self._trace:08x}-{self.events}-{self.now:.6f}-{self.rng.getrandbits(32):08x}"

    def fail(self, message: str) -> None:
        self.failures.append(message)

    def run_until(self, deadline: float, done: Callable[[], bool] | None = None) -> bool:
        """Let time pass until then, or until `done`; False when the time ran out. Raises Broken."""
        queue, failures = self._queue, self.failures
        while queue and queue[0][0] <= deadline:
            self.now, _, callback, args = heappop(queue)
            self.events += 1
            callback(*args)
            if failures:
                raise Broken(self.failures[0])
            if self.events > EVENTS_MAX:
                raise Broken(f"HistoriesEnd: {self.events} events")
            if done is not None and done():
                return True
        self.now = max(self.now, deadline)
        return False

    def run_for(self, seconds: float, done: Callable[[], bool] | None = None) -> bool:
        return self.run_until(self.now + seconds, done)

    def end(self) -> None:
        """Nothing happens any more. Coroutines that were under way are closed, whatever they say to it."""
        self._queue.clear()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            for loop in self.graveyard:
                loop.bury()
            self.graveyard.clear()


_histories = 0


@contextmanager
def without_collector() -> Iterator[None]:
    """When garbage is collected must not depend on anything but the seed, as finalizers may be seen."""
    global _histories
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        _histories += 1
        if _histories % HISTORIES_PER_COLLECTION == 0:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", RuntimeWarning)  # coroutines of a process that was killed
                gc.collect()
        if was_enabled:
            gc.enable()
