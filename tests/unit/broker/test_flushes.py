"""How many flushes are begun at the same moment."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from tests.patience import PATIENCE_S, until
from tests.unit.broker.test_node import hold_flushes
from tidelog.broker.node_ports import DIRECTORY_THREADS, IO_THREADS_MAX
from tidelog.broker.replicas import flushes
from tidelog.broker.replicas.flushes import Flushes
from tidelog.protocol.messages.produce import (
    PartitionProduceData,
    ProduceRequest,
    ProduceResponse,
    TopicProduceData,
)
from tidelog.storage.log.flush import FlushTask

MakeBatch = Callable[..., bytes]
COUNT = 30


def produce_to_all(batch: bytes) -> ProduceRequest:
    return produce_to(range(COUNT), batch)


def produce_to(indexes: Iterable[int], batch: bytes) -> ProduceRequest:
    data = [PartitionProduceData(index=index, records=batch) for index in indexes]
    return ProduceRequest(acks=-1, timeout_ms=60_000, topic_data=[TopicProduceData(name="t", partition_data=data)])


async def errors_of(wire: Any) -> list[int]:
    answer = await asyncio.wait_for(wire.receive(ProduceResponse, 9), PATIENCE_S)
    return [each.error_code for each in answer.responses[0].partition_responses]


async def test_the_first_records_of_many_partitions_do_not_begin_all_flushes_in_one_turn(
    start_node: Any, make_batch: MakeBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flushes, "UNDER_WAY_MAX", 4)
    node = await start_node()
    wire = await node.connect()
    await wire.create_topic("t", COUNT)
    partitions = node.node._broker.partitions
    await until(lambda: sum(each.leads for each in partitions.hosted()) == COUNT)
    gate = hold_flushes(monkeypatch)
    under_way = partitions.flushes._under_way
    wire.send(produce_to_all(make_batch(b"a")), 9)
    await until(lambda: all(each.log.log_end_offset for each in partitions.hosted()))
    begun = len(under_way)
    gate.set()
    assert begun == 4
    assert await errors_of(wire) == [0] * COUNT
    await until(lambda: not under_way)
    wire.send(produce_to_all(make_batch(b"b")), 9)
    assert await errors_of(wire) == [0] * COUNT


class Log:
    """A log with records that wait for a sync; `error` is that of the next one."""

    def __init__(self, directory: str = "/data/t-0") -> None:
        self.directory = directory
        self.flush_due = True
        self.begun = 0
        self.error: OSError | None = None
        self.committable_offset = 0
        self.durability = SimpleNamespace(blocked_from=-1)

    def begin_flush(self) -> Log:
        self.begun += 1
        self.flush_due = False
        return self

    def run(self) -> None:
        pass

    def finish_flush(self, task: Log, now_ms: int) -> None:
        error, self.error = self.error, None
        if error is not None:
            self.flush_due = True
            raise error

    def can_retry(self, error: Exception) -> bool:
        return True


class Partition:
    def __init__(self, directory: str = "/data/t-0") -> None:
        self.topic, self.index, self.offline, self.leads = "t", 0, False, True
        self.log = Log(directory)
        self.watch = SimpleNamespace(syncs=SimpleNamespace(take_reached=lambda offset: []))

    def advance_high_watermark(self) -> None:
        pass


async def test_a_flush_that_fails_or_whose_partition_is_gone_leaves_no_other_one_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(flushes, "UNDER_WAY_MAX", 1)
    monkeypatch.setattr(flushes, "SHORTAGE_PAUSE_S", 0.01)
    failing, failed, gone, last = (Partition() for _ in range(4))
    failing.log.error = OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    failed.offline = True
    absent: list[Any] = [gone]
    loop = asyncio.get_running_loop()
    host: Any = Flushes(
        loop, lambda _: None, lambda: 0, lambda: 0.0, lambda each: each not in absent, Mock(), lambda *_: None
    )
    for partition in (failing, failed, gone, last):
        host.flush(partition)
    assert [each.log.begun for each in (failing, failed, gone, last)] == [1, 0, 0, 0]
    await until(lambda: last.log.begun == 1)
    await until(lambda: failing.log.begun == 2)
    await until(lambda: not host._under_way)
    assert [each.log.begun for each in (failed, gone)] == [0, 0]
    assert not host._waiting


async def test_what_meets_a_shortage_is_tried_at_the_same_rate_for_as_long_as_it_lasts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each time that files were closed it got one more timer: after minutes the loop did little else."""
    partition, timers = Partition(), [Mock() for _ in range(6)]
    error = OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    monkeypatch.setattr(partition.log, "begin_flush", Mock(side_effect=error))
    loop = Mock(call_later=Mock(side_effect=timers))
    host: Any = Flushes(loop, lambda _: None, lambda: 0, lambda: 0.0, lambda each: True, Mock(), lambda *_: None)
    host.flush(partition)
    for _ in range(5):
        host.sync_short()
    assert [each.cancel.called for each in timers] == [True] * 5 + [False]


