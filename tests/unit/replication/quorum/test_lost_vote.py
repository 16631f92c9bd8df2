"""The voters that one without its vote file asks: those that the others' logs name, too, wherever their logs begin."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.unit.replication.quorum.raft_simulation import Node, World
from tidelog.protocol.errors import ErrorCode
from tidelog.replication.ports import Endpoint
from tidelog.replication.quorum.raft import lost_vote
from tidelog.replication.quorum.raft.lost_vote import LostVote
from tidelog.replication.quorum.raft.messages import FetchAnswer, Peer
from tidelog.replication.quorum.raft.snapshot import SnapshotId
from tidelog.replication.quorum.raft.state import Follower
from tidelog.replication.quorum.raft.voters import ReplicaKey, Voter, VoterSet


def voter_set(*node_ids: int) -> VoterSet:
    return VoterSet(Voter(ReplicaKey(i, bytes([i]) * 16), (("C", Endpoint("node", i)),)) for i in node_ids)


class Cluster:
    """Two voters, and others that the logs name. Node 1 has lost its vote file."""

    def __init__(
        self, logs: dict[int, list[tuple[int, Any]]], snapshots: dict[int, SnapshotId] | None = None, *, size: int = 2
    ) -> None:
        self.world = World(1, dynamic=True, size=size)
        self.world.snapshot_voters = dict.fromkeys((snapshots or {}).values(), voter_set(1, 2, 3))
        self.world.cut = {(a, b) for a in self.world.nodes for b in self.world.nodes}
        for node_id, entries in logs.items():
            log = self.world.nodes[node_id].log
            if snapshots and node_id in snapshots:
                log.begin_at(snapshots[node_id])
            log.entries = entries
            log.synced_offset = log.end_offset
        self.world.nodes[1].has_file = False
        for node_id in logs:
            self.world.nodes[node_id].start()
        self.lost = LostVote(self.node(1).raft)

    def node(self, node_id: int) -> Node:
        return self.world.nodes[node_id]

    def answers(self, node_id: int) -> list[int]:
        """The node answers. Returns the voters that have to, as far as they are known."""
        self.lost.on_answer(node_id, lost_vote.answer(self.node(node_id).raft))
        return sorted(self.lost.others())


PAST: list[tuple[int, Any]] = [(1, ("leader", 2)), (1, "a")]
ADDED: tuple[int, Any] = (1, voter_set(1, 2, 3))


def test_voters_behind_its_log_count_until_it_has_the_record_that_names_them() -> None:
    cluster = Cluster({1: PAST[:], 2: [*PAST, ADDED]})
    assert sorted(cluster.lost.others()) == [2]
    assert cluster.answers(2) == [2, 3]
    assert not cluster.lost.is_found
    node = cluster.node(1)
    node.log.entries.append((1, voter_set(1, 2)))  # of a leader that did not know of the addition
    assert sorted(cluster.lost.others()) == [2]
    node.log.entries[-1] = (2, voter_set(1, 2))
    assert sorted(cluster.lost.others()) == [2, 3]


def test_voters_count_that_only_a_snapshot_names() -> None:
    """It asked for what follows its own log, and the other's log began later: the answer had no records."""
    cluster = Cluster({1: PAST[:], 2: [(2, "b")]}, {2: SnapshotId(40, 2)})
    assert cluster.answers(2) == [2, 3]


def test_voters_count_that_another_log_names_below_the_end_of_a_diverging_one() -> None:
    cluster = Cluster({1: [*PAST, *[(1, "lost")] * 9], 2: [*PAST, (2, ("leader", 2)), (2, ADDED[1])]})
    assert cluster.answers(2) == [2, 3]


def test_a_voter_counts_whose_removal_may_be_uncommitted() -> None:
    """It may have won by the voters before, and only they know that."""
    cluster = Cluster({1: PAST[:], 2: [*PAST, ADDED, (1, voter_set(1, 2)), (1, voter_set(1, 2))]})
    assert cluster.answers(2) == [2, 3]
    cluster.node(2).raft.high_watermark = 5
    assert cluster.answers(2) == [2]


