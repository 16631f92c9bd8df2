"""Producer ids of this broker, from blocks that the controller allocates.

Invariant: a producer id is used once in a cluster, also after a crash, because an allocated block
counts as used (KIP-730, Kafka's RPCProducerIdManager).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Final

from tidelog.protocol.errors import ErrorCode, KafkaError
from tidelog.protocol.messages.allocate_producer_ids import AllocateProducerIdsRequest
from tidelog.replication.controller.decisions.state import ProducerIdBlock

if TYPE_CHECKING:
    from tidelog.broker.cluster.controller_channel import ControllerChannel

# How long a request waits for a new block. A broker may wait much longer for a controller that it does not hear.
# Meanwhile the client asks again, and often reaches another broker.
ANSWER_S: Final = 2.0

logger = logging.getLogger("tidelog.transactions")


def controller_blocks(
    channel: ControllerChannel, node_id: int, broker_epoch: Callable[[], int]
) -> Callable[[], Awaitable[ProducerIdBlock]]:
    """Return a function that asks the controller for the next block of producer ids for this broker.

    It raises KafkaError(COORDINATOR_LOAD_IN_PROGRESS), as in Kafka, if the controller refuses or does not answer. A
    Java producer tries again after this code. It would end at the controller's own code, which is about this broker,
    for example that the broker has to register again. Older ones end at REQUEST_TIMED_OUT.
    """

    async def allocate() -> ProducerIdBlock:
        request = AllocateProducerIdsRequest(broker_id=node_id, broker_epoch=broker_epoch())
        try:
            response = await channel.call(request, 0)
        except KafkaError as error:
            raise KafkaError(ErrorCode.COORDINATOR_LOAD_IN_PROGRESS, f"no producer ids: {error}") from error
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
        self._asking: asyncio.Task[KafkaError | None] | None = None
        """The request for the next block, one for all that wait."""

    @property
    def is_empty(self) -> bool:
        return self._next == self._end

    def take(self) -> int | None:
        """The next id; None at the end of the block, and a new block is fetched."""
        if self.is_empty:
            self._ask()
            return None
        self._next += 1
        return self._next - 1

    async def fill(self) -> None:
        """Wait until there is an id. Raises KafkaError(COORDINATOR_LOAD_IN_PROGRESS) if the controller refuses, and
        after ANSWER_S; the request for a block goes on.
        """
        if not self.is_empty:
            return
        asking = self._ask()
        await asyncio.wait({asking}, timeout=ANSWER_S)
        if not asking.done() or asking.cancelled():
            raise KafkaError(ErrorCode.COORDINATOR_LOAD_IN_PROGRESS, "the controller has not sent producer ids yet")
        error = asking.result()
        if error is not None:
            raise KafkaError(error.code, error.message) from error

    async def next(self) -> int:
        """The next id, from a new block if necessary. Raises as `fill`."""
        while self.is_empty:
            await self.fill()
        self._next += 1
        return self._next - 1

    def _ask(self) -> asyncio.Task[KafkaError | None]:
        if self._asking is None:
            self._asking = asyncio.get_running_loop().create_task(self._fetch(), name="producer ids")
        return self._asking

    async def _fetch(self) -> KafkaError | None:
        try:
            block = await self._allocate()
        except KafkaError as error:
            logger.warning("could not get producer ids from the controller: %s", error)
            return error
        finally:
            self._asking = None
        self._next, self._end = block.first, block.first + block.size
        return None

    async def close(self) -> None:
        if self._asking is not None:
            self._asking.cancel()
            await asyncio.gather(self._asking, return_exceptions=True)
