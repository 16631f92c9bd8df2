"""The sticky assignors: the best balance that the subscriptions allow, with few moves.

Three steps. Members keep the partitions that they own. A free partition goes to its least loaded
subscriber. While an imbalance remains, partitions shift along the shortest chain of members whose
last member has at least two partitions fewer than the first. No such chain exists at the end. For
unit loads this means an optimal balance (the semi-matching argument), where a heuristic of single
moves can stop early. Pure. Compatible with Java's `StickyAssignor` and `CooperativeStickyAssignor`,
whose user data and owned partitions it reads and writes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from heapq import heapify, heapreplace

from tidelog.client.assignment.protocol import (
    UNKNOWN_GENERATION,
    Assignment,
    MemberSubscription,
    decode_sticky_user_data,
    encode_sticky_user_data,
    ordered_members,
)
from tidelog.client.model import TopicPartition

Ownership = Mapping[str, tuple[Sequence[TopicPartition], int]]
"""Member -> (its partitions, the generation in which it owned them)."""


class StickyAssignor:
    """Eager: members revoke all partitions before a rebalance, and mostly get them again."""

    name = "sticky"
    cooperative = False

    def user_data(self, owned: Sequence[TopicPartition], generation: int) -> bytes | None:
        return encode_sticky_user_data(owned, generation) if owned else None

    def assign(self, partition_counts: Mapping[str, int], members: Mapping[str, MemberSubscription]) -> Assignment:
        ownership = {name: decode_sticky_user_data(member.user_data) for name, member in members.items()}
        return _AssignmentBuilder(partition_counts, members, ownership).assign()


class CooperativeStickyAssignor:
    """Cooperative (KIP-429): a partition that must move stays free until the next rebalance."""

    name = "cooperative-sticky"
    cooperative = True

    def user_data(self, owned: Sequence[TopicPartition], generation: int) -> bytes | None:
        # As Java, only the generation: for leaders that cannot read a version 2 subscription.
        return generation.to_bytes(4, "big", signed=True)

    def assign(self, partition_counts: Mapping[str, int], members: Mapping[str, MemberSubscription]) -> Assignment:
        ownership = {name: (member.owned, _generation_of(member)) for name, member in members.items()}
        assignment = _AssignmentBuilder(partition_counts, members, ownership).assign()
        holders: dict[TopicPartition, tuple[int, set[str]]] = {}
        for name, (owned, generation) in ownership.items():
            for partition in owned:
                newest, names = holders.get(partition, (generation, set()))
                if generation >= newest:
                    holders[partition] = generation, {name} | (names if generation == newest else set())
        for name, partitions in assignment.items():
            # A partition with another owner is withheld. The stale claim of a member that returned does not count.
            partitions[:] = [partition for partition in partitions if name in holders.get(partition, (0, (name,)))[1]]
        return assignment


def _generation_of(member: MemberSubscription) -> int:
    if member.generation != UNKNOWN_GENERATION or member.user_data is None or len(member.user_data) < 4:
        return member.generation
    return int.from_bytes(member.user_data[:4], "big", signed=True)


class _AssignmentBuilder:
    """Builds one assignment from the current owners and the subscribers of each topic."""

    def __init__(
        self,
        partition_counts: Mapping[str, int],
        members: Mapping[str, MemberSubscription],
        ownership: Ownership,
    ) -> None:
        self._rank = {name: rank for rank, name in enumerate(ordered_members(members))}
        self._subscribers: dict[str, list[str]] = {}
        for name in self._rank:
            for topic in dict.fromkeys(members[name].topics):
                if topic in partition_counts:
                    self._subscribers.setdefault(topic, []).append(name)
        numbers: dict[tuple[str, ...], int] = {}
        self._audience_of = {
            topic: numbers.setdefault(tuple(names), len(numbers)) for topic, names in self._subscribers.items()
        }
        """Topic -> a number that all topics with the same subscribers share."""
        # Topics with the fewest subscribers first: later topics have more members to balance the
        # load.
        self._topics = sorted(self._subscribers, key=lambda topic: (len(self._subscribers[topic]), topic))
        self._partition_counts = partition_counts
        self._ownership = ownership
        self._holder: dict[TopicPartition, str] = {}
        self._topic_partitions_of: dict[str, dict[str, set[int]]] = {name: {} for name in self._rank}
        self._previous_numbers: dict[str, dict[str, set[int]]] = {}
        """Member -> topic -> the partitions that it owned; of the members that took one."""
        self._load = dict.fromkeys(self._rank, 0)
        self._settled: set[str] = set()
        """Members that a search without a chain has reached. Later searches skip them.

        All subscribers of what they hold are among them, so no chain leaves them. None enters them either: each has at
        least as many partitions as the first member of that search less one, and from then on no other member has more
        than that first one.
        """

    def assign(self) -> Assignment:
        self._keep_owned()
        free = [
            candidate
            for topic in self._topics
            for candidate in (TopicPartition(topic, number) for number in range(self._partition_counts[topic]))
            if candidate not in self._holder
        ]
        if self._are_equals():
            self._balance_equals(free)
        else:
            for candidate in free:
                self._assign_partition(candidate, min(self._subscribers[candidate.topic], key=self._load_and_rank))
            while self._shift_once():
                pass
        assignment: Assignment = {name: [] for name in self._rank}
        for topic in sorted(self._topics):
            for partition in range(self._partition_counts[topic]):
                assigned = TopicPartition(topic, partition)
                assignment[self._holder[assigned]].append(assigned)
        return assignment

    def _load_and_rank(self, name: str) -> tuple[int, int]:
        return self._load[name], self._rank[name]

    def _keep_owned(self) -> None:
        """Keep claims of the newest generation.

        Two claims of one generation are both void, as in Java.
        """
        claims: dict[TopicPartition, tuple[int, str | None]] = {}
        for name in self._rank:
            partitions, generation = self._ownership[name]
            for partition in dict.fromkeys(partitions):
                rival = claims.get(partition)
                if rival is None or generation > rival[0]:
                    claims[partition] = (generation, name)
                elif generation == rival[0]:
                    claims[partition] = (generation, None)
        subscribed = {topic: set(names) for topic, names in self._subscribers.items()}
        for partition, (_, holder) in claims.items():
            exists = 0 <= partition.partition < self._partition_counts.get(partition.topic, 0)
            if holder is not None and exists and holder in subscribed.get(partition.topic, ()):
                self._assign_partition(partition, holder)

    def _assign_partition(self, partition: TopicPartition, name: str) -> None:
        self._holder[partition] = name
        self._topic_partitions_of[name].setdefault(partition.topic, set()).add(partition.partition)
        self._load[name] += 1

    def _release_partition(self, partition: TopicPartition) -> None:
        name = self._holder.pop(partition)
        numbers = self._topic_partitions_of[name][partition.topic]
        numbers.discard(partition.partition)
        if not numbers:
            del self._topic_partitions_of[name][partition.topic]
        self._load[name] -= 1

    def _are_equals(self) -> bool:
        """Whether each member has all topics."""
        return all(len(names) == len(self._rank) for names in self._subscribers.values())

    def _balance_equals(self, free: Sequence[TopicPartition]) -> None:
        """The same steps for equals. A chain is then one move, from the most loaded member to the
        least loaded one, and no member that gives takes, or the other way round: two heaps find these, and a giver's
        entry among the lightest, or a taker's among the heaviest, need not be right.
        """
        lightest = [(load, self._rank[name], name) for name, load in self._load.items()]
        heapify(lightest)
        for partition in free:
            load, rank, name = lightest[0]
            self._assign_partition(partition, name)
            heapreplace(lightest, (load + 1, rank, name))
        heaviest = [(-load, rank, name) for load, rank, name in lightest]
        heapify(heaviest)
        to_give: dict[str, list[TopicPartition]] = {}
        while heaviest and -heaviest[0][0] - lightest[0][0] >= 2:
            minus_load, giver_rank, giver = heaviest[0]
            load, rank, taker = lightest[0]
            giving = to_give.get(giver)
            if giving is None:
                giving = to_give[giver] = self._in_order_of_giving(giver)
            while self._holder[giving[-1]] != giver:
                giving.pop()
            topic = giving[-1].topic
            has_owned = topic in self._previous_of(taker)
            partition = self._choose_partition(giver, topic, taker) if has_owned else giving[-1]
            self._release_partition(partition)
            self._assign_partition(partition, taker)
            heapreplace(heaviest, (minus_load + 1, giver_rank, giver))
            heapreplace(lightest, (load + 1, rank, taker))

    def _in_order_of_giving(self, giver: str) -> list[TopicPartition]:
        """What a member holds, the last one first: it gives the first topic, and the highest number of that."""
        held = self._topic_partitions_of[giver]
        return [TopicPartition(topic, number) for topic in sorted(held, reverse=True) for number in sorted(held[topic])]

    def _shift_once(self) -> bool:
        """Shift partitions along one chain to a member lighter by two or more; False without such a
        chain.
        """
        lightest = min(self._load.values(), default=0)
        for heavy in sorted(self._rank, key=lambda name: (-self._load[name], self._rank[name])):
            if self._load[heavy] - 2 < lightest:
                return False
            if heavy in self._settled:
                continue
            chain = self._find_chain(heavy)
            if chain:
                # All moves are chosen before the first one: each member passes on a partition that
                # it owned.
                moves = [(self._choose_partition(giver, topic, taker), taker) for giver, topic, taker in chain]
                for partition, taker in moves:
                    self._release_partition(partition)
                    self._assign_partition(partition, taker)
                return True
        return False

    def _choose_partition(self, giver: str, topic: str, taker: str) -> TopicPartition:
        """One partition of `topic` to pass on, preferably one that the taker owned before."""
        held = self._topic_partitions_of[giver][topic]
        return TopicPartition(topic, max(held & self._previous_of(taker).get(topic, set()) or held))

    def _previous_of(self, name: str) -> dict[str, set[int]]:
        """By topic, the partitions that a member owned."""
        previous = self._previous_numbers.get(name)
        if previous is None:
            previous = self._previous_numbers[name] = {}
            for topic, number in self._ownership[name][0]:
                previous.setdefault(topic, set()).add(number)
        return previous

    def _find_chain(self, heavy: str) -> list[tuple[str, str, str]]:
        """The shortest chain of (giver, topic, taker) to the lightest member two or more below
        `heavy`, or [].
        """
        limit = self._load[heavy] - 2
        audiences: set[int] = set()
        previous_links: dict[str, tuple[str, str]] = {heavy: ("", "")}
        queue = deque([heavy])
        while queue:
            lighter_members: list[str] = []
            for _ in range(len(queue)):
                giver = queue.popleft()
                for topic in sorted(self._topic_partitions_of[giver]):
                    if len(previous_links) + len(self._settled) == len(self._rank):
                        break  # none is left to find
                    if self._audience_of[topic] in audiences:
                        continue  # its subscribers are found
                    audiences.add(self._audience_of[topic])
                    for taker in self._subscribers[topic]:
                        if taker not in previous_links and taker not in self._settled:
                            previous_links[taker] = (giver, topic)
                            queue.append(taker)
                            if self._load[taker] <= limit:
                                lighter_members.append(taker)
            if lighter_members:
                return self._walk_back(previous_links, min(lighter_members, key=self._load_and_rank))
        self._settled.update(previous_links)
        return []

    @staticmethod
    def _walk_back(previous_links: Mapping[str, tuple[str, str]], end: str) -> list[tuple[str, str, str]]:
        chain: list[tuple[str, str, str]] = []
        giver, topic = previous_links[end]
        while giver:
            chain.append((giver, topic, end))
            end = giver
            giver, topic = previous_links[end]
        return chain[::-1]
