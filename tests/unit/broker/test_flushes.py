"""How many flushes are begun at the same moment."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from tests.patience import PATIENCE_S, until
from tests.unit.broker.test_node import hold_flushes
from tidelog.broker.replicas import flushes
from tidelog.broker.replicas.flushes import Flushes
from tidelog.protocol.messages.produce import (
    PartitionProduceData,
    ProduceRequest,
    ProduceResponse,
    TopicProduceData,
)

MakeBatch = Callable[..., bytes]
COUNT = 30


def produce_to_all(batch: bytes) -> ProduceRequest:
    data = [PartitionProduceData(index=index, records=batch) for index in range(COUNT)]
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

    def __init__(self) -> None:
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
    def __init__(self) -> None:
        self.topic, self.index, self.offline, self.leads = "t", 0, False, True
        self.log = Log()
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
    host: Any = Flushes(loop, None, lambda: 0, lambda: 0.0, lambda each: each not in absent, Mock(), lambda *_: None)
    for partition in (failing, failed, gone, last):
        host.flush(partition)
    assert [each.log.begun for each in (failing, failed, gone, last)] == [1, 0, 0, 0]
    await until(lambda: last.log.begun == 1)
    await until(lambda: failing.log.begun == 2)
    await until(lambda: not host._under_way)
    assert [each.log.begun for each in (failed, gone)] == [0, 0]
    assert not host._waiting


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
    host: Any = Flushes(loop, None, lambda: 0, lambda: 0.0, lambda each: True, Mock(), lambda *_: None)
    for each in (*busy, *waiting):
        host.flush(each)
    await until(lambda: not host._under_way)
    assert len(flushed) == 43
    assert max(flushed.index(each.log) for each in waiting) < 10
