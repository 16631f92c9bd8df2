"""Calls of blocking clients that Ctrl-C or a signal handler interrupts, at each place where Python runs the handler.

The client and its other calls go on: no lock stays taken, no record waits for a wake-up that does not come.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from itertools import count
from typing import Any

import pytest

from tests.patience import PATIENCE_S
from tests.unit.client.test_admin import served
from tests.unit.client.test_consumer import fill
from tests.unit.client.test_loop_thread import WAITING_MODULES, interrupted_at, run_in_threads
from tests.unit.client.test_producer import FAST
from tests.unit.client.transacting import cluster_of
from tidelog.client import TopicPartition, TransactionAborted, sync
from tidelog.client.sync.caller_thread import CallerThread
from tidelog.client.sync.loop_thread import LoopThread

pytestmark = pytest.mark.filterwarnings("ignore:coroutine .* was never awaited")  # of a call that had not begun

MODULES = (*WAITING_MODULES, "sync/producer.py", "sync/consumer.py", "contextlib.py", "futures/_base.py")


def wait_until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.001)


def hunt(interrupt: Callable[[], Any], check: Callable[[], Any], steps_min: int) -> None:
    """Interrupt a call at one place after the other, and check each time in a thread of its own."""
    for step in count():
        was_interrupted = interrupted_at(step, interrupt, MODULES)
        checked: list[Any] = []
        run_in_threads(lambda: checked.append(check()))  # noqa: B023
        assert checked, f"step {step}"
        if not was_interrupted:
            break
    assert step >= steps_min


@pytest.mark.parametrize("on_delivery", [None, lambda metadata, error: None])
def test_no_interrupt_of_a_send_holds_up_later_records(on_delivery: Any) -> None:
    with served(t=1) as cluster, sync.Producer(bootstrap_servers=cluster.bootstrap, **FAST) as producer:
        producer.start()

        def send() -> None:
            wait_until(lambda: not producer._is_draining)
            producer.send("t", b"v", on_delivery=on_delivery)

        def check() -> None:
            sent = producer.send("t", b"later")
            wait_until(sent.done)  # no call that waits for it wakes the loop

        hunt(send, check, 5)


def test_no_interrupt_of_a_wait_for_a_commit_holds_the_consumer() -> None:
    t0 = TopicPartition("t", 0)
    with (
        served(t=1) as cluster,
        sync.Consumer(bootstrap_servers=cluster.bootstrap, group_id="g", **FAST) as consumer,
    ):
        consumer.assign([t0])
        hunt(lambda: consumer.commit_async({t0: 3}).result(), lambda: consumer.commit({t0: 4}), 20)


def test_no_interrupt_of_an_iteration_loses_a_record() -> None:
    with (
        served(t=1) as cluster,
        sync.Consumer("t", bootstrap_servers=cluster.bootstrap, auto_offset_reset="earliest", **FAST) as consumer,
    ):
        fill(cluster, "t", 0, 200)
        read = [next(consumer).offset]

        def iterate() -> None:
            for record in consumer:
                read.append(record.offset)
                if len(read) % 3 == 0:
                    break

        hunt(iterate, lambda: None, 4)
        iterate()
        assert read == list(range(len(read)))


def test_no_interrupt_of_a_callback_leaves_the_loop_to_wait_for_it() -> None:
    """All later polls of a consumer would wait for its listener."""
    thread, caller, runs = LoopThread(), CallerThread(), list[int]()

    async def begin(step: int) -> asyncio.Task[Any]:
        return asyncio.create_task(caller.run(runs.append, step))

    async def end(callback: asyncio.Task[Any]) -> None:
        await asyncio.wait([callback])

    for step in count():
        callback = thread.run(begin(step))
        wait = partial(lambda callback: thread.run(end(callback), caller), callback)
        was_interrupted = interrupted_at(step, wait, MODULES)
        run_in_threads(wait)
        assert callback.done(), f"step {step}"
        assert runs.count(step) == 1, f"step {step}"
        error = callback.exception()
        assert error is None or "the listener was interrupted" in str(error)
        if not was_interrupted:
            break
    assert step >= 30
    thread.stop()


def test_a_callback_that_two_threads_see_is_run_by_one_of_them_and_the_next_one_is_not_lost(monkeypatch: Any) -> None:
    thread, caller, main = LoopThread(), CallerThread(), threading.current_thread()
    begun, released = threading.Event(), threading.Event()
    other = threading.Thread(target=caller._run_next)

    class Calls(deque[Any]):
        def __getitem__(self, index: Any) -> Any:
            call = super().__getitem__(index)
            if threading.current_thread() is main and not begun.is_set():
                other.start()  # the other thread takes this call before the main thread goes on
                assert begun.wait(PATIENCE_S)
            return call

    def slow() -> int:
        begun.set()
        released.wait(PATIENCE_S)
        return 1

    async def begin() -> list[asyncio.Task[int]]:
        tasks = [asyncio.create_task(caller.run(slow)), asyncio.create_task(caller.run(int, 2))]
        await asyncio.sleep(0)
        return tasks

    async def outcomes(tasks: list[asyncio.Task[int]]) -> list[int]:
        async with asyncio.timeout(PATIENCE_S):
            return await asyncio.gather(*tasks)

    monkeypatch.setattr(caller, "_calls", Calls())
    tasks = thread.run(begin())
    caller._run_next()
    caller._run_next()
    released.set()
    other.join(PATIENCE_S)
    assert thread.run(outcomes(tasks)) == [1, 2]
    thread.stop()


@pytest.mark.slow
def test_no_interrupt_of_a_transaction_keeps_the_next_one_from_its_begin() -> None:
    with served(t=1) as cluster:
        cluster.finalized_features, cluster.finalized_features_epoch = {"transaction.version": 2}, 0
        options: Any = {"bootstrap_servers": cluster.bootstrap, "transactional_id": "x", **FAST}
        with sync.Producer(**options) as producer:
            producer.init_transactions()

            def transact() -> None:
                with producer.transaction():
                    producer.send("t", b"v")

            hunt(transact, transact, 20)


@pytest.mark.slow
def test_a_close_that_is_interrupted_ends_the_thread_and_holds_up_no_other() -> None:
    async def nothing() -> None:
        pass

    for step in count():
        client = sync.Producer()
        client._run(nothing)
        assert client._thread is not None
        thread = client._thread._thread
        was_interrupted = interrupted_at(step, client.close, MODULES)
        closed: list[int] = []

        def close(client: sync.Producer = client, closed: list[int] = closed) -> None:
            client.close()
            closed.append(1)

        run_in_threads(close)
        assert closed, f"step {step}"
        thread.join(PATIENCE_S)
        assert not thread.is_alive(), f"step {step}"
        finalizer = client._finalizer
        assert finalizer is not None
        assert not finalizer.alive, f"step {step}"  # it would warn of a client left open
        if not was_interrupted:
            break
    assert step > 20


@pytest.mark.parametrize("way", ["block", "call"])
def test_a_commit_that_is_interrupted_at_any_step_may_be_asked_for_again(way: str) -> None:
    """It tells a commit from an abort: a program that took one for the other would write the records again."""
    thread = LoopThread()
    cluster = thread.run(cluster_of(2).__aenter__())
    ends = cluster.transactions.ends
    with sync.Producer(bootstrap_servers=cluster.bootstrap, transactional_id="x", **FAST) as producer:

        def transact() -> None:
            with producer.transaction():
                producer.send("t", b"v")

        def ask() -> bool:
            try:
                producer.commit_transaction()
            except (RuntimeError, TransactionAborted):
                return False
            return True

        for step in count():
            del ends[:]
            if way == "call":
                producer.begin_transaction()
                producer.send("t", b"v")
            was_interrupted = interrupted_at(step, transact if way == "block" else producer.commit_transaction, MODULES)
            told: list[bool] = []
            run_in_threads(lambda: told.append(ask()))  # noqa: B023
            if not was_interrupted:
                break
            assert told == [ends == ["commit"]], f"step {step}"
    assert told == [False], "there is nothing to ask for"
    assert step >= 30
    thread.run(cluster.__aexit__())
    thread.stop()
