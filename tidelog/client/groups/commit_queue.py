"""The commits of one consumer: sent one at a time, in the order of the calls.

Invariant: an older offset is never sent after a newer offset of the same partition. A queued
commit, or one that waits for a retry, leaves out the partitions that a later call covers; for them
it gets the result of the later call. A commit is sent even when its caller no longer waits, because
its request may be in flight already.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping

from tidelog.client.groups.coordinator import Coordinator, GroupIdentity
from tidelog.client.model import OffsetAndMetadata, TopicPartition
from tidelog.client.network.outcomes import own_error, retrieve_exception, start_task
from tidelog.protocol.errors import ErrorCode, KafkaError


class _Commit:
    """One commit call.

    `unsettled` counts this commit and the later commits on which its result depends.
    """

    __slots__ = (
        "deadline",
        "dependents",
        "error",
        "future",
        "identity",
        "offsets",
        "replaced_by",
        "timeout_ms",
        "topic_ids",
        "unsettled",
    )

    def __init__(
        self,
        offsets: dict[TopicPartition, OffsetAndMetadata],
        identity: GroupIdentity,
        timeout_ms: float,
        topic_ids: Mapping[str, bytes],
    ) -> None:
        self.offsets = offsets
        self.identity = identity
        self.topic_ids = topic_ids
        self.timeout_ms = timeout_ms
        loop = asyncio.get_running_loop()
        self.deadline = loop.time() + timeout_ms / 1000
        self.future: asyncio.Future[None] = loop.create_future()
        self.replaced_by: set[_Commit] = set()
        self.dependents: list[_Commit] = []
        self.unsettled = 1
        self.error: Exception | None = None

    def settle(self, error: Exception | None) -> None:
        """Note the end of this commit, or of a commit that replaced a part of it.

        The first error is the result.
        """
        pending = [(self, error)]
        while pending:
            commit, error = pending.pop()
            commit.error = commit.error or error
            commit.unsettled -= 1
            if not commit.future.done():
                if commit.error is not None:
                    commit.future.set_exception(own_error(commit.error))
                elif not commit.unsettled:
                    commit.future.set_result(None)
            if not commit.unsettled:
                pending.extend((dependent, commit.error) for dependent in commit.dependents)
                commit.dependents = []


class CommitQueue:
    """The commit queue of one group's coordinator."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator
        self._waiting: deque[_Commit] = deque()
        self._newest: dict[TopicPartition, _Commit] = {}
        self._worker: asyncio.Task[None] | None = None
        self._is_closed = False

    @property
    def is_busy(self) -> bool:
        return self._worker is not None

    def add(
        self,
        offsets: Mapping[TopicPartition, OffsetAndMetadata],
        identity: GroupIdentity,
        timeout_ms: float,
        topic_ids: Mapping[str, bytes],
    ) -> asyncio.Future[None]:
        """Queue a commit now. The future gets None or an exception of `Coordinator.commit`.

        `topic_ids`: as of `Coordinator.commit_once`, of this moment.
        """
        commit = _Commit(dict(offsets), identity, timeout_ms, topic_ids)
        commit.future.add_done_callback(retrieve_exception)
        if self._is_closed:
            commit.settle(_closed_error())
            return commit.future
        for partition in commit.offsets:
            self._newest[partition] = commit
        self._waiting.append(commit)
        if self._worker is None:
            self._worker = start_task(self._send_commits())
            self._worker.add_done_callback(retrieve_exception)
        return commit.future

    async def wait_until_empty(self) -> None:
        """Wait for the end of every commit queued so far. Their errors go to their own futures."""
        waiting = [commit.future for commit in self._newest.values()]
        if self._worker is not None and waiting:
            await asyncio.wait(waiting)

    def close(self) -> None:
        """Stop sending. Unsettled commits fail with NETWORK_EXCEPTION."""
        self._is_closed = True
        if self._worker is not None:
            self._worker.cancel()

    async def _send_commits(self) -> None:
        current: _Commit | None = None
        try:
            while self._waiting:
                current = commit = self._waiting.popleft()
                commit.settle(await self._try_commit(commit))
                current = None
                for partition in commit.offsets:
                    if self._newest.get(partition) is commit:
                        del self._newest[partition]
        finally:
            self._worker = None
            for commit in [*([] if current is None else [current]), *self._waiting]:
                commit.settle(_closed_error())
            self._waiting.clear()
            self._newest.clear()

    async def _try_commit(self, commit: _Commit) -> Exception | None:
        async def attempt() -> None:
            offsets = self._offsets_to_send(commit)
            if offsets:
                await self._coordinator.commit_once(offsets, commit.identity, commit.topic_ids)

        try:
            await self._coordinator.retry(commit.timeout_ms, attempt, commit.deadline)
        except Exception as error:
            return error
        return None

    def _offsets_to_send(self, commit: _Commit) -> dict[TopicPartition, OffsetAndMetadata]:
        """The offsets of a commit without the partitions that a later commit covers."""
        for partition in list(commit.offsets):
            newest = self._newest[partition]
            if newest is not commit:
                del commit.offsets[partition]
                if newest not in commit.replaced_by:
                    commit.replaced_by.add(newest)
                    commit.unsettled += 1
                    newest.dependents.append(commit)
        return commit.offsets


def _closed_error() -> KafkaError:
    return KafkaError(ErrorCode.NETWORK_EXCEPTION, "the consumer was closed before the commit was answered")
