"""One replica of the metadata log: its epoch, its role, and the transitions between roles. Pure.

`candidacy.py`, `following.py` and `leading.py` implement a replica's behaviour in each role; `raft.py` calls them. The
replica emits effects, which the shell carries out. Invariants: the epoch never decreases; one vote in an epoch; one
leader in an epoch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, TypeAlias

from tidelog.replication.ports import Endpoint
from tidelog.replication.quorum.raft.commit import Progress
from tidelog.replication.quorum.raft.election import (
    Tally,
    election_timeout_ms,
)
from tidelog.replication.quorum.raft.messages import (
    AppendLeaderChange,
    Ask,
    BeginAsk,
    Effect,
    ElectionState,
    EndAsk,
    FetchAsk,
    OffsetAndEpoch,
    Peer,
    Persist,
    ReportHighWatermark,
    ReportLead,
    ReportLeader,
    ReportResign,
    Send,
    SnapshotAsk,
    VoteAsk,
    WakeFetches,
)
from tidelog.replication.quorum.raft.requests import Requests
from tidelog.replication.quorum.raft.settings import QuorumSettings
from tidelog.replication.quorum.raft.state import (
    TRANSITIONS,
    Candidate,
    Follower,
    Leader,
    LogView,
    Prospective,
    Resigned,
    Role,
    Unattached,
)
from tidelog.replication.quorum.raft.voters import ReplicaKey, VoterHistory, VoterSet

if TYPE_CHECKING:
    from random import Random

NEVER: Final = float("inf")
# An epoch is an int32 that only grows, and every voter keeps it on disk. Without these bounds one request with the
# largest epoch leaves no number for the next election, and the cluster has no controller ever again. An honest epoch
# counts elections, so it is far below the first bound; beyond it, epochs of other nodes may exceed ours by a few only.
EPOCH_FREE_MAX: Final = 2**30
EPOCH_STEP_MAX: Final = 10_000

RoleState: TypeAlias = "Unattached | Follower | Prospective | Candidate | Leader | Resigned"

ROLE_OF: Final[dict[type, Role]] = {
    Unattached: Role.UNATTACHED,
    Follower: Role.FOLLOWER,
    Prospective: Role.PROSPECTIVE,
    Candidate: Role.CANDIDATE,
    Leader: Role.LEADER,
    Resigned: Role.RESIGNED,
}
LANES: Final = {VoteAsk: "vote", BeginAsk: "begin", EndAsk: "end", FetchAsk: "fetch", SnapshotAsk: "fetch"}


class RaftReplica:
    """`own_endpoints`: (listener name, endpoint) at which other nodes reach this node."""

    def __init__(
        self,
        *,
        own: ReplicaKey,
        own_endpoints: Sequence[tuple[str, Endpoint]],
        can_vote: bool,
        settings: QuorumSettings,
        log: LogView,
        voters: VoterHistory,
        rng: Random,
    ) -> None:
        self.own = own
        self.own_endpoints = tuple(own_endpoints)
        self.can_vote = can_vote
        self.settings = settings
        self.log = log
        self.voters = voters
        self.rng = rng
        self.epoch = 0
        self.leader_id = -1
        self.leader_endpoint: Endpoint | None = None
        self.voted: ReplicaKey | None = None
        self.high_watermark = -1
        self.is_closing = False
        self.deposed_until_ms = 0.0
        """A leader that another candidate's epoch has ended lets the others elect one until this time: it has the
        longest log, but a majority has heard nothing from it.
        """
        self.lacks_records = False
        """Whether damage has removed acknowledged records: no candidacy until they are fetched again.

        Meanwhile the replica votes only for a candidate whose log reaches `acknowledged`, and for none if that is
        unknown. Otherwise it and a replica that never had those records could elect a leader without committed records.
        """
        self.vote_is_unknown = False
        """Whether the vote file is lost: no vote, and no candidacy, before `recover_vote`."""
        self._leader_is_filed = False
        """The leader is known from the vote file alone."""
        self.acknowledged: OffsetAndEpoch | None = None
        """The upper bound of its acknowledgements while `lacks_records`; None if unknown."""
        self.state: RoleState = Unattached(NEVER)
        self.requests = Requests(settings.retry_backoff_ms, settings.retry_backoff_max_ms)
        self._effects: list[Effect] = []
        self._persisted = ElectionState()
        self._reported: tuple[int, int] = (-1, -1)
        self._deadline_ms: float = NEVER
        self._entered_epoch = -1
        self._shunned: tuple[int, int, float] = (-1, -1, 0.0)

    # -- its state, and the nodes that it knows ------------------------------------------------------------------------

    @property
    def role(self) -> Role:
        return ROLE_OF[type(self.state)]

    @property
    def is_voter(self) -> bool:
        if self.lacks_records or self.vote_is_unknown:
            return False
        return self.can_vote and self.voters.may_run(self.own, self.high_watermark)

    @property
    def is_active_leader(self) -> bool:
        return isinstance(self.state, Leader) and self.state.is_active

    @property
    def deadline_ms(self) -> float:
        """The time at which the caller must call `poll` at the latest."""
        return self._deadline_ms

    def take_effects(self) -> list[Effect]:
        effects, self._effects = self._effects, []
        return effects

    def peer(self, voter_id: int) -> Peer | None:
        """Another voter or the leader with its address, or None if unknown.

        The configured address comes first, because this node may reach a voter by another address than the others.
        """
        configured = self.settings.voters.get(voter_id)
        if configured is not None:
            return Peer(voter_id, configured)
        if voter_id == self.leader_id and self.leader_endpoint is not None:
            return Peer(voter_id, self.leader_endpoint)
        voter = self.voters.latest.get(voter_id)
        return None if voter is None or voter.endpoint is None else Peer(voter_id, voter.endpoint)

    def leader_peer(self) -> Peer | None:
        return self.peer(self.leader_id) if self.leader_id >= 0 else None

    def is_beyond_elections(self, epoch: int) -> bool:
        """Whether a request states an epoch that no number of elections explains; it is refused.

        Answers come from nodes that this one has asked. A voter that was away learns from them how far the others are.
        """
        return epoch > max(self.epoch, EPOCH_FREE_MAX) + EPOCH_STEP_MAX

    # -- changes of role ---------------------------------------------------------------------------------------------

    def observe(self, epoch: int, leader_id: int, endpoint: Endpoint | None, now_ms: float) -> None:
        """A message states that `leader_id` leads in `epoch`; -1 for an unknown leader."""
        is_other = leader_id >= 0 and leader_id != self.own.id
        if (leader_id, epoch) == self._shunned[:2] and now_ms < self._shunned[2]:
            return
        if epoch > self.epoch:
            self.become_unattached(epoch, now_ms, quietly=is_other)
            if is_other:
                self.follow(leader_id, endpoint, now_ms)
        elif epoch == self.epoch and is_other:
            if self.leader_id < 0 or (self._leader_is_filed and self.leader_id != leader_id):
                if not isinstance(self.state, Leader | Resigned):
                    self.follow(leader_id, endpoint, now_ms)
            elif self.leader_id == leader_id and endpoint is not None:
                self.leader_endpoint = endpoint

    def lose_leader(self, now_ms: float) -> None:
        """For a replica that is no voter: the leader does not answer. For a short time, messages that still name it
        are ignored.
        """
        self._shunned = (self.leader_id, self.epoch, now_ms + 2 * self.settings.gone_delay_max_ms)
        self.become_unattached(self.epoch, now_ms)

    def resign(self, now_ms: float) -> None:
        """Give up the leadership and notify the other voters."""
        if not isinstance(self.state, Leader):
            return
        preferred = self.state.progress.successors()
        self._leave()
        unaware = {key.id for key in preferred}
        self.enter(Resigned(preferred, now_ms + election_timeout_ms(self.settings, self.rng), unaware))
        self.leader_id, self.leader_endpoint = -1, None
        self.report_leader()

    def become_unattached(self, epoch: int, now_ms: float, *, quietly: bool = False) -> None:
        """`quietly`: the caller is about to name the leader."""
        assert epoch >= self.epoch, (epoch, self.epoch)
        election_at_ms = now_ms + election_timeout_ms(self.settings, self.rng)
        if isinstance(self.state, Leader):
            self.deposed_until_ms = election_at_ms
        self._leave()
        if epoch > self.epoch:
            self.epoch, self.voted = epoch, None
        self.leader_id, self.leader_endpoint = -1, None
        self.enter(Unattached(election_at_ms))
        if not quietly:
            self.persist()
            self.report_leader()

    def follow(self, leader_id: int, endpoint: Endpoint | None, now_ms: float) -> None:
        self._leave()
        self._leader_is_filed = False
        self.leader_id, self.leader_endpoint = leader_id, endpoint
        self.enter(Follower(now_ms + self.settings.fetch_timeout_ms))
        self.persist()
        self.report_leader()

    def follow_again(self, attempt: Prospective, now_ms: float) -> None:
        """The leader answers: end the attempt. Grants of other voters still count until a fetch succeeds."""
        self.follow(self.leader_id, self.leader_endpoint, now_ms)
        assert isinstance(self.state, Follower)
        self.state.pre_votes = attempt.tally

    def become_prospective(self, now_ms: float, retries: int = 0) -> Prospective:
        timeout_ms = election_timeout_ms(self.settings, self.rng)
        state = Prospective(Tally(self.voters.latest, self.own), now_ms + timeout_ms, retries)
        self.enter(state)
        return state

    def become_candidate(self, now_ms: float, retries: int) -> None:
        self._leave()
        self.epoch += 1
        self.voted = self.own
        self.leader_id, self.leader_endpoint = -1, None
        tally = Tally(self.voters.latest, self.own)
        self.enter(Candidate(tally, now_ms + election_timeout_ms(self.settings, self.rng), retries))
        self.persist()
        self.report_leader()

    def become_leader(self, granting: tuple[ReplicaKey, ...], now_ms: float) -> None:
        start = self.log.end_offset
        voters = self.voters.latest
        self.leader_id, self.leader_endpoint = self.own.id, None
        self.enter(Leader(Progress(self.own, voters, start, now_ms), start, granting=granting))
        self.persist()
        self.report_leader()
        self.emit(AppendLeaderChange(self.epoch, voters, granting, self._voters_to_write(voters)))

    def _voters_to_write(self, voters: VoterSet) -> VoterSet | None:
        """The voters to write with the leader change, or None. They are written at kraft.version 1, if only a snapshot
        names them or this node's addresses have changed.
        """
        own = voters.get(self.own.id)
        if self.voters.kraft_version < 1 or own is None or not self.own_endpoints:
            return None
        if self.voters.latest_offset >= 0 and own.endpoints == self.own_endpoints:
            return None
        return voters.with_voter(own._replace(endpoints=self.own_endpoints))

    def enter(self, state: RoleState) -> None:
        role = ROLE_OF[type(state)]
        assert self.epoch > self._entered_epoch or role in TRANSITIONS[self.role], f"{self.role} becomes {role}"
        self._entered_epoch = self.epoch
        self.state = state
        self.requests.reset()

    def _leave(self) -> None:
        """Leave the present role."""
        if isinstance(self.state, Leader):
            if self.state.is_active:
                self.emit(ReportResign(self.epoch))
            self.emit(WakeFetches())

    def persist(self) -> None:
        if self.vote_is_unknown:
            return  # a file without the vote would look whole
        state = ElectionState(self.epoch, self.leader_id, self.voted)
        if state != self._persisted:
            self._persisted = state
            self.emit(Persist(state))

    def report_leader(self) -> None:
        if self._reported != (self.leader_id, self.epoch):
            self._reported = (self.leader_id, self.epoch)
            self.emit(ReportLeader(self.leader_id, self.epoch))

    # -- effects --------------------------------------------------------------------------

    def emit(self, effect: Effect) -> None:
        self._effects.append(effect)

    def due(self, at_ms: float) -> None:
        """Require a `poll` at this time."""
        self._deadline_ms = min(self._deadline_ms, at_ms)

    def send(self, peer: Peer, ask: Ask, now_ms: float) -> bool:
        """Send the request, unless one is open in its lane or the lane pauses after a failure. Returns whether it is
        sent.
        """
        lane = lane_of(ask)
        if not self.requests.is_ready(peer.id, lane, now_ms):
            ready_at_ms = self.requests.ready_at_ms(peer.id, lane)
            if ready_at_ms is not None:
                self.due(ready_at_ms)
            return False
        self.emit(Send(self.requests.begin(peer.id, lane), peer, ask))
        return True

    def known_leader_endpoint(self) -> Endpoint | None:
        """The leader's address for responses to other nodes; this node's own address while it leads."""
        if self.leader_id == self.own.id:
            return self.own_endpoints[0][1] if self.own_endpoints else None
        peer = self.leader_peer()
        return peer.endpoint if peer is not None else None

    def committed(self, high_watermark: int) -> None:
        """Report an advanced high watermark, and the lead once this epoch's first record is below it."""
        if high_watermark > self.high_watermark:
            self.high_watermark = high_watermark
            self.emit(ReportHighWatermark(high_watermark))
        if isinstance(self.state, Leader) and not self.state.is_active:
            self.state.is_active = True
            self.emit(ReportLead(self.epoch))


def lane_of(ask: Ask) -> str:
    return LANES.get(type(ask), "update")
