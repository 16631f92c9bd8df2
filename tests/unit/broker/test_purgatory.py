"""Waiting requests leave exactly once: by offset in order, by deadline, or by being dropped."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidelog.broker.scheduling import purgatory
from tidelog.broker.scheduling.purgatory import DEADLINE_RESOLUTION_MS, Deadlines, OffsetWaiter, OffsetWaiters


def _note(called: list[int], number: int, error: Exception | None) -> None:
    called.append(number)


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50))))
def test_a_waiter_leaves_when_the_high_watermark_reaches_its_offset_and_not_before(
    steps: list[tuple[int, int]],
) -> None:
    waiters = OffsetWaiters()
    called: list[int] = []
    asked: dict[int, int] = {}
    high_watermark = 0
    for number, (offset, advance) in enumerate(steps):
        high_watermark += advance // 10
        for callback in waiters.take_reached(high_watermark):
            callback(None)
        if offset > high_watermark:
            asked[number] = offset
            waiters.add(offset, partial(_note, called, number))
        assert all(asked[n] <= high_watermark for n in called), "answered before it was committed"
    for callback in waiters.take_reached(50):
        callback(None)
    assert called == sorted(asked), "each once, in the order of their appends"
    assert not waiters.waiting


def test_a_duplicate_that_asks_for_less_waits_behind_those_before_it() -> None:
    waiters = OffsetWaiters()
    called: list[str] = []
    waiters.add(20, lambda error: called.append("first"))
    waiters.add(10, lambda error: called.append("retry"))
    assert waiters.take_reached(19) == []
    for callback in waiters.take_reached(20):
        callback(None)
    assert called == ["first", "retry"]


def test_all_waiters_can_be_taken_out_to_be_failed() -> None:
    waiters = OffsetWaiters()
    failures: list[Exception | None] = []
    waiters.add(1, failures.append)
    waiters.add(2, failures.append)
    error = ValueError("no longer the leader")
    for callback in waiters.take_all():
        callback(error)
    assert failures == [error, error]
    assert waiters.take_reached(100) == []


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("add"), st.integers(0, 500)),
            st.tuples(st.just("discard"), st.integers(0, 20)),
            st.tuples(st.just("expire"), st.integers(0, 100)),
        )
    )
)
def test_deadlines_are_never_early_at_most_one_bucket_late_and_never_after_a_discard(
    steps: list[tuple[str, int]],
) -> None:
    deadlines: Deadlines[Callable[[], None]] = Deadlines()
    now_ms = 1000
    open_items: dict[Callable[[], None], tuple[int, int]] = {}  # item -> (due_ms, bucket)
    for verb, argument in steps:
        if verb == "add":
            item: Callable[[], None] = partial(_note, [], len(open_items), None)
            open_items[item] = (now_ms + argument, deadlines.add(now_ms + argument, item))
        elif verb == "discard" and open_items:
            item = list(open_items)[argument % len(open_items)]
            deadlines.discard(open_items.pop(item)[1], item)
        elif verb == "expire":
            now_ms += argument
            for item in deadlines.expire(now_ms):
                due_ms, _ = open_items.pop(item)
                assert due_ms <= now_ms, "early"
            late = [due for due, _ in open_items.values() if due + DEADLINE_RESOLUTION_MS < now_ms]
            assert not late, "late by more than a bucket"
        next_due_ms = deadlines.next_due_ms()
        assert (next_due_ms is None) == (not open_items)
        if next_due_ms is not None:
            assert next_due_ms >= min(due for due, _ in open_items.values())
        assert len(deadlines) == len(open_items)


@pytest.mark.parametrize("apart_ms", [0, 4, 3000])
def test_a_deadline_that_one_due_before_it_has_discarded_does_not_come(apart_ms: int) -> None:
    """A node that stood still was past the deadline of a repeated batch and past the timeout of its request at once.
    The first answered the request, and the second answered it again.
    """
    deadlines: Deadlines[int] = Deadlines()
    buckets = [deadlines.add(1000 + number * apart_ms, number) for number in range(10)]
    expired: list[int] = []
    for number in deadlines.expire(60_000, 4):
        expired.append(number)
        if number + 1 < 10:
            deadlines.discard(buckets[number + 1], number + 1)
    assert expired == [0, 2, 4, 6]
    assert list(deadlines.expire(60_000)) == [8, 9]
    assert deadlines.next_due_ms() is None


@given(st.lists(st.tuples(st.sampled_from(("add", "discard", "reach")), st.integers(0, 40))))
def test_those_that_were_discarded_are_not_called_and_do_not_stay(steps: list[tuple[str, int]]) -> None:
    waiters = OffsetWaiters()
    called: list[int] = []
    waiting: dict[int, tuple[int, OffsetWaiter]] = {}
    most, high_watermark = purgatory.DISCARDED_MAX, 0
    purgatory.DISCARDED_MAX = 2
    try:
        for number, (step, value) in enumerate(steps):
            if step == "add":
                offset = max([high_watermark + 1 + value, *(each for each, _ in waiting.values())])
                waiting[number] = offset, waiters.add(offset, partial(_note, called, number))
            elif step == "discard" and waiting:
                _, waiter = waiting.pop(sorted(waiting)[value % len(waiting)])
                waiter.discard()
                waiter.discard()
            elif step == "reach":
                high_watermark += value
                reached = [each for each, (offset, _) in waiting.items() if offset <= high_watermark]
                called.clear()
                for callback in waiters.take_reached(high_watermark):
                    callback(None)
                assert called == reached
                for each in reached:
                    waiting.pop(each)[1].discard()  # it has been called: no effect
            assert len(waiters.waiting) <= len(waiting) + max(2, len(waiting))
        called.clear()
        for callback in waiters.take_all():
            callback(None)
        assert called == list(waiting)
    finally:
        purgatory.DISCARDED_MAX = most