def test_voters_lead_to_others() -> None:
    cluster = Cluster(
        {1: PAST[:], 2: [*PAST, ADDED], 3: [*PAST, ADDED, (2, voter_set(1, 3)), (2, voter_set(1, 3, 4))]},
    )
    assert cluster.answers(2) == [2, 3]
    assert cluster.answers(3) == [2, 3, 4]
    assert cluster.lost.epoch == 2


def test_a_voter_does_not_count_whose_removal_its_own_log_has() -> None:
    """It may be gone for good. The other has just started, and does not know either what is committed."""
    log = [*PAST, ADDED, (1, voter_set(1, 2))]
    cluster = Cluster({1: [*log, (2, ("leader", 1))], 2: log})
    assert cluster.node(2).raft.high_watermark == -1
    assert cluster.answers(2) == [2]
    assert cluster.lost.is_found


def test_what_another_has_truncated_does_not_count() -> None:
    cluster = Cluster({1: PAST[:], 2: [*PAST, ADDED]})
    assert cluster.answers(2) == [2, 3]
    node = cluster.node(2)
    node.log.cut(2)
    node.history.truncate_to(2)
    assert cluster.answers(2) == [2]


def test_where_records_are_lost_the_bootstrap_servers_have_to_answer_too() -> None:
    """The lost ones named all the others, and nobody was asked."""
    cluster = Cluster({1: PAST[:], 2: [*PAST, ADDED], 3: [*PAST, ADDED]}, size=1)
    assert not cluster.lost.others()
    raft = cluster.node(1).raft
    raft.lacks_records = True
    assert sorted(cluster.lost.others()) == [-5, -4, -3]
    for node_id in (2, 3, 4):
        cluster.lost.on_answer(-1 - node_id, lost_vote.answer(cluster.node(min(node_id, 3)).raft))
    assert sorted(cluster.lost.others()) == [-5, -4, -3, 2, 3]
    assert not cluster.lost.is_found
    for node_id in (2, 3):
        cluster.answers(node_id)
    assert cluster.lost.is_found
    raft.lacks_records = False
    assert not cluster.lost.others()


def test_a_bootstrap_server_may_be_the_node_itself_by_another_address() -> None:
    cluster = Cluster({1: PAST[:]}, size=1)
    raft = cluster.node(1).raft
    raft.lacks_records = True
    raft.vote_is_unknown = True
    raft.settings = replace(raft.settings, bootstrap_servers=[Endpoint("alias", 1)])
    cluster.lost.on_answer(-2, FetchAnswer(ErrorCode.INCONSISTENT_CLUSTER_ID, -1))
    assert not cluster.lost.is_found
    cluster.lost.on_answer(-2, lost_vote.answer(raft))
    assert cluster.lost.is_found
    assert cluster.lost.epoch == -1


def test_an_answer_without_an_epoch_or_an_address_is_none() -> None:
    cluster = Cluster({1: PAST[:], 2: PAST[:]})
    cluster.node(2).raft.vote_is_unknown = True
    cluster.answers(2)
    assert not cluster.lost.is_found
    cluster.lost.on_answer(2, FetchAnswer(ErrorCode.NONE, 1, nodes=(Peer(7, Endpoint("", 0)),)))
    assert cluster.lost.others() == {2: Endpoint("node", 2), 7: None}
    assert not cluster.lost.is_found


@pytest.mark.parametrize(("high_watermark", "is_found"), [(-1, False), (3, False), (2, True)])
def test_it_takes_the_records_of_a_leader_first_which_may_be_kafkas(high_watermark: int, is_found: bool) -> None:
    cluster = Cluster({1: PAST[:], 2: PAST[:]})
    raft = cluster.node(1).raft
    raft.observe(2, 2, None, cluster.world.now)
    assert isinstance(raft.state, Follower)
    raft.state.leader_high_watermark = high_watermark
    cluster.lost.on_answer(2, FetchAnswer(ErrorCode.NONE, 2, 2, Endpoint("node", 2)))
    assert cluster.lost.is_found is is_found
