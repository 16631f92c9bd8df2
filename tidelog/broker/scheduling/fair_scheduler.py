"""Fairness on the event loop: work beyond one small request waits in queues, and each turn serves a part of each queue.

A connection that sends one small request at a time never waits here. A connection waits if it has sent many requests
at once, or if its request arrives in a turn of the loop that is already long. So the next connection finds the loop
free after a few milliseconds, however much the others have sent. Six queues are for first and for further
requests, each for those between nodes, for Produce and Fetch, and for all else: a node lives by its heartbeats and
votes, and a Produce costs a tenth of most other requests. Two more are for the first fetches and heartbeats of few
connections, which are known as those of voters and brokers. Two are for the first requests of connections of which
one took long: a cheap one does not wait behind hundreds of them on its own host. Coroutines wait in two queues of their
own. A turn continues only the first of each, because the time until its next pause is unknown.
Invariants: in each queue those of one host are served in order, and hosts take turns (not
the coroutines of Produce and Fetch); a connection is in at most one queue, and there once; every turn of the loop
serves every queue.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from functools import partial

from tidelog.broker.scheduling.host_queue import REQUEST_HOST, HostQueue

logger = logging.getLogger("tidelog.connection")

# The time that one turn of the loop spends on each queue.
QUEUE_S = 0.0005
# A turn with this much work is long: the requests that are read in the rest of it wait.
LONG_TURN_S = 0.001
# The connection of a request that took as long waits so often with others of its kind.
COSTLY_WAITS = 4
# The bytes of the large requests under way, exceeded by the last of them. Their decoded elements take many times as
# much memory; further requests stay undecoded in the buffers of their connections.
REQUEST_BYTES_MAX = 2 * 1024 * 1024
# The number of coroutines that make large answers. An answer takes many times its bytes until it is encoded.
LARGE_ANSWERS_MAX = 4
# The scheduler observes the turns of the loop when this much work was done in one period.
BUSY_S = 0.0005
PERIOD_S = 0.001

Wake = Callable[[], None]


class FairScheduler:
    """`is_turn_long`: this turn of the loop has done much work, and further requests are to wait.

    `call_soon` calls back in the loop's next turn. `stopwatch` returns seconds; None where turns of the loop take no
    time.
    """

    __slots__ = (
        "_call_soon", "_has_begun", "_is_admitting", "_is_armed", "_large_answers", "_large_waiting", "_paused",
        "_paused_for_records", "_period_ends_s", "_period_work_s", "_queues", "_request_bytes", "_stopwatch",
        "_turn_began_s", "_waiting_for_room", "is_turn_long", "pauses",
    )  # fmt: skip

    def __init__(self, call_soon: Callable[[Wake], object], stopwatch: Callable[[], float] | None = None) -> None:
        self.is_turn_long = False
        self.pauses = 0
        """How often a coroutine has paused."""
        self._call_soon = call_soon
        self._stopwatch = stopwatch
        self._queues: tuple[HostQueue[Wake], ...] = tuple(HostQueue() for _ in range(10))
        self._paused_for_records: deque[asyncio.Future[None]] = deque()
        self._paused: HostQueue[asyncio.Future[None]] = HostQueue()  # all other coroutines
        self._request_bytes = 0
        self._waiting_for_room: HostQueue[tuple[Wake, str]] = HostQueue()
        self._is_admitting = False  # the first of `_waiting_for_room` is being served
        self._large_answers = 0
        self._large_waiting: HostQueue[asyncio.Future[None]] = HostQueue()
        self._has_begun = False  # a coroutine continues in this turn of the loop
        self._is_armed = False
        self._turn_began_s = 0.0
        self._period_ends_s = self._period_work_s = 0.0

    def __len__(self) -> int:
        """The number of waiting connections and coroutines."""
        return sum(map(len, self._queues)) + len(self._paused_for_records) + len(self._paused)

    def wait(
        self,
        wake: Wake,
        *,
        is_first: bool,
        for_records: bool,
        host: str,
        of_node: bool = False,
        is_known: bool = False,
        is_costly: bool = False,
    ) -> None:
        """Enqueue a connection of this host. `wake` serves a part of its requests; with `is_first` it serves one."""
        kind = 0 if of_node else 1 if for_records else 2
        if not is_first:
            kind += 3
        elif is_known:
            kind = 7 if for_records else 6
        elif is_costly and not of_node:
            kind = 8 if for_records else 9
        self._queues[kind].append(wake, host)
        self._arm()
        self.add_work(0.0)

    async def pause(self, *, for_records: bool = False) -> None:
        """Let a coroutine with more work wait until other requests and the coroutines before it were served; hosts take
        turns, except for records.
        """
        self.pauses += 1
        turn = asyncio.get_running_loop().create_future()
        if for_records:
            self._paused_for_records.append(turn)
        else:
            self._paused.append(turn, REQUEST_HOST.get())
        self._arm()
        await turn

    async def begin(self) -> None:
        """Let a coroutine with much work before its first pause wait if another one continues in this turn."""
        if self._has_begun or self._paused:
            await self.pause()
        else:
            self._has_begun = True
            self._arm()

    @property
    def has_room(self) -> bool:
        """Whether a large request may begin. It must not overtake those that wait."""
        return self._request_bytes < REQUEST_BYTES_MAX and (self._is_admitting or not self._waiting_for_room)

    def wait_for_room(self, wake: Wake, host: str) -> None:
        """Wait behind the requests of the same host, and between two of them for one of each other host."""
        self._waiting_for_room.append((wake, host), host)

    def begin_request(self, size_bytes: int) -> None:
        """Count a large request. `end_request` must follow."""
        self._request_bytes += size_bytes

    def end_request(self, size_bytes: int) -> None:
        self._request_bytes -= size_bytes
        self._admit()

    def _admit(self) -> None:
        if self._waiting_for_room and self._request_bytes < REQUEST_BYTES_MAX:
            wake, host = self._waiting_for_room.popleft()
            self.wait(partial(self._serve_large, wake), is_first=True, for_records=False, host=host)

    def _serve_large(self, wake: Wake) -> None:
        self._is_admitting = True
        try:
            wake()
        finally:
            self._is_admitting = False
            self._admit()

    async def begin_large_answer(self) -> None:
        """Wait while LARGE_ANSWERS_MAX other coroutines make large answers. `end_large_answer` must follow."""
        if self._large_answers < LARGE_ANSWERS_MAX:
            self._large_answers += 1
            return
        turn = asyncio.get_running_loop().create_future()
        self._large_waiting.append(turn, REQUEST_HOST.get())
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.end_large_answer()
            raise

    def end_large_answer(self) -> None:
        if not _wake_first(self._large_waiting):
            self._large_answers -= 1

    def add_work(self, seconds: float) -> None:
        """Count the time of finished work. Small Produce and Fetch requests are not counted.

        A callback at the end of a turn costs as much as a small request. The scheduler therefore asks for one only
        after BUSY_S of work in one period, when other connections might have to wait.
        """
        if self._stopwatch is None:
            return
        now_s = self._stopwatch()
        if self._is_armed:
            if now_s - self._turn_began_s > LONG_TURN_S:
                self.is_turn_long = True
            return
        if now_s > self._period_ends_s:
            self._period_ends_s, self._period_work_s = now_s + PERIOD_S, 0.0
        self._period_work_s += seconds
        if self._period_work_s > BUSY_S:
            self._arm()

    def _arm(self) -> None:
        """Have `_serve` called at the begin of the loop's next turn."""
        if not self._is_armed:
            self._is_armed = True
            self._call_soon(self._serve)
            if self._stopwatch is not None:
                self._turn_began_s = self._stopwatch()

    def _serve(self) -> None:
        """Serve a part of each queue."""
        self._is_armed = False
        try:
            for queue in self._queues:
                if queue:
                    self._serve_queue(queue)
            _wake_first(self._paused_for_records)
            self._has_begun = _wake_first(self._paused)
        finally:
            self.is_turn_long = False
            if len(self):
                self._arm()
            if self._stopwatch is not None:
                self._turn_began_s = self._stopwatch()

    def _serve_queue(self, queue: HostQueue[Wake]) -> None:
        """Serve each connection of the queue once, or as many as fit into QUEUE_S."""
        stopwatch = self._stopwatch
        began_s = 0.0
        if stopwatch is not None:
            self._arm()
            began_s = stopwatch()
            self._turn_began_s = began_s + QUEUE_S - LONG_TURN_S  # the turn becomes long at the end of QUEUE_S
        for _ in range(len(queue)):
            self.is_turn_long = False
            try:
                queue.popleft()()
            except Exception:
                logger.exception("the work of a connection failed")
            if stopwatch is not None and stopwatch() - began_s >= QUEUE_S:
                break


def _wake_first(paused: deque[asyncio.Future[None]] | HostQueue[asyncio.Future[None]]) -> bool:
    """Continue the first coroutine. Returns whether there was one."""
    while paused:
        turn = paused.popleft()
        if not turn.done():  # done: its coroutine was cancelled
            turn.set_result(None)
            return True
    return False
