"""`send_many` and `send_batch`: many records in one call, their order, and what an error leaves in the log."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from tests.patience import PATIENCE_S
from tests.unit.client.fake_broker import FakeCluster, refuse_produce
from tests.unit.client.test_admin import served
from tests.unit.client.test_producer import FAST, numbered, producer, values
from tests.unit.client.transacting import cluster_of, transactional
from tidelog import BatchSendError, Producer, ProducerRecord, TransactionAbortable
from tidelog.client import sync
from tidelog.client.sync.loop_thread import LoopThread
from tidelog.protocol.batches.record_batch import read_header
from tidelog.protocol.batches.records import iter_records
from tidelog.protocol.errors import ErrorCode, KafkaError
from tidelog.protocol.messages.produce import ProduceRequest
from tidelog.testing.embedded import EmbeddedBroker


async def test_records_of_every_form_arrive() -> None:
    async with FakeCluster(t=2) as cluster, producer(cluster) as sending:
        records = [
            ProducerRecord(b"v", b"k", [("h", b"x")], 1, 7),
            ProducerRecord(None, b"k", partition=1, timestamp_ms=8),
            ProducerRecord(b"w", partition=0),
        ]
        assert await (await sending.send_many("t", iter(records))) == [("t", 0, 0, 1), ("t", 1, 0, 2)]
        found = [tuple(each) for batch in cluster.topics["t"][1].batches for each in iter_records(batch)]
        assert found == [(0, 7, b"k", b"v", (("h", b"x"),)), (1, 8, b"k", None, ())]
    async with FakeCluster(t=1) as cluster, producer(cluster, value_serializer=str.encode) as sending:
        assert await (await sending.send_many("t", ["a", (b"k", "b")])) == [("t", 0, 0, 2)]
        found = [(each.key, each.value) for batch in cluster.topics["t"][0].batches for each in iter_records(batch)]
        assert found == [(None, b"a"), (b"k", b"b")]


async def test_a_call_shares_batches_with_single_records_and_keeps_their_order() -> None:
    async with FakeCluster(t=1) as cluster, producer(cluster, linger_ms=60_000) as sending:
        before = await sending.send("t", b"before")
        first = await sending.send_many("t", numbered(10))
        between = await sending.send("t", b"between")
        second = await sending.send_many("t", numbered(3))
        await sending.flush()
        assert (await before).offset == 0
        assert await first == [("t", 0, 1, 10)]
        assert (await between).offset == 11
        assert await second == [("t", 0, 12, 3)]
        assert values(cluster) == [b"before", *numbered(10), b"between", *numbered(3)]
        assert len(cluster.topics["t"][0].batches) == 1


async def test_no_records_are_no_ranges() -> None:
    async with FakeCluster(t=1) as cluster, producer(cluster) as sending:
        assert await (await sending.send_many("t", [])) == []


async def test_refused_batches_are_sent_again_and_large_ones_split() -> None:
    async with FakeCluster(t=1) as cluster, producer(cluster, batch_size=300) as sending:
        cluster.topics["t"][0].max_batch_bytes = 200
        cluster.script(ProduceRequest, refuse_produce(ErrorCode.NOT_LEADER_OR_FOLLOWER, append=True))
        assert await (await sending.send_many("t", numbered(500))) == [("t", 0, 0, 500)]
        assert values(cluster) == numbered(500)


async def test_more_records_than_memory_wait_for_it() -> None:
    async with FakeCluster(t=1) as cluster, producer(cluster, buffer_memory=2_000, batch_size=300) as sending:
        assert await (await sending.send_many("t", numbered(1_000))) == [("t", 0, 0, 1_000)]
        assert values(cluster) == numbered(1_000)


@pytest.mark.slow
async def test_an_iterator_is_read_as_memory_becomes_free() -> None:
    """All of it was read before the first record was sent, whatever `buffer_memory` said."""
    underway: list[int] = []
    async with FakeCluster(t=1) as cluster, producer(cluster, buffer_memory=20_000, batch_size=1_000) as sending:

        def each() -> Iterator[bytes]:
            for number in range(3_000):
                if number % 20 == 0:  # to count them takes long
                    underway.append(number - len(values(cluster)))
                yield b"%d" % number

        assert await (await sending.send_many("t", each())) == [("t", 0, 0, 3_000)]
        assert values(cluster) == numbered(3_000)
        assert max(underway) < 600  # the memory holds 155, a piece 256
        assert await (await sending.send_many("t", iter(()))) == []


async def test_what_an_iterator_gave_before_it_raised_is_sent() -> None:
    def each(count: int) -> Iterator[bytes]:
        yield from numbered(count)
        raise ValueError("a fault of the iterator")

    async with FakeCluster(t=1) as cluster, producer(cluster) as sending:
        with pytest.raises(ValueError, match="a fault of the iterator"):
            await sending.send_many("t", each(0))
        for count in (1, 1_000):
            with pytest.raises(BatchSendError, match="a fault of the iterator") as failure:
                await (await sending.send_many("t", each(count)))
            assert (sum(each.record_count for each in failure.value.written), failure.value.failed_count) == (count, 0)
        with pytest.raises(BatchSendError, match="value must be bytes") as failure:
            await (await sending.send_many("t", (b"x" if number else 17 for number in range(5, -1, -1))))
        assert (failure.value.written[0].record_count, failure.value.failed_count) == (5, 1)


def test_the_blocking_producer_reads_an_iterator_in_the_thread_of_the_call() -> None:
    threads: set[threading.Thread] = set()
    underway: list[int] = []
    with (
        EmbeddedBroker() as broker,
        sync.Producer(bootstrap_servers=broker.bootstrap_servers, buffer_memory=20_000, batch_size=1_000) as sending,
    ):
        sending.send_and_wait("t", b"first")

        def each() -> Iterator[bytes]:
            for number in range(3_000):
                threads.add(threading.current_thread())
                underway.append(number + 1 - sending.metrics().record_delivered_total)
                if number == 1_000:
                    sending.flush()  # the producer is free meanwhile
                yield b"%d" % number

        assert sending.send_many("t", each()).result(PATIENCE_S) == [("t", 0, 1, 3_000)]
        with pytest.raises(ZeroDivisionError):
            sending.send_many("t", (1 // 0 for _ in range(3)))
    assert threads == {threading.current_thread()}
    assert max(underway) < 600


@pytest.mark.parametrize(("record", "count_max"), [(b"x" * 1_000, 11), (b"", 2_000), (17, 2_000)])
def test_the_blocking_producer_reads_an_iterator_no_further_than_a_batch(record: Any, count_max: int) -> None:
    counter = itertools.count()
    options: dict[str, Any] = {} if isinstance(record, bytes) else {"value_serializer": lambda value: b"%d" % value}
    with (
        EmbeddedBroker() as broker,
        sync.Producer(bootstrap_servers=broker.bootstrap_servers, max_request_size=10_000, **options) as sending,
    ):
        with pytest.raises(KafkaError, match="the batch is larger than max_request_size"):
            sending.send_batch("t", (record for _ in iter(lambda: next(counter), 100_000)), partition=0)
        assert next(counter) <= count_max
        assert sending.send_batch("t", (record for _ in range(3)), partition=0).result(PATIENCE_S).record_count == 3


@pytest.mark.parametrize("version", [1, 2])
async def test_a_serializer_that_raises_any_error_makes_the_transaction_abortable(version: int) -> None:
    """A RuntimeError passed for the lack of a transaction: the others were committed without its record."""

    def serialize(value: int) -> bytes:
        if value == 2:
            raise RuntimeError("a fault of the serializer")
        return b"%d" % value

    async with cluster_of(version) as cluster, transactional(cluster, value_serializer=serialize) as sending:
        with pytest.raises(TransactionAbortable, match="a fault of the serializer"):
            async with sending.transaction():
                await sending.send_many("t", [1, 2, 3])
        async with sending.transaction():
            await sending.send_many("t", [4])
        assert cluster.transactions.committed == [b"4"]


@pytest.mark.parametrize("version", [1, 2])
def test_a_batch_that_is_too_large_makes_the_transaction_of_the_blocking_producer_abortable(version: int) -> None:
    thread = LoopThread()
    cluster = thread.run(cluster_of(version).__aenter__())
    with sync.Producer(
        bootstrap_servers=cluster.bootstrap, transactional_id="tx", max_request_size=10_000, **FAST
    ) as sending:
        sending.begin_transaction()
        sending.send("t", b"1", partition=0)
        with pytest.raises(KafkaError, match="larger than max_request_size"):
            sending.send_batch("t", [b"2" * 20_000], partition=0)
        with pytest.raises(TransactionAbortable, match="larger than max_request_size"):
            sending.commit_transaction()
        sending.abort_transaction()
        with sending.transaction():
            sending.send_batch("t", [b"3"], partition=0)
    assert cluster.transactions.committed == [b"3"]
    thread.run(cluster.__aexit__())
    thread.stop()


@pytest.mark.parametrize(
    ("wrong", "error"),
    [(17, TypeError), ((b"k", b"v", b"x"), TypeError), (b"x" * 2_000_000, KafkaError), ("text", TypeError)],
)
async def test_an_error_at_the_first_record_is_raised_and_at_a_later_one_is_the_outcome(
    wrong: Any, error: type[Exception]
) -> None:
    async with FakeCluster(t=1) as cluster, producer(cluster) as sending:
        with pytest.raises(error):
            await sending.send_many("t", [wrong, b"after"])
        outcome = await sending.send_many("t", [b"0", b"1", wrong, b"after"])
        with pytest.raises(BatchSendError) as raised:
            await outcome
        assert (raised.value.written, raised.value.failed_count) == ([("t", 0, 0, 2)], 2)
        assert values(cluster) == [b"0", b"1"]


async def test_a_partition_that_refuses_fails_its_records_alone() -> None:
    async with FakeCluster(t=2) as cluster, producer(cluster) as sending:
        cluster.topics["t"][1].max_batch_bytes = 10
        outcome = await sending.send_many("t", [ProducerRecord(b"x", partition=n % 2) for n in range(6)])
        with pytest.raises(BatchSendError) as raised:
            await outcome
        error = raised.value
        assert (error.code, error.failed_count) == (ErrorCode.MESSAGE_TOO_LARGE, 3)
        assert error.written == [("t", 0, 0, 3)]


@pytest.mark.parametrize("version", [1, 2])
async def test_transactions(version: int) -> None:
    async with cluster_of(version) as cluster, transactional(cluster) as sending:
        with pytest.raises(RuntimeError, match="needs an open transaction"):
            await sending.send_many("t", [b"x"])
        async with sending.transaction():
            many = await sending.send_many("t", [ProducerRecord(b"%d" % n, partition=0) for n in range(20)])
            one = await sending.send_batch("t", numbered(5), partition=0)
        assert (await many, await one) == ([("t", 0, 0, 20)], ("t", 0, 20, 5))
        with pytest.raises(KafkaError, match="not sent"):
            async with sending.transaction():
                await sending.send_many("t", [b"x", 17])


async def test_a_batch_is_one_record_batch_of_any_size_up_to_a_request() -> None:
    async with FakeCluster(t=2) as cluster, producer(cluster, batch_size=100) as sending:
        records = [(b"k", value * 10) for value in numbered(400)]
        await sending.send("t", b"before", partition=1)
        assert await (await sending.send_batch("t", records, partition=1)) == ("t", 1, 1, 400)
        await sending.send_and_wait("t", b"after", partition=1)
        counts = [read_header(batch).record_count for batch in cluster.topics["t"][1].batches]
        assert counts == [1, 400, 1]
        sequences = [read_header(batch).base_sequence for batch in cluster.topics["t"][1].batches]
        assert sequences == [0, 1, 401]


async def test_a_batch_is_written_whole_or_not_at_all() -> None:
    async with FakeCluster(t=1) as cluster, producer(cluster, max_block_ms=300) as sending:
        cluster.topics["t"][0].max_batch_bytes = 500
        with pytest.raises(KafkaError, match="MESSAGE_TOO_LARGE"):
            await (await sending.send_batch("t", numbered(500), partition=0))
        with pytest.raises(KafkaError, match="larger than max_request_size"):
            await sending.send_batch("t", [b"x" * 600_000] * 2, partition=0)
        with pytest.raises(KafkaError, match="larger than max_request_size"):
            await sending.send_batch("t", [b"x" * 2_000_000], partition=0)
        with pytest.raises(ValueError, match="at least one"):
            await sending.send_batch("t", [], partition=0)
        with pytest.raises(ValueError, match="of its own"):
            await sending.send_batch("t", [ProducerRecord(b"", partition=0)], partition=0)
        with pytest.raises(KafkaError, match="has 1 partition,"):
            await sending.send_batch("t", [b"x"], partition=1)
        with pytest.raises(TypeError, match="value must be bytes"):
            await sending.send_batch("t", [b"x", 1], partition=0)
        assert values(cluster) == []
        assert await (await sending.send_batch("t", [b"last"], partition=0)) == ("t", 0, 0, 1)


@pytest.mark.parametrize("call", ["send_batch", "send_many"])
def test_calls_that_fail_at_the_same_time_have_errors_of_their_own(call: str) -> None:
    """The traceback of one for all grew with each `result()`, and so did what a program logged of it."""
    with (
        served(t=1) as cluster,
        sync.Producer(bootstrap_servers=cluster.bootstrap, **FAST, linger_ms=60_000) as sending,
    ):
        cluster.script(ProduceRequest, *[refuse_produce(ErrorCode.NOT_LEADER_OR_FOLLOWER)] * 1_000)
        options = {"partition": 0} if call == "send_batch" else {}
        futures = [getattr(sending, call)("t", [b"a", b"b"], **options) for _ in range(3)]
        sending.close(0)
        depths: list[int] = []
        for future in futures:
            with pytest.raises(KafkaError, match="NETWORK_EXCEPTION") as raised:
                future.result(PATIENCE_S)
            depths.append(len(raised.traceback))
        assert len(set(depths)) == 1


async def test_a_cancelled_call_keeps_what_it_has_appended() -> None:
    async with FakeCluster(t=1) as cluster, producer(cluster, buffer_memory=1_000, batch_size=100) as sending:
        await sending.partitions_for("t")
        task = asyncio.ensure_future(sending.send_many("t", numbered(5_000)))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await sending.send_and_wait("t", b"after")
        written = values(cluster)
        assert 0 < len(written) < 5_000
        assert written == [*numbered(len(written) - 1), b"after"]


@pytest.mark.parametrize("call", ["send_many", "send_batch"])
@pytest.mark.parametrize("is_blocking", [True, False])
def test_an_iterator_may_use_its_record_again_for_the_next_one(call: str, is_blocking: bool) -> None:
    """Records were read in pieces before the first one was serialized: all of a piece were sent as the last one."""

    def records() -> Iterator[Any]:
        value: list[Any] = [0]
        for number in range(600):
            value[0] = number
            yield ProducerRecord(value, headers=())

    def encode(value: Any) -> bytes:
        return b"%d" % value[0]

    async def send(bootstrap: str) -> None:
        async with Producer(bootstrap_servers=bootstrap, value_serializer=encode) as sending:
            if call == "send_many":
                await (await sending.send_many("t", records()))
            else:
                await (await sending.send_batch("t", records(), partition=0))

    with served(t=1) as fake:
        if is_blocking:
            with sync.Producer(bootstrap_servers=fake.bootstrap, value_serializer=encode) as sending:
                if call == "send_many":
                    sending.send_many("t", records()).result(PATIENCE_S)
                else:
                    sending.send_batch("t", records(), partition=0).result(PATIENCE_S)
        else:
            asyncio.run(send(fake.bootstrap))
        assert values(fake) == numbered(600)


async def test_an_iterator_may_use_its_key_again_for_the_next_record() -> None:
    """The value is bytes, which need no copy."""

    def records() -> Iterator[Any]:
        key = bytearray(1)
        for number in range(3):
            key[:] = b"%d" % number
            yield key, b"x"

    async with FakeCluster(t=1) as cluster, producer(cluster) as sending:
        await (await sending.send_many("t", records()))
        assert [each.key for batch in cluster.topics["t"][0].batches for each in iter_records(batch)] == numbered(3)


@pytest.mark.parametrize("is_blocking", [True, False])
def test_a_producer_may_have_a_serializer_of_keys_alone(is_blocking: bool) -> None:
    async def send(bootstrap: str) -> None:
        async with Producer(bootstrap_servers=bootstrap, key_serializer=str.encode) as sending:
            await sending.send("t", b"x", "0")
            await sending.send_many("t", iter([("1", b"x")]))
            await sending.send_many("t", [("2", b"x")])

    with served(t=1) as fake:
        if is_blocking:
            with sync.Producer(bootstrap_servers=fake.bootstrap, key_serializer=str.encode) as sending:
                sending.send("t", b"x", "0")
                sending.send_many("t", iter([("1", b"x")]))
                sending.send_many("t", [("2", b"x")])
        else:
            asyncio.run(send(fake.bootstrap))
        assert [each.key for batch in fake.topics["t"][0].batches for each in iter_records(batch)] == numbered(3)


@pytest.mark.parametrize("fault", [ValueError, asyncio.CancelledError])
async def test_a_record_that_its_serializer_refuses_fails_those_behind_it_in_its_piece(
    fault: type[BaseException],
) -> None:
    def encode(value: bytes) -> bytes:
        if value == b"3":
            raise fault
        return value

    async with FakeCluster(t=1) as cluster, producer(cluster, value_serializer=encode) as sending:
        if fault is ValueError:
            with pytest.raises(BatchSendError) as failed:
                await (await sending.send_many("t", iter(numbered(10))))
            assert [written.record_count for written in failed.value.written] == [3]
            assert failed.value.failed_count == 7
        else:
            with pytest.raises(fault):
                await sending.send_many("t", iter(numbered(10)))
        await sending.flush()
        assert values(cluster) == numbered(3)


@pytest.mark.parametrize("fault", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_in_a_serializer_ends_the_reading_of_an_iterator(fault: type[BaseException]) -> None:
    """It was raised when the piece was read, which takes as long as the iterator waits for its records."""
    read: list[int] = []

    def records() -> Iterator[int]:
        for number in range(10):
            read.append(number)
            yield number

    def encode(value: int) -> bytes:
        if value == 2:
            raise fault
        return b"%d" % value

    with served(t=1) as fake, sync.Producer(bootstrap_servers=fake.bootstrap, value_serializer=encode) as sending:
        with pytest.raises(fault):
            sending.send_many("t", records())
        assert read == [0, 1, 2]
        sending.send_many("t", iter([7, 8])).result(PATIENCE_S)
        assert values(fake)[-2:] == [b"7", b"8"]
