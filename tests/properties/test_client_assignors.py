"""Assignors over all small groups: complete, allowed, as balanced as can be, and moving no more than that needs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidelog.client.assignment.assignors import assignor_named
from tidelog.client.assignment.protocol import Assignment, MemberSubscription, encode_sticky_user_data
from tidelog.client.model import TopicPartition

TOPICS = ("a", "b", "c")
NAMES = ["range", "roundrobin", "sticky", "cooperative-sticky"]

counts = st.dictionaries(st.sampled_from(TOPICS), st.integers(1, 5), min_size=1)
topic_sets = st.lists(st.sampled_from(TOPICS), unique=True, max_size=3)
groups = st.lists(topic_sets, min_size=1, max_size=5).map(
    lambda subscribed: {f"m{number}": MemberSubscription(tuple(topics)) for number, topics in enumerate(subscribed)}
)


def with_ownership(members: Mapping[str, MemberSubscription], assignment: Assignment, generation: int):
    """The members as they would join again, telling what they own in both of the ways."""
    told = {}
    for name, member in members.items():
        held = tuple(assignment.get(name, ()))
        told[name] = member._replace(
            owned=held, generation=generation, user_data=encode_sticky_user_data(held, generation)
        )
    return told


def wanted(partition_counts: Mapping[str, int], members: Mapping[str, MemberSubscription]) -> set[TopicPartition]:
    subscribed = {topic for member in members.values() for topic in member.topics}
    return {
        TopicPartition(topic, n)
        for topic, count in partition_counts.items()
        if topic in subscribed
        for n in range(count)
    }


def loads(assignment: Assignment) -> list[int]:
    return sorted(len(partitions) for partitions in assignment.values())


def assigner(name: str):
    assignor = assignor_named(name)
    assert assignor is not None
    return assignor.assign


@pytest.mark.parametrize("name", NAMES)
@given(partition_counts=counts, members=groups)
def test_each_partition_goes_to_exactly_one_subscriber(name, partition_counts, members):
    assignment = assigner(name)(partition_counts, members)
    assert assignment.keys() == members.keys()
    given_out = [partition for partitions in assignment.values() for partition in partitions]
    assert Counter(given_out) == Counter(wanted(partition_counts, members))
    for member, partitions in assignment.items():
        assert {partition.topic for partition in partitions} <= set(members[member].topics)


@given(partition_counts=counts, members=groups)
def test_sticky_is_as_balanced_as_any_assignment_could_be(partition_counts, members):
    """No chain of moves leads from a member to one two lighter: for unit loads that is the optimum (semi-matching)."""
    assignment = assigner("sticky")(partition_counts, members)
    for heavy in members:
        reached, row = {heavy}, [heavy]
        while row:
            giver = row.pop()
            for topic in {partition.topic for partition in assignment[giver]}:
                for taker, member in members.items():
                    if topic in member.topics and taker not in reached:
                        reached.add(taker)
                        row.append(taker)
        assert all(len(assignment[heavy]) - len(assignment[light]) < 2 for light in reached)


@given(
    partition_counts=st.dictionaries(st.sampled_from("ab"), st.integers(1, 3), min_size=1),
    subscribed=st.lists(st.lists(st.sampled_from("ab"), unique=True, min_size=1), min_size=1, max_size=3),
)
def test_sticky_is_as_balanced_as_the_best_of_all_assignments(partition_counts, subscribed):
    """The same claim against brute force, for groups small enough."""
    members = {f"m{number}": MemberSubscription(tuple(topics)) for number, topics in enumerate(subscribed)}
    everything = sorted(wanted(partition_counts, members))
    choices = [[name for name, member in members.items() if part.topic in member.topics] for part in everything]
    best = min(sum(load * load for load in Counter(takers).values()) if takers else 0 for takers in product(*choices))
    assert sum(load * load for load in loads(assigner("sticky")(partition_counts, members))) == best


@given(count=st.integers(1, 12), before=st.integers(1, 6), after=st.integers(1, 6), shift=st.integers(0, 5))
def test_sticky_moves_only_what_balance_demands_when_members_come_and_go(count, before, after, shift):
    """With equal subscriptions the least number of moves is known: what exceeds each share, shares chosen well."""
    old = {f"m{number}": MemberSubscription(("t",)) for number in range(before)}
    new = {f"m{number}": MemberSubscription(("t",)) for number in range(shift, shift + after)}
    first = assigner("sticky")({"t": count}, old)
    told = with_ownership(new, first, 1)
    second = assigner("sticky")({"t": count}, told)
    assert loads(second)[-1] - loads(second)[0] <= 1
    kept = sum(len(set(second[name]) & set(first.get(name, ()))) for name in new)
    share, larger = divmod(count, after)
    held = sorted((len(first.get(name, ())) for name in new), reverse=True)
    most = sum(min(each, share + (rank < larger)) for rank, each in enumerate(held))
    assert kept == most


@given(partition_counts=counts, members=groups)
def test_sticky_changes_nothing_when_nothing_changed(partition_counts, members):
    first = assigner("sticky")(partition_counts, members)
    second = assigner("sticky")(partition_counts, with_ownership(members, first, 1))
    assert {name: set(parts) for name, parts in first.items()} == {name: set(parts) for name, parts in second.items()}


@given(partition_counts=counts, old=groups, new=groups)
def test_cooperative_members_never_hold_a_partition_at_the_same_time_and_soon_hold_all(partition_counts, old, new):
    assign = assigner("cooperative-sticky")
    owned = assign(partition_counts, old)
    generation = 1
    for _ in range(4):
        told = with_ownership(new, owned, generation)
        given_out = assign(partition_counts, told)
        for name, partitions in given_out.items():
            for other, held in owned.items():
                if other != name and other in new:
                    # Still in the other's hands until it has joined again.
                    assert not set(partitions) & set(held)
        owned, generation = given_out, generation + 1
    held_now = [partition for partitions in owned.values() for partition in partitions]
    assert Counter(held_now) == Counter(wanted(partition_counts, new))
