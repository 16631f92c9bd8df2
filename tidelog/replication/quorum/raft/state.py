"""The roles of a replica in the metadata quorum and what each remembers; the log as raft sees it. Pure.

`TRANSITIONS` is the whole table; `raft.py` asks it before every change. Times are ms of a clock that only goes forward.
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
    """This replica's log, read only: the core says what to do with it in effects."""

    @property
    def start_offset(self) -> int: ...

    @property
    def end_offset(self) -> int: ...

    @property
    def synced_offset(self) -> int:
        """Everything below it is on the device."""
        ...

    @property
    def last_epoch(self) -> int:
        """Of the last record or of the snapshot in its place, 0 for nothing."""
        ...

    @property
    def snapshots(self) -> tuple[SnapshotId, SnapshotId] | None:
        """The earliest and the latest one on disk."""
        ...

    def end_of_epoch(self, epoch: int) -> OffsetAndEpoch:
        """The largest epoch not above `epoch`, and where it ends."""
        ...


class Role(Enum):
    """A replica that may not vote is UNATTACHED or a FOLLOWER: Kafka's observer."""

    UNATTACHED = "Unattached"
    FOLLOWER = "Follower"
    PROSPECTIVE = "Prospective"
    CANDIDATE = "Candidate"
    LEADER = "Leader"
    RESIGNED = "Resigned"


# Within an epoch; a higher epoch makes everybody UNATTACHED or a FOLLOWER, and begins with a CANDIDATE.
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
    """Knows the epoch at most. A voter asks for pre-votes at `election_at_ms`."""

    election_at_ms: float


@dataclass(eq=False, repr=False)
class Download:
    """A snapshot that is being fetched."""

    snapshot: SnapshotId
    position: int = 0
    is_installing: bool = False


@dataclass(eq=False, repr=False)
class Follower:
    """`has_fetched`: from this leader in this epoch, so that it is known to live; `is_gone`: it is known not to."""

    give_up_at_ms: float
    has_fetched: bool = False
    is_gone: bool = False
    leader_high_watermark: int = -1
    download: Download | None = None
    update_sent: bool = False


@dataclass(eq=False, repr=False)
class Prospective:
    tally: Tally
    give_up_at_ms: float
    retries: int = 0
    defer_until_ms: float = 0.0
    """Somebody better placed asked for our pre-vote: let them go first."""


@dataclass(eq=False, repr=False)
class Candidate:
    tally: Tally
    give_up_at_ms: float
    retries: int = 0
    lost_until_ms: float | None = None
    """A majority refused: the next attempt is to begin then."""


@dataclass(eq=False, repr=False)
class Leader:
    progress: Progress
    epoch_start_offset: int
    is_active: bool = False
    """Its first record is committed, so all before is too."""
    granting: tuple[ReplicaKey, ...] = ()
    silent_until_ms: dict[int, float] = field(default_factory=dict)
    """When to tell a voter that does not fetch of this leader again."""


@dataclass(eq=False, repr=False)
class Resigned:
    preferred: tuple[ReplicaKey, ...]
    until_ms: float
    unaware: set[int] = field(default_factory=set)
