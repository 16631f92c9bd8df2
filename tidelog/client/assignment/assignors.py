"""Who reads what: Kafka's partition assignors, run by the leader of a classic consumer group.

Range and round-robin are here, sticky and cooperative-sticky in `sticky_assignor`; `assignor_named` is the way in.
Pure: partition counts and subscriptions go in, an assignment comes out. Invariant of them all: every partition of a
subscribed topic goes to exactly one of the members that subscribed to it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import cycle
from typing import Protocol

from tidelog.client.assignment.protocol import Assignment, MemberSubscription, ordered_members
from tidelog.client.assignment.sticky_assignor import CooperativeStickyAssignor, StickyAssignor
from tidelog.client.model import TopicPartition


class Assignor(Protocol):
    """A strategy of `partition.assignment.strategy`."""

    name: str
    """As Kafka names it in JoinGroup: range, roundrobin, sticky, cooperative-sticky."""
    cooperative: bool
    """Members keep what they own during a rebalance and give up only what they are told to (KIP-429)."""

    def user_data(self, owned: Sequence[TopicPartition], generation: int) -> bytes | None:
        """What a member adds to its own subscription, from its last assignment."""

    def assign(self, partition_counts: Mapping[str, int], members: Mapping[str, MemberSubscription]) -> Assignment:
        """Every member with its partitions (an empty list too). Topics without a count do not exist: skipped."""


def _subscribers(
    partition_counts: Mapping[str, int], members: Mapping[str, MemberSubscription]
) -> dict[str, list[str]]:
    subscribers: dict[str, list[str]] = {}
    for member in ordered_members(members):
        for topic in dict.fromkeys(members[member].topics):
            if topic in partition_counts:
                subscribers.setdefault(topic, []).append(member)
    return subscribers


class RangeAssignor:
    """Each topic alone: consecutive partitions, the first members one more (Java's `RangeAssignor` without racks)."""

    name = "range"
    cooperative = False

    def user_data(self, owned: Sequence[TopicPartition], generation: int) -> bytes | None:
        return None

    def assign(self, partition_counts: Mapping[str, int], members: Mapping[str, MemberSubscription]) -> Assignment:
        assignment: Assignment = {member: [] for member in members}
        subscribers = _subscribers(partition_counts, members)
        for topic in sorted(subscribers):
            share, larger_shares = divmod(partition_counts[topic], len(subscribers[topic]))
            first = 0
            for position, member in enumerate(subscribers[topic]):
                end = first + share + (position < larger_shares)
                assignment[member].extend(TopicPartition(topic, partition) for partition in range(first, end))
                first = end
        return assignment


class RoundRobinAssignor:
    """All partitions of all topics in turn to the members in turn, passing over members without the topic."""

    name = "roundrobin"
    cooperative = False

    def user_data(self, owned: Sequence[TopicPartition], generation: int) -> bytes | None:
        return None

    def assign(self, partition_counts: Mapping[str, int], members: Mapping[str, MemberSubscription]) -> Assignment:
        assignment: Assignment = {member: [] for member in members}
        subscribers = {topic: set(names) for topic, names in _subscribers(partition_counts, members).items()}
        turn = cycle(ordered_members(members))
        for topic in sorted(subscribers):
            for partition in range(partition_counts[topic]):
                member = next(member for member in turn if member in subscribers[topic])
                assignment[member].append(TopicPartition(topic, partition))
        return assignment


def assignor_named(name: str) -> Assignor | None:
    """The assignor of that Kafka name; also its Java class name, full or bare. None when there is none."""
    known: dict[str, Assignor] = {}
    for assignor in (RangeAssignor(), RoundRobinAssignor(), StickyAssignor(), CooperativeStickyAssignor()):
        known[assignor.name] = known[type(assignor).__name__] = assignor
    return known.get(name.removeprefix("org.apache.kafka.clients.consumer."))
