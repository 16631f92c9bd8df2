"""Candidacy and votes, by Raft with pre-vote (KIP-996). Pure.

Functions over `replica.py`'s RaftReplica for the roles without a live leader. A pre-vote promises
nothing and may be requested again; a vote is given once in an epoch.
"""

from __future__ import annotations

from tidelog.replication.quorum.raft import following
from tidelog.replication.quorum.raft.election import Tally, election_timeout_ms, is_up_to_date, may_vote, retry_delay_ms
from tidelog.replication.quorum.raft.messages import EndAsk, OffsetAndEpoch, Peer, VoteAnswer, VoteAsk
from tidelog.replication.quorum.raft.replica import RaftReplica
from tidelog.replication.quorum.raft.state import Candidate, Follower, Leader, Prospective, Resigned, Unattached


def may_grant(raft: RaftReplica, ask: VoteAsk) -> bool:
    if raft.vote_is_unknown:
        return False
    own = OffsetAndEpoch(raft.log.last_epoch, raft.log.end_offset)
    if raft.lacks_records:
        if raft.acknowledged is None:
            return False
        own = max(own, raft.acknowledged)
    up_to_date = is_up_to_date(ask.last_epoch, ask.end_offset, own.epoch, own.end_offset)
    state = raft.state
    if ask.pre_vote:
        if isinstance(state, Follower):
            return up_to_date and (not state.has_fetched or state.is_gone)
        return up_to_date and not isinstance(state, Leader)
    if isinstance(state, Unattached | Prospective):
        return may_vote(ask.candidate, raft.voted, raft.leader_id, up_to_date)
    return False


def after_vote(raft: RaftReplica, ask: VoteAsk, granted: bool, now_ms: float) -> None:
    state = raft.state
    if ask.pre_vote:
        if granted and isinstance(state, Prospective):
            theirs = (ask.last_epoch, ask.end_offset, ask.candidate.id)
            if theirs > (raft.log.last_epoch, raft.log.end_offset, raft.own.id):
                state.defer_until_ms = now_ms + raft.settings.gone_delay_max_ms
    elif granted:
        raft.voted = ask.candidate
        raft.enter(Unattached(now_ms + election_timeout_ms(raft.settings, raft.rng)))
        raft.persist()
    elif isinstance(state, Unattached) and raft.voted is None and raft.leader_id < 0:
        # The candidate does not get this vote, so run soon instead of waiting a whole election timeout.
        soon_ms = now_ms + raft.rng.random() * 2 * raft.settings.gone_delay_max_ms
        state.election_at_ms = min(state.election_at_ms, max(soon_ms, raft.deposed_until_ms))


def on_vote_answer(raft: RaftReplica, peer: Peer, ask: VoteAsk, answer: VoteAnswer, now_ms: float) -> None:
    state = raft.state
    if ask.epoch != raft.epoch or not isinstance(state, Prospective | Candidate):
        return
    if ask.pre_vote != isinstance(state, Prospective):
        return
    if answer.granted:
        state.tally.record(peer.id, granted=True)
    elif isinstance(state, Candidate):
        state.tally.record(peer.id, granted=False)
        if state.tally.is_lost and state.lost_until_ms is None:
            state.lost_until_ms = now_ms + retry_delay_ms(raft.settings, state.retries, raft.rng)
    elif peer.id == raft.leader_id == answer.leader_id:
        raft.follow_again(state, now_ms)  # the refusal shows that the leader lives
    else:
        # A refused pre-vote is not final: the peer may not have noticed yet that the leader is gone.
        raft.requests.rest(peer.id, "vote", now_ms + raft.settings.pre_vote_retry_ms)


def on_late_vote_answer(raft: RaftReplica, peer: Peer, ask: VoteAsk, answer: VoteAnswer, now_ms: float) -> None:
    """Count a pre-vote that is granted after the leader's refusal has ended the attempt.

    The refusal arrives first if the leader is nearer than the other voters. If its answers to fetches are lost, only
    the grants of the other voters can replace it. They count until a fetch succeeds.
    """
    state = raft.state
    if not isinstance(state, Follower) or state.pre_votes is None or state.has_fetched:
        return
    if ask.pre_vote and ask.epoch == raft.epoch and answer.granted:
        state.pre_votes.record(peer.id, granted=True)
        if state.pre_votes.is_won and raft.is_voter:
            raft.become_prospective(now_ms).tally = state.pre_votes


def _ask_for_votes(raft: RaftReplica, tally: Tally, pre_vote: bool, now_ms: float) -> None:
    for voter_id in tally.open():
        voter, peer = tally.voters.get(voter_id), raft.peer(voter_id)
        if voter is None or peer is None or voter_id == raft.own.id:
            continue
        ask = VoteAsk(raft.epoch, raft.own, voter.key, raft.log.last_epoch, raft.log.end_offset, pre_vote)
        raft.send(peer, ask, now_ms)


def poll_unattached(raft: RaftReplica, now_ms: float) -> bool:
    assert isinstance(raft.state, Unattached)
    if not raft.is_voter:
        following.find_leader(raft, now_ms)
    elif now_ms >= raft.state.election_at_ms:
        raft.become_prospective(now_ms)
        return poll_prospective(raft, now_ms)
    else:
        raft.due(raft.state.election_at_ms)
    return False


def poll_prospective(raft: RaftReplica, now_ms: float) -> bool:
    state = raft.state
    assert isinstance(state, Prospective)
    if state.tally.is_won:
        if now_ms >= state.defer_until_ms:
            raft.become_candidate(now_ms, state.retries)
            return poll_candidate(raft, now_ms)
        raft.due(state.defer_until_ms)
    if now_ms >= state.give_up_at_ms:
        if raft.leader_id >= 0:
            raft.follow(raft.leader_id, raft.leader_endpoint, now_ms)
            return following.poll_follower(raft, now_ms)
        state = raft.become_prospective(now_ms, state.retries)
    _ask_for_votes(raft, state.tally, True, now_ms)
    raft.due(state.give_up_at_ms)
    return False


def poll_candidate(raft: RaftReplica, now_ms: float) -> bool:
    state = raft.state
    assert isinstance(state, Candidate)
    if state.tally.is_won:
        raft.become_leader(state.tally.granting(), now_ms)
    elif now_ms >= (state.give_up_at_ms if state.lost_until_ms is None else state.lost_until_ms):
        raft.become_prospective(now_ms, state.retries + 1)
        return poll_prospective(raft, now_ms)
    else:
        _ask_for_votes(raft, state.tally, False, now_ms)
        raft.due(state.give_up_at_ms if state.lost_until_ms is None else state.lost_until_ms)
    return False


def poll_resigned(raft: RaftReplica, now_ms: float) -> bool:
    state = raft.state
    assert isinstance(state, Resigned)
    endpoint = raft.own_endpoints[0][1] if raft.own_endpoints else None
    for voter_id in sorted(state.unaware):
        peer = raft.peer(voter_id)
        if peer is not None:
            raft.send(peer, EndAsk(raft.epoch, raft.own.id, state.preferred, endpoint), now_ms)
    if now_ms < state.until_ms:
        raft.due(state.until_ms)
    elif not raft.is_closing:
        raft.enter(Unattached(now_ms))
    return False
