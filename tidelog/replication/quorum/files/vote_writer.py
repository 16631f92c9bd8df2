"""Writes the vote file on another thread, only the newest state, and completes the waits for it.

Invariant: `written` returns only after each epoch and vote that was passed in before, or a later one, is on the
device. While the file cannot be written, it waits. It does not wait for the leader's id alone: a majority has stored
its votes for this leader, so none can elect another in the epoch.

Until then the replica can neither ask nor answer, so its timers stand. Otherwise, on a slow device, a candidate would
give up before it has asked for a vote, and a voter would disturb the leader that it has just elected.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from tidelog.protocol.errors import ErrorCode, KafkaError
from tidelog.replication.backoff import SHORTAGE_PAUSE_S
from tidelog.replication.quorum.files.vote_store import VoteStore, state_of
from tidelog.replication.quorum.raft.messages import ElectionState
from tidelog.replication.quorum.raft.voters import VoterHistory


class VoteWriter:
    """`tolerates` gets the error of a failed write and decides whether to retry. `on_written`: the timers go on."""

    def __init__(
        self,
        store: VoteStore,
        voters: VoterHistory,
        loop: asyncio.AbstractEventLoop,
        run_in_executor: Callable[[Callable[[], Any]], Awaitable[Any]],
        tolerates: Callable[[Exception], bool],
        on_written: Callable[[], None] = lambda: None,
    ) -> None:
        self._store = store
        self._voters = voters
        self._loop = loop
        self._run_in_executor = run_in_executor
        self._tolerates = tolerates
        self._on_written = on_written
        self._latest: tuple[int, ElectionState] = (0, ElectionState())
        self._latest_vote = 0  # the number of the last state with another epoch or vote
        self._written = 0
        self._waits_since_s: float | None = None
        self._waited_s = 0.0
        self._writing: asyncio.Task[None] | None = None
        self._waiters: deque[tuple[int, asyncio.Future[None]]] = deque()
        self._is_over = False

    def write(self, state: ElectionState) -> None:
        number, before = self._latest
        self._latest = (number + 1, state)
        if number == 0 or (state.epoch, state.voted) != (before.epoch, before.voted):
            self._latest_vote = number + 1
            if self._waits_since_s is None:
                self._waits_since_s = self._loop.time()
        if self._writing is None:
            self._writing = self._loop.create_task(self._write_all(), name="quorum-state")

    @property
    def is_waiting(self) -> bool:
        """Whether the timers stand."""
        return self._waits_since_s is not None

    @property
    def waited_ms(self) -> float:
        """For how long the timers have stood in all."""
        waits_s = 0.0 if self._waits_since_s is None else self._loop.time() - self._waits_since_s
        return (self._waited_s + waits_s) * 1000

    async def written(self) -> None:
        """Raises KafkaError(BROKER_NOT_AVAILABLE) if this node has left the quorum before."""
        number = self._latest_vote
        if self._written < number:
            if self._is_over:
                raise _left_quorum()
            future: asyncio.Future[None] = self._loop.create_future()
            self._waiters.append((number, future))
            await future

    async def close(self) -> None:
        self._is_over = True
        if self._writing is not None:
            await self._writing
        self.give_up()

    def give_up(self) -> None:
        """Fail all waits, because this node has left the quorum."""
        self._is_over = True
        while self._waiters:
            _, future = self._waiters.popleft()
            if not future.done():
                future.set_exception(_left_quorum())

    async def _write_all(self) -> None:
        try:
            while self._written < self._latest[0]:
                number, state = self._latest
                try:
                    await self._run_in_executor(partial(self._store.write, state_of(state, self._voters), sync=True))
                except OSError as error:
                    if not self._tolerates(error) or self._is_over:
                        return
                    await asyncio.sleep(SHORTAGE_PAUSE_S)
                    continue
                self._written = number
                while self._waiters and self._waiters[0][0] <= number:
                    _, future = self._waiters.popleft()
                    if not future.done():
                        future.set_result(None)
                if self._waits_since_s is not None and self._latest_vote <= number:
                    self._waited_s += self._loop.time() - self._waits_since_s
                    self._waits_since_s = None
                    self._on_written()
        finally:
            self._writing = None


def _left_quorum() -> KafkaError:
    return KafkaError(ErrorCode.BROKER_NOT_AVAILABLE, "this node has left the quorum")
