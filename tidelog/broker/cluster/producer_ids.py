"""Producer ids of this broker, from blocks that the controller allocates.

Invariant: a producer id is used once in a cluster, also after a crash, because an allocated block
counts as used (KIP-730, Kafka's RPCProducerIdManager).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from tidelog.protocol.errors import ErrorCode, KafkaError
from tidelog.protocol.messages.allocate_producer_ids import AllocateProducerIdsRequest
from tidelog.replication.controller.decisions.state import ProducerIdBlock

if TYPE_CHECKING:
    from tidelog.broker.cluster.controller_channel import ControllerChannel

logger = logging.getLogger("tidelog.transactions")


def controller_blocks(
    channel: ControllerChannel, node_id: int, broker_epoch: Callable[[], int]
) -> Callable[[], Awaitable[ProducerIdBlock]]:
    """Return a function that asks the controller for the next block of producer ids for this broker.

    It raises KafkaError(COORDINATOR_LOAD_IN_PROGRESS), as in Kafka, if the controller refuses. A Java producer tries
    again after this code. It would end at the controller's own code, which is about this broker, for example that the
    broker has to register again.
    """

    async def allocate() -> ProducerIdBlock:
        request = AllocateProducerIdsRequest(broker_id=node_id, broker_epoch=broker_epoch())
        response = await channel.call(request, 0)
        if response.error_code:
            code = ErrorCode.of(response.error_code)
            logger.info("the controller allocates no producer ids to this broker now: %s", code.name)
            raise KafkaError(ErrorCode.COORDINATOR_LOAD_IN_PROGRESS, f"no producer ids: {code.name}")
        return ProducerIdBlock(response.producer_id_start, response.producer_id_len)

    return allocate


class ProducerIdManager:
    """`allocate()` gets the next block for this broker from the controller."""

    def __init__(self, allocate: Callable[[], Awaitable[ProducerIdBlock]]) -> None:
        self._allocate = allocate
        self._next = 0
        self._end = 0
        self._lock = asyncio.Lock()
        self._filling: asyncio.Task[None] | None = None

    @property
    def is_empty(self) -> bool:
        return self._next == self._end

    def take(self) -> int | None:
        """The next id; None at the end of the block, and a new block is fetched."""
        if self.is_empty:
            if self._filling is None:
                self._filling = asyncio.get_running_loop().create_task(self._fill_alone(), name="producer ids")
            return None
        self._next += 1
        return self._next - 1

    async def fill(self) -> None:
        """Wait until there is an id. Raises the controller's KafkaError."""
        async with self._lock:  # one block at a time, for all that wait
            if self.is_empty:
                block = await self._allocate()
                self._next, self._end = block.first, block.first + block.size

    async def next(self) -> int:
        """The next id, from a new block if necessary. Raises the controller's KafkaError."""
        while self.is_empty:
            await self.fill()
        self._next += 1
        return self._next - 1

    async def _fill_alone(self) -> None:
        """For a caller that does not wait, and takes an id some time later."""
        try:
            await self.fill()
        except KafkaError as error:
            logger.warning("could not get producer ids from the controller: %s", error)
        finally:
            self._filling = None

    async def close(self) -> None:
        if self._filling is not None:
            self._filling.cancel()
            await asyncio.gather(self._filling, return_exceptions=True)
