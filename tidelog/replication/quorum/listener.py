"""Whom the quorum tells of the metadata log: what is committed, and who leads; and how, in order and never within."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Protocol

from tidelog.replication.quorum.raft.snapshot import SnapshotId


class MetadataListener(Protocol):
    """Whom the quorum tells, in order. On the loop's thread, never from within a call into RaftNode but `start`."""

    def on_snapshot(self, identity: SnapshotId, values: list[bytes], timestamp_ms: int) -> None:
        """Replaces everything known; at the start, and when one was fetched from the leader."""
        ...

    def on_high_watermark(self, offset: int) -> None:
        """Offsets below `offset` are committed: pull them with `read`."""
        ...

    def on_leader(self, leader_id: int, epoch: int) -> None:
        """Whoever leads now, -1 for nobody."""
        ...

    def on_lead(self, epoch: int) -> None:
        """This node leads, and everything before its epoch is committed and was reported."""
        ...

    def on_resign(self, epoch: int) -> None:
        """It leads no longer: after every `on_lead`, before the `on_leader` of the next."""
        ...

    def on_damage(self) -> None:
        """Committed records or snapshots are damaged: a snapshot of all that is known is to replace them."""
        ...

    def on_failure(self, error: Exception) -> None:
        """This node's log or vote file cannot be used any more: it takes no part in the quorum from now on."""
        ...


class News:
    """Told in order at the loop's next turn, so that nobody is called from within a call of his own."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._untold: deque[Callable[[], None]] = deque()
        self._handle: asyncio.Handle | None = None

    def tell(self, news: Callable[[], None]) -> None:
        self._untold.append(news)
        if self._handle is None:
            self._handle = self._loop.call_soon(self.deliver)

    def deliver(self) -> None:
        """All there is, now."""
        self._handle = None
        while self._untold:
            self._untold.popleft()()
