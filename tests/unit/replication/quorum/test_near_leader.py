"""A leader that is nearer than the other voters: its refusals arrive before their grants, its votes before theirs."""

from __future__ import annotations

import pytest

from tests.unit.replication.quorum.raft_simulation import SETTINGS, Node, World
from tests.unit.replication.quorum.test_arriving_answers import KEYS, follower, sent
from tidelog.protocol.errors import ErrorCode
from tidelog.replication.quorum.raft.messages import BeginAsk, FetchAnswer, FetchAsk, Send, VoteAnswer, VoteAsk
from tidelog.replication.quorum.raft.raft import Raft
from tidelog.replication.quorum.raft.state import Follower, Prospective, Unattached

TIMEOUT_MS = SETTINGS.fetch_timeout_ms
NEAR_MS = 0.2


class BlackHole(World):
    """Answers with records from the `near` node never arrive. The other voters are `distance_ms` from each other."""

    near: Node | None = None
    distance_ms = NEAR_MS

    def send(self, source: Node, send: Send) -> None:
        target = self.nodes[send.peer.endpoint.port]
        delay_ms = NEAR_MS if self.near in (source, target) else self.distance_ms

        def answered(answer: object) -> None:
            is_lost = target is self.near and isinstance(answer, FetchAnswer) and len(answer.records) > 0
            if not is_lost:
                source.later(self.rng.uniform(1, 1.2) * delay_ms, lambda: take(answer))

        def take(answer: object) -> None:
            source.raft.on_answer(send, answer, self.now)  # type: ignore[arg-type]
            source.drive()

        def fail() -> None:
            source.raft.on_failure(send, False, self.now)
            source.drive()

        self.at(self.rng.uniform(1, 1.2) * delay_ms, lambda: target.serve(send.ask, answered))
        source.later(SETTINGS.request_timeout_ms, fail)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("distance_ms", [NEAR_MS, 10])
def test_a_leader_whose_large_answers_are_lost_is_replaced_by_voters_far_from_each_other(
    distance_ms: float, seed: int
) -> None:
    """Each of them followed it again when it refused a pre-vote, or it led again before a vote came from afar."""
    world = BlackHole(seed, size=3)
    for node in world.nodes.values():
        node.start()
    world.run_until(1000)
    world.near = world.leader()
    assert world.near is not None
    world.distance_ms = distance_ms
    world.near.append("its answers are lost")
    world.near.drive()
    end_ms = world.now + 20 * TIMEOUT_MS
    while world.leader() in (None, world.near):
        world.run_until(world.now + 1)
        assert world.now < end_ms


def refused(*, by_begin: bool) -> tuple[Raft, Send]:
    """It follows node 2 again, which has refused a pre-vote. Node 3 has not answered yet."""
    raft, _, _ = follower()
    votes = sent(raft, VoteAsk, TIMEOUT_MS + 1.0)
    assert isinstance(raft.state, Prospective)
    by_leader, by_other = sorted(votes, key=lambda send: send.peer.id)
    if by_begin:
        raft.on_begin(BeginAsk(5, 2, KEYS[1], None), TIMEOUT_MS + 2.0)
    else:
        raft.on_answer(by_leader, VoteAnswer(ErrorCode.NONE, 5, 2, None, False), TIMEOUT_MS + 2.0)
    assert isinstance(raft.state, Follower)
    return raft, by_other


@pytest.mark.parametrize("by_begin", [False, True])
def test_a_grant_counts_after_the_leaders_refusal(by_begin: bool) -> None:
    raft, send = refused(by_begin=by_begin)
    raft.on_answer(send, VoteAnswer(ErrorCode.NONE, 5, 2, None, True), TIMEOUT_MS + 50.0)
    [vote, _] = sent(raft, VoteAsk, TIMEOUT_MS + 50.0)
    assert isinstance(vote.ask, VoteAsk)
    assert not vote.ask.pre_vote
    assert raft.epoch == 6


@pytest.mark.parametrize("granted", [False, True])
def test_a_grant_does_not_count_after_a_fetch(granted: bool) -> None:
    """The leader answers, so there is no reason for an election."""
    raft, send = refused(by_begin=False)
    [fetch] = sent(raft, FetchAsk, TIMEOUT_MS + 2.0)
    if granted:
        raft.on_answer(fetch, FetchAnswer(ErrorCode.NONE, 5, 2, None, 0), TIMEOUT_MS + 40.0)
    raft.on_answer(send, VoteAnswer(ErrorCode.NONE, 5, 2, None, granted), TIMEOUT_MS + 50.0)
    raft.poll(TIMEOUT_MS + 50.0)
    assert isinstance(raft.state, Follower)
    assert raft.epoch == 5


@pytest.mark.parametrize("is_leader", [False, True])
def test_a_leader_that_another_candidate_deposes_lets_the_others_vote_first(is_leader: bool) -> None:
    """It has the longest log, so it refuses its vote, and led again at once."""
    world = World(1, size=3)
    for node in world.nodes.values():
        node.start()
    world.run_until(1000)
    leader = world.leader()
    assert leader is not None
    own, *_ = [node for node in world.nodes.values() if (node is leader) == is_leader and node.can_vote]
    other = next(node for node in world.nodes.values() if node not in (own, leader) and node.can_vote)
    leader.append("only here")
    leader.drive()
    world.run_until(world.now + 100)
    for epoch in (leader.raft.epoch + 1, leader.raft.epoch + 2):
        ask = VoteAsk(epoch, other.key, own.key, 0, 0, pre_vote=False)
        assert not own.raft.on_vote(ask, world.now).granted
        assert isinstance(own.raft.state, Unattached)
        waits_ms = own.raft.state.election_at_ms - world.now
        assert (waits_ms >= SETTINGS.election_timeout_ms) == is_leader
        assert waits_ms <= (2 * SETTINGS.election_timeout_ms if is_leader else 2 * SETTINGS.gone_delay_max_ms)
