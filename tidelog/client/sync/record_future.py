"""The future of one record of the blocking producer: a `concurrent.futures.Future` that is cheap to make and to keep.

The standard one makes a condition, a lock and two lists for each record, which costs more than the
record itself. A record's future is a view of its batch's delivery, as that of the asynchronous
producer: nothing settles it, unless it is observed. A callback observes it, a thread in `result`,
or a waiter of `concurrent.futures.wait` or `as_completed`. Each is told once: by the loop, or by the thread that
comes with it when the future has ended.

Invariants: `concurrent.futures.wait`, `as_completed` and `asyncio.wrap_future` work as with the standard future. No
future has a lock: the loop waits for no thread here, and no thread for another one. So a signal handler or a finalizer
may run between any two lines, and wait for the loop there; an interrupt leaves nothing taken.

No future has a `__dict__`. CPython 3.11 makes it when it is first needed, and may collect garbage meanwhile. A second
thread that needs it while a finalizer runs gets another dictionary with the same memory: an attribute is lost, or the
process crashes. So what several threads keep for a future is in a dictionary of its class, and the first future of a
class has all attributes: the interpreter then has a place for each of them in the later ones.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from threading import get_ident
from typing import Any
from weakref import WeakKeyDictionary

from tidelog.client.client_logging import client_logger
from tidelog.client.producing.batch_delivery import BatchDelivery
from tidelog.client.sync.waiting_threads import WaiterEvent, WaitingThreads

logger = client_logger(__name__)

_RUNNING = "RUNNING"  # the names of concurrent.futures
_FINISHED = "FINISHED"

_WAITERS, _CALLBACKS = 0, 1  # the two kinds of notices, in the order in which they are called
_Notices = dict[object, Callable[[Any], object]]
"""By key, what to call with a future that has ended."""
_NONE: tuple[_Notices, _Notices] = ({}, {})


class _Registration:
    """What `concurrent.futures` takes for the lock of a future, and for its list of waiters.

    `wait` and `as_completed` look at the state more than once while they have the lock, and count what they see. So a
    thread sees one state from `acquire` to `release`. A future that it sees running tells the waiter, at once if it
    has ended meanwhile; one that it sees finished does not.
    """

    __slots__ = ("_future",)

    def __init__(self, future: RecordFuture) -> None:
        self._future = future

    def acquire(self) -> None:
        future = self._future
        has_ended = future.done()
        if future._seen.get(future) or not has_ended:
            thread = get_ident()
            seen = future._seen.setdefault(future, {})
            # A signal handler inside `wait` may come with the same future.
            seen[thread] = (has_ended, seen.get(thread))

    def release(self) -> None:
        seen = self._future._seen.get(self._future)
        if seen and (thread := get_ident()) in seen:
            _, outer = seen[thread]
            if outer is None:
                del seen[thread]
            else:
                seen[thread] = outer

    __enter__ = acquire

    def __exit__(self, *_: object) -> None:
        self.release()

    def append(self, waiter: Any) -> None:
        future = self._future
        if future._state == _RUNNING:
            future._check_may_wait()
            if waiter.event.__class__ is not WaiterEvent:
                waiter.event = WaiterEvent(waiter, future._check_may_wait)
            if future._observe(_WAITERS, waiter, waiter.event.tell):
                waiter.event.tell(future)

    def remove(self, waiter: Any) -> None:
        self._future._notices.get(self._future, _NONE)[_WAITERS].pop(waiter, None)


class RecordFuture(Future[Any]):
    """The outcome of a record, or of all records of one call. It is underway from the beginning, so it cannot be
    cancelled.
    """

    _outcome: tuple[Any, BaseException | None] | None = None
    """The result and the exception of a future without a delivery."""
    _delivery: BatchDelivery | None = None
    _index: int
    """The place in the batch of that delivery, which may be split since."""
    _is_observed = False
    """There may be waiters or callbacks."""
    _is_known_to_loop = False
    """The delivery will notify this future. Set on the loop."""
    _condition: Any = property(_Registration)
    _waiters: Any = property(_Registration)

    _callback_of_call: _Notices = {}
    """The callback that came with the call that made the future."""
    _seen: WeakKeyDictionary[RecordFuture, dict[int, tuple[bool, Any]]]
    """Of the class: whether a future had ended when a thread began to register, by thread; then what the thread saw
    before that.
    """
    _notices: WeakKeyDictionary[RecordFuture, tuple[_Notices, _Notices]]
    """Of the class: what to call at the end of a future for its waiters, and then for its callbacks. The one that takes
    it out of the inner dictionary calls it.
    """
    _on_wait: Callable[[], None]
    _check_can_end: Callable[[], None]
    _check_may_wait: Callable[[], None]
    _observe_on_loop: Callable[[RecordFuture], None]

    __init__ = object.__init__

    def call_when_done(self, callback: Callable[[Future[Any]], object]) -> None:
        """As `add_done_callback`, in the thread that has made the future, before any other thing has it."""
        self._callback_of_call = {None: callback}
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
            self._is_known_to_loop = True
        # Looked at after that: a thread whose `close` was interrupted may be here while the loop settles the delivery.
        if delivery.is_settled:
            self.handle_settled()

    @property
    def index(self) -> int:
        """As an observer of the delivery."""
        return self._place()[1]

    def handle_settled(self) -> None:
        """As an observer of the delivery. Never waits. More than once has no effect.

        No exception of a callback reaches the loop. The standard future lets an `asyncio.CancelledError` or a
        SystemExit pass: it would leave the records after this one without an outcome, or end the loop.
        """
        waiters, callbacks = self._notices.get(self, _NONE)
        for notices in (waiters, self._callback_of_call, callbacks):
            for key in list(notices):
                notice = notices.pop(key, None)
                try:
                    if notice is not None:
                        notice(self)
                except BaseException:
                    logger.exception("a callback of %r raised", self)
        self._notices.pop(self, None)  # they may refer to the future

    handle_split = observe

    # -- in any thread

    def _place(self) -> tuple[BatchDelivery, int]:
        """The delivery that settles the record, and the record's place in it. Requires one."""
        assert self._delivery is not None
        return self._delivery.part_of(self._index)

    def done(self) -> bool:
        delivery = self._delivery
        if delivery is None:
            return self._outcome is not None
        return delivery.is_settled or (bool(delivery.parts) and self._place()[0].is_settled)

    def cancelled(self) -> bool:
        return False

    @property
    def _state(self) -> str:  # type: ignore[override]
        seen = self._seen.get(self, {}).get(get_ident())
        return _FINISHED if (self.done() if seen is None else seen[0]) else _RUNNING

    def _observe(self, kind: int, key: object, notice: Callable[[Any], object]) -> bool:
        """Have `notice` called with this future, once, when it ends. True if it has ended: the caller calls it."""
        notices = self._notices.setdefault(self, ({}, {}))[kind]
        notices[key] = notice
        self._is_observed = True
        if self._delivery is not None and not self._is_known_to_loop:
            type(self)._observe_on_loop(self)
        # Looked at after the notice is in place: the thread that ends the future from now on finds it.
        return self.done() and notices.pop(key, None) is not None

    def add_done_callback(self, fn: Callable[[Future[Any]], object]) -> None:
        """As in the standard future. Raises RuntimeError in the child of a fork, where the future does not end."""
        if not self.done():
            type(self)._check_can_end()
        if self.done() or self._observe(_CALLBACKS, object(), fn):
            super().add_done_callback(fn)  # calls it

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
        if self._delivery is not None or self._outcome is not None:
            raise InvalidStateError(f"{self._state}: {self!r}")
        self._outcome = outcome
        self.handle_settled()

    # -- those who wait for it

    def _wait(self, timeout: float | None) -> None:
        if self.done():
            return
        type(self)._on_wait()
        threads = WaitingThreads()
        try:
            self._observe(_WAITERS, threads, lambda _: threads.wake())
            if not threads.wait(self.done, timeout):
                raise TimeoutError
        finally:
            self._waiters.remove(threads)

    def result(self, timeout: float | None = None) -> Any:
        self._wait(timeout)
        try:
            if self._delivery is None and self._exception is not None:
                raise self._exception
            return self._result
        finally:
            del self  # breaks the cycle of the exception's traceback and this future

    def exception(self, timeout: float | None = None) -> BaseException | None:
        self._wait(timeout)
        return self._exception


