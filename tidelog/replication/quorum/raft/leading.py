"""A leader of the metadata log: it announces itself, answers fetches, commits, and detects a lost majority. Pure.

Functions over `replica.py`'s RaftReplica in the state Leader. Invariant: the records in an answer to a fetch begin at
an offset where the leader's log and the replica's log are known to agree; and a change of the voters is on the leader's
device before another replica has it.
"""

from __future__ import annotations

from typing import Final

from tidelog.protocol.errors import ErrorCode
from tidelog.replication.answer_size import ARRIVING_BYTES
from tidelog.replication.quorum.raft.messages import BeginAsk, FetchAnswer, FetchAsk, Peer, SnapshotAsk, WakeFetches
from tidelog.replication.quorum.raft.replica import NEVER, RaftReplica
from tidelog.replication.quorum.raft.snapshot import SnapshotId
from tidelog.replication.quorum.raft.state import Leader, LogView
from tidelog.replication.quorum.raft.voters import ReplicaKey

CHECK_QUORUM_FACTOR: Final = 1.5  # of the fetch timeout: Kafka's CHECK_QUORUM_TIMEOUT_FACTOR
# For how many fetch timeouts a voter may receive one answer.
RECEIVES_TIMEOUTS_MAX: Final = 64
BOOTSTRAP_SNAPSHOT: Final = SnapshotId(0, 0)


def poll_leader(raft: RaftReplica, now_ms: float) -> bool:
    state = raft.state
    assert isinstance(state, Leader)
    if raft.is_voter and state.progress.on_own_log(raft.log.synced_offset):
        on_commit(raft)
    lost_at_ms = _majority_lost_at_ms(raft, state)
    if now_ms >= lost_at_ms:
        raft.resign(now_ms)
        return False
    raft.due(lost_at_ms)
    if now_ms >= _withholding_ends_ms(raft, state, now_ms):
        raft.resign(now_ms)
        return False
    has_left = not raft.voters.latest.includes(raft.own)
    if has_left and state.is_active and raft.voters.latest_offset < raft.high_watermark:
        raft.resign(now_ms)
        return False
    _make_known(raft, state, now_ms)
    return False


def _majority_lost_at_ms(raft: RaftReplica, state: Leader) -> float:
    lost_at_ms = state.progress.quorum_lost_at_ms(raft.settings.fetch_timeout_ms * CHECK_QUORUM_FACTOR)
    return NEVER if lost_at_ms is None else lost_at_ms


def _withholding_ends_ms(raft: RaftReplica, state: Leader, now_ms: float) -> float:
    """The time at which this leader gives up the lead, because its device has not synced the voters that it has
    written. Nothing is committed meanwhile. Kafka's leader answers no fetch while it waits for its device, so that its
    followers elect another one; here they hear from it.
    """
    if fetchable_end(raft) == raft.log.end_offset:
        if state.withheld_since_ms is not None:
            raft.emit(WakeFetches())
        state.withheld_since_ms = None
        return NEVER
    if state.withheld_since_ms is None:
        state.withheld_since_ms = now_ms
    *_, known = raft.voters.in_question(raft.high_watermark)
    timeout_ms = raft.settings.fetch_timeout_ms
    others = [state.progress.find(voter.key) for voter in known if not voter.key.matches(raft.own)]
    fetching = [each for each in others if each is not None and each.last_fetch_ms > now_ms - timeout_ms]
    if len(fetching) < known.majority:
        return NEVER  # the others cannot elect one of them, and this one has the longest log
    ends_ms = state.withheld_since_ms + timeout_ms * CHECK_QUORUM_FACTOR
    raft.due(ends_ms)
    return ends_ms


def has_lost_majority(raft: RaftReplica, now_ms: float) -> bool:
    """Whether this leader has had no contact with a majority for so long that it resigns at its next poll."""
    return isinstance(raft.state, Leader) and now_ms >= _majority_lost_at_ms(raft, raft.state)


def _make_known(raft: RaftReplica, state: Leader, now_ms: float) -> None:
    """Send BeginQuorumEpoch to every voter that does not fetch."""
    interval_ms = raft.settings.fetch_timeout_ms / 2
    endpoint = raft.own_endpoints[0][1] if raft.own_endpoints else None
    for replica in state.progress.voters:
        voter_id = replica.key.id
        peer = raft.peer(voter_id)
        if voter_id == raft.own.id or peer is None:
            continue
        not_before_ms = state.silent_until_ms.get(voter_id, 0.0)
        if replica.last_fetch_ms >= 0:
            not_before_ms = max(not_before_ms, replica.last_fetch_ms + interval_ms)
        if now_ms < not_before_ms:
            raft.due(not_before_ms)
        else:
            raft.send(peer, BeginAsk(raft.epoch, raft.own.id, replica.key, endpoint), now_ms)


def on_begin_answer(raft: RaftReplica, peer: Peer, key: ReplicaKey, error: int, now_ms: float) -> None:
    """A voter that still receives the answer to its last fetch follows this leader, though it fetches later."""
    state = raft.state
    if not isinstance(state, Leader):
        return
    state.silent_until_ms[peer.id] = now_ms + raft.settings.fetch_timeout_ms / 2
    replica = state.progress.find(key)
    if error == ErrorCode.NONE and replica is not None and now_ms < replica.receives_until_ms:
        state.progress.on_contact(key, now_ms)


