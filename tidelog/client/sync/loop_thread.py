"""An event loop in a thread of its own, and what the blocking clients of `sync` share.

Invariant: a client's thread is made by `start` or the first call and ended by `close`. None of it survives a fork: make
clients in the process that uses them.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError, Future
from types import TracebackType
from typing import Any, Self, TypeVar

Outcome = TypeVar("Outcome")

_PATIENCE_S = 5


def _new_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


async def _cancel_the_rest() -> None:
    rest = asyncio.all_tasks() - {asyncio.current_task()}
    for task in rest:
        task.cancel()
    if rest:
        await asyncio.wait(rest, timeout=_PATIENCE_S)


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
        self, call: Coroutine[Any, Any, Outcome], wait: Callable[[Future[Outcome]], Outcome] = Future.result
    ) -> Outcome:
        """Run it in the thread and wait; an interrupt here cancels it there. RuntimeError if `stop` comes meanwhile."""
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
        """Whether the caller runs in this thread, as callbacks do."""
        return threading.current_thread() is self._thread

    def stop(self) -> None:
        """End the thread. Calls of other threads that still wait for something are woken with their RuntimeError."""
        with self._lock:
            self._is_ending = True
        # Calls that were let in before have their tasks by now; a later one would wait for a loop that does not run.
        try:
            asyncio.run_coroutine_threadsafe(_cancel_the_rest(), self.loop).result()
        finally:
            self.loop.call_soon_threadsafe(self.loop.stop)
            self._thread.join()


class Twin:
    """What the twins share: the thread, and `with`."""

    def __init__(self) -> None:
        self._thread: LoopThread | None = None
        self._thread_lock = threading.Lock()
        self._closed = False

    def _run(
        self,
        call: Callable[[], Coroutine[Any, Any, Outcome]],
        wait: Callable[[Future[Outcome]], Outcome] = Future.result,
    ) -> Outcome:
        self._refuse_on_loop()
        with self._thread_lock:
            if self._closed:
                raise RuntimeError("this client is closed")
            if self._thread is None:
                self._thread = LoopThread()
            thread = self._thread
        return thread.run(call(), wait)

    def _on_loop(self) -> bool:
        thread = self._thread
        return thread is not None and thread.is_current

    def _refuse_on_loop(self) -> None:
        """RuntimeError in a callback: it runs on the client's own thread, and to wait there is to wait for ever."""
        if self._on_loop():
            raise RuntimeError("a callback of this client cannot wait for it; send from it, or wait in another thread")

    def _end(self, call: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self._refuse_on_loop()
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
            self.close()  # `with` ends here, and so must the thread
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
