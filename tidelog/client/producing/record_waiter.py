"""One call that waits for its own record, which needs no future that others could use too (`delivery_future`).

Invariant: the call goes on once the record's delivery is settled, and a call that is cancelled leaves the record to
the producer.
"""

from __future__ import annotations

import asyncio

from tidelog.client.model import RecordMetadata
from tidelog.client.producing.batch_delivery import BatchDelivery


class RecordWaiter:
    """Observes the delivery of a record that is in a batch. Await `future`, then ask for the `result`."""

    __slots__ = ("_delivery", "future", "index")

    def __init__(self, delivery: BatchDelivery, index: int, loop: asyncio.AbstractEventLoop) -> None:
        self._delivery = delivery
        self.index = index
        self.future: asyncio.Future[None] = loop.create_future()
        """Done when the delivery is settled."""
        if delivery.is_settled:
            self.future.set_result(None)
        else:
            delivery.observe(self)

    def result(self) -> RecordMetadata:
        """The outcome, once the future is done. Raises the KafkaError of a record that was not delivered."""
        return self._delivery.metadata(self.index)

    # -- as an observer of the delivery

    def cancelled(self) -> bool:
        return self.future.cancelled()

    def handle_settled(self) -> None:
        if not self.future.done():
            self.future.set_result(None)

    def handle_split(self) -> None:
        self._delivery, self.index = self._delivery.part_of(self.index)
        self._delivery.observe(self)
