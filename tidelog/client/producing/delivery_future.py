"""The future of one record of the asynchronous producer: a view of its batch's delivery.

A plain `asyncio.Future` for each record costs more than the rest of an append: it is set one at a
time, it keeps its result, and the collector visits thousands of them. This one has a batch and an
index, and makes the result when it is read. Invariants: it is used as any `asyncio.Future`, except
that only the producer settles it. One that is dropped leaves nothing behind.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator
from contextvars import Context, copy_context
from typing import Any, ClassVar, NoReturn

from tidelog.client.model import RecordMetadata, TopicPartition
from tidelog.client.producing.batch_delivery import BatchDelivery


class _Observation:
    """What a future needs once a task awaits it, a callback is added or it is cancelled."""

    __slots__ = ("callbacks", "cancel_message", "is_cancelled", "waiters")

    def __init__(self) -> None:
        self.callbacks: list[tuple[Callable[[Any], object], Context]] = []
        self.waiters: list[asyncio.Future[None]] = []
        """One for each task that awaits the record."""
        self.is_cancelled = False
        self.cancel_message: Any = None


class DeliveryFuture(asyncio.Future[RecordMetadata]):
    """The outcome of a record. `delivery_future_class` makes the class of one event loop."""

    __slots__ = ("_delivery", "_observation", "index")

    loop: ClassVar[asyncio.AbstractEventLoop]

    # The C type's own state stays unused: to set it up costs more than all the rest.
    __init__ = object.__init__

    index: int
    _delivery: BatchDelivery
    _observation: _Observation | None

    def bind(self, delivery: BatchDelivery, index: int) -> None:
        """The record is in a batch. Required before any other use."""
        self._delivery = delivery
        self.index = index
        self._observation = None

    # -- the state

    @property
    def partition(self) -> TopicPartition:
        return self._delivery.partition

    def _settling(self) -> BatchDelivery:
        """The delivery of the batch that has the record now."""
        if self._delivery.parts:
            self._delivery, self.index = self._delivery.part_of(self.index)
        return self._delivery

    def done(self) -> bool:
        observation = self._observation
        return (observation is not None and observation.is_cancelled) or self._settling().is_settled

    def cancelled(self) -> bool:
        return self._observation is not None and self._observation.is_cancelled

    def result(self) -> RecordMetadata:
        return self._settled("Result is not set.").metadata(self.index)

    def exception(self) -> BaseException | None:
        return self._settled("Exception is not set.").error

    def _settled(self, otherwise: str) -> BatchDelivery:
        if self._observation is not None and self._observation.is_cancelled:
            raise self._make_cancelled_error()
        delivery = self._settling()
        if not delivery.is_settled:
            raise asyncio.InvalidStateError(otherwise)
        return delivery

    def get_loop(self) -> asyncio.AbstractEventLoop:
        return self.loop

    def __repr__(self) -> str:
        if not hasattr(self, "_delivery"):
            return "<DeliveryFuture unbound>"
        state = "cancelled" if self.cancelled() else "finished" if self.done() else "pending"
        return f"<DeliveryFuture {state} {self._settling().partition} record {self.index}>"

    # -- observers

    def _observed(self) -> _Observation:
        if self._observation is None:
            self._observation = _Observation()
            delivery = self._settling()
            if not delivery.is_settled:
                delivery.observe(self)
        return self._observation

    def add_done_callback(self, fn: Callable[[Any], object], /, *, context: Context | None = None) -> None:
        context = copy_context() if context is None else context
        if self.done():
            self.loop.call_soon(fn, self, context=context)
        else:
            self._observed().callbacks.append((fn, context))

    def remove_done_callback(self, fn: Callable[[Any], object], /) -> int:
        if self._observation is None:
            return 0
        callbacks = self._observation.callbacks
        kept = [entry for entry in callbacks if entry[0] != fn]
        self._observation.callbacks = kept
        return len(callbacks) - len(kept)

    def cancel(self, msg: Any = None) -> bool:
        """Forget the outcome. The record is sent nevertheless."""
        if self.done():
            return False
        observation = self._observed()
        observation.is_cancelled = True
        observation.cancel_message = msg
        self.handle_settled()
        return True

    def handle_split(self) -> None:
        """Observe the part that has the record. As an observer of the delivery."""
        self._settling().observe(self)

    def handle_settled(self) -> None:
        """Wake the tasks and call the callbacks soon. As an observer of the delivery."""
        observation = self._observation
        if observation is None:
            return
        for waiter in observation.waiters:
            if not waiter.done():
                waiter.set_result(None)
        if observation.callbacks:
            callbacks, observation.callbacks = observation.callbacks, []
            for fn, context in callbacks:
                self.loop.call_soon(fn, self, context=context)

    # -- await

    def __await__(self) -> Generator[Any, None, RecordMetadata]:
        """A task waits on a future of asyncio's own type, which takes it a fraction of the steps that this type would.

        A task that is cancelled cancels the record's future, as it does with any future that it awaits.
        """
        if not self.done():
            waiter: asyncio.Future[None] = self.loop.create_future()
            waiters = self._observed().waiters
            waiters.append(waiter)
            try:
                yield from waiter
            except asyncio.CancelledError as error:
                if waiter.cancelled():
                    self.cancel(*error.args)
                raise
            finally:
                waiters.remove(waiter)
        return self.result()

    __iter__ = __await__

    # -- what `asyncio.gather` and debuggers read: the C type's own state is empty

    def _make_cancelled_error(self) -> asyncio.CancelledError:
        message = self._cancel_message
        return asyncio.CancelledError() if message is None else asyncio.CancelledError(message)

    @property
    def _cancel_message(self) -> Any:
        return None if self._observation is None else self._observation.cancel_message

    @property
    def _loop(self) -> asyncio.AbstractEventLoop:
        return self.loop

    @property
    def _state(self) -> str:  # type: ignore[override]
        return "CANCELLED" if self.cancelled() else "FINISHED" if self.done() else "PENDING"

    @property
    def _result(self) -> RecordMetadata | None:
        return self.result() if self._state == "FINISHED" and self._exception is None else None

    @property
    def _exception(self) -> BaseException | None:
        return self.exception() if self._state == "FINISHED" else None

    @property
    def _callbacks(self) -> list[tuple[Callable[[Any], object], Context]] | None:  # type: ignore[override]
        return (None if self._observation is None else self._observation.callbacks) or None

    @property
    def _log_traceback(self) -> bool:
        return False  # the sender logs each loss once

    @_log_traceback.setter
    def _log_traceback(self, value: bool) -> None:
        if value:
            raise ValueError("_log_traceback can only be set to False")

    # -- only the producer settles it

    def set_result(self, result: RecordMetadata, /) -> NoReturn:
        raise RuntimeError("a record's future does not support set_result operation")

    def set_exception(self, exception: type | BaseException, /) -> NoReturn:
        raise RuntimeError("a record's future does not support set_exception operation")


def delivery_future_class(loop: asyncio.AbstractEventLoop) -> type[DeliveryFuture]:
    """The class of the futures of one event loop: what they share needs no place in each."""
    return type("DeliveryFuture", (DeliveryFuture,), {"__slots__": (), "loop": loop})
