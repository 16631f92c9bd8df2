"""What the clients of a history do: drawn from a seed before anything runs. Pure.

A client's plans are operations: sends and polls in one transaction or outside of any, and how it ends. A chain client
reads the input in a group and writes one record for each record it reads. Values are unique in a history.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random
from typing import NamedTuple

from tests.transactions.history import Isolation

VALUES_PER_CLIENT = 1_000_000


class End(enum.Enum):
    COMMIT = "commit"
    ABORT = "abort"
    ABANDON = "abandon"
    """The client forgets it and begins anew with the same transactional id."""
    RIVAL = "rival"
    """Another producer takes the transactional id, then this one tries to commit."""
    PLAIN = "plain"
    """No transaction."""


class PlannedSend(NamedTuple):
    partition: int
    value: int


class PlannedPoll(NamedTuple):
    limit: int


class PlannedAttach(NamedTuple):
    partitions: tuple[int, ...]


PlannedStep = PlannedSend | PlannedPoll | PlannedAttach


@dataclass(frozen=True)
class Plan:
    steps: tuple[PlannedStep, ...]
    end: End
    rest_s: float = 0.0


@dataclass(frozen=True)
class ChainPlan:
    """`outputs`: partition and value for each record that the poll returns, as many as there are."""

    limit: int
    outputs: tuple[PlannedSend, ...]
    end: End


@dataclass(frozen=True)
class Shape:
    """Partitions 0.. of the topic and, numbered on from there, of the input topic."""

    partitions: int = 4
    inputs: int = 2
    clients: int = 3
    chain_clients: int = 2
    operations: int = 12
    steps_max: int = 5

    @property
    def input_numbers(self) -> range:
        return range(self.partitions, self.partitions + self.inputs)

    @property
    def numbers(self) -> range:
        return range(self.partitions + self.inputs)


ENDS = (
    [End.COMMIT, End.ABORT, End.ABANDON, End.RIVAL, End.PLAIN],
    [60, 16, 4, 3, 17],
)
CHAIN_ENDS = ([End.COMMIT, End.ABORT, End.ABANDON], [80, 15, 5])


def isolation_of(rng: Random) -> Isolation:
    return rng.choices([Isolation.READ_COMMITTED, Isolation.READ_UNCOMMITTED], [4, 1])[0]


def plans(rng: Random, shape: Shape, client: int) -> Iterator[Plan]:
    """A third of all sends go to the input, or the chain would have nothing to do."""
    values = iter(range(client * VALUES_PER_CLIENT + 1, (client + 1) * VALUES_PER_CLIENT))
    for number in range(shape.operations):
        end = rng.choices(*ENDS)[0]
        steps: list[PlannedStep] = []
        if number == 0 or rng.random() < 0.08:
            chosen = rng.sample(shape.numbers, rng.randrange(1, len(shape.numbers) + 1))
            steps.append(PlannedAttach(tuple(sorted(chosen))))
        for _ in range(rng.randrange(1, shape.steps_max + 1)):
            if rng.random() < 0.3:
                steps.append(PlannedPoll(rng.choice((1, 3, 10))))
                continue
            targets = shape.input_numbers if shape.inputs and rng.random() < 0.33 else range(shape.partitions)
            steps.append(PlannedSend(rng.choice(targets), next(values)))
        yield Plan(tuple(steps), end, rng.choice((0.0, 0.0, 0.01, 0.05)))


def chain_plans(rng: Random, shape: Shape, client: int) -> Iterator[ChainPlan]:
    """Without end: a chain client works until it is told to stop."""
    values = iter(range(client * VALUES_PER_CLIENT + 1, (client + 1) * VALUES_PER_CLIENT))
    while True:
        limit = rng.choice((1, 3, 8))
        outputs = tuple(PlannedSend(rng.randrange(shape.partitions), next(values)) for _ in range(limit))
        yield ChainPlan(limit, outputs, rng.choices(*CHAIN_ENDS)[0])
