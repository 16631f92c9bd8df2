"""The future of one record of the blocking producer: a `concurrent.futures.Future` that is cheap to make.

The standard one makes a condition, a lock and two lists for each record, which costs more than the
record itself. Here the futures of a producer share one lock, and what few of them need (a thread
that waits, callbacks) is made on first use. Invariant: `concurrent.futures.wait`, `as_completed`
and `asyncio.wrap_future` work as with the standard future.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future, InvalidStateError
from typing import Any

from tidelog.client.producing.batch_delivery import BatchDelivery
from tidelog.client.sync.waiting_threads import WaitingThreads

logger = logging.getLogger(__name__)

_RUNNING = "RUNNING"  # the names of concurrent.futures
_FINISHED = "FINISHED"


class _MadeOnFirstUse:
    """An empty list as an attribute. The class attribute of an instance without one."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, instance: Any, owner: Any = None) -> list[Any]:
        made: list[Any] = []
        instance.__dict__[self._name] = made
        instance._is_observed = True
        return made


class RecordFuture(Future[Any]):
    """The outcome of a record, or of all records of one call. It is underway from the beginning, so it cannot be
    cancelled.
    """

    _state = _RUNNING
    _own_result: Any = None
    _delivery: BatchDelivery | None = None
    """The delivery of its batch, which is settled. It has the result in place of the future."""
    _index: int
    _exception = None
    _waiting_threads: WaitingThreads | None = None
    _is_observed = False
    """Whether there may be waiters, callbacks or a waiting thread. Set under the lock, like the state."""
    _waiters = _MadeOnFirstUse("_waiters")
    _done_callbacks = _MadeOnFirstUse("_done_callbacks")

    _lock: threading.RLock
    _condition: Any
    """What `concurrent.futures` holds while it registers. It is the lock itself: a condition takes its lock in Python
    code, and an interrupt there would leave it taken, and the loop waiting for it.
    """
    _on_wait: Callable[[], None]

    __init__ = object.__init__

    def done(self) -> bool:
        return self._state == _FINISHED

    @property
    def _result(self) -> Any:  # type: ignore[override]
        return self._own_result if self._delivery is None else self._delivery.metadata(self._index)

    def set_result(self, result: Any) -> None:
        with self._lock:
            if self._state == _FINISHED:
                raise InvalidStateError(f"{self._state}: {self!r}")
            self._own_result = result
            self._state = _FINISHED
            if not self._is_observed:
                return
            self._tell_waiters()
        self._tell_others()

    @classmethod
    def set_results(cls, futures: Iterable[RecordFuture], delivery: BatchDelivery, first: int) -> None:
        """Settle the futures of one producer, except those that are done, by a batch that is in the log.

        They are its records from the index `first` on. Each makes its metadata when it is read. Callbacks are called at
        the end, in the order of the futures.
        """
        observed: list[RecordFuture] = []
        with cls._lock:
            for index, future in enumerate(futures, first):
                if future._state != _FINISHED:
                    future._delivery = delivery
                    future._index = index
                    future._state = _FINISHED
                    if future._is_observed:
                        future._tell_waiters()
                        observed.append(future)
        for future in observed:
            future._tell_others()

    def set_exception(self, exception: BaseException | None) -> None:
        with self._lock:
            if self._state == _FINISHED:
                raise InvalidStateError(f"{self._state}: {self!r}")
            self._exception = exception
            self._state = _FINISHED
            if not self._is_observed:
                return
            self._tell_waiters()
        self._tell_others()

    def _tell_waiters(self) -> None:
        """Tell `wait` and `as_completed`, under the lock that the state was set under: they come with it to a future
        that is done already, and would count it twice."""
        for waiter in self.__dict__.get("_waiters", ()):
            if self._exception is None:
                waiter.add_result(self)
            else:
                waiter.add_exception(self)

    def _tell_others(self) -> None:
        """Wake the threads that wait for this future alone, and call the callbacks."""
        if self._waiting_threads is not None:
            self._waiting_threads.wake()
        if "_done_callbacks" in self.__dict__:
            self._invoke_callbacks()

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
        if self._state == _FINISHED:
            return
        type(self)._on_wait()
        with self._lock:
            if self.done():
                return
            if self._waiting_threads is None:
                self._is_observed = True
                self._waiting_threads = WaitingThreads()
            threads = self._waiting_threads
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


def record_future_class(on_wait: Callable[[], None]) -> type[RecordFuture]:
    """The class of one producer's futures, which has what they share: a future without a constructor costs least.

    `on_wait` is called in a thread that is about to wait for a record. It may raise.
    """
    lock = threading.RLock()  # a signal handler may run inside any call
    shared = {"_lock": lock, "_condition": lock, "_on_wait": staticmethod(on_wait)}
    return type("RecordFuture", (RecordFuture,), shared)
