"""The future of one record of the blocking producer: a `concurrent.futures.Future` that is cheap to make and to keep.

The standard one makes a condition, a lock and two lists for each record, which costs more than the
record itself. Here what few of them need (a lock, a thread that waits, callbacks) is made on first
use. A record's future is a view of its batch's delivery, as that of the asynchronous producer:
nothing settles it, unless it is observed.

Invariants: `concurrent.futures.wait`, `as_completed` and `asyncio.wrap_future` work as with the
standard future. The state that they see changes under the lock only, together with their notice of it.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError, _base
from types import FrameType
from typing import Any

from tidelog.client.producing.batch_delivery import BatchDelivery
from tidelog.client.sync.held_futures import HeldFutures
from tidelog.client.sync.waiting_threads import ThreadEvent, WaitingThreads

logger = logging.getLogger(__name__)

_RUNNING = "RUNNING"  # the names of concurrent.futures
_FINISHED = "FINISHED"


class _MadeOnFirstUse:
    """An empty list as an attribute. The class attribute of an instance without one."""

    def __init__(self, name: str, kind: type[list[Any]] = list) -> None:
        self._name = name
        self._kind = kind

    def __get__(self, instance: Any, owner: Any = None) -> list[Any]:
        instance._be_observed()
        # A signal handler that ran here may have made one.
        made: list[Any] = instance.__dict__.setdefault(self._name, self._kind())
        return made


class _Waiters(list[Any]):
    """The waiters of `wait` and `as_completed`. Requires the lock of the future, as they do.

    A waiter's own event and lock are replaced before any other thread has the waiter: a thread in `Event.wait` has the
    event's lock for moments, and a signal handler that runs there and waits for the loop would hold up the loop.
    """

    def append(self, waiter: Any) -> None:
        if waiter.event.__class__ is threading.Event:
            waiter.event = ThreadEvent()
            waiter.lock = threading.RLock()  # `_tell_waiters` takes it first, with a limit
        super().append(waiter)


class _LockMadeOnFirstUse:
    """A lock of each instance, as the class attribute `_condition`. `name` is that of its place in the instance."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        # Reentrant, as a signal handler may run inside any call. Threads that come at once get the same one.
        return instance.__dict__.setdefault(self._name, threading.RLock())


class _LockOfChild(_LockMadeOnFirstUse):
    """Takes the place of the locks that are there at a fork: another thread of the parent may have held one."""

    def __set__(self, instance: Any, value: Any) -> None:
        """There so that Python looks here first."""
        raise AttributeError(self._name)


