"""Runs callbacks of a client's event loop in a thread that waits for that client.

A listener of the blocking consumer may call the consumer, and such a call waits for the loop: on the loop's own thread
it would wait for ever. Invariant: a callback runs in a thread that is inside `wait`, one callback at a time per thread.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

Outcome = TypeVar("Outcome")


class _Call:
    __slots__ = ("arguments", "function", "loop", "outcome")

    def __init__(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        self.function = function
        self.arguments = arguments
        self.loop = asyncio.get_running_loop()
        self.outcome: asyncio.Future[Any] = self.loop.create_future()

    def run(self) -> None:
        try:
            result = self.function(*self.arguments)
        except Exception as error:
            self._tell(self._fail, error)
        except BaseException as error:
            # An interrupt is this thread's: on the loop's thread it would end the loop.
            self._tell(self._fail, RuntimeError(f"the listener was interrupted: {error!r}"))
            raise
        else:
            self._tell(self._succeed, result)

    def _tell(self, how: Callable[[Any], None], what: Any) -> None:
        try:
            self.loop.call_soon_threadsafe(how, what)
        except RuntimeError:
            pass  # the loop was closed meanwhile: nothing waits there any more

    def _succeed(self, result: Any) -> None:
        if not self.outcome.done():
            self.outcome.set_result(result)

    def _fail(self, error: Exception) -> None:
        if isinstance(error, StopIteration):  # which no future may hold
            error = RuntimeError(f"the listener raised {error!r}")
        if not self.outcome.done():
            self.outcome.set_exception(error)


class CallerThread:
    """The threads that wait for one client."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._calls: deque[_Call] = deque()
        self._in_callback = threading.local()

    @property
    def in_callback(self) -> bool:
        """The calling thread is inside a callback."""
        return getattr(self._in_callback, "now", False)

    async def run(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """On the loop: have a waiting thread call the function, the next one that waits if there is none now."""
        call = _Call(function, arguments)
        with self._changed:
            self._calls.append(call)
            self._changed.notify_all()
        return await call.outcome

    def wait(self, outcome: Future[Outcome]) -> Outcome:
        """In the caller's thread: wait for what runs on the loop, and run callbacks meanwhile."""
        outcome.add_done_callback(self._wake)
        while True:
            with self._changed:
                while not outcome.done() and not self._calls:
                    self._changed.wait()
                if outcome.done():
                    return outcome.result()
                call = self._calls.popleft()
            if call.outcome.done():
                continue  # the loop no longer waits for it
            self._in_callback.now = True
            try:
                call.run()
            finally:
                self._in_callback.now = False

    def _wake(self, _: Future[Any]) -> None:
        with self._changed:
            self._changed.notify_all()
