"""Interceptors of a producer, and callbacks for the delivery of single records.

Invariant: an exception of either is logged and goes no further, so that neither breaks a send or
stops the sender. A KeyboardInterrupt or SystemExit leaves the event loop, in a callback of its own; in a thread
without a loop it leaves the call.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from tidelog.client.arguments import shown
from tidelog.client.client_logging import client_logger
from tidelog.client.model import ProducerRecord, RecordMetadata
from tidelog.client.network.outcomes import own_error

logger = client_logger(__name__)

DeliveryCallback = Callable[[RecordMetadata | None, Exception | None], None]
"""Called with the metadata of a delivered record, or with None and the error."""


class ProducerInterceptor:
    """Sees the records of a producer on their way. Subclass it and override either method.

    Both must be quick. They run on the producer's event loop, but `on_send` for a `send` of the blocking producer runs
    in the thread that calls. `send_batch` and `send_arrow` bypass them.
    """

    def on_send(self, topic: str, record: ProducerRecord) -> ProducerRecord:
        """The record to send in place of this one, before serializers and the partitioner."""
        return record

    def on_acknowledgement(self, metadata: RecordMetadata | None, error: Exception | None) -> None:
        """A record is delivered, or it is not: then `metadata` is None."""


class Interceptors:
    """The interceptors of one producer, in their order."""

    def __init__(self, interceptors: Sequence[ProducerInterceptor]) -> None:
        self._interceptors = tuple(interceptors)

    def on_send(self, topic: str, record: ProducerRecord) -> ProducerRecord:
        """The record that comes out of all interceptors. One that raises leaves it as it was."""
        for interceptor in self._interceptors:
            try:
                replaced: Any = interceptor.on_send(topic, record)
            except BaseException as fault:
                _handle_fault(interceptor, "on_send", fault)
                continue
            if isinstance(replaced, ProducerRecord):
                record = replaced
            else:
                logger.error("%s: on_send returned %r, not a ProducerRecord", type(interceptor).__name__, replaced)
        return record

    def on_acknowledgement(self, metadata: RecordMetadata | None, error: Exception | None) -> None:
        """Call all interceptors for one record."""
        for interceptor in self._interceptors:
            try:
                interceptor.on_acknowledgement(metadata, own_error(error))
            except BaseException as fault:
                _handle_fault(interceptor, "on_acknowledgement", fault)


def _handle_fault(interceptor: ProducerInterceptor, method: str, fault: BaseException) -> None:
    logger.error("%s: %s raised", type(interceptor).__name__, method, exc_info=fault)
    if isinstance(fault, (KeyboardInterrupt, SystemExit)):
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            raise fault from None  # an interrupt of the thread that sends
        # asyncio ends its loop by these. Raised here, they would leave the records after this one without an outcome.
        loop.call_soon(_raise, fault)


def _raise(fault: BaseException) -> None:
    raise fault


def calls_on_delivery(callback: DeliveryCallback) -> Callable[[Any], None]:
    """A callback for a record's future that calls `callback`."""
    if not callable(callback):
        raise TypeError(f"on_delivery must be callable, not {shown(callback)}")

    def handle(future: Any) -> None:
        if future.cancelled():
            return
        error = future.exception()
        try:
            callback(None if error is not None else future.result(), error)
        except (Exception, asyncio.CancelledError):  # code that reads the result of a cancelled future raises that
            logger.exception("a delivery callback raised")

    return handle
