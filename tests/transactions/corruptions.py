"""One mistake of a broker put into a clean history, at a place of chance. False: the history has no such place."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from random import Random
from typing import TypeVar

from tests.transactions.checker import Kind
from tests.transactions.history import Attach, History, Isolation, Operation, Outcome, Poll, Record, Send

T = TypeVar("T")
COMMITTED, UNCOMMITTED = Isolation.READ_COMMITTED, Isolation.READ_UNCOMMITTED


def _one(rng: Random, choices: Iterator[T]) -> T | None:
    found = list(choices)
    return rng.choice(found) if found else None


def _polls(history: History) -> Iterator[tuple[Operation, Poll]]:
    for operation in history.operations:
        for poll in operation.polls():
            if poll.records:
                yield operation, poll


def _sends(history: History) -> Iterator[tuple[Operation, Send]]:
    for operation in history.operations:
        for send in operation.sends():
            yield operation, send


def _visible(history: History, send: Send, isolation: Isolation = COMMITTED) -> bool:
    return any(record.value == send.value for record in history.final[isolation][send.partition])


def _drop(history: History, send: Send, *isolations: Isolation) -> None:
    for isolation in isolations:
        partition = history.final[isolation]
        partition[send.partition] = [each for each in partition[send.partition] if each.value != send.value]


def made_up(history: History, rng: Random) -> bool:
    records = rng.choice(list(history.final[UNCOMMITTED].values()))
    records.append(Record(0, 10_000, 10_000_000))
    return True


def another_value(history: History, rng: Random) -> bool:
    found = _one(rng, _polls(history))
    if found is None:
        return False
    records = found[1].records
    number = rng.randrange(len(records))
    others = [
        each for each in history.final[UNCOMMITTED][records[number].partition] if each.value != records[number].value
    ]
    if not others:
        return False
    records[number] = records[number]._replace(value=rng.choice(others).value)
    return True


def zero_offset(history: History, rng: Random) -> bool:
    found = _one(rng, (send for _, send in _sends(history) if send.offset))
    if found is None:
        return False
    found.offset = 0
    return True


def twice(history: History, rng: Random) -> bool:
    found = _one(rng, (send for _, send in _sends(history) if _visible(history, send)))
    if found is None:
        return False
    for isolation in Isolation:
        history.final[isolation][found.partition].append(Record(found.partition, 10_000, found.value))
    return True


def aborted_visible(history: History, rng: Random) -> bool:
    """As though its marker were one of a commit."""
    found = _one(rng, ((o, s) for o, s in _sends(history) if o.outcome is Outcome.ABORTED))
    if found is None:
        return False
    _, send = found
    assert send.offset is not None
    records = history.final[COMMITTED][send.partition]
    records.append(Record(send.partition, send.offset, send.value))
    records.sort()
    return True


def read_too_early(history: History, rng: Random) -> bool:
    """As though the last stable offset were ignored."""
    found = _one(rng, (o for o in history.operations if o.commit_invoked_at and any(o.sends())))
    reader = _one(rng, (o for o in history.operations if o.isolation is COMMITTED))
    if found is None or reader is None:
        return False
    send = rng.choice(list(found.sends()))
    assert send.offset is not None
    assert send.acknowledged_at is not None
    reader.steps.append(Poll(send.acknowledged_at, [Record(send.partition, send.offset, send.value)]))
    return True


def lost(history: History, rng: Random) -> bool:
    found = _one(rng, (send for _, send in _sends(history) if _visible(history, send)))
    if found is None:
        return False
    _drop(history, found, *Isolation)
    return True


def torn(history: History, rng: Random) -> bool:
    """As though one partition got the marker of an abort."""
    outcomes = (Outcome.COMMITTED, Outcome.UNKNOWN)
    found = _one(
        rng,
        (
            o
            for o in history.operations
            if o.outcome in outcomes and len({s.partition for s in o.sends() if _visible(history, s)}) > 1
        ),
    )
    if found is None:
        return False
    partition = rng.choice(sorted({send.partition for send in found.sends()}))
    for send in found.sends():
        if send.partition == partition:
            _drop(history, send, COMMITTED)
    return True


def _pairs_of_records(history: History) -> Iterator[tuple[list[Record], int]]:
    for _, poll in _polls(history):
        for number, (one, other) in enumerate(zip(poll.records, poll.records[1:], strict=False)):
            if one.partition == other.partition and number > 0 and poll.records[number - 1].partition == one.partition:
                yield poll.records, number


def skipped(history: History, rng: Random) -> bool:
    found = _one(rng, _pairs_of_records(history))
    if found is None:
        return False
    records, number = found
    del records[number]
    return True


def backward(history: History, rng: Random) -> bool:
    found = _one(rng, _polls(history))
    if found is None:
        return False
    operation, poll = found
    again = rng.choice(poll.records)
    operation.steps.insert(operation.steps.index(poll) + 1, Poll(poll.returned_at, [again]))
    return True


def send_order(history: History, rng: Random) -> bool:
    """Two sends of one partition, the later one invoked when the earlier was acknowledged, change places."""
    for _ in range(50):
        sends = [send for _, send in _sends(history)]
        if len(sends) < 2:
            return False
        one, other = rng.sample(sends, 2)
        assert one.acknowledged_at is not None
        if one.partition == other.partition and one.acknowledged_at < other.invoked_at:
            one.invoked_at, other.invoked_at = other.invoked_at, one.invoked_at
            one.acknowledged_at, other.acknowledged_at = other.acknowledged_at, one.acknowledged_at
            return True
    return False


def circle(history: History, rng: Random) -> bool:
    """The writer reads what its reader wrote."""
    writers = {send.value: (o, send) for o, send in _sends(history)}
    for operation, poll in _polls(history):
        send = next(operation.sends(), None)
        if operation.isolation is not COMMITTED or operation.outcome is Outcome.PLAIN or send is None:
            continue
        writer = writers[rng.choice(poll.records).value][0]
        is_like = writer.isolation is COMMITTED and writer.outcome is not Outcome.PLAIN
        if writer is not operation and is_like:
            assert send.offset is not None
            writer.steps.append(Poll(writer.began_at, [Record(send.partition, send.offset, send.value)]))
            return True
    return False


def _chain_operations(history: History) -> list[Operation]:
    def is_visible(operation: Operation) -> bool:
        sends = [send for send in operation.sends() if send.source is not None]
        return bool(sends) and all(_visible(history, send) for send in sends)

    return [operation for operation in history.operations if operation.offsets and is_visible(operation)]


def one_offset_twice(history: History, rng: Random) -> bool:
    done = _chain_operations(history)
    if len(done) < 2:
        return False
    number = rng.randrange(1, len(done))
    for partition, (_, end) in done[number].offsets.items():
        done[number].offsets[partition] = done[number - 1].offsets[partition][0], end
    return True


def input_lost(history: History, rng: Random) -> bool:
    done = _chain_operations(history)
    if not done:
        return False
    for send in rng.choice(done).sends():
        send.source = None
    return True


def input_twice(history: History, rng: Random) -> bool:
    sends = [send for operation in _chain_operations(history) for send in operation.sends() if send.source]
    if len(sends) < 2:
        return False
    one, other = rng.sample(sends, 2)
    one.source = other.source
    return True


def offset_lost(history: History, rng: Random) -> bool:
    done = _chain_operations(history)
    if not done:
        return False
    assert history.chain is not None
    for partition, (start, _) in done[-1].offsets.items():
        history.chain.committed[partition] = start
    return True


def hanging(history: History, rng: Random) -> bool:
    partition = rng.choice(sorted(history.ends))
    stable, high_watermark = history.ends[partition]
    history.ends[partition] = stable - 1, high_watermark
    return True


def unattached(history: History, rng: Random) -> bool:
    """A position that was told is not where the consumer goes on."""
    for operation in history.operations:
        for number, step in enumerate(operation.steps[:-1]):
            poll = operation.steps[number + 1]
            if isinstance(step, Attach) and isinstance(poll, Poll) and poll.records:
                step.positions = {each.partition: each.offset + 1 for each in poll.records}
                return True
    return False


CORRUPTIONS: list[tuple[Callable[[History, Random], bool], Kind]] = [
    (made_up, Kind.UNKNOWN_MESSAGE),
    (another_value, Kind.INCONSISTENT_OFFSET),
    (zero_offset, Kind.ZERO_OFFSET),
    (twice, Kind.DUPLICATE),
    (aborted_visible, Kind.ABORTED_READ),
    (read_too_early, Kind.DIRTY_READ),
    (lost, Kind.LOST_WRITE),
    (torn, Kind.TORN),
    (skipped, Kind.SKIPPED_POLL),
    (backward, Kind.BACKWARD_POLL),
    (unattached, Kind.BACKWARD_POLL),
    (send_order, Kind.BACKWARD_SEND),
    (circle, Kind.CYCLE_G1C),
    (one_offset_twice, Kind.CYCLE_G2),
    (input_lost, Kind.CHAIN_LOST),
    (input_twice, Kind.CHAIN_TWICE),
    (offset_lost, Kind.CHAIN_TORN),
    (hanging, Kind.HANGING),
]
