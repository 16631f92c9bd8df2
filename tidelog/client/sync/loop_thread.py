"""An event loop in a separate thread, and the base class of the blocking clients of `sync`.

Invariant: `start` or the first call creates a client's thread, and `close` ends it; so does the garbage collector
where a program drops a client without `close`. A fork copies no thread, so calls of a started client raise
RuntimeError in the child; `close` returns there.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import threading
import warnings
import weakref
from _thread import start_new_thread
from collections.abc import Callable, Coroutine
from contextlib import suppress
from sys import is_finalizing
from types import TracebackType
from typing import Any, Self, TypeVar

from tidelog.client.client_logging import client_logger, pass_on_in_this_thread
from tidelog.client.sync.caller_thread import CallerThread
from tidelog.client.sync.loop_call import CLOSED, CLOSED_AT_WORK, LoopCall
from tidelog.client.sync.waiting_threads import WaitingThreads

Result = TypeVar("Result")

logger = client_logger(__name__)

_CANCEL_TIMEOUT_S = 5
_ENDING = (
    "the interpreter is ending, and with it the thread of this client; close it before, in an atexit function at last"
)
_FORKED = "this client was started before a fork, and its thread is in the other process; make a client after the fork"


def new_loop() -> asyncio.AbstractEventLoop:
    """An event loop of uvloop where it is installed, else of asyncio."""
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


async def _end_tasks(last_call: Callable[[], Coroutine[Any, Any, None]]) -> None:
    await _cancel_other_tasks()
    await last_call()


async def _do_nothing() -> None:
    pass


class LoopThread:
    """An event loop in a daemon thread, which makes it: a signal handler never runs there, so no interrupt comes
    between a loop and its owner.
    """

    loop: asyncio.AbstractEventLoop

    def __init__(self, publish: Callable[[LoopThread], bool] | None = None) -> None:
        """`publish` is called in the new thread and gives this object to its owner; the thread ends where it returns
        False. An interrupt of this call ends the thread, unless there is a `publish`.
        """
        self._publish = publish
        self._has_begun = False
        self._begin_waiters = WaitingThreads()
        self._begin_error: BaseException | None = None
        self._calls: set[LoopCall[Any]] = set()
        """Those whose callers wait."""
        self._is_ending = False
        self._is_stopped = False
        self._end: asyncio.Task[None] | None = None
        """The last task of the loop."""
        self._thread = threading.Thread(target=self._run, name="tidelog-client", daemon=True)
        try:
            start_new_thread(self._start, ())
            self._begin_waiters.wait(lambda: self._has_begun)
        except BaseException:  # an interrupt, for example
            if publish is None:
                self._is_stopped = True
                # Looked at after that: the thread makes the loop first, and looks whether to run it then.
                if hasattr(self, "loop"):
                    with suppress(RuntimeError):  # the loop is closed
                        self.loop.call_soon_threadsafe(self._stop_loop)
            raise
        if self._begin_error is not None:
            raise self._begin_error

    def _start(self) -> None:
        """In a thread for this alone. An interrupt of `Thread.start` releases a lock that the new thread has, or leaves
        a lock taken, and the new thread never runs.
        """
        try:
            self._thread.start()
        except BaseException as error:
            self._fail_begin(error)
            self._begin_waiters.wake()

    def _fail_begin(self, error: BaseException) -> None:
        self._is_stopped = True
        self._begin_error = error
        self._has_begun = True

    def _begin(self) -> None:
        """In the new thread. It keeps no reference to the owner: that may be dropped."""
        publish, self._publish = self._publish, None
        pass_on_in_this_thread()  # before asyncio logs the kind of the loop
        try:
            self.loop = new_loop()
            asyncio.set_event_loop(self.loop)
            if publish is not None and not publish(self):
                self._is_stopped = True
                self.loop.close()
        except BaseException as error:  # no descriptor is left, for example
            self._fail_begin(error)
        self._has_begun = True
        self._begin_waiters.wake()

    def _run(self) -> None:
        self._begin()
        if not hasattr(self, "loop"):
            return
        try:
            while not self._is_stopped:
                try:
                    self.loop.run_forever()
                except BaseException as error:
                    # A SystemExit of the user's code, such as a deserializer, ends `run_forever`. The call that ran
                    # it raises it, and all other calls need the loop.
                    logger.error("the loop of a blocking client goes on after %r", error)
        finally:
            self.loop.close()
            # A call that came when the loop ran no more. A later one finds it closed.
            for running in list(self._calls):
                running.give_up()

    def _stop_loop(self) -> None:
        """On the loop."""
        self._is_stopped = True
        self.loop.stop()

    def run(self, call: Coroutine[Any, Any, Result], caller: CallerThread | None = None) -> Result:
        """Run the coroutine in the thread and wait. An interrupt of the caller cancels it.

        With `caller`, this thread runs its callbacks meanwhile. Raises RuntimeError when `stop` is called meanwhile.
        """
        threads = WaitingThreads() if caller is None else caller.threads
        running = LoopCall(self.loop, call, threads, lambda: self._end is not None)
        try:
            self._calls.add(running)
            if self._is_ending:
                call.close()
                raise RuntimeError(CLOSED)
            running.begin()
            return running.result() if caller is None else caller.wait(running)
        except asyncio.CancelledError:
            raise RuntimeError(CLOSED_AT_WORK) from None
        except BaseException:
            running.cancel()
            raise
        finally:
            self._calls.discard(running)

    @property
    def is_current(self) -> bool:
        """Whether the caller runs in this thread, as callbacks of the loop do."""
        return threading.current_thread() is self._thread

    def stop(self, last_call: Callable[[], Coroutine[Any, Any, None]] = _do_nothing) -> None:
        """Run `last_call` when all other calls have ended, then end the thread. Waiting calls of other threads raise
        RuntimeError. An interrupt ends the wait for that, and nothing else.
        """
        self.stop_soon(last_call)
        try:
            self._thread.join()
        except RuntimeError as error:
            # An interrupt of `join` releases a lock, which the thread may have released by then.
            raise error.__context__ or error from None
        if self._end is not None and self._end.done():
            self._end.result()

    def stop_soon(self, last_call: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """`stop` without the wait. A second call has no effect, and is for an interrupt of the first one."""
        self._is_ending = True
        # Calls that reach the loop before the end begins have tasks, which it cancels. It refuses later ones.
        self.end_soon(lambda: _end_tasks(last_call))

    def end_soon(self, call: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run `call` and let the thread end, without a wait. A second call has no effect."""

        def begin() -> None:
            if self._end is None:
                self._end = self.loop.create_task(call())
                self._end.add_done_callback(lambda _: self._stop_loop())

        with suppress(RuntimeError):  # the loop is closed
            self.loop.call_soon_threadsafe(begin)


