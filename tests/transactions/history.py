"""A history: what several clients did to several partitions and saw of them, and what lies in the logs at the end.

Here: values only, no judgement (`checker` judges) and no clock. All times come from one monotonic clock, in seconds. A
value is sent once in a history, so that a value names its send.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple


class Isolation(enum.StrEnum):
    READ_COMMITTED = "read_committed"
    READ_UNCOMMITTED = "read_uncommitted"


class Outcome(enum.Enum):
    COMMITTED = "committed"
    """The client was told that the transaction is committed."""
    ABORTED = "aborted"
    """The client was told that the transaction is aborted."""
    UNKNOWN = "unknown"
    """The client was told neither. Where it never asked to commit, nobody may have committed."""
    PLAIN = "plain"
    """No transaction: each send counts by itself."""


class Record(NamedTuple):
    partition: int
    offset: int
    value: int


@dataclass(slots=True)
class Send:
    partition: int
    value: int
    invoked_at: float
    acknowledged_at: float | None = None
    """None: refused, or never answered."""
    offset: int | None = None
    """The offset that the client was told, if it was told one."""
    source: tuple[int, int] | None = None
    """Partition and offset of the record that this one was made from."""


@dataclass(slots=True)
class Poll:
    returned_at: float
    records: list[Record] = field(default_factory=list)


@dataclass(slots=True)
class Attach:
    """The consumer's partitions from now on (assign, seek, or given by a group), each with its position if known."""

    positions: dict[int, int | None]


Step = Send | Poll | Attach


@dataclass(slots=True)
class Operation:
    """One transaction, or several plain sends and polls of one client in one go."""

    index: int
    client: str
    began_at: float
    outcome: Outcome
    steps: list[Step] = field(default_factory=list)
    isolation: Isolation = Isolation.READ_COMMITTED
    commit_invoked_at: float | None = None
    ended_at: float | None = None
    offsets: dict[int, tuple[int, int]] = field(default_factory=dict)
    """What was sent to the transaction for the group: partition -> where reading began, the offset to commit."""
    error: str = ""

    def sends(self) -> Iterator[Send]:
        return (step for step in self.steps if isinstance(step, Send))

    def polls(self) -> Iterator[Poll]:
        return (step for step in self.steps if isinstance(step, Poll))

    @property
    def may_be_committed(self) -> bool:
        """Whether its writes may be visible to readers of committed records."""
        if self.outcome is Outcome.UNKNOWN:
            return self.commit_invoked_at is not None
        return self.outcome is not Outcome.ABORTED

    def __str__(self) -> str:
        parts = []
        for step in self.steps:
            if isinstance(step, Send):
                told = "?" if step.acknowledged_at is None else step.offset
                parts.append(f"send p{step.partition} {step.value} -> {told}")
            elif isinstance(step, Poll):
                parts.append("poll " + " ".join(f"p{r.partition}@{r.offset}={r.value}" for r in step.records))
            else:
                parts.append("attach " + " ".join(f"p{p}@{o}" for p, o in step.positions.items()))
        if self.offsets:
            parts.append("offsets " + " ".join(f"p{p}:{a}-{b}" for p, (a, b) in self.offsets.items()))
        times = f"{self.began_at:.3f}..{'?' if self.ended_at is None else f'{self.ended_at:.3f}'}"
        error = f" ({self.error})" if self.error else ""
        return f"#{self.index} {self.client} {times} {self.outcome.value}{error}: " + "; ".join(parts)


@dataclass(slots=True)
class Chain:
    """A group whose offsets are committed inside the transactions that write what was made of its input."""

    inputs: frozenset[int]
    committed: dict[int, int] = field(default_factory=dict)
    """The group's committed offset of each input partition at the end."""


@dataclass(slots=True)
class History:
    operations: list[Operation] = field(default_factory=list)
    final: dict[Isolation, dict[int, list[Record]]] = field(default_factory=dict)
    """Each partition, read from its beginning to its end after all clients and all transactions have ended."""
    ends: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Last stable offset and high watermark of each partition at the end."""
    chain: Chain | None = None

    def __str__(self) -> str:
        lines = [str(operation) for operation in self.operations]
        for isolation, partitions in self.final.items():
            for partition, records in sorted(partitions.items()):
                lines.append(f"{isolation} p{partition}: " + " ".join(f"{r.offset}={r.value}" for r in records))
        lines.append(f"last stable offset and high watermark: {self.ends}")
        if self.chain is not None:
            lines.append(f"committed offsets: {self.chain.committed}")
        return "\n".join(lines)
