"""An event loop in a separate thread, and the base class of the blocking clients of `sync`.

Invariant: `start` or the first call creates a client's thread, and `close` ends it. A client does
not survive a fork: create it in the process that uses it.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError, Future
from types import TracebackType
from typing import Any, Self, TypeVar

Result = TypeVar("Result")

_CANCEL_TIMEOUT_S = 5


def _new_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


async def _cancel_other_tasks() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks, timeout=_CANCEL_TIMEOUT_S)


class LoopThread:
    """An event loop in a daemon thread."""

    def __init__(self) -> None:
        self.loop = _new_loop()
        self._lock = threading.Lock()
        self._is_ending = False
        self._thread = threading.Thread(target=self._run, name="tidelog-client", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            self.loop.run_forever()
        finally:
            self.loop.close()

    def run(
        self, call: Coroutine[Any, Any, Result], wait: Callable[[Future[Result]], Result] = Future.result
    ) -> Result:
        """Run the coroutine in the thread and wait. An interrupt of the caller cancels it.

        Raises RuntimeError when `stop` is called meanwhile.
        """
        with self._lock:
            if self._is_ending:
                call.close()
                raise RuntimeError("this client is closed")
            future = asyncio.run_coroutine_threadsafe(call, self.loop)
        try:
            return wait(future)
        except CancelledError:
            raise RuntimeError("this client was closed while it was at work") from None
        except BaseException:
            future.cancel()
            raise

    @property
    def is_current(self) -> bool:
        """Whether the caller runs in this thread, as callbacks of the loop do."""
        return threading.current_thread() is self._thread

    def stop(self) -> None:
        """End the thread. Waiting calls of other threads raise RuntimeError."""
        with self._lock:
            self._is_ending = True
        # Earlier calls have their tasks by now. A later call would wait for a loop that does not
        # run.
        try:
            asyncio.run_coroutine_threadsafe(_cancel_other_tasks(), self.loop).result()
        finally:
            self.loop.call_soon_threadsafe(self.loop.stop)
            self._thread.join()


class BlockingClient:
    """The base of the blocking clients: the thread and the `with` statement."""

    def __init__(self) -> None:
        self._thread: LoopThread | None = None
        self._thread_lock = threading.Lock()
        self._closed = False

    def _run(
        self,
        call: Callable[[], Coroutine[Any, Any, Result]],
        wait: Callable[[Future[Result]], Result] = Future.result,
    ) -> Result:
        self._check_not_on_loop()
        with self._thread_lock:
            if self._closed:
                raise RuntimeError("this client is closed")
            if self._thread is None:
                self._thread = LoopThread()
            thread = self._thread
        return thread.run(call(), wait)

    def _is_on_loop(self) -> bool:
        thread = self._thread
        return thread is not None and thread.is_current

    def _check_not_on_loop(self) -> None:
        """Raise RuntimeError in a callback: it runs on the client's own thread, where a wait would
        never end.
        """
        if self._is_on_loop():
            raise RuntimeError("a callback of this client cannot wait for it; send from it, or wait in another thread")

    def _close_with(self, call: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self._check_not_on_loop()
        with self._thread_lock:
            if self._closed:
                return
            self._closed = True
            thread, self._thread = self._thread, None
        if thread is not None:
            try:
                thread.run(call())
            finally:
                thread.stop()

    def start(self) -> None:
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.close()  # `__exit__` does not run after this, so the thread must end here
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
