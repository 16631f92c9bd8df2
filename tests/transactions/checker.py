"""Judges a history: what Kafka's transactions forbid, and was seen. Pure.

It looks for what Jepsen's workload for Kafka-like queues looks for. Kafka orders no writes of different transactions
and makes a transaction visible partition by partition, so neither write-write cycles nor a read that sees one
partition's part earlier than another's is a fault. Every rule is one function of `_RULES`; each yields what breaks it.
A history that a correct broker can cause breaks none, whatever the faults were.
"""

from __future__ import annotations

import enum
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from tests.transactions.cycles import a_cycle
from tests.transactions.history import Attach, Chain, History, Isolation, Operation, Outcome, Poll, Record, Send

COMMITTED, UNCOMMITTED = Isolation.READ_COMMITTED, Isolation.READ_UNCOMMITTED


class Kind(enum.StrEnum):
    UNKNOWN_MESSAGE = "unknown message"
    """A value that was never sent, or was sent to another partition."""
    INCONSISTENT_OFFSET = "inconsistent offset"
    """Two values at one offset, or an acknowledged offset at which the value does not lie."""
    ZERO_OFFSET = "zero offset"
    """Offset 0 told for a send that lies elsewhere."""
    DUPLICATE = "duplicate message"
    """One value at two offsets."""
    ABORTED_READ = "aborted read"
    DIRTY_READ = "dirty read"
    """Read as committed before its transaction was asked to commit."""
    LOST_WRITE = "lost write"
    """Acknowledged, or read once, and not there at the end."""
    TORN = "torn transaction"
    """Some of its writes are visible at the end and others are not."""
    SKIPPED_POLL = "skipped poll"
    BACKWARD_POLL = "backward poll"
    """A stale message: a consumer was given what lies before its position."""
    BACKWARD_SEND = "nonmonotonic send"
    """A later send lies before an earlier one."""
    CYCLE_G1C = "G1c"
    """Committed transactions that read from each other in a circle."""
    CYCLE_G2 = "G2"
    """Two committed transactions that both went on from the same committed offset."""
    CHAIN_LOST = "input without output"
    CHAIN_TWICE = "input processed twice"
    CHAIN_TORN = "output without offset"
    """What was made from a record is committed, the offset behind that record is not."""
    HANGING = "hanging transaction"
    """The last stable offset is below the high watermark though all transactions have ended."""


class Anomaly(NamedTuple):
    kind: Kind
    message: str
    operations: tuple[int, ...]

    def __str__(self) -> str:
        of = f" (operations {', '.join(map(str, self.operations))})" if self.operations else ""
        return f"{self.kind}: {self.message}{of}"


def check(history: History) -> list[Anomaly]:
    facts = _Facts(history)
    return [anomaly for rule in _RULES for anomaly in rule(facts)]


def kinds(anomalies: Iterable[Anomaly]) -> set[Kind]:
    return {anomaly.kind for anomaly in anomalies}


class _Facts:
    """The history, indexed."""

    def __init__(self, history: History) -> None:
        self.history = history
        self.writes: dict[int, tuple[Operation, Send]] = {}
        self.polls: list[tuple[Operation, Poll]] = []
        for operation in history.operations:
            for step in operation.steps:
                if isinstance(step, Send):
                    assert step.value not in self.writes, f"{step.value} is sent twice"
                    self.writes[step.value] = operation, step
                elif isinstance(step, Poll):
                    self.polls.append((operation, step))
        self.visible: dict[Isolation, dict[int, dict[int, int]]] = {
            isolation: {
                partition: {record.value: record.offset for record in records}
                for partition, records in history.final.get(isolation, {}).items()
            }
            for isolation in Isolation
        }
        """Isolation -> partition -> value -> offset, at the end."""

    def final_records(self) -> Iterator[tuple[Isolation, Record]]:
        for isolation, partitions in self.history.final.items():
            for records in partitions.values():
                for record in records:
                    yield isolation, record

    def is_missing(self, isolation: Isolation, send: Send) -> bool:
        """Whether that partition was read to its end, and it is not there."""
        partition = self.visible[isolation].get(send.partition)
        return partition is not None and send.value not in partition


