"""The roles of a replica in the metadata quorum, the state of each role, and raft's view of the log. Pure.

`TRANSITIONS` is the whole table of role changes; `replica.py` checks it before each change. Times are in milliseconds
of a monotonic clock.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Final, Protocol

from tidelog.replication.quorum.raft.commit import Progress
from tidelog.replication.quorum.raft.election import Tally
from tidelog.replication.quorum.raft.messages import OffsetAndEpoch
from tidelog.replication.quorum.raft.snapshot import SnapshotId
from tidelog.replication.quorum.raft.voters import ReplicaKey


class LogView(Protocol):
    """This replica's log, read only: the core changes it by effects."""

    @property
    def start_offset(self) -> int: ...

    @property
    def end_offset(self) -> int: ...

    @property
    def synced_offset(self) -> int:
        """All records below this offset are on the device."""
        ...

    @property
    def last_epoch(self) -> int:
        """The epoch of the last record, or of the snapshot in its place; 0 for an empty log."""
        ...

    @property
    def snapshots(self) -> tuple[SnapshotId, SnapshotId] | None:
        """The earliest and the latest snapshot on disk."""
        ...

    def end_of_epoch(self, epoch: int) -> OffsetAndEpoch:
        """The largest epoch that is at most `epoch`, and its end offset."""
        ...

    def identity_of(self, end_offset: int) -> SnapshotId:
        """`end_offset`, or the log start if that is later, with the epoch of the record before it, -1 if unknown."""
        ...

    def holds(self, identity: SnapshotId) -> bool:
        """Whether this log begins with the one that `identity_of` names."""
        ...


class Role(Enum):
    """A replica that may not vote is UNATTACHED or a FOLLOWER: Kafka's observer."""

    UNATTACHED = "Unattached"
    FOLLOWER = "Follower"
    PROSPECTIVE = "Prospective"
    CANDIDATE = "Candidate"
    LEADER = "Leader"
    RESIGNED = "Resigned"


# The role changes within one epoch. A higher epoch begins with a CANDIDATE and makes other replicas UNATTACHED or a
# FOLLOWER.
TRANSITIONS: Final[Mapping[Role, frozenset[Role]]] = {
    Role.UNATTACHED: frozenset({Role.UNATTACHED, Role.FOLLOWER, Role.PROSPECTIVE}),
    Role.FOLLOWER: frozenset({Role.FOLLOWER, Role.UNATTACHED, Role.PROSPECTIVE}),
    Role.PROSPECTIVE: frozenset({Role.PROSPECTIVE, Role.UNATTACHED, Role.FOLLOWER}),
    Role.CANDIDATE: frozenset({Role.LEADER, Role.PROSPECTIVE, Role.FOLLOWER}),
    Role.LEADER: frozenset({Role.RESIGNED}),
    Role.RESIGNED: frozenset({Role.UNATTACHED, Role.PROSPECTIVE}),
}


@dataclass(eq=False, repr=False)
class Unattached:
    """A replica without a known leader. A voter requests pre-votes at `election_at_ms`."""

    election_at_ms: float


@dataclass(eq=False, repr=False)
class Download:
    """The fetch of a snapshot."""

    snapshot: SnapshotId
    position: int = 0
    is_installing: bool = False


@dataclass(eq=False, repr=False)
class Follower:
    """`has_fetched`: a fetch from this leader in this epoch has succeeded, so the leader was alive. `is_gone`: the
    leader has resigned, or its port refuses connections.
    """

    give_up_at_ms: float
    has_fetched: bool = False
    is_gone: bool = False
    leader_high_watermark: int = -1
    download: Download | None = None
    pre_votes: Tally | None = None
    """Those of the attempt that this leader's answer has ended, as long as no fetch has succeeded since."""


@dataclass(eq=False, repr=False)
class Prospective:
    tally: Tally
    give_up_at_ms: float
    retries: int = 0
    defer_until_ms: float = 0.0
    """A replica with a better claim has requested a pre-vote: it may run first, until this time."""


@dataclass(eq=False, repr=False)
class Candidate:
    tally: Tally
    give_up_at_ms: float
    retries: int = 0
    lost_until_ms: float | None = None
    """The time of the next attempt after a majority has refused."""


@dataclass(eq=False, repr=False)
class Leader:
    progress: Progress
    epoch_start_offset: int
    is_active: bool = False
    """Whether the first record of its epoch is committed, and so all earlier records."""
    granting: tuple[ReplicaKey, ...] = ()
    silent_until_ms: dict[int, float] = field(default_factory=dict)
    """Per voter that does not fetch: the time of the next BeginQuorumEpoch to it."""
    withheld_since_ms: float | None = None
    """Since when other replicas have to wait for the voters that this leader has written; None if they have not."""


@dataclass(eq=False, repr=False)
class Resigned:
    preferred: tuple[ReplicaKey, ...]
    until_ms: float
    unaware: set[int] = field(default_factory=set)
