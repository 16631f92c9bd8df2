"""The thread of the blocking clients: interrupted callers."""

from __future__ import annotations

import asyncio
import signal
import sys
import threading
from types import FrameType
from typing import Any

import pytest

from tests.patience import PATIENCE_S
from tidelog.client.sync.loop_thread import LoopThread


class Interrupt(BaseException):
    pass


async def number(value: int) -> int:
    await asyncio.sleep(0.01)
    return value


def test_an_interrupt_between_two_instructions_of_a_caller_does_not_hold_the_loop():
    """As Ctrl-C, or a signal handler that raises, where the caller has taken a lock and not begun its `with` block."""
    thread = LoopThread()

    def interrupt(frame: FrameType, event: str, _: Any) -> Any:
        if event == "return" and frame.f_code is threading.Condition.__enter__.__code__:
            raise Interrupt
        return interrupt

    def interrupted() -> None:
        sys.settrace(interrupt)
        try:
            thread.run(number(1))
        except Interrupt:
            pass
        finally:
            sys.settrace(None)

    results: list[int] = []
    for work in (interrupted, lambda: results.append(thread.run(number(2)))):
        caller = threading.Thread(target=work, daemon=True)
        caller.start()
        caller.join(PATIENCE_S)
    assert results == [2]
    thread.stop()


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
