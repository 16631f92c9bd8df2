"""The checker of histories: one for each mistake that it must find, the same without the mistake, and random ones."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest

from tests.transactions.checker import Kind, check, kinds
from tests.transactions.corruptions import CORRUPTIONS
from tests.transactions.history import Attach, Chain, History, Isolation, Operation, Outcome, Poll, Record, Send
from tests.transactions.model import ModelRun

COMMITTED, ABORTED, UNKNOWN, PLAIN = Outcome.COMMITTED, Outcome.ABORTED, Outcome.UNKNOWN, Outcome.PLAIN


def sound() -> History:
    """Two transactions of two partitions, an aborted one, a plain send, readers, and a chain from partition 2 to 1."""
    first = Operation(0, "a", 1.0, COMMITTED, [Send(0, 10, 1.1, 1.2, 0), Send(1, 11, 1.2, 1.3, 0)])
    first.commit_invoked_at, first.ended_at = 2.0, 2.1
    aborted = Operation(1, "b", 1.0, ABORTED, [Send(0, 20, 1.5, 1.6, 1)], ended_at=2.5)
    plain = Operation(
        2, "c", 3.0, PLAIN, [Send(0, 30, 3.0, 3.1, 4), Send(2, 31, 3.1, 3.2, 0), Send(2, 32, 3.2, 3.3, 1)]
    )
    reading = Operation(3, "d", 4.0, COMMITTED, [Attach({0: 0, 1: 0}), Send(1, 40, 4.0, 4.1, 2)])
    reading.steps += [Poll(4.2, [Record(0, 0, 10), Record(1, 0, 11)]), Poll(4.3, [Record(0, 4, 30)])]
    reading.commit_invoked_at, reading.ended_at = 5.0, 5.1
    chain = Operation(4, "e", 6.0, COMMITTED, [Attach({2: 0}), Poll(6.1, [Record(2, 0, 31)])])
    chain.steps.append(Send(1, 50, 6.2, 6.3, 4, source=(2, 0)))
    chain.commit_invoked_at, chain.ended_at, chain.offsets = 7.0, 7.1, {2: (0, 1)}
    chained = Operation(5, "f", 8.0, COMMITTED, [Attach({2: 1}), Poll(8.1, [Record(2, 1, 32)])])
    chained.steps.append(Send(1, 60, 8.2, 8.3, 6, source=(2, 1)))
    chained.commit_invoked_at, chained.ended_at, chained.offsets = 9.0, 9.1, {2: (1, 2)}
    committed = {
        0: [Record(0, 0, 10), Record(0, 4, 30)],
        1: [Record(1, 0, 11), Record(1, 2, 40), Record(1, 4, 50), Record(1, 6, 60)],
        2: [Record(2, 0, 31), Record(2, 1, 32)],
    }
    everything = {**committed, 0: [Record(0, 0, 10), Record(0, 1, 20), Record(0, 4, 30)]}
    return History(
        [first, aborted, plain, reading, chain, chained],
        {Isolation.READ_COMMITTED: committed, Isolation.READ_UNCOMMITTED: everything},
        {0: (5, 5), 1: (8, 8), 2: (2, 2)},
        Chain(frozenset({2}), {2: 2}),
    )


def final(history: History, isolation: Isolation, partition: int, *records: Record) -> None:
    history.final[isolation][partition] = list(records)


def step(history: History, operation: int, number: int) -> object:
    return history.operations[operation].steps[number]


def everywhere(history: History, partition: int, *records: Record) -> None:
    for isolation in Isolation:
        final(history, isolation, partition, *records)


def test_a_sound_history_is_clean():
    assert check(sound()) == []


def made_up(history: History) -> None:
    history.operations[3].steps.append(Poll(4.4, [Record(1, 9, 999)]))


def another_value_at_an_offset(history: History) -> None:
    history.operations[3].steps[3] = Poll(4.3, [Record(0, 4, 10)])


def told_a_wrong_offset(history: History) -> None:
    history.operations[2].steps[0] = Send(0, 30, 3.0, 3.1, 2)


def told_offset_zero(history: History) -> None:
    history.operations[2].steps[0] = Send(0, 30, 3.0, 3.1, 0)


def twice_in_the_log(history: History) -> None:
    everywhere(history, 2, Record(2, 0, 31), Record(2, 1, 32), Record(2, 2, 32))


def aborted_is_polled(history: History) -> None:
    history.operations[3].steps[2] = Poll(4.2, [Record(0, 0, 10), Record(0, 1, 20), Record(1, 0, 11)])


def aborted_is_there_at_the_end(history: History) -> None:
    final(history, Isolation.READ_COMMITTED, 0, Record(0, 0, 10), Record(0, 1, 20), Record(0, 4, 30))


def never_asked_to_commit(history: History) -> None:
    history.operations[0].outcome, history.operations[0].commit_invoked_at = UNKNOWN, None


def read_before_the_commit(history: History) -> None:
    history.operations[0].commit_invoked_at = 4.5


def reads_its_own_write(history: History) -> None:
    history.operations[3].steps.append(Poll(4.4, [Record(1, 2, 40)]))


def committed_is_lost(history: History) -> None:
    final(history, Isolation.READ_COMMITTED, 0, Record(0, 0, 10))


def acknowledged_of_an_aborted_one_is_lost(history: History) -> None:
    final(history, Isolation.READ_UNCOMMITTED, 0, Record(0, 0, 10), Record(0, 4, 30))


def read_and_lost(history: History) -> None:
    history.operations[2].steps[1:2] = [Send(2, 31, 3.1)]
    everywhere(history, 2, Record(2, 1, 32))


def half_committed(history: History) -> None:
    history.operations[0].outcome = UNKNOWN
    history.operations[3].steps[2] = Poll(4.2, [Record(0, 0, 10)])
    final(history, Isolation.READ_COMMITTED, 1, *history.final[Isolation.READ_COMMITTED][1][1:])


def a_record_is_passed_over(history: History) -> None:
    history.operations[3].steps[2] = Poll(4.2, [Record(1, 0, 11)])


def the_position_is_ignored(history: History) -> None:
    history.operations[4].steps[0] = Attach({2: 1})


def a_record_comes_again(history: History) -> None:
    history.operations[3].steps.append(Poll(4.4, [Record(0, 0, 10)]))


def order_of_one_operation_is_turned(history: History) -> None:
    history.operations[2].steps[1:] = [Send(2, 32, 3.1, 3.2, 1), Send(2, 31, 3.2, 3.3, 0)]


def order_of_two_clients_is_turned(history: History) -> None:
    history.operations.append(Operation(6, "g", 2.0, PLAIN, [Send(2, 70, 2.0, 2.1, 2)]))
    everywhere(history, 2, Record(2, 0, 31), Record(2, 1, 32), Record(2, 2, 70))


def reading_in_a_circle(history: History) -> None:
    history.operations[0].steps.append(Poll(1.9, [Record(1, 2, 40)]))


def two_go_on_from_one_offset(history: History) -> None:
    history.operations[5].offsets = {2: (0, 2)}


def input_is_passed_over(history: History) -> None:
    history.operations[4].steps[2] = Send(1, 50, 6.2, 6.3, 4)


def input_is_processed_twice(history: History) -> None:
    history.operations[5].steps[2] = Send(1, 60, 8.2, 8.3, 6, source=(2, 0))


def offset_is_not_committed(history: History) -> None:
    assert history.chain is not None
    history.chain.committed[2] = 1


def nothing_is_stable(history: History) -> None:
    history.ends[0] = (4, 5)


PLANTED: list[tuple[Callable[[History], None], Kind]] = [
    (made_up, Kind.UNKNOWN_MESSAGE),
    (another_value_at_an_offset, Kind.INCONSISTENT_OFFSET),
    (told_a_wrong_offset, Kind.INCONSISTENT_OFFSET),
    (told_offset_zero, Kind.ZERO_OFFSET),
    (twice_in_the_log, Kind.DUPLICATE),
    (aborted_is_polled, Kind.ABORTED_READ),
    (aborted_is_there_at_the_end, Kind.ABORTED_READ),
    (never_asked_to_commit, Kind.ABORTED_READ),
    (read_before_the_commit, Kind.DIRTY_READ),
    (reads_its_own_write, Kind.DIRTY_READ),
    (committed_is_lost, Kind.LOST_WRITE),
    (acknowledged_of_an_aborted_one_is_lost, Kind.LOST_WRITE),
    (read_and_lost, Kind.LOST_WRITE),
    (half_committed, Kind.TORN),
    (a_record_is_passed_over, Kind.SKIPPED_POLL),
    (the_position_is_ignored, Kind.BACKWARD_POLL),
    (a_record_comes_again, Kind.BACKWARD_POLL),
    (order_of_one_operation_is_turned, Kind.BACKWARD_SEND),
    (order_of_two_clients_is_turned, Kind.BACKWARD_SEND),
    (reading_in_a_circle, Kind.CYCLE_G1C),
    (two_go_on_from_one_offset, Kind.CYCLE_G2),
    (input_is_passed_over, Kind.CHAIN_LOST),
    (input_is_processed_twice, Kind.CHAIN_TWICE),
    (offset_is_not_committed, Kind.CHAIN_TORN),
    (nothing_is_stable, Kind.HANGING),
]


@pytest.mark.parametrize(("plant", "kind"), PLANTED, ids=lambda value: getattr(value, "__name__", ""))
def test_each_mistake_is_found(plant: Callable[[History], None], kind: Kind):
    history = sound()
    plant(history)
    assert kind in kinds(check(history))


def test_every_kind_is_planted_and_corrupted():
    assert {kind for _, kind in PLANTED} == set(Kind)
    assert {kind for _, kind in CORRUPTIONS} == set(Kind)


def test_what_kafka_allows_is_clean():
    """Writes of two transactions interleave, and one partition's part of a transaction is seen before another's."""
    history = sound()
    history.operations[3].steps[2] = Poll(4.2, [Record(0, 0, 10)])
    history.operations[3].steps.append(Attach({0: None}))
    history.operations[3].steps.append(Poll(4.5, [Record(0, 0, 10)]))
    one = Operation(6, "g", 10.0, COMMITTED, [Send(1, 71, 10.0, 10.1, 8), Send(1, 72, 10.4, 10.5, 10)])
    other = Operation(7, "h", 10.0, COMMITTED, [Send(1, 81, 10.2, 10.3, 9), Send(1, 82, 10.6, 10.7, 11)])
    for operation in (one, other):
        operation.commit_invoked_at = operation.ended_at = 11.0
        history.operations.append(operation)
    for isolation in Isolation:
        history.final[isolation][1] += [Record(1, 8, 71), Record(1, 9, 81), Record(1, 10, 72), Record(1, 11, 82)]
    history.ends[1] = 14, 14
    assert check(history) == []


@pytest.mark.parametrize("first", range(0, 200, 50))
def test_what_a_correct_broker_does_is_clean(first: int):
    for seed in range(first, first + 50):
        assert check(ModelRun(Random(seed)).history()) == [], f"seed {seed}"


@pytest.mark.slow
@pytest.mark.parametrize(("corrupt", "kind"), CORRUPTIONS, ids=lambda value: getattr(value, "__name__", ""))
def test_random_histories_with_one_corruption_are_found(corrupt: Callable[[History, Random], bool], kind: Kind):
    found = 0
    for seed in range(40):
        history = ModelRun(Random(seed)).history()
        if corrupt(history, Random(seed)):
            assert kind in kinds(check(history)), f"seed {seed}"
            found += 1
    assert found >= 10
