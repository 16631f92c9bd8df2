"""Fetching over a slow link: an answer that goes on arriving is awaited, one that stops is given up."""

from __future__ import annotations

import pytest

from tests.unit.replication.replicas import FakeLink, Replicas
from tidelog.replication.answer_size import ARRIVING_BYTES

LOOK_MS = 15_000
"""Half of `replica.socket.timeout.ms`."""


def waiting_for_an_answer() -> tuple[Replicas, FakeLink]:
    """A follower whose leader has answered with a record, and the link that does not bring the answer yet."""
    cluster = Replicas(2)
    cluster.loop.run_for(100)
    (link,) = (each for each in cluster.links if not each.closed)
    cluster.cut.add((2, 1))
    cluster.nodes[1].produce(b"a", acks=1)
    cluster.loop.run_for(1000)
    return cluster, link


def test_an_answer_that_arrives_slowly_is_awaited() -> None:
    cluster, link = waiting_for_an_answer()
    for _ in range(10):
        link.arrived_bytes += ARRIVING_BYTES
        cluster.loop.run_for(LOOK_MS)
    assert not link.closed
    cluster.cut.clear()
    link.arrived_bytes = 0
    link._answer()
    cluster.loop.run_for(1000)
    assert cluster.nodes[2].values() == [b"a"]
    assert not link.closed


@pytest.mark.parametrize("trickle_bytes", [0, ARRIVING_BYTES // 20])
def test_an_answer_that_stops_is_given_up_as_one_that_never_began(trickle_bytes: int) -> None:
    cluster, link = waiting_for_an_answer()
    for _ in range(3):
        link.arrived_bytes += ARRIVING_BYTES
        cluster.loop.run_for(LOOK_MS)
    for _ in range(2 * LOOK_MS // 1000):
        link.arrived_bytes += trickle_bytes
        cluster.loop.run_for(1000)
    assert link.closed
    cluster.cut.clear()
    cluster.loop.run_for(2 * LOOK_MS + 1000)
    assert cluster.nodes[2].values() == [b"a"]


def test_the_present_answer_is_counted_anew_behind_another() -> None:
    cluster, link = waiting_for_an_answer()
    link.arrived_bytes = 10 * ARRIVING_BYTES
    cluster.loop.run_for(LOOK_MS)
    cluster.cut.clear()
    link.arrived_bytes = 0
    link._answer()
    cluster.loop.run_for(10)
    cluster.cut.add((2, 1))
    for _ in range(4):
        cluster.loop.run_for(LOOK_MS)
        link.arrived_bytes += ARRIVING_BYTES
    assert not link.closed
