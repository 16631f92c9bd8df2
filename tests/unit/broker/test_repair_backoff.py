"""How often other replicas are asked for what is damaged: soon at first, ever more rarely where they do not have it."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from tests.patience import until
from tidelog.broker.replicas import repairs as module
from tidelog.broker.replicas.repairs import LOST_PAUSE_S_MAX, Repairs
from tidelog.protocol.errors import ErrorCode
from tidelog.replication.controller.metadata.image import MetadataDelta

TOPIC_ID = b"t" * 16


class Waiting:
    """A partition whose one damaged range no replica has. The clock is turned by hand."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.attempts: list[float] = []
        self.ranges = [(object(), SimpleNamespace(first_offset=3))]
        log: Any = SimpleNamespace(damaged_ranges=lambda: list(self.ranges))
        self.partition: Any = Mock(topic="t", index=0, topic_id=TOPIC_ID, log=log, offline=False)
        self.now_s = 0.0
        loop = asyncio.get_running_loop()
        clock: Any = SimpleNamespace(
            time=lambda: self.now_s, create_task=loop.create_task, call_at=lambda at, call: self.sleep(at, call)
        )
        self.due_s = 0.0
        self.wake: Any = None
        unused: Any = None
        self.repairs = Repairs(1, unused, unused, unused, unused, clock, unused)

        self.has_space = True

        async def repair(partition: Any) -> bool:
            self.attempts.append(self.now_s)
            if not self.has_space:
                self.repairs._without_space.add(partition)
            return not self.ranges

        monkeypatch.setattr(self.repairs, "_repair", repair)

    def sleep(self, at_s: float, call: Any) -> Any:
        self.due_s, self.wake = at_s, call
        return SimpleNamespace(cancel=lambda: None)

    async def pass_time(self, count: int) -> None:
        """Go to the next attempt, `count` times."""
        for _ in range(count):
            before = len(self.attempts)
            self.now_s = self.due_s
            self.wake()
            await until(lambda: len(self.attempts) > before)  # noqa: B023
            await asyncio.sleep(0)

    def pauses(self) -> list[float]:
        return [after - before for before, after in zip(self.attempts, self.attempts[1:])]


@pytest.fixture
async def waiting(monkeypatch: pytest.MonkeyPatch) -> Any:
    waiting = Waiting(monkeypatch)
    assert waiting.repairs.report(waiting.partition) == ErrorCode.KAFKA_STORAGE_ERROR
    await until(lambda: waiting.wake is not None)
    yield waiting
    await waiting.repairs.close()


def lose(waiting: Waiting) -> None:
    waiting.repairs._lost_ranges.add((waiting.partition, 3))
    assert waiting.repairs.report(waiting.partition) == ErrorCode.CORRUPT_MESSAGE


async def test_what_no_replica_has_is_asked_for_ever_more_rarely(waiting: Waiting) -> None:
    lose(waiting)
    await waiting.pass_time(16)
    pauses = waiting.pauses()
    assert pauses[:4] == pytest.approx([0.05, 0.1, 0.2, 0.4])
    assert pauses == sorted(pauses)
    assert max(pauses) == pytest.approx(LOST_PAUSE_S_MAX)


async def test_what_a_replica_may_have_is_asked_for_every_few_seconds(waiting: Waiting) -> None:
    await waiting.pass_time(12)
    assert max(waiting.pauses()) == pytest.approx(module.PAUSE_S_MAX)


async def test_what_there_is_no_space_for_is_fetched_more_rarely(waiting: Waiting) -> None:
    waiting.has_space = False
    await waiting.pass_time(14)
    assert max(waiting.pauses()) == pytest.approx(module.SPACE_PAUSE_S_MAX)
    waiting.has_space = True
    await waiting.pass_time(2)
    assert waiting.pauses()[-1] == pytest.approx(module.SPACE_PAUSE_S_MAX)
    await waiting.pass_time(1)
    assert waiting.pauses()[-1] == pytest.approx(module.PAUSE_S_MAX)


@pytest.mark.parametrize(
    ("delta", "is_asked"),
    [
        (MetadataDelta(changed_brokers={2}), True),
        (MetadataDelta(changed_partitions={TOPIC_ID: {0}}), True),
        (MetadataDelta(changed_partitions={TOPIC_ID: {1}}), False),
        (MetadataDelta(changed_features=True), False),
    ],
)
async def test_a_change_of_the_replicas_is_a_reason_to_ask_at_once(
    waiting: Waiting, delta: MetadataDelta, is_asked: bool
) -> None:
    lose(waiting)
    await waiting.pass_time(16)
    before = len(waiting.attempts)
    waiting.now_s += 1
    waiting.repairs.on_image(delta)
    if is_asked:
        await until(lambda: len(waiting.attempts) > before)
        await until(lambda: waiting.due_s - waiting.now_s < 1)
    else:
        await asyncio.sleep(0.05)
        assert len(waiting.attempts) == before


async def test_other_damage_is_a_reason_to_ask_at_once_and_the_same_is_not(waiting: Waiting) -> None:
    lose(waiting)
    await waiting.pass_time(16)
    before = len(waiting.attempts)
    waiting.repairs.report(waiting.partition)
    await asyncio.sleep(0.05)
    assert len(waiting.attempts) == before
    waiting.ranges = [*waiting.ranges, (object(), SimpleNamespace(first_offset=30))]
    waiting.repairs.report(waiting.partition)
    await until(lambda: len(waiting.attempts) > before)


async def test_a_partition_that_is_whole_again_is_not_looked_at_any_more(waiting: Waiting) -> None:
    waiting.ranges = []
    await waiting.pass_time(1)
    await until(lambda: not waiting.repairs._queue.waiting)
    assert waiting.repairs._task is None
