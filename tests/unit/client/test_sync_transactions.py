"""The blocking transactional producer: what was queued before the end belongs to the transaction, and nothing later."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any

import pytest

from tests.patience import PATIENCE_S, join, wait_until
from tests.unit.client.fake_broker import SILENCE, FakeCluster, refuse_produce
from tests.unit.client.test_producer import FAST, numbered
from tests.unit.client.test_transaction_offsets import Lost
from tests.unit.client.transacting import cluster_of, limited, refuse_end, story
from tidelog.client import (
    BatchSendError,
    ConsumerGroupMetadata,
    ProducerFenced,
    ProducerInterceptor,
    ProducerRecord,
    TopicPartition,
    TransactionAbortable,
    TransactionAborted,
)
from tidelog.client.sync import Producer, producer
from tidelog.client.sync.loop_thread import LoopThread
from tidelog.protocol.errors import ErrorCode, KafkaError
from tidelog.protocol.messages.end_txn import EndTxnRequest
from tidelog.protocol.messages.produce import ProduceRequest


@pytest.fixture(params=[1, 2])
def cluster(request: pytest.FixtureRequest) -> Iterator[FakeCluster]:
    """A cluster of either version, on a loop of its own."""

    async def make() -> FakeCluster:
        return await cluster_of(request.param).__aenter__()

    thread = LoopThread()
    fake = thread.run(make())
    yield fake
    thread.run(fake.__aexit__())
    thread.stop()


def transactional(cluster: FakeCluster, **options: Any) -> Producer:
    return Producer(
        **{"bootstrap_servers": cluster.bootstrap, "linger_ms": 0, "transactional_id": "tx", **FAST, **options}
    )


def test_a_block_commits_everything_that_was_queued_in_it(cluster):
    with transactional(cluster) as sending:
        for start in (0, 3_000):
            with sending.transaction():
                for number in range(start, start + 3_000):
                    sending.send("t", b"%d" % number, partition=0)
        assert cluster.transactions.committed == numbered(6_000)
        assert cluster.transactions.ends == ["commit", "commit"]


def test_an_interrupted_block_ends_soon_while_its_abort_gets_no_answer(cluster):
    """Ctrl-C in a block took `max_block_ms` while a broker hung."""
    interrupted, began = threading.Event(), threading.Event()

    def work(sending: Producer) -> None:
        with suppress(KeyboardInterrupt), sending.transaction():
            sending.send_and_wait("t", b"1", partition=0)
            cluster.script(EndTxnRequest, *[refuse_end(ErrorCode.NOT_COORDINATOR)] * 100_000)
            began.set()
            raise KeyboardInterrupt
        interrupted.set()

    with transactional(cluster, max_block_ms=600_000) as sending:
        thread = threading.Thread(target=work, args=(sending,))
        thread.start()
        assert began.wait(PATIENCE_S)
        try:
            assert interrupted.wait(PATIENCE_S)
            assert cluster.transactions.ends == []
        finally:
            cluster.scripts.clear()
            join(thread)
        with sending.transaction():  # waits for the abort
            sending.send("t", b"next", partition=0)
        assert cluster.transactions.ends == ["abort", "commit"]
        assert cluster.transactions.committed == [b"next"]


def test_a_block_that_raises_aborts_what_was_queued_in_it(cluster):
    futures: list[Future[Any]] = []

    def work(sending: Producer) -> None:
        with sending.transaction():
            futures.extend(sending.send("t", b"dropped", partition=0) for _ in range(3_000))
            raise ZeroDivisionError

    with transactional(cluster) as sending:
        with pytest.raises(ZeroDivisionError):
            work(sending)
        with sending.transaction():
            sending.send("t", b"next", partition=0)
    assert cluster.transactions.committed == [b"next"]
    errors = [future.exception(PATIENCE_S) for future in futures]
    assert {type(error) for error in errors} <= {type(None), TransactionAborted}


def test_a_record_that_nobody_waits_for_still_decides(cluster):
    with transactional(cluster, max_request_size=2_000) as sending:
        for value in (bytes(3_000), "no bytes"):
            sending.begin_transaction()
            sending.send("t", value)
            with pytest.raises(TransactionAbortable, match="was not sent"):
                sending.commit_transaction()
            sending.abort_transaction()
        cluster.script(ProduceRequest, refuse_produce(ErrorCode.INVALID_RECORD))
        with pytest.raises(TransactionAbortable, match="INVALID_RECORD"), sending.transaction():
            sending.send("t", b"1", partition=0)
    assert cluster.transactions.committed == []


def test_offsets_and_a_fenced_producer(cluster):
    with transactional(cluster) as first, transactional(cluster) as second:
        first.init_transactions()
        with first.transaction():
            first.send_offsets_to_transaction({TopicPartition("t", 0): 3}, ConsumerGroupMetadata("g"))
        assert cluster.transactions.committed_offsets == {("g", "t", 0): 3}
        first.begin_transaction()
        first.send_and_wait("t", b"1", partition=0)
        second.init_transactions()
        with pytest.raises(ProducerFenced):
            first.commit_transaction()
    assert story(cluster).count("init") == 2


def test_a_consumer_that_is_no_member_makes_the_transaction_abortable(cluster):
    with transactional(cluster) as sending:
        sending.begin_transaction()
        with pytest.raises(TransactionAbortable, match="not a member"):
            sending.send_offsets_to_transaction({TopicPartition("t", 0): 3}, Lost())
        with pytest.raises(TransactionAbortable, match="not a member"):
            sending.commit_transaction()
        sending.abort_transaction()
    assert cluster.transactions.committed_offsets == {}


def test_an_abort_drops_the_record_that_waits_for_its_topic(cluster):
    """It would hold back the next transaction for max_block_ms, and then make that one abortable."""
    cluster.auto_create_partitions = 0
    with transactional(cluster, max_block_ms=20_000) as sending:
        sending.begin_transaction()
        waiting = sending.send("missing", b"dropped")
        behind = sending.send("missing", b"dropped too", partition=0)
        while not sending._topic_waits:
            time.sleep(0.001)
        sending.abort_transaction()
        with sending.transaction():
            sending.send("t", b"next", partition=0)
        for future in (waiting, behind):
            assert isinstance(future.exception(PATIENCE_S), TransactionAborted)
    assert cluster.transactions.committed == [b"next"]


def test_an_abort_drops_large_records_that_the_loop_has_not_taken(cluster):
    """They take more than one entry in the queue."""
    with transactional(cluster) as sending:
        sending.begin_transaction()
        sending._is_draining = True  # the loop comes to the queue later
        dropped = [sending.send("t", bytes(100_000), partition=0) for _ in range(2)]
        sending.abort_transaction()
        for future in dropped:
            assert isinstance(future.exception(PATIENCE_S), TransactionAborted)
        with sending.transaction():
            sending.send("t", b"next", partition=0)
    assert cluster.transactions.committed == [b"next"]


def test_an_abort_ends_though_a_delivery_callback_sends_what_it_drops_again(cluster):
    """The loop dropped these records too, without end: neither the abort nor any other call returned."""
    cluster.auto_create_partitions = 0
    outcomes: list[BaseException | None] = []

    def send_again(_: object, error: BaseException | None) -> None:
        outcomes.append(error)
        if isinstance(error, TransactionAborted) and len(outcomes) < 1_000:
            sending.send("t", b"again", partition=0, on_delivery=send_again)

    with transactional(cluster, max_block_ms=20_000) as sending:
        sending.begin_transaction()
        sending.send("missing", b"waits", partition=0)
        sending.send("missing", b"behind", partition=0, on_delivery=send_again)
        while not sending._topic_waits:
            time.sleep(0.001)
        sending.abort_transaction()
        with sending.transaction():
            sending.send("t", b"next", partition=0)
    assert len(outcomes) < 10
    assert None not in outcomes
    assert cluster.transactions.committed == [b"next"]


@pytest.mark.parametrize("has_block", [True, False])
def test_what_a_delivery_callback_sends_again_during_an_abort_is_no_part_of_the_next_transaction(cluster, has_block):
    cluster.auto_create_partitions = 0
    again: list[Future[Any]] = []

    def send_again(*_: object) -> None:
        again.extend(sending.send("t", b"again", partition=0) for _ in range(2_000))

    with transactional(cluster, max_block_ms=20_000) as sending:
        sending.begin_transaction()
        sending.send("missing", b"waits", partition=0, on_delivery=send_again)
        wait_until(lambda: bool(sending._topic_waits))
        sending.abort_transaction()
        if has_block:
            with sending.transaction():
                sending.send("t", b"next", partition=0)
        else:
            sending.begin_transaction()
            sending.send("t", b"next", partition=0)
            sending.commit_transaction()
    assert len(again) == 2_000
    assert None not in {future.exception(PATIENCE_S) for future in again}
    assert cluster.transactions.committed == [b"next"]


@pytest.mark.parametrize("has_block", [True, False])
@pytest.mark.parametrize("transactional_id", ["tx", None])
def test_a_begin_that_is_refused_waits_for_no_record(cluster, has_block, transactional_id, caplog):
    caplog.set_level(logging.CRITICAL, "tidelog")
    cluster.auto_create_partitions = 0
    with transactional(cluster, max_block_ms=20_000, transactional_id=transactional_id) as sending:
        sending.start()
        if transactional_id is not None:
            sending.begin_transaction()
        waiting = sending.send("missing", b"x")
        wait_until(lambda: bool(sending._topic_waits))
        begin = sending.transaction().__enter__ if has_block else sending.begin_transaction
        with pytest.raises(RuntimeError, match=r"is open already|has no transactions"):
            begin()
        assert not waiting.done()
        sending.close(0)


@pytest.mark.parametrize("topic", ["t", "missing"])
def test_close_does_not_wait_for_records_that_cannot_be_committed(topic, cluster):
    """It waited for their delivery, for delivery_timeout_ms, and then for the abort."""
    cluster.auto_create_partitions = 0
    sending = transactional(cluster)
    sending.start()
    sending.begin_transaction()
    cluster.script(ProduceRequest, *[lambda request, node: SILENCE] * 10)
    futures = [sending.send(topic, b"%d" % number) for number in range(2)]
    wait_until(lambda: bool(cluster.sent(ProduceRequest) or sending._topic_waits))
    began_s = time.monotonic()
    with limited(sending._producer, max_block_ms=300):
        sending.close()
    assert time.monotonic() - began_s < PATIENCE_S / 2
    assert all(isinstance(future.exception(0), KafkaError) for future in futures)


@pytest.mark.parametrize("has_block", [False, True])
@pytest.mark.parametrize("is_in_time", [False, True])
def test_close_waits_for_the_commit_of_another_thread_that_waits_for_a_record(is_in_time, has_block, cluster):
    """It aborted the transaction, and the commit raised. Java's close lets the commit end."""
    cluster.auto_create_partitions = 0
    sending = transactional(cluster, max_block_ms=60_000)
    sending.start()
    sending.init_transactions()
    errors: list[BaseException | None] = []

    def commit() -> None:
        try:
            if has_block:
                with sending.transaction():
                    sending.send("late", b"1", partition=0)
            else:
                sending.begin_transaction()
                sending.send("late", b"1", partition=0)
                sending.commit_transaction()
            errors.append(None)
        except BaseException as error:
            errors.append(error)

    committing = threading.Thread(target=commit, daemon=True)
    committing.start()
    wait_until(lambda: sending._behind_count == 1)  # the commit, behind the record
    closing = threading.Thread(target=sending.close, args=(None if is_in_time else 100,), daemon=True)
    closing.start()
    if is_in_time:
        wait_until(lambda: sending._behind_count == 2)
        cluster.create("late", 1)
    join(closing)
    join(committing)
    if is_in_time:
        assert errors == [None]
        assert cluster.transactions.ends == ["commit"]
    else:
        assert isinstance(errors[0], (RuntimeError, TransactionAborted))
        assert cluster.transactions.ends != ["commit"]


