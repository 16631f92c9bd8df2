"""Calls of the loop of a client from other threads: a coroutine that its caller waits for, and a shared call."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import suppress
from threading import get_ident
from typing import Any, Generic, TypeVar

from tidelog.client.network.outcomes import retrieve_exception
from tidelog.client.sync.waiting_threads import WaitingThreads

Result = TypeVar("Result")

CLOSED = "this client is closed"
CLOSED_AT_WORK = "this client was closed while it was at work"


class LoopCall(Generic[Result]):
    """One call. `begin`, `result` and `cancel` are for the thread that called. `threads` are woken at its end.

    `is_refused` says, on the loop, whether the call comes too late.
    """

    __slots__ = ("_call", "_is_given_up", "_is_refused", "_loop", "_task", "_threads")

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        call: Coroutine[Any, Any, Result],
        threads: WaitingThreads,
        is_refused: Callable[[], bool],
    ) -> None:
        self._loop = loop
        self._call = call
        self._threads = threads
        self._is_refused = is_refused
        self._task: asyncio.Task[Result] | None = None
        self._is_given_up = False

    @property
    def is_over(self) -> bool:
        return self._is_given_up or (self._task is not None and self._task.done())

    def begin(self) -> None:
        """Raises RuntimeError once the loop is closed."""
        try:
            self._loop.call_soon_threadsafe(self._begin)
        except RuntimeError:
            self._call.close()
            raise RuntimeError(CLOSED) from None

    def _begin(self) -> None:
        if self._is_refused():
            self.give_up()
            return
        self._task = self._loop.create_task(self._call)
        self._task.add_done_callback(self._handle_end)

    def give_up(self) -> None:
        """In the thread of the loop: the call does not end any more, unless it has."""
        self._is_given_up = True
        self._threads.wake()

    def _handle_end(self, task: asyncio.Task[Result]) -> None:
        retrieve_exception(task)  # an interrupted caller does not ask for it
        self._threads.wake()

    def result(self) -> Result:
        """Wait for the result of a call that has begun. Raises RuntimeError when the loop ends before it."""
        self._threads.wait(lambda: self.is_over)
        if self._task is None:
            self._call.close()
            raise RuntimeError(CLOSED)
        if not self._task.done():
            raise RuntimeError(CLOSED_AT_WORK)
        return self._task.result()

    def cancel(self) -> None:
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._cancel)

    def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()
        else:  # the interrupt came before it began
            self._call.close()


class SharedCall:
    """A call that several threads ask for: one call is for all that ask before it begins, as a wake-up costs much."""

    __slots__ = ("_asking", "_function", "_is_asked")

    def __init__(self, function: Callable[[], object]) -> None:
        self._function = function
        self._is_asked = False
        self._asking: set[int] = set()
        """The threads inside `ask`."""

    def is_on_its_way(self) -> bool:
        """A signal handler inside `ask` may wait for the loop, so the call that its thread is about to make is none."""
        return self._is_asked and get_ident() not in self._asking

    def ask(self, loop: asyncio.AbstractEventLoop) -> None:
        """Raises RuntimeError once the loop is closed. An interrupt may leave the others that ask without the call."""
        caller = get_ident()
        is_inside = caller in self._asking  # in a signal handler: the call around this one is still to be made
        try:
            self._asking.add(caller)
            self._is_asked = True
            loop.call_soon_threadsafe(self._function)
        except BaseException:
            self._is_asked = False
            raise
        finally:
            if not is_inside:
                self._asking.discard(caller)

    def has_begun(self) -> None:
        """On the loop, first thing: a later change asks for another call."""
        self._is_asked = False
