"""The blocking producer: one order whichever way records are sent, callbacks that send, and futures that all end."""

from __future__ import annotations

import asyncio
import concurrent.futures
import gc
import logging
import signal
import socket
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import fields
from functools import partial
from typing import Any

import pytest

from tests.patience import PATIENCE_S, join, wait_until
from tests.unit.client.fake_broker import SILENCE, FakeCluster, FakeNode
from tests.unit.client.test_producer import FAST, numbered, values
from tests.unit.client.transacting import finalize
from tidelog.client import ProducerInterceptor, sync
from tidelog.client.config import ProducerConfig
from tidelog.client.model import RecordMetadata
from tidelog.client.sync import Producer, loop_thread
from tidelog.client.sync import producer as sync_producer
from tidelog.client.sync.loop_call import LoopCall, SharedCall
from tidelog.client.sync.loop_thread import LoopThread
from tidelog.protocol.codec.schema import Message
from tidelog.protocol.errors import ErrorCode, KafkaError
from tidelog.protocol.messages.metadata import MetadataRequest
from tidelog.protocol.messages.produce import ProduceRequest


@pytest.fixture
def cluster() -> Iterator[FakeCluster]:
    """A cluster on a loop of its own."""
    thread = LoopThread()
    fake = FakeCluster(t=1)
    thread.run(fake.__aenter__())
    yield fake
    thread.run(fake.__aexit__())
    thread.stop()


def producer(cluster: FakeCluster, **options: Any) -> Producer:
    return Producer(**{"bootstrap_servers": cluster.bootstrap, "linger_ms": 0, **FAST, **options})


def test_a_record_that_is_waited_for_comes_after_those_sent_before(cluster):
    with producer(cluster) as sending:
        for value in numbered(2_000):
            sending.send("t", value * 100)
        assert sending.send_and_wait("t", b"last").offset == 2_000
    assert values(cluster) == [*(value * 100 for value in numbered(2_000)), b"last"]


@pytest.mark.parametrize("has_serializer", [True, False])
def test_a_record_is_sent_as_it_was_in_the_call(cluster, has_serializer):
    """A value that its sender used again for the next record was sent with its last content each time."""
    encode = (lambda value: None if value is None else bytes(value)) if has_serializer else None
    records: list[tuple[int, bytes | None, bytes | None, Any]] = []
    with producer(cluster, value_serializer=encode, key_serializer=encode) as sending:
        sending.send_and_wait("t", b"first")
        value, key = bytearray(b"0"), bytearray(b"0")
        headers: list[Any] = [["h", b""]]
        futures = []
        for number in numbered(100):
            value[:], key[:], headers[0][1] = number, b"k" + number, number
            futures.append(sending.send("t", value, key, headers=headers))
        assert [future.result(PATIENCE_S).offset for future in futures] == list(range(1, 101))
    with sync.Consumer("t", bootstrap_servers=cluster.bootstrap, auto_offset_reset="earliest") as reading:
        while len(records) < 101:
            for batch in reading.poll(PATIENCE_S * 1000).values():
                records += [(each.offset, each.value, each.key, each.headers) for each in batch]
    assert records[1:] == [
        (offset, number, b"k" + number, (("h", number),)) for offset, number in enumerate(numbered(100), 1)
    ]


@pytest.mark.parametrize("changed", ["key", "list of headers", "header"])
def test_a_part_of_a_record_is_sent_as_it_was_in_the_call(cluster, changed):
    """Its value is bytes, which need no copy."""
    records: list[tuple[bytes | None, Any]] = []
    with producer(cluster) as sending:
        sending.send_and_wait("t", b"first")
        key, headers = bytearray(b"k"), [("h", b"0"), ("i", None)]
        header: Any = ["h", b"0"]
        goes_on = threading.Event()
        sending._call_on_loop(lambda: goes_on.wait(PATIENCE_S))
        if changed == "key":
            sending.send("t", b"x", key, headers=headers)
            key[:] = b"-"
        elif changed == "header":
            sending.send("t", b"x", b"k", headers=[header, headers[1]])
            header[1] = b"-"
        else:
            sending.send("t", b"x", b"k", headers=headers)
            headers.pop()
        goes_on.set()
    with sync.Consumer("t", bootstrap_servers=cluster.bootstrap, auto_offset_reset="earliest") as reading:
        while len(records) < 2:
            for batch in reading.poll(PATIENCE_S * 1000).values():
                records += [(each.key, each.headers) for each in batch]
    assert records == [(None, ()), (b"k", (("h", b"0"), ("i", None)))]


def test_a_record_goes_with_times_as_long_as_they_can_be(cluster):
    """Timers of event loops and locks have limits of their own."""
    times = [each.name for each in fields(ProducerConfig) if each.metadata.get("bounds", (0, 0))[1] == 2**63 - 1]
    assert len(times) == 12
    with producer(cluster, **dict.fromkeys(times, 2**63 - 1) | {"linger_ms": 0}) as sending:
        assert sending.send_and_wait("t", b"x").offset == 0
        assert sending.partitions_for("t")


def test_the_records_of_a_batch_may_come_from_calls_of_different_kinds(cluster):
    with producer(cluster, linger_ms=60_000) as sending:
        before = [sending.send("t", b"x", timestamp_ms=at) for at in range(2)]
        first, second = [sending.send_many("t", [b"x"] * count) for count in (3, 2)]
        after = [sending.send("t", b"x", timestamp_ms=7 + at) for at in range(2)]
        third = sending.send_many("t", [(b"k", b"x")])
        sending.flush()
        assert len(cluster.topics["t"][0].batches) == 1
        assert [future.result() for future in before] == [RecordMetadata("t", 0, at, at) for at in range(2)]
        assert [future.result() for future in after] == [RecordMetadata("t", 0, 7 + at, 7 + at) for at in range(2)]
        assert [many.result() for many in (first, second, third)] == [
            [("t", 0, 2, 3)],
            [("t", 0, 5, 2)],
            [("t", 0, 9, 1)],
        ]


