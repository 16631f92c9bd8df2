"""Proposals of replicas for `tidelog reassign --generate`. Pure; randomness is an argument.

The topics to move have the form of kafka-reassign-partitions, `{"topics": [{"topic": "t"}], "version": 1}`.
Invariant: leaders are spread evenly over the brokers, no broker has two replicas of a partition, and no rack has two
while another has none.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import chain, zip_longest
from typing import TYPE_CHECKING

from tidelog.cli.reassign.partition_lists import ListError, Plan, entries_in
from tidelog.client.model import Node, TopicPartition
from tidelog.protocol.errors import counted

if TYPE_CHECKING:
    import random


def topics_in(text: str) -> list[str]:
    """The topics to move. Raises ListError."""
    entries = entries_in(text, "topics", '{"topic": ...}', "topic")
    names = [entry.get("topic") if isinstance(entry, dict) else None for entry in entries]
    for entry, name in zip(entries, names):
        if not isinstance(name, str):
            raise ListError(f"expected a topic, not {json.dumps(entry)}")
        if names.count(name) > 1:
            raise ListError(f"{name} is there twice")
    return [name for name in names if isinstance(name, str)]


def proposal(
    assignment: Mapping[TopicPartition, Sequence[int]],
    brokers: Sequence[Node],
    rng: random.Random,
    *,
    by_rack: bool = True,
) -> Plan:
    """A plan over these brokers; each partition gets as many replicas as the first partition of its topic has. Raises
    ListError.
    """
    racks = {broker.node_id: broker.rack if by_rack else None for broker in brokers}
    known = [rack for rack in racks.values() if rack is not None]
    if known and len(known) < len(racks):
        raise ListError("not all of these brokers have a rack: --disable-rack-aware leaves racks out of account")
    topics: dict[str, list[TopicPartition]] = {}
    for partition in sorted(assignment):
        topics.setdefault(partition.topic, []).append(partition)
    plan: Plan = {}
    for name, partitions in topics.items():
        count = len(assignment[partitions[0]])
        if count > len(racks):
            raise ListError(
                f"{name} has {counted(count, 'replica')} of each partition: so many brokers are wanted, "
                f"not {len(racks)}"
            )
        plan.update(zip(partitions, _spread(len(partitions), count, racks, rng)))
    return plan


def _spread(partitions: int, count: int, racks: Mapping[int, str | None], rng: random.Random) -> list[list[int]]:
    """Spread the leaders in order over the ring. The followers are rotated by an offset that grows with each round, so
    that leaders do not share the same followers.
    """
    ring = _ring(racks)
    start, turn = rng.randrange(len(ring)), rng.randrange(len(ring))
    spread = []
    for number in range(partitions):
        at = (start + number) % len(ring)
        others = ring[at + 1 :] + ring[:at]
        shift = (turn + number // len(ring)) % max(1, len(others))
        spread.append(_chosen(ring[at], others[shift:] + others[:shift], count, racks))
    return spread


def _chosen(leader: int, others: list[int], count: int, racks: Mapping[int, str | None]) -> list[int]:
    """The leader and the first of the other brokers, with one broker of each rack before a second one of any rack."""
    chosen = [leader]
    used = [racks[leader]]
    while len(chosen) < count:
        fewest = min(used.count(racks[other]) for other in others)
        follower = next(other for other in others if used.count(racks[other]) == fewest)
        others.remove(follower)
        chosen.append(follower)
        used.append(racks[follower])
    return chosen


def _ring(racks: Mapping[int, str | None]) -> list[int]:
    """The brokers in an order that alternates between the racks."""
    by_rack: dict[str, list[int]] = {}
    for broker in sorted(racks):
        by_rack.setdefault(racks[broker] or "", []).append(broker)
    rounds = zip_longest(*(by_rack[rack] for rack in sorted(by_rack)))
    return [broker for broker in chain.from_iterable(rounds) if broker is not None]
