"""Kafka's partition assignors, run by the leader of a classic consumer group.

Range and round-robin are here, sticky and cooperative-sticky in `sticky_assignor`. `assignor_named`
returns an assignor by its name. Pure: partition counts and subscriptions go in, an assignment comes
out. Invariant of all assignors: every partition of a subscribed topic goes to exactly one of its
subscribers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import cycle
from typing import Protocol

from tidelog.client.arguments import as_mapping, as_partitions
from tidelog.client.assignment.protocol import Assignment, MemberSubscription, ordered_members
from tidelog.client.assignment.sticky_assignor import CooperativeStickyAssignor, StickyAssignor
from tidelog.client.model import TopicPartition


class Assignor(Protocol):
    """A strategy of `partition.assignment.strategy`. An object with these members is one, too:
    `Consumer(partition_assignment_strategy=[MyAssignor()])`. Every member of the group needs it.
    """

    name: str
    """The name in JoinGroup, the same in every member; Kafka's own are range, roundrobin, sticky and
    cooperative-sticky.
    """
    cooperative: bool
    """Members keep their partitions during a rebalance and revoke only those assigned to others
    (KIP-429).
    """

    def user_data(self, owned: Sequence[TopicPartition], generation: int) -> bytes | None:
        """The user data in this member's subscription, made from its last assignment and the generation
        of that (-1 before the first); None for no user data.
        """

    def assign(self, partition_counts: Mapping[str, int], members: Mapping[str, MemberSubscription]) -> Assignment:
        """The partitions of each member, by member id; run by the leader of the group.

        `partition_counts`: by name, the subscribed topics that exist. `members`: the subscription of
        each member by its id. A member that is left out gets nothing. What it raises, `poll` of the
        leader raises.
        """


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
    """Assigns each topic alone: consecutive partitions, one more for the first members.

    As Java's `RangeAssignor` without racks.
    """

    name = "range"
    cooperative = False

    def user_data(self, owned: Sequence[TopicPartition], generation: int) -> bytes | None:
        return None

    def assign(self, partition_counts: Mapping[str, int], members: Mapping[str, MemberSubscription]) -> Assignment:
        assignment: Assignment = {member: [] for member in members}
        subscribers = _subscribers(partition_counts, members)
        for topic in sorted(subscribers):
            names = subscribers[topic]
            share, larger_shares = divmod(partition_counts[topic], len(names))
            start = 0
            for position, member in enumerate(names if share else names[:larger_shares]):
                end = start + share + (position < larger_shares)
                assignment[member].extend(TopicPartition(topic, partition) for partition in range(start, end))
                start = end
        return assignment


class RoundRobinAssignor:
    """Assigns all partitions to the members in rotation and skips members without the topic."""

    name = "roundrobin"
    cooperative = False

    def user_data(self, owned: Sequence[TopicPartition], generation: int) -> bytes | None:
        return None

    def assign(self, partition_counts: Mapping[str, int], members: Mapping[str, MemberSubscription]) -> Assignment:
        assignment: Assignment = {member: [] for member in members}
        subscribers = {topic: set(names) for topic, names in _subscribers(partition_counts, members).items()}
        member_cycle = cycle(ordered_members(members))
        for topic in sorted(subscribers):
            for partition in range(partition_counts[topic]):
                member = next(member for member in member_cycle if member in subscribers[topic])
                assignment[member].append(TopicPartition(topic, partition))
        return assignment


def check_assignor(value: object) -> str | None:
    """Why a value of `partition_assignment_strategy` is not an assignor, None if it is."""
    for attribute, kind in (("name", str), ("cooperative", bool)):
        if not isinstance(getattr(value, attribute, None), kind):
            return f"{value!r} has no {attribute} ({kind.__name__})"
    for method in ("assign", "user_data"):
        if not callable(getattr(value, method, None)):
            return f"{value!r} has no method {method}()"
    return None


def checked_assignment(
    name: str, assignment: Mapping[str, Sequence[TopicPartition]], members: Mapping[str, MemberSubscription]
) -> Assignment:
    """The assignment of an assignor of the application, with an entry for each member. Raises ValueError
    for a member that does not exist and for a partition with two members.
    """
    owner: dict[TopicPartition, str] = {}
    checked: Assignment = {member: [] for member in members}
    what = f"the assignment of assignor {name!r}"
    for member, partitions in as_mapping(what, assignment, "TopicPartitions by member").items():
        if member not in members:
            raise ValueError(f"assignor {name!r} assigned partitions to {member!r}, which is not a member")
        checked[member] = as_partitions(f"{what} to {member!r}", partitions)
        for partition in checked[member]:
            if owner.setdefault(partition, member) != member:
                raise ValueError(f"assignor {name!r} assigned {partition} to {owner[partition]!r} and {member!r}")
    return checked


def assignor_named(name: str) -> Assignor | None:
    """The assignor with this Kafka name or Java class name, full or bare; None if unknown."""
    assignors: dict[str, Assignor] = {}
    for assignor in (RangeAssignor(), RoundRobinAssignor(), StickyAssignor(), CooperativeStickyAssignor()):
        assignors[assignor.name] = assignors[type(assignor).__name__] = assignor
    return assignors.get(name.removeprefix("org.apache.kafka.clients.consumer."))
