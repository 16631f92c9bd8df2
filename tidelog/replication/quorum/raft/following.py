"""A replica that does not lead: it finds the leader, fetches from it, truncates, and loads its snapshots. Pure.

Functions over `replica.py`'s RaftReplica. Invariants: a replica that may vote fetches only when its whole log is
synced, so that its reported offset never decreases; no record below the high watermark is truncated.
"""

from __future__ import annotations

from tidelog.protocol.errors import ErrorCode
from tidelog.replication.quorum.raft.messages import (
    AppendRecords,
    CommittedRecordsMissing,
    FetchAnswer,
    FetchAsk,
    KeepSnapshotPart,
    OffsetAndEpoch,
    Peer,
    Recovered,
    ReportHighWatermark,
    SnapshotAnswer,
    SnapshotAsk,
    Truncate,
    UpdateVoterAsk,
)
from tidelog.replication.quorum.raft.replica import RaftReplica
from tidelog.replication.quorum.raft.snapshot import SnapshotId
from tidelog.replication.quorum.raft.state import Download, Follower, Unattached


def poll_follower(raft: RaftReplica, now_ms: float) -> bool:
    state = raft.state
    assert isinstance(state, Follower)
    if state.download is not None and state.download.is_installing:
        state.give_up_at_ms = max(state.give_up_at_ms, now_ms + raft.settings.fetch_timeout_ms)
    high_watermark = min(state.leader_high_watermark, raft.log.end_offset)
    if high_watermark > raft.high_watermark:
        raft.committed(high_watermark)
    if raft.lacks_records:
        _recover(raft, state)
    if now_ms >= state.give_up_at_ms:
        if raft.is_voter:
            raft.become_prospective(now_ms)
        else:
            raft.lose_leader(now_ms)
        return True
    raft.due(state.give_up_at_ms)
    peer = raft.leader_peer()
    if peer is None or state.is_gone:
        return False
    if state.download is not None:
        if not state.download.is_installing:
            ask = SnapshotAsk(raft.own, raft.epoch, state.download.snapshot, state.download.position)
            raft.send(peer, ask, now_ms)
    elif not raft.can_vote or raft.log.synced_offset >= raft.log.end_offset:
        raft.send(peer, _fetch(raft), now_ms)
    _tell_own_endpoints(raft, state, peer, now_ms)
    return False


def _recover(raft: RaftReplica, state: Follower) -> None:
    """End `lacks_records` when the log has all committed records again; a possible voter must have synced them."""
    end_offset = raft.log.end_offset
    if raft.can_vote:
        end_offset = min(end_offset, raft.log.synced_offset)
    # A leader's high watermark lies in its own epoch or is unknown, so all earlier committed records lie below it.
    if max(state.leader_high_watermark, raft.high_watermark) <= end_offset and state.leader_high_watermark >= 0:
        raft.lacks_records = False
        raft.emit(Recovered())
        if raft.high_watermark >= 0:  # records may have been truncated before the listener had read them
            raft.emit(ReportHighWatermark(raft.high_watermark))


def _fetch(raft: RaftReplica) -> FetchAsk:
    return FetchAsk(
        raft.own,
        raft.epoch,
        raft.log.end_offset,
        raft.log.last_epoch,
        raft.high_watermark,
        raft.settings.fetch_wait_ms,
    )


def find_leader(raft: RaftReplica, now_ms: float) -> None:
    """For a replica that is no voter: query the voters and the bootstrap servers in turn for the leader."""
    known = [raft.peer(voter_id) for voter_id in raft.voters.latest.ids if voter_id != raft.own.id]
    peers = [peer for peer in known if peer is not None]
    peers += [Peer(-2 - index, endpoint) for index, endpoint in enumerate(raft.settings.bootstrap_servers)]
    if not peers or (raft.can_vote and raft.log.synced_offset < raft.log.end_offset):
        return
    first = raft.rng.randrange(len(peers))
    for peer in peers[first:] + peers[:first]:
        if raft.send(peer, _fetch(raft)._replace(max_wait_ms=0), now_ms):
            # Query the others soon after, because a peer that hangs must not delay the search.
            for other in peers:
                if other != peer and raft.requests.is_ready(other.id, "fetch", now_ms):
                    raft.requests.rest(other.id, "fetch", now_ms + raft.settings.pre_vote_retry_ms)
                    raft.due(now_ms + raft.settings.pre_vote_retry_ms)
            return


