"""Whom the quorum tells of the metadata log: what is committed, and who leads."""

from __future__ import annotations

from typing import Protocol

from tidelog.replication.quorum.snapshot import SnapshotId


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

    def on_failure(self, error: Exception) -> None:
        """This node's log or vote file cannot be used any more: it takes no part in the quorum from now on."""
        ...
