"""Writes the vote file off the loop's thread, the newest state only, and knows who waits for it.

Invariant: `written` returns only after every state handed in before it is on the device, itself or a later one.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from tidelog.protocol.errors import ErrorCode, KafkaError
from tidelog.replication.quorum.messages import ElectionState
from tidelog.replication.quorum.vote_store import QuorumState, VoteStore
from tidelog.replication.quorum.voters import ReplicaKey, VoterHistory


class VoteWriter:
    """`on_failure` hears of a file that cannot be written."""

    def __init__(
        self,
        store: VoteStore,
        voters: VoterHistory,
        loop: asyncio.AbstractEventLoop,
        run_in_executor: Callable[[Callable[[], Any]], Awaitable[Any]],
        on_failure: Callable[[Exception], None],
    ) -> None:
        self._store = store
        self._voters = voters
        self._loop = loop
        self._run_in_executor = run_in_executor
        self._on_failure = on_failure
        self._wanted: tuple[int, ElectionState] = (0, ElectionState())
        self._written = 0
        self._writing: asyncio.Task[None] | None = None
        self._waiters: deque[tuple[int, asyncio.Future[None]]] = deque()

    def write(self, state: ElectionState) -> None:
        self._wanted = (self._wanted[0] + 1, state)
        if self._writing is None:
            self._writing = self._loop.create_task(self._write_all(), name="quorum-state")

    async def written(self) -> None:
        number = self._wanted[0]
        if self._written < number:
            future: asyncio.Future[None] = self._loop.create_future()
            self._waiters.append((number, future))
            await future

    async def close(self) -> None:
        if self._writing is not None:
            await self._writing
        self.give_up()

    def give_up(self) -> None:
        """Nobody's wait will end any more."""
        while self._waiters:
            _, future = self._waiters.popleft()
            if not future.done():
                future.set_exception(KafkaError(ErrorCode.BROKER_NOT_AVAILABLE, "this node has left the quorum"))

    async def _write_all(self) -> None:
        try:
            while self._written < self._wanted[0]:
                number, state = self._wanted
                await self._run_in_executor(partial(self._store.write, self._in_file(state), sync=True))
                self._written = number
                while self._waiters and self._waiters[0][0] <= number:
                    _, future = self._waiters.popleft()
                    if not future.done():
                        future.set_result(None)
        except OSError as error:
            self._on_failure(error)
        finally:
            self._writing = None

    def _in_file(self, state: ElectionState) -> QuorumState:
        is_dynamic = self._voters.kraft_version > 0
        voted = state.voted or ReplicaKey(-1)
        return QuorumState(
            leader_id=state.leader_id,
            leader_epoch=state.epoch,
            voted_id=voted.id,
            voted_directory_id=voted.directory_id,
            voter_ids=() if is_dynamic else self._voters.static.ids,
            data_version=1 if is_dynamic else 0,
        )
