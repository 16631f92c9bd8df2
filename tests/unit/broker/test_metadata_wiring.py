"""The line that says for whom a node waits."""

from __future__ import annotations

from tidelog.broker.metadata_wiring import quorum_wait
from tidelog.replication.ports import Endpoint
from tidelog.replication.quorum.raft.voters import ReplicaKey, Voter, VoterSet


def voters(*ids: int) -> VoterSet:
    return VoterSet(Voter(ReplicaKey(each), (("C", Endpoint(f"host-{each}", 9093)),)) for each in ids)


def test_a_node_that_waits_for_its_quorum_names_the_others():
    said = quorum_wait(voters(1, 2, 3), [], 2, is_controller=True)
    assert "waits for voters 1 at host-1:9093, 3 at host-3:9093; 2 of 3 voters must run" in said
    assert "waits for voter 1 at host-1:9093; 1 of 1 voters" in quorum_wait(voters(1), [], 7, is_controller=False)
    assert "its only voter" in quorum_wait(voters(1), [], 1, is_controller=True)


def test_a_node_that_knows_no_voter_names_where_it_looks_for_one():
    servers = [Endpoint("a", 1), Endpoint("::1", 2)]
    said = quorum_wait(VoterSet(), servers, 1, is_controller=True)
    assert "waits for a controller at a:1, [::1]:2" in said
    assert "`tidelog format --standalone`" in said
    assert "format" not in quorum_wait(VoterSet(), servers, 1, is_controller=False)
