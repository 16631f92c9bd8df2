"""The interface of the quorum for the controller and the tracker: the metadata log as values.

The quorum's driver implements `RaftLog` without importing it; tests have an implementation of their
own.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Protocol, TypeVar

from tidelog.replication.quorum.raft.snapshot import SnapshotId

T = TypeVar("T")


class CommittedBatch(Protocol):
    """The values of one batch of the metadata log (empty for a control batch), and its last offset."""

    @property
    def last_offset(self) -> int: ...
    @property
    def epoch(self) -> int: ...
    @property
    def timestamp_ms(self) -> int: ...
    @property
    def values(self) -> list[bytes]: ...


class RaftLog(Protocol):
    @property
    def is_leader(self) -> bool: ...
    @property
    def has_lost_majority(self) -> bool:
        """Whether this leader has heard of no majority for so long that another may lead."""
        ...

    @property
    def epoch(self) -> int: ...
    @property
    def end_offset(self) -> int: ...
    @property
    def is_alone(self) -> bool:
        """Whether no other voter is known that could have a copy of the log."""
        ...

    def append(self, values: Sequence[bytes], now_ms: int) -> int:
        """Append one atomic batch; returns the offset of its last record, before its commit."""
        ...

    def read(self, from_offset: int) -> Iterable[CommittedBatch]: ...

    def snapshot_writer(
        self, values: Iterable[bytes], identity: SnapshotId, last_timestamp_ms: int, now_ms: int
    ) -> Callable[[], None]:
        """Work for any thread, which writes a snapshot completely or not at all. Call this on the loop's thread."""
        ...

    def snapshot_written(self, identity: SnapshotId) -> None: ...

    def resign(self) -> object: ...


class RunInExecutor(Protocol):
    """Runs a call on another thread and awaits its result."""

    def __call__(self, work: Callable[[], T], /) -> Awaitable[T]: ...
