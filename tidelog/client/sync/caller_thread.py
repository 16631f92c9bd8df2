"""Runs callbacks of a client's event loop in a thread that waits for that client.

A listener of the blocking consumer may call the consumer, and such a call waits for the loop; on
the loop's own thread it would wait forever. Invariant: a callback runs in a thread that is inside
`wait`, one callback at a time per thread.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

from tidelog.client.sync.loop_call import LoopCall
from tidelog.client.sync.waiting_threads import WaitingThreads

Result = TypeVar("Result")


class _Call:
    """One callback, with the future that gets its result on the loop."""

    __slots__ = ("arguments", "function", "future", "loop")

    def __init__(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        self.function = function
        self.arguments = arguments
        self.loop = asyncio.get_running_loop()
        self.future: asyncio.Future[Any] = self.loop.create_future()

    def run(self) -> None:
        try:
            result = self.function(*self.arguments)
        except Exception as error:
            self._call_on_loop(self._fail, error)
        except BaseException as error:
            # An interrupt belongs to this thread: on the loop's thread it would end the loop.
            self._call_on_loop(self._fail, RuntimeError(f"the listener was interrupted: {error!r}"))
            raise
        else:
            self._call_on_loop(self._succeed, result)

    def _call_on_loop(self, callback: Callable[[Any], None], argument: Any) -> None:
        try:
            self.loop.call_soon_threadsafe(callback, argument)
        except RuntimeError:
            pass  # the loop was closed meanwhile, so no task waits for the result

    def _succeed(self, result: Any) -> None:
        if not self.future.done():
            self.future.set_result(result)

    def _fail(self, error: Exception) -> None:
        if isinstance(error, StopIteration):  # a future cannot hold StopIteration
            error = RuntimeError(f"the listener raised {error!r}")
        if not self.future.done():
            self.future.set_exception(error)


class CallerThread:
    """The threads that wait for one client, and the callbacks for them."""

    def __init__(self) -> None:
        self.threads = WaitingThreads()
        self._calls: deque[_Call] = deque()
        self._callback_state = threading.local()

    @property
    def is_in_callback(self) -> bool:
        """Whether the calling thread is inside a callback."""
        return getattr(self._callback_state, "is_active", False)

    async def run(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """On the loop: let a waiting thread call the function, or the next thread that waits."""
        call = _Call(function, arguments)
        self._calls.append(call)
        self.threads.wake()
        return await call.future

    def wait(self, running: LoopCall[Result]) -> Result:
        """In the caller's thread: wait for a call on the loop and run callbacks meanwhile."""
        while True:
            self.threads.wait(lambda: running.is_over or bool(self._calls))
            if running.is_over:
                return running.result()
            try:
                call = self._calls.popleft()
            except IndexError:
                continue  # another thread has taken it
            if call.future.done():
                continue  # the loop no longer waits for it
            self._callback_state.is_active = True
            try:
                call.run()
            finally:
                self._callback_state.is_active = False
