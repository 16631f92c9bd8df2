"""The answers that a voter needs before it votes again after the loss of its vote file. Pure.

Its vote went to a candidate that had its epoch on the device, and an election is won by a majority of the voters that
the winner's log names. So this voter has given no vote that matters in a later epoch than all other voters have. Its
own log may name too few of them. So each answer names the voters of the other's log, too, with the position of the
record that names them. They count unless this voter's log has that record: then it names them itself, or later ones.
Invariant: a member of each set of voters knows the set that follows, because the leader that writes it has synced it
before others fetch it (`leading.fetchable_end`). So the answers lead to the latest one.
"""

from __future__ import annotations

from tidelog.protocol.errors import ErrorCode
from tidelog.replication.ports import Endpoint
from tidelog.replication.quorum.raft.messages import FetchAnswer, Peer
from tidelog.replication.quorum.raft.replica import RaftReplica
from tidelog.replication.quorum.raft.state import Follower


def answer(raft: RaftReplica) -> FetchAnswer:
    """This replica's answer, in any role: its epoch, or -1 if it has lost its own vote. `nodes`: the voters that its
    log names, and those before while their change may be uncommitted. `snapshot`: the log up to the record that does.
    """
    epoch = -1 if raft.vote_is_unknown else raft.epoch  # it may have been in a later one
    base = FetchAnswer(ErrorCode.NONE, epoch, raft.leader_id, raft.known_leader_endpoint())
    voters = raft.voters
    if voters.latest_offset < 0:
        return base  # those of the configuration or the format, which all logs begin with
    nodes: dict[int, Peer] = {}
    for each in voters.in_question(raft.high_watermark):
        for voter in each:
            nodes.setdefault(voter.key.id, Peer(voter.key.id, voter.endpoint or Endpoint("", 0)))
    return base._replace(nodes=tuple(nodes.values()), snapshot=raft.log.identity_of(voters.latest_offset + 1))


class LostVote:
    def __init__(self, raft: RaftReplica) -> None:
        self._raft = raft
        self._answers: dict[int, FetchAnswer] = {}
        """Voter id -> its last answer with an epoch since the start. A bootstrap server only names voters, and may be
        this node itself by another address.
        """

    def on_answer(self, voter_id: int, answer: FetchAnswer) -> None:
        if answer.epoch >= 0 or (voter_id < 0 and not answer.error):
            self._answers[voter_id] = answer._replace(records=b"")

    def others(self) -> dict[int, Endpoint | None]:
        """The other voters that have to answer, as far as they are known; None without an address.

        While this log lacks records, which may have named others, so do the bootstrap servers. Their ids are negative.
        """
        raft = self._raft
        others: dict[int, Endpoint | None] = {}
        for voter_id in raft.voters.latest.ids:
            peer = raft.peer(voter_id)
            others[voter_id] = None if peer is None else peer.endpoint
        if raft.lacks_records:
            own = [endpoint for _, endpoint in raft.own_endpoints]
            servers = enumerate(raft.settings.bootstrap_servers)
            others |= {-2 - index: server for index, server in servers if server not in own}
        waiting = list(others)
        for voter_id in waiting:
            for peer in self._named_by(voter_id):
                if peer.id not in others:
                    known = raft.peer(peer.id) or peer
                    others[peer.id] = known.endpoint if known.endpoint.port > 0 else None
                    waiting.append(peer.id)
        others.pop(raft.own.id, None)
        return others

    def _named_by(self, voter_id: int) -> tuple[Peer, ...]:
        answer = self._answers.get(voter_id)
        if answer is None or (answer.snapshot is not None and self._raft.log.holds(answer.snapshot)):
            return ()
        return answer.nodes

    @property
    def is_found(self) -> bool:
        """Whether all have answered. A log without records may not name the voters yet."""
        knows_voters = len(self._raft.voters.latest) > 0
        return knows_voters and not self._is_behind and self._answers.keys() >= self.others().keys()

    @property
    def _is_behind(self) -> bool:
        """Whether a leader has records for this log, which may name others. Kafka's nodes answer without the voters."""
        state = self._raft.state
        return isinstance(state, Follower) and not 0 <= state.leader_high_watermark <= self._raft.log.end_offset

    @property
    def epoch(self) -> int:
        """The highest epoch of all who have answered."""
        return max((answer.epoch for answer in self._answers.values()), default=0)
