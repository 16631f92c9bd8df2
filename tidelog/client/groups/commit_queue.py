"""Commits of one consumer: sent one at a time, in the order of the calls.

Invariant: an older offset is never sent after a newer one of the same partition. A commit that waits for its turn, or
to be tried again, leaves out the partitions which a later call covers; its outcome for them is that of the later call.
A commit that was called is sent even when its caller no longer waits: it may be on the wire already.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping

from tidelog.client.groups.coordinator import Coordinator, GroupIdentity
from tidelog.client.model import OffsetAndMetadata, TopicPartition
from tidelog.protocol.errors import ErrorCode, KafkaError


class _Commit:
    """One call. `unsettled` counts itself and the later commits on which its outcome depends."""

    __slots__ = ("deadline", "dependents", "future", "identity", "offsets", "problem", "replaced_by", "unsettled")

    def __init__(
        self, offsets: dict[TopicPartition, OffsetAndMetadata], identity: GroupIdentity, deadline: float
    ) -> None:
        self.offsets = offsets
        self.identity = identity
        self.deadline = deadline
        self.future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.replaced_by: set[_Commit] = set()
        self.dependents: list[_Commit] = []
        self.unsettled = 1
        self.problem: Exception | None = None

    def settle(self, problem: Exception | None) -> None:
        """It has ended, or a commit that replaced a part of it. The first problem is the outcome."""
        pending = [(self, problem)]
        while pending:
            commit, problem = pending.pop()
            commit.problem = commit.problem or problem
            commit.unsettled -= 1
            if not commit.future.done():
                if commit.problem is not None:
                    commit.future.set_exception(commit.problem)
                elif not commit.unsettled:
                    commit.future.set_result(None)
            if not commit.unsettled:
                pending.extend((dependent, commit.problem) for dependent in commit.dependents)
                commit.dependents = []


class CommitQueue:
    """The queue in front of one group's coordinator."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator
        self._loop = asyncio.get_running_loop()
        self._waiting: deque[_Commit] = deque()
        self._newest: dict[TopicPartition, _Commit] = {}
        self._worker: asyncio.Task[None] | None = None
        self._closed = False

    @property
    def busy(self) -> bool:
        return self._worker is not None

    def add(
        self, offsets: Mapping[TopicPartition, OffsetAndMetadata], identity: GroupIdentity, timeout_ms: float
    ) -> asyncio.Future[None]:
        """Queue a commit now. The future ends with None or the exceptions of `Coordinator.commit`."""
        commit = _Commit(dict(offsets), identity, self._loop.time() + timeout_ms / 1000)
        commit.future.add_done_callback(_retrieve)
        if self._closed:
            commit.settle(_closed())
            return commit.future
        for partition in commit.offsets:
            self._newest[partition] = commit
        self._waiting.append(commit)
        if self._worker is None:
            self._worker = self._loop.create_task(self._work())
            self._worker.add_done_callback(_retrieve)
        return commit.future

    async def wait_until_empty(self) -> None:
        """Every commit that was called by now has ended; its error stays with its own future."""
        waiting = [commit.future for commit in self._newest.values()]
        if self._worker is not None and waiting:
            await asyncio.wait(waiting)

    def close(self) -> None:
        """Send nothing more. What is not settled fails with NETWORK_EXCEPTION."""
        self._closed = True
        if self._worker is not None:
            self._worker.cancel()

    async def _work(self) -> None:
        current: _Commit | None = None
        try:
            while self._waiting:
                current = commit = self._waiting.popleft()
                commit.settle(await self._outcome(commit))
                current = None
                for partition in commit.offsets:
                    if self._newest.get(partition) is commit:
                        del self._newest[partition]
        finally:
            self._worker = None
            for left in [*([] if current is None else [current]), *self._waiting]:
                left.settle(_closed())
            self._waiting.clear()
            self._newest.clear()

    async def _outcome(self, commit: _Commit) -> Exception | None:
        async def attempt() -> None:
            offsets = self._still_to_send(commit)
            if offsets:
                await self._coordinator.commit_once(offsets, commit.identity)

        try:
            await self._coordinator.retry((commit.deadline - self._loop.time()) * 1000, attempt)
        except Exception as error:
            return error
        return None

    def _still_to_send(self, commit: _Commit) -> dict[TopicPartition, OffsetAndMetadata]:
        """Its offsets without those which a later commit replaces."""
        for partition in list(commit.offsets):
            newest = self._newest[partition]
            if newest is not commit:
                del commit.offsets[partition]
                if newest not in commit.replaced_by:
                    commit.replaced_by.add(newest)
                    commit.unsettled += 1
                    newest.dependents.append(commit)
        return commit.offsets


def _closed() -> KafkaError:
    return KafkaError(ErrorCode.NETWORK_EXCEPTION, "the consumer was closed before the commit was answered")


def _retrieve(outcome: asyncio.Future[None]) -> None:
    """A caller that no longer waits hears of no failure; that is no error of the program."""
    if not outcome.cancelled():
        outcome.exception()
