"""The delay of the event loop, measured by a timer, and the CPU time of its thread.

A callback that blocks the loop for 50 ms delays every client by as much. These metrics show it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from tidelog.broker.network.counters import Histogram

if TYPE_CHECKING:
    from tidelog.broker.metrics.exposition import Exposition

INTERVAL_S = 0.25
# uvloop's timers have a resolution of a millisecond, so smaller bounds would be meaningless.
BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)


class LoopDelay:
    def __init__(self, loop: asyncio.AbstractEventLoop, stopwatch: Callable[[], float]) -> None:
        self.delays = Histogram(BOUNDS_S)
        self._loop = loop
        self._stopwatch = stopwatch
        self._due_s = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        self._due_s = self._stopwatch() + INTERVAL_S
        self._timer = self._loop.call_later(INTERVAL_S, self._on_time)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _on_time(self) -> None:
        self.delays.observe(max(0.0, self._stopwatch() - self._due_s))
        self.start()

    def collect(self, out: Exposition) -> None:
        """Runs on the loop's thread, because it reads the CPU time of its own thread."""
        out.add_histogram("tidelog_loop_delay_seconds", self.delays)
        out.add("tidelog_loop_cpu_seconds_total", time.thread_time())
