"""Fetching over a slow link: an answer that goes on arriving is awaited, one that stops is given up."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from tests.unit.replication.replicas import FakeLink, Replicas
from tidelog.replication.answer_size import ARRIVING_BYTES
from tidelog.replication.controller.metadata.image import MetadataDelta
from tidelog.replication.leader_link import EXCHANGES_MS_MAX, EXCHANGES_PER_PAUSE, OPEN_MAX, UNKNOWN_MIN
from tidelog.replication.ports import OnResponse

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


MANY_ID = b"M" * 16
MANY = UNKNOWN_MIN


def unknown_to_the_leader(count: int) -> Replicas:
    """Node 2 learns of partitions that it follows at node 1 before node 1 does."""
    cluster = Replicas(2)
    in_sync = cluster.placed
    cluster.placed = replace(in_sync, isr=(1,))
    cluster.add_topic(MANY_ID, "many", count)
    cluster.placed = in_sync
    cluster.loop.run_for(100)
    return cluster


def learn(cluster: Replicas, node_id: int) -> None:
    count = len(cluster.image.topics_by_id[MANY_ID].partitions)
    everything = MetadataDelta(changed_partitions={MANY_ID: set(range(count))})
    cluster.nodes[node_id].hosting.apply(cluster.image, everything)


@pytest.mark.parametrize("count", [MANY - 1, MANY])
@pytest.mark.parametrize("exchange_ms", [0, 300, 3000])
def test_partitions_that_a_leader_behind_a_slow_link_does_not_know_leave_it_room(
    monkeypatch: pytest.MonkeyPatch, exchange_ms: int, count: int
) -> None:
    """The leader learns of them over the same link, and requests that mentioned all of them again filled half of it."""
    cluster = unknown_to_the_leader(count)
    times_s: list[float] = []
    request = FakeLink.request

    def slowly(link: FakeLink, api_key: int, version: int, body: bytes | bytearray, on_response: OnResponse) -> None:
        if len(body) < 30 * count // 2:
            request(link, api_key, version, body, on_response)
            return
        times_s.append(cluster.loop.time())
        cluster.loop.call_later(exchange_ms / 1000, request, link, api_key, version, body, on_response)

    monkeypatch.setattr(FakeLink, "request", slowly)
    learn(cluster, 2)
    cluster.loop.run_for(60_000)
    pauses_ms = [round((after - before) * 1000) - exchange_ms for before, after in pairwise(times_s)]
    wanted_ms = min(EXCHANGES_PER_PAUSE * exchange_ms, EXCHANGES_MS_MAX) if count == MANY else 0
    assert min(pauses_ms) >= wanted_ms
    assert max(pauses_ms) <= max(1_001, wanted_ms + 1)
    assert pauses_ms[0] < 50 or wanted_ms
    (link,) = cluster.nodes[2].fetchers._links.values()
    assert len(link._many_sent_s) <= OPEN_MAX
    learn(cluster, 1)
    cluster.loop.run_for(2 * exchange_ms + EXCHANGES_MS_MAX + 1_000)
    followed = [each for each in link.followed.values() if each.partition.topic == "many"]
    assert len(followed) == count
    assert all(each.in_session and not each.failures for each in followed)