def _unknown_messages(facts: _Facts) -> Iterator[Anomaly]:
    def judge(record: Record, where: tuple[int, ...]) -> Iterator[Anomaly]:
        write = facts.writes.get(record.value)
        if write is None:
            yield Anomaly(Kind.UNKNOWN_MESSAGE, f"{record} was never sent", where)
        elif write[1].partition != record.partition:
            yield Anomaly(Kind.UNKNOWN_MESSAGE, f"{record} was sent to {write[1].partition}", (write[0].index, *where))

    for operation, poll in facts.polls:
        for record in poll.records:
            yield from judge(record, (operation.index,))
    for _, record in facts.final_records():
        yield from judge(record, ())


def _offsets(facts: _Facts) -> Iterator[Anomaly]:
    """Every read agrees on what lies at an offset, no value lies at two, and sends were told where they lie."""
    at: dict[tuple[int, int], int] = {}
    offset_of: dict[int, int] = {}
    reads: list[tuple[Record, tuple[int, ...]]] = [(record, ()) for _, record in facts.final_records()]
    reads += [(record, (operation.index,)) for operation, poll in facts.polls for record in poll.records]
    for record, where in reads:
        partition, offset, value = record
        if (other := at.setdefault((partition, offset), value)) != value:
            yield Anomaly(Kind.INCONSISTENT_OFFSET, f"{other} and {value} at offset {offset} of {partition}", where)
        if (place := offset_of.setdefault(value, offset)) != offset:
            yield Anomaly(Kind.DUPLICATE, f"{value} at offsets {place} and {offset} of {partition}", where)
    for operation, send in facts.writes.values():
        if send.offset is None:
            continue
        place = offset_of.get(send.value, send.offset)
        other = at.setdefault((send.partition, send.offset), send.value)
        if place == send.offset and other == send.value:
            continue
        kind = Kind.ZERO_OFFSET if send.offset == 0 else Kind.INCONSISTENT_OFFSET
        lies = f"it lies at {place}" if place != send.offset else f"{other} lies there"
        message = f"{send.value} was acknowledged at offset {send.offset} of {send.partition}, {lies}"
        yield Anomaly(kind, message, (operation.index,))


def _aborted_reads(facts: _Facts) -> Iterator[Anomaly]:
    def judge(record: Record, isolation: Isolation, where: tuple[int, ...]) -> Iterator[Anomaly]:
        write = facts.writes.get(record.value)
        if write is not None and isolation is COMMITTED and not write[0].may_be_committed:
            yield Anomaly(Kind.ABORTED_READ, f"{record} was read as committed", (write[0].index, *where))

    for operation, poll in facts.polls:
        for record in poll.records:
            yield from judge(record, operation.isolation, (operation.index,))
    for isolation, record in facts.final_records():
        yield from judge(record, isolation, ())


def _dirty_reads(facts: _Facts) -> Iterator[Anomaly]:
    for operation, poll in facts.polls:
        if operation.isolation is not COMMITTED:
            continue
        for record in poll.records:
            write = facts.writes.get(record.value)
            if write is None:
                continue
            asked_at = write[0].commit_invoked_at
            if asked_at is not None and write[0].outcome is not Outcome.PLAIN and poll.returned_at < asked_at:
                message = f"{record} was read at {poll.returned_at:.3f}, its commit was asked for at {asked_at:.3f}"
                yield Anomaly(Kind.DIRTY_READ, message, (write[0].index, operation.index))