class BlockingClient:
    """The base of the blocking clients: the thread and the `with` statement."""

    _is_forked = False
    _thread: LoopThread | None = None
    """Set once, by the first call or by `close`: None there says that there will be none."""

    def __init__(self) -> None:
        _clients.add(self)
        self._finalizer: weakref.finalize[..., BlockingClient] | None = None
        self._thread_lock = threading.RLock()
        self._closed = False
        self._closing_thread: threading.Thread | None = None
        """The thread that closes this client."""
        self._is_close_finished = False
        self._close_waiters = WaitingThreads()
        vars(self)  # makes `__dict__`, which two threads could make at the same time in CPython 3.11

    def _handle_fork(self) -> None:
        """In the child of a fork: leave the thread and its locks to the parent."""
        self._thread_lock = threading.RLock()
        if self._thread is not None:
            self._is_forked = True
            self._thread = None
            self._is_close_finished = True
            self._forget_finalizer()

    def _final_call(self) -> Callable[[], Coroutine[Any, Any, None]]:
        """The call that ends the asynchronous client of a dropped one. It must not refer to this object."""
        raise NotImplementedError

    async def _last_call(self) -> None:
        """On the loop: end the asynchronous client at once where an interrupt came before `close` began there."""

    def _forget_finalizer(self) -> None:
        if self._finalizer is not None:
            self._finalizer.detach()

    def _handle_exit(self) -> None:
        """The program ends. Called without `close` too."""

    def _check_not_forked(self) -> None:
        if self._is_forked:
            raise RuntimeError(_FORKED)

    def _check_thread_can_run(self) -> None:
        self._check_not_forked()
        if is_finalizing():  # in a `__del__`, for example: daemon threads do not run any more
            raise RuntimeError(_ENDING)

    def _run(self, call: Callable[[], Coroutine[Any, Any, Result]], caller: CallerThread | None = None) -> Result:
        self._check_not_on_loop()
        self._check_thread_can_run()
        # Without a lock: since Python 3.14 a signal handler may run directly behind its `__enter__`, and wait for
        # another thread that uses this client.
        thread = self._open_thread or self._first_thread()
        return thread.run(call(), caller)

    @property
    def _open_thread(self) -> LoopThread | None:
        """The thread, from the first call until `close` begins."""
        return None if self._closed else self._thread

    def _first_thread(self) -> LoopThread:
        """The thread, which is made if there is none. Raises RuntimeError if the client is closed.

        Several first calls at once may each make a thread. All of these threads but one end at once.
        """
        if self._thread is None and not self._closed:
            LoopThread(self._publish)
        thread = self._open_thread
        if thread is None:
            raise RuntimeError(CLOSED)
        return thread

    def _publish(self, thread: LoopThread) -> bool:
        """In the new thread: make it that of this client. False if there is one already, or the client is closed."""
        if self.__dict__.setdefault("_thread", thread) is not thread:
            return False
        self._finalizer = weakref.finalize(self, _end_dropped, thread, self._final_call(), type(self).__name__)
        self._finalizer.atexit = False  # the thread ends with the interpreter
        if self._is_close_finished:  # meanwhile
            self._forget_finalizer()
        return True

    def _last_thread(self) -> LoopThread | None:
        """For `close`: the thread, or None, and there will be none."""
        thread: LoopThread | None = self.__dict__.setdefault("_thread", None)
        return thread

    def _is_on_loop(self) -> bool:
        thread = self._thread
        return thread is not None and thread.is_current

    def _check_not_on_loop(self) -> None:
        """Raise RuntimeError in a callback, also while `close` waits: it runs on the client's own thread,
        where a wait would never end.
        """
        if self._is_on_loop():
            raise RuntimeError("a callback of this client cannot wait for it; send from it, or wait in another thread")

    def _check_may_wait(self) -> None:
        self._check_not_on_loop()
        self._check_thread_can_run()

    def _call_on_loop(self, function: Callable[[], object]) -> None:
        """Call the function on the loop soon, if it runs."""
        thread = self._open_thread
        if thread is not None:
            with suppress(RuntimeError):  # the loop is closed
                thread.loop.call_soon_threadsafe(function)

    def _close_with(
        self,
        call: Callable[[], Coroutine[Any, Any, None]],
        timeout_s: float | None = None,
        callbacks: CallerThread | None = None,
    ) -> None:
        """Run `call` and end the thread. Another call waits for the end of the first one, at most `timeout_s`.

        The calling thread runs the `callbacks` meanwhile.
        """
        self._check_not_on_loop()
        if self._open_thread is not None:
            self._check_thread_can_run()
        caller = threading.current_thread()
        is_first = False
        try:
            with self._thread_lock:
                # An interrupt comes before these lines or behind them.
                if not self._closed:
                    is_first = self._closed = True
                    self._closing_thread = caller
            if is_first and (thread := self._last_thread()) is not None:
                thread.run(call(), callbacks)
        finally:
            if is_first:
                try:
                    if (thread := self._last_thread()) is not None:
                        thread.stop(self._last_call)
                finally:
                    self._is_close_finished = True
                    self._close_waiters.wake()
                    if (thread := self._thread) is not None:
                        thread.stop_soon(self._last_call)
                    self._forget_finalizer()
        # A signal handler inside `close` must not wait for itself.
        if not is_first and caller is not self._closing_thread:
            self._close_waiters.wait(lambda: self._is_close_finished, timeout_s)
        self._forget_finalizer()  # here, too: the first call may have been interrupted before it

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


def _end_dropped(thread: LoopThread, final_call: Callable[[], Coroutine[Any, Any, None]], client: str) -> None:
    """The garbage collector has collected a client, perhaps on the client's own thread: end its thread."""
    thread.end_soon(final_call)
    warnings.warn(f"a blocking {client} was dropped without close()", ResourceWarning, stacklevel=1)


_clients: weakref.WeakSet[BlockingClient] = weakref.WeakSet()


def _handle_fork() -> None:
    for client in list(_clients):
        client._handle_fork()


def _handle_exit() -> None:
    for client in list(_clients):
        client._handle_exit()


atexit.register(_handle_exit)

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_handle_fork)
