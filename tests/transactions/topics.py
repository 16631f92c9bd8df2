"""How the partitions of a history are numbered, and what a client of it is told. Values only."""

from __future__ import annotations

from typing import NamedTuple

from tests.transactions.history import Isolation
from tests.transactions.workload import Shape


class Topics(NamedTuple):
    """Partitions 0.. of `topic`; those of `input_topic` are numbered on from there."""

    topic: str
    input_topic: str
    shape: Shape

    def place(self, number: int) -> tuple[str, int]:
        if number < self.shape.partitions:
            return self.topic, number
        return self.input_topic, number - self.shape.partitions

    def number(self, topic: str, index: int) -> int:
        return index if topic == self.topic else index + self.shape.partitions


class ClientSettings(NamedTuple):
    """`group`: of a chain client, which subscribes to the input topic."""

    bootstrap: str
    topics: Topics
    transactional_id: str
    isolation: Isolation
    group: str | None
    timeout_s: float
    transaction_timeout_ms: int
