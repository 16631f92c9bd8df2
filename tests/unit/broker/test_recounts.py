"""What damage has hidden is read on a thread, before readers of committed records get what was repaired."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.unit.broker.repairing import RepairedReplica
from tests.unit.storage.batches import NOW, Logs, batch, idempotent, marker
from tests.unit.storage.test_damage import copy_of, damage
from tests.unit.storage.test_damaged_transactions import committed
from tidelog.broker.replicas.repairs import RECOUNTS_MAX
from tidelog.protocol.errors import ErrorCode, KafkaError
from tidelog.storage.log import recount
from tidelog.storage.producers.producer_state import ProducerState
from tidelog.storage.segments.log_config import LogConfig

COUNT = 60


class Damaged(RepairedReplica):
    """After a kill: two segments of transactions, of which every second one is aborted, with two damaged batches."""

    def __init__(self, made: Logs) -> None:
        self.made = made
        for number in range(2):
            for sequence in range(COUNT):
                made.append(idempotent(number * COUNT + sequence, transactional=True), from_client=False)
                if sequence % 3 == 2:
                    made.append(marker(abort=sequence % 2 == 0), batch(1), from_client=False)
            if not number:
                made.log.roll(NOW)
        self.rows = made.log.aborted_transactions(0, made.log.log_end_offset)
        self.expected, self.copy = set(committed(made.log)), copy_of(made)
        made.kill()
        for number in (1, 50):
            damage(made.folder / made.files("*.log")[0], number, "CRC")
        made.open(machine_ran_on=True)
        super().__init__(made.log, lambda: (2,))
        self.is_on_thread, self.runs = False, 0
        self.during_recount: Callable[[], object] = lambda: None

    async def run(self, work: Callable[[], None]) -> None:
        self.is_on_thread = True
        work()
        self.is_on_thread = False
        if isinstance(getattr(work, "__self__", None), recount.Recount):
            self.runs += 1
            self.during_recount()

    async def fetch(
        self, partition: object, source: int, offset: int, *, up_to_log_end: bool, bytes_max: int = 1 << 20
    ) -> bytes:
        if offset not in self.copy:
            raise KafkaError(ErrorCode.OFFSET_OUT_OF_RANGE)
        return bytes(self.copy[offset])


def count_replays(replica: Damaged, monkeypatch: pytest.MonkeyPatch) -> dict[bool, int]:
    """Whether it was on a thread -> how many batches were replayed."""
    counts, replay = {False: 0, True: 0}, ProducerState.replay

    def counted(self: ProducerState, *given: Any) -> Any:
        counts[replica.is_on_thread] += 1
        return replay(self, *given)

    monkeypatch.setattr(ProducerState, "replay", counted)
    return counts


async def test_the_batches_are_read_on_a_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replica = Damaged(Logs(tmp_path / "data", LogConfig(segment_bytes=1 << 20)))
    counts = count_replays(replica, monkeypatch)
    await replica.repairs._repair(replica.partition)
    log = replica.made.log
    assert not replica.refused
    assert not log.damaged_ranges()
    assert counts[False] == 0
    assert counts[True] >= len(replica.copy)
    assert log.aborted_transactions(0, log.log_end_offset) == replica.rows
    assert set(committed(log)) == replica.expected
    assert log.producers.expected_sequence(7, 0) == 2 * COUNT


async def test_a_log_that_grows_meanwhile_is_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recount, "BEHIND_BYTES_MAX", 0)
    replica = Damaged(Logs(tmp_path / "data", LogConfig(segment_bytes=1 << 20)))
    made, log = replica.made, replica.made.log
    replica.during_recount = lambda: made.append(batch(1)) if replica.runs < 4 else None
    counts = count_replays(replica, monkeypatch)
    assert await replica.repairs._repair(replica.partition)
    assert replica.runs == 5
    assert counts[False] == 0
    assert log.producers.end_offset == log.log_end_offset
    assert not log.lacks_producers


async def test_a_repair_ends_though_the_log_never_stays_the_same(tmp_path: Path) -> None:
    """Then the loop reads it."""
    replica = Damaged(Logs(tmp_path / "data", LogConfig(segment_bytes=1 << 20)))
    made, log = replica.made, replica.made.log

    def change() -> None:
        made.append(batch(1))
        log.truncate_to(log.log_end_offset - 1)

    replica.during_recount = change
    assert await replica.repairs._repair(replica.partition)
    assert replica.runs == 2 * RECOUNTS_MAX
    assert not log.damaged_ranges()
    assert not log.lacks_producers
    assert log.aborted_transactions(0, log.log_end_offset) == replica.rows


async def test_a_log_that_is_given_up_meanwhile_is_left_alone(tmp_path: Path) -> None:
    replica = Damaged(Logs(tmp_path / "data", LogConfig(segment_bytes=1 << 20)))
    log = replica.made.log
    replica.during_recount = log.abandon
    await replica.repairs._repair(replica.partition)
    assert replica.runs == 1
    assert not replica.refused
    assert log.damaged_ranges()


async def test_what_was_read_counts_though_the_node_stops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the loop would read it once more before it stops."""
    replica = Damaged(Logs(tmp_path / "data", LogConfig(segment_bytes=1 << 20)))
    counts = count_replays(replica, monkeypatch)

    def stop() -> None:
        repair.cancel()

    replica.during_recount = stop
    repair = asyncio.get_running_loop().create_task(replica.repairs._repair(replica.partition))
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(repair, 30)
    assert replica.runs == 1
    assert len(replica.made.log.damaged_ranges()) == 1
    assert counts[False] == 0
