from __future__ import annotations

import asyncio
import gc
import sys
import weakref
from contextlib import suppress
from contextvars import ContextVar
from types import FunctionType, ModuleType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.patience import PATIENCE_S
from tests.unit.client.fake_broker import FakeCluster
from tidelog.client import Producer
from tidelog.client.model import RecordMetadata, TopicPartition
from tidelog.client.producing.batch_delivery import BatchDelivery
from tidelog.client.producing.delivery_future import DeliveryFuture, delivery_future_class
from tidelog.client.producing.record_timestamps import RecordTimestamps
from tidelog.protocol.errors import ErrorCode, KafkaError

PARTITION = TopicPartition("t", 3)
ERROR = KafkaError(ErrorCode.MESSAGE_TOO_LARGE, "too large")


def futures_of(delivery: BatchDelivery, count: int) -> list[DeliveryFuture]:
    make: Any = delivery_future_class(asyncio.get_running_loop())
    made = [make() for _ in range(count)]
    for index, future in enumerate(made):
        future.bind(delivery, index)
    return made


def batch(count: int) -> tuple[BatchDelivery, list[DeliveryFuture]]:
    delivery = BatchDelivery(PARTITION, timestamps([1_000 + index for index in range(count)]))
    return delivery, futures_of(delivery, count)


def timestamps(values_ms: list[int]) -> RecordTimestamps:
    """As a batch makes them."""
    found = RecordTimestamps()
    for record, timestamp_ms in enumerate(values_ms):
        found.append(record, timestamp_ms)
    return found


@given(st.lists(st.integers(0, 3) | st.integers(0, 2**62), min_size=1))
def test_timestamps_are_those_that_were_given(values_ms: list[int]):
    runs = timestamps(values_ms)
    assert [runs.of(record) for record in range(len(values_ms))] == values_ms