@pytest.mark.parametrize("has_block", [False, True])
@pytest.mark.parametrize("records", range(6))
def test_close_lets_a_commit_begin_whose_records_it_has_drained(records, has_block, monkeypatch, cluster):
    """It began at once when its own drain reached what the commit had waited for, and the commit raised."""
    monkeypatch.setattr(producer, "_RECORDS_PER_DRAIN", 1)
    sending = transactional(cluster)
    sending.start()
    sending.init_transactions()
    sending.partitions_for("t")
    block = sending.transaction()
    if has_block:
        block.__enter__()
    else:
        sending.begin_transaction()
    thread, may_go_on, errors = sending._thread, threading.Event(), []
    assert thread is not None

    def commit() -> None:
        try:
            if has_block:
                block.__exit__(None, None, None)
            else:
                sending.commit_transaction()
        except BaseException as error:
            errors.append(error)

    thread.loop.call_soon_threadsafe(may_go_on.wait, PATIENCE_S)
    futures = [sending.send("t", b"%d" % number, partition=0) for number in range(records)]
    calls = [threading.Thread(target=call, daemon=True) for call in (commit, sending.close)]
    for count, call in enumerate(calls, 1):
        call.start()
        wait_until(partial(lambda sent: len(thread._calls) == sent, count))
    time.sleep(0.01)  # until the call is on its way to the loop
    may_go_on.set()
    for call in calls:
        join(call)
    assert errors == []
    assert cluster.transactions.ends == ["commit"] * bool(records)
    assert all(future.exception(0) is None for future in futures)


