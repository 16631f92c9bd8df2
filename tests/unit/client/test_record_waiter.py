"""A call that waits for its own record: each way in which the record's batch may end."""

from __future__ import annotations

import asyncio

import pytest

from tests.patience import PATIENCE_S
from tests.unit.client.test_delivery_future import ERROR, PARTITION, timestamps
from tidelog.client.model import RecordMetadata
from tidelog.client.producing.batch_delivery import BatchDelivery
from tidelog.client.producing.record_waiter import RecordWaiter
from tidelog.protocol.errors import KafkaError


def new_delivery(*timestamps_ms: int) -> BatchDelivery:
    return BatchDelivery(PARTITION, timestamps(list(timestamps_ms)))


def waiter(delivery: BatchDelivery, index: int) -> RecordWaiter:
    return RecordWaiter(delivery, index, asyncio.get_running_loop())


async def outcome(waiting: RecordWaiter) -> RecordMetadata:
    async with asyncio.timeout(PATIENCE_S):
        await waiting.future
    return waiting.result()


async def test_each_record_has_its_own_place_in_the_batch():
    delivery = new_delivery(7, 8, 8)
    waiting = [waiter(delivery, index) for index in range(3)]
    assert not any(each.future.done() for each in waiting)
    delivery.acknowledge(40, -1)
    assert [await outcome(each) for each in waiting] == [
        *(RecordMetadata("t", 3, 40, 7), RecordMetadata("t", 3, 41, 8), RecordMetadata("t", 3, 42, 8)),
    ]


async def test_a_record_that_is_settled_already_is_not_waited_for():
    delivery = new_delivery(7)
    delivery.acknowledge(40, 9)
    assert await outcome(waiter(delivery, 0)) == RecordMetadata("t", 3, 40, 9)


async def test_each_record_of_a_failed_batch_raises_its_error():
    delivery = new_delivery(7, 8)
    waiting = [waiter(delivery, index) for index in range(2)]
    delivery.fail(ERROR)
    for each in waiting:
        with pytest.raises(KafkaError) as raised:
            await outcome(each)
        assert str(raised.value) == str(ERROR)
        assert len(raised.traceback) == 4  # not the places of the other records too


async def test_the_records_of_a_divided_batch_have_the_outcome_of_their_part():
    delivery = new_delivery(1, 2, 3, 4)
    waiting = [waiter(delivery, index) for index in range(4)]
    first, second = new_delivery(1, 2), new_delivery(3, 4)
    delivery.split([(first, 2), (second, 2)])
    inner = [new_delivery(3), new_delivery(4)]
    second.split([(part, 1) for part in inner])
    inner[1].acknowledge(40, -1)
    first.fail(ERROR)
    assert [each.future.done() for each in waiting] == [True, True, False, True]
    with pytest.raises(KafkaError):
        waiting[1].result()
    assert waiting[3].result() == RecordMetadata("t", 3, 40, 4)
    inner[0].acknowledge(30, -1)
    assert waiting[2].result() == RecordMetadata("t", 3, 30, 3)


async def test_a_cancelled_call_leaves_the_other_records_alone():
    delivery = new_delivery(7, 8)
    waiting = [waiter(delivery, index) for index in range(2)]
    task = asyncio.create_task(outcome(waiting[0]))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert delivery.cancelled_count == 1
    delivery.acknowledge(40, -1)
    assert await outcome(waiting[1]) == RecordMetadata("t", 3, 41, 8)
