"""Sizes: batches that the broker finds too large are divided until they fit, and large records get their memory."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tests.patience import PATIENCE_S, until
from tests.unit.client.fake_broker import FakeCluster, refuse_produce
from tests.unit.client.test_producer import numbered, producer, values
from tidelog.client import Producer
from tidelog.protocol.batches.records import iter_records
from tidelog.protocol.errors import ErrorCode, KafkaError
from tidelog.protocol.messages.produce import ProduceRequest


@pytest.mark.parametrize("idempotent", [True, False])
@pytest.mark.parametrize("codec", ["none", "zstd"])
async def test_batches_that_are_too_large_are_divided_and_keep_their_order(idempotent, codec):
    options: dict[str, Any] = {"enable_idempotence": idempotent, "compression_type": codec, "batch_size": 4_000}
    if not idempotent:
        options["max_in_flight_requests_per_connection"] = 1
    async with FakeCluster(t=1) as cluster, producer(cluster, linger_ms=50, **options) as sending:
        cluster.topics["t"][0].max_batch_bytes = 150
        sent = [await sending.send("t", value, b"k", headers=[("h", b"x")]) for value in numbered(500)]
        await sending.flush()
        assert all(future.done() for future in sent)
        assert [future.result().offset for future in sent] == list(range(500))
        assert values(cluster) == numbered(500)
        records = [each for batch in cluster.topics["t"][0].batches for each in iter_records(batch)]
        assert {(each.key, each.headers) for each in records} == {(b"k", (("h", b"x"),))}
        assert [each.timestamp for each in records] == [future.result().timestamp_ms for future in sent]
        assert sending._accumulator.used_bytes == 0
        assert sending._accumulator.incomplete_count == 0


async def test_one_record_that_is_too_large_fails_and_the_others_of_its_batch_arrive(caplog):
    caplog.set_level(logging.CRITICAL, "tidelog")
    async with FakeCluster(t=1) as cluster, producer(cluster, linger_ms=50) as sending:
        cluster.topics["t"][0].max_batch_bytes = 200
        sizes = [1, 1, 500, 1, 1, 1, 400, 1]
        sent = [await sending.send("t", b"%d" % number * size) for number, size in enumerate(sizes)]
        outcomes = await asyncio.gather(*sent, return_exceptions=True)
        failed = [number for number, outcome in enumerate(outcomes) if isinstance(outcome, KafkaError)]
        assert failed == [2, 6]
        assert {str(outcomes[number]).partition(":")[0] for number in failed} == {"MESSAGE_TOO_LARGE"}
        assert values(cluster) == [b"%d" % number for number, size in enumerate(sizes) if size == 1]


async def test_a_batch_with_many_times_is_divided():
    """The parts count times from their own first record, which takes more bytes in the worst case."""
    async with FakeCluster(t=1) as cluster, producer(cluster, linger_ms=50, batch_size=400) as sending:
        cluster.script(ProduceRequest, *[refuse_produce(ErrorCode.RECORD_LIST_TOO_LARGE)] * 3)
        sent = [
            await sending.send("t", value, timestamp_ms=2**60 if number % 13 == 0 else number)
            for number, value in enumerate(numbered(60))
        ]
        await asyncio.gather(*sent)
        assert values(cluster) == numbered(60)


@asynccontextmanager
async def crowd(max_block_ms: int) -> AsyncIterator[Producer]:
    """A producer whose memory is always full of small records, and always getting free."""
    async with (
        FakeCluster(t=2) as cluster,
        producer(cluster, batch_size=2_000, buffer_memory=60_000, max_block_ms=max_block_ms) as sending,
    ):

        async def send_small() -> None:
            while True:
                try:
                    await sending.send("t", b"x" * 1_000, partition=0)
                except KafkaError:
                    pass  # its turn did not come in time, as on a loaded machine

        tasks = [asyncio.create_task(send_small()) for _ in range(20)]
        await until(lambda: sending._accumulator.used_bytes > 50_000)
        yield sending
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_large_record_is_not_kept_out_by_small_ones():
    async with crowd(max_block_ms=60_000) as sending:
        assert (await sending.send_and_wait("t", b"y" * 50_000, partition=1)).offset == 0


async def test_waiting_for_room_ends_however_much_is_delivered_meanwhile(monkeypatch):
    async with crowd(max_block_ms=500) as sending:
        monkeypatch.setattr(sending._appender, "_append_again", lambda *_: False)
        with pytest.raises(KafkaError, match="no room in buffer_memory"):
            async with asyncio.timeout(PATIENCE_S):
                await sending.send("t", b"y", partition=1)


async def test_nothing_that_comes_later_is_taken_while_another_record_waits_for_room():
    """Also in the moment in which the turn passes from one that waited to the next."""
    async with FakeCluster(t=1) as cluster, producer(cluster, buffer_memory=2_000) as sending:

        async def send(*given: bytes) -> None:
            for value in given:
                await sending.send("t", value)

        await sending.send("t", b"x" * 1_800)
        async with asyncio.timeout(PATIENCE_S), asyncio.TaskGroup() as tasks:
            tasks.create_task(send(b"first", b"third"))
            tasks.create_task(send(b"second"))
        await sending.flush()
        assert values(cluster)[1:] == [b"first", b"second", b"third"]