async def test_partitions_that_always_have_records_let_the_others_be_flushed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next flush of each began before those that waited, for as long as records came to it during its flushes."""
    monkeypatch.setattr(flushes, "UNDER_WAY_MAX", 2)
    busy, waiting = [Partition() for _ in range(2)], [Partition() for _ in range(3)]
    flushed: list[Any] = []

    def run(log: Any) -> None:
        flushed.append(log)
        log.flush_due = flushed.count(log) < 20

    for each in busy:
        monkeypatch.setattr(each.log, "run", partial(run, each.log))
    for each in waiting:
        monkeypatch.setattr(each.log, "run", partial(flushed.append, each.log))
    loop = asyncio.get_running_loop()
    host: Any = Flushes(loop, lambda _: None, lambda: 0, lambda: 0.0, lambda each: True, Mock(), lambda *_: None)
    for each in (*busy, *waiting):
        host.flush(each)
    await until(lambda: not host._under_way)
    assert len(flushed) == 43
    assert max(flushed.index(each.log) for each in waiting) < 10


async def test_flushes_that_wait_hold_up_none_of_another_log_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flushes, "UNDER_WAY_MAX", 1)
    first, second, other = Partition("/a/t-0"), Partition("/a/t-1"), Partition("/b/t-2")
    loop, goes_on = asyncio.get_running_loop(), threading.Event()
    monkeypatch.setattr(first.log, "run", partial(goes_on.wait, PATIENCE_S))
    host: Any = Flushes(loop, lambda _: None, lambda: 0, lambda: 0.0, lambda each: True, Mock(), lambda *_: None)
    for partition in (first, second, other):
        host.flush(partition)
    begun = [each.log.begun for each in (first, second, other)]
    goes_on.set()
    assert begun == [1, 0, 1]
    await until(lambda: not host._under_way)
    assert second.log.begun == 1
    assert not host._waiting
    assert not host._count_of


async def test_a_flush_that_waited_while_its_log_moved_is_one_of_the_new_directory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(flushes, "UNDER_WAY_MAX", 1)
    first, moved = Partition("/a/t-0"), Partition("/a/t-1")
    loop, goes_on = asyncio.get_running_loop(), threading.Event()
    monkeypatch.setattr(first.log, "run", partial(goes_on.wait, PATIENCE_S))
    asked: list[str] = []
    host: Any = Flushes(loop, asked.append, lambda: 0, lambda: 0.0, lambda each: True, Mock(), lambda *_: None)
    for partition in (first, moved):
        host.flush(partition)
    moved.log.directory = "/b/t-1"
    goes_on.set()
    await until(lambda: moved.log.begun == 1 and not host._under_way)
    assert asked == ["/a", "/b"]


async def test_a_node_ends_with_the_threads_of_its_log_directories(start_node: Any, tmp_path: Path) -> None:
    node = await start_node(**{"log.dirs": f"{tmp_path}/a,{tmp_path}/b"})
    pools = list(node.node._ports.of_directories.values())
    assert len(pools) == 2
    await node.stop()
    for pool in pools:
        with pytest.raises(RuntimeError, match="after shutdown"):
            pool.submit(print)


async def test_a_slow_device_delays_the_syncs_and_cold_reads_of_its_own_log_directory_alone(
    start_node: Any, make_batch: MakeBatch, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """All shared eight threads: thirty partitions on a slow device delayed the produces of others by a second."""
    homes = [tmp_path / name for name in ("slow", "other")]
    node = await start_node(**{"log.dirs": ",".join(map(str, homes)), "log.flush.interval.messages": "1"})
    wire, another = await node.connect(), await node.connect()
    await wire.create_topic("t", COUNT)
    partitions = node.node._broker.partitions
    await until(lambda: sum(each.leads for each in partitions.hosted()) == COUNT)
    names = {int(each.name[2:]): home for home in homes for each in home.glob("t-*")}
    slow, other = ([index for index, home in names.items() if home == each] for each in homes)
    assert min(len(slow), len(other)) > IO_THREADS_MAX
    goes_on, run = threading.Event(), FlushTask.run
    held: list[FlushTask] = []

    def run_slowly(task: FlushTask) -> None:
        if any("/slow/" in path for path in task._paths):
            held.append(task)
            assert goes_on.wait(PATIENCE_S)
        run(task)

    monkeypatch.setattr(FlushTask, "run", run_slowly)
    try:
        wire.send(produce_to(slow, make_batch(b"a")), 9)
        await until(lambda: len(held) == DIRECTORY_THREADS)
        another.send(produce_to(other, make_batch(b"a")), 9)
        assert await errors_of(another) == [0] * len(other)
        warmed = asyncio.get_running_loop().create_future()
        read: Any = SimpleNamespace(path=f"{homes[1]}/t-0/0.log", pin=Mock(), unpin=Mock(), warm=Mock(), examined=None)
        asked: list[str] = []
        threads_of = partitions._threads_of

        def asked_threads_of(path: str) -> Any:
            asked.append(path)
            return threads_of(path)

        monkeypatch.setattr(partitions, "_threads_of", asked_threads_of)
        partitions.run_cold(read, partial(warmed.set_result, None))
        await asyncio.wait_for(warmed, PATIENCE_S)
        assert asked == [str(homes[1])]
    finally:
        goes_on.set()
    assert await errors_of(wire) == [0] * len(slow)
