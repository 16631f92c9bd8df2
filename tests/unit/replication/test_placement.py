from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.replication.clusters import cluster_state
from tidelog.protocol.errors import ErrorCode, KafkaError
from tidelog.replication.controller.decisions.placement import place_replicas


def place(brokers, partitions, factor, *, fenced=(), racks=None, seed=3):
    image = cluster_state(brokers, fenced=fenced, racks=racks).image
    return place_replicas(image.brokers.values(), partitions, factor, random.Random(seed))


def test_one_broker_takes_everything():
    assert place([5], 3, 1) == [(5,)] * 3


@given(
    broker_count=st.integers(1, 9),
    partitions=st.integers(1, 40),
    factor=st.integers(1, 9),
    rack_count=st.integers(1, 4),
    seed=st.integers(0, 2**32),
    data=st.data(),
)
def test_every_replica_is_on_another_broker_and_leaders_are_never_fenced(
    broker_count, partitions, factor, rack_count, seed, data
):
    brokers = list(range(1, broker_count + 1))
    fenced = data.draw(st.sets(st.sampled_from(brokers), max_size=broker_count - 1))
    racks = {broker: f"r{broker % rack_count}" for broker in brokers}
    if factor > broker_count:
        with pytest.raises(KafkaError) as refused:
            place(brokers, partitions, factor, fenced=fenced, racks=racks, seed=seed)
        assert refused.value.code is ErrorCode.INVALID_REPLICATION_FACTOR
        return
    placed = place(brokers, partitions, factor, fenced=fenced, racks=racks, seed=seed)
    assert len(placed) == partitions
    for replicas in placed:
        assert len(set(replicas)) == len(replicas) == factor
        assert replicas[0] not in fenced


@given(seed=st.integers(0, 2**32), rack_count=st.integers(1, 3))
def test_leaders_spread_evenly(seed, rack_count):
    brokers = [1, 2, 3, 4, 5, 6]
    placed = place(brokers, 60, 3, racks={broker: f"r{broker % rack_count}" for broker in brokers}, seed=seed)
    leaders = Counter(replicas[0] for replicas in placed)
    assert max(leaders.values()) - min(leaders.values()) <= 4


@given(seed=st.integers(0, 2**32))
def test_replicas_spread_over_racks(seed):
    racks = {1: "a", 2: "a", 3: "b", 4: "b", 5: "c", 6: "c"}
    for replicas in place([1, 2, 3, 4, 5, 6], 30, 3, racks=racks, seed=seed):
        assert {racks[broker] for broker in replicas} == {"a", "b", "c"}


def test_all_fenced_is_refused():
    with pytest.raises(KafkaError) as refused:
        place([1, 2], 1, 1, fenced=[1, 2])
    assert refused.value.code is ErrorCode.INVALID_REPLICATION_FACTOR
    assert "All brokers are currently fenced" in str(refused.value.message)
