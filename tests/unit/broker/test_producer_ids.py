"""Producer ids of a broker, from the controller's blocks."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.patience import PATIENCE_S
from tidelog.broker.cluster import producer_ids
from tidelog.broker.cluster.producer_ids import ProducerIdManager, controller_blocks
from tidelog.protocol.errors import ErrorCode, KafkaError
from tidelog.protocol.messages.allocate_producer_ids import AllocateProducerIdsResponse
from tidelog.replication.controller.decisions.state import ProducerIdBlock


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


def test_a_request_does_not_wait_for_a_controller_that_is_not_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    """A producer that began at such a broker waited for 30 s, while other brokers had ids."""
    monkeypatch.setattr(producer_ids, "ANSWER_S", 0.01)
    answers: list[asyncio.Future[ProducerIdBlock]] = []

    async def allocate() -> ProducerIdBlock:
        answers.append(asyncio.get_running_loop().create_future())
        return await answers[-1]

    async def take() -> list[int]:
        ids = ProducerIdManager(allocate)
        for _ in range(2):
            with pytest.raises(KafkaError) as caught:
                await asyncio.wait_for(ids.next(), PATIENCE_S)
            assert caught.value.code is ErrorCode.COORDINATOR_LOAD_IN_PROGRESS
        [answer] = answers
        answer.set_result(ProducerIdBlock(5000, 1000))
        return list(await asyncio.gather(*(asyncio.wait_for(ids.next(), PATIENCE_S) for _ in range(3))))

    assert asyncio.run(take()) == [5000, 5001, 5002]


def test_a_controller_that_does_not_answer_does_not_end_a_producer() -> None:
    """Older Java producers end at REQUEST_TIMED_OUT."""

    class Silent:
        async def call(self, request: Any, version: int) -> AllocateProducerIdsResponse:
            raise KafkaError(ErrorCode.REQUEST_TIMED_OUT)

    silent: Any = Silent()
    with pytest.raises(KafkaError) as caught:
        asyncio.run(ProducerIdManager(controller_blocks(silent, 1, lambda: 7)).next())
    assert caught.value.code is ErrorCode.COORDINATOR_LOAD_IN_PROGRESS


def test_a_request_ends_when_the_node_closes() -> None:
    async def allocate() -> ProducerIdBlock:
        return await asyncio.get_running_loop().create_future()

    async def close() -> None:
        ids = ProducerIdManager(allocate)
        request = asyncio.create_task(ids.next())
        await asyncio.sleep(0)
        await ids.close()
        with pytest.raises(KafkaError):
            await asyncio.wait_for(request, PATIENCE_S)

    asyncio.run(close())
