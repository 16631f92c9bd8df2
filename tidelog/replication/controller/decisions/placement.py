"""Placement of new replicas on brokers: striped over racks, then over the brokers of a rack.

The order is Kafka's (StripedReplicaPlacer). Partition p starts one rack after partition p - 1. In
each round the brokers of every rack shift by one. Only unfenced brokers become leaders. The caller
passes in the randomness as `rng`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from tidelog.protocol.errors import ErrorCode, KafkaError
from tidelog.replication.controller.metadata.image import BrokerImage

if TYPE_CHECKING:
    import random


class _Ring:
    """The fenced or the unfenced brokers of one rack, in rotation; each round starts one broker
    further.
    """

    def __init__(self, brokers: list[int], rng: random.Random) -> None:
        self.brokers = sorted(brokers)
        self._offset = rng.randrange(len(brokers)) if brokers else 0
        self._round = 0
        self._taken_count = 0

    def next(self, number: int) -> int | None:
        """The next broker of round `number`; None after the last."""
        if not self.brokers:
            return None
        if self._round != number:
            self._round, self._taken_count = number, 0
            self._offset = (self._offset + 1) % len(self.brokers)
        if self._taken_count == len(self.brokers):
            return None
        broker = self.brokers[(self._taken_count + self._offset) % len(self.brokers)]
        self._taken_count += 1
        return broker


class _Rack:
    def __init__(self, brokers: list[BrokerImage], rng: random.Random) -> None:
        self.active = _Ring([broker.node_id for broker in brokers if not broker.fenced], rng)
        self.fenced = _Ring([broker.node_id for broker in brokers if broker.fenced], rng)

    def next(self, number: int) -> int | None:
        broker = self.active.next(number)
        return self.fenced.next(number) if broker is None else broker


class _Placer:
    def __init__(self, brokers: list[BrokerImage], rng: random.Random) -> None:
        by_rack: dict[str, list[BrokerImage]] = {}
        for broker in brokers:
            by_rack.setdefault(broker.rack or "", []).append(broker)
        self._racks = [_Rack(by_rack[name], rng) for name in sorted(by_rack)]
        self._active_count = sum(1 for broker in brokers if not broker.fenced)
        self._offset = rng.randrange(len(self._racks))
        self._round = 0
        self._rng = rng

    def place(self, replication_factor: int) -> tuple[int, ...]:
        if self._round == self._active_count and self._active_count > 1:
            # Each broker has led once. Shuffle, because the same replica sets would follow again.
            self._rng.shuffle(self._racks)
            for rack in self._racks:
                self._rng.shuffle(rack.active.brokers)
                self._rng.shuffle(rack.fenced.brokers)
            self._round = 0
        self._offset %= len(self._racks)
        leader_rack, leader = self._leader()
        replicas = [leader]
        index = self._offset
        skip: int | None = leader_rack
        while len(replicas) < replication_factor:
            broker = None
            if index == skip:
                skip = None  # skip the leader's rack once
            else:
                broker = self._racks[index].next(self._round)
            index = (index + 1) % len(self._racks)
            if broker is not None:
                replicas.append(broker)
        self._round += 1
        self._offset += 1
        return tuple(replicas)

    def _leader(self) -> tuple[int, int]:
        for step in range(len(self._racks)):
            index = (self._offset + step) % len(self._racks)
            broker = self._racks[index].active.next(self._round)
            if broker is not None:
                return index, broker
        raise AssertionError("placing without an active broker")


def place_replicas(
    brokers: Iterable[BrokerImage], partition_count: int, replication_factor: int, rng: random.Random
) -> list[tuple[int, ...]]:
    """The replicas of each new partition, preferred leader first. Raises
    KafkaError(INVALID_REPLICATION_FACTOR).
    """
    registered = list(brokers)
    problem: str | None = None
    if all(broker.fenced for broker in registered):
        problem = "All brokers are currently fenced."
    elif replication_factor > len(registered):
        problem = (
            f"The target replication factor of {replication_factor} cannot be reached because only "
            f"{len(registered)} broker(s) are registered or some brokers have all their log directories cordoned."
        )
    if problem is not None:
        message = f"Unable to replicate the partition {replication_factor} time(s): {problem}"
        raise KafkaError(ErrorCode.INVALID_REPLICATION_FACTOR, message)
    if len(registered) == 1:
        return [(registered[0].node_id,)] * partition_count
    placer = _Placer(registered, rng)
    return [placer.place(replication_factor) for _ in range(partition_count)]
