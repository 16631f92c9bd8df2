"""Single rules of one replica, where a history of a whole quorum seldom gets: old answers, lost records, own votes."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from tests.unit.replication.quorum.raft_simulation import SETTINGS, Log
from tidelog.replication.ports import Endpoint
from tidelog.replication.quorum.raft import leading
from tidelog.replication.quorum.raft.messages import (
    AppendLeaderChange,
    BeginAsk,
    ElectionState,
    FetchAnswer,
    FetchAsk,
    OffsetAndEpoch,
    Recovered,
    Send,
    SnapshotAsk,
    VoteAsk,
    WakeFetches,
)
from tidelog.replication.quorum.raft.raft import Raft
from tidelog.replication.quorum.raft.snapshot import SnapshotId
from tidelog.replication.quorum.raft.state import Download, Follower, Leader, Unattached
from tidelog.replication.quorum.raft.voters import ReplicaKey, Voter, VoterHistory, VoterSet

KEYS = {node_id: ReplicaKey(node_id, bytes([node_id]) * 16) for node_id in (1, 2, 3)}
VOTERS = VoterSet(Voter(key, (("CONTROLLER", Endpoint("node", key.id)),)) for key in KEYS.values())
TIMEOUT_MS = SETTINGS.fetch_timeout_ms
CHECK_QUORUM_MS = TIMEOUT_MS * 1.5


def started(election: ElectionState, *epochs: int, voters: VoterHistory | None = None) -> Raft:
    """Node 1, with a synced log of records of these epochs."""
    log = Log()
    log.entries = [(epoch, "r") for epoch in epochs]
    log.synced_offset = log.end_offset
    raft = Raft(
        own=KEYS[1], own_endpoints=(("CONTROLLER", Endpoint("node", 1)),), can_vote=True, settings=SETTINGS, log=log,
        voters=voters or VoterHistory(VOTERS), rng=Random(1),
    )  # fmt: skip
    raft.start(election, 0.0)
    return raft


def effects(raft: Raft, kind: type) -> list[Any]:
    return [effect for effect in raft.take_effects() if isinstance(effect, kind)]


def answer(raft: Raft, now_ms: float, **fields: Any) -> None:
    """The leader answers the fetch that is sent now."""
    raft.poll(now_ms)
    [send] = [each for each in effects(raft, Send) if isinstance(each.ask, FetchAsk)]
    raft.on_answer(send, FetchAnswer(0, raft.epoch, raft.leader_id, **fields), now_ms)


def leader(*epochs: int, voters: VoterHistory | None = None) -> Raft:
    raft = started(ElectionState(), *epochs, voters=voters)
    raft.become_candidate(0.0, 0)
    raft.become_leader((KEYS[2],), 0.0)
    return raft


def test_a_former_leader_has_voted_for_itself_in_its_epoch() -> None:
    raft = started(ElectionState(5, 1))
    assert isinstance(raft.state, Unattached)
    assert not raft.on_vote(VoteAsk(5, KEYS[2], KEYS[1], 0, 0, False), 1.0).granted
    assert raft.on_vote(VoteAsk(6, KEYS[2], KEYS[1], 0, 0, False), 1.0).granted


def test_the_leader_of_the_vote_file_gives_way_to_one_that_speaks() -> None:
    raft = started(ElectionState(5, 2))
    raft.on_begin(BeginAsk(5, 3, KEYS[1], Endpoint("node", 3)), 1.0)
    assert raft.leader_id == 3
    raft.on_begin(BeginAsk(5, 2, KEYS[1], Endpoint("node", 2)), 2.0)
    assert raft.leader_id == 3, "it has spoken"


def test_a_candidate_that_loses_records_is_none_any_more() -> None:
    raft = started(ElectionState(5))
    raft.become_prospective(1.0)
    raft.become_candidate(1.0, 0)
    raft.lose_records(None, 2.0)
    assert isinstance(raft.state, Unattached)
    raft.poll(2.0 + 10 * SETTINGS.election_timeout_ms)
    assert isinstance(raft.state, Unattached)


def test_lost_records_are_there_again_when_all_are_that_were_committed_here() -> None:
    """The leader may not know yet how far they are committed."""
    raft = started(ElectionState(5, 2), 1, 1, 1, 1)
    raft.committed(4)
    log: Any = raft.log
    log.cut(2)
    raft.lose_records(OffsetAndEpoch(1, 4), 1.0)
    answer(raft, 2.0, high_watermark=2)
    raft.poll(3.0)
    assert not effects(raft, Recovered)
    assert raft.lacks_records
    log.entries += [(1, "r")] * 2
    raft.poll(4.0)
    assert raft.lacks_records, "they are not synced"
    log.synced_offset = 4
    raft.poll(5.0)
    assert effects(raft, Recovered)
    assert not raft.lacks_records


def test_a_lacking_voter_votes_for_what_reaches_its_own_log_and_its_acknowledgements() -> None:
    raft = started(ElectionState(5), 1, 1, 3)
    raft.lose_records(OffsetAndEpoch(1, 9), 1.0)
    assert not raft.on_vote(VoteAsk(6, KEYS[2], KEYS[1], 1, 9, False), 2.0).granted, "its own log is later"
    assert raft.on_vote(VoteAsk(7, KEYS[2], KEYS[1], 3, 3, False), 2.0).granted


def test_a_snapshot_that_is_being_installed_is_no_silence_of_the_leader() -> None:
    raft = started(ElectionState(5, 2))
    state = raft.state
    assert isinstance(state, Follower)
    state.download = Download(SnapshotId(9, 1), 10, is_installing=True)
    for now_ms in (0.9 * TIMEOUT_MS, 1.8 * TIMEOUT_MS, 2.7 * TIMEOUT_MS):
        raft.poll(now_ms)
        assert raft.state is state


def test_a_voter_that_loads_a_snapshot_keeps_the_leader() -> None:
    raft = leader(1)
    asked_at_ms = 0.9 * CHECK_QUORUM_MS
    leading.on_fetch_snapshot(raft, SnapshotAsk(KEYS[2], raft.epoch, SnapshotId(1, 1), 0), asked_at_ms)
    raft.poll(CHECK_QUORUM_MS)
    assert isinstance(raft.state, Leader)
    raft.poll(asked_at_ms + CHECK_QUORUM_MS)
    assert not isinstance(raft.state, Leader)


def test_a_new_leader_gives_the_voters_time_for_their_first_fetch() -> None:
    raft = started(ElectionState())
    raft.become_candidate(1000.0, 0)
    raft.become_leader((KEYS[2],), 1000.0)
    raft.poll(1000.0 + CHECK_QUORUM_MS - 1)
    assert isinstance(raft.state, Leader)
    raft.poll(1000.0 + CHECK_QUORUM_MS)
    assert not isinstance(raft.state, Leader)


def test_a_commit_wakes_the_fetches_that_wait_for_it() -> None:
    raft = leader()
    log: Any = raft.log
    log.entries.append((raft.epoch, "leader"))
    log.synced_offset = 1
    raft.poll(1.0)
    raft.take_effects()
    raft.on_fetch(FetchAsk(KEYS[2], raft.epoch, 1, raft.epoch, -1, 0), 2.0)
    assert raft.high_watermark == 1
    assert effects(raft, WakeFetches)


@pytest.mark.parametrize(("is_in_log", "written"), [(False, VOTERS), (True, None)])
def test_voters_that_only_a_snapshot_names_are_written_into_the_log(is_in_log: bool, written: VoterSet | None) -> None:
    history = VoterHistory(VOTERS)
    history.add_version(-1, 1)
    if is_in_log:
        history.add_voters(0, VOTERS)
    [change] = effects(leader(1, voters=history), AppendLeaderChange)
    assert change.voters_now == written
