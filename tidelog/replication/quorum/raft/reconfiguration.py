"""Changes of the voters, one voter at a time, by records in the log (KIP-853). Pure.

Functions over `raft.py`'s Raft; they raise KafkaError for a refused change. Invariant: the set of voters changes only
after the previous set is committed in the leader's own epoch, so that two successive majorities share a voter.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tidelog.protocol.errors import ErrorCode, KafkaError
from tidelog.replication.quorum.raft.messages import AppendVoters
from tidelog.replication.quorum.raft.state import Leader
from tidelog.replication.quorum.raft.voters import ReplicaKey, Voter, VoterSet

if TYPE_CHECKING:
    from tidelog.replication.quorum.raft.replica import RaftReplica


def require_change(raft: RaftReplica) -> VoterSet:
    """The present voters. Raises KafkaError if they may not change now."""
    if not isinstance(raft.state, Leader):
        raise KafkaError(ErrorCode.NOT_LEADER_OR_FOLLOWER, "this node does not lead the metadata quorum")
    if not raft.state.is_active:
        raise KafkaError(ErrorCode.REQUEST_TIMED_OUT, "the leader has not committed anything yet")
    if raft.voters.kraft_version < 1:
        raise KafkaError(
            ErrorCode.UNSUPPORTED_VERSION, f"voters cannot change while kraft.version is {raft.voters.kraft_version}"
        )
    if raft.voters.latest_offset >= raft.high_watermark:
        raise KafkaError(ErrorCode.REQUEST_TIMED_OUT, "the change of voters before this one is not committed yet")
    return raft.voters.latest


def require_addition(raft: RaftReplica, key: ReplicaKey) -> VoterSet:
    voters = require_change(raft)
    if voters.get(key.id) is not None:
        raise KafkaError(ErrorCode.DUPLICATE_VOTER, f"node {key.id} is a voter already")
    return voters


def add_voter(raft: RaftReplica, voter: Voter, now_ms: float) -> None:
    voters = require_addition(raft, voter.key)
    _require_version(raft, voter)
    assert isinstance(raft.state, Leader)
    if not raft.state.progress.is_caught_up(voter.key, now_ms):
        raise KafkaError(ErrorCode.REQUEST_TIMED_OUT, f"node {voter.key.id} does not fetch, or lags behind")
    raft.emit(AppendVoters(raft.epoch, voters.with_voter(voter)))


def remove_voter(raft: RaftReplica, key: ReplicaKey) -> None:
    voters = require_change(raft)
    voter = voters.get(key.id)
    if voter is None or voter.key != key:
        raise KafkaError(ErrorCode.VOTER_NOT_FOUND, f"node {key.id} with that directory is not a voter")
    if len(voters) == 1:
        raise KafkaError(ErrorCode.INVALID_REQUEST, "the last voter cannot be removed")
    raft.emit(AppendVoters(raft.epoch, voters.without(key)))


def update_voter(raft: RaftReplica, voter: Voter) -> None:
    voters = require_change(raft)
    present = voters.get(voter.key.id)
    if present is None or present.key != voter.key:
        raise KafkaError(ErrorCode.VOTER_NOT_FOUND, f"node {voter.key.id} with that directory is not a voter")
    _require_version(raft, voter)
    if not voter.endpoints:
        raise KafkaError(ErrorCode.INVALID_REQUEST, "a voter without an address")
    if voter != present:
        raft.emit(AppendVoters(raft.epoch, voters.with_voter(voter)))


def _require_version(raft: RaftReplica, voter: Voter) -> None:
    if not voter.version_min <= raft.voters.kraft_version <= voter.version_max:
        raise KafkaError(
            ErrorCode.INVALID_REQUEST,
            f"node {voter.key.id} speaks kraft.version {voter.version_min} to {voter.version_max}, "
            f"the quorum {raft.voters.kraft_version}",
        )
