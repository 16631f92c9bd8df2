"""A model of a correct broker and random clients of it: the histories that it makes must be clean. Chance is its `rng`.

Transactions of several clients overlap, a commit is acknowledged before its markers are written, markers of one
transaction are written at different times, clients are told nothing of some ends. Not here: retries, leaders, epochs.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

from tests.transactions.history import (
    Attach,
    Chain,
    History,
    Isolation,
    Operation,
    Outcome,
    Poll,
    Record,
    Send,
)


@dataclass
class _Entry:
    value: int | None
    """None: a marker."""
    transaction: int | None


@dataclass
class _Partition:
    entries: list[_Entry] = field(default_factory=list)
    open: dict[int, int] = field(default_factory=dict)
    """Transaction -> its first offset."""
    aborted: set[int] = field(default_factory=set)

    @property
    def last_stable_offset(self) -> int:
        return min(self.open.values(), default=len(self.entries))

    def append(self, value: int, transaction: int | None) -> int:
        offset = len(self.entries)
        self.entries.append(_Entry(value, transaction))
        if transaction is not None:
            self.open.setdefault(transaction, offset)
        return offset

    def end(self, transaction: int, *, commit: bool) -> None:
        self.entries.append(_Entry(None, transaction))
        self.open.pop(transaction, None)
        if not commit:
            self.aborted.add(transaction)

    def read(self, number: int, start: int, isolation: Isolation, limit: int = 1 << 30) -> list[Record]:
        end = self.last_stable_offset if isolation is Isolation.READ_COMMITTED else len(self.entries)
        found: list[Record] = []
        for offset in range(start, end):
            entry = self.entries[offset]
            is_hidden = isolation is Isolation.READ_COMMITTED and entry.transaction in self.aborted
            if entry.value is not None and not is_hidden:
                found.append(Record(number, offset, entry.value))
                if len(found) == limit:
                    break
        return found


class ModelRun:
    """`history()` lets random clients act on the model until they have made `operations` operations."""

    def __init__(self, rng: Random, partitions: int = 3, clients: int = 3, operations: int = 40) -> None:
        self._rng = rng
        self._now = 0.0
        self._values = 0
        self._inputs = 1
        self._partitions = [_Partition() for _ in range(partitions + self._inputs)]
        self._left = operations
        self._clients = [_Client(self, f"c{number}", rng) for number in range(clients)]
        self._clients.append(_ChainClient(self, "chain", rng))
        self._markers: list[tuple[int, int, bool]] = []
        self.committed: dict[int, int] = {}
        self.operations: list[Operation] = []

    def history(self) -> History:
        while self._left > 0 or any(client.operation for client in self._clients):
            if self._markers and self._rng.random() < 0.3:
                self._write_marker(self._rng.randrange(len(self._markers)))
            busy = [client for client in self._clients if client.operation] if self._left <= 0 else self._clients
            if busy:
                self._rng.choice(busy).act()
        while self._markers:
            self._write_marker(0)
        inputs = frozenset(range(len(self._partitions) - self._inputs, len(self._partitions)))
        return History(
            self.operations,
            {
                isolation: {n: log.read(n, 0, isolation) for n, log in enumerate(self._partitions)}
                for isolation in Isolation
            },
            {n: (log.last_stable_offset, len(log.entries)) for n, log in enumerate(self._partitions)},
            Chain(inputs, dict(self.committed)),
        )

    def now(self) -> float:
        self._now += self._rng.random() + 0.001
        return self._now

    @property
    def numbers(self) -> range:
        return range(len(self._partitions))

    @property
    def input(self) -> int:
        return len(self._partitions) - 1

    def begin(self, client: str, outcome: Outcome, isolation: Isolation) -> Operation:
        self._left -= 1
        operation = Operation(len(self.operations), client, self.now(), outcome, isolation=isolation)
        self.operations.append(operation)
        return operation

    def send(self, operation: Operation, partition: int, source: tuple[int, int] | None = None) -> None:
        self._values += 1
        transaction = None if operation.outcome is Outcome.PLAIN else operation.index
        send = Send(partition, self._values, self.now(), source=source)
        send.offset = self._partitions[partition].append(send.value, transaction)
        send.acknowledged_at = self.now()
        operation.steps.append(send)

    def poll(self, operation: Operation, partition: int, position: int) -> list[Record]:
        limit = self._rng.randrange(1, 6)
        return self._partitions[partition].read(partition, position, operation.isolation, limit)

    def end(self, operation: Operation, *, commit: bool) -> None:
        """Decide it; its markers are written later."""
        for partition in sorted({send.partition for send in operation.sends()}):
            self._markers.append((partition, operation.index, commit))

    def has_markers(self, client: str) -> bool:
        """A producer begins anew when its last transaction is completed."""
        return any(self.operations[index].client == client for _, index, _ in self._markers)

    def _write_marker(self, number: int) -> None:
        partition, index, commit = self._markers.pop(number)
        self._partitions[partition].end(index, commit=commit)


class _Client:
    def __init__(self, run: ModelRun, name: str, rng: Random) -> None:
        self.run, self.name, self.rng = run, name, rng
        self.operation: Operation | None = None
        self.isolation = rng.choice(list(Isolation))
        self.positions: dict[int, int] = {}
        self._steps = 0

    def act(self) -> None:
        operation = self.operation
        if operation is None:
            self._begin()
        elif self._steps > 0:
            self._steps -= 1
            self._step(operation)
        else:
            self._end(operation)

    def _begin(self) -> None:
        if self.run.has_markers(self.name):
            return
        outcome = self.rng.choices([Outcome.COMMITTED, Outcome.ABORTED, Outcome.UNKNOWN, Outcome.PLAIN], [6, 2, 1, 2])[
            0
        ]
        self.operation = self.run.begin(self.name, outcome, self.isolation)
        self._steps = self.rng.randrange(1, 6)
        if not self.positions or self.rng.random() < 0.1:
            chosen = self.rng.sample(self.run.numbers, self.rng.randrange(1, len(self.run.numbers) + 1))
            self.positions = dict.fromkeys(sorted(chosen), 0)
            self.operation.steps.append(Attach(dict(self.positions)))

    def _step(self, operation: Operation) -> None:
        if self.rng.random() < 0.6:
            self.run.send(operation, self.rng.choice(self.run.numbers))
            return
        records: list[Record] = []
        for partition in self.rng.sample(sorted(self.positions), self.rng.randrange(1, len(self.positions) + 1)):
            found = self.run.poll(operation, partition, self.positions[partition])
            if found:
                self.positions[partition] = found[-1].offset + 1
            records += found
        operation.steps.append(Poll(self.run.now(), records))

    def _end(self, operation: Operation) -> None:
        self.operation = None
        if operation.outcome is Outcome.PLAIN:
            operation.ended_at = self.run.now()
            return
        commit = operation.outcome is Outcome.COMMITTED
        if operation.outcome is Outcome.UNKNOWN and self.rng.random() < 0.7:
            commit = self.rng.random() < 0.5
            operation.commit_invoked_at = self.run.now()
        elif commit:
            operation.commit_invoked_at = self.run.now()
        self.run.end(operation, commit=commit)
        if commit:
            for partition, (_, end) in operation.offsets.items():
                self.run.committed[partition] = end
        if operation.outcome is not Outcome.UNKNOWN:
            operation.ended_at = self.run.now()


class _ChainClient(_Client):
    """Reads the input from the committed offset on, and writes one record for each."""

    def _begin(self) -> None:
        if self.run.has_markers(self.name):
            return
        outcome = self.rng.choices([Outcome.COMMITTED, Outcome.ABORTED, Outcome.UNKNOWN], [4, 1, 1])[0]
        self.isolation = Isolation.READ_COMMITTED
        self.operation = operation = self.run.begin(self.name, outcome, self.isolation)
        start = self.run.committed.get(self.run.input, 0)
        operation.steps.append(Attach({self.run.input: start}))
        records = self.run.poll(operation, self.run.input, start)
        operation.steps.append(Poll(self.run.now(), records))
        for record in records:
            output = self.rng.choice([each for each in self.run.numbers if each != self.run.input])
            self.run.send(operation, output, (record.partition, record.offset))
        if records:
            operation.offsets[self.run.input] = start, records[-1].offset + 1
