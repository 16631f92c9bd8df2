"""The futures of the blocking producer that are settled together: each observer learns of its record once."""

from __future__ import annotations

import concurrent.futures
import itertools
import random
import subprocess
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import pytest

from tests.patience import PATIENCE_S, join, wait_until
from tests.unit.client.test_loop_thread import WAITING_MODULES, handled_at, interrupted_at
from tidelog.client.model import RecordMetadata, TopicPartition
from tidelog.client.producing.batch_delivery import BatchDelivery
from tidelog.client.producing.record_timestamps import RecordTimestamps
from tidelog.client.producing.transaction_errors import TransactionAborted
from tidelog.client.sync.record_future import RecordFuture, record_future_class
from tidelog.protocol.errors import ErrorCode, KafkaError

as_completed: Any = concurrent.futures.as_completed
MODULES = (*WAITING_MODULES, "concurrent/futures/_base.py")


@pytest.fixture
def quick_switches() -> Iterator[None]:
    """Threads change places after each few instructions."""
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval_s)


def in_thread(work: Callable[[], object]) -> None:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    join(thread)


class Loop:
    """What a producer's loop does for its futures, in the thread of the test."""

    def __init__(self, count: int) -> None:
        self.to_observe: deque[RecordFuture] = deque()
        kind = record_future_class(lambda: None, self.to_observe.append)
        self.futures = [kind() for _ in range(count)]

    def bind(self, first: int = 0, end: int | None = None) -> BatchDelivery:
        """Some records are in one batch. It will have the offsets of their places."""
        futures = self.futures[first:end]
        timestamps = RecordTimestamps()
        for place, _ in enumerate(futures):
            timestamps.append(place, 1)
        delivery = BatchDelivery(TopicPartition("t", 0), timestamps)
        for place, future in enumerate(futures):
            future.bind(delivery, place)
        return delivery

    def turn(self) -> None:
        while self.to_observe:
            self.to_observe.popleft().observe()


def test_a_future_that_is_not_observed_is_a_view_of_its_delivery() -> None:
    loop = Loop(2)
    delivery = loop.bind()
    assert not loop.futures[1].done()
    delivery.acknowledge(7, -1)
    assert all(future.done() for future in loop.futures)
    assert loop.futures[1].result() == RecordMetadata("t", 0, 8, 1)
    assert loop.futures[1].exception() is None
    assert not loop.to_observe
    assert delivery._observers == []


def test_a_failed_delivery_is_the_outcome() -> None:
    loop = Loop(2)
    delivery = loop.bind()
    seen: list[Any] = []
    loop.futures[0].add_done_callback(lambda done: seen.append(done.exception()))
    loop.turn()
    error = KafkaError(ErrorCode.MESSAGE_TOO_LARGE, "t")
    delivery.fail(error)
    assert [str(each) for each in (*seen, loop.futures[1].exception())] == [str(error)] * 2
    with pytest.raises(KafkaError):
        loop.futures[1].result()


def test_what_a_program_does_with_an_error_does_not_change_that_of_another_record() -> None:
    """A loop over thousands of failed records that logs each error wrote gigabytes."""
    loop = Loop(2)
    loop.bind().fail(KafkaError(ErrorCode.MESSAGE_TOO_LARGE, "t"))
    depths: list[int] = []
    for future in (*loop.futures, *loop.futures):
        try:
            raise ValueError("another exception is handled")
        except ValueError:
            with pytest.raises(KafkaError) as raised:
                future.result()
        depths.append(len(raised.traceback))
        raised.value.add_note("record 0")
    assert len(set(depths)) == 1
    for future in loop.futures:
        error = future.exception()
        assert error is not None
        with suppress(KafkaError):
            raise error
        untouched = future.exception()
        assert untouched is not None
        assert untouched.__traceback__ is untouched.__context__ is None
        assert not hasattr(untouched, "__notes__")


def test_the_error_of_each_record_is_of_the_kind_of_the_batch() -> None:
    loop = Loop(2)
    loop.bind().fail(TransactionAborted(ErrorCode.TRANSACTION_ABORTABLE, "t"))
    for future in loop.futures:
        error = future.exception()
        assert isinstance(error, TransactionAborted)
        assert (error.code, error.message) == (ErrorCode.TRANSACTION_ABORTABLE, "t")
        with pytest.raises(TransactionAborted):
            future.result()