def leader_is_gone(raft: RaftReplica, run_at_ms: float) -> None:
    """The leader has resigned, or its port refuses connections. A voter runs for the lead at `run_at_ms`; other
    replicas then search for the next leader.
    """
    state = raft.state
    assert isinstance(state, Follower)
    state.is_gone = True
    state.give_up_at_ms = min(state.give_up_at_ms, run_at_ms)


def on_fetch_failure(raft: RaftReplica, peer: Peer, failures: int, refused: bool, now_ms: float) -> None:
    state = raft.state
    if isinstance(state, Unattached):
        raft.requests.rest(peer.id, "fetch", now_ms + min(failures, 5) * raft.settings.pre_vote_retry_ms)
    elif isinstance(state, Follower) and peer.id == raft.leader_id and not state.is_gone:
        if refused:
            delay_ms = raft.rng.random() * raft.settings.gone_delay_max_ms if raft.is_voter else 0.0
            leader_is_gone(raft, now_ms + delay_ms)
        elif not raft.is_voter and failures > 1:
            leader_is_gone(raft, now_ms)


def on_arriving(raft: RaftReplica, peer: Peer, now_ms: float) -> None:
    """A large answer goes on arriving over a slow link."""
    state = raft.state
    if isinstance(state, Follower) and peer.id == raft.leader_id and not state.is_gone:
        state.has_fetched = True
        state.give_up_at_ms = now_ms + raft.settings.fetch_timeout_ms


def on_fetch_answer(raft: RaftReplica, peer: Peer, ask: FetchAsk, answer: FetchAnswer, now_ms: float) -> None:
    state = raft.state
    if not isinstance(state, Follower):
        raft.requests.rest(peer.id, "fetch", now_ms + raft.settings.pre_vote_retry_ms)
        return
    if answer.error != ErrorCode.NONE:
        _on_refusal(raft, peer, answer.error, answer.leader_id, now_ms)
        return
    if (ask.end_offset, ask.last_epoch) != (raft.log.end_offset, raft.log.last_epoch) or state.download is not None:
        return
    state.has_fetched = True
    if not state.is_gone:  # otherwise the leader has resigned after this answer
        state.give_up_at_ms = now_ms + raft.settings.fetch_timeout_ms
    if answer.diverging is not None:
        state.leader_high_watermark = -1
        end_offset = truncation_point(raft, answer.diverging)
        _check_committed(raft, peer, end_offset)
        raft.emit(Truncate(end_offset))
    elif answer.snapshot is not None:
        _check_committed(raft, peer, answer.snapshot.end_offset)
        state.download = Download(answer.snapshot)
    else:
        if len(answer.records):
            raft.emit(AppendRecords(answer.records))
        state.leader_high_watermark = answer.high_watermark


def _check_committed(raft: RaftReplica, leader: Peer, end_offset: int) -> None:
    """Raises CommittedRecordsMissing if the log is to end there, or to begin anew, and loses committed records."""
    is_cut_by_damage = raft.lacks_records and raft.log.end_offset < raft.high_watermark
    if end_offset < raft.high_watermark and not is_cut_by_damage:
        raise _missing_at(leader, raft.epoch, end_offset, raft.high_watermark)


def _missing_at(leader: Peer, epoch: int, end_offset: int, high_watermark: int) -> CommittedRecordsMissing:
    return CommittedRecordsMissing(
        f"the controller at {leader.endpoint}, which leads in epoch {epoch}, lacks metadata records that are "
        f"committed here (offsets {end_offset} to {high_watermark - 1}): it is of another quorum, or its directory "
        "is an old copy. Nothing was cut here. Stop it before this node starts again: a node that starts follows the "
        "leader of the highest epoch, and sets aside the logs of topics that it does not know"
    )


