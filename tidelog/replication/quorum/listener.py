"""The listener of the metadata log, and the queue that calls it in order from the event loop."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Protocol

from tidelog.replication.quorum.raft.snapshot import SnapshotId


class MetadataListener(Protocol):
    """Receives commits and leader changes in order, on the loop's thread. Only `start` calls it directly; all other
    calls of RaftNode return before it is called.
    """

    def on_snapshot(self, identity: SnapshotId, values: list[bytes], timestamp_ms: int) -> None:
        """A snapshot that replaces all earlier metadata, at the start or fetched from the leader."""
        ...

    def on_high_watermark(self, offset: int) -> None:
        """Records below `offset` are committed; the listener gets them with `read`."""
        ...

    def on_leader(self, leader_id: int, epoch: int) -> None:
        """The leader has changed; -1 for no known leader."""
        ...

    def on_lead(self, epoch: int) -> None:
        """This node leads, and all records before its epoch are committed and reported."""
        ...

    def on_resign(self, epoch: int) -> None:
        """This node no longer leads. Called once after every `on_lead`, before the next `on_leader`."""
        ...

    def on_damage(self) -> None:
        """Committed records or snapshots are damaged: the listener writes a snapshot that replaces them."""
        ...

    def on_failure(self, error: Exception) -> None:
        """This node's log or vote file is unusable, so it has left the quorum."""
        ...


class ListenerCalls:
    """A queue of listener calls. They run in order in the loop's next iteration, so that a listener is never called
    inside its own call into RaftNode.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._calls: deque[Callable[[], None]] = deque()
        self._handle: asyncio.Handle | None = None

    def add(self, call: Callable[[], None]) -> None:
        self._calls.append(call)
        if self._handle is None:
            self._handle = self._loop.call_soon(self.run)

    def run(self) -> None:
        """Run all queued calls now."""
        self._handle = None
        while self._calls:
            self._calls.popleft()()
