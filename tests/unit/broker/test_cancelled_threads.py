"""A task that is cancelled while its work runs on a thread gives up nothing that the work still uses."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import pytest

from tests.patience import PATIENCE_S, until
from tests.unit.storage.batches import NOW, Logs, batch
from tidelog.broker.replicas.repairs import Repairs
from tidelog.broker.replicas.replica_moves import ReplicaMoves
from tidelog.broker.replicas.scrubber import Scrubber
from tidelog.replication.quorum.metadata_scrubber import MetadataScrubber
from tidelog.replication.quorum.service import QuorumService
from tidelog.replication.threads import until_done
from tidelog.storage.segments.log_config import LogConfig
from tidelog.storage.segments.reader import ColdRead


class HeldThread:
    """Runs work on a thread, which stands still before it until `go_on` is set."""

    def __init__(self) -> None:
        self.is_there, self.go_on = asyncio.Event(), threading.Event()
        self.has_ended = False

    def run(self, work: Callable[[], Any]) -> Awaitable[Any]:
        loop = asyncio.get_running_loop()

        def held() -> Any:
            loop.call_soon_threadsafe(self.is_there.set)
            assert self.go_on.wait(PATIENCE_S)
            try:
                return work()
            finally:
                self.has_ended = True

        return loop.run_in_executor(None, held)


@pytest.fixture
def made(tmp_path: Path) -> Iterator[Logs]:
    logs = Logs(tmp_path / "data", LogConfig())
    for number in range(10):
        logs.append(batch(value=bytes(100), timestamp=NOW + number))
    yield logs
    logs.close()


class Check:
    """Of a repair."""

    def __init__(self, log: Any) -> None:
        self.file = log.segments.active.file
        self.file.pin()

    def run(self) -> None:
        assert self.file.read_at(10, 0)


def scrub(logs: Logs, thread: HeldThread) -> Awaitable[Any]:
    partition: Any = SimpleNamespace(topic="t", index=0, log=logs.log, offline=False)
    partitions: Any = SimpleNamespace(find=lambda topic, index: partition)
    config: Any = SimpleNamespace(integer=lambda name: 1 << 20)
    scrubber = Scrubber(config, partitions, cast(Any, None), asyncio.get_running_loop(), thread.run)
    return scrubber._scrub(partition, logs.log.segments.active)


def scrub_metadata(logs: Logs, thread: HeldThread) -> Awaitable[Any]:
    settings: Any = SimpleNamespace(scrub_bytes_per_s=1 << 20, scrub_interval_ms=1)
    unused: Any = None
    loop = asyncio.get_running_loop()
    scrubber = MetadataScrubber(unused, logs.log, settings, loop, thread.run, unused, unused, unused)
    return scrubber._scrub(logs.log.segments.active)


def check_copy(logs: Logs, thread: HeldThread) -> Awaitable[Any]:
    unused: Any = Mock(on_offline=[])
    loop = asyncio.get_running_loop()
    moves = ReplicaMoves(unused, unused, unused, unused, loop, lambda: NOW, thread.run)
    replica: Any = SimpleNamespace(partition=Mock(), log=logs.log)
    moves._moves[replica.partition] = replica, unused
    return moves._check_segment(replica, logs.log.segments.active)


def check_repair(logs: Logs, thread: HeldThread) -> Awaitable[Any]:
    unused: Any = Mock()
    repairs = Repairs(1, unused, unused, unused, unused, asyncio.get_running_loop(), thread.run)
    check: Any = Check(logs.log)
    log = SimpleNamespace(finish_repair=lambda check: check.file.unpin())
    return repairs._check(cast(Any, SimpleNamespace(log=log, watch=Mock())), check)


def read_metadata(logs: Logs, thread: HeldThread) -> Awaitable[Any]:
    segment = logs.log.segments.active

    def cold(offset: int, bytes_max: int, end_offset: int) -> bytes:
        raise ColdRead(segment, 0, segment.size_bytes)

    node: Any = SimpleNamespace(log=SimpleNamespace(records_from=cold), run_in_executor=thread.run)
    service: Any = SimpleNamespace(_node=node)
    return QuorumService._read(service, 0, 1000, 1)


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("work", [scrub, scrub_metadata, check_copy, check_repair, read_metadata])
async def test_a_file_stays_open_until_its_reader_on_a_thread_has_ended(
    made: Logs, work: Callable[[Logs, HeldThread], Any], times: int
) -> None:
    thread, file = HeldThread(), cast(Any, made.log.segments.active.file)
    task = asyncio.ensure_future(work(made, thread))
    try:
        await asyncio.wait_for(thread.is_there.wait(), PATIENCE_S)
        assert file._pins == 1
        for _ in range(times):
            task.cancel()
            for _ in range(5):
                await asyncio.sleep(0)
        made.log.segments.release()  # as at the end of the node, or of the log
        assert file._pins == 1
        assert file._descriptor >= 0, "the thread will read from it"
        assert not task.done()
    finally:
        thread.go_on.set()
        await until(lambda: thread.has_ended)
    with pytest.raises(asyncio.CancelledError):
        await task
    assert file._pins == 0
    assert file._descriptor < 0


async def test_an_error_on_the_thread_is_raised() -> None:
    thread = HeldThread()
    thread.go_on.set()
    with pytest.raises(ZeroDivisionError):
        await until_done(thread.run(lambda: 1 // 0))


async def test_the_result_is_returned() -> None:
    thread = HeldThread()
    thread.go_on.set()
    assert await until_done(thread.run(lambda: 7)) == 7


async def test_a_task_that_a_dead_loop_has_left_ends_at_once() -> None:
    """Python closes its coroutine, which must not wait then."""
    waiting = until_done(asyncio.get_running_loop().create_future())
    waiting.send(None)
    waiting.close()