def test_an_abort_ends_a_flush_behind_the_record_that_waits_for_its_topic(cluster):
    cluster.auto_create_partitions = 0
    with transactional(cluster, max_block_ms=20_000) as sending:
        sending.begin_transaction()
        futures = [sending.send(topic, b"dropped") for topic in ("missing", "missing", "another")]
        flushing = threading.Thread(target=sending.flush, daemon=True)
        flushing.start()
        wait_until(lambda: sending._behind_count == 3)  # a record, and the flush behind each topic
        sending.abort_transaction()
        join(flushing)
        for future in futures:
            assert isinstance(future.exception(PATIENCE_S), TransactionAborted)
        assert sending._behind_count == 0
        with sending.transaction():
            sending.send("t", b"next", partition=0)
    assert cluster.transactions.committed == [b"next"]


class Acknowledgements(ProducerInterceptor):
    def __init__(self) -> None:
        self.sent_count = 0
        self.errors: list[Exception | None] = []

    def on_send(self, topic: str, record: ProducerRecord) -> ProducerRecord:
        self.sent_count += 1
        return record

    def on_acknowledgement(self, metadata: Any, error: Exception | None) -> None:
        self.errors.append(error)


def test_two_aborts_at_once_tell_an_interceptor_once_of_a_record_that_waits(cluster):
    cluster.auto_create_partitions = 0
    noting = Acknowledgements()
    with transactional(cluster, max_block_ms=20_000, interceptors=[noting]) as sending:
        sending.begin_transaction()
        waiting = sending.send("missing", b"dropped")
        wait_until(lambda: bool(sending._topic_waits))
        assert sending._thread is not None
        goes_on = threading.Event()
        sending._thread.loop.call_soon_threadsafe(goes_on.wait, PATIENCE_S)
        calls = sending._thread._calls

        def abort() -> None:
            with suppress(RuntimeError):  # the other call may have ended the transaction
                sending.abort_transaction()

        aborting = [threading.Thread(target=abort, daemon=True) for _ in range(2)]
        for thread in aborting:
            thread.start()
        wait_until(lambda: len(calls) == 2)
        goes_on.set()
        for thread in aborting:
            join(thread)
        assert isinstance(waiting.exception(PATIENCE_S), TransactionAborted)
    assert [type(error) for error in noting.errors] == [TransactionAborted]


