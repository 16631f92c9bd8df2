"""The files of the partition tools: what is read, what is refused, what a plan means for throttles and progress."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tidelog.cli.reassign.partition_lists import (
    COMPLETE,
    ELSEWHERE,
    MISSING,
    MOVING,
    ListError,
    as_plan,
    directories_in,
    partitions_in,
    plan_in,
    progress,
    throttles,
)
from tidelog.client import TopicPartition
from tidelog.client.model import PartitionReassignment, Replica

A0, A1, B0 = TopicPartition("a", 0), TopicPartition("a", 1), TopicPartition("b", 0)


def document(*entries: Any, **more: Any) -> str:
    return json.dumps({"partitions": list(entries), **more})


def entry(partition: TopicPartition, **more: Any) -> dict[str, Any]:
    return {"topic": partition.topic, "partition": partition.partition, **more}


def test_lists_and_plans_are_read():
    assert partitions_in(document(entry(B0), entry(A1))) == [B0, A1]
    text = document(entry(A0, replicas=[3, 1], log_dirs=["any", "any"]), entry(B0, replicas=[2]), version=1)
    assert plan_in(text) == {A0: [3, 1], B0: [2]}
    assert plan_in(as_plan({B0: (2,), A0: (3, 1)})) == {A0: [3, 1], B0: [2]}
    assert directories_in(text) == {}
    placed = {Replica("a", 0, 1): "/x", Replica("b", 0, 2): "/y"}
    assert directories_in(as_plan({B0: (2,), A0: (3, 1)}, placed)) == placed


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{", "not JSON"),
        ("[]", "expected {"),
        (document(), "at least one"),
        (document("a-0"), "expected a topic and a partition"),
        (document({"topic": "a", "partition": "0"}), "expected a topic and a partition"),
        (document({"topic": "a", "partition": True}), "expected a topic and a partition"),
        (document(entry(A0, replicas=[1]), entry(A0, replicas=[2])), "a-0 is there twice"),
        (document(entry(A0)), "a-0: replicas must be"),
        (document(entry(A0, replicas=[])), "a-0: replicas must be"),
        (document(entry(A0, replicas=["1"])), "a-0: replicas must be"),
        (document(entry(A0, replicas=[1, 1])), "a-0: a broker is named twice"),
        (document(entry(A0, replicas=[1], log_dirs=["/a", "/b"])), "a-0: 1 replica, but 2 log_dirs"),
        (document(entry(A0, replicas=[1], log_dirs="/a")), "a-0: log_dirs must be a list"),
        (document(entry(A0, replicas=[1], log_dirs=[5])), "a-0: log_dirs must be a list"),
        (document(entry(A0, replicas=[1]), version=2), "version 2 is not known"),
    ],
)
def test_what_is_no_plan_is_said(text: str, problem: str):
    with pytest.raises(ListError) as caught:
        directories_in(text)
    assert problem in str(caught.value)


def test_throttles_hold_back_sources_and_newcomers_as_kafkas_tool_does():
    placed = {A0: (1, 2), A1: (1, 2), B0: (3,)}
    topics, brokers = throttles({A0: [2, 3], A1: [2, 1], B0: [4]}, placed, {})
    assert topics == {
        "a": {
            "leader.replication.throttled.replicas": "0:1,0:2",
            "follower.replication.throttled.replicas": "0:3",
        },
        "b": {"leader.replication.throttled.replicas": "0:3", "follower.replication.throttled.replicas": "0:4"},
    }
    assert brokers == [1, 2, 3, 4]


def test_a_plan_changed_on_the_way_throttles_what_has_not_come_yet():
    moving = {A0: PartitionReassignment((1, 2, 3), adding=(3,), removing=(1,))}
    topics, _ = throttles({A0: [2, 3]}, {A0: (1, 2, 3)}, moving)
    assert topics["a"]["follower.replication.throttled.replicas"] == "0:3"
    assert topics["a"]["leader.replication.throttled.replicas"] == "0:1,0:2"


def test_a_plan_keeps_the_throttles_of_what_moves_already():
    """A topic has one list: one with only the new plan's partitions would set those on their way free."""
    moving = {
        A0: PartitionReassignment((1, 2, 3), adding=(3,), removing=(1,)),
        B0: PartitionReassignment((5, 6), adding=(6,), removing=(5,)),
    }
    topics, brokers = throttles({A1: [2, 4]}, {A1: (1, 2)}, moving)
    assert topics == {
        "a": {
            "leader.replication.throttled.replicas": "0:1,0:2,1:1,1:2",
            "follower.replication.throttled.replicas": "0:3,1:4",
        },
        "b": {"leader.replication.throttled.replicas": "0:5", "follower.replication.throttled.replicas": "0:6"},
    }
    assert brokers == [1, 2, 3, 4, 5, 6]


def test_a_plan_that_moves_nothing_throttles_nobody():
    assert throttles({A0: [2, 1]}, {A0: (1, 2)}, {}) == ({}, [])


def test_progress():
    placed = {A0: (1, 2), A1: (1, 2, 3), B0: (3,)}
    moving = {A1: PartitionReassignment((1, 2, 3), (3,), (1,))}
    plan = {A0: [1, 2], A1: [2, 3], B0: [4], TopicPartition("c", 0): [1]}
    assert list(progress(plan, placed, moving).values()) == [COMPLETE, MOVING, ELSEWHERE, MISSING]
