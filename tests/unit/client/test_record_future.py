"""The futures of the blocking producer that are settled together: each observer learns of its record once."""

from __future__ import annotations

import concurrent.futures
import random
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from tests.patience import PATIENCE_S, join
from tidelog.client.model import RecordMetadata, TopicPartition
from tidelog.client.producing.batch_delivery import BatchDelivery
from tidelog.client.producing.record_timestamps import RecordTimestamps
from tidelog.client.sync.record_future import RecordFuture, record_future_class


@pytest.fixture
def quick_switches() -> Iterator[None]:
    """Threads change places after each few instructions."""
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval_s)


def new_futures(count: int) -> list[RecordFuture]:
    kind = record_future_class(lambda: None)
    return [kind() for _ in range(count)]


def results_of(futures: list[RecordFuture]) -> list[RecordMetadata]:
    return [RecordMetadata("t", 0, offset, 1) for offset in range(len(futures))]


def delivered(count: int) -> BatchDelivery:
    """A batch whose records have the offsets from 0 on."""
    timestamps = RecordTimestamps()
    for place in range(count):
        timestamps.append(place, 1)
    delivery = BatchDelivery(TopicPartition("t", 0), timestamps)
    delivery.acknowledge(0, -1)
    return delivery


def settle(futures: list[RecordFuture]) -> None:
    type(futures[0]).set_results(futures, delivered(len(futures)), 0)


def test_all_are_done_and_a_finished_one_keeps_its_outcome() -> None:
    futures = new_futures(4)
    error = ValueError("closed meanwhile")
    calls: list[Any] = []
    futures[1].add_done_callback(calls.append)
    futures[1].set_exception(error)
    futures[2].set_result(RecordMetadata("t", 0, 99, 1))
    settle(futures)
    assert all(future.done() for future in futures)
    assert futures[1].exception() is error
    assert [futures[place].result().offset for place in (0, 2, 3)] == [0, 99, 3]
    assert calls == [futures[1]]


def test_callbacks_run_in_the_order_of_the_records_when_all_are_done() -> None:
    futures = new_futures(4)
    seen: list[Any] = []
    for place in (3, 1, 0):
        futures[place].add_done_callback(lambda done: seen.append((done.result().offset, futures[2].done())))
    settle(futures)
    assert seen == [(0, True), (1, True), (3, True)]


def test_a_callback_that_raises_keeps_nothing_from_the_others() -> None:
    futures = new_futures(3)
    seen: list[int] = []

    def fail(_: Any) -> None:
        raise SystemExit

    futures[0].add_done_callback(fail)
    futures[2].add_done_callback(lambda done: seen.append(done.result().offset))
    settle(futures)
    assert seen == [2]
    assert futures[1].result().offset == 1


def test_an_iterator_that_a_callback_opens_counts_no_record_twice() -> None:
    futures = new_futures(3)
    seen: list[Any] = []
    opened: list[Iterator[Any]] = []

    def take_the_first(_: Any) -> None:
        opened.append(concurrent.futures.as_completed(futures, PATIENCE_S))
        seen.append(next(opened[0]))

    futures[0].add_done_callback(take_the_first)
    futures[1].add_done_callback(lambda _: None)
    settle(futures[:2])
    futures[2].set_result(RecordMetadata("t", 0, 2, 1))
    seen.extend(opened[0])
    assert len(seen) == 3
    assert set(seen) == set(futures)


@pytest.mark.usefixtures("quick_switches")
@pytest.mark.parametrize("is_together", [True, False], ids=["together", "each"])
@pytest.mark.parametrize("seed", range(20))
def test_observers_of_any_kind_that_come_at_any_time_learn_it_once(seed: int, is_together: bool) -> None:
    rng = random.Random(seed)
    futures = new_futures(30)
    calls: Counter[int] = Counter()
    outcomes: list[bool] = []
    start = threading.Barrier(5)

    def add_callbacks(mine: list[int]) -> None:
        start.wait(PATIENCE_S)
        for place in mine:
            futures[place].add_done_callback(lambda done: calls.update([done.result().offset]))

    def wait_for_each(mine: list[int]) -> None:
        start.wait(PATIENCE_S)
        outcomes.extend(futures[place].result(PATIENCE_S).offset == place for place in mine)

    def wait_for_all(_: list[int]) -> None:
        start.wait(PATIENCE_S)
        done, waiting = concurrent.futures.wait(futures, PATIENCE_S)
        outcomes.append(len(done) == len(futures) and not waiting)

    def take_as_they_come(_: list[int]) -> None:
        start.wait(PATIENCE_S)
        ended = [future.result().offset for future in concurrent.futures.as_completed(futures, PATIENCE_S)]
        outcomes.append(sorted(ended) == list(range(len(futures))))

    observers = (add_callbacks, wait_for_each, wait_for_all, take_as_they_come)
    threads = [
        threading.Thread(target=observe, args=(rng.sample(range(len(futures)), len(futures)),), daemon=True)
        for observe in observers
    ]
    for thread in threads:
        thread.start()
    start.wait(PATIENCE_S)
    for first in range(0, len(futures), 10):
        part = slice(first, first + 10)
        if is_together:
            type(futures[0]).set_results(futures[part], delivered(len(futures)), first)
        else:
            for future, result in zip(futures[part], results_of(futures)[part]):
                future.set_result(result)
    for thread in threads:
        join(thread)
    assert len(outcomes) == len(futures) + 2
    assert all(outcomes)
    assert set(calls.values()) == {1}
    assert len(calls) == len(futures)