def test_those_who_wait_for_a_record_learn_of_its_end_before_its_callbacks_run() -> None:
    """As of the standard future: a callback may take long."""
    loop = Loop(1)
    [future] = loop.futures
    waiting_sees: list[Any] = []
    waiter: Any = concurrent.futures._base._AsCompletedWaiter()
    future.call_when_done(lambda _: waiting_sees.append(list(waiter.event._ended)))
    future.add_done_callback(lambda _: waiting_sees.append(list(waiter.event._ended)))
    future._waiters.append(waiter)
    future.set_result(None)
    assert waiting_sees == [[future], [future]]


def test_those_who_wait_no_longer_leave_nothing_at_a_future() -> None:
    """A program that looks at a record again and again, with a short timeout, would fill its memory."""
    loop = Loop(1)
    [future] = loop.futures
    for _ in range(3):
        with pytest.raises(TimeoutError):
            future.result(0)
        assert concurrent.futures.wait([future], 0).not_done == {future}
        with pytest.raises(TimeoutError):
            next(concurrent.futures.as_completed([future], 0))
    assert future._notices[future] == ({}, {})


def test_a_future_is_settled_once() -> None:
    loop = Loop(3)
    loop.futures[0].set_result(1)
    loop.futures[1].set_exception(ValueError())
    loop.bind(2).acknowledge(0, -1)
    for future in loop.futures:
        with pytest.raises(concurrent.futures.InvalidStateError):
            future.set_result(2)
        with pytest.raises(concurrent.futures.InvalidStateError):
            future.set_exception(ValueError())


@pytest.mark.parametrize("comes", ["before the batch", "after it", "after the split", "after the end"])
def test_a_record_of_a_batch_that_is_split_is_that_of_its_part(comes: str) -> None:
    loop = Loop(5)
    seen: list[int] = []

    def observe(now: str) -> None:
        if now == comes:
            loop.futures[3].add_done_callback(lambda done: seen.append(done.result().offset))

    observe("before the batch")
    whole = loop.bind()
    observe("after it")
    loop.turn()
    parts = []
    for count in (2, 3):
        timestamps = RecordTimestamps()
        timestamps.append(0, 1)
        parts.append((BatchDelivery(whole.partition, timestamps), count))
    whole.split(parts)
    observe("after the split")
    loop.turn()
    assert not loop.futures[3].done()
    parts[1][0].acknowledge(10, -1)
    assert loop.futures[3].done()
    assert not loop.futures[1].done()
    observe("after the end")
    assert seen == [11]
    assert loop.futures[3].result(0).offset == 11
    parts[0][0].acknowledge(20, -1)
    assert loop.futures[1].result(0).offset == 21


def test_callbacks_run_in_the_order_of_the_records_when_all_are_done() -> None:
    loop = Loop(4)
    futures = loop.futures
    seen: list[Any] = []
    for place in (3, 1, 0):
        futures[place].add_done_callback(lambda done: seen.append((done.result().offset, futures[2].done())))
    loop.bind().acknowledge(0, -1)
    assert seen == [(0, True), (1, True), (3, True)]


def test_a_callback_that_raises_keeps_nothing_from_the_others() -> None:
    loop = Loop(3)
    seen: list[int] = []

    def fail(_: Any) -> None:
        raise SystemExit

    loop.futures[0].add_done_callback(fail)
    loop.futures[2].add_done_callback(lambda done: seen.append(done.result().offset))
    loop.bind().acknowledge(0, -1)
    assert seen == [2]
    assert loop.futures[1].result().offset == 1


def test_an_iterator_that_a_callback_opens_counts_no_record_twice() -> None:
    loop = Loop(3)
    futures = loop.futures
    seen: list[Any] = []
    opened: list[Iterator[Any]] = []

    def take_the_first(_: Any) -> None:
        opened.append(concurrent.futures.as_completed(futures, PATIENCE_S))
        seen.append(next(opened[0]))

    futures[0].add_done_callback(take_the_first)
    futures[1].add_done_callback(lambda _: None)
    loop.bind(0, 2).acknowledge(0, -1)
    loop.bind(2).acknowledge(2, -1)
    seen.extend(opened[0])
    assert len(seen) == 3
    assert set(seen) == set(futures)


def test_futures_that_were_seen_done_are_not_told_again() -> None:
    """`wait` counts those that are not done, and each notice of one."""
    loop = Loop(2)
    loop.bind(0, 1).acknowledge(0, -1)
    rest = loop.bind(1)
    outcome: list[Any] = []
    waiting = threading.Thread(
        target=lambda: outcome.append(concurrent.futures.wait(loop.futures, PATIENCE_S)), daemon=True
    )
    waiting.start()
    wait_until(lambda: loop.to_observe)
    loop.futures[0].observe()
    loop.futures[0].handle_settled()
    waiting.join(0.1)
    assert waiting.is_alive()
    loop.turn()
    rest.acknowledge(1, -1)
    join(waiting)
    assert outcome[0].not_done == set()


