"""The state of producers after a truncation is what a replay of the rest of the log gives."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from tidelog.protocol.batches.record_batch import CONTROL_FLAG, TRANSACTIONAL_FLAG
from tidelog.storage.producers.producer_state import BATCHES_RETAINED, EndMarker, ProducerState
from tidelog.storage.producers.transitions import CHANGES_MAX

# Producer, what it does, records, and whether it raises its epoch first. -1 is no producer.
Step = tuple[int, str, int, bool]
KINDS = ("batch", "batch", "transactional", "marker")


def steps(kinds: tuple[str, ...]) -> st.SearchStrategy[list[Step]]:
    one = st.tuples(
        st.integers(-1, 1), st.sampled_from(kinds), st.integers(1, 3), st.integers(0, 9).map(lambda number: number == 0)
    )
    return st.lists(one, min_size=1, max_size=12)


def log_of(moves: list[Step]) -> list[tuple[Any, EndMarker | None]]:
    """Headers as a leader would append them, each with its marker."""
    epochs, sequences, in_transaction = dict.fromkeys(range(2), 0), dict.fromkeys(range(2), 0), set[int]()
    offset, found = 0, []
    for producer, kind, count, raises in moves:
        control = kind == "marker" and producer >= 0
        if producer >= 0 and raises and producer not in in_transaction:
            epochs[producer] += 1
            sequences[producer] = 0
        transactional = producer >= 0 and (kind == "transactional" or producer in in_transaction)
        count = 1 if control else count
        epoch = epochs.get(producer, -1)
        header = SimpleNamespace(
            producer_id=producer, producer_epoch=epoch, base_sequence=sequences.get(producer, -1), base_offset=offset,
            last_offset=offset + count - 1, next_offset=offset + count, max_timestamp=1_000 + offset,
            attributes=(CONTROL_FLAG if control else 0) | (TRANSACTIONAL_FLAG if control or transactional else 0),
        )  # fmt: skip
        found.append((header, EndMarker(producer, epoch, 0, False, offset, 5_000 + offset) if control else None))
        if control:
            in_transaction.discard(producer)
        elif producer >= 0:
            sequences[producer] += count
            if transactional:
                in_transaction.add(producer)
        offset += count
    return found


def replayed(log: list[tuple[Any, EndMarker | None]]) -> ProducerState:
    state = ProducerState()
    for header, end in log:
        state.replay(header, end)
    return state


def facts(state: ProducerState) -> dict[int, tuple[int, int, int, int]]:
    return {
        each.producer_id: (each.epoch, each.coordinator_epoch, each.last_timestamp, each.transaction_first_offset)
        for each in state.entries.values()
    }


def check(moves: list[Step], cut: int, replicated: int = 0) -> bool:
    """Compare the state after a truncation before batch `cut` with a replay. `replicated`: so many batches are."""
    log = log_of(moves)
    cut = min(cut, len(log))
    end_offset = log[cut][0].base_offset if cut < len(log) else log[-1][0].next_offset
    state, expected, before = replayed(log), replayed(log[:cut]), replayed(log)
    high_watermark = log[min(replicated, cut, len(log) - 1)][0].base_offset
    for each in (state, expected, before):
        each.on_high_watermark(high_watermark)
    earlier = state.earlier(end_offset)
    assert facts(state) == facts(before)
    assert [each.batches for each in state.entries.values()] == [each.batches for each in before.entries.values()]
    assert state.first_unstable_offset == before.first_unstable_offset
    if earlier is None:
        return False
    state.return_to(earlier)
    compare(state, expected, log, cut)
    # The log goes on from here, and is cut again at the same place.
    for header, end in log[cut:]:
        state.replay(header, end)
    assert facts(state) == facts(before)
    assert state.first_unstable_offset == before.first_unstable_offset
    again = state.earlier(end_offset)
    if again is not None:
        state.return_to(again)
        compare(state, expected, log, cut)
    return True


def compare(state: ProducerState, expected: ProducerState, log: list[tuple[Any, EndMarker | None]], cut: int) -> None:
    assert facts(state) == facts(expected)
    assert state.end_offset == expected.end_offset
    assert state.first_unstable_offset == expected.first_unstable_offset
    assert state.open_transaction_count == expected.open_transaction_count
    for producer_id, entry in expected.entries.items():
        kept = state.entries[producer_id].batches
        # Those that leave the log take places among the five.
        gone = sum(header.producer_id == producer_id for header, _ in log[cut:])
        assert kept == entry.batches[len(entry.batches) - len(kept) :]
        assert len(kept) >= min(len(entry.batches), BATCHES_RETAINED - gone)


@pytest.mark.slow
@settings(max_examples=1_000)
@given(steps(KINDS), st.integers(1, 4), st.integers(0, 12))
def test_the_state_after_a_truncation_is_that_of_the_rest(moves: list[Step], tail: int, replicated: int) -> None:
    event("earlier state" if check(moves, max(0, len(moves) - tail), replicated) else "left to a replay")


@pytest.mark.slow
@settings(max_examples=300)
@given(steps(("batch",)), st.integers(1, 4), st.integers(0, 12))
def test_a_tail_of_producers_without_transactions_is_not_replayed(
    moves: list[Step], tail: int, replicated: int
) -> None:
    assert check(moves, max(0, len(moves) - tail), replicated)


@pytest.mark.slow
@settings(max_examples=300)
@given(steps(("transactional", "marker")), st.integers(1, 4), st.integers(0, 12))
def test_a_tail_of_transactions_is_not_replayed(moves: list[Step], tail: int, replicated: int) -> None:
    assert check(moves, max(0, len(moves) - tail), replicated)


def test_more_changes_than_are_kept_are_left_to_a_replay() -> None:
    log = log_of([(0, kind, 1, False) for _ in range(CHANGES_MAX) for kind in ("transactional", "marker")])
    state = replayed(log)
    assert state.earlier(CHANGES_MAX - 1) is None
    earlier = state.earlier(CHANGES_MAX)
    assert earlier is not None
    state.return_to(earlier)
    assert facts(state) == facts(replayed(log[:CHANGES_MAX]))


def test_a_replicated_change_is_left_to_a_replay() -> None:
    log = log_of([(0, "transactional", 1, False), (0, "marker", 1, False), (0, "transactional", 1, False)])
    state = replayed(log)
    state.on_high_watermark(2)
    assert state.earlier(1) is None
    assert state.earlier(2) is not None


def test_a_producer_with_none_of_its_earlier_batches_left_is_left_to_a_replay() -> None:
    log = log_of([(0, "batch", 1, False)] * (BATCHES_RETAINED + 2))
    assert replayed(log).earlier(3) is not None
    assert replayed(log).earlier(2) is None
    assert replayed(log).earlier(0) is not None, "the producer is new in the tail"


def test_a_batch_outside_transactions_after_a_transaction_is_left_to_a_replay() -> None:
    log = log_of([(0, "transactional", 1, False), (0, "marker", 1, False), (0, "batch", 1, False)])
    assert replayed(log).earlier(2) is None


def test_what_was_before_a_snapshot_is_left_to_a_replay() -> None:
    log = log_of([(0, "transactional", 1, False), (0, "marker", 1, False)] * 2)
    state = replayed(log[:3])
    state.load(list(replayed(log).entries.values()), 4)
    assert state.earlier(2) is None
    assert state.earlier(3) is None
    unchanged = state.earlier(4)
    assert unchanged is not None
    assert unchanged.entries == {}
