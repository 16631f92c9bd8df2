"""Many throttled replicas wait for the rate, while others are fetched: what they cost, and that none is lost."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest

from tests.unit.replication.replicas import Replicas
from tidelog.protocol.batches.batch_builder import encode_batch
from tidelog.protocol.batches.record import Record
from tidelog.replication.controller.metadata.image import MetadataDelta
from tidelog.replication.followed_partition import FollowedPartition
from tidelog.replication.leader_link import ReplicaFetcher
from tidelog.replication.partition import Partition
from tidelog.replication.throttle import Throttle

TOPIC_ID = b"M" * 16
COUNT = 100


def lagging(side: str, rate: int, rest_bytes: int) -> Replicas:
    """Node 2 follows node 1 in `t`, in sync, and in a hundred throttled partitions, of which it lacks one record each.

    The records of the first 45 fill two answers, and use the rate up. Those of the rest have `rest_bytes`.
    """
    cluster = Replicas(2)
    cluster.set_rates(**{f"{side}_replication_throttled_rate": str(rate)})
    in_sync = cluster.placed
    cluster.placed = replace(in_sync, isr=(1,))
    cluster.add_topic(TOPIC_ID, "many", COUNT)
    cluster.placed = in_sync
    throttled = {f"{side}.replication.throttled.replicas": "*"}
    cluster.image = replace(cluster.image, configs={**cluster.image.configs, (2, "many"): throttled})
    everything = MetadataDelta(changed_partitions={TOPIC_ID: set(range(COUNT))})
    cluster.nodes[1].hosting.apply(cluster.image, everything)
    cluster.loop.settle()
    for partition in many(cluster, 1):
        append(cluster, partition, 100_000 if partition.index < 45 else rest_bytes)
    cluster.nodes[2].hosting.apply(cluster.image, everything)
    cluster.loop.settle()
    return cluster


def many(cluster: Replicas, node_id: int) -> list[Partition]:
    return [each for each in cluster.nodes[node_id].partitions.hosted() if each.topic == "many"]


def append(cluster: Replicas, partition: Partition, size_bytes: int = 1000) -> None:
    records = encode_batch([Record(0, 0, None, b"x" * size_bytes)])
    cluster.nodes[1].partitions.append(partition, memoryview(records), 0, -1)


def copied(partitions: Iterable[Partition]) -> int:
    return sum(each.log.log_end_offset > 0 for each in partitions)


def test_those_that_wait_for_the_leaders_rate_are_not_looked_at_in_each_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """With ten thousand of them each fetch of another partition cost seven milliseconds."""
    cluster = lagging("leader", 10, 100_000)
    (session,) = cluster.nodes[1].partitions.follower_fetches.sessions.values()
    looks = 0
    pause_ms = Throttle.pause_ms

    def counted(throttle: Throttle, now_ms: float) -> float:
        nonlocal looks
        looks += 1
        return pause_ms(throttle, now_ms)

    monkeypatch.setattr(Throttle, "pause_ms", counted)
    for _ in range(100):
        sent = cluster.nodes[1].produce(b"a")
        cluster.loop.run_for(10)
        assert sent.code == 0
    waiting = COUNT - copied(many(cluster, 2))
    assert waiting >= 30, "an answer holds two megabytes"
    assert looks <= 4 * waiting, "when they are held back, and each half a second"
    assert len(session.outside) <= COUNT - waiting, "only those that may join the ISR without another fetch"
    monkeypatch.undo()
    for partition in many(cluster, 1):
        append(cluster, partition)
    cluster.loop.run_for(1)
    assert session.held_back
    assert not session.dirty
    cluster.set_rates()
    cluster.loop.run_for(2000)
    assert {each.log.log_end_offset for each in many(cluster, 2)} == {2}


def test_a_replica_that_waits_for_the_leaders_rate_does_not_count_as_caught_up() -> None:
    """It would hold the high watermark back until it had lagged for long."""
    cluster = lagging("leader", 10, 100_000)
    partition, copy = many(cluster, 1)[-1], many(cluster, 2)[-1]
    follower = partition.in_sync.followers[2]
    append(cluster, partition)
    cluster.loop.run_for(600)
    assert copy.log.log_end_offset == 0
    assert follower.last_caught_up_ms < 0
    cluster.nodes[2].fetchers.unfollow(copy)
    cluster.nodes[1].produce(b"a")
    cluster.loop.run_for(600)
    assert follower.last_caught_up_ms < 0
    append(cluster, partition)
    assert partition.high_watermark == 3


def test_a_replica_that_waits_for_the_leaders_rate_learns_of_another_leader_at_once() -> None:
    cluster = lagging("leader", 10, 100_000)
    partition = many(cluster, 1)[-1]
    assert many(cluster, 2)[-1].log.log_end_offset == 0
    topic = cluster.image.topics_by_id[TOPIC_ID]
    elected = replace(topic.partitions[partition.index], leader_epoch=1, partition_epoch=1)
    topic = replace(topic, partitions={**topic.partitions, partition.index: elected})
    cluster.image = replace(
        cluster.image,
        topics_by_id={**cluster.image.topics_by_id, TOPIC_ID: topic},
        topics_by_name={**cluster.image.topics_by_name, "many": topic},
    )
    change = MetadataDelta(changed_partitions={TOPIC_ID: {partition.index}})
    cluster.nodes[1].hosting.apply(cluster.image, change)
    cluster.loop.run_for(1)
    assert cluster.nodes[2].fetchers.failing_count == 1


def test_those_that_wait_for_the_followers_rate_are_not_looked_at_each_time_two_go_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ten thousand took an eighth of a processor."""
    cluster = lagging("follower", 1_000_000, 3_000)
    (link,) = cluster.nodes[2].fetchers._links.values()
    waiting = len(link._throttled)
    assert waiting >= 40, copied(many(cluster, 2))
    looks = rounds = 0
    is_limited, look_at_rate = ReplicaFetcher._is_limited, ReplicaFetcher._look_at_rate

    def counted(followed: FollowedPartition) -> bool:
        nonlocal looks
        looks += followed in link._throttled
        return is_limited(followed)

    def counted_round(self: ReplicaFetcher) -> None:
        nonlocal rounds
        rounds += 1
        look_at_rate(self)

    monkeypatch.setattr(ReplicaFetcher, "_is_limited", staticmethod(counted))
    monkeypatch.setattr(ReplicaFetcher, "_look_at_rate", counted_round)
    cluster.loop.run_for(7000)
    assert copied(many(cluster, 2)) == COUNT
    assert rounds > 30
    assert looks < 10 * waiting, "each half a second"