def test_records_that_an_iterator_has_given_while_another_thread_aborts_are_counted_and_acknowledged(cluster):
    """They counted neither as written nor as failed."""
    noting = Acknowledgements()

    def records() -> Iterator[bytes]:
        yield from numbered(300)  # a piece, and a part of the next one
        thread = threading.Thread(target=sending.abort_transaction, daemon=True)
        thread.start()
        join(thread)
        yield b"300"

    with transactional(cluster, interceptors=[noting]) as sending:
        sending.begin_transaction()
        error = sending.send_many("t", records()).exception(PATIENCE_S)
    assert isinstance(error, BatchSendError)
    assert sum(written.record_count for written in error.written) + error.failed_count == 301
    assert noting.sent_count == len(noting.errors) == 301


def test_what_an_iterator_gives_after_another_thread_has_aborted_is_no_part_of_the_next_transaction(cluster):
    def begin_anew() -> None:
        sending.abort_transaction()
        sending.begin_transaction()

    def records() -> Iterator[bytes]:
        yield from numbered(300)  # a piece, and a part of the next one
        thread = threading.Thread(target=begin_anew, daemon=True)
        thread.start()
        join(thread)
        yield b"late"

    with transactional(cluster) as sending:
        sending.begin_transaction()
        assert isinstance(sending.send_many("t", records()).exception(PATIENCE_S), BatchSendError)
        sending.send("t", b"next", partition=0)
        sending.commit_transaction()
    assert cluster.transactions.committed == [b"next"]


def test_a_record_that_another_thread_sends_behind_a_commit_does_not_fail_it(cluster, monkeypatch):
    """The commit has waited for what was queued before it. The record of a new topic behind it is not a part of it."""
    with transactional(cluster) as sending:
        sending.begin_transaction()
        sending.send("t", b"committed", partition=0)
        behind: list[Future[Any]] = []
        drain_queue = sending._drain_queue

        async def drain_and_queue_another() -> None:
            monkeypatch.undo()
            await drain_queue()
            behind.append(sending.send("new", b"behind"))
            sending._drain()

        monkeypatch.setattr(sending, "_drain_queue", drain_and_queue_another)
        sending.commit_transaction()
        assert isinstance(behind[0].exception(PATIENCE_S), RuntimeError)
    assert cluster.transactions.committed == [b"committed"]
