"""What raft replicas ask and answer, and what the core wants done, as plain values. Pure.

`wire.py` turns asks and answers into Kafka's messages and back. `error` in an answer is Kafka's code of the partition.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

from tidelog.replication.ports import Endpoint
from tidelog.replication.quorum.raft.snapshot import SnapshotId
from tidelog.replication.quorum.raft.voters import ReplicaKey, VoterSet

Bytes = bytes | bytearray | memoryview


class Peer(NamedTuple):
    """Another node; the id of one that is known by its address only (a bootstrap server) is below -1."""

    id: int
    endpoint: Endpoint


class ElectionState(NamedTuple):
    """What `quorum-state` keeps. -1 and None stand for nobody."""

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
    """`endpoint`: where the leader can be reached, None when the request does not say."""

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
    """`end_offset`: of the asking replica's log, synced if it may vote; `last_epoch`: of the record before."""

    replica: ReplicaKey
    epoch: int
    end_offset: int
    last_epoch: int
    high_watermark: int
    max_wait_ms: int


class FetchAnswer(NamedTuple):
    error: int
    epoch: int
    leader_id: int = -1
    leader: Endpoint | None = None
    high_watermark: int = -1
    diverging: OffsetAndEpoch | None = None
    snapshot: SnapshotId | None = None
    records: Bytes = b""


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


# -- what the core wants done, in this order ---------------------------------------------------------------------------


class Persist(NamedTuple):
    """On the device before anything that is sent or answered from now on leaves the node."""

    state: ElectionState


class Recovered(NamedTuple):
    """What damage took from the log has been fetched again: this replica may vote."""


class Send(NamedTuple):
    """Then `on_answer` or `on_failure` with this very value."""

    number: int
    peer: Peer
    ask: Ask


class AppendLeaderChange(NamedTuple):
    """The first record of the epoch; with `voters_now`, kraft.version and voters behind it in the same batch."""

    epoch: int
    voters: VoterSet
    granting: tuple[ReplicaKey, ...]
    voters_now: VoterSet | None = None


class AppendVoters(NamedTuple):
    epoch: int
    voters: VoterSet


class AppendRecords(NamedTuple):
    """What a leader sent, offsets and all."""

    records: Bytes


class Truncate(NamedTuple):
    end_offset: int


class KeepSnapshotPart(NamedTuple):
    """After the last part it is to be installed, and `on_snapshot_installed` or `on_snapshot_failed` is to follow."""

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
    """What parked fetches wait for may have come."""


Effect: TypeAlias = (
    "Persist | Send | AppendLeaderChange | AppendVoters | AppendRecords | Truncate | KeepSnapshotPart | ReportLeader "
    "| ReportHighWatermark | ReportLead | ReportResign | WakeFetches | Recovered"
)
