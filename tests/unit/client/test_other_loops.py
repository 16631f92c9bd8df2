"""A client belongs to the event loop of its start, and to the process: what its calls do elsewhere."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest

from tests.patience import PATIENCE_S
from tests.unit.client.fake_broker import FakeCluster
from tests.unit.client.test_admin import served
from tests.unit.client.test_consumer import FAST
from tests.unit.client.test_sync_fork import in_child
from tidelog.client import Admin, Consumer, Producer, sync

NOT_CLOSED = "a producer was not closed, and its last records may be lost: call close() or flush()"
CLIENTS = pytest.mark.parametrize("client", [Producer, Consumer, Admin])


def made(client: Any, cluster: FakeCluster) -> Any:
    options = {"bootstrap_servers": cluster.bootstrap}
    return Consumer("t", **options, **FAST, group_id="g") if client is Consumer else client(**options)


async def use(client: Any) -> None:
    async with asyncio.timeout(PATIENCE_S):
        if isinstance(client, Producer):
            await client.send_and_wait("t", b"x")
        elif isinstance(client, Consumer):
            while not client.assignment():
                await client.poll(10)
            await client.poll(10)
        else:
            await client.list_topics()


def calls_of(client: Any) -> list[Callable[[], Any]]:
    if isinstance(client, Producer):
        return [
            lambda: client.send("t", b"x"),
            lambda: client.send_many("t", [b"x"]),
            lambda: client.send_many("t", iter([b"x"])),
            lambda: client.send_batch("t", [b"x"], partition=0),
            lambda: client.partitions_for("t"),
            client.flush,
        ]
    if isinstance(client, Consumer):
        return [lambda: client.poll(10), client.commit, client.unsubscribe]
    return [client.list_topics]


def in_another_loop(call: Callable[[], Any]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(PATIENCE_S):
            await call()

    asyncio.run(limited())


@CLIENTS
async def test_a_call_in_another_loop_is_refused_and_the_client_goes_on_in_its_own(client: Any) -> None:
    async with FakeCluster(t=1) as cluster, made(client, cluster) as started:
        await use(started)
        for call in [*calls_of(started), started.close]:
            with pytest.raises(RuntimeError, match="was started in another event loop"):
                await asyncio.to_thread(in_another_loop, call)
        await use(started)


async def test_a_record_from_another_loop_joins_no_open_batch() -> None:
    """Two threads in one batch mixed its records up: the broker refused it, or futures got other records' offsets."""
    linger_ms = int(PATIENCE_S * 1000)
    async with (
        FakeCluster(t=1) as cluster,
        Producer(bootstrap_servers=cluster.bootstrap, linger_ms=linger_ms) as sending,
    ):
        sent = await sending.send("t", b"x")
        for send in (sending.send, sending.send_and_wait):
            with pytest.raises(RuntimeError, match="was started in another event loop"):
                await asyncio.to_thread(in_another_loop, lambda send=send: send("t", b"y"))  # type: ignore[misc]
        await sending.flush()
        assert sent.result().offset == 0
        assert sending.metrics().record_delivered_total == 1


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@CLIENTS
async def test_the_child_of_a_fork_leaves_a_client_to_the_parent(client: Any) -> None:
    """Both have the loop's selector: a socket that the child takes out of it is out of the parent's as well."""
    async with FakeCluster(t=1) as cluster, made(client, cluster) as started:
        await use(started)
        for call in calls_of(started):
            assert in_child(lambda call=call: in_another_loop(call)).startswith(  # type: ignore[misc]
                "RuntimeError: this "
            )
        assert in_child(lambda: in_another_loop(started.close)) == "None"
        await use(started)


def test_records_that_a_loop_leaves_behind_are_said_and_get_no_others_from_the_next_loop(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Their batch is open, but nobody sends it any more."""

    async def end() -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:  # as `asyncio.run` does at its end
            task.cancel()
        await asyncio.wait(tasks, timeout=PATIENCE_S)

    with served(t=1) as cluster, asyncio.Runner() as first, asyncio.Runner() as second:
        sending = Producer(bootstrap_servers=cluster.bootstrap, linger_ms=int(PATIENCE_S * 1000))
        first.run(sending.send("t", b"left"))
        assert not caplog.records
        first.run(end())
        assert [record.message for record in caplog.records] == [NOT_CLOSED]
        with pytest.raises(RuntimeError, match="was started in another event loop"):
            second.run(sending.send("t", b"more"))
        first.run(sending.close(0))


@pytest.mark.slow
@pytest.mark.parametrize("end", ["", "producer.flush()", "producer.close()"])
def test_a_program_that_ends_without_close_says_that_records_may_be_lost(end: str) -> None:
    with served(t=1) as cluster:
        program = f"""
from tidelog.client.sync import Producer
producer = Producer(bootstrap_servers={cluster.bootstrap!r}, linger_ms={int(PATIENCE_S * 1000)})
producer.start()
producer.send("t", b"left")
{end}
"""
        command = [sys.executable, "-c", program]
        ended = subprocess.run(command, capture_output=True, check=False, text=True, timeout=PATIENCE_S)
    assert (ended.returncode, ended.stderr.strip()) == (0, "" if end else NOT_CLOSED)


def test_a_record_that_waits_for_its_topic_is_left_behind_too(caplog: pytest.LogCaptureFixture) -> None:
    """It is neither in the queue nor in a batch: the warning at the end of a program passed over it."""
    with served(t=1) as cluster:
        cluster.auto_create_partitions = 0
        producer = sync.Producer(bootstrap_servers=cluster.bootstrap, max_block_ms=int(PATIENCE_S * 1000))
        producer.start()
        future = producer.send("missing", b"left")
        deadline_s = time.monotonic() + PATIENCE_S
        while not producer._topic_waits:
            assert time.monotonic() < deadline_s
            time.sleep(0.001)
        caplog.clear()
        producer._handle_exit()
        assert [record.message for record in caplog.records] == [NOT_CLOSED]
        producer.close(0)
        assert future.done()


async def test_a_client_that_was_made_in_one_loop_may_start_in_another() -> None:
    async with FakeCluster(t=1) as cluster:
        sending = made(Producer, cluster)

        async def send_and_close() -> None:
            await use(sending)
            await sending.close()

        await asyncio.to_thread(in_another_loop, send_and_close)
        await sending.close()
