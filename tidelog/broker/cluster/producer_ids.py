"""Producer ids of this broker, from blocks that the controller allocates.

Invariant: a producer id is used once in a cluster, also after a crash, because an allocated block
counts as used (KIP-730, Kafka's RPCProducerIdManager).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tidelog.replication.controller.decisions.state import ProducerIdBlock


class ProducerIdManager:
    """`allocate()` gets the next block for this broker from the controller."""

    def __init__(self, allocate: Callable[[], Awaitable[ProducerIdBlock]]) -> None:
        self._allocate = allocate
        self._next = 0
        self._end = 0
        self._lock = asyncio.Lock()

    def take(self) -> int | None:
        """The next id, or None at the end of the block."""
        if self._next == self._end:
            return None
        self._next += 1
        return self._next - 1

    async def next(self) -> int:
        """The next id, from a new block if necessary. Raises the controller's KafkaError."""
        while (producer_id := self.take()) is None:
            async with self._lock:  # one block at a time, for all that wait
                if self._next == self._end:
                    block = await self._allocate()
                    self._next, self._end = block.first, block.first + block.size
        return producer_id
