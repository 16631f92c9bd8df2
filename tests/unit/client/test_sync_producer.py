"""The blocking producer: one order whichever way records are sent, callbacks that send, and futures that all end."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import pytest

from tests.patience import PATIENCE_S
from tests.unit.client.fake_broker import SILENCE, FakeCluster
from tests.unit.client.test_producer import FAST, numbered, values
from tidelog.client.model import RecordMetadata
from tidelog.client.sync import Producer, loop_thread
from tidelog.client.sync.loop_thread import LoopThread
from tidelog.protocol.errors import KafkaError
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
        assert isinstance(future.exception(PATIENCE_S), (KafkaError, RuntimeError))
    with pytest.raises(RuntimeError, match="closed"):
        sending.send("t", b"x")


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
        def __init__(self) -> None:
            super().__init__()
            made.append(self)

    monkeypatch.setattr(loop_thread, "LoopThread", Counted)
    with_all = producer(cluster)

    def first() -> None:
        barrier.wait()
        with_all.send("t", b"x").result(PATIENCE_S)

    threads = [threading.Thread(target=first) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with_all.close()
    assert len(made) == 1
    assert len(values(cluster)) == 4


def test_records_of_a_missing_topic_wait_at_the_same_time_and_do_not_keep_others_for_long(cluster, caplog):
    caplog.set_level(logging.CRITICAL, "tidelog")
    count = 40
    cluster.auto_create_partitions = 0
    with producer(cluster, max_block_ms=2_000) as sending:
        missing = [sending.send("missing", b"x") for _ in range(count)]
        there = sending.send("t", b"y")
        began = time.monotonic()
        assert there.result(PATIENCE_S).offset == 0
        assert 1 < time.monotonic() - began < count  # one after another they take twice that
        outcomes = {type(future.exception(0)) for future in missing}
        assert outcomes == {KafkaError}


def test_a_topic_that_came_late_takes_records_again(cluster, caplog):
    caplog.set_level(logging.CRITICAL, "tidelog")
    cluster.auto_create_partitions = 0
    with producer(cluster, max_block_ms=500) as sending:
        for _ in range(2):
            assert isinstance(sending.send("late", b"x").exception(PATIENCE_S), KafkaError)
        cluster.auto_create_partitions = 1
        assert sending.send("late", b"x").result(PATIENCE_S).offset == 0
        assert sending._missing_since == {}