def on_sending(raft: RaftReplica, key: ReplicaKey, size_bytes: int, now_ms: float) -> None:
    """The replica gets an answer with so many bytes of the log or of a snapshot."""
    replica = raft.state.progress.find(key) if isinstance(raft.state, Leader) else None
    if replica is not None:
        timeouts = min(size_bytes // ARRIVING_BYTES, RECEIVES_TIMEOUTS_MAX)
        replica.receives_until_ms = now_ms + timeouts * raft.settings.fetch_timeout_ms


def on_commit(raft: RaftReplica) -> None:
    """The high watermark has advanced."""
    assert isinstance(raft.state, Leader)
    raft.committed(raft.state.progress.high_watermark)
    raft.emit(WakeFetches())


def refusal(raft: RaftReplica, epoch: int) -> ErrorCode:
    """The error for a request that only the leader of `epoch` handles; NONE if this node is that leader."""
    if epoch < raft.epoch:
        return ErrorCode.FENCED_LEADER_EPOCH
    if epoch > raft.epoch:
        return ErrorCode.UNKNOWN_LEADER_EPOCH
    if not isinstance(raft.state, Leader):
        return ErrorCode.NOT_LEADER_OR_FOLLOWER
    return ErrorCode.NONE


def on_fetch(raft: RaftReplica, ask: FetchAsk, now_ms: float) -> FetchAnswer:
    answer = answer_fetch(raft, ask)
    state = raft.state
    if answer.error or not isinstance(state, Leader):
        return answer
    if answer.diverging is not None or answer.snapshot is not None:
        state.progress.on_contact(ask.replica, now_ms)
        return answer
    if state.progress.on_fetch(ask.replica, ask.end_offset, raft.log.end_offset, now_ms):
        on_commit(raft)
        return answer._replace(high_watermark=state.progress.high_watermark)
    return answer


def answer_fetch(raft: RaftReplica, ask: FetchAsk) -> FetchAnswer:
    """The present answer to a fetch, without the records. Changes no state."""
    error = refusal(raft, ask.epoch)
    state = raft.state
    if error != ErrorCode.NONE or not isinstance(state, Leader):
        return FetchAnswer(error, raft.epoch, raft.leader_id, raft.known_leader_endpoint())
    high_watermark = state.progress.high_watermark
    base = FetchAnswer(ErrorCode.NONE, raft.epoch, raft.leader_id, raft.known_leader_endpoint(), high_watermark)
    return check_position(raft.log, ask.end_offset, ask.last_epoch, base)


def check_position(log: LogView, offset: int, epoch: int, base: FetchAnswer) -> FetchAnswer:
    """Check whether a log that ends at `offset` in `epoch` is a prefix of this log. If it is not, the answer has the
    divergence to truncate to, or the snapshot to load.

    Follows Kafka's ReplicatedLog.validateOffsetAndEpoch: an empty log gets a snapshot if one exists.
    """
    if log.snapshots is not None:
        earliest, latest = log.snapshots
        if offset == 0 and latest != BOOTSTRAP_SNAPSHOT:
            return base._replace(snapshot=latest)
        if log.start_offset == 0 and offset == 0:
            return base
        if (
            offset < log.start_offset
            or (offset == log.start_offset and epoch != earliest.epoch)
            or epoch < earliest.epoch
        ):
            return base._replace(snapshot=latest)
    elif log.start_offset == 0 and offset == 0:
        return base
    end = log.end_of_epoch(epoch)
    if end.epoch != epoch or end.end_offset < offset:
        return base._replace(diverging=end)
    return base


def fetchable_end(raft: RaftReplica) -> int:
    """The end of what other replicas may fetch: the log's end, or before voters that this leader has not synced.

    If it lost them with its power, only the added voter would know that it may be elected. As Kafka's leader, which
    flushes its log before it answers a fetch.
    """
    synced_offset = raft.log.synced_offset
    return raft.log.end_offset if raft.voters.latest_offset < synced_offset else synced_offset


def is_worth_answering(raft: RaftReplica, ask: FetchAsk, answer: FetchAnswer) -> bool:
    """Whether to answer a fetch at once instead of parking it. The high watermark may be above what it can have yet."""
    return bool(
        answer.error
        or answer.diverging is not None
        or answer.snapshot is not None
        or fetchable_end(raft) > ask.end_offset
        or min(answer.high_watermark, ask.end_offset) > ask.high_watermark
    )


def on_fetch_snapshot(raft: RaftReplica, ask: SnapshotAsk, now_ms: float) -> ErrorCode:
    """The error for a fetch of a snapshot; NONE if the shell may answer with a part of it."""
    error = refusal(raft, ask.epoch)
    if error == ErrorCode.NONE and isinstance(raft.state, Leader):
        raft.state.progress.on_contact(ask.replica, now_ms)
    return error
