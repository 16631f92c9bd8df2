"""Producer ids of a broker, from the controller's blocks."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tidelog.broker.cluster.producer_ids import ProducerIdManager, controller_blocks
from tidelog.protocol.errors import ErrorCode, KafkaError
from tidelog.protocol.messages.allocate_producer_ids import AllocateProducerIdsResponse


class Channel:
    def __init__(self, *codes: ErrorCode) -> None:
        self._codes = list(codes)

    async def call(self, request: Any, version: int) -> AllocateProducerIdsResponse:
        return AllocateProducerIdsResponse(error_code=self._codes.pop(0), producer_id_start=5000, producer_id_len=1000)


@pytest.mark.parametrize(
    "code", [ErrorCode.BROKER_ID_NOT_REGISTERED, ErrorCode.STALE_BROKER_EPOCH, ErrorCode.UNKNOWN_SERVER_ERROR]
)
def test_what_the_controller_says_of_the_broker_does_not_end_a_producer(code: ErrorCode) -> None:
    channel: Any = Channel(code, ErrorCode.NONE)
    ids = ProducerIdManager(controller_blocks(channel, 1, lambda: 7))

    async def take() -> int:
        with pytest.raises(KafkaError) as caught:
            await ids.next()
        assert caught.value.code is ErrorCode.COORDINATOR_LOAD_IN_PROGRESS
        return await ids.next()

    assert asyncio.run(take()) == 5000