class RecordFuture(Future[Any]):
    """The outcome of a record, or of all records of one call. It is underway from the beginning, so it cannot be
    cancelled.
    """

    _own_state = _RUNNING
    """What a future that is observed, or that is no view of a delivery, has told."""
    _outcome: tuple[Any, BaseException | None] | None = None
    """The result and the exception of a future without a delivery."""
    _delivery: BatchDelivery | None = None
    _index: int
    """The place in the batch of that delivery, which may be split since."""
    _waiting_threads: WaitingThreads | None = None
    _is_observed = False
    """Whether there may be waiters, callbacks, a waiting thread, or a look at the state. Set under the lock."""
    _waiters = _MadeOnFirstUse("_waiters", _Waiters)
    _done_callbacks = _MadeOnFirstUse("_done_callbacks")

    _condition: Any = _LockMadeOnFirstUse("_condition")
    """What `concurrent.futures` holds while it registers. It takes those of many futures one after the other, in the
    order of the futures: with a lock that futures share two threads could each hold one, and wait for the other. It is
    the lock itself: a condition takes its lock in Python code, and an interrupt there would leave it taken, and the
    loop waiting for it.
    """
    _on_wait: Callable[[], None]
    _observe_on_loop: Callable[[RecordFuture], None]
    _held: HeldFutures | None

    __init__ = object.__init__

    def call_when_done(self, callback: Callable[[Future[Any]], object]) -> None:
        """As `add_done_callback`, in the thread that has made the future, before any other thing has it."""
        self.__dict__["_done_callbacks"] = [callback]
        self._is_observed = True

    # -- on the loop

    def bind(self, delivery: BatchDelivery, index: int) -> None:
        """The record is in a batch, whose delivery is not settled."""
        self._index = index
        self._delivery = delivery
        # Looked at after the delivery is set: another thread sets the flag first, and looks for a delivery then.
        if self._is_observed:
            delivery.observe(self)

    def observe(self) -> None:
        """Learn of the delivery of the batch that has the record."""
        delivery, _ = self._place()
        if not delivery.is_settled:
            delivery.observe(self)
        # Looked at after that: a thread whose `close` was interrupted may be here while the loop settles the delivery.
        if delivery.is_settled:
            self.handle_settled()

    @property
    def index(self) -> int:
        """As an observer of the delivery."""
        return self._place()[1]

    def handle_settled(self) -> None:
        """As an observer of the delivery. More than once has no effect."""
        if self._waiting_threads is not None:
            self._waiting_threads.wake()  # without the lock: what they look at does not depend on it
        lock, held = self._condition, self._held
        is_news: bool | None = None
        if held is not None and self._is_looked_at_below(lock):
            pass
        elif held is None or threading.get_ident() == held.main_thread_id:
            with lock:  # an interrupt behind a call of `acquire` would leave it taken
                is_news = self._tell_waiters()
        elif lock.acquire(False) or lock.acquire(timeout=held.patience_s):
            try:
                is_news = self._try_to_tell_waiters(held.patience_s)
            finally:
                lock.release()
        if is_news is None and held is not None:
            held.add(self)  # the thread that has it may be in a signal handler or finalizer, which waits for this one
        elif is_news and "_done_callbacks" in self.__dict__:
            self._invoke_callbacks()

    handle_split = observe

    def _is_looked_at_below(self, lock: Any) -> bool:
        """Whether this call is in a signal handler or finalizer, inside of one that registers a waiter or callback, or
        tells a waiter. The locks are reentrant, but that one would take the future as not told yet, and wait for good.
        """
        if any(waiter.lock._is_owned() for waiter in self.__dict__.get("_waiters", ())):
            return True
        # Without that module an interrupt has left the lock taken, and none but this thread can tell it.
        return lock._is_owned() and _is_running(_base.__file__)

    @property
    def is_told(self) -> bool:
        """Whether `handle_settled` has found the lock free."""
        return self._own_state == _FINISHED

    # -- in any thread

    def _place(self) -> tuple[BatchDelivery, int]:
        """The delivery that settles the record, and the record's place in it. Requires one."""
        assert self._delivery is not None
        return self._delivery.part_of(self._index)

    def done(self) -> bool:
        if self._delivery is None:
            return self._outcome is not None
        return self._own_state == _FINISHED or self._place()[0].is_settled

    def cancelled(self) -> bool:
        return False

    def _be_observed(self) -> None:
        """From here on the loop tells the future when its delivery is settled. Requires the lock."""
        if self._is_observed:
            return
        if self.done():
            self._own_state = _FINISHED
        self._is_observed = True
        if self._own_state == _RUNNING and self._delivery is not None:
            try:
                type(self)._observe_on_loop(self)
            except BaseException:  # an interrupt, perhaps before the loop heard of it
                self._is_observed = False
                raise

    @property
    def _state(self) -> str:  # type: ignore[override]
        """`concurrent.futures` looks at it under the lock, and takes the future as done, or as one that tells it later:
        never as both.
        """
        with self._condition:
            self._be_observed()
            return self._own_state

    @property
    def _result(self) -> Any:  # type: ignore[override]
        if self._delivery is None:
            return None if self._outcome is None else self._outcome[0]
        delivery, index = self._place()
        return delivery.metadata(index)

    @property
    def _exception(self) -> BaseException | None:  # type: ignore[override]
        if self._delivery is None:
            return None if self._outcome is None else self._outcome[1]
        return self._place()[0].error

    # -- the outcome of a future without a delivery

    def set_result(self, result: Any) -> None:
        self._settle((result, None))

    def set_exception(self, exception: BaseException | None) -> None:
        self._settle((None, exception))

    def _settle(self, outcome: tuple[Any, BaseException | None]) -> None:
        # Of two threads one sets it.
        if self._delivery is not None or self.__dict__.setdefault("_outcome", outcome) is not outcome:
            raise InvalidStateError(f"{self._own_state}: {self!r}")
        self.handle_settled()

    # -- those who wait for it

    def _tell_waiters(self) -> bool:
        """Tell `wait` and `as_completed`, under the lock that the state is set under: they come with it to a future
        that is done already, and would count it twice. False if that has been done.
        """
        if self._own_state == _FINISHED:
            return False
        self._own_state = _FINISHED
        for waiter in self.__dict__.get("_waiters", ()):
            if self._exception is None:
                waiter.add_result(self)
            else:
                waiter.add_exception(self)
        return True

    def _try_to_tell_waiters(self, patience_s: float) -> bool | None:
        """As `_tell_waiters`. None, and it has done nothing, where a waiter's lock is not free."""
        taken: list[Any] = []
        try:
            for waiter in self.__dict__.get("_waiters", ()):
                if not waiter.lock.acquire(timeout=patience_s):
                    return None
                taken.append(waiter.lock)
            return self._tell_waiters()
        finally:
            for lock in taken:
                lock.release()

    def _invoke_callbacks(self) -> None:
        """No exception of a callback reaches the loop. The standard future lets an `asyncio.CancelledError` or a
        SystemExit pass: it would leave the records after this one without an outcome, or end the loop.
        """
        for callback in self._done_callbacks:
            try:
                callback(self)
            except BaseException:
                logger.exception("a callback of %r raised", self)

    def _wait(self, timeout: float | None) -> None:
        if self.done():
            return
        type(self)._on_wait()
        with self._condition:
            if self._waiting_threads is None:
                self._waiting_threads = WaitingThreads()
            threads = self._waiting_threads
            self._be_observed()
        if not threads.wait(self.done, timeout):
            raise TimeoutError

    def result(self, timeout: float | None = None) -> Any:
        self._wait(timeout)
        try:
            if self._exception is not None:
                raise self._exception
            return self._result
        finally:
            del self  # breaks the cycle of the exception's traceback and this future

    def exception(self, timeout: float | None = None) -> BaseException | None:
        self._wait(timeout)
        return self._exception


def _is_running(path: str) -> bool:
    """Whether this thread is in a function of that module."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code.co_filename != path:
        frame = frame.f_back
    return frame is not None


def _has_no_loop(_: RecordFuture) -> None:
    raise AssertionError("these futures are never bound to a delivery")


def record_future_class(
    on_wait: Callable[[], None],
    observe_on_loop: Callable[[RecordFuture], None] = _has_no_loop,
    held: HeldFutures | None = None,
) -> type[RecordFuture]:
    """The class of one producer's futures, which has what they share: a future without a constructor costs least.

    `on_wait` is called in a thread that is about to wait for a record. It may raise. `observe_on_loop` has the loop
    call a future's `observe` soon; where no loop runs any more, it calls it itself. `held` takes settled futures whose
    lock is not free; None waits for the lock.
    """
    shared = {
        "_on_wait": staticmethod(on_wait),
        "_observe_on_loop": staticmethod(observe_on_loop),
        "_held": held,
    }
    return type("RecordFuture", (RecordFuture,), shared)


def _replace_locks() -> None:
    """In the child of a fork."""
    RecordFuture._condition = _LockOfChild(f"_lock_of_{os.getpid()}")


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_replace_locks)