def on_append_failed(raft: RaftReplica, now_ms: float) -> None:
    """The fetched records could not be appended: fetch them again after a pause."""
    if isinstance(raft.state, Follower):
        raft.requests.rest(raft.leader_id, "fetch", now_ms + raft.settings.retry_backoff_max_ms)


def truncation_point(raft: RaftReplica, diverging: OffsetAndEpoch) -> int:
    """The last offset at which both logs can still agree (Kafka's ReplicatedLog.truncateToEndOffset)."""
    own = raft.log.end_of_epoch(diverging.epoch)
    if own.epoch == diverging.epoch:
        return min(own.end_offset, diverging.end_offset)
    return own.end_offset


def _on_refusal(raft: RaftReplica, peer: Peer, error: int, leader_id: int, now_ms: float) -> None:
    state = raft.state
    assert isinstance(state, Follower)
    raft.requests.rest(peer.id, "fetch", now_ms + raft.settings.pre_vote_retry_ms)
    if error == ErrorCode.NOT_LEADER_OR_FOLLOWER and peer.id == raft.leader_id and leader_id < 0:
        # The leader has restarted or resigned.
        leader_is_gone(raft, now_ms + raft.rng.random() * raft.settings.gone_delay_max_ms)


# -- snapshots ---------------------------------------------------------------------------------------------------------


def on_snapshot_answer(raft: RaftReplica, peer: Peer, ask: SnapshotAsk, answer: SnapshotAnswer, now_ms: float) -> None:
    state = raft.state
    if not isinstance(state, Follower) or state.download is None:
        return
    download = state.download
    if answer.error != ErrorCode.NONE:
        state.download = None  # the next fetch gets another snapshot to load
        _on_refusal(raft, peer, answer.error, answer.leader_id, now_ms)
        return
    if ask.snapshot != download.snapshot or answer.position != download.position or download.is_installing:
        return
    state.give_up_at_ms = now_ms + raft.settings.fetch_timeout_ms
    download.position += len(answer.data)
    is_last = download.position >= answer.size_bytes
    if not len(answer.data) and not is_last:
        raft.requests.rest(peer.id, "fetch", now_ms + raft.settings.pre_vote_retry_ms)
        return
    download.is_installing = is_last
    raft.emit(KeepSnapshotPart(download.snapshot, answer.position, answer.data, is_last))


def on_snapshot_installed(raft: RaftReplica, snapshot: SnapshotId, now_ms: float) -> None:
    """The log now starts at the snapshot's end, and all of the snapshot is committed."""
    raft.high_watermark = max(raft.high_watermark, snapshot.end_offset)
    _end_download(raft, snapshot, now_ms)


def on_snapshot_failed(raft: RaftReplica, snapshot: SnapshotId, now_ms: float) -> None:
    """The snapshot could not be stored or is damaged: fetch it again."""
    _end_download(raft, snapshot, now_ms)
    if isinstance(raft.state, Follower):
        raft.requests.rest(raft.leader_id, "fetch", now_ms + raft.settings.retry_backoff_max_ms)


def _end_download(raft: RaftReplica, snapshot: SnapshotId, now_ms: float) -> None:
    state = raft.state
    if isinstance(state, Follower):
        state.give_up_at_ms = now_ms + raft.settings.fetch_timeout_ms
        if state.download is not None and state.download.snapshot == snapshot:
            state.download = None


# -- own addresses (KIP-853) -------------------------------------------------------------------------------------------


def _tell_own_endpoints(raft: RaftReplica, state: Follower, peer: Peer, now_ms: float) -> None:
    own = raft.voters.latest.get(raft.own.id)
    if raft.voters.kraft_version < 1 or not raft.is_voter or own is None:
        return
    # A leader of another kind may list them in another order.
    if raft.own_endpoints and set(own.endpoints) != set(raft.own_endpoints) and state.has_fetched:
        raft.send(peer, UpdateVoterAsk(raft.epoch, raft.own), now_ms)


def on_update_answer(raft: RaftReplica, peer: Peer, now_ms: float) -> None:
    """The record arrives by a fetch. Until then, and while updates are refused, the next one waits."""
    raft.requests.rest(peer.id, "update", now_ms + raft.settings.fetch_timeout_ms)
