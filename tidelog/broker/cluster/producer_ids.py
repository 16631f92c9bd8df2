"""Producer ids for this broker to hand out: from a block, and when that is used up from the controller's next.

Ids of one cluster are never given twice, not even after a crash: a block counts as used once it is allocated (KIP-730,
Kafka's RPCProducerIdManager).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tidelog.replication.controller.decisions.state import ProducerIdBlock


class ProducerIds:
    """`allocate()` gets the next block for this broker from the controller."""

    def __init__(self, allocate: Callable[[], Awaitable[ProducerIdBlock]]) -> None:
        self._allocate = allocate
        self._next = 0
        self._end = 0
        self._lock = asyncio.Lock()

    def take(self) -> int | None:
        """The next id, or None when the block is used up."""
        if self._next == self._end:
            return None
        self._next += 1
        return self._next - 1

    async def next(self) -> int:
        """The next id, from a new block if need be. Raises KafkaError as the controller does."""
        while (producer_id := self.take()) is None:
            async with self._lock:  # one request for a block, however many wait
                if self._next == self._end:
                    block = await self._allocate()
                    self._next, self._end = block.first, block.first + block.size
        return producer_id
