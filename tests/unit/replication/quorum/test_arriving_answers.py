"""An answer that goes on arriving over a slow link: what the two roles take it for."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from tests.unit.replication.quorum.raft_simulation import SETTINGS, Log
from tidelog.protocol.errors import ErrorCode
from tidelog.replication.answer_size import ARRIVING_BYTES
from tidelog.replication.ports import Endpoint
from tidelog.replication.quorum.raft import leading
from tidelog.replication.quorum.raft.messages import (
    BeginAnswer,
    BeginAsk,
    ElectionState,
    EndAsk,
    FetchAsk,
    Send,
    VoteAsk,
)
from tidelog.replication.quorum.raft.raft import Raft
from tidelog.replication.quorum.raft.state import Follower, Leader
from tidelog.replication.quorum.raft.voters import ReplicaKey, Voter, VoterHistory, VoterSet

KEYS = {node_id: ReplicaKey(node_id, bytes([node_id]) * 16) for node_id in (1, 2, 3)}
VOTERS = VoterSet(Voter(key, (("CONTROLLER", Endpoint("node", key.id)),)) for key in KEYS.values())
TIMEOUT_MS = SETTINGS.fetch_timeout_ms


def started(election: ElectionState) -> Raft:
    raft = Raft(
        own=KEYS[1],
        own_endpoints=(("CONTROLLER", Endpoint("node", 1)),),
        can_vote=True,
        settings=replace(SETTINGS, retry_backoff_max_ms=5),
        log=Log(),
        voters=VoterHistory(VOTERS),
        rng=Random(1),
    )
    raft.start(election, 0.0)
    return raft


def sent(raft: Raft, kind: type, now_ms: float) -> list[Send]:
    raft.poll(now_ms)
    return [effect for effect in raft.take_effects() if isinstance(effect, Send) and isinstance(effect.ask, kind)]


def follower() -> tuple[Raft, Follower, Send]:
    """Of node 2, from which it fetches."""
    raft = started(ElectionState(5, 2))
    [send] = sent(raft, FetchAsk, 1.0)
    assert isinstance(raft.state, Follower)
    assert send.peer.id == 2
    return raft, raft.state, send


def test_the_leader_from_which_it_arrives_is_not_replaced() -> None:
    raft, state, send = follower()
    ask = VoteAsk(5, KEYS[3], KEYS[1], 0, 0, pre_vote=True)
    assert raft.on_vote(ask, 50.0).granted
    raft.on_arriving(send, 100.0)
    assert state.give_up_at_ms == 100.0 + TIMEOUT_MS
    assert not raft.on_vote(ask, 101.0).granted


def test_a_leader_that_has_resigned_is_replaced_while_its_last_answer_arrives() -> None:
    raft, state, send = follower()
    raft.on_end(EndAsk(5, 2, (KEYS[1],), None), 50.0)
    give_up_at_ms = state.give_up_at_ms
    assert give_up_at_ms < 50.0 + TIMEOUT_MS
    raft.on_arriving(send, 51.0)
    assert state.give_up_at_ms == give_up_at_ms


@pytest.mark.parametrize("leader_id", [2, 3])
@pytest.mark.parametrize("has_asked", [False, True])
def test_an_answer_of_an_earlier_epoch_says_nothing_of_the_present_leader(leader_id: int, has_asked: bool) -> None:
    raft, _, send = follower()
    raft.on_begin(BeginAsk(6, leader_id, KEYS[1], Endpoint("node", leader_id)), 50.0)
    if has_asked:
        assert sent(raft, FetchAsk, 51.0)
    raft.on_arriving(send, 100.0)
    assert isinstance(raft.state, Follower)
    assert raft.state.give_up_at_ms == 50.0 + TIMEOUT_MS


def leader() -> Raft:
    """Node 2 has fetched from it, at 10 ms."""
    raft = started(ElectionState())
    raft.become_candidate(0.0, 0)
    raft.become_leader((KEYS[2],), 0.0)
    raft.on_fetch(FetchAsk(KEYS[2], raft.epoch, 0, 0, -1, 0), 10.0)
    raft.take_effects()
    return raft


def last_contact_ms(raft: Raft) -> float:
    assert isinstance(raft.state, Leader)
    replica = raft.state.progress.find(KEYS[2])
    assert replica is not None
    return replica.last_fetch_ms


def contact_at(raft: Raft, now_ms: float, error: ErrorCode = ErrorCode.NONE) -> float:
    """The last contact with node 2 after its answer to BeginQuorumEpoch at this time."""
    [send] = [each for each in sent(raft, BeginAsk, now_ms) if each.peer.id == 2]
    raft.on_answer(send, BeginAnswer(error, raft.epoch, 1), now_ms)
    return last_contact_ms(raft)


def test_a_voter_that_receives_a_large_answer_is_there_as_long_as_it_says_so() -> None:
    raft = leader()
    leading.on_sending(raft, KEYS[2], 2 * ARRIVING_BYTES, 10.0)
    assert contact_at(raft, 150.0, ErrorCode.INVALID_VOTER_KEY) == 10.0
    assert contact_at(raft, 260.0) == 260.0
    assert contact_at(raft, 10.0 + 2 * TIMEOUT_MS) == 260.0, "by then it has all of it, and should have fetched"


def test_a_voter_that_does_not_fetch_after_a_small_answer_is_no_contact() -> None:
    raft = leader()
    leading.on_sending(raft, KEYS[2], 9 * ARRIVING_BYTES, 10.0)
    leading.on_sending(raft, KEYS[2], 0, 20.0)
    assert contact_at(raft, 150.0) == 10.0


def test_the_time_for_one_answer_is_bounded() -> None:
    raft = leader()
    leading.on_sending(raft, KEYS[2], 9999 * ARRIVING_BYTES, 10.0)
    assert isinstance(raft.state, Leader)
    replica = raft.state.progress.find(KEYS[2])
    assert replica is not None
    assert replica.receives_until_ms == 10.0 + leading.RECEIVES_TIMEOUTS_MAX * TIMEOUT_MS