def _has_no_loop(_: RecordFuture) -> None:
    raise AssertionError("these futures are never bound to a delivery")


def record_future_class(
    on_wait: Callable[[], None],
    observe_on_loop: Callable[[RecordFuture], None] = _has_no_loop,
    check_can_end: Callable[[], None] = lambda: None,
    check_may_wait: Callable[[], None] | None = None,
) -> type[RecordFuture]:
    """The class of one producer's futures, which has what they share: a future without a constructor costs least.

    `on_wait` is called in a thread that is about to wait for a record. It may raise. `observe_on_loop` has the loop
    call a future's `observe` soon; where no loop runs any more, it calls it itself. `check_can_end` raises
    RuntimeError in the child of a fork, where no future ends any more. `check_may_wait` is called in a thread that is
    about to wait in `concurrent.futures.wait` or `as_completed`, and may raise; without it that is `check_can_end`.
    """
    shared: dict[str, Any] = {
        "_seen": WeakKeyDictionary(),
        "_notices": WeakKeyDictionary(),
        "_on_wait": staticmethod(on_wait),
        "_observe_on_loop": staticmethod(observe_on_loop),
        "_check_can_end": staticmethod(check_can_end),
        "_check_may_wait": staticmethod(check_may_wait or check_can_end),
    }
    kind: type[RecordFuture] = type("RecordFuture", (RecordFuture,), shared)
    first = kind()
    first._index = 0
    for name in ("_callback_of_call", "_delivery", "_is_known_to_loop", "_is_observed", "_outcome"):
        setattr(first, name, getattr(first, name))
    return kind