def test_those_that_are_followed_are_not_all_looked_at_each_time_two_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten thousand took three milliseconds, a hundred times a second."""
    cluster = lagging("follower", 1_000_000, 30_000)
    (link,) = cluster.nodes[2].fetchers._links.values()
    looks = 0
    is_limited = ReplicaFetcher._is_limited

    def counted(followed: FollowedPartition) -> bool:
        nonlocal looks
        looks += followed not in link._throttled
        return is_limited(followed)

    monkeypatch.setattr(ReplicaFetcher, "_is_limited", staticmethod(counted))
    while copied(many(cluster, 2)) < COUNT:
        cluster.loop.run_for(100)
    assert looks < 10 * COUNT, "all each 400 ms, and those that go on"


def test_a_refused_isr_is_proposed_again_by_a_fetch_that_does_not_name_the_partition() -> None:
    cluster = Replicas(2)
    leader, follower = cluster.nodes[1], cluster.nodes[2]
    cluster.elect(1, [1])
    leader.produce(b"a", acks=1)
    cluster.loop.settle()
    leader.produce(b"b", acks=1)
    cluster.loop.settle()
    partition, proposal = leader.proposals.pop()
    partition.on_proposal_rejected(proposal)
    cluster.loop.run_for(1200)
    assert follower.log.log_end_offset == 2
    assert [broker_id for broker_id, _ in leader.proposals[-1][1].isr] == [1, 2]
