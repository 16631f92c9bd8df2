"""Handlers and filters of the program's logging, which neither stop a client nor hold it up."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.patience import PATIENCE_S, join, wait_until
from tests.unit.client.fake_broker import FakeCluster
from tests.unit.client.test_producer import producer, values
from tests.unit.client.test_sync_producer import cluster as cluster_on_a_thread
from tests.unit.client.test_sync_producer import producer as blocking_producer
from tidelog.client import client_logging
from tidelog.client.client_logging import client_logger, pass_on_in_this_thread
from tidelog.protocol.errors import ErrorCode, KafkaError

blocking_cluster = cluster_on_a_thread


class Noting(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


def raising(record: logging.LogRecord) -> bool:
    raise LookupError("outside of a request")


class Raising(Noting):
    def emit(self, record: logging.LogRecord) -> None:
        super().emit(record)
        raising(record)


@contextmanager
def handling(handler: logging.Handler) -> Iterator[None]:
    logger = logging.getLogger("tidelog.client")
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


@pytest.mark.parametrize("fault", ["handler", "filter"])
def test_a_handler_that_raises_does_not_end_the_loop_of_a_blocking_client(
    blocking_cluster: FakeCluster, fault: str
) -> None:
    handler: Noting = Raising()
    if fault == "filter":
        handler = Noting()
        handler.addFilter(raising)
    blocking_cluster.auto_create_partitions = 0
    sending = blocking_producer(blocking_cluster, max_block_ms=200)
    with handling(handler):
        for _ in range(2):
            error = sending.send("missing", b"0").exception(PATIENCE_S)
            assert isinstance(error, KafkaError)
            assert error.code is ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
        assert sending.send("t", b"1").result(PATIENCE_S).offset == 0
    sending.close()
    assert values(blocking_cluster) == [b"1"]


async def test_a_handler_that_raises_breaks_nothing_off_in_an_asynchronous_client() -> None:
    handler = Raising()
    faults: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: faults.append(context))
    async with (
        FakeCluster(t=1) as cluster,
        producer(cluster, delivery_timeout_ms=300, request_timeout_ms=100) as sending,
    ):
        await sending.send_and_wait("t", b"0")
        await cluster.nodes[1].stop()
        with handling(handler):
            futures = [await sending.send("t", b"1") for _ in range(3)]
            done, pending = await asyncio.wait(futures, timeout=PATIENCE_S)
            assert (len(done), pending) == (3, set())
            assert {type(future.exception()) for future in done} == {KafkaError}
    assert handler.records
    assert faults == []


def test_a_handler_that_sends_by_the_client_does_not_hold_up_its_thread(
    blocking_cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The handler keeps its lock meanwhile, for which the thread of the client would wait to log the lost record."""
    monkeypatch.setattr(client_logging, "_WAIT_S", 0.05)

    blocking_cluster.auto_create_partitions = 0
    with blocking_producer(blocking_cluster, max_block_ms=200) as sending:

        class Sending(Noting):
            def emit(self, record: logging.LogRecord) -> None:
                super().emit(record)
                if record.name == "tidelog.client.program":
                    assert sending.send("missing", b"").exception(PATIENCE_S) is not None
                    sending.send("t", record.getMessage().encode()).result(PATIENCE_S)

        handler = Sending()
        with handling(handler):
            logging.getLogger("tidelog.client.program").warning("begun")
            wait_until(lambda: len(handler.records) == 2)
    assert values(blocking_cluster) == [b"begun"]
    assert [record.threadName for record in handler.records] == [threading.current_thread().name, "tidelog-client"]


def test_records_behind_one_that_is_held_up_are_not_waited_for_and_keep_their_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(client_logging, "_WAIT_S", 0.05)
    monkeypatch.setattr(client_logging, "_RECORDS_MAX", 100)
    logger, handler = client_logger("tidelog.client.example"), Noting()
    logged = threading.Event()

    def log() -> None:
        pass_on_in_this_thread()
        for number in range(1000):
            logger.warning("%d", number)
        logged.set()

    with handling(handler):
        handler.acquire()
        try:
            thread = threading.Thread(target=log)
            thread.start()
            assert logged.wait(PATIENCE_S)
            assert handler.records == []
        finally:
            handler.release()
        wait_until(lambda: len(handler.records) == 101)
        join(thread)
    assert [record.getMessage() for record in handler.records] == ["0", *map(str, range(900, 1000))]
    assert handler.records[0].funcName == "log"


_ENDING_BEHIND_A_SLOW_HANDLER = """
import logging, threading, time
from tidelog.client import client_logging
client_logging._WAIT_S = 0.01

class Slow(logging.Handler):
    def handle(self, record):  # without its lock, for which the end of `logging` would wait, too
        time.sleep(0.3)
        print(record.getMessage(), flush=True)

logger = client_logging.client_logger("tidelog.client.example")
logger.logger.addHandler(Slow())

def log():
    client_logging.pass_on_in_this_thread()
    for number in range(4):
        logger.warning("%d", number)

thread = threading.Thread(target=log)
thread.start()
thread.join(60)
"""


def test_the_last_records_of_a_program_reach_a_slow_handler() -> None:
    program = [sys.executable, "-c", _ENDING_BEHIND_A_SLOW_HANDLER]
    ended = subprocess.run(program, capture_output=True, text=True, timeout=PATIENCE_S, check=True)
    assert ended.stdout.split() == ["0", "1", "2", "3"]
    assert not client_logging._running
