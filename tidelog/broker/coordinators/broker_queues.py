"""A queue of items for each broker. Items that wait together are sent in one request.

A few requests to one broker are under way at once, each on a connection of its own, because a request may wait at the
other broker for a slow partition. The caller makes the requests.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Final, Generic, TypeVar

logger = logging.getLogger("tidelog.transactions")
T = TypeVar("T")

LANES: Final = 4


class BrokerQueues(Generic[T]):
    """`take(queue)` removes the items of one request from a queue. `send(broker_id, items, lane)` sends them and
    handles the answer. The remaining items wait for a free lane. `on_failure(items)` is called if `send` raises, so
    that no item is lost.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        name: str,
        take: Callable[[deque[T]], list[T]],
        send: Callable[[int, list[T], str], Awaitable[None]],
        on_failure: Callable[[list[T]], None],
    ) -> None:
        self._loop = loop
        self._name = name
        self._take = take
        self._send = send
        self._on_failure = on_failure
        self._queues: dict[int, deque[T]] = {}
        self._free_lanes: dict[int, list[str]] = {}
        self._tasks: dict[asyncio.Task[None], None] = {}
        self._is_due = False
        self._is_closed = False

    def __len__(self) -> int:
        """The items that wait to be sent."""
        return sum(map(len, self._queues.values()))

    def add(self, broker_id: int, item: T) -> None:
        """Send the item in a later turn of the loop, together with the items added in this turn."""
        if self._is_closed:
            return
        self._queues.setdefault(broker_id, deque()).append(item)
        if not self._is_due:
            self._is_due = True
            self._loop.call_soon(self._send_all)

    def _send_all(self) -> None:
        self._is_due = False
        for broker_id in list(self._queues):
            self._send_queue(broker_id)

    def _send_queue(self, broker_id: int) -> None:
        queue = self._queues.get(broker_id)
        lanes = self._free_lanes.setdefault(broker_id, [f"{self._name}-{number}" for number in range(LANES)])
        while queue and lanes and not self._is_closed:
            items = self._take(queue)
            if items:
                lane = lanes.pop()
                task = self._loop.create_task(self._send_on(broker_id, items, lane))
                self._tasks[task] = None
                task.add_done_callback(self._tasks.pop)
        if not queue:
            self._queues.pop(broker_id, None)

    async def _send_on(self, broker_id: int, items: list[T], lane: str) -> None:
        try:
            await self._send(broker_id, items, lane)
        except Exception as error:
            logger.error("%s to broker %d failed", self._name, broker_id, exc_info=error)
            self._on_failure(items)
        finally:
            self._free_lanes[broker_id].append(lane)
        self._send_queue(broker_id)

    async def close(self) -> None:
        """Drop the waiting items, and cancel the requests under way."""
        self._is_closed = True
        self._queues.clear()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
