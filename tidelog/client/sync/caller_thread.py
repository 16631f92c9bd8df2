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
from contextlib import suppress
from typing import Any, TypeVar

from tidelog.client.sync.loop_call import LoopCall
from tidelog.client.sync.waiting_threads import WaitingThreads

Result = TypeVar("Result")


class _Call:
    """One callback, with the future that gets its result on the loop."""

    __slots__ = ("_arguments", "_claim", "_error", "_function", "_future", "_has_begun", "_loop", "_result")

    def __init__(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        self._function = function
        self._arguments = arguments
        self._loop = asyncio.get_running_loop()
        self._future: asyncio.Future[Any] = self._loop.create_future()
        self._has_begun = False
        self._claim: dict[str, object] = {}
        self._result: Any = None
        self._error: Exception | None = RuntimeError("the listener was interrupted")

    async def outcome(self) -> Any:
        return await self._future

    def claim(self, runner: object) -> bool:
        """Whether this runner is the one of the call, now or by an earlier claim. In one step, for several threads."""
        return self._claim.setdefault("runner", runner) is runner

    def is_claimed_by(self, runner: object) -> bool:
        return self._claim.get("runner") is runner

    def give_up(self) -> None:
        self._claim.clear()

    def run(self) -> None:
        """An interrupt leaves an outcome, if the callback has begun."""
        # Not where the loop no longer waits for it.
        if not self._has_begun and not self._future.done():
            try:
                self._has_begun = True
                self._result = self._function(*self._arguments)
                self._error = None
            except Exception as error:
                self._error = error
            except BaseException as error:
                # An interrupt belongs to this thread: on the loop's thread it would end the loop.
                self._error = RuntimeError(f"the listener was interrupted: {error!r}")
                raise

    def end(self) -> bool:
        """Give the loop the outcome. False if the callback is still to be run. More than once has no effect."""
        if not self._has_begun:
            return self._future.done()
        try:
            self._loop.call_soon_threadsafe(self._settle)
        except RuntimeError:
            pass  # the loop was closed meanwhile, so no task waits for the result
        return True

    def _settle(self) -> None:
        """On the loop."""
        error = self._error
        if isinstance(error, StopIteration):  # a future cannot hold StopIteration
            error = RuntimeError(f"the listener raised {error!r}")
        if self._future.done():
            return
        if error is None:
            self._future.set_result(self._result)
        else:
            self._future.set_exception(error)


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
        return await call.outcome()

    def wait(self, running: LoopCall[Result]) -> Result:
        """In the caller's thread: wait for a call on the loop and run callbacks meanwhile."""
        while True:
            self.threads.wait(lambda: running.is_over or bool(self._calls))
            if running.is_over:
                return running.result()
            self._run_next()

    def _run_next(self) -> None:
        """Run the first call, unless another thread runs it.

        The call stays in the queue until it is claimed: behind `popleft()` an interrupt, by Ctrl-C for example, would
        lose it, and all later calls of the client would wait for it.
        """
        call, runner = None, object()
        try:
            with suppress(IndexError):  # another thread has taken it
                call = self._calls[0]
            if call is None or not call.claim(runner):
                return
            self._calls.remove(call)
            self._callback_state.is_active = True
            call.run()
            call.end()
        except BaseException:
            if call is not None and call.is_claimed_by(runner) and not call.end():
                if call not in self._calls:
                    self._calls.appendleft(call)
                call.give_up()
                self.threads.wake()  # for the next thread that waits
            raise
        finally:
            self._callback_state.is_active = False
