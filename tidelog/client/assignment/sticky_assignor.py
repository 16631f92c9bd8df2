"""The sticky assignors: as balanced as the subscriptions allow, and moving as little as that needs.

Three steps: members keep what they own, what nobody holds goes to the least loaded subscriber, and where that left an
imbalance, partitions are shifted along the shortest chain of members that ends two lighter than it starts. No such
chain is left at the end, which for unit loads means that the balance is optimal (the semi-matching argument), where a
heuristic of single moves can stop short. Pure. Stands in for Java's `StickyAssignor` and `CooperativeStickyAssignor`,
whose user data and owned partitions it reads and writes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

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
"""Member -> (partitions it held, generation in which it held them)."""


class StickyAssignor:
    """Eager: members give up all before a rebalance, and mostly get the same back."""

    name = "sticky"
    cooperative = False

    def user_data(self, owned: Sequence[TopicPartition], generation: int) -> bytes | None:
        return encode_sticky_user_data(owned, generation) if owned else None

    def assign(self, partition_counts: Mapping[str, int], members: Mapping[str, MemberSubscription]) -> Assignment:
        ownership = {name: decode_sticky_user_data(member.user_data) for name, member in members.items()}
        return _Board(partition_counts, members, ownership).assign()


class CooperativeStickyAssignor:
    """Cooperative (KIP-429): a partition that must move is withheld from all, and given in the rebalance after."""

    name = "cooperative-sticky"
    cooperative = True

    def user_data(self, owned: Sequence[TopicPartition], generation: int) -> bytes | None:
        # Java writes the generation alone, for leaders that read no version 2 subscription.
        return generation.to_bytes(4, "big", signed=True)

    def assign(self, partition_counts: Mapping[str, int], members: Mapping[str, MemberSubscription]) -> Assignment:
        ownership = {name: (member.owned, _generation_of(member)) for name, member in members.items()}
        assignment = _Board(partition_counts, members, ownership).assign()
        holders: dict[TopicPartition, set[str]] = {}
        for name, member in members.items():
            for partition in member.owned:
                holders.setdefault(partition, set()).add(name)
        for name, partitions in assignment.items():
            # Not the claim of a member that fell out and came back: its successor holds the partition already.
            partitions[:] = [partition for partition in partitions if name in holders.get(partition, (name,))]
        return assignment


def _generation_of(member: MemberSubscription) -> int:
    if member.generation != UNKNOWN_GENERATION or member.user_data is None or len(member.user_data) < 4:
        return member.generation
    return int.from_bytes(member.user_data[:4], "big", signed=True)


class _Board:
    """One assignment in the making: which member holds what, and who else could."""

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
        # The topics with the fewest takers first: while everybody else is still free to even things out.
        self._topics = sorted(self._subscribers, key=lambda topic: (len(self._subscribers[topic]), topic))
        self._partition_counts = partition_counts
        self._ownership = ownership
        self._holder: dict[TopicPartition, str] = {}
        self._held: dict[str, dict[str, set[int]]] = {name: {} for name in self._rank}
        self._load = dict.fromkeys(self._rank, 0)

    def assign(self) -> Assignment:
        self._keep_owned()
        for topic in self._topics:
            for partition in range(self._partition_counts[topic]):
                wanted = TopicPartition(topic, partition)
                if wanted not in self._holder:
                    self._give(wanted, min(self._subscribers[topic], key=self._load_and_rank))
        while self._shift_once():
            pass
        assignment: Assignment = {name: [] for name in self._rank}
        for topic in sorted(self._topics):
            for partition in range(self._partition_counts[topic]):
                held = TopicPartition(topic, partition)
                assignment[self._holder[held]].append(held)
        return assignment

    def _load_and_rank(self, name: str) -> tuple[int, int]:
        return self._load[name], self._rank[name]

    def _keep_owned(self) -> None:
        """The claim of the newest generation counts; two of the same generation are both void, as in Java."""
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
                self._give(partition, holder)

    def _give(self, partition: TopicPartition, name: str) -> None:
        self._holder[partition] = name
        self._held[name].setdefault(partition.topic, set()).add(partition.partition)
        self._load[name] += 1

    def _take(self, partition: TopicPartition) -> None:
        name = self._holder.pop(partition)
        numbers = self._held[name][partition.topic]
        numbers.discard(partition.partition)
        if not numbers:
            del self._held[name][partition.topic]
        self._load[name] -= 1

    def _shift_once(self) -> bool:
        """Shift partitions along one chain, from a heavy member to one two or more lighter; False if there is none."""
        for heavy in sorted(self._rank, key=lambda name: (-self._load[name], self._rank[name])):
            chain = self._chain_from(heavy)
            if chain:
                # Decided on the state before the first move: each link hands on a partition of its own.
                moves = [(self._pick(giver, topic, taker), taker) for giver, topic, taker in chain]
                for partition, taker in moves:
                    self._take(partition)
                    self._give(partition, taker)
                return True
        return False

    def _pick(self, giver: str, topic: str, taker: str) -> TopicPartition:
        """One partition of `topic` to hand over, first one that the taker held before."""
        formerly = {number for name, number in self._ownership[taker][0] if name == topic}
        held = self._held[giver][topic]
        return TopicPartition(topic, max(held & formerly or held))

    def _chain_from(self, heavy: str) -> list[tuple[str, str, str]]:
        """The shortest chain of (giver, topic, taker) to the lightest member at least two below `heavy`, or []."""
        limit = self._load[heavy] - 2
        reached: dict[str, tuple[str, str]] = {heavy: ("", "")}
        row = deque([heavy])
        while row:
            ends: list[str] = []
            for _ in range(len(row)):
                giver = row.popleft()
                for topic in sorted(self._held[giver]):
                    for taker in self._subscribers[topic]:
                        if taker not in reached:
                            reached[taker] = (giver, topic)
                            row.append(taker)
                            if self._load[taker] <= limit:
                                ends.append(taker)
            if ends:
                return self._walk_back(reached, min(ends, key=self._load_and_rank))
        return []

    @staticmethod
    def _walk_back(reached: Mapping[str, tuple[str, str]], end: str) -> list[tuple[str, str, str]]:
        chain: list[tuple[str, str, str]] = []
        giver, topic = reached[end]
        while giver:
            chain.append((giver, topic, end))
            end = giver
            giver, topic = reached[end]
        return chain[::-1]
