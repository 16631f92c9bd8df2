"""The requests and responses of raft replicas, and the effects of the core, as plain values. Pure.

`wire.py` converts requests and responses to Kafka's messages and back. `error` in a response is Kafka's error code of
the partition.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

from tidelog.replication.ports import Endpoint
from tidelog.replication.quorum.raft.snapshot import SnapshotId
from tidelog.replication.quorum.raft.voters import ReplicaKey, VoterSet

Bytes = bytes | bytearray | memoryview


class Peer(NamedTuple):
    """Another node. A node known only by its address (a bootstrap server) has an id below -1."""

    id: int
    endpoint: Endpoint


class CommittedRecordsMissing(Exception):
    """The leader lacks records that this replica knows as committed: it must not follow it."""


class ElectionState(NamedTuple):
    """The content of `quorum-state`. -1 and None mean none."""

    epoch: int = 0
    leader_id: int = -1
    voted: ReplicaKey | None = None


class OffsetAndEpoch(NamedTuple):
    epoch: int
    end_offset: int


class VoteAsk(NamedTuple):
    epoch: int
    candidate: ReplicaKey
    voter: ReplicaKey
    last_epoch: int
    end_offset: int
    pre_vote: bool


class VoteAnswer(NamedTuple):
    error: int
    epoch: int
    leader_id: int = -1
    leader: Endpoint | None = None
    granted: bool = False


class BeginAsk(NamedTuple):
    """`endpoint`: the leader's address, or None if the request has none."""

    epoch: int
    leader_id: int
    voter: ReplicaKey
    endpoint: Endpoint | None


class BeginAnswer(NamedTuple):
    error: int
    epoch: int
    leader_id: int = -1
    leader: Endpoint | None = None


class EndAsk(NamedTuple):
    epoch: int
    leader_id: int
    preferred: tuple[ReplicaKey, ...]
    endpoint: Endpoint | None


class EndAnswer(NamedTuple):
    error: int
    epoch: int
    leader_id: int = -1
    leader: Endpoint | None = None


class FetchAsk(NamedTuple):
    """`end_offset`: the end of the fetching replica's log, synced if it may vote. `last_epoch`: the epoch of its last
    record.
    """

    replica: ReplicaKey
    epoch: int
    end_offset: int
    last_epoch: int
    high_watermark: int
    max_wait_ms: int


class FetchAnswer(NamedTuple):
    """`nodes`: the nodes that the answer names: the leader, and in one to a repair the voters (`lost_vote.py`)."""

    error: int
    epoch: int
    leader_id: int = -1
    leader: Endpoint | None = None
    high_watermark: int = -1
    diverging: OffsetAndEpoch | None = None
    snapshot: SnapshotId | None = None
    records: Bytes = b""
    nodes: tuple[Peer, ...] = ()


class SnapshotAsk(NamedTuple):
    replica: ReplicaKey
    epoch: int
    snapshot: SnapshotId
    position: int


class SnapshotAnswer(NamedTuple):
    error: int
    epoch: int
    leader_id: int = -1
    leader: Endpoint | None = None
    size_bytes: int = 0
    position: int = 0
    data: Bytes = b""


class UpdateVoterAsk(NamedTuple):
    epoch: int
    voter: ReplicaKey


class UpdateVoterAnswer(NamedTuple):
    error: int
    epoch: int
    leader_id: int = -1
    leader: Endpoint | None = None


Ask: TypeAlias = "VoteAsk | BeginAsk | EndAsk | FetchAsk | SnapshotAsk | UpdateVoterAsk"
Answer: TypeAlias = "VoteAnswer | BeginAnswer | EndAnswer | FetchAnswer | SnapshotAnswer | UpdateVoterAnswer"


# -- effects, to carry out in this order -------------------------------------------------------------------------------


class Persist(NamedTuple):
    """Write the state to the device before any later request or response leaves the node."""

    state: ElectionState


class Recovered(NamedTuple):
    """The records lost to damage have been fetched again, so this replica may become a candidate."""


class Send(NamedTuple):
    """Send a request. The shell then calls `on_answer` or `on_failure` with this same value."""

    number: int
    peer: Peer
    ask: Ask


class AppendLeaderChange(NamedTuple):
    """Append the first record of the epoch. `voters_now`: append kraft.version and these voters in the same batch."""

    epoch: int
    voters: VoterSet
    granting: tuple[ReplicaKey, ...]
    voters_now: VoterSet | None = None


class AppendVoters(NamedTuple):
    epoch: int
    voters: VoterSet


class AppendRecords(NamedTuple):
    """Append records of the leader, with the leader's offsets."""

    records: Bytes


class Truncate(NamedTuple):
    end_offset: int


class KeepSnapshotPart(NamedTuple):
    """Store a part of a snapshot. After the last part, the shell installs the snapshot and calls
    `on_snapshot_installed` or `on_snapshot_failed`.
    """

    snapshot: SnapshotId
    position: int
    data: Bytes
    is_last: bool


class ReportLeader(NamedTuple):
    leader_id: int
    epoch: int


class ReportHighWatermark(NamedTuple):
    offset: int


class ReportLead(NamedTuple):
    epoch: int


class ReportResign(NamedTuple):
    epoch: int


class WakeFetches(NamedTuple):
    """Check the parked fetches again."""


Effect: TypeAlias = (
    "Persist | Send | AppendLeaderChange | AppendVoters | AppendRecords | Truncate | KeepSnapshotPart | ReportLeader "
    "| ReportHighWatermark | ReportLead | ReportResign | WakeFetches | Recovered"
)