def _lost_writes(facts: _Facts) -> Iterator[Anomaly]:
    for operation, send in facts.writes.values():
        if send.acknowledged_at is not None and facts.is_missing(UNCOMMITTED, send):
            message = f"{send.value} of partition {send.partition} was acknowledged at offset {send.offset}"
            yield Anomaly(Kind.LOST_WRITE, message, (operation.index,))
        is_committed = operation.outcome is Outcome.COMMITTED
        if operation.outcome is Outcome.PLAIN:
            is_committed = send.acknowledged_at is not None
        if is_committed and facts.is_missing(COMMITTED, send):
            message = f"{send.value} of partition {send.partition} was committed, readers of committed records miss it"
            yield Anomaly(Kind.LOST_WRITE, message, (operation.index,))
    for operation, poll in facts.polls:
        for record in poll.records:
            for isolation in {UNCOMMITTED, operation.isolation}:
                partition = facts.visible[isolation].get(record.partition)
                if partition is not None and record.value not in partition:
                    yield Anomaly(Kind.LOST_WRITE, f"{record} was read, {isolation} misses it", (operation.index,))


def _torn_transactions(facts: _Facts) -> Iterator[Anomaly]:
    for operation in facts.history.operations:
        if operation.outcome not in (Outcome.COMMITTED, Outcome.UNKNOWN):
            continue
        sends = [send for send in operation.sends() if send.partition in facts.visible[COMMITTED]]
        missing = [send.value for send in sends if facts.is_missing(COMMITTED, send)]
        if missing and len(missing) < len(sends):
            message = f"of {[send.value for send in sends]} readers of committed records miss {missing}"
            yield Anomaly(Kind.TORN, message, (operation.index,))


def _polls(facts: _Facts) -> Iterator[Anomaly]:
    """A consumer gets what lies in a partition in its order, and misses nothing, until it is attached anew."""
    offsets = {
        isolation: {partition: sorted(values.values()) for partition, values in partitions.items()}
        for isolation, partitions in facts.visible.items()
    }
    positions: dict[tuple[str, Isolation], dict[int, tuple[int, int]]] = defaultdict(dict)
    for operation in facts.history.operations:
        position = positions[operation.client, operation.isolation]
        for step in operation.steps:
            if isinstance(step, Attach):
                position.clear()
                position.update({at: (to, operation.index) for at, to in step.positions.items() if to is not None})
            if not isinstance(step, Poll):
                continue
            for record in step.records:
                partition, offset, _ = record
                expected, since = position.get(partition, (offset, operation.index))
                position[partition] = offset + 1, operation.index
                where = (since, operation.index)
                if offset < expected:
                    message = f"{operation.client} was at {expected} of {partition} and got {record}"
                    yield Anomaly(Kind.BACKWARD_POLL, message, where)
                elif offset > expected:
                    known = offsets[operation.isolation].get(partition, [])
                    first, end = bisect_left(known, expected), bisect_left(known, offset)
                    if first < end:
                        message = (
                            f"{operation.client} was at {expected} of {partition}, got {record}, not {known[first:end]}"
                        )
                        yield Anomaly(Kind.SKIPPED_POLL, message, where)


def _sends(facts: _Facts) -> Iterator[Anomaly]:
    """What is sent after an acknowledgement lies behind that send; so does what one operation sends later."""
    placed: dict[int, list[tuple[int, Send, Operation]]] = defaultdict(list)
    for operation in facts.history.operations:
        latest: dict[int, tuple[int, int]] = {}
        for send in operation.sends():
            offset = facts.visible[UNCOMMITTED].get(send.partition, {}).get(send.value, send.offset)
            if offset is None:
                continue
            placed[send.partition].append((offset, send, operation))
            before, value = latest.get(send.partition, (-1, 0))
            latest[send.partition] = offset, send.value
            if offset < before:
                message = (
                    f"{send.value} was sent after {value} and lies at {offset}, before {before}, in {send.partition}"
                )
                yield Anomaly(Kind.BACKWARD_SEND, message, (operation.index,))
    for partition, sends in placed.items():
        sends.sort(key=lambda placement: placement[0])
        newest: tuple[int, Send, Operation] | None = None
        for offset, send, operation in sends:
            acknowledged_at = send.acknowledged_at
            if newest is not None and acknowledged_at is not None and newest[1].invoked_at > acknowledged_at:
                later = f"{newest[1].value} at {newest[0]} of {partition}"
                message = f"{later} was sent after {send.value} at {offset} was acknowledged"
                yield Anomaly(Kind.BACKWARD_SEND, message, (operation.index, newest[2].index))
            if newest is None or send.invoked_at > newest[1].invoked_at:
                newest = offset, send, operation


