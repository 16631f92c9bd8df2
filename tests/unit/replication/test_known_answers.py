"""An answer whose beginning a follower knows from an earlier one: it counts for what it is an answer to now."""

from __future__ import annotations

from tests.unit.replication.replicas import TOPIC_ID, Replicas
from tidelog.protocol.hot_replication import encode_one_fetched


def following() -> Replicas:
    """Node 2 has had an answer with records of node 1."""
    cluster = Replicas(2)
    cluster.nodes[1].produce(b"a")
    cluster.loop.run_for(1)
    assert cluster.nodes[2].values() == [b"a"]
    (link,) = cluster.nodes[2].fetchers._links.values()
    assert link._answering, "it knows how they begin"
    return cluster


def test_the_partition_of_another_leader_epoch_is_not_the_one_of_before() -> None:
    """The session, and so the beginning of its answers, is the same."""
    cluster = following()
    cluster.elect(1, [1, 2])
    sent = cluster.nodes[1].produce(b"b")
    cluster.loop.run_for(1)
    assert (cluster.nodes[2].values(), sent.code) == ([b"a", b"b"], 0)


def test_an_answer_to_a_full_request_begins_a_session_however_it_begins() -> None:
    cluster = following()
    (link,) = cluster.nodes[2].fetchers._links.values()
    session_id = link._session_id
    link._begin_anew(session_id)
    frame = encode_one_fetched(1, session_id, TOPIC_ID, 0, 1, 1, 0, [], 0)
    assert isinstance(frame, bytes)
    link._answered_on(link._link, memoryview(bytearray(frame[9:])))
    assert (link._session_id, link._session_epoch > 0) == (session_id, True)
