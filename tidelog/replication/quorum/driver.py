"""RaftNode: this node's part in the metadata quorum. A shell: what is to be done is `raft.py`'s to say.

It syncs, sends, wakes and answers. Invariants: nothing is told to anybody before the vote and epoch it rests on are on
the device; what a follower reports and a leader counts of its own log is.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

from tidelog.replication.ports import Endpoint, Exchange
from tidelog.replication.quorum.settings import QuorumSettings
from tidelog.replication.quorum.snapshot import SnapshotId
from tidelog.storage.disk import Disk
from tidelog.storage.log import PartitionLog

T = TypeVar("T")


class NotLeader(Exception):
    """This node does not lead the metadata quorum, so it may not append."""


class ReplayedBatch(NamedTuple):
    """Values of metadata records, and the offset of the last record they come from (control records included)."""

    last_offset: int
    epoch: int
    timestamp_ms: int
    values: list[bytes]


class MetadataListener(Protocol):
    """Whom the quorum tells. Called on the loop's thread, never from within a call into RaftNode."""

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


class RaftNode:
    """`root`: the log directory that holds `__cluster_metadata-0`, whose log is `log`."""

    def __init__(
        self,
        *,
        node_id: int,
        directory_id: bytes,
        cluster_id: str,
        disk: Disk,
        root: str,
        log: PartitionLog,
        settings: QuorumSettings,
        can_vote: bool,
        loop: asyncio.AbstractEventLoop,
        exchange: Exchange,
        run_in_executor: Callable[[Callable[[], T]], Awaitable[T]],
        clock_ms: Callable[[], int],
        rng: random.Random,
        listener: MetadataListener,
    ) -> None:
        raise NotImplementedError

    async def start(self) -> None:
        """Read the vote file, snapshot and log; tell the listener of the snapshot; begin electing or fetching.

        Returns at once. Raises CorruptSnapshot, CorruptQuorumState, CorruptLog, InconsistentVoters.
        """

    async def close(self) -> None:
        """A leader resigns. The log is its directory's to close."""

    @property
    def leader_id(self) -> int:
        """-1: nobody known."""
        raise NotImplementedError

    @property
    def epoch(self) -> int:
        raise NotImplementedError

    @property
    def high_watermark(self) -> int:
        """Committed offsets are below it; -1 while unknown."""
        raise NotImplementedError

    @property
    def end_offset(self) -> int:
        raise NotImplementedError

    @property
    def is_leader(self) -> bool:
        raise NotImplementedError

    def leader_endpoint(self) -> Endpoint | None:
        raise NotImplementedError

    def append(self, values: Sequence[bytes], now_ms: int) -> int:
        """One batch, all or nothing; the offset of its last record. Raises NotLeader, OSError."""
        raise NotImplementedError

    def read(self, from_offset: int) -> Iterator[ReplayedBatch]:
        """Committed batches from `from_offset` on, up to the high watermark of now."""
        raise NotImplementedError

    def bootstrap_values(self) -> list[bytes]:
        """What Kafka's `format` left for the first start (bootstrap.checkpoint); empty without one."""
        raise NotImplementedError

    def resign(self) -> None:
        """Lead no longer, and say so to the others (EndQuorumEpoch)."""

    async def vote(self, request: Any, version: int) -> Any: ...
    async def begin_quorum_epoch(self, request: Any, version: int) -> Any: ...
    async def end_quorum_epoch(self, request: Any, version: int) -> Any: ...
    async def fetch(self, request: Any, version: int) -> Any: ...
    async def fetch_snapshot(self, request: Any, version: int) -> Any: ...
    async def describe_quorum(self, request: Any, version: int) -> Any: ...
    async def add_voter(self, request: Any, version: int) -> Any: ...
    async def remove_voter(self, request: Any, version: int) -> Any: ...
    async def update_voter(self, request: Any, version: int) -> Any: ...

    def write_snapshot(
        self, values: Iterable[bytes], identity: SnapshotId, last_timestamp_ms: int, now_ms: int
    ) -> None:
        """Beside the log, complete or not at all. May run on any thread."""

    def forget_before(self, identity: SnapshotId, now_ms: int) -> None:
        """Remove what a snapshot on disk makes superfluous; on the loop's thread."""
