"""A leader behind a slow link learns of topics later than its followers: how much they ask it meanwhile."""

from __future__ import annotations

import pytest

from tests.unit.replication.replicas import FakeLink, Replicas
from tidelog.broker.replicas.fetching import follower_sessions
from tidelog.protocol.hot_replication import decode_follower_request
from tidelog.replication.controller.metadata.image import MetadataDelta
from tidelog.replication.leader_link import FETCH
from tidelog.replication.ports import OnResponse
from tidelog.replication.unhosted_partitions import ASKED_AT_ONCE_MIN, PARTS

COUNT = 800
FIRST, SECOND = b"M" * 16, b"N" * 16


class Case:
    """Node 2 follows partitions of node 1 that node 1 does not host, until `show`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, count: int = COUNT) -> None:
        self.cluster = Replicas(2)
        self.cluster.loop.run_for(100)
        self.asked: list[tuple[bytes, int]] = []
        self.requests = 0
        ask = FakeLink.request

        def recorded(
            link: FakeLink, api_key: int, version: int, body: bytes | bytearray, on_response: OnResponse
        ) -> None:
            if api_key == FETCH:
                self.requests += 1
                request = decode_follower_request(memoryview(bytearray(body)))
                if request is not None:
                    self.asked += [(bytes(each.topic_id), each.partition) for each in request.partitions]
            ask(link, api_key, version, body, on_response)

        monkeypatch.setattr(FakeLink, "request", recorded)
        self.add(FIRST, "many", count)

    def add(self, topic_id: bytes, name: str, count: int) -> None:
        self.cluster.add_topic(topic_id, name, count)
        self.show(2, topic_id)

    def show(self, node_id: int, topic_id: bytes) -> None:
        partitions = set(self.cluster.image.topics_by_id[topic_id].partitions)
        delta = MetadataDelta(changed_partitions={topic_id: partitions})
        self.cluster.nodes[node_id].hosting.apply(self.cluster.image, delta)

    def wait_ms(self, duration_ms: int) -> int:
        """The partitions that requests name meanwhile."""
        before = len(self.asked)
        self.cluster.loop.run_for(duration_ms)
        return len(self.asked) - before

    def are_fetched(self, topic_id: bytes = FIRST) -> bool:
        """Whether the leader has heard the follower's offset in all partitions of the topic."""
        hosted = [each for each in self.cluster.nodes[1].partitions.hosted() if each.topic_id == topic_id]
        return bool(hosted) and all(
            2 in each.in_sync.followers and each.in_sync.followers[2].log_end_offset >= 0 for each in hosted
        )


@pytest.fixture(params=["in a session", "without a session"])
def case(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Case:
    if request.param == "without a session":  # the session ends with each answer
        monkeypatch.setattr(follower_sessions, "NOT_HOSTED_MAX", COUNT // PARTS - 1)
    return Case(monkeypatch)


def test_a_leader_that_does_not_know_many_partitions_is_asked_for_a_part_of_them(case: Case) -> None:
    """Each second a request named all: over 60 KB/s those took half of the link from the metadata that it lacked."""
    case.wait_ms(3000)
    assert case.wait_ms(10_000) <= 20 * (1 + COUNT // PARTS)
    case.show(1, FIRST)
    case.wait_ms(1100)
    assert case.are_fetched()


def test_each_partition_has_its_turn_while_the_leader_does_not_know_another_topic(case: Case) -> None:
    """It has deleted the first topic, and the follower does not know that yet."""
    case.wait_ms(3000)
    case.add(SECOND, "later", 30)
    case.wait_ms(3000)
    case.show(1, SECOND)
    case.wait_ms(PARTS * 1100)
    assert case.are_fetched(SECOND)
    before = len(case.asked)
    case.wait_ms(PARTS * 1100)
    assert len({each for each in case.asked[before:] if each[0] == FIRST}) == COUNT


def test_a_leader_that_starts_anew_is_asked_for_all_at_once(case: Case) -> None:
    case.wait_ms(5000)
    for link in case.cluster.links:
        if not link.closed:
            link._break()
    case.show(1, FIRST)
    case.wait_ms(100)
    assert case.are_fetched()


def test_partitions_that_are_not_followed_any_more_are_not_asked_for(case: Case) -> None:
    case.wait_ms(3000)
    fetchers = case.cluster.nodes[2].fetchers
    for partition in case.cluster.nodes[2].partitions.hosted():
        if partition.topic_id == FIRST:
            fetchers.unfollow(partition)
    case.wait_ms(1000)
    before = len(case.asked)
    case.wait_ms(5000)
    assert not [each for each in case.asked[before:] if each[0] == FIRST]


def test_a_few_partitions_are_asked_for_together(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(monkeypatch, ASKED_AT_ONCE_MIN)
    case.wait_ms(3000)
    before = len(case.asked)
    case.wait_ms(1100)
    assert len(set(case.asked[before:]) - {(b"T" * 16, 0)}) == ASKED_AT_ONCE_MIN


def test_a_leader_that_learns_of_the_partitions_within_the_first_pause_is_asked_once_more(case: Case) -> None:
    case.cluster.loop.run_for(4)
    case.show(1, FIRST)
    case.cluster.loop.run_for(30)
    assert case.are_fetched()
