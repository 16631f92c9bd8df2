"""Keys go where Java's clients send them; records without a key are spread evenly."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from random import Random

import pytest

from tidelog.client.assignment.partitioner import (
    RoundRobinPartitioner,
    StickyPartitioner,
    murmur2,
    positive_hash,
)

# From Kafka's own UtilsTest, as signed 32-bit numbers.
KAFKAS_VECTORS = {
    b"21": -973932308,
    b"foobar": -790332482,
    b"a-little-bit-long-string": -985981536,
    b"a-little-bit-longer-string": -1486304829,
    b"lkjh234lh9fiuh90y23oiuhsafujhadof229phr9h19h89h8": -58897971,
    b"abc": 479470107,
}


@pytest.mark.parametrize("key", KAFKAS_VECTORS)
def test_murmur2_agrees_with_javas(key):
    unsigned = murmur2(key)
    signed = unsigned - (1 << 32) if unsigned >= 1 << 31 else unsigned
    assert signed == KAFKAS_VECTORS[key]


def test_a_negative_hash_loses_its_sign_bit_instead_of_changing_sign():
    assert positive_hash(b"21") == -973932308 & 0x7FFFFFFF
    assert positive_hash(b"21") % 6 == (-973932308 & 0x7FFFFFFF) % 6


def test_the_sticky_spread_stays_until_it_has_given_its_bytes():
    spread = StickyPartitioner(Random(1), 100)
    available = (0, 1, 2)
    first = spread.choose(available)
    spread.record_sent(60)
    assert spread.choose(available) == first
    spread.record_sent(60)
    assert spread.choose(available) != first


def test_the_sticky_spread_visits_every_partition_equally_often():
    spread = StickyPartitioner(Random(7), 1)
    available = tuple(range(5))
    visits: Counter[int] = Counter()
    for _ in range(500):
        visits[spread.choose(available)] += 1
        spread.record_sent(1)
    assert set(visits.values()) == {100}


def test_the_sticky_spread_leaves_a_partition_that_lost_its_leader():
    spread = StickyPartitioner(Random(1), 1000)
    gone = spread.choose((0, 1, 2))
    rest = tuple(number for number in range(3) if number != gone)
    assert all(spread.choose(rest) != gone for _ in range(10))


def test_the_sticky_spread_does_not_stay_after_a_round_ends():
    spread = StickyPartitioner(Random(3), 1)
    available = (0, 1)
    chosen = []
    for _ in range(100):
        chosen.append(spread.choose(available))
        spread.record_sent(1)
    assert all(one != other for one, other in pairwise(chosen))


def test_a_single_partition_is_always_chosen():
    spread = StickyPartitioner(Random(3), 1)
    for _ in range(5):
        assert spread.choose((4,)) == 4
        spread.record_sent(10)


@pytest.mark.parametrize("new", [lambda: StickyPartitioner(Random(3), 100), RoundRobinPartitioner])
def test_the_choice_with_a_size_is_the_choice_and_then_the_size(new):
    in_one, in_two = new(), new()
    chance = Random(4)
    available: tuple[int, ...] = (0, 1, 2, 3)
    for _ in range(500):
        if chance.random() < 0.05:
            available = tuple(chance.sample(range(6), 3))
        size_bytes = chance.randrange(60)
        expected = in_two.choose(available)
        in_two.record_sent(size_bytes)
        assert in_one.choose_for(size_bytes, available) == expected


def test_round_robin_takes_turns():
    spread = RoundRobinPartitioner()
    assert [spread.choose((0, 2, 3)) for _ in range(6)] == [0, 2, 3, 0, 2, 3]


def visits_of(loads: dict[int, int | None], count: int = 4_000) -> Counter[int]:
    spread = StickyPartitioner(Random(5), 1, lambda partitions: [loads[partition] for partition in partitions])
    available = tuple(loads)
    visits: Counter[int] = Counter()
    for _ in range(count):
        visits[spread.choose(available)] += 1
        spread.record_sent(1)
    return visits


def test_a_partition_with_a_longer_queue_gets_less():
    visits = visits_of({0: 0, 1: 3, 2: 3, 3: 1})  # weights 4, 1, 1, 3
    assert [round(visits[partition] * 9 / 4_000) for partition in range(4)] == [4, 1, 1, 3]


def test_equal_queues_are_visited_in_rounds():
    assert set(visits_of({0: 2, 1: 2, 2: 2, 3: 2}).values()) == {1_000}


def test_a_partition_to_be_avoided_gets_nothing_unless_all_are():
    assert set(visits_of({0: 0, 1: None, 2: 0})) == {0, 2}
    assert set(visits_of({0: 5, 1: None})) == {0}
    assert set(visits_of({0: None, 1: None}).values()) == {2_000}
