"""The thread of the blocking clients: interrupted callers."""

from __future__ import annotations

import asyncio
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Any

import pytest

from tests.patience import PATIENCE_S
from tidelog.client.sync.loop_thread import LoopThread
from tidelog.client.sync.record_future import record_future_class


class Interrupt(BaseException):
    pass


async def number(value: int) -> int:
    await asyncio.sleep(0.01)
    return value


def interrupted(call: Callable[[], Any]) -> None:
    """Call, and interrupt where the caller has taken the lock of a condition and not begun its `with` block.

    As Ctrl-C, or a signal handler that raises, would do it there.
    """

    def interrupt(frame: FrameType, event: str, _: Any) -> Any:
        if event == "return" and frame.f_code is threading.Condition.__enter__.__code__:
            raise Interrupt
        return interrupt

    sys.settrace(interrupt)
    try:
        call()
    except Interrupt:
        pass
    finally:
        sys.settrace(None)


def run_in_threads(*works: Callable[[], Any]) -> None:
    """One after the other; a work that does not end is left behind."""
    for work in works:
        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        thread.join(PATIENCE_S)


def test_an_interrupt_between_two_instructions_of_a_caller_does_not_hold_the_loop():
    thread = LoopThread()
    results: list[int] = []
    run_in_threads(
        lambda: interrupted(lambda: thread.run(number(1))),
        lambda: results.append(thread.run(number(2))),
    )
    assert results == [2]
    thread.stop()


def test_an_interrupt_of_a_thread_that_waits_for_a_record_does_not_hold_the_loop():
    future = record_future_class(lambda: None)()
    settled: list[bool] = []

    def wait() -> None:
        with suppress(TimeoutError):
            future.exception(0.01)

    def settle() -> None:
        future.set_exception(ValueError())
        settled.append(future.done())

    run_in_threads(lambda: interrupted(wait), settle)
    assert settled == [True]


def test_all_threads_that_wait_for_a_record_go_on():
    future = record_future_class(lambda: None)()
    errors: list[BaseException | None] = []
    threads = [threading.Thread(target=lambda: errors.append(future.exception(PATIENCE_S))) for _ in range(4)]
    for thread in threads:
        thread.start()
    with pytest.raises(TimeoutError):
        future.result(0.01)
    error = ValueError()
    future.set_exception(error)
    for thread in threads:
        thread.join(PATIENCE_S)
    assert errors == [error] * 4


def test_an_interrupted_caller_cancels_its_call():
    thread = LoopThread()
    ended: list[str] = []

    async def wait() -> None:
        try:
            interrupter.start()
            await asyncio.sleep(10 * PATIENCE_S)
        except asyncio.CancelledError:
            ended.append("cancelled")
            raise

    def handle(*_: Any) -> None:
        raise Interrupt

    before = signal.signal(signal.SIGUSR1, handle)
    main = threading.main_thread().ident
    assert main is not None
    interrupter = threading.Timer(0.05, lambda: signal.pthread_kill(main, signal.SIGUSR1))
    try:
        with pytest.raises(Interrupt):
            thread.run(wait())
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert thread.run(number(3)) == 3
    assert ended == ["cancelled"]
    thread.stop()


def test_an_interrupt_while_the_thread_starts_leaves_no_thread(monkeypatch):
    started: list[threading.Thread] = []
    start = threading.Thread.start

    def start_and_interrupt(thread: threading.Thread) -> None:
        start(thread)
        started.append(thread)
        raise Interrupt

    monkeypatch.setattr(threading.Thread, "start", start_and_interrupt)
    with pytest.raises(Interrupt):
        LoopThread()
    started[0].join(PATIENCE_S)
    assert not started[0].is_alive()
