"""Random commits of a group for a topic that is deleted and made anew, again and again: outside of transactions and in
them, while commits lag, appends fail, and the coordinator moves.

Of the present topic the group has the last effective commit in the order of the log, and nothing else.
"""

from __future__ import annotations

from random import Random
from typing import NamedTuple

import pytest

from tests.properties.coordinator_history import CoordinatorHistory
from tests.unit.broker.coordinators.fakes import World
from tests.unit.broker.coordinators.test_offsets_in_transactions import commit, end

HISTORIES = 100
STEPS = 60
PARTITIONS = 2
PRODUCERS = (5, 6)
NO_PRODUCER = -1


class Committed(NamedTuple):
    at: int
    partition: int
    position: int
    topic_id: bytes
    producer_id: int


class Ended(NamedTuple):
    at: int
    producer_id: int
    is_commit: bool


class History(CoordinatorHistory):
    """The coordinator, and what its log should hold of the requests so far."""

    def __init__(self, seed: int) -> None:
        choice = Random(seed)
        super().__init__(choice, World(commits_at_once=choice.random() < 0.3))
        self.log: list[Committed | Ended] = []

    @property
    def open_producers(self) -> list[int]:
        found: set[int] = set()
        for entry in self.log:
            if isinstance(entry, Ended):
                found.discard(entry.producer_id)
            elif entry.producer_id != NO_PRODUCER:
                found.add(entry.producer_id)
        return sorted(found)

    def commit(self, position: int) -> None:
        before = self.end_offset
        partition, producer_id = self.choice.randrange(PARTITIONS), self.choice.choice((NO_PRODUCER, *PRODUCERS))
        if producer_id == NO_PRODUCER:
            self.world.commit(offsets={("t", partition): position}, topic_id=self.topic_id)
        else:
            commit(self.world, position, partition=partition, producer_id=producer_id, topic_id=self.topic_id)
        if self.end_offset > before:
            self.log.append(Committed(before, partition, position, self.topic_id, producer_id))

    def end_one(self) -> None:
        if self.open_producers:
            before = self.end_offset
            producer_id, is_commit = self.choice.choice(self.open_producers), self.choice.random() < 0.6
            end(self.world, is_commit=is_commit, producer_id=producer_id)
            if self.end_offset > before:
                self.log.append(Ended(before, producer_id, is_commit))

    def move(self) -> None:
        if not self.world.ports.commits_at_once:
            self.world.ports.truncate_uncommitted(0)
        self.log = [entry for entry in self.log if entry.at < self.end_offset]
        self.has_moved = True
        self.world.restart()
        self.world.ports.commit(0)

    def step(self, position: int) -> None:
        what = self.choice.choices(
            ("commit", "end", "replicate", "anew", "time", "refuse", "move"), (20, 6, 10, 6, 8, 1, 1)
        )
        if what == ["commit"]:
            self.commit(position)
        elif what == ["end"]:
            self.end_one()
        elif what == ["replicate"]:
            self.replicate()
        elif what == ["anew"]:
            self.make_anew()
        elif what == ["time"]:
            self.world.advance(self.choice.choice((0, 1, 199, 250, 1000)))
        elif what == ["refuse"]:
            self.refuse_or_take()
        else:
            self.move()

    def settle(self) -> None:
        self.world.ports.refuse_appends = None
        while self.open_producers:
            self.end_one()
        for _ in range(6):
            self.world.ports.commit(0)
            self.world.advance(1000)

    def expected(self) -> dict[int, int]:
        effective: dict[int, tuple[int, int]] = {}
        for entry in self.log:
            if isinstance(entry, Ended) or entry.topic_id != self.topic_id:
                continue
            ends = (other for other in self.log if isinstance(other, Ended) and other.at > entry.at)
            decision = next((other for other in ends if other.producer_id == entry.producer_id), None)
            if entry.producer_id == NO_PRODUCER or (decision is not None and decision.is_commit):
                effective[entry.partition] = max(effective.get(entry.partition, (-1, 0)), (entry.at, entry.position))
        return {partition: position for partition, (_, position) in effective.items()}


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(0, 5 * HISTORIES, HISTORIES))
def test_the_present_topic_has_its_own_positions(seed: int):
    for number in range(seed, seed + HISTORIES):
        history = History(number)
        for position in range(STEPS):
            history.step(position)
        history.settle()
        coordinator = history.world.coordinator()
        found = coordinator.offsets.of_group("g").get("t", {})
        own = {index: entry.offset for index, entry in found.items() if entry.topic_id == history.topic_id}
        assert own == history.expected(), number
        # A new coordinator does not hear of topics that were deleted before.
        assert len(own) == len(found) or history.has_moved, number
        assert not coordinator._groups_to_sweep, number
        assert not coordinator._groups_to_sweep_later, number
