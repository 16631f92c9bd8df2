"""When a follower's answer waits for more records: only in a busy session, and not where nothing more comes."""

from __future__ import annotations

import pytest

from tests.unit.replication.replicas import Replicas
from tidelog.broker.replicas.fetching.follower_linger import BUSY_BYTES_PER_MS, FollowerLinger

VALUE = b"x" * 10_000
SELECTOR = "org.apache.kafka.common.replica.RackAwareReplicaSelector"


def replicas(count: int, are_read: bool) -> Replicas:
    """`are_read`: consumers read from followers, which learn of each high watermark."""
    return Replicas(count, replica_selector_class=SELECTOR) if are_read else Replicas(count)


def busy_linger() -> FollowerLinger:
    linger = FollowerLinger()
    linger.sent(0, 1000)
    linger.sent(100 * BUSY_BYTES_PER_MS, 1100)
    assert linger.busy
    return linger


def test_a_session_is_busy_by_the_bytes_it_carried_lately() -> None:
    linger = busy_linger()
    linger.sent(100, 1110)
    assert linger.busy, "the next window has not passed"
    linger.sent(100, 1130)
    assert not linger.busy
    assert not linger.may_wait(1130)


def test_a_wait_that_brought_nothing_is_followed_by_rests_that_grow_to_a_bound() -> None:
    linger, now_ms, rests = busy_linger(), 2000.0, []
    for _ in range(8):
        assert linger.may_wait(now_ms)
        linger.waited(now_ms)
        began_ms = now_ms
        while not linger.may_wait(now_ms):
            now_ms += 50
        rests.append(now_ms - began_ms)
    assert rests == [100, 200, 400, 800, 1600, 3200, 3200, 3200]
    linger.news += 1
    linger.waited(now_ms)
    assert linger.may_wait(now_ms), "this one paid"


@pytest.mark.parametrize("are_read", [False, True])
def test_a_busy_stream_is_carried_in_fewer_rounds_and_acknowledged_all_the_same(are_read: bool) -> None:
    cluster = replicas(2, are_read)
    sent = []
    for _ in range(400):  # 40 MB/s, nobody waits for anything
        sent.append(cluster.nodes[1].produce(VALUE))
        cluster.loop.run_for(0.25)
    cluster.loop.run_for(600)
    assert [each.code for each in sent] == [0] * 400
    assert len(cluster.requests) < (250 if are_read else 200)
    assert cluster.marks() == {1: (400, 400), 2: (400, 400)}


@pytest.mark.parametrize("are_read", [False, True])
@pytest.mark.parametrize("count", [2, 3])
def test_a_producer_that_waits_for_each_record_is_hardly_ever_held_up(count: int, are_read: bool) -> None:
    """Where followers are told of high watermarks, each record met the wait for one, and ended no wait."""
    cluster = replicas(count, are_read)
    held_up_ms = 0
    for _ in range(400):
        sent = cluster.nodes[1].produce(VALUE)
        cluster.loop.run_for(0.5)  # 20 MB/s
        while sent.code is None:
            cluster.loop.run_for(0.5)
            held_up_ms += 1
    assert 0 < held_up_ms <= 12
    for session in cluster.nodes[1].partitions.follower_fetches.sessions.values():
        assert session.linger.news <= 400, "a high watermark is no append"


def test_a_slow_stream_is_never_held_up() -> None:
    cluster = Replicas(2)
    for _ in range(100):
        sent = cluster.nodes[1].produce(b"x" * 200)
        cluster.loop.settle()
        assert sent.code == 0
        cluster.loop.run_for(1)


def test_what_the_follower_must_know_at_once_does_not_wait() -> None:
    cluster = Replicas(2)
    for _ in range(100):
        cluster.nodes[1].produce(VALUE)
        cluster.loop.run_for(0.25)
    session = next(iter(cluster.nodes[1].partitions.follower_fetches.sessions.values()))
    cluster.loop.run_for(3)
    assert session.linger.busy
    assert session.parked is not None
    cluster.elect(2, [1, 2], tell=[1])
    cluster.loop.settle()
    assert session.parked is None
