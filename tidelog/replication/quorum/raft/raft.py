"""The inputs of one replica of the metadata log, by KRaft's variant of Raft: messages and the time. Pure.

Each input goes to the module that handles it: `replica.py` for epoch and role, `candidacy.py` for elections,
`leading.py` for a leader, `following.py` for a follower, `reconfiguration.py` for changes of the voters. After every
input the caller carries out `take_effects()` in order, then calls `poll`, until there are no more effects.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from tidelog.protocol.errors import ErrorCode
from tidelog.replication.quorum.raft import candidacy, following, leading
from tidelog.replication.quorum.raft.election import (
    successor_delay_ms,
)
from tidelog.replication.quorum.raft.messages import (
    Answer,
    BeginAnswer,
    BeginAsk,
    ElectionState,
    EndAnswer,
    EndAsk,
    FetchAnswer,
    FetchAsk,
    OffsetAndEpoch,
    ReportHighWatermark,
    Send,
    SnapshotAnswer,
    SnapshotAsk,
    VoteAnswer,
    VoteAsk,
)
from tidelog.replication.quorum.raft.replica import NEVER, RaftReplica, lane_of
from tidelog.replication.quorum.raft.state import (
    Candidate,
    Follower,
    Leader,
    Prospective,
    Resigned,
    Unattached,
)

if TYPE_CHECKING:
    pass


class Raft(RaftReplica):
    """The inputs of a replica."""

    # -- inputs ------------------------------------------------------------------------------------------------------

    def start(self, election: ElectionState, now_ms: float) -> None:
        """`election`: the content of `quorum-state`. An only voter leads at once."""
        self.epoch = max(election.epoch, self.log.last_epoch)
        self._persisted = election
        leader_id = -1
        if election.epoch == self.epoch:
            self.voted, leader_id = election.voted, election.leader_id
        if leader_id == self.own.id:
            leader_id, self.voted = -1, self.voted or self.own
        if self.is_voter and self.voters.latest.is_only(self.own):
            self.become_candidate(now_ms, 0)
        elif leader_id >= 0 and self.voters.latest.get(leader_id) is not None:
            self.follow(leader_id, None, now_ms)
            self._leader_is_filed = True
        else:
            self.state = Unattached(now_ms + self.rng.random() * self.settings.start_delay_max_ms)

    def poll(self, now_ms: float) -> None:
        """Act on the time and on changes since the last poll."""
        self._deadline_ms = NEVER
        is_called = not self.is_closing or isinstance(self.state, Leader | Resigned)
        if is_called and _POLLS[type(self.state)](self, now_ms):
            self.poll(now_ms)

    def on_vote(self, ask: VoteAsk, now_ms: float) -> VoteAnswer:
        error = ErrorCode.NONE
        granted = False
        if (
            ask.end_offset < 0
            or not 0 <= ask.last_epoch <= ask.epoch
            or (not ask.pre_vote and ask.last_epoch == ask.epoch)
            or self.is_beyond_elections(ask.epoch)
        ):
            error = ErrorCode.INVALID_REQUEST
        elif ask.epoch < self.epoch:
            error = ErrorCode.FENCED_LEADER_EPOCH
        else:
            if ask.epoch > self.epoch:
                self.become_unattached(ask.epoch, now_ms)
            if ask.voter.id >= 0 and not ask.voter.matches(self.own):
                error = ErrorCode.INVALID_VOTER_KEY
            else:
                granted = candidacy.may_grant(self, ask)
                candidacy.after_vote(self, ask, granted, now_ms)
        return VoteAnswer(error, self.epoch, self.leader_id, self.known_leader_endpoint(), granted)

    def on_begin(self, ask: BeginAsk, now_ms: float) -> BeginAnswer:
        error = ErrorCode.NONE
        if self.is_beyond_elections(ask.epoch):
            error = ErrorCode.INVALID_REQUEST
        elif ask.epoch < self.epoch:
            error = ErrorCode.FENCED_LEADER_EPOCH
        else:
            self.observe(ask.epoch, ask.leader_id, ask.endpoint, now_ms)
            if isinstance(self.state, Prospective) and self.leader_id == ask.leader_id:
                self.follow_again(self.state, now_ms)
            if ask.voter.id >= 0 and not ask.voter.matches(self.own):
                error = ErrorCode.INVALID_VOTER_KEY
        return BeginAnswer(error, self.epoch, self.leader_id, self.known_leader_endpoint())

    def on_end(self, ask: EndAsk, now_ms: float) -> EndAnswer:
        error = ErrorCode.NONE
        if self.is_beyond_elections(ask.epoch):
            error = ErrorCode.INVALID_REQUEST
        elif ask.epoch < self.epoch:
            error = ErrorCode.FENCED_LEADER_EPOCH
        else:
            self.observe(ask.epoch, ask.leader_id, ask.endpoint, now_ms)
            if isinstance(self.state, Follower) and self.leader_id == ask.leader_id:
                place = [key.matches(self.own) for key in ask.preferred]
                position = place.index(True) if True in place else len(place)
                following.leader_is_gone(self, now_ms + successor_delay_ms(self.settings, position, self.rng))
        return EndAnswer(error, self.epoch, self.leader_id, self.known_leader_endpoint())

    def on_fetch(self, ask: FetchAsk, now_ms: float) -> FetchAnswer:
        """The answer without records. If it has no error, divergence or snapshot, the shell reads records from
        `ask.end_offset` on.
        """
        return leading.on_fetch(self, ask, now_ms)

    def on_answer(self, send: Send, answer: Answer, now_ms: float) -> None:
        ask, peer = send.ask, send.peer
        is_current = self.requests.done(peer.id, lane_of(ask), send.number)
        before = self.state
        if answer.epoch >= 0 and answer.error != ErrorCode.INCONSISTENT_CLUSTER_ID:
            self.observe(answer.epoch, answer.leader_id, answer.leader, now_ms)
        if answer.epoch < self.epoch or not is_current:
            if is_current:
                self.requests.rest(peer.id, lane_of(ask), now_ms + self.settings.pre_vote_retry_ms)
            elif isinstance(ask, VoteAsk) and isinstance(answer, VoteAnswer):
                candidacy.on_late_vote_answer(self, peer, ask, answer, now_ms)
            return
        if isinstance(ask, VoteAsk) and isinstance(answer, VoteAnswer):
            if self.state is before:
                candidacy.on_vote_answer(self, peer, ask, answer, now_ms)
        elif isinstance(ask, BeginAsk):
            leading.on_begin_answer(self, peer, ask.voter, answer.error, now_ms)
        elif isinstance(ask, EndAsk):
            if isinstance(self.state, Resigned):
                self.state.unaware.discard(peer.id)
        elif isinstance(ask, FetchAsk) and isinstance(answer, FetchAnswer):
            following.on_fetch_answer(self, peer, ask, answer, now_ms)
        elif isinstance(ask, SnapshotAsk) and isinstance(answer, SnapshotAnswer):
            following.on_snapshot_answer(self, peer, ask, answer, now_ms)
        else:
            following.on_update_answer(self, peer, now_ms)

    def on_arriving(self, send: Send, now_ms: float) -> None:
        """More of the answer to a large fetch has come: the leader lives."""
        if self.requests.is_open(send.peer.id, lane_of(send.ask), send.number):
            following.on_arriving(self, send.peer, now_ms)

    def on_failure(self, send: Send, refused: bool, now_ms: float) -> None:
        """The request has got no answer. `refused`: the peer's port refused the connection."""
        failures = self.requests.failed(send.peer.id, lane_of(send.ask), send.number, now_ms)
        if not failures:
            return
        if isinstance(send.ask, FetchAsk | SnapshotAsk):
            following.on_fetch_failure(self, send.peer, failures, refused, now_ms)
        elif isinstance(send.ask, VoteAsk):
            # Elections cannot wait for the long backoffs of other requests.
            until_ms = now_ms + min(failures * self.settings.retry_backoff_ms, 2 * self.settings.gone_delay_max_ms)
            self.requests.rest(send.peer.id, lane_of(send.ask), until_ms)

    def on_voters_changed(self, now_ms: float) -> None:
        """The voters in the log have changed."""
        if isinstance(self.state, Leader):
            self.state.progress.set_voters(self.voters.latest, now_ms)

    def recover_vote(self, epoch: int, now_ms: float) -> None:
        """This voter may vote again in epochs above `epoch`, which is the highest of all other voters."""
        self.vote_is_unknown = False
        if epoch > self.epoch:
            self.become_unattached(epoch, now_ms, quietly=True)
        if self.voted is None:
            self.voted = self.own  # it may have voted in this epoch
        self.persist()
        self.report_leader()

    def lose_records(self, acknowledged: OffsetAndEpoch | None, now_ms: float) -> None:
        """The shell has truncated the log at damage, possibly below the acknowledged end."""
        self.lacks_records, self.acknowledged = True, acknowledged
        if isinstance(self.state, Leader):
            self.resign(now_ms)
        elif isinstance(self.state, Follower):
            self.follow(self.leader_id, self.leader_endpoint, now_ms)  # drops the open requests, so old answers too
        elif isinstance(self.state, Prospective | Candidate):
            self.become_prospective(now_ms)
            self.become_unattached(self.epoch, now_ms)

    def regain_records(self) -> None:
        """The log has again all that this voter had acknowledged."""
        self.lacks_records = False
        if self.high_watermark >= 0:  # records may have been truncated before the listener had read them
            self.emit(ReportHighWatermark(self.high_watermark))


# Each function acts on the time. It returns whether the role has changed, so that the new role is polled at once.
_POLLS: Final[dict[type, Callable[[RaftReplica, float], bool]]] = {
    Unattached: candidacy.poll_unattached,
    Follower: following.poll_follower,
    Prospective: candidacy.poll_prospective,
    Candidate: candidacy.poll_candidate,
    Leader: leading.poll_leader,
    Resigned: candidacy.poll_resigned,
}