@pytest.mark.parametrize("ends", ["before", "while it looks"])
def test_a_thread_that_registers_sees_one_state_and_is_told_of_what_it_saw_running(ends: str) -> None:
    """`wait` counts what it sees running, and each notice of one."""
    loop = Loop(1)
    [future] = loop.futures
    if ends == "before":
        future.set_result(None)
    waiter = concurrent.futures._base._FirstCompletedWaiter()
    future._condition.acquire()
    seen = [future._state]
    if ends == "while it looks":
        in_thread(lambda: future.set_result(None))
        with future._condition:  # as a signal handler there may
            seen.append(future._state)
    seen.append(future._state)
    future._waiters.append(waiter)
    future._condition.release()
    assert future._state == "FINISHED"
    assert seen == (["FINISHED"] * 2 if ends == "before" else ["RUNNING", "FINISHED", "RUNNING"])
    assert waiter.event.wait(0.0) is (ends != "before")
    assert waiter.finished_futures == ([] if ends == "before" else [future])
    future._waiters.remove(waiter)


@pytest.mark.usefixtures("quick_switches")
def test_threads_that_wait_for_the_futures_of_two_producers_do_not_block_each_other() -> None:
    """`concurrent.futures` takes the locks of all of them, in the order of the futures."""
    kinds = [record_future_class(lambda: None) for _ in range(2)]
    made = sorted((kinds[number % 2]() for number in range(20)), key=id)
    first = made[0]
    second = next(future for future in made if type(future) is not type(first))
    third = next(future for future in made[made.index(second) :] if type(future) is type(first))

    def wait(some: list[RecordFuture]) -> None:
        for _ in range(2_000):
            concurrent.futures.wait(some, 0)

    pairs = ([first, second], [second, third])
    threads = [threading.Thread(target=wait, args=(pair,), daemon=True) for pair in pairs]
    for thread in threads:
        thread.start()
    for thread in threads:
        join(thread)


def test_threads_that_wait_for_their_records_and_for_a_future_of_both_do_not_block_each_other() -> None:
    """The one of both is that of an executor, say. `concurrent.futures` takes the locks in the order of the futures."""
    kind = record_future_class(lambda: None)
    kinds: list[type[concurrent.futures.Future[Any]]] = [kind, concurrent.futures.Future] * 20
    made = sorted((each() for each in kinds), key=id)
    first = next(future for future in made if type(future) is kind)
    shared = next(future for future in made[made.index(first) :] if type(future) is not kind)
    last = next(future for future in made[made.index(shared) :] if type(future) is kind)
    with shared._condition:
        one = threading.Thread(target=concurrent.futures.wait, args=([first, shared], 0), daemon=True)
        one.start()
        wait_until(lambda: first._seen.get(first))
        other = threading.Thread(target=concurrent.futures.wait, args=([last], 0), daemon=True)
        other.start()
        join(other)
    join(one)


def test_an_interrupt_before_the_loop_heard_of_an_observer_loses_nothing() -> None:
    calls = 0

    def interrupt(future: RecordFuture) -> None:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise KeyboardInterrupt
        loop.to_observe.append(future)

    loop = Loop(0)
    loop.futures = [record_future_class(lambda: None, interrupt)()]
    delivery = loop.bind()
    with pytest.raises(KeyboardInterrupt):
        loop.futures[0].result(0)
    with pytest.raises(TimeoutError):
        loop.futures[0].result(0)
    assert calls == 2
    seen: list[Any] = []
    loop.futures[0].add_done_callback(seen.append)
    loop.turn()
    delivery.acknowledge(0, -1)
    assert seen == loop.futures


@pytest.mark.usefixtures("quick_switches")
@pytest.mark.parametrize("is_bound_first", [True, False], ids=["in a batch", "queued"])
@pytest.mark.parametrize("seed", range(20))
def test_observers_of_any_kind_that_come_at_any_time_learn_it_once(seed: int, is_bound_first: bool) -> None:
    rng = random.Random(seed)
    loop = Loop(30)
    futures = loop.futures
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
    deliveries = [loop.bind(first, first + 10) for first in range(0, 30, 10)] if is_bound_first else []
    start.wait(PATIENCE_S)
    for number in range(3):
        if not is_bound_first:
            deliveries.append(loop.bind(10 * number, 10 * number + 10))
        if rng.random() < 0.5:
            loop.turn()
        deliveries[number].acknowledge(10 * number, -1)

    def have_all_ended() -> bool:
        loop.turn()
        return not any(thread.is_alive() for thread in threads)

    wait_until(have_all_ended, 0.0)
    assert len(outcomes) == len(futures) + 2
    assert all(outcomes)
    assert set(calls.values()) == {1}
    assert len(calls) == len(futures)


