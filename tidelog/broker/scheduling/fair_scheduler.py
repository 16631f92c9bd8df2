"""Whose turn it is: connections that want more than one stand in line here, and each turn of the loop serves a part.

A connection that asks for one small thing at a time is not met here. In line are those that have sent many requests at
once, and, when a turn of the loop has become long, all that are read in the rest of it; so that whoever comes next
finds the loop free after a few milliseconds, however many others want however much. There are four lines: for a first
request and for what a connection wants beside it, of records and of anything else, because a Produce costs a tenth of
what most others do. Invariants: in each line who comes first is served first; a connection stands in one of them at
most, and once; every line moves with every turn of the loop, however busy others are.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import asyncio

logger = logging.getLogger("tidelog.connection")

# Of one turn of the loop: for each line, and for what takes long and is read in it.
LINE_S = 0.0005
READS_S = 0.001
# A loop that did so much in a while is looked at turn by turn.
BUSY_S = 0.0005
WHILE_S = 0.001

Wake = Callable[[], None]


class FairScheduler:
    """`late`: this turn of the loop has become long; who is read now is to wait in line.

    `soon` calls back on the loop's next turn. `stopwatch`: seconds, None where a turn of the loop takes no time.
    """

    __slots__ = ("_began", "_busy_s", "_is_due", "_lines", "_soon", "_stopwatch", "_while_ends", "late")

    def __init__(self, soon: Callable[[Wake], object], stopwatch: Callable[[], float] | None = None) -> None:
        self.late = False
        self._soon = soon
        self._stopwatch = stopwatch
        self._lines: tuple[deque[Wake], ...] = (deque(), deque(), deque(), deque())
        self._is_due = False
        self._began = 0.0
        self._while_ends = self._busy_s = 0.0

    def __len__(self) -> int:
        """How many wait."""
        return sum(map(len, self._lines))

    def wait(self, wake: Wake, *, is_first: bool, for_records: bool) -> None:
        """Stand in line; `wake` is called when the turn has come, for one request if it `is_first`."""
        self._lines[(0 if is_first else 2) + (0 if for_records else 1)].append(wake)
        self._arm()
        self.took(0.0)

    async def pause(self, loop: asyncio.AbstractEventLoop) -> None:
        """Of a coroutine that has more to do: wait in line with what takes long."""
        turn = loop.create_future()
        self.wait(lambda: None if turn.done() else turn.set_result(None), is_first=False, for_records=False)
        await turn

    def took(self, seconds: float) -> None:
        """So long did it take what was done just now, which was not a small Produce or Fetch.

        To be called when a turn of the loop is over costs as much as serving a small request: that begins when there
        is so much to do in a while that somebody might have to wait.
        """
        if self._stopwatch is None:
            return
        now = self._stopwatch()
        if self._is_due:
            if now - self._began > READS_S:
                self.late = True
            return
        if now > self._while_ends:
            self._while_ends, self._busy_s = now + WHILE_S, 0.0
        self._busy_s += seconds
        if self._busy_s > BUSY_S:
            self._arm()

    def _arm(self) -> None:
        if not self._is_due:
            self._is_due = True
            self._soon(self._serve)
            if self._stopwatch is not None:
                self._began = self._stopwatch()

    def _serve(self) -> None:
        """As a turn of the loop begins."""
        self._is_due = False
        try:
            for line in self._lines:
                if line:
                    self._move(line)
        finally:
            self.late = False
            if any(self._lines):
                self._arm()
            if self._stopwatch is not None:
                self._began = self._stopwatch()

    def _move(self, line: deque[Wake]) -> None:
        """Everybody in it once, or as many as there is time for."""
        stopwatch = self._stopwatch
        began = 0.0
        if stopwatch is not None:
            self._arm()
            began = stopwatch()
            self._began = began + LINE_S - READS_S  # late when the line's time is over
        for _ in range(len(line)):
            self.late = False
            try:
                line.popleft()()
            except Exception:
                logger.exception("the work of a connection failed")  # the others in line go on
            if stopwatch is not None and stopwatch() - began >= LINE_S:
                break
