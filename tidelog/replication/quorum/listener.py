"""The listener of the metadata log, and the queue that calls it in order from the event loop."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator
from typing import Protocol

from tidelog.replication.quorum.raft.snapshot import SnapshotId


class MetadataListener(Protocol):
    """Receives commits and leader changes in order, on the loop's thread. Only `start` calls it directly; all other
    calls of RaftNode return before it is called.
    """

    def on_snapshot(self, identity: SnapshotId, values: list[bytes], timestamp_ms: int) -> None:
        """A snapshot that replaces all earlier metadata, at the start or fetched from the leader."""
        ...

    def on_high_watermark(self, offset: int) -> Iterator[None] | None:
        """Records below `offset` are committed; the listener gets them with `read`. It returns the steps that are left
        if it has many records to read: each runs in a turn of the loop, and the next call follows the last one.
        """
        ...

    def on_leader(self, leader_id: int, epoch: int) -> None:
        """The leader has changed; -1 for no known leader."""
        ...

    def on_lead(self, epoch: int) -> None:
        """This node led, and all records before its epoch are committed and reported. Behind the steps of another call
        the lead may be over: `on_resign` follows.
        """
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


Call = Callable[[], Iterator[None] | None]


class ListenerCalls:
    """A queue of listener calls. They run in order in the loop's next iteration, so that a listener is never called
    inside its own call into RaftNode. Others run between the steps of a call.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._calls: deque[Call] = deque()
        self._steps: Iterator[None] | None = None  # of the call under way
        self._handle: asyncio.Handle | None = None

    def add(self, call: Call) -> None:
        self._calls.append(call)
        if self._handle is None:
            self._handle = self._loop.call_soon(self._run)

    def _run(self) -> None:
        self._handle = None
        if self._steps is not None and not is_done(self._steps):
            self._handle = self._loop.call_soon(self._run)
            return
        self._steps = None
        while self._calls:
            self._steps = self._calls.popleft()()
            if self._steps is not None:
                self._handle = self._loop.call_soon(self._run)
                return

    def close(self) -> None:
        """Run all queued calls now, unless one of them has steps left: then it and those behind it are dropped."""
        while self._calls and self._steps is None:
            self._steps = self._calls.popleft()()
        self._calls.clear()
        if self._handle is not None:
            self._handle.cancel()


def is_done(steps: Iterator[None]) -> bool:
    """Run the next step. Whether it was the last one."""
    return next(steps, _DONE) is _DONE


_DONE = object()