OBSERVED_IN_COLLECTIONS = """
import gc, sys, threading
from tidelog.client.model import TopicPartition
from tidelog.client.producing.batch_delivery import BatchDelivery
from tidelog.client.producing.record_timestamps import RecordTimestamps
from tidelog.client.sync.record_future import record_future_class


def collect(phase, info):
    "As a finalizer that lets another thread run."
    for _ in range(50):
        pass


def observe(number):
    start.wait(60)
    for future in futures:
        future.add_done_callback(lambda _: called.append(number))


gc.callbacks.append(collect)
gc.set_threshold(5)
sys.setswitchinterval(1e-6)
for _ in range(int(sys.argv[1])):
    to_observe = []
    kind = record_future_class(lambda: None, to_observe.append)
    futures = [kind() for _ in range(200)]
    called = []
    start = threading.Barrier(3)
    threads = [threading.Thread(target=observe, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    timestamps = RecordTimestamps()
    delivery = BatchDelivery(TopicPartition("t", 0), timestamps)
    start.wait(60)
    for place, future in enumerate(futures):
        timestamps.append(place, 1)
        future.bind(delivery, place)
    for thread in threads:
        thread.join(60)
    while to_observe:
        to_observe.pop().observe()
    delivery.acknowledge(0, -1)
    assert [future.result(0).offset for future in futures] == list(range(200))
    assert (called.count(0), called.count(1)) == (200, 200)
    assert not kind._notices
    assert not any(isinstance(of, dict) for future in futures for of in gc.get_referents(future))
print("all")
"""


def test_collections_while_threads_observe_futures_lose_nothing() -> None:
    """CPython 3.11 collects while it makes a `__dict__`: a second thread then got another one, in the same memory."""
    program = [sys.executable, "-c", OBSERVED_IN_COLLECTIONS, "60"]
    ended = subprocess.run(program, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "all\n", "")


@pytest.mark.slow
@pytest.mark.parametrize("end_comes", ["in its thread", "in another thread"])
@pytest.mark.parametrize("kind", ["wait", "first", "as_completed", "result", "callback"])
def test_a_signal_handler_at_any_step_may_end_the_records_and_wait_for_them(kind: str, end_comes: str) -> None:
    """`close()` in a handler does so, and `flush()` or `wait` while the loop's thread ends them."""
    for step in itertools.count():
        loop = Loop(2)
        delivery, is_ending = loop.bind(), threading.Lock()
        called: list[Any] = []
        reached: list[bool] = []

        def end(loop: Loop = loop, delivery: BatchDelivery = delivery, is_ending: Any = is_ending) -> None:
            with is_ending:
                loop.turn()
                if not delivery.is_settled:
                    delivery.acknowledge(0, -1)

        def handle(loop: Loop = loop, end: Callable[[], None] = end) -> None:
            if end_comes == "in its thread":
                end()
            else:
                in_thread(end)
            assert concurrent.futures.wait(loop.futures, PATIENCE_S).not_done == set()
            assert len(list(as_completed(loop.futures, PATIENCE_S))) == 2

        def run(
            loop: Loop = loop,
            handle: Callable[[], None] = handle,
            called: list[Any] = called,
            reached: list[bool] = reached,
            step: int = step,
        ) -> None:
            reached.append(handled_at(step, lambda: observe(kind, loop.futures, called), handle, MODULES))

        running = threading.Thread(target=run, daemon=True)
        running.start()
        running.join(0.01)
        in_thread(end)
        join(running)
        assert len(called) >= (1 if kind == "first" else 2), f"step {step}"
        assert len(called) == len(set(called)), f"step {step}"
        if not reached[0]:
            break
    assert step > 20


def observe(kind: str, futures: list[RecordFuture], called: list[Any]) -> None:
    """Append the records that end, each once, to `called`."""
    if kind == "callback":
        for future in futures:
            future.add_done_callback(called.append)
    elif kind == "as_completed":
        called.extend(as_completed(futures, PATIENCE_S))
    elif kind == "result":
        called.extend(future for future in futures if future.result(PATIENCE_S))
    else:
        how = concurrent.futures.FIRST_COMPLETED if kind == "first" else concurrent.futures.ALL_COMPLETED
        called.extend(concurrent.futures.wait(futures, PATIENCE_S, how).done)