async def test_a_future_that_is_kept_keeps_little_of_its_batch():
    async with FakeCluster(t=1) as cluster:
        async with Producer(bootstrap_servers=cluster.bootstrap, linger_ms=1_000, batch_size=1 << 20) as producer:
            sent: list[Any] = [await producer.send("t", b"v", timestamp_ms=number // 1_000) for number in range(10_000)]
            await producer.flush()
        kept = [sent[0], sent[5_999], sent[-1]]
        del sent
        assert len({future._delivery for future in kept}) == 1
        assert kept_bytes(kept) < 10_000
        assert [(future.result().offset, future.result().timestamp_ms) for future in kept] == [
            *((0, 0), (5_999, 5), (9_999, 9)),
        ]


def kept_bytes(found: object) -> int:
    """The size of all that is reachable from here, but modules, classes, functions and the loop."""
    seen: dict[int, int] = {}
    left = [found]
    while left:
        one = left.pop()
        if id(one) not in seen and not isinstance(one, (type, ModuleType, FunctionType, asyncio.AbstractEventLoop)):
            seen[id(one)] = sys.getsizeof(one)
            left += gc.get_referents(one)
    return sum(seen.values())


async def test_a_future_has_its_own_offset_and_time_whenever_it_is_read():
    delivery, futures = batch(3)
    assert not any(future.done() for future in futures)
    with pytest.raises(asyncio.InvalidStateError):
        futures[0].result()
    with pytest.raises(asyncio.InvalidStateError):
        futures[0].exception()
    delivery.acknowledge(70, -1)
    assert [future.result() for future in futures] == [RecordMetadata("t", 3, 70 + at, 1_000 + at) for at in range(3)]
    assert await futures[2] == futures[2].result()
    assert futures[1].exception() is None


async def test_the_brokers_time_and_an_unknown_offset_are_those_of_every_record():
    delivery, futures = batch(2)
    delivery.acknowledge(-1, 9_999)
    assert [future.result() for future in futures] == [RecordMetadata("t", 3, -1, 9_999)] * 2


async def test_asyncio_takes_it_for_a_future_of_its_own():
    delivery, futures = batch(6)
    assert asyncio.isfuture(futures[0])
    assert isinstance(futures[0], asyncio.Future)
    assert futures[0].get_loop() is asyncio.get_running_loop()

    async def read(future: DeliveryFuture) -> RecordMetadata:
        return await future

    waiting: list[Any] = [
        asyncio.gather(*futures[:2]), asyncio.create_task(read(futures[2])), asyncio.shield(futures[3]),
        asyncio.create_task(asyncio.wait_for(futures[4], PATIENCE_S)),
        asyncio.create_task(asyncio.wait(futures[5:])),
    ]  # fmt: skip
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    delivery.acknowledge(0, -1)
    gathered, read_one, shielded, waited, (done, pending) = await asyncio.gather(*waiting)
    assert [each.offset for each in (*gathered, read_one, shielded, waited)] == [0, 1, 2, 3, 4]
    assert done == {futures[5]}
    assert not pending
    assert [(await each).offset for each in asyncio.as_completed([futures[5]])] == [5]


async def test_callbacks_run_soon_in_the_order_of_the_records_and_in_their_context():
    place: ContextVar[str] = ContextVar("place")
    calls: list[Any] = []
    delivery, futures = batch(3)
    for future in reversed(futures):
        place.set(f"of {future.index}")
        future.add_done_callback(lambda future: calls.append((future.result().offset, place.get())))
    removed = calls.append
    futures[0].add_done_callback(removed)
    assert futures[0].remove_done_callback(removed) == 1
    assert futures[0].remove_done_callback(removed) == 0
    delivery.acknowledge(5, -1)
    assert not calls
    await asyncio.sleep(0)
    assert calls == [(5, "of 0"), (6, "of 1"), (7, "of 2")]
    futures[1].add_done_callback(lambda future: calls.append("late"))
    await asyncio.sleep(0)
    assert calls[3:] == ["late"]


async def test_all_records_of_a_failed_batch_have_its_error_and_their_own_traceback():
    delivery, futures = batch(2)
    delivery.fail(ERROR)
    depths = []
    for future in (*futures, *futures):
        with pytest.raises(KafkaError, match="too large") as raised:
            await future
        depths.append(len(raised.traceback))
        assert str(future.exception()) == str(ERROR)
    assert len(set(depths)) == 1


async def test_a_cancelled_future_stays_cancelled_and_its_neighbour_is_settled():
    delivery, futures = batch(3)
    calls: list[Any] = []
    futures[0].add_done_callback(calls.append)

    async def read(future: DeliveryFuture) -> RecordMetadata:
        return await future

    task = asyncio.create_task(read(futures[1]))
    await asyncio.sleep(0)
    task.cancel("enough")
    assert futures[0].cancel("no more")
    assert not futures[0].cancel()
    await asyncio.wait([task])
    assert task.cancelled()
    assert futures[1].cancelled()
    assert calls == [futures[0]]
    assert delivery.cancelled_count == 2
    delivery.acknowledge(0, -1)
    await asyncio.sleep(0)
    assert calls == [futures[0]]
    with pytest.raises(asyncio.CancelledError, match="no more"):
        futures[0].result()
    with pytest.raises(asyncio.CancelledError):
        futures[1].exception()
    assert futures[2].result().offset == 2
    assert not futures[2].cancel()


async def test_tasks_that_await_one_record_share_its_end_and_its_cancellation():
    async def read(future: DeliveryFuture) -> RecordMetadata:
        return await future

    for end in ("delivered", "one is cancelled", "the record is cancelled", "dropped"):
        delivery, (future,) = batch(1)
        calls: list[Any] = []
        future.add_done_callback(calls.append)
        tasks = [asyncio.create_task(read(future)) for _ in range(3)]
        await asyncio.sleep(0)
        if end == "delivered":
            delivery.acknowledge(7, -1)
            assert [each.offset for each in await asyncio.gather(*tasks)] == [7, 7, 7]
        elif end == "dropped":
            for leave in (
                lambda coroutine: coroutine.close(),
                lambda coroutine: coroutine.throw(asyncio.CancelledError),
            ):
                coroutine = read(future)
                coroutine.send(None)
                with suppress(asyncio.CancelledError):
                    leave(coroutine)
            assert not future.cancelled()
            delivery.acknowledge(7, -1)
            await asyncio.wait(tasks, timeout=PATIENCE_S)
        else:
            assert (tasks[1] if end == "one is cancelled" else future).cancel("enough")
            await asyncio.wait(tasks, timeout=PATIENCE_S)
            assert [task.cancelled() for task in tasks] == [True, True, True]
            with pytest.raises(asyncio.CancelledError, match="enough"):
                future.result()
        assert calls == [future]
        assert future._observation is not None
        assert future._observation.waiters == []


async def test_the_records_of_a_batch_that_is_split_are_settled_with_their_parts():
    delivery, futures = batch(5)
    calls: list[Any] = []
    for future in (futures[0], futures[4]):
        future.add_done_callback(lambda future: calls.append(future.index))
    futures[3].cancel()
    first, second = BatchDelivery(PARTITION, timestamps([1, 2])), BatchDelivery(PARTITION, timestamps([3, 4, 5]))
    delivery.split([(first, 2), (second, 3)])
    assert not any(future.done() for at, future in enumerate(futures) if at != 3)
    assert second.cancelled_count == 1
    inner = [(BatchDelivery(PARTITION, timestamps([3])), 1), (BatchDelivery(PARTITION, timestamps([4, 5])), 2)]
    second.split(inner)
    inner[1][0].acknowledge(40, -1)
    first.fail(ERROR)
    await asyncio.sleep(0)
    assert [future.done() for future in futures] == [True, True, False, True, True]
    assert calls == [1, 0]
    assert [str(future.exception()) for future in futures[:2]] == [str(ERROR)] * 2
    assert futures[3].cancelled()
    assert futures[4].result() == RecordMetadata("t", 3, 41, 5)
    inner[0][0].acknowledge(30, -1)
    assert futures[2].result() == RecordMetadata("t", 3, 30, 3)


async def test_only_the_producer_settles_it():
    _, (future,) = batch(1)
    with pytest.raises(RuntimeError, match="set_result"):
        future.set_result(RecordMetadata("t", 3, 0, 0))
    with pytest.raises(RuntimeError, match="set_exception"):
        future.set_exception(ERROR)


async def test_a_future_that_is_dropped_goes_at_once_and_a_kept_one_goes_without_the_collector():
    delivery, futures = batch(2)
    dropped, kept = map(weakref.ref, futures)
    gc.disable()
    try:
        futures[1].add_done_callback(lambda future: None)
        futures.clear()
        assert dropped() is None
        assert kept() is not None
        delivery.acknowledge(0, -1)
        await asyncio.sleep(0)
        assert kept() is None
    finally:
        gc.enable()


async def test_what_it_prints_says_what_it_is():
    delivery, futures = batch(2)
    assert repr(futures[1]) == "<DeliveryFuture pending t-3 record 1>"
    delivery.acknowledge(0, -1)
    futures[0].cancel()
    assert "finished" in repr(futures[0])
    assert "unbound" in repr(type(futures[0]).__new__(type(futures[0])))


async def test_sends_whose_futures_are_dropped_leave_nothing_for_the_collector():
    async with FakeCluster(t=1) as cluster, Producer(bootstrap_servers=cluster.bootstrap, linger_ms=60_000) as sending:
        await sending.send("t", b"first")
        gc.collect()
        before = len(gc.get_objects())
        for _ in range(300):
            await sending.send("t", b"value", key=b"key")
        assert len(gc.get_objects()) - before < 100
        await sending.flush()
        assert sending.metrics().record_delivered_total == 301


async def test_the_message_of_a_cancellation_reaches_those_who_gather():
    _, futures = batch(2)
    for future in futures:
        future.cancel("no more")
    with pytest.raises(asyncio.CancelledError, match="no more"):
        await asyncio.gather(futures[0])
    (error,) = await asyncio.gather(futures[1], return_exceptions=True)
    assert str(error) == "no more"


async def test_its_inner_attributes_are_those_of_a_plain_future():
    delivery, futures = batch(3)
    failed_delivery, (failed,) = batch(1)
    plain: list[Any] = [asyncio.get_running_loop().create_future() for _ in range(4)]
    attributes = [name for name in dir(plain[0]) if not callable(getattr(plain[0], name)) and name != "__dict__"]
    assert {"_state", "_loop", "_callbacks", "_result", "_exception", "_cancel_message"} <= set(attributes)

    def compare() -> None:
        for ours, other in zip([*futures, failed], plain, strict=True):
            for name in set(attributes) - {"__doc__", "__module__"}:
                inner, plain_inner = getattr(ours, name), getattr(other, name)
                # An exception is one of its own.
                assert repr(inner) == repr(plain_inner) if name == "_exception" else inner == plain_inner, name

    compare()
    futures[0].cancel("no more")
    plain[0].cancel("no more")
    delivery.acknowledge(7, -1)
    failed_delivery.fail(ERROR)
    for at in (1, 2):
        plain[at].set_result(futures[at].result())
    plain[3].set_exception(ERROR)
    assert plain[3].exception() is ERROR
    compare()
    for future in (futures[2], plain[2]):
        future._log_traceback = False
        with pytest.raises(ValueError, match="only be set to False"):
            future._log_traceback = True


async def test_the_callbacks_of_all_records_have_run_when_a_flush_ends():
    offsets: list[int] = []

    def note(metadata: RecordMetadata | None, _: Exception | None) -> None:
        assert metadata is not None
        offsets.append(metadata.offset)

    async with FakeCluster(t=1) as cluster, Producer(bootstrap_servers=cluster.bootstrap, linger_ms=60_000) as sending:
        for _ in range(3):
            await sending.send("t", b"value", on_delivery=note)
        await sending.flush()
        assert offsets == [0, 1, 2]
