"""Many leaders that were elected uncleanly at once: what they ask for has a bound for the node."""

from __future__ import annotations

import asyncio
import tracemalloc
from types import SimpleNamespace
from typing import Any

import pytest

from tests.patience import until
from tests.unit.storage.batches import batch
from tidelog.broker.replicas import unclean_leaders
from tidelog.broker.replicas.unclean_leaders import FETCHES_MAX, UncleanLeaders
from tidelog.protocol.batches.record_batch import iter_headers
from tidelog.replication.controller.metadata.image import RECOVERING, PartitionImage
from tidelog.storage.segments.leader_epochs import LeaderEpochs

PIECE_BYTES = 512 * 1024
ASSIGNMENT = PartitionImage((1, 2, 3), (1,), 1, leader_recovery_state=RECOVERING)


class Log:
    def __init__(self) -> None:
        self.log_start_offset = self.log_end_offset = 0
        self.leader_epochs = LeaderEpochs()
        self.segments = SimpleNamespace(active=SimpleNamespace(size_bytes=1))  # it does not end in damage


class Replica:
    """A partition of broker 1, whose log is empty."""

    def __init__(self, index: int) -> None:
        self.topic, self.index, self.leads, self.offline = "t", index, False, False
        self.log = Log()

    def append_as_follower(self, batches: memoryview, now_ms: int) -> None:
        for _, header in iter_headers(batches):
            assert header.base_offset == self.log.log_end_offset
            self.log.log_end_offset = header.next_offset


class Others:
    """Brokers 2 and 3, which have the same records."""

    def __init__(self, pieces: int) -> None:
        self.pieces = [bytes(batch(1, base_offset=offset, value=bytes(PIECE_BYTES))) for offset in range(pieces)]
        self.silent: set[int] = set()
        self.open = self.open_max = 0
        self.asked: list[int] = []

    def others(self, partition: Any) -> list[int]:
        return [2, 3]

    async def fetch(self, partition: Any, source: int, offset: int, *, up_to_log_end: bool) -> bytes:
        self.asked.append(source)
        self.open += 1
        self.open_max = max(self.open_max, self.open)
        try:
            if source in self.silent:
                await asyncio.get_running_loop().create_future()
            await asyncio.sleep(0)
            return self.pieces[offset] if offset < len(self.pieces) else b""
        finally:
            self.open -= 1


def leaders_beside(others: Any) -> UncleanLeaders:
    flushes = SimpleNamespace(flush_if_due=lambda partition: None)
    partitions: Any = SimpleNamespace(flushes=flushes)
    return UncleanLeaders(partitions, others, asyncio.get_running_loop(), lambda: 0)


async def lead(leaders: UncleanLeaders, count: int) -> list[Replica]:
    """Elect broker 1 for so many partitions; returns when it may lead all of them."""
    done: list[Any] = []
    leaders.on_done = done.append
    replicas: list[Any] = [Replica(index) for index in range(count)]
    for each in replicas:
        assert leaders.delays(each, ASSIGNMENT)
    await until(lambda: len(done) == count)
    return replicas


async def test_an_epoch_that_was_led_without_records_ends_where_others_are_taken() -> None:
    """The epoch file said 4 of a record of epoch 1, which counted as damaged again after each repair."""
    leaders = leaders_beside(Others(2))
    done: list[Any] = []
    leaders.on_done = done.append
    replica: Any = Replica(0)
    replica.log.leader_epochs.assign(4, 0)
    assert leaders.delays(replica, ASSIGNMENT)
    await until(lambda: done == [replica])
    assert replica.log.log_end_offset == 2
    assert list(replica.log.leader_epochs) == []


async def test_the_fetches_of_all_partitions_have_one_bound() -> None:
    others = Others(2)
    replicas = await lead(leaders_beside(others), 100)
    assert others.open_max == FETCHES_MAX
    assert {each.log.log_end_offset for each in replicas} == {2}


async def test_what_is_only_compared_is_not_kept() -> None:
    others = Others(20)
    tracemalloc.start()
    try:
        replicas = await lead(leaders_beside(others), 4)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert {each.log.log_end_offset for each in replicas} == {20}
    assert peak_bytes < 8 * PIECE_BYTES, "eight tails of ten MiB each"


async def test_a_replica_that_does_not_answer_is_waited_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not by every partition in turn."""
    monkeypatch.setattr(unclean_leaders, "ASK_S_MAX", 0.5)
    others = Others(2)
    others.silent = {2}
    replicas = await lead(leaders_beside(others), 100)
    assert others.asked.count(2) <= FETCHES_MAX
    assert {each.log.log_end_offset for each in replicas} == {2}


async def test_a_replica_that_answers_again_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unclean_leaders, "ASK_S_MAX", 0.2)
    others = Others(2)
    others.silent = {2, 3}
    leaders = leaders_beside(others)
    [replica] = await lead(leaders, 1)
    assert replica.log.log_end_offset == 0
    others.silent = set()
    [replica] = await lead(leaders, 1)
    assert replica.log.log_end_offset == 2