@pytest.mark.parametrize("kind", ["wait", "as_completed", "callback"])
def test_an_interrupt_at_any_step_takes_nothing_from_other_threads(kind: str) -> None:
    for step in itertools.count():
        loop = Loop(2)
        for future in loop.futures[:1]:
            future.set_result(None)

        def wait(futures: list[RecordFuture] = loop.futures) -> None:
            with suppress(TimeoutError):
                if kind == "callback":
                    futures[1].add_done_callback(lambda _: None)
                elif kind == "wait":
                    concurrent.futures.wait(futures, 0.0)
                else:
                    list(as_completed(futures, 0.0))

        was_interrupted = interrupted_at(step, wait, MODULES)
        done: list[int] = []
        other = threading.Thread(
            target=lambda: done.append(len(concurrent.futures.wait(loop.futures, PATIENCE_S).done)),  # noqa: B023
            daemon=True,
        )
        other.start()
        in_thread(lambda: loop.futures[1].set_result(None))  # noqa: B023
        join(other)
        assert done == [2], f"step {step}"
        if not was_interrupted:
            break
    assert step > 10


WAYS_TO_WAIT: dict[str, Callable[[Sequence[concurrent.futures.Future[Any]]], object]] = {
    "all": lambda futures: concurrent.futures.wait(futures, PATIENCE_S).not_done,
    "first": lambda futures: not concurrent.futures.wait(futures, PATIENCE_S, concurrent.futures.FIRST_COMPLETED).done,
    "in order": lambda futures: len(futures) - len([*concurrent.futures.as_completed(futures, PATIENCE_S)]),
}


@pytest.mark.parametrize(("way", "look_at"), [("all", 1), ("all", 2), ("first", 1), ("in order", 1)])
def test_what_a_handler_settles_while_its_thread_begins_to_wait_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, way: str, look_at: int
) -> None:
    """As by `close` in a signal handler: nothing else settles these futures."""
    kind = record_future_class(lambda: None)
    futures = [kind() for _ in range(3)]
    looks = Counter[RecordFuture]()
    state = RecordFuture._state.fget

    def look(future: RecordFuture) -> str:
        seen: str = state(future)
        looks[future] += 1
        if looks[future] == look_at and not future.done():
            future.set_result(None)
        return seen

    monkeypatch.setattr(RecordFuture, "_state", property(look))
    left: list[object] = []
    in_thread(lambda: left.append(WAYS_TO_WAIT[way](futures)))
    assert left
    assert not left[0]
    assert all(future.done() for future in futures)


def test_what_a_handler_settles_while_its_thread_takes_what_is_completed_comes_too() -> None:
    """The event of `as_completed` is cleared after the list was emptied: what comes between both was lost."""
    kind = record_future_class(lambda: None)
    futures = [kind() for _ in range(2)]
    coming = concurrent.futures.as_completed(futures, PATIENCE_S)
    futures[0].set_result(None)
    assert next(coming) is futures[0]
    waiter: Any = next(iter(kind._notices[futures[1]][0]))
    with waiter.lock:
        waiter.finished_futures = []
        futures[1].set_result(None)  # the handler
        waiter.event.clear()
    began_s = time.monotonic()
    assert list(coming) == [futures[1]]
    assert time.monotonic() - began_s < PATIENCE_S / 2


def test_what_an_interrupt_has_left_acquired_keeps_nothing_from_its_thread() -> None:
    future = record_future_class(lambda: None)()
    called: list[object] = []
    future.add_done_callback(called.append)
    future._condition.acquire()
    future.set_result(None)
    assert called == [future]
    assert concurrent.futures.wait([future], 0.0).done == {future}
    assert list(as_completed([future], 0.0)) == [future]


@pytest.mark.parametrize("way", WAYS_TO_WAIT)
def test_a_wait_for_records_of_several_clients_is_refused_where_those_of_one_do_not_end(way: str) -> None:
    """As in the child of a fork, with records of a client that was made there too."""

    def refuse() -> None:
        raise RuntimeError("forked")

    lives, is_forked = record_future_class(lambda: None), record_future_class(lambda: None, check_can_end=refuse)
    for _ in range(20):  # the set of futures has them in any order
        futures = [is_forked(), lives()]
        futures[1].call_when_done(lambda _: None)
        with pytest.raises(RuntimeError, match="forked"):
            WAYS_TO_WAIT[way](futures)
        assert not any(future._seen.get(future) for future in futures)
