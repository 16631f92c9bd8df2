"""What `tidelog reassign --generate` proposes: even, on as many racks as there are, with as many replicas as before."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from tidelog.cli.reassign.partition_lists import ListError
from tidelog.cli.reassign.proposals import proposal, topics_in
from tidelog.client.model import Node, TopicPartition


def brokers(*racks: str | None) -> list[Node]:
    return [Node(number, "h", 9092, rack) for number, rack in enumerate(racks, 1)]


def placed(**topics: tuple[int, int]) -> dict[TopicPartition, list[int]]:
    """(partitions, replicas of each)"""
    return {
        TopicPartition(name, number): list(range(70, 70 + replicas))
        for name, (partitions, replicas) in topics.items()
        for number in range(partitions)
    }


@pytest.mark.parametrize("seed", range(300))
def test_it_is_even_over_brokers_and_racks(seed: int) -> None:
    rng = random.Random(seed)
    choices: list[list[str | None]] = [[None], ["a"], ["a", "b"], ["a", "b", "c"]]
    racks = rng.choice(choices)
    nodes = brokers(*(racks[each % len(racks)] for each in range(rng.randint(1, 9))))
    rng.shuffle(nodes)
    rack_of = {node.node_id: node.rack for node in nodes}
    partitions, count = rng.randint(1, 40), rng.randint(1, len(nodes))
    wanted = placed(t=(partitions, count), u=(2, 1))
    plan = proposal(wanted, nodes, rng)
    assert plan.keys() == wanted.keys()
    assert all(len(plan[partition]) == len(replicas) for partition, replicas in wanted.items())
    of_t = [replicas for partition, replicas in plan.items() if partition.topic == "t"]
    leaders = Counter(dict.fromkeys(rack_of, 0))
    leaders.update(replicas[0] for replicas in of_t)
    assert max(leaders.values()) - min(leaders.values()) <= 1
    for replicas in of_t:
        assert len(set(replicas)) == count
        used = Counter(dict.fromkeys(rack_of.values(), 0))
        used.update(rack_of[replica] for replica in replicas)
        room = Counter(rack_of.values())
        assert not any(used[a] > used[b] + 1 and used[b] < room[b] for a in used for b in used)
    if partitions >= len(nodes) and len(set(rack_of.values())) == 1:
        held = Counter(replica for replicas in of_t for replica in replicas)
        assert max(held.values()) - min(held.values()) <= count


def test_rounds_differ() -> None:
    plan = proposal(placed(t=(8, 2)), brokers(None, None, None, None), random.Random(1))
    assert len({tuple(replicas) for replicas in plan.values()}) == 8


def test_what_cannot_be_proposed() -> None:
    with pytest.raises(ListError, match="not all of these brokers have a rack"):
        proposal(placed(t=(1, 1)), brokers("a", None), random.Random(1))
    assert proposal(placed(t=(1, 2)), brokers("a", None), random.Random(1), by_rack=False)
    with pytest.raises(ListError, match="t has 3 replicas of each partition: so many brokers are wanted, not 2"):
        proposal(placed(t=(1, 3)), brokers("a", "b"), random.Random(1))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{", "not JSON"),
        ("[]", "at least one topic"),
        ('{"topics": []}', "at least one topic"),
        ('{"topics": ["t"]}', 'not "t"'),
        ('{"topics": [{"topic": 5}]}', "not {"),
        ('{"topics": [{"topic": "t"}, {"topic": "t"}]}', "t is there twice"),
        ('{"topics": [{"topic": "t"}], "version": 2}', "version 2"),
    ],
)
def test_a_file_that_is_no_list_of_topics(text: str, problem: str) -> None:
    with pytest.raises(ListError, match=problem):
        topics_in(text)
    assert topics_in('{"version": 1, "topics": [{"topic": "t"}, {"topic": "u"}]}') == ["t", "u"]