def _cycles(facts: _Facts) -> Iterator[Anomaly]:
    """Edges from writes to reads; then the group's committed offsets too, where a read precedes an overwrite."""
    operations = {operation.index: operation for operation in facts.history.operations}
    reads: dict[int, set[int]] = defaultdict(set)
    for operation, poll in facts.polls:
        if operation.isolation is COMMITTED and operation.outcome is not Outcome.PLAIN:
            for record in poll.records:
                write = facts.writes.get(record.value)
                if write is not None and write[0] is not operation and write[0].outcome is not Outcome.PLAIN:
                    reads[write[0].index].add(operation.index)
    cycle = a_cycle(reads)
    if cycle is not None:
        yield Anomaly(Kind.CYCLE_G1C, "each reads what the one before it wrote", tuple(cycle))
        return
    if (edges := _offset_edges(facts, operations.values(), reads)) is None:
        return
    cycle = a_cycle(edges)
    if cycle is not None:
        yield Anomaly(Kind.CYCLE_G2, "each reads or overwrites what the one before it wrote or read", tuple(cycle))


def _offset_edges(
    facts: _Facts, operations: Iterable[Operation], reads: Mapping[int, set[int]]
) -> dict[int, set[int]] | None:
    edges = defaultdict(set, {writer: set(readers) for writer, readers in reads.items()})
    ranges: dict[int, list[tuple[int, int, int]]] = defaultdict(list)
    for operation in operations:
        if operation.offsets and _is_committed(facts, operation):
            for partition, (start, end) in operation.offsets.items():
                if start < end:
                    ranges[partition].append((start, end, operation.index))
    for found in ranges.values():
        found.sort()
        for number, (_, end, index) in enumerate(found):
            for next_start, _, other in found[number + 1 :]:
                if next_start > end:
                    break
                edges[index].add(other)
                if next_start < end:
                    edges[other].add(index)
    return edges if ranges else None


def _is_committed(facts: _Facts, operation: Operation) -> bool:
    if operation.outcome is Outcome.COMMITTED:
        return True
    sends = list(operation.sends())
    return bool(sends) and all(send.value in facts.visible[COMMITTED].get(send.partition, {}) for send in sends)


def _chain(facts: _Facts) -> Iterator[Anomaly]:
    """Each input record below the group's committed offset has one committed output; those behind it have none."""
    chain: Chain | None = facts.history.chain
    if chain is None:
        return
    outputs: dict[tuple[int, int], list[int]] = defaultdict(list)
    for operation, send in facts.writes.values():
        if send.source is not None and send.value in facts.visible[COMMITTED].get(send.partition, {}):
            outputs[send.source].append(operation.index)
    for partition in sorted(chain.inputs):
        end = chain.committed.get(partition, 0)
        for offset in sorted(facts.visible[COMMITTED].get(partition, {}).values()):
            made_by = outputs.get((partition, offset), [])
            if offset >= end and made_by:
                message = f"offset {offset} of {partition} has an output, its group's committed offset is {end}"
                yield Anomaly(Kind.CHAIN_TORN, message, tuple(made_by))
            elif len(made_by) > 1:
                yield Anomaly(Kind.CHAIN_TWICE, f"offset {offset} of {partition}", tuple(made_by))
            elif offset < end and not made_by:
                message = f"offset {offset} of {partition} has no output, its group's committed offset is {end}"
                yield Anomaly(Kind.CHAIN_LOST, message, ())


def _hanging(facts: _Facts) -> Iterator[Anomaly]:
    for partition, (last_stable, high_watermark) in sorted(facts.history.ends.items()):
        if last_stable < high_watermark:
            yield Anomaly(Kind.HANGING, f"partition {partition}: {last_stable} of {high_watermark} is stable", ())


_RULES = (
    _unknown_messages, _offsets, _aborted_reads, _dirty_reads, _lost_writes, _torn_transactions, _polls, _sends,
    _cycles, _chain, _hanging,
)  # fmt: skip