def test_a_record_that_is_waited_for_does_not_linger_unless_linger_is_asked_for(cluster, monkeypatch):
    monkeypatch.setattr("tidelog.client.config.DEFAULT_LINGER_MS", 80_000)
    with producer(cluster, linger_ms=None) as sending:
        first = sending.send("t", b"x")
        assert sending.send_and_wait("t", b"x").offset == 1
        assert first.done()
        second = sending.send("t", b"x")
        time.sleep(0.05)  # the loop has taken it from the queue
        assert not second.done()
        assert second.result(PATIENCE_S).offset == 2
    with producer(cluster, linger_ms=80_000) as sending:
        lingering = sending.send("t", b"x")
        with pytest.raises(TimeoutError):
            lingering.result(0.05)
        sending.flush()
        assert lingering.result(PATIENCE_S).offset == 3


def test_each_record_of_a_batch_has_its_offset_and_its_own_timestamp(cluster):
    with producer(cluster, linger_ms=1_000) as sending:
        futures = [sending.send("t", b"x", timestamp_ms=1_000 + at // 3) for at in range(10)]
        sending.flush()
        assert [future.result() for future in futures] == [
            RecordMetadata("t", 0, at, 1_000 + at // 3) for at in range(10)
        ]
    with producer(cluster, linger_ms=1_000, acks=0) as sending:
        futures = [sending.send("t", b"x", timestamp_ms=7) for _ in range(3)]
        sending.flush()
        assert [future.result() for future in futures] == [RecordMetadata("t", 0, -1, 7)] * 3


def test_a_record_has_the_time_of_a_log_that_stamps_its_records(cluster):
    def stamped(request: Any, node: Any) -> Any:
        response = node.on_produce(request)
        response.responses[0].partition_responses[0].log_append_time_ms = 5_000
        return response

    cluster.script(ProduceRequest, stamped)
    with producer(cluster, linger_ms=1_000) as sending:
        futures = [sending.send("t", b"x", timestamp_ms=7) for _ in range(3)]
        sending.flush()
        assert [future.result() for future in futures] == [RecordMetadata("t", 0, at, 5_000) for at in range(3)]


def test_a_delivery_callback_sends_as_much_as_it_likes(cluster):
    count = 6_000  # more than the queue holds
    sent: list[Future[RecordMetadata]] = []
    done = threading.Event()
    with producer(cluster) as sending:

        def more(_: Future[RecordMetadata]) -> None:
            sent.extend(sending.send("t", value) for value in numbered(count))
            done.set()

        sending.send("t", b"first").add_done_callback(more)
        assert done.wait(PATIENCE_S)
        sending.flush()
        assert all(future.done() for future in sent)
    assert values(cluster) == [b"first", *numbered(count)]


def test_a_delivery_callback_that_would_wait_for_its_own_thread_is_refused(cluster):
    refused: list[str] = []
    done = threading.Event()
    with producer(cluster) as sending:

        def wait(_: Future[RecordMetadata]) -> None:
            for call in (lambda: sending.send_and_wait("t", b"x"), sending.flush, sending.close):
                with pytest.raises(RuntimeError, match="cannot wait") as caught:
                    call()
                refused.append(str(caught.value))
            done.set()

        sending.send("t", b"first").add_done_callback(wait)
        assert done.wait(PATIENCE_S)
        assert len(refused) == 3
        sending.send_and_wait("t", b"second")
    assert values(cluster) == [b"first", b"second"]


def test_the_queue_of_callbacks_has_an_end(cluster, monkeypatch):
    monkeypatch.setattr("tidelog.client.sync.producer._QUEUE_MAX", 10)
    monkeypatch.setattr("tidelog.client.sync.producer._QUEUE_MAX_IN_CALLBACKS", 50)
    outcome: Future[int] = Future()
    with producer(cluster) as sending:

        def flood(_: Future[RecordMetadata]) -> None:
            with pytest.raises(KafkaError, match="cannot wait for room"):
                [sending.send("t", b"x") for _ in range(1_000)]
            outcome.set_result(len(sending._queue))

        sending.send("t", b"first").add_done_callback(flood)
        assert outcome.result(PATIENCE_S) == 50


def test_every_future_ends_when_closing_runs_out_of_time(cluster, caplog):
    caplog.set_level(logging.CRITICAL, "tidelog")
    cluster.script(ProduceRequest, *[lambda request, node: SILENCE] * 5)
    sending = producer(cluster, buffer_memory=2_000, batch_size=200)
    sent = [sending.send("t", b"x" * 100) for _ in range(500)]
    sending.close(timeout_ms=50)
    for future in sent:
        assert isinstance(future.exception(PATIENCE_S), KafkaError)
    with pytest.raises(RuntimeError, match="closed"):
        sending.send("t", b"x")


def test_records_that_a_close_leaves_behind_fail_alike(cluster, caplog):
    """All but the first raised the RuntimeError of a send after `close`."""
    caplog.set_level(logging.CRITICAL, "tidelog")
    sending = producer(cluster)
    sending.start()
    cluster.script(MetadataRequest, *[lambda request, node: SILENCE] * 50)
    sent = [sending.send("unknown", b"x") for _ in range(3)]
    sending.close(0)
    errors = [future.exception(PATIENCE_S) for future in sent]
    assert [isinstance(error, KafkaError) and error.code for error in errors] == [ErrorCode.NETWORK_EXCEPTION] * 3


def test_a_flush_waits_for_what_was_sent_before_it_and_not_for_what_comes_later(cluster):
    stop = threading.Event()

    def serialize_and_send_more(value: bytes) -> bytes:
        if not stop.is_set():
            sending.send("t", b"later")
        return value

    with producer(cluster, value_serializer=serialize_and_send_more, buffer_memory=100_000) as sending:
        mine = [sending.send("t", value) for value in numbered(10)]
        flushed = threading.Thread(target=sending.flush, daemon=True)
        flushed.start()
        try:
            flushed.join(PATIENCE_S)
            assert not flushed.is_alive()
            assert all(future.done() for future in mine)
        finally:
            stop.set()


def test_threads_that_send_the_first_record_at_once_share_one_loop(cluster, monkeypatch):
    made: list[LoopThread] = []
    barrier = threading.Barrier(4)

    class Counted(LoopThread):
        def __init__(self, publish: Callable[[LoopThread], bool]) -> None:
            super().__init__(publish)
            made.append(self)

    monkeypatch.setattr(loop_thread, "LoopThread", Counted)
    with_all = producer(cluster)

    def first() -> None:
        barrier.wait(PATIENCE_S)
        with_all.send("t", b"x").result(PATIENCE_S)

    threads = [threading.Thread(target=first) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        join(thread)
    own = with_all._thread
    assert [each for each in made if not each.loop.is_closed()] == [own]
    with_all.close()
    assert all(each.loop.is_closed() for each in made)
    assert len(values(cluster)) == 4


@pytest.mark.slow
def test_the_start_by_the_first_record_takes_no_longer_than_a_send_may():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    sending = Producer(bootstrap_servers=f"127.0.0.1:{port}", max_block_ms=300)
    with pytest.raises(KafkaError, match="within max_block_ms=300"):
        sending.send("t", b"x")
    with pytest.raises(KafkaError, match="within max_block_ms=300"):
        sending.send_and_wait("t", b"x")
    sending.close()


@pytest.mark.slow
def test_records_of_a_missing_topic_wait_at_the_same_time(cluster, caplog):
    caplog.set_level(logging.CRITICAL, "tidelog")
    count = 40
    cluster.auto_create_partitions = 0
    with producer(cluster, max_block_ms=2_000) as sending:
        missing = [sending.send("missing", b"x") for _ in range(count)]
        began = time.monotonic()
        assert {type(future.exception(PATIENCE_S)) for future in missing} == {KafkaError}
        assert 1 < time.monotonic() - began < count  # one after another they take twice that
        assert sending._topic_waits == {}
        assert sending._behind_count == 0


def test_a_record_that_has_failed_is_kept_neither_by_its_future_nor_until_a_garbage_collection(cluster, caplog):
    """The traceback of the failure had the record, and the future: large records of a missing topic took gigabytes."""
    caplog.set_level(logging.CRITICAL, "tidelog")
    cluster.auto_create_partitions = 0
    gc.disable()
    try:
        with producer(cluster, max_block_ms=50) as sending:
            kept, dropped = (sending.send("missing", b"x") for _ in range(2))
            for future in (kept, dropped):
                error = future.exception(PATIENCE_S)
                assert error is not None
                assert (error.__traceback__, error.__context__) == (None, None)
            reference = weakref.ref(dropped)
            del dropped, future
            wait_until(lambda: reference() is None)
    finally:
        gc.enable()


def test_only_so_many_missing_topics_are_remembered(cluster, monkeypatch, caplog):
    """Each of their names was kept while a program sent to ever new ones."""
    caplog.set_level(logging.CRITICAL, "tidelog")
    monkeypatch.setattr(sync_producer, "_MISSING_TOPICS_MAX", 3)
    cluster.auto_create_partitions = 0
    with producer(cluster, max_block_ms=50) as sending:
        for number in range(5):
            assert isinstance(sending.send(f"missing-{number}", b"x").exception(PATIENCE_S), KafkaError)
        assert list(sending._missing_since) == ["missing-2", "missing-3", "missing-4"]


def test_the_reason_of_records_that_are_not_sent_is_logged_once(cluster, caplog):
    """Their futures may never be read."""
    with producer(cluster, max_request_size=1_000) as sending:
        for size in (3_000, 3_000, 4_000):
            assert isinstance(sending.send("t", b"x" * size).exception(PATIENCE_S), KafkaError)
    lines = [each.getMessage() for each in caplog.records if each.levelname == "ERROR"]
    assert [line.startswith("a record was not sent: MESSAGE_TOO_LARGE") for line in lines] == [True, True]


def test_a_record_that_its_serializer_has_refused_is_kept_neither_by_its_future_nor_until_a_garbage_collection(
    cluster, caplog
):
    """The traceback of the serializer's error had the record, and the future. Its lines are in a note now."""
    caplog.set_level(logging.CRITICAL, "tidelog")

    class Value:
        pass

    def refuse(value: Any) -> bytes:
        try:
            raise KeyError(value.__class__.__name__)
        except KeyError as cause:
            raise ValueError("no such field") from cause

    gc.disable()
    try:
        with producer(cluster, value_serializer=refuse) as sending:
            value = Value()
            kept, dropped = (sending.send("t", value) for _ in range(2))
            error = kept.exception(PATIENCE_S)
            assert isinstance(error, ValueError)
            assert str(error) == "no such field"
            assert [error.__traceback__, getattr(error.__cause__, "__traceback__", 0)] == [None, None]
            text = "".join(traceback.format_exception(error))
            assert text.count("in refuse") == 2
            assert isinstance(dropped.exception(PATIENCE_S), ValueError)
            references = weakref.ref(value), weakref.ref(dropped)
            del value, dropped
            wait_until(lambda: [reference() for reference in references] == [None, None])
    finally:
        gc.enable()


def test_the_exception_that_the_program_handles_while_a_serializer_fails_stays_as_it_is(cluster, caplog):
    """Python makes it the context of the serializer's error, whose tracebacks are dropped."""
    caplog.set_level(logging.CRITICAL, "tidelog")

    def refuse(value: Any) -> bytes:
        try:
            raise KeyError("field")
        except KeyError:
            raise ValueError("no such field")  # noqa: B904

    with producer(cluster, value_serializer=refuse) as sending:
        try:
            raise OSError("the program's own")
        except OSError as handled:
            error, own_error = sending.send("t", {}).exception(PATIENCE_S), handled
    assert isinstance(error, ValueError)
    assert isinstance(error.__context__, KeyError)
    assert error.__context__.__context__ is None
    assert own_error.__traceback__ is not None
    assert not hasattr(own_error, "__notes__")


def test_an_exception_that_a_serializer_raises_for_each_record_gets_one_note(cluster, caplog):
    caplog.set_level(logging.CRITICAL, "tidelog")
    refusal = ValueError("refused")

    def refuse(value: Any) -> bytes:
        raise refusal

    with producer(cluster, value_serializer=refuse) as sending:
        for future in [sending.send("t", b"x") for _ in range(3)]:
            assert future.exception(PATIENCE_S) is refusal
    assert len(refusal.__notes__) == 1


def test_a_record_of_a_missing_topic_holds_no_record_of_another_one(cluster, caplog):
    """It held those of all topics and threads for max_block_ms, again and again while a program sent to that topic."""
    caplog.set_level(logging.CRITICAL, "tidelog")
    cluster.auto_create_partitions = 0
    with producer(cluster, max_block_ms=int(PATIENCE_S * 1000)) as sending:
        sending.send_and_wait("t", b"x")  # its metadata is known, and only the partition is missing
        missing = [sending.send("missing", b"x"), sending.send("t", b"x", partition=9), sending.send("missing", b"y")]
        cluster.create("new", 1)
        assert sending.send("new", b"a").result(PATIENCE_S).offset == 0
        assert [written.record_count for written in sending.send_many("new", [b"b", b"c"]).result(PATIENCE_S)] == [2]
        assert sending.send_batch("new", [b"d"], partition=0).result(PATIENCE_S).base_offset == 3
        assert not any(future.done() for future in missing)
        sending.close(0)
        assert [type(future.exception(0)) for future in missing] == [KafkaError] * 3


class Number:
    """A whole number that is no int, such as one of numpy."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __index__(self) -> int:
        return self.number


@pytest.mark.parametrize("as_number", [int, Number])
def test_a_record_of_a_missing_partition_holds_no_record_of_another_topic(cluster, as_number, caplog):
    """Not either where its number is one of numpy."""
    caplog.set_level(logging.CRITICAL, "tidelog")
    cluster.create("other", 1)
    with producer(cluster, max_block_ms=int(PATIENCE_S * 1000)) as sending:
        assert sending.send_and_wait("t", b"x").offset == 0
        missing = sending.send("t", b"x", partition=as_number(1))
        assert sending.send("other", b"x").result(PATIENCE_S / 2).offset == 0
        assert not missing.done()
        sending.close(0)


def test_records_of_a_topic_that_comes_late_keep_their_order(cluster, monkeypatch):
    """Also when the loop takes its turn between them, and when others wait for memory beside them."""
    monkeypatch.setattr(sync_producer, "_RECORDS_PER_DRAIN", 7)
    cluster.auto_create_partitions = 0
    topics = ("late", "later")
    with producer(cluster, max_block_ms=int(PATIENCE_S * 1000), buffer_memory=4_000, batch_size=400) as sending:
        threads = [threading.Thread(target=lambda n=n: send_numbered(sending, topics, n)) for n in range(3)]
        for thread in threads:
            thread.start()
        for topic in topics:
            wait_until(lambda: "later" in sending._topic_waits)
            time.sleep(0.05)
            cluster.create(topic, 1)
        for thread in threads:
            join(thread)
        sending.flush()
        assert sending._topic_waits == {}
        assert sending._behind_count == 0
    for topic in ("t", *topics):
        for n in range(3):
            own = [value for value in values(cluster, topic) if value is not None and value.startswith(b"%d-" % n)]
            assert own == [b"%d-%d" % (n, i) for i in range(200)], topic


def is_known(sending: Producer, topic: str) -> bool:
    return topic not in sending._topic_waits


def send_numbered(sending: Producer, topics: tuple[str, ...], n: int) -> None:
    for i in range(200):
        for topic in ("t", *topics):
            sending.send(topic, b"%d-%d" % (n, i))


def test_a_flush_waits_for_the_records_of_a_topic_that_comes_late(cluster):
    cluster.auto_create_partitions = 0
    with producer(cluster, max_block_ms=int(PATIENCE_S * 1000)) as sending:
        late = [sending.send(topic, value) for value in (b"a", b"b") for topic in ("late", "later")]
        flushing = threading.Thread(target=sending.flush)
        flushing.start()
        there = sending.send("t", b"c")
        assert there.result(PATIENCE_S).offset == 0
        for topic in ("late", "later"):
            assert flushing.is_alive()
            assert not late[-1].done()
            cluster.create(topic, 1)
            wait_until(partial(is_known, sending, topic))
        join(flushing)
        assert [future.result(0).offset for future in late] == [0, 0, 1, 1]


def test_too_many_records_of_a_missing_topic_make_its_senders_wait_and_no_others(cluster, monkeypatch, caplog):
    caplog.set_level(logging.CRITICAL, "tidelog")
    monkeypatch.setattr(sync_producer, "_QUEUE_MAX", 10)
    monkeypatch.setattr(sync_producer, "_QUEUE_MAX_IN_CALLBACKS", 20)
    cluster.auto_create_partitions = 0
    with producer(cluster, max_block_ms=int(PATIENCE_S * 1000)) as sending:
        sent: list[Future[Any]] = []

        def send_to_missing() -> None:
            for _ in range(100):
                sent.append(sending.send("missing", b"x"))
                time.sleep(0.001)  # the queue never fills up, only the place behind the first record

        thread = threading.Thread(target=send_to_missing)
        thread.start()
        wait_until(lambda: sending._behind_count >= 10)
        for count in range(30):
            assert sending.send("t", b"y").result(PATIENCE_S).offset == count
        assert len(sent) <= 30
        outcome: Future[Any] = Future()

        def send_in_callback(*_: object) -> None:
            try:
                for _value in range(20):
                    sending.send("missing", b"z")
            except KafkaError as error:
                outcome.set_result(error.code)

        sending.send("t", b"y", on_delivery=send_in_callback)
        assert outcome.result(PATIENCE_S) is ErrorCode.REQUEST_TIMED_OUT
        cluster.create("missing", 1)
        join(thread)
        sending.flush()
        assert [future.result(0) is not None for future in sent] == [True] * 100
        assert values(cluster, "missing").count(b"x") == 100


@contextmanager
def filled_by_a_missing_topic(
    cluster: FakeCluster, sending: Producer, record_count: int, **record: Any
) -> Iterator[None]:
    """A thread sends large records of a topic that comes at the end of the block, until its room of 15 is taken."""
    sent: list[Future[Any]] = []

    def send_to_missing() -> None:
        for _ in range(record_count):
            sent.append(sending.send("missing", **record))
            time.sleep(0.001)

    thread = threading.Thread(target=send_to_missing)
    thread.start()
    wait_until(lambda: sending._behind_count >= 15)
    yield
    sent_count = len(sent)
    cluster.create("missing", 1)
    join(thread)
    sending.flush()
    assert sent_count <= 15
    assert sending._behind_count == 0
    assert len(values(cluster, "missing")) == record_count


@pytest.mark.parametrize("as_value", [bytes, bytearray])
def test_large_records_fill_the_queue_by_their_size(cluster, monkeypatch, as_value):
    """The queue had room for 4096 of any size, gigabytes beside `buffer_memory`."""
    monkeypatch.setattr(sync_producer, "_QUEUE_MAX", 15)
    goes_on = threading.Event()

    async def answer_later(request: ProduceRequest, node: FakeNode) -> Message:
        while not goes_on.is_set():  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        return node.on_produce(request)

    with producer(cluster, max_block_ms=int(PATIENCE_S * 1000), buffer_memory=50_000) as sending:
        sending.send_and_wait("t", b"y")  # its metadata is known
        cluster.script(ProduceRequest, *[answer_later] * 5)
        sent: list[Future[Any]] = []

        def send_large() -> None:
            sent.extend(sending.send("t", as_value(b"x" * 20_000)) for _ in range(100))

        thread = threading.Thread(target=send_large)
        thread.start()
        wait_until(lambda: len(sending._queue) >= 15)
        time.sleep(0.1)
        count = len(sent)
        goes_on.set()
        join(thread)
        assert count <= 10
        assert all(future.result(PATIENCE_S).offset >= 0 for future in sent)
        assert values(cluster) == [b"y"] + [b"x" * 20_000] * 100


@pytest.mark.parametrize(
    "record",
    [
        {"key": b"x" * 20_000},
        {"value": b"", "key": bytearray(20_000)},
        {"value": b"", "headers": [("h", b"x" * 20_000)]},
        {"value": b"", "headers": [("x" * 10_000, None), ["i", b"x" * 10_000]]},
    ],
)
def test_large_keys_and_headers_fill_the_queue_by_their_size(cluster, monkeypatch, caplog, record):
    """Only values counted."""
    caplog.set_level(logging.CRITICAL, "tidelog")
    monkeypatch.setattr(sync_producer, "_QUEUE_MAX", 15)
    cluster.auto_create_partitions = 0
    with (
        producer(cluster, max_block_ms=int(PATIENCE_S * 1000)) as sending,
        filled_by_a_missing_topic(cluster, sending, 50, **record),
    ):
        time.sleep(0.1)


def test_large_records_of_a_missing_topic_hold_no_large_ones_of_another(cluster, monkeypatch, caplog):
    caplog.set_level(logging.CRITICAL, "tidelog")
    monkeypatch.setattr(sync_producer, "_QUEUE_MAX", 15)
    cluster.auto_create_partitions = 0
    with producer(cluster, max_block_ms=int(PATIENCE_S * 1000)) as sending:
        with filled_by_a_missing_topic(cluster, sending, 100, value=b"x" * 20_000):
            for count in range(30):
                assert sending.send("t", b"y" * 20_000).result(PATIENCE_S).offset == count
        assert values(cluster, "missing") == [b"x" * 20_000] * 100


def test_a_sender_that_waits_for_room_for_a_large_record_ends_with_a_close(cluster, monkeypatch, caplog):
    caplog.set_level(logging.CRITICAL, "tidelog")
    monkeypatch.setattr(sync_producer, "_QUEUE_MAX", 15)
    sending = producer(cluster, buffer_memory=50_000)
    sending.send_and_wait("t", b"y")  # its metadata is known
    cluster.script(ProduceRequest, *[lambda request, node: SILENCE] * 5)
    sent: list[Future[Any]] = []

    def send_large() -> None:
        with suppress(RuntimeError):  # it is closed
            while True:
                sent.append(sending.send("t", b"x" * 20_000))

    thread = threading.Thread(target=send_large)
    thread.start()
    wait_until(lambda: len(sending._queue) >= 15)
    sending.close(timeout_ms=50)
    join(thread)
    assert {type(future.exception(PATIENCE_S)) for future in sent} == {KafkaError}


def test_a_record_of_one_missing_topic_too_many_holds_those_behind_it(cluster, monkeypatch, caplog):
    """Until its topic comes. Those of the other missing topics wait on."""
    caplog.set_level(logging.CRITICAL, "tidelog")
    monkeypatch.setattr(sync_producer, "_MISSING_TOPICS_MAX", 2)
    cluster.auto_create_partitions = 0
    with producer(cluster, max_block_ms=int(PATIENCE_S * 1000)) as sending:
        missing = [sending.send(f"missing-{n}", b"x") for n in range(3)]
        behind = sending.send("t", b"y")
        wait_until(lambda: sending._wait is not None)
        assert list(sending._topic_waits) == ["missing-0", "missing-1"]
        assert not behind.done()
        cluster.create("missing-2", 1)
        assert [future.result(PATIENCE_S).offset for future in (missing[2], behind)] == [0, 0]
        sending.close(0)
        assert [type(future.exception(0)) for future in missing[:2]] == [KafkaError] * 2


def test_records_of_a_missing_topic_fail_where_an_interrupt_comes_before_the_close_begins(cluster, monkeypatch):
    """The interceptors learn of each, too: they had seen it in `send`, and got no acknowledgement."""
    acknowledged: list[Any] = []

    class Noting(ProducerInterceptor):
        def on_acknowledgement(self, metadata: Any, error: Any) -> None:
            acknowledged.append(error)

    cluster.auto_create_partitions = 0
    with producer(cluster, max_block_ms=int(PATIENCE_S * 1000), interceptors=[Noting()]) as sending:
        missing = [sending.send("missing", b"x") for _ in range(3)]
        wait_until(lambda: sending._behind_count == 2)

        def interrupt(call: Coroutine[Any, Any, None], _: object) -> None:
            call.close()
            raise KeyboardInterrupt

        assert sending._thread is not None
        monkeypatch.setattr(sending._thread, "run", interrupt)
        with pytest.raises(KeyboardInterrupt):
            sending.close()
        assert [type(future.exception(PATIENCE_S)) for future in missing] == [KafkaError] * 3
    assert [type(error) for error in acknowledged] == [KafkaError] * 3


def test_a_record_that_its_serializer_refuses_has_an_outcome_where_a_close_is_interrupted_before_it(
    cluster, monkeypatch
):
    def refuse(value: object) -> bytes:
        raise ValueError

    with producer(cluster, value_serializer=refuse) as sending:
        sending.start()
        sending._is_draining = True  # the loop comes to the queue later
        refused = sending.send("t", b"x")

        def interrupt(call: Coroutine[Any, Any, None], _: object) -> None:
            call.close()
            raise KeyboardInterrupt

        assert sending._thread is not None
        monkeypatch.setattr(sending._thread, "run", interrupt)
        with pytest.raises(KeyboardInterrupt):
            sending.close()
        assert isinstance(refused.exception(PATIENCE_S), KafkaError)


def test_an_abort_of_a_producer_without_transactions_drops_no_record(cluster):
    with producer(cluster) as sending:
        sending.start()
        futures = [sending.send("t", b"x") for _ in range(1_000)]
        with pytest.raises(RuntimeError, match="has no transactions"):
            sending.abort_transaction()
        assert futures[-1].result(PATIENCE_S).offset == 999


@pytest.mark.slow
def test_a_topic_that_came_late_takes_records_again(cluster, caplog):
    caplog.set_level(logging.CRITICAL, "tidelog")
    cluster.auto_create_partitions = 0
    with producer(cluster, max_block_ms=500) as sending:
        for _ in range(2):
            assert isinstance(sending.send("late", b"x").exception(PATIENCE_S), KafkaError)
        cluster.auto_create_partitions = 1
        assert sending.send("late", b"x").result(PATIENCE_S).offset == 0
        assert sending._missing_since == {}


def test_a_second_close_in_another_thread_takes_nothing_from_the_first(cluster):
    reached, released = threading.Event(), threading.Event()

    async def late(request: Any, node: Any) -> Any:
        reached.set()
        await asyncio.to_thread(released.wait, PATIENCE_S)
        return node.on_produce(request)

    cluster.script(ProduceRequest, late)
    # The memory holds few records, so the others stay in the queue to the loop.
    sending = producer(cluster, buffer_memory=2_000, batch_size=200)
    sent = [sending.send("t", b"x" * 100) for _ in range(100)]
    assert reached.wait(PATIENCE_S)
    closing = [threading.Thread(target=sending.close, daemon=True) for _ in range(2)]
    for thread in closing:
        thread.start()
    time.sleep(0.05)
    assert not any(future.done() for future in sent)
    released.set()
    for thread in closing:
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
    assert [future.result(0).offset for future in sent] == list(range(100))


def test_a_callback_that_closes_the_producer_while_it_closes_does_not_stop_it(cluster):
    with producer(cluster, linger_ms=100) as sending:
        outcome: Future[Any] = Future()

        def close(_: Any) -> None:
            try:
                sending.close()
                outcome.set_result(None)
            except RuntimeError as error:
                outcome.set_result(error)

        sending.send("t", b"1").add_done_callback(close)
    assert outcome.done()


def test_a_signal_handler_may_close_the_producer_in_any_call(cluster):
    sending = producer(cluster)

    def send_until_closed() -> None:
        while True:
            sending.send("t", b"x")
            sending.flush()

    before = signal.signal(signal.SIGUSR1, lambda *_: sending.close())
    try:
        main = threading.main_thread().ident
        assert main is not None
        interrupt = threading.Timer(0.05, signal.pthread_kill, (main, signal.SIGUSR1))
        interrupt.start()
        with pytest.raises(RuntimeError, match="closed"):
            send_until_closed()
        sending.close()
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_transaction_is_detached_with_the_records_that_were_queued(cluster):
    finalize(cluster, 2)
    with producer(cluster, transactional_id="tx") as sending:
        sending.begin_transaction()
        for value in numbered(10):
            sending.send("t", value)
        detached = sending.detach_transaction()
        assert detached is not None
        assert detached.transactional_id == "tx"
        assert values(cluster) == numbered(10)


def test_a_loop_that_is_busy_with_records_is_not_woken_for_each(cluster, monkeypatch):
    with producer(cluster, linger_ms=10) as sending:
        sending.send_and_wait("t", b"first")
        wake_ups: list[Any] = []
        wake = sending._wake_loop

        def count_and_wake(thread: LoopThread) -> None:
            wake_ups.append(thread)
            wake(thread)

        monkeypatch.setattr(sending, "_wake_loop", count_and_wake)
        monkeypatch.setattr(sending, "_drain_interval_s", PATIENCE_S)
        sending.send("t", b"second").result(PATIENCE_S)
        assert wake_ups
        wake_ups.clear()
        sent = [sending.send("t", value) for value in numbered(1_000)]
        assert not wake_ups  # the loop looks at the queue again by itself
        # A thread that waits does not wait for that.
        assert sent[-1].result(PATIENCE_S).offset == 1_001
        assert len(wake_ups) == 1


def test_the_future_of_a_record_is_one_of_the_standard_library(cluster):
    with producer(cluster) as sending:
        first, second = sending.send("t", b"1"), sending.send("t", 17)
        assert not first.cancel()
        done, pending = concurrent.futures.wait([first, second], PATIENCE_S)
        assert (len(done), len(pending)) == (2, 0)
        assert first.result().offset == 0
        assert isinstance(second.exception(), TypeError)
        with pytest.raises(TypeError, match="value must be bytes"):
            second.result()
        more = [sending.send("t", value) for value in numbered(50)]
        offsets = [future.result().offset for future in concurrent.futures.as_completed(more, PATIENCE_S)]
        assert sorted(offsets) == list(range(1, 51))

        async def on_another_loop() -> int:
            return (await asyncio.wrap_future(sending.send("t", b"x"))).offset

        assert asyncio.run(on_another_loop()) == 51
        called: list[Any] = []
        first.add_done_callback(called.append)  # it is done already
        assert called == [first]
        cluster.script(ProduceRequest, lambda request, node: SILENCE)
        late = sending.send("t", b"x")
        with pytest.raises(TimeoutError):
            late.result(0.01)
        assert not late.done()
        sending.close(0)
        assert isinstance(late.exception(PATIENCE_S), KafkaError)


def test_many_threads_wait_each_for_its_own_record(cluster):
    outcomes: list[int] = []
    with producer(cluster) as sending:

        def send_and_wait() -> None:
            outcomes.extend(sending.send_and_wait("t", b"x").offset for _ in range(50))

        threads = [threading.Thread(target=send_and_wait) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE_S)
    assert sorted(outcomes) == list(range(400))


@pytest.mark.parametrize(
    "wait_for",
    [
        lambda sent: sent.result(),
        lambda sent: concurrent.futures.wait([sent], timeout=1),
        lambda sent: list(concurrent.futures.as_completed([sent], timeout=1)),
    ],
    ids=["result", "wait", "as_completed"],
)
def test_a_callback_that_waits_for_a_record_is_refused_and_does_not_stop_the_loop(cluster, wait_for):
    outcome: Future[Any] = Future()
    with producer(cluster) as sending:

        def wait(_: Any) -> None:
            try:
                outcome.set_result(wait_for(sending.send("t", b"2")))
            except RuntimeError as error:
                outcome.set_result(error)

        sending.send("t", b"1").add_done_callback(wait)
        assert isinstance(outcome.result(PATIENCE_S), RuntimeError)
    assert values(cluster) == [b"1", b"2"]


def test_a_callback_that_raises_what_is_no_exception_stops_no_other_record(cluster, caplog):
    """An `asyncio.CancelledError` and a SystemExit pass through a future of the standard library."""

    def cancel(_: object) -> None:
        raise asyncio.CancelledError

    def leave(_: object) -> None:
        raise SystemExit

    calls: list[object] = []
    with producer(cluster, linger_ms=60_000) as sending:
        futures = [sending.send("t", b"1", partition=0) for _ in range(4)]
        futures[0].add_done_callback(cancel)
        futures[1].add_done_callback(leave)
        futures[1].add_done_callback(calls.append)
        many = sending.send_many("t", [b"2"] * 2)
        many.add_done_callback(leave)
        sending.flush()
        assert [future.result(PATIENCE_S).offset for future in futures] == [0, 1, 2, 3]
        assert many.result(PATIENCE_S)
        assert calls == [futures[1]]
    assert caplog.text.count("raised") == 3


# -- futures of records in batches, which the loop tells of their outcome once another thread has asked


def test_a_record_that_waited_for_its_place_has_its_own_offset(cluster):
    """After eight new batches a record waits for a turn of the loop, and joins a batch with others."""
    cluster.create("many", 8)
    with producer(cluster, linger_ms=60_000) as sending:
        firsts = [sending.send("many", b"x", partition=partition) for partition in range(8)]
        seconds = [sending.send("many", b"x", partition=partition) for partition in range(8)]
        sending.flush()
        assert [future.result(PATIENCE_S).offset for future in firsts] == [0] * 8
        assert [future.result(PATIENCE_S).offset for future in seconds] == [1] * 8


def test_a_callback_that_comes_during_a_close_is_called_before_its_end_and_may_not_wait(cluster):
    cluster.create("two", 2)
    gates: list[asyncio.Event] = []
    loops: list[asyncio.AbstractEventLoop] = []

    def wait(request: Any, node: Any) -> Any:
        gate = asyncio.Event()
        gates.append(gate)
        loops.append(asyncio.get_running_loop())

        async def answer() -> Any:
            await gate.wait()
            return node.on_produce(request)

        return answer()

    def open_gate(number: int) -> None:
        gates[number].set()

    cluster.script(ProduceRequest, wait, wait)
    with producer(cluster) as sending:
        first = sending.send("two", b"x", partition=0)
        wait_until(lambda: len(gates) == 1)
        second = sending.send("two", b"x", partition=1)
        wait_until(lambda: not sending._queue)
        closing = threading.Thread(target=sending.close, daemon=True)
        closing.start()
        wait_until(lambda: sending._closed)
        outcomes: list[Any] = []

        def wait_in_callback(_: Any) -> None:
            calls: list[Callable[[], Any]] = [lambda: second.result(5), sending.flush, sending.close]
            for call in calls:
                try:
                    outcomes.append(call())
                except Exception as error:
                    outcomes.append(error)

        first.add_done_callback(wait_in_callback)
        loops[0].call_soon_threadsafe(open_gate, 0)
        wait_until(lambda: len(outcomes) == 3)
        assert all(isinstance(outcome, RuntimeError) for outcome in outcomes), outcomes
        assert closing.is_alive()
        wait_until(lambda: len(gates) == 2)
        loops[0].call_soon_threadsafe(open_gate, 1)
        join(closing)
        assert second.result(0).offset == 0


@pytest.mark.parametrize("is_before_the_end", [True, False])
def test_what_the_loop_did_not_come_to_is_told_by_the_thread_that_closes_or_asks(cluster, is_before_the_end):
    called: list[Any] = []
    with producer(cluster) as sending:
        future: Any = sending.send("t", b"x")
        sending.flush()
        if is_before_the_end:  # as if the loop had taken the call, and had ended before
            sending._observing._is_asked = True
            future.call_when_done(called.append)
            sending._to_observe.append(future)
    if not is_before_the_end:
        future.call_when_done(called.append)
        sending._observe_on_loop(future)
    assert not sending._to_observe
    assert called == [future]


@pytest.mark.parametrize("in_thread", [False, True], ids=["itself", "for a thread that does"])
@pytest.mark.parametrize("wait", [Producer.flush, Producer.close], ids=lambda wait: wait.__name__)
@pytest.mark.parametrize("kind", ["records", "groups", "refused records"])
def test_a_signal_handler_inside_a_wait_for_records_may_wait_for_the_producer(cluster, kind, wait, in_thread):
    """`concurrent.futures.wait` has what it takes for the locks of its futures while it looks at them."""
    with producer(cluster) as sending:

        def send() -> Any:
            if kind == "groups":
                return sending.send_many("t", [b"x", b"y"])
            return sending.send("t", b"x" if kind == "records" else object())

        futures = [send() for _ in range(3)]
        called: list[Any] = []
        for future in futures:
            future.add_done_callback(called.append)

        def handle() -> None:
            with futures[0]._condition, futures[1]._condition:
                if in_thread:
                    waiting = threading.Thread(target=wait, args=(sending,), daemon=True)
                    waiting.start()
                    join(waiting)
                else:
                    wait(sending)
                assert all(future.done() for future in futures)

        handling = threading.Thread(target=handle, daemon=True)
        handling.start()
        join(handling)
        wait_until(lambda: len(called) == 3)
        assert set(called) == set(futures)


@pytest.mark.parametrize("end", [Producer.flush, Producer.close], ids=lambda end: end.__name__)
@pytest.mark.parametrize(
    ("kind", "part"),
    [("_AS_COMPLETED", "event"), ("_AS_COMPLETED", "lock"), ("FIRST_COMPLETED", "event"), ("ALL_COMPLETED", "event")],
)
def test_a_signal_handler_inside_the_wait_of_a_waiter_may_wait_for_the_producer(cluster, kind, part, end):
    """`Event.wait` has the event's lock for moments, and `as_completed` that of its waiter."""
    base: Any = concurrent.futures._base
    with producer(cluster, linger_ms=60_000) as sending:
        future: Any = sending.send("t", b"x")
        with future._condition:
            waiter = base._create_and_install_waiters([future], getattr(base, kind))
        kept = waiter.lock if part == "lock" else getattr(waiter.event, "_cond", nullcontext())

        def handle() -> None:
            with kept:
                end(sending)
                assert future.done()

        handling = threading.Thread(target=handle, daemon=True)
        handling.start()
        join(handling)
        assert waiter.event.wait(PATIENCE_S)
        assert waiter.finished_futures == [future]


def test_an_interrupt_before_the_loop_is_called_leaves_it_to_the_next_one(cluster):
    with producer(cluster, linger_ms=60_000) as sending:
        future: Any = sending.send("t", b"x")
        wait_until(lambda: future._delivery is not None)
        thread = sending._thread
        with pytest.MonkeyPatch.context() as patch:

            class Interrupted:
                @property
                def loop(self) -> Any:
                    raise KeyboardInterrupt

            patch.setattr(sending, "_thread", Interrupted())
            with pytest.raises(KeyboardInterrupt):
                sending._observe_on_loop(future)
        assert sending._thread is thread
        called = threading.Event()
        future.add_done_callback(lambda _: called.set())
        sending.flush()
        assert called.wait(PATIENCE_S)


def test_an_interrupt_before_the_loop_is_called_takes_nothing_from_another_thread(cluster, monkeypatch):
    with producer(cluster, linger_ms=60_000) as sending:
        futures: list[Any] = [sending.send("t", b"x") for _ in range(2)]
        wait_until(lambda: futures[1]._delivery is not None)
        called = threading.Event()
        thread = sending._thread
        assert thread is not None

        class Interrupted:
            @property
            def loop(self) -> Any:
                monkeypatch.setattr(sending, "_thread", thread)
                other = threading.Thread(target=futures[1].add_done_callback, args=(lambda _: called.set(),))
                other.start()
                join(other)
                raise KeyboardInterrupt

        monkeypatch.setattr(sending, "_thread", Interrupted())
        with pytest.raises(KeyboardInterrupt):
            sending._observe_on_loop(futures[0])
        sending.flush()
        assert called.wait(PATIENCE_S)


def test_an_interrupted_wake_up_of_the_loop_leaves_no_record_of_another_thread_unsent(cluster, monkeypatch):
    with producer(cluster) as sending:
        sending.send("t", b"first").result(PATIENCE_S)
        wait_until(lambda: not sending._is_draining)
        sent: list[Future[Any]] = []

        def ask(*_: Any) -> None:
            other = threading.Thread(target=lambda: sent.append(sending.send("t", b"other")))
            other.start()
            join(other)
            monkeypatch.undo()
            raise KeyboardInterrupt

        monkeypatch.setattr(SharedCall, "ask", ask)
        with pytest.raises(KeyboardInterrupt):
            sending.send("t", b"interrupted")
        assert concurrent.futures.wait(sent, PATIENCE_S).done == set(sent)
    assert values(cluster) == [b"first", b"interrupted", b"other"]


def test_a_close_that_is_interrupted_before_it_begins_on_the_loop_leaves_no_future_without_an_outcome(
    cluster, monkeypatch
):
    cluster.script(ProduceRequest, *[lambda request, node: SILENCE] * 5)
    sending = producer(cluster)
    future = sending.send("t", b"x")
    called, interrupted = threading.Event(), threading.Event()
    future.add_done_callback(lambda _: called.set())
    wait_until(lambda: cluster.sent(ProduceRequest))
    usual_cancel, usual_result = LoopCall.cancel, LoopCall.result

    def cancel(call: LoopCall[Any]) -> None:
        usual_cancel(call)
        interrupted.set()

    def result(call: LoopCall[Any]) -> Any:
        if interrupted.is_set():
            return usual_result(call)
        raise KeyboardInterrupt

    monkeypatch.setattr(LoopCall, "cancel", cancel)
    monkeypatch.setattr(LoopCall, "result", result)
    sending._call_on_loop(lambda: interrupted.wait(PATIENCE_S))
    with pytest.raises(KeyboardInterrupt):
        sending.close()
    assert called.wait(PATIENCE_S)
    assert isinstance(future.exception(0), KafkaError)


def test_an_interrupted_close_leaves_no_future_without_an_outcome(cluster):
    cluster.script(ProduceRequest, *[lambda request, node: SILENCE] * 5)
    sending = producer(cluster)
    future = sending.send("t", b"x")
    called = threading.Event()
    future.add_done_callback(lambda _: called.set())
    wait_until(lambda: cluster.sent(ProduceRequest))

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        with pytest.raises(KeyboardInterrupt):
            sending.close()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert called.wait(PATIENCE_S)
    assert isinstance(future.exception(0), KafkaError)
