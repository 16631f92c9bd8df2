"""Whose turn it is: connections that want more than one stand in line here, and each turn of the loop serves a part.

A connection that asks for one small thing at a time is not met here. In line are those that have sent many requests at
once, and, when a turn of the loop has become long, all that are read in the rest of it; so that the next connection
finds the loop free after a few milliseconds, however many others want however much. There are four lines: for a first
request and for what a connection wants beside it, of records and of anything else, because a Produce costs a tenth of
what most others do. Coroutines wait in two lines of their own. A turn lets the first of each go on, and no other: how
long it takes is not known before its next pause. Invariants: in each line who comes first is served first; a connection
stands in one of them at most, and once; every line moves with every turn of the loop, however busy others are.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from functools import partial

logger = logging.getLogger("tidelog.connection")

# Of one turn of the loop: for each line, and for what takes long and is read in it.
LINE_S = 0.0005
READS_S = 0.001
# The bytes of large requests under way, one more than that. Their elements take many times as much; the others wait in
# their connections' buffers.
REQUEST_BYTES_MAX = 2 * 1024 * 1024
# Coroutines that make large answers at a time. What an answer holds until it is encoded is many times its bytes.
LARGE_AT_ONCE_MAX = 4
# A loop that did so much in a while is looked at turn by turn.
BUSY_S = 0.0005
WHILE_S = 0.001

Wake = Callable[[], None]


class FairScheduler:
    """`late`: this turn of the loop has become long; who is read now is to wait in line.

    `soon` calls back on the loop's next turn. `stopwatch`: seconds, None where a turn of the loop takes no time.
    """

    __slots__ = (
        "_began", "_busy_s", "_has_begun", "_is_admitting", "_is_due", "_large", "_large_waiting", "_lines", "_paused",
        "_paused_for_records", "_request_bytes", "_soon", "_stopwatch", "_waiting_for_room", "_while_ends", "late",
    )  # fmt: skip

    def __init__(self, soon: Callable[[Wake], object], stopwatch: Callable[[], float] | None = None) -> None:
        self.late = False
        self._soon = soon
        self._stopwatch = stopwatch
        self._lines: tuple[deque[Wake], ...] = (deque(), deque(), deque(), deque())
        self._paused_for_records: deque[asyncio.Future[None]] = deque()
        self._paused: deque[asyncio.Future[None]] = deque()  # for anything else
        self._request_bytes = 0
        self._waiting_for_room: deque[Wake] = deque()
        self._is_admitting = False  # the first that waited for room is served
        self._large = 0  # coroutines that make large answers
        self._large_waiting: deque[asyncio.Future[None]] = deque()
        self._has_begun = False  # a coroutine goes on in this turn of the loop
        self._is_due = False
        self._began = 0.0
        self._while_ends = self._busy_s = 0.0

    def __len__(self) -> int:
        """How many wait."""
        return sum(map(len, self._lines)) + len(self._paused_for_records) + len(self._paused)

    def wait(self, wake: Wake, *, is_first: bool, for_records: bool) -> None:
        """Stand in line; `wake` is called when the turn has come, for one request if it `is_first`."""
        self._lines[(0 if is_first else 2) + (0 if for_records else 1)].append(wake)
        self._arm()
        self.took(0.0)

    async def pause(self, *, for_records: bool = False) -> None:
        """Of a coroutine that has more to do: wait until others were served, and for the coroutines before it."""
        turn = asyncio.get_running_loop().create_future()
        (self._paused_for_records if for_records else self._paused).append(turn)
        self._arm()
        await turn

    async def begin(self) -> None:
        """Of a coroutine that takes long already until its first pause: wait if another one goes on in this turn."""
        if self._has_begun or self._paused:
            await self.pause()
        else:
            self._has_begun = True
            self._arm()

    @property
    def has_room(self) -> bool:
        """For a large request, which must not overtake those that wait."""
        return self._request_bytes < REQUEST_BYTES_MAX and (self._is_admitting or not self._waiting_for_room)

    def wait_for_room(self, wake: Wake) -> None:
        self._waiting_for_room.append(wake)

    def begin_request(self, size_bytes: int) -> None:
        """A large request is under way. `end_request` must follow."""
        self._request_bytes += size_bytes

    def end_request(self, size_bytes: int) -> None:
        self._request_bytes -= size_bytes
        self._admit()

    def _admit(self) -> None:
        if self._waiting_for_room and self._request_bytes < REQUEST_BYTES_MAX:
            self.wait(partial(self._serve_large, self._waiting_for_room.popleft()), is_first=True, for_records=False)

    def _serve_large(self, wake: Wake) -> None:
        self._is_admitting = True
        try:
            wake()
        finally:
            self._is_admitting = False
            self._admit()

    async def begin_large(self) -> None:
        """Of a coroutine whose answer has become large: wait until few others are at one. `end_large` must follow."""
        if self._large < LARGE_AT_ONCE_MAX:
            self._large += 1
            return
        turn = asyncio.get_running_loop().create_future()
        self._large_waiting.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.end_large()
            raise

    def end_large(self) -> None:
        if not _wake_first(self._large_waiting):
            self._large -= 1

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
            _wake_first(self._paused_for_records)
            self._has_begun = _wake_first(self._paused)
        finally:
            self.late = False
            if len(self):
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


def _wake_first(paused: deque[asyncio.Future[None]]) -> bool:
    """Let the first coroutine go on. Whether there was one."""
    while paused:
        turn = paused.popleft()
        if not turn.done():  # done: its coroutine was cancelled
            turn.set_result(None)
            return True
    return False
